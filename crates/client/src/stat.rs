//! Attributes as programs see them: mode, owner, links and inode number from the shard; size, blocks and times of a
//! file with data from its backing files.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_data::BackingName;
use forebay_types::{
    Attr, BackingAttr, Code, Entry, Ino, Kind, Layout, Timestamp, FLAG_ATTACHED, FLAG_RESIDENT,
};

use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Pool};
use crate::walk::{permits, EXECUTE, READ, WRITE};

/// Bytes that `st_blksize` recommends: large enough that copies run at the medium's speed.
const BLOCK_BYTES: i64 = 128 * 1024;
/// Bytes that a medium allocates at a time.
const PAGE_BYTES: u64 = 4096;

/// An all-zero `stat`.
pub(crate) fn empty_stat() -> libc::stat {
    // SAFETY: an all-zero stat is valid.
    unsafe { std::mem::zeroed() }
}

fn later(a: (i64, i64), b: (i64, i64)) -> (i64, i64) {
    a.max(b)
}

/// `fstatat` relative to a directory descriptor.
pub(crate) fn stat_at(dir: RawFd, name: &CStr) -> Result<libc::stat, Code> {
    let mut st = empty_stat();
    // SAFETY: the name is NUL-terminated and `st` is valid for the call.
    errno::check(unsafe { libc::fstatat(dir, name.as_ptr(), &mut st, libc::AT_SYMLINK_NOFOLLOW) })?;
    Ok(st)
}

/// `fstatat` of a file's first backing file, which is the only one of most files.
#[inline]
fn stat_first(target: RawFd, ino: Ino) -> Result<libc::stat, Code> {
    stat_at(target, BackingName::new(ino, 0, 0).as_c_str())
}

/// This process has met files in front of a store: the state of a file's data is read before its backing file.
static MEETS_STORES: AtomicBool = AtomicBool::new(false);

/// A stat of a file's first backing file that was made before the file's entry was read.
struct Asked {
    backing: Result<libc::stat, Code>,
    /// Epoch and flags of the file's data before that, if they were read.
    before: Option<(u64, u32)>,
}

impl Asked {
    /// The stat, if the backing file had all data of the entry. In front of a store a restore may have been filling it,
    /// unless the data were there already.
    #[inline]
    fn backing_of(self, attr: &Attr) -> Option<libc::stat> {
        let is_attached = attr.flags & FLAG_ATTACHED != 0;
        if is_attached && self.before.is_none() {
            MEETS_STORES.store(true, Ordering::Relaxed);
        }
        let is_same = |(epoch, flags): (u64, u32)| epoch == attr.epoch() && flags & FLAG_RESIDENT != 0;
        self.backing.ok().filter(|_| !is_attached || self.before.is_some_and(is_same))
    }
}

/// Combines attributes of several backing files: the size is the greatest that any implies, and the times are those of
/// the one changed last.
pub(crate) struct Stripes {
    size: u64,
    blocks: i64,
    newest: Option<libc::stat>,
    /// Lower bound of the change time: the shard's.
    ctime: (i64, i64),
}

impl Stripes {
    pub(crate) fn of(st: &libc::stat) -> Stripes {
        Stripes { size: 0, blocks: 0, newest: None, ctime: (st.st_ctime, st.st_ctime_nsec) }
    }

    pub(crate) fn add(&mut self, layout: &Layout, (component, stripe): (usize, u16), backing: &libc::stat) {
        self.size = self.size.max(layout.size_from(component, stripe, backing.st_size as u64));
        self.blocks += backing.st_blocks;
        let ctime = |st: &libc::stat| (st.st_ctime, st.st_ctime_nsec);
        if self.newest.as_ref().is_none_or(|newest| ctime(backing) > ctime(newest)) {
            self.newest = Some(*backing);
        }
    }

    pub(crate) fn put(self, st: &mut libc::stat) {
        (st.st_ctime, st.st_ctime_nsec) = self.ctime;
        if let Some(newest) = &self.newest {
            Pool::merge(st, newest, false);
        }
        st.st_size = self.size as i64;
        st.st_blocks = self.blocks;
    }
}

/// The attributes of a backing file on another node as a `stat`.
pub(crate) fn stat_of(attr: &BackingAttr) -> libc::stat {
    let mut st = empty_stat();
    st.st_size = attr.bytes as i64;
    st.st_blocks = (attr.allocated_bytes / 512) as _;
    (st.st_atime, st.st_atime_nsec) = (attr.atime.sec, attr.atime.nsec.into());
    (st.st_mtime, st.st_mtime_nsec) = (attr.mtime.sec, attr.mtime.nsec.into());
    (st.st_ctime, st.st_ctime_nsec) = (attr.ctime.sec, attr.ctime.nsec.into());
    st
}

impl Pool {
    /// An inode's attributes in the shard, without its backing files.
    fn shard_stat(&self, attr: &Attr) -> libc::stat {
        let mut st = empty_stat();
        st.st_dev = self.device();
        st.st_ino = attr.ino.0;
        st.st_mode = attr.mode;
        st.st_nlink = attr.nlink as _;
        st.st_uid = attr.uid;
        st.st_gid = attr.gid;
        st.st_rdev = if attr.is_file() || attr.is_directory() { 0 } else { attr.rdev };
        st.st_size = attr.size as i64;
        st.st_blksize = BLOCK_BYTES as _;
        st.st_blocks = 0;
        let put = |sec: &mut i64, nsec: &mut i64, t: Timestamp| {
            *sec = t.sec;
            *nsec = t.nsec as i64;
        };
        put(&mut st.st_atime, &mut st.st_atime_nsec, attr.atime);
        put(&mut st.st_mtime, &mut st.st_mtime_nsec, attr.mtime);
        put(&mut st.st_ctime, &mut st.st_ctime_nsec, attr.ctime);
        st
    }

    /// Merges the attributes of a backing file into those of its inode. In an attached tree the change time of the
    /// backing file is ignored while its modification time equals the shard's: then the mover set that time when it
    /// restored the file, or a program set it through the shard.
    fn merge(st: &mut libc::stat, backing: &libc::stat, is_attached: bool) {
        let is_as_known =
            is_attached && (st.st_mtime, st.st_mtime_nsec) == (backing.st_mtime, backing.st_mtime_nsec);
        st.st_size = backing.st_size;
        st.st_blocks = backing.st_blocks;
        (st.st_atime, st.st_atime_nsec) = (backing.st_atime, backing.st_atime_nsec);
        (st.st_mtime, st.st_mtime_nsec) = (backing.st_mtime, backing.st_mtime_nsec);
        if !is_as_known {
            let ctime = later((st.st_ctime, st.st_ctime_nsec), (backing.st_ctime, backing.st_ctime_nsec));
            (st.st_ctime, st.st_ctime_nsec) = ctime;
        }
    }

    /// Attributes of an inode whose entry is known; [`Code::Stale`] if it was removed since.
    pub fn stat_entry(&self, entry: &Entry) -> Result<libc::stat, Code> {
        self.stat_with(entry, None)
    }

    /// [`Pool::stat_entry`] with a stat of the first backing file, if there was one already.
    #[inline]
    fn stat_with(&self, entry: &Entry, asked: Option<Asked>) -> Result<libc::stat, Code> {
        if entry.attr.is_directory() && entry.attr.width_log2 != 0 {
            return Ok(self.shard_stat(&self.with_parts(&entry.attr)?));
        }
        let mut st = self.shard_stat(&entry.attr);
        if !entry.attr.is_file() {
            return Ok(st);
        }
        if !entry.attr.is_resident() {
            // As if all were allocated: tar and others take a file without blocks for a hole.
            st.st_blocks = (entry.attr.size.div_ceil(PAGE_BYTES) * (PAGE_BYTES / 512)) as i64;
            return Ok(st);
        }
        st.st_size = 0;
        let is_attached = entry.attr.flags & FLAG_ATTACHED != 0;
        if let Some(id) = self.backing_elsewhere(entry, 0, 0).filter(|_| entry.layout.is_single()) {
            match self.stat_backing(id) {
                Ok(attr) => Pool::merge(&mut st, &stat_of(&attr), is_attached),
                // Never created, so the file is empty; or removed since the attributes were read.
                Err(Code::NotFound) => {
                    if self.get_attr(entry.attr.ino) == Err(Code::NotFound) {
                        return Err(Code::Stale);
                    }
                }
                Err(code) => return Err(code),
            }
            // Released since its entry was read, as below.
            if let Some(now) = self.changed_since(entry)? {
                return self.stat_with(&now, None);
            }
            return Ok(st);
        }
        if entry.layout.is_single() {
            // A backing file that was missing earlier may have got its name before the layout was read.
            if let Some(backing) = asked.and_then(|asked| asked.backing_of(&entry.attr)) {
                Pool::merge(&mut st, &backing, is_attached);
                return Ok(st);
            }
            let target = self.attached()?.target_of(&entry.layout, 0, 0);
            match stat_first(target, entry.attr.ino) {
                Ok(backing) => {
                    Pool::merge(&mut st, &backing, is_attached);
                    // Released since its entry was read, and perhaps restored: then the backing file may be one that is
                    // being filled.
                    if let Some(now) = self.changed_since(entry)? {
                        return self.stat_with(&now, None);
                    }
                }
                Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory) => {
                    if self.attached()?.target_was_lost(self.address()) {
                        return self.stat_entry(entry);
                    }
                    // Never created, so the file is empty; or removed or released since the attributes were read.
                    if self.get_attr(entry.attr.ino).is_err() {
                        return Err(Code::Stale);
                    }
                    if let Some(now) = self.changed_since(entry)? {
                        return self.stat_with(&now, None);
                    }
                }
                Err(code) => return Err(code),
            }
            return Ok(st);
        }
        if self.merge_stripes(entry, &mut st)? {
            return Ok(st);
        }
        let now = self.get_attr(entry.attr.ino).map_err(|_| Code::Stale)?;
        self.stat_with(&now, None)
    }

    /// The entry of a file of an attached tree that was released since its entry was read; [`Code::Stale`] if it was
    /// removed.
    fn changed_since(&self, entry: &Entry) -> Result<Option<Entry>, Code> {
        if entry.attr.flags & FLAG_ATTACHED == 0 || self.flags_if_same_data(&entry.attr).is_some() {
            return Ok(None);
        }
        let now = self.get_attr(entry.attr.ino).map_err(|code| match code {
            Code::NotFound => Code::Stale,
            code => code,
        })?;
        let is_same = now.attr.is_resident() && now.attr.epoch() == entry.attr.epoch();
        // An open for writing begins another epoch too: the backing file is the same.
        Ok(Some(now).filter(|_| !is_same))
    }

    /// Combines the attributes of several backing files: the size is the greatest that any implies, and the times are
    /// those of the one changed last. False if the file has another layout by now.
    #[cold]
    fn merge_stripes(&self, entry: &Entry, st: &mut libc::stat) -> Result<bool, Code> {
        let attached = self.attached()?;
        // A stripe that was never written has no backing file. A target's descriptor that the program closed would give
        // the same error, so it is checked first.
        attached.target_was_lost(self.address());
        let (mut sum, mut missing, mut failed) = (Stripes::of(st), false, Ok(()));
        let mut look = |at: (usize, u16), told| match told {
            Ok(backing) => sum.add(&entry.layout, at, &backing),
            Err(Code::NotFound) => missing = true,
            Err(code) => failed = failed.and(Err(code)),
        };
        let mut far = entry.layout.stripes().filter_map(|(component, stripe)| {
            Some(((component, stripe), self.backing_elsewhere(entry, component, stripe)?))
        });
        if let Some(first) = far.next() {
            let mut far = std::iter::once(first).chain(far);
            self.stat_all(&mut far, |at, told| look(at, told.map(|attr| stat_of(&attr))))?;
        }
        for (component, stripe) in entry.layout.stripes() {
            if self.backing_elsewhere(entry, component, stripe).is_none() {
                let number = entry.layout.file_number(component);
                let name = BackingName::new(entry.attr.ino, number, stripe);
                let target = attached.target_of(&entry.layout, component, stripe);
                look((component, stripe), stat_at(target, name.as_c_str()));
            }
        }
        failed?;
        sum.put(st);
        // Never created, or meanwhile merged with the others into one.
        Ok(!missing || self.get_attr(entry.attr.ino).is_ok_and(|now| now.layout == entry.layout))
    }

    /// [`Pool::stat_entry`] of a file with one backing file. `backing` is the result of the kernel's `fstat` of that.
    pub fn stat_opened(&self, entry: &Entry, backing: &libc::stat) -> libc::stat {
        let mut st = self.shard_stat(&entry.attr);
        Pool::merge(&mut st, backing, entry.attr.flags & FLAG_ATTACHED != 0);
        st
    }

    /// Attributes of an inode by its number.
    pub fn stat_inode(&self, ino: Ino) -> Result<libc::stat, Code> {
        self.stat_entry(&self.get_attr(ino)?).map_err(|code| match code {
            Code::Stale => Code::NotFound,
            code => code,
        })
    }

    /// `stat` (with `follow`) or `lstat`.
    pub fn stat(&self, place: Place<'_>, follow: bool, escape: &mut PathBuffer) -> Door<libc::stat> {
        if self.spans_nodes() || self.attached()?.target_count() > 1 {
            return self.with_entry(place, follow, escape, |entry| self.stat_entry(entry));
        }
        self.with_inode(place, follow, escape, |found| {
            if found.kind != Kind::File {
                return self.stat_entry(&self.get_attr(found.ino)?);
            }
            // The board and the kernel's inode are often both out of the cache: the board is prefetched during the
            // system call.
            self.prefetch(found.ino);
            let before = match MEETS_STORES.load(Ordering::Relaxed) {
                true => self.on_board(|board| board.data_state(found.ino))?,
                false => None,
            };
            let backing = stat_first(self.attached()?.target(), found.ino);
            self.stat_with(&self.get_attr(found.ino)?, Some(Asked { backing, before }))
        })
    }

    /// `statx`: the attributes of `stat`, and the birth time.
    pub fn statx(&self, place: Place<'_>, follow: bool, escape: &mut PathBuffer) -> Door<libc::statx> {
        self.with_entry(place, follow, escape, |entry| {
            Ok(statx_from(&self.stat_entry(entry)?, Some(entry.attr.btime)))
        })
    }

    /// `faccessat`: `amode` of R_OK, W_OK, X_OK. `effective` selects the effective instead of the real IDs.
    pub fn access(
        &self,
        place: Place<'_>,
        amode: i32,
        effective: bool,
        follow: bool,
        escape: &mut PathBuffer,
    ) -> Door<()> {
        if amode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
            return Err(Code::Invalid.into());
        }
        let attr = self.with_entry(place, follow, escape, |entry| Ok(entry.attr))?;
        let mut want = 0;
        for (bit, permission) in [(libc::R_OK, READ), (libc::W_OK, WRITE), (libc::X_OK, EXECUTE)] {
            if amode & bit != 0 {
                want |= permission;
            }
        }
        if permits((attr.mode, attr.uid, attr.gid), want, !effective) {
            Ok(())
        } else {
            Err(Code::AccessDenied.into())
        }
    }

    /// The result of `fstat` for a descriptor of this pool; `None` for other descriptors, and when the attributes
    /// cannot be read. `kernel` is the kernel's result. A file without names has 0 links and keeps the kernel's size
    /// and times.
    pub fn fstat(&self, fd: RawFd, kernel: &libc::stat) -> Option<libc::stat> {
        if self.was_opened_by_mount(fd, kernel) {
            let mut st = *kernel;
            st.st_dev = self.device();
            return Some(st);
        }
        let ino = self.inode_of(fd, kernel)?;
        let entry = match self.get_attr(ino) {
            Ok(entry) => entry,
            Err(Code::NotFound) => {
                let mut st = *kernel;
                st.st_dev = self.device();
                st.st_ino = ino.0;
                st.st_nlink = 0;
                if st.st_mode & libc::S_IFMT == libc::S_IFREG {
                    (st.st_mode, st.st_uid, st.st_gid) = crate::nameless::owned(fd, ino, kernel);
                } else if let Some(owned) = crate::nameless::changed(fd, ino) {
                    (st.st_mode, st.st_uid, st.st_gid) = owned;
                }
                return Some(st);
            }
            // The pool is gone, or another node has the attributes and does not answer.
            Err(_) => return None,
        };
        let is_wide = entry.attr.is_directory() && entry.attr.width_log2 != 0;
        if is_wide || entry.attr.is_file() && !entry.layout.is_single() {
            return self.stat_entry(&entry).ok();
        }
        let is_attached = entry.attr.flags & FLAG_ATTACHED != 0;
        if entry.attr.is_file() && is_attached && kernel.st_nlink == 0 {
            // A descriptor of O_PATH did not keep the file from being released.
            return self.stat_entry(&entry).ok();
        }
        let mut st = self.shard_stat(&entry.attr);
        if entry.attr.is_file() {
            Pool::merge(&mut st, kernel, is_attached);
        }
        Some(st)
    }

    /// `statfs` of the pool.
    pub fn statfs(&self) -> Result<libc::statfs, Code> {
        let space = self.space()?;
        // SAFETY: an all-zero statfs is valid, and filled by the call.
        let mut st: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: `st` is valid for the call; a bad descriptor is an error.
        let mut ask = |target| errno::check(unsafe { libc::fstatfs(target, &mut st) });
        let attached = self.attached()?;
        if let Err(code) = ask(attached.target()) {
            if !attached.target_was_lost(self.address()) {
                return Err(code);
            }
            ask(attached.target())?;
        }
        st.f_bsize = 4096;
        st.f_frsize = 4096;
        st.f_blocks = space.total_bytes / 4096;
        st.f_bfree = space.free_bytes / 4096;
        st.f_bavail = st.f_bfree;
        st.f_files = space.inodes.saturating_add(space.free_inodes);
        st.f_ffree = space.free_inodes;
        st.f_namelen = forebay_types::limits::NAME_MAX as _;
        Ok(st)
    }

    /// `statvfs` of the pool.
    pub fn statvfs(&self) -> Result<libc::statvfs, Code> {
        let s = self.statfs()?;
        // SAFETY: an all-zero statvfs is valid.
        let mut st: libc::statvfs = unsafe { std::mem::zeroed() };
        st.f_bsize = s.f_bsize as _;
        st.f_frsize = s.f_frsize as _;
        st.f_blocks = s.f_blocks as _;
        st.f_bfree = s.f_bfree as _;
        st.f_bavail = s.f_bavail as _;
        st.f_files = s.f_files as _;
        st.f_ffree = s.f_ffree as _;
        st.f_favail = s.f_ffree as _;
        st.f_fsid = self.device();
        st.f_namemax = s.f_namelen as _;
        Ok(st)
    }
}

/// `statx` of a `stat`.
pub(crate) fn statx_from(st: &libc::stat, btime: Option<Timestamp>) -> libc::statx {
    // SAFETY: an all-zero statx is valid.
    let mut x: libc::statx = unsafe { std::mem::zeroed() };
    x.stx_mask = libc::STATX_BASIC_STATS;
    x.stx_blksize = st.st_blksize as u32;
    x.stx_nlink = st.st_nlink as u32;
    x.stx_uid = st.st_uid;
    x.stx_gid = st.st_gid;
    x.stx_mode = st.st_mode as u16;
    x.stx_ino = st.st_ino;
    x.stx_size = st.st_size as u64;
    x.stx_blocks = st.st_blocks as u64;
    let set = |t: &mut libc::statx_timestamp, sec: i64, nsec: i64| {
        t.tv_sec = sec;
        t.tv_nsec = nsec as u32;
    };
    set(&mut x.stx_atime, st.st_atime, st.st_atime_nsec);
    set(&mut x.stx_mtime, st.st_mtime, st.st_mtime_nsec);
    set(&mut x.stx_ctime, st.st_ctime, st.st_ctime_nsec);
    if let Some(t) = btime {
        set(&mut x.stx_btime, t.sec, t.nsec as i64);
        x.stx_mask |= libc::STATX_BTIME;
    }
    (x.stx_rdev_major, x.stx_rdev_minor) = (libc::major(st.st_rdev), libc::minor(st.st_rdev));
    (x.stx_dev_major, x.stx_dev_minor) = (libc::major(st.st_dev), libc::minor(st.st_dev));
    x
}
