//! Programs that a run left behind: found by the token in their environment, killed when their run was.
//!
//! A `forebay run` that is killed outright cannot take its programs with it; the kernel ends its direct child, and this
//! ends what that child had started. A program that ended in good order may leave others running: those are not touched.

use std::os::fd::AsFd;

use rustix::process::{Pid, PidfdFlags, Signal};

/// The environment variable that marks a run's programs.
pub const TOKEN_VARIABLE: &str = "FOREBAY_MEMBER";

/// Passes over the process table: programs may start others while one pass goes on.
const PASSES_MAX: usize = 20;

/// Kills every process of this user that carries `token` in its first environment; how many.
pub(crate) fn kill_marked(token: &str) -> usize {
    let mark = format!("{TOKEN_VARIABLE}={token}").into_bytes();
    let mut killed = 0;
    for _ in 0..PASSES_MAX {
        let found = pass(&mark);
        if found == 0 {
            break;
        }
        killed += found;
    }
    killed
}

fn pass(mark: &[u8]) -> usize {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let me = rustix::process::getpid();
    let mut killed = 0;
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|s| s.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        if pid == me || !carries(pid, mark) {
            continue;
        }
        // The number may have passed to another process meanwhile: hold on to it, then look again.
        let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if carries(pid, mark) && rustix::process::pidfd_send_signal(process.as_fd(), Signal::KILL).is_ok() {
            killed += 1;
        }
    }
    killed
}

fn carries(pid: Pid, mark: &[u8]) -> bool {
    let Ok(environment) = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) else {
        return false;
    };
    environment.split(|&b| b == 0).any(|variable| variable == mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

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
