//! The cost of links between many nodes: the call layers of hundreds of nodes in one process over the simulated
//! network, each with a link to every other. Times are processor time of this machine for the call layer (handshakes,
//! MACs, timers). The time of the simulated network is not counted.
//!
//! `cargo run --release -p forebay-fabric --example crowd [-- --json] [NODES]...`

use std::time::Duration;

use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{CallEvent, Calls, CallsSettings, Identity};
use forebay_types::{Caller, NodeId, Reply, Request};
use forebay_wire::{Message, Secret, Stamp};
use serde_json::{json, Value};

/// The time for which links are idle, by the simulated clock.
const IDLE: Duration = Duration::from_secs(2);

struct Crowd {
    network: Network,
    nodes: Vec<Calls>,
    /// Processor time of the call layers.
    worked: Duration,
    answered: usize,
    links: usize,
}

/// Processor time of this process, which has one thread. So other programs on the machine do not count.
fn worked() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is valid and writable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

impl Crowd {
    fn new(count: u16) -> Crowd {
        let delay = Duration::from_micros(10);
        let faults = Faults { delay: (delay, 2 * delay), ..Faults::NONE };
        let network = Network::new(1, faults);
        let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).expect("32 bytes that differ");
        let started = worked();
        let nodes = (1..=count)
            .map(|me| {
                let identity = Identity { pool: [1; 16], node: NodeId(me), capacity_bytes: 0 };
                let settings = CallsSettings { seed: Some(u64::from(me)), ..CallsSettings::default() };
                let endpoint = Box::new(network.endpoint(u32::from(me)));
                let mut calls = Calls::new(endpoint, identity, secret.clone(), settings);
                for other in (1..=count).filter(|o| *o != me) {
                    let address = format!("simulated:{other}");
                    calls.add_node(NodeId(other), address.as_bytes()).expect("an address of this network");
                }
                calls
            })
            .collect();
        Crowd { network, nodes, worked: worked() - started, answered: 0, links: 0 }
    }

    fn round(&mut self) {
        // Messages that arrive within a tenth of a millisecond are handled together, as a busy thread does.
        let until = self.network.now() + Duration::from_micros(100);
        while self.network.now() < until {
            self.network.turn();
        }
        let started = worked();
        for calls in &mut self.nodes {
            calls.progress();
            while let Some(event) = calls.next_event() {
                match event {
                    CallEvent::Asked { ticket, .. } => {
                        let answer = Message::Answer(Ok(Reply::Done));
                        calls.answer(&ticket, &answer).expect("an answer");
                    }
                    CallEvent::Answered { outcome, .. } => {
                        outcome.expect("no call fails");
                        self.answered += 1;
                    }
                    CallEvent::Up { .. } => self.links += 1,
                    _ => {}
                }
            }
        }
        self.worked += worked() - started;
    }

    /// Every node calls every other once. Returns the seconds of processor time.
    fn all_ask_all(&mut self, sequence: u64) -> f64 {
        let (before, count) = (self.worked, self.nodes.len() as u16);
        self.answered = 0;
        for distance in 1..count {
            let started = worked();
            for me in 0..count {
                let to = NodeId((me + distance) % count + 1);
                let calls = &mut self.nodes[usize::from(me)];
                let deadline = calls.now() + Duration::from_secs(600);
                let stamp = Stamp { session: u64::from(me) + 1, slot: 0, sequence };
                let request = Message::Ask(Caller { uid: 0, gid: 0 }, Request::Space);
                calls.call(to, stamp, &request, deadline).expect("a call");
            }
            self.worked += worked() - started;
            while self.answered < usize::from(distance) * usize::from(count) {
                self.round();
            }
        }
        (self.worked - before).as_secs_f64()
    }

    fn frames(&self) -> u64 {
        self.nodes.iter().map(|calls| calls.statistics().frames_in).sum()
    }
}

fn measure(count: u16) -> Value {
    let bytes = resident_bytes();
    let mut crowd = Crowd::new(count);
    let links = usize::from(count) * usize::from(count - 1);
    let known = (resident_bytes() - bytes) as f64 / links as f64;
    let starting = crowd.frames();
    // Before the first call there is no link, and nothing is sent.
    let quiet = crowd.network.now() + IDLE;
    while crowd.network.now() < quiet {
        crowd.round();
    }
    assert_eq!((crowd.frames() - starting, crowd.links), (0, 0), "a link that nobody asked for");
    let made = crowd.all_ask_all(1);
    assert_eq!(crowd.links, links);
    let each = (resident_bytes() - bytes) as f64 / links as f64;
    let again = crowd.all_ask_all(2);
    let (frames, before, from) = (crowd.frames(), crowd.worked, crowd.network.now());
    while crowd.network.now() < from + IDLE {
        crowd.round();
    }
    let seconds = (crowd.network.now() - from).as_secs_f64();
    let idle = (crowd.worked - before).as_secs_f64();
    json!({
        "nodes": count,
        "links": links,
        "bytes_of_a_known_node": known.round(),
        "bytes_of_a_link": each.round(),
        "link_and_call_us": made * 1e6 / links as f64,
        "call_us": again * 1e6 / links as f64,
        "idle_frames_per_node_and_second": (crowd.frames() - frames) as f64 / f64::from(count) / seconds,
        "idle_processor_share_of_a_node": idle / f64::from(count) / seconds,
    })
}

fn main() {
    let mut as_json = false;
    let mut counts = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.parse::<u16>() {
            Ok(count) if count > 1 => counts.push(count),
            _ if argument == "--json" => as_json = true,
            _ => {
                eprintln!("crowd: {argument} is no number of nodes");
                std::process::exit(2);
            }
        }
    }
    if counts.is_empty() {
        counts = vec![16, 64, 256];
    }
    for count in counts {
        let measured = measure(count);
        if as_json {
            println!("{measured}");
            continue;
        }
        let n = |key: &str| measured[key].as_f64().unwrap_or(0.0);
        println!(
            "{count:5} nodes: a link {:.1} KiB (a node only known {:.0} B), made and first asked in {:.1} µs, asked again {:.1} µs; \
             idle {:.0} frames/s and {:.2} % of a processor a node",
            n("bytes_of_a_link") / 1024.0,
            n("bytes_of_a_known_node"),
            n("link_and_call_us"),
            n("call_us"),
            n("idle_frames_per_node_and_second"),
            100.0 * n("idle_processor_share_of_a_node")
        );
    }
}
