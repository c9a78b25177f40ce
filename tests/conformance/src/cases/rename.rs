//! rename(2) and renameat2(2).

use crate::case::{case, equal, refused, Case};
use crate::door::{Door, Verdict};
use libc::{RENAME_EXCHANGE, RENAME_NOREPLACE};

pub(super) const CASES: &[Case] = &[
    case!(rename_moves_any_kind_and_keeps_the_inode;
        "rename moves files, directories and links within and between directories and keeps the inode."),
    case!(rename_onto_a_file_replaces_it;
        "rename onto an existing name replaces it: every observer sees the old or the new inode, never none."),
    case!(rename_onto_a_directory_or_by_one_is_bounded;
        "rename of a directory onto a directory with entries fails with ENOTEMPTY, of a directory onto a file with ENOTDIR, and of a file onto a directory with EISDIR."),
    case!(rename_into_itself_fails; "A directory cannot be moved into itself or below itself: EINVAL."),
    case!(rename_exchanging_with_a_directory_above_fails [OneNode];
        "A directory cannot be moved into itself or below itself: EINVAL."),
    case!(rename_between_links_does_nothing;
        "rename between two names of one inode does nothing and succeeds."),
    case!(rename_of_dots_or_nothing_fails;
        "rename of a path that ends in `.` or `..` fails with EBUSY, and of a missing name with ENOENT."),
    case!(rename_without_replacing_refuses_a_name;
        "RENAME_NOREPLACE fails with EEXIST when the destination exists."),
    case!(rename_exchanging_swaps_any_two [OneNode];
        "RENAME_EXCHANGE swaps any two entries, also a directory and a file, and fails with ENOENT when one is missing."),
    case!(rename_with_wrong_flags_fails;
        "RENAME_NOREPLACE with RENAME_EXCHANGE fails with EINVAL, and so does an unknown flag."),
    case!(rename_of_a_directory_moves_its_parent;
        "A directory that moved has its new parent as `..`, and both parents' link counts are right."),
];

fn rename_moves_any_kind_and_keeps_the_inode(door: &dyn Door) -> Verdict {
    door.make_directory("to")?;
    door.put("f", b"data")?;
    door.make_directory("d")?;
    door.put("d/in", b"inner")?;
    door.symlink("anywhere", "s")?;
    door.make_node_at("p".into(), libc::S_IFIFO | 0o600, 0)?;
    for name in ["f", "d", "s", "p"] {
        let ino = door.lstat(name)?.ino;
        let (near, far) = (format!("{name}2"), format!("to/{name}"));
        door.rename(name, &near)?;
        refused(door.lstat(name), libc::ENOENT)?;
        equal(door.lstat(&near)?.ino, ino)?;
        door.rename(&near, &far)?;
        refused(door.lstat(&near), libc::ENOENT)?;
        equal(door.lstat(&far)?.ino, ino)?;
    }
    equal(door.get("to/f")?, b"data".to_vec())?;
    equal(door.get("to/d/in")?, b"inner".to_vec())?;
    equal(door.read_link("to/s")?, b"anywhere".to_vec())?;
    equal(door.names(".")?, vec![b"to".to_vec()])
}

fn rename_onto_a_file_replaces_it(door: &dyn Door) -> Verdict {
    door.put("a", b"a")?;
    door.put("b", b"b")?;
    door.link("b", "b-too")?;
    door.symlink("a", "s")?;
    door.rename("a", "b")?;
    equal(door.get("b")?, b"a".to_vec())?;
    equal(door.get("b-too")?, b"b".to_vec())?;
    equal(door.stat("b-too")?.nlink, 1)?;
    // The destination's link itself is replaced, not what it points to.
    door.put("a", b"kept")?;
    door.rename("b", "s")?;
    equal(door.lstat("s")?.kind(), libc::S_IFREG)?;
    equal(door.get("a")?, b"kept".to_vec())?;
    equal(door.names(".")?, vec![b"a".to_vec(), b"b-too".to_vec(), b"s".to_vec()])
}

fn rename_onto_a_directory_or_by_one_is_bounded(door: &dyn Door) -> Verdict {
    door.put("f", b"f")?;
    for d in ["d", "empty", "full"] {
        door.make_directory(d)?;
    }
    door.put("full/x", b"")?;
    door.put("d/y", b"y")?;
    refused(door.rename("d", "full"), libc::ENOTEMPTY)?;
    refused(door.rename("d", "f"), libc::ENOTDIR)?;
    refused(door.rename("f", "d"), libc::EISDIR)?;
    refused(door.rename("f", "empty"), libc::EISDIR)?;
    let ino = door.stat("d")?.ino;
    door.rename("d", "empty")?;
    equal(door.stat("empty")?.ino, ino)?;
    equal(door.get("empty/y")?, b"y".to_vec())?;
    refused(door.stat("d"), libc::ENOENT)
}

fn rename_into_itself_fails(door: &dyn Door) -> Verdict {
    door.make_directory("a")?;
    door.make_directory("a/b")?;
    door.make_directory("a/b/c")?;
    refused(door.rename("a", "a/x"), libc::EINVAL)?;
    refused(door.rename("a", "a/b/c/x"), libc::EINVAL)?;
    // The target is an ancestor, which is not empty.
    refused(door.rename("a/b/c", "a"), libc::ENOTEMPTY)?;
    door.rename("a", "a")?;
    door.stat("a/b/c")?;
    Ok(())
}

fn rename_exchanging_with_a_directory_above_fails(door: &dyn Door) -> Verdict {
    door.make_directory("a")?;
    door.make_directory("a/b")?;
    door.make_directory("a/b/c")?;
    refused(door.rename_with("a", "a/b/c", RENAME_EXCHANGE), libc::EINVAL)?;
    refused(door.rename_with("a/b/c", "a", RENAME_EXCHANGE), libc::EINVAL)
}

fn rename_between_links_does_nothing(door: &dyn Door) -> Verdict {
    door.put("a", b"x")?;
    door.link("a", "b")?;
    door.rename("a", "b")?;
    door.rename("a", "a")?;
    equal(door.names(".")?, vec![b"a".to_vec(), b"b".to_vec()])?;
    equal(door.stat("a")?.nlink, 2)
}

fn rename_of_dots_or_nothing_fails(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("d/e")?;
    refused(door.rename("d/.", "x"), libc::EBUSY)?;
    refused(door.rename("d/e/..", "x"), libc::EBUSY)?;
    refused(door.rename("d/e", "d/."), libc::EBUSY)?;
    refused(door.rename("none", "x"), libc::ENOENT)?;
    refused(door.rename("none", "d"), libc::ENOENT)?;
    refused(door.rename("d/e", "none/x"), libc::ENOENT)
}

fn rename_without_replacing_refuses_a_name(door: &dyn Door) -> Verdict {
    door.put("a", b"a")?;
    door.put("b", b"b")?;
    door.make_directory("d")?;
    door.symlink("none", "s")?;
    for there in ["b", "d", "s", "a"] {
        refused(door.rename_with("a", there, RENAME_NOREPLACE), libc::EEXIST)?;
    }
    door.rename_with("a", "new", RENAME_NOREPLACE)?;
    equal(door.get("new")?, b"a".to_vec())?;
    equal(door.get("b")?, b"b".to_vec())?;
    refused(door.rename_with("none", "x", RENAME_NOREPLACE), libc::ENOENT)
}

fn rename_exchanging_swaps_any_two(door: &dyn Door) -> Verdict {
    door.put("f", b"file")?;
    door.make_directory("d")?;
    door.put("d/in", b"inner")?;
    door.make_directory("p")?;
    door.make_directory("q")?;
    door.put("p/x", b"x")?;
    door.make_directory("q/y")?;
    let (f, d) = (door.stat("f")?.ino, door.stat("d")?.ino);
    door.rename_with("f", "d", RENAME_EXCHANGE)?;
    equal((door.stat("f")?.ino, door.stat("d")?.ino), (d, f))?;
    equal(door.get("f/in")?, b"inner".to_vec())?;
    equal(door.get("d")?, b"file".to_vec())?;
    door.rename_with("p/x", "q/y", RENAME_EXCHANGE)?;
    equal(door.get("q/y")?, b"x".to_vec())?;
    equal(door.stat("p/x")?.kind(), libc::S_IFDIR)?;
    equal((door.stat("p")?.nlink, door.stat("q")?.nlink), (3, 2))?;
    equal(door.stat("p/x/..")?.ino, door.stat("p")?.ino)?;
    refused(door.rename_with("d", "none", RENAME_EXCHANGE), libc::ENOENT)?;
    refused(door.rename_with("none", "d", RENAME_EXCHANGE), libc::ENOENT)
}

fn rename_with_wrong_flags_fails(door: &dyn Door) -> Verdict {
    door.put("a", b"")?;
    door.put("b", b"")?;
    refused(door.rename_with("a", "b", RENAME_NOREPLACE | RENAME_EXCHANGE), libc::EINVAL)?;
    refused(door.rename_with("a", "b", 1 << 10), libc::EINVAL)?;
    equal(door.names(".")?.len(), 2)
}

fn rename_of_a_directory_moves_its_parent(door: &dyn Door) -> Verdict {
    for d in ["p", "q", "p/d", "p/d/e"] {
        door.make_directory(d)?;
    }
    door.rename("p/d", "q/d")?;
    equal(door.stat("q/d/..")?.ino, door.stat("q")?.ino)?;
    equal(door.stat("q/d/e/../..")?.ino, door.stat("q")?.ino)?;
    equal((door.stat("p")?.nlink, door.stat("q")?.nlink), (2, 3))?;
    let dotdot = door.items("q/d")?.into_iter().find(|item| item.name == b"..").map(|item| item.ino);
    equal(dotdot, Some(door.stat("q")?.ino))?;
    // Replacing an empty directory also removes its link from the parent's count.
    door.make_directory("p/empty")?;
    door.rename("q/d", "p/empty")?;
    equal((door.stat("p")?.nlink, door.stat("q")?.nlink), (3, 2))
}
