//! The programs that are attached to the pool: those with the preload library, and those that call `forebay.h`, whether or
//! not `forebay run` started them. The descriptor store has the pidfd of each, so a worker that does not answer hides none.
//! Tools, the mover and the mount's process are no programs.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::store::{Kept, PROGRAM_TAG};

/// How many programs are named.
const NAMED_MAX: usize = 4;

/// The pidfds of the programs that live.
pub(super) fn living(kept: &Kept) -> Vec<BorrowedFd<'_>> {
    // A session's descriptors are its ring and the pidfd of its process.
    let all: Vec<&OwnedFd> = kept.of(PROGRAM_TAG).filter_map(<[OwnedFd]>::last).collect();
    let mut polled: Vec<PollFd<'_>> = all.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    while poll(&mut polled, Some(&at_once)) == Err(rustix::io::Errno::INTR) {}
    let lives = polled.iter().map(|fd| fd.revents().is_empty());
    let alive: Vec<bool> = lives.collect();
    all.into_iter().zip(alive).filter(|(_, lives)| *lives).map(|(fd, _)| fd.as_fd()).collect()
}

/// Names and numbers of some programs, for people.
pub(super) fn labels(pidfds: &[BorrowedFd<'_>]) -> Vec<String> {
    pidfds.iter().take(NAMED_MAX).map(|pidfd| label(*pidfd)).collect()
}

fn label(pidfd: BorrowedFd<'_>) -> String {
    let info =
        std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap_or_default();
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    // 0: of a PID namespace that is not visible here.
    let Some(pid) = pid.map(str::trim).filter(|pid| pid.parse().is_ok_and(|pid: i32| pid > 0)) else {
        return "a process of another PID namespace".to_owned();
    };
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{} ({pid})", name.trim_end()),
        Err(_) => format!("process {pid}"),
    }
}
