//! Wide directories over three shards in one process: they are created, filled, changed, renamed and removed, mostly
//! without faults. The histories in `main.rs` cover them with faults.

use std::collections::BTreeSet;

use forebay_types::{
    Change, Code, Ino, Kind, Layout, NodeId, Part, Request, SetAttr, TimeSet, Timestamp, TxId,
    RENAME_NOREPLACE,
};

use crate::shards::{Said, Shards};

const ROOT: Ino = Ino::ROOT;

fn name(i: u32) -> Vec<u8> {
    format!("file.{i}").into_bytes()
}

fn widen(p: &mut Shards, ino: Ino, width: u16) -> Result<Said, Code> {
    p.ask(&Request::SetWidth { ino, width })
}

fn rename<'a>(parent: Ino, name: &'a [u8], new_parent: Ino, new_name: &'a [u8]) -> Request<'a> {
    Request::Rename { parent, name, new_parent, new_name, flags: 0 }
}

#[test]
fn names_of_a_wide_directory_lie_on_all_its_nodes_in_one_order() {
    let mut p = Shards::new("names");
    let d = p.make_directory(2, ROOT, b"d");
    assert_eq!(widen(&mut p, d, 0), Ok(Said::Other));
    let made: BTreeSet<Vec<u8>> = (0..300).map(name).collect();
    for name in &made {
        p.create(d, name).unwrap();
    }
    assert_eq!(p.create(d, &name(7)), Err(Code::Exists));
    for node in 1..=3 {
        let births = made.iter().filter(|n| p.found(d, n).unwrap().birth_node() == NodeId(node)).count();
        assert!((60..=140).contains(&births), "node {node} has {births} of 300");
    }
    let listed = p.list(d).unwrap();
    let hashes: Vec<u64> = listed.iter().map(|(name, _)| forebay_types::name_hash(name)).collect();
    assert!(hashes.is_sorted(), "the parts one after the other are in the order of the cookies");
    assert_eq!(listed.into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>(), made);
    p.check();
    let remove = Request::RemoveDirectory { parent: ROOT, name: b"d" };
    assert_eq!(p.ask(&remove), Err(Code::NotEmpty));
    for name in &made {
        p.ask(&Request::Unlink { parent: d, name }).unwrap();
    }
    assert_eq!(p.ask(&remove), Ok(Said::Removed(d)));
    p.check();
}

#[test]
fn set_width_is_refused_where_it_cannot_be() {
    let mut p = Shards::new("refused");
    let d = p.make_directory(1, ROOT, b"d");
    let file = p.create(ROOT, b"f").unwrap();
    assert_eq!(widen(&mut p, ROOT, 2), Err(Code::NotEmpty));
    assert_eq!(widen(&mut p, file, 2), Err(Code::NotDirectory));
    assert_eq!(widen(&mut p, d, 1), Err(Code::Invalid));
    assert_eq!(widen(&mut p, d, 4), Err(Code::NoDevice), "there are three nodes");
    assert_eq!(widen(&mut p, Ino::new(NodeId(1), 99), 2), Err(Code::NotFound));
    p.create(d, b"f").unwrap();
    assert_eq!(widen(&mut p, d, 2), Err(Code::NotEmpty));
    p.ask(&Request::Unlink { parent: d, name: b"f" }).unwrap();
    assert_eq!(p.ask(&Request::PartsOf { ino: d }), Err(Code::NoAttribute));
    assert_eq!(widen(&mut p, d, 2), Ok(Said::Other));
    assert_eq!(widen(&mut p, d, 3), Err(Code::Exists));
    assert_eq!(p.ask(&Request::PartsOf { ino: d }), Ok(Said::Other));
    let part = p.ask(&Request::ReadDirectory { ino: d, cookie: 0, attributes: false });
    assert_eq!(part, Ok(Said::Names(Vec::new())));
    // A node does not answer: the directory stays as it is.
    let e = p.make_directory(1, ROOT, b"e");
    p.network.lose_to = Some((NodeId(3), 0));
    assert_eq!(widen(&mut p, e, 3), Err(Code::Io));
    p.heal();
    p.check();
    assert_eq!(p.look_at(e).attr.width_log2, 0);
}

#[test]
fn renames_and_links_reach_into_and_out_of_a_wide_directory() {
    let mut p = Shards::new("renames");
    let (wide, narrow) = (p.make_directory(2, ROOT, b"wide"), p.make_directory(3, ROOT, b"narrow"));
    widen(&mut p, wide, 3).unwrap();
    let file = p.create(narrow, b"f").unwrap();
    // The sender does not know yet that the destination is wide.
    p.ask(&rename(narrow, b"f", wide, b"0")).unwrap();
    for i in 0..20 {
        let (old, new) = (i.to_string().into_bytes(), (i + 1).to_string().into_bytes());
        p.ask(&rename(wide, &old, wide, &new)).unwrap();
        assert_eq!(p.found(wide, &new), Some(file));
        assert_eq!(p.found(wide, &old), None);
    }
    p.ask(&Request::Link { ino: file, parent: wide, name: b"link" }).unwrap();
    p.ask(&Request::Link { ino: file, parent: narrow, name: b"link" }).unwrap();
    assert_eq!(p.ask(&Request::GetAttr { ino: file }), Ok(Said::Inode(file, 3, 0)));
    p.ask(&rename(wide, b"20", narrow, b"g")).unwrap();
    p.check();
    // Directories in it are created on their creator's node, whichever part has the name.
    for node in 1..=3u16 {
        for i in 0..8u16 {
            let name = format!("dir.{node}.{i}").into_bytes();
            let dir = p.make_directory(node, wide, &name);
            assert_eq!(dir.birth_node(), NodeId(node));
            p.create(dir, b"below").unwrap();
            let new = format!("moved.{node}.{i}").into_bytes();
            p.ask(&rename(wide, &name, wide, &new)).unwrap();
            assert_eq!(p.ask(&rename(ROOT, b"wide", dir, b"x")), Err(Code::Invalid), "below itself");
            assert_eq!(p.ask(&rename(wide, &new, dir, b"x")), Err(Code::Invalid), "below itself");
            if i % 2 == 0 {
                p.ask(&rename(wide, &new, narrow, &new)).unwrap();
            }
        }
    }
    p.check();
    // The wide directory is moved like any other, and its parts stay.
    p.ask(&rename(ROOT, b"wide", narrow, b"wide")).unwrap();
    assert!(p.found(wide, b"moved.1.1").is_some());
    p.check();
}

#[test]
fn rename_over_a_wide_directory_replaces_it_if_it_is_empty() {
    let mut p = Shards::new("over");
    let (a, b) = (p.make_directory(1, ROOT, b"a"), p.make_directory(1, ROOT, b"b"));
    widen(&mut p, b, 3).unwrap();
    p.create(b, b"in the way").unwrap();
    assert_eq!(p.ask(&rename(ROOT, b"a", ROOT, b"b")), Err(Code::NotEmpty));
    p.ask(&Request::Unlink { parent: b, name: b"in the way" }).unwrap();
    let keep = Request::Rename {
        parent: ROOT,
        name: b"a",
        new_parent: ROOT,
        new_name: b"b",
        flags: RENAME_NOREPLACE,
    };
    assert_eq!(p.ask(&keep), Err(Code::Exists));
    assert_eq!(p.ask(&rename(ROOT, b"a", ROOT, b"b")), Ok(Said::Removed(b)));
    assert_eq!(p.found(ROOT, b"b"), Some(a));
    p.check();
}

#[test]
fn wide_directory_whose_part_is_lost_for_good_can_be_changed_and_removed() {
    let mut p = Shards::new("lost");
    let d = p.make_directory(2, ROOT, b"d");
    widen(&mut p, d, 3).unwrap();
    p.network.gone = Some(NodeId(3));
    let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    assert_eq!(p.ask(&Request::SetAttr { ino: d, set }), Ok(Said::Inode(d, 2, 0)));
    assert_eq!(p.look_at(d).attr.mode & 0o777, 0o700);
    assert_eq!(p.ask(&Request::RemoveDirectory { parent: ROOT, name: b"d" }), Ok(Said::Removed(d)));
    assert_eq!(p.found(ROOT, b"d"), None);
    p.settle();
    assert_eq!(p.ask(&Request::GetAttr { ino: d }), Err(Code::NotFound));
}

#[test]
fn changes_of_a_wide_directory_reach_its_parts() {
    let mut p = Shards::new("changes");
    let d = p.make_directory(2, ROOT, b"d");
    let group = |gid| SetAttr { mode: Some(0o2775), gid: Some(gid), ..SetAttr::default() };
    p.ask(&Request::SetAttr { ino: d, set: group(5) }).unwrap();
    widen(&mut p, d, 3).unwrap();
    let groups = |p: &mut Shards, from: u32| -> BTreeSet<u32> {
        let made: Vec<Ino> = (from..from + 20).map(|i| p.create(d, &name(i)).unwrap()).collect();
        made.into_iter().map(|ino| p.look_at(ino).attr.gid).collect()
    };
    assert_eq!(groups(&mut p, 0), BTreeSet::from([5]), "inherited from before");
    assert_eq!(p.ask(&Request::SetAttr { ino: d, set: group(6) }), Ok(Said::Inode(d, 2, 0)));
    assert_eq!(groups(&mut p, 100), BTreeSet::from([6]), "and from after");
    let early = TimeSet::At(Timestamp { sec: -9, nsec: 0 });
    p.ask(&Request::SetAttr { ino: d, set: SetAttr { mtime: early, ..SetAttr::default() } }).unwrap();
    let layout = Layout::on_any(2, 1 << 20).unwrap();
    p.ask(&Request::SetLayout { ino: d, layout }).unwrap();
    assert_eq!(p.look_at(d).layout, layout);
    p.check();
    // A node does not answer: nothing is changed.
    p.network.lose_to = Some((NodeId(1), 0));
    assert_eq!(p.ask(&Request::SetAttr { ino: d, set: group(7) }), Err(Code::Io));
    p.heal();
    assert_eq!(p.look_at(d).attr.gid, 6);
    p.check();
}

fn set_width_of_new(p: &mut Shards, ino: Ino, width: u8) {
    let set = SetAttr { width_of_new: Some(width), ..SetAttr::default() };
    assert!(matches!(p.ask(&Request::SetAttr { ino, set }), Ok(Said::Inode(..))));
    assert_eq!(p.look_at(ino).attr.width_of_new(), width);
}

#[test]
fn directories_made_where_new_ones_are_wide_are_wide_and_hand_it_on() {
    let mut p = Shards::new("inherited");
    let d = p.make_directory(2, ROOT, b"d");
    let before = p.make_directory(2, d, b"before");
    let set = SetAttr { mode: Some(0o2775), gid: Some(5), ..SetAttr::default() };
    p.ask(&Request::SetAttr { ino: d, set }).unwrap();
    set_width_of_new(&mut p, d, 3);
    // Created by the parent's node, by another node, and below the latter, which is wide itself.
    let (here, there) = (p.make_directory(2, d, b"here"), p.make_directory(1, d, b"there"));
    assert_eq!(p.mkdir(2, d, b"there"), Err(Code::Exists));
    assert_eq!(p.mkdir(1, d, b"here"), Err(Code::Exists));
    let below = p.make_directory(3, there, b"below");
    for (ino, home) in [(here, 2), (there, 1), (below, 3)] {
        let made = p.look_at(ino);
        assert_eq!((made.attr.width_log2, made.attr.width_of_new(), made.attr.gid), (2, 3, 5));
        assert_eq!((made.attr.mode & 0o7777, made.attr.home), (0o2750, NodeId(home)));
        let nodes: BTreeSet<u16> = (0..30).map(|i| p.create(ino, &name(i)).unwrap().birth_node().0).collect();
        assert_eq!(nodes, BTreeSet::from([1, 2, 3]));
    }
    assert_eq!(p.look_at(before).attr.width_log2, 0, "made before");
    p.check();
    // Width two of three nodes, then one.
    set_width_of_new(&mut p, before, 2);
    let two = p.make_directory(1, before, b"two");
    assert_eq!(p.look_at(two).attr.width_log2, 1);
    set_width_of_new(&mut p, before, 0);
    let narrow = p.make_directory(2, before, b"narrow");
    assert_eq!(p.look_at(narrow).attr.width_log2, 0);
    p.ask(&Request::RemoveDirectory { parent: before, name: b"two" }).unwrap();
    let file = p.create(ROOT, b"f").unwrap();
    let set = SetAttr { width_of_new: Some(2), ..SetAttr::default() };
    assert_eq!(p.ask(&Request::SetAttr { ino: file, set }), Err(Code::NotDirectory));
    p.check();
}

#[test]
fn directory_that_was_to_be_wide_is_whole_or_not_there() {
    for (parent, node) in [(2, 2), (2, 1), (3, 1)] {
        let mut p = Shards::new("whole");
        let d = p.make_directory(parent, ROOT, b"d");
        set_width_of_new(&mut p, d, 16);
        for (lost, after) in [(3, 0), (3, 1), (2, 0), (2, 1), (1, 0)] {
            p.network.lose_to = Some((NodeId(lost), after));
            let made = p.mkdir(node, d, b"x");
            p.heal();
            p.settle();
            let found = p.found(d, b"x");
            match made {
                Ok(ino) => assert_eq!(found, Some(ino)),
                Err(code) => assert_eq!(code, Code::Io),
            }
            if let Some(ino) = found {
                assert_eq!(p.look_at(ino).attr.width_log2, 2);
                p.ask(&Request::RemoveDirectory { parent: d, name: b"x" }).unwrap();
            }
            p.check();
        }
    }
}

/// Another node's reply that it does not know a node says nothing about whether that node still exists.
#[test]
fn part_is_given_up_for_lost_by_no_word_of_another_node() {
    let mut p = Shards::new("denied");
    let d = p.make_directory(2, ROOT, b"d");
    widen(&mut p, d, 3).unwrap();
    // The first message to the directory's home names the directory, the second its part.
    p.network.denies = Some((NodeId(2), 1));
    assert_eq!(p.ask(&Request::RemoveDirectory { parent: ROOT, name: b"d" }), Err(Code::NoDevice));
    p.network.denies = Some((NodeId(3), 0));
    let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    assert_eq!(p.ask(&Request::SetAttr { ino: d, set }), Err(Code::NoDevice));
    p.heal();
    assert_eq!(p.found(ROOT, b"d"), Some(d));
    p.check();
    // After the decision, it is delivered until it is acknowledged.
    p.network.denies = Some((NodeId(3), 1));
    assert_eq!(p.ask(&Request::RemoveDirectory { parent: ROOT, name: b"d" }), Ok(Said::Removed(d)));
    p.heal();
    p.check();
}

#[test]
fn part_takes_and_tells_only_names_of_its_own() {
    let mut p = Shards::new("astray");
    let d = p.make_directory(2, ROOT, b"d");
    widen(&mut p, d, 3).unwrap();
    let file = p.create(ROOT, b"f").unwrap();
    p.create(d, b"f").unwrap();
    let parts = p.refusal(&Request::Lookup { parent: d, name: b"f" }).1.unwrap();
    for part in parts.as_slice().iter().copied().filter(|part| *part != parts.of_name(b"f")) {
        // Only the directory's home has the list of parts, and returns it.
        let expected = (Code::Wide, (part.birth_node() == NodeId(2)).then_some(parts));
        let create = Request::Create {
            parent: part,
            name: b"f",
            mode: 0,
            exclusive: false,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        };
        for request in [
            create,
            Request::Lookup { parent: part, name: b"f" },
            Request::MakeDirectory { parent: part, name: b"f", mode: 0 },
            Request::MakeNode { parent: part, name: b"f", mode: 0o010_600, rdev: 0 },
            Request::Symlink { parent: part, name: b"f", target: b"t" },
            Request::Unlink { parent: part, name: b"f" },
            Request::RemoveDirectory { parent: part, name: b"f" },
            rename(part, b"f", part, b"f"),
        ] {
            assert_eq!(p.refusal(&request), expected, "{request:?}");
        }
        let enter = Part::Enter {
            parent: part,
            name: b"f",
            ino: file,
            kind: Kind::File,
            link: TxId::new(NodeId(1), 5),
            flags: 0,
        };
        let prepare = Request::Prepare { tx: TxId::new(NodeId(1), 5), index: 0, part: enter };
        assert_eq!(p.apply_at(part.birth_node(), &prepare), Err(Code::Wide));
    }
    // A part cannot be changed without its directory.
    let part = parts.as_slice()[1];
    let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    assert_eq!(p.refusal(&Request::SetAttr { ino: part, set }), (Code::Invalid, None));
    let layout = Layout::on_any(2, 1 << 20).unwrap();
    assert_eq!(p.refusal(&Request::SetLayout { ino: part, layout }), (Code::Invalid, None));
    p.check();
}

/// A daemon that was restarted sends a retry to the directory's home, while a part has executed the request and kept
/// the reply.
#[test]
fn home_of_a_wide_directory_leads_to_its_parts_before_it_refuses_anything_else() {
    let mut p = Shards::new("lead");
    let (d, e) = (p.make_directory(2, ROOT, b"d"), p.make_directory(2, ROOT, b"e"));
    widen(&mut p, d, 3).unwrap();
    let gone = p.create(e, b"gone").unwrap();
    p.ask(&Request::Unlink { parent: e, name: b"gone" }).unwrap();
    let parts = p.refusal(&Request::Lookup { parent: d, name: b"n" }).1;
    assert!(parts.is_some());
    let set_number = Request::Create {
        parent: d,
        name: b"n",
        mode: 0,
        exclusive: true,
        dirty: true,
        layout: None,
        number: Some(gone),
        reserve: true,
    };
    for request in [
        Request::Link { ino: gone, parent: d, name: b"n" },
        Request::Link { ino: e, parent: d, name: b"n" },
        set_number,
        Request::MakeDirectory { parent: d, name: b"n", mode: 0 },
        Request::MakeNode { parent: d, name: b"n", mode: 0o010_600, rdev: 0 },
        Request::Symlink { parent: d, name: b"n", target: b"t" },
        Request::Unlink { parent: d, name: b"n" },
        Request::RemoveDirectory { parent: d, name: b"n" },
        rename(d, b"n", gone, b"n"),
        rename(e, b"n", d, b"n"),
    ] {
        assert_eq!(p.refusal(&request), (Code::Wide, parts), "{request:?}");
    }
    p.check();
}

#[test]
fn changes_of_a_wide_directory_at_the_same_time_take_turns() {
    let mut p = Shards::new("turns");
    let d = p.make_directory(2, ROOT, b"d");
    widen(&mut p, d, 3).unwrap();
    let set = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
    let many: Vec<_> = (0..24).map(|mode| Request::SetAttr { ino: d, set: set(mode) }).collect();
    let done = p.ask_together(&many);
    assert!(done.iter().all(|done| *done == Ok(Said::Inode(d, 2, 0))), "{done:?}");
    assert_eq!(p.begun_anew, 0, "none meets another");
    p.check();
    // A change waits while another node's transaction holds the directory. It does not start and abort again and again.
    let part = Part::Change { ino: d, change: Change { set: set(0o750), layout: None } };
    let tx = TxId::new(NodeId(1), 99);
    p.apply_at(NodeId(2), &Request::Prepare { tx, index: 0, part }).unwrap();
    assert!(
        p.waits(&many[0]) && p.waits(&Request::SetLayout { ino: d, layout: Layout::single(NodeId(1), 0) })
    );
    assert!(!p.waits(&Request::SetAttr { ino: ROOT, set: set(0o755) }));
    p.apply_at(NodeId(2), &Request::Finish { tx, commit: false }).unwrap();
    assert!(!p.waits(&many[0]));
    p.check();
}

#[test]
fn directory_of_another_node_takes_after_its_parent_in_the_step_that_makes_it() {
    let mut p = Shards::new("after");
    let d = p.make_directory(2, ROOT, b"d");
    let plain = p.make_directory(3, d, b"plain");
    assert_eq!((p.look_at(plain).attr.mode, p.look_at(plain).attr.gid), (0o040_750, 8));
    assert_eq!(p.look_at(plain).layout, Layout::single(NodeId(3), 0));
    let (mode, gid) = (Some(0o2770), Some(5));
    p.ask(&Request::SetAttr { ino: d, set: SetAttr { mode, gid, ..SetAttr::default() } }).unwrap();
    let layout = Layout::on_any(2, 1 << 20).unwrap();
    p.ask(&Request::SetLayout { ino: d, layout }).unwrap();
    p.ask(&Request::RemoveDirectory { parent: d, name: b"plain" }).unwrap();
    let check = |p: &mut Shards, ino: Ino| {
        let entry = p.look_at(ino);
        assert_eq!((entry.attr.mode, entry.attr.gid, entry.layout), (0o042_750, 5, layout), "{ino}");
    };
    let above = p.make_directory(3, d, b"narrow");
    check(&mut p, above);
    p.ask(&Request::RemoveDirectory { parent: d, name: b"narrow" }).unwrap();
    widen(&mut p, d, 3).unwrap();
    for (i, node) in [1, 2, 3, 1, 2, 3].into_iter().enumerate() {
        let below = p.make_directory(node, d, &name(i as u32));
        assert_eq!(below.birth_node(), NodeId(node));
        check(&mut p, below);
    }
    p.check();
    // Whichever node is restarted or not reached, the directory is created completely or not at all, and no entry gets
    // into an incomplete one.
    for after in 0..8 {
        for what in 0..4 {
            p.network.fault(after, what);
            let made = p.mkdir(3, d, b"try");
            p.heal();
            p.settle();
            if let Some(ino) = p.found(d, b"try") {
                check(&mut p, ino);
                p.ask(&Request::RemoveDirectory { parent: d, name: b"try" }).unwrap();
            } else {
                assert!(made.is_err());
            }
            p.check();
        }
    }
}
