//! Jobs of which Slurm's controller may have lost a hook, and what it says of them.
//!
//! A controller that does not answer says nothing of a job. Only its word that it has no job of this number, or that
//! the job is over, ends a run.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::command;
use super::registry::{now_s, Job, Pool, Registry, State};

/// A record that has changed since is left alone: its next hook may be on its way.
const QUIET_S: u64 = 30;
/// A job that lives is asked for again after a quarter of the time since its last change, and after this at most.
const ASK_AGAIN_S: u64 = 600;

/// Starts a comparison if there is something to compare. Sites without burst buffers in use start nothing.
pub(crate) fn start_if_due(registry: &Registry) {
    let jobs = registry.jobs();
    if !jobs.iter().any(|job| is_due(registry, job))
        && !registry.pools().iter().any(|pool| is_stale(registry, pool))
    {
        return;
    }
    let Ok(mut command) = command::own(&["bb", "reconcile"]) else { return };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    // SAFETY: both are plain system calls, which may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            // It may outlive slurmctld, whose next one needs the port.
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
            Ok(())
        });
    }
    let _ = command.spawn();
}

/// Whether Slurm is to be asked for a job.
pub(crate) fn is_due(registry: &Registry, job: &Job) -> bool {
    let quiet = now_s().saturating_sub(job.changed_s);
    let pause = (quiet / 4).clamp(QUIET_S / 2, ASK_AGAIN_S);
    job.state != State::TornDown
        && quiet >= QUIET_S
        && registry.asked_s_ago(job.job).is_none_or(|asked| asked >= pause)
}

/// Whether a job counts as a user of a pool that does not use it.
fn is_stale(registry: &Registry, pool: &Pool) -> bool {
    pool.users.iter().any(|user| !registry.uses(pool, *user))
}

/// What Slurm's controller says of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// It does not answer, or the job waits, or is on its way to another state.
    Nothing,
    Runs,
    /// Its programs have ended; a hook should be waiting for its data.
    StagesOut,
    /// It has ended, or Slurm has forgotten it.
    Over,
}

/// Asks the controller for a job.
pub(crate) fn ask(job: &Job) -> Known {
    let Some((success, answer, message)) = squeue(job, "all") else { return Known::Nothing };
    known(job, success, &answer, &message)
}

/// Whether a job waits for nodes, also if squeue shows that its run before stages out; `None` if that is not known.
pub(crate) fn waits(job: &Job) -> Option<bool> {
    let (success, answer, _) = squeue(job, "PENDING")?;
    success.then(|| !answer.trim().is_empty())
}

fn squeue(job: &Job, states: &str) -> Option<(bool, String, String)> {
    let asked = Command::new("timeout")
        .args(["20", "squeue", "--noheader", "--format=%A %U %T"])
        .args([format!("--states={states}"), format!("--jobs={}", job.job)])
        .stdin(Stdio::null())
        .output();
    let output = asked.ok()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((output.status.success(), text(&output.stdout), text(&output.stderr)))
}

/// Reads squeue's answer. Its lines have no words of users.
fn known(job: &Job, success: bool, answer: &str, message: &str) -> Known {
    if !success {
        return if message.contains("Invalid job id") { Known::Over } else { Known::Nothing };
    }
    // It lists all tasks of an array.
    let line = answer.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let id = words.next()?.parse::<u32>().ok()?;
        (id == job.job).then(|| (words.next().unwrap_or(""), words.next().unwrap_or("")))
    });
    match line {
        None => Known::Nothing,
        Some((uid, _)) if uid != job.uid.to_string() => Known::Over, // the number was given again
        Some((_, "RUNNING" | "SUSPENDED" | "STOPPED" | "SIGNALING" | "RESIZING")) => Known::Runs,
        Some((_, "STAGE_OUT")) => Known::StagesOut,
        Some((
            _,
            "BOOT_FAIL" | "CANCELLED" | "COMPLETED" | "DEADLINE" | "FAILED" | "NODE_FAIL" | "OUT_OF_MEMORY"
            | "PREEMPTED" | "REVOKED" | "TIMEOUT",
        )) => Known::Over,
        Some(_) => Known::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::directives::Request;

    #[test]
    fn job_is_over_only_if_the_controller_says_so() {
        let job = Job {
            job: 12,
            run: 0,
            uid: 5,
            gid: 5,
            request: Request::default(),
            state: State::StagedIn,
            hurry: false,
            failed: None,
            changed_s: 0,
            pool_key: None,
            reconciled: false,
            unsaved: None,
        };
        let of = |answer: &str| known(&job, true, answer, "");
        for (answer, known) in [
            ("12 5 RUNNING\n", Known::Runs),
            ("12 5 PENDING\n", Known::Nothing),
            ("12 5 COMPLETING\n", Known::Nothing),
            ("12 5 STAGE_OUT\n", Known::StagesOut),
            ("12 5 CANCELLED\n", Known::Over),
            ("12 33 RUNNING\n", Known::Over),
            // The other tasks of an array, and a state of a later Slurm.
            ("11 5 COMPLETED\n12 5 RUNNING\n13 5 FAILED\n", Known::Runs),
            ("11 5 COMPLETED\n", Known::Nothing),
            ("12 5 SLEEPING\n", Known::Nothing),
            ("", Known::Nothing),
        ] {
            assert_eq!(of(answer), known, "{answer}");
        }
        let failed = |message: &str| known(&job, false, "", message);
        assert_eq!(failed("slurm_load_jobs error: Invalid job id specified\n"), Known::Over);
        let silent = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n";
        assert_eq!(failed(silent), Known::Nothing);
        assert_eq!(failed(""), Known::Nothing, "it was killed after 20 s");
    }
}
