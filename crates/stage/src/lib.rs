//! Between pool and backing store: parallel, recursive staging in both directions, manifests and checksums.
//!
//! What goes where is said in [`Pair`]'s module: a destination is the name that the source gets. Of each file are kept:
//! content, holes, mode, access and modification time to the nanosecond, extended attributes, hard links among all
//! that one call stages, and owner and group where this process may set them. Symbolic links, FIFOs, sockets and, for
//! root, device nodes are made again. What a destination cannot keep is a warning in the report.
//!
//! **Whole files only.** Staging out writes each file under a temporary name beside its final one, syncs it, and renames
//! it over what was there; directories are synced at the end. Staging in does the same without syncing, except that a
//! file that one write holds is made under its own name where that is free, and gets its modification time last.
//!
//! **Resumed, not repeated.** A file that is there with the size and modification time of its source is not copied
//! again (with `verify`, its bytes are compared, too), so what was killed, cancelled or stopped by a full medium goes on
//! where it was when it is run again; temporaries that it left are removed. A modification time does not move when a
//! program stores through a shared mapping on tmpfs, so for such programs stage out with `verify`, or without `resume`.
//!
//! **Failures.** What can be known to be wrong beforehand, such as a source that is missing, is an error before
//! anything is copied. A file within a source that cannot be copied is recorded in [`StageReport::errors`] and the
//! others are staged; [`StageReport::outcome`] turns that into one error. A full destination stops everything. With
//! `all_or_nothing`, any failure, and cancellation, removes all that was staged.
//!
//! A file that changes while it is copied is copied again, three times at most.
//!
//! Threads: the caller's and more of its own for the length of the call, and one that counts the sources; see
//! `engine`. Tests: beside the modules, and `tests/`.

mod attributes;
mod branch;
mod copy;
mod count;
mod engine;
mod enter;
mod entry;
#[cfg(test)]
mod faults;
mod job;
mod kernel_file;
mod large;
mod leftovers;
mod links;
mod manifest;
mod names;
mod options;
mod pair;
mod pool;
mod posix;
mod prepare;
mod progress;
mod queue;
mod report;
mod run;
mod small;
mod special;
mod tree;
#[cfg(test)]
#[path = "../tests/trees/mod.rs"]
mod trees;
mod whole;

pub use manifest::Manifest;
pub use options::StageOptions;
pub use pair::Pair;
pub use posix::takes_files;
pub use progress::{Progress, Quiet};
pub use report::{FileError, StageReport, Warning, ERRORS_LISTED_MAX, WARNINGS_LISTED_MAX};

use forebay_client::Pool;
use forebay_types::{Code, Error, Result};

/// Stages from the backing store into the pool.
///
/// # Errors
/// What can be known to be wrong before anything is copied: a source that is missing or unreadable, a destination that
/// cannot be written to, two sources with one destination. Failures after that are in the report; see
/// [`StageReport::outcome`].
pub fn stage_in(
    pool: &'static Pool,
    pairs: &[Pair],
    options: &StageOptions,
    progress: &dyn Progress,
) -> Result<StageReport> {
    let inside = pool::PoolTree::new(pool).map_err(unreachable)?;
    run::stage(&posix::PosixTree::new(), &inside, pairs, options, false, progress)
}

/// Stages from the pool out to the backing store.
///
/// # Errors
/// Those of [`stage_in`].
pub fn stage_out(
    pool: &'static Pool,
    pairs: &[Pair],
    options: &StageOptions,
    progress: &dyn Progress,
) -> Result<StageReport> {
    let inside = pool::PoolTree::new(pool).map_err(unreachable)?;
    run::stage(&inside, &posix::PosixTree::new(), pairs, options, true, progress)
}

fn unreachable(code: Code) -> Error {
    Error::new(code, "cannot reach the pool")
        .why(report::reason(code))
        .cure("look with `forebay status`, start it with `forebay up`")
}

/// The direction that [`stage_between`] plays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// As staging in: copies need not be durable.
    In,
    /// As staging out: copies are durable before they get their names.
    Out,
}

/// Stages between two places of the kernel's file tree, with no pool: what tests and benchmarks use, and what moves
/// data between two backing stores.
///
/// # Errors
/// Those of [`stage_in`].
pub fn stage_between(
    way: Way,
    pairs: &[Pair],
    options: &StageOptions,
    progress: &dyn Progress,
) -> Result<StageReport> {
    let tree = posix::PosixTree::new();
    run::stage(&tree, &tree, pairs, options, way == Way::Out, progress)
}
