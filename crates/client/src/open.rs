//! Opens files, directories and other inodes. The descriptor of a file is that of its backing file; the descriptor of a
//! directory belongs to the mount or is an anchor, as is one of a symbolic link (O_PATH with O_NOFOLLOW).
//!
//! An open for writing takes these steps in order: open the backing file without O_TRUNC; mark the file dirty if it is
//! clean; truncate; return the descriptor. A file of an attached tree may be released or drained at any time: it is
//! restored first if it is not resident, and its attributes are read again after the open, which starts over if they
//! have another epoch. So no descriptor of a file that was released is handed out, and no write goes unmarked. The creator
//! of a file does the same (`making.rs`). If opening the backing file fails with ENOENT, it was never created, or was
//! removed with the file. The daemon knows which.
//!
//! A large released file is opened for reading by the pool's mount, if there is one: its reads wait for what they read
//! alone (`ranges.rs`).

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_data::{AnchorName, BackingName};
use forebay_types::limits::PATH_MAX;
use forebay_types::{Attr, Code, Entry, Ino, Kind, Request, FLAG_ATTACHED};

use crate::connection::Role;
use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Fail, Pool};
use crate::remembered::remember_opened;
use crate::walk::{permits, Target, READ, WRITE};

/// Mode of every backing file. The inode's own mode is in the shard.
pub(crate) const BACKING_MODE: libc::mode_t = 0o700;
/// A flag beside those of open(2), for a descriptor of a file's only backing file although the pool emulates a medium.
pub(crate) const BACKING_FILE: i32 = 1 << 30;
/// Flags that are passed to the kernel unchanged.
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
    | libc::O_NOFOLLOW
    | libc::O_ASYNC;
/// What counts beside O_PATH: the kernel ignores all other flags of open(2) then.
const PATH_FLAGS: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
/// How often an open starts again when the file is replaced meanwhile.
pub(crate) const ATTEMPTS: u32 = 4096;

static DIRECTORIES: AtomicU64 = AtomicU64::new(0);

/// Number of directory descriptors that this process has opened.
#[inline]
pub fn directories_opened() -> u64 {
    DIRECTORIES.load(Ordering::Relaxed)
}

pub(crate) fn open_at(dir: RawFd, name: &CStr, flags: i32) -> Result<RawFd, Code> {
    // A FIFO's open may be interrupted, and the program handles that.
    errno::check(forebay_ring::opening::open_at(dir, name, flags, BACKING_MODE))
}

/// Permissions that opening with `flags` requires.
pub(crate) fn wanted(flags: i32) -> u32 {
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

/// True if opening with `flags` can only read.
pub(crate) fn reads_alone(flags: i32) -> bool {
    flags & (libc::O_ACCMODE | libc::O_TRUNC) == libc::O_RDONLY
}

/// True if a descriptor that is opened with `flags` can write.
pub(crate) fn writes(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY && flags & libc::O_PATH == 0
}

/// True if opening with `flags` may wait for the other end.
fn waits_for_other_end(entry: &Entry, flags: i32) -> bool {
    let never = libc::O_NONBLOCK | libc::O_PATH | libc::O_DIRECTORY;
    // A process that opens both ends does not wait.
    let one_end = flags & libc::O_ACCMODE != libc::O_RDWR;
    entry.attr.kind() == Kind::Fifo && one_end && flags & never == 0
}

/// True if a file was marked dirty, and nothing else happened to it.
fn is_next_epoch(before: &Entry, marked: &Entry) -> bool {
    marked.attr.is_resident() && marked.attr.epoch() == before.attr.epoch() + 1
}

/// Why a create gives no descriptor.
pub(crate) struct NotOpened {
    pub(crate) code: Code,
    /// This create made the file, and it keeps its name.
    pub(crate) is_made: bool,
}

impl From<Code> for NotOpened {
    fn from(code: Code) -> NotOpened {
        NotOpened { code, is_made: false }
    }
}

impl NotOpened {
    pub(crate) fn made(code: Code) -> NotOpened {
        NotOpened { code, is_made: true }
    }
}

/// True if the store has data of a released file: a new file may be released before its creator has opened it.
pub(crate) fn needs_data(entry: &Entry) -> bool {
    entry.attr.size > 0
}

pub(crate) fn close(fd: RawFd) {
    // By number: libc's close is a thread cancellation point.
    // SAFETY: the descriptor is ours, and no one else uses it yet.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// How a file that was found or created is opened.
enum Way {
    /// It is open, with this descriptor.
    Opened(RawFd),
    /// By the kernel, at the path in the pool's mount that was stored.
    ByMount,
    /// By the kernel, at the path that was stored, where it may wait for the other end.
    AtFifo,
}

impl Pool {
    /// `openat`. The descriptor is that of the backing file for a regular file, the mount's or an anchor for a
    /// directory, and the kernel's for a FIFO or device. The umask is already applied to `mode`. All of O_CREAT,
    /// O_EXCL, O_TRUNC, O_APPEND, O_CLOEXEC, O_NOFOLLOW, O_DIRECTORY, O_TMPFILE and O_PATH have the same meaning as on
    /// a local file system. A file of another node is opened in the pool's mount.
    pub fn open(&self, place: Place<'_>, flags: i32, mode: u32, escape: &mut PathBuffer) -> Door<RawFd> {
        for _ in 0..ATTEMPTS {
            match self.open_with(place, flags, mode, escape, true)? {
                Way::Opened(fd) => return Ok(fd),
                Way::ByMount | Way::AtFifo => {
                    let flags = flags & !(libc::O_CREAT | libc::O_EXCL | BACKING_FILE);
                    match open_at(libc::AT_FDCWD, escape.as_c_str(), flags) {
                        // Removed since its name was looked up. The name may lead to another file by now.
                        Err(Code::NotFound) => {}
                        result => return Ok(result?),
                    }
                }
            }
        }
        Err(Code::NotFound.into())
    }

    /// [`Pool::open`] for a caller that repeats opens on the kernel's paths. A file of another node gives
    /// [`Fail::Escape`] with its path in the pool's mount, if there is one. A FIFO whose open would wait for the other
    /// end gives [`Fail::Escape`] with the backing file's path, so that the caller waits.
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
        let flags = if flags & libc::O_PATH != 0 { flags & (PATH_FLAGS | BACKING_FILE) } else { flags };
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            return self.open_temporary(place, flags, mode, escape).map(Way::Opened);
        }
        let create = flags & libc::O_CREAT != 0;
        // As in Linux since 6.4.
        if create && flags & libc::O_DIRECTORY != 0 {
            return Err(Code::Invalid.into());
        }
        let exclusive = create && flags & libc::O_EXCL != 0;
        let follow = flags & libc::O_NOFOLLOW == 0 && !exclusive;
        if create && !place.path.is_empty() && place.path.iter().all(|&b| b == b'/') {
            return Err(Code::IsDirectory.into());
        }
        for attempt in 0..ATTEMPTS {
            // The first attempt creates without a look-up if the board does not have the name.
            let unseen = create && attempt == 0;
            let result = match self.walk_to(place, follow, unseen, escape)? {
                Target::Missing(dir, name) if create => {
                    let hands_out = flags & BACKING_FILE == 0 && self.role() == Role::Host;
                    if hands_out && self.is_paced() {
                        self.sees_mount(escape)?;
                    }
                    match self.open_new(&dir, &name, flags, (mode, exclusive, unseen), escape) {
                        Ok(fd) => Ok(fd.map_or(Way::ByMount, Way::Opened)),
                        Err(NotOpened {
                            code: Code::AccessDenied | Code::Invalid | Code::Exists | Code::NoSpace,
                            is_made: false,
                        }) if unseen => continue,
                        Err(failed) => Err(failed.code),
                    }
                }
                Target::Missing(..) => return Err(Code::NotFound.into()),
                Target::Found(_) if exclusive => return Err(Code::Exists.into()),
                Target::Found(found) if found.kind == Kind::Symlink => {
                    if flags & libc::O_DIRECTORY != 0 {
                        return Err(Code::NotDirectory.into());
                    } else if flags & libc::O_PATH == 0 {
                        return Err(Code::TooManySymlinks.into());
                    }
                    self.open_symlink(found.ino, flags).map(Way::Opened)
                }
                Target::Found(found) => match self.attr_to_open(found.ino, flags) {
                    Ok(entry) if !waits && waits_for_other_end(&entry, flags) => {
                        self.lead_to_fifo(&entry, flags, escape).map(|()| Way::AtFifo)
                    }
                    // The kernel has a descriptor for a file on another node only through the mount.
                    Ok(entry) if self.needs_mount(&entry) || self.hands_out_paced(&entry, flags) => {
                        self.mount_path_of(&entry, escape).map(|()| Way::ByMount)
                    }
                    Ok(entry) => match self.open_better_by_mount(&entry, flags) {
                        Some(fd) => Ok(Way::Opened(fd)),
                        None => self.open_entry(&entry, flags).map(Way::Opened),
                    },
                    Err(Code::NotFound) => Err(Code::Stale),
                    Err(code) => Err(code),
                },
            };
            match result {
                // Removed between look-up and open. The name may lead to another file by now, or be gone.
                Err(Code::Stale) => continue,
                Err(Code::NotFound) if create => continue,
                result => return Ok(result?),
            }
        }
        Err(Code::NotFound.into())
    }

    /// The attributes with which an inode is opened. In a pool of several nodes a released file is restored first, or
    /// placed here if it can be read while it is restored: then it is known which node has its data.
    fn attr_to_open(&self, ino: Ino, flags: i32) -> Result<Entry, Code> {
        let entry = self.get_attr(ino)?;
        let attr = &entry.attr;
        match attr.is_resident()
            || !attr.is_file()
            || !self.spans_nodes()
            || !permits((attr.mode, attr.uid, attr.gid), wanted(flags), false)
        {
            true => Ok(entry),
            false if reads_alone(flags) => self.near(&entry),
            false => self.resident(&entry),
        }
    }

    /// Opens an existing inode: checks permission and kind, opens the backing file, truncates. [`Code::Stale`] if it
    /// must be looked up again.
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
                // A descriptor refers to one backing file: the file is converted to one and looked up again.
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

    /// Stores the path of a FIFO's backing file, which is created if missing.
    fn lead_to_fifo(&self, entry: &Entry, flags: i32, path: &mut PathBuffer) -> Result<(), Code> {
        close(self.open_entry(entry, flags & libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_PATH)?);
        if !permits((entry.attr.mode, entry.attr.uid, entry.attr.gid), wanted(flags), false) {
            return Err(Code::AccessDenied);
        }
        self.path_of_backing(entry, path)
    }

    fn truncate_opened(&self, entry: &Entry, fd: RawFd, flags: i32) -> Result<(), Code> {
        // Access mode 3 needs both permissions and gives neither.
        if matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR) {
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

    /// The descriptor of a file's only backing file. If `flags` allow writing, the file is marked dirty before the
    /// function returns.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for a striped file, which has several, and for a file of another node; [`Code::Stale`] if
    /// the file was removed meanwhile.
    pub fn open_backing(&self, entry: &Entry, flags: i32) -> Result<RawFd, Code> {
        if entry.attr.is_file() && !entry.layout.is_single() || !self.is_here(&entry.layout) {
            return Err(Code::NotSupported);
        }
        let (writes, reads_alone) = (writes(flags), reads_alone(flags));
        let mut entry = self.resident_here(entry, reads_alone)?;
        for _ in 0..ATTEMPTS {
            let fd = self.open_stripe(&entry, 0, 0, flags & KERNEL_FLAGS)?;
            match self.entry_to_open_again(&entry, writes) {
                Ok(None) => {
                    remember_opened(&entry.attr, fd);
                    return Ok(fd);
                }
                Ok(Some(now)) => {
                    close(fd);
                    entry = self.resident_here(&now, reads_alone)?;
                }
                Err(code) => {
                    close(fd);
                    return Err(code);
                }
            }
        }
        Err(Code::Busy)
    }

    /// The entry of a file whose data are in the pool: they are restored if they are in the backing store alone. In a
    /// pool of several nodes they come to this node, unless a restore to another one is under way. [`Code::NoAttribute`]
    /// (ENODATA) in a program that is not to have data copied, and needs some.
    #[inline]
    pub fn resident(&self, entry: &Entry) -> Result<Entry, Code> {
        match entry.attr.is_resident() || !entry.attr.is_file() {
            true => Ok(*entry),
            false => self.restore_near(entry),
        }
    }

    /// The same for an open. With `reads_alone` the store's setting may forbid the copy, or limit what a process has copied:
    /// [`Code::NoAttribute`] then too.
    #[inline]
    pub(crate) fn resident_for(&self, entry: &Entry, reads_alone: bool) -> Result<Entry, Code> {
        if entry.attr.is_resident() || !entry.attr.is_file() {
            return Ok(*entry);
        }
        // The mount asks for the process whose open it serves. Tools copy what their user named.
        if reads_alone && self.recalls() && needs_data(entry) && self.role() == Role::Host {
            self.may_recall(entry.attr.ino, std::process::id())?;
        }
        self.restore_near(entry)
    }

    /// Asks whether a process may have a released file's data copied in order to read them.
    #[cold]
    pub fn may_recall(&self, ino: Ino, process: u32) -> Result<(), Code> {
        let asked = self.request(&Request::Recall { ino, process: process.into() }, |_| Ok(()));
        asked.map_err(|code| if code == Code::NotFound { Code::Stale } else { code })
    }

    /// The same for a file whose backing file was here. [`Code::Stale`] if it is on another node by now.
    #[inline]
    fn resident_here(&self, entry: &Entry, reads_alone: bool) -> Result<Entry, Code> {
        let entry = self.resident_for(entry, reads_alone)?;
        match entry.attr.is_file() && !self.is_here(&entry.layout) {
            true => Err(Code::Stale),
            false => Ok(entry),
        }
    }

    #[cold]
    fn restore_near(&self, entry: &Entry) -> Result<Entry, Code> {
        let ino = entry.attr.ino;
        if !self.recalls() && needs_data(entry) {
            return Err(Code::NoAttribute);
        }
        self.placed_here(entry)?;
        self.restore(ino)
    }

    /// Has a file's data restored, and waits for them. [`Code::Stale`] if the file is gone; [`Code::Io`] or
    /// [`Code::TimedOut`] if the backing store fails or does not answer: the daemon and the mover limit the wait.
    #[cold]
    pub fn restore(&self, ino: Ino) -> Result<Entry, Code> {
        loop {
            match self.ask_entry(&Request::Restore { ino }) {
                Ok(entry) if !entry.attr.is_resident() => {}
                Err(Code::NotFound) => return Err(Code::Stale),
                result => return result,
            }
        }
    }

    /// Marks a file dirty that was opened for writing, and checks that it was not released meanwhile: then the entry
    /// with which the open starts over. [`Code::Stale`] if it was removed meanwhile.
    #[inline]
    pub(crate) fn entry_to_open_again(&self, entry: &Entry, writes: bool) -> Result<Option<Entry>, Code> {
        let attr = &entry.attr;
        if !attr.is_file() {
            return Ok(None);
        }
        let is_attached = attr.flags & FLAG_ATTACHED != 0;
        let same = if is_attached { self.flags_if_same_data(attr) } else { Some(attr.flags) };
        if same.is_some_and(|flags| !writes || !Attr { flags, ..*attr }.needs_mark()) {
            return Ok(None);
        }
        let now = match is_attached {
            false => *entry,
            true => match self.get_attr(attr.ino) {
                // It may have been released before it lost its name: then a restore was filling what was opened.
                Err(Code::NotFound) => return Err(Code::Stale),
                now => now?,
            },
        };
        if now.attr.epoch() != attr.epoch() || is_attached && !now.attr.is_resident() {
            return Ok(Some(now));
        }
        if !writes || !now.attr.needs_mark() {
            return Ok(None);
        }
        if self.is_here(&entry.layout) {
            self.wait_for_room(attr.ino);
        }
        match self.ask_entry(&Request::MarkDirty { ino: attr.ino }) {
            // Released meanwhile, perhaps restored too: the descriptor is of a file that is gone.
            Ok(marked) if is_attached && !is_next_epoch(&now, &marked) => Ok(Some(marked)),
            Ok(_) => Ok(None),
            Err(Code::NotFound) => Err(Code::Stale),
            Err(code) => Err(code),
        }
    }

    /// Opens one backing file. If it does not exist, the daemon creates it.
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
            // Created under a umask that hides it from its owner. The daemon corrects its mode.
            Err(Code::AccessDenied) => {}
            Err(code) => return Err(code),
        }
        // The inode's home creates its own missing backing files. This client creates a backing file here of an inode
        // of another node.
        let made = match self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino }) {
            Ok(_) if !self.is_served_here(entry.attr.ino) => {
                open_at(target(), name.as_c_str(), flags | libc::O_CREAT).map(close)
            }
            asked => asked.map(|_| ()),
        };
        match made {
            // Missing again: unlinked meanwhile.
            Ok(_) => open().map_err(|code| if code == Code::NotFound { Code::Stale } else { code }),
            Err(Code::NotFound) => Err(Code::Stale),
            Err(code) => Err(code),
        }
    }

    /// A descriptor of a directory: the mount's, or an anchor. An O_PATH descriptor is an anchor, because it cannot
    /// carry the mark.
    fn open_directory(&self, ino: Ino, flags: i32) -> Result<RawFd, Code> {
        // F_GETFL shows all but the first.
        let flags = flags
            & (libc::O_CLOEXEC
                | libc::O_PATH
                | libc::O_NOATIME
                | libc::O_NONBLOCK
                | libc::O_APPEND
                | libc::O_DIRECTORY
                | libc::O_NOFOLLOW);
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

    /// Opens an anchor: an empty directory on the target whose name contains the inode number, and which is removed at
    /// once. The kernel's dup, fork, exec and fchdir work on it, and no file can be created in it by mistake.
    pub(crate) fn open_anchor(&self, ino: Ino, flags: i32) -> Result<RawFd, Code> {
        let make = |target: RawFd, name: &CStr| {
            // SAFETY: the name is NUL-terminated.
            errno::check(unsafe { libc::mkdirat(target, name.as_ptr(), 0o700) })
        };
        self.open_made(ino, (make, libc::AT_REMOVEDIR), libc::O_RDONLY | flags)
    }

    /// Opens a symbolic link itself, with O_PATH: a link on the target with the same text, which is removed at once like an
    /// anchor. [`Code::Stale`] if the link was removed meanwhile, [`Code::NotSupported`] if its text is too long for the
    /// target (1 KiB on XFS).
    #[cold]
    fn open_symlink(&self, ino: Ino, flags: i32) -> Result<RawFd, Code> {
        let mut text = [0; PATH_MAX + 1];
        let n = self.read_link_inode(ino, &mut text[..PATH_MAX]).map_err(|code| match code {
            Code::NotFound => Code::Stale,
            code => code,
        })?;
        debug_assert!(!text[..n].contains(&0));
        let make = |target: RawFd, name: &CStr| {
            let number = libc::SYS_symlinkat;
            // SAFETY: text and name are NUL-terminated.
            errno::check(unsafe { libc::syscall(number, text.as_ptr(), target, name.as_ptr()) as i32 })
        };
        let flags = libc::O_PATH | libc::O_NOFOLLOW | flags & libc::O_CLOEXEC;
        self.open_made(ino, (make, 0), flags).map_err(|code| match code {
            Code::NameTooLong => Code::NotSupported,
            code => code,
        })
    }

    /// Makes an anchor with `make`, opens it with `flags`, and removes it, `removal` being unlinkat's flags.
    fn open_made(
        &self,
        ino: Ino,
        (make, removal): (impl Fn(RawFd, &CStr) -> Result<i32, Code>, i32),
        flags: i32,
    ) -> Result<RawFd, Code> {
        let attached = self.attached()?;
        // SAFETY: cannot fail.
        let pid = unsafe { libc::getpid() } as u32;
        // The session number is random. PIDs do not suffice: processes of other PID namespaces have the same ones, and
        // killed processes leave anchors.
        let number = attached.reply.session.wrapping_add(DIRECTORIES.fetch_add(1, Ordering::Relaxed));
        let name = AnchorName::new(ino, pid, number);
        let name = name.as_c_str();
        match make(attached.target(), name) {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                make(attached.target(), name)?
            }
            result => result?,
        };
        let open = || open_at(attached.target(), name, flags);
        let fd = match open() {
            // A daemon that has just started removes the anchors of killed clients, and does not know this one.
            Err(Code::NotFound) => make(attached.target(), name).and_then(|_| open()),
            result => result,
        };
        // SAFETY: the name is NUL-terminated.
        unsafe { libc::unlinkat(attached.target(), name.as_ptr(), removal) };
        fd
    }
}
