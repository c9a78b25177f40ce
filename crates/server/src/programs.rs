//! Kills the programs that a killed run left behind. It finds them by the token in their environment.
//!
//! A `forebay run` that is killed by SIGKILL cannot end its programs. The kernel kills its direct child, and this
//! module kills the processes that the child had started. A program that ended in good order may leave others running:
//! those are not killed.

use std::os::fd::AsFd;
use std::time::Duration;

use forebay_sys::process::Stat;
use rustix::process::{Pid, PidfdFlags, Signal};

/// The environment variable that marks a run's programs.
pub const TOKEN_VARIABLE: &str = "FOREBAY_MEMBER";

/// The most passes over the process table: programs may start others during a pass.
const PASSES_MAX: usize = 20;
/// Longest pause before a process without a visible environment is examined again. The pauses double up to this one. A
/// process that is executing another program has no visible environment for a moment.
const PAUSE_MAX: Duration = Duration::from_millis(64);

/// Kills every process of this user whose initial environment has `token`; returns their number.
pub(crate) fn kill_marked(token: &str) -> usize {
    let mark = format!("{TOKEN_VARIABLE}={token}").into_bytes();
    let (mut killed, mut pause) = (0, Duration::from_millis(1));
    for _ in 0..PASSES_MAX {
        let found = pass(&mark);
        killed += found.killed;
        if found.killed == 0 && (!found.any_unknown || pause > PAUSE_MAX) {
            break;
        }
        // Killed processes may take a moment to end.
        std::thread::sleep(if found.killed > 0 { Duration::from_millis(1) } else { pause });
        if found.killed == 0 {
            pause *= 2;
        }
    }
    killed
}

/// The result of one pass.
#[derive(Default)]
struct Found {
    killed: usize,
    /// True when the environment of a process was not visible.
    any_unknown: bool,
}

fn pass(mark: &[u8]) -> Found {
    let mut found = Found::default();
    let Ok(entries) = std::fs::read_dir("/proc") else { return found };
    let me = rustix::process::getpid();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|s| s.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        if pid == me {
            continue;
        }
        match carries(pid, mark) {
            Some(true) => {}
            Some(false) => continue,
            None => {
                found.any_unknown = true;
                continue;
            }
        }
        // The process number may have been reused: pin it by a pidfd, then check again.
        let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        let marked = carries(pid, mark) == Some(true);
        if marked && rustix::process::pidfd_send_signal(process.as_fd(), Signal::KILL).is_ok() {
            found.killed += 1;
        }
    }
    found
}

/// Whether a process has the mark; none when the process is executing another program and has no visible environment.
fn carries(pid: Pid, mark: &[u8]) -> Option<bool> {
    let number = pid.as_raw_nonzero().get().unsigned_abs();
    let Ok(environment) = std::fs::read(format!("/proc/{number}/environ")) else { return Some(false) };
    if environment.is_empty() {
        return if is_starting(number) { None } else { Some(false) };
    }
    Some(environment.split(|&b| b == 0).any(|variable| variable == mark))
}

/// True when a process is executing another program and the new environment is not in place yet. A process that was
/// started without an environment has an address for it, and kernel threads and processes that have ended have no
/// program.
fn is_starting(number: u32) -> bool {
    Stat::of(number).is_ok_and(|stat| stat.environment_start == 0)
        && std::fs::read_link(format!("/proc/{number}/exe")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn process_without_an_environment_is_not_taken_for_one_that_starts() {
        let mut bare = Command::new("sleep").arg("60").env_clear().stdin(Stdio::null()).spawn().unwrap();
        // The child may be starting for a moment.
        let known = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            carries(Pid::from_child(&bare), b"FOREBAY_MEMBER=x") == Some(false)
        });
        bare.kill().unwrap();
        bare.wait().unwrap();
        assert!(known);
    }

    #[test]
    fn kill_marked_ends_those_that_carry_the_token_and_no_others() {
        let sleeper = |token: &str| {
            Command::new("sleep").arg("60").env(TOKEN_VARIABLE, token).stdin(Stdio::null()).spawn().unwrap()
        };
        let token = format!("programs-test-{}", std::process::id());
        let mut marked = sleeper(&token);
        let mut other = sleeper(&format!("{token}-other"));
        let killed = kill_marked(&token);
        let status = marked.wait().unwrap();
        let other_lives = other.try_wait().unwrap().is_none();
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(killed >= 1);
        assert!(!status.success());
        assert!(other_lives);
    }
}
