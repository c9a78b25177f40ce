//! The daemon's clock: that of the kernel's file times. So the times in the shard and those of backing files are in the
//! order of the events.
//!
//! The kernel stamps files with its coarse clock, which ticks every few milliseconds. From Linux 6.13 on (multigrain
//! timestamps) a file that is changed again after its times were read gets an exact time, and from then on no file of
//! any file system gets an earlier one. The coarse clock of clock_gettime(2) ignores this: a name created after a file
//! would be older than the file. The exact clock would be ahead of the time that the kernel gives the next file. So the
//! daemon sets the times of a memfd of its own to "now", and reads back its access time; reading only the access time
//! does not make the next stamp exact. The two calls cost about a microsecond, once for all changes that are served
//! together.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use forebay_types::Timestamp;
use rustix::fs::{AtFlags, MemfdFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW};

/// The file that is stamped. None if it could not be created.
static STAMPED: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// The time that the kernel would give a file now.
pub(crate) fn now() -> Timestamp {
    let file = STAMPED.get_or_init(|| rustix::fs::memfd_create("clock", MemfdFlags::CLOEXEC).ok());
    file.as_ref().and_then(stamp).unwrap_or_else(coarse)
}

fn stamp(file: &OwnedFd) -> Option<Timestamp> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::futimens(file.as_fd(), &Timestamps { last_access: now, last_modification: now }).ok()?;
    let found = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::ATIME).ok()?;
    Some(Timestamp { sec: found.stx_atime.tv_sec, nsec: found.stx_atime.tv_nsec })
}

fn coarse() -> Timestamp {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Timestamp { sec: t.tv_sec, nsec: t.tv_nsec as u32 }
}

/// A board's epoch: greater with each worker.
pub(super) fn new_epoch() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn times_are_in_order_with_those_of_files() {
        // A file in memory has exact times where the kernel has them at all.
        let file = rustix::fs::memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::from(file);
        let changed = || {
            file.write_at(b"x", 0).unwrap();
            let st = file.metadata().unwrap();
            Timestamp { sec: st.mtime(), nsec: st.mtime_nsec() as u32 }
        };
        for _ in 0..2000 {
            changed();
            let (before, at, after) = (changed(), now(), changed());
            assert!(before <= at && at <= after, "{before:?} {at:?} {after:?}");
        }
    }
}
