//! Free space, and a file system that is full.

use crate::case::{case, equal, fail, holds, refused, Case};
use crate::door::{Door, Errno, Failure, Outcome, Verdict};
use libc::{ENOSPC, O_APPEND, O_CREAT, O_EXCL, O_RDWR, O_WRONLY};
use std::os::fd::OwnedFd;

pub(super) const CASES: &[Case] = &[
    case!(space_moves_with_files [OwnSpace];
        "statfs returns the pool's capacity, its free space as files are written and removed, and a name length of 255.",
        "Space is free at once after a file is truncated, or after its last name is removed and its last descriptor closed."),
    case!(full_of_data_refuses_writes_and_keeps_the_rest [SmallSpace];
        "On a full pool a write fails with ENOSPC or writes less; it never kills the program, and data written before stay whole.",
        "On a full pool fallocate fails with ENOSPC."),
    case!(full_of_data_can_be_read_changed_and_emptied [SmallSpace];
        "In a full pool files can be read, listed, truncated, renamed and removed.",
        "Space is free at once after a file is truncated, or after its last name is removed and its last descriptor closed."),
    case!(full_of_names_refuses_each_call_and_can_be_emptied [SmallSpace];
        "When a pool has no space for another entry, open, mkdir, symlink, link and mknod fail with ENOSPC and leave nothing behind.",
        "In a full pool files can be read, listed, truncated, renamed and removed."),
];

const CHUNK: usize = 256 << 10;
/// No case may write more: a `SmallSpace` file system is smaller.
const BYTES_MAX: usize = 300 << 20;
/// No case may make more entries: a `SmallSpace` file system holds fewer.
const ENTRIES_MAX: usize = 3_000_000;

/// The byte at `offset` of a filled file.
fn byte_at(offset: usize) -> u8 {
    (offset / CHUNK) as u8 ^ 0x5a
}

/// Appends until ENOSPC. Returns the number of bytes written.
fn fill(door: &dyn Door, fd: &OwnedFd) -> Result<usize, Failure> {
    let mut taken = 0;
    while taken < BYTES_MAX {
        let left = CHUNK - taken % CHUNK;
        match door.write(fd, &vec![byte_at(taken); left]) {
            Ok(0) => return fail("a write of some bytes wrote none and gave no error".into()),
            Ok(n) => taken += n,
            Err(Errno(ENOSPC)) => return Ok(taken),
            Err(errno) => return fail(format!("a write to a full file system gave {errno}")),
        }
    }
    fail(format!("{BYTES_MAX} bytes did not fill the file system"))
}

fn check_filled(door: &dyn Door, path: &str, length: usize) -> Verdict {
    let fd = door.open(path, libc::O_RDONLY, 0)?;
    let mut buffer = vec![0; CHUNK];
    let mut offset = 0;
    loop {
        match door.read(&fd, &mut buffer)? {
            0 => break,
            n => {
                let right = (0..n).all(|i| buffer[i] == byte_at(offset + i));
                holds(right, "what was written before is whole")?;
                offset += n;
            }
        }
    }
    equal(offset, length)
}

fn space_moves_with_files(door: &dyn Door) -> Verdict {
    let start = door.space()?;
    equal(start.name_max, 255)?;
    holds(start.free_bytes <= start.total_bytes && start.free_bytes > 32 << 20, "free is part of the total")?;
    let size = 24 << 20;
    let tolerance = 6 << 20; // huge pages, and the shard's own growth
    let near = |bytes: u64| -> Outcome<bool> { Ok(door.space()?.free_bytes.abs_diff(bytes) <= tolerance) };
    door.put("f", &vec![1; size])?;
    holds(near(start.free_bytes - size as u64)?, "the file's bytes are no longer free")?;
    door.truncate(b"f", 0)?;
    holds(near(start.free_bytes)?, "truncation gives them back")?;
    door.put("f", &vec![2; size])?;
    let fd = door.open("f", O_RDWR, 0)?;
    door.unlink("f")?;
    holds(near(start.free_bytes - size as u64)?, "an open file keeps its space without a name")?;
    drop(fd);
    holds(near(start.free_bytes)?, "the last close gives it back")?;
    door.put("f", &vec![3; size])?;
    door.put("g", b"")?;
    door.rename("g", "f")?;
    holds(near(start.free_bytes)?, "a rename over a file gives its space back")
}

fn full_of_data_refuses_writes_and_keeps_the_rest(door: &dyn Door) -> Verdict {
    door.put("before", b"written before")?;
    let fd = door.create("big")?;
    let taken = fill(door, &fd)?;
    refused(door.write(&fd, &[1; CHUNK]), ENOSPC)?;
    refused(door.allocate(&fd, 0, 0, 1 << 30), ENOSPC)?;
    let other = door.open("before", O_WRONLY | O_APPEND, 0)?;
    let outcome = door.write(&other, &[7; 1 << 20]);
    holds(matches!(outcome, Err(Errno(ENOSPC)) | Ok(1..=65_536)), "a large append is refused or cut")?;
    equal(door.get("before")?[..14].to_vec(), b"written before".to_vec())?;
    equal(door.stat("big")?.size, taken as i64)?;
    check_filled(door, "big", taken)?;
    door.unlink("big")?;
    drop(fd);
    door.put("after", &vec![9; taken / 2])?;
    door.unlink("after")?;
    Ok(())
}

fn full_of_data_can_be_read_changed_and_emptied(door: &dyn Door) -> Verdict {
    for i in 0..200 {
        door.put(format!("f{i}"), format!("file {i}").as_bytes())?;
    }
    door.make_directory("d")?;
    let fd = door.create("big")?;
    let taken = fill(door, &fd)?;
    equal(door.names(".")?.len(), 202)?;
    for i in 0..200 {
        equal(door.get(format!("f{i}"))?, format!("file {i}").into_bytes())?;
    }
    door.rename("f0", "d/renamed")?;
    door.chmod("f1", 0o600)?;
    door.truncate(b"f2", 0)?;
    let mut again = 0;
    for round in 0..3 {
        door.truncate(b"big", 0)?;
        door.seek(&fd, 0, libc::SEEK_SET)?;
        again = fill(door, &fd)?;
        holds(
            again >= taken / 10 * 9,
            &format!("round {round}: {again} of {taken} bytes can be written again"),
        )?;
    }
    for i in 1..200 {
        door.unlink(format!("f{i}"))?;
    }
    door.unlink("d/renamed")?;
    door.remove_directory("d")?;
    check_filled(door, "big", again)?;
    door.unlink("big")?;
    equal(door.names(".")?, vec![])?;
    drop(fd);
    // Each time once the last close has taken effect.
    let mut back = 0;
    for _ in 0..100 {
        let fd = door.create("big")?;
        back = fill(door, &fd)?;
        door.unlink("big")?;
        drop(fd);
        if back >= taken / 10 * 9 {
            return space_comes_back(door);
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    fail(format!("{back} of {taken} bytes can be written again"))
}

/// Waits until the last close of a file without a name has taken effect: the kernel's FUSE client sends it after close has
/// returned.
fn space_comes_back(door: &dyn Door) -> Verdict {
    for _ in 0..1000 {
        match door.put("probe", b"x") {
            Err(Errno(ENOSPC)) => std::thread::sleep(std::time::Duration::from_millis(10)),
            put => {
                put?;
                door.unlink("probe")?;
                return Ok(());
            }
        }
        match door.unlink("probe") {
            Ok(()) | Err(Errno(libc::ENOENT)) => {}
            Err(errno) => return fail(format!("removing a file that could not be written gave {errno}")),
        }
    }
    fail("the space of a removed file does not come back".to_owned())
}

/// Creates entries until ENOSPC. Returns how many were created.
fn exhaust(make: &dyn Fn(usize) -> Outcome<()>) -> Result<usize, Failure> {
    for i in 0..ENTRIES_MAX {
        match make(i) {
            Ok(()) => {}
            Err(Errno(ENOSPC)) => return Ok(i),
            Err(errno) => return fail(format!("making entry {i} gave {errno}")),
        }
    }
    fail(format!("{ENTRIES_MAX} entries did not fill the file system"))
}

fn full_of_names_refuses_each_call_and_can_be_emptied(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("kept", b"kept")?;
    // Long targets fill the file system sooner than empty files do.
    let target = vec![b't'; 3000];
    let links = exhaust(&|i| door.symlink(&target, format!("d/{i}")))?;
    // Some smaller inodes may still fit; each kind ends in ENOSPC too.
    let files = exhaust(&|i| door.open(format!("d/f{i}"), O_WRONLY | O_CREAT | O_EXCL, 0o644).map(drop))?;
    let dirs = exhaust(&|i| door.make_directory(format!("d/d{i}")))?;
    let nodes = exhaust(&|i| door.make_node_at(format!("d/n{i}").as_str().into(), libc::S_IFIFO | 0o600, 0))?;
    let hard = exhaust(&|i| door.link("kept", format!("d/h{i}")))?;
    refused(door.symlink(&target, "d/over"), ENOSPC)?;
    equal(door.names("d")?.len(), links + files + dirs + nodes + hard)?;
    equal(door.get("kept")?, b"kept".to_vec())?;
    equal(door.read_link(format!("d/{}", links / 2))?, target.clone())?;
    equal(door.stat("kept")?.nlink, 1 + hard as u64)?;
    let mut stream = door.open_stream(b"d")?;
    while let Some(item) = stream.next()? {
        let path = [b"d/", item.name.as_slice()].concat();
        match item.name.as_slice() {
            b"." | b".." => {}
            _ if item.kind == libc::DT_DIR => door.remove_directory(&path)?,
            _ => door.unlink(&path)?,
        }
    }
    door.remove_directory("d")?;
    door.make_directory("d")?;
    let again = exhaust(&|i| door.symlink(&target, format!("d/{i}")))?;
    holds(again >= links / 10 * 9, &format!("{again} of {links} entries can be made again"))?;
    for i in 0..again {
        door.unlink(format!("d/{i}"))?;
    }
    door.remove_directory("d")?;
    Ok(())
}
