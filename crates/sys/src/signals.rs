//! Signals: a descriptor to poll for them, signal masks of threads, and dispositions.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Makes this process ignore these signals.
pub fn ignore(signals: &[i32]) {
    signals.iter().for_each(|&signal| set_disposition(signal, libc::SIG_IGN));
}

/// Restores the default action of a signal.
pub fn reset(signal: i32) {
    set_disposition(signal, libc::SIG_DFL);
}

/// True if this process ignores a signal: it was started so, by nohup(1) or by a shell in the background.
pub fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call writes the whole action unless it fails, and only a written one is read.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn set_disposition(signal: i32, disposition: libc::sighandler_t) {
    // SAFETY: sets a disposition; there is no handler.
    unsafe { libc::signal(signal, disposition) };
}

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

/// A signal that was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// True when a process sent it. False when the kernel did, for example for a terminal's ^C, which itself reaches
    /// the whole foreground process group.
    pub from_process: bool,
}

impl Signals {
    /// Blocks `signals` in this thread, and in threads that it starts later. If SIGCHLD is among them, its disposition
    /// is reset: this process may have inherited it as ignored, and then could not wait for its children.
    pub fn block(signals: &[i32]) -> io::Result<Signals> {
        if signals.contains(&libc::SIGCHLD) {
            reset(libc::SIGCHLD);
        }
        let set = set_of(signals);
        let before = change_mask(libc::SIG_BLOCK, &set)?;
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

    /// The mask before the block, for a child that has to start with it. Safe to call between fork and exec.
    pub fn mask_before(&self) -> SignalMask {
        SignalMask(self.before)
    }
}

impl From<Signals> for OwnedFd {
    /// The descriptor alone, which is readable while one of the signals is pending.
    fn from(signals: Signals) -> OwnedFd {
        signals.fd
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

    /// A mask that blocks all signals that can be blocked.
    pub fn full() -> SignalMask {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigfillset writes the whole set.
        unsafe {
            libc::sigfillset(set.as_mut_ptr());
            SignalMask(set.assume_init())
        }
    }

    /// Makes this the calling thread's mask, and returns the previous one. Async-signal-safe.
    pub fn set(&self) -> SignalMask {
        // It fails only for an unknown operation, and the operation is a constant.
        SignalMask(change_mask(libc::SIG_SETMASK, &self.0).unwrap_or(self.0))
    }
}

/// Changes the calling thread's mask, and returns the previous one.
fn change_mask(how: i32, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are live; `before` is written before it is read.
    unsafe {
        match libc::pthread_sigmask(how, set, before.as_mut_ptr()) {
            0 => Ok(before.assume_init()),
            e => Err(io::Error::from_raw_os_error(e)),
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

    #[test]
    fn set_gives_the_mask_from_before_and_blocks() {
        let before = SignalMask::full().set();
        // SAFETY: sends this very thread a signal that it blocks.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGURG) };
        let signals = Signals::block(&[libc::SIGURG]).unwrap();
        assert_eq!(signals.next().map(|received| received.signal), Some(libc::SIGURG));
        before.set();
        // SAFETY: as above. It is ignored unless a handler was set.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGURG) };
        assert_eq!(signals.next(), None, "nothing blocks it any more");
    }

    #[test]
    fn ignored_signal_is_dropped_until_it_is_reset() {
        let ends_by = |ignored: bool| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "kill -XCPU $$"]);
            // SAFETY: signal(2) is async-signal-safe.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                    ignore(&[libc::SIGXCPU]);
                    if !ignored {
                        reset(libc::SIGXCPU);
                    }
                    if is_ignored(libc::SIGXCPU) != ignored {
                        return Err(io::ErrorKind::Other.into());
                    }
                    Ok(())
                })
            };
            std::os::unix::process::ExitStatusExt::signal(&command.status().unwrap())
        };
        assert_eq!([ends_by(true), ends_by(false)], [None, Some(libc::SIGXCPU)]);
    }
}
