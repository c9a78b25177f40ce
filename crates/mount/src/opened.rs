//! The open state of one inode: descriptors of its backing file, and its registration for passthrough.
//!
//! The kernel refuses to mix opens with and without passthrough of one inode, and opens with different registrations.
//! So an inode keeps one registration from its first open to its last release. A writable descriptor is held only
//! while a program has the file open for writing, because a read lease on the file ([`is_unwritten`]) is refused while
//! such a descriptor is open.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use forebay_client::Pool;
use forebay_types::{Code, Entry, Ino};

use crate::errno::{check, Errno};
use crate::registrar::Registrar;

#[derive(Debug, Default)]
struct Inner {
    registered: Option<(Arc<Registrar>, i32)>,
    /// The file could not be registered when it was opened, or was opened while it arrived. It is read and written by
    /// requests until the last release.
    by_requests: bool,
    read: Option<Arc<OwnedFd>>,
    write: Option<Arc<OwnedFd>>,
    /// Opens for writing that were not released yet.
    writers: u32,
    /// When a descriptor of the file was last closed.
    flushed: Option<Instant>,
}

/// The open state of one inode.
#[derive(Debug)]
pub(crate) struct Opened {
    ino: u64,
    inner: Mutex<Inner>,
}

impl Inner {
    fn any(&self) -> Option<&Arc<OwnedFd>> {
        self.write.as_ref().or(self.read.as_ref())
    }
}

/// Opens an open file again, with other flags.
pub(crate) fn reopen(file: &impl AsFd, flags: i32) -> Result<OwnedFd, Errno> {
    let path = forebay_sys::descriptor::path(file).into_os_string().into_encoded_bytes();
    let path = CString::new(path).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the path is NUL-terminated; the descriptor is new and ours.
    unsafe {
        let fd = check(libc::open(path.as_ptr(), flags | libc::O_CLOEXEC))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// `fstat` of a descriptor of this process.
pub(crate) fn fstat(file: &impl AsRawFd) -> Result<libc::stat, Errno> {
    // SAFETY: an all-zero stat is valid.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `st` is valid for the call.
    check(unsafe { libc::fstat(file.as_raw_fd(), &mut st) })?;
    Ok(st)
}

/// Opens the backing file of an entry. With flags that allow writing, the file is marked dirty before this returns.
pub(crate) fn open_backing(pool: &Pool, entry: &Entry, flags: i32) -> Result<OwnedFd, Code> {
    let fd = pool.open_backing(entry, flags | libc::O_CLOEXEC)?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// True when no process has the file open or mapped for writing. False also on a medium without leases.
pub(crate) fn is_unwritten(file: &OwnedFd) -> bool {
    const F_SETSIG: i32 = 10;
    let fd = file.as_raw_fd();
    // SIGURG reports an opener without effect. The default, SIGIO, would end the process.
    // SAFETY: plain system calls on a descriptor of ours.
    unsafe {
        if libc::fcntl(fd, F_SETSIG, libc::SIGURG) != 0
            || libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) != 0
        {
            return false;
        }
        libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
    }
    true
}

impl Opened {
    pub(crate) fn new(ino: u64) -> Opened {
        Opened { ino, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Opened::open_inode`].
    pub(crate) fn open(
        &self,
        pool: &Pool,
        registrar: Option<&Arc<Registrar>>,
        write: bool,
    ) -> Result<Option<i32>, Errno> {
        self.open_inode(pool, Ino(self.ino), registrar, write)
    }

    /// Opens the file for reading or writing, and registers it with `registrar` if there is one. Returns the number of
    /// the registration. Writers are counted: [`Opened::end_write`] ends each successful open for writing. `ino` is the
    /// inode, which has another number than this state where it was made without a name.
    ///
    /// # Errors
    /// ESTALE when the inode has lost its name and was not open; EOPNOTSUPP for a file of several backing files.
    pub(crate) fn open_inode(
        &self,
        pool: &Pool,
        ino: Ino,
        registrar: Option<&Arc<Registrar>>,
        write: bool,
    ) -> Result<Option<i32>, Errno> {
        let is_missing = |inner: &Inner| if write { inner.write.is_none() } else { inner.any().is_none() };
        let flags = if write { libc::O_RDWR } else { libc::O_RDONLY };
        // Opened before anything is locked: the file's data may have to be restored, and writers wait for space.
        let open = || pool.get_attr(ino).and_then(|entry| open_backing(pool, &entry, flags));
        let is_missing_now = is_missing(&self.inner());
        let mut opened = is_missing_now.then(open);
        let mut inner = loop {
            let inner = self.inner();
            if !is_missing(&inner) || opened.is_some() {
                break inner;
            }
            // Another open ended meanwhile.
            drop(inner);
            opened = Some(open());
        };
        if let (true, Some(opened)) = (is_missing(&inner), opened) {
            let fd = match (opened, inner.any()) {
                (Ok(fd), _) => fd,
                // The inode has no name, but is still open.
                (Err(Code::NotFound | Code::Stale), Some(file)) => reopen(file, flags)?,
                (Err(Code::NotFound), None) => return Err(Errno(libc::ESTALE)),
                (Err(code), _) => return Err(code.into()),
            };
            *(if write { &mut inner.write } else { &mut inner.read }) = Some(Arc::new(fd));
        }
        Opened::register_open(&mut inner, registrar, write)
    }

    /// Has this and all later opens read and write by requests, until the last release. False when the kernel reads and
    /// writes the file itself already.
    pub(crate) fn begin_by_requests(&self) -> bool {
        let mut inner = self.inner();
        inner.by_requests |= inner.registered.is_none();
        inner.by_requests
    }

    /// True when no open is by passthrough.
    pub(crate) fn is_by_requests(&self) -> bool {
        self.inner().by_requests
    }

    /// A file that was opened while it arrived is whole: its backing file.
    pub(crate) fn note_whole(&self, file: &Arc<OwnedFd>) {
        self.inner().read.get_or_insert_with(|| Arc::clone(file));
    }

    /// Takes over the descriptor of a newly created file, as an open that can write if `write` is set.
    pub(crate) fn adopt(
        &self,
        fd: OwnedFd,
        registrar: Option<&Arc<Registrar>>,
        write: bool,
    ) -> Result<Option<i32>, Errno> {
        let mut inner = self.inner();
        *(if write { &mut inner.write } else { &mut inner.read }) = Some(Arc::new(fd));
        Opened::register_open(&mut inner, registrar, write)
    }

    /// Registers the file for an open, and counts the open if it can write.
    fn register_open(
        inner: &mut Inner,
        registrar: Option<&Arc<Registrar>>,
        write: bool,
    ) -> Result<Option<i32>, Errno> {
        let registered = Opened::register(inner, registrar);
        if registered.is_ok() {
            inner.writers += u32::from(write);
        } else if inner.writers == 0 && inner.read.is_some() {
            // No release will end the open for writing that failed.
            inner.write = None;
        }
        registered
    }

    fn register(inner: &mut Inner, registrar: Option<&Arc<Registrar>>) -> Result<Option<i32>, Errno> {
        if let Some((_, id)) = &inner.registered {
            return Ok(Some(*id));
        }
        let (Some(registrar), Some(file)) = (registrar, inner.any()) else { return Ok(None) };
        if inner.by_requests {
            return Ok(None);
        }
        let id = registrar.register(file.as_fd())?;
        match id {
            Some(id) => inner.registered = Some((Arc::clone(registrar), id)),
            None => inner.by_requests = true,
        }
        Ok(id)
    }

    /// Ends an open for writing, which was released.
    pub(crate) fn end_write(&self) {
        let gone = {
            let mut inner = self.inner();
            inner.writers = inner.writers.saturating_sub(1);
            if inner.writers > 0 {
                return;
            }
            // Other opens may still read by the writable descriptor: a read-only one replaces it.
            if inner.read.is_none() {
                if let Some(file) = &inner.write {
                    inner.read = reopen(file, libc::O_RDONLY).ok().map(Arc::new);
                }
            }
            inner.write.take()
        };
        drop(gone);
    }

    /// Records that a descriptor of the file is being closed.
    pub(crate) fn note_flush(&self) {
        self.inner().flushed = Some(Instant::now());
    }

    /// When a descriptor of the file was last closed.
    pub(crate) fn flushed(&self) -> Option<Instant> {
        self.inner().flushed
    }

    /// A descriptor of the file, a writable one if there is one.
    pub(crate) fn any(&self) -> Option<Arc<OwnedFd>> {
        self.inner().any().cloned()
    }

    /// A writable descriptor of the file.
    pub(crate) fn writable(&self) -> Option<Arc<OwnedFd>> {
        self.inner().write.clone()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((registrar, id)) = inner.registered.take() {
            registrar.unregister(id);
        }
    }
}
