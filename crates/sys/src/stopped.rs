//! Ends a process that was stopped for long, before it goes on: by SIGSTOP, by a frozen cgroup, with its whole machine.
//!
//! Other nodes give up a node that does not answer, and go on without it. What had reached it by then, in buffers of
//! sockets or of its own, must not be executed when it goes on. The clock alone does not tell in time: a call that stores
//! what a socket has may be in progress, and stores more of it before the next look at the clock. A handler of SIGCONT runs
//! before the thread that executes it leaves that call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Milliseconds of the limit; 0 while nothing is watched.
static LIMIT: AtomicU64 = AtomicU64::new(0);
/// When the process is known to have run last, in milliseconds of [`now`].
static RUNNING: AtomicU64 = AtomicU64::new(0);
/// The exit status.
static STATUS: AtomicU64 = AtomicU64::new(0);

/// Ends this process with `status` as soon as it goes on after `limit` or more, that is since the last call of [`runs`] or
/// [`hearing`]. Blocks SIGCONT in this thread and those that it starts from now on, except within [`hearing`].
pub fn watch(limit: Duration, status: u8) {
    STATUS.store(status.into(), Ordering::Relaxed);
    waited();
    LIMIT.store(limit.as_millis() as u64, Ordering::Release);
    // SAFETY: the handler is async-signal-safe, and all structures are valid: zeroes are a sigaction without flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = goes_on as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGCONT, &raw const action, std::ptr::null_mut());
    }
    mask(libc::SIG_BLOCK);
}

/// Does work that must not go on: this thread executes the handler meanwhile. One thread at a time does such work, as under
/// a lock.
pub fn hearing<R>(work: impl FnOnce() -> R) -> R {
    if LIMIT.load(Ordering::Relaxed) == 0 {
        return work();
    }
    runs();
    mask(libc::SIG_UNBLOCK);
    let done = work();
    mask(libc::SIG_BLOCK);
    done
}

/// For a thread that was started within [`hearing`].
pub fn hears_not() {
    mask(libc::SIG_BLOCK);
}

/// Records that the process has waited, for a disk say, and was not stopped.
pub fn waited() {
    RUNNING.store(now(), Ordering::Relaxed);
}

/// Ends the process if it was stopped for too long. For threads whose running says nothing of the others'.
#[inline]
pub fn check() {
    if LIMIT.load(Ordering::Relaxed) != 0 {
        end_if_late();
    }
}

/// Records that the process runs. Ends it if it was stopped for too long. To be called more often than the limit.
#[inline]
pub fn runs() {
    if LIMIT.load(Ordering::Relaxed) != 0 {
        end_if_late();
        waited();
    }
}

extern "C" fn goes_on(_: libc::c_int) {
    end_if_late();
}

fn end_if_late() {
    let limit = LIMIT.load(Ordering::Acquire);
    if limit != 0 && now().saturating_sub(RUNNING.load(Ordering::Relaxed)) >= limit {
        // SAFETY: ends all threads at once, and is async-signal-safe.
        unsafe { libc::_exit(STATUS.load(Ordering::Relaxed) as libc::c_int) };
    }
}

/// Milliseconds since the machine started, with the time in which it was suspended. Async-signal-safe.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

fn mask(how: libc::c_int) {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset writes the whole set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCONT);
        libc::pthread_sigmask(how, set.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    /// The exit status of a child that works until some time after it was stopped for `stopped`, and calls `runs` meanwhile.
    fn child_stopped_for(stopped: Duration, runs_meanwhile: bool) -> i32 {
        let (mut begun, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the child calls what is async-signal-safe, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            watch(Duration::from_secs(3), 75);
            hearing(|| {
                // SAFETY: one byte that is there.
                unsafe { libc::write(theirs.as_raw_fd(), b"x".as_ptr().cast(), 1) };
                let end = now() + 500 + stopped.as_millis() as u64;
                while now() < end {
                    if runs_meanwhile {
                        runs();
                    }
                }
            });
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        begun.read_exact(&mut [0]).unwrap();
        let mut status = 0;
        // SAFETY: signals to the child, which is reaped here.
        unsafe {
            libc::kill(pid, libc::SIGSTOP);
            std::thread::sleep(stopped);
            libc::kill(pid, libc::SIGCONT);
            libc::waitpid(pid, &raw mut status, 0);
        }
        assert!(libc::WIFEXITED(status), "{status}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn process_that_was_stopped_for_long_ends_before_it_goes_on() {
        assert_eq!(child_stopped_for(Duration::from_millis(3_500), true), 75);
    }

    #[test]
    fn process_that_looks_at_no_clock_itself_is_ended_by_the_signal() {
        assert_eq!(child_stopped_for(Duration::from_millis(3_500), false), 75);
    }

    #[test]
    fn process_that_was_stopped_for_a_moment_goes_on() {
        assert_eq!(child_stopped_for(Duration::from_millis(20), true), 0);
    }
}
