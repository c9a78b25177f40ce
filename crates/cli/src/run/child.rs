//! The program while it runs: a child that dies with this process and receives this process's signals.
//!
//! It shares this process's group, so that a terminal's keys and job control affect both as they would affect the
//! program alone. A signal that the kernel sent to the group (^C) has already reached the program and is not forwarded;
//! a signal that a process sent to this one is.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};

use forebay_sys::signals::Signals;
use forebay_types::Error;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{Pid, Signal};

use super::program::{Refused, Target, CANNOT_START, NOT_FOUND};

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    /// By itself.
    Status(i32),
    /// By a signal.
    Signal(i32),
}

/// Runs the program until it ends. `signals` are blocked in this process and not in the program.
pub(super) fn run(
    target: &Target,
    arguments: &[OsString],
    environment: &[(OsString, Option<OsString>)],
    signals: &Signals,
) -> Result<Ended, Refused> {
    let mut command = Command::new(&target.path);
    match &target.before {
        Some(before) => {
            command.arg0(&before[0]).args(&before[1..]);
        }
        None => {
            command.arg0(&arguments[0]);
        }
    }
    command.args(&arguments[1..]);
    for (name, value) in environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let mask = signals.mask_before();
    let me = rustix::process::getpid();
    // SAFETY: between fork and exec only system calls are made, all async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(me) {
                return Err(rustix::io::Errno::SRCH.into()); // killed before the death signal was set
            }
            mask.set();
            Ok(())
        });
    }
    let child = command.spawn().map_err(|e| {
        let status = if e.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_START };
        let name = arguments[0].to_string_lossy();
        let error = Error::io(format!("cannot run {name}"), &e);
        let missing_interpreter = "is the interpreter that it names installed?";
        (status, if status == NOT_FOUND { error.cure(missing_interpreter) } else { error })
    })?;
    Ok(wait(child, signals))
}

fn wait(mut child: Child, signals: &Signals) -> Ended {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                return match status.signal() {
                    Some(signal) => Ended::Signal(signal),
                    None => Ended::Status(status.code().unwrap_or(1)),
                };
            }
            Ok(None) => {}
            // Another part of this process has waited for the child, so its status is lost.
            Err(_) => return Ended::Status(i32::from(crate::failure::FOREBAY_FAILED)),
        }
        let _ = poll(&mut [PollFd::new(signals, PollFlags::IN)], None);
        while let Some(received) = signals.next() {
            match received.signal {
                libc::SIGCHLD => {}
                libc::SIGTSTP => {
                    if received.from_process {
                        send(&child, libc::SIGTSTP);
                    }
                    // The shell waits until this process has stopped too; SIGCONT resumes it.
                    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
                }
                signal if received.from_process => send(&child, signal),
                _ => {}
            }
        }
    }
}

/// The child has not been waited for, so its pid has not been reused.
fn send(child: &Child, signal: i32) {
    let pid = Pid::from_raw(child.id() as i32);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
