//! The shard against the reference file system: random requests, in batches that are committed or dropped, with the
//! shard closed and opened in between. Every reply, every effect, and at the end every record must agree.

mod place;
mod reference;

use std::collections::BTreeMap;

use forebay_meta::{Batch, Effects, Shard};
use forebay_types::{
    limits, target_of, Code, Entry, Ino, Kind, Layout, NodeId, Reply, Request, SetAttr, TimeSet, Timestamp,
    RENAME_EXCHANGE, RENAME_NOREPLACE, XATTR_CREATE, XATTR_REPLACE,
};
use place::{Place, CALLER, OPTIONS};
use proptest::prelude::*;
use reference::{Expected, Reference};

/// A hash with three values, so that most directories have collisions.
fn weak_hash(name: &[u8]) -> u64 {
    1 + name.iter().map(|b| *b as u64).sum::<u64>() % 3
}

/// One step. Its numbers are resolved against what exists when it is executed.
#[derive(Clone, Copy, Debug)]
struct Step {
    op: u8,
    a: u16,
    b: u16,
    name: u8,
    other: u8,
    flag: u8,
}

fn steps(count: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<u8>(), any::<u16>(), any::<u16>(), 0u8..8, 0u8..8, any::<u8>())
        .prop_map(|(op, a, b, name, other, flag)| Step { op, a, b, name, other, flag });
    proptest::collection::vec(step, 1..count)
}

fn name(number: u8) -> Vec<u8> {
    match number {
        0 => b"a".to_vec(),
        1 => vec![0xff; 255],
        n => format!("name {n}").into_bytes(),
    }
}

fn xattr_name(number: u8) -> &'static [u8] {
    [
        b"user.one".as_slice(),
        b"user.one.more",
        b"trusted.t",
        b"security.capability",
        b"system.posix_acl_access",
        b"system.other",
        b"user.",
        b"bare",
    ][number as usize % 8]
}

/// Directory and name.
type Name = (u64, Vec<u8>);

/// The contents of a board, built from effects. They must always agree with the reference.
#[derive(Default, Clone)]
struct Board {
    names: BTreeMap<Name, Option<(Ino, Kind)>>,
    inodes: BTreeMap<u64, Option<Entry>>,
}

impl Board {
    fn take(&mut self, effects: &Effects) {
        for n in effects.names() {
            self.names.insert((n.parent.0, n.name.to_vec()), n.entry);
        }
        for (ino, entry) in effects.inodes() {
            self.inodes.insert(ino.0, *entry);
        }
    }

    fn agree(&self, fs: &Reference) {
        for ((parent, name), entry) in &self.names {
            let there = fs.nodes.get(parent).and_then(|n| n.entries.get(name));
            let there = there.map(|ino| (*ino, fs.nodes[&ino.0].attr.kind()));
            assert_eq!(*entry, there, "board's entry of {name:?} in {parent:x}");
        }
        for (ino, entry) in &self.inodes {
            assert_eq!(*entry, fs.nodes.get(ino).map(|n| n.entry()), "board's inode {ino:x}");
        }
    }
}

/// The shard, the reference and the board, driven together.
struct Pair {
    fs: Reference,
    board: Board,
    out: Vec<u8>,
    clock: i64,
    /// All inode numbers that were ever assigned.
    given: Vec<Ino>,
}

impl Pair {
    fn now(&mut self) -> Timestamp {
        self.clock += 1;
        Timestamp { sec: 1_700_000_000 + self.clock / 7, nsec: (self.clock % 7) as u32 }
    }

    /// An inode number: mostly of an existing inode, sometimes of one that is gone or never existed.
    fn ino(&self, number: u16) -> Ino {
        match number % 31 {
            0 => self.given[number as usize / 31 % self.given.len()],
            1 => Ino::new(NodeId::FIRST, 1 << 40),
            _ => Ino(*self.fs.nodes.keys().nth(number as usize / 31 % self.fs.nodes.len()).unwrap()),
        }
    }

    fn directory(&self, number: u16) -> Ino {
        let directories: Vec<_> = self.fs.nodes.values().filter(|n| n.attr.is_directory()).collect();
        match number % 23 {
            0 => self.ino(number / 23),
            _ => directories[number as usize / 23 % directories.len()].attr.ino,
        }
    }

    fn step(&mut self, batch: &mut Batch<'_>, step: Step) {
        let (parent, other) = (self.directory(step.a), self.directory(step.b));
        let (name, new_name) = (name(step.name), name(step.other));
        let (name, new_name) = (name.as_slice(), new_name.as_slice());
        let ino = self.ino(step.a);
        let flag = step.flag;
        let mode = (step.b as u32) & 0o7777;
        let long = vec![step.other; [0, 1, 100, 1700, 1701, 3400, 4095, 30_000, 65_536][flag as usize % 9]];
        let target = vec![b'x'; long.len().clamp(1, limits::PATH_MAX)];
        let layout = Layout::overstriped(NodeId::FIRST, 1, 1 + (flag % 9) as u16, 1 << 16).unwrap();
        // A create yields to the directory's layout if there is one. A directory's layout may leave its targets open.
        let made = if flag & 16 != 0 { Layout::unless_set(target_of(NodeId(2), 1)) } else { layout };
        let set_layout =
            if flag & 16 != 0 { Layout::on_any(1 + (flag % 9) as u16, 1 << 16).unwrap() } else { layout };
        let time = |n: u8| match n % 3 {
            0 => TimeSet::Omit,
            1 => TimeSet::Now,
            _ => TimeSet::At(Timestamp { sec: -(step.b as i64), nsec: step.a as u32 }),
        };
        let set = SetAttr {
            mode: (flag & 1 != 0).then_some(mode),
            uid: (flag & 2 != 0).then_some(step.a as u32),
            gid: (flag & 4 != 0).then_some(step.b as u32),
            size: (flag & 24 == 24).then_some(step.a as u64),
            atime: time(flag / 32),
            mtime: time(flag / 64),
            width_of_new: None,
        };
        let request = match step.op % 36 {
            0..=4 => Request::Create {
                parent,
                name,
                mode,
                exclusive: flag & 1 != 0,
                dirty: flag & 2 != 0,
                layout: (flag & 4 != 0).then_some(made),
                number: self.fs.reserved.get(step.b as usize % 4).copied(),
                reserve: flag & 8 != 0,
            },
            5 | 6 => Request::MakeDirectory { parent, name, mode },
            7 => Request::MakeNode {
                parent,
                name,
                mode: [0o010_000, 0o020_000, 0o060_000, 0o140_000][flag as usize % 4] | mode,
                rdev: step.b as u64,
            },
            8 | 9 => Request::Symlink { parent, name, target: &target },
            10 | 11 => Request::Link { ino, parent: other, name },
            12..=14 => Request::Unlink { parent, name },
            15 | 16 => Request::RemoveDirectory { parent, name },
            17..=22 => {
                let flags = [0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE][flag as usize % 4];
                Request::Rename { parent, name, new_parent: other, new_name, flags }
            }
            23 => Request::GetXattr { ino, name: xattr_name(step.name) },
            24 | 25 => Request::SetXattr {
                ino,
                name: xattr_name(step.name),
                value: &long,
                flags: [0, 0, XATTR_CREATE, XATTR_REPLACE][flag as usize / 9 % 4],
            },
            26 => Request::ListXattr { ino },
            27 => Request::RemoveXattr { ino, name: xattr_name(step.name) },
            28 => Request::SetAttr { ino, set },
            29 => Request::MarkDirty { ino },
            30 => Request::MakeBacking { ino },
            31 => Request::PathOf { ino: parent },
            32 => Request::Lookup { parent, name },
            33 => Request::Reserve,
            34 => Request::SetLayout { ino, layout: set_layout },
            _ => Request::ReadLink { ino },
        };
        self.apply(batch, &request);
        for request in [Request::GetAttr { ino }, Request::Lookup { parent, name: new_name }] {
            self.apply(batch, &request);
        }
    }

    fn apply(&mut self, batch: &mut Batch<'_>, request: &Request<'_>) {
        let now = self.now();
        let mut effects = Effects::new();
        let got = batch.apply(CALLER, request, now, &mut effects, &mut self.out);
        let got = got.map_err(|refusal| refusal.code());
        let orphans = self.fs.orphans.clone();
        let expected = self.fs.apply(CALLER, request, now);
        if let Ok(Expected::Created(entry, true, _) | Expected::Entry(entry)) = &expected {
            if !self.given.contains(&entry.attr.ino) {
                self.given.push(entry.attr.ino);
            }
        }
        agree(request, got, &expected);
        let new_orphans: Vec<_> = self
            .fs
            .orphans
            .iter()
            .filter(|o| !orphans.contains_key(o.0))
            .map(|(i, l)| (Ino(*i), *l))
            .collect();
        assert_eq!(effects.orphaned(), new_orphans);
        self.board.take(&effects);
        self.board.agree(&self.fs);
        if expected.is_err() && !matches!(request, Request::Lookup { .. } | Request::GetAttr { .. }) {
            assert!(effects.is_empty(), "{request:?} failed and has effects");
        }
    }

    /// Compares every directory's entries and every inode, through requests.
    fn whole_tree(&mut self, batch: &mut Batch<'_>) {
        let mut effects = Effects::new();
        let now = self.now();
        for (ino, node) in &self.fs.nodes {
            let request = Request::GetAttr { ino: Ino(*ino) };
            let got = batch.apply(CALLER, &request, now, &mut effects, &mut self.out);
            assert_eq!(got, Ok(Reply::Entry(node.entry())));
            if !node.attr.is_directory() {
                continue;
            }
            let mut seen = BTreeMap::new();
            let mut cookie = 0;
            loop {
                let request = Request::ReadDirectory { ino: Ino(*ino), cookie, attributes: true };
                let got = batch.apply(CALLER, &request, now, &mut effects, &mut self.out);
                let Ok(Reply::Entries(entries)) = got else { panic!() };
                for entry in entries.iter() {
                    let entry = entry.unwrap();
                    assert!(entry.cookie > cookie);
                    cookie = entry.cookie;
                    let there = self.fs.nodes[&entry.ino.0].attr;
                    assert_eq!(entry.attr, Some(there));
                    assert_eq!(entry.kind, there.kind());
                    assert!(seen.insert(entry.name.to_vec(), entry.ino).is_none());
                }
                if entries.end {
                    break;
                }
            }
            assert_eq!(seen, node.entries);
        }
        let orphans: BTreeMap<u64, Layout> =
            batch.orphans().unwrap().into_iter().map(|(ino, layout)| (ino.0, layout)).collect();
        assert_eq!(orphans, self.fs.orphans);
    }
}

fn agree(request: &Request<'_>, got: Result<Reply<'_>, Code>, expected: &Result<Expected, Code>) {
    let matches = match (got, expected) {
        (Err(got), Err(expected)) => got == *expected,
        (Ok(Reply::Done), Ok(Expected::Done)) => true,
        (Ok(Reply::Number(got)), Ok(Expected::Number(expected))) => got == *expected,
        (Ok(Reply::Relaid { ino, layout }), Ok(Expected::Relaid(i, l))) => (ino, layout) == (*i, *l),
        (Ok(Reply::Entry(got)), Ok(Expected::Entry(expected))) => got == *expected,
        (Ok(Reply::Created { entry, created, next }), Ok(Expected::Created(e, c, n))) => {
            (entry, created, next) == (*e, *c, *n)
        }
        (Ok(Reply::Removed { ino, .. }), Ok(Expected::Nothing)) => ino == Ino(0),
        (Ok(Reply::Removed { ino, last, kind, layout }), Ok(Expected::Removed(i, l, k, y))) => {
            (ino, last, kind) == (*i, *l, *k) && (kind != Kind::File || layout == *y)
        }
        (Ok(Reply::Bytes(got)), Ok(Expected::Bytes(expected))) => got == expected.as_slice(),
        (Ok(Reply::Bytes(got)), Ok(Expected::Names(names))) => {
            let mut found: Vec<_> =
                got.split_inclusive(|b| *b == 0).map(|n| n[..n.len() - 1].to_vec()).collect();
            found.sort();
            found == *names
        }
        _ => false,
    };
    assert!(matches, "{request:?}: got {got:?}, expected {expected:?}");
}

fn compare(steps: &[Step], hash: fn(&[u8]) -> u64) {
    let place = Place::new();
    let start = Timestamp { sec: 1, nsec: 0 };
    let mut shard = Shard::create_with_hash(place.path(), &OPTIONS, start, hash).unwrap();
    let mut pair = Pair {
        fs: Reference::new(OPTIONS.root_mode, OPTIONS.root_uid, OPTIONS.root_gid, start),
        board: Board::default(),
        out: vec![0; limits::MESSAGE_BYTES_MAX],
        clock: 0,
        given: vec![Ino::ROOT],
    };
    for batch_steps in steps.chunk_by(|a, _| a.flag % 5 != 0) {
        let before = (pair.fs.clone(), pair.board.clone());
        let mut batch = shard.begin().unwrap();
        for step in batch_steps {
            pair.step(&mut batch, *step);
        }
        match batch_steps[0].op % 8 {
            0 => {
                drop(batch);
                (pair.fs, pair.board) = before;
            }
            1 => {
                batch.commit().unwrap();
                drop(shard);
                shard = Shard::open_with_hash(place.path(), hash).unwrap();
            }
            _ => batch.commit().unwrap(),
        }
    }
    for reopened in [false, true] {
        if reopened {
            drop(shard);
            shard = Shard::open_with_hash(place.path(), hash).unwrap();
        }
        let mut batch = shard.begin().unwrap();
        pair.whole_tree(&mut batch);
        drop(batch);
        let mut files = Vec::new();
        let report = shard.check(&mut |e| files.extend(e.attr.is_file().then_some(e.attr.ino.0))).unwrap();
        assert_eq!(report.problems, Vec::<String>::new());
        assert_eq!(report.inodes as usize, pair.fs.nodes.len());
        let expected: Vec<_> = pair.fs.nodes.values().filter(|n| n.attr.is_file()).collect();
        assert_eq!(files, expected.iter().map(|n| n.attr.ino.0).collect::<Vec<_>>());
        let statistics = shard.statistics().unwrap();
        assert_eq!(statistics.inodes as usize, pair.fs.nodes.len());
        assert_eq!(statistics.orphans as usize, pair.fs.orphans.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn random_requests_agree_with_the_reference(steps in steps(250)) {
        compare(&steps, forebay_types::name_hash);
    }

    #[test]
    fn random_requests_on_names_of_equal_hash_agree_with_the_reference(steps in steps(250)) {
        compare(&steps, weak_hash);
    }
}
