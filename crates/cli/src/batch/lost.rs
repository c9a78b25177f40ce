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
/// Slurm is asked for a job that was torn down once more after this: slurmctld may have been killed meanwhile.
const LATE_S: u64 = 600;
/// A job that lives is asked for again after a quarter of the time since its last change, and after this at most.
const ASK_AGAIN_S: u64 = 600;
/// How the variables begin that are options of squeue and scancel, or change what they print.
const OPTIONS: [&str; 7] = [
    "SQUEUE_",
    "SCANCEL_",
    "SLURM_CLUSTERS",
    "SLURM_TIME_FORMAT",
    "SLURM_BITSTR_LEN",
    "SLURM_JSON",
    "SLURM_YAML",
];

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

/// Whether Slurm is to be asked for a job. A slurmctld that was killed before it had saved that a stage-out is over shows
/// that job as staging out for ever: so it is asked for a job that was torn down as well, twice, and more often while it
/// shows that.
pub(crate) fn is_due(registry: &Registry, job: &Job) -> bool {
    let quiet = now_s().saturating_sub(job.changed_s);
    if quiet < QUIET_S {
        return false;
    }
    let Some(asked) = registry.asked_s_ago(job.job) else { return true };
    if job.state != State::TornDown {
        return asked >= (quiet / 4).clamp(QUIET_S / 2, ASK_AGAIN_S);
    }
    let since_last_time = if quiet >= LATE_S { quiet - LATE_S } else { quiet };
    asked >= since_last_time || (asked >= QUIET_S / 2 && registry.is_seen_to_stage_out(job))
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

/// Asks the controller which of these jobs stage out. `None` if it does not answer.
pub(crate) fn staging_out(jobs: &[Job]) -> Option<Vec<Job>> {
    let words = ["squeue", "--noheader", "--format=%A %U %T %i", "--states=STAGE_OUT"];
    let output = slurm(&words).output().ok().filter(|output| output.status.success())?;
    let answer = String::from_utf8_lossy(&output.stdout);
    let stages_out = |job: &&Job| known(job, true, &answer, "") == Known::StagesOut;
    Some(jobs.iter().filter(stages_out).cloned().collect())
}

/// The name under which Slurm is told to end a job that it shows as staging out. `None` if that is not known, or if
/// more than the stage-out would end: the job waits for nodes while its run before stages out, or it is a part of a
/// heterogeneous job.
pub(crate) fn name_to_end(job: &Job) -> Option<String> {
    let (success, waiting, _) = squeue(job, "PENDING")?;
    if !success || line_of(job, &waiting).is_some() {
        return None;
    }
    let (success, answer, _) = squeue(job, "all")?;
    let line = line_of(job, &answer).filter(|line| success && line.uid == job.uid.to_string())?;
    (line.state == "STAGE_OUT" && is_one_job(line.name)).then(|| line.name.to_owned())
}

/// Whether a name is that of a job, or of one task of an array. The number of the array's last task alone is the array.
fn is_one_job(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    name.split_once('_').map_or(is_number(name), |(job, task)| is_number(job) && is_number(task))
}

/// A command of Slurm's, without what the environment of slurmctld has for it.
pub(crate) fn slurm(words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.arg("20").args(words).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if OPTIONS.iter().any(|start| name.as_encoded_bytes().starts_with(start.as_bytes())) {
            command.env_remove(&name);
        }
    }
    command
}

fn squeue(job: &Job, states: &str) -> Option<(bool, String, String)> {
    let (states, jobs) = (format!("--states={states}"), format!("--jobs={}", job.job));
    let asked = slurm(&["squeue", "--noheader", "--format=%A %U %T %i", &states, &jobs]).output();
    let output = asked.ok()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((output.status.success(), text(&output.stdout), text(&output.stderr)))
}

/// What squeue prints of a job. It has no words of users.
struct Line<'a> {
    uid: &'a str,
    state: &'a str,
    /// `JOB`, `ARRAY_TASK`, or `JOB+PART`.
    name: &'a str,
}

/// The line of a job. squeue lists all tasks of an array.
fn line_of<'a>(job: &Job, answer: &'a str) -> Option<Line<'a>> {
    answer.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let id = words.next()?.parse::<u32>().ok()?;
        let mut word = || words.next().unwrap_or("");
        (id == job.job).then(|| Line { uid: word(), state: word(), name: word() })
    })
}

/// Reads squeue's answer.
fn known(job: &Job, success: bool, answer: &str, message: &str) -> Known {
    if !success {
        return if message.contains("Invalid job id") { Known::Over } else { Known::Nothing };
    }
    match line_of(job, answer).map(|line| (line.uid, line.state)) {
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
            ended_s: None,
            pool_key: None,
            reconciled: false,
            unsaved: None,
            data_out_failed: None,
            is_second_start: false,
        };
        assert!(["7", "10_3"].into_iter().all(is_one_job));
        assert!(!["", "7+0", "10_[1-3]", "10_", "10_1+0", "N/A"].into_iter().any(is_one_job));
        let of = |answer: &str| known(&job, true, answer, "");
        for (answer, known) in [
            ("12 5 RUNNING\n", Known::Runs),
            ("12 5 PENDING\n", Known::Nothing),
            ("12 5 COMPLETING\n", Known::Nothing),
            ("12 5 STAGE_OUT 12\n", Known::StagesOut),
            ("12 5 CANCELLED\n", Known::Over),
            ("12 33 RUNNING\n", Known::Over),
            // The other tasks of an array, and a state of a later Slurm.
            ("11 5 COMPLETED 10_1\n12 5 RUNNING 10_2\n10 5 FAILED 10_3\n", Known::Runs),
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
