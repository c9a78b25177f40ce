//! The call layer over both kinds of endpoints: answers, refusals, deadlines, data by RMA, hosts without the secret.

use std::sync::{mpsc, Arc};
use std::time::Duration;

use forebay_fabric::libfabric::{self, LibfabricEndpoint, Settings};
use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{
    Access, CallEvent, CallId, Calls, CallsSettings, CallsThread, Direction, Endpoint, Event, Failed,
    Identity, Local, Region, Ticket, Transfer,
};
use forebay_types::{BackingId, Caller, Code, Ino, NodeId, Reply, Request};
use forebay_wire::{DataLocation, Memory, Message, Secret, Stamp};

const CALLER: Caller = Caller { uid: 1, gid: 2 };
/// A short request, and a short answer.
const PING: Message<'static> = Message::Ask(CALLER, Request::Ping);
const DONE: Message<'static> = Message::Answer(Ok(Reply::Done));

enum Bed {
    Simulated(Network, u32),
    Tcp,
}

impl Bed {
    fn simulated() -> Option<Bed> {
        Some(Bed::Simulated(Network::new(3, Faults::NONE), 0))
    }

    fn tcp() -> Option<Bed> {
        match libfabric::unusable() {
            None => Some(Bed::Tcp),
            Some(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    fn open(&mut self) -> Box<dyn Endpoint> {
        match self {
            Bed::Simulated(network, next) => {
                *next += 1;
                Box::new(network.endpoint(*next))
            }
            Bed::Tcp => Box::new(open_tcp()),
        }
    }
}

fn open_tcp() -> LibfabricEndpoint {
    let settings = Settings {
        provider: Some("tcp;ofi_rxm".to_owned()),
        host: Some("127.0.0.1".to_owned()),
        ..Settings::default()
    };
    LibfabricEndpoint::open(settings).expect("libfabric is there, and tcp needs no device")
}

fn secret(first: u8) -> Secret {
    Secret::new(&(first..first + 32).collect::<Vec<_>>()).unwrap()
}

fn settings(bed: &Bed, node: u16) -> CallsSettings {
    let seed = matches!(bed, Bed::Simulated(..)).then_some(100 + u64::from(node));
    CallsSettings {
        unreachable: Duration::from_secs(2),
        resend: Duration::from_millis(500),
        seed,
        ..CallsSettings::default()
    }
}

fn calls(bed: &mut Bed, node: u16, secret: Secret, pool: u8) -> Calls {
    let identity = Identity { pool: [pool; 16], node: NodeId(node), capacity_bytes: 1 << 30 };
    let settings = settings(bed, node);
    Calls::new(bed.open(), identity, secret, settings)
}

/// Nodes that one thread drives, numbered from 1.
struct Room {
    bed: Bed,
    nodes: Vec<Calls>,
    happened: Vec<Vec<CallEvent>>,
}

impl Room {
    fn new(mut bed: Bed, count: u16) -> Room {
        let mut nodes: Vec<Calls> = (1..=count).map(|n| calls(&mut bed, n, secret(1), 7)).collect();
        let addresses: Vec<Vec<u8>> = nodes.iter_mut().map(|n| n.endpoint().address().to_vec()).collect();
        for (i, node) in nodes.iter_mut().enumerate() {
            for (j, address) in addresses.iter().enumerate().filter(|(j, _)| *j != i) {
                node.add_node(NodeId(j as u16 + 1), address).unwrap();
            }
        }
        let happened = nodes.iter().map(|_| Vec::new()).collect();
        Room { bed, nodes, happened }
    }

    fn turn(&mut self) {
        if let Bed::Simulated(network, _) = &self.bed {
            network.turn();
        }
        for (node, happened) in self.nodes.iter_mut().zip(&mut self.happened) {
            node.progress();
            while let Some(event) = node.next_event() {
                happened.push(event);
            }
        }
    }

    /// Drives all nodes until `done` returns a value, 20 seconds at most.
    fn until<T>(&mut self, what: &str, mut done: impl FnMut(&mut Room) -> Option<T>) -> T {
        let end = self.nodes[0].now() + Duration::from_secs(20);
        loop {
            if let Some(found) = done(self) {
                return found;
            }
            self.turn();
            assert!(self.nodes[0].now() < end, "not in 20 s: {what}; {:?}", self.happened);
        }
    }

    fn ask(&mut self, from: usize, to: u16, sequence: u64, message: &Message<'_>) -> CallId {
        let stamp = Stamp { session: 5, slot: 0, sequence };
        let deadline = self.nodes[from].now() + Duration::from_secs(10);
        self.nodes[from].call(NodeId(to), stamp, message, deadline).unwrap()
    }

    fn asked(&mut self, at: usize) -> (Ticket, CallEvent) {
        self.until("a request", |room| {
            let found = room.happened[at].iter().position(|h| matches!(h, CallEvent::Asked { .. }))?;
            let event = room.happened[at].remove(found);
            let CallEvent::Asked { ticket, .. } = &event else { unreachable!() };
            Some((*ticket, event))
        })
    }

    fn outcome(&mut self, at: usize, id: CallId) -> Result<CallEvent, Failed> {
        self.until(&format!("{id:?}"), |room| {
            let of = |h: &CallEvent| matches!(h, CallEvent::Answered { call, .. } if *call == id);
            let found = room.happened[at].iter().position(of)?;
            let event = room.happened[at].remove(found);
            match &event {
                CallEvent::Answered { outcome: Err(failed), .. } => Some(Err(failed.clone())),
                _ => Some(Ok(event)),
            }
        })
    }

    fn moved(&mut self, at: usize, number: u64) -> Result<(), Failed> {
        self.until("a transfer", |room| {
            let of = |h: &CallEvent| matches!(h, CallEvent::Moved { token, .. } if *token == number);
            let found = room.happened[at].iter().position(of)?;
            match room.happened[at].remove(found) {
                CallEvent::Moved { outcome, .. } => Some(outcome),
                _ => None,
            }
        })
    }
}

fn message_of(event: &CallEvent) -> Message<'_> {
    match event {
        CallEvent::Asked { body, .. } | CallEvent::Answered { outcome: Ok(body), .. } => body.message(),
        other => panic!("{other:?} has no message"),
    }
}

fn lookup(name: &[u8]) -> Message<'_> {
    Message::Ask(CALLER, Request::Lookup { parent: Ino::ROOT, name })
}

fn requests_are_answered_in_any_order(bed: Bed) {
    let mut room = Room::new(bed, 3);
    let names: Vec<String> = (0..200).map(|i| format!("name {i}")).collect();
    let ids: Vec<CallId> =
        names.iter().enumerate().map(|(i, n)| room.ask(0, 2, i as u64, &lookup(n.as_bytes()))).collect();
    let mut tickets: Vec<(Ticket, Vec<u8>)> = Vec::new();
    for _ in &names {
        let (ticket, event) = room.asked(1);
        let Message::Ask(CALLER, Request::Lookup { name, .. }) = message_of(&event) else { panic!() };
        assert_eq!((ticket.node, ticket.stamp.session), (NodeId(1), 5));
        tickets.push((ticket, name.to_vec()));
    }
    for (ticket, name) in tickets.iter().rev() {
        room.nodes[1].answer(ticket, &Message::Answer(Ok(Reply::Bytes(name)))).unwrap();
    }
    for (id, name) in ids.into_iter().zip(&names) {
        let event = room.outcome(0, id).unwrap();
        assert_eq!(message_of(&event), Message::Answer(Ok(Reply::Bytes(name.as_bytes()))));
    }
    // The other direction has a link of its own. A failure carries a code and a text.
    let id = room.ask(1, 1, 1, &PING);
    let (ticket, _) = room.asked(0);
    room.nodes[0].answer(&ticket, &Message::Failure { code: Code::Stale, detail: b"restarted" }).unwrap();
    let failed = room.outcome(1, id).unwrap_err();
    assert_eq!((failed.code, failed.why.as_str()), (Code::Stale, "node 1: restarted"));
    let joined =
        |h: &CallEvent| matches!(h, CallEvent::Joined { node: NodeId(1), capacity_bytes: 0x4000_0000, .. });
    assert_eq!(room.happened[1].iter().filter(|h| joined(h)).count(), 1);
    assert!(room.happened[0].iter().any(|h| matches!(h, CallEvent::Up { node: NodeId(2), .. })));
    for node in &room.nodes {
        // On a busy machine a slow handshake is sent again. The second answer to it then counts as replayed.
        let s = node.statistics();
        assert_eq!(s.forged, 0, "{s:?}");
    }
}

fn what_cannot_be_asked_or_answered_is_refused(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let deadline = room.nodes[0].now() + Duration::from_secs(5);
    let mut call = |node, stamp, message| room.nodes[0].call(node, stamp, &message, deadline);
    let stamp = Stamp::default();
    assert_eq!(call(NodeId(9), stamp, PING), Err(Code::Invalid), "an unknown node");
    assert_eq!(call(NodeId(2), stamp, DONE), Err(Code::Invalid), "an answer");
    assert_eq!(call(NodeId(2), Stamp { slot: 5000, ..stamp }, PING), Err(Code::Invalid));
    let stripe = BackingId { target: 1 << 16, ino: Ino(1), number: 9, stripe: 0 };
    let read = Message::ReadStripe { id: stripe, offset: 0, bytes: 1, to: DataLocation::Inline(&[]) };
    assert_eq!(call(NodeId(2), stamp, read), Err(Code::Invalid), "no such backing file");
    let own = room.nodes[0].endpoint().address().to_vec();
    assert_eq!(room.nodes[0].add_node(NodeId(1), &own), Err(Code::Invalid), "itself");
    // The server's call layer refuses a malformed name. The server's user never receives the request.
    let id = room.ask(0, 2, 1, &Message::Ask(CALLER, Request::Unlink { parent: Ino::ROOT, name: b"a/b" }));
    let failed = room.outcome(0, id).unwrap_err();
    assert_eq!(failed.code, Code::Invalid);
    assert!(!room.happened[1].iter().any(|h| matches!(h, CallEvent::Asked { .. })));
    let id = room.ask(0, 2, 2, &PING);
    let (ticket, _) = room.asked(1);
    assert_eq!(room.nodes[1].answer(&ticket, &PING), Err(Code::Invalid), "a request");
    let late = room.nodes[0].now();
    let timed = room.nodes[0].call(NodeId(2), stamp, &PING, late + Duration::from_millis(300)).unwrap();
    let failed = room.outcome(0, timed).unwrap_err();
    assert_eq!(failed.code, Code::TimedOut);
    assert!(failed.why.contains("node 2"), "{}", failed.why);
    let waited = room.nodes[0].now() - late;
    assert!((300..5000).contains(&waited.as_millis()), "{waited:?}");
    room.nodes[1].answer(&ticket, &DONE).unwrap();
    room.outcome(0, id).unwrap();
}

fn slow_requests_are_handed_out_once(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let id = room.ask(0, 2, 1, &PING);
    let (ticket, _) = room.asked(1);
    // Three times the interval of resends.
    let end = room.nodes[0].now() + Duration::from_millis(1700);
    room.until("time", |room| (room.nodes[0].now() > end).then_some(()));
    assert!(room.nodes[0].statistics().resent >= 2 && room.nodes[1].statistics().repeated >= 2);
    assert!(!room.happened[1].iter().any(|h| matches!(h, CallEvent::Asked { .. })), "handed out twice");
    room.nodes[1].answer(&ticket, &DONE).unwrap();
    room.outcome(0, id).unwrap();
}

fn data_go_by_rma_between_asker_and_server(bed: Bed) {
    let mut room = Room::new(bed, 2);
    const BYTES: usize = 3 << 20;
    let pattern: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
    let (mine, bounce) = (Arc::new(Region::new(BYTES).unwrap()), Arc::new(Region::new(BYTES).unwrap()));
    mine.write_at(0, &pattern).unwrap();
    let asker = room.nodes[0].endpoint().register(mine.clone(), Access::BOTH).unwrap();
    let server = room.nodes[1].endpoint().register(bounce.clone(), Access::LOCAL).unwrap();
    let stripe = BackingId { target: 1 << 16, ino: Ino(77), number: 0, stripe: 3 };
    let place = DataLocation::Remote(asker.remote);
    for (sequence, writes) in [(1, true), (2, false)] {
        let message = if writes {
            Message::WriteStripe { id: stripe, append: false, offset: 0, bytes: BYTES as u64, from: place }
        } else {
            Message::ReadStripe { id: stripe, offset: 0, bytes: BYTES as u64, to: place }
        };
        let id = room.ask(0, 2, sequence, &message);
        let (ticket, event) = room.asked(1);
        let (direction, remote) = match message_of(&event) {
            Message::WriteStripe { from: DataLocation::Remote(memory), .. } => (Direction::Read, memory),
            Message::ReadStripe { to: DataLocation::Remote(memory), .. } => (Direction::Write, memory),
            other => panic!("{other:?}"),
        };
        let deadline = room.nodes[1].now() + Duration::from_secs(5);
        let transfer = Transfer { direction, local: server.local, local_offset: 0, remote, bytes: BYTES };
        let other_start = Ticket { incarnation: ticket.incarnation ^ 1, ..ticket };
        let refused = room.nodes[1].transfer_for(&other_start, &transfer, 30 + sequence, deadline);
        assert_eq!(refused, Err(Code::Stale), "the memory of another start of the node");
        room.nodes[1].transfer_for(&ticket, &transfer, 40 + sequence, deadline).unwrap();
        assert_eq!(room.moved(1, 40 + sequence), Ok(()));
        room.nodes[1].answer(&ticket, &Message::Answer(Ok(Reply::Count(BYTES as u64)))).unwrap();
        let event = room.outcome(0, id).unwrap();
        assert_eq!(message_of(&event), Message::Answer(Ok(Reply::Count(BYTES as u64))));
        let mut back = vec![0; BYTES];
        if writes {
            bounce.read_at(0, &mut back).unwrap();
            mine.write_at(0, &vec![0; BYTES]).unwrap();
        } else {
            mine.read_at(0, &mut back).unwrap();
        }
        assert!(back == pattern);
    }
    let deadline = room.nodes[1].now() + Duration::from_secs(5);
    let bad = Transfer {
        direction: Direction::Read,
        local: Local(424_242),
        local_offset: 0,
        remote: Memory { address: 0, key: 0 },
        bytes: 1,
    };
    assert_eq!(room.nodes[1].transfer(NodeId(1), &bad, 1, deadline), Err(Code::Fault));
    assert_eq!(room.nodes[1].transfer(NodeId(1), &bad, 1 << 63, deadline), Err(Code::Invalid));
    assert_eq!(room.nodes[1].transfer(NodeId(5), &bad, 1, deadline), Err(Code::Invalid));
}

fn strangers_are_neither_heard_nor_harmful(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let address = room.nodes[1].endpoint().address().to_vec();
    let mut other_secret = calls(&mut room.bed, 3, secret(50), 7);
    other_secret.add_node(NodeId(2), &address).unwrap();
    let mut other_pool = calls(&mut room.bed, 4, secret(1), 8);
    other_pool.add_node(NodeId(2), &address).unwrap();
    let mut garbage = room.bed.open();
    let to = garbage.connect(&address).unwrap();

    let deadline = garbage.now() + Duration::from_secs(10);
    let failed_of = |calls: &mut Calls, room: &mut Room| -> Failed {
        calls.call(NodeId(2), Stamp::default(), &PING, deadline).unwrap();
        loop {
            room.turn();
            calls.progress();
            while let Some(event) = calls.next_event() {
                if let CallEvent::Answered { outcome: Err(failed), .. } = event {
                    return failed;
                }
            }
            assert!(calls.now() < deadline, "no answer");
        }
    };
    let failed = failed_of(&mut other_secret, &mut room);
    assert_eq!(failed.code, Code::Io);
    assert!(failed.why.contains("node 2") && failed.why.contains("secret"), "{}", failed.why);
    let failed = failed_of(&mut other_pool, &mut room);
    assert_eq!(failed.code, Code::NotPermitted);
    assert!(failed.why.contains("another pool"), "{}", failed.why);
    assert!(room.nodes[1].statistics().forged > 0);

    let (mut numbers, mut done) = (forebay_fabric::Numbers::new(9), 0);
    for token in 0..300 {
        let bytes: Vec<u8> = (0..numbers.below(400)).map(|_| numbers.draw() as u8).collect();
        let mut frame = bytes;
        if token % 3 == 0 && frame.len() > 8 {
            frame[..8].copy_from_slice(b"FBAY\x01\x00\x0a\x00");
        }
        let deadline = garbage.now() + Duration::from_secs(5);
        garbage.send(to, token, &frame, token, deadline).unwrap();
        garbage.progress(&mut |e| done += u64::from(matches!(e, Event::Done { .. } | Event::Failed { .. })));
        room.turn();
    }
    room.until("garbage delivered", |_| {
        garbage.progress(&mut |e| done += u64::from(matches!(e, Event::Done { .. } | Event::Failed { .. })));
        (done == 300).then_some(())
    });
    let id = room.ask(0, 2, 1, &PING);
    let (ticket, _) = room.asked(1);
    assert_eq!(ticket.node, NodeId(1));
    room.nodes[1].answer(&ticket, &DONE).unwrap();
    room.outcome(0, id).unwrap();
    let s = room.nodes[1].statistics();
    assert!(s.unusable > 200, "{s:?}");
    assert!(!room.happened[1].iter().any(|h| matches!(h, CallEvent::Joined { node: NodeId(3 | 4), .. })));
}

fn calls_beyond_their_bounds_are_refused(mut bed: Bed) {
    let few = |bed: &mut Bed, node: u16, calls_per_node: usize| {
        let identity = Identity { pool: [7; 16], node: NodeId(node), capacity_bytes: 0 };
        let settings = CallsSettings { calls_per_node, ..settings(bed, node) };
        Calls::new(bed.open(), identity, secret(1), settings)
    };
    let (mut asker, mut server) = (few(&mut bed, 1, 10), few(&mut bed, 2, 4));
    asker.add_node(NodeId(2), server.endpoint().address()).unwrap();
    let mut room = Room { bed, nodes: vec![asker, server], happened: vec![Vec::new(), Vec::new()] };
    let ids: Vec<CallId> = (0..10).map(|i| room.ask(0, 2, i, &PING)).collect();
    let deadline = room.nodes[0].now() + Duration::from_secs(5);
    let more = room.nodes[0].call(NodeId(2), Stamp::default(), &PING, deadline);
    assert_eq!(more, Err(Code::Busy), "the asker's own bound");
    // The server accepts twice its limit and refuses the others.
    let refused: Vec<Code> = ids[8..].iter().map(|id| room.outcome(0, *id).unwrap_err().code).collect();
    assert_eq!(refused, [Code::Busy, Code::Busy]);
    for _ in 0..8 {
        let (ticket, _) = room.asked(1);
        room.nodes[1].answer(&ticket, &DONE).unwrap();
    }
    for id in &ids[..8] {
        room.outcome(0, *id).unwrap();
    }
}

fn leaving_in_order_is_told_at_once(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let id = room.ask(0, 2, 1, &PING);
    room.asked(1);
    let start = room.nodes[0].now();
    room.nodes[1].leave("the pool goes down");
    let failed = room.outcome(0, id).unwrap_err();
    assert!(failed.why.contains("node 2 has left: the pool goes down"), "{}", failed.why);
    assert!(room.nodes[0].now() - start < Duration::from_secs(1));
    let down = |h: &CallEvent| matches!(h, CallEvent::Down { node: NodeId(2), .. });
    assert!(room.happened[0].iter().any(down));
    // The node is in fact alive, and the next call reaches it again.
    let id = room.ask(0, 2, 2, &PING);
    let (ticket, _) = room.asked(1);
    room.nodes[1].answer(&ticket, &DONE).unwrap();
    room.outcome(0, id).unwrap();
    room.nodes[0].remove_node(NodeId(2));
    let deadline = room.nodes[0].now() + Duration::from_secs(1);
    assert_eq!(room.nodes[0].call(NodeId(2), Stamp::default(), &PING, deadline), Err(Code::Invalid));
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod simulated { $(#[test] fn $name() { super::$name(super::Bed::simulated().unwrap()); })* }
        mod tcp { $(#[test] fn $name() { if let Some(bed) = super::Bed::tcp() { super::$name(bed); } })* }
    };
}

suite! {
    requests_are_answered_in_any_order,
    what_cannot_be_asked_or_answered_is_refused,
    slow_requests_are_handed_out_once,
    data_go_by_rma_between_asker_and_server,
    strangers_are_neither_heard_nor_harmful,
    calls_beyond_their_bounds_are_refused,
    leaving_in_order_is_told_at_once,
}

#[test]
fn threads_of_calls_sleep_serve_and_end() {
    if let Some(why) = libfabric::unusable() {
        return println!("skipped: {why}");
    }
    let mut bed = Bed::Tcp;
    let mut server = calls(&mut bed, 2, secret(1), 7);
    let address = server.endpoint().address().to_vec();
    let server = CallsThread::start("server", server, |calls, event| {
        if let CallEvent::Asked { ticket, body } = event {
            let Message::Ask(_, Request::Lookup { name, .. }) = body.message() else { panic!() };
            calls.answer(&ticket, &Message::Answer(Ok(Reply::Bytes(name)))).unwrap();
        }
    })
    .unwrap();
    let mut client = calls(&mut bed, 1, secret(1), 7);
    client.add_node(NodeId(2), &address).unwrap();
    let (sender, answers) = mpsc::channel();
    let client = CallsThread::start("client", client, move |_, event| {
        if let CallEvent::Answered { outcome, .. } = event {
            let _ = sender.send(outcome.is_ok());
        }
    })
    .unwrap();
    for _ in 0..100 {
        let ask = |calls: &mut Calls| {
            let deadline = calls.now() + Duration::from_secs(5);
            calls.call(NodeId(2), Stamp::default(), &lookup(b"name"), deadline).unwrap();
        };
        client.hand(ask).unwrap();
        assert!(answers.recv_timeout(Duration::from_secs(5)).unwrap());
    }
    // The thread sleeps while it has no work. A thread that spins would use the whole time.
    let used = || {
        let (sender, time) = mpsc::channel();
        client
            .hand(move |_| {
                let _ = sender.send(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime));
            })
            .unwrap();
        let time = time.recv_timeout(Duration::from_secs(5)).unwrap();
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    let before = used();
    std::thread::sleep(Duration::from_millis(400));
    let ms = (used() - before) / 1_000_000;
    assert!(ms < 100, "{ms} ms of 400 while nothing happened");
    drop(client);
    drop(server);
}

// --- frames that leave in one message

/// Sends several requests before any leaves, and answers all before any answer leaves.
fn several_at_once(bed: Option<Bed>) {
    let Some(bed) = bed else { return };
    let mut room = Room::new(bed, 2);
    let first = room.ask(0, 2, 1, &Message::Ask(CALLER, Request::Ping));
    let (ticket, _) = room.asked(1);
    room.nodes[1].answer(&ticket, &Message::Answer(Ok(Reply::Done))).unwrap();
    room.outcome(0, first).unwrap();
    let (mut sent, mut came) = (Vec::new(), Vec::new());
    let before: Vec<_> = room.nodes.iter().map(Calls::statistics).collect();
    room.nodes[0].gather();
    // Names long enough that they need more than one message, and one frame that fills a message alone.
    let long = [b'v'; 20_000];
    for i in 0..40u16 {
        let name = format!("{i:0200}");
        let message = match i {
            20 => Request::SetXattr { ino: Ino(1), name: name.as_bytes(), value: &long, flags: 0 },
            _ => Request::Lookup { parent: Ino(i.into()), name: name.as_bytes() },
        };
        let stamp = Stamp { session: 5, slot: i, sequence: 9 };
        let deadline = room.nodes[0].now() + Duration::from_secs(10);
        sent.push(room.nodes[0].call(NodeId(2), stamp, &Message::Ask(CALLER, message), deadline).unwrap());
    }
    room.nodes[0].send_gathered();
    room.nodes[1].gather();
    while came.len() < sent.len() {
        let (ticket, _) = room.asked(1);
        room.nodes[1].gather();
        let reply = Reply::Count(u64::from(ticket.stamp.slot));
        room.nodes[1].answer(&ticket, &Message::Answer(Ok(reply))).unwrap();
        came.push(ticket.stamp.slot);
    }
    room.nodes[1].send_gathered();
    assert!(came.iter().copied().eq(0..40), "in the order in which they were asked: {came:?}");
    for (i, id) in sent.into_iter().enumerate() {
        let Ok(CallEvent::Answered { outcome: Ok(body), .. }) = room.outcome(0, id) else { panic!() };
        assert_eq!(body.message(), Message::Answer(Ok(Reply::Count(i as u64))));
    }
    for (node, before) in room.nodes.iter().zip(before) {
        let s = node.statistics();
        let (messages, frames) = (s.messages_in - before.messages_in, s.frames_in - before.frames_in);
        assert!(frames >= 40 && messages < frames / 2, "{frames} frames in {messages} messages");
        assert_eq!((s.forged, s.replayed, s.unusable, s.resent), (0, 0, 0, 0));
    }
}

#[test]
fn what_leaves_together_is_answered_one_by_one_simulated() {
    several_at_once(Bed::simulated());
}

#[test]
fn what_leaves_together_is_answered_one_by_one_tcp() {
    several_at_once(Bed::tcp());
}

/// Answers requests whose transfers start in one round, as a node does whose data are read.
fn answers_behind_transfers(bed: Option<Bed>) {
    let Some(bed) = bed else { return };
    let mut room = Room::new(bed, 2);
    const BYTES: usize = 1 << 20;
    const COUNT: u16 = 4;
    let (theirs, mine) = (Arc::new(Region::new(BYTES).unwrap()), Arc::new(Region::new(BYTES).unwrap()));
    mine.write_at(0, &vec![5; BYTES]).unwrap();
    let remote = room.nodes[0].endpoint().register(theirs.clone(), Access::BOTH).unwrap().remote;
    let local = room.nodes[1].endpoint().register(mine, Access::LOCAL).unwrap().local;
    for (bytes, are_short) in [(64 << 10, true), (BYTES, false)] {
        theirs.write_at(0, &vec![0; BYTES]).unwrap();
        let sequence = bytes as u64;
        let asked: Vec<_> = (0..COUNT).map(|i| room.ask(0, 2, sequence + u64::from(i), &PING)).collect();
        let tickets: Vec<_> = asked.iter().map(|_| room.asked(1).0).collect();
        let before = room.nodes[0].statistics();
        let deadline = room.nodes[1].now() + Duration::from_secs(10);
        room.nodes[1].gather();
        for (i, ticket) in (0..).zip(&tickets) {
            let direction = Direction::Write;
            let transfer = Transfer { direction, local, local_offset: 0, remote, bytes };
            room.nodes[1].transfer_for(ticket, &transfer, sequence + i, deadline).unwrap();
            room.nodes[1].answer(ticket, &Message::Answer(Ok(Reply::Count(i)))).unwrap();
        }
        room.nodes[1].send_gathered();
        for (i, id) in (0..).zip(asked) {
            let event = room.outcome(0, id).unwrap();
            assert_eq!(message_of(&event), Message::Answer(Ok(Reply::Count(i))));
            let mut last = [0];
            theirs.read_at(bytes - 1, &mut last).unwrap();
            assert_eq!(last, [5], "the answer has overtaken its data");
        }
        let after = room.nodes[0].statistics();
        let (messages, frames) = (after.messages_in - before.messages_in, after.frames_in - before.frames_in);
        let alone = frames - u64::from(COUNT) + u64::from(if are_short { 1 } else { COUNT });
        assert_eq!(messages, alone, "{frames} frames behind transfers of {bytes} bytes");
    }
}

#[test]
fn answers_leave_together_behind_short_transfers_and_each_behind_its_long_one_simulated() {
    answers_behind_transfers(Bed::simulated());
}

#[test]
fn answers_leave_together_behind_short_transfers_and_each_behind_its_long_one_tcp() {
    answers_behind_transfers(Bed::tcp());
}
