//! Reads and writes of whole ranges of a backing file.

use std::os::fd::{AsRawFd, OwnedFd};

use forebay_types::Code;
use rustix::io::Errno;

pub(super) fn code(e: Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

/// Reads until the room is full or the file ends.
pub(super) fn read(file: &OwnedFd, room: &mut [u8], offset: u64) -> Result<usize, Code> {
    let mut done = 0;
    while done < room.len() {
        match rustix::io::pread(file, &mut room[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(code(e)),
        }
    }
    Ok(done)
}

/// Writes all bytes.
pub(super) fn write(file: &OwnedFd, bytes: &[u8], offset: u64) -> Result<(), Code> {
    // SAFETY: of the slice.
    unsafe { write_from(file, bytes.as_ptr(), bytes.len(), offset) }
}

/// # Safety
/// `len` bytes at `start` can be read; others may write them meanwhile.
pub(super) unsafe fn write_from(
    file: &OwnedFd,
    start: *const u8,
    len: usize,
    offset: u64,
) -> Result<(), Code> {
    let mut done = 0;
    while done < len {
        // SAFETY: the caller's promise.
        let n = unsafe {
            let from = start.add(done).cast();
            libc::pwrite(file.as_raw_fd(), from, len - done, (offset + done as u64) as libc::off_t)
        };
        match n {
            // The medium accepts no byte and gives no reason.
            0 => return Err(Code::Io),
            n if n > 0 => done += n as usize,
            _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                e => return Err(code(e.unwrap_or(Errno::IO))),
            },
        }
    }
    Ok(())
}
