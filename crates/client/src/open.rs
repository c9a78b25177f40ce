//! Open: a file's own backing descriptor, or a directory's: the mount's, or an anchor.
//!
//! For write it is open first, mark second, hand out third: the backing file is opened without O_TRUNC, the daemon is
//! asked to mark the file dirty if it is clean, then it is truncated, then the program gets the descriptor. ENOENT of
//! the backing file means that it was never made, was released or is gone, and the daemon knows which.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_data::{AnchorName, BackingName};
use forebay_types::{Code, Entry, Ino, Kind, Request, FLAG_DIRTY};

use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Fail, Pool};
use crate::remembered::remember_opened;
use crate::walk::{permits, Target, READ, WRITE};

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
    /// `openat`: of a regular file its backing descriptor, of a directory the mount's or an anchor, of a FIFO or device
    /// the kernel's. `mode` has the umask applied. All of O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_CLOEXEC, O_NOFOLLOW,
    /// O_DIRECTORY, O_TMPFILE and O_PATH mean what they do on a local file system. A file of another node is opened in
    /// the pool's mount.
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

    /// [`Pool::open`] for a caller that repeats opens on the kernel's paths: a file of another node is [`Fail::Escape`]
    /// with its path in the pool's mount, if there is one. And where opening a FIFO would wait for somebody at its
    /// other end, it is [`Fail::Escape`] with the backing file's path, so that the wait is the caller's.
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
        // Its home makes what is missing of its own; the backing file of an inode of another node is this client's to
        // make.
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

    /// A descriptor for a directory: the mount's, or an anchor. One that only names it is an anchor: it carries no
    /// mark.
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
        // The session is random: processes of other PID namespaces have the same numbers, and killed ones leave
        // anchors.
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
}
