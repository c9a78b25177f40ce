//! The daemon's clock: that of the kernel's file times. So the times in the shard and those of backing files are in the
//! order of the events.
//!
//! The kernel stamps files with its coarse clock, which ticks every few milliseconds. From Linux 6.13 on (multigrain
//! timestamps) a file that is changed again after its times were read gets an exact time, and from then on no file of
//! any file system gets an earlier one. The coarse clock of clock_gettime(2) ignores this: a name created after a file
//! would be older than the file. The exact clock would be ahead of the time that the kernel gives the next file. So on
//! such a kernel the daemon reads from an empty memfd of its own, by which the kernel sets the access time, and asks for
//! that time alone: after a query of the others, the kernel may set an exact one. The two calls cost 0.66 µs where the
//! shortest system call costs 0.17, once for all changes that are served together. On older kernels the coarse clock is
//! right, and needs no system call.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use forebay_types::Timestamp;
use rustix::fs::{AtFlags, MemfdFlags, StatxFlags};

/// Attempts to see two changes of a file between two ticks of the coarse clock.
const ATTEMPTS: usize = 100;

/// The file whose access time is the time. None where the coarse clock is the clock of file times.
static STAMPED: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// The time that the kernel would give a file now.
pub(crate) fn now() -> Timestamp {
    let at_least = coarse();
    let stamped = STAMPED.get_or_init(|| if has_exact_times() { memfd() } else { None });
    // A kernel that does not set the access time leaves an old one.
    stamped.as_ref().and_then(stamp).map_or(at_least, |stamp| stamp.max(at_least))
}

fn memfd() -> Option<OwnedFd> {
    rustix::fs::memfd_create("clock", MemfdFlags::CLOEXEC).ok()
}

fn stamp(file: &OwnedFd) -> Option<Timestamp> {
    rustix::io::pread(file, &mut [0; 1], 0).ok()?;
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::ATIME).ok()?;
    Some(Timestamp { sec: found.stx_atime.tv_sec, nsec: found.stx_atime.tv_nsec })
}

/// True when the kernel gives files times other than those of the coarse clock, or when this could not be seen.
fn has_exact_times() -> bool {
    let Some(file) = memfd() else { return true };
    let changed = || {
        rustix::io::pwrite(&file, b"x", 0).ok()?;
        let found = rustix::fs::fstat(&file).ok()?;
        Some(Timestamp { sec: found.st_mtime, nsec: found.st_mtime_nsec as u32 })
    };
    let between_ticks = (0..ATTEMPTS).find_map(|_| {
        let (before, _, again, after) = (coarse(), changed()?, changed()?, coarse());
        (before == after).then_some((before, again))
    });
    between_ticks.is_none_or(|(coarse, again)| coarse != again)
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

    /// Changes a file, and returns the time that the kernel gave it.
    fn changed(file: &std::fs::File) -> Timestamp {
        file.write_at(b"x", 0).unwrap();
        let st = file.metadata().unwrap();
        Timestamp { sec: st.mtime(), nsec: st.mtime_nsec() as u32 }
    }

    #[test]
    fn times_are_in_order_with_those_of_files() {
        // A file in memory has exact times where the kernel has them at all.
        let file = std::fs::File::from(memfd().unwrap());
        for _ in 0..2000 {
            changed(&file);
            let (before, at, after) = (changed(&file), now(), changed(&file));
            assert!(before <= at && at <= after, "{before:?} {at:?} {after:?}");
        }
    }

    #[test]
    fn stamps_of_a_new_file_are_in_order_with_the_times_of_files() {
        // Whether or not this kernel has exact times.
        for _ in 0..500 {
            let (file, stamped) = (std::fs::File::from(memfd().unwrap()), memfd().unwrap());
            // The first change of a file that nobody has looked at gets no exact time.
            let first = (stamp(&stamped).unwrap(), stamp(&stamped).unwrap(), changed(&file));
            assert!(first.0 <= first.1 && first.1 <= first.2, "{first:?}");
            let then = (changed(&file), stamp(&stamped).unwrap(), changed(&file));
            assert!(then.0 <= then.1 && then.1 <= then.2, "{then:?}");
        }
    }
}
