//! Requests that a daemon refuses although the peer has the pool's secret, because no correct daemon sends them:
//! layouts on nodes that do not exist, names that a part of a wide directory does not own, and another protocol
//! version. A peer with a wrong clock is served.

mod support;

use std::time::{Duration, Instant};

use forebay_fabric::{CallEvent, CallId, Calls, CallsSettings};
use forebay_types::{
    Answer, Attr, Caller, Class, Code, Entry, Ino, Kind, Layout, NodeId, Part, Parts, Reply, Request,
    Timestamp, TxId,
};
use forebay_wire::{Message, Stamp, PROTOCOL_MAX};
use support::{skipped, Daemon};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Node 2, which answers requests as a node would, and sends any request.
struct Liar {
    calls: Calls,
    sequence: u64,
    /// How many parts of directories it was asked to make.
    born: u64,
    /// The reasons why node 1 was not reached.
    whys: Vec<String>,
    clocks_us: Vec<i64>,
}

fn encoded(answer: Answer<'_>) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    let n = Reply::encode_answer(&answer, &mut bytes).unwrap();
    bytes.truncate(n);
    bytes
}

fn directory(ino: Ino, of: Ino) -> Entry {
    let time = Timestamp::default();
    let attr = Attr {
        ino,
        size: 0,
        rdev: 0,
        parent: of,
        mode: Kind::Directory.mode_bits() | 0o755,
        uid: 0,
        gid: 0,
        nlink: 2,
        flags: 0,
        home: NodeId(2),
        width_log2: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
    };
    Entry { attr, layout: Layout::single(NodeId(2), 0) }
}

impl Liar {
    fn new(daemon: &Daemon, settings: CallsSettings) -> Liar {
        let calls = daemon.peer_with(&daemon.secret(), settings);
        Liar { calls, sequence: 0, born: 0, whys: Vec::new(), clocks_us: Vec::new() }
    }

    fn begin(&mut self, request: Request<'_>) -> CallId {
        self.sequence += 1;
        let daemons = if matches!(request.class(), Class::Step | Class::Peer) { 1 << 47 } else { 0 };
        let stamp = Stamp { session: 2 << 48 | daemons | 5, slot: 0, sequence: self.sequence };
        let deadline = self.calls.now() + TIMEOUT;
        let message = Message::Ask(Caller { uid: 0, gid: 0 }, request);
        self.calls.call(NodeId(1), stamp, &message, deadline).unwrap()
    }

    /// Sends a request; returns the encoded reply, or the failure's code.
    fn ask(&mut self, request: Request<'_>) -> Result<Vec<u8>, Code> {
        let asked = self.begin(request);
        loop {
            self.calls.progress();
            match self.calls.next_event() {
                Some(CallEvent::Answered { call, outcome, .. }) if call == asked => {
                    return match outcome.map_err(|failed| failed.code)?.message() {
                        Message::Answer(reply) => Ok(encoded(reply)),
                        other => panic!("{other:?}"),
                    };
                }
                Some(event) => self.hear(event),
                None => self.calls.wait(Duration::from_millis(20)),
            }
        }
    }

    /// Sends a request; returns the code of its refusal, or none.
    fn refused(&mut self, request: Request<'_>) -> Option<Code> {
        let reply = self.ask(request).unwrap_or_else(|code| panic!("{request:?}: {code}"));
        Reply::decode(&reply).err()
    }

    /// Makes a wide directory over both nodes.
    fn wide_directory(&mut self) -> (Ino, Parts) {
        let made =
            self.ask(Request::MakeDirectory { parent: Ino::ROOT, name: b"wide", mode: 0o755 }).unwrap();
        let Ok(Reply::Entry(wide)) = Reply::decode(&made) else { panic!("{made:?}") };
        let made = self.ask(Request::SetWidth { ino: wide.attr.ino, width: 2 }).unwrap();
        let Ok(Reply::Parts(parts)) = Reply::decode(&made) else { panic!("{made:?}") };
        (wide.attr.ino, parts)
    }

    fn hear(&mut self, event: CallEvent) {
        match event {
            CallEvent::Asked { ticket, body } => {
                let answer = match body.message() {
                    Message::Ask(_, Request::Prepare { part: Part::CreatePart { of, .. }, .. }) => {
                        self.born += 1;
                        Ok(Reply::Entry(directory(Ino::part(NodeId(2), 100 + self.born), of)))
                    }
                    Message::Ask(_, Request::Finish { .. }) => Ok(Reply::Done),
                    _ => Err(Code::NotSupported.into()),
                };
                self.calls.answer(&ticket, &Message::Answer(answer)).unwrap();
            }
            CallEvent::Down { failed, .. } => self.whys.push(failed.why),
            CallEvent::Up { clock_ahead_us, .. } => self.clocks_us.push(clock_ahead_us),
            _ => {}
        }
    }
}

fn create(parent: Ino, name: &[u8], layout: Option<Layout>) -> Request<'_> {
    let (number, mode) = (None, 0o644);
    Request::Create { parent, name, mode, exclusive: true, dirty: true, layout, number, reserve: false }
}

#[test]
fn layout_on_a_node_or_target_that_is_not_there_is_refused() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("layouts", 6);
    let worker = daemon.status().unwrap().pids.worker;
    let mut liar = Liar::new(&daemon, CallsSettings::default());
    let root = Ino::ROOT;
    let wide = liar.wide_directory().0;
    let on = |targets: &[u32]| Layout::on(targets, targets.len() as u16, 1 << 20).unwrap();
    for (i, layout) in [
        Layout::single(NodeId(77), 0),
        Layout::single(NodeId(2), 8),
        Layout::single(NodeId(1), 1),
        Layout::unless_set(77 << 16),
        Layout::unless_set(1 << 16 | 3),
        on(&[1 << 16, 2 << 16, 3 << 16]),
        on(&[1 << 16, 1 << 16 | 1]),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("refused {i}");
        assert_eq!(
            liar.refused(create(root, name.as_bytes(), Some(layout))),
            Some(Code::NoDevice),
            "{layout:?}"
        );
        let look = liar.refused(Request::Lookup { parent: root, name: name.as_bytes() });
        assert_eq!(look, Some(Code::NotFound), "{layout:?}");
        if layout.is_placed() {
            for ino in [root, wide] {
                let set = Request::SetLayout { ino, layout };
                assert_eq!(liar.refused(set), Some(Code::NoDevice), "{layout:?}");
            }
        }
    }
    // Layouts on existing targets are accepted: a target of each node, a target of node 2 above those in the pool file,
    // and targets that are chosen for each file.
    assert_eq!(liar.refused(create(root, b"a", Some(on(&[1 << 16, 2 << 16])))), None);
    assert_eq!(liar.refused(create(root, b"b", Some(Layout::unless_set(2 << 16)))), None);
    assert_eq!(liar.refused(create(root, b"c", Some(Layout::unless_set(2 << 16 | 1)))), None);
    let any = Request::SetLayout { ino: root, layout: Layout::on_any(4, 1 << 20).unwrap() };
    assert_eq!(liar.refused(any), None);
    liar.calls.leave("done");
    daemon.assert_unharmed(worker);
}

#[test]
fn name_that_a_part_of_a_wide_directory_has_not_is_refused_by_the_part() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("parts", 7);
    let worker = daemon.status().unwrap().pids.worker;
    let mut liar = Liar::new(&daemon, CallsSettings::default());
    let (wide, parts) = liar.wide_directory();
    let here = parts.as_slice()[0];
    assert_eq!((here.birth_node(), parts.as_slice()[1]), (NodeId(1), Ino::part(NodeId(2), 101)));
    let names: Vec<Vec<u8>> = (0..40).map(|i| format!("name {i}").into_bytes()).collect();
    let (its, others): (Vec<_>, Vec<_>) = names.iter().partition(|name| parts.of_name(name) == here);
    assert!(its.len() > 4 && others.len() > 4);
    // First names that this part owns, for use in the wrong requests.
    for name in &its {
        assert_eq!(liar.refused(create(here, name, None)), None);
    }
    for (i, name) in others.iter().enumerate() {
        let tx = TxId::new(NodeId(2), 1000 + i as u64);
        let (kind, link) = (Kind::Directory, TxId::NONE);
        let ino = Ino::new(NodeId(2), 500 + i as u64);
        let enter = Part::Enter { parent: here, name, ino, kind, link, flags: 0 };
        for request in [
            create(here, name, None),
            Request::Lookup { parent: here, name },
            Request::MakeDirectory { parent: here, name, mode: 0o755 },
            Request::MakeNode { parent: here, name, mode: Kind::Fifo.mode_bits() | 0o600, rdev: 0 },
            Request::Symlink { parent: here, name, target: b"x" },
            Request::Unlink { parent: here, name },
            Request::RemoveDirectory { parent: here, name },
            Request::Rename { parent: here, name: its[0], new_parent: here, new_name: name, flags: 0 },
            Request::Prepare { tx, index: 0, part: enter },
        ] {
            assert_eq!(liar.refused(request), Some(Code::Wide), "{request:?}");
        }
    }
    // The wide directory itself has no names.
    assert_eq!(liar.refused(create(wide, its[0], None)), Some(Code::Wide));
    assert_eq!(liar.refused(Request::Lookup { parent: here, name: its[0] }), None);
    liar.calls.leave("done");
    daemon.assert_unharmed(worker);
}

#[test]
fn peer_of_another_version_is_told_both_versions_and_so_is_the_log() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("version", 8);
    let worker = daemon.status().unwrap().pids.worker;
    let newer = PROTOCOL_MAX + 1;
    let settings = CallsSettings { protocols: (newer, newer + 1), ..CallsSettings::default() };
    let mut liar = Liar::new(&daemon, settings);
    let refused = liar.ask(Request::GetAttr { ino: Ino::ROOT }).unwrap_err();
    assert_eq!(refused, Code::NotPermitted);
    while liar.whys.is_empty() {
        let event = liar.calls.next_event().expect("it is told why");
        liar.hear(event);
    }
    let theirs =
        format!("{PROTOCOL_MAX}, node 2 speaks {newer} to {}: install one version on both", newer + 1);
    assert!(liar.whys[0].contains("node 1 speaks protocols"), "{:?}", liar.whys);
    assert!(liar.whys[0].contains(&theirs), "{:?}", liar.whys);
    let said = daemon.messages();
    assert!(said.contains("node 2 was refused") && said.contains(&theirs), "{said}");
    // The peer refuses the daemon's own requests too, and `status` reports the reason: once it has answered, which on a
    // busy machine may be after the daemon has given up on it.
    let nodes = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let end = Instant::now() + Duration::from_secs(60);
            loop {
                let nodes = daemon.status().unwrap().more["nodes"].clone();
                if !nodes[0]["why"].is_null() || Instant::now() > end {
                    return nodes;
                }
            }
        });
        while !asking.is_finished() {
            liar.calls.progress();
            while let Some(event) = liar.calls.next_event() {
                liar.hear(event);
            }
            liar.calls.wait(Duration::from_millis(10));
        }
        asking.join().unwrap()
    });
    let why = nodes[0]["why"].as_str().unwrap_or_default();
    assert!(nodes[0]["state"] == "unreachable" && why.contains("install one version on both"), "{nodes}");
    daemon.assert_unharmed(worker);
}

#[test]
fn peer_whose_clock_is_an_hour_ahead_is_told_of_and_served() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("clock", 9);
    let worker = daemon.status().unwrap().pids.worker;
    let settings = CallsSettings { clock_ahead_us: 3_600_000_000, ..CallsSettings::default() };
    let mut liar = Liar::new(&daemon, settings);
    for name in [b"a", b"b"] {
        assert_eq!(liar.refused(create(Ino::ROOT, name, Some(Layout::single(NodeId(2), 0)))), None);
    }
    let leased = liar.ask(Request::RenewLease).unwrap();
    assert!(matches!(Reply::decode(&leased), Ok(Reply::Count(_))), "{leased:?}");
    assert_eq!(liar.refused(Request::Unlink { parent: Ino::ROOT, name: b"a" }), None);
    // Seen from node 2, node 1's clock is an hour behind.
    assert!(liar.clocks_us.iter().all(|us| (*us + 3_600_000_000).abs() < 60_000_000), "{:?}", liar.clocks_us);
    assert!(!liar.clocks_us.is_empty());
    let told = |said: &str| {
        ["3599", "3600", "3601"].iter().any(|s| said.contains(&format!("the clock of node 2 is {s}")))
    };
    let until = Instant::now() + TIMEOUT;
    while !told(&daemon.messages()) {
        assert!(Instant::now() < until, "nobody was told: {}", daemon.messages());
        // The daemon logs this when it makes its own link.
        liar.refused(Request::GetAttr { ino: Ino::ROOT });
    }
    liar.calls.leave("done");
    daemon.assert_unharmed(worker);
}
