//! What several processes see of one another.

use crate::case::{case, equal, fail, holds, Case};
use crate::door::{Ability, Door, Errno, Failure, Verdict};
use libc::{O_APPEND, O_CREAT, O_EXCL, O_RDWR, O_WRONLY};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

pub(super) const CASES: &[Case] = &[
    case!(child_reads_what_its_parent_wrote_and_the_other_way_round [Children];
        "Data written through one descriptor can be read at once through every other descriptor of the file, in every process."),
    case!(child_shares_the_offset [Children];
        "open returns a descriptor of the kernel: the lowest free number, O_CLOEXEC as requested, a shared offset after dup and fork."),
    case!(create_exclusive_by_many_succeeds_once [Children];
        "When several processes open one new name with O_CREAT and O_EXCL, exactly one succeeds."),
    case!(append_by_many_keeps_records_whole [Children];
        "With O_APPEND each write lands whole at the end of the file, also when several processes append at the same time."),
    case!(locks_exclude_and_go_with_their_holder [Children];
        "Record locks and flock exclude other processes, and are released when their holder ends."),
    case!(fifo_passes_bytes_between_processes [Children, OneDoor];
        "A FIFO passes bytes between processes that open it by name."),
    case!(rename_over_by_another_is_never_seen_half_done [Children];
        "rename onto an existing name replaces it: every observer sees the old or the new inode, never none."),
];

/// Runs `work` in a forked child.
fn child(work: impl FnOnce() -> Verdict) -> Result<libc::pid_t, Failure> {
    // SAFETY: the suite's process has one thread, so the child may do anything.
    match unsafe { libc::fork() } {
        -1 => fail("fork failed".into()),
        0 => {
            let status = match work() {
                Ok(()) => 0,
                Err(failure) => {
                    eprintln!("    in a child: {} at {}", failure.what, failure.place);
                    1
                }
            };
            // SAFETY: ends the child without running its parent's exit handlers.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(pid),
    }
}

/// Waits for a child, which must have done well.
#[track_caller]
fn reap(pid: libc::pid_t) -> Verdict {
    let mut status = 0;
    // SAFETY: the status is ours.
    while unsafe { libc::waitpid(pid, &mut status, 0) } != pid {}
    equal(status, 0)
}

fn child_reads_what_its_parent_wrote_and_the_other_way_round(door: &dyn Door) -> Verdict {
    door.put("f", b"parent")?;
    let fd = door.open("f", O_RDWR, 0)?;
    reap(child(|| {
        equal(door.get("f")?, b"parent".to_vec())?;
        door.write_at(&fd, b"child!", 0)?;
        door.make_directory("made")?;
        door.put("made/g", b"new").map_err(Into::into)
    })?)?;
    equal(door.get("f")?, b"child!".to_vec())?;
    equal(door.get("made/g")?, b"new".to_vec())?;
    reap(child(|| {
        door.unlink("made/g")?;
        door.remove_directory("made").map_err(Into::into)
    })?)?;
    equal(door.names(".")?, vec![b"f".to_vec()])
}

fn child_shares_the_offset(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.write(&fd, b"12")?;
    reap(child(|| equal(door.write(&fd, b"345")?, 3))?)?;
    equal(door.seek(&fd, 0, libc::SEEK_CUR)?, 5)?;
    door.write(&fd, b"6")?;
    equal(door.get("f")?, b"123456".to_vec())
}

fn create_exclusive_by_many_succeeds_once(door: &dyn Door) -> Verdict {
    const NAMES: usize = 50;
    let mut children = Vec::new();
    for who in 0..4 {
        children.push(child(|| {
            for i in 0..NAMES {
                match door.open(format!("n{i}"), O_WRONLY | O_CREAT | O_EXCL, 0o644) {
                    Ok(_) => door.put(format!("won.{i}.{who}"), b"")?,
                    Err(errno) => equal(errno.0, libc::EEXIST)?,
                }
            }
            Ok(())
        })?);
    }
    for pid in children {
        reap(pid)?;
    }
    let won = door.names(".")?.into_iter().filter(|name| name.starts_with(b"won.")).count();
    equal(won, NAMES)
}

fn append_by_many_keeps_records_whole(door: &dyn Door) -> Verdict {
    const RECORDS: usize = 200;
    door.put("log", b"")?;
    let mut children = Vec::new();
    for who in 0..3_u8 {
        children.push(child(|| {
            let fd = door.open("log", O_WRONLY | O_APPEND, 0)?;
            for _ in 0..RECORDS {
                equal(door.write(&fd, &[b'a' + who; 777])?, 777)?;
            }
            Ok(())
        })?);
    }
    for pid in children {
        reap(pid)?;
    }
    let bytes = door.get("log")?;
    equal(bytes.len(), 3 * RECORDS * 777)?;
    holds(bytes.chunks(777).all(|record| record.iter().all(|b| *b == record[0])), "every record is whole")?;
    for who in 0..3 {
        equal(bytes.chunks(777).filter(|record| record[0] == b'a' + who).count(), RECORDS)?;
    }
    Ok(())
}

fn locks_exclude_and_go_with_their_holder(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    // SAFETY: all zeros is a valid struct flock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as i16;
    range.l_len = 10;
    // SAFETY: the structure is ours.
    equal(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &range) }, 0)?;
    let attempt = |whole: bool| {
        child(move || {
            let other = door.open("f", O_RDWR, 0)?;
            // SAFETY: the structure is ours.
            let (record, file) = unsafe {
                (
                    libc::fcntl(other.as_raw_fd(), libc::F_SETLK, &range),
                    libc::flock(other.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB),
                )
            };
            equal((record == -1, file == -1), (!whole, whole))
        })
    };
    // The parent holds the record lock, so the child gets only the flock. Then the other way round.
    reap(attempt(false)?)?;
    range.l_type = libc::F_UNLCK as i16;
    // SAFETY: the structure is ours.
    equal(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &range) }, 0)?;
    // The child that held the flock has ended, and its lock with it. Another node receives that a moment later.
    let free_by =
        Instant::now() + if door.can(Ability::OneNode) { Duration::ZERO } else { Duration::from_secs(10) };
    loop {
        // SAFETY: no memory is passed.
        let outcome = unsafe { libc::flock(fd.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
        if outcome == 0 || Instant::now() >= free_by {
            equal(outcome, 0)?;
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let range = libc::flock { l_type: libc::F_WRLCK as i16, ..range };
    reap(child(|| {
        let other = door.open("f", O_RDWR, 0)?;
        // SAFETY: the structure is ours.
        equal(unsafe { libc::fcntl(other.as_raw_fd(), libc::F_SETLK, &range) }, 0)?;
        // SAFETY: no memory is passed.
        equal(unsafe { libc::flock(other.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }, -1)
    })?)
}

fn fifo_passes_bytes_between_processes(door: &dyn Door) -> Verdict {
    door.make_node_at("p".into(), libc::S_IFIFO | 0o600, 0)?;
    let writer = child(|| {
        let fd = door.open("p", O_WRONLY, 0)?;
        equal(door.write(&fd, &[7; 5000])?, 5000)
    })?;
    equal(door.get("p")?, vec![7; 5000])?;
    reap(writer)?;
    equal(door.stat("p")?.kind(), libc::S_IFIFO)
}

fn rename_over_by_another_is_never_seen_half_done(door: &dyn Door) -> Verdict {
    door.put("name", b"0")?;
    let pid = child(|| {
        for i in 0..300 {
            let next = format!("next{}", i % 2);
            door.put(&next, format!("{i}").as_bytes())?;
            door.rename(&next, "name")?;
        }
        Ok(())
    })?;
    let (mut status, mut stale) = (0, 0);
    // SAFETY: the status is ours.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == 0 {
        let bytes = match door.get("name") {
            // Through a mount the kernel looks the name up and opens the inode, and after ESTALE does both once more. A
            // rename came between both times. On one node that is rare: it happens when the mount's threads wait for a
            // processor.
            Err(Errno(libc::ESTALE)) if !door.can(Ability::OneNode) || stale < 2 => {
                stale += 1;
                continue;
            }
            bytes => bytes?,
        };
        holds(!bytes.is_empty(), "the name has a whole file at any time")?;
        door.stat("name")?;
    }
    equal(status, 0)?;
    equal(door.get("name")?, b"299".to_vec())
}
