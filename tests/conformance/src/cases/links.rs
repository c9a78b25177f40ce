//! Hard links.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Door, Verdict};

pub(super) const CASES: &[Case] = &[
    case!(link_shares_data_attributes_and_count;
        "Hard links are names of one inode: each of them shows the same data, attributes and link count."),
    case!(link_onto_a_name_or_of_a_directory_fails;
        "link fails with EEXIST on any existing name, and with EPERM on a directory."),
    case!(link_of_a_symlink_follows_only_when_asked;
        "link creates a second name of a symbolic link itself, or of its target with AT_SYMLINK_FOLLOW."),
];

fn link_shares_data_attributes_and_count(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("a", b"one")?;
    door.link("a", "d/b")?;
    equal(door.stat("a")?, door.stat("d/b")?)?;
    equal(door.stat("a")?.nlink, 2)?;
    door.put("d/b", b"another")?;
    equal(door.get("a")?, b"another".to_vec())?;
    door.chmod("a", 0o640)?;
    equal(door.stat("d/b")?.permissions(), 0o640)?;
    for i in 0..20 {
        door.link("d/b", format!("c{i}"))?;
    }
    equal(door.stat("a")?.nlink, 22)?;
    let ino = door.stat("a")?.ino;
    door.unlink("a")?;
    equal(door.get("d/b")?, b"another".to_vec())?;
    equal(door.stat("c7")?.nlink, 21)?;
    holds(
        door.items(".")?.iter().filter(|item| item.ino == ino).count() == 20,
        "twenty entries of one inode",
    )?;
    for i in 0..20 {
        door.unlink(format!("c{i}"))?;
    }
    equal(door.stat("d/b")?.nlink, 1)
}

fn link_onto_a_name_or_of_a_directory_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"f")?;
    door.put("g", b"g")?;
    door.make_directory("d")?;
    door.symlink("none", "dangling")?;
    for there in ["g", "d", "dangling", "f"] {
        refused(door.link("f", there), libc::EEXIST)?;
    }
    refused(door.link("d", "e"), libc::EPERM)?;
    refused(door.link("none", "e"), libc::ENOENT)?;
    equal(door.stat("f")?.nlink, 1)?;
    equal(door.get("g")?, b"g".to_vec())
}

fn link_of_a_symlink_follows_only_when_asked(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    door.symlink("f", "s")?;
    door.link("s", "plain")?;
    equal(door.lstat("plain")?.ino, door.lstat("s")?.ino)?;
    equal(door.lstat("s")?.nlink, 2)?;
    door.link_at("s".into(), "followed".into(), true)?;
    equal(door.lstat("followed")?.ino, door.stat("f")?.ino)?;
    equal(door.stat("f")?.nlink, 2)
}
