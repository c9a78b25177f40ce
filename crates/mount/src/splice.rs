//! Replies to large reads without a copy in this process. The file's pages are spliced into a pipe behind the reply's
//! header, and the pipe is spliced into the device. The kernel then copies the data once, to the reader.

use forebay_sys::fuse::{out_header, OUT_HEADER_BYTES};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use forebay_fuse::Device;

/// Smallest read for which splicing pays: the pipe takes four system calls, against one copy.
const SPLICE_BYTES_MIN: usize = 64 * 1024;
const PAGE_BYTES: usize = 4096;
/// Wanted size of a pipe: the largest read, which may begin in the middle of a page, and the header. A process without
/// privileges gets a smaller pipe, and copies the largest reads.
const PIPE_BYTES: usize = 2 << 20;
/// Pipe size that every user may set, by the system's default.
const PIPE_BYTES_OF_ALL: usize = 1 << 20;

/// A thread's pipe; empty between two replies.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Number of the pipe's buffers. Each holds a page or less.
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

    /// Writes the header into the pipe, splices the data behind it, and splices the pipe into the device.
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

/// Answers a read of `size` bytes at `offset` with the data of `file`. Returns false if nothing was answered: the
/// caller then copies the data.
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
    let (Ok(st), Ok(at)) = (crate::opened::fstat(&file), i64::try_from(offset)) else { return false };
    // The header precedes the data and states their length.
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
        // The pipe is dropped with its content. A reply that the kernel no longer waits for counts as answered.
        Err(e) => matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)),
    }
}
