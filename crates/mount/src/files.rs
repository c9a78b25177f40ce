//! Requests about files: open, create, release, and the data of files that passthrough does not serve.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use forebay_types::limits::COPY_BYTES_MAX;
use forebay_types::{Code, Entry, Ino, SetAttr, FLAG_ATTACHED};

use crate::arriving::{Arriving, Readable};
use crate::errno::{check, Errno};
use crate::filesystem::{FileSystem, Outcome};
use crate::handles::{Handle, Patience};
use crate::names::gone_is_stale;
use crate::nodes::Seen;
use crate::opened::{fstat, open_backing, reopen, Opened};
use crate::rights::{Owned, Rights};
use forebay_fuse::protocol::{
    self, fopen, Body, Request, FSYNC_FDATASYNC, OPEN_KILL_SUIDGID, RELEASE_FLOCK_UNLOCK, WRITE_CACHE,
    WRITE_KILL_SUIDGID,
};

/// Bytes of the largest write that the kernel sends, and of the largest read that it requests.
pub(crate) const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Flags of an open that are kept for a backing file which the mount reads and writes itself. O_DIRECT is not among
/// them: it needs aligned buffers, which the buffers of requests are not, and the kernel caches no pages here anyway.
const HANDLE_FLAGS: i32 = libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC;

fn writes(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// True for an open that permits writable mappings. Every mapping needs read access, so O_WRONLY permits none.
fn maps_for_writing(flags: i32) -> bool {
    flags & libc::O_ACCMODE == libc::O_RDWR
}

/// The reply to an open.
struct Answer {
    handle: u64,
    flags: u32,
    backing: i32,
}

impl Answer {
    fn passthrough(handle: u64, id: i32) -> Answer {
        Answer { handle, flags: fopen::PASSTHROUGH, backing: id }
    }

    /// The kernel maps the file itself, beside other opens by passthrough, but reads and writes it by requests, which can
    /// wait.
    fn waiting(handle: u64, id: i32) -> Answer {
        let flags = fopen::PASSTHROUGH | fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        Answer { handle, flags, backing: id }
    }

    /// The kernel caches no pages of the file, because other interfaces write it too.
    fn requests(handle: u64) -> Answer {
        Answer { handle, flags: fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES, backing: 0 }
    }
}

impl FileSystem {
    pub(crate) fn open(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (flags, open_flags) = (f.u32()? as i32, f.u32()?);
        let ino = self.ino(rq.node);
        let truncates = flags & libc::O_TRUNC != 0;
        if truncates && open_flags & OPEN_KILL_SUIDGID != 0 {
            self.drop_set_ids(rq, ino)?;
        }
        let mut entry = self.entry(ino)?;
        if let Some(entry) = &entry {
            self.check_recall(rq, entry, flags).map_err(gone_is_stale)?;
        }
        if self.pool.spans_nodes() {
            entry = entry.as_ref().map(|entry| self.near(entry, flags)).transpose().map_err(gone_is_stale)?;
        }
        let node = self.open_ino(rq.node);
        let answer = self.open_node(node, ino, entry.as_ref(), flags).map_err(|e| match e {
            Errno(libc::ESTALE) => self.lookup_pins.came_too_late(),
            e => e,
        })?;
        if truncates {
            let done = self.truncate_opened(node, entry.as_ref(), flags);
            if let Err(e) = done {
                self.close_node(node, flags, answer.handle);
                return Err(e);
            }
        }
        protocol::put_open_out(out, answer.handle, answer.flags, answer.backing);
        Ok(Outcome::Reply)
    }

    fn truncate_opened(&self, node: Ino, entry: Option<&Entry>, flags: i32) -> Result<(), Errno> {
        match (entry, self.nodes.opened(node.0).and_then(|opened| opened.writable())) {
            (_, Some(file)) if writes(flags) => {
                // SAFETY: plain system call on a descriptor of ours.
                check(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }).map(|_| ())
            }
            (Some(entry), _) => self.truncate_entry(entry, 0),
            (None, _) => Err(Errno(libc::ESTALE)),
        }
    }

    /// True for a file that is always read and written by requests: the kernel cannot, as not all of it is in one file
    /// here, or must not, as reads and writes are to take as long as those of another medium.
    fn is_served(&self, entry: &Entry) -> bool {
        entry.attr.is_file() && (self.pool.is_paced() || !self.pool.is_one_here(&entry.layout))
    }

    /// Opens an inode, whose open state is kept under `node` ([`FileSystem::open_ino`]). [`FileSystem::close_node`] ends
    /// the open.
    fn open_node(&self, node: Ino, ino: Ino, entry: Option<&Entry>, flags: i32) -> Result<Answer, Errno> {
        if let Some(entry) = entry.filter(|e| self.is_served(e)) {
            let file = self.pool.open_file(entry, writes(flags)).map_err(gone_is_stale)?;
            let appends = flags & libc::O_APPEND != 0;
            return Ok(Answer::requests(self.handles.add(Handle::Parts(Box::new(file), appends))));
        }
        let opened = self.nodes.open(node.0);
        if let Some(answer) = self.open_arriving(&opened, entry, flags) {
            return Ok(answer);
        }
        if maps_for_writing(flags) && self.nodes.note_writer(ino.0) {
            self.invalidate_attributes(ino.0);
        }
        let answer = opened.open_inode(self.pool, ino, self.registrar(), writes(flags));
        if let Err(Errno(libc::ENOSPC)) = answer {
            // There was room for it a moment ago.
            if let Some(answer) = self.open_arriving(&opened, entry, flags) {
                return Ok(answer);
            }
        }
        let answer = answer.and_then(|id| self.answer_open(&opened, entry, flags, id));
        if answer.is_err() {
            self.nodes.close(node.0);
        }
        answer
    }

    /// Opens a released file that is read while it arrives, or for which there is no room.
    fn open_arriving(&self, opened: &Arc<Opened>, entry: Option<&Entry>, flags: i32) -> Option<Answer> {
        let entry = entry.filter(|entry| self.opens_arriving(entry, flags))?;
        opened.begin_by_requests().then(|| {
            let arriving = Arriving::new(entry, Arc::clone(opened), Arc::clone(&self.arriving));
            Answer::requests(self.handles.add(Handle::Arriving(Box::new(arriving))))
        })
    }

    /// The reply to an open of a file of one backing file that is registered under `id`, if it is registered. Where space
    /// is scarce in front of a backing store, writes become requests. If this fails, the open for writing has ended.
    fn answer_open(
        &self,
        opened: &Arc<Opened>,
        entry: Option<&Entry>,
        flags: i32,
        id: Option<i32>,
    ) -> Result<Answer, Errno> {
        let is_attached = || entry.is_some_and(|entry| entry.attr.flags & FLAG_ATTACHED != 0);
        let answer = match id {
            Some(id) if writes(flags) && is_attached() && self.waiting.is_scarce(self.pool) => {
                self.open_handle(opened, entry, flags).map(|answer| Answer::waiting(answer.handle, id))
            }
            Some(id) => Ok(Answer::passthrough(self.handles.number(), id)),
            None => self.open_handle(opened, entry, flags),
        };
        answer.inspect_err(|_| {
            if writes(flags) {
                opened.end_write();
            }
        })
    }

    /// Makes a handle with the flags of its open, for reads and writes by requests.
    fn open_handle(&self, opened: &Arc<Opened>, entry: Option<&Entry>, flags: i32) -> Result<Answer, Errno> {
        let access = if writes(flags) { libc::O_RDWR } else { libc::O_RDONLY };
        let flags = access | flags & HANDLE_FLAGS;
        let named = entry.map(|entry| open_backing(self.pool, entry, flags));
        let file = match (named, opened.any()) {
            (Some(Ok(file)), _) => file,
            (None | Some(Err(Code::Stale)), Some(file)) => reopen(&file, flags)?,
            (Some(Err(code)), _) => return Err(code.into()),
            (None, None) => return Err(Errno(libc::ESTALE)),
        };
        // Writes through a writable mapping and through other opens do not wait.
        let waits = writes(access) && entry.is_some_and(|entry| entry.attr.flags & FLAG_ATTACHED != 0);
        let patience = Patience { waits, ..Patience::default() };
        Ok(Answer::requests(self.handles.add(Handle::Single(file, patience))))
    }

    fn close_node(&self, ino: Ino, flags: i32, handle: u64) {
        if let Some(Handle::Parts(..)) = self.handles.get(handle).as_deref() {
            self.handles.remove(handle);
            return;
        }
        self.handles.remove(handle);
        let opened = if writes(flags) { self.nodes.opened(ino.0) } else { None };
        if !self.nodes.close(ino.0) {
            if let Some(opened) = opened {
                opened.end_write();
            }
        }
    }

    pub(crate) fn release(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, flags, release_flags, owner) = (f.u64()?, f.u32()? as i32, f.u32()?, f.u64()?);
        let ino = self.open_ino(rq.node);
        if release_flags & RELEASE_FLOCK_UNLOCK != 0 {
            self.locks.drop_flock(ino.0, owner);
        }
        self.locks.drop_opened(ino.0, handle);
        self.close_node(ino, flags, handle);
        self.forget_second_node_if_gone(rq.node);
        Ok(Outcome::Reply)
    }

    /// The number under which a node's open state is kept: the node's own, even after a file without a name got one.
    pub(crate) fn open_ino(&self, node: u64) -> Ino {
        if node >= crate::filesystem::TEMPORARY {
            Ino(node)
        } else {
            self.ino(node)
        }
    }

    pub(crate) fn create(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (flags, mode, _umask, _open_flags) = (f.u32()? as i32, f.u32()?, f.u32()?, f.u32()?);
        let (name, parent, caller) = (f.name()?, self.ino(rq.node), FileSystem::caller(rq));
        let exclusive = flags & libc::O_EXCL != 0;
        self.nameless.settle(&self.nodes, self.pool);
        let (entry, made, file) =
            self.pool.create_as_set(caller, parent, name, mode & 0o7777, exclusive, 0)?;
        let ino = entry.attr.ino;
        if !made {
            // Another interface created the file first, so this user's permission to open it was not checked. On
            // ESTALE the kernel looks the name up and checks.
            return Err(Errno(libc::ESTALE));
        }
        let Some(file) = file.filter(|_| !self.is_served(&entry)) else {
            let answer = self.open_node(ino, ino, Some(&entry), flags).inspect_err(|_| {
                let _ = self.pool.unlink_in(parent, name);
            })?;
            self.put_entry(out, parent, name, &self.pool.stat_entry(&entry)?);
            protocol::put_open_out(out, answer.handle, answer.flags, answer.backing);
            return Ok(Outcome::Reply);
        };
        let st = self.pool.stat_opened(&entry, &fstat(&file)?);
        let opened = self.nodes.open(ino.0);
        let answer = opened.adopt(file, self.registrar(), true);
        let answer = answer.and_then(|id| self.answer_open(&opened, Some(&entry), flags, id));
        let answer = answer.inspect_err(|_| {
            if !writes(flags) {
                opened.end_write();
            }
            self.nodes.close(ino.0);
            let _ = self.pool.unlink_in(parent, name);
        })?;
        if maps_for_writing(flags) {
            self.nodes.note_writer(ino.0);
        }
        if !writes(flags) {
            opened.end_write();
        }
        self.put_entry(out, parent, name, &st);
        protocol::put_open_out(out, answer.handle, answer.flags, answer.backing);
        Ok(Outcome::Reply)
    }

    /// Makes a file without a name. It exists on the target alone: the shard has no inode of it until it is linked.
    pub(crate) fn tmpfile(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (flags, mode) = (f.u32()? as i32, f.u32()?);
        let parent = self.entry(self.ino(rq.node))?.ok_or(Errno(libc::ENOENT))?;
        let file = self.pool.make_temporary(0)?;
        let node = self.new_temporary();
        let inherits = parent.attr.mode & 0o2000 != 0;
        let seen = Seen {
            mode: libc::S_IFREG | mode & 0o7777,
            uid: rq.uid,
            gid: if inherits { parent.attr.gid } else { rq.gid },
        };
        self.nodes.add_lookup(node, seen);
        let opened = self.nodes.open(node);
        let answer = opened.adopt(file, self.registrar(), true).and_then(|id| match id {
            Some(id) => Ok(Answer::passthrough(self.handles.number(), id)),
            None => self.open_handle(&opened, None, flags),
        });
        let answer = answer.inspect_err(|_| {
            self.nodes.close(node);
            self.nodes.forget(node, 1);
        })?;
        self.nameless.note(&self.nodes, node);
        let st = self.stat(node)?.0;
        protocol::put_entry_out(out, node, &st, protocol::Validity::NONE, protocol::Validity::NONE);
        protocol::put_open_out(out, answer.handle, answer.flags, answer.backing);
        Ok(Outcome::Reply)
    }

    /// Drops the set-ID bits of a file, because a caller without the right to keep them writes it.
    fn drop_set_ids(&self, rq: &Request<'_>, ino: Ino) -> Result<(), Errno> {
        let Some(entry) = self.entry(ino)? else { return self.drop_nameless_set_ids(rq) };
        let kept = Rights::of(rq).drop_set_ids(Owned::from(&entry.attr));
        if kept != entry.attr.mode & 0o7777 {
            self.pool.set_attr(ino, SetAttr { mode: Some(kept), ..SetAttr::default() })?;
        }
        Ok(())
    }

    fn handle(&self, number: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(number).ok_or(Errno(libc::EBADF))
    }

    /// `send` may answer the request with the file's data at an offset. It returns whether it did.
    pub(crate) fn read(
        &self,
        rq: &Request<'_>,
        out: &mut Body,
        send: impl FnOnce(BorrowedFd<'_>, (u64, usize)) -> bool,
    ) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, offset, size) = (self.handle(f.u64()?)?, f.u64()?, f.u32()? as usize);
        let arrived;
        let single = match &*handle {
            Handle::Single(file, _) => Some(file),
            Handle::Parts(..) => None,
            Handle::Arriving(arriving) => match arriving.wait_for(self.pool, offset, size)? {
                Readable::Here(file) => {
                    arrived = file;
                    Some(&*arrived)
                }
                Readable::Elsewhere(file) => {
                    out.fill(size.min(TRANSFER_BYTES_MAX), |room| {
                        file.read_at(room, offset).map_err(Errno::from)
                    })?;
                    return Ok(Outcome::Reply);
                }
                Readable::Read(data) => {
                    out.fill(data.len().min(TRANSFER_BYTES_MAX), |room| {
                        room.copy_from_slice(&data[..room.len()]);
                        Ok::<_, Errno>(room.len())
                    })?;
                    return Ok(Outcome::Reply);
                }
                Readable::Nothing => return Ok(Outcome::Reply),
            },
        };
        if single.is_some_and(|file| send(file.as_fd(), (offset, size))) {
            return Ok(Outcome::Silence);
        }
        out.fill(size.min(TRANSFER_BYTES_MAX), |room| match (&*handle, single) {
            (Handle::Parts(file, _), _) => file.read_at(room, offset).map_err(Errno::from),
            (_, Some(file)) => {
                // SAFETY: the buffer is as long as said.
                let n = unsafe {
                    libc::pread(file.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), offset as i64)
                };
                check(n).map(|n| n as usize)
            }
            (_, None) => Err(Errno(libc::EBADF)),
        })?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn write(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, offset, size, write_flags) =
            (self.handle(f.u64()?)?, f.u64()?, f.u32()? as usize, f.u32()?);
        f.skip(16)?;
        let bytes = f.bytes(size)?;
        if write_flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_set_ids(rq, self.ino(rq.node))?;
        }
        self.wait_for_space(&handle);
        let written = match &*handle {
            Handle::Parts(file, true) if write_flags & WRITE_CACHE == 0 => file.append(bytes)?,
            Handle::Parts(file, _) => file.write_at(bytes, offset)?,
            Handle::Arriving(_) => return Err(Errno(libc::EBADF)),
            // Pages of a mapping, written by a handle that the kernel chose. They are written at their own offset,
            // even if that handle appends.
            Handle::Single(..) if write_flags & WRITE_CACHE != 0 => {
                let opened = self.nodes.opened(self.open_ino(rq.node).0);
                let file = opened.and_then(|opened| opened.writable()).ok_or(Errno(libc::EBADF))?;
                // SAFETY: the buffer is as long as said.
                let n = unsafe {
                    libc::pwrite(file.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset as i64)
                };
                check(n)? as usize
            }
            Handle::Single(file, _) => {
                // SAFETY: the buffer is as long as said.
                let n = unsafe {
                    libc::pwrite(file.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset as i64)
                };
                check(n)? as usize
            }
        };
        out.u32(written as u32);
        out.u32(0);
        Ok(Outcome::Reply)
    }

    /// Lets a write wait while the pool is full, unless the last one waited in vain.
    fn wait_for_space(&self, handle: &Handle) {
        let Handle::Single(_, patience) = handle else { return };
        if !patience.waits {
            return;
        }
        if !self.waiting.is_full(self.pool) {
            patience.is_over.store(false, Ordering::Relaxed);
        } else if !patience.is_over.load(Ordering::Relaxed) && !self.waiting.wait_for_space(self.pool) {
            patience.is_over.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn flush(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let handle = f.u64()?;
        f.skip(8)?;
        let ino = self.open_ino(rq.node).0;
        self.locks.drop_posix(ino, f.u64()?);
        self.locks.held().note_flush(ino, handle);
        let mut is_written = false;
        if let Some(opened) = self.nodes.opened(ino) {
            opened.note_flush();
            is_written = opened.writable().is_some();
        }
        if let Some(handle) = self.handles.get(handle) {
            is_written |= matches!(&*handle, Handle::Parts(file, _) if file.is_writable());
        }
        // Close fails with what this returns.
        if is_written {
            self.pool.persist_for(self.ino(rq.node), forebay_client::Durable::Close)?;
        }
        Ok(Outcome::Reply)
    }

    /// A descriptor for an operation on the whole open file.
    fn descriptor(&self, node: u64, handle: u64, write: bool) -> Result<Descriptor, Errno> {
        if let Some(handle) = self.handles.get(handle) {
            return Ok(Descriptor::Handle(handle));
        }
        let opened = self.nodes.opened(self.open_ino(node).0);
        let file = opened.and_then(|opened| if write { opened.writable() } else { opened.any() });
        file.map(Descriptor::Opened).ok_or(Errno(libc::EBADF))
    }

    pub(crate) fn fsync(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, flags) = (f.u64()?, f.u32()?);
        let file = self.descriptor(rq.node, handle, false)?;
        let ino = self.ino(rq.node);
        self.pool.mark_to_recover(ino)?;
        if let Some(file) = file.single() {
            // SAFETY: plain system calls on a descriptor of ours.
            check(unsafe {
                if flags & FSYNC_FDATASYNC != 0 {
                    libc::fdatasync(file.as_raw_fd())
                } else {
                    libc::fsync(file.as_raw_fd())
                }
            })?;
        } else if let Descriptor::Handle(handle) = &file {
            if let Handle::Parts(file, _) = &**handle {
                file.sync()?;
                return Ok(Outcome::Reply);
            }
        }
        self.pool.persist_for(ino, forebay_client::Durable::Sync)?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn fallocate(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, offset, len, mode) = (f.u64()?, f.u64()?, f.u64()?, f.u32()?);
        self.nameless.settle(&self.nodes, self.pool);
        let file = self.descriptor(rq.node, handle, true)?;
        if let Descriptor::Handle(handle) = &file {
            self.wait_for_space(handle);
        }
        if let Some(parts) = file.parts() {
            parts.allocate_range(mode as i32, offset, len)?;
            return Ok(Outcome::Reply);
        }
        let file = file.single().ok_or(Errno(libc::EOPNOTSUPP))?;
        // SAFETY: plain system call on a descriptor of ours.
        check(unsafe { libc::fallocate(file.as_raw_fd(), mode as i32, offset as i64, len as i64) })?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn lseek(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (handle, offset, whence) = (f.u64()?, f.u64()?, f.u32()?);
        let file = self.descriptor(rq.node, handle, false)?;
        let at = match file.single() {
            // The call also moves the descriptor's own offset, which nothing uses.
            Some(file) => {
                // SAFETY: plain system call on a descriptor of ours.
                let at = unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence as i32) };
                check(at)? as u64
            }
            None => self.seek_in_parts(rq.node, offset, whence as i32)?,
        };
        out.u64(at);
        Ok(Outcome::Reply)
    }

    /// A file with several backing files, or with one on another node, counts as data up to its end.
    fn seek_in_parts(&self, node: u64, offset: u64, whence: i32) -> Result<u64, Errno> {
        let size = self.stat(node)?.0.st_size as u64;
        match whence {
            _ if offset >= size => Err(Errno(libc::ENXIO)),
            libc::SEEK_DATA => Ok(offset),
            libc::SEEK_HOLE => Ok(size),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    pub(crate) fn copy_file_range(
        &self,
        rq: &Request<'_>,
        out: &mut Body,
        wide: bool,
    ) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (from_handle, mut from, to_node, to_handle) = (f.u64()?, f.u64()? as i64, f.u64()?, f.u64()?);
        let (mut to, len, flags) = (f.u64()? as i64, f.u64()?, f.u64()?);
        let source = self.descriptor(rq.node, from_handle, false)?;
        let destination = self.descriptor(to_node, to_handle, true)?;
        if let Descriptor::Handle(handle) = &destination {
            self.wait_for_space(handle);
        }
        // On EOPNOTSUPP the kernel copies by reads and writes.
        let by_parts = Errno(libc::EOPNOTSUPP);
        let (source, destination) = (source.single().ok_or(by_parts)?, destination.single().ok_or(by_parts)?);
        let len = len.min(COPY_BYTES_MAX as u64);
        // SAFETY: the offsets live over the call; the descriptors are ours.
        let copied = check(unsafe {
            libc::copy_file_range(
                source.as_raw_fd(),
                &mut from,
                destination.as_raw_fd(),
                &mut to,
                len as usize,
                flags as u32,
            )
        })?;
        if wide {
            out.u64(copied as u64);
        } else {
            out.u32(copied as u32);
            out.u32(0);
        }
        Ok(Outcome::Reply)
    }
}

/// A descriptor that lives as long as the request.
enum Descriptor {
    Handle(Arc<Handle>),
    Opened(Arc<OwnedFd>),
}

impl Descriptor {
    /// The file, if it has several backing files, or one on another node.
    fn parts(&self) -> Option<&forebay_client::File> {
        match self {
            Descriptor::Handle(handle) => match &**handle {
                Handle::Parts(file, _) => Some(file),
                Handle::Single(..) | Handle::Arriving(_) => None,
            },
            Descriptor::Opened(_) => None,
        }
    }

    /// The one backing file; none when there are several.
    fn single(&self) -> Option<&OwnedFd> {
        match self {
            Descriptor::Opened(file) => Some(file),
            Descriptor::Handle(handle) => match &**handle {
                Handle::Single(file, _) => Some(file),
                Handle::Parts(..) | Handle::Arriving(_) => None,
            },
        }
    }
}
