//! Files of any layout: opening them, and operations on all of their backing files. Reads and writes are in `data`.

mod data;

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use forebay_types::limits::{AHEAD_BYTES_MAX, SCATTER_PIECES_MIN};
use forebay_types::{BackingId, BackingOp, Code, Entry, Layout, Request, TimeSet};

use crate::ahead::Preallocation;
use crate::attributes::timespec;
use crate::errno;
use crate::making::PLACE_ATTEMPTS;
use crate::open::BACKING_FILE;
use crate::path::{PathBuffer, Place};
use crate::persisting::Durable;
use crate::pool::{Door, Fail, Pool};
use crate::read_ahead::ReadAhead;
use crate::remote_inodes::OpenElsewhere;
use crate::scatter::Scatter;
use crate::stat::{stat_of, Stripes};
use crate::walk::{permits, Target, EXECUTE, READ, WRITE};

/// How often an open starts again when meanwhile the file gets another layout, or the name leads to another file.
const ATTEMPTS: u32 = 64;

/// Striping of a file that an open creates.
#[derive(Clone, Copy, Debug)]
pub struct Striping {
    /// Number of backing files, on targets that the daemon selects; 1 is an ordinary file.
    pub stripe_count: u16,
    /// Bytes of a stripe, a power of two.
    pub stripe_bytes: u32,
    /// True if the directory's layout takes precedence where it has one.
    pub directory_takes_precedence: bool,
}

impl Striping {
    /// The directory's layout.
    pub const OF_DIRECTORY: Striping =
        Striping { stripe_count: 1, stripe_bytes: 1 << 20, directory_takes_precedence: true };

    /// The striping of a layout's first component.
    pub fn of(layout: &Layout) -> Striping {
        let first = &layout.components()[0];
        Striping {
            stripe_count: first.stripe_count,
            stripe_bytes: first.stripe_bytes,
            directory_takes_precedence: false,
        }
    }
}

/// An open backing file.
#[derive(Debug)]
pub(crate) enum Stripe {
    /// On this node: the kernel's descriptor.
    Local(OwnedFd),
    /// On another node: requests go to that node.
    Remote(OpenElsewhere),
}

/// An open file. Offsets are in bytes. A read returns fewer bytes only at the file's end.
#[derive(Debug)]
pub struct File {
    pub(crate) pool: &'static Pool,
    entry: Entry,
    /// The backing files, in the order of the layout's stripes.
    stripes: Vec<Stripe>,
    /// Index in `stripes` of each component's first stripe.
    first: Vec<usize>,
    writable: bool,
    is_in_memory: bool,
    /// Its targets on this node emulate a medium.
    is_paced: bool,
    ahead: Preallocation,
    scatter: Scatter,
    pub(crate) read_ahead: ReadAhead,
}

impl Pool {
    fn opened(&self, entry: &Entry, stripes: Vec<Stripe>, first: Vec<usize>, writable: bool) -> File {
        // Preallocation and mappings pay only for files in memory, and stores to a mapping cannot be paced.
        let is_paced = self.is_paced();
        let is_in_memory =
            !is_paced && self.attached().is_ok_and(|attached| attached.is_in_memory(&entry.layout));
        let (ahead, scatter) = match is_in_memory {
            true => (Preallocation::default(), Scatter::default()),
            false => (Preallocation::never(), Scatter::never()),
        };
        let (pool, read_ahead) = (self.for_ever(), ReadAhead::default());
        File {
            pool,
            entry: *entry,
            stripes,
            first,
            writable,
            is_in_memory,
            is_paced,
            ahead,
            scatter,
            read_ahead,
        }
    }

    /// Opens a file of any layout. With `write` the file is marked dirty before the function returns. [`Code::Stale`]
    /// if the layout changed meanwhile.
    pub fn open_file(&self, entry: &Entry, write: bool) -> Result<File, Code> {
        if !entry.attr.is_file() {
            return Err(if entry.attr.is_directory() { Code::IsDirectory } else { Code::Invalid });
        }
        let mut entry = self.resident_for(entry, !write)?;
        for _ in 0..ATTEMPTS {
            let file = self.open_stripes(&entry, write)?;
            match self.entry_to_open_again(&entry, write)? {
                None => return Ok(file),
                Some(now) => entry = self.resident_for(&now, !write)?,
            }
        }
        Err(Code::Busy)
    }

    /// Opens all backing files.
    fn open_stripes(&self, entry: &Entry, write: bool) -> Result<File, Code> {
        let flags = libc::O_CLOEXEC | if write { libc::O_RDWR } else { libc::O_RDONLY };
        let (mut stripes, mut elsewhere) = (Vec::new(), Vec::new());
        let mut first = Vec::new();
        for (component, stripe) in entry.layout.stripes() {
            if stripe == 0 {
                first.push(stripes.len());
            }
            if let Some(id) = self.backing_elsewhere(entry, component, stripe) {
                elsewhere.push(id);
                stripes.push(None);
                continue;
            }
            let fd = self.open_stripe(entry, component, stripe, flags)?;
            // SAFETY: the descriptor is new and ours.
            stripes.push(Some(Stripe::Local(unsafe { OwnedFd::from_raw_fd(fd) })));
        }
        let mut there = match elsewhere.is_empty() {
            true => Vec::new(),
            false => self.open_elsewhere(&mut elsewhere.into_iter())?,
        }
        .into_iter()
        .map(Stripe::Remote);
        let stripes: Vec<Stripe> =
            stripes.into_iter().filter_map(|here| here.or_else(|| there.next())).collect();
        // The layout cannot change while all backing files are open. Only the daemon knows whether it changed before.
        // No request is needed if the single backing file of a new layout does not exist (migrate.rs), nor in a pool of
        // several nodes, where no layout changes.
        if stripes.len() > 1 && !self.spans_nodes() && self.may_be_single(entry.attr.ino) {
            match self.ask_entry(&Request::GetAttr { ino: entry.attr.ino }) {
                Ok(now) if now.layout == entry.layout => {}
                Ok(_) | Err(Code::NotFound) => return Err(Code::Stale),
                Err(code) => return Err(code),
            }
        }
        Ok(self.opened(entry, stripes, first, write))
    }

    /// Opens a file of any layout by its path. `flags` are O_ACCMODE, O_CREAT, O_EXCL and O_TRUNC; the umask is already
    /// applied to `mode`. `striping` applies if this call creates the file.
    pub fn open_striped(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        striping: Striping,
        escape: &mut PathBuffer,
    ) -> Door<File> {
        self.open_striped_on(place, flags, mode, striping, &[], escape)
    }

    /// The same; a file that this call creates lies on the given targets, if there are any.
    pub fn open_striped_on(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        striping: Striping,
        targets: &[u32],
        escape: &mut PathBuffer,
    ) -> Door<File> {
        // On a node without a target a new file can only be opened in parts, because its backing files are on other
        // nodes.
        let asked = striping.stripe_count > 1
            || striping.directory_takes_precedence
            || !targets.is_empty()
            || !self.takes_files();
        if flags & libc::O_CREAT != 0 && asked {
            if let Some(file) = self.make_striped(place, flags, mode, striping, targets, escape)? {
                return Ok(file);
            }
        }
        for _ in 0..ATTEMPTS {
            let found = match self.resolve(place, true, escape) {
                Ok(entry) => Some(entry),
                Err(Fail::Code(Code::NotFound)) => None,
                Err(fail) => return Err(fail),
            };
            let exclusive = flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL;
            let was_found = found.is_some();
            let in_parts =
                found.filter(|entry| entry.attr.is_file() && !self.is_one_here(&entry.layout) && !exclusive);
            let Some(entry) = in_parts else {
                match self.open_single(place, flags, mode, escape) {
                    // Another node created the file meanwhile.
                    Err(Fail::Code(Code::NotSupported)) if !was_found && self.spans_nodes() => continue,
                    result => return result,
                }
            };
            match self.open_in_parts(&entry, flags) {
                Err(Code::Stale) => {}
                result => return Ok(result?),
            }
        }
        Err(Code::Stale.into())
    }

    /// Opens or creates a file with one backing file on this node.
    fn open_single(&self, place: Place<'_>, flags: i32, mode: u32, escape: &mut PathBuffer) -> Door<File> {
        let fd = self.open(place, flags | libc::O_CLOEXEC | BACKING_FILE, mode, escape)?;
        // SAFETY: the descriptor is new and ours.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let kernel = errno::stat(fd.as_raw_fd())?;
        let ino = self.inode_of(fd.as_raw_fd(), &kernel).ok_or(Code::Stale)?;
        let entry = self.get_attr(ino)?;
        if !entry.attr.is_file() {
            return Err(if entry.attr.is_directory() { Code::IsDirectory } else { Code::Invalid }.into());
        }
        let writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
        Ok(self.opened(&entry, vec![Stripe::Local(fd)], vec![0], writable))
    }

    /// Opens a file with several backing files, or with one on another node.
    fn open_in_parts(&self, entry: &Entry, flags: i32) -> Result<File, Code> {
        let access = flags & libc::O_ACCMODE;
        let write = access != libc::O_RDONLY;
        let wanted = match access {
            libc::O_RDONLY => READ,
            libc::O_WRONLY => WRITE,
            _ => READ | WRITE,
        };
        let attr = &entry.attr;
        if !permits((attr.mode, attr.uid, attr.gid), wanted, false) {
            return Err(Code::AccessDenied);
        }
        let file = self.open_file(entry, write)?;
        if write && flags & libc::O_TRUNC != 0 {
            file.truncate(0)?;
        }
        Ok(file)
    }

    /// Creates a file with several backing files, or with one on another node. `None` if the name exists and O_EXCL is
    /// not set.
    fn make_striped(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        striping: Striping,
        targets: &[u32],
        escape: &mut PathBuffer,
    ) -> Door<Option<File>> {
        let exclusive = flags & libc::O_EXCL != 0;
        let (dir, name) = match self.walk_to(place, !exclusive, false, escape)? {
            Target::Missing(dir, name) => (dir, name),
            Target::Found(_) if exclusive => return Err(Code::Exists.into()),
            Target::Found(_) => return Ok(None),
        };
        dir.check(self, WRITE | EXECUTE)?;
        let single_elsewhere = striping.stripe_count == 1 && targets.is_empty() && !self.takes_files();
        let above = if striping.directory_takes_precedence || single_elsewhere {
            Some(self.get_attr(dir.ino)?)
        } else {
            None
        };
        let above = above.filter(|above| above.layout.is_set(above.attr.home));
        let is_placed = above.as_ref().map_or(!targets.is_empty(), |above| above.layout.is_placed());
        for attempt in 1.. {
            let layout = match &above {
                Some(above) => self.layout_as_set(above)?,
                None if !targets.is_empty() => self.layout_on(striping, targets)?,
                None if striping.stripe_count == 1 && !single_elsewhere => return Ok(None),
                None => self.layout_of(striping)?,
            };
            if targets.is_empty() && self.is_one_here(&layout) {
                return Ok(None);
            }
            let made = self.create_entry(dir.ino, name.as_bytes(), mode & 0o7777, exclusive, Some(layout));
            let (entry, created) = match made {
                Err(Code::Exists) if !exclusive => return Ok(None),
                made => made?,
            };
            if !created {
                return Ok(None);
            }
            match self.open_file(&entry, true) {
                Ok(file) => return Ok(Some(file)),
                Err(code) => {
                    // An open that fails leaves no name behind.
                    let _ = self.unlink_in(dir.ino, name.as_bytes());
                    // A selected node does not answer: the next attempt selects others, unless the caller or the
                    // directory names the targets.
                    if is_placed || code != Code::Io || attempt == PLACE_ATTEMPTS {
                        return Err(code.into());
                    }
                }
            }
        }
        Err(Code::Io.into())
    }
}

impl File {
    /// The striping of the first component.
    pub fn striping(&self) -> Striping {
        Striping::of(&self.entry.layout)
    }

    /// The attributes when it was opened.
    pub(crate) fn attr(&self) -> forebay_types::Attr {
        self.entry.attr
    }

    /// The inode.
    pub fn ino(&self) -> forebay_types::Ino {
        self.entry.attr.ino
    }

    /// Sets whether data on other nodes may be read ahead when they are read in order. Data read ahead may be up to
    /// [`READ_AHEAD_MS`] old, but this file's own writes, truncations and [`File::sync`] take effect at once. Initially
    /// off.
    ///
    /// [`READ_AHEAD_MS`]: forebay_types::limits::READ_AHEAD_MS
    pub fn read_in_order(&self, wanted: bool) {
        self.read_ahead.ask(wanted && self.has_far());
    }

    /// True if some backing files are on other nodes.
    pub(crate) fn has_far(&self) -> bool {
        self.stripes.iter().any(|stripe| matches!(stripe, Stripe::Remote(_)))
    }

    /// Reserves space for the first `bytes` bytes and extends the file to `bytes` if it is shorter. It never truncates.
    pub fn allocate(&self, bytes: u64) -> Result<(), Code> {
        self.allocate_range(0, 0, bytes)
    }

    /// `fallocate` of a range, with the modes that move no data. Stripes are dense in a backing file, so a range of the
    /// file is one range of each backing file.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for modes that move data.
    pub fn allocate_range(&self, mode: i32, offset: u64, bytes: u64) -> Result<(), Code> {
        let moves_none = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        if mode & !moves_none != 0 {
            return Err(Code::NotSupported);
        }
        let end = offset.checked_add(bytes).filter(|end| *end <= forebay_types::limits::FILE_BYTES_MAX);
        let end = end.ok_or(Code::FileTooLarge)?;
        let mut far = Vec::new();
        for (component, stripe) in self.entry.layout.stripes() {
            let of = |bytes| self.entry.layout.backing_bytes(component, stripe, bytes);
            let (from, length) = (of(offset), of(end) - of(offset));
            if length == 0 {
                continue;
            }
            let fd = match self.stripe(component, stripe) {
                Stripe::Local(fd) => fd,
                Stripe::Remote(remote) => {
                    let op = BackingOp::Allocate { mode: mode as u32, offset: from, bytes: length };
                    far.push((remote.id, op));
                    continue;
                }
            };
            loop {
                // SAFETY: plain system call on our descriptor.
                let result = unsafe { libc::fallocate(fd.as_raw_fd(), mode, from as i64, length as i64) };
                match errno::check(result) {
                    Ok(_) => break,
                    Err(Code::Interrupted) => {}
                    Err(code) => return Err(code),
                }
            }
        }
        let all = self.ask_far(&mut far.into_iter());
        self.read_ahead.forget();
        all
    }

    /// Sends requests to other nodes, all at the same time. Without requests it does not even attach.
    fn ask_far<'a>(&self, asks: &mut dyn Iterator<Item = (BackingId, BackingOp<'a>)>) -> Result<(), Code> {
        match asks.next() {
            Some(first) => self.pool.ask_all(&mut std::iter::once(first).chain(asks)),
            None => Ok(()),
        }
    }

    /// The backing files on other nodes.
    fn far(&self) -> impl Iterator<Item = BackingId> + '_ {
        self.stripes.iter().filter_map(|stripe| match stripe {
            Stripe::Remote(remote) => Some(remote.id),
            Stripe::Local(_) => None,
        })
    }

    /// Number of backing files on other nodes.
    pub fn count_elsewhere(&self) -> usize {
        self.far().count()
    }

    /// fsync(2) of all backing files. Data that were read ahead are discarded. Where the store is attached so, waits
    /// until it has the data.
    pub fn sync(&self) -> Result<(), Code> {
        self.pool.mark_to_recover(self.entry.attr.ino)?;
        for stripe in &self.stripes {
            if let Stripe::Local(fd) = stripe {
                // SAFETY: plain system call on our descriptor.
                errno::check(unsafe { libc::fsync(fd.as_raw_fd()) })?;
            }
        }
        self.read_ahead.forget();
        self.ask_far(&mut self.far().map(|id| (id, BackingOp::Sync)))?;
        match Durable::Sync.waits(&self.entry.attr) {
            true => self.pool.persist(self.entry.attr.ino),
            false => Ok(()),
        }
    }

    /// Closes the file. Where the store is attached so, waits until it has the data that were written. On failure the
    /// file is closed too.
    pub fn close(self) -> Result<(), Code> {
        let (pool, attr, writable) = (self.pool, self.attr(), self.writable);
        drop(self);
        match writable && Durable::Close.waits(&attr) {
            true => pool.persist(attr.ino),
            false => Ok(()),
        }
    }

    /// The descriptor of a file with one backing file, if that is on this node. None if its target emulates a medium, as
    /// nothing would delay what the kernel does with it.
    pub fn fd(&self) -> Option<RawFd> {
        match self.stripes.first() {
            Some(Stripe::Local(fd)) if self.entry.layout.is_single() && !self.is_paced => {
                Some(fd.as_raw_fd())
            }
            _ => None,
        }
    }

    pub(crate) fn stripe(&self, component: usize, stripe: u16) -> &Stripe {
        &self.stripes[self.index_of(component, stripe)]
    }

    /// The index of a backing file among all of the file's.
    pub(crate) fn index_of(&self, component: usize, stripe: u16) -> usize {
        self.first[component] + stripe as usize
    }

    pub(crate) fn stripe_at(&self, index: usize) -> &Stripe {
        &self.stripes[index]
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.entry.layout
    }

    pub(crate) fn stripe_count(&self) -> usize {
        self.stripes.len()
    }

    /// True if all of the file's backing files on this node are in memory.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// True if the file's targets on this node emulate a medium.
    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        self.is_paced
    }

    pub(crate) fn scattered(&self) -> &Scatter {
        &self.scatter
    }

    /// Preallocates before a write of `bytes` bytes to a range of a backing file on this node. The caller steps through
    /// the file by `step` bytes.
    pub(crate) fn take_ahead(&self, index: usize, fd: RawFd, range: Range<u64>, bytes: usize, step: usize) {
        let (count, start) = (self.stripes.len(), range.start);
        let is_small = self.ahead.take((index, count), fd, range, bytes, step);
        // Many pieces in one call are mostly written through a mapping, which fills its pages with zeros without the
        // inode's lock.
        let is_one_by_one = bytes / step.max(1) < SCATTER_PIECES_MIN;
        let ([c], true) = (self.entry.layout.components(), is_small && count > 1 && is_one_by_one) else {
            return;
        };
        let (stripe_bytes, count) = (u64::from(c.stripe_bytes), count as u64);
        let number = start / stripe_bytes * count + index as u64;
        if self.ahead.enters(number) {
            let (next, row) = ((number + 1) % count, (number + 1) / count);
            if let Stripe::Local(fd) = &self.stripes[next as usize] {
                let range = row * stripe_bytes..row * stripe_bytes + stripe_bytes.min(AHEAD_BYTES_MAX);
                self.ahead.take_next(next as usize, fd.as_raw_fd(), range);
            }
        }
    }

    /// Size, blocks and times, combined from the backing files. The other attributes are in the shard, or lost if the
    /// inode was removed, and are left empty.
    pub fn stat(&self) -> Result<libc::stat, Code> {
        let mut st = crate::stat::empty_stat();
        let mut sum = Stripes::of(&st);
        self.stat_each(|at, backing| sum.add(&self.entry.layout, at, backing))?;
        sum.put(&mut st);
        Ok(st)
    }

    /// Sets the times of all backing files.
    pub fn set_times(&self, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        let times = [timespec(atime), timespec(mtime)];
        for stripe in &self.stripes {
            if let Stripe::Local(fd) = stripe {
                // SAFETY: the array has two elements.
                errno::check(unsafe { libc::futimens(fd.as_raw_fd(), times.as_ptr()) })?;
            }
        }
        self.ask_far(&mut self.far().map(|id| (id, BackingOp::SetTimes { atime, mtime })))
    }

    pub(crate) fn stripes(&self) -> &[Stripe] {
        &self.stripes
    }

    /// True if the file was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Size of the file in bytes.
    pub fn size(&self) -> Result<u64, Code> {
        let mut size = 0;
        self.stat_each(|(component, stripe), backing| {
            let bytes = backing.st_size as u64;
            size = size.max(self.entry.layout.size_from(component, stripe, bytes));
        })?;
        Ok(size)
    }

    /// Calls `look` with the attributes of each backing file. All other nodes are queried at the same time.
    fn stat_each(&self, mut look: impl FnMut((usize, u16), &libc::stat)) -> Result<(), Code> {
        let mut far = Vec::new();
        for (component, stripe) in self.entry.layout.stripes() {
            match self.stripe(component, stripe) {
                Stripe::Local(fd) => look((component, stripe), &errno::stat(fd.as_raw_fd())?),
                Stripe::Remote(remote) => far.push(((component, stripe), remote.id)),
            }
        }
        if far.is_empty() {
            return Ok(());
        }
        let mut all = Ok(());
        self.pool.stat_all(&mut far.into_iter(), |at, told| match told {
            Ok(attr) => look(at, &stat_of(&attr)),
            Err(code) => all = all.and(Err(code)),
        })?;
        all
    }

    /// Sets the size.
    pub fn truncate(&self, size: u64) -> Result<(), Code> {
        if size > forebay_types::limits::FILE_BYTES_MAX {
            return Err(Code::FileTooLarge);
        }
        let layout = &self.entry.layout;
        // The backing file that holds the last byte is extended to it, because the file's size is computed from the
        // backing files.
        let mut far = Vec::new();
        for (component, stripe) in layout.stripes() {
            let bytes = layout.backing_bytes(component, stripe, size);
            match self.stripe(component, stripe) {
                Stripe::Local(fd) => {
                    // SAFETY: plain system call on our descriptor.
                    errno::check(unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as i64) })?;
                }
                Stripe::Remote(remote) => far.push((remote.id, BackingOp::Truncate { bytes })),
            }
        }
        let all = self.ask_far(&mut far.into_iter());
        self.read_ahead.forget();
        all
    }
}
