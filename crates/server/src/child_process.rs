//! Child processes of the supervisor: where their programs are, how they are started beside a socket to it, and when
//! one that died is started again.
//!
//! The supervisor and a helper (the mount's process, the mover) exchange JSON over a SOCK_SEQPACKET pair, one message a
//! packet. The supervisor never waits for a helper.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forebay_sys::signals::SignalMask;
use forebay_types::{Code, Error, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Signal;
use serde_json::Value;

use crate::store;

/// Maximum bytes of a message.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// A process that ends within this time counts as crashed at its start.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// First and longest delay before the restart of a process that crashed at its start.
const DELAY: Duration = Duration::from_millis(50);
const DELAY_MAX: Duration = Duration::from_secs(5);

/// The path of a program of Forebay, which is beside this one.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let what = format!("cannot find {name}");
    let me = std::env::current_exe().map_err(|e| Error::io(&what, &e))?;
    let beside = me.with_file_name(name);
    if beside.is_file() {
        return Ok(beside);
    }
    Err(Error::new(Code::NotFound, what)
        .why(format!("{} is not there", beside.display()))
        .cure(format!("install forebay, forebayd and {name} into one directory (`make install`)")))
}

/// A helper: a process that has a socket to the supervisor.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
    socket: OwnedFd,
    pub(crate) started: Instant,
}

impl Helper {
    /// Starts `command` with its end of a new pair of sockets as `--socket FD`.
    pub(crate) fn start(mut command: Command, what: &str) -> Result<Helper> {
        let (ours, theirs) = store::pair()?;
        let number = theirs.as_raw_fd();
        command.args([OsString::from("--socket"), number.to_string().into()]);
        Helper::spawn(command, ours, Some(number), what)
    }

    /// Starts `command` without a socket: it sends no messages.
    pub(crate) fn start_silent(command: Command, what: &str) -> Result<Helper> {
        let (ours, _) = store::pair()?; // the other end is closed at once
        Helper::spawn(command, ours, None, what)
    }

    fn spawn(mut command: Command, socket: OwnedFd, inherited: Option<i32>, what: &str) -> Result<Helper> {
        command.stdin(Stdio::null()).current_dir("/");
        // SAFETY: between fork and exec only system calls are made that are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                SignalMask::empty().set();
                if inherited.is_some_and(|number| libc::fcntl(number, libc::F_SETFD, 0) < 0) {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().map_err(|e| Error::io(what, &e))?;
        Ok(Helper { child, socket, started: Instant::now() })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// To be polled for reading.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // The child is not reaped yet, so its process number is not reused.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Its unread messages; never waits.
    pub(crate) fn messages(&self) -> Vec<Value> {
        let (mut all, mut buffer) = (Vec::new(), vec![0u8; MESSAGE_BYTES_MAX]);
        loop {
            match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((n, _)) if n > 0 => all.extend(serde_json::from_slice(&buffer[..n])),
                Err(Errno::INTR) => {}
                _ => return all,
            }
        }
    }

    /// Sends a message. A helper that has ended does not get it, which the supervisor notices otherwise.
    pub(crate) fn send(&self, message: &Value) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&self.socket, message.to_string().as_bytes(), flags);
    }
}

/// Describes how a process ended.
pub(crate) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended".to_owned(),
    }
}

/// The delay before a restart.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    short_lives: u32,
}

impl Backoff {
    /// The delay after a process that lived for `life`: none, unless several in a row crashed at their start.
    pub(crate) fn after(&mut self, life: Duration) -> Duration {
        if life >= SHORT_LIFE {
            self.short_lives = 0;
            return Duration::ZERO;
        }
        self.short_lives += 1;
        match self.short_lives {
            1 => Duration::ZERO,
            n => DELAY_MAX.min(DELAY * (1 << (n - 2).min(10))),
        }
    }

    /// How many in a row crashed at their start.
    pub(crate) fn short_lives(&self) -> u32 {
        self.short_lives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_starts_at_once_and_grows_only_while_lives_are_short() {
        let mut b = Backoff::default();
        let short = Duration::from_millis(5);
        assert_eq!(b.after(Duration::from_secs(100)), Duration::ZERO);
        assert_eq!(b.after(short), Duration::ZERO);
        assert_eq!(b.after(short), DELAY);
        assert_eq!(b.after(short), DELAY * 2);
        for _ in 0..100 {
            assert!(b.after(short) <= DELAY_MAX);
        }
        assert_eq!(b.after(short), DELAY_MAX);
        assert_eq!(b.after(Duration::from_secs(2)), Duration::ZERO);
        assert_eq!(b.after(short), Duration::ZERO);
    }
}
