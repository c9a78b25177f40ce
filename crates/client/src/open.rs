//! Open: a file's own backing descriptor, or a directory's: the mount's, or an anchor.
//!
//! For write it is open first, mark second, hand out third: the backing file is opened without O_TRUNC, the daemon is
//! asked to mark the file dirty if it is clean, then it is truncated, then the program gets the descriptor. ENOENT of
//! the backing file means that it was never made, was released or is gone, and the daemon knows which.

use std::ffi::CStr;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_data::{AnchorName, BackingName};
use forebay_types::{Caller, Code, Entry, Ino, Kind, Layout, Reply, Request, FLAG_DIRTY};

use crate::descriptor::remember_opened;
use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{caller, Door, Fail, Pool, SHORT_REPLY_BYTES, SHORT_REQUEST_BYTES};
use crate::walk::{permits, Dir, Name, Target, EXECUTE, READ, WRITE};

/// Mode of every backing file; the inode's own is the shard's business.
pub(crate) const BACKING_MODE: libc::mode_t = 0o700;
/// Flags that are handed to the kernel as they are.
pub(crate) const KERNEL_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_CLOEXEC
    | libc::O_DIRECT
    | libc::O_DSYNC
    | libc::O_SYNC
    | libc::O_NOATIME
    | libc::O_NONBLOCK
    | libc::O_PATH
    | libc::O_NOCTTY
    | libc::O_ASYNC;
/// How often an open starts again when the file is replaced under it.
const ATTEMPTS: u32 = 4096;

static DIRECTORIES: AtomicU64 = AtomicU64::new(0);

/// How many descriptors of directories this process has made.
#[inline]
pub fn directories_opened() -> u64 {
    DIRECTORIES.load(Ordering::Relaxed)
}

pub(crate) fn open_at(dir: RawFd, name: &CStr, flags: i32) -> Result<RawFd, Code> {
    // SAFETY: the name is NUL-terminated. A FIFO's open may be interrupted, which is the program's business.
    errno::check(unsafe { libc::openat(dir, name.as_ptr(), flags, BACKING_MODE as libc::c_uint) })
}

/// Permissions that opening with `flags` takes.
fn wanted(flags: i32) -> u32 {
    if flags & libc::O_PATH != 0 {
        return 0;
    }
    let access = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => READ,
        libc::O_WRONLY => WRITE,
        _ => READ | WRITE,
    };
    access | if flags & libc::O_TRUNC != 0 { WRITE } else { 0 }
}

/// True when opening with `flags` may wait for somebody at the other end.
fn waits_for_other_end(entry: &Entry, flags: i32) -> bool {
    let never = libc::O_NONBLOCK | libc::O_PATH | libc::O_DIRECTORY;
    // Who opens both ends waits for nobody.
    let one_end = flags & libc::O_ACCMODE != libc::O_RDWR;
    entry.attr.kind() == Kind::Fifo && one_end && flags & never == 0
}

pub(crate) fn close(fd: RawFd) {
    // By number: libc's close is a point at which a thread may be cancelled.
    // SAFETY: the descriptor is ours and nobody else knows it yet.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// What became of a request to make a file.
enum Made {
    /// It was made, and its backing file, whose descriptor this is.
    New(Entry, Result<RawFd, Code>),
    /// The name is taken.
    Old(Entry),
    /// Nothing was, as the directory, which this is, says how its files lie.
    AsSet(Entry),
}

/// A file to be made.
#[derive(Clone, Copy)]
pub(crate) struct NewFile<'a> {
    pub(crate) parent: Ino,
    pub(crate) name: &'a [u8],
    pub(crate) mode: u32,
    pub(crate) exclusive: bool,
    pub(crate) layout: Option<Layout>,
    /// Its backing file may be made before it is known that there will be one.
    pub(crate) ahead: bool,
}

impl<'a> NewFile<'a> {
    /// The request that makes it under a number, if there is one in reserve, and puts one in reserve.
    pub(crate) fn request(&self, number: Option<Ino>) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number, reserve: true }
    }

    /// The target of this node on which its one backing file is made ahead.
    fn target_index(&self) -> u16 {
        let layout = self.layout.as_ref();
        layout.map_or(0, |layout| layout.wish().unwrap_or(layout.components()[0].target(0)) as u16)
    }

    /// The request of who makes no backing file.
    pub(crate) fn request_without_reserve(&self) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number: None, reserve: false }
    }
}

/// A backing file that was made, or was not, before it was known whether there will be an inode of its number.
#[derive(Clone, Copy)]
struct Ahead {
    ino: Ino,
    fd: Option<RawFd>,
}

impl Ahead {
    fn make(target: RawFd, ino: Ino, flags: i32) -> Ahead {
        let name = BackingName::new(ino, 0, 0);
        // Exclusive: what is there already, if anything ever is, is not ours to use or to remove.
        let flags = flags & KERNEL_FLAGS | libc::O_CREAT | libc::O_EXCL;
        Ahead { ino, fd: open_at(target, name.as_c_str(), flags).ok() }
    }

    /// The descriptor, if it is that of the file that was made.
    fn take(self, entry: &Entry) -> Option<RawFd> {
        let fd = self.fd?;
        if self.ino == entry.attr.ino && entry.layout.is_single() {
            return Some(fd);
        }
        close(fd);
        None
    }

    /// Removes the backing file again; false when something may be left.
    fn undo(self, target: RawFd) -> bool {
        let Some(fd) = self.fd else { return true };
        close(fd);
        // SAFETY: the name is NUL-terminated.
        unsafe { libc::unlinkat(target, BackingName::new(self.ino, 0, 0).as_c_str().as_ptr(), 0) == 0 }
    }
}

/// How a file that was found, or made, is opened.
enum Way {
    /// It is: by this descriptor.
    Opened(RawFd),
    /// By the kernel, which reaches it in the pool's mount by the path that was written.
    ByMount,
    /// By the kernel, at the path that was written, where it may wait for another end.
    AtFifo,
}

impl Pool {
    /// `openat`: of a regular file its backing descriptor, of a directory the mount's or an anchor, of a FIFO or device the kernel's.
    /// `mode` has the umask applied. All of O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_CLOEXEC, O_NOFOLLOW, O_DIRECTORY,
    /// O_TMPFILE and O_PATH mean what they do on a local file system. A file of another node is opened in the pool's mount.
    pub fn open(&self, place: Place<'_>, flags: i32, mode: u32, escape: &mut PathBuffer) -> Door<RawFd> {
        for _ in 0..ATTEMPTS {
            match self.open_with(place, flags, mode, escape, true)? {
                Way::Opened(fd) => return Ok(fd),
                Way::ByMount | Way::AtFifo => {
                    let flags = flags & !(libc::O_CREAT | libc::O_EXCL);
                    match open_at(libc::AT_FDCWD, escape.as_c_str(), flags) {
                        // Removed since its name was looked at, which may be another file's by now.
                        Err(Code::NotFound) => {}
                        result => return Ok(result?),
                    }
                }
            }
        }
        Err(Code::NotFound.into())
    }

    /// [`Pool::open`] for a caller that repeats opens on the kernel's paths: a file of another node is [`Fail::Escape`] with
    /// its path in the pool's mount, if there is one. And where opening a FIFO would wait for somebody at
    /// its other end, it is [`Fail::Escape`] with the backing file's path, so that the wait is the caller's.
    pub fn open_unwaiting(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        escape: &mut PathBuffer,
    ) -> Door<RawFd> {
        match self.open_with(place, flags, mode, escape, false)? {
            Way::Opened(fd) => Ok(fd),
            Way::ByMount | Way::AtFifo => Err(Fail::Escape),
        }
    }

    fn open_with(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        escape: &mut PathBuffer,
        waits: bool,
    ) -> Door<Way> {
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            return self.open_temporary(place, flags, mode, escape).map(Way::Opened);
        }
        let create = flags & libc::O_CREAT != 0;
        let exclusive = create && flags & libc::O_EXCL != 0;
        let follow = flags & libc::O_NOFOLLOW == 0 && !exclusive;
        if create && place.path.last() == Some(&b'/') {
            return Err(Code::IsDirectory.into());
        }
        for attempt in 0..ATTEMPTS {
            // The first attempt creates without a look-up where the board does not know the name.
            let unseen = create && attempt == 0;
            let result = match self.walk_to(place, follow, unseen, escape)? {
                Target::Missing(dir, name) if create => {
                    match self.open_new(&dir, &name, flags, (mode, exclusive, unseen), escape) {
                        Err(Code::AccessDenied | Code::Invalid | Code::Exists | Code::NoSpace) if unseen => {
                            continue
                        }
                        result => result.map(|fd| fd.map_or(Way::ByMount, Way::Opened)),
                    }
                }
                Target::Missing(..) => return Err(Code::NotFound.into()),
                Target::Found(_) if exclusive => return Err(Code::Exists.into()),
                Target::Found(found) if found.kind == Kind::Symlink => {
                    return if flags & libc::O_PATH != 0 {
                        Err(Code::NotSupported.into())
                    } else if flags & libc::O_DIRECTORY != 0 {
                        Err(Code::NotDirectory.into())
                    } else {
                        Err(Code::TooManySymlinks.into())
                    };
                }
                Target::Found(found) => match self.get_attr(found.ino) {
                    Ok(entry) if !waits && waits_for_other_end(&entry, flags) => {
                        self.lead_to_fifo(&entry, flags, escape).map(|()| Way::AtFifo)
                    }
                    // The kernel has no descriptor for what is on another node, but by the mount.
                    Ok(entry) if self.needs_mount(&entry) => {
                        self.lead_to_mount(&entry, escape).map(|()| Way::ByMount)
                    }
                    Ok(entry) => self.open_entry(&entry, flags).map(Way::Opened),
                    Err(Code::NotFound) => Err(Code::Stale),
                    Err(code) => Err(code),
                },
            };
            match result {
                // Removed between look-up and open: the name may be another file's by now, or nobody's.
                Err(Code::Stale) => continue,
                Err(Code::NotFound) if create => continue,
                result => return Ok(result?),
            }
        }
        Err(Code::NotFound.into())
    }

    /// Makes a file: its descriptor, or none when `by_mount` is where the kernel reaches it.
    fn open_new(
        &self,
        dir: &Dir,
        name: &Name,
        flags: i32,
        (mode, exclusive, ahead): (u32, bool, bool),
        by_mount: &mut PathBuffer,
    ) -> Result<Option<RawFd>, Code> {
        dir.check(self, WRITE | EXECUTE)?;
        if flags & libc::O_DIRECTORY != 0 {
            return Err(Code::Invalid);
        }
        let mut layout = self.layout_unless_set()?;
        if self.wishes_elsewhere(layout.as_ref()) && !self.can_open_by_mount(mode, flags, by_mount) {
            layout = self.layout_here_unless_set()?;
        }
        let elsewhere = self.wishes_elsewhere(layout.as_ref());
        let file = NewFile {
            parent: dir.ino,
            name: name.as_bytes(),
            mode: mode & 0o7777,
            exclusive,
            layout,
            ahead: ahead && self.has_entries_here(dir.ino) && !elsewhere,
        };
        let made = match self.create_file(caller(), &file, flags)? {
            Made::AsSet(above) => match self.open_new_as_set(&file, &above, flags, by_mount)? {
                Some(made) => made,
                None => return Ok(None),
            },
            made => made,
        };
        match made {
            Made::New(_, Ok(fd)) => Ok(Some(fd)),
            Made::New(entry, Err(code)) => {
                let code = match code {
                    Code::NotSupported if elsewhere => match self.lead_to_mount(&entry, by_mount) {
                        Ok(()) => return Ok(None),
                        Err(code) => code,
                    },
                    code => code,
                };
                // Out of descriptors or of space: an open that fails leaves no name behind.
                let _ = self.unlink_in(dir.ino, name.as_bytes());
                Err(code)
            }
            Made::Old(_) if exclusive => Err(Code::Exists),
            Made::Old(entry) if entry.attr.is_symlink() || self.needs_mount(&entry) => Err(Code::Stale),
            Made::Old(entry) => self.open_entry(&entry, flags).map(Some),
            Made::AsSet(_) => Err(Code::Malformed),
        }
    }

    /// True when who makes a file can open it again by the mount, where `path` leads then.
    #[cold]
    fn can_open_by_mount(&self, mode: u32, flags: i32, path: &mut PathBuffer) -> bool {
        let me = caller();
        permits((mode & 0o7777, me.uid, me.gid), wanted(flags), false) && self.find_mount(path).is_some()
    }

    /// Makes a file in a directory that says how its files lie; none when it is made and `by_mount` says where the kernel reaches
    /// it. Where no descriptor could be had of such a file, without a mount or as its maker may not open it again, it has one
    /// backing file here.
    #[cold]
    fn open_new_as_set(
        &self,
        file: &NewFile<'_>,
        above: &Entry,
        flags: i32,
        by_mount: &mut PathBuffer,
    ) -> Result<Option<Made>, Code> {
        let mut layout = self.layout_to_open(above)?;
        let me = caller();
        if !self.is_one_here(&layout) {
            if self.can_open_by_mount(file.mode, flags, by_mount) {
                let (mode, exclusive) = (file.mode, file.exclusive);
                let (entry, created) =
                    self.create_entry(file.parent, file.name, mode, exclusive, Some(layout))?;
                return match created {
                    true => self.lead_to_mount(&entry, by_mount).map(|()| None),
                    false => Ok(Some(Made::Old(entry))),
                };
            }
            layout = self.layout_here()?;
        }
        self.create_file(me, &NewFile { layout: Some(layout), ahead: false, ..*file }, flags).map(Some)
    }

    /// Asks for a file. When it was made, its backing file is too, and the descriptor or why there is none comes along.
    fn create_file(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        let attached = self.attached()?;
        let (ring, alive) = (&attached.ring, || self.is_alive(attached));
        let claim = ring.claim(&alive).map_err(|failure| self.failed(attached, failure))?;
        let number = Some(Ino(claim.kept())).filter(|ino| file.ahead && *ino != Ino(0));
        debug_assert!(number.is_none() || self.is_served_here(file.parent));
        let mut message = [0; SHORT_REQUEST_BYTES];
        // Numbers in reserve are this node's.
        let request = if self.has_entries_here(file.parent) {
            file.request(number)
        } else {
            file.request_without_reserve()
        };
        let n = request.encode(caller, &mut message)?;
        claim.post(&message[..n]);
        // While the daemon is at it.
        let target = attached.target_at(file.target_index());
        let ahead = number.map(|ino| Ahead::make(target, ino, flags));
        let mut buffer = [0; SHORT_REPLY_BYTES];
        let reply = claim.finish(&mut buffer, &alive, |reply, claim| {
            let reply = Reply::decode(reply);
            if let Ok(Reply::Created { entry, created: true, next }) = reply {
                if let Some(next) = next {
                    claim.keep(next.0);
                } else if number.is_some() {
                    claim.keep(0);
                }
                // Made before the slot carries another request: until then the daemon keeps an unlink by somebody
                // else from forgetting the backing file that is about to appear.
                let fd = match ahead.and_then(|ahead| ahead.take(&entry)) {
                    Some(fd) => {
                        remember_opened(&entry.attr, fd);
                        Ok(fd)
                    }
                    None => self.open_backing_new(&entry, flags),
                };
                return Ok(Ok(Made::New(entry, fd)));
            }
            // The number stays in reserve, unless something may be left under it or the daemon knows nothing of it.
            let undone = ahead.is_none_or(|ahead| ahead.undo(target));
            if !undone || reply == Err(Code::Stale) {
                claim.keep(0);
            }
            match reply? {
                Reply::Created { entry, .. } => Ok(Ok(Made::Old(entry))),
                Reply::Entry(above) => Ok(Ok(Made::AsSet(above))),
                Reply::Elsewhere { ino, .. } => Ok(Err(ino)),
                _ => Err(Code::Malformed),
            }
        });
        let made = reply.map_err(|failure| {
            // Whether the file was made is not known, so what was made for it stays: the daemon removes it if not.
            if let Some(fd) = ahead.and_then(|ahead| ahead.fd) {
                close(fd);
            }
            self.failed(attached, failure)
        })??;
        made.or_else(|ino| self.entry_elsewhere(ino).map(Made::Old))
    }

    /// A file of another node that a name leads to; [`Code::Stale`] when it is gone since the name was read.
    fn entry_elsewhere(&self, ino: Ino) -> Result<Entry, Code> {
        self.get_attr(ino).map_err(|code| if code == Code::NotFound { Code::Stale } else { code })
    }

    /// Opens the backing file of a file that was just made, with the caller's access whatever its mode.
    fn open_backing_new(&self, entry: &Entry, flags: i32) -> Result<RawFd, Code> {
        if !self.is_one_here(&entry.layout) {
            return Err(Code::NotSupported);
        }
        let name = BackingName::new(entry.attr.ino, 0, 0);
        let attached = self.attached()?;
        let target = || attached.target_of(&entry.layout, 0, 0);
        let flags = flags & KERNEL_FLAGS | libc::O_CREAT;
        let opened = match open_at(target(), name.as_c_str(), flags) {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                open_at(target(), name.as_c_str(), flags)
            }
            // A tmpfs of the pool's own user namespace lets only the pool's user and group make files; others may use
            // what the daemon makes.
            Err(Code::Overflow) => {
                self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino })?;
                open_at(target(), name.as_c_str(), flags & !libc::O_CREAT)
            }
            result => result,
        };
        if let Ok(fd) = opened {
            remember_opened(&entry.attr, fd);
        }
        opened
    }

    /// Opens an existing inode: permission, kind, data, truncation. [`Code::Stale`] when it must be looked up again.
    pub(crate) fn open_entry(&self, entry: &Entry, flags: i32) -> Result<RawFd, Code> {
        let attr = &entry.attr;
        if !permits((attr.mode, attr.uid, attr.gid), wanted(flags), false) {
            return Err(Code::AccessDenied);
        }
        match attr.kind() {
            Kind::Directory => {
                let writes =
                    flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
                if writes && flags & libc::O_PATH == 0 {
                    return Err(Code::IsDirectory);
                }
                self.open_directory(attr.ino, flags)
            }
            _ if flags & libc::O_DIRECTORY != 0 => Err(Code::NotDirectory),
            Kind::Symlink => Err(Code::TooManySymlinks),
            Kind::Socket if flags & libc::O_PATH == 0 => Err(Code::NoDevice),
            Kind::File if !entry.layout.is_single() => {
                // A descriptor is of one backing file: the file gets one, and is looked up again.
                let truncates = flags & libc::O_TRUNC != 0 && flags & libc::O_PATH == 0;
                self.make_single(attr.ino, truncates)?;
                Err(Code::Stale)
            }
            Kind::File => {
                let fd = self.open_backing(entry, flags)?;
                if flags & libc::O_TRUNC != 0 && flags & libc::O_PATH == 0 {
                    if let Err(code) = self.truncate_opened(entry, fd, flags) {
                        close(fd);
                        return Err(code);
                    }
                }
                Ok(fd)
            }
            _ => self.open_backing(entry, flags),
        }
    }

    /// The path of a FIFO's backing file, which is there.
    fn lead_to_fifo(&self, entry: &Entry, flags: i32, path: &mut PathBuffer) -> Result<(), Code> {
        close(self.open_entry(entry, flags & libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_PATH)?);
        if !permits((entry.attr.mode, entry.attr.uid, entry.attr.gid), wanted(flags), false) {
            return Err(Code::AccessDenied);
        }
        self.path_of_backing(entry, path)
    }

    fn truncate_opened(&self, entry: &Entry, fd: RawFd, flags: i32) -> Result<(), Code> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            // SAFETY: plain system call on an open descriptor.
            errno::check(unsafe { libc::ftruncate(fd, 0) })?;
            return Ok(());
        }
        let writable = self.open_backing(entry, libc::O_WRONLY | libc::O_CLOEXEC)?;
        // SAFETY: as above.
        let result = errno::check(unsafe { libc::ftruncate(writable, 0) });
        close(writable);
        result.map(|_| ())
    }

    /// The descriptor of a file's one backing file; with a flag that writes, the file is dirty when it returns.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for a striped file, which has no one descriptor, and for one of another node, which has none
    /// here; [`Code::Stale`] when it was removed meanwhile.
    pub fn open_backing(&self, entry: &Entry, flags: i32) -> Result<RawFd, Code> {
        if entry.attr.is_file() && !entry.layout.is_single() || !self.is_here(&entry.layout) {
            return Err(Code::NotSupported);
        }
        let fd = self.open_stripe(entry, 0, 0, flags & KERNEL_FLAGS)?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY && flags & libc::O_PATH == 0;
        if writes && entry.attr.is_file() && entry.attr.flags & FLAG_DIRTY == 0 {
            if let Err(code) = self.ask_entry(&Request::MarkDirty { ino: entry.attr.ino }) {
                close(fd);
                return Err(if code == Code::NotFound { Code::Stale } else { code });
            }
        }
        remember_opened(&entry.attr, fd);
        Ok(fd)
    }

    /// Opens one backing file; asks the daemon for it when it is not there.
    pub(crate) fn open_stripe(
        &self,
        entry: &Entry,
        component: usize,
        stripe: u16,
        flags: i32,
    ) -> Result<RawFd, Code> {
        let name = BackingName::new(entry.attr.ino, entry.layout.file_number(component), stripe);
        let attached = self.attached()?;
        let target = || attached.target_of(&entry.layout, component, stripe);
        let open = || open_at(target(), name.as_c_str(), flags);
        match open() {
            Ok(fd) => return Ok(fd),
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory) => {
                if attached.target_was_lost(self.address()) {
                    if let Ok(fd) = open() {
                        return Ok(fd);
                    }
                }
            }
            // Made under a umask that hides it from its owner; the daemon puts that right.
            Err(Code::AccessDenied) => {}
            Err(code) => return Err(code),
        }
        // Its home makes what is missing of its own; the backing file of an inode of another node is this client's to make.
        let made = match self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino }) {
            Ok(_) if !self.is_served_here(entry.attr.ino) => {
                open_at(target(), name.as_c_str(), flags | libc::O_CREAT).map(close)
            }
            asked => asked.map(|_| ()),
        };
        match made {
            // Absent again: unlinked meanwhile.
            Ok(_) => open().map_err(|code| if code == Code::NotFound { Code::Stale } else { code }),
            Err(Code::NotFound) => Err(Code::Stale),
            Err(code) => Err(code),
        }
    }

    /// A descriptor for a directory: the mount's, or an anchor. One that only names it is an anchor: it carries no mark.
    fn open_directory(&self, ino: Ino, flags: i32) -> Result<RawFd, Code> {
        let flags = flags & (libc::O_CLOEXEC | libc::O_PATH | libc::O_NOATIME | libc::O_NONBLOCK);
        let names = flags & libc::O_PATH != 0;
        let mounted = (!names).then(|| self.open_mounted(ino, libc::O_RDONLY | libc::O_DIRECTORY | flags));
        match mounted.flatten() {
            Some(fd) => {
                DIRECTORIES.fetch_add(1, Ordering::Relaxed);
                Ok(fd)
            }
            None => self.open_anchor(ino, flags),
        }
    }

    /// An anchor: of an empty directory on the target that is removed at once, whose name carries
    /// the inode. The kernel's dup, fork, exec and fchdir work on it, and nothing can be made in it by mistake.
    pub(crate) fn open_anchor(&self, ino: Ino, flags: i32) -> Result<RawFd, Code> {
        let attached = self.attached()?;
        // SAFETY: cannot fail.
        let pid = unsafe { libc::getpid() } as u32;
        // The session is random: processes of other PID namespaces have the same numbers, and killed ones leave anchors.
        let number = attached.reply.session.wrapping_add(DIRECTORIES.fetch_add(1, Ordering::Relaxed));
        let name = AnchorName::new(ino, pid, number);
        let name = name.as_c_str();
        let make = || {
            // SAFETY: the name is NUL-terminated.
            errno::check(unsafe { libc::mkdirat(attached.target(), name.as_ptr(), 0o700) })
        };
        match make() {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                make()?
            }
            result => result?,
        };
        let open = || open_at(attached.target(), name, libc::O_RDONLY | libc::O_DIRECTORY | flags);
        let fd = match open() {
            // A daemon that has just started removes what killed clients left, and did not know this one.
            Err(Code::NotFound) => make().and_then(|_| open()),
            result => result,
        };
        // SAFETY: as above.
        unsafe { libc::unlinkat(attached.target(), name.as_ptr(), libc::AT_REMOVEDIR) };
        fd
    }

    /// Makes a file with one backing file here, or opens the one that is there, with a descriptor to its backing file (read-write,
    /// and `flags` of O_APPEND, O_DIRECT...). The flag tells whether it was made.
    ///
    /// # Errors
    /// [`Code::Exists`] with `exclusive`; [`Code::Stale`] when the name has come to be a file of which there is no descriptor.
    pub fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        flags: i32,
    ) -> Result<(Entry, bool, OwnedFd), Code> {
        let layout = self.layout_in(None)?;
        let file = NewFile { parent, name, mode, exclusive, layout, ahead: self.has_entries_here(parent) };
        let flags = flags | libc::O_RDWR | libc::O_CLOEXEC;
        let made = self.create_numbered(caller, &file, flags)?;
        match self.opened_new(&file, made, flags)? {
            (entry, created, Some(fd)) => Ok((entry, created, fd)),
            _ => Err(Code::Stale),
        }
    }

    /// The same as the directory says. Without a descriptor when the file is not one backing file of this node: for
    /// [`Pool::open_file`].
    pub fn create_as_set(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        flags: i32,
    ) -> Result<(Entry, bool, Option<OwnedFd>), Code> {
        let layout = self.layout_unless_set()?;
        let ahead = self.has_entries_here(parent) && !self.wishes_elsewhere(layout.as_ref());
        let mut file = NewFile { parent, name, mode, exclusive, layout, ahead };
        let flags = flags | libc::O_RDWR | libc::O_CLOEXEC;
        let mut made = self.create_numbered(caller, &file, flags)?;
        if let Made::AsSet(above) = made {
            file = NewFile { layout: Some(self.layout_to_open(&above)?), ahead: false, ..file };
            made = self.create_file(caller, &file, flags)?;
        }
        self.opened_new(&file, made, flags)
    }

    fn create_numbered(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        match self.create_file(caller, file, flags) {
            // The daemon knew nothing of the number in reserve.
            Err(Code::Stale) => self.create_file(caller, &NewFile { ahead: false, ..*file }, flags),
            result => result,
        }
    }

    fn opened_new(
        &self,
        file: &NewFile<'_>,
        made: Made,
        flags: i32,
    ) -> Result<(Entry, bool, Option<OwnedFd>), Code> {
        use std::os::fd::FromRawFd;
        let (entry, created, fd) = match made {
            Made::New(entry, Ok(fd)) => (entry, true, fd),
            // Its backing files are made when they are opened.
            Made::New(entry, Err(Code::NotSupported)) => return Ok((entry, true, None)),
            Made::New(_, Err(code)) => {
                let _ = self.unlink_in(file.parent, file.name);
                return Err(code);
            }
            Made::Old(entry) if self.needs_mount(&entry) => return Ok((entry, false, None)),
            Made::Old(entry) => (entry, false, self.open_entry(&entry, flags)?),
            Made::AsSet(_) => return Err(Code::Malformed),
        };
        // SAFETY: the descriptor is new and ours.
        Ok((entry, created, Some(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Makes a file of any layout without opening it; its backing files are made by the daemon when they are opened.
    pub fn create_entry(
        &self,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        layout: Option<Layout>,
    ) -> Result<(Entry, bool), Code> {
        let layout = self.layout_in(layout)?;
        let file = NewFile { parent, name, mode, exclusive, layout, ahead: false };
        let request = file.request_without_reserve();
        let made = self.ask_as(caller(), &request, |reply| match reply {
            Reply::Created { entry, created, .. } => Ok(Ok((entry, created))),
            Reply::Elsewhere { ino, .. } => Ok(Err(ino)),
            _ => Err(Code::Malformed),
        })?;
        made.or_else(|ino| Ok((self.entry_elsewhere(ino)?, false)))
    }
}
