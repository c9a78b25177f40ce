//! Signals as a descriptor to poll.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that are blocked in this thread and read from a descriptor instead.
pub struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signals").field("fd", &self.fd).finish_non_exhaustive()
    }
}

/// One signal that came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// True when a process sent it; false when the kernel did, as a terminal's ^C, which reaches the whole foreground
    /// process group by itself.
    pub from_process: bool,
}

impl Signals {
    /// Blocks `signals` in this thread, and in threads that it starts later. SIGCHLD among them is made to come even
    /// where the starter of this process had it ignored, with which no child could be waited for.
    pub fn block(signals: &[i32]) -> io::Result<Signals> {
        if signals.contains(&libc::SIGCHLD) {
            // SAFETY: sets a disposition; there is no handler.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        }
        let set = set_of(signals);
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are live; `before` is written before it is read.
        let before = unsafe {
            let e = libc::pthread_sigmask(libc::SIG_BLOCK, &set, before.as_mut_ptr());
            if e != 0 {
                return Err(io::Error::from_raw_os_error(e));
            }
            before.assume_init()
        };
        // SAFETY: `set` is a valid set, and a descriptor that is returned is new and ours.
        let fd = unsafe {
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Signals { fd, before })
    }

    /// The next signal that is pending, if any; never waits.
    pub fn next(&self) -> Option<Received> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let bytes = std::mem::size_of::<libc::signalfd_siginfo>();
        // SAFETY: the kernel writes one whole record or nothing, and only a whole one is read.
        let info = unsafe {
            let n = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), bytes);
            if n != bytes as isize {
                return None;
            }
            info.assume_init()
        };
        let from_process = matches!(info.ssi_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
        Some(Received { signal: info.ssi_signo as i32, from_process })
    }

    /// The mask from before, for a child that is to start with it. Safe to call between fork and exec.
    pub fn mask_before(&self) -> SignalMask {
        SignalMask(self.before)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A set of blocked signals.
#[derive(Clone, Copy)]
pub struct SignalMask(libc::sigset_t);

impl std::fmt::Debug for SignalMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SignalMask")
    }
}

impl SignalMask {
    /// A mask that blocks nothing.
    pub fn empty() -> SignalMask {
        SignalMask(set_of(&[]))
    }

    /// Makes this the calling thread's mask. Async-signal-safe.
    pub fn set(&self) {
        // SAFETY: the set is valid; the old one is not asked for.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut());
        }
    }
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset writes the whole set; sigaddset only changes it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &s in signals {
            libc::sigaddset(set.as_mut_ptr(), s);
        }
        set.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_yields_a_blocked_signal_and_who_sent_it() {
        let signals = Signals::block(&[libc::SIGUSR2]).unwrap();
        assert_eq!(signals.next(), None);
        // SAFETY: sends this very thread a signal that it blocks.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
        assert_eq!(signals.next(), Some(Received { signal: libc::SIGUSR2, from_process: true }));
        assert_eq!(signals.next(), None);
        signals.mask_before().set();
    }
}
