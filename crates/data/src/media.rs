//! The only access to the media: what the daemon may do with the backing files of one target.
//!
//! The daemon goes through [`Media`] alone, so that its crash tests run against a [`crate::FaultyMedium`] instead of a
//! disk, and a paced medium can stand in front of a real one. Programs do not: their data goes through descriptors.
//!
//! Invariants: `create` and `remove` are idempotent, so that a request repeated after a crash does no harm; no call
//! touches more than the backing file it names; nothing here follows a symbolic link. A file's size and times are
//! computed from its backing files by one rule, [`FileStat::merge`].
//!
//! One suite of behaviour, `tests/media.rs`, runs on every implementation.

use std::os::fd::OwnedFd;

use forebay_types::{Code, Ino, Layout, TimeSet, Timestamp};
use rustix::fs::{Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

/// What a descriptor of a backing file is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading alone: a lease, a copy.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// One backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BackingStat {
    /// Bytes up to its end.
    pub bytes: u64,
    /// Bytes of the medium that it takes: fewer than `bytes` when it has holes.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
    /// The inode number that the medium's own file system gave it.
    pub kernel_ino: u64,
}

/// A regular file as its backing files show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileStat {
    /// Bytes up to the file's end.
    pub bytes: u64,
    /// Bytes of the medium that it takes.
    pub allocated_bytes: u64,
    /// The latest access of any backing file.
    pub atime: Timestamp,
    /// The mtime of the backing file that changed last (by ctime): the latest of them would undo a `utimens` into the
    /// past.
    pub mtime: Timestamp,
    /// The latest ctime.
    pub ctime: Timestamp,
}

/// Bytes of a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Bytes that it holds.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
}

impl FileStat {
    /// The file of this `layout` as its backing file (`component`, `stripe`) alone shows it.
    pub fn of(layout: &Layout, component: usize, stripe: u16, stat: &BackingStat) -> FileStat {
        FileStat {
            bytes: layout.size_from(component, stripe, stat.bytes),
            allocated_bytes: stat.allocated_bytes,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
        }
    }

    /// The file as both backing files, or sets of them, show it. The order does not matter.
    pub fn merge(self, other: FileStat) -> FileStat {
        let last = if (self.ctime, self.mtime) >= (other.ctime, other.mtime) { &self } else { &other };
        FileStat {
            bytes: self.bytes.max(other.bytes),
            allocated_bytes: self.allocated_bytes + other.allocated_bytes,
            atime: self.atime.max(other.atime),
            mtime: last.mtime,
            ctime: last.ctime,
        }
    }
}

/// A target's backing files. Every method fails with the code of the kernel's errno: [`Code::NotFound`] when there is
/// no such backing file, [`Code::NoSpace`] when the medium is full.
pub trait Media: Send + Sync {
    /// The target's number, as layouts name it: node in the upper 16 bits, the node's target index in the lower.
    fn target(&self) -> u32;

    /// Makes an empty backing file with mode 0700. One that is there is left as it is.
    fn create(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code>;

    /// A descriptor of its own, at offset 0, close-on-exec.
    fn open(&self, ino: Ino, component: usize, stripe: u16, access: Access) -> Result<OwnedFd, Code>;

    /// Unlinks a backing file; its space is back when the last descriptor is closed. One that is absent is fine.
    fn remove(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code>;

    /// Size, space and times of a backing file.
    fn stat(&self, ino: Ino, component: usize, stripe: u16) -> Result<BackingStat, Code>;

    /// Cuts a backing file, or lengthens it by a hole.
    fn truncate(&self, ino: Ino, component: usize, stripe: u16, bytes: u64) -> Result<(), Code>;

    /// Sets the times of a backing file.
    fn set_times(
        &self,
        ino: Ino,
        component: usize,
        stripe: u16,
        atime: TimeSet,
        mtime: TimeSet,
    ) -> Result<(), Code>;

    /// Space of the medium.
    fn space(&self) -> Result<Space, Code>;

    /// Makes everything that was done so far survive the node's death, where the medium can.
    fn sync(&self) -> Result<(), Code>;

    /// Visits every backing file once, in no order; the visitor may remove the one that it is shown. Those that come or
    /// go meanwhile may be missed or shown. An error of the visitor ends the visit and is returned.
    fn for_each(&self, visit: &mut dyn FnMut(Ino, usize, u16) -> Result<(), Code>) -> Result<(), Code>;

    /// Calls `on` with component, stripe and the component's number in names, for each stripe of `layout` on this
    /// target.
    #[doc(hidden)]
    fn for_stripes(
        &self,
        layout: &Layout,
        on: &mut dyn FnMut(usize, u16, usize) -> Result<(), Code>,
    ) -> Result<(), Code> {
        let target = self.target();
        for (component, stripe) in layout.stripes() {
            if layout.components()[component].target(stripe) == target {
                on(component, stripe, layout.file_number(component))?;
            }
        }
        Ok(())
    }

    /// Makes the file's backing files that lie on this target.
    fn create_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        self.for_stripes(layout, &mut |_, stripe, number| self.create(ino, number, stripe))
    }

    /// Unlinks the file's backing files that lie on this target. All are tried; the first error is returned.
    fn remove_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        let mut outcome = Ok(());
        self.for_stripes(layout, &mut |_, stripe, number| {
            outcome = outcome.and(self.remove(ino, number, stripe));
            Ok(())
        })?;
        outcome
    }

    /// Sets the file's size, as far as its backing files lie on this target.
    fn truncate_all(&self, ino: Ino, layout: &Layout, file_bytes: u64) -> Result<(), Code> {
        self.for_stripes(layout, &mut |component, stripe, number| {
            self.truncate(ino, number, stripe, layout.backing_bytes(component, stripe, file_bytes))
        })
    }

    /// Sets the file's times, on those of its backing files that lie on this target.
    fn set_times_all(&self, ino: Ino, layout: &Layout, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        self.for_stripes(layout, &mut |_, stripe, number| self.set_times(ino, number, stripe, atime, mtime))
    }

    /// The file as its backing files on this target show it. [`Code::NotFound`] when one of them is missing (it was
    /// released, or never made) or none belongs here.
    fn file_stat(&self, ino: Ino, layout: &Layout) -> Result<FileStat, Code> {
        let mut file: Option<FileStat> = None;
        self.for_stripes(layout, &mut |component, stripe, number| {
            let one = FileStat::of(layout, component, stripe, &self.stat(ino, number, stripe)?);
            file = Some(file.map_or(one, |all| all.merge(one)));
            Ok(())
        })?;
        file.ok_or(Code::NotFound)
    }

    /// The file's size as its backing files on this target show it; see [`Media::file_stat`].
    fn file_size(&self, ino: Ino, layout: &Layout) -> Result<u64, Code> {
        Ok(self.file_stat(ino, layout)?.bytes)
    }
}

/// What the kernel's `struct stat` says.
pub(crate) fn backing_stat(stat: &Stat) -> BackingStat {
    // The types of the fields differ between machines.
    let time = |sec, nsec: u64| Timestamp { sec, nsec: nsec as u32 };
    #[allow(clippy::unnecessary_cast)]
    BackingStat {
        bytes: stat.st_size as u64,
        allocated_bytes: stat.st_blocks as u64 * 512,
        atime: time(stat.st_atime as i64, stat.st_atime_nsec as u64),
        mtime: time(stat.st_mtime as i64, stat.st_mtime_nsec as u64),
        ctime: time(stat.st_ctime as i64, stat.st_ctime_nsec as u64),
        kernel_ino: stat.st_ino as u64,
    }
}

/// Times in the form of `utimensat`.
pub fn timestamps(atime: TimeSet, mtime: TimeSet) -> Timestamps {
    let spec = |time| match time {
        TimeSet::Omit => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT as _ },
        TimeSet::Now => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW as _ },
        TimeSet::At(t) => Timespec { tv_sec: t.sec, tv_nsec: t.nsec as _ },
    };
    Timestamps { last_access: spec(atime), last_modification: spec(mtime) }
}
