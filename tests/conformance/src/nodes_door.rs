//! The doors of several nodes to one pool: each call is made on the next node.
//!
//! A call with a path goes through the next node in turn. A call with a descriptor, or with a path under one, goes
//! through the node that opened the descriptor. So different nodes create, look up and remove a directory's names, and
//! a file is written through one node and read through another. Device numbers are not compared, because each node's
//! door has its own.

use crate::door::{Ability, At, Door, Errno, Outcome, SetTime, Space, Stat, Stream};
use crate::pair_door::without_device;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// See the module.
pub struct NodesDoor {
    doors: Vec<Box<dyn Door>>,
    turn: Cell<usize>,
    opened_by: RefCell<HashMap<RawFd, usize>>,
}

impl NodesDoor {
    /// A door that uses these doors in turn. There must be at least one.
    pub fn new(doors: Vec<Box<dyn Door>>) -> NodesDoor {
        assert!(!doors.is_empty(), "a pool has a node");
        NodesDoor { doors, turn: Cell::new(0), opened_by: RefCell::default() }
    }

    fn next(&self) -> usize {
        let turn = (self.turn.get() + 1) % self.doors.len();
        self.turn.set(turn);
        turn
    }

    fn of_handle(&self, fd: RawFd) -> usize {
        self.opened_by.borrow().get(&fd).copied().unwrap_or(0)
    }

    /// The door for a call with this name: the one that opened the directory of the name, or the next one.
    fn of_name(&self, at: At<'_>) -> usize {
        at.dir.map_or_else(|| self.next(), |dir| self.of_handle(dir))
    }

    /// Translates a path of the first door, which cases use, for another door.
    fn translated(&self, door: usize, path: &[u8]) -> Vec<u8> {
        match path.strip_prefix(&self.doors[0].absolute(b"")[..]) {
            Some(rest) => [&self.doors[door].absolute(b"")[..], rest].concat(),
            None => path.to_vec(),
        }
    }

    fn by_path<T>(&self, path: &[u8], call: impl FnOnce(&dyn Door, &[u8]) -> T) -> T {
        let door = self.next();
        call(&*self.doors[door], &self.translated(door, path))
    }

    fn by_name<T>(&self, at: At<'_>, call: impl FnOnce(&dyn Door, At<'_>) -> T) -> T {
        let door = self.of_name(at);
        call(&*self.doors[door], At { path: &self.translated(door, at.path), ..at })
    }

    /// A call with two names. If they are under descriptors of two nodes, no single call can do it: EXDEV.
    fn by_names<T>(
        &self,
        from: At<'_>,
        to: At<'_>,
        call: impl FnOnce(&dyn Door, At<'_>, At<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let door = match (from.dir, to.dir) {
            (Some(a), Some(b)) if self.of_handle(a) != self.of_handle(b) => return Err(Errno(libc::EXDEV)),
            (Some(dir), _) | (None, Some(dir)) => self.of_handle(dir),
            (None, None) => self.next(),
        };
        let (a, b) = (self.translated(door, from.path), self.translated(door, to.path));
        call(&*self.doors[door], At { path: &a, ..from }, At { path: &b, ..to })
    }

    fn by_handle<T>(&self, fd: RawFd, call: impl FnOnce(&dyn Door) -> T) -> T {
        call(&*self.doors[self.of_handle(fd)])
    }
}

impl Door for NodesDoor {
    fn name(&self) -> String {
        let names: Vec<String> = self.doors.iter().map(|door| door.name()).collect();
        format!("in turn by {}", names.join(", "))
    }

    fn can(&self, ability: Ability) -> bool {
        // Space is the sum over all nodes, as reported by them some seconds ago.
        let lacking = [Ability::OneDoor, Ability::OneNode, Ability::OwnSpace];
        !lacking.contains(&ability) && self.doors.iter().all(|door| door.can(ability))
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        let maker = self.next();
        self.doors[maker].enter(directory)?;
        let mut others = self.doors.iter_mut().enumerate().filter(|(door, _)| *door != maker);
        others.try_for_each(|(_, door)| door.enter_existing(directory))
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        self.doors.iter_mut().try_for_each(|door| door.enter_existing(directory))
    }

    fn absolute(&self, path: &[u8]) -> Vec<u8> {
        self.doors[0].absolute(path)
    }

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        let door = self.of_name(at);
        let at = At { path: &self.translated(door, at.path), ..at };
        let fd = self.doors[door].open_at(at, flags, mode)?;
        self.opened_by.borrow_mut().insert(fd.as_raw_fd(), door);
        Ok(fd)
    }

    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat> {
        without_device(self.by_name(at, |door, at| door.stat_at(at, follow)))
    }

    fn make_directory_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        self.by_name(at, |door, at| door.make_directory_at(at, mode))
    }

    fn unlink_at(&self, at: At<'_>) -> Outcome<()> {
        self.by_name(at, |door, at| door.unlink_at(at))
    }

    fn remove_directory_at(&self, at: At<'_>) -> Outcome<()> {
        self.by_name(at, |door, at| door.remove_directory_at(at))
    }

    fn rename_at(&self, from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()> {
        self.by_names(from, to, |door, from, to| door.rename_at(from, to, flags))
    }

    fn link_at(&self, from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()> {
        self.by_names(from, to, |door, from, to| door.link_at(from, to, follow))
    }

    fn link_handle(&self, fd: RawFd, to: At<'_>) -> Outcome<()> {
        let door = self.of_handle(fd);
        self.doors[door].link_handle(fd, At { path: &self.translated(door, to.path), ..to })
    }

    fn symlink_at(&self, target: &[u8], at: At<'_>) -> Outcome<()> {
        self.by_name(at, |door, at| door.symlink_at(target, at))
    }

    fn read_link_at(&self, at: At<'_>, buffer: &mut [u8]) -> Outcome<usize> {
        self.by_name(at, |door, at| door.read_link_at(at, buffer))
    }

    fn make_node_at(&self, at: At<'_>, mode: u32, rdev: u64) -> Outcome<()> {
        self.by_name(at, |door, at| door.make_node_at(at, mode, rdev))
    }

    fn chmod_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        self.by_name(at, |door, at| door.chmod_at(at, mode))
    }

    fn chown_at(&self, at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()> {
        self.by_name(at, |door, at| door.chown_at(at, uid, gid, follow))
    }

    fn set_times_at(&self, at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()> {
        self.by_name(at, |door, at| door.set_times_at(at, atime, mtime, follow))
    }

    fn access_at(&self, at: At<'_>, amode: i32) -> Outcome<()> {
        self.by_name(at, |door, at| door.access_at(at, amode))
    }

    fn truncate(&self, path: &[u8], size: i64) -> Outcome<()> {
        self.by_path(path, |door, path| door.truncate(path, size))
    }

    fn get_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        self.by_path(path, |door, path| door.get_xattr(path, follow, name, value))
    }

    fn set_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        self.by_path(path, |door, path| door.set_xattr(path, follow, name, value, flags))
    }

    fn list_xattr(&self, path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize> {
        self.by_path(path, |door, path| door.list_xattr(path, follow, names))
    }

    fn remove_xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Outcome<()> {
        self.by_path(path, |door, path| door.remove_xattr(path, follow, name))
    }

    fn space(&self) -> Outcome<Space> {
        self.doors[self.next()].space()
    }

    fn set_umask(&self, mask: u32) -> u32 {
        // A process has one umask. Doors with their own umask have had the same calls.
        let earlier: Vec<u32> = self.doors.iter().map(|door| door.set_umask(mask)).collect();
        earlier[0]
    }

    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>> {
        self.by_path(path, |door, path| door.open_stream(path))
    }

    fn stream_of(&self, directory: OwnedFd) -> Outcome<Box<dyn Stream>> {
        let door = self.of_handle(directory.as_raw_fd());
        self.doors[door].stream_of(directory)
    }

    fn change_directory(&self, directory: RawFd) -> Outcome<()> {
        self.by_handle(directory, |door| door.change_directory(directory))
    }

    fn working_directory(&self) -> Outcome<Vec<u8>> {
        let path = self.doors[0].working_directory()?;
        let first = self.doors[0].absolute(b"");
        let rest = self.doors.iter().find_map(|door| path.strip_prefix(&door.absolute(b"")[..]));
        Ok(rest.map_or(path.clone(), |rest| [&first, rest].concat()))
    }

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat> {
        without_device(self.by_handle(fd, |door| door.stat_handle(fd)))
    }

    fn chmod_handle(&self, fd: RawFd, mode: u32) -> Outcome<()> {
        self.by_handle(fd, |door| door.chmod_handle(fd, mode))
    }

    fn chown_handle(&self, fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()> {
        self.by_handle(fd, |door| door.chown_handle(fd, uid, gid))
    }

    fn set_times_handle(&self, fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()> {
        self.by_handle(fd, |door| door.set_times_handle(fd, atime, mtime))
    }

    fn get_xattr_handle(&self, fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        self.by_handle(fd, |door| door.get_xattr_handle(fd, name, value))
    }

    fn set_xattr_handle(&self, fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        self.by_handle(fd, |door| door.set_xattr_handle(fd, name, value, flags))
    }

    fn list_xattr_handle(&self, fd: RawFd, names: &mut [u8]) -> Outcome<usize> {
        self.by_handle(fd, |door| door.list_xattr_handle(fd, names))
    }

    fn remove_xattr_handle(&self, fd: RawFd, name: &[u8]) -> Outcome<()> {
        self.by_handle(fd, |door| door.remove_xattr_handle(fd, name))
    }
}
