//! The network's rates without a pool, between two processes on two nodes: transfers of the provider, one at a time,
//! and authenticated requests of the call layer, by several requesters with one request each in progress. Both wait by
//! events, as daemons do.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric::libfabric::{LibfabricEndpoint, Settings, Waiting};
use forebay_fabric::{
    Access, CallEvent, Calls, CallsSettings, Direction, Endpoint, Event, Identity, Region, Transfer,
};
use forebay_types::{Caller, Code, NodeId, Reply, Request};
use forebay_wire::{Memory, Message, Secret, Stamp};

use super::hosts::Hosts;
use crate::systems::said;

/// The memory of the server, over which one transfer at a time goes, as calls on a volume go over as much of it.
pub(super) const WINDOW: usize = 64 << 20;
/// The same for several at a time, each of which has a place of its own, and the memory of the requester.
pub(super) const DEEP_WINDOW: usize = 128 << 20;
/// Transfers at a time, where there are several, as far as there is memory.
pub(super) const DEPTH: usize = 16;

/// How many blocks of so many bytes are in progress at a time, where there are several.
pub(super) fn depth_of(block: usize) -> usize {
    DEPTH.min(DEEP_WINDOW / block).max(1)
}

const SECONDS: f64 = 0.5;
const WAIT: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(5);

/// The kind of measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Transfers, one at a time; the number is their length in bytes.
    Memory,
    /// The same, several at a time ([`depth_of`]).
    Deep,
    /// Calls; the number is that of the requesters.
    Calls,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Memory => "memory",
            Kind::Deep => "deep",
            Kind::Calls => "calls",
        }
    }

    fn of(word: &str) -> Result<Kind, String> {
        let kinds = [Kind::Memory, Kind::Deep, Kind::Calls];
        kinds.into_iter().find(|k| k.word() == word).ok_or(format!("raw memory, deep or calls, not {word}"))
    }
}

/// Starts a server on node 2 and a requester on node 1; returns the JSON that the requester printed.
pub(super) fn measure(hosts: &Hosts, kind: Kind, number: usize) -> Result<String, String> {
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let command = |node: usize, words: &[&str]| {
        let mut command = hosts.on(node, &this as &Path);
        command.args(["drive", "raw", kind.word()]).args(words);
        command
    };
    let mut serve = command(2, &["serve", &hosts.address(2)]);
    serve.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = serve.spawn().map_err(|e| format!("{serve:?} cannot be run: {e}"))?;
    let mut line = String::new();
    let told = match server.stdout.take() {
        Some(out) => BufReader::new(out).read_line(&mut line).map_err(|e| e.to_string()),
        None => Ok(0),
    };
    let asked = told.and_then(|_| {
        let mut ask = command(1, &["ask", &hosts.address(1), &number.to_string()]);
        said(ask.args(line.split_whitespace()))
    });
    // The server ends at the end of its input.
    drop(server.stdin.take());
    let _ = server.wait();
    asked
}

fn endpoint(host: &str) -> Result<LibfabricEndpoint, String> {
    let settings = Settings { host: Some(host.to_owned()), waiting: Waiting::Events, ..Settings::default() };
    LibfabricEndpoint::open(settings).map_err(|e| e.to_string())
}

fn calls(host: &str, node: u16) -> Result<Calls, String> {
    let identity = Identity { pool: [0; 16], node: NodeId(node), capacity_bytes: 0 };
    let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).map_err(|e| e.to_string())?;
    Ok(Calls::new(Box::new(endpoint(host)?), identity, secret, CallsSettings::default()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>, String> {
    let byte = |i| text.get(i..i + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    (0..text.len()).step_by(2).map(byte).collect::<Option<_>>().ok_or(format!("{text} is no address"))
}

fn code(what: &'static str) -> impl Fn(Code) -> String {
    move |code| format!("{what}: {code}")
}

/// `drive raw KIND serve HOST`: prints its address, and serves until the end of its input.
pub(crate) fn serve(kind: &str, host: &str) -> Result<(), String> {
    std::thread::spawn(|| {
        while matches!(std::io::stdin().read(&mut [0]), Ok(n) if n > 0) {}
        std::process::exit(0);
    });
    match Kind::of(kind)? {
        Kind::Memory | Kind::Deep => {
            let mut end = endpoint(host)?;
            let region = Arc::new(Region::new(DEEP_WINDOW).map_err(code("memory"))?);
            region.write_at(0, &vec![1; DEEP_WINDOW]).map_err(code("memory"))?;
            let memory = end.register(region, Access::BOTH).map_err(code("registering"))?.remote;
            println!("{} {} {}", hex(end.address()), memory.address, memory.key);
            loop {
                if end.progress(&mut |_| {}) == 0 {
                    end.wait(WAIT);
                }
            }
        }
        Kind::Calls => {
            let mut server = calls(host, 2)?;
            println!("{} 0 0", hex(server.endpoint().address()));
            loop {
                server.progress();
                while let Some(event) = server.next_event() {
                    if let CallEvent::Asked { ticket, .. } = event {
                        let nothing = Message::Answer(Ok(Reply::Count(0)));
                        server.answer(&ticket, &nothing).map_err(code("an answer"))?;
                    }
                }
                server.wait(WAIT);
            }
        }
    }
}

/// `drive raw KIND ask HOST NUMBER ADDRESS MEMORY KEY`: the rates, as JSON.
pub(crate) fn ask(kind: &str, words: &[String]) -> Result<String, String> {
    let [host, count, address, memory, key] = words else {
        return Err("drive raw KIND ask HOST NUMBER ADDRESS MEMORY KEY".into());
    };
    let number = |word: &String| word.parse::<u64>().map_err(|_| format!("{word}: not a number"));
    let (count, address) = (number(count)? as usize, unhex(address)?);
    match Kind::of(kind)? {
        kind @ (Kind::Memory | Kind::Deep) => {
            let depth = if kind == Kind::Deep { depth_of(count) } else { 1 };
            let remote = Memory { address: number(memory)?, key: number(key)? };
            let rates = transfers(&mut endpoint(host)?, &address, remote, count, depth)?;
            Ok(serde_json::json!({ "read": rates[0], "write": rates[1] }).to_string())
        }
        Kind::Calls => {
            let rate = requests(&mut calls(host, 1)?, &address, count)?;
            Ok(serde_json::json!({ "calls": rate }).to_string())
        }
    }
}

/// GB/s of reads and of writes of `bytes` bytes, `depth` at a time, each of these with a place of its own in the memory of both.
fn transfers(
    end: &mut LibfabricEndpoint,
    address: &[u8],
    remote: Memory,
    bytes: usize,
    depth: usize,
) -> Result<[f64; 2], String> {
    let peer = end.connect(address).map_err(code("an address"))?;
    let region = Arc::new(Region::new(depth * bytes).map_err(code("memory"))?);
    region.write_at(0, &vec![2; depth * bytes]).map_err(code("memory"))?;
    // One at a time goes over the server's memory.
    let (places, mut alone) = ((WINDOW / bytes).max(1), 0);
    let local = end.register(region, Access::LOCAL).map_err(code("registering"))?.local;
    let mut rates = [0.0; 2];
    for (rate, direction) in rates.iter_mut().zip([Direction::Read, Direction::Write]) {
        let mut start = |end: &mut LibfabricEndpoint, slot: usize| {
            alone = (alone + 1) % places;
            let place = if depth == 1 { alone } else { slot };
            let remote = Memory { address: remote.address + (place * bytes) as u64, key: remote.key };
            let transfer = Transfer { direction, local, local_offset: slot * bytes, remote, bytes };
            let deadline = end.now() + TIMEOUT;
            end.transfer(peer, &transfer, slot as u64, deadline).map_err(code("a transfer"))
        };
        // As many as one round has; further ones begin as those end.
        let mut rounds = |least: usize, seconds: f64| -> Result<usize, String> {
            (0..depth).try_for_each(|slot| start(end, slot))?;
            let (started, mut ended, mut running) = (Instant::now(), 0, depth);
            let mut now = Vec::with_capacity(depth);
            while running > 0 {
                let mut failed = None;
                now.clear();
                let told = end.progress(&mut |event| match event {
                    Event::Done { token } => now.push(token as usize),
                    Event::Failed { why, .. } => failed = Some(why.to_owned()),
                    Event::Received { .. } => {}
                });
                if let Some(why) = failed {
                    return Err(why);
                }
                ended += now.len();
                running -= now.len();
                if ended < least || started.elapsed().as_secs_f64() < seconds {
                    now.iter().try_for_each(|slot| start(end, *slot))?;
                    running += now.len();
                }
                if told == 0 {
                    end.wait(WAIT);
                }
            }
            Ok(ended)
        };
        rounds(3 * depth, 0.0)?;
        let started = Instant::now();
        let ended = rounds(0, SECONDS)?;
        *rate = (ended * bytes) as f64 / started.elapsed().as_secs_f64() / 1e9;
    }
    Ok(rates)
}

/// Requests per second of `askers` requesters, each of which sends its next request when the last was answered.
fn requests(asker: &mut Calls, address: &[u8], askers: usize) -> Result<f64, String> {
    asker.add_node(NodeId(2), address).map_err(code("an address"))?;
    let mut sequence = 0;
    let mut ask = |asker: &mut Calls| {
        sequence += 1;
        let stamp = Stamp { session: 1, slot: 0, sequence };
        let message = Message::Ask(Caller { uid: 0, gid: 0 }, Request::Ping);
        asker.call(NodeId(2), stamp, &message, asker.now() + TIMEOUT).map_err(code("a request"))
    };
    for _ in 0..askers {
        ask(asker)?;
    }
    // The time to establish the link is not counted.
    let (mut started, mut answered) = (None::<Instant>, 0u64);
    while started.is_none_or(|started| started.elapsed().as_secs_f64() < SECONDS) {
        if asker.progress() == 0 {
            asker.wait(WAIT);
        }
        while let Some(event) = asker.next_event() {
            if let CallEvent::Answered { outcome, .. } = event {
                outcome.map_err(|failed| failed.why)?;
                started.get_or_insert_with(Instant::now);
                answered += 1;
                ask(asker)?;
            }
        }
    }
    let seconds = started.map_or(SECONDS, |started| started.elapsed().as_secs_f64());
    Ok(answered as f64 / seconds)
}
