//! The messages of both sides: packets of 32 bytes, with at most one descriptor.
//!
//! Each request has a number, which its answer repeats, so that a late answer is not taken for the answer to a later
//! request. The answer to a registration identifies the file that was registered, so that the mount can check that it
//! is the right one.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A packet's length.
const BYTES: usize = 32;

/// A file, by the numbers of its device and its inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct File {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// The content of one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The FUSE connection to register with. A descriptor of `/dev/fuse` is attached. Answered.
    Connection,
    /// Register the regular file whose descriptor is attached. Answered, with the registration's number and the file.
    Register,
    /// End the registration of this number. Not answered.
    Unregister(i32),
    /// An answer: 0 or the registration's number, or a negative errno; and the file that was registered, if any.
    Answer(i32, File),
}

/// One packet.
#[derive(Debug)]
pub struct Packet {
    /// The request's number. An answer has the number of its request.
    pub number: u32,
    /// The content.
    pub message: Message,
    /// The attached descriptor.
    pub descriptor: Option<OwnedFd>,
}

impl Message {
    fn encode(self, number: u32) -> [u8; BYTES] {
        let (what, how, file) = match self {
            Message::Connection => (1, 0, File::default()),
            Message::Register => (2, 0, File::default()),
            Message::Unregister(id) => (3, id, File::default()),
            Message::Answer(result, file) => (4, result, file),
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&i32::to_le_bytes(what));
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..12].copy_from_slice(&i32::to_le_bytes(how));
        bytes[16..24].copy_from_slice(&file.device.to_le_bytes());
        bytes[24..].copy_from_slice(&file.inode.to_le_bytes());
        bytes
    }

    /// The message and its number.
    fn decode(bytes: &[u8; BYTES]) -> Option<(Message, u32)> {
        let word = |at: usize| {
            let (mut word, end) = ([0; 4], at + 4);
            word.copy_from_slice(&bytes[at..end]);
            u32::from_le_bytes(word)
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let file = File { device: long(16), inode: long(24) };
        let plain = file == File::default();
        let message = match (word(0), word(8) as i32) {
            (1, 0) if plain => Message::Connection,
            (2, 0) if plain => Message::Register,
            (3, id) if plain => Message::Unregister(id),
            (4, result) => Message::Answer(result, file),
            _ => return None,
        };
        (word(12) == 0).then_some((message, word(4)))
    }
}

/// Room for one descriptor's control message, with the alignment that the kernel requires.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn interrupted(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::Interrupted
}

/// Sends a message under a number, with a descriptor if the message takes one.
pub fn send(
    socket: BorrowedFd<'_>,
    number: u32,
    message: Message,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = message.encode(number);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: BYTES };
    let mut control = Control([0; 64]);
    loop {
        // SAFETY: an all-zero msghdr is valid; its pointers are set to locals that live over the call; the control
        // buffer has room for one descriptor.
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

/// Receives a message and its descriptor. None when the other side has closed the connection.
///
/// # Errors
/// `InvalidData` for a packet that is no message. Its descriptors are closed.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Packet>> {
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
    // Takes ownership of all received descriptors, so that none is left open, whatever message they belong to.
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
    let text = bytes.first_chunk().ok_or_else(strange)?;
    let (message, number) = Message::decode(text).ok_or_else(strange)?;
    Ok(Some(Packet { number, message, descriptor: descriptors.pop() }))
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
        for (number, message, descriptor) in [
            (0, Message::Connection, Some(file.as_fd())),
            (1, Message::Register, Some(file.as_fd())),
            (u32::MAX, Message::Unregister(7), None),
            (3, Message::Answer(-13, File { device: u64::MAX - 1, inode: 1 << 32 }), None),
        ] {
            send(a.as_fd(), number, message, descriptor).unwrap();
            let got = receive(b.as_fd()).unwrap().unwrap();
            let came = (got.number, got.message, got.descriptor.is_some());
            assert_eq!(came, (number, message, descriptor.is_some()));
        }
        drop(a);
        assert!(receive(b.as_fd()).unwrap().is_none());
    }

    #[test]
    fn packet_that_is_no_message_is_refused() {
        let (a, b) = pair().unwrap();
        let mut strange = Message::Register.encode(1);
        strange[16] = 1;
        // The second is a message of an older version.
        for packet in
            [&b"x"[..], &[1, 0, 0, 0, 0, 0, 0, 0], &[0; 32], &[9; 32], &strange, &[1; 33], &[255; 200]]
        {
            // SAFETY: the buffer is as long as said.
            unsafe { libc::send(a.as_raw_fd(), packet.as_ptr().cast(), packet.len(), 0) };
            let refused = receive(b.as_fd()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{packet:?}");
        }
    }
}
