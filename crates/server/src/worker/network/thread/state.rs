//! What the network thread keeps, and what all of its parts need: to tell the shard thread something, and to answer a
//! client.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{CallId, Calls};
use forebay_types::limits::NODE_TIMEOUT_MS;
use forebay_types::{Code, Ino, NodeId, Reply};
use forebay_wire::Stamp;
use serde_json::Value;

use super::flights::{Flight, Introduced};
use super::moves::Moves;
use super::served::Served;
use crate::worker::message::Message;
use crate::worker::network::commands::Command;
use crate::worker::network::ended::Ended;
use crate::worker::network::io_workers::IoWorker;
use crate::worker::network::jobs::Jobs;
use crate::worker::network::kept::KeptOpen;
use crate::worker::network::lease_renewal::Renewals;
use crate::worker::network::met::MetNodes;
use crate::worker::network::removals::Removals;
use crate::worker::network::target_selection::{SpaceMap, TargetNode};
use crate::worker::session_id::session_on;

/// How long another node may take to answer.
pub(super) const NODE_TIMEOUT: Duration = Duration::from_millis(NODE_TIMEOUT_MS);
/// Room for a reply that is found here: numbers.
pub(super) const SHORT_REPLY_BYTES: usize = 64;

/// A node of the pool, as people know it.
#[derive(Debug)]
pub(in crate::worker) struct Member {
    pub(in crate::worker) node: NodeId,
    pub(in crate::worker) name: String,
    pub(in crate::worker) host: String,
    /// Of each of its targets.
    pub(in crate::worker) media: Vec<String>,
}

/// The thread's state.
pub(in crate::worker) struct NetworkThread {
    pub(super) calls: Calls,
    pub(super) me: NodeId,
    /// Every node.
    pub(super) members: Vec<Member>,
    /// Nodes that were up when they were seen last, or were not, and since when.
    pub(super) states: HashMap<NodeId, (bool, Duration)>,
    /// Why nodes that are not reached are not.
    pub(super) failures: HashMap<NodeId, String>,
    /// Which start of each node was reached last.
    pub(super) starts: HashMap<NodeId, u64>,
    pub(super) commands: Receiver<Command>,
    /// What the calls have no room for.
    pub(super) backlog: VecDeque<Command>,
    pub(super) to_shard: Sender<Message>,
    pub(super) jobs: Jobs,
    /// For what the thread reads itself: where backing files are in memory.
    pub(super) io_worker: Option<IoWorker>,
    /// What the I/O workers keep open for processes of other nodes.
    pub(super) kept: Arc<KeptOpen>,
    pub(super) flights: HashMap<CallId, Flight>,
    pub(super) removals: Removals,
    pub(super) renewals: Renewals,
    /// The last change to a backing file that each session's slot asked for.
    pub(super) served: HashMap<(u64, u16), Served>,
    /// Data that the network moves by itself.
    pub(super) moves: Moves,
    pub(super) removed: VecDeque<Ino>,
    /// Processes of other nodes that are over.
    pub(super) ended: Ended,
    /// Who wants to know how all nodes are.
    pub(super) surveyors: Vec<Sender<Value>>,
    pub(super) met: MetNodes,
    /// New data are introduced at the start: where the answer goes, and whether all are told.
    pub(super) introduction: Option<(Sender<Introduced>, bool)>,
    /// True where the data are new: another node may refuse them at any time.
    pub(super) is_new: bool,
    /// Nodes that have not answered to that, and when they are asked again.
    pub(super) introduce_at: BTreeMap<NodeId, Duration>,
    pub(super) space_map: SpaceMap,
    /// When the other nodes are asked next which of their processes are there.
    pub(super) review_at: Duration,
    /// Since when a process's node could not be asked.
    pub(super) unreached: HashMap<u64, Duration>,
    /// The session of what the daemon asks for itself.
    pub(super) session: u64,
    pub(super) sequence: u64,
    /// The shard thread was told something.
    pub(super) told: bool,
    /// When the thread wakes if nothing comes.
    pub(super) sleeps_until: Option<Duration>,
    /// Another thread met the order to stop.
    pub(super) stopped: bool,
    /// Another thread does these rounds.
    pub(super) helps: bool,
    /// It left something that is this one's.
    pub(super) leaves: bool,
}

impl NetworkThread {
    pub(in crate::worker) fn new(
        calls: Calls,
        me: NodeId,
        members: Vec<Member>,
        commands: Receiver<Command>,
        to_shard: Sender<Message>,
        (jobs, kept): (Jobs, Arc<KeptOpen>),
    ) -> NetworkThread {
        let target_nodes =
            members.iter().map(|member| TargetNode { node: member.node, targets: 1 }).collect();
        let removed = kept.appended.removed();
        NetworkThread {
            calls,
            me,
            members,
            states: HashMap::new(),
            failures: HashMap::new(),
            starts: HashMap::new(),
            commands,
            backlog: VecDeque::new(),
            to_shard,
            jobs,
            io_worker: None,
            kept,
            flights: HashMap::new(),
            removals: Removals::default(),
            renewals: Renewals::default(),
            served: HashMap::new(),
            moves: Moves::default(),
            removed,
            ended: Ended::default(),
            surveyors: Vec::new(),
            met: MetNodes::default(),
            introduction: None,
            is_new: false,
            introduce_at: BTreeMap::new(),
            space_map: SpaceMap::new(me, target_nodes),
            review_at: Duration::ZERO,
            unreached: HashMap::new(),
            session: session_on(me, 0),
            sequence: 0,
            told: false,
            sleeps_until: None,
            stopped: false,
            helps: false,
            leaves: false,
        }
    }

    /// How many targets each node has; without this it is one.
    pub(in crate::worker) fn with_targets(mut self, target_nodes: Vec<TargetNode>) -> NetworkThread {
        self.space_map = SpaceMap::new(self.me, target_nodes);
        self
    }

    /// Reads by itself what is short and in memory.
    pub(in crate::worker::network) fn with_io_worker(mut self, io_worker: Option<IoWorker>) -> NetworkThread {
        self.io_worker = io_worker;
        self
    }

    /// Remembers which data nodes are met with; a node with new data introduces itself.
    pub(in crate::worker::network) fn with_met(
        mut self,
        met: MetNodes,
        introduction: Option<(Sender<Introduced>, bool)>,
    ) -> NetworkThread {
        self.met = met;
        self.is_new = introduction.is_some();
        self.introduction = introduction;
        self
    }

    /// Has a node that comes from one of these addresses under another number taken the place of the one listed.
    pub(in crate::worker) fn with_addresses(mut self, listed: &[(NodeId, Vec<u8>)]) -> NetworkThread {
        listed.iter().for_each(|(node, address)| self.met.set_address(node.0, address));
        self
    }

    /// A defect: data are taken for there without a look.
    pub(in crate::worker) fn trust_canaries(&mut self) {
        self.moves.granted.trusts_canaries = true;
    }

    /// Tells the shard thread something.
    pub(super) fn tell(&mut self, message: Message) {
        // The shard thread outlives this one.
        let _ = self.to_shard.send(message);
        self.told = true;
    }

    /// A client's request has an answer that was found here.
    pub(super) fn answered_with(&mut self, stamp: Stamp, reply: Result<Reply<'_>, Code>) {
        let mut bytes = [0; SHORT_REPLY_BYTES];
        let reply = Reply::encode(&reply, &mut bytes).map(|n| bytes[..n].to_vec());
        self.answered(stamp, reply);
    }

    /// A client's request has its answer.
    pub(super) fn answered(&mut self, stamp: Stamp, reply: Result<Vec<u8>, Code>) {
        let reply = reply.unwrap_or_else(|code| {
            let mut bytes = [0; 8];
            let n = Reply::encode(&Err(code), &mut bytes).unwrap_or(0);
            bytes[..n].to_vec()
        });
        self.tell(Message::Answered { stamp, reply });
    }
}
