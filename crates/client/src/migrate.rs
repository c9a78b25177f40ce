//! Converts a file with several backing files to one backing file, so that a process can have a kernel descriptor of
//! it.
//!
//! Write leases on all backing files keep other processes from opening them while the data are copied into an unnamed
//! file. Then the copy is linked under the name of a single backing file, which no other layout uses, the daemon
//! changes the layout, and the old backing files are unlinked. Reads before the change of layout use the old backing
//! files, later ones the new file. A process that opens the file meanwhile waits in open(2) and so breaks the lease:
//! the copy is abandoned, and the open succeeds on the unchanged file. A lock on the directory ensures that one process
//! at a time copies a file. A process that waits for that lock gives up after a while, as the one that has it may be stopped.
//!
//! A process may die or lose its leases between its request and the daemon's processing of it. Therefore:
//!
//! - The daemon changes the layout only if, at that time, a lease is held and the new name exists.
//! - A process removes a leftover file of the new name before it takes leases. It does so after the leases of a dead
//!   process are gone and the daemon has confirmed the old layout. So a lease together with the name means that the
//!   lease's holder has copied all data.
//! - A process that opens several backing files checks for the new name while it has all of them open. From then on no
//!   lease can be held, and the layout cannot change. If it changed earlier, the name exists, and the process queries
//!   the daemon.
//!
//! A process that dies leaves the old layout and at worst a copy that is never read, or the new layout, and the daemon
//! removes the old backing files. Nothing here allocates. Tests: `crates/cli/tests/spread.rs`.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use forebay_data::BackingName;
use forebay_types::limits::{CALL_TIMEOUT_MS, LEASE_TRIES};
use forebay_types::{Code, Entry, Ino, Layout, Reply, Request};

use crate::descriptor::proc_fd;
use crate::errno;
use crate::leased::{LeaseKind, LeasedFiles};
use crate::open::{close, open_at, BACKING_MODE};
use crate::pool::Pool;
use crate::stat::stat_at;

/// Bytes that are copied between two checks of the leases. An opener waits some milliseconds for them.
const COPY_BYTES: usize = 8 << 20;

/// Pauses between two tries to lock a directory that another process has locked. A conversion of a small file takes less
/// than a millisecond.
const LOCK_PAUSE_US: libc::c_uint = 100;
const LOCK_PAUSE_US_MAX: libc::c_uint = 10_000;

/// Locks a directory. False if another process has it locked.
fn lock_at_once(directory: &OwnedFd) -> Result<bool, Code> {
    // SAFETY: plain system call on a descriptor of ours.
    if unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    // SAFETY: errno of this thread.
    match unsafe { *libc::__errno_location() } {
        libc::EWOULDBLOCK => Ok(false),
        _ => Err(errno::last()),
    }
}

/// The next data of `file` at or after `from`, as a range of offsets; `None` if there are none.
fn data_behind(file: RawFd, from: u64) -> Result<Option<(u64, u64)>, Code> {
    // SAFETY: plain system calls; the descriptor's own offset is not used.
    let start = unsafe { libc::lseek(file, from as i64, libc::SEEK_DATA) };
    if start < 0 {
        // SAFETY: errno of this thread.
        return if unsafe { *libc::__errno_location() } == libc::ENXIO {
            Ok(None)
        } else {
            Err(errno::last())
        };
    }
    // SAFETY: as above.
    let end = unsafe { libc::lseek(file, start, libc::SEEK_HOLE) };
    if end < 0 {
        return Err(errno::last());
    }
    Ok(Some((start as u64, end as u64)))
}

/// Copies a range, within the kernel.
fn copy_range(from: RawFd, mut at: i64, to: RawFd, mut into: i64, mut bytes: usize) -> Result<(), Code> {
    while bytes > 0 {
        // SAFETY: both offsets outlive the call, the descriptors are ours. By number, because libc's function is a
        // thread cancellation point.
        let n = unsafe {
            libc::syscall(libc::SYS_copy_file_range, from, &raw mut at, to, &raw mut into, bytes, 0)
        };
        match n {
            0 => return Err(Code::Io),
            n if n < 0 => match errno::last() {
                Code::Interrupted => {}
                code => return Err(code),
            },
            n => bytes -= n as usize,
        }
    }
    Ok(())
}

impl Pool {
    /// Converts a file to one backing file with the same data; a file that has one is not changed. With `empty` the
    /// data are dropped.
    ///
    /// # Errors
    /// [`Code::Busy`] if another process has the file open, or another conversion in the same directory does not end for
    /// [`CALL_TIMEOUT_MS`]; [`Code::NoSpace`] if there is no space for a copy;
    /// [`Code::NotSupported`] if the target's file system has no leases, and in a pool of several nodes.
    #[cold]
    pub fn make_single(&self, ino: Ino, empty: bool) -> Result<(), Code> {
        // Leases keep out only programs of this node.
        if self.spans_nodes() {
            let entry = self.get_attr(ino)?;
            let is_done = entry.attr.is_file() && entry.layout.is_single();
            return if is_done { Ok(()) } else { Err(Code::NotSupported) };
        }
        let lock = self.lock_bucket(ino)?;
        let mut entry = self.get_attr(ino)?;
        if !entry.attr.is_file() {
            return Err(if entry.attr.is_directory() { Code::IsDirectory } else { Code::Invalid });
        }
        if entry.layout.is_single() {
            return Ok(());
        }
        let name = BackingName::new(ino, 0, 0);
        // A process may have died and left the new name. Once its leases are gone, the daemon refuses its request.
        self.await_no_lease(&entry)?;
        entry = self.ask_entry(&Request::GetAttr { ino })?;
        if entry.layout.is_single() {
            return Ok(());
        }
        for (_, target) in self.attached()?.targets() {
            // SAFETY: the name is NUL-terminated.
            unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) };
        }
        let to = self.attached()?.roomy_target();
        let held = self.hold_in_the_end(&entry)?;
        let made = self.copy_into_one(&entry, to, &held, empty)?;
        if !held.is_undisturbed() {
            return Err(Code::Busy);
        }
        self.name_single(&made, to, &name)?;
        let done = self.change_layout(&entry, to);
        if done == Err(Code::NotFound) {
            // Unlinked meanwhile. The inode number is never reused, so the name is ours to remove.
            // SAFETY: as above.
            unsafe { libc::unlinkat(self.attached()?.target_at(to), name.as_c_str().as_ptr(), 0) };
        }
        drop(held);
        drop(lock);
        done
    }

    /// Opens the directory of the file's backing files and locks it against other copies. [`Code::Busy`] if another process
    /// has the lock all the time: it may be stopped.
    fn lock_bucket(&self, ino: Ino) -> Result<OwnedFd, Code> {
        let lock = self.open_bucket(ino)?;
        let until = Instant::now() + Duration::from_millis(CALL_TIMEOUT_MS);
        let mut pause_us = LOCK_PAUSE_US;
        while !lock_at_once(&lock)? {
            if Instant::now() >= until {
                return Err(Code::Busy);
            }
            // SAFETY: no memory is involved.
            unsafe { libc::usleep(pause_us) };
            pause_us = (2 * pause_us).min(LOCK_PAUSE_US_MAX);
        }
        Ok(lock)
    }

    /// The same lock, if no other process has it: [`Code::Busy`] then.
    pub(crate) fn try_lock_bucket(&self, ino: Ino) -> Result<OwnedFd, Code> {
        let lock = self.open_bucket(ino)?;
        match lock_at_once(&lock)? {
            true => Ok(lock),
            false => Err(Code::Busy),
        }
    }

    fn open_bucket(&self, ino: Ino) -> Result<OwnedFd, Code> {
        let attached = self.attached()?;
        let name = BackingName::new(ino, 0, 0);
        let mut directory = [0; 8];
        directory[..7].copy_from_slice(&name.as_bytes()[..7]);
        let path = std::ffi::CStr::from_bytes_until_nul(&directory).map_err(|_| Code::Malformed)?;
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let open = || open_at(attached.target(), path, flags);
        let fd = match open() {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                open()?
            }
            result => result?,
        };
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// True if a file with several backing files may have been converted to one: a backing file of that name exists.
    pub(crate) fn may_be_single(&self, ino: Ino) -> bool {
        let Ok(attached) = self.attached() else { return true };
        let name = BackingName::new(ino, 0, 0);
        let missing = |target| matches!(stat_at(target, name.as_c_str()), Err(Code::NotFound));
        !attached.targets().all(|(_, target)| missing(target))
    }

    /// Waits until no process holds a lease on the first backing file.
    fn await_no_lease(&self, entry: &Entry) -> Result<(), Code> {
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
        for _ in 0..LEASE_TRIES {
            match self.open_stripe(entry, 0, 0, flags) {
                Ok(fd) => {
                    close(fd);
                    return Ok(());
                }
                // The code of EAGAIN.
                Err(Code::Io) => {}
                Err(code) => return Err(code),
            }
            // SAFETY: no memory is involved.
            unsafe { libc::usleep(1000) };
        }
        Err(Code::Busy)
    }

    /// Takes write leases on all backing files, retried for a short time while another process has the file open.
    fn hold_in_the_end(&self, entry: &Entry) -> Result<LeasedFiles, Code> {
        for _ in 1..LEASE_TRIES {
            match self.lease_files(entry, LeaseKind::Write) {
                // SAFETY: no memory is involved.
                Err(Code::Busy) => unsafe { libc::usleep(1000) },
                result => return result,
            };
        }
        self.lease_files(entry, LeaseKind::Write)
    }

    /// Copies the data into an unnamed file on a target of this node.
    fn copy_into_one(
        &self,
        entry: &Entry,
        target: u16,
        held: &LeasedFiles,
        empty: bool,
    ) -> Result<OwnedFd, Code> {
        let st = self.stat_entry(entry)?;
        let attached = self.attached()?;
        let flags = libc::O_RDWR | libc::O_TMPFILE | libc::O_CLOEXEC;
        // SAFETY: the descriptor is new and ours.
        let made = unsafe { OwnedFd::from_raw_fd(open_at(attached.target_at(target), c"data", flags)?) };
        let to = made.as_raw_fd();
        // SAFETY: plain system call on a descriptor of ours. A umask may have taken bits away.
        errno::check(unsafe { libc::fchmod(to, BACKING_MODE) })?;
        if !empty {
            // SAFETY: as above.
            errno::check(unsafe { libc::ftruncate(to, st.st_size) })?;
            for (file, (component, stripe)) in held.files().zip(entry.layout.stripes()) {
                copy_stripe(&entry.layout, (component, stripe), file.as_raw_fd(), to, held)?;
            }
        }
        let times = [
            libc::timespec { tv_sec: st.st_atime, tv_nsec: st.st_atime_nsec },
            libc::timespec { tv_sec: st.st_mtime, tv_nsec: st.st_mtime_nsec },
        ];
        // SAFETY: the array has two elements.
        errno::check(unsafe { libc::futimens(to, times.as_ptr()) })?;
        Ok(made)
    }

    /// Links the copy under its name.
    fn name_single(&self, made: &OwnedFd, target: u16, name: &BackingName) -> Result<(), Code> {
        let target = self.attached()?.target_at(target);
        let mut buffer = [0; 32];
        let link = proc_fd(made.as_raw_fd(), &mut buffer).ok_or(Code::BadDescriptor)?;
        let name = name.as_c_str().as_ptr();
        // SAFETY: both names are NUL-terminated.
        let result =
            unsafe { libc::linkat(libc::AT_FDCWD, link.as_ptr(), target, name, libc::AT_SYMLINK_FOLLOW) };
        errno::check(result).map(|_| ())
    }

    /// Requests the new layout from the daemon, and removes the old backing files.
    fn change_layout(&self, entry: &Entry, target: u16) -> Result<(), Code> {
        let layout = Layout::single(entry.attr.home, target);
        let request = Request::SetLayout { ino: entry.attr.ino, layout };
        self.ask_then(&request, |reply| match reply {
            Reply::Relaid { ino, layout } => {
                self.remove_backing(ino, entry.attr.kind(), &layout, false).map(|_| ())
            }
            _ => Err(Code::Malformed),
        })
        // The leases were lost: another process has the file open.
        .map_err(|code| if code == Code::Stale { Code::Busy } else { code })
    }
}

/// Copies the data of one backing file to their offsets in the new file.
fn copy_stripe(
    layout: &Layout,
    (component, stripe): (usize, u16),
    from: RawFd,
    to: RawFd,
    held: &LeasedFiles,
) -> Result<(), Code> {
    let (mut at, mut since) = (0, 0);
    while let Some((start, end)) = data_behind(from, at)? {
        at = start;
        while at < end {
            // The offset of this byte in the file, and the rest of its stripe.
            let place = layout.size_from(component, stripe, at + 1) - 1;
            let extent = layout.locate(place, (end - at).min(COPY_BYTES as u64));
            copy_range(from, at as i64, to, place as i64, extent.len as usize)?;
            at += extent.len;
            since += extent.len as usize;
            if since >= COPY_BYTES {
                since = 0;
                if !held.is_undisturbed() {
                    return Err(Code::Busy);
                }
            }
        }
    }
    Ok(())
}
