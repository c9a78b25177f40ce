//! FIFOs, sockets and devices.

use crate::case::{case, equal, refused, Case};
use crate::door::{Door, Verdict};

pub(super) const CASES: &[Case] = &[
    case!(make_node_makes_each_kind;
        "mknod creates entries for FIFOs, sockets and regular files, and for root also device nodes with their numbers."),
    case!(make_node_for_root_makes_devices [Root];
        "mknod creates entries for FIFOs, sockets and regular files, and for root also device nodes with their numbers."),
    case!(make_node_on_a_name_that_is_there_fails;
        "mknod and mkfifo on a name that is there fail with EEXIST."),
];

fn make_node_makes_each_kind(door: &dyn Door) -> Verdict {
    for (name, kind) in [("p", libc::S_IFIFO), ("k", libc::S_IFSOCK), ("r", libc::S_IFREG)] {
        door.make_node_at(name.into(), kind | 0o640, 0)?;
        let stat = door.lstat(name)?;
        equal((stat.mode, stat.nlink, stat.size), (kind | 0o640, 1, 0))?;
    }
    door.put("r", b"a regular file after all")?;
    equal(door.get("r")?.len(), 24)?;
    door.link("p", "p2")?;
    door.rename("p", "p3")?;
    equal(door.lstat("p2")?.nlink, 2)?;
    for name in ["p2", "p3", "k", "r"] {
        door.unlink(name)?;
    }
    equal(door.names(".")?, vec![])
}

fn make_node_for_root_makes_devices(door: &dyn Door) -> Verdict {
    let number = libc::makedev(1, 3);
    for (name, kind) in [("c", libc::S_IFCHR), ("b", libc::S_IFBLK)] {
        door.make_node_at(name.into(), kind | 0o600, number)?;
        let stat = door.stat(name)?;
        equal((stat.mode, stat.rdev), (kind | 0o600, number))?;
    }
    Ok(())
}

fn make_node_on_a_name_that_is_there_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.symlink("none", "s")?;
    for there in ["f", "s", "."] {
        refused(door.make_node_at(there.into(), libc::S_IFIFO | 0o600, 0), libc::EEXIST)?;
        refused(door.make_node_at(there.into(), libc::S_IFREG | 0o600, 0), libc::EEXIST)?;
    }
    Ok(())
}
