//! Packets on a SOCK_SEQPACKET socket between a process and the supervisor that started it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What [`receive`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// A packet of so many bytes.
    Packet(usize),
    /// No packet yet.
    Nothing,
    /// The other end is closed.
    Closed,
}

/// Takes over an open descriptor whose number this process got on its command line, and sets it to close-on-exec.
///
/// The number must have been handed to this process for this purpose, and be taken once. Standard descriptors are
/// refused.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= libc::STDERR_FILENO {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: asks about a number; no memory is touched.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and by this function's condition nothing else in this process uses the number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Sends one packet. A closed peer is an error, not a signal.
pub fn send(socket: &impl AsFd, packet: &[u8]) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer is as long as said.
    let sent = unsafe { libc::send(fd, packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL) };
    match sent {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Receives one packet, if there is one; never waits. What does not fit into the buffer is lost.
pub fn receive(socket: &impl AsFd, buffer: &mut [u8]) -> Received {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer is as long as said.
    let n = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
    match usize::try_from(n) {
        Ok(0) => Received::Closed,
        Ok(n) => Received::Packet(n),
        Err(_) => match io::Error::last_os_error().kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Received::Nothing,
            _ => Received::Closed,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_arrive_whole_until_the_end_is_closed() {
        let mut ends = [-1; 2];
        // SAFETY: two numbers are written; they are new and ours.
        let (ours, theirs) = unsafe {
            assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, ends.as_mut_ptr()), 0);
            (OwnedFd::from_raw_fd(ends[0]), inherited(ends[1]).unwrap())
        };
        let mut buffer = [0; 8];
        assert_eq!(receive(&theirs, &mut buffer), Received::Nothing);
        send(&ours, b"one").unwrap();
        send(&ours, b"three").unwrap();
        assert_eq!(receive(&theirs, &mut buffer), Received::Packet(3));
        assert_eq!(receive(&theirs, &mut buffer), Received::Packet(5));
        assert_eq!(&buffer[..5], b"three");
        drop(ours);
        assert_eq!(receive(&theirs, &mut buffer), Received::Closed);
        assert!(send(&theirs, b"x").is_err());
    }

    #[test]
    fn standard_and_closed_descriptors_are_not_inherited() {
        assert!(inherited(2).is_err());
        assert!(inherited(1 << 20).is_err());
    }
}
