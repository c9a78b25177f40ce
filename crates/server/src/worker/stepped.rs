//! A worker without threads, for simulations and fuzzing: the caller runs the rounds of its threads one at a time.
//!
//! All code is the worker's own: shard thread, network thread, I/O workers and sweeper with their state, channels and
//! journal, over an endpoint from the caller. Only what makes it a process is missing: supervisor, attendant,
//! notifiers, threads. The caller keeps what a supervisor keeps (target, flight recorder, doorbell, rings). So dropping
//! a [`Node`] has the effect of SIGKILL on a worker: the open transaction and all memory are lost; journal, shard as of
//! its last commit, target and rings remain for the next worker. A [`Watcher`] that unwinds kills the worker in the
//! middle of a round. No code here reads a clock of the machine or generates a random number.
//!
//! Tests: `tests/conformance/tests/simulation`; `tests/garbage.rs`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;

use forebay_data::{NodeTargets, Target};
use forebay_fabric::{Calls, CallsSettings, Endpoint, Identity};
use forebay_meta::{Shard, ShardOptions};
use forebay_ring::{AttachReply, BoardWriter, Doorbell, ServedRing};
use forebay_types::limits::{BOARD_BYTES_MIN, VOLUME_GRAIN_BYTES};
use forebay_types::{Error, Ino, NodeId, PieceId, Result, Rights, Timestamp};
use forebay_wire::Secret;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde_json::Value;

use crate::notifier::Starter;
use crate::store::{self, receive, FdStore, Kept, Message as StoreMessage};

use super::coordination::CrossNode;
use super::core::state::{Round, ShardThread};
use super::journal::Journal;
use super::known_parts::KnownParts;
use super::message::Message;
use super::network::{
    give_buffer, queue, Commands, IoWorker, Job, KeptOpen, Member, Network, NetworkThread,
    Round as NetworkRound, Taker, TargetNode, APPENDS_TAG, ATOMICS_TAG, LOCK_TAG, TURN_TAG,
};
use super::piece_table::{PieceKind, PieceTable};
use super::recorder::FlightRecorder;
use super::session::Session;
use super::statistics::Statistics;
use super::sweeper::{Sweep, Sweeper};
use super::wide::Wide;

pub use super::moments::{Moment, Watcher};

/// A defect that a simulation must find, which shows that it can find defects of that kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// A worker that takes over drops the last replies of other nodes' processes.
    ForgottenReplies,
    /// A worker that takes over drops the log of finished appends.
    ForgottenAppends,
    /// A worker that takes over drops the last atomic operations of other nodes' processes.
    ForgottenAtomics,
    /// A worker that takes over drops the locks of other nodes' processes.
    ForgottenLocks,
    /// A worker that takes over drops the turns to append to files of several backing files.
    ForgottenTurns,
    /// Data in eager buffers count as arrived, whatever their canaries are.
    TrustedCanaries,
}

/// Descriptors that the last worker left, by tag.
type Left = Vec<(String, Vec<OwnedFd>)>;

/// The descriptor store of a supervisor: its contents outlive a node's workers. A node without one leaves nothing.
#[derive(Debug, Default)]
pub struct Keeper {
    kept: Kept,
    /// This end of the socket pair; the last worker had the other end.
    socket: Option<OwnedFd>,
}

impl Keeper {
    /// Takes what the worker has put. A supervisor does this all the time, because a worker waits while the socket is
    /// full.
    ///
    /// # Errors
    /// A message of the worker that cannot be understood.
    pub fn collect(&mut self) -> Result<()> {
        while let Some(socket) = &self.socket {
            match receive(socket.as_fd(), RecvFlags::DONTWAIT) {
                Ok(Some(StoreMessage::Put(tag, fds))) => self.kept.put(tag, fds),
                Ok(Some(StoreMessage::Remove(tag))) => self.kept.remove(&tag),
                Ok(Some(_)) => {}
                Ok(None) => self.socket = None,
                Err(Errno::AGAIN) => break,
                Err(e) => return Err(Error::io("cannot receive from the worker", &e.into())),
            }
        }
        Ok(())
    }

    /// The next worker's end of the socket pair, and what the last worker left in the store.
    fn open(&mut self) -> Result<(FdStore, Left)> {
        self.collect()?;
        let (ours, theirs) = store::pair()?;
        self.socket = Some(ours);
        let mut left = Left::new();
        for tag in self.kept.tags() {
            let fds = self.kept.get(&tag).unwrap_or_default();
            let fds: std::io::Result<Vec<OwnedFd>> = fds.iter().map(|fd| fd.try_clone_to_owned()).collect();
            left.push((tag, fds.map_err(failed("cannot hand on what a worker left"))?));
        }
        Ok((FdStore::new(theirs), left))
    }
}

/// Arguments of [`Node::start`].
pub struct Setup<'a> {
    /// The node's number.
    pub node: NodeId,
    /// The other nodes with their addresses.
    pub others: Vec<(NodeId, Vec<u8>)>,
    /// All nodes without a target, perhaps this one; `target` then holds only its shard.
    pub without_target: Vec<NodeId>,
    /// The node's endpoint.
    pub endpoint: Box<dyn Endpoint>,
    /// Timeouts and seed of its calls.
    pub calls: CallsSettings,
    /// The pool's secret.
    pub secret: Secret,
    /// The formatted directory of the target. If it has no shard, one is created.
    pub target: BorrowedFd<'a>,
    /// Largest size of the shard, in bytes.
    pub shard_bytes: u64,
    /// Memory of [`crate::FLIGHT_RECORDER_BYTES`] that outlives the node.
    pub flight_recorder: BorrowedFd<'a>,
    /// The doorbell, which outlives the node.
    pub doorbell: BorrowedFd<'a>,
    /// The store for what outlives the node: finished appends, locks and removed inodes of other nodes' processes.
    pub keeper: Option<&'a mut Keeper>,
    /// Sessions of the last worker whose processes live, with their rings.
    pub rings: Vec<(u64, OwnedFd)>,
    /// The board's epoch: greater than the last worker's.
    pub epoch: u64,
    /// A piece of a volume on this node: memory of [`VOLUME_GRAIN_BYTES`], which outlives the node. This process' user may use
    /// it.
    pub piece: Option<(PieceId, Arc<OwnedFd>)>,
    /// The clock.
    pub clock: fn() -> Timestamp,
    /// A planted defect.
    pub planted: Option<Planted>,
    /// The FUSE device of a kernel that has the pool mounted.
    pub kernel: Option<OwnedFd>,
}

/// Jobs that the I/O workers have at the same time: one per thread.
const IO_WORKERS: usize = 4;

/// A node, between two rounds. See the module.
pub struct Node {
    /// Dropped before the shard that it borrows. None only during the drop.
    shard_thread: Option<ShardThread<'static>>,
    /// From [`Box::into_raw`].
    shard: *mut Shard,
    to_shard: Sender<Message>,
    to_network: Commands,
    network: NetworkThread,
    io_worker: IoWorker,
    targets: Arc<NodeTargets>,
    kept: Arc<KeptOpen>,
    jobs: Taker,
    at_hand: VecDeque<Job>,
    sweeper: Sweeper,
    sweeps: Receiver<Sweep>,
    board: OwnedFd,
    board_bytes: u64,
    takes_files: bool,
    node: NodeId,
    nodes: u64,
    epoch: u64,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("node", &self.node).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// The table of a node's pieces: of one at most.
fn pieces_of(piece: Option<(PieceId, Arc<OwnedFd>)>) -> PieceTable {
    let table = PieceTable::default();
    if let Some((id, memory)) = piece {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let rights = Some(Rights { uid, gid, mode: 0o600 });
        let kind = PieceKind { target: 0, bytes: VOLUME_GRAIN_BYTES, rights, is_thin: false };
        table.add(id, (&memory, kind), None);
    }
    table.publish(std::iter::empty());
    table
}

fn failed(what: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |e| Error::io(what, &e)
}

impl Node {
    /// Opens shard and journal, takes over what the last worker left, and is ready for its first round.
    ///
    /// # Errors
    /// As a worker's start.
    pub fn start(setup: Setup<'_>) -> Result<Node> {
        let target_dir = setup.target.try_clone_to_owned().map_err(failed("cannot keep the target"))?;
        let dir = super::targets::shard_dir(&target_dir);
        let new = !dir.join("data.mdb").exists();
        let shard = if !new {
            Shard::open(&dir)?
        } else {
            let options = ShardOptions {
                node: setup.node,
                map_bytes: setup.shard_bytes,
                root_mode: 0o777,
                root_uid: rustix::process::getuid().as_raw(),
                root_gid: rustix::process::getgid().as_raw(),
            };
            Shard::create(&dir, &options, (setup.clock)())?
        };
        let (board_fd, mut board) =
            BoardWriter::create(BOARD_BYTES_MIN).map_err(failed("cannot make the board"))?;
        board.set_node(setup.node);
        let board_bytes = board.bytes() as u64;
        let doorbell = Arc::new(Doorbell::open(setup.doorbell).map_err(failed("cannot map the doorbell"))?);
        let number = u32::from(setup.node.0) << 16;
        let has_target = |node: &NodeId| !setup.without_target.contains(node);
        let first = Target::open(target_dir.as_fd(), number)?;
        let targets = Arc::new(match has_target(&setup.node) {
            true => NodeTargets::new(vec![first]),
            false => NodeTargets::of_shard_alone(first),
        });
        let recorder = FlightRecorder::open(setup.flight_recorder)?;
        let journal = Journal::open(target_dir.as_fd())?;
        let (to_shard, messages) = mpsc::channel();

        let identity = Identity { pool: setup.secret.pool(), node: setup.node, capacity_bytes: 0 };
        let mut calls = Calls::new(setup.endpoint, identity, setup.secret, setup.calls);
        let member =
            |node| Member { node, name: format!("node{node}"), host: String::new(), media: Vec::new() };
        let mut members = vec![member(setup.node)];
        for (node, address) in &setup.others {
            calls
                .add_node(*node, address)
                .map_err(|code| Error::new(code, format!("cannot use the address of node {node}")))?;
            members.push(member(*node));
        }
        let nodes = members.len();
        let all: Vec<NodeId> = members.iter().map(|member| member.node).collect();
        let target_nodes: Vec<TargetNode> =
            all.iter().map(|node| TargetNode { node: *node, targets: has_target(node).into() }).collect();
        let takes_files = has_target(&setup.node);
        let (sender, commands) = mpsc::channel();
        let to_network = Commands::new(sender, calls.endpoint().waker().clone());
        let (to_io_workers, jobs) = queue();
        let mut known_parts = KnownParts::default();
        let kept = Arc::new(match setup.keeper {
            Some(keeper) => {
                let (store, mut left) = keeper.open()?;
                let forgotten = match setup.planted {
                    Some(Planted::ForgottenAppends) => Some(APPENDS_TAG),
                    Some(Planted::ForgottenAtomics) => Some(ATOMICS_TAG),
                    Some(Planted::ForgottenLocks) => Some(LOCK_TAG),
                    Some(Planted::ForgottenTurns) => Some(TURN_TAG),
                    _ => None,
                };
                left.retain(|(tag, _)| forgotten.is_none_or(|forgotten| !tag.starts_with(forgotten)));
                known_parts = KnownParts::restored(&store, &mut left)?;
                KeptOpen::restored(store, &mut left, pieces_of(setup.piece))?
            }
            None => KeptOpen::default(),
        });
        let io_worker = IoWorker::new(Arc::clone(&targets), Arc::clone(&kept), to_network.clone());
        let mut network = NetworkThread::new(
            calls,
            setup.node,
            members,
            commands,
            to_shard.clone(),
            (to_io_workers, Arc::clone(&kept)),
        )
        .with_targets(target_nodes.clone())
        .with_addresses(&setup.others);
        if setup.planted == Some(Planted::TrustedCanaries) {
            network.trust_canaries();
        }
        let (to_sweeper, sweeps) = mpsc::channel();
        let sweeper = Sweeper {
            targets: Arc::clone(&targets),
            to_shard: to_shard.clone(),
            doorbell: Arc::clone(&doorbell),
            network: Some((setup.node, to_network.clone())),
        };

        let shard = Box::into_raw(Box::new(shard));
        // An error from here on leaves the shard open until the process ends.
        // SAFETY: only `drop` frees the shard, after the only borrower.
        let borrowed: &'static Shard = unsafe { &*shard };
        let mut shard_thread = ShardThread::new(
            borrowed,
            Arc::clone(&targets),
            board,
            recorder,
            journal,
            (to_shard.clone(), messages),
            to_sweeper,
            Arc::new(Statistics::default()),
            setup.epoch,
            Some(Network {
                node: setup.node,
                nodes,
                others: setup.others.iter().map(|(node, _)| *node).collect(),
                target_nodes,
                commands: to_network.clone(),
                thread: None,
            }),
            new,
        )?;
        shard_thread.wide = Wide::with(known_parts);
        shard_thread.clock = setup.clock;
        shard_thread.cross_node = Some(CrossNode::by_clock(setup.node, setup.epoch, setup.clock));
        if let Some(kernel) = setup.kernel {
            let doorbell = setup.doorbell.try_clone_to_owned().map_err(failed("cannot keep the doorbell"))?;
            shard_thread.notifiers = Some(Arc::new(Starter::new(doorbell, None)));
            shard_thread.resume_mount(0, kernel)?;
        }
        let mut sessions = Vec::new();
        for (id, ring) in setup.rings {
            let ring = ServedRing::reopen(ring.as_fd()).map_err(failed("cannot map a ring"))?;
            sessions.push(Session::local(id, ring));
        }
        shard_thread.recover(sessions)?;
        if setup.planted == Some(Planted::ForgottenReplies) {
            for session in shard_thread.sessions.iter_mut().filter(|s| !s.is_here()) {
                session.slots.iter_mut().for_each(|slot| slot.last_change = Default::default());
            }
        }
        Ok(Node {
            shard_thread: Some(shard_thread),
            shard,
            to_shard,
            to_network,
            network,
            io_worker,
            targets,
            kept,
            jobs,
            at_hand: VecDeque::new(),
            sweeper,
            sweeps,
            board: board_fd,
            board_bytes,
            takes_files,
            node: setup.node,
            nodes: nodes as u64,
            epoch: setup.epoch,
        })
    }

    fn shard_thread(&mut self) -> &mut ShardThread<'static> {
        match &mut self.shard_thread {
            Some(shard_thread) => shard_thread,
            None => unreachable!("taken in drop alone"),
        }
    }

    /// Takes the shard thread's state, for a test that installs it in a `Handoff`. It must be dropped before the node.
    #[cfg(test)]
    pub(super) fn take_shard_thread(&mut self) -> Option<ShardThread<'static>> {
        self.shard_thread.take()
    }

    /// Runs a round of the network thread. True if it sent the shard thread something.
    #[cfg(test)]
    pub(super) fn has_told(&mut self) -> bool {
        self.network.round();
        self.network.take_told()
    }

    /// Sends the shard thread a message.
    #[cfg(test)]
    pub(super) fn tell(&self, message: Message) {
        let _ = self.to_shard.send(message);
    }

    /// The shard thread calls `watcher` at each [`Moment`].
    pub fn watch(&mut self, watcher: Watcher) {
        self.shard_thread().watcher = Some(watcher);
    }

    /// Runs one round of the shard thread. True when it served requests.
    ///
    /// # Errors
    /// What ends a worker.
    pub fn serve(&mut self) -> Result<bool> {
        Ok(self.shard_thread().round()? == Round::Served)
    }

    /// Runs the shard thread's work for idle times, which includes the commit.
    ///
    /// # Errors
    /// What ends a worker.
    pub fn rest(&mut self) -> Result<bool> {
        self.shard_thread().rest(true)
    }

    /// Runs one round of the network thread. True when there may be more to do.
    pub fn communicate(&mut self) -> bool {
        self.network.round() == NetworkRound::Busy
    }

    /// Serves one of the I/O workers' jobs. `choose` selects it from that many. False when there is no job.
    pub fn serve_data(&mut self, choose: impl FnOnce(usize) -> usize) -> bool {
        while self.at_hand.len() < IO_WORKERS {
            let Some(job) = self.jobs.try_take() else { break };
            self.at_hand.push_back(job);
        }
        if self.at_hand.is_empty() {
            return false;
        }
        match self.at_hand.remove(choose(self.at_hand.len())) {
            Some(job) => self.io_worker.serve(job),
            None => return false,
        }
        true
    }

    /// An I/O worker of this node for a thread of its own, on which it may wait: for the mover's leases, and for files to
    /// be marked dirty. [`Node::serve_data`] waits for neither.
    pub fn io_worker(&self) -> SteppedIoWorker {
        let worker =
            IoWorker::new(Arc::clone(&self.targets), Arc::clone(&self.kept), self.to_network.clone());
        SteppedIoWorker { worker, jobs: self.jobs.clone() }
    }

    /// Runs the sweeper's next job. False when there is none.
    pub fn sweep(&mut self) -> bool {
        match self.sweeps.try_recv() {
            Ok(sweep) => self.sweeper.sweep(sweep),
            Err(_) => false,
        }
    }

    /// Attaches a process of this node. Returns its ring, which the caller keeps as a supervisor does.
    ///
    /// # Errors
    /// No memory.
    pub fn attach(&mut self, session: u64) -> Result<OwnedFd> {
        let (fd, ring) = ServedRing::create().map_err(failed("cannot make a ring"))?;
        ring.set_epoch(self.epoch);
        let session = Session::local(session, ring);
        // The receiver is in this node.
        let _ = self.to_shard.send(Message::Attached(Box::new(session)));
        Ok(fd)
    }

    /// Gives this node's processes buffers, as an attendant does beside the other threads.
    pub fn buffers(&self) -> Buffers {
        Buffers { to_network: self.to_network.clone() }
    }

    /// Ends a process's session.
    pub fn end(&mut self, session: u64) {
        let _ = self.to_shard.send(Message::Ended(session));
    }

    /// Asks other nodes now which of their processes live, as a worker does periodically.
    pub fn review_sessions(&mut self) {
        let _ = self.to_shard.send(Message::ReviewSessions(None));
    }

    /// The reply to a process of this node that attaches, or requests the board again. `device` is the files' `st_dev`.
    pub fn attach_reply(&self, session: u64, device: u64) -> AttachReply {
        AttachReply {
            session,
            epoch: self.epoch,
            board_bytes: self.board_bytes,
            device,
            targets: self.takes_files.into(),
            root: Ino::ROOT,
            stable_inodes: 0,
            node: self.node,
            nodes: self.nodes,
            paced: 0,
        }
    }

    /// Entries that were evicted from the board.
    pub fn evicted(&self) -> u64 {
        self.shard_thread.as_ref().map_or(0, |shard_thread| shard_thread.board.evicted())
    }

    /// The board.
    pub fn board(&self) -> BorrowedFd<'_> {
        self.board.as_fd()
    }

    /// Checks shard and target after the pending work, as `forebay fsck` does without other nodes.
    ///
    /// # Errors
    /// What ends a worker.
    pub fn check(&mut self) -> Result<Value> {
        self.serve()?;
        self.shard_thread().check_here()?
    }

    /// Sessions of which the shard keeps replies.
    ///
    /// # Errors
    /// What ends a worker.
    pub fn kept_sessions(&mut self) -> Result<Vec<u64>> {
        self.shard_thread().commit()?;
        self.shard_thread().batch()?.sessions()
    }
}

/// An I/O worker without a thread. It may outlive the node that it is of.
pub struct SteppedIoWorker {
    worker: IoWorker,
    jobs: Taker,
}

impl std::fmt::Debug for SteppedIoWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteppedIoWorker").finish_non_exhaustive()
    }
}

impl SteppedIoWorker {
    /// Serves the next job. False when there is none.
    pub fn serve(&mut self) -> bool {
        match self.jobs.try_take() {
            Some(job) => self.worker.serve(job),
            None => return false,
        }
        true
    }
}

/// Gives processes of a node buffers for data of other nodes.
#[derive(Clone, Debug)]
pub struct Buffers {
    to_network: Commands,
}

impl Buffers {
    /// Creates a buffer for a session, under a number that the session has not used. A node that was dropped ignores
    /// it.
    ///
    /// # Errors
    /// No memory.
    pub fn give(&self, session: u64, number: u64) -> Result<OwnedFd> {
        give_buffer(&self.to_network, session, number)
    }
}

/// The session of a process of a node. The node's number is a part of it.
pub fn session_of(node: NodeId, number: u64) -> u64 {
    super::session_id::session_on(node, number)
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shard_thread = None;
        // SAFETY: from `Box::into_raw`, freed only here, after its borrower was dropped.
        drop(unsafe { Box::from_raw(self.shard) });
    }
}
