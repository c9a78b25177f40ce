//! The interface between the daemon and the backing files of one target.
//!
//! The daemon uses only [`Media`], so that its crash tests run on a [`crate::FaultyMedium`] instead of a disk. Programs
//! do not use it: they read and write through descriptors.
//!
//! Invariants: `create` and `remove` are idempotent, so that a request can be repeated after a crash; a call changes
//! only the backing file that it names; no call follows a symbolic link. A file's size and times are computed from its
//! backing files by one rule, [`FileStat::merge`].
//!
//! One suite of tests, `tests/media.rs`, runs on every implementation.

use std::os::fd::OwnedFd;

use forebay_types::{Code, Ino, Layout, TimeSet, Timestamp};
use rustix::fs::{Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

/// The access that a descriptor of a backing file permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading only, for a lease or a copy.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Size, space and times of one backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BackingStat {
    /// Bytes up to its end.
    pub bytes: u64,
    /// Bytes that it occupies on the medium: fewer than `bytes` if it has holes.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of content or attributes.
    pub ctime: Timestamp,
    /// The inode number in the medium's own file system.
    pub kernel_ino: u64,
}

/// Size, space and times of a regular file, computed from its backing files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileStat {
    /// Bytes up to the file's end.
    pub bytes: u64,
    /// Bytes that it occupies on the medium.
    pub allocated_bytes: u64,
    /// The latest access of any backing file.
    pub atime: Timestamp,
    /// The mtime of the backing file that changed last, by ctime. The latest mtime of all would undo a `utimens` into
    /// the past.
    pub mtime: Timestamp,
    /// The latest ctime.
    pub ctime: Timestamp,
}

/// Size and free space of a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Its size.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
}

impl FileStat {
    /// The file with this `layout`, computed from its backing file (`component`, `stripe`) alone.
    pub fn of(layout: &Layout, component: usize, stripe: u16, stat: &BackingStat) -> FileStat {
        FileStat {
            bytes: layout.size_from(component, stripe, stat.bytes),
            allocated_bytes: stat.allocated_bytes,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
        }
    }

    /// The file, computed from two sets of its backing files. The order does not matter.
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

/// The backing files of a target. Every method fails with the code of the kernel's errno: [`Code::NotFound`] if the
/// backing file does not exist, [`Code::NoSpace`] if the medium is full.
pub trait Media: Send + Sync {
    /// The target's number, as layouts name it: the node in the upper 16 bits, the index of the target on that node in
    /// the lower.
    fn target(&self) -> u32;

    /// Creates an empty backing file with mode 0700. An existing one stays as it is.
    fn create(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code>;

    /// Opens a backing file. The descriptor has offset 0 and is close-on-exec.
    fn open(&self, ino: Ino, component: usize, stripe: u16, access: Access) -> Result<OwnedFd, Code>;

    /// Unlinks a backing file. Its space is freed when the last descriptor is closed. Succeeds if it does not exist.
    fn remove(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code>;

    /// Size, space and times of a backing file.
    fn stat(&self, ino: Ino, component: usize, stripe: u16) -> Result<BackingStat, Code>;

    /// Shortens a backing file, or extends it by a hole.
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

    /// Makes all changes so far durable, if the medium can survive the node's death.
    fn sync(&self) -> Result<(), Code>;

    /// Visits every backing file once, in no order. The visitor may remove the file that it visits. Files that are
    /// created or removed meanwhile may be visited or not. An error of the visitor ends the visit and is returned.
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

    /// Creates the file's backing files on this target.
    fn create_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        self.for_stripes(layout, &mut |_, stripe, number| self.create(ino, number, stripe))
    }

    /// Unlinks the file's backing files on this target. Tries all, and returns the first error.
    fn remove_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        let mut outcome = Ok(());
        self.for_stripes(layout, &mut |_, stripe, number| {
            outcome = outcome.and(self.remove(ino, number, stripe));
            Ok(())
        })?;
        outcome
    }

    /// Sets the size of the file's backing files on this target.
    fn truncate_all(&self, ino: Ino, layout: &Layout, file_bytes: u64) -> Result<(), Code> {
        self.for_stripes(layout, &mut |component, stripe, number| {
            self.truncate(ino, number, stripe, layout.backing_bytes(component, stripe, file_bytes))
        })
    }

    /// Sets the times of the file's backing files on this target.
    fn set_times_all(&self, ino: Ino, layout: &Layout, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        self.for_stripes(layout, &mut |_, stripe, number| self.set_times(ino, number, stripe, atime, mtime))
    }

    /// The file, computed from its backing files on this target. [`Code::NotFound`] if one of them is missing (it was
    /// released, or never created) or none is on this target.
    fn file_stat(&self, ino: Ino, layout: &Layout) -> Result<FileStat, Code> {
        let mut file: Option<FileStat> = None;
        self.for_stripes(layout, &mut |component, stripe, number| {
            let one = FileStat::of(layout, component, stripe, &self.stat(ino, number, stripe)?);
            file = Some(file.map_or(one, |all| all.merge(one)));
            Ok(())
        })?;
        file.ok_or(Code::NotFound)
    }

    /// The file's size, computed from its backing files on this target. See [`Media::file_stat`].
    fn file_size(&self, ino: Ino, layout: &Layout) -> Result<u64, Code> {
        Ok(self.file_stat(ino, layout)?.bytes)
    }
}

/// The kernel's `struct stat` as a `BackingStat`.
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
