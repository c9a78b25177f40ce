//! Times.

use crate::case::{case, equal, holds, Case};
use crate::door::{Door, SetTime, Stat, Time, Verdict};
use libc::O_RDWR;
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(times_keep_nanoseconds_and_far_years;
        "Times have a resolution of nanoseconds, and may lie before 1970 and after 2038."),
    case!(write_and_truncate_move_mtime_and_ctime;
        "Writes, and truncation by path and by descriptor, update mtime and ctime."),
    case!(changes_of_the_inode_move_ctime_alone;
        "chmod, chown, link and rename update ctime and leave mtime unchanged."),
    case!(changes_of_entries_move_the_directorys_times;
        "Creating, removing and renaming an entry update mtime and ctime of its directory."),
    case!(set_times_sets_either_and_omits_the_other;
        "utimensat sets each time to a value or to the present, and leaves it unchanged with UTIME_OMIT."),
    case!(set_times_of_a_symlink_leaves_its_target;
        "utimensat with AT_SYMLINK_NOFOLLOW sets the times of the link."),
];

fn at(sec: i64, nsec: i64) -> SetTime {
    SetTime::At(Time { sec, nsec })
}

/// Long enough for any file system's clock to have moved: it moves with the scheduler's tick, 10 ms at most.
fn tick() {
    std::thread::sleep(std::time::Duration::from_millis(25));
}

fn now() -> i64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

fn times_keep_nanoseconds_and_far_years(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    door.make_directory("d")?;
    for path in ["f", "d"] {
        for (a, m) in [
            ((1, 1), (2, 999_999_999)),
            ((-1000, 5), (-1, 999_999_999)),
            ((4_000_000_000, 7), (5_000_000_000, 8)),
        ] {
            door.set_times_at(path.into(), at(a.0, a.1), at(m.0, m.1), true)?;
            let stat = door.stat(path)?;
            equal((stat.atime.sec, stat.atime.nsec), a)?;
            equal((stat.mtime.sec, stat.mtime.nsec), m)?;
        }
    }
    Ok(())
}

fn write_and_truncate_move_mtime_and_ctime(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    let fd = door.open("f", O_RDWR, 0)?;
    let moved = |before: Stat| -> Verdict {
        let after = door.stat("f")?;
        holds(after.mtime > before.mtime, "mtime moved")?;
        holds(after.ctime > before.ctime, "ctime moved")?;
        equal(after, door.stat_handle(fd.as_raw_fd())?)
    };
    let before = door.stat("f")?;
    holds((now() - before.mtime.sec).abs() < 100, "a new file's mtime is about now")?;
    tick();
    door.write(&fd, b"y")?;
    moved(before)?;
    let before = door.stat("f")?;
    tick();
    door.truncate(b"f", 0)?;
    moved(before)?;
    let before = door.stat("f")?;
    tick();
    door.truncate_handle(&fd, 10)?;
    moved(before)?;
    let before = door.stat("f")?;
    tick();
    door.open("f", O_RDWR | libc::O_TRUNC, 0)?;
    moved(before)
}

fn changes_of_the_inode_move_ctime_alone(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    let moved = |before: Stat, path: &str| -> Verdict {
        let after = door.stat(path)?;
        holds(after.ctime > before.ctime, "ctime moved")?;
        equal((after.mtime, after.atime), (before.mtime, before.atime))
    };
    let before = door.stat("f")?;
    tick();
    door.chmod("f", 0o600)?;
    moved(before, "f")?;
    let before = door.stat("f")?;
    tick();
    door.chown_at("f".into(), Some(before.uid), Some(before.gid), true)?;
    moved(before, "f")?;
    let before = door.stat("f")?;
    tick();
    door.link("f", "g")?;
    moved(before, "f")?;
    let before = door.stat("f")?;
    tick();
    door.unlink("g")?;
    moved(before, "f")?;
    let before = door.stat("f")?;
    tick();
    door.rename("f", "h")?;
    moved(before, "h")
}

fn changes_of_entries_move_the_directorys_times(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("e")?;
    door.put("file", b"")?;
    let step = |what: &str, paths: &[&str], change: &dyn Fn() -> Result<(), crate::door::Errno>| -> Verdict {
        let before = paths.iter().map(|p| door.stat(p)).collect::<Result<Vec<_>, _>>()?;
        tick();
        change()?;
        for (path, before) in paths.iter().zip(before) {
            let after = door.stat(path)?;
            holds(
                after.mtime > before.mtime && after.ctime > before.ctime,
                &format!("{what} moved the times of {path}"),
            )?;
        }
        Ok(())
    };
    step("create", &["d"], &|| door.put("d/f", b""))?;
    step("mkdir", &["d"], &|| door.make_directory("d/sub"))?;
    step("symlink", &["d"], &|| door.symlink("x", "d/s"))?;
    step("link", &["d"], &|| door.link("file", "d/l"))?;
    step("rename within", &["d"], &|| door.rename("d/f", "d/g"))?;
    step("rename between", &["d", "e"], &|| door.rename("d/g", "e/g"))?;
    step("unlink", &["e"], &|| door.unlink("e/g"))?;
    step("rmdir", &["d"], &|| door.remove_directory("d/sub"))
}

fn set_times_sets_either_and_omits_the_other(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    door.set_times_at("f".into(), at(100, 1), at(200, 2), true)?;
    door.set_times_at("f".into(), SetTime::Omit, at(300, 3), true)?;
    let stat = door.stat("f")?;
    equal((stat.atime.sec, stat.mtime.sec), (100, 300))?;
    door.set_times_at("f".into(), SetTime::Now, SetTime::Omit, true)?;
    let stat = door.stat("f")?;
    holds((now() - stat.atime.sec).abs() < 100, "atime is about now")?;
    equal(stat.mtime, Time { sec: 300, nsec: 3 })?;
    let fd = door.open("f", O_RDWR, 0)?;
    door.set_times_handle(fd.as_raw_fd(), at(400, 4), SetTime::Now)?;
    let stat = door.stat("f")?;
    equal(stat.atime, Time { sec: 400, nsec: 4 })?;
    holds((now() - stat.mtime.sec).abs() < 100, "mtime is about now")?;
    holds((now() - stat.ctime.sec).abs() < 100, "ctime is about now whatever was set")?;
    door.set_times_handle(fd.as_raw_fd(), SetTime::Omit, SetTime::Omit)?;
    equal(door.stat("f")?.atime, Time { sec: 400, nsec: 4 })
}

fn set_times_of_a_symlink_leaves_its_target(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    door.set_times_at("f".into(), at(10, 0), at(20, 0), true)?;
    door.symlink("f", "s")?;
    door.set_times_at("s".into(), at(30, 0), at(40, 0), false)?;
    equal(door.lstat("s")?.mtime, Time { sec: 40, nsec: 0 })?;
    equal(door.stat("f")?.mtime, Time { sec: 20, nsec: 0 })?;
    door.set_times_at("s".into(), at(50, 0), at(60, 0), true)?;
    equal(door.stat("f")?.mtime, Time { sec: 60, nsec: 0 })?;
    equal(door.lstat("s")?.mtime, Time { sec: 40, nsec: 0 })
}
