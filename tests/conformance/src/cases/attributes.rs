//! Modes, owners, counts.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Door, Verdict};
use libc::{O_CREAT, O_RDONLY, O_RDWR, O_WRONLY};
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(stat_by_path_and_descriptor_agree;
        "stat, lstat and fstat return the same attributes, except for a symbolic link, which lstat does not follow."),
    case!(inode_numbers_are_distinct_and_kept;
        "All inodes of a pool have the same device number; each has its own inode number, and keeps it through rename."),
    case!(chmod_sets_twelve_bits;
        "chmod sets the twelve permission bits, by path and by descriptor, and fstat of every descriptor returns the new bits."),
    case!(chown_sets_owner_and_group [Root];
        "chown sets owner and group, either of them alone, also of a symbolic link, and clears the set-id bits of a file."),
    case!(create_in_a_set_group_id_directory_takes_its_group [Root];
        "A file, directory or link created in a directory with the set-group-ID bit gets its group, and a directory also the bit."),
    case!(unnamed_file_of_a_set_group_id_directory_has_its_group [Root, OwnData, OneNode];
        "A file, directory or link created in a directory with the set-group-ID bit gets its group, and a directory also the bit."),
    case!(umask_applies_to_what_is_made;
        "The umask applies to new files, directories, FIFOs, sockets and device nodes, and to nothing else."),
    case!(directory_link_count_follows_its_subdirectories;
        "A directory's link count is two, plus one for each subdirectory."),
];

fn stat_by_path_and_descriptor_agree(door: &dyn Door) -> Verdict {
    door.put("f", &[1; 12_345])?;
    door.make_directory("d")?;
    door.symlink("f", "s")?;
    let fd = door.open("f", O_RDONLY, 0)?;
    equal(door.stat("f")?, door.lstat("f")?)?;
    equal(door.stat("f")?, door.stat("s")?)?;
    equal(door.stat("f")?, door.stat_handle(fd.as_raw_fd())?)?;
    holds(door.lstat("s")?.ino != door.stat("s")?.ino, "the link is an inode of its own")?;
    let stat = door.stat("f")?;
    equal((stat.size, stat.nlink, stat.kind()), (12_345, 1, libc::S_IFREG))?;
    holds(stat.blocks * 512 >= 12_345, "blocks hold the bytes")?;
    let dir = door.open("d", O_RDONLY, 0)?;
    equal(door.stat("d")?, door.stat_handle(dir.as_raw_fd())?)
}

fn inode_numbers_are_distinct_and_kept(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("f", b"")?;
    door.put("d/g", b"")?;
    door.symlink("f", "s")?;
    let all = ["d", "f", "d/g", "s", "."];
    let stats = all.iter().map(|p| door.lstat(p)).collect::<Result<Vec<_>, _>>()?;
    for (i, a) in stats.iter().enumerate() {
        holds(a.ino != 0, "an inode number is not zero")?;
        equal(a.dev, stats[0].dev)?;
        holds(stats[..i].iter().all(|b| b.ino != a.ino), "inode numbers are distinct")?;
    }
    door.rename("f", "d/moved")?;
    equal(door.stat("d/moved")?.ino, stats[1].ino)?;
    door.rename("d", "e")?;
    equal(door.stat("e")?.ino, stats[0].ino)?;
    equal(door.stat("e/g")?.ino, stats[2].ino)
}

fn chmod_sets_twelve_bits(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.make_directory("d")?;
    for mode in [0o000, 0o777, 0o4755, 0o2755, 0o1644, 0o7777, 0o600] {
        door.chmod("f", mode)?;
        equal(door.stat("f")?.mode, libc::S_IFREG | mode)?;
        equal(door.stat_handle(fd.as_raw_fd())?.permissions(), mode)?;
        door.chmod("d", mode | 0o700)?;
        equal(door.stat("d")?.mode, libc::S_IFDIR | mode | 0o700)?;
    }
    door.chmod_handle(fd.as_raw_fd(), 0o641)?;
    equal(door.stat("f")?.permissions(), 0o641)?;
    let dir = door.open("d", O_RDONLY, 0)?;
    door.chmod_handle(dir.as_raw_fd(), 0o1777)?;
    equal(door.stat("d")?.permissions(), 0o1777)?;
    refused(door.chmod("none", 0o600), libc::ENOENT)
}

fn chown_sets_owner_and_group(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.symlink("f", "s")?;
    door.chown_at("f".into(), Some(1234), Some(2345), true)?;
    let owner = |path: &str| door.lstat(path).map(|s| (s.uid, s.gid));
    equal(owner("f")?, (1234, 2345))?;
    door.chown_at("f".into(), Some(7), None, true)?;
    equal(owner("f")?, (7, 2345))?;
    door.chown_at("f".into(), None, Some(8), true)?;
    equal(owner("f")?, (7, 8))?;
    door.chown_at("s".into(), Some(99), Some(98), false)?;
    equal((owner("s")?, owner("f")?), ((99, 98), (7, 8)))?;
    door.chown_at("s".into(), Some(70), None, true)?;
    equal(owner("f")?, (70, 8))?;
    door.chown_handle(fd.as_raw_fd(), Some(3), Some(4))?;
    equal(owner("f")?, (3, 4))?;
    door.chmod("f", 0o6755)?;
    door.chown_at("f".into(), Some(5), Some(6), true)?;
    equal(door.stat("f")?.permissions(), 0o755)?;
    door.make_directory("d")?;
    door.chmod("d", 0o2755)?;
    door.chown_at("d".into(), Some(5), Some(6), true)?;
    equal(door.stat("d")?.permissions(), 0o2755)
}

fn create_in_a_set_group_id_directory_takes_its_group(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.chown_at("d".into(), None, Some(4321), true)?;
    door.chmod("d", 0o2775)?;
    door.put("d/f", b"")?;
    door.make_directory("d/sub")?;
    door.symlink("x", "d/s")?;
    door.make_node_at("d/p".into(), libc::S_IFIFO | 0o600, 0)?;
    for made in ["d/f", "d/sub", "d/s", "d/p"] {
        equal(door.lstat(made)?.gid, 4321)?;
    }
    equal(door.stat("d/sub")?.permissions(), 0o2755)?;
    equal(door.stat("d/f")?.permissions(), 0o644)
}

fn unnamed_file_of_a_set_group_id_directory_has_its_group(door: &dyn Door) -> Verdict {
    for (dir, mode) in [("plain", 0o775), ("set", 0o2775)] {
        door.make_directory(dir)?;
        door.chown_at(dir.into(), None, Some(4321), true)?;
        door.chmod(dir, mode)?;
    }
    // SAFETY: no memory is passed.
    let own = unsafe { libc::getegid() };
    for (from, gid) in [("plain", own), ("set", 4321)] {
        let fd = door.open(from, O_RDWR | libc::O_TMPFILE, 0o2750)?;
        let stat = door.stat_handle(fd.as_raw_fd())?;
        equal((stat.gid, stat.mode), (gid, libc::S_IFREG | 0o2750))?;
        // It keeps the group, wherever it gets its name.
        for to in ["plain", "set"] {
            let fd = door.open(from, O_RDWR | libc::O_TMPFILE, 0o640)?;
            let name = format!("{to}/from-{from}");
            door.link_handle(fd.as_raw_fd(), name.as_str().into())?;
            equal(door.stat(&name)?.gid, gid)?;
            equal(door.stat_handle(fd.as_raw_fd())?.gid, gid)?;
        }
    }
    Ok(())
}

fn umask_applies_to_what_is_made(door: &dyn Door) -> Verdict {
    equal(door.set_umask(0o137), 0o022)?;
    door.open("f", O_WRONLY | O_CREAT, 0o777)?;
    door.make_directory_at("d".into(), 0o1777)?;
    door.make_node_at("p".into(), libc::S_IFIFO | 0o666, 0)?;
    door.symlink("x", "s")?;
    equal(door.stat("f")?.permissions(), 0o640)?;
    equal(door.stat("d")?.permissions(), 0o1640)?;
    equal(door.stat("p")?.permissions(), 0o640)?;
    equal(door.lstat("s")?.permissions(), 0o777)?;
    door.chmod("f", 0o777)?;
    equal(door.stat("f")?.permissions(), 0o777)?;
    equal(door.set_umask(0o022), 0o137)
}

fn directory_link_count_follows_its_subdirectories(door: &dyn Door) -> Verdict {
    let links = |path: &str| door.stat(path).map(|s| s.nlink);
    door.make_directory("d")?;
    equal(links("d")?, 2)?;
    for i in 0..5 {
        door.make_directory(format!("d/{i}"))?;
        door.put(format!("d/f{i}"), b"")?;
    }
    equal(links("d")?, 7)?;
    door.remove_directory("d/0")?;
    door.rename("d/1", "out")?;
    equal(links("d")?, 5)?;
    door.rename("d/2", "d/3")?;
    equal(links("d")?, 4)?;
    let fd = door.open("d/f0", O_RDWR, 0)?;
    equal(door.stat_handle(fd.as_raw_fd())?.nlink, 1)
}
