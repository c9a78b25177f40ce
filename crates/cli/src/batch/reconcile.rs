//! Compares the registry with the jobs that Slurm has, and does what lost hooks have left.
//!
//! slurmctld calls each hook once, and saves its state seconds later, that of its burst buffers each half minute. Killed
//! in between, it never calls the rest of a job's hooks: the record stays as it was, and a persistent pool keeps a user
//! that is gone. `pools`, which slurmctld calls each half minute, starts the comparison (`lost`) in a process of its own,
//! as a hook must not wait for the controller that waits for the hook.

use std::process::ExitCode;

use forebay_types::Result;

use super::command;
use super::hooks::Hooks;
use super::lost::{self, Known};
use super::registry::{Job, State};

/// A job that stages out is left to Slurm for so long from the first look that shows it, if no hook works on it.
const LOST_S: u64 = 120;
/// The file of `hooks` that is locked while the comparison runs. No job has this number.
const COMPARISON: u32 = 0;

/// `forebay bb reconcile`.
pub(crate) fn run() -> Result<ExitCode> {
    let hooks = Hooks::new()?;
    let Some(compares) = hooks.registry.works_alone_on(COMPARISON)? else { return Ok(ExitCode::SUCCESS) };
    hooks.settle_pools()?;
    let mut over = Vec::new();
    let due = hooks.registry.jobs().into_iter().filter(|job| lost::is_due(&hooks.registry, job));
    let (torn_down, due): (Vec<Job>, Vec<Job>) = due.partition(|job| job.state == State::TornDown);
    if let Some(staging_out) = (!torn_down.is_empty()).then(|| lost::staging_out(&torn_down)).flatten() {
        for job in &torn_down {
            // The others are compared all the same.
            let _ = hooks.registry.asks_for(job.job);
            if !staging_out.iter().any(|other| other.job == job.job)
                && hooks.registry.is_seen_to_stage_out(job)
            {
                hooks.registry.stages_out_no_more(job.job);
            }
        }
        let is_lost = |job: &Job| hooks.registry.stages_out_for(job).unwrap_or(0) >= LOST_S;
        over.extend(staging_out.into_iter().filter(is_lost).map(|job| (job, Known::StagesOut)));
    }
    for job in due {
        hooks.registry.asks_for(job.job)?;
        match lost::ask(&job) {
            Known::Nothing => {}
            Known::Runs if matches!(job.state, State::Setup | State::StagingIn | State::StagedIn) => {
                hooks.runs(&job)?;
            }
            Known::Runs => {}
            // The record of a job that has long run may be old, and its hook about to come.
            Known::StagesOut if hooks.registry.stages_out_for(&job).unwrap_or(0) < LOST_S => {}
            known => over.push((job, known)),
        }
    }
    // Stage-outs may take long. The next comparison has jobs of its own.
    drop(compares);
    std::thread::scope(|scope| {
        for (job, known) in &over {
            scope.spawn(|| end(&hooks, job, *known));
        }
    });
    Ok(ExitCode::SUCCESS)
}

/// Does what the hooks of a job that is over have not done.
fn end(hooks: &Hooks, job: &Job, known: Known) {
    let Ok(Some(_works)) = hooks.registry.works_alone_on(job.job) else { return };
    let is_same = |now: Job| now.run == job.run && now.state == job.state;
    if !hooks.registry.job(job.job).is_ok_and(|now| now.is_some_and(is_same)) {
        return; // a hook has come
    }
    let is_staged = job.state == State::TornDown || !hooks.has_run(job);
    let staged = if is_staged { Ok(()) } else { hooks.stage_out(job.job).map(drop) };
    let unsaved = staged.err().map(|e| command::reason(&e.to_string()));
    // Slurm would show it as staging out for ever. Its own teardown finds nothing to do, nor is there any here for a job
    // that was torn down.
    if hooks.end_lost(job, unsaved).is_ok() && known == Known::StagesOut {
        if let Some(name) = lost::name_to_end(job) {
            let _ = lost::slurm(&["scancel", "--hurry", &name]).output();
        }
    }
}
