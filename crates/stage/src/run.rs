//! One staging from start to end: check, prepare, copy, move to the final names, report.

use std::collections::HashSet;
use std::time::Instant;

use forebay_types::{Error, Result};

use crate::attributes::OwnerRules;
use crate::count::{count, Finish};
use crate::engine::{Engine, Settings};
use crate::names::Tag;
use crate::options::StageOptions;
use crate::pair::{Pair, Spot};
use crate::prepare::{check, make_parents};
use crate::progress::Progress;
use crate::report::{add, reason, StageReport};
use crate::tree::Tree;
use crate::whole::adopt;

/// Default bytes of one read and write: a huge page.
const UNIT_BYTES: usize = 2 << 20;
/// Bounds of the user's setting.
const UNIT_BYTES_MIN: usize = 64 << 10;
const UNIT_BYTES_MAX: usize = 64 << 20;
/// Most threads that a user can set.
const THREADS_MAX: usize = 256;
/// Default threads without a network between the trees (one and a half per core, because some wait for the pool's
/// daemon or the medium), and with one, where threads wait most of the time.
const THREADS_LOCAL: std::ops::RangeInclusive<usize> = 2..=16;
const THREADS_REMOTE: std::ops::RangeInclusive<usize> = 8..=32;
/// Copies that one thread keeps open, at most.
const BATCH_FILES_MAX: usize = 64;

/// Stages `pairs` from one tree to another. `durable` is the default of this direction.
pub(crate) fn stage<S: Tree, D: Tree>(
    source: &S,
    destination: &D,
    pairs: &[Pair],
    options: &StageOptions,
    durable: bool,
    progress: &dyn Progress,
) -> Result<StageReport> {
    let begin = Instant::now();
    let tag = Tag::new();
    let whole = options.all_or_nothing;
    let mut tops = check(source, destination, pairs, whole.then_some(&tag))?;
    let parents = make_parents(destination, &tops)?;
    let leftovers_removed = adopt(destination, &mut tops, &tag, options.resume, whole).map_err(|code| {
        Error::new(code, "cannot remove what a killed staging left at the destination").why(reason(code))
    })?;
    let remote = tops.first().is_some_and(|top| {
        let far = |path: Vec<u8>| source.open_path(&path).is_ok_and(|(at, _)| source.is_remote(&at));
        let far_end =
            destination.open_path(&top.staged.parent).is_ok_and(|(at, _)| destination.is_remote(&at));
        far(top.source.parent.clone()) || far_end
    });
    let settings = settings(options, durable, remote);
    let owners = OwnerRules::new(options.preserve_owner);
    let mut engine = Engine::new((source, destination), settings, owners, tag, progress);
    engine.tops = tops;
    add(&engine.tally.leftovers_removed, leftovers_removed);

    let finish = Finish::default();
    let told = std::thread::scope(|scope| {
        let counting = scope.spawn(|| count(source, &engine.tops, progress, &finish));
        engine.run();
        finish.end();
        counting.join().unwrap_or_default()
    });
    let mut rolled_back = false;
    if whole {
        rolled_back = engine.is_stopping() || engine.tally.has_errors() || !engine.commit();
        if rolled_back {
            engine.roll_back(&parents);
        }
    } else if engine.settings.durable {
        sync_places(&engine, &parents);
    }
    let cancelled = engine.was_cancelled();
    let stopped = engine.was_stopped();
    let mut report = engine.tally.report(begin.elapsed(), cancelled);
    report.rolled_back = rolled_back;
    report.stopped = stopped;
    tell_rest(&report, told, progress);
    Ok(report)
}

/// Syncs to the medium the parent directories of the staged names, and those of directories created above them.
fn sync_places<S: Tree, D: Tree>(engine: &Engine<'_, S, D>, made: &[Spot]) {
    let places = engine.tops.iter().map(|top| &top.staged.parent).chain(made.iter().map(|spot| &spot.parent));
    let mut synced = HashSet::new();
    for place in places {
        if synced.insert(place) {
            engine.sync_place(place);
        }
    }
}

/// Reports the files that the counting thread did not reach, so that the sums are equal.
fn tell_rest(report: &StageReport, told: (u64, u64), progress: &dyn Progress) {
    let files = report.files
        + report.symlinks
        + report.hard_links
        + report.special
        + report.skipped_files
        + report.errors_total;
    let bytes = report.bytes + report.holes_bytes + report.skipped_bytes;
    progress.found(files.saturating_sub(told.0), bytes.saturating_sub(told.1));
    progress.scanning_finished();
}

fn settings(options: &StageOptions, durable: bool, remote: bool) -> Settings {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = match options.threads {
        0 if remote => (4 * cores).clamp(*THREADS_REMOTE.start(), *THREADS_REMOTE.end()),
        0 => (cores + cores / 2).clamp(*THREADS_LOCAL.start(), *THREADS_LOCAL.end()),
        n => n.min(THREADS_MAX),
    };
    let unit = match options.transfer_bytes {
        0 => UNIT_BYTES,
        n => n.clamp(UNIT_BYTES_MIN, UNIT_BYTES_MAX).next_multiple_of(UNIT_BYTES_MIN),
    };
    // A quarter of the limit of open files for directories and a quarter for copies; the rest is for the program.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    let quarter = (limit / 4).min(1 << 16) as usize;
    Settings {
        threads,
        verify: options.verify,
        resume: options.resume,
        durable: options.durable.unwrap_or(durable),
        unit,
        batch_files: (quarter / threads).clamp(1, BATCH_FILES_MAX),
        open_directories: (quarter / 2).clamp(8, 1024),
    }
}
