//! `forebay up` that stays until its pool is down.
//!
//! Slurm kills at the end of a step whatever the step has started, and with it a pool. The process that a step is made
//! of is therefore one that stays; so is one that was told to, by `--foreground`, for other launchers and for
//! supervisors of services.

use std::path::Path;
use std::process::ExitCode;

use forebay_server::launch::{self, DownOptions};
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Result};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{getppid, pidfd_open, Pid, PidfdFlags};

/// What launchers call the process of theirs that starts tasks on a node.
const STARTERS: [&str; 5] = ["slurmstepd", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr"];

/// What is said where nobody asked for it.
const NOTE: &str = "  note: Slurm ends what a step has started when the step ends, so this one stays until `forebay down`:\n  \
                    start it with & and --overlap; `forebay status --wait 60` waits until the pool is up (--background: do not stay)\n";

/// Whether what this process starts is killed when it ends: it is the task of a Slurm step, or was started by one.
pub(super) fn step_would_end_it() -> bool {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let parent = getppid().map(|pid| format!("/proc/{}/comm", pid.as_raw_nonzero()));
    let parent = parent.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    is_in_step(&groups) && STARTERS.contains(&parent.trim_end())
}

/// Whether a process of these control groups is of a step that ends before its job does; those of the batch script, of
/// `salloc`'s shell and of what ssh brings do not.
fn is_in_step(groups: &str) -> bool {
    groups.lines().flat_map(|line| line.split('/')).any(|part| {
        part.strip_prefix("step_").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Says why this process stays.
pub(super) fn tell() {
    eprint!("{NOTE}");
}

/// The signals that stop the pool. To be called when it is started, for the daemon would have them blocked too.
pub(super) fn signals() -> Result<Signals> {
    Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))
}

/// Waits until the pool is down, and stops it when a signal comes.
///
/// # Errors
/// [`Code::PoolGone`] when its daemon was killed.
pub(super) fn until_down(path: &Path, supervisor: u32, signals: &Signals) -> Result<ExitCode> {
    let what = || format!("cannot stay with pool {}", path.display());
    let daemon = i32::try_from(supervisor)
        .ok()
        .and_then(Pid::from_raw)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // Without: it has ended already.
    if let Some(daemon) = &daemon {
        let mut watched = [PollFd::new(daemon, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        loop {
            match poll(&mut watched, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Error::io(what(), &e.into())),
                Ok(_) => {}
            }
            if signals.next().is_some() {
                launch::down(path, DownOptions { keep: false, force: true })?;
                return Ok(ExitCode::SUCCESS);
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
