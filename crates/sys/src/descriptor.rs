//! Descriptors: access by a path, and passing over a socket.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Most descriptors of one message.
pub const PASSED_MAX: usize = 12;

/// A path to an open file of this process, for calls that take only paths.
pub fn path(file: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// The path of an entry of an open directory.
pub fn path_of_entry(directory: &impl AsFd, name: &[u8]) -> PathBuf {
    path(directory).join(OsStr::from_bytes(name))
}

/// Bytes of control data, aligned for `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

const CONTROL_BYTES: usize = 64;

// SAFETY: computes a size only.
const _: () = assert!(unsafe { libc::CMSG_SPACE(4 * PASSED_MAX as u32) } as usize <= CONTROL_BYTES);

fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(n) = usize::try_from(call()) {
            return Ok(n);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Sends `bytes`, which must not be empty, with at most [`PASSED_MAX`] descriptors attached to the first byte. Returns
/// the number of bytes sent. A closed peer is an error, not a signal. Allocates no memory.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    assert!(fds.len() <= PASSED_MAX && !bytes.is_empty());
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr() as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: an all-zero msghdr is valid; its pointers are set to live locals below.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        message.msg_control = control.0.as_mut_ptr().cast();
        let payload = std::mem::size_of_val(fds) as u32;
        // SAFETY: the control buffer is large enough for one header and all descriptors, and aligned.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(payload) as _;
            let c = libc::CMSG_FIRSTHDR(&message);
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            (*c).cmsg_len = libc::CMSG_LEN(payload) as _;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(c), payload as usize);
        }
    }
    // SAFETY: `message` points to live memory.
    retried(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
}

/// Receives up to `buffer.len()` bytes, and returns their number. Received descriptors are put into `fds` from its
/// front and are close-on-exec; those beyond its end are closed. Allocates no memory.
///
/// # Errors
/// EMFILE when more descriptors were sent than this process may open, or than [`PASSED_MAX`]; all are then closed.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], fds: &mut [Option<OwnedFd>]) -> io::Result<usize> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: an all-zero msghdr is valid; its pointers are set to live locals below.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: `message` points to live memory.
    let n = retried(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) })?;
    let mut free = fds.iter_mut();
    // SAFETY: the kernel wrote the control data, walked by its own lengths; each descriptor is new and ours.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(&message);
        while !c.is_null() {
            if (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*c).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / 4 {
                    let fd = std::ptr::read_unaligned(libc::CMSG_DATA(c).cast::<RawFd>().add(i));
                    let fd = OwnedFd::from_raw_fd(fd);
                    if let Some(place) = free.next() {
                        *place = Some(fd);
                    }
                }
            }
            c = libc::CMSG_NXTHDR(&message, c);
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        fds.fill_with(|| None);
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    fn inode(file: &impl AsFd) -> (u64, u64) {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(path(file)).unwrap();
        (found.dev(), found.ino())
    }

    #[test]
    fn paths_lead_to_the_open_file_and_to_entries() {
        let directory = File::open("/proc/self").unwrap();
        let status = File::open("/proc/self/status").unwrap();
        assert_eq!(inode(&status), inode(&File::open(path_of_entry(&directory, b"status")).unwrap()));
    }

    #[test]
    fn receive_takes_what_was_sent_and_closes_what_it_has_no_place_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (one, two) = (File::open("/proc/self/status").unwrap(), File::open("/proc").unwrap());
        let sent = [one.as_raw_fd(), two.as_raw_fd()];
        assert_eq!(send(ours.as_fd(), b"abc", &sent).unwrap(), 3);
        assert_eq!(send(ours.as_fd(), b"d", &sent).unwrap(), 1);
        assert_eq!(send(ours.as_fd(), b"e", &[]).unwrap(), 1);
        let (mut buffer, mut fds) = ([0; 8], [None, None, None]);
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds).unwrap(), 3);
        assert_eq!(&buffer[..3], b"abc");
        assert_eq!(inode(fds[0].as_ref().unwrap()), inode(&one));
        assert_eq!(inode(fds[1].as_ref().unwrap()), inode(&two));
        assert!(fds[2].is_none());
        let mut fds = [None];
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds).unwrap(), 1);
        let kept = fds[0].take().unwrap();
        // SAFETY: reads a flag.
        let flags = unsafe { libc::fcntl(kept.as_raw_fd(), libc::F_GETFD) };
        assert!(flags & libc::FD_CLOEXEC != 0);
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds).unwrap(), 1);
        assert!(fds[0].is_none());
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds).unwrap(), 0, "its end");
    }

    #[test]
    fn receive_of_more_descriptors_than_a_message_may_have_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let many = [ours.as_raw_fd(); PASSED_MAX + 4];
        let mut control = [0u64; 32];
        let mut byte = [1u8];
        let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        // SAFETY: as in `send`, with a buffer that is large enough.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4 * many.len() as u32) as _;
            let c = libc::CMSG_FIRSTHDR(&message);
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            (*c).cmsg_len = libc::CMSG_LEN(4 * many.len() as u32) as _;
            std::ptr::copy_nonoverlapping(many.as_ptr().cast::<u8>(), libc::CMSG_DATA(c), 4 * many.len());
            libc::sendmsg(ours.as_raw_fd(), &message, 0)
        };
        assert_eq!(sent, 1);
        let mut fds = [const { None }; PASSED_MAX];
        let e = receive(theirs.as_fd(), &mut [0], &mut fds).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EMFILE));
        assert!(fds.iter().all(Option::is_none));
    }
}
