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

#[cfg(test)]
mod tests {
    use super::*;

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
