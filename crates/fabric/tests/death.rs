//! Nodes as processes of their own over tcp on 127.0.0.1, killed, stopped and started again while operations are in
//! progress.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric::libfabric::{self, LibfabricEndpoint, Settings};
use forebay_fabric::{
    Access, CallEvent, CallId, Calls, CallsSettings, Direction, Failed, Identity, Region, Transfer,
};
use forebay_types::{Caller, Code, Ino, NodeId, Reply, Request};
use forebay_wire::{Memory, Message, Secret, Stamp};

const BYTES: usize = 32 << 20;
const UNREACHABLE: Duration = Duration::from_millis(2500);

fn calls(node: u16, port: Option<u16>) -> Calls {
    let settings = Settings {
        provider: Some("tcp;ofi_rxm".to_owned()),
        host: Some(std::env::var("FOREBAY_TEST_HOST").unwrap_or("127.0.0.1".to_owned())),
        port,
        ..Settings::default()
    };
    let endpoint = LibfabricEndpoint::open(settings).expect("tcp needs no device");
    let identity = Identity { pool: [3; 16], node: NodeId(node), capacity_bytes: 0 };
    let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap();
    let settings = CallsSettings { unreachable: UNREACHABLE, ..CallsSettings::default() };
    Calls::new(Box::new(endpoint), identity, secret, settings)
}

/// The program of a child: a server that echoes names, never answers `hold`, and returns the address of its memory. Not
/// a test by itself.
#[test]
fn child() {
    let Ok(of) = std::env::var("FOREBAY_TEST_NODE") else { return };
    let mut words = of.split(' ').map(|w| w.parse::<u16>().unwrap());
    let (node, port) = (words.next().unwrap(), words.next().filter(|p| *p != 0));
    let mut calls = calls(node, port);
    let region = Arc::new(Region::new(BYTES).unwrap());
    let memory = calls.endpoint().register(region, Access::BOTH).unwrap().remote;
    let address: String = calls.endpoint().address().iter().map(|b| format!("{b:02x}")).collect();
    println!("\naddress {address}");
    loop {
        calls.progress();
        while let Some(event) = calls.next_event() {
            let CallEvent::Asked { ticket, body } = event else { continue };
            let Message::Ask(_, Request::Lookup { name, .. }) = body.message() else { continue };
            let mut place = memory.address.to_le_bytes().to_vec();
            place.extend(memory.key.to_le_bytes());
            let bytes = match name {
                b"hold" => continue,
                b"memory" => &place[..],
                name => name,
            };
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
    fn start(node: u16, port: u16) -> Server {
        Server::spawn(Command::new(std::env::current_exe().unwrap()), node, port)
    }

    fn spawn(mut command: Command, node: u16, port: u16) -> Server {
        let mut child = command
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env("FOREBAY_TEST_NODE", format!("{node} {port}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
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

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
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
    happened: Vec<CallEvent>,
    sequence: u64,
}

impl Asker {
    fn new(servers: &[&Server]) -> Asker {
        let mut calls = calls(100, None);
        for (i, server) in servers.iter().enumerate() {
            calls.add_node(NodeId(i as u16 + 1), &server.address).unwrap();
        }
        Asker { calls, happened: Vec::new(), sequence: 0 }
    }

    fn ask(&mut self, node: u16, name: &[u8], within: Duration) -> CallId {
        self.sequence += 1;
        let stamp = Stamp { session: 1, slot: 0, sequence: self.sequence };
        let request = Request::Lookup { parent: Ino::ROOT, name };
        let deadline = self.calls.now() + within;
        self.calls
            .call(NodeId(node), stamp, &Message::Ask(Caller { uid: 0, gid: 0 }, request), deadline)
            .unwrap()
    }

    fn turn(&mut self) {
        self.calls.progress();
        while let Some(event) = self.calls.next_event() {
            self.happened.push(event);
        }
        self.calls.wait(Duration::from_millis(5));
    }

    fn answer(&mut self, id: CallId) -> Result<Vec<u8>, Failed> {
        let start = Instant::now();
        loop {
            let of = |h: &CallEvent| matches!(h, CallEvent::Answered { call, .. } if *call == id);
            if let Some(found) = self.happened.iter().position(of) {
                let CallEvent::Answered { outcome, .. } = self.happened.remove(found) else { unreachable!() };
                return outcome.map(|body| match body.message() {
                    Message::Answer(Ok(Reply::Bytes(bytes))) => bytes.to_vec(),
                    other => panic!("{other:?}"),
                });
            }
            self.turn();
            assert!(start.elapsed() < Duration::from_secs(20), "a call that never ends");
        }
    }

    fn echo(&mut self, node: u16, name: &[u8]) -> Duration {
        let start = Instant::now();
        let id = self.ask(node, name, Duration::from_secs(10));
        assert_eq!(self.answer(id).unwrap(), name);
        start.elapsed()
    }
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

#[test]
fn peer_killed_with_work_under_way_fails_in_time_and_others_go_on() {
    if skipped() {
        return;
    }
    let (mut one, two) = (Server::start(1, 0), Server::start(2, 0));
    let mut asker = Asker::new(&[&one, &two]);
    asker.echo(1, b"hello");
    asker.echo(2, b"hello");
    let id = asker.ask(1, b"memory", Duration::from_secs(5));
    let place = asker.answer(id).unwrap();
    let word = |at: usize| u64::from_le_bytes(place[at..at + 8].try_into().unwrap());
    let remote = Memory { address: word(0), key: word(8) };
    let region = Arc::new(Region::new(BYTES).unwrap());
    let local = asker.calls.endpoint().register(region, Access::LOCAL).unwrap().local;
    let held: Vec<CallId> = (0..16).map(|_| asker.ask(1, b"hold", Duration::from_secs(60))).collect();
    asker.turn();
    // The peer is stopped, so that transfers are certainly in progress when it dies.
    one.signal(rustix::process::Signal::STOP);
    for token in 0..4 {
        let direction = if token % 2 == 0 { Direction::Read } else { Direction::Write };
        let transfer = Transfer { direction, local, local_offset: 0, remote, bytes: BYTES };
        let deadline = asker.calls.now() + Duration::from_secs(8);
        asker.calls.transfer(NodeId(1), &transfer, token, deadline).unwrap();
    }
    for _ in 0..20 {
        asker.turn();
    }
    let killed = Instant::now();
    one.child.kill().unwrap();
    one.child.wait().unwrap();
    let (mut moved, mut slowest, mut all_moved) = (0, Duration::ZERO, Duration::ZERO);
    while moved < 4 || killed.elapsed() < Duration::from_millis(500) {
        slowest = slowest.max(asker.echo(2, b"still there"));
        asker.happened.retain(|h| match h {
            CallEvent::Moved { outcome, .. } => {
                assert!(outcome.is_err());
                moved += 1;
                all_moved = killed.elapsed();
                false
            }
            _ => true,
        });
        assert!(killed.elapsed() < Duration::from_secs(10), "only {moved} of 4 transfers ended");
    }
    for id in held {
        let failed = asker.answer(id).unwrap_err();
        assert_eq!(failed.code, Code::Io);
        assert!(failed.why.contains("node 1"), "{}", failed.why);
    }
    let all = killed.elapsed();
    println!(
        "transfers ended after {all_moved:?}, calls after {all:?}; slowest echo of the other {slowest:?}"
    );
    assert!(all < UNREACHABLE + Duration::from_secs(4), "{all:?}");
    assert!(slowest < Duration::from_secs(2), "the other waited {slowest:?}");
    assert!(asker.happened.iter().any(|h| matches!(h, CallEvent::Down { node: NodeId(1), .. })));
    // Calls to the dead node now fail sooner, and the other node still answers.
    let start = Instant::now();
    let id = asker.ask(1, b"anyone?", Duration::from_secs(60));
    assert_eq!(asker.answer(id).unwrap_err().code, Code::Io);
    assert!(start.elapsed() < UNREACHABLE, "{:?}", start.elapsed());
    asker.echo(2, b"hello");
}

#[test]
fn peer_that_is_killed_and_started_again_answers_what_was_asked_meanwhile() {
    if skipped() {
        return;
    }
    let mut one = Server::start(1, 0);
    let port = one.port();
    let mut asker = Asker::new(&[&one]);
    for round in 0..3 {
        asker.echo(1, b"before");
        let before = asker.ask(1, b"hold", Duration::from_secs(1));
        asker.turn();
        one.child.kill().unwrap();
        one.child.wait().unwrap();
        let meanwhile: Vec<CallId> =
            (0..10).map(|_| asker.ask(1, b"meanwhile", Duration::from_secs(10))).collect();
        for _ in 0..20 {
            asker.turn();
        }
        one = Server::start(1, port);
        let start = Instant::now();
        for id in meanwhile {
            assert_eq!(asker.answer(id).unwrap(), b"meanwhile");
        }
        println!("round {round}: answered {:?} after the new start", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(4));
        assert!(matches!(asker.answer(before).unwrap_err().code, Code::TimedOut | Code::Io));
    }
    let starts: std::collections::BTreeSet<u64> = asker
        .happened
        .iter()
        .filter_map(|h| match h {
            CallEvent::Up { incarnation, .. } => Some(*incarnation),
            _ => None,
        })
        .collect();
    assert_eq!(starts.len(), 4, "every start is another incarnation");
}

#[test]
fn peer_that_is_stopped_for_a_while_goes_on_where_it_was() {
    if skipped() {
        return;
    }
    let (one, two) = (Server::start(1, 0), Server::start(2, 0));
    let mut asker = Asker::new(&[&one, &two]);
    asker.echo(1, b"hello");
    one.signal(rustix::process::Signal::STOP);
    let ids: Vec<CallId> = (0..50).map(|_| asker.ask(1, b"are you there", Duration::from_secs(10))).collect();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        assert!(asker.echo(2, b"meanwhile") < Duration::from_millis(1400));
    }
    one.signal(rustix::process::Signal::CONT);
    for id in ids {
        assert_eq!(asker.answer(id).unwrap(), b"are you there");
    }
    assert!(!asker.happened.iter().any(|h| matches!(h, CallEvent::Down { .. })), "it was never given up");
}

/// A client in a network namespace of its own. A bridge joins it to the namespace of the process in
/// `FOREBAY_TEST_PEER`, in which the server runs. The bridge's other port is then shut and opened. Not a test by
/// itself.
#[test]
fn cut_child() {
    let Ok(peer) = std::env::var("FOREBAY_TEST_PEER") else { return };
    let cut = Duration::from_millis(std::env::var("FOREBAY_TEST_CUT_MS").unwrap().parse().unwrap());
    let bridge = |state: &str| {
        let words = ["link", "set", "toserver", state];
        assert!(Command::new("ip").args(words).status().expect("the parent used it").success());
    };
    let mut command = Command::new("nsenter");
    command.args(["--net", "--target", &peer, "env", "FOREBAY_TEST_HOST=10.77.0.2"]);
    command.arg(std::env::current_exe().unwrap());
    let one = Server::spawn(command, 1, 0);
    let mut asker = Asker::new(&[&one]);
    asker.echo(1, b"before");
    bridge("down");
    let start = Instant::now();
    let id = asker.ask(1, b"lost", Duration::from_secs(60));
    let failed = asker.answer(id).unwrap_err();
    assert_eq!(failed.code, Code::Io);
    let told = start.elapsed();
    assert!(told < UNREACHABLE + Duration::from_secs(4), "{told:?}");
    while start.elapsed() < cut {
        asker.turn();
    }
    bridge("up");
    let healed = Instant::now();
    loop {
        let id = asker.ask(1, b"after", Duration::from_secs(5));
        if asker.answer(id).is_ok() {
            break;
        }
        assert!(healed.elapsed() < Duration::from_secs(150), "not reached again");
    }
    println!(
        "\ncut for {cut:?}: told after {told:?}, reached again {:?} after it was healed",
        healed.elapsed()
    );
}

#[test]
fn network_that_is_cut_fails_calls_in_time_and_heals_by_itself() {
    if skipped() {
        return;
    }
    // Two network namespaces joined by a bridge, in which a packet can be lost unnoticed by its sender's kernel.
    let setup = "set -e
        unshare --net sleep 300 & peer=$!
        trap 'kill $peer' EXIT
        until [ \"$(readlink /proc/$peer/ns/net)\" != \"$(readlink /proc/self/ns/net)\" ]; do sleep 0.01; done
        ip link set lo up
        ip link add joint type bridge
        ip link add toasker type veth peer name asker
        ip link add toserver type veth peer name server
        ip link set toasker master joint
        ip link set toserver master joint
        ip link set server netns $peer
        ip addr add 10.77.0.1/24 dev asker
        for i in joint toasker toserver asker; do ip link set $i up; done
        nsenter --net --target $peer sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev server; ip link set server up'";
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c", &format!("{setup}\n{script}")]);
        command
    };
    let tried = inside("true").output();
    if !tried.as_ref().is_ok_and(|o| o.status.success()) {
        return println!("skipped: no networks of its own here (unshare, ip, veth, bridge): {tried:?}");
    }
    let exe = std::env::current_exe().unwrap();
    let script = format!(
        "FOREBAY_TEST_HOST=10.77.0.1 FOREBAY_TEST_PEER=$peer '{}' --exact cut_child --nocapture --test-threads=1",
        exe.display()
    );
    let cut_ms = std::env::var("FOREBAY_TEST_CUT_MS").unwrap_or("4000".to_owned());
    let output = inside(&script).env("FOREBAY_TEST_CUT_MS", cut_ms).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("reached again"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{}", text.lines().find(|l| l.contains("reached again")).unwrap_or_default());
}
