//! The network thread's state, and what all of its parts need: messages to the shard thread, and replies to clients.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{CallId, Calls};
use forebay_types::limits::NODE_TIMEOUT_MS;
use forebay_types::{Code, NodeId, Reply};
use forebay_wire::Stamp;
use serde_json::Value;

use super::flights::{Flight, Introduced};
use super::local_clients::LocalClients;
use super::moves::Moves;
use super::served::Served;
use crate::worker::message::Message;
use crate::worker::network::away_volumes::AwayVolumes;
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
use crate::worker::statistics::Statistics;

/// How long another node may take to answer.
pub(super) const NODE_TIMEOUT: Duration = Duration::from_millis(NODE_TIMEOUT_MS);
/// Bytes of a reply that is made here: numbers.
pub(super) const SHORT_REPLY_BYTES: usize = 64;

/// A node of the pool, as it is shown to users.
#[derive(Debug)]
pub(in crate::worker) struct Member {
    pub(in crate::worker) node: NodeId,
    pub(in crate::worker) name: String,
    pub(in crate::worker) host: String,
    /// The medium of each target.
    pub(in crate::worker) media: Vec<String>,
}

/// The thread's state.
pub(in crate::worker) struct NetworkThread {
    pub(super) calls: Calls,
    pub(super) me: NodeId,
    /// All nodes of the pool.
    pub(super) members: Vec<Member>,
    /// Whether each node is up, and since when.
    pub(super) states: HashMap<NodeId, (bool, Duration)>,
    /// Why a node cannot be reached.
    pub(super) failures: HashMap<NodeId, String>,
    /// The last incarnation of each node that was reached.
    pub(super) starts: HashMap<NodeId, u64>,
    pub(super) commands: Receiver<Command>,
    /// Commands that the calls have no room for.
    pub(super) backlog: VecDeque<Command>,
    pub(super) to_shard: Sender<Message>,
    pub(super) jobs: Jobs,
    /// Reads short data in this thread, where backing files are in memory.
    pub(super) io_worker: Option<IoWorker>,
    /// What the I/O workers keep open for processes of other nodes.
    pub(super) kept: Arc<KeptOpen>,
    pub(super) flights: HashMap<CallId, Flight>,
    pub(super) statistics: Arc<Statistics>,
    /// The processes of this node, and their data requests in progress.
    pub(super) clients: LocalClients,
    pub(super) removals: Removals,
    pub(super) renewals: Renewals,
    /// The last change to a backing file of each slot of each session.
    pub(super) served: HashMap<(u64, u16), Served>,
    /// Data transfers.
    pub(super) moves: Moves,
    /// Processes of other nodes that have ended.
    pub(super) ended: Ended,
    /// Requests for the status of all nodes.
    pub(super) surveyors: Vec<Sender<Value>>,
    pub(super) met: MetNodes,
    /// A node with new data introduces itself at the start: the receiver of the result, and whether to all nodes.
    pub(super) introduction: Option<(Sender<Introduced>, bool)>,
    /// This node's data are new: another node may refuse them at any time.
    pub(super) is_new: bool,
    /// Nodes that have not replied to the introduction, and when it is sent again.
    pub(super) introduce_at: BTreeMap<NodeId, Duration>,
    pub(super) space_map: SpaceMap,
    /// Volumes of other homes with pieces here.
    pub(super) away_volumes: AwayVolumes,
    /// When the other nodes are next asked which of their processes live.
    pub(super) review_at: Duration,
    /// Since when the node of a process could not be asked.
    pub(super) unreached: HashMap<u64, Duration>,
    /// The session of the daemon's own requests.
    pub(super) session: u64,
    pub(super) sequence: u64,
    /// A message was sent to the shard thread.
    pub(super) told: bool,
    /// When the thread wakes if no event arrives.
    pub(super) sleeps_until: Option<Duration>,
    /// Another thread has executed the command to stop.
    pub(super) stopped: bool,
    /// Another thread runs the rounds.
    pub(super) helps: bool,
    /// That thread left work that this one must do.
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
            statistics: Arc::default(),
            clients: LocalClients::default(),
            removals: Removals::default(),
            renewals: Renewals::default(),
            served: HashMap::new(),
            moves: Moves::default(),
            ended: Ended::default(),
            surveyors: Vec::new(),
            met: MetNodes::default(),
            introduction: None,
            is_new: false,
            introduce_at: BTreeMap::new(),
            space_map: SpaceMap::new(me, target_nodes),
            away_volumes: AwayVolumes::default(),
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

    /// Sets the number of targets of each node, which is one otherwise.
    pub(in crate::worker) fn with_targets(mut self, target_nodes: Vec<TargetNode>) -> NetworkThread {
        self.space_map = SpaceMap::new(self.me, target_nodes);
        self
    }

    /// Sets where data requests are counted.
    pub(in crate::worker) fn with_statistics(mut self, statistics: Arc<Statistics>) -> NetworkThread {
        self.statistics = statistics;
        self
    }

    /// Makes the thread itself read what is short and in memory.
    pub(in crate::worker::network) fn with_io_worker(mut self, io_worker: Option<IoWorker>) -> NetworkThread {
        self.io_worker = io_worker;
        self
    }

    /// Sets the record of which data each node has. A node with new data introduces itself.
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

    #[cfg(any(test, feature = "simulation"))]
    /// Sets the addresses of the nodes. A node that joins from one of them under another number replaces the node
    /// listed.
    pub(in crate::worker) fn with_addresses(mut self, listed: &[(NodeId, Vec<u8>)]) -> NetworkThread {
        listed.iter().for_each(|(node, address)| self.met.set_address(node.0, address));
        self
    }

    #[cfg(any(test, feature = "simulation"))]
    /// Plants a defect: canaries are not checked.
    pub(in crate::worker) fn trust_canaries(&mut self) {
        self.moves.granted.trusts_canaries = true;
    }

    /// Sends the shard thread a message.
    pub(super) fn tell(&mut self, message: Message) {
        // The shard thread outlives this one.
        let _ = self.to_shard.send(message);
        self.told = true;
    }

    /// Answers a client's request that was served here.
    pub(super) fn answered_with(&mut self, stamp: Stamp, reply: Result<Reply<'_>, Code>) {
        let mut bytes = [0; SHORT_REPLY_BYTES];
        let reply = Reply::encode(&reply, &mut bytes).map(|n| &bytes[..n]);
        self.answered(stamp, reply);
    }

    /// Answers the slot of a client whose request this thread has taken, or passes the reply on to the shard thread.
    pub(super) fn answered(&mut self, stamp: Stamp, reply: Result<&[u8], Code>) {
        let mut refusal = [0; 8];
        let reply = reply.unwrap_or_else(|code| {
            let n = Reply::encode(&Err(code), &mut refusal).unwrap_or(0);
            &refusal[..n]
        });
        if !self.clients.answer(stamp, reply) {
            self.tell(Message::Answered { stamp, reply: reply.to_vec() });
        }
    }
}
