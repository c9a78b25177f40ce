//! Requests about attributes, including extended attributes.

use forebay_client::nameless;
use forebay_types::{Code, Entry, Ino, SetAttr, TimeSet, Timestamp};

use crate::errno::{check, Errno};
use crate::filesystem::{FileSystem, Outcome, TEMPORARY};
use crate::handles::Handle;
use crate::nodes::Seen;
use crate::opened::{open_backing, reopen};
use crate::rights::{Owned, Rights};
use forebay_fuse::protocol::{self, fattr, Body, Request};

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The extended attribute that holds a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";

/// True when no later change can get this time stamp, because the clock for time stamps has passed it.
fn is_past(time: Timestamp) -> bool {
    const TICKS: std::time::Duration = std::time::Duration::from_millis(100);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let limit = now.saturating_sub(TICKS);
    (time.sec, time.nsec) < (limit.as_secs() as i64, limit.subsec_nanos())
}

/// A SETATTR's fields.
struct SetAttrRequest {
    valid: u32,
    size: u64,
    atime: TimeSet,
    mtime: TimeSet,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl SetAttrRequest {
    fn read(rq: &Request<'_>) -> Result<SetAttrRequest, Errno> {
        let mut f = rq.fields;
        let valid = f.u32()?;
        f.u32()?;
        f.u64()?;
        let size = f.u64()?;
        f.u64()?;
        let (atime, mtime, _ctime) = (f.u64()?, f.u64()?, f.u64()?);
        let (atime_nsec, mtime_nsec, _ctime_nsec) = (f.u32()?, f.u32()?, f.u32()?);
        let mode = f.u32()?;
        f.u32()?;
        let (uid, gid) = (f.u32()?, f.u32()?);
        let time = |set, now, sec: u64, nsec| match valid & (set | now) {
            0 => TimeSet::Omit,
            bits if bits & now != 0 => TimeSet::Now,
            _ => TimeSet::At(Timestamp { sec: sec as i64, nsec }),
        };
        Ok(SetAttrRequest {
            valid,
            size,
            atime: time(fattr::ATIME, fattr::ATIME_NOW, atime, atime_nsec),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, mtime, mtime_nsec),
            mode,
            uid,
            gid,
        })
    }

    fn has(&self, bit: u32) -> bool {
        self.valid & bit != 0
    }

    fn sets_times(&self) -> bool {
        self.atime != TimeSet::Omit || self.mtime != TimeSet::Omit
    }

    /// Checks that the caller may make the change, and returns the new permission bits if they change. Set-ID bits are
    /// dropped where Linux drops them: the kernel leaves that to the file system (`FUSE_HANDLE_KILLPRIV_V2`). The
    /// kernel sends a SETATTR without any attribute in two cases: for a chown that names no id, and for a passthrough
    /// write. The second needs a file that is open for writing.
    ///
    /// A truncation is not checked here: the kernel checked it by permission bits that it refreshes, or at the open.
    fn check(&self, who: Rights, old: Owned, has_writer: bool) -> Result<Option<u32>, Errno> {
        let id = |bit, id| self.has(bit).then_some(id);
        who.chown(old, id(fattr::UID, self.uid), id(fattr::GID, self.gid))?;
        if self.sets_times() {
            who.set_times(old, self.atime == TimeSet::Now && self.mtime == TimeSet::Now)?;
        }
        if self.has(fattr::MODE) {
            return who.chmod(old, self.mode & 0o7777).map(Some);
        }
        let drops = self.has(fattr::KILL_SUIDGID | fattr::UID | fattr::GID) || self.is_empty();
        let mode = if drops { who.drop_set_ids(old) } else { old.mode & 0o7777 };
        if mode == old.mode & 0o7777 {
            return Ok(None);
        }
        if self.is_empty() && !has_writer {
            who.touch_mode(old)?;
        }
        Ok(Some(mode))
    }

    fn is_empty(&self) -> bool {
        let all = fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE;
        !self.has(all) && !self.sets_times()
    }
}

fn timespec(t: TimeSet) -> libc::timespec {
    match t {
        TimeSet::Omit => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
        TimeSet::Now => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
        TimeSet::At(t) => libc::timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() },
    }
}

fn truncate(file: &OwnedFd, size: u64) -> Result<(), Errno> {
    let size = i64::try_from(size).map_err(|_| Errno(libc::EFBIG))?;
    // SAFETY: plain system call on a descriptor of ours.
    check(unsafe { libc::ftruncate(file.as_raw_fd(), size) }).map(|_| ())
}

impl FileSystem {
    pub(crate) fn getattr(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let (st, entry) = self.stat(rq.node)?;
        self.put_attr(rq.node, &st, entry.is_some(), out);
        Ok(Outcome::Reply)
    }

    fn put_attr(&self, node: u64, st: &libc::stat, has_name: bool, out: &mut Body) {
        if has_name {
            self.nodes.note(st.st_ino, Seen::of(st));
        }
        protocol::put_attr_out(out, st, self.attr_validity(node, st));
    }

    pub(crate) fn statx(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let (st, entry) = self.stat(rq.node)?;
        let born = entry.map(|entry| (entry.attr.btime.sec, entry.attr.btime.nsec));
        protocol::put_statx_out(out, &st, born, self.attr_validity(rq.node, &st));
        Ok(Outcome::Reply)
    }

    pub(crate) fn setattr(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let (request, ino, who) = (SetAttrRequest::read(rq)?, self.ino(rq.node), Rights::of(rq));
        let st = match self.entry(ino)? {
            Some(entry) => self.set_named(rq.node, &entry, &request, who)?,
            None => {
                self.set_nameless(rq.node, &request, who)?;
                self.stat(rq.node)?.0
            }
        };
        self.put_attr(rq.node, &st, st.st_nlink > 0, out);
        Ok(Outcome::Reply)
    }

    /// True when a program has the inode open for writing through the mount.
    fn has_writer(&self, ino: Ino) -> bool {
        let parts = || matches!(self.handles.parts_of(ino.0).as_deref(), Some(Handle::Parts(file, _)) if file.is_writable());
        self.nodes.opened(ino.0).is_some_and(|opened| opened.writable().is_some()) || parts()
    }

    fn set_named(
        &self,
        node: u64,
        entry: &Entry,
        request: &SetAttrRequest,
        who: Rights,
    ) -> Result<libc::stat, Errno> {
        let attr = &entry.attr;
        let mode = request.check(who, attr.into(), self.has_writer(self.open_ino(node)))?;
        if request.has(fattr::SIZE) {
            self.truncate_entry(entry, request.size)?;
        }
        let mut set = SetAttr {
            mode,
            uid: request.has(fattr::UID).then_some(request.uid),
            gid: request.has(fattr::GID).then_some(request.gid),
            ..SetAttr::default()
        };
        if !attr.is_file() {
            (set.atime, set.mtime) = (request.atime, request.mtime);
        } else if request.sets_times() {
            self.pool.set_times_entry(entry, request.atime, request.mtime)?;
        }
        let entry = if set != SetAttr::default() || request.is_empty() {
            self.pool.set_attr(attr.ino, set)?
        } else {
            *entry
        };
        Ok(self.pool.stat_entry(&entry)?)
    }

    /// Sets attributes of an inode without a name: on its open file, and in the attributes recorded in `nodes`.
    fn set_nameless(&self, node: u64, request: &SetAttrRequest, who: Rights) -> Result<(), Errno> {
        let mut seen = Seen::of(&self.stat(node)?.0);
        let ino = self.open_ino(node);
        let mode = request.check(who, seen.into(), self.has_writer(ino))?;
        let opened = self.nodes.opened(ino.0);
        let parts = self.handles.parts_of(ino.0);
        let parts = match parts.as_deref() {
            Some(Handle::Parts(file, _)) => Some(file),
            _ => None,
        };
        if let (Some(file), true) = (parts, request.has(fattr::SIZE)) {
            file.truncate(request.size)?;
        } else if request.has(fattr::SIZE) {
            let file = opened.as_ref().and_then(|o| o.any()).ok_or(Errno(libc::ESTALE))?;
            truncate(&reopen(&file, libc::O_RDWR)?, request.size)?;
        }
        if let (Some(file), true) = (parts, request.sets_times()) {
            file.set_times(request.atime, request.mtime)?;
        } else if request.sets_times() && seen.mode & libc::S_IFMT == libc::S_IFREG {
            let file = opened.and_then(|o| o.any()).ok_or(Errno(libc::ESTALE))?;
            let times = [timespec(request.atime), timespec(request.mtime)];
            // SAFETY: the array has two elements, as the call requires.
            check(unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) })?;
        }
        if let Some(mode) = mode {
            seen.mode = seen.mode & libc::S_IFMT | mode;
        }
        if request.has(fattr::UID) {
            seen.uid = request.uid;
        }
        if request.has(fattr::GID) {
            seen.gid = request.gid;
        }
        self.note_nameless(ino, seen);
        Ok(())
    }

    /// Drops the set-ID bits of a file without a name, because a caller without the right to keep them writes it.
    pub(crate) fn drop_nameless_set_ids(&self, rq: &Request<'_>) -> Result<(), Errno> {
        let mut seen = Seen::of(&self.stat(rq.node)?.0);
        let kept = Rights::of(rq).drop_set_ids(seen.into());
        if kept != seen.mode & 0o7777 {
            seen.mode = seen.mode & libc::S_IFMT | kept;
            self.note_nameless(self.open_ino(rq.node), seen);
        }
        Ok(())
    }

    /// Records new attributes of an inode without a name.
    fn note_nameless(&self, ino: Ino, seen: Seen) {
        // Before a temporary file has a name, no other process can have it open. Afterwards the shard's attributes
        // count.
        let opened = if ino.0 < TEMPORARY { self.nodes.opened(ino.0) } else { None };
        if let Some(file) = opened.and_then(|opened| opened.any()) {
            nameless::store_owner(file.as_raw_fd(), (seen.mode, seen.uid, seen.gid));
        }
        self.nodes.note(ino.0, seen);
    }

    /// Sets the size of a file, open or not.
    pub(crate) fn truncate_entry(&self, entry: &Entry, size: u64) -> Result<(), Errno> {
        if !self.pool.is_one_here(&entry.layout) {
            return Ok(self.pool.open_file(entry, true)?.truncate(size)?);
        }
        if let Some(file) = self.nodes.opened(entry.attr.ino.0).and_then(|opened| opened.writable()) {
            return truncate(&file, size);
        }
        match open_backing(self.pool, entry, libc::O_RDWR) {
            Ok(file) => truncate(&file, size),
            Err(Code::Stale) => Err(Errno(libc::ESTALE)),
            Err(code) => Err(code.into()),
        }
    }

    pub(crate) fn getxattr(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (room, _, name) = (f.u32()? as usize, f.u32()?, f.name()?);
        let ino = self.ino(rq.node);
        if name == CAPABILITIES {
            return self.capabilities(rq, room, out);
        }
        self.answer_sized(room, out, |value| match self.pool.get_xattr_inode(ino, name, value) {
            Err(Code::NotFound) => nameless::get_xattr(self.nameless_file(rq)?.as_raw_fd(), name, value),
            result => result,
        })
    }

    /// Answers with a file's capabilities. The kernel requests them before the first write after each refresh of
    /// attributes, and nearly no file has any. So `nodes` remembers that a file has none, together with the file's
    /// ctime, which setting capabilities changes: only the first request reaches the shard. Nothing is remembered if
    /// the ctime is so recent that another change may get the same one.
    fn capabilities(&self, rq: &Request<'_>, room: usize, out: &mut Body) -> Result<Outcome, Errno> {
        let ino = self.ino(rq.node);
        let changed = self.entry(ino)?.map(|entry| entry.attr.ctime);
        if changed.is_some_and(|changed| self.nodes.is_incapable(ino.0, changed)) {
            return Err(Errno(libc::ENODATA));
        }
        let answer =
            self.answer_sized(room, out, |value| match self.pool.get_xattr_inode(ino, CAPABILITIES, value) {
                Err(Code::NotFound) => {
                    nameless::get_xattr(self.nameless_file(rq)?.as_raw_fd(), CAPABILITIES, value)
                }
                result => result,
            });
        if let (Err(Errno(libc::ENODATA)), Some(changed)) = (&answer, changed) {
            if is_past(changed) {
                self.nodes.note_incapable(ino.0, changed);
            }
        }
        answer
    }

    /// The open file of an inode without a name, for its extended attributes.
    fn nameless_file(&self, rq: &Request<'_>) -> Result<Arc<OwnedFd>, Code> {
        let opened = self.nodes.opened(self.open_ino(rq.node).0);
        opened.and_then(|opened| opened.any()).ok_or(Code::NotFound)
    }

    pub(crate) fn listxattr(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (room, ino) = (f.u32()? as usize, self.ino(rq.node));
        self.answer_sized(room, out, |names| match self.pool.list_xattr_inode(ino, names) {
            Err(Code::NotFound) => nameless::list_xattr(self.nameless_file(rq)?.as_raw_fd(), names),
            result => result,
        })
    }

    /// Answers with a value, or with its length if the kernel has no room for a value.
    fn answer_sized(
        &self,
        room: usize,
        out: &mut Body,
        ask: impl FnOnce(&mut [u8]) -> Result<usize, Code>,
    ) -> Result<Outcome, Errno> {
        let nameless = |code| match code {
            Code::NotFound => Errno(libc::ENODATA),
            code => Errno::from(code),
        };
        if room == 0 {
            let n = ask(&mut []).map_err(nameless)?;
            out.u32(n as u32);
            out.u32(0);
        } else {
            out.fill(room, ask).map_err(nameless)?;
        }
        Ok(Outcome::Reply)
    }

    pub(crate) fn setxattr(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (size, flags, name) = (f.u32()? as usize, f.u32()?, f.name()?);
        let value = f.bytes(size)?;
        self.check_xattr(rq, name)?;
        match self.pool.set_xattr_inode(self.ino(rq.node), name, value, flags) {
            Err(Code::NotFound) => {
                nameless::set_xattr(self.nameless_file(rq)?.as_raw_fd(), name, value, flags)?;
            }
            result => result?,
        }
        Ok(Outcome::Reply)
    }

    pub(crate) fn removexattr(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let name = f.name()?;
        self.check_xattr(rq, name)?;
        match self.pool.remove_xattr_inode(self.ino(rq.node), name) {
            Err(Code::NotFound) => nameless::remove_xattr(self.nameless_file(rq)?.as_raw_fd(), name)?,
            result => result?,
        }
        Ok(Outcome::Reply)
    }

    /// Checks a change of an extended attribute, as far as the check depends on the owner. For name spaces other than
    /// `user.` the permission follows from the caller alone, and the kernel refreshes permission bits before it checks
    /// them.
    fn check_xattr(&self, rq: &Request<'_>, name: &[u8]) -> Result<(), Errno> {
        if rq.uid == 0 || !name.starts_with(b"user.") {
            return Ok(());
        }
        match self.entry(self.ino(rq.node))? {
            Some(entry) => Rights::of(rq).set_user_xattr(Owned::from(&entry.attr)),
            None => Ok(()),
        }
    }
}
