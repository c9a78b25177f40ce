//! What the kernel knows of the writing of a file's data to its medium.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Waits until data that are on their way to the medium are there, and returns an error if any of the file's data could
/// not be written since it was last reported. Starts no writing, and does not flush the medium's own cache: syncfs(2) does
/// both for all files of a file system.
pub fn wait(file: impl AsFd) -> io::Result<()> {
    // SAFETY: plain system call on a descriptor of ours.
    match unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) }
    {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Starts the writing of a range of a file's data to its medium, and does not wait for it. A failure shows when the file
/// is synced.
pub fn start(file: impl AsFd, offset: u64, bytes: u64) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return };
    // SAFETY: plain system call on a descriptor of ours.
    unsafe {
        libc::sync_file_range(file.as_fd().as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_leaves_data_as_they_are_and_clean_after_a_wait() {
        let path = std::env::temp_dir().join(format!("forebay-start-{}", std::process::id()));
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        start(&file, 1 << 20, 1 << 20);
        start(&file, u64::MAX, 1);
        wait(&file).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 3 << 20]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn wait_succeeds_for_a_file_and_fails_for_what_has_no_data() {
        let path = std::env::temp_dir().join(format!("forebay-written-{}", std::process::id()));
        std::fs::write(&path, [7; 9000]).unwrap();
        wait(std::fs::File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (_reader, writer) = std::io::pipe().unwrap();
        assert_eq!(wait(&writer).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
    }
}
