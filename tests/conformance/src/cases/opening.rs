//! open(2) and its flags.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Door, Verdict};
use libc::{
    O_APPEND, O_CLOEXEC, O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_RDONLY, O_RDWR, O_TMPFILE,
    O_TRUNC, O_WRONLY,
};
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(open_create_makes_a_file_of_the_caller;
        "O_CREAT creates a regular file with the requested mode less the umask, owned by the caller."),
    case!(open_exclusive_on_a_name_that_is_there_fails;
        "O_CREAT with O_EXCL fails with EEXIST on any existing name, also on a dangling symbolic link."),
    case!(open_create_through_a_dangling_symlink_makes_its_target;
        "O_CREAT through a dangling symbolic link creates the link's target."),
    case!(open_truncate_empties_and_keeps_the_inode; "O_TRUNC empties the file and keeps its inode."),
    case!(open_of_the_wrong_kind_fails;
        "O_DIRECTORY on anything else fails with ENOTDIR, and O_NOFOLLOW on a symbolic link with ELOOP."),
    case!(open_of_a_directory_for_writing_fails;
        "Opening a directory for writing fails with EISDIR, and so does O_CREAT on one."),
    case!(open_mode_bounds_reads_and_writes;
        "A descriptor that is open for reading only refuses writes with EBADF, and the other way round."),
    case!(open_descriptors_are_the_kernels;
        "open returns a descriptor of the kernel: the lowest free number, O_CLOEXEC as requested, a shared offset after dup and fork."),
    case!(open_unnamed_file_vanishes_with_its_descriptor [OwnData];
        "O_TMPFILE opens a regular file without a name, which is removed with its last descriptor."),
    case!(link_of_an_unnamed_file_names_it [OneNode];
        "linkat gives a file opened with O_TMPFILE a name, unless it was opened with O_EXCL."),
    case!(open_path_only_answers_fstat;
        "On a descriptor opened with O_PATH fstat succeeds, and reads and writes fail with EBADF."),
];

fn open_create_makes_a_file_of_the_caller(door: &dyn Door) -> Verdict {
    door.set_umask(0o027);
    let fd = door.open("f", O_RDWR | O_CREAT, 0o666)?;
    let stat = door.stat_handle(fd.as_raw_fd())?;
    equal(stat.mode, libc::S_IFREG | 0o640)?;
    equal((stat.size, stat.nlink), (0, 1))?;
    // SAFETY: no memory is passed.
    equal((stat.uid, stat.gid), unsafe { (libc::geteuid(), libc::getegid()) })?;
    // An open of an existing file ignores the requested mode.
    door.open("f", O_RDWR | O_CREAT, 0o777)?;
    equal(door.stat("f")?.permissions(), 0o640)?;
    // The mode of a new file does not restrict the descriptor that created it.
    let fd = door.open("unwritable", O_RDWR | O_CREAT, 0o400)?;
    equal(door.write(&fd, b"yes")?, 3)?;
    equal(door.get("unwritable")?, b"yes".to_vec())
}

fn open_exclusive_on_a_name_that_is_there_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"kept")?;
    door.make_directory("d")?;
    door.symlink("none", "dangling")?;
    door.symlink("f", "to-f")?;
    for there in ["f", "d", "dangling", "to-f"] {
        refused(door.open(there, O_RDWR | O_CREAT | O_EXCL | O_TRUNC, 0o644), libc::EEXIST)?;
    }
    equal(door.get("f")?, b"kept".to_vec())?;
    refused(door.stat("none"), libc::ENOENT)
}

fn open_create_through_a_dangling_symlink_makes_its_target(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.symlink("d/target", "s")?;
    door.put("s", b"through")?;
    equal(door.get("d/target")?, b"through".to_vec())?;
    equal(door.lstat("s")?.kind(), libc::S_IFLNK)?;
    door.symlink("no/such", "lost")?;
    refused(door.open("lost", O_RDWR | O_CREAT, 0o644), libc::ENOENT)
}

fn open_truncate_empties_and_keeps_the_inode(door: &dyn Door) -> Verdict {
    door.put("f", &[7; 100_000])?;
    let before = door.stat("f")?;
    let other = door.open("f", O_RDONLY, 0)?;
    let fd = door.open("f", O_WRONLY | O_TRUNC, 0)?;
    let after = door.stat("f")?;
    equal((after.ino, after.size, after.blocks), (before.ino, 0, 0))?;
    equal(door.drain(&other)?, vec![])?;
    door.write(&fd, b"new")?;
    equal(door.drain(&other)?, b"new".to_vec())
}

fn open_of_the_wrong_kind_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.make_directory("d")?;
    door.symlink("f", "to-f")?;
    door.symlink("d", "to-d")?;
    refused(door.open("f", O_RDONLY | O_DIRECTORY, 0), libc::ENOTDIR)?;
    refused(door.open("to-f", O_RDONLY | O_NOFOLLOW, 0), libc::ELOOP)?;
    refused(door.open("to-d", O_RDONLY | O_NOFOLLOW | O_DIRECTORY, 0), libc::ENOTDIR)?;
    door.open("to-d", O_RDONLY | O_DIRECTORY, 0)?;
    door.open("f", O_RDONLY | O_NOFOLLOW, 0)?;
    Ok(())
}

fn open_of_a_directory_for_writing_fails(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    refused(door.open("d", O_WRONLY, 0), libc::EISDIR)?;
    refused(door.open("d", O_RDWR, 0), libc::EISDIR)?;
    refused(door.open("d", O_RDONLY | O_CREAT, 0o644), libc::EISDIR)?;
    refused(door.open("new/", O_RDWR | O_CREAT, 0o644), libc::EISDIR)?;
    let fd = door.open("d", O_RDONLY, 0)?;
    equal(door.stat_handle(fd.as_raw_fd())?.ino, door.stat("d")?.ino)?;
    equal(door.stat_handle(fd.as_raw_fd())?.kind(), libc::S_IFDIR)
}

fn open_mode_bounds_reads_and_writes(door: &dyn Door) -> Verdict {
    door.put("f", b"abc")?;
    let reader = door.open("f", O_RDONLY, 0)?;
    let writer = door.open("f", O_WRONLY, 0)?;
    refused(door.write(&reader, b"x"), libc::EBADF)?;
    refused(door.write_at(&reader, b"x", 0), libc::EBADF)?;
    refused(door.read(&writer, &mut [0]), libc::EBADF)?;
    refused(door.read_at(&writer, &mut [0], 0), libc::EBADF)?;
    equal(door.get("f")?, b"abc".to_vec())
}

fn open_descriptors_are_the_kernels(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    let other = door.open("f", O_RDWR | O_CLOEXEC, 0)?;
    holds(other.as_raw_fd() > fd.as_raw_fd(), "numbers rise")?;
    // SAFETY: no memory is passed.
    let flags = |fd: i32| unsafe { (libc::fcntl(fd, libc::F_GETFD), libc::fcntl(fd, libc::F_GETFL)) };
    equal(flags(fd.as_raw_fd()).0, 0)?;
    equal(flags(other.as_raw_fd()).0, libc::FD_CLOEXEC)?;
    equal(flags(other.as_raw_fd()).1 & libc::O_ACCMODE, O_RDWR)?;
    let appender = door.open("f", O_WRONLY | O_APPEND, 0)?;
    equal(flags(appender.as_raw_fd()).1 & O_APPEND, O_APPEND)?;
    let number = other.as_raw_fd();
    drop(other);
    let again = door.open("f", O_RDONLY, 0)?;
    equal(again.as_raw_fd(), number)?;
    let twin = door.duplicate(&fd)?;
    door.write(&fd, b"abcd")?;
    equal(door.seek(&twin, 0, libc::SEEK_CUR)?, 4)
}

fn open_unnamed_file_vanishes_with_its_descriptor(door: &dyn Door) -> Verdict {
    let fd = door.open(".", O_RDWR | O_TMPFILE, 0o600)?;
    door.write(&fd, b"nameless")?;
    let stat = door.stat_handle(fd.as_raw_fd())?;
    equal((stat.kind(), stat.size, stat.nlink), (libc::S_IFREG, 8, 0))?;
    let mut bytes = [0; 8];
    equal(door.read_at(&fd, &mut bytes, 0)?, 8)?;
    equal(&bytes, b"nameless")?;
    equal(door.names(".")?, vec![])
}

fn link_of_an_unnamed_file_names_it(door: &dyn Door) -> Verdict {
    door.set_umask(0);
    let fd = door.open(".", O_RDWR | O_TMPFILE, 0o643)?;
    door.write(&fd, b"before ")?;
    door.put("taken", b"x")?;
    refused(door.link_handle(fd.as_raw_fd(), "taken".into()), libc::EEXIST)?;
    refused(door.link_handle(fd.as_raw_fd(), "none/f".into()), libc::ENOENT)?;
    door.link_handle(fd.as_raw_fd(), "f".into())?;
    door.write(&fd, b"and after")?;
    equal(door.get("f")?, b"before and after".to_vec())?;
    let stat = door.stat("f")?;
    equal((stat.mode, stat.nlink, stat.size), (libc::S_IFREG | 0o643, 1, 16))?;
    drop(fd);
    equal(door.get("f")?, b"before and after".to_vec())?;
    let fd = door.open(".", O_RDWR | O_TMPFILE | O_EXCL, 0o600)?;
    refused(door.link_handle(fd.as_raw_fd(), "never".into()), libc::ENOENT)?;
    equal(door.names(".")?, vec![b"f".to_vec(), b"taken".to_vec()])
}

fn open_path_only_answers_fstat(door: &dyn Door) -> Verdict {
    door.put("f", b"abc")?;
    door.make_directory("d")?;
    let fd = door.open("f", O_PATH, 0)?;
    equal(door.stat_handle(fd.as_raw_fd())?, door.stat("f")?)?;
    refused(door.read(&fd, &mut [0]), libc::EBADF)?;
    refused(door.write(&fd, b"x"), libc::EBADF)?;
    let fd = door.open("d", O_PATH | O_DIRECTORY, 0)?;
    equal(door.stat_handle(fd.as_raw_fd())?.ino, door.stat("d")?.ino)
}
