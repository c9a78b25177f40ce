//! Replies to large reads without a copy in this process: the file's pages are put into a pipe behind the reply's
//! header, and the pipe into the device, from where the kernel copies them once, to whoever reads.

use forebay_sys::fuse::{out_header, OUT_HEADER_BYTES};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::device::Device;

/// From so many bytes on it pays: the pipe's four system calls against one copy.
const SPLICE_BYTES_MIN: usize = 64 * 1024;
const PAGE_BYTES: usize = 4096;
/// What a pipe should hold: the largest read, from the middle of a page on, and the header. Who has no privileges gets
/// less, and has the largest reads copied.
const PIPE_BYTES: usize = 2 << 20;
/// As much as everybody may have, unless the system says otherwise.
const PIPE_BYTES_OF_ALL: usize = 1 << 20;

/// A thread's pipe; empty between two replies.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Buffers that it has, each of a page or less.
    pages: usize,
}

fn check(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

impl Pipe {
    fn new() -> io::Result<Pipe> {
        let mut fds = [0; 2];
        // SAFETY: the array has room for two descriptors, which are new and ours.
        let (read, write) = unsafe {
            check(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) as isize)?;
            (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
        };
        let resize = |bytes: usize| {
            // SAFETY: plain system call on a descriptor of ours.
            check(unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as i32) } as isize)
        };
        let bytes = resize(PIPE_BYTES).or_else(|_| resize(PIPE_BYTES_OF_ALL))?;
        Ok(Pipe { read, write, pages: bytes / PAGE_BYTES })
    }

    /// Puts header and data into the pipe, and the pipe into the device.
    fn send(
        &self,
        device: &Device,
        file: BorrowedFd<'_>,
        mut offset: i64,
        bytes: usize,
        unique: u64,
    ) -> io::Result<()> {
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let whole = OUT_HEADER_BYTES + bytes;
        let header = out_header(whole, unique, 0);
        let (from, to) = (self.read.as_raw_fd(), self.write.as_raw_fd());
        // SAFETY: here and below, plain system calls on open descriptors; buffer and offset live over them.
        if check(unsafe { libc::write(to, header.as_ptr().cast(), header.len()) })? != header.len() {
            return Err(short());
        }
        let mut left = bytes;
        while left > 0 {
            let flags = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK;
            let file = file.as_raw_fd();
            // SAFETY: as above.
            let n = check(unsafe { libc::splice(file, &mut offset, to, std::ptr::null_mut(), left, flags) })?;
            if n == 0 {
                return Err(short());
            }
            left -= n;
        }
        let (nowhere, device) = (std::ptr::null_mut(), device.as_fd().as_raw_fd());
        // SAFETY: as above.
        let n = check(unsafe { libc::splice(from, nowhere, device, nowhere, whole, libc::SPLICE_F_MOVE) })?;
        if n == whole {
            Ok(())
        } else {
            Err(short())
        }
    }
}

/// Answers a read of `size` bytes at `offset` with what `file` has there; false when nothing was answered, and the data
/// are to be copied.
pub(crate) fn answer_read(
    pipe: &mut Option<Pipe>,
    device: &Device,
    file: BorrowedFd<'_>,
    (offset, size): (u64, usize),
    unique: u64,
) -> bool {
    if size < SPLICE_BYTES_MIN {
        return false;
    }
    let (Ok(st), Ok(at)) = (crate::filesystem::fstat(&file), i64::try_from(offset)) else { return false };
    // The header comes first and says how much there is.
    let bytes = usize::try_from(st.st_size - at).map_or(0, |left| left.min(size));
    if bytes < SPLICE_BYTES_MIN {
        return false;
    }
    let Some(open) = pipe.take().or_else(|| Pipe::new().ok()) else { return false };
    let pages = 1 + (offset as usize % PAGE_BYTES + bytes).div_ceil(PAGE_BYTES);
    if pages > open.pages {
        *pipe = Some(open);
        return false;
    }
    match open.send(device, file, at, bytes, unique) {
        Ok(()) => {
            *pipe = Some(open);
            true
        }
        // What is in the pipe goes with it. A reply that nobody waits for was an answer too.
        Err(e) => matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)),
    }
}
