//! The canary: a door with one planted defect. A suite that passes it proves nothing.

use crate::door::{Ability, At, Door, Errno, Item, Outcome, SetTime, Space, Stat, Stream};
use crate::libc_door::LibcDoor;
use std::os::fd::{OwnedFd, RawFd};

/// The planted defect of a wrong door.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lie {
    /// RENAME_NOREPLACE replaces.
    ReplacesAlways,
    /// unlink of a directory gives EPERM, as in POSIX, instead of EISDIR, as in Linux.
    AnotherErrno,
    /// The listing of a long directory lacks an entry.
    LosesAnEntry,
    /// O_EXCL is ignored.
    NotExclusive,
    /// stat rounds a size up.
    RoundsSizes,
    /// Modification times lose their nanoseconds.
    WholeSeconds,
    /// A long write omits its last byte and returns the full count.
    CutsWrites,
    /// utimensat with UTIME_OMIT sets the time to now.
    OmitsNothing,
}

impl Lie {
    /// All planted defects.
    pub const ALL: [Lie; 8] = [
        Lie::ReplacesAlways,
        Lie::AnotherErrno,
        Lie::LosesAnEntry,
        Lie::NotExclusive,
        Lie::RoundsSizes,
        Lie::WholeSeconds,
        Lie::CutsWrites,
        Lie::OmitsNothing,
    ];
}

/// A door to a directory that is correct except for one planted defect.
pub struct WrongDoor {
    /// The correct door.
    pub inner: LibcDoor,
    /// The planted defect.
    pub lie: Lie,
}

impl WrongDoor {
    fn bend(&self, stat: Outcome<Stat>) -> Outcome<Stat> {
        let mut stat = stat?;
        match self.lie {
            Lie::RoundsSizes if stat.kind() == libc::S_IFREG => stat.size = (stat.size + 7) & !7,
            Lie::WholeSeconds => stat.mtime.nsec = 0,
            _ => {}
        }
        Ok(stat)
    }

    fn bend_time(&self, time: SetTime) -> SetTime {
        if self.lie == Lie::OmitsNothing && time == SetTime::Omit {
            SetTime::Now
        } else {
            time
        }
    }
}

/// Methods that go to the correct door unchanged.
macro_rules! honest {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.inner.$name($($argument),*)
        })*
    };
}

impl Door for WrongDoor {
    fn name(&self) -> String {
        format!("{} lying ({:?})", self.inner.name(), self.lie)
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        self.inner.enter(directory)
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        self.inner.enter_existing(directory)
    }

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        let flags = if self.lie == Lie::NotExclusive { flags & !libc::O_EXCL } else { flags };
        self.inner.open_at(at, flags, mode)
    }

    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat> {
        self.bend(self.inner.stat_at(at, follow))
    }

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat> {
        self.bend(self.inner.stat_handle(fd))
    }

    fn unlink_at(&self, at: At<'_>) -> Outcome<()> {
        match self.inner.unlink_at(at) {
            Err(Errno(libc::EISDIR)) if self.lie == Lie::AnotherErrno => Err(Errno(libc::EPERM)),
            other => other,
        }
    }

    fn rename_at(&self, from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()> {
        let replace = self.lie == Lie::ReplacesAlways && flags == libc::RENAME_NOREPLACE;
        self.inner.rename_at(from, to, if replace { 0 } else { flags })
    }

    fn set_times_at(&self, at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()> {
        self.inner.set_times_at(at, self.bend_time(atime), self.bend_time(mtime), follow)
    }

    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>> {
        let inner = self.inner.open_stream(path)?;
        let skip = (self.lie == Lie::LosesAnEntry).then_some(1000);
        Ok(Box::new(WrongStream { inner, skip, given: 0 }))
    }

    fn write(&self, fd: &OwnedFd, bytes: &[u8]) -> Outcome<usize> {
        let cut = (self.lie == Lie::CutsWrites && bytes.len() > 5000) as usize;
        self.inner.write(fd, &bytes[..bytes.len() - cut]).map(|n| n + cut)
    }

    honest! {
        fn can(ability: Ability) -> bool;
        fn absolute(path: &[u8]) -> Vec<u8>;
        fn make_directory_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn remove_directory_at(at: At<'_>) -> Outcome<()>;
        fn link_at(from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()>;
        fn link_handle(fd: RawFd, to: At<'_>) -> Outcome<()>;
        fn symlink_at(target: &[u8], at: At<'_>) -> Outcome<()>;
        fn read_link_at(at: At<'_>, buffer: &mut [u8]) -> Outcome<usize>;
        fn make_node_at(at: At<'_>, mode: u32, rdev: u64) -> Outcome<()>;
        fn chmod_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn chown_at(at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()>;
        fn access_at(at: At<'_>, amode: i32) -> Outcome<()>;
        fn truncate(path: &[u8], size: i64) -> Outcome<()>;
        fn get_xattr(path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
        fn set_xattr(path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
        fn list_xattr(path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize>;
        fn remove_xattr(path: &[u8], follow: bool, name: &[u8]) -> Outcome<()>;
        fn space() -> Outcome<Space>;
        fn set_umask(mask: u32) -> u32;
        fn stream_of(directory: OwnedFd) -> Outcome<Box<dyn Stream>>;
        fn change_directory(directory: RawFd) -> Outcome<()>;
        fn working_directory() -> Outcome<Vec<u8>>;
        fn chmod_handle(fd: RawFd, mode: u32) -> Outcome<()>;
        fn chown_handle(fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()>;
        fn set_times_handle(fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()>;
        fn get_xattr_handle(fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
        fn set_xattr_handle(fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
        fn list_xattr_handle(fd: RawFd, names: &mut [u8]) -> Outcome<usize>;
        fn remove_xattr_handle(fd: RawFd, name: &[u8]) -> Outcome<()>;
    }
}

/// A stream that may leave an entry out.
struct WrongStream {
    inner: Box<dyn Stream>,
    skip: Option<usize>,
    given: usize,
}

impl Stream for WrongStream {
    fn next(&mut self) -> Outcome<Option<Item>> {
        self.given += 1;
        if self.skip == Some(self.given) {
            self.inner.next()?;
        }
        self.inner.next()
    }

    fn tell(&mut self) -> i64 {
        self.inner.tell()
    }

    fn seek(&mut self, position: i64) {
        self.inner.seek(position)
    }

    fn rewind(&mut self) {
        self.inner.rewind()
    }
}
