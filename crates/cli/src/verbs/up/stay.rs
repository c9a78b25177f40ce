//! `forebay up` that stays until its pool is down.
//!
//! At the end of a step Slurm kills every process that the step started, and so would kill a pool. The process that
//! makes up a step therefore stays. `--foreground` requests the same for other launchers and for service supervisors.

use std::path::Path;
use std::process::ExitCode;

use forebay_server::launch;
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Result};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{getppid, pidfd_open, Pid, PidfdFlags};

use crate::verbs::down;

/// The names of the launchers' processes that start tasks on a node.
const STARTERS: [&str; 5] = ["slurmstepd", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr"];

/// Printed when staying was not requested.
const NOTE: &str = "  note: Slurm ends what a step has started when the step ends, so this one stays until `forebay down`:\n  \
                    start it with & and --overlap; `forebay status --wait 60` waits until the pool is up (--background: do not stay)\n";

/// True if Slurm will kill what this process starts: the process is in a step that ends before its job does, and a
/// launcher started it directly.
pub(super) fn step_would_end_it() -> bool {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let parent = getppid().map(|pid| format!("/proc/{}/comm", pid.as_raw_nonzero()));
    let parent = parent.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    is_in_step(&groups) && STARTERS.contains(&parent.trim_end())
}

/// True if a process in these control groups is in a step that ends before its job. The steps of the batch script, of
/// `salloc`'s shell and of ssh sessions do not end before.
fn is_in_step(groups: &str) -> bool {
    groups.lines().flat_map(|line| line.split('/')).any(|part| {
        part.strip_prefix("step_").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Prints why this process stays.
pub(super) fn tell() {
    eprint!("{NOTE}");
}

/// The signals that stop the pool. Call it only after the daemon was started, which would otherwise inherit them
/// blocked.
pub(super) fn signals() -> Result<Signals> {
    Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))
}

/// Waits until the pool is down; a signal stops it.
///
/// # Errors
/// [`Code::PoolGone`] when its daemon was killed.
pub(super) fn until_down(path: &Path, supervisor: u32, signals: &Signals) -> Result<ExitCode> {
    let what = || format!("cannot stay with pool {}", path.display());
    let daemon = i32::try_from(supervisor)
        .ok()
        .and_then(Pid::from_raw)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // Without a pidfd the daemon has already ended.
    if let Some(daemon) = &daemon {
        let mut watched = [PollFd::new(daemon, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        loop {
            match poll(&mut watched, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Error::io(what(), &e.into())),
                Ok(_) => {}
            }
            if signals.next().is_some() {
                return down::by_signal(path, signals);
            }
            if !watched[0].revents().is_empty() {
                break;
            }
        }
    }
    match launch::was_killed(path) {
        false => Ok(ExitCode::SUCCESS),
        true => Err(Error::new(Code::PoolGone, what())
            .why("its daemon was killed")
            .cure(format!("see {}/log; `forebay up` finds what is left of its data", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_is_known_by_its_control_group() {
        assert!(is_in_step("4:memory:/slurm/uid_0/job_3/step_0/task_1\n"));
        assert!(is_in_step("0::/system.slice/slurmstepd.scope/job_12/step_14/user/task_0\n"));
        for other in ["step_batch", "step_extern", "step_interactive", "step_", "footstep_1"] {
            assert!(!is_in_step(&format!("0::/system.slice/slurmstepd.scope/job_12/{other}/user/task_0\n")));
        }
        assert!(!is_in_step("0::/user.slice\n"));
    }
}
