//! Which requests wait for a backing store or for space (`waiting`). Only requests for attached trees do.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use forebay_types::{Code, Entry, Ino, FLAG_ATTACHED, FLAG_UNLISTED};

use crate::errno::Errno;
use crate::filesystem::FileSystem;
use crate::handles::Handle;
use crate::opened::open_backing;
use crate::waiting::WaitsFor;
use forebay_fuse::protocol::{fattr, op, Request};

/// An open for running a program, among the flags of an open (`FMODE_EXEC`). It waits for the whole file.
const OPEN_TO_RUN: i32 = 0x20;

/// True for an open that can read what arrives.
fn is_for_reading(flags: i32) -> bool {
    flags & libc::O_ACCMODE == libc::O_RDONLY && flags & (libc::O_TRUNC | OPEN_TO_RUN) == 0
}

/// The process of a thread: the thread itself if that cannot be told, and 0 for one that this process cannot see.
#[cold]
fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    process.unwrap_or(thread)
}

impl FileSystem {
    /// An inode of an attached tree.
    fn attached(&self, ino: Ino) -> Option<Entry> {
        let entry = self.entry(ino).ok().flatten()?;
        Some(entry).filter(|entry| entry.attr.flags & FLAG_ATTACHED != 0)
    }

    /// True for a directory of whose names some are in its store alone.
    pub(crate) fn is_unlisted(&self, ino: Ino) -> bool {
        let is_unlisted = |entry: Entry| entry.attr.is_directory() && entry.attr.flags & FLAG_UNLISTED != 0;
        self.attached(ino).is_some_and(is_unlisted)
    }

    /// True when the entry of a name is an unlisted directory: whether it is empty is for its store to say.
    fn leads_to_unlisted(&self, parent: Ino, name: &[u8]) -> bool {
        self.pool.lookup(parent, name).is_ok_and(|entry| self.is_unlisted(entry.attr.ino))
    }

    /// What a request may have to wait for; none for a request that is served at once.
    pub(crate) fn waits_for(&self, rq: &Request<'_>) -> Option<WaitsFor> {
        let (mut f, ino) = (rq.fields, self.ino(rq.node));
        let names = |waits: bool| waits.then_some(WaitsFor::Names);
        match rq.opcode {
            op::UNLINK if !self.is_unlisted(ino) => {
                self.leads_to_arriving(ino, f.name().ok()?).map(|_| WaitsFor::Data)
            }
            op::READ => self.waits_for_range(f.u64().ok()?, f.u64().ok()?, f.u32().ok()? as usize),
            op::GETLK | op::SETLK | op::SETLKW => self.is_arriving(ino).then_some(WaitsFor::Data),
            op::LOOKUP
            | op::SYMLINK
            | op::MKDIR
            | op::LINK
            | op::UNLINK
            | op::OPENDIR
            | op::READDIR
            | op::READDIRPLUS => names(self.is_unlisted(ino)),
            op::CREATE | op::MKNOD => {
                self.attached(ino)?;
                match self.is_unlisted(ino) {
                    true => Some(WaitsFor::Names),
                    false => self.waiting.is_full(self.pool).then_some(WaitsFor::Room),
                }
            }
            op::RMDIR => {
                self.attached(ino)?;
                names(self.is_unlisted(ino) || self.leads_to_unlisted(ino, f.name().ok()?))
            }
            op::RENAME | op::RENAME2 => {
                let to = self.ino(f.u64().ok()?);
                if self.attached(ino).is_none() && self.attached(to).is_none() {
                    return None;
                }
                if rq.opcode == op::RENAME2 {
                    f.u64().ok()?;
                }
                let (_, name) = (f.name().ok()?, f.name().ok()?);
                if self.is_unlisted(ino) || self.is_unlisted(to) || self.leads_to_unlisted(to, name) {
                    return Some(WaitsFor::Names);
                }
                self.leads_to_arriving(to, name).map(|_| WaitsFor::Data)
            }
            // The mover marks what is synced on a target that outlives the node.
            op::FSYNC | op::FSYNCDIR => {
                self.attached(ino)?;
                self.pool.may_outlive_node().then_some(WaitsFor::Write)
            }
            op::OPEN => {
                let flags = f.u32().ok()? as i32;
                let entry = self.attached(ino)?;
                if self.opens_arriving(&entry, flags) {
                    return None;
                }
                self.waits_for_data(
                    ino,
                    flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0,
                )
            }
            op::SETATTR if f.u32().ok()? & fattr::SIZE != 0 => self.waits_for_data(ino, true),
            op::WRITE | op::FALLOCATE => self.waits_for_space(f.u64().ok()?),
            op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => {
                f.skip(3 * 8).ok()?;
                self.waits_for_space(f.u64().ok()?)
            }
            _ => None,
        }
    }

    /// Refuses an open for reading of a released file whose data the process may not have copied. Running a program is no
    /// scan.
    pub(crate) fn check_recall(&self, rq: &Request<'_>, entry: &Entry, flags: i32) -> Result<(), Code> {
        let is_released =
            entry.attr.is_file() && entry.attr.flags & FLAG_ATTACHED != 0 && !entry.attr.is_resident();
        // A new file may be released before its creator opens it.
        match is_released && entry.attr.size > 0 && is_for_reading(flags) {
            true => self.pool.may_recall(entry.attr.ino, process_of(rq.thread)),
            false => Ok(()),
        }
    }

    /// What a read by a handle may have to wait for.
    fn waits_for_range(&self, handle: u64, offset: u64, len: usize) -> Option<WaitsFor> {
        match self.handles.get(handle).as_deref() {
            Some(Handle::Arriving(arriving)) if !arriving.is_there(self.pool, offset, len) => {
                Some(WaitsFor::Range)
            }
            _ => self.pool.is_paced().then_some(WaitsFor::Medium),
        }
    }

    /// What a write by a handle may have to wait for.
    fn waits_for_space(&self, handle: u64) -> Option<WaitsFor> {
        match self.handles.get(handle).as_deref() {
            Some(Handle::Single(_, patience)) if patience.waits && self.waiting.is_full(self.pool) => {
                Some(WaitsFor::Write)
            }
            _ => self.pool.is_paced().then_some(WaitsFor::Medium),
        }
    }

    /// What an open of a file may have to wait for.
    fn waits_for_data(&self, ino: Ino, writes: bool) -> Option<WaitsFor> {
        let entry = self.attached(ino)?;
        if !entry.attr.is_resident() {
            return Some(WaitsFor::Data);
        }
        (writes && self.waiting.is_full(self.pool)).then_some(WaitsFor::Room)
    }

    /// True for an open that need not wait for the whole file.
    pub(crate) fn opens_arriving(&self, entry: &Entry, flags: i32) -> bool {
        is_for_reading(flags) && self.pool.comes_in_ranges(entry)
    }

    /// The entry of a file that an open is about to use, in a pool of several nodes: a released file is restored, or
    /// placed here if this node can read it while it is restored. Then it is known which node has its data.
    pub(crate) fn near(&self, entry: &Entry, flags: i32) -> Result<Entry, Code> {
        match is_for_reading(flags) {
            true => self.pool.near(entry),
            false => self.pool.resident(entry),
        }
    }

    /// True when an inode is open for reading what arrives, and for nothing else.
    pub(crate) fn is_arriving(&self, ino: Ino) -> bool {
        self.arriving.load(Ordering::Relaxed) > 0
            && self
                .nodes
                .opened(ino.0)
                .is_some_and(|opened| opened.is_by_requests() && opened.any().is_none())
    }

    /// The same for the inode that a name leads to.
    pub(crate) fn leads_to_arriving(&self, parent: Ino, name: &[u8]) -> Option<Ino> {
        if self.arriving.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let ino = self.pool.lookup(parent, name).ok()?.attr.ino;
        self.is_arriving(ino).then_some(ino)
    }

    /// Waits for the whole of a file that is open while it arrives.
    pub(crate) fn make_whole(&self, ino: Ino) -> Result<(), Errno> {
        if !self.is_arriving(ino) {
            return Ok(());
        }
        let Some(opened) = self.nodes.opened(ino.0) else { return Ok(()) };
        let file = self.pool.get_attr(ino).and_then(|entry| open_backing(self.pool, &entry, libc::O_RDONLY));
        opened.note_whole(&Arc::new(file?));
        Ok(())
    }
}
