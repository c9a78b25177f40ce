//! From several backing files to one, so that whoever wants a descriptor of the file can have it.
//!
//! The data is copied into a file without a name while write leases keep all backing files closed to everybody else;
//! then it gets the name of a single backing file, which no other layout uses, the daemon changes the layout, and the
//! old backing files go. Before the change all reads are of the old ones, behind it of the new one. Who opens the file
//! meanwhile waits in open(2), and the lease says so: the copy is given up, and the opener goes on as if nothing had
//! been. One process at a time copies a file: a lock on the directory sees to that.
//!
//! A process may die, or lose its leases, between its request and the daemon's turn. So the daemon changes the layout
//! only if a lease is held then and the new name is there, and whoever takes leases has removed that name first, when
//! the leases of whoever died are gone and the daemon still has the old layout: lease and name together say that who
//! holds the lease has copied all. And who opens several backing files looks for the new name with all of them open:
//! from then on no lease is held, and no layout changes; if it did before, the name is there, and the daemon is asked.
//! What a dead process leaves is the old layout, and at worst a file that nobody reads, or the new one, and the daemon
//! removes the old backing files. Nothing here allocates. Tests: `crates/cli/tests/spread.rs`.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use forebay_data::BackingName;
use forebay_types::limits::{LEASE_TRIES, STRIPES_MAX};
use forebay_types::{Code, Entry, Ino, Layout, Reply, Request};

use crate::descriptor::proc_fd;
use crate::errno;
use crate::open::{close, open_at, BACKING_MODE};
use crate::pool::Pool;
use crate::stat::stat_at;

/// Bytes that are copied between two looks at the lease: some milliseconds that an opener waits.
const COPY_BYTES: usize = 8 << 20;

/// fcntl(2)'s command that says by which signal a lease's end is told; libc does not name it.
const F_SETSIG: libc::c_int = 10;

/// The backing files of a file, held under write leases: nobody else has them open.
struct Held {
    files: [Option<OwnedFd>; STRIPES_MAX as usize],
}

impl Held {
    /// Whether nobody has asked for any of them since.
    fn is_undisturbed(&self) -> bool {
        self.files.iter().flatten().all(|file| {
            // SAFETY: plain system call on a descriptor of ours.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
        })
    }
}

/// Takes a write lease.
///
/// # Errors
/// [`Code::Busy`] when somebody else has the file open or mapped; [`Code::NotSupported`] where there are no leases.
fn lease(file: RawFd) -> Result<(), Code> {
    // The kernel's signal about an opener is one that does nothing unless the program wants it, then none at all: SIGIO
    // would end the program.
    // SAFETY: plain system calls on a descriptor of ours.
    unsafe {
        errno::check(libc::fcntl(file, F_SETSIG, libc::SIGURG))?;
        if libc::fcntl(file, libc::F_SETLEASE, libc::F_WRLCK) != 0 {
            return Err(match *libc::__errno_location() {
                libc::EAGAIN => Code::Busy,
                libc::EINVAL => Code::NotSupported,
                _ => errno::last(),
            });
        }
        libc::fcntl(file, libc::F_SETOWN, 0);
    }
    Ok(())
}

/// The next data of `file` from `from` on, as a range of offsets; none at its end.
fn data_behind(file: RawFd, from: u64) -> Result<Option<(u64, u64)>, Code> {
    // SAFETY: plain system calls; the descriptor's own offset is used by nobody.
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
        // SAFETY: both offsets live over the call, the descriptors are ours. By number, as libc's is a point at which a
        // thread may be cancelled.
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
    /// Gives a file one backing file, with the data of those that it has; a file that has one is left as it is. With
    /// `empty` the data is dropped.
    ///
    /// # Errors
    /// [`Code::Busy`] when anybody has the file open; [`Code::NoSpace`] when there is no room for a copy;
    /// [`Code::NotSupported`] where the target's file system has no leases, and in a pool of several nodes.
    #[cold]
    pub fn make_single(&self, ino: Ino, empty: bool) -> Result<(), Code> {
        // Leases keep out the programs of this node alone.
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
        // What a process left that died, when its leases are gone too and so its request comes too late.
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
        let done = self.relay(&entry, to);
        if done == Err(Code::NotFound) {
            // Unlinked meanwhile, and its number is never another's.
            // SAFETY: as above.
            unsafe { libc::unlinkat(self.attached()?.target_at(to), name.as_c_str().as_ptr(), 0) };
        }
        drop(held);
        drop(lock);
        done
    }

    /// The directory of the file's backing files, locked against other copies.
    fn lock_bucket(&self, ino: Ino) -> Result<OwnedFd, Code> {
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
        let lock = unsafe { OwnedFd::from_raw_fd(fd) };
        loop {
            // SAFETY: plain system call on a descriptor of ours.
            match errno::check(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }) {
                Ok(_) => return Ok(lock),
                Err(Code::Interrupted) => {}
                Err(code) => return Err(code),
            }
        }
    }

    /// True where a file of several backing files may have got one: there is one by its name.
    pub(crate) fn may_be_single(&self, ino: Ino) -> bool {
        let Ok(attached) = self.attached() else { return true };
        let name = BackingName::new(ino, 0, 0);
        let missing = |target| matches!(stat_at(target, name.as_c_str()), Err(Code::NotFound));
        !attached.targets().all(|(_, target)| missing(target))
    }

    /// Returns when nobody holds a lease on the first backing file.
    fn await_no_lease(&self, entry: &Entry) -> Result<(), Code> {
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
        for _ in 0..LEASE_TRIES {
            match self.open_stripe(entry, 0, 0, flags) {
                Ok(fd) => {
                    close(fd);
                    return Ok(());
                }
                // What EAGAIN is.
                Err(Code::Io) => {}
                Err(code) => return Err(code),
            }
            // SAFETY: no memory is involved.
            unsafe { libc::usleep(1000) };
        }
        Err(Code::Busy)
    }

    /// [`Pool::hold`], again for a moment while somebody has the file open.
    fn hold_in_the_end(&self, entry: &Entry) -> Result<Held, Code> {
        for _ in 1..LEASE_TRIES {
            match self.hold(entry) {
                // SAFETY: no memory is involved.
                Err(Code::Busy) => unsafe { libc::usleep(1000) },
                result => return result,
            };
        }
        self.hold(entry)
    }

    /// Opens all backing files under leases.
    fn hold(&self, entry: &Entry) -> Result<Held, Code> {
        let mut held = Held { files: [const { None }; STRIPES_MAX as usize] };
        // As many as there is room for, which is as many as one component has.
        if entry.layout.stripes().count() > held.files.len() {
            return Err(Code::NotSupported);
        }
        for (file, (component, stripe)) in held.files.iter_mut().zip(entry.layout.stripes()) {
            let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
            let fd = self.open_stripe(entry, component, stripe, flags)?;
            // SAFETY: the descriptor is new and ours.
            let opened = unsafe { OwnedFd::from_raw_fd(fd) };
            lease(opened.as_raw_fd())?;
            *file = Some(opened);
        }
        Ok(held)
    }

    /// A file without a name on a target of this node that holds the data.
    fn copy_into_one(&self, entry: &Entry, target: u16, held: &Held, empty: bool) -> Result<OwnedFd, Code> {
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
            for (file, (component, stripe)) in held.files.iter().flatten().zip(entry.layout.stripes()) {
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

    /// Gives the copy its name.
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

    /// Has the daemon change the layout, and removes the old backing files.
    fn relay(&self, entry: &Entry, target: u16) -> Result<(), Code> {
        let layout = Layout::single(entry.attr.home, target);
        let request = Request::SetLayout { ino: entry.attr.ino, layout };
        self.ask_then(&request, |reply| match reply {
            Reply::Relaid { ino, layout } => self.remove_backing(ino, entry.attr.kind(), &layout, false),
            _ => Err(Code::Malformed),
        })
        // The leases were lost: somebody has it open.
        .map_err(|code| if code == Code::Stale { Code::Busy } else { code })
    }
}

/// Copies what one backing file holds to where it belongs.
fn copy_stripe(
    layout: &Layout,
    (component, stripe): (usize, u16),
    from: RawFd,
    to: RawFd,
    held: &Held,
) -> Result<(), Code> {
    let (mut at, mut since) = (0, 0);
    while let Some((start, end)) = data_behind(from, at)? {
        at = start;
        while at < end {
            // Where this byte is in the file, and how much of the stripe is left.
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
