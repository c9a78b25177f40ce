//! Cross-node transactions: three shards in one process, a network between them that loses messages, and nodes that are
//! restarted at every step. After each history every acknowledged change is there, and no other; names, links and
//! parents of all shards agree; no transaction is in doubt, no delivery is left, nothing is held.

mod shards;
mod stores;
mod wide;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_meta::{Act, Client, Delivery, Transactions};
use forebay_types::{Code, Ino, Kind, NodeId, Reply, Request, SetAttr, TxId, RENAME_NOREPLACE};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};
use shards::{Said, Shards};

const ROOT: Ino = Ino::ROOT;

fn rename<'a>(parent: Ino, name: &'a [u8], new_parent: Ino, new_name: &'a [u8], flags: u32) -> Request<'a> {
    Request::Rename { parent, name, new_parent, new_name, flags }
}

#[test]
fn directory_of_another_shard_is_made_listed_and_removed() {
    let mut p = Shards::new("made");
    let d = p.make_directory(2, ROOT, b"d");
    assert_eq!(d.birth_node(), NodeId(2));
    assert_eq!(p.ask(&Request::Lookup { parent: ROOT, name: b"d" }), Ok(Said::Elsewhere(d)));
    assert_eq!(p.ask(&Request::GetAttr { ino: ROOT }), Ok(Said::Inode(ROOT, 3, 1)));
    assert_eq!(p.mkdir(3, ROOT, b"d"), Err(Code::Exists));
    let file = p.create(d, b"f").unwrap();
    assert_eq!(file.birth_node(), NodeId(2), "files are where their directory is");
    let deep = p.inode(&Request::MakeDirectory { parent: d, name: b"e", mode: 0 });
    assert_eq!(p.ask(&Request::PathOf { ino: deep }), Ok(Said::Part(d, ROOT, b"/e".to_vec())));
    assert_eq!(p.ask(&Request::NameOf { parent: ROOT, ino: d }), Ok(Said::Bytes(b"d".to_vec())));
    let remove = Request::RemoveDirectory { parent: ROOT, name: b"d" };
    assert_eq!(p.ask(&remove), Err(Code::NotEmpty));
    p.ask(&Request::Unlink { parent: d, name: b"f" }).unwrap();
    p.ask(&Request::RemoveDirectory { parent: d, name: b"e" }).unwrap();
    assert_eq!(p.ask(&remove), Ok(Said::Removed(d)));
    assert_eq!(p.ask(&Request::GetAttr { ino: d }), Err(Code::NotFound));
    assert_eq!(p.ask(&Request::GetAttr { ino: ROOT }), Ok(Said::Inode(ROOT, 2, 0)));
    p.check();
}

#[test]
fn links_to_files_of_other_shards_are_counted() {
    let mut p = Shards::new("links");
    let (two, three) = (p.make_directory(2, ROOT, b"two"), p.make_directory(3, ROOT, b"three"));
    let file = p.create(two, b"f").unwrap();
    let link = |ino, parent, name| Request::Link { ino, parent, name };
    assert_eq!(p.ask(&link(file, ROOT, b"a")), Ok(Said::Inode(file, 2, 0)));
    assert_eq!(p.ask(&link(file, three, b"b")), Ok(Said::Inode(file, 3, 0)));
    assert_eq!(p.ask(&link(file, three, b"b")), Err(Code::Exists));
    assert_eq!(p.ask(&link(two, three, b"c")), Err(Code::NotPermitted), "of a directory");
    assert_eq!(p.ask(&link(Ino::new(NodeId(2), 99), three, b"c")), Err(Code::NotFound));
    assert_eq!(p.ask(&Request::Lookup { parent: three, name: b"b" }), Ok(Said::Elsewhere(file)));
    // An entry for another node's file among local ones: it is renamed, and replaced by a local file.
    p.ask(&rename(three, b"b", three, b"c", 0)).unwrap();
    let sub = p.inode(&Request::MakeDirectory { parent: three, name: b"sub", mode: 0 });
    p.ask(&rename(three, b"c", sub, b"c", 0)).unwrap();
    let own = p.create(three, b"own").unwrap();
    assert_eq!(p.ask(&rename(three, b"own", sub, b"c", 0)), Ok(Said::Removed(file)));
    assert_eq!(p.ask(&Request::GetAttr { ino: file }), Ok(Said::Inode(file, 2, 0)));
    assert_eq!(p.ask(&Request::Lookup { parent: sub, name: b"c" }), Ok(Said::Inode(own, 1, 0)));
    // The file's first name is removed, then its last.
    assert_eq!(p.ask(&Request::Unlink { parent: two, name: b"f" }), Ok(Said::Removed(file)));
    assert_eq!(p.ask(&Request::GetAttr { ino: file }), Ok(Said::Inode(file, 1, 0)));
    p.check();
    assert_eq!(p.ask(&Request::Unlink { parent: ROOT, name: b"a" }), Ok(Said::Removed(file)));
    assert_eq!(p.ask(&Request::GetAttr { ino: file }), Err(Code::NotFound));
    assert_eq!(p.orphans(2), [file]);
    p.check();
}

#[test]
fn files_are_renamed_from_shard_to_shard_and_back() {
    let mut p = Shards::new("files");
    let dirs =
        [p.make_directory(1, ROOT, b"1"), p.make_directory(2, ROOT, b"2"), p.make_directory(3, ROOT, b"3")];
    let file = p.create(dirs[0], b"f").unwrap();
    for (from, to) in [(0, 1), (1, 2), (2, 1), (1, 0), (0, 2), (2, 0)] {
        assert_eq!(p.ask(&rename(dirs[from], b"f", dirs[to], b"f", 0)), Ok(Said::Removed(Ino(0))));
        assert_eq!(p.ask(&Request::GetAttr { ino: file }), Ok(Said::Inode(file, 1, 0)));
        assert_eq!(p.ask(&Request::Lookup { parent: dirs[from], name: b"f" }), Err(Code::NotFound));
        p.check();
    }
    let other = p.create(dirs[1], b"g").unwrap();
    assert_eq!(p.ask(&rename(dirs[0], b"f", dirs[1], b"g", RENAME_NOREPLACE)), Err(Code::Exists));
    assert_eq!(p.ask(&rename(dirs[0], b"none", dirs[1], b"g", 0)), Err(Code::NotFound));
    assert_eq!(p.ask(&rename(dirs[0], b"f", ROOT, b"2", 0)), Err(Code::IsDirectory));
    assert_eq!(p.ask(&rename(dirs[0], b"f", dirs[1], b"g", 0)), Ok(Said::Removed(other)));
    assert_eq!(p.orphans(2), [other]);
    // Two names of one inode on two nodes: nothing to do.
    p.ask(&Request::Link { ino: file, parent: dirs[0], name: b"f" }).unwrap();
    assert_eq!(p.ask(&rename(dirs[0], b"f", dirs[1], b"g", 0)), Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&Request::GetAttr { ino: file }), Ok(Said::Inode(file, 2, 0)));
    p.check();
}

#[test]
fn directories_move_between_shards_but_not_below_themselves() {
    let mut p = Shards::new("directories");
    let a = p.make_directory(2, ROOT, b"a");
    let b = p.make_directory(3, ROOT, b"b");
    let c = p.make_directory(1, a, b"c");
    let d = p.make_directory(3, c, b"d");
    let file = p.create(d, b"f").unwrap();
    assert_eq!(p.ask(&rename(ROOT, b"a", d, b"x", 0)), Err(Code::Invalid), "below itself, over three nodes");
    assert_eq!(p.ask(&rename(ROOT, b"a", a, b"x", 0)), Err(Code::Invalid));
    assert_eq!(p.ask(&rename(a, b"c", b, b"c", 0)), Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&Request::Lookup { parent: b, name: b"c" }), Ok(Said::Elsewhere(c)));
    assert_eq!(p.ask(&Request::GetAttr { ino: a }), Ok(Said::Inode(a, 2, 0)));
    assert_eq!(p.ask(&Request::GetAttr { ino: b }), Ok(Said::Inode(b, 3, 1)));
    assert_eq!(p.ask(&Request::NameOf { parent: b, ino: c }), Ok(Said::Bytes(b"c".to_vec())));
    p.check();
    // A directory replaces an empty directory of another node, but not one that is not empty, and not a file.
    let empty = p.make_directory(3, a, b"empty");
    assert_eq!(p.ask(&rename(b, b"c", a, b"empty", 0)), Ok(Said::Removed(empty)));
    assert_eq!(p.ask(&Request::GetAttr { ino: empty }), Err(Code::NotFound));
    p.make_directory(1, b, b"sub");
    assert_eq!(p.ask(&rename(a, b"empty", ROOT, b"b", 0)), Err(Code::NotEmpty));
    p.create(ROOT, b"file").unwrap();
    assert_eq!(p.ask(&rename(a, b"empty", ROOT, b"file", 0)), Err(Code::NotDirectory));
    assert_eq!(p.ask(&rename(a, b"empty", ROOT, b"b", RENAME_NOREPLACE)), Err(Code::Exists));
    assert_eq!(p.ask(&Request::Lookup { parent: d, name: b"f" }), Ok(Said::Inode(file, 1, 0)));
    // A rename within one directory, over an empty directory of another node.
    p.make_directory(3, a, b"other");
    assert_eq!(p.ask(&rename(a, b"empty", a, b"other", 0)).map(|_| ()), Ok(()));
    p.check();
}

#[test]
fn requests_wait_for_what_a_prepared_part_holds() {
    let mut p = Shards::new("waits");
    let two = p.make_directory(2, ROOT, b"two");
    let file = p.create(ROOT, b"f").unwrap();
    // The decision is made, and the message to the other node is lost.
    p.network.lose_to = Some((NodeId(2), 1));
    assert_eq!(p.ask(&rename(ROOT, b"f", two, b"g", 0)), Ok(Said::Removed(Ino(0))), "decided all the same");
    assert_eq!(p.ask(&Request::Lookup { parent: ROOT, name: b"f" }), Err(Code::NotFound));
    for request in [
        Request::Lookup { parent: two, name: b"g" },
        Request::Unlink { parent: two, name: b"g" },
        Request::Link { ino: two, parent: two, name: b"g" },
        rename(two, b"g", two, b"h", 0),
        Request::RemoveDirectory { parent: two, name: b"g" },
        Request::ReadDirectory { ino: two, cookie: 0, attributes: false },
    ] {
        assert!(p.waits(&request), "{request:?}");
    }
    assert!(!p.waits(&Request::Lookup { parent: two, name: b"h" }));
    // The directory gets an entry, so it cannot be removed before or after the commit.
    p.network.lose_to = None;
    assert_eq!(p.ask(&Request::RemoveDirectory { parent: ROOT, name: b"two" }), Err(Code::NotEmpty));
    p.settle();
    assert_eq!(p.ask(&Request::Lookup { parent: two, name: b"g" }), Ok(Said::Elsewhere(file)));
    p.check();
}

#[test]
fn name_that_leads_elsewhere_since_the_plan_is_planned_anew() {
    let mut p = Shards::new("replanned");
    let two = p.make_directory(2, ROOT, b"two");
    p.create(ROOT, b"f").unwrap();
    let other = p.create(ROOT, b"h").unwrap();
    let done = p.ask_while(&rename(ROOT, b"f", two, b"g", 0), |p| {
        p.apply_here(&rename(ROOT, b"h", ROOT, b"f", 0));
    });
    assert_eq!(done, Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&Request::Lookup { parent: two, name: b"g" }), Ok(Said::Elsewhere(other)));
    // Two links to one file of another node, each with a record there: the rename must move the right one.
    let theirs = p.create(two, b"t").unwrap();
    for name in [b"a", b"b"] {
        p.ask(&Request::Link { ino: theirs, parent: ROOT, name }).unwrap();
    }
    let three = p.make_directory(3, ROOT, b"three");
    let done = p.ask_while(&rename(ROOT, b"a", three, b"a", 0), |p| {
        p.apply_here(&Request::Unlink { parent: ROOT, name: b"a" });
        p.apply_here(&rename(ROOT, b"b", ROOT, b"a", 0));
    });
    assert_eq!(done, Ok(Said::Removed(Ino(0))));
    p.settle();
    assert_eq!(p.ask(&Request::GetAttr { ino: theirs }), Ok(Said::Inode(theirs, 2, 0)));
    // Meanwhile a rename gave the directory's name to a file, which rmdir must not remove.
    p.make_directory(2, ROOT, b"d");
    p.create(ROOT, b"k").unwrap();
    let done = p.ask_while(&Request::RemoveDirectory { parent: ROOT, name: b"d" }, |p| {
        p.apply_here(&rename(ROOT, b"d", ROOT, b"e", 0));
        p.apply_here(&rename(ROOT, b"k", ROOT, b"d", 0));
    });
    assert!(matches!(done, Err(Code::NotDirectory | Code::NotFound)), "{done:?}");
    p.check();
}

/// The requests to other nodes among the next acts.
fn asked(t: &mut Transactions) -> Vec<(NodeId, u64)> {
    let act = std::iter::from_fn(|| t.next_act());
    act.filter_map(|act| match act {
        Act::Ask { node, flight, .. } => Some((node, flight)),
        _ => None,
    })
    .collect()
}

#[test]
fn node_that_does_not_answer_keeps_no_delivery_to_others_waiting() {
    let now = Duration::from_secs(1);
    let mut t = Transactions::new(NodeId(1), 0);
    // More deliveries than may be in flight, and smaller in order than the one to the other node.
    let silent: Vec<Delivery> =
        (1..200).map(|n| Delivery::DropLink(Ino::new(NodeId(2), n), TxId::NONE)).collect();
    t.deliver(&silent, now);
    let under_way = asked(&mut t);
    let waited_for = Delivery::DropLink(Ino::new(NodeId(3), 1), TxId::NONE);
    let client = Client { session: 1, slot: 2, seq: 3 };
    t.answer_after(client, Reply::Done, &[waited_for]);
    t.deliver(&[waited_for], now);
    let [(NodeId(3), flight)] = asked(&mut t)[..] else { panic!("node 3 is not told") };
    t.answered(flight, Ok(Ok(Reply::Done)), now);
    let answered = std::iter::from_fn(|| t.next_act())
        .any(|act| matches!(act, Act::Answer { client: of, .. } if of == client));
    assert!(answered);
    // A client whose delivery goes to the silent node waits for one try only, not for a try of each delivery before it.
    let last = *silent.last().unwrap();
    t.answer_after(client, Reply::Done, &[last]);
    t.answered(under_way[0].1, Err(Code::Io), now);
    let answered = std::iter::from_fn(|| t.next_act()).any(|act| matches!(act, Act::Answer { .. }));
    assert!(answered);
}

#[test]
fn retry_of_what_the_last_worker_did_waits_for_what_it_left_undelivered() {
    let now = Duration::from_secs(1);
    let mut t = Transactions::new(NodeId(1), 0);
    let client = Client { session: 1, slot: 2, seq: 3 };
    assert!(!t.answer_after_inherited(client, Reply::Done), "nothing was left");
    let left = [2, 3].map(|node| Delivery::Commit(TxId::new(NodeId(1), 9), NodeId(node)));
    t.resume(&[], &left, now);
    assert!(t.answer_after_inherited(client, Reply::Done));
    let flights = asked(&mut t);
    assert_eq!(flights.len(), 2);
    t.answered(flights[0].1, Ok(Ok(Reply::Done)), now);
    assert!(std::iter::from_fn(|| t.next_act()).all(|act| !matches!(act, Act::Answer { .. })));
    t.answered(flights[1].1, Err(Code::Io), now);
    let answers = std::iter::from_fn(|| t.next_act()).filter(|act| matches!(act, Act::Answer { .. })).count();
    assert_eq!(answers, 1, "who cannot be reached was tried");
    assert!(!t.answer_after_inherited(client, Reply::Done), "and is not waited for twice");
}

/// The expected tree: the inode of each name, and the number of names of each file.
#[derive(Clone, Default, Debug)]
struct Tree {
    /// Directory, name → inode, kind.
    names: BTreeMap<(u64, u8), (Ino, Kind)>,
    /// Directories that are wide.
    wide: BTreeSet<u64>,
}

impl Tree {
    fn directories(&self) -> Vec<Ino> {
        let below = self.names.values().filter(|(_, kind)| *kind == Kind::Directory);
        std::iter::once(ROOT).chain(below.map(|(ino, _)| *ino)).collect()
    }

    fn is_above(&self, above: Ino, mut ino: Ino) -> bool {
        loop {
            if ino == above {
                return true;
            }
            match self.names.iter().find(|(_, (of, _))| *of == ino) {
                Some(((parent, _), _)) => ino = Ino(*parent),
                None => return false,
            }
        }
    }

    fn is_empty(&self, ino: Ino) -> bool {
        !self.names.keys().any(|(parent, _)| *parent == ino.0)
    }

    fn links(&self, ino: Ino) -> u32 {
        self.names.values().filter(|(of, _)| *of == ino).count() as u32
    }

    /// The expected result of a rename.
    fn rename(&mut self, from: (u64, u8), to: (u64, u8), flags: u32) -> Result<(), Code> {
        let (ino, kind) = *self.names.get(&from).ok_or(Code::NotFound)?;
        let target = self.names.get(&to).copied();
        if target.is_some() && flags & RENAME_NOREPLACE != 0 {
            return Err(Code::Exists);
        }
        if kind == Kind::Directory && self.is_above(ino, Ino(to.0)) {
            return Err(Code::Invalid);
        }
        if let Some((victim, of)) = target {
            if victim == ino {
                return Ok(());
            }
            match (kind == Kind::Directory, of == Kind::Directory) {
                (true, false) => return Err(Code::NotDirectory),
                (false, true) => {
                    // Linux gives ENOTEMPTY instead if the source is below the destination.
                    return Err(Code::IsDirectory);
                }
                (true, true) if !self.is_empty(victim) => return Err(Code::NotEmpty),
                _ => {}
            }
        }
        self.names.remove(&from);
        self.names.insert(to, (ino, kind));
        Ok(())
    }
}

/// One step. Its numbers are resolved against what exists when it is executed.
#[derive(Clone, Copy, Debug)]
struct Step {
    op: u8,
    a: u8,
    b: u8,
    name: u8,
    other: u8,
    node: u8,
    /// After so many messages the fault occurs: a message is lost, or a node is restarted.
    fault_after: u8,
    fault: u8,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<u8>(), any::<u8>(), any::<u8>(), 0u8..4, 0u8..4, 1u8..4, 0u8..12, any::<u8>())
        .prop_map(|(op, a, b, name, other, node, fault_after, fault)| Step {
            op,
            a,
            b,
            name,
            other,
            node,
            fault_after,
            fault,
        });
    proptest::collection::vec(step, 1..60)
}

/// Checks that a request without an answer was executed completely or not at all.
fn matches_one(p: &mut Shards, before: &Tree, after: &Tree, tree: &mut Tree) {
    let is = |p: &mut Shards, tree: &Tree| p.names() == shape(tree);
    if is(p, after) {
        *tree = after.clone();
    } else {
        assert!(
            is(p, before),
            "half done: {:?}\nbefore {:?}\nafter {:?}",
            p.names(),
            shape(before),
            shape(after)
        );
        *tree = before.clone();
    }
}

/// The names of a tree, in the order of their keys.
fn shape(tree: &Tree) -> Vec<((u64, Vec<u8>), Ino)> {
    tree.names.iter().map(|((parent, name), (ino, _))| ((*parent, vec![b'a' + name]), *ino)).collect()
}

fn history(steps: &[Step], faults: bool, forgetful: bool) {
    let mut p = Shards::new("history");
    p.forgetful = forgetful;
    let mut tree = Tree::default();
    // In some histories all new directories are wide.
    let inherits = steps.first().is_some_and(|step| step.b.is_multiple_of(3));
    if inherits {
        let set = SetAttr { width_of_new: Some(2 + steps[0].a % 2), ..SetAttr::default() };
        p.ask(&Request::SetAttr { ino: ROOT, set }).unwrap();
    }
    for step in steps {
        let directories = tree.directories();
        let (a, b) = (
            directories[usize::from(step.a) % directories.len()],
            directories[usize::from(step.b) % directories.len()],
        );
        let (name, other) = ([b'a' + step.name], [b'a' + step.other]);
        let (from, to) = ((a.0, step.name), (b.0, step.other));
        if faults && step.fault < 160 {
            p.network.fault(step.fault_after.into(), step.fault);
        }
        let before = tree.clone();
        let mut after = tree.clone();
        let (done, expected) = match step.op % 16 {
            0..=2 => {
                let expected = match tree.names.get(&from) {
                    Some(_) => Err(Code::Exists),
                    None => Ok(()),
                };
                let done = p.create(a, &name);
                if let Ok(ino) = done {
                    after.names.insert(from, (ino, Kind::File));
                }
                (done.map(|_| ()), expected)
            }
            3..=5 => {
                let expected = match tree.names.get(&from) {
                    Some(_) => Err(Code::Exists),
                    None => Ok(()),
                };
                let done = p.mkdir(step.node.into(), a, &name);
                match done {
                    Ok(ino) => {
                        after.names.insert(from, (ino, Kind::Directory));
                        after.wide.extend(inherits.then_some(ino.0));
                    }
                    // The directory may have been created: a look-up of its name returns its inode.
                    Err(Code::Io | Code::Busy) if expected.is_ok() => {
                        p.heal();
                        if let Some(ino) = p.found(a, &name) {
                            after.names.insert(from, (ino, Kind::Directory));
                            after.wide.extend(inherits.then_some(ino.0));
                        }
                    }
                    Err(_) => {}
                }
                (done.map(|_| ()), expected)
            }
            6 | 7 => {
                let files: Vec<Ino> =
                    tree.names.values().filter(|(_, k)| *k == Kind::File).map(|(ino, _)| *ino).collect();
                let Some(ino) = files.get(usize::from(step.b) % files.len().max(1)).copied() else {
                    continue;
                };
                let expected = match tree.names.get(&from) {
                    Some(_) => Err(Code::Exists),
                    None => Ok(()),
                };
                if expected.is_ok() {
                    after.names.insert(from, (ino, Kind::File));
                }
                (p.ask(&Request::Link { ino, parent: a, name: &name }).map(|_| ()), expected)
            }
            8 | 9 => {
                let expected = match tree.names.get(&from) {
                    None => Err(Code::NotFound),
                    Some((_, Kind::Directory)) => Err(Code::IsDirectory),
                    Some(_) => Ok(()),
                };
                if expected.is_ok() {
                    after.names.remove(&from);
                }
                (p.ask(&Request::Unlink { parent: a, name: &name }).map(|_| ()), expected)
            }
            10 => {
                let expected = match tree.names.get(&from) {
                    None => Err(Code::NotFound),
                    Some((ino, Kind::Directory)) if !tree.is_empty(*ino) => Err(Code::NotEmpty),
                    Some((_, Kind::Directory)) => Ok(()),
                    Some(_) => Err(Code::NotDirectory),
                };
                if expected.is_ok() {
                    after.names.remove(&from);
                }
                (p.ask(&Request::RemoveDirectory { parent: a, name: &name }).map(|_| ()), expected)
            }
            11 => {
                let expected = match () {
                    () if tree.wide.contains(&a.0) => Err(Code::Exists),
                    () if !tree.is_empty(a) => Err(Code::NotEmpty),
                    () => Ok(()),
                };
                let width = u16::from(step.name);
                let expected = if width == 1 { expected.and(Err(Code::Invalid)) } else { expected };
                let done = p.ask(&Request::SetWidth { ino: a, width }).map(|_| ());
                if let (Err(Code::Io | Code::Busy), true) = (done, faults) {
                    p.heal();
                    p.settle();
                    if p.look_at(a).attr.width_log2 != 0 {
                        after.wide.insert(a.0);
                    }
                    tree.clone_from(&after);
                    continue;
                }
                if expected.is_ok() {
                    after.wide.insert(a.0);
                }
                (done, expected)
            }
            _ => {
                let flags = if step.op >= 240 { RENAME_NOREPLACE } else { 0 };
                let expected = after.rename(from, to, flags);
                (p.ask(&rename(a, &name, b, &other, flags)).map(|_| ()), expected)
            }
        };
        p.heal();
        match done {
            // The transaction that the request met may have been the reason, or a message was lost: both outcomes are
            // possible.
            Err(Code::Io | Code::Busy) if faults => {
                p.settle();
                matches_one(&mut p, &before, &after, &mut tree);
            }
            done => {
                let same_refusal = match (done, expected) {
                    // If two refusals apply, either is accepted.
                    (
                        Err(Code::NotEmpty | Code::Invalid | Code::IsDirectory | Code::NotDirectory),
                        Err(_),
                    ) => true,
                    (done, expected) => done == expected,
                };
                assert!(same_refusal, "{step:?}: {done:?}, expected {expected:?}\n{tree:?}");
                tree = if done.is_ok() { after } else { before };
            }
        }
    }
    p.settle();
    assert_eq!(p.names(), shape(&tree));
    for (ino, kind) in tree.names.values() {
        if *kind == Kind::File {
            assert_eq!(p.ask(&Request::GetAttr { ino: *ino }), Ok(Said::Inode(*ino, tree.links(*ino), 0)));
        } else {
            assert_eq!(p.look_at(*ino).attr.width_log2 != 0, tree.wide.contains(&ino.0));
        }
    }
    p.check();
}

/// Number of histories of each kind; `FOREBAY_CASES` overrides it.
fn cases() -> u32 {
    std::env::var("FOREBAY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn histories_over_three_shards_agree_with_a_tree(steps in steps()) {
        history(&steps, false, false);
    }

    #[test]
    fn histories_with_lost_messages_and_restarts_leave_nothing_half_done(steps in steps()) {
        history(&steps, true, false);
    }
}

/// The canary test: nodes that forget their deliveries at a restart are detected.
#[test]
fn nodes_that_forget_what_they_owe_are_caught() {
    let config =
        ProptestConfig { cases: 500, max_shrink_iters: 0, failure_persistence: None, ..Default::default() };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let found = TestRunner::new_with_rng(config, random).run(&steps(), |steps| {
        history(&steps, true, true);
        Ok(())
    });
    assert!(matches!(found, Err(TestError::Fail(..))), "500 histories did not show it");
}
