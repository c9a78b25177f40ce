//! The address of a socket by its path.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The address of the socket at `path`; ENAMETOOLONG if the path does not fit.
pub(crate) fn socket_address(path: &Path) -> io::Result<libc::sockaddr_un> {
    // SAFETY: an all-zero address is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}
