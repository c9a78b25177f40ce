//! The shard thread's state: the open transaction, the journal, the board, and the components.

use crate::worker::message::Message;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;

use forebay_data::{Media, NodeTargets};
use forebay_meta::{Batch, Effects, Shard, ShardStatistics};
use forebay_ring::BoardWriter;
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{Code, Result, Timestamp};
use serde_json::Value;

use crate::notifier::Starter;
use crate::worker::arrivals::Arrivals;
use crate::worker::backing_files::BackingFiles;
use crate::worker::batch::Pipeline;
use crate::worker::coordination::CrossNode;
use crate::worker::journal::{Journal, MARK_SESSION};
use crate::worker::late_removals::LateRemovals;
use crate::worker::leases::Leases;
use crate::worker::moments::{Moment, Watcher};
use crate::worker::mover_mail::MoverMail;
pub(in crate::worker) use crate::worker::network::Network;
use crate::worker::notifier::MountedKernel;
use crate::worker::recall_limits::RecallLimits;
use crate::worker::recorder::FlightRecorder;
use crate::worker::sessions::Sessions;
use crate::worker::statistics::Statistics;
use crate::worker::store_waits::StoreWaits;
use crate::worker::sweeper::Sweep;
use crate::worker::volumes::Volumes;
use crate::worker::watches::Watched;
use crate::worker::wide::Wide;

/// Orphan records deleted between two checks of the page budget: they take no more pages than the largest removal.
const FORGET_AT_ONCE: usize = 8;
/// Changes of one transaction: more make it no cheaper, and a crash repeats them.
const CHANGES_MAX: usize = 1024;
/// The same while a snapshot of the last commit is being copied, which the second commit after it ends.
const CHANGES_HELD_MAX: usize = 16 * CHANGES_MAX;

/// The result of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Round {
    /// Requests were served: there may be more.
    Served,
    /// There was no call.
    Idle,
    /// `Message::Stop` was received.
    Stopped,
}

/// The shard thread's state.
pub(in crate::worker) struct ShardThread<'a> {
    pub(in crate::worker) shard: &'a Shard,
    /// The open transaction.
    pub(in crate::worker) batch: Option<Batch<'a>>,
    pub(in crate::worker) journal: Journal,
    /// Slots whose last change is not kept in the shard yet: session and slot.
    pub(in crate::worker) unkept: Vec<(u64, usize)>,
    /// The shard as of the last commit.
    pub(in crate::worker) committed: ShardStatistics,
    pub(in crate::worker) targets: Arc<NodeTargets>,
    pub(in crate::worker) board: BoardWriter,
    pub(in crate::worker) recorder: FlightRecorder,
    pub(in crate::worker) messages: Receiver<Message>,
    /// Messages that were received and not handled yet.
    pub(in crate::worker) unhandled: VecDeque<Message>,
    /// For messages to this thread.
    pub(in crate::worker) to_self: Sender<Message>,
    /// The kernel that has the pool mounted.
    pub(in crate::worker) mount: Option<MountedKernel>,
    /// The processes that notify it of changes.
    pub(in crate::worker) notifiers: Option<Arc<Starter>>,
    /// The directories that programs watch; none before the first.
    pub(in crate::worker) watched: Option<Watched>,
    /// Backing files that clients may be creating, and those that are to be removed.
    pub(in crate::worker) backing: BackingFiles,
    pub(in crate::worker) statistics: Arc<Statistics>,
    pub(in crate::worker) epoch: u64,
    pub(in crate::worker) sessions: Sessions,
    /// Requests of other nodes' processes to be taken.
    pub(in crate::worker) arrivals: Arrivals,
    /// The network thread's commands, in a pool of several nodes.
    pub(in crate::worker) network: Option<Network>,
    /// Cross-node transactions, likewise.
    pub(in crate::worker) cross_node: Option<CrossNode>,
    /// Leases given to other nodes and taken from them, likewise.
    pub(in crate::worker) leases: Option<Leases>,
    /// The wide directories whose parts are known.
    pub(in crate::worker) wide: Wide,
    /// The session that the next batch starts with.
    pub(in crate::worker) first_session: usize,
    /// A batch of one call is taken from a ring if there is one.
    pub(in crate::worker) is_rings_turn: bool,
    /// Memory into which a request is copied out of its ring.
    pub(in crate::worker) scratch: Vec<u8>,
    pub(in crate::worker) effects: Effects,
    /// Requests that wait until clients' late removals are done.
    pub(in crate::worker) late: LateRemovals,
    /// Calls that wait for a backing store, and the mover's tasks.
    pub(in crate::worker) store: StoreWaits,
    /// What processes had copied from backing stores lately.
    pub(in crate::worker) recalls: RecallLimits,
    /// Messages to this node's mover.
    pub(in crate::worker) mover_mail: MoverMail,
    /// Pieces of volumes on this node.
    pub(in crate::worker) volumes: Volumes,
    pub(in crate::worker) pipeline: Pipeline,
    /// Changes in the open transaction.
    pub(in crate::worker) uncommitted: usize,
    /// The clock that dates changes.
    pub(in crate::worker) clock: fn() -> Timestamp,
    /// Called at each point of the pipeline, so that a simulation can kill the worker there.
    pub(in crate::worker) watcher: Option<Watcher>,
    /// A snapshot of the last commit is being copied.
    pub(in crate::worker) snapshot_hold: Option<std::sync::Arc<crate::worker::snapshot_hold::Hold>>,
    pub(in crate::worker) stop: bool,
}

impl<'a> ShardThread<'a> {
    #[allow(clippy::too_many_arguments)]
    pub(in crate::worker) fn new(
        shard: &'a Shard,
        targets: Arc<NodeTargets>,
        board: BoardWriter,
        recorder: FlightRecorder,
        journal: Journal,
        (to_self, messages): (Sender<Message>, Receiver<Message>),
        sweeper: Sender<Sweep>,
        statistics: Arc<Statistics>,
        epoch: u64,
        mut network: Option<Network>,
        new: bool,
    ) -> Result<ShardThread<'a>> {
        if let Some(network) = &mut network {
            network.commands = network.commands.without_waking();
        }
        let cross_node = match &network {
            Some(network) => Some(CrossNode::new(network.node)?),
            None => None,
        };
        let leases = network.as_ref().filter(|n| n.nodes > 1).map(|_| Leases::new(new));
        Ok(ShardThread {
            shard,
            batch: None,
            journal,
            unkept: Vec::new(),
            committed: shard.statistics()?,
            targets,
            board,
            recorder,
            messages,
            unhandled: VecDeque::new(),
            to_self,
            mount: None,
            notifiers: None,
            watched: None,
            backing: BackingFiles::new(sweeper),
            statistics,
            epoch,
            sessions: Sessions::default(),
            arrivals: Arrivals::default(),
            network,
            cross_node,
            leases,
            wide: Wide::default(),
            first_session: 0,
            is_rings_turn: false,
            effects: Effects::new(),
            late: LateRemovals::default(),
            store: StoreWaits::default(),
            recalls: RecallLimits::default(),
            mover_mail: MoverMail::default(),
            volumes: Volumes::default(),
            pipeline: Pipeline::new(),
            scratch: vec![0; MESSAGE_BYTES_MAX],
            uncommitted: 0,
            clock: crate::worker::now,
            watcher: None,
            snapshot_hold: None,
            stop: false,
        })
    }

    /// Calls the watcher, if there is one.
    ///
    /// # Errors
    /// The watcher's, which end the worker.
    #[inline]
    pub(in crate::worker) fn passes(&mut self, moment: Moment) -> Result<()> {
        match &mut self.watcher {
            Some(watcher) => watcher(moment),
            None => Ok(()),
        }
    }

    /// The open transaction, begun if there is none.
    pub(in crate::worker) fn batch(&mut self) -> Result<&mut Batch<'a>> {
        if self.batch.is_none() {
            self.batch = Some(self.shard.begin()?);
        }
        match &mut self.batch {
            Some(batch) => Ok(batch),
            None => unreachable!("begun above"),
        }
    }

    /// Commits the open transaction; the journal is empty then.
    ///
    /// # Errors
    /// The worker must end: what is acknowledged is in the journal, and the next one tries again.
    pub(in crate::worker) fn commit(&mut self) -> Result<()> {
        let Some(mut batch) = self.batch.take() else { return Ok(()) };
        let (mut kept, mut refused) = (Vec::new(), Vec::new());
        for (session, slot) in self.unkept.drain(..) {
            let Some(session) = self.sessions.find_mut(session) else { continue };
            let state = &mut session.slots[slot];
            let (seq, reply) = &state.last_change;
            crate::worker::session::encode_kept(state.reserved, reply, &mut kept);
            let noted = if session.noted { Ok(()) } else { batch.add_session(session.id) };
            session.noted |= noted.is_ok();
            if let Err(e) = noted.and_then(|()| batch.keep_reply(session.id, slot as u8, *seq, &kept)) {
                // Without it a crash between here and the slot's next request would repeat the change.
                tracing::warn!("{e}");
                refused.push((session.id, slot));
            } else {
                state.unkept = false;
            }
        }
        self.unkept = refused;
        if !self.journal.is_empty() {
            batch.keep_reply(MARK_SESSION, 0, self.journal.last(), &[])?;
        }
        self.passes(Moment::Committing)?;
        batch.commit()?;
        self.passes(Moment::Committed)?;
        if let Some(hold) = &self.snapshot_hold {
            hold.note_commit();
        }
        self.journal.clear();
        self.uncommitted = 0;
        self.committed = self.shard.statistics()?;
        Statistics::add(&self.statistics.commits, 1);
        Ok(())
    }

    /// Removes something in the open transaction, or in a new one if the open one has no space left. False when a full
    /// medium leaves no space in the new one either: the caller tries again later.
    pub(in crate::worker) fn remove_in_batch(
        &mut self,
        remove: impl Fn(&mut Batch<'_>) -> Result<()>,
    ) -> Result<bool> {
        if self.must_commit() {
            self.commit()?;
        }
        let mut removed = remove(self.batch()?);
        if removed.as_ref().is_err_and(|e| e.code == Code::NoSpace) {
            self.commit()?;
            removed = remove(self.batch()?);
        }
        match removed {
            Ok(()) => Ok(true),
            Err(e) if e.code == Code::NoSpace => {
                tracing::debug!("{e}");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Deletes the records of orphans whose backing files are gone, as far as there is space. True when any was
    /// deleted.
    pub(in crate::worker) fn forget_orphans(&mut self) -> Result<bool> {
        let inos = self.backing.take_unlinked();
        for (i, some) in inos.chunks(FORGET_AT_ONCE).enumerate() {
            if !self.remove_in_batch(|batch| batch.remove_orphans(some))? {
                self.backing.unlinked(inos[i * FORGET_AT_ONCE..].iter().copied());
                return Ok(i > 0);
            }
        }
        Ok(true)
    }

    /// True when the open transaction must not grow.
    pub(in crate::worker) fn must_commit(&self) -> bool {
        let most = if self.is_held_for_snapshot() { CHANGES_HELD_MAX } else { CHANGES_MAX };
        self.uncommitted >= most || self.journal.is_full() || self.batch.as_ref().is_some_and(Batch::is_spent)
    }

    pub(in crate::worker) fn count_clients(&self) {
        let here = self.sessions.local().len();
        self.statistics.clients.store(here as u64, Ordering::Relaxed);
    }

    pub(in crate::worker) fn status(&self) -> Value {
        let space = self.targets.space().unwrap_or_default();
        let s = &self.committed;
        let (volume_pieces, volume_bytes) = self.volumes.taken();
        serde_json::json!({
            "used_bytes": space.total_bytes.saturating_sub(space.free_bytes),
            "free_bytes": space.free_bytes,
            "target_spaces": self.targets.for_files().iter().map(|target| {
                let space = target.space().unwrap_or_default();
                serde_json::json!({ "total_bytes": space.total_bytes, "free_bytes": space.free_bytes })
            }).collect::<Vec<_>>(),
            "clients": self.sessions.local().len(),
            "ring": self.statistics.to_json(),
            "board": { "bytes": self.board.bytes(), "evicted": self.board.evicted() },
            "inodes": s.inodes,
            "volume_pieces": volume_pieces,
            "volume_bytes": volume_bytes,
            "watched_directories": self.watched_directories(),
            "shard": { "entries": s.entries, "orphans": s.orphans, "bytes": s.bytes },
        })
    }
}
