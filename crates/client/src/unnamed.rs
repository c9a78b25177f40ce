//! Unnamed files (O_TMPFILE), and how they get a name.
//!
//! An unnamed file exists only on the target; the shard does not know it. Naming it is atomic: first it is linked as
//! the backing file of a reserved inode number, then the shard creates inode and name in one transaction. A process
//! that dies in between leaves a backing file under a reserved number, and the daemon removes it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_data::BackingName;
use forebay_types::{Caller, Code, Entry, Ino, Kind, Layout, Reply, Request, SetAttr};

use crate::attributes::SET_GID;
use crate::descriptor::proc_fd;
use crate::errno;
use crate::making::NewFile;
use crate::open::{close, open_at, BACKING_MODE, KERNEL_FLAGS};
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Fail, Pool, SHORT_REPLY_BYTES, SHORT_REQUEST_BYTES};
use crate::remembered::{remember, remember_opened};
use crate::walk::{permits, Target, EXECUTE, WRITE};

/// Attempts to find a slot with a reserved number. Other threads may take the slots that have one.
const ATTEMPTS: u32 = 64;

/// Kernel inode of the file that a thread of this process is naming, or 0.
static NAMING: AtomicU64 = AtomicU64::new(0);
/// Checks whether another thread has finished naming, and the pause between them.
const TURNS: u32 = 1000;
const TURN_NS: i64 = 100_000;

/// The right to name a file. If two threads name one file, the second finds it named.
struct Turn;

impl Turn {
    /// Waits a bounded time: the holder may be a thread that a signal handler in this thread interrupted, or that a
    /// fork left behind.
    fn take(kernel_ino: u64) -> Turn {
        for _ in 0..TURNS {
            if NAMING.compare_exchange(0, kernel_ino, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Turn;
            }
            let pause = libc::timespec { tv_sec: 0, tv_nsec: TURN_NS };
            // SAFETY: the time is readable.
            unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, 0) };
        }
        NAMING.store(kernel_ino, Ordering::Relaxed);
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        NAMING.store(0, Ordering::Release);
    }
}

/// Sets a file's mode through /proc, because its descriptor may be an O_PATH one.
fn set_mode(fd: RawFd, mode: libc::mode_t) -> Result<(), Code> {
    let mut buffer = [0; 32];
    let link = proc_fd(fd, &mut buffer).ok_or(Code::BadDescriptor)?;
    // SAFETY: NUL-terminated.
    errno::check(unsafe { libc::fchmodat(libc::AT_FDCWD, link.as_ptr(), mode, 0) }).map(|_| ())
}

/// Makes a file the backing file of inode number `ino`. The file is unnamed, or with `from` the backing file of another
/// number: the kernel links an unnamed file only once, so it is renamed then.
fn link_backing(fd: RawFd, target: RawFd, from: Option<Ino>, ino: Ino) -> Result<(), Code> {
    let mut buffer = [0; 32];
    let link = proc_fd(fd, &mut buffer).ok_or(Code::BadDescriptor)?;
    let name = BackingName::new(ino, 0, 0);
    let (name, follow) = (name.as_c_str().as_ptr(), libc::AT_SYMLINK_FOLLOW);
    let result = match from.map(|from| BackingName::new(from, 0, 0)) {
        // SAFETY: NUL-terminated.
        None => unsafe { libc::linkat(libc::AT_FDCWD, link.as_ptr(), target, name, follow) },
        Some(from) => {
            let (from, flags) = (from.as_c_str().as_ptr(), libc::RENAME_NOREPLACE);
            // SAFETY: NUL-terminated.
            unsafe { libc::syscall(libc::SYS_renameat2, target, from, target, name, flags) as i32 }
        }
    };
    errno::check(result).map(|_| ())
}

fn unlink_backing(target: RawFd, ino: Ino) -> bool {
    // SAFETY: NUL-terminated.
    unsafe { libc::unlinkat(target, BackingName::new(ino, 0, 0).as_c_str().as_ptr(), 0) == 0 }
}

impl Pool {
    /// `open` with O_TMPFILE in the directory at `place`.
    pub(crate) fn open_temporary(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        escape: &mut PathBuffer,
    ) -> Door<RawFd> {
        if flags & libc::O_CREAT != 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
            return Err(Code::Invalid.into());
        }
        let found = self.walk_found(place, flags & libc::O_NOFOLLOW == 0, escape)?;
        if found.kind != Kind::Directory {
            return Err(Code::NotDirectory.into());
        }
        if !permits(found.permissions, WRITE | EXECUTE, false) {
            return Err(Code::AccessDenied.into());
        }
        let keep = flags & (KERNEL_FLAGS | libc::O_EXCL) | libc::O_TMPFILE;
        let attached = self.attached()?;
        if !attached.takes_files() {
            return Err(Code::NotSupported.into());
        }
        let index = attached.roomy_target();
        let fd = match open_at(attached.target_at(index), c"data", keep) {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                open_at(attached.target_at(index), c"data", keep)?
            }
            result => result?,
        };
        let (above, _, group) = found.permissions;
        if above & SET_GID != 0 {
            // Refused to a user who is not in the group: then the file has the user's own.
            // SAFETY: plain system call on our descriptor.
            unsafe { libc::syscall(libc::SYS_fchown, fd, !0u32, group) };
        }
        // SAFETY: plain system call on our descriptor.
        if let Err(code) = errno::check(unsafe { libc::fchmod(fd, mode & 0o7777) }) {
            close(fd);
            return Err(code.into());
        }
        Ok(fd)
    }

    /// Opens an unnamed regular file on the target, for reading and writing. [`Pool::name_temporary`] can name it.
    ///
    /// # Errors
    /// [`Code::NotSupported`] on a node without a target.
    pub fn make_temporary(&self, flags: i32) -> Result<OwnedFd, Code> {
        let flags =
            flags & KERNEL_FLAGS & !libc::O_ACCMODE | libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC;
        let attached = self.attached()?;
        if !attached.takes_files() {
            return Err(Code::NotSupported);
        }
        let fd = open_at(attached.target_at(attached.roomy_target()), c"data", flags)?;
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// `linkat` of a file that was opened with O_TMPFILE, by its descriptor. It becomes an inode with its current mode,
    /// owner and group.
    ///
    /// # Errors
    /// [`Code::NotFound`] if it was opened with O_EXCL, or has lost its name; [`Code::CrossDevice`] if it is not such a
    /// file on a target of this pool and node.
    pub fn link_unnamed(&self, fd: RawFd, to: Place<'_>, escape: &mut PathBuffer) -> Door<()> {
        let attached = self.attached()?;
        let kernel = errno::stat(fd)?;
        let target = attached.target_on(kernel.st_dev);
        let Some(target) = target.filter(|_| kernel.st_mode & libc::S_IFMT == libc::S_IFREG) else {
            return Err(Code::CrossDevice.into());
        };
        let _turn = Turn::take(kernel.st_ino);
        let kernel = errno::stat(fd)?;
        if let Some(ino) = self.inode_of(fd, &kernel) {
            // Another thread has named it meanwhile.
            return self.link(Place { dir: ino, path: b"" }, to, false, escape);
        }
        if kernel.st_nlink != 0 {
            return Err(Code::CrossDevice.into());
        }
        let (dir, name) = match self.walk_to(to, false, false, escape) {
            Ok(Target::Missing(dir, name)) => (dir, name),
            Ok(Target::Found(_)) => return Err(Code::Exists.into()),
            Err(Fail::Escape) => return Err(Code::CrossDevice.into()),
            Err(fail) => return Err(fail),
        };
        dir.check(self, WRITE | EXECUTE)?;
        let caller = Caller { uid: kernel.st_uid, gid: kernel.st_gid };
        // SAFETY: the caller's descriptor is open, and stays open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let entry = self.name_temporary(caller, file, dir.ino, name.as_bytes(), kernel.st_mode & 0o7777)?;
        if attached.is_stable(target) {
            remember(&kernel, entry.attr.ino);
        }
        remember_opened(&entry.attr, fd);
        Ok(())
    }

    /// Gives an unnamed file of the target its first name: it becomes the backing file of a new inode with this mode.
    /// Only one thread at a time may name a file. If another process creates the name meanwhile, the file remains
    /// unnamed for ever, because the kernel links an unnamed file only once.
    ///
    /// # Errors
    /// [`Code::CrossDevice`] in a directory of another node.
    pub fn name_temporary(
        &self,
        caller: Caller,
        file: BorrowedFd<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
    ) -> Result<Entry, Code> {
        // Its inode number is one of this node, so this node must own the directory's entries. In a wide directory, an
        // inode is created on the node that has the name's part.
        if !self.has_entries_here(parent) {
            return Err(Code::CrossDevice);
        }
        let kernel = errno::stat(file.as_raw_fd())?;
        let before = kernel.st_mode & 0o7777;
        set_mode(file.as_raw_fd(), BACKING_MODE)?;
        crate::nameless::forget(file.as_raw_fd());
        let named = self.name_as_backing(caller, (file.as_raw_fd(), kernel.st_dev), parent, name, mode);
        match named {
            // It keeps its group in a directory with the set-group-ID bit too.
            Ok(entry) if entry.attr.gid != caller.gid => {
                let set = SetAttr { gid: Some(caller.gid), ..SetAttr::default() };
                Ok(self.set_attr(entry.attr.ino, set).unwrap_or(entry))
            }
            Ok(entry) => Ok(entry),
            Err(code) => {
                let _ = set_mode(file.as_raw_fd(), before);
                Err(code)
            }
        }
    }

    fn name_as_backing(
        &self,
        caller: Caller,
        (fd, device): (RawFd, u64),
        parent: Ino,
        name: &[u8],
        mode: u32,
    ) -> Result<Entry, Code> {
        let attached = self.attached()?;
        let (ring, alive) = (&attached.ring, || self.is_alive(attached));
        let (mut message, mut buffer) = ([0; SHORT_REQUEST_BYTES], [0; SHORT_REPLY_BYTES]);
        // Any target on its file system will do.
        let index = attached.target_on(device).ok_or(Code::CrossDevice)?;
        let (target, layout) = (attached.target_at(index), Layout::single(attached.reply.node, index));
        let layout = Some(layout).filter(|_| attached.target_count() > 1);
        let mut linked = None;
        for _ in 0..ATTEMPTS {
            let claim = ring.claim(&alive).map_err(|failure| self.failed(attached, failure))?;
            let number = Ino(claim.kept());
            if number == Ino(0) {
                let n = Request::Reserve.encode(caller, &mut message)?;
                self.post(attached, &claim, &message[..n]);
                let reserved =
                    claim.finish(&mut buffer, &alive, |reply, claim| match Reply::decode(reply)? {
                        Reply::Number(number) => {
                            claim.keep(number.0);
                            Ok(())
                        }
                        _ => Err(Code::Malformed),
                    });
                reserved.map_err(|failure| self.failed(attached, failure))??;
                continue;
            }
            match link_backing(fd, target, linked, number) {
                // A file may be left under the number. The daemon cleans up a number that is given up.
                Err(Code::Exists) => {
                    claim.keep(0);
                    continue;
                }
                done => done?,
            }
            linked = Some(number);
            let new = NewFile { parent, name, mode, exclusive: true, layout, ahead: true };
            let n = new.request(Some(number)).encode(caller, &mut message)?;
            self.post(attached, &claim, &message[..n]);
            let named = claim.finish(&mut buffer, &alive, |reply, claim| {
                let reply = Reply::decode(reply);
                match reply {
                    Ok(Reply::Created { entry, created: true, next }) => {
                        claim.keep(next.map_or(0, |ino| ino.0));
                        Ok(entry)
                    }
                    // The daemon does not know the number: try another one.
                    Err(Code::Stale) => {
                        claim.keep(0);
                        Err(Code::Stale)
                    }
                    other => {
                        if !unlink_backing(target, number) {
                            claim.keep(0);
                        }
                        Err(other.err().unwrap_or(Code::Malformed))
                    }
                }
            });
            // If the daemon is gone, it is unknown whether the file was named. The backing file stays, and the daemon
            // removes it if it was not.
            match named.map_err(|failure| self.failed(attached, failure))? {
                Err(Code::Stale) => {}
                named => return named,
            }
        }
        if let Some(number) = linked {
            unlink_backing(target, number);
        }
        Err(Code::Busy)
    }
}
