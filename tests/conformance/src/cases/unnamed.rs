//! Files that are open and have no name.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Door, Verdict};
use libc::O_RDWR;
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(unlink_while_open_keeps_the_file_usable;
        "An open file stays whole after its last name is removed: it can be read, written and extended, and fstat returns its attributes.",
        "An open file without a name has a link count of zero."),
    case!(attributes_that_were_changed_since_the_open_outlive_the_name;
        "An open file stays whole after its last name is removed: it can be read, written and extended, and fstat returns its attributes."),
    case!(rename_over_an_open_file_keeps_it_usable;
        "A file that rename replaced stays whole for processes that have it open."),
    case!(unlinked_name_made_anew_is_another_inode;
        "A name that was unlinked can be created again at once, as another inode."),
];

fn unlink_while_open_keeps_the_file_usable(door: &dyn Door) -> Verdict {
    door.put("f", b"still")?;
    let fd = door.open("f", O_RDWR, 0)?;
    let before = door.stat_handle(fd.as_raw_fd())?;
    door.unlink("f")?;
    refused(door.stat("f"), libc::ENOENT)?;
    equal(door.names(".")?, vec![])?;
    let after = door.stat_handle(fd.as_raw_fd())?;
    equal((after.ino, after.dev, after.size, after.nlink), (before.ino, before.dev, 5, 0))?;
    equal(after.mode, before.mode)?;
    equal(door.drain(&fd)?, b"still".to_vec())?;
    door.write_at(&fd, b"here", 1 << 20)?;
    door.truncate_handle(&fd, (1 << 20) + 2)?;
    equal(door.stat_handle(fd.as_raw_fd())?.size, (1 << 20) + 2)?;
    let twin = door.duplicate(&fd)?;
    drop(fd);
    equal(door.stat_handle(twin.as_raw_fd())?.nlink, 0)?;
    let mut two = [0; 4];
    equal(door.read_at(&twin, &mut two, 1 << 20)?, 2)?;
    equal(&two[..2], b"he")
}

fn attributes_that_were_changed_since_the_open_outlive_the_name(door: &dyn Door) -> Verdict {
    for name in ["f", "g"] {
        door.put(name, b"x")?;
        let fd = door.open(name, O_RDWR, 0)?;
        match name {
            "f" => door.chmod_handle(fd.as_raw_fd(), 0o741)?,
            _ => door.chmod(name, 0o741)?,
        }
        let before = door.stat_handle(fd.as_raw_fd())?;
        door.unlink(name)?;
        let after = door.stat_handle(fd.as_raw_fd())?;
        equal(after.mode & 0o7777, 0o741)?;
        equal((after.mode, after.uid, after.gid), (before.mode, before.uid, before.gid))?;
    }
    Ok(())
}

fn rename_over_an_open_file_keeps_it_usable(door: &dyn Door) -> Verdict {
    door.put("old", b"old bytes")?;
    door.put("new", b"new bytes")?;
    let fd = door.open("old", O_RDWR, 0)?;
    door.rename("new", "old")?;
    equal(door.get("old")?, b"new bytes".to_vec())?;
    equal(door.drain(&fd)?, b"old bytes".to_vec())?;
    door.write(&fd, b" and more")?;
    equal(door.stat_handle(fd.as_raw_fd())?.nlink, 0)?;
    equal(door.stat_handle(fd.as_raw_fd())?.size, 18)?;
    equal(door.get("old")?, b"new bytes".to_vec())
}

fn unlinked_name_made_anew_is_another_inode(door: &dyn Door) -> Verdict {
    let old = door.create("f")?;
    door.write(&old, b"old")?;
    door.unlink("f")?;
    let new = door.create("f")?;
    door.write(&new, b"new!")?;
    equal(door.get("f")?, b"new!".to_vec())?;
    holds(
        door.stat_handle(old.as_raw_fd())?.ino != door.stat_handle(new.as_raw_fd())?.ino,
        "the open old file and the new one have two inode numbers",
    )?;
    equal(door.drain(&door.open("f", O_RDWR, 0)?)?, b"new!".to_vec())?;
    equal(door.stat_handle(old.as_raw_fd())?.size, 3)
}
