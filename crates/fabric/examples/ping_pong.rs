//! The cost of the network between two processes: latency of 64 bytes, reads and writes by RMA, requests of the call
//! layer. A raw TCP stream on the same addresses is measured in the same run.
//!
//! `cargo run --release -p forebay-fabric --example ping_pong [-- --json] [--spin] [--provider NAME] [--host ADDRESS]
//! [--seconds N]`

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric::libfabric::{LibfabricEndpoint, Settings, Waiting};
use forebay_fabric::{
    Access, CallEvent, Calls, CallsSettings, Direction, Endpoint, Event, Identity, Peer, Region, Transfer,
};
use forebay_types::{Caller, NodeId, Reply, Request};
use forebay_wire::{Memory, Message, Secret, Stamp};
use serde_json::{json, Value};

const SIZES: [usize; 5] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
const LARGEST: usize = 16 << 20;
/// Transfers in progress at a time.
const DEPTH: usize = 4;
/// Messages and calls in progress at a time.
const CALLS_DEPTH: usize = 64;

#[derive(Clone)]
struct Options {
    provider: Option<String>,
    host: String,
    seconds: f64,
    json: bool,
    waiting: Waiting,
}

fn options() -> Options {
    let mut o = Options {
        provider: None,
        host: "127.0.0.1".to_owned(),
        seconds: 0.5,
        json: false,
        waiting: Waiting::Events,
    };
    let mut words = std::env::args().skip(1);
    let usage = "usage: ping_pong [--json] [--spin] [--provider NAME] [--host ADDRESS] [--seconds N]";
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{usage}"));
        match word.as_str() {
            "--json" => o.json = true,
            // Faster if each process has a processor of its own, and far slower if not.
            "--spin" => o.waiting = Waiting::Spinning,
            "--provider" => o.provider = Some(value()),
            "--host" => o.host = value(),
            "--seconds" => o.seconds = value().parse().unwrap_or_else(|_| panic!("{usage}")),
            // The other process: `ping_pong serve …`.
            "serve" => {}
            _ => panic!("{usage}"),
        }
    }
    o
}

fn endpoint(o: &Options, waiting: Waiting) -> LibfabricEndpoint {
    let settings =
        Settings { provider: o.provider.clone(), host: Some(o.host.clone()), waiting, ..Settings::default() };
    LibfabricEndpoint::open(settings).unwrap_or_else(|e| panic!("{e}"))
}

fn calls(endpoint: LibfabricEndpoint, node: u16) -> Calls {
    let identity = Identity { pool: [0; 16], node: NodeId(node), capacity_bytes: 0 };
    let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).expect("32 bytes");
    Calls::new(Box::new(endpoint), identity, secret, CallsSettings::default())
}

/// Calls `progress`, and sleeps if there was nothing to do.
fn turn(end: &mut LibfabricEndpoint, waiting: Waiting, sink: &mut dyn FnMut(Event<'_>)) {
    if end.progress(sink) == 0 && waiting == Waiting::Events {
        end.wait(Duration::from_millis(50));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&text[i..i + 2], 16).expect("written by the other process");
    (0..text.len()).step_by(2).map(byte).collect()
}

/// The other process, until stdin closes: a raw TCP peer, an endpoint that sends messages back, and a server of calls.
fn serve(o: &Options) {
    let listener = TcpListener::bind((o.host.as_str(), 0)).expect("a port");
    let mut end = endpoint(o, o.waiting);
    let region = Arc::new(Region::new(LARGEST * DEPTH).expect("memory"));
    region.write_at(0, &vec![1; LARGEST * DEPTH]).expect("its own length");
    let memory = end.register(region, Access::BOTH).expect("registers").remote;
    let mut server = calls(endpoint(o, Waiting::Events), 2);
    println!(
        "{} {} {} {} {}",
        listener.local_addr().expect("bound"),
        hex(end.address()),
        memory.address,
        memory.key,
        hex(server.endpoint().address())
    );
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = serve_tcp(stream);
        }
    });
    // One thread serves the current measurement: first the endpoint, then the calls.
    let mode = std::sync::Arc::new(std::sync::atomic::AtomicU8::new(0));
    let told = mode.clone();
    std::thread::spawn(move || {
        let mut byte = [0];
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {
            told.store(byte[0], std::sync::atomic::Ordering::Relaxed);
        }
        std::process::exit(0);
    });
    let mut back: Option<Peer> = None;
    loop {
        match mode.load(std::sync::atomic::Ordering::Relaxed) {
            b'm' => {
                let mut answers = Vec::new();
                turn(&mut end, o.waiting, &mut |event| {
                    if let Event::Received { bytes, .. } = event {
                        answers.push(bytes.to_vec());
                    }
                });
                for bytes in answers {
                    let to = match back {
                        Some(peer) => peer,
                        // The first message is the sender's address.
                        None => *back.insert(end.connect(&bytes).expect("an address")),
                    };
                    let deadline = end.now() + Duration::from_secs(5);
                    end.send(to, 0, &bytes, 0, deadline).expect("a message");
                }
            }
            b'c' => {
                server.progress();
                while let Some(event) = server.next_event() {
                    if let CallEvent::Asked { ticket, .. } = event {
                        server.answer(&ticket, &Message::Answer(Ok(Reply::Count(0)))).expect("an answer");
                    }
                }
                server.wait(Duration::from_millis(50));
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Serves a raw stream. A request is its length and the answer's, 8 bytes each, and then its bytes.
fn serve_tcp(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; LARGEST];
    loop {
        let mut sizes = [0; 16];
        stream.read_exact(&mut sizes)?;
        let number = |at: usize| u64::from_le_bytes(sizes[at..at + 8].try_into().expect("8 bytes")) as usize;
        let (comes, goes) = (number(0), number(8));
        stream.read_exact(&mut buffer[..comes])?;
        stream.write_all(&buffer[..goes])?;
    }
}

/// Repeats `round` until `seconds` have passed. Returns the seconds of one round.
fn timed(seconds: f64, mut round: impl FnMut()) -> f64 {
    for _ in 0..3 {
        round();
    }
    let (start, mut rounds) = (Instant::now(), 0u32);
    while start.elapsed().as_secs_f64() < seconds || rounds < 5 {
        round();
        rounds += 1;
    }
    start.elapsed().as_secs_f64() / f64::from(rounds)
}

/// `depth` exchanges. All are sent before any answer is read.
fn tcp_round(stream: &mut TcpStream, buffer: &mut [u8], goes: usize, comes: usize, depth: usize) {
    for _ in 0..depth {
        let mut head = (goes as u64).to_le_bytes().to_vec();
        head.extend((comes as u64).to_le_bytes());
        head.extend(&buffer[..goes.min(64)]);
        stream.write_all(&head).expect("writes");
        stream.write_all(&buffer[goes.min(64)..goes]).expect("writes");
    }
    for _ in 0..depth {
        stream.read_exact(&mut buffer[..comes]).expect("reads");
    }
}

fn main() {
    let o = options();
    if std::env::args().nth(1).as_deref() == Some("serve") {
        return serve(&o);
    }
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.arg("serve").args(["--host", &o.host]).stdin(Stdio::piped()).stdout(Stdio::piped());
    if o.waiting == Waiting::Spinning {
        command.arg("--spin");
    }
    if let Some(provider) = &o.provider {
        command.args(["--provider", provider]);
    }
    let mut child = command.spawn().expect("starts itself");
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(child.stdout.as_mut().expect("piped")),
        &mut line,
    )
    .expect("a line");
    let words: Vec<&str> = line.split_whitespace().collect();
    let [tcp, address, memory, key, server] = words[..] else { panic!("the other process said {line:?}") };
    let tcp: SocketAddr = tcp.parse().expect("an address");
    let remote = Memory { address: memory.parse().expect("a number"), key: key.parse().expect("a number") };
    let mut tell = |mode: u8| child.stdin.as_mut().expect("piped").write_all(&[mode]).expect("it lives");

    let mut results: Vec<Value> = Vec::new();
    let mut note = |what: String, unit: &str, ours: f64, raw: Option<f64>, ratio: Option<f64>| {
        if !o.json {
            let raw = raw.map_or(String::new(), |raw| format!("{raw:10.2} {unit} raw TCP"));
            let ratio = ratio.map_or(String::new(), |ratio| format!("  ratio {ratio:.2}"));
            println!("{what:28} {ours:10.2} {unit} {raw}{ratio}");
        }
        results.push(json!({ "what": what, "unit": unit, "fabric": ours, "tcp": raw, "ratio": ratio }));
    };

    // 64 bytes in each direction. Half of the time is the latency.
    let mut stream = TcpStream::connect(tcp).expect("connects");
    stream.set_nodelay(true).expect("sets");
    let mut buffer = vec![1; LARGEST];
    let raw = timed(o.seconds, || tcp_round(&mut stream, &mut buffer, 48, 64, 1)) * 1e6 / 2.0;
    tell(b'm');
    let mut end = endpoint(&o, o.waiting);
    let provider = end.provider().to_owned();
    let to = end.connect(&unhex(address)).expect("an address");
    let own = end.address().to_vec();
    let message = |end: &mut LibfabricEndpoint, bytes: &[u8]| {
        let deadline = end.now() + Duration::from_secs(5);
        end.send(to, 0, bytes, 0, deadline).expect("a message");
        let mut back = false;
        while !back {
            turn(end, o.waiting, &mut |event| match event {
                Event::Received { .. } => back = true,
                Event::Failed { why, .. } => panic!("{why}"),
                Event::Done { .. } => {}
            });
        }
    };
    message(&mut end, &own);
    let ours = timed(o.seconds, || message(&mut end, &[7; 64])) * 1e6 / 2.0;
    note("64 B, one way".to_owned(), "us", ours, Some(raw), Some(raw / ours));

    // Whole transfers, several in progress, compared with a stream that sends one way and receives one short answer.
    let region = Arc::new(Region::new(LARGEST * DEPTH).expect("memory"));
    region.write_at(0, &vec![2; LARGEST * DEPTH]).expect("its own length");
    let local = end.register(region, Access::LOCAL).expect("registers").local;
    for direction in [Direction::Read, Direction::Write] {
        for bytes in SIZES {
            for depth in [1, DEPTH] {
                let raw = timed(o.seconds, || match direction {
                    Direction::Read | Direction::ReadInTime => {
                        tcp_round(&mut stream, &mut buffer, 0, bytes, depth)
                    }
                    Direction::Write | Direction::Ahead => {
                        tcp_round(&mut stream, &mut buffer, bytes, 1, depth)
                    }
                });
                let raw = (bytes * depth) as f64 / raw / 1e9;
                let ours = timed(o.seconds, || {
                    let deadline = end.now() + Duration::from_secs(5);
                    for i in 0..depth {
                        let remote = Memory { address: remote.address + (i * LARGEST) as u64, ..remote };
                        let transfer =
                            Transfer { direction, local, local_offset: i * LARGEST, remote, bytes };
                        end.transfer(to, &transfer, i as u64, deadline).expect("starts");
                    }
                    let mut left = depth;
                    while left > 0 {
                        turn(&mut end, o.waiting, &mut |event| match event {
                            Event::Done { .. } => left -= 1,
                            Event::Failed { why, .. } => panic!("{why}"),
                            Event::Received { .. } => {}
                        });
                    }
                });
                let ours = (bytes * depth) as f64 / ours / 1e9;
                let what = format!("{direction:?} {} KiB, {depth} at a time", bytes >> 10);
                note(what, "GB/s", ours, Some(raw), Some(ours / raw));
            }
        }
    }

    // Bare messages in both directions, the upper bound for calls. Then the call layer.
    let messages = timed(o.seconds, || {
        let deadline = end.now() + Duration::from_secs(5);
        for _ in 0..CALLS_DEPTH {
            end.send(to, 0, &[7; 64], 0, deadline).expect("a message");
        }
        let mut left = CALLS_DEPTH;
        while left > 0 {
            turn(&mut end, o.waiting, &mut |event| {
                left -= usize::from(matches!(event, Event::Received { .. }));
            });
        }
    });
    let messages = CALLS_DEPTH as f64 / messages / 1e3;
    note(format!("messages, {CALLS_DEPTH} at a time"), "k/s", messages, None, None);

    // The call layer: authenticated requests. Both sides wait for events.
    tell(b'c');
    let mut asker = calls(endpoint(&o, Waiting::Events), 1);
    asker.add_node(NodeId(2), &unhex(server)).expect("an address");
    for depth in [1, CALLS_DEPTH] {
        let mut sequence = 0;
        let seconds = timed(o.seconds, || {
            for _ in 0..depth {
                sequence += 1;
                let stamp = Stamp { session: 1, slot: 0, sequence };
                let deadline = asker.now() + Duration::from_secs(5);
                let message = Message::Ask(Caller { uid: 0, gid: 0 }, Request::Ping);
                asker.call(NodeId(2), stamp, &message, deadline).expect("asks");
            }
            let mut left = depth;
            while left > 0 {
                if asker.progress() == 0 {
                    asker.wait(Duration::from_millis(50));
                }
                while let Some(event) = asker.next_event() {
                    if let CallEvent::Answered { outcome, .. } = event {
                        outcome.expect("an answer");
                        left -= 1;
                    }
                }
            }
        });
        let rate = depth as f64 / seconds / 1e3;
        let ratio = (depth == CALLS_DEPTH).then_some(rate / messages);
        note(format!("calls, {depth} at a time"), "k/s", rate, None, ratio);
    }
    drop(child.stdin.take());
    let _ = child.wait();
    if o.json {
        println!(
            "{}",
            json!({ "provider": provider, "host": o.host, "waiting": format!("{:?}", o.waiting), "results": results })
        );
    } else {
        println!("provider {provider}, {}, waiting by {:?}", o.host, o.waiting);
    }
}
