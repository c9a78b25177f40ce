//! Parallel, recursive staging between pool and backing store in both directions, with manifests and checksums.
//!
//! [`Pair`]'s module has the rules of sources and destinations: a destination is the name that the source gets. A copy
//! keeps the file's content, holes, mode, access and modification time to the nanosecond, extended attributes, hard
//! links among all files that one call stages, and owner and group if this process may set them. Symbolic links, FIFOs,
//! sockets and, for root, device nodes are created anew. An attribute that the destination cannot keep gives a warning
//! in the report.
//!
//! **Whole files only.** Stage-out writes each file under a temporary name beside its final one, syncs it, and renames
//! it over an existing file; directories are synced at the end. Stage-in does the same without syncing. Exception: if
//! one write holds a file and its name is free, the file is created under its own name and gets its modification time
//! last.
//!
//! **Resumed, not repeated.** A file that exists with its source's size and modification time is not copied again (with
//! `verify`, its bytes are compared too). So a staging that was killed, cancelled or stopped by a full medium continues
//! when it is run again; its temporaries are removed. Stores through a shared mapping on tmpfs do not change the
//! modification time: after programs that use them, stage out with `verify`, or without `resume`.
//!
//! **Failures.** Errors that can be detected in advance, such as a missing source, are returned before anything is
//! copied. If a file within a source cannot be copied, the error goes to [`StageReport::errors`], and the other files
//! are staged; [`StageReport::outcome`] turns the report into one error. A full destination stops everything. With
//! `all_or_nothing`, any failure or cancellation removes all copies.
//!
//! A file that changes while it is copied is copied again, three times at most. Threads: the caller's, others for the
//! length of the call, and one that counts the sources; see `engine`. Tests: beside the modules, and `tests/`.

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
/// Errors that can be detected before anything is copied: a source that is missing or unreadable, a destination that
/// cannot be written to, two sources with one destination. Later failures are in the report; see
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
        .cure("check with `forebay status`, start it with `forebay up`")
}

/// The direction in which [`stage_between`] stages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Like stage-in: copies need not be durable.
    In,
    /// Like stage-out: copies are durable before they get their names.
    Out,
}

/// Stages between two paths of the kernel's file tree, without a pool: for tests and benchmarks, and to move data
/// between two backing stores.
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
