//! A store's tree, which one shard has: nothing crosses its border, whichever shards take part.

use forebay_types::{Code, Ino, NodeId, Request, FLAG_ATTACHED, RENAME_NOREPLACE};

use crate::shards::{Said, Shards};
use crate::{rename, ROOT};

/// A shard 2 with the directory `/s` in front of a store, and a file and a directory in it.
fn attached(p: &mut Shards) -> (Ino, Ino, Ino) {
    let root = p.make_directory(2, ROOT, b"s");
    p.ask(&Request::Attach { ino: root, listed: false, settings: b"{}" }).unwrap();
    let file = p.create(root, b"f").unwrap();
    let below = p.inode(&Request::MakeDirectory { parent: root, name: b"d", mode: 0o755 });
    (root, file, below)
}

#[test]
fn nothing_of_other_shards_enters_a_tree_and_nothing_leaves_it() {
    let mut p = Shards::new("border");
    let (root, file, below) = attached(&mut p);
    let (other, here) = (p.make_directory(3, ROOT, b"o"), p.make_directory(2, ROOT, b"h"));
    let (their_file, their_directory) = (
        p.create(other, b"f").unwrap(),
        p.inode(&Request::MakeDirectory { parent: other, name: b"d", mode: 0 }),
    );
    let link = |ino, parent| Request::Link { ino, parent, name: b"l" };
    let moved = |parent, new_parent, ino| Request::MoveDirectory {
        parent,
        name: b"d",
        new_parent,
        new_name: b"e",
        flags: RENAME_NOREPLACE,
        ino,
    };
    for (what, request) in [
        (
            "a directory of another shard",
            Request::MakeDirectoryAt { node: NodeId(3), parent: root, name: b"x", mode: 0 },
        ),
        (
            "the same, deeper",
            Request::MakeDirectoryAt { node: NodeId(1), parent: below, name: b"x", mode: 0 },
        ),
        ("a file comes", rename(other, b"f", root, b"x", 0)),
        ("a file goes", rename(root, b"f", other, b"x", 0)),
        ("a file goes, on its shard", rename(root, b"f", here, b"x", 0)),
        ("a link comes", link(their_file, below)),
        ("a link goes", link(file, other)),
        ("a link goes, on its shard", link(file, here)),
        ("a directory comes", moved(other, root, their_directory)),
        ("a directory goes", moved(root, other, below)),
    ] {
        assert_eq!(p.ask(&request), Err(Code::CrossDevice), "{what}");
        p.check();
    }
    // The directory with the store is like a mount point, also for the shard that has its entry.
    let remove = Request::RemoveDirectory { parent: ROOT, name: b"s" };
    assert!(matches!(p.ask(&remove), Err(Code::Busy | Code::NotEmpty)));
    let away = Request::MoveDirectory {
        parent: ROOT,
        name: b"s",
        new_parent: other,
        new_name: b"s",
        flags: RENAME_NOREPLACE,
        ino: root,
    };
    assert_eq!(p.ask(&away), Err(Code::Busy));
    assert_eq!(p.ask(&Request::SetWidth { ino: below, width: 2 }), Err(Code::NotSupported));
    p.check();
    // Within the tree its shard does everything.
    let deep = p.inode(&Request::MakeDirectory { parent: below, name: b"e", mode: 0o755 });
    assert_eq!(p.ask(&rename(root, b"f", deep, b"g", 0)), Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&rename(below, b"e", root, b"e", 0)), Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&rename(root, b"d", deep, b"d", 0)), Ok(Said::Removed(Ino(0))));
    assert_eq!(p.ask(&rename(root, b"e", below, b"e", 0)), Err(Code::Invalid), "into what is below it");
    for ino in [file, below, deep] {
        assert_ne!(p.look_at(ino).attr.flags & FLAG_ATTACHED, 0);
    }
    p.check();
}
