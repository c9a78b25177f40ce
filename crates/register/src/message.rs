//! What the two sides say: packets of 8 bytes, a word for what and a word for how, with at most one descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A packet's length.
const BYTES: usize = 8;

/// One packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The connection to register with: a descriptor of `/dev/fuse` comes along. Answered.
    Connection,
    /// Register the regular file whose descriptor comes along. Answered, with its number.
    Register,
    /// Forget the registration of this number. Not answered.
    Unregister(i32),
    /// An answer: 0 or a number, or a negative errno.
    Answer(i32),
}

impl Message {
    fn encode(self) -> [u8; BYTES] {
        let (what, how) = match self {
            Message::Connection => (1, 0),
            Message::Register => (2, 0),
            Message::Unregister(id) => (3, id),
            Message::Answer(result) => (4, result),
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&i32::to_le_bytes(what));
        bytes[4..].copy_from_slice(&i32::to_le_bytes(how));
        bytes
    }

    fn decode(bytes: [u8; BYTES]) -> Option<Message> {
        let word = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        match (word(0), word(4)) {
            (1, 0) => Some(Message::Connection),
            (2, 0) => Some(Message::Register),
            (3, id) => Some(Message::Unregister(id)),
            (4, result) => Some(Message::Answer(result)),
            _ => None,
        }
    }
}

/// Room for one descriptor's control message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn interrupted(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::Interrupted
}

/// Sends a message, with a descriptor where it takes one.
pub fn send(socket: BorrowedFd<'_>, message: Message, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut bytes = message.encode();
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: BYTES };
    let mut control = Control([0; 64]);
    loop {
        // SAFETY: an all-zero msghdr is valid; its pointers are set to locals that live over the call; the control buffer
        // has room for one descriptor.
        let sent = unsafe {
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_iov = &mut part;
            header.msg_iovlen = 1;
            if let Some(fd) = descriptor {
                let size = size_of::<i32>() as u32;
                header.msg_control = control.0.as_mut_ptr().cast();
                header.msg_controllen = libc::CMSG_SPACE(size) as _;
                let c = libc::CMSG_FIRSTHDR(&header);
                (*c).cmsg_level = libc::SOL_SOCKET;
                (*c).cmsg_type = libc::SCM_RIGHTS;
                (*c).cmsg_len = libc::CMSG_LEN(size) as _;
                std::ptr::write_unaligned(libc::CMSG_DATA(c).cast::<i32>(), fd.as_raw_fd());
            }
            libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL)
        };
        match sent {
            n if n >= 0 => return Ok(()),
            _ => match io::Error::last_os_error() {
                e if interrupted(&e) => {}
                e => return Err(e),
            },
        }
    }
}

/// Receives a message and the descriptor that came along; none when the other side is gone.
///
/// # Errors
/// `InvalidData` for what is no message; descriptors that came with it are closed.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    // One byte more than a message has, so that a longer one is noticed.
    let mut bytes = [0u8; BYTES + 1];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: an all-zero msghdr is valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    let n = loop {
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len() as _;
        // SAFETY: the header's pointers are to locals that live over the call.
        let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
        if n >= 0 {
            break n as usize;
        }
        match io::Error::last_os_error() {
            e if interrupted(&e) => {}
            e if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            e => return Err(e),
        }
    };
    // All descriptors that came become ours, so that none is left open whatever they came with.
    let mut descriptors = Vec::new();
    // SAFETY: the control messages are read as the kernel wrote them; the descriptors are new and ours.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(&header);
        while !c.is_null() {
            if (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*c).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                for i in 0..count {
                    let fd = std::ptr::read_unaligned(libc::CMSG_DATA(c).cast::<i32>().add(i));
                    descriptors.push(OwnedFd::from_raw_fd(fd));
                }
            }
            c = libc::CMSG_NXTHDR(&header, c);
        }
    }
    if n == 0 && descriptors.is_empty() {
        return Ok(None);
    }
    let strange = || io::Error::new(io::ErrorKind::InvalidData, "a packet that is no message");
    if n != BYTES || header.msg_flags & libc::MSG_CTRUNC != 0 || descriptors.len() > 1 {
        return Err(strange());
    }
    let mut message = [0; BYTES];
    message.copy_from_slice(&bytes[..BYTES]);
    Ok(Some((Message::decode(message).ok_or_else(strange)?, descriptors.pop())))
}

/// A connected pair of sockets for messages.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: the array has room for two descriptors, which are new and ours.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) < 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn message_arrives_with_its_descriptor() {
        let (a, b) = pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (message, descriptor) in [
            (Message::Connection, Some(file.as_fd())),
            (Message::Register, Some(file.as_fd())),
            (Message::Unregister(7), None),
            (Message::Answer(-13), None),
        ] {
            send(a.as_fd(), message, descriptor).unwrap();
            let (got, with) = receive(b.as_fd()).unwrap().unwrap();
            assert_eq!((got, with.is_some()), (message, descriptor.is_some()));
        }
        drop(a);
        assert!(receive(b.as_fd()).unwrap().is_none());
    }

    #[test]
    fn packet_that_is_no_message_is_refused() {
        let (a, b) = pair().unwrap();
        for packet in [&b"x"[..], &[0; 8], &[1, 0, 0, 0, 1, 0, 0, 0], &[9; 9], &[255; 200]] {
            // SAFETY: the buffer is as long as said.
            unsafe { libc::send(a.as_raw_fd(), packet.as_ptr().cast(), packet.len(), 0) };
            let refused = receive(b.as_fd()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{packet:?}");
        }
    }
}
