//! Three nodes in one process, each with a shard and the driver of its transactions, and a network that may lose
//! messages. Time is a counter; nothing waits. A node that is restarted keeps only its shard.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use forebay_meta::{Act, Client, Effects, Leading, Shard, ShardOptions, Transactions, PAYLOAD_BYTES_MAX};
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{
    Answer, Caller, Code, Entry, Ino, Kind, NodeId, Outcome, Parts, Refusal, Reply, Request, Timestamp,
};

const CALLER: Caller = Caller { uid: 7, gid: 8 };
const NODES: u16 = 3;

/// The contents of a reply, in a form that outlives its buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Said {
    Done,
    /// Number, links, size.
    Inode(Ino, u32, u64),
    Elsewhere(Ino),
    Removed(Ino),
    Bytes(Vec<u8>),
    Part(Ino, Ino, Vec<u8>),
    Names(Vec<(Vec<u8>, Ino)>),
    Other,
}

impl Said {
    fn of(reply: Reply<'_>) -> Said {
        match reply {
            Reply::Done => Said::Done,
            Reply::Entry(e) | Reply::Created { entry: e, .. } => {
                Said::Inode(e.attr.ino, e.attr.nlink, e.attr.size)
            }
            Reply::Elsewhere { ino, .. } => Said::Elsewhere(ino),
            Reply::Removed { ino, .. } => Said::Removed(ino),
            Reply::Bytes(bytes) => Said::Bytes(bytes.to_vec()),
            Reply::PartOfPath { top, parent, path } => Said::Part(top, parent, path.to_vec()),
            Reply::Entries(entries) => {
                let entries = entries.iter().map(Result::unwrap);
                Said::Names(entries.map(|e| (e.name.to_vec(), e.ino)).collect())
            }
            _ => Said::Other,
        }
    }
}

/// The faults of the network.
#[derive(Default)]
pub(crate) struct Network {
    /// Number of messages before the fault, and its kind.
    fault: Option<(u32, u8)>,
    /// Only so many of the messages to this node arrive; further ones are lost.
    pub(crate) lose_to: Option<(NodeId, u32)>,
    /// Another node has the place of this one.
    pub(crate) gone: Option<NodeId>,
    /// After so many messages this node replies that it does not exist.
    pub(crate) denies: Option<(NodeId, u32)>,
}

impl Network {
    /// After so many messages a request or a reply is lost, or a node is restarted.
    pub(crate) fn fault(&mut self, after: u32, what: u8) {
        self.fault = Some((after, what));
    }

    fn next(&mut self) -> Option<u8> {
        let (left, what) = self.fault.as_mut()?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let what = *what;
        self.fault = None;
        Some(what)
    }
}

struct Node {
    shard: Option<Shard>,
    transactions: Transactions,
    dir: PathBuf,
}

/// The nodes, in a directory that is removed with them.
pub(crate) struct Shards {
    place: PathBuf,
    nodes: BTreeMap<u16, Node>,
    pub(crate) network: Network,
    now: Duration,
    starts: u64,
    seq: u64,
    answers: BTreeMap<u64, Vec<u8>>,
    /// Wide directories whose parts are known.
    wide: BTreeMap<u64, Parts>,
    again: VecDeque<(u16, Client, Vec<u8>, Duration)>,
    /// Requests that were executed again because they met a transaction.
    pub(crate) begun_anew: usize,
    /// A planted defect: restarted nodes drop their deliveries.
    pub(crate) forgetful: bool,
}

fn encoded(answer: &Answer<'_>) -> Vec<u8> {
    let mut out = vec![0; MESSAGE_BYTES_MAX];
    let n = Reply::encode_answer(answer, &mut out).unwrap();
    out.truncate(n);
    out
}

impl Shards {
    pub(crate) fn new(name: &str) -> Shards {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let place =
            std::env::temp_dir().join(format!("forebay-shards-{name}-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        let nodes = (1..=NODES).map(|number| {
            let dir = place.join(number.to_string());
            std::fs::create_dir_all(&dir).unwrap();
            let options = ShardOptions {
                node: NodeId(number),
                map_bytes: 64 << 20,
                root_mode: 0o755,
                root_uid: 0,
                root_gid: 0,
            };
            let shard = Some(Shard::create(&dir, &options, Timestamp::default()).unwrap());
            (number, Node { shard, transactions: Transactions::new(NodeId(number), 0), dir })
        });
        let nodes = nodes.collect();
        Shards {
            place,
            nodes,
            network: Network::default(),
            now: Duration::from_secs(1),
            starts: 0,
            seq: 0,
            answers: BTreeMap::new(),
            wide: BTreeMap::new(),
            again: VecDeque::new(),
            begun_anew: 0,
            forgetful: false,
        }
    }

    fn apply(&mut self, node: u16, message: &[u8]) -> Vec<u8> {
        let now = Timestamp { sec: self.now.as_secs() as i64, nsec: 0 };
        let at = self.nodes.get_mut(&node).unwrap();
        let (caller, request) = Request::decode(message).unwrap();
        if let Request::AskOutcome { tx } = request {
            if at.transactions.is_undecided(tx) {
                let mut out = [0; 8];
                let n = Reply::encode(&Ok(Reply::Outcome(Outcome::Undecided)), &mut out).unwrap();
                return out[..n].to_vec();
            }
        }
        let mut batch = at.shard.as_ref().unwrap().begin().unwrap();
        let (mut out, mut effects) = (vec![0; MESSAGE_BYTES_MAX], Effects::new());
        let mut payload = vec![0; PAYLOAD_BYTES_MAX];
        let answer = batch.apply(caller, &request, now, &mut effects, &mut payload);
        let n = Reply::encode_answer(&answer, &mut out).unwrap();
        out.truncate(n);
        let prepared = batch.prepared();
        batch.commit().unwrap();
        at.transactions.deliver(effects.deliveries(), self.now);
        at.transactions.note_prepared(&prepared, self.now);
        out
    }

    /// Restarts a node: everything in its memory is lost.
    fn restart(&mut self, number: u16) {
        self.starts += 1;
        let node = self.nodes.get_mut(&number).unwrap();
        node.shard = None;
        let shard = Shard::open(&node.dir).unwrap();
        node.transactions = Transactions::new(NodeId(number), self.starts << 20);
        let batch = shard.begin().unwrap();
        let (prepared, mut deliveries) = (batch.prepared(), batch.deliveries().unwrap());
        drop(batch);
        if self.forgetful {
            deliveries.clear();
        }
        node.shard = Some(shard);
        node.transactions.resume(&prepared, &deliveries, self.now);
        self.again.retain(|(of, ..)| *of != number);
    }

    /// Executes one act, if there is one.
    fn act(&mut self) -> bool {
        for number in 1..=NODES {
            let Some(act) = self.nodes.get_mut(&number).unwrap().transactions.next_act() else { continue };
            match act {
                Act::Local { flight, message, .. } => {
                    if self.network.next().is_some() {
                        self.restart(number);
                        return true;
                    }
                    let reply = self.apply(number, &message);
                    if self.network.next().is_some() {
                        self.restart(number);
                        return true;
                    }
                    let now = self.now;
                    self.nodes.get_mut(&number).unwrap().transactions.answered(
                        flight,
                        Ok(Reply::decode_answer(&reply)),
                        now,
                    );
                }
                Act::Ask { flight, node, message } => self.carry(number, flight, node, &message),
                Act::Answer { client, answer } => {
                    self.answers.insert(client.seq, encoded(&answer));
                }
                Act::Again { client, message, since } => {
                    self.begun_anew += 1;
                    self.again.push_back((number, client, message, since));
                }
                Act::Settle(delivery) => {
                    let shard = self.nodes[&number].shard.as_ref().unwrap();
                    let mut batch = shard.begin().unwrap();
                    batch.settle(&delivery).unwrap();
                    batch.commit().unwrap();
                }
            }
            return true;
        }
        false
    }

    fn carry(&mut self, from: u16, flight: u64, to: NodeId, message: &[u8]) {
        if let Some((node, left)) = &mut self.network.lose_to {
            if *node == to {
                if *left == 0 {
                    let now = self.now;
                    let node = self.nodes.get_mut(&from).unwrap();
                    return node.transactions.answered(flight, Err(Code::Io), now);
                }
                *left -= 1;
            }
        }
        if self.network.gone == Some(to) {
            let now = self.now;
            let node = self.nodes.get_mut(&from).unwrap();
            return node.transactions.answered(flight, Err(Code::NoDevice), now);
        }
        if let Some((_, left)) = self.network.denies.as_mut().filter(|(node, _)| *node == to) {
            if *left == 0 {
                let now = self.now;
                let node = self.nodes.get_mut(&from).unwrap();
                return node.transactions.answered(flight, Ok(Err(Code::NoDevice.into())), now);
            }
            *left -= 1;
        }
        let lost = |s: &mut Shards| {
            let now = s.now;
            s.nodes.get_mut(&from).unwrap().transactions.answered(flight, Err(Code::Io), now);
        };
        match self.network.next() {
            Some(what) if what % 4 == 0 => return lost(self),
            Some(what) if what % 4 == 1 => return self.restart(from),
            Some(_) => self.restart(to.0),
            None => {}
        }
        let reply = self.apply(to.0, message);
        match self.network.next() {
            Some(what) if what % 2 == 0 => lost(self),
            Some(_) => self.restart(from),
            None => {
                let now = self.now;
                self.nodes.get_mut(&from).unwrap().transactions.answered(
                    flight,
                    Ok(Reply::decode_answer(&reply)),
                    now,
                );
            }
        }
    }

    /// Executes a request at its node. The reply may come at once.
    fn serve(&mut self, node: u16, client: Client, message: &[u8], since: Duration) {
        let (caller, request) = Request::decode(message).unwrap();
        let at = self.nodes.get_mut(&node).unwrap();
        let mut batch = at.shard.as_ref().unwrap().begin().unwrap();
        if batch.must_wait(&request) {
            drop(batch);
            return self.again.push_back((node, client, message.to_vec(), since));
        }
        let all: Vec<NodeId> = (1..=NODES).map(NodeId).collect();
        let plan = batch.plan(&request, &all);
        let plan = plan.map_err(|code| batch.refusal(code));
        drop(batch);
        match plan {
            Err(refusal) => {
                self.answers.insert(client.seq, encoded(&Err(refusal)));
            }
            Ok(Some(plan)) => at.transactions.begin(client, caller, message, plan, since, self.now),
            Ok(None) => {
                let reply = self.apply(node, message);
                self.answers.insert(client.seq, reply);
            }
        }
    }

    /// Sends a request, and executes everything until it has a reply; [`Code::Io`] after 40 s.
    pub(crate) fn ask(&mut self, request: &Request<'_>) -> Result<Said, Code> {
        self.ask_while(request, |_| {})
    }

    /// The same; `meanwhile` runs between the plan and its first step.
    pub(crate) fn ask_while(
        &mut self,
        request: &Request<'_>,
        meanwhile: impl FnOnce(&mut Shards),
    ) -> Result<Said, Code> {
        let here = match request {
            Request::MakeDirectoryAt { node, .. } => *node,
            request => request.node().expect("a request of one node"),
        };
        self.ask_of(here, request, Box::new(meanwhile))
    }

    /// Sends several requests at the same time. Returns their results.
    pub(crate) fn ask_together(&mut self, requests: &[Request<'_>]) -> Vec<Result<Said, Code>> {
        let first = self.seq + 1;
        for request in requests {
            let mut message = vec![0; MESSAGE_BYTES_MAX];
            let n = request.encode(CALLER, &mut message).unwrap();
            self.seq += 1;
            let client = Client { session: 1, slot: 0, seq: self.seq };
            self.serve(request.node().unwrap().0, client, &message[..n], self.now);
        }
        self.settle();
        let replies = (first..=self.seq).map(|seq| self.answers.remove(&seq).expect("all is settled"));
        replies.map(|reply| Reply::decode(&reply).map(Said::of)).collect()
    }

    /// Sends a request that the node must refuse, without first redirecting it to a part. Returns the refusal.
    pub(crate) fn refusal(&mut self, request: &Request<'_>) -> (Code, Option<Parts>) {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let n = request.encode(CALLER, &mut message).unwrap();
        let reply = self.apply(request.node().unwrap().0, &message[..n]);
        match Reply::decode_answer(&reply) {
            Err(Refusal::Wide(parts)) => (Code::Wide, Some(parts)),
            Err(Refusal::Code(code)) => (code, None),
            Ok(other) => panic!("{request:?}: {other:?}"),
        }
    }

    /// [`Shards::ask`] for a process on node `here`.
    fn ask_of(
        &mut self,
        here: NodeId,
        request: &Request<'_>,
        meanwhile: Box<dyn FnOnce(&mut Shards) + '_>,
    ) -> Result<Said, Code> {
        let known = |ino: Ino| self.wide.get(&ino.0).copied();
        let of_parts = request.in_parts(here, known)?;
        let translated = of_parts.unwrap_or(*request);
        let node = translated.node().expect("a request of one node").0;
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let n = translated.encode(CALLER, &mut message).unwrap();
        self.seq += 1;
        let client = Client { session: 1, slot: 0, seq: self.seq };
        self.serve(node, client, &message[..n], self.now);
        meanwhile(self);
        let end = self.now + Duration::from_secs(40);
        let reply = loop {
            while self.act() {}
            if let Some(reply) = self.answers.remove(&client.seq) {
                break reply;
            }
            if self.now >= end {
                return Err(Code::Io);
            }
            self.pass_time();
        };
        // Further acts that the reply caused.
        while self.act() {}
        if let Err(Refusal::Wide(parts)) = Reply::decode_answer(&reply) {
            assert!(self.wide.insert(parts.of.0, parts).is_none(), "{request:?} was told so before");
            return self.ask_of(here, request, Box::new(|_| {}));
        }
        let said = Reply::decode(&reply).map(Said::of)?;
        let (Said::Elsewhere(ino), Request::Rename { parent, name, new_parent, new_name, flags }) =
            (&said, translated)
        else {
            return Ok(said);
        };
        let request = Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino: *ino };
        self.ask_of(here, &request, Box::new(|_| {}))
    }

    /// The entries of a directory; if it is wide, of one part after the other.
    pub(crate) fn list(&mut self, ino: Ino) -> Result<Vec<(Vec<u8>, Ino)>, Code> {
        let list = |s: &mut Shards, ino| {
            let request = Request::ReadDirectory { ino, cookie: 0, attributes: false };
            match s.ask(&request)? {
                Said::Names(names) => Ok(names),
                other => panic!("{other:?}"),
            }
        };
        let first = list(self, ino)?;
        let Some(parts) = self.wide.get(&ino.0).copied() else { return Ok(first) };
        let mut all = first;
        for part in &parts.as_slice()[1..] {
            all.extend(list(self, *part)?);
        }
        Ok(all)
    }

    /// Applies a request between daemons.
    pub(crate) fn apply_at(&mut self, node: NodeId, request: &Request<'_>) -> Result<(), Code> {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let n = request.encode(CALLER, &mut message).unwrap();
        Reply::decode(&self.apply(node.0, &message[..n])).map(drop)
    }

    /// Applies a request that needs one node only, whatever transactions are in progress.
    pub(crate) fn apply_here(&mut self, request: &Request<'_>) {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let n = request.encode(CALLER, &mut message).unwrap();
        let reply = self.apply(request.node().unwrap().0, &message[..n]);
        Reply::decode(&reply).unwrap_or_else(|code| panic!("{request:?}: {code}"));
    }

    fn pass_time(&mut self) {
        self.now += Duration::from_millis(50);
        for node in self.nodes.values_mut() {
            node.transactions.tick(self.now);
        }
        for (node, client, message, since) in std::mem::take(&mut self.again) {
            self.serve(node, client, &message, since);
        }
    }

    /// True when a request must wait.
    pub(crate) fn waits(&mut self, request: &Request<'_>) -> bool {
        let node = request.node().unwrap().0;
        let shard = self.nodes[&node].shard.as_ref().unwrap();
        let mut batch = shard.begin().unwrap();
        batch.must_wait(request)
    }

    /// Ends all faults.
    pub(crate) fn heal(&mut self) {
        self.network = Network::default();
    }

    /// Advances the time until nothing is left to do.
    pub(crate) fn settle(&mut self) {
        for _ in 0..2000 {
            while self.act() {}
            if self.again.is_empty() && self.nodes.values().all(|node| node.transactions.is_idle()) {
                return;
            }
            self.pass_time();
        }
        panic!("something is never over");
    }

    pub(crate) fn inode(&mut self, request: &Request<'_>) -> Ino {
        match self.ask(request) {
            Ok(Said::Inode(ino, ..)) => ino,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    /// The inode that a name leads to.
    pub(crate) fn found(&mut self, parent: Ino, name: &[u8]) -> Option<Ino> {
        self.settle();
        match self.ask(&Request::Lookup { parent, name }) {
            Ok(Said::Inode(ino, ..) | Said::Elsewhere(ino)) => Some(ino),
            _ => None,
        }
    }

    /// Creates a directory on a node.
    pub(crate) fn mkdir(&mut self, node: u16, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        let said = match parent.birth_node() == NodeId(node) {
            true => self.ask(&Request::MakeDirectory { parent, name, mode: 0o750 }),
            false => self.ask(&Request::MakeDirectoryAt { node: NodeId(node), parent, name, mode: 0o750 }),
        };
        said.map(|said| match said {
            Said::Inode(ino, ..) => ino,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn make_directory(&mut self, node: u16, parent: Ino, name: &[u8]) -> Ino {
        self.mkdir(node, parent, name).unwrap()
    }

    pub(crate) fn create(&mut self, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        let request = Request::Create {
            parent,
            name,
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        };
        self.ask(&request).map(|said| match said {
            Said::Inode(ino, ..) => ino,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn orphans(&self, node: u16) -> Vec<Ino> {
        let batch = self.nodes[&node].shard.as_ref().unwrap().begin().unwrap();
        batch.orphans().unwrap().into_iter().map(|(ino, _)| ino).collect()
    }

    /// Every name of every shard and its inode, in the order of parent and name.
    pub(crate) fn names(&mut self) -> Vec<((u64, Vec<u8>), Ino)> {
        let mut names = Vec::new();
        for node in 1..=NODES {
            for to in 1..=NODES {
                self.each_leading(node, to, |l| names.push(((l.parent.0, l.name.to_vec()), l.ino)));
            }
        }
        for ((parent, _), _) in &mut names {
            if Ino(*parent).is_part() {
                *parent = self.look_at(Ino(*parent)).attr.parent.0;
            }
        }
        names.sort();
        names
    }

    fn each_leading(&mut self, node: u16, to: u16, mut each: impl FnMut(&Leading<'_>)) {
        let (mut parent, mut cookie) = (Ino(0), 0);
        loop {
            let mut message = [0; 64];
            let request = Request::LeadsTo { node: NodeId(to), parent, cookie };
            let n = request.encode(CALLER, &mut message).unwrap();
            let reply = self.apply(node, &message[..n]);
            let Ok(Reply::Bytes(bytes)) = Reply::decode(&reply) else { panic!("{reply:?}") };
            if bytes.is_empty() {
                return;
            }
            for leading in Leading::decode_all(bytes) {
                let leading = leading.unwrap();
                each(&leading);
                (parent, cookie) = (leading.parent, leading.cookie);
            }
        }
    }

    /// Checks that every shard is clean and that they agree: every entry leads to an inode, every inode has an entry,
    /// link counts are right, and every directory is below the root.
    pub(crate) fn check(&mut self) {
        self.settle();
        let mut inodes: BTreeMap<u64, (Kind, u32, Ino)> = BTreeMap::new();
        let mut links: BTreeMap<u64, u32> = BTreeMap::new();
        let mut led = Vec::new();
        for number in 1..=NODES {
            let report = self.nodes[&number].shard.as_ref().unwrap().check(&mut |_| {}).unwrap();
            assert!(report.is_clean(), "node {number}: {:?}", report.problems);
            assert_eq!((report.prepared, report.deliveries), (0, 0), "node {number}");
            for to in 1..=NODES {
                self.each_leading(number, to, |l| led.push((l.parent, l.ino)));
            }
        }
        for ino in led.iter().map(|(_, ino)| *ino).chain([Ino::ROOT]) {
            let entry = self.look_at(ino);
            inodes.insert(ino.0, (entry.attr.kind(), entry.attr.nlink, entry.attr.parent));
            *links.entry(ino.0).or_default() += u32::from(ino != Ino::ROOT);
            if !(entry.attr.is_directory() && entry.attr.width_log2 != 0) {
                continue;
            }
            let mut message = [0; 64];
            let n = Request::PartsOf { ino }.encode(CALLER, &mut message).unwrap();
            let reply = self.apply(ino.birth_node().0, &message[..n]);
            let Ok(Reply::Parts(parts)) = Reply::decode(&reply) else { panic!("{ino} has no parts") };
            for part in parts.as_slice() {
                let of = self.look_at(*part);
                assert_eq!((of.attr.mode, of.attr.gid), (entry.attr.mode, entry.attr.gid), "part {part}");
                inodes.insert(part.0, (Kind::Directory, of.attr.nlink, of.attr.parent));
            }
        }
        for (parent, ino) in led {
            let (kind, nlink, above) = inodes[&ino.0];
            if kind == Kind::Directory {
                assert_eq!((links[&ino.0], above), (1, parent), "directory {ino}");
                let mut at = ino;
                for depth in 0.. {
                    assert!(depth < 10_000, "directory {ino} lies in itself");
                    if at == Ino::ROOT {
                        break;
                    }
                    at = inodes[&at.0].2;
                }
            } else {
                assert_eq!(links[&ino.0], nlink, "file {ino}");
            }
        }
        // No inode is without an entry.
        let there: u64 =
            (1..=NODES).map(|n| self.nodes[&n].shard.as_ref().unwrap().statistics().unwrap().inodes).sum();
        assert_eq!(there, inodes.len() as u64, "inodes that nothing leads to");
    }
}

impl Shards {
    /// An inode, which must exist.
    pub(crate) fn look_at(&mut self, ino: Ino) -> Entry {
        let mut message = [0; 64];
        let n = Request::GetAttr { ino }.encode(CALLER, &mut message).unwrap();
        let reply = self.apply(ino.birth_node().0, &message[..n]);
        let Ok(Reply::Entry(entry)) = Reply::decode(&reply) else { panic!("{ino} is not there") };
        entry
    }
}

impl Drop for Shards {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.place);
    }
}
