//! Attacks on endpoints by hosts without the pool's secret. The connections of real peers must survive them.

mod attack;

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use attack::{attack, break_off, is_let_in, Extent, Recorder, Recording};
use forebay_fabric::libfabric::{self, LibfabricEndpoint, Settings};
use forebay_fabric::{CallEvent, Calls, CallsSettings, Identity};
use forebay_types::{Caller, Ino, NodeId, Reply, Request};
use forebay_wire::{Message, Secret, Stamp};

fn calls(node: u16, port: Option<u16>) -> Calls {
    let settings = Settings {
        provider: Some("tcp;ofi_rxm".to_owned()),
        host: Some("127.0.0.1".to_owned()),
        port,
        ..Settings::default()
    };
    let endpoint = LibfabricEndpoint::open(settings).expect("tcp needs no device");
    let identity = Identity { pool: [3; 16], node: NodeId(node), capacity_bytes: 0 };
    let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap();
    Calls::new(Box::new(endpoint), identity, secret, CallsSettings::default())
}

/// The program of a child: a server that echoes names. Not a test by itself.
#[test]
fn child() {
    let Ok(port) = std::env::var("FOREBAY_TEST_PORT") else { return };
    let mut calls = calls(1, port.parse().ok().filter(|port| *port != 0));
    if let Some(host) = std::env::var("FOREBAY_TEST_NODES_AT").ok().and_then(|h| h.parse::<Ipv4Addr>().ok()) {
        let mut address = calls.endpoint().address().to_vec();
        address[2..4].copy_from_slice(&[0, 1]);
        address[4..8].copy_from_slice(&host.octets());
        calls.add_node(NodeId(50), &address).unwrap();
        calls.hear_only_nodes();
    }
    let address: String = calls.endpoint().address().iter().map(|b| format!("{b:02x}")).collect();
    println!("\naddress {address}");
    loop {
        calls.progress();
        while let Some(event) = calls.next_event() {
            let CallEvent::Asked { ticket, body } = event else { continue };
            let Message::Ask(_, Request::Lookup { name, .. }) = body.message() else { continue };
            let again = calls.statistics().opened_again.to_string();
            let bytes = if name == b"opened again" { again.as_bytes() } else { name };
            calls.answer(&ticket, &Message::Answer(Ok(Reply::Bytes(bytes)))).unwrap();
        }
        calls.wait(Duration::from_millis(100));
    }
}

/// A server's process. Dropping this kills it.
struct Server {
    child: Child,
    address: Vec<u8>,
}

impl Server {
    /// Starts a server at this port, or at any. With `nodes_at`, the server accepts only that host.
    fn start(port: Option<u16>, nodes_at: Option<Ipv4Addr>) -> Server {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
        command.env("FOREBAY_TEST_PORT", port.unwrap_or(0).to_string());
        if let Some(host) = nodes_at {
            command.env("FOREBAY_TEST_NODES_AT", host.to_string());
        }
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .find_map(|line| line.unwrap().strip_prefix("address ").map(str::to_owned))
            .expect("a start");
        let byte = |i: usize| u8::from_str_radix(&address[i..i + 2], 16).unwrap();
        Server { address: (0..address.len()).step_by(2).map(byte).collect(), child }
    }

    fn port(&self) -> u16 {
        u16::from_be_bytes([self.address[2], self.address[3]])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Asker {
    calls: Calls,
    sequence: u64,
}

impl Asker {
    fn new(node: u16, address: &[u8]) -> Asker {
        let mut calls = calls(node, None);
        calls.add_node(NodeId(1), address).unwrap();
        Asker { calls, sequence: 0 }
    }

    /// Sends a name until it is answered. Returns the time that this took, and the answer.
    fn ask(&mut self, name: &[u8], within: Duration) -> Option<(Duration, Vec<u8>)> {
        let start = Instant::now();
        while start.elapsed() < within {
            self.sequence += 1;
            let stamp = Stamp { session: 1, slot: 0, sequence: self.sequence };
            let ask = Message::Ask(Caller { uid: 0, gid: 0 }, Request::Lookup { parent: Ino::ROOT, name });
            let deadline = self.calls.now() + Duration::from_secs(10);
            let id = self.calls.call(NodeId(1), stamp, &ask, deadline).unwrap();
            loop {
                self.calls.progress();
                let mut answered = None;
                while let Some(event) = self.calls.next_event() {
                    match event {
                        CallEvent::Answered { call, outcome, .. } if call == id => answered = Some(outcome),
                        _ => {}
                    }
                }
                match answered {
                    Some(Ok(body)) => {
                        let Message::Answer(Ok(Reply::Bytes(bytes))) = body.message() else { return None };
                        return Some((start.elapsed(), bytes.to_vec()));
                    }
                    Some(Err(_)) => break,
                    None => self.calls.wait(Duration::from_millis(5)),
                }
            }
        }
        None
    }

    fn echo(&mut self, within: Duration) -> Option<Duration> {
        let (took, bytes) = self.ask(b"name", within)?;
        assert_eq!(bytes, b"name");
        Some(took)
    }
}

/// The bytes that a peer sends on its connection, from the first one.
fn record(server: &Server) -> Recording {
    let recorder = Recorder::start(server.port());
    let mut address = server.address.clone();
    address[2..4].copy_from_slice(&recorder.port.to_be_bytes());
    let mut asker = Asker::new(9, &address);
    for _ in 0..30 {
        asker.echo(Duration::from_secs(10)).expect("a server");
    }
    drop(asker);
    recorder.finish()
}

fn skipped() -> bool {
    match libfabric::unusable() {
        Some(why) => {
            println!("skipped: {why}");
            true
        }
        None => false,
    }
}

/// The address of the host without the secret.
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 77);
/// The longest wait for an answer. An endpoint that no longer receives has noticed this by then, and was opened again, also
/// where other tests have the processors.
const TIMEOUT: Duration = Duration::from_secs(180);

#[test]
fn peers_go_on_while_a_host_without_the_secret_attacks() {
    if skipped() {
        return;
    }
    let soak = std::env::var_os("FOREBAY_SOAK").is_some();
    let lasts = Duration::from_secs(if soak { 3600 } else { 32 });
    let mut server = Server::start(None, None);
    let recording = record(&server);
    let mut asker = Asker::new(2, &server.address);
    asker.echo(TIMEOUT).expect("a server");
    let (start, mut slowest, mut round, mut starts) = (Instant::now(), Duration::ZERO, 0, 1);
    while start.elapsed() < lasts {
        let extent =
            Extent { connections: 2400, messages: 30_000, lasts: Duration::from_secs(8), held: 1500 };
        let (port, of) = (server.port(), recording.clone());
        let attacker = std::thread::spawn(move || attack(STRANGER, port, round, &of, extent));
        while !attacker.is_finished() {
            // If the provider crashed, the server is started again, as a worker's supervisor does.
            if server.child.try_wait().unwrap().is_some() {
                server = Server::start(Some(port), None);
                starts += 1;
            }
            match asker.echo(Duration::from_secs(5)) {
                Some(took) => slowest = slowest.max(took),
                None => slowest = slowest.max(asker.echo(TIMEOUT).expect("an answer amid an attack")),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let made = attacker.join().unwrap();
        assert!(made > 1000, "only {made} connections: no attack");
        let mut new = Asker::new(3, &server.address);
        new.echo(TIMEOUT).expect("an answer for a new peer");
        println!("round {round}: {made} connections, slowest answer so far {slowest:?}, {starts} starts");
        round += 1;
    }
}

#[test]
fn endpoint_without_receive_buffers_is_opened_anew() {
    if skipped() {
        return;
    }
    let server = Server::start(None, None);
    let recording = record(&server);
    let mut asker = Asker::new(2, &server.address);
    asker.echo(TIMEOUT).expect("a server");
    assert_eq!(asker.ask(b"opened again", TIMEOUT).unwrap().1, b"0");
    // More than the provider has receive buffers, so that none is left.
    break_off(STRANGER, server.port(), 1, &recording, 400);
    let took = asker.echo(TIMEOUT).expect("an answer of an endpoint that was deaf");
    let again = asker.ask(b"opened again", TIMEOUT).unwrap().1;
    assert_ne!(again, b"0", "it was never deaf: the attack has none of the effect that this test is about");
    println!("answered after {took:?}");
    Asker::new(3, &server.address).echo(TIMEOUT).expect("an answer for a new peer");
}

#[test]
fn host_that_is_no_node_is_not_let_in_where_nodes_are_known() {
    if skipped() {
        return;
    }
    let open = Server::start(None, None);
    assert!(is_let_in(STRANGER, open.port(), TIMEOUT), "the canary: anybody is, where they are not");
    drop(open);
    let server = Server::start(None, Some(Ipv4Addr::LOCALHOST));
    let mut asker = Asker::new(2, &server.address);
    asker.echo(TIMEOUT).expect("a server");
    let start = Instant::now();
    while is_let_in(STRANGER, server.port(), Duration::from_secs(1)) {
        assert!(start.elapsed() < TIMEOUT, "a stranger is let in");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(is_let_in(Ipv4Addr::LOCALHOST, server.port(), TIMEOUT), "a node's host");
    Asker::new(3, &server.address).echo(TIMEOUT).expect("an answer for a new peer");
}
