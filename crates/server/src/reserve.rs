//! A reserved descriptor. With it, a listener that has run out of descriptors still accepts connections, and refuses
//! them. Otherwise the clients in the listener's queue would wait for ever, and poll would report the listener as
//! readable again and again.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use rustix::time::Timespec;

/// The least time between two equal lines of the log.
const SAY_AGAIN: Duration = Duration::from_secs(60);
/// How long to wait for a client's request before refusing it.
const PROMPT: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };

/// A reserved descriptor; see the module.
#[derive(Debug)]
pub(crate) struct Reserve {
    fd: Option<OwnedFd>,
}

/// Limits the rate of a log line.
#[derive(Debug, Default)]
pub(crate) struct Seldom {
    said: Mutex<Option<Instant>>,
}

impl Seldom {
    /// True when the line may be logged again.
    pub(crate) fn may_say(&self) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let may = said.is_none_or(|at| at.elapsed() >= SAY_AGAIN);
        if may {
            *said = Some(Instant::now());
        }
        may
    }
}

impl Reserve {
    /// Reserves a duplicate of any descriptor.
    pub(crate) fn new(any: BorrowedFd<'_>) -> Reserve {
        Reserve { fd: any.try_clone_to_owned().ok() }
    }

    /// True when an accept failed because this process or the machine has no descriptor left.
    pub(crate) fn is_wanted(e: Errno) -> bool {
        matches!(e, Errno::MFILE | Errno::NFILE)
    }

    /// Accepts one connection of a listener and answers it with `refusal`.
    ///
    /// # Errors
    /// `Errno::AGAIN` when no connection waits. Without a free descriptor the kernel would not examine the queue.
    pub(crate) fn refuse(&mut self, listener: BorrowedFd<'_>, refusal: &[u8]) -> Result<(), Errno> {
        self.fd = None;
        let accepted = rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
        let refused = accepted.map(|socket| {
            // If this end closes with the client's request unread, the client gets an error instead of the answer.
            let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&PROMPT));
            let _ = rustix::net::recv(&socket, &mut [0u8; 4096], RecvFlags::DONTWAIT);
            let _ = rustix::net::send(&socket, refusal, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        });
        self.fd = listener.try_clone_to_owned().ok();
        refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn connection_that_cannot_be_served_is_refused_in_words() {
        let path = std::env::temp_dir().join(format!("forebay-reserve-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        client.write_all(b"attach").unwrap();
        let mut reserve = Reserve::new(listener.as_fd());
        listener.set_nonblocking(true).unwrap();
        assert_eq!(reserve.refuse(listener.as_fd(), b"no"), Ok(()));
        assert_eq!(reserve.refuse(listener.as_fd(), b"no"), Err(Errno::AGAIN));
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, b"no");
        assert!(reserve.fd.is_some(), "there is one for the next");
        let seldom = Seldom::default();
        assert!(seldom.may_say() && !seldom.may_say());
    }
}
