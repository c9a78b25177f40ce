//! Counters that are incremented over a faulty network, and a model of their possible values.
//!
//! Servers keep counters and, as a shard does, the last reply of each (session, slot): they answer a retry and do not
//! execute it again. Hosts are cut off, stopped, killed and started again; a server's state survives that. The model:
//! an acknowledged increment happened once, a failed one happened at most once, and no value was returned twice. At the
//! end all faults are repaired, and every server must answer again. A server with a planted defect shows that the model
//! detects it.
//!
//! `FOREBAY_SEEDS=1000 cargo test -p forebay-fabric --test simulation` runs more seeds; `FOREBAY_SEED=17` repeats one.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::Duration;

use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{CallEvent, CallId, Calls, CallsSettings, Identity, Numbers};
use forebay_types::{Caller, Code, Ino, NodeId, Refusal, Reply, Request};
use forebay_wire::{Message, Secret, Stamp};

const SERVERS: u16 = 3;
const CLIENTS: u16 = 2;
const SLOTS: u16 = 4;

/// The state that a server's shard would hold.
#[derive(Default)]
struct Kept {
    counters: BTreeMap<u64, u64>,
    replies: BTreeMap<(u64, u16), (u64, u64)>,
}

/// A node while it is alive.
struct Node {
    calls: Option<Calls>,
    stopped: bool,
    start: u64,
}

/// A slot of a client.
#[derive(Default)]
struct Slot {
    sequence: u64,
    /// The call in progress: its ID, its counter, its server.
    call: Option<(CallId, u64, u16)>,
}

#[derive(Default)]
struct Model {
    /// By counter: acknowledged increments in `certain`, failed ones, which may have happened, in `doubtful`.
    certain: BTreeMap<u64, u64>,
    doubtful: BTreeMap<u64, u64>,
    given: BTreeSet<(u64, u64)>,
    answered: u64,
    failed: u64,
}

struct World {
    network: Network,
    numbers: Numbers,
    nodes: Vec<Node>,
    kept: Vec<Kept>,
    slots: Vec<Vec<Slot>>,
    model: Model,
    seed: u64,
    planted: bool,
    chaos: bool,
    cuts: BTreeSet<(u32, u32)>,
}

/// Servers are nodes 1 to 3, clients follow.
fn is_server(node: usize) -> bool {
    node < SERVERS as usize
}

impl World {
    fn new(seed: u64, planted: bool) -> World {
        let faults = Faults {
            delay: (Duration::from_micros(5), Duration::from_millis(3)),
            drop_permille: 20,
            duplicate_permille: 20,
            reorder: true,
            give_up: Duration::from_millis(30),
        };
        let count = (SERVERS + CLIENTS) as usize;
        let mut world = World {
            network: Network::new(seed, faults),
            numbers: Numbers::new(seed ^ 0xabcd),
            nodes: (0..count).map(|_| Node { calls: None, stopped: false, start: 0 }).collect(),
            kept: (0..SERVERS).map(|_| Kept::default()).collect(),
            slots: (0..CLIENTS).map(|_| (0..SLOTS).map(|_| Slot::default()).collect()).collect(),
            model: Model::default(),
            seed,
            planted,
            chaos: true,
            cuts: BTreeSet::new(),
        };
        for node in 0..count {
            world.start(node);
        }
        world
    }

    fn start(&mut self, node: usize) {
        self.nodes[node].start += 1;
        let number = node as u16 + 1;
        let identity = Identity { pool: [1; 16], node: NodeId(number), capacity_bytes: 0 };
        let settings = CallsSettings {
            seed: Some(self.seed * 1000 + node as u64 * 37 + self.nodes[node].start * 7_919),
            unreachable: Duration::from_secs(3),
            resend: Duration::from_millis(300),
            quiet: Duration::from_millis(500),
            ..CallsSettings::default()
        };
        let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap();
        let endpoint = Box::new(self.network.endpoint(u32::from(number)));
        let mut calls = Calls::new(endpoint, identity, secret, settings);
        if !is_server(node) {
            for server in 1..=SERVERS {
                calls.add_node(NodeId(server), format!("simulated:{server}").as_bytes()).unwrap();
            }
        }
        self.nodes[node].calls = Some(calls);
    }

    /// Causes a fault, or repairs one.
    fn trouble(&mut self) {
        let node = self.numbers.below(self.nodes.len() as u64) as usize;
        let host = node as u32 + 1;
        match self.numbers.below(10) {
            0..=2 => {
                let other = self.numbers.below(self.nodes.len() as u64) as u32 + 1;
                let pair = (host.min(other), host.max(other));
                if pair.0 != pair.1 && self.cuts.insert(pair) {
                    self.network.cut(pair.0, pair.1, true);
                }
            }
            3..=5 => {
                if let Some(pair) = self.cuts.pop_first() {
                    self.network.cut(pair.0, pair.1, false);
                }
            }
            6 if is_server(node) && self.nodes[node].calls.is_some() => {
                self.network.kill(host);
                self.nodes[node].calls = None;
                self.nodes[node].stopped = false;
            }
            7 | 8 => self.bring_back(node),
            9 => {
                let stopped = !self.nodes[node].stopped && self.nodes[node].calls.is_some();
                self.nodes[node].stopped = stopped;
                self.network.stop(host, stopped);
            }
            _ => {}
        }
    }

    fn bring_back(&mut self, node: usize) {
        if self.nodes[node].calls.is_none() {
            self.start(node);
        }
    }

    fn serve(&mut self, node: usize, event: CallEvent) {
        let CallEvent::Asked { ticket, body } = event else { return };
        let Message::Ask(_, Request::GetXattr { ino, name: b"next" }) = body.message() else {
            panic!("{body:?}")
        };
        let (kept, stamp) = (&mut self.kept[node], ticket.stamp);
        let last = kept.replies.get(&(stamp.session, stamp.slot)).copied();
        let value = match last {
            Some((sequence, value)) if sequence == stamp.sequence && !self.planted => Ok(value),
            Some((sequence, _)) if sequence > stamp.sequence => Err(Code::Stale),
            _ => {
                let counter = kept.counters.entry(ino.0).or_default();
                *counter += 1;
                kept.replies.insert((stamp.session, stamp.slot), (stamp.sequence, *counter));
                Ok(*counter)
            }
        };
        let bytes = value.unwrap_or(0).to_le_bytes();
        let answer = Message::Answer(value.map(|_| Reply::Bytes(&bytes)).map_err(Refusal::Code));
        if let Some(calls) = &mut self.nodes[node].calls {
            calls.answer(&ticket, &answer).unwrap();
        }
    }

    fn ended(&mut self, client: usize, event: CallEvent) {
        let CallEvent::Answered { call, outcome, .. } = event else { return };
        let slot = self.slots[client].iter_mut().find(|s| s.call.is_some_and(|(id, ..)| id == call));
        let slot = slot.expect("every call ends once, in its slot");
        let (_, counter, _) = slot.call.take().expect("found above");
        match outcome.as_ref().map(|body| body.message()) {
            Ok(Message::Answer(Ok(Reply::Bytes(bytes)))) => {
                let value = u64::from_le_bytes(bytes.try_into().unwrap());
                assert!(
                    self.model.given.insert((counter, value)),
                    "value {value} of counter {counter} was given twice"
                );
                *self.model.certain.entry(counter).or_default() += 1;
                self.model.answered += 1;
            }
            Ok(other) => panic!("{other:?}: a slot has one call at a time, in order"),
            Err(failed) => {
                assert!(matches!(failed.code, Code::TimedOut | Code::Io), "{failed:?}");
                assert!(failed.why.contains("node "), "{failed:?}");
                *self.model.doubtful.entry(counter).or_default() += 1;
                self.model.failed += 1;
            }
        }
    }

    fn ask(&mut self, client: usize) {
        let Some(index) = self.slots[client].iter().position(|s| s.call.is_none()) else { return };
        let server = 1 + self.numbers.below(u64::from(SERVERS)) as u16;
        let counter = u64::from(server) * 10 + self.numbers.below(3);
        let node = SERVERS as usize + client;
        let Some(calls) = &mut self.nodes[node].calls else { return };
        let slot = &mut self.slots[client][index];
        slot.sequence += 1;
        let stamp = Stamp { session: client as u64 + 1, slot: index as u16, sequence: slot.sequence };
        let request = Request::GetXattr { ino: Ino(counter), name: b"next" };
        let deadline = calls.now() + Duration::from_millis(500 + self.numbers.below(4000));
        let message = Message::Ask(Caller { uid: 0, gid: 0 }, request);
        let id = calls.call(NodeId(server), stamp, &message, deadline).unwrap();
        slot.call = Some((id, counter, server));
    }

    fn turn(&mut self) {
        self.network.turn();
        if self.chaos && self.numbers.chance(3) {
            self.trouble();
        }
        for node in 0..self.nodes.len() {
            if self.nodes[node].stopped {
                continue;
            }
            let Some(calls) = &mut self.nodes[node].calls else { continue };
            calls.progress();
            while let Some(event) = self.nodes[node].calls.as_mut().and_then(Calls::next_event) {
                if is_server(node) {
                    self.serve(node, event);
                } else {
                    self.ended(node - SERVERS as usize, event);
                }
            }
        }
        if self.chaos {
            for client in 0..CLIENTS as usize {
                if !self.nodes[SERVERS as usize + client].stopped && self.numbers.chance(50) {
                    self.ask(client);
                }
            }
        }
    }

    /// Repairs all faults. Then all calls must end, and every server must answer every client again.
    fn heal(&mut self) {
        self.chaos = false;
        while let Some((a, b)) = self.cuts.pop_first() {
            self.network.cut(a, b, false);
        }
        for node in 0..self.nodes.len() {
            self.nodes[node].stopped = false;
            self.network.stop(node as u32 + 1, false);
            self.bring_back(node);
        }
        self.network.set_faults(Faults::NONE);
        self.finish(Duration::from_secs(10));
        // Links that are still silent, or between two attempts, get the time of the longest pause.
        let settled = self.network.now() + Duration::from_secs(2);
        while self.network.now() < settled {
            self.turn();
        }
        let before = self.model.answered;
        for _ in 0..10 {
            for client in 0..CLIENTS as usize {
                self.ask(client);
            }
        }
        let asked: usize = self.slots.iter().flatten().filter(|s| s.call.is_some()).count();
        self.finish(Duration::from_secs(10));
        assert_eq!(self.model.answered - before, asked as u64, "all are served again");
    }

    fn finish(&mut self, within: Duration) {
        let end = self.network.now() + within;
        while self.slots.iter().flatten().any(|s| s.call.is_some()) {
            self.turn();
            assert!(self.network.now() < end, "calls that never end");
        }
    }

    fn check(&self) {
        for (server, kept) in self.kept.iter().enumerate() {
            for (counter, value) in &kept.counters {
                let certain = self.model.certain.get(counter).copied().unwrap_or(0);
                let doubtful = self.model.doubtful.get(counter).copied().unwrap_or(0);
                assert!(
                    (certain..=certain + doubtful).contains(value),
                    "counter {counter} of server {}: {value}, acknowledged {certain}, in doubt {doubtful}",
                    server + 1
                );
            }
        }
    }
}

/// Runs one history. Returns its trace, its events, answers and failures.
fn run(seed: u64, planted: bool) -> (u64, u64, u64, u64) {
    let mut world = World::new(seed, planted);
    for _ in 0..4000 {
        world.turn();
    }
    world.heal();
    world.check();
    (world.network.trace(), world.network.events(), world.model.answered, world.model.failed)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn increments_over_a_bad_network_happen_once_in_every_history() {
    let seeds: Vec<u64> = match number("FOREBAY_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("FOREBAY_SEEDS").unwrap_or(100)).collect(),
    };
    let (mut events, mut answered, mut failed) = (0, 0, 0);
    for seed in &seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(*seed, false)));
        let (_, e, a, f) = outcome.unwrap_or_else(|_| panic!("seed {seed}: replay with FOREBAY_SEED={seed}"));
        events += e;
        answered += a;
        failed += f;
    }
    println!("{} histories, {events} events, {answered} increments, {failed} that failed", seeds.len());
    if seeds.len() >= 100 {
        assert!(answered > 2000 && failed > 50, "histories too quiet to mean anything");
    }
}

#[test]
fn one_seed_gives_one_history() {
    for seed in [3, 44, 555] {
        let first = run(seed, false);
        assert_eq!(first, run(seed, false), "seed {seed}");
        assert_ne!(first.0, run(seed + 1, false).0, "another seed is another history");
    }
}

/// The model's canary test: a server that executes retries again.
#[test]
fn server_that_repeats_retries_is_caught() {
    let caught = (1..=20).filter(|seed| catch_unwind(AssertUnwindSafe(|| run(*seed, true))).is_err()).count();
    println!("caught in {caught} of 20 histories");
    assert!(caught > 0);
}
