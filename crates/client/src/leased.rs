//! Backing files under leases, and what a mover does with backing files (docs/decisions/0041): it copies them under read
//! leases, unlinks those of a released file under write leases, and creates that of a file that is restored.
//!
//! A read lease is refused while any process has the file open or mapped for writing, and a write lease while any other
//! has it open. An open that conflicts waits in open(2) until the lease is given up, and so breaks it. Nothing here
//! allocates, except where it says so. Tests: `crates/cli/tests/spread.rs`, the tests of `crates/mover`.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use forebay_data::BackingName;
use forebay_types::limits::STRIPES_MAX;
use forebay_types::{node_of, Code, Entry, Ino, Layout, NodeId};

use crate::errno;
use crate::open::{open_at, BACKING_MODE};
use crate::pool::Pool;
use crate::stat::stat_at;

/// The fcntl(2) command that sets the signal for a broken lease. The libc crate lacks it.
const F_SETSIG: libc::c_int = 10;

/// Mode of a backing file that a mover has copied to the store or from it.
const COPIED_MODE: libc::mode_t = BACKING_MODE | libc::S_ISVTX;
/// The permission that a backing file lacks while a restore fills it.
const ARRIVED: libc::mode_t = libc::S_IXUSR;

/// True for the mode of a backing file that has all its data.
pub fn has_arrived(mode: libc::mode_t) -> bool {
    mode & ARRIVED != 0
}

/// What a lease excludes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseKind {
    /// Writers.
    Read,
    /// Every other open.
    Write,
    /// Nothing: the files are only read, while programs may write them.
    None,
}

impl LeaseKind {
    fn number(self) -> libc::c_int {
        match self {
            LeaseKind::Read => libc::F_RDLCK,
            LeaseKind::Write => libc::F_WRLCK,
            LeaseKind::None => libc::F_UNLCK,
        }
    }
}

/// The backing files of a file, under leases. They are given up when this is dropped.
#[derive(Debug)]
pub struct LeasedFiles {
    files: [Option<OwnedFd>; STRIPES_MAX as usize],
    kind: LeaseKind,
}

impl LeasedFiles {
    /// True if no process has tried since to open any of them in conflict with its lease.
    pub fn is_undisturbed(&self) -> bool {
        let held = self.kind.number();
        self.files().all(|file| {
            // SAFETY: plain system call on a descriptor of ours.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) == held }
        })
    }

    /// Notes at the backing files that a mover has copied them under these leases: a node that is about to write one for
    /// another node has the file marked dirty first (`backing_operations.rs` of the server, docs/decisions/0042).
    pub fn note_copied(&self) -> Result<(), Code> {
        for file in self.files() {
            // SAFETY: plain system call on a descriptor of ours.
            errno::check(unsafe { libc::fchmod(file.as_raw_fd(), COPIED_MODE) })?;
        }
        Ok(())
    }

    /// The backing file with this number in the order of the layout's stripes, if this node has it.
    pub fn file(&self, number: usize) -> Option<&OwnedFd> {
        self.files.get(number)?.as_ref()
    }

    /// The backing files, open for reading, in the order of the layout's stripes.
    pub fn files(&self) -> impl Iterator<Item = &OwnedFd> {
        self.files.iter().flatten()
    }
}

/// Takes a lease.
///
/// # Errors
/// [`Code::Busy`] if another process has the file open or mapped in conflict with it; [`Code::NotSupported`] if the file
/// system has no leases.
fn lease(file: RawFd, kind: LeaseKind) -> Result<(), Code> {
    // The kernel must not send SIGIO when another process opens the file, because SIGIO would end the program. SIGURG
    // is ignored by default. Once the lease is taken, F_SETOWN 0 turns the signal off.
    // SAFETY: plain system calls on a descriptor of ours.
    unsafe {
        errno::check(libc::fcntl(file, F_SETSIG, libc::SIGURG))?;
        if libc::fcntl(file, libc::F_SETLEASE, kind.number()) != 0 {
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

/// True if an open backing file has a name. One that was released has none.
///
/// # Errors
/// Those of fstat(2).
pub fn has_name(file: BorrowedFd<'_>) -> Result<bool, Code> {
    // SAFETY: all zeros is a valid `stat`, which the kernel fills; plain system call on an open descriptor.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        errno::check(libc::fstat(file.as_raw_fd(), &raw mut st))?;
        Ok(st.st_nlink > 0)
    }
}

/// True if a name leads to this file.
fn is_at(file: &OwnedFd, directory: RawFd, name: &CStr) -> Result<bool, Code> {
    let there = match stat_at(directory, name) {
        Err(Code::NotFound) => return Ok(false),
        there => there?,
    };
    let own = errno::stat(file.as_raw_fd())?;
    Ok((own.st_dev, own.st_ino) == (there.st_dev, there.st_ino))
}

/// True if a process has a backing file open that a release has left, and the file is still what it was: the process reads
/// it as the file, and is to see what is written next. A release that has lost its leases and whose mover has died leaves
/// this. Versions are told apart by size and modification time.
fn is_read_still(left: &OwnedFd, now: &Entry) -> Result<bool, Code> {
    let (st, attr) = (errno::stat(left.as_raw_fd())?, &now.attr);
    let is_same = has_arrived(st.st_mode)
        && u64::try_from(st.st_size) == Ok(attr.size)
        && (st.st_mtime, st.st_mtime_nsec) == (attr.mtime.sec, i64::from(attr.mtime.nsec));
    // The lease ends with the descriptor.
    Ok(is_same && lease(left.as_raw_fd(), LeaseKind::Write) == Err(Code::Busy))
}

impl Pool {
    /// Unlinks a backing file of `ino` that a release or a restore has left, under a name in a directory of a target.
    /// `is_left` looks whether it is that, while no process has it open and none can open it: a release, which may be taken
    /// back, has it open until it ends, and a restore opens first what is there. A conversion to one backing file opens
    /// nothing, and holds the lock of the directory. That lock is taken behind `is_left`, which may send requests: a
    /// process that stops there holds up no conversion.
    ///
    /// # Errors
    /// [`Code::Busy`] or [`Code::Io`] if a process has it open, or converts a file of this directory; those of the calls.
    pub fn remove_left(
        &self,
        ino: Ino,
        directory: BorrowedFd<'_>,
        name: &CStr,
        is_left: impl FnOnce() -> bool,
    ) -> Result<(), Code> {
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the descriptor is new and ours.
        let file = unsafe { OwnedFd::from_raw_fd(open_at(directory.as_raw_fd(), name, flags)?) };
        lease(file.as_raw_fd(), LeaseKind::Write)?;
        // A restore that began before the lease may have put another file in its place, and one that begins now breaks it.
        // SAFETY: plain system call on an open descriptor.
        let is_held = || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) } == libc::F_WRLCK;
        if !is_left() {
            return Ok(());
        }
        let _lock = self.try_lock_bucket(ino)?;
        // A conversion that has run meanwhile has removed the file. Its number is not used again while it is open here.
        if is_at(&file, directory.as_raw_fd(), name)? && is_held() {
            // SAFETY: the name is NUL-terminated.
            errno::check(unsafe { libc::unlinkat(directory.as_raw_fd(), name.as_ptr(), 0) })?;
        }
        Ok(())
    }

    /// Opens the backing files of a file that are on this node, and takes leases on them.
    ///
    /// # Errors
    /// As [`lease`]; [`Code::NotSupported`] too for a file with too many of them; [`Code::Stale`] if the file was removed
    /// or released.
    pub fn lease_files(&self, entry: &Entry, kind: LeaseKind) -> Result<LeasedFiles, Code> {
        let mut held = LeasedFiles { files: [const { None }; STRIPES_MAX as usize], kind };
        // `held` has room for the backing files of one component.
        if entry.layout.stripes().count() > held.files.len() {
            return Err(Code::NotSupported);
        }
        for (file, (component, stripe)) in held.files.iter_mut().zip(entry.layout.stripes()) {
            if self.backing_elsewhere(entry, component, stripe).is_some() {
                continue;
            }
            let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
            // A copy is no access of a program: the file's access time stays.
            let fd = match self.open_stripe(entry, component, stripe, flags | libc::O_NOATIME) {
                Err(Code::NotPermitted) => self.open_stripe(entry, component, stripe, flags)?,
                opened => opened?,
            };
            // SAFETY: the descriptor is new and ours.
            let opened = unsafe { OwnedFd::from_raw_fd(fd) };
            if kind != LeaseKind::None {
                lease(opened.as_raw_fd(), kind)?;
            }
            *file = Some(opened);
        }
        Ok(held)
    }

    /// Creates the empty backing file of a file that is to be restored, in place of what a restore left that did not end:
    /// programs that read the file meanwhile may have that one open (`ranges.rs`). A backing file that a release left, and
    /// that a process still reads as the file, stays: the file is resident then.
    ///
    /// # Errors
    /// [`Code::Interrupted`] if the file is to be looked at again; [`Code::NotSupported`] for a striped file, and for one
    /// of another node.
    pub fn open_to_restore(&self, entry: &Entry) -> Result<OwnedFd, Code> {
        if !self.is_one_here(&entry.layout) {
            return Err(Code::NotSupported);
        }
        let name = BackingName::new(entry.attr.ino, 0, 0);
        let target = self.attached()?.target_of(&entry.layout, 0, 0);
        // A release that is under way has a lease, and decides whether the file is released: this waits for its end. Leases
        // of a striped file's release are on other backing files: `Restored` is refused if that is taken back first.
        // For reading, because a process may execute it.
        let left = match open_at(target, name.as_c_str(), libc::O_RDONLY | libc::O_CLOEXEC) {
            // SAFETY: the descriptor is new and ours.
            Ok(fd) => Some(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(Code::NotFound) => None,
            Err(code) => return Err(code),
        };
        let now = self.get_attr(entry.attr.ino)?;
        if now.attr.is_resident() || now.attr.epoch() != entry.attr.epoch() {
            return Err(Code::Interrupted);
        }
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
        if let Some(left) = left {
            if is_read_still(&left, &now)? {
                self.take_back_release(now)?;
                return Err(Code::Interrupted);
            }
            // SAFETY: the name is NUL-terminated. That there is none any more is no error.
            unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) };
        }
        let fd = match open_at(target, name.as_c_str(), flags) {
            // The file's creator has made it meanwhile.
            Err(Code::Exists) => return Err(Code::Interrupted),
            made => made?,
        };
        // SAFETY: the descriptor is new and ours.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let mode = if self.spans_nodes() { COPIED_MODE } else { BACKING_MODE };
        // SAFETY: plain system call on a descriptor of ours. A umask may have taken bits away.
        errno::check(unsafe { libc::fchmod(fd, mode & !ARRIVED) })?;
        Ok(file)
    }

    /// All data of a file that is being restored have arrived: notes it at the backing file ([`has_arrived`]).
    pub fn note_arrived(&self, file: &OwnedFd) -> Result<(), Code> {
        // SAFETY: plain system call on a descriptor of ours.
        errno::check(unsafe { libc::fchmod(file.as_raw_fd(), COPIED_MODE) }).map(|_| ())
    }

    /// Unlinks the backing file of a restore that failed, unless the file was restored by another. Programs that have it
    /// open keep what has arrived. That of a resident file with several backing files stays, after a release that was taken
    /// back: a process may be about to convert the file to one of this name, and removes what is there first.
    pub fn remove_unrestored(&self, entry: &Entry) -> Result<(), Code> {
        match self.get_attr(entry.attr.ino) {
            Ok(now) if now.attr.is_resident() => return Ok(()),
            Ok(_) | Err(Code::NotFound) => {}
            Err(code) => return Err(code),
        }
        let name = BackingName::new(entry.attr.ino, 0, 0);
        let target = self.attached()?.target_of(&entry.layout, 0, 0);
        // SAFETY: the name is NUL-terminated.
        errno::check(unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) }).map(|_| ())
    }

    /// The other nodes that have backing files of a layout. Allocates.
    pub fn other_nodes_of(&self, layout: &Layout) -> Vec<NodeId> {
        let Ok(here) = self.node() else { return Vec::new() };
        let target_of = |(component, stripe): (usize, u16)| layout.components()[component].target(stripe);
        let mut nodes: Vec<NodeId> = layout.stripes().map(|at| node_of(target_of(at))).collect();
        nodes.sort();
        nodes.dedup();
        nodes.retain(|node| *node != here);
        nodes
    }

    /// The number of nodes of the pool.
    pub fn node_count(&self) -> u64 {
        self.attached().map_or(1, |attached| attached.reply.nodes).max(1)
    }

    /// The directories of this node's targets, for a mover that looks for what it can release. Allocates.
    pub fn target_directories(&self) -> Vec<BorrowedFd<'static>> {
        let Ok(attached) = self.attached() else { return Vec::new() };
        // SAFETY: an attachment and its descriptors of targets live as long as the process.
        attached.targets().map(|(_, fd)| unsafe { BorrowedFd::borrow_raw(fd) }).collect()
    }

    /// Unlinks the backing files of a file that was released. Of a striped file not the one that a restore fills: no lease
    /// kept that from beginning, and it may have ended.
    pub fn unlink_released(&self, entry: &Entry) -> Result<(), Code> {
        self.remove_backing(entry.attr.ino, entry.attr.kind(), &entry.layout, false).map(|_| ())
    }
}
