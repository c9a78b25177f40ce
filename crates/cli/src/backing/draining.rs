//! Copies to backing stores what they lack, with progress, before a pool or an attachment ends.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_sys::signals::Signals;
use forebay_tasks::{MoverClient, Task, Verb};
use forebay_types::{Code, Error, Ino, NodeId, PendingPlace, Result};

use super::path_of;
use super::pending::{all, nodes, Lacking};
use super::progress::{wait, Waited};
use super::trees::Trees;
use crate::staging::Style;

/// Paths that are named when some could not be copied.
const NAMED_MAX: usize = 5;

/// How long a node may still be listed as up that does not answer.
const NODE_ENDS: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// What was copied.
#[derive(Debug, Default)]
pub(crate) struct Drained {
    /// Files.
    pub(crate) files: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// The signal that ended the waiting; the mover goes on.
    pub(crate) stopped_by: Option<i32>,
    /// Tasks that could not do everything.
    failed: Vec<Task>,
}

impl Drained {
    /// The error when stores still lack something: `discard` is what drops it.
    pub(crate) fn refusal(&self, what: String, lacking: Lacking, discard: &str) -> Error {
        let mut why = format!("the backing store does not have {}", lacking.words());
        let errors = self.failed.iter().flat_map(|task| &task.errors);
        for error in errors.take(NAMED_MAX) {
            let e = Error::from(error.error.clone());
            let reason = if e.why.is_empty() { String::new() } else { format!(": {}", e.why) };
            why.push_str(&format!("\n  {}: {}{reason}", error.path, e.what));
        }
        let conflicts = match lacking.conflicts {
            0 => "",
            _ => "settle conflicts (`forebay resolve PATH --keep pool|store|both`), ",
        };
        let code = if lacking.conflicts > 0 { Code::Exists } else { Code::Busy };
        Error::new(code, what)
            .why(why)
            .cure(format!("{conflicts}put it right and try again, or lose it: `forebay {discard}`"))
    }
}

/// The nodes that have the trees of all stores, or of one.
fn nodes_with(dir: &Path, only: Option<Ino>) -> Result<Vec<NodeId>> {
    match only {
        None => nodes(dir),
        Some(root) => Ok(vec![root.birth_node()]),
    }
}

/// The pending places of all stores, or of one. A node that has just been stopped cannot be asked, and is listed as up for
/// a moment.
fn pending(dir: &Path, pool: &'static Pool, only: Option<Ino>) -> Result<Vec<PendingPlace>> {
    let end = Instant::now() + NODE_ENDS;
    loop {
        let nodes = nodes_with(dir, only)?;
        match all(pool, &nodes) {
            Err(_) if nodes.len() > 1 && Instant::now() < end => std::thread::sleep(LOOK_AGAIN),
            places => return places,
        }
    }
}

/// What would be lost with the pool, or with the tree of one store.
pub(crate) fn would_lose(dir: &Path, pool: &'static Pool, only: Option<Ino>) -> Result<Lacking> {
    let mut trees = Trees::new(pool);
    let mut places = pending(dir, pool, only)?;
    places.retain(|place| only.is_none_or(|root| trees.store_of(place.parent) == Some(root)));
    Ok(Lacking::of(pool, &places))
}

/// As [`drain_until_stopped`]. A signal ends this process; the mover goes on.
pub(crate) fn drain(
    dir: &Path,
    pool: &'static Pool,
    only: Option<Ino>,
    style: Style,
    signals: &Signals,
) -> Result<Drained> {
    let drained = drain_until_stopped(dir, pool, only, style, signals)?;
    if let Some(signal) = drained.stopped_by {
        note!("forebay: stopped: the pool is up, and goes on copying (`forebay tasks`)");
        crate::death::die_of(signal);
    }
    Ok(drained)
}

/// Copies everything that stores lack, or that one store lacks.
pub(crate) fn drain_until_stopped(
    dir: &Path,
    pool: &'static Pool,
    only: Option<Ino>,
    style: Style,
    signals: &Signals,
) -> Result<Drained> {
    let mut trees = Trees::new(pool);
    let mut roots = BTreeSet::new();
    for place in pending(dir, pool, only)? {
        let Some(root) = trees.store_of(place.parent) else { continue };
        let writes = trees.settings(root).is_some_and(|settings| settings.is_written());
        if writes && only.is_none_or(|only| only == root) {
            roots.insert(root);
        }
    }
    let mut drained = Drained::default();
    if !roots.is_empty() {
        forebay_server::control::start_mover(dir)?;
    }
    for root in roots {
        let task = MoverClient::connect(dir)?.start(Verb::Sync, root.0, &path_of(pool, root), true)?;
        match wait(dir, task.id, style, signals, None, None)? {
            Waited::Over(task) => {
                drained.files += task.files_done;
                drained.bytes += task.bytes_done;
                if task.error_count > 0 {
                    drained.failed.push(task);
                }
            }
            Waited::TimedOut(_) => {}
            Waited::Interrupted(signal) => {
                drained.stopped_by = Some(signal);
                break;
            }
        }
    }
    Ok(drained)
}
