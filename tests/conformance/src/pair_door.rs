//! Two doors to one pool: one for changes, the other for reads.
//!
//! Everything that only reads (stat, readlink, access, reads of xattrs, listings, opens for reading) goes through one
//! door, all else through the other. A case passes only if each read sees every change that was acknowledged before it.
//! Device numbers are not compared, because each door has its own.

use crate::door::{Ability, At, Door, Outcome, SetTime, Space, Stat, Stream};
use crate::libc_door::LibcDoor;
use std::os::fd::{OwnedFd, RawFd};

/// See the module.
pub struct PairDoor {
    /// The door for changes.
    pub changes: LibcDoor,
    /// The door for reads.
    pub looks: LibcDoor,
}

impl PairDoor {
    /// Translates a path of `changes` for `looks`.
    fn translated(&self, path: &[u8]) -> Vec<u8> {
        let (from, to) = (self.changes.absolute(b""), self.looks.absolute(b""));
        match path.strip_prefix(&from[..]) {
            Some(rest) => [&to[..], rest].concat(),
            None => path.to_vec(),
        }
    }
}

pub(crate) fn without_device(stat: Outcome<Stat>) -> Outcome<Stat> {
    stat.map(|stat| Stat { dev: 0, ..stat })
}

/// Methods that go through one of the doors.
macro_rules! through {
    ($door:ident: $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.$door.$name($($argument),*)
        })*
    };
}

impl Door for PairDoor {
    fn name(&self) -> String {
        format!("changes by {}, looks by {}", self.changes.name(), self.looks.name())
    }

    fn can(&self, ability: Ability) -> bool {
        ability != Ability::OneDoor && self.changes.can(ability) && self.looks.can(ability)
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        self.changes.enter(directory)?;
        self.looks.enter_existing(directory)
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        self.changes.enter_existing(directory)?;
        self.looks.enter_existing(directory)
    }

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        let changes = libc::O_CREAT | libc::O_TRUNC | libc::O_DIRECTORY;
        if at.dir.is_none() && flags & libc::O_ACCMODE == libc::O_RDONLY && flags & changes == 0 {
            let path = self.translated(at.path);
            return self.looks.open_at(At { dir: None, path: &path }, flags, mode);
        }
        self.changes.open_at(at, flags, mode)
    }

    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat> {
        let path = self.translated(at.path);
        without_device(self.looks.stat_at(At { path: &path, ..at }, follow))
    }

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat> {
        without_device(self.changes.stat_handle(fd))
    }

    fn read_link_at(&self, at: At<'_>, buffer: &mut [u8]) -> Outcome<usize> {
        let path = self.translated(at.path);
        self.looks.read_link_at(At { path: &path, ..at }, buffer)
    }

    fn access_at(&self, at: At<'_>, amode: i32) -> Outcome<()> {
        let path = self.translated(at.path);
        self.looks.access_at(At { path: &path, ..at }, amode)
    }

    fn get_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        self.looks.get_xattr(&self.translated(path), follow, name, value)
    }

    fn list_xattr(&self, path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize> {
        self.looks.list_xattr(&self.translated(path), follow, names)
    }

    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>> {
        self.looks.open_stream(&self.translated(path))
    }

    fn space(&self) -> Outcome<Space> {
        self.looks.space()
    }

    through! {
        changes:
        fn absolute(path: &[u8]) -> Vec<u8>;
        fn make_directory_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn unlink_at(at: At<'_>) -> Outcome<()>;
        fn remove_directory_at(at: At<'_>) -> Outcome<()>;
        fn rename_at(from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()>;
        fn link_at(from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()>;
        fn link_handle(fd: RawFd, to: At<'_>) -> Outcome<()>;
        fn symlink_at(target: &[u8], at: At<'_>) -> Outcome<()>;
        fn make_node_at(at: At<'_>, mode: u32, rdev: u64) -> Outcome<()>;
        fn chmod_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn chown_at(at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()>;
        fn set_times_at(at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()>;
        fn truncate(path: &[u8], size: i64) -> Outcome<()>;
        fn set_xattr(path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
        fn remove_xattr(path: &[u8], follow: bool, name: &[u8]) -> Outcome<()>;
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
