//! Snapshots of the shard on targets that outlive the node (docs/decisions/0043).
//!
//! A thread of its own asks the shard thread for the last commit (`Message::Snapshot`), copies it into each such target,
//! syncs the copy, and renames it over the last one. The shard thread goes on meanwhile, and only puts off commits that
//! are not necessary: a copy is void once two commits have come after the one that it copies. Then the thread tries
//! again. So no request waits for a snapshot, and there is at most one copy a period, of what changed.
//!
//! The thread also notes in each target during which boot of the node the pool runs: `forebay recover` trusts a shard
//! that was written during the present one. Tests: `crates/cli/tests/recover.rs`, and `crates/meta`.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::time::Duration;

use forebay_data::outlives_node;
use forebay_meta::{Shard, SnapshotHead, SnapshotSource, SNAPSHOT_FILE, SNAPSHOT_FILE_NEW};
use forebay_ring::Doorbell;
use forebay_types::{Error, NodeId, Result, Timestamp};

use super::message::Message;
use super::statistics::Statistics;
use super::targets::shard_dir;
use crate::directory::BOOT_FILE;
use crate::identity::PoolIdentity;
use crate::snapshot_period::period_of;

/// Attempts in one period, and the pause between two.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// What is written where, and how often.
#[derive(Clone, Debug)]
pub(super) struct Places {
    directories: Vec<PathBuf>,
    // The directories' paths lead through these descriptors.
    _targets: Vec<Arc<OwnedFd>>,
    node: NodeId,
    pool: String,
    period: Duration,
}

impl Places {
    /// The targets that outlive the node; none if there is none.
    pub(super) fn of(targets: &[OwnedFd], identity: &PoolIdentity) -> Result<Option<Places>> {
        let clone = |target: &OwnedFd| target.try_clone().map(Arc::new);
        let targets: Vec<_> = targets
            .iter()
            .filter(|target| outlives_node(target))
            .map(clone)
            .collect::<std::io::Result<_>>()
            .map_err(|e| Error::io("cannot open the target", &e))?;
        let Some(period) = period_of(identity.snapshots_ms).filter(|_| !targets.is_empty()) else {
            return Ok(None);
        };
        let directories = targets.iter().map(|target| shard_dir(target)).collect();
        let (node, pool) = (NodeId(identity.node), identity.uuid.clone());
        Ok(Some(Places { directories, _targets: targets, node, pool, period }))
    }

    fn note_boot(&self) -> Result<()> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        for directory in &self.directories {
            let path = directory.join(BOOT_FILE);
            std::fs::write(&path, &boot)
                .map_err(|e| Error::io(format!("cannot write {}", path.display()), &e))?;
        }
        Ok(())
    }

    /// Copies a commit to all of them. False if it became void.
    fn write(&self, source: &SnapshotSource, taken: Timestamp, is_valid: &dyn Fn() -> bool) -> Result<bool> {
        let head = SnapshotHead { node: self.node, pool: self.pool.clone(), taken };
        for directory in &self.directories {
            if !write_one(directory, source, &head, is_valid)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The last snapshot of a pool that stops. Nothing else uses the shard.
    pub(super) fn write_last(&self, shard: &Shard) {
        let taken = super::now();
        let written = shard.snapshot_source().and_then(|source| self.write(&source, taken, &|| true));
        if let Err(e) = written {
            tracing::warn!("{e}");
        }
    }
}

fn write_one(
    directory: &Path,
    source: &SnapshotSource,
    head: &SnapshotHead,
    is_valid: &dyn Fn() -> bool,
) -> Result<bool> {
    let (new, path) = (directory.join(SNAPSHOT_FILE_NEW), directory.join(SNAPSHOT_FILE));
    let failed = |e: &std::io::Error| {
        Error::io(format!("cannot write a snapshot of the shard to {}", path.display()), e).cure(
            "free space on that medium: without snapshots, names of its files may be lost with the node",
        )
    };
    let write = || -> Result<bool> {
        let file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)
            .map_err(|e| failed(&e))?;
        if !source.copy_to(&file, head, is_valid)? {
            return Ok(false);
        }
        file.sync_all().map_err(|e| failed(&e))?;
        std::fs::rename(&new, &path).map_err(|e| failed(&e))?;
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(|e| failed(&e))?;
        Ok(true)
    };
    let written = write();
    if !matches!(written, Ok(true)) {
        let _ = std::fs::remove_file(&new);
    }
    written
}

/// The thread that takes snapshots. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Snapshots {
    stop: Option<Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts the thread.
pub(super) fn start(
    places: &Places,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
    statistics: Arc<Statistics>,
) -> Result<Snapshots> {
    places.note_boot()?;
    let (stop, stopped) = mpsc::channel();
    let thread = Taker { places: places.clone(), to_shard, doorbell, statistics, stopped };
    let thread = std::thread::Builder::new()
        .name("snapshots".into())
        .spawn(move || thread.run())
        .map_err(|e| Error::io("cannot start a thread", &e))?;
    Ok(Snapshots { stop: Some(stop), thread: Some(thread) })
}

struct Taker {
    places: Places,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
    statistics: Arc<Statistics>,
    stopped: Receiver<()>,
}

impl Taker {
    fn run(self) {
        let period = self.places.period;
        // The first one is taken at once: a new target has none.
        let mut taken: Option<u64> = None;
        let mut has_failed = false;
        loop {
            let requests = self.statistics.requests.load(Ordering::Relaxed);
            if taken != Some(requests) {
                match self.take() {
                    Ok(true) => (taken, has_failed) = (Some(requests), false),
                    Ok(false) => tracing::debug!("no snapshot: the shard is committed all the time"),
                    // Once, not each period.
                    Err(e) if !has_failed => {
                        tracing::warn!("{e}");
                        has_failed = true;
                    }
                    Err(_) => {}
                }
            }
            match self.stopped.recv_timeout(period) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
        }
    }

    fn take(&self) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            let (answer, answered) = mpsc::channel();
            if self.to_shard.send(Message::Snapshot(answer)).is_err() {
                return Ok(false);
            }
            self.doorbell.ring();
            let Ok(answer) = answered.recv() else { return Ok(false) };
            let (source, taken, hold) = answer?;
            let written = self.places.write(&source, taken, &|| hold.is_valid());
            hold.end();
            if written? {
                return Ok(true);
            }
            if !matches!(self.stopped.recv_timeout(PAUSE), Err(RecvTimeoutError::Timeout)) {
                return Ok(false);
            }
        }
        Ok(false)
    }
}
