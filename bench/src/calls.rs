//! Calls of the C library that report errors in words, for all drivers.

use std::ffi::CString;

/// A path as a C string.
pub(crate) fn c_path(directory: &str, name: &str) -> CString {
    CString::new(format!("{directory}/{name}")).unwrap_or_default()
}

/// Returns an error with errno's text unless the call succeeded.
pub(crate) fn check(result: i32, call: &str, path: &CString) -> Result<(), String> {
    if result >= 0 {
        return Ok(());
    }
    Err(format!("{call} {}: {}", path.to_string_lossy(), std::io::Error::last_os_error()))
}

/// Creates a file.
pub(crate) fn create(path: &CString) -> Result<i32, String> {
    // SAFETY: the string ends in NUL.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o644) };
    check(fd, "create", path).map(|()| fd)
}

/// close(2).
pub(crate) fn close(fd: i32) {
    // SAFETY: the descriptor is the driver's own.
    unsafe { libc::close(fd) };
}

/// Writes all bytes at the descriptor's offset.
pub(crate) fn write_all(fd: i32, mut bytes: &[u8]) -> Result<(), String> {
    while !bytes.is_empty() {
        // SAFETY: the bytes are ours and of the length given.
        let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        if n <= 0 {
            return Err(format!("write: {}", std::io::Error::last_os_error()));
        }
        bytes = &bytes[n as usize..];
    }
    Ok(())
}
