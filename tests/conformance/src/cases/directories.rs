//! Directories: making, removing, reading, and calls relative to them.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Ability, At, Door, Outcome, Stream, Verdict};
use libc::{O_CREAT, O_DIRECTORY, O_RDONLY, O_RDWR};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(make_directory_on_a_name_or_nowhere_fails;
        "mkdir on any existing name fails with EEXIST, and under a missing parent with ENOENT."),
    case!(make_directory_of_the_root_fails [Outside];
        "mkdir on any existing name fails with EEXIST, and under a missing parent with ENOENT."),
    case!(remove_directory_only_when_empty;
        "rmdir removes an empty directory; it fails with ENOTEMPTY on a directory with entries and with ENOTDIR on anything else."),
    case!(remove_directory_by_dots_fails;
        "rmdir of a path that ends in `.` fails with EINVAL, and of one that ends in `..` with ENOTEMPTY."),
    case!(unlink_of_a_directory_fails; "unlink of a directory fails with EISDIR."),
    case!(list_gives_each_entry_once_with_inode_and_type;
        "A directory lists `.`, `..` and each entry once, with its inode number and type."),
    case!(list_while_entries_come_and_go_keeps_the_rest;
        "A listing during which entries are created and removed returns each entry that exists throughout exactly once."),
    case!(list_position_survives_changes;
        "A position from telldir stays valid for seekdir while the directory is open, also when entries are created or removed."),
    case!(list_rewound_sees_what_is_new; "rewinddir starts a new listing, which shows entries created since."),
    case!(list_while_removing_removes_all; "A program that removes each entry that it reads from a listing removes all of them."),
    case!(directory_of_many_entries_is_complete; "The number of entries of a directory is limited only by space."),
    case!(removed_directory_that_is_open_takes_nothing [DirectoryDescriptors];
        "In a directory that was removed while open, creating an entry fails with ENOENT, and a listing returns no entries."),
    case!(calls_under_a_descriptor_follow_its_directory [DirectoryDescriptors];
        "Calls relative to a directory's descriptor follow the directory through renames."),
    case!(parent_under_a_descriptor_follows_its_directory [DirectoryDescriptors, OneNode];
        "Calls relative to a directory's descriptor follow the directory through renames."),
    case!(working_directory_is_in_the_pool [DirectoryDescriptors];
        "The working directory can be in the pool, and relative paths and getcwd work there."),
    case!(working_directory_follows_its_directory [DirectoryDescriptors, OneNode];
        "The working directory can be in the pool, and relative paths and getcwd work there."),
];

fn rest(stream: &mut dyn Stream) -> Outcome<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    while let Some(item) = stream.next()? {
        names.push(item.name);
    }
    Ok(names)
}

fn make_directory_on_a_name_or_nowhere_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.make_directory("d")?;
    door.symlink("none", "dangling")?;
    door.symlink("d", "to-d")?;
    for there in ["f", "d", "dangling", "to-d", ".", "d/.", "d/.."] {
        refused(door.make_directory(there), libc::EEXIST)?;
    }
    refused(door.make_directory("no/d"), libc::ENOENT)?;
    door.make_directory_at("mode".into(), 0o750)?;
    equal(door.stat("mode")?.mode, libc::S_IFDIR | 0o750)?;
    equal(door.names("mode")?, vec![])
}

fn make_directory_of_the_root_fails(door: &dyn Door) -> Verdict {
    // The root's own path, as `mkdir -p` takes it: the case's directory lies in it.
    let case = door.absolute(b"");
    let mut parts: Vec<&[u8]> = case.split(|b| *b == b'/').collect();
    parts.truncate(parts.len() - 2);
    let root = parts.join(&b'/');
    equal(door.stat(&root)?.kind(), libc::S_IFDIR)?;
    equal(door.stat(&root)?.ino, door.stat("..")?.ino)?;
    refused(door.make_directory(&root), libc::EEXIST)?;
    refused(door.symlink("x", &root), libc::EEXIST)?;
    refused(door.unlink(&root), libc::EISDIR)?;
    refused(door.open(&root, O_RDWR | O_CREAT, 0o644), libc::EISDIR)?;
    holds(!door.names(&root)?.is_empty(), "the root lists the case's directory")?;
    // ENOTEMPTY for a directory, EBUSY for a mount point.
    holds(door.remove_directory(&root).is_err(), "the root stays")
}

fn remove_directory_only_when_empty(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("d/f", b"")?;
    door.symlink("d", "s")?;
    refused(door.remove_directory("d"), libc::ENOTEMPTY)?;
    refused(door.remove_directory("d/f"), libc::ENOTDIR)?;
    refused(door.remove_directory("s"), libc::ENOTDIR)?;
    refused(door.remove_directory("none"), libc::ENOENT)?;
    door.unlink("d/f")?;
    door.remove_directory("d")?;
    refused(door.stat("d"), libc::ENOENT)?;
    refused(door.stat("s"), libc::ENOENT)
}

fn remove_directory_by_dots_fails(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("d/e")?;
    refused(door.remove_directory("d/e/."), libc::EINVAL)?;
    refused(door.remove_directory("d/e/.."), libc::ENOTEMPTY)?;
    equal(door.names("d")?, vec![b"e".to_vec()])
}

fn unlink_of_a_directory_fails(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    refused(door.unlink("d"), libc::EISDIR)?;
    refused(door.unlink("none"), libc::ENOENT)?;
    door.stat("d")?;
    Ok(())
}

fn list_gives_each_entry_once_with_inode_and_type(door: &dyn Door) -> Verdict {
    door.make_directory("t")?;
    door.put("t/file", b"")?;
    door.make_directory("t/dir")?;
    door.symlink("x", "t/link")?;
    door.make_node_at("t/fifo".into(), libc::S_IFIFO | 0o600, 0)?;
    let items = door.items("t")?;
    let by_name: BTreeMap<&[u8], _> = items.iter().map(|i| (i.name.as_slice(), i)).collect();
    equal(by_name.len(), items.len())?;
    equal(items.len(), 6)?;
    let kinds = [
        ("file", libc::DT_REG),
        ("dir", libc::DT_DIR),
        ("link", libc::DT_LNK),
        ("fifo", libc::DT_FIFO),
        (".", libc::DT_DIR),
        ("..", libc::DT_DIR),
    ];
    for (name, kind) in kinds {
        let Some(item) = by_name.get(name.as_bytes()) else {
            return holds(false, &format!("{name} is listed"));
        };
        equal(item.kind, kind)?;
        equal(item.ino, door.lstat(format!("t/{name}"))?.ino)?;
    }
    refused(door.items("t/file"), libc::ENOTDIR)?;
    refused(door.items("none"), libc::ENOENT)
}

fn list_while_entries_come_and_go_keeps_the_rest(door: &dyn Door) -> Verdict {
    const STAY: usize = 1500;
    door.make_directory("d")?;
    for i in 0..STAY {
        door.put(format!("d/stay{i}"), b"")?;
        if i % 3 == 0 {
            door.put(format!("d/go{i}"), b"")?;
        }
    }
    let mut stream = door.open_stream(b"d")?;
    let mut seen = BTreeMap::<Vec<u8>, usize>::new();
    let mut round = 0;
    while let Some(item) = stream.next()? {
        *seen.entry(item.name).or_default() += 1;
        if seen.len() & 31 == 0 {
            round += 1;
            door.unlink(format!("d/go{}", (round - 1) * 3)).ok();
            door.put(format!("d/come{round}"), b"")?;
            door.rename(format!("d/come{round}"), format!("d/came{round}"))?;
        }
    }
    for i in 0..STAY {
        equal((i, seen.get(format!("stay{i}").as_bytes())), (i, Some(&1)))?;
    }
    Ok(())
}

fn list_position_survives_changes(door: &dyn Door) -> Verdict {
    const ENTRIES: usize = 300;
    door.make_directory("d")?;
    for i in 0..ENTRIES {
        door.put(format!("d/{i}"), b"")?;
    }
    let mut stream = door.open_stream(b"d")?;
    let mut before = Vec::new();
    for _ in 0..ENTRIES / 2 {
        before.extend(stream.next()?);
    }
    let position = stream.tell();
    let behind = rest(&mut *stream)?;
    equal(before.len() + behind.len(), ENTRIES + 2)?;
    stream.seek(position);
    equal(rest(&mut *stream)?, behind.clone())?;
    // The entries read before the position are removed, and one of the entries after it; others are created.
    for item in &before {
        if item.name != b"." && item.name != b".." {
            door.unlink([b"d/", item.name.as_slice()].concat())?;
        }
    }
    door.unlink([b"d/", behind[5].as_slice()].concat())?;
    for i in 0..50 {
        door.put(format!("d/new{i}"), b"")?;
    }
    stream.seek(position);
    let again: BTreeSet<_> =
        rest(&mut *stream)?.into_iter().filter(|name| !name.starts_with(b"new")).collect();
    let expected: BTreeSet<_> =
        behind.iter().enumerate().filter(|(i, _)| *i != 5).map(|(_, n)| n.clone()).collect();
    equal(again, expected)
}

fn list_rewound_sees_what_is_new(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("d/a", b"")?;
    let mut stream = door.open_stream(b"d")?;
    equal(rest(&mut *stream)?.len(), 3)?;
    door.put("d/b", b"")?;
    door.unlink("d/a")?;
    stream.rewind();
    let names: BTreeSet<_> = rest(&mut *stream)?.into_iter().collect();
    equal(names, [b".".to_vec(), b"..".to_vec(), b"b".to_vec()].into())
}

fn list_while_removing_removes_all(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    for i in 0..2000 {
        door.put(format!("d/{i}"), b"")?;
    }
    let mut stream = door.open_stream(b"d")?;
    while let Some(item) = stream.next()? {
        if item.name != b"." && item.name != b".." {
            door.unlink([b"d/", item.name.as_slice()].concat())?;
        }
    }
    door.remove_directory("d")?;
    refused(door.stat("d"), libc::ENOENT)
}

fn directory_of_many_entries_is_complete(door: &dyn Door) -> Verdict {
    let entries = if door.can(Ability::OneNode) { 12_000 } else { 2_000 };
    door.make_directory("d")?;
    let name = |i: usize| format!("d/a-rather-longer-name-than-usual-{i:08}");
    door.put(name(0), b"one inode")?;
    for i in 1..entries {
        door.link(name(0), name(i))?;
    }
    let names = door.names("d")?;
    equal(names.len(), entries)?;
    equal(names[entries - 1].clone(), name(entries - 1).as_bytes()[2..].to_vec())?;
    equal(names.iter().collect::<BTreeSet<_>>().len(), entries)?;
    equal(door.stat(name(entries / 2))?.nlink, entries as u64)
}

fn removed_directory_that_is_open_takes_nothing(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    let dir = door.open("d", O_RDONLY | O_DIRECTORY, 0)?;
    let under = |path: &'static str| At { dir: Some(dir.as_raw_fd()), path: path.as_bytes() };
    door.remove_directory("d")?;
    equal(door.stat_handle(dir.as_raw_fd())?.kind(), libc::S_IFDIR)?;
    refused(door.open_at(under("f"), O_RDWR | O_CREAT, 0o644), libc::ENOENT)?;
    refused(door.make_directory_at(under("e"), 0o755), libc::ENOENT)?;
    refused(door.symlink_at(b"x", under("s")), libc::ENOENT)?;
    refused(door.stat_at(under("f"), true), libc::ENOENT)?;
    // Another directory may get the name; the descriptor still refers to the removed one.
    door.make_directory("d")?;
    door.put("d/f", b"")?;
    refused(door.stat_at(under("f"), true), libc::ENOENT)?;
    let mut stream = door.stream_of(dir)?;
    let entries = rest(&mut *stream)?.into_iter().filter(|name| name != b"." && name != b"..").count();
    equal(entries, 0)
}

fn calls_under_a_descriptor_follow_its_directory(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("other")?;
    let dir = door.open("d", O_RDONLY | O_DIRECTORY, 0)?;
    let under = |path: &'static str| At { dir: Some(dir.as_raw_fd()), path: path.as_bytes() };
    let fd = door.open_at(under("f"), O_RDWR | O_CREAT, 0o644)?;
    door.write(&fd, b"under")?;
    door.rename("d", "other/moved")?;
    equal(door.get("other/moved/f")?, b"under".to_vec())?;
    equal(door.stat_at(under("f"), true)?, door.stat("other/moved/f")?)?;
    door.make_directory_at(under("e"), 0o755)?;
    door.symlink_at(b"f", under("s"))?;
    door.rename_at(under("f"), under("g"), 0)?;
    door.link_at(under("g"), "out".into(), false)?;
    equal(door.stat("out")?.nlink, 2)?;
    door.chmod_at(under("g"), 0o600)?;
    equal(door.stat("out")?.permissions(), 0o600)?;
    door.access_at(under("g"), libc::R_OK)?;
    let mut buffer = [0; 10];
    equal(door.read_link_at(under("s"), &mut buffer)?, 1)?;
    door.unlink_at(under("g"))?;
    door.unlink_at(under("s"))?;
    refused(door.unlink_at(under("e")), libc::EISDIR)?;
    door.remove_directory_at(under("e"))?;
    equal(door.names("other/moved")?, vec![])?;
    // A descriptor that is not a directory, and one that is not open.
    refused(door.stat_at(At { dir: Some(fd.as_raw_fd()), path: b"x" }, true), libc::ENOTDIR)?;
    refused(door.stat_at(At { dir: Some(999), path: b"x" }, true), libc::EBADF)?;
    let mut stream = door.stream_of(dir)?;
    equal(rest(&mut *stream)?.len(), 2)
}

fn parent_under_a_descriptor_follows_its_directory(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("other")?;
    let dir = door.open("d", O_RDONLY | O_DIRECTORY, 0)?;
    door.rename("d", "other/moved")?;
    door.put("other/moved/g", b"")?;
    let above = At { dir: Some(dir.as_raw_fd()), path: b"../../other/moved/g" };
    equal(door.stat_at(above, true)?.ino, door.stat("other/moved/g")?.ino)
}

fn working_directory_is_in_the_pool(door: &dyn Door) -> Verdict {
    // Paths relative to the process's working directory, with every spelling of the door.
    let here = |path: &'static str| At { dir: Some(libc::AT_FDCWD), path: path.as_bytes() };
    let back = door.open(".", O_RDONLY | O_DIRECTORY, 0)?;
    door.make_directory("d")?;
    door.make_directory("d/e")?;
    let e = door.open("d/e", O_RDONLY | O_DIRECTORY, 0)?;
    door.change_directory(e.as_raw_fd())?;
    let fd = door.open_at(here("f"), O_RDWR | O_CREAT, 0o644)?;
    door.write(&fd, b"here")?;
    equal(door.stat_at(here("../e/f"), true)?.size, 4)?;
    equal(door.working_directory()?, door.absolute(b"d/e"))?;
    equal(door.stat_at(here("."), true)?.ino, door.stat_handle(e.as_raw_fd())?.ino)?;
    door.change_directory(back.as_raw_fd())?;
    equal(door.get("d/e/f")?, b"here".to_vec())
}

fn working_directory_follows_its_directory(door: &dyn Door) -> Verdict {
    let here = |path: &'static str| At { dir: Some(libc::AT_FDCWD), path: path.as_bytes() };
    let back = door.open(".", O_RDONLY | O_DIRECTORY, 0)?;
    door.make_directory("d")?;
    door.make_directory("d/e")?;
    door.put("d/e/f", b"here")?;
    let e = door.open("d/e", O_RDONLY | O_DIRECTORY, 0)?;
    door.change_directory(e.as_raw_fd())?;
    door.rename_at(
        At { dir: Some(back.as_raw_fd()), path: b"d" },
        At { dir: Some(back.as_raw_fd()), path: b"moved" },
        0,
    )?;
    equal(door.working_directory()?, door.absolute(b"moved/e"))?;
    equal(door.stat_at(here("f"), true)?.size, 4)?;
    door.change_directory(back.as_raw_fd())?;
    equal(door.get("moved/e/f")?, b"here".to_vec())
}
