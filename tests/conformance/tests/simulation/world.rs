//! Nodes, clients and the faults between them, on one simulated network with one clock, from one seed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use forebay_data::{Media, Target};
use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{CallsSettings, Numbers};
use forebay_ring::{memfd_sealed, Doorbell, Seal};
use forebay_server::stepped::{session_of, Keeper, Moment, Node, Planted, Setup};
use forebay_server::FLIGHT_RECORDER_BYTES;
use forebay_types::{Ino, NodeId};
use forebay_wire::Secret;
use serde_json::Value;

use crate::backing::Front;
use crate::baton::{self, Process, NOW_NS};
use crate::client::{Client, Common, Defect, Plan};
use crate::door::{Desk, Handout};
use crate::history::{Op, Outcome, Recorder};
use crate::words::{Words, HOME};

const SHARD_BYTES: u64 = 64 << 20;
/// The longest time in which the pool settles once there are no more faults. It is longer than the longest deadline.
const SETTLE: Duration = Duration::from_secs(90);

/// The time in which nodes notify each other of processes that ended.
const ENDS: Duration = Duration::from_secs(3);

/// Supervisors collect the descriptors that workers store with them once in so many turns. That is often enough that no
/// worker waits for room.
const COLLECT_TURNS: u64 = 16;

/// Marks the number of a daemon's own session, which also contains the count of its starts.
const DAEMONS: u64 = 1 << 47;

/// The parameters of a history.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plot {
    pub(crate) seed: u64,
    pub(crate) nodes: u16,
    pub(crate) clients_per_node: usize,
    /// The node that has no target, if there is one.
    pub(crate) without_target: Option<u16>,
    /// The number of turns with faults.
    pub(crate) turns: u64,
    pub(crate) planted: Option<Defect>,
    pub(crate) much_data: bool,
    pub(crate) locks: bool,
    /// Many operations read or write files' blocks.
    pub(crate) blocks: bool,
    /// Clients execute atomic operations on a word of a volume.
    pub(crate) words: bool,
    /// The pool stands in front of a backing store; its programs are those of `backing`.
    pub(crate) backing: bool,
}

/// A host of the network, with the state that outlives its worker.
pub(crate) struct Host {
    pub(crate) number: u16,
    pub(crate) node: Option<Node>,
    pub(crate) stopped: bool,
    target: Arc<OwnedFd>,
    device: u64,
    recorder: OwnedFd,
    doorbell: Arc<OwnedFd>,
    keeper: Keeper,
    pub(crate) rings: BTreeMap<u64, Arc<OwnedFd>>,
    starts: u64,
    /// The moment of a round at which the shard thread is killed next, and how many times it passes that moment first.
    doom: Rc<Cell<Option<(Moment, u32)>>>,
}

/// The panic payload of a killed shard thread.
struct Killed;

pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) numbers: Numbers,
    pub(crate) hosts: Vec<Host>,
    pub(crate) clients: Vec<Client>,
    pub(crate) recorder: Recorder,
    pub(crate) desk: Desk,
    pub(crate) dir: PathBuf,
    plot: Plot,
    cuts: BTreeSet<(u32, u32)>,
    pub(crate) chaos: bool,
    turns: u64,
    /// What a pool in front of a store has in addition.
    pub(crate) front: Option<Front>,
    pub(crate) words: Option<Words>,
}

/// Removes the nodes' targets, also after a panic.
impl Drop for World {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.node = None;
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn address(node: u16) -> Vec<u8> {
    format!("simulated:{node}").into_bytes()
}

fn open_directory(path: &Path) -> OwnedFd {
    File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).into()
}

impl World {
    /// A pool that has just been started. Its targets are in the new directory `dir`, which `drop` removes.
    pub(crate) fn new(plot: Plot, dir: PathBuf, recorder: Recorder) -> World {
        let faults = Faults {
            delay: (Duration::from_micros(5), Duration::from_millis(2)),
            drop_permille: 15,
            duplicate_permille: 20,
            reorder: true,
            give_up: Duration::from_millis(30),
        };
        std::fs::create_dir(&dir).unwrap_or_else(|e| panic!("cannot make {}: {e}", dir.display()));
        NOW_NS.store(0, Ordering::Relaxed);
        let mut world = World {
            network: Network::new(plot.seed, faults),
            numbers: Numbers::new(plot.seed ^ 0x5eed),
            hosts: Vec::new(),
            clients: Vec::new(),
            recorder: recorder.clone(),
            desk: Desk::default(),
            dir,
            plot,
            cuts: BTreeSet::new(),
            chaos: true,
            turns: 0,
            front: None,
            words: plot.words.then(|| Words::new(recorder.clone())),
        };
        for number in 1..=plot.nodes {
            world.add_host(number);
            world.start(usize::from(number) - 1);
        }
        if plot.backing {
            let mut front = Front::new(plot.seed, &world.dir, plot.nodes);
            for number in 1..=plot.nodes {
                for _ in 0..plot.clients_per_node {
                    front.add_program(&mut world, number);
                }
            }
            world.front = Some(front);
            return world;
        }
        let common = Common::new(recorder, &plot, world.words.clone());
        for number in 1..=plot.nodes {
            for _ in 0..plot.clients_per_node {
                world.add_client(number, &common);
            }
        }
        world
    }

    fn add_host(&mut self, number: u16) {
        let path = self.dir.join(format!("target{number}"));
        std::fs::create_dir(&path).unwrap();
        let target = open_directory(&path);
        Target::format(&target).unwrap_or_else(|e| panic!("{e}"));
        std::fs::create_dir_all(path.join("shard")).unwrap();
        let (recorder, _) =
            memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, Seal::Size).expect("a memfd");
        let (doorbell, _) = Doorbell::create().expect("a doorbell");
        self.hosts.push(Host {
            number,
            node: None,
            stopped: false,
            target: Arc::new(target),
            device: std::fs::metadata(&path).unwrap().dev(),
            recorder,
            doorbell: Arc::new(doorbell),
            keeper: Keeper::default(),
            rings: BTreeMap::new(),
            starts: 0,
            doom: Rc::default(),
        });
    }

    /// Attaches a process to a node. Returns the directory with the socket at which it attaches.
    pub(crate) fn add_process(&mut self, number: u16, session: u64, name: &str) -> PathBuf {
        let host = &mut self.hosts[usize::from(number) - 1];
        let node = host.node.as_mut().expect("started before its clients");
        let ring = node.attach(session).unwrap_or_else(|e| panic!("{e}"));
        host.rings.insert(session, Arc::new(ring));
        self.lay_out(usize::from(number) - 1);
        let dir = self.dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        self.desk.open_door(&dir, session);
        dir
    }

    /// Ends a process: first its files are closed, then its node is notified.
    pub(crate) fn end_process(&mut self, host: usize, session: u64, process: &Process) {
        self.hosts[host].rings.remove(&session);
        self.desk.handouts().remove(&session);
        process.kill();
        if let Some(node) = &mut self.hosts[host].node {
            node.end(session);
        }
    }

    fn add_client(&mut self, number: u16, common: &Common) {
        let index = self.clients.len();
        let session = session_of(NodeId(number), index as u64 + 1);
        let dir = self.add_process(number, session, &format!("client{index}"));
        let seed = self.numbers.draw();
        self.clients.push(Client::start(index, number, session, dir, seed, common.clone()));
    }

    /// Puts on the desk what a host's clients may request.
    pub(crate) fn lay_out(&mut self, host: usize) {
        let host = &self.hosts[host];
        let mut handouts = self.desk.handouts();
        for (session, ring) in &host.rings {
            handouts.remove(session);
            let Some(node) = &host.node else { continue };
            let handout = Handout {
                reply: node.attach_reply(*session, host.device),
                ring: Arc::clone(ring),
                doorbell: Arc::clone(&host.doorbell),
                board: Arc::new(node.board().try_clone_to_owned().unwrap()),
                target: Arc::clone(&host.target),
                buffers: node.buffers(),
            };
            handouts.insert(*session, handout);
        }
    }

    fn start(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        host.starts += 1;
        let number = host.number;
        let others = (1..=self.plot.nodes).filter(|n| *n != number).map(|n| (NodeId(n), address(n)));
        let setup = Setup {
            node: NodeId(number),
            others: others.collect(),
            without_target: self.plot.without_target.map(NodeId).into_iter().collect(),
            endpoint: Box::new(self.network.endpoint(u32::from(number))),
            calls: CallsSettings {
                seed: Some(self.plot.seed * 1000 + u64::from(number) * 37 + host.starts * 7919),
                unreachable: Duration::from_secs(3),
                resend: Duration::from_millis(300),
                quiet: Duration::from_millis(500),
                ..CallsSettings::default()
            },
            secret: Secret::new(&(0..32).collect::<Vec<u8>>()).expect("32 bytes"),
            target: host.target.as_fd(),
            shard_bytes: SHARD_BYTES,
            flight_recorder: host.recorder.as_fd(),
            doorbell: host.doorbell.as_fd(),
            keeper: Some(&mut host.keeper),
            rings: host.rings.iter().map(|(id, ring)| (*id, ring.try_clone().unwrap())).collect(),
            epoch: host.starts,
            clock: baton::timestamp,
            planted: match self.plot.planted {
                Some(Defect::ForgetsReplies) => Some(Planted::ForgottenReplies),
                Some(Defect::ForgetsAppends) => Some(Planted::ForgottenAppends),
                Some(Defect::ForgetsAtomics) => Some(Planted::ForgottenAtomics),
                Some(Defect::ForgetsLocks) => Some(Planted::ForgottenLocks),
                Some(Defect::ForgetsTurns) => Some(Planted::ForgottenTurns),
                Some(Defect::TrustsPlaces) => Some(Planted::TrustedCanaries),
                _ => None,
            },
            kernel: None,
            piece: self.words.as_ref().filter(|_| number == HOME).map(Words::piece),
        };
        let mut node = Node::start(setup).unwrap_or_else(|e| panic!("node {number} does not start: {e}"));
        host.doom.set(None);
        let doom = Rc::clone(&host.doom);
        node.watch(Box::new(move |moment| {
            match doom.get() {
                Some((at, 0)) if at == moment => resume_unwind(Box::new(Killed)),
                Some((at, n)) if at == moment => doom.set(Some((at, n - 1))),
                _ => {}
            }
            Ok(())
        }));
        host.node = Some(node);
        host.stopped = false;
        self.recorder.started(number);
        self.lay_out(index);
    }

    fn kill(&mut self, index: usize, why: &str) {
        let host = &mut self.hosts[index];
        if host.node.is_none() {
            return;
        }
        self.network.kill(u32::from(host.number));
        host.node = None;
        host.stopped = false;
        self.recorder.tell(format!("node {} is killed{why}", host.number));
        self.lay_out(index);
    }

    /// Injects a fault, or repairs one.
    fn trouble(&mut self) {
        let index = self.numbers.below(self.hosts.len() as u64) as usize;
        let number = u32::from(self.hosts[index].number);
        match self.numbers.below(20) {
            0..=1 => {
                let other = self.numbers.below(self.hosts.len() as u64) as u32 + 1;
                let pair = (number.min(other), number.max(other));
                if pair.0 != pair.1 && self.cuts.insert(pair) {
                    self.network.cut(pair.0, pair.1, true);
                    self.recorder.tell(format!("nodes {} and {} are cut off", pair.0, pair.1));
                }
            }
            2..=5 => {
                if let Some(pair) = self.cuts.pop_first() {
                    self.network.cut(pair.0, pair.1, false);
                    self.recorder.tell(format!("nodes {} and {} are joined", pair.0, pair.1));
                }
            }
            6..=7 => self.kill(index, ""),
            8..=10 => {
                // The shard thread is killed when it reaches this moment of a later round.
                const MOMENTS: [Moment; 5] = [
                    Moment::Journaled,
                    Moment::Published,
                    Moment::Answered,
                    Moment::Committing,
                    Moment::Committed,
                ];
                let at = MOMENTS[self.numbers.below(MOMENTS.len() as u64) as usize];
                self.hosts[index].doom.set(Some((at, self.numbers.below(3) as u32)));
            }
            11..=15 => {
                if self.hosts[index].node.is_none() {
                    self.start(index);
                }
            }
            16 => self.pause(index, true),
            17..=18 => self.pause(index, false),
            _ => {
                // Few clients are killed, so that the others continue.
                if self.numbers.chance(100) && !self.clients.is_empty() {
                    let client = self.numbers.below(self.clients.len() as u64) as usize;
                    self.kill_client(client);
                }
            }
        }
    }

    fn pause(&mut self, index: usize, stopped: bool) {
        let host = &mut self.hosts[index];
        if host.node.is_some() && host.stopped != stopped {
            host.stopped = stopped;
            self.network.stop(u32::from(host.number), stopped);
            let what = if stopped { "is stopped" } else { "goes on" };
            self.recorder.tell(format!("node {} {what}", host.number));
        }
    }

    fn kill_client(&mut self, index: usize) {
        let client = &mut self.clients[index];
        // The first client of each node lives on, to read the whole tree at the end.
        let first = index.is_multiple_of(self.plot.clients_per_node);
        if client.killed || first {
            return;
        }
        client.killed = true;
        let session = client.session;
        let host = &mut self.hosts[usize::from(client.node) - 1];
        host.rings.remove(&session);
        self.desk.handouts().remove(&session);
        if let Some(node) = &mut host.node {
            node.end(session);
        }
        self.recorder.tell(format!("client {index} is killed"));
        client.locked.end();
        // Its locks are released at some later time.
        for ino in self.recorder.locked(index) {
            self.recorder.asked(index, 0, &Op::Unlock { ino, client: index });
        }
    }

    /// Runs rounds of a node's threads, each with its own probability.
    fn run_host(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        let Some(node) = host.node.as_mut().filter(|_| !host.stopped) else { return };
        let (numbers, backing) = (&mut self.numbers, self.plot.backing);
        let rounds = AssertUnwindSafe(|| -> forebay_types::Result<()> {
            if numbers.chance(800) {
                node.communicate();
            }
            if numbers.chance(800) {
                node.serve()?;
            }
            if numbers.chance(500) && !backing {
                node.serve_data(|n| numbers.below(n as u64) as usize);
            }
            if numbers.chance(300) {
                node.sweep();
            }
            if numbers.chance(40) {
                node.rest()?;
            }
            Ok(())
        });
        match catch_unwind(rounds) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => panic!("node {} cannot go on: {e}", host.number),
            Err(panic) if panic.is::<Killed>() => {
                let why = format!(" when it is {:?}", host.doom.get().map(|(at, _)| at));
                self.kill(index, &why);
            }
            Err(panic) => resume_unwind(panic),
        }
    }

    fn turn(&mut self) {
        self.network.turn();
        NOW_NS.store(self.network.now().as_nanos() as u64, Ordering::Relaxed);
        if self.chaos && self.numbers.chance(8) {
            self.trouble();
        }
        let first = self.numbers.below(self.hosts.len() as u64) as usize;
        for i in 0..self.hosts.len() {
            self.run_host((first + i) % self.hosts.len());
        }
        self.turns += 1;
        if self.turns.is_multiple_of(COLLECT_TURNS) {
            self.hosts.iter_mut().for_each(|host| host.keeper.collect().unwrap_or_else(|e| panic!("{e}")));
        }
        if let Some(mut front) = self.front.take() {
            front.turn(self);
            self.front = Some(front);
            return;
        }
        if self.clients.is_empty() {
            return;
        }
        let first = self.numbers.below(self.clients.len() as u64) as usize;
        for i in 0..self.clients.len() {
            let client = &self.clients[(first + i) % self.clients.len()];
            if client.killed {
                continue;
            }
            let runs = if client.baton.is_ready() {
                client.plan() != Plan::Anything || (self.chaos && self.numbers.chance(100))
            } else {
                client.baton.is_woken() && self.numbers.chance(700)
            };
            if runs {
                client.baton.pass();
            }
        }
    }

    /// Runs the turns with faults.
    pub(crate) fn run(&mut self) {
        for _ in 0..self.plot.turns {
            self.turn();
        }
    }

    fn until(&mut self, what: &str, done: impl Fn(&World) -> bool) {
        let end = self.network.now() + SETTLE;
        while !done(self) {
            self.turn();
            assert!(self.network.now() < end, "{what} takes for ever");
        }
    }

    /// Runs turns until `done`, for this time at most.
    pub(crate) fn until_front(
        &mut self,
        front: &mut Front,
        what: &str,
        limit: Duration,
        done: impl Fn(&Front) -> bool,
    ) -> Result<(), String> {
        let end = self.network.now() + limit;
        while !done(front) {
            self.turn();
            front.turn(self);
            if self.network.now() >= end {
                return Err(format!("{what} takes for ever"));
            }
        }
        Ok(())
    }

    /// Repairs all faults of nodes and network.
    pub(crate) fn repair(&mut self) {
        self.recorder.tell("everything is put right".to_owned());
        self.chaos = false;
        while let Some((a, b)) = self.cuts.pop_first() {
            self.network.cut(a, b, false);
        }
        for index in 0..self.hosts.len() {
            self.pause(index, false);
            if self.hosts[index].node.is_none() {
                self.start(index);
            }
            self.hosts[index].doom.set(None);
        }
        self.network.set_faults(Faults::NONE);
    }

    /// Repairs all faults, waits until all operations in progress have ended, and has a client of each node read the
    /// whole tree.
    pub(crate) fn heal(&mut self) {
        self.repair();
        let at_rest = |c: &Client| c.killed || c.baton.is_ready() || c.baton.has_ended();
        self.until("what is under way", |world| world.clients.iter().all(at_rest));
        // 15 s is the longest that the daemons' own work and a link's pause between two attempts take.
        let settled = self.network.now() + Duration::from_secs(15);
        self.until("settling", |world| world.network.now() >= settled);
        for host in &mut self.hosts {
            host.node.as_mut().expect("started above").review_sessions();
        }
        // The lock requests of killed clients are over by now, and their locks are free.
        self.until("ends of processes", |world| world.network.now() >= settled + ENDS);
        let (locks, ends): (Vec<usize>, Vec<usize>) = self
            .recorder
            .unanswered_locks(|client| self.clients[client].killed)
            .into_iter()
            .partition(|index| matches!(self.recorder.history().entries[*index].op, Op::Lock { .. }));
        locks.into_iter().for_each(|index| self.recorder.is_over(index));
        ends.into_iter().for_each(|index| self.recorder.answered(index, Outcome::Done));
        let mut history = self.recorder.history();
        history.settled = Some(history.entries.len());
        drop(history);
        for index in (0..self.clients.len()).step_by(self.plot.clients_per_node) {
            self.clients[index].set_plan(Plan::LookAtAll);
            self.until("looking at everything", |world| world.clients[index].baton.has_ended());
        }
        for client in self.clients.iter().filter(|c| !c.killed) {
            client.set_plan(Plan::End);
        }
        self.until("ending", |world| world.clients.iter().all(|c| c.killed || c.baton.has_ended()));
    }

    /// The report of each node's check, in order.
    pub(crate) fn check_nodes(&mut self) -> Vec<Value> {
        let check = |host: &mut Host| {
            let node = host.node.as_mut().expect("started by `heal`");
            while node.sweep() {}
            node.check().unwrap_or_else(|e| panic!("{e}"))
        };
        self.hosts.iter_mut().map(check).collect()
    }

    /// The backing files on each node that belong to other nodes' inodes. No node's own check can tell whether those
    /// inodes exist.
    pub(crate) fn foreign_backing_files(&self) -> Vec<(u16, Ino)> {
        let mut all = Vec::new();
        for host in &self.hosts {
            let target = Target::open(host.target.as_fd(), u32::from(host.number) << 16).expect("formatted");
            let each = &mut |ino: Ino, _, _| {
                all.extend((ino.birth_node().0 != host.number).then_some((host.number, ino)));
                Ok(())
            };
            target.for_each(each).unwrap_or_else(|code| panic!("cannot list a target: {code}"));
        }
        all
    }

    /// The sessions for which nodes keep replies, and the sessions of live processes.
    pub(crate) fn sessions(&mut self) -> (BTreeSet<u64>, BTreeSet<u64>) {
        let mut kept = BTreeSet::new();
        for host in &mut self.hosts {
            let node = host.node.as_mut().expect("started by `heal`");
            kept.extend(node.kept_sessions().unwrap_or_else(|e| panic!("{e}")));
        }
        let live = self.clients.iter().filter(|c| !c.killed).map(|c| c.session);
        // Daemons also send requests to each other, in one session for each worker.
        let daemons = self.hosts.iter().map(|h| session_of(NodeId(h.number), DAEMONS | h.starts));
        (kept, live.chain(daemons).collect())
    }
}
