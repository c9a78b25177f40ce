//! `forebay stage-in` and `forebay stage-out`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_stage::{Pair, StageOptions};
use forebay_sys::signals::Signals;
use forebay_types::{Error, Result};

use crate::arguments::{StageIn, StageOut, Staging};
use crate::staging::{self, Direction, Interrupt, Shown, Style};
use crate::tally::Tally;
use crate::{failure, pool};

pub(super) fn stage_in(named: Option<PathBuf>, arguments: StageIn) -> Result<ExitCode> {
    let pairs = staging::pairs_in(&arguments.pairs, arguments.staging.manifest.as_deref())?;
    stage(named, Direction::In, &pairs, &arguments.staging)
}

pub(super) fn stage_out(named: Option<PathBuf>, arguments: StageOut) -> Result<ExitCode> {
    let pairs = staging::pairs_out(&arguments.pairs, arguments.staging.manifest.as_deref())?;
    stage(named, Direction::Out, &pairs, &arguments.staging)
}

fn stage(
    named: Option<PathBuf>,
    direction: Direction,
    pairs: &[Pair],
    arguments: &Staging,
) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    staging::refuse_own(&dir, direction, pairs)?;
    let pool = pool::attach(&dir)?;
    let options = StageOptions {
        verify: arguments.verify,
        all_or_nothing: arguments.all_or_nothing,
        threads: arguments.jobs,
        resume: !arguments.no_resume,
        ..StageOptions::default()
    };
    let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))?;
    let interrupt = Interrupt::new(&signals, None);
    let shown = Shown::new(direction, Style::of_stderr(!arguments.no_progress), &interrupt)
        .with_tally(arguments.tally.clone().map(Tally::new));
    let result = match direction {
        Direction::In => forebay_stage::stage_in(pool, pairs, &options, &shown),
        Direction::Out => forebay_stage::stage_out(pool, pairs, &options, &shown),
    };
    shown.finish();
    let report = result?;
    staging::print_report(direction, &report, arguments.json);
    if let Some(signal) = interrupt.stopped_by() {
        note!(
            "forebay: stopped: {}",
            match report.rolled_back {
                true => "everything that was staged is removed",
                false => "run it again to go on",
            }
        );
        crate::death::die_of(signal);
    }
    Ok(if report.is_complete() { ExitCode::SUCCESS } else { ExitCode::from(failure::FAILED) })
}
