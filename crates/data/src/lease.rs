//! Checks that leases (F_SETLEASE) of a file system show whether a file is in use.
//!
//! A read lease must be refused while a descriptor or mapping can write the file, and a write lease while another
//! descriptor or a mapping of the file exists. The mount relies on the first rule, and the conversion of a striped file
//! to one backing file on the second. Local file systems keep both. overlayfs grants leases despite mappings, because
//! the mapping is of another inode. Network file systems refuse leases, or grant them wrongly. So the check is made on
//! the target itself.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::probe_file::ProbeFile;

const BYTES: usize = 4096;
/// A lease that should be granted is tried this often, a millisecond apart, as an indexer or scanner may have a new
/// file open.
const TRIES: u32 = 100;

/// The reason why leases in `directory` are unusable. None if they work. Makes a file there and removes it.
pub fn lease_fault(directory: impl AsFd) -> Option<String> {
    let fault = |e: Errno| format!("leases could not be tested: {e}");
    match ProbeFile::new(directory.as_fd(), BYTES as u64) {
        Ok(file) => check(&file).unwrap_or_else(|e| Some(fault(e))),
        Err(e) => Some(fault(e)),
    }
}

/// Returns a fault of the leases, or an error of the check itself.
fn check(file: &ProbeFile<'_>) -> Result<Option<String>, Errno> {
    let no = |fault: &str| Ok(Some(fault.to_owned()));

    let writer = file.open(OFlags::RDWR)?;
    if lease(&file.open(OFlags::RDONLY)?, libc::F_RDLCK).is_ok() {
        return no("a read lease is granted while a writable descriptor is open");
    }
    let mapping = Mapping::new(&writer, ProtFlags::READ | ProtFlags::WRITE)?;
    drop(writer);
    if lease(&file.open(OFlags::RDONLY)?, libc::F_RDLCK).is_ok() {
        return no("a read lease is granted while a writable shared mapping lives");
    }
    drop(mapping);
    if let Err(e) = lease_in_the_end(file, libc::F_RDLCK)? {
        return Ok(Some(format!("a read lease on a file without writers is refused: {e}")));
    }

    let reader = file.open(OFlags::RDONLY)?;
    if lease(&file.open(OFlags::RDONLY)?, libc::F_WRLCK).is_ok() {
        return no("a write lease is granted while another descriptor is open");
    }
    let mapping = Mapping::new(&reader, ProtFlags::READ)?;
    drop(reader);
    if lease(&file.open(OFlags::RDONLY)?, libc::F_WRLCK).is_ok() {
        return no("a write lease is granted while a shared mapping lives");
    }
    drop(mapping);
    if let Err(e) = lease_in_the_end(file, libc::F_WRLCK)? {
        return Ok(Some(format!("a write lease on a file that is not open is refused: {e}")));
    }

    let holder = file.open(OFlags::RDONLY)?;
    if let Err(e) = lease(&holder, libc::F_RDLCK) {
        return Ok(Some(format!("a second read lease is refused: {e}")));
    }
    match file.open(OFlags::RDWR | OFlags::NONBLOCK) {
        Err(Errno::WOULDBLOCK) => {}
        Err(e) => return Err(e),
        Ok(_) => return no("an open for writing does not wait for a read lease"),
    }
    // SAFETY: F_GETLEASE takes no argument; the descriptor is open.
    if unsafe { libc::fcntl(holder.as_raw_fd(), libc::F_GETLEASE) } != libc::F_UNLCK {
        return no("the holder of a read lease does not learn of an open for writing");
    }
    drop(holder);
    file.open(OFlags::RDWR)?;
    Ok(None)
}

/// Takes a lease and disables the signal by which the kernel would announce an opener: SIGIO kills a process without a
/// handler.
fn lease(file: &OwnedFd, kind: c_int) -> Result<(), Errno> {
    // SAFETY: F_SETLEASE takes an int; the descriptor is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } != 0 {
        let e = std::io::Error::last_os_error().raw_os_error();
        return Err(Errno::from_raw_os_error(e.unwrap_or(libc::EIO)));
    }
    // No other process knows the file's name, so none opens it before F_SETOWN takes effect.
    // SAFETY: F_SETOWN takes an int; the descriptor is open.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, 0) };
    Ok(())
}

/// Tries again for a while if the lease is refused. A granted lease ends with the descriptor.
fn lease_in_the_end(file: &ProbeFile<'_>, kind: c_int) -> Result<Result<(), Errno>, Errno> {
    let mut outcome = Ok(());
    for _ in 0..TRIES {
        outcome = lease(&file.open(OFlags::RDONLY)?, kind);
        if outcome != Err(Errno::AGAIN) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(outcome)
}

/// A shared mapping of a file's first page.
struct Mapping(*mut std::ffi::c_void);

impl Mapping {
    fn new(file: impl AsFd, protection: ProtFlags) -> Result<Mapping, Errno> {
        // SAFETY: the kernel chooses the address, and nothing reads or writes through the mapping.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file.as_fd(), 0)?
        };
        Ok(Mapping(at))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made above, with this length, and no pointer into it remains.
        let _ = unsafe { rustix::mm::munmap(self.0, BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::fs::File;
    use std::path::Path;

    #[test]
    fn lease_fault_on_a_tmpfs_is_none_and_no_file_stays() {
        let scratch = Scratch::within(Path::new("/dev/shm"));
        assert_eq!(lease_fault(File::open(scratch.path()).unwrap()), None);
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn lease_fault_where_no_file_can_be_made_is_told() {
        let fault = lease_fault(File::open("/proc").unwrap()).unwrap();
        assert!(fault.contains("could not be tested"), "{fault}");
    }
}
