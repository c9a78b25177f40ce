//! An attached pool: how calls reach the daemon, and how look-ups avoid requests.

use std::cell::UnsafeCell;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use forebay_ring::{Board, CallFailure, Claim, Lookup, NameRef};
use forebay_types::{Attr, Caller, Code, Entry, Error, Ino, Reply, Request, FLAG_RESIDENT};

use crate::attached::Attached;
use crate::connection::{Address, Role};

/// Why a path operation has no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fail {
    /// The operation failed.
    Code(Code),
    /// The path leaves the pool, by a symlink out of it or by `..` above its root. The caller repeats the call on the
    /// kernel path in its buffer.
    Escape,
}

impl From<Code> for Fail {
    fn from(code: Code) -> Fail {
        Fail::Code(code)
    }
}

/// The result of a path operation.
pub type Door<T> = Result<T, Fail>;

/// Room for a request without a long value: two names, a layout, and the fixed fields.
pub(crate) const SHORT_REQUEST_BYTES: usize = 768;
/// Room for a reply with an inode.
pub(crate) const SHORT_REPLY_BYTES: usize = 256;
/// Longest prefix, in bytes.
const PREFIX_MAX: usize = 255;

/// With `no`, a program that opens a released file gets an error instead of its data.
const RECALL: &str = "FOREBAY_RECALL";

/// A pool that this process uses. It exists until the process ends.
pub struct Pool {
    address: Address,
    role: Role,
    /// Calls of this process may have data copied from a backing store (`FOREBAY_RECALL`).
    recalls: bool,
    /// This process's attachment; a fork sets it to null in the child.
    own: &'static AtomicPtr<Attached>,
    /// The last attachment of this process or of its parent.
    last: AtomicPtr<Attached>,
    /// The pool that was published in [`KEPT`] before this one.
    older: AtomicPtr<Pool>,
    prefix: UnsafeCell<[u8; PREFIX_MAX]>,
    prefix_len: AtomicUsize,
    /// Device of the pool's mount when it was last seen; 0 if it never was.
    pub(crate) mounted: AtomicU64,
    /// The device number that files show; 0 until it is determined.
    shown_device: AtomicU64,
}

// SAFETY: `prefix` is written before `prefix_len` is published, and never after; all else is atomic.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Pool {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

/// The newest pool, and through `older` all of them.
static KEPT: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
/// Bytes of the mapping that detects a fork.
const PAGE: usize = 4096;

/// A pointer that is null in a forked child. Kernels before 4.14 cannot do that: the pointer keeps its value, and the
/// child shares its parent's ring, which works until both claim one slot.
fn wiped_on_fork() -> Result<&'static AtomicPtr<Attached>, Code> {
    // SAFETY: a fresh anonymous mapping, unmapped only with a pool that was not returned to any caller.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return Err(Code::NoMemory);
        }
        libc::madvise(page, PAGE, libc::MADV_WIPEONFORK);
        Ok(AtomicPtr::from_ptr(page.cast()))
    }
}

impl Pool {
    /// Attaches to the pool whose directory is `dir`.
    ///
    /// # Errors
    /// [`Code::PoolGone`] if no daemon serves the pool, [`Code::AccessDenied`] if another user owns it,
    /// [`Code::NameTooLong`] if the socket's path exceeds the kernel's 107 bytes.
    pub fn attach(dir: &Path) -> forebay_types::Result<&'static Pool> {
        Pool::attach_as(dir, Role::Host)
    }

    /// [`Pool::attach`] in another role than that of a program.
    pub fn attach_as(dir: &Path, role: Role) -> forebay_types::Result<&'static Pool> {
        let pool = Box::new(Pool::prepare_as(dir, role)?);
        if let Err(code) = pool.attached().map(|_| ()) {
            // SAFETY: the mapping of `wiped_on_fork`, to which no reference exists once the pool is dropped.
            unsafe { libc::munmap(pool.own.as_ptr().cast(), PAGE) };
            drop(pool);
            let what = format!("cannot attach to the pool at {}", dir.display());
            return Err(match code {
                Code::PoolGone => {
                    Error::new(code, what).why("no daemon answers on its socket").cure(format!(
                        "start it with `forebay up --path {}`, or name another with --pool",
                        dir.display()
                    ))
                }
                Code::AccessDenied => Error::new(code, what)
                    .why("this user may not connect to its socket")
                    .cure("a pool serves the user who started it; start one of your own with `forebay up`"),
                Code::NoResources => Error::new(code, what)
                    .why("this process or the pool's daemon may open no more files")
                    .cure("raise the limit of open files (ulimit -n) of the program, or of the shell that starts the pool"),
                Code::NotSupported => Error::new(code, what)
                    .why("its daemon is of another version of Forebay")
                    .cure("use the version that has started the pool"),
                Code::NoMemory => Error::new(code, what).why("this process gets no more memory or address space"),
                code => Error::new(code, what),
            });
        }
        Ok(pool.keep())
    }

    /// A pool to which this process attaches at its first call.
    pub fn prepare(dir: &Path) -> forebay_types::Result<&'static Pool> {
        Ok(Box::new(Pool::prepare_as(dir, Role::Host)?).keep())
    }

    /// Makes the pool live until the process ends, reachable from a static so that leak checkers see it.
    fn keep(self: Box<Pool>) -> &'static Pool {
        let pool: &'static Pool = Box::leak(self);
        let mut newest = KEPT.load(Ordering::Relaxed);
        loop {
            pool.older.store(newest, Ordering::Relaxed);
            let me = std::ptr::from_ref(pool).cast_mut();
            match KEPT.compare_exchange_weak(newest, me, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return pool,
                Err(other) => newest = other,
            }
        }
    }

    pub(crate) fn prepare_as(dir: &Path, role: Role) -> forebay_types::Result<Pool> {
        let bytes = dir.as_os_str().as_bytes();
        let address = Address::new(bytes).map_err(|code| {
            Error::new(code, format!("cannot use the pool directory {}", dir.display()))
                .why("the path of its socket exceeds 107 bytes")
                .cure("use a shorter path, e.g. under /tmp")
        })?;
        let own = wiped_on_fork().map_err(|code| Error::new(code, "cannot map memory for the pool"))?;
        Ok(Pool {
            address,
            role,
            recalls: role != Role::Host || std::env::var_os(RECALL).is_none_or(|value| value != "no"),
            own,
            last: AtomicPtr::new(std::ptr::null_mut()),
            prefix: UnsafeCell::new([0; PREFIX_MAX]),
            prefix_len: AtomicUsize::new(0),
            mounted: AtomicU64::new(0),
            shown_device: AtomicU64::new(0),
            older: AtomicPtr::new(std::ptr::null_mut()),
        })
    }

    /// This pool as a `'static` reference.
    pub(crate) fn for_ever(&self) -> &'static Pool {
        // SAFETY: `keep` leaked every pool that was returned to a caller, and it is never freed or moved. The only pool
        // that is freed is one that could not be attached, and this function was not called on it.
        unsafe { &*std::ptr::from_ref(self) }
    }

    /// Sets the prefix under which programs see the pool, e.g. `/forebay`: an absolute path without a slash at the end.
    /// Called once, before several threads use the pool. A prefix of over 255 bytes is ignored.
    pub fn set_prefix(&self, prefix: &[u8]) {
        if self.prefix_len.load(Ordering::Acquire) == 0 && prefix.len() <= PREFIX_MAX {
            // SAFETY: the length is still 0, so the bytes are not read; the caller is the only writer.
            unsafe { (&mut *self.prefix.get())[..prefix.len()].copy_from_slice(prefix) };
            self.prefix_len.store(prefix.len(), Ordering::Release);
        }
    }

    /// The prefix; empty when none was set.
    pub fn prefix(&self) -> &[u8] {
        let len = self.prefix_len.load(Ordering::Acquire);
        // SAFETY: the first `len` bytes were written before `len`, and are never written again.
        unsafe { &(&*self.prefix.get())[..len] }
    }

    /// Device number (`st_dev`) of all files of the pool; 0 if the process cannot attach. It is the mount's if the pool
    /// is mounted at the prefix, because a program may reach a file by either. It does not change until this process
    /// attaches anew because the pool was gone.
    pub fn device(&self) -> u64 {
        match self.shown_device.load(Ordering::Relaxed) {
            0 => self.decide_device(),
            device => device,
        }
    }

    #[cold]
    fn decide_device(&self) -> u64 {
        let Ok(attached) = self.attached() else { return 0 };
        let device = self.device_of_mount_at(self.prefix()).unwrap_or(attached.reply.device);
        self.shown_device.store(device, Ordering::Relaxed);
        device
    }

    /// This process's attachment; attaches if there is none.
    #[inline]
    pub(crate) fn attached(&self) -> Result<&'static Attached, Code> {
        let current = self.own.load(Ordering::Acquire);
        match served(current) {
            Some(attached) => Ok(attached),
            None => self.attach_now(current),
        }
    }

    /// The number of this process's session with the daemon. `None` if there is none, or if a call on it got no reply.
    pub fn session(&self) -> Option<u64> {
        served(self.own.load(Ordering::Acquire)).map(|attached| attached.reply.session)
    }

    #[cold]
    fn attach_now(&self, current: *mut Attached) -> Result<&'static Attached, Code> {
        let last = self.last.load(Ordering::Acquire);
        // What is remembered of a pool that is gone is invalid in a forked child too.
        if !last.is_null() && served(last).is_none() {
            crate::remembered::forget_all();
            self.shown_device.store(0, Ordering::Relaxed);
        }
        let new = Attached::new(&self.address, self.role)?;
        let place = std::ptr::from_ref(new).cast_mut();
        // Threads that attach at the same time each create an attachment. All use the first; the others stay idle until
        // the process ends.
        match self.own.compare_exchange(current, place, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.last.store(place, Ordering::Release);
                Ok(new)
            }
            // SAFETY: attachments are never freed.
            Err(other) => Ok(unsafe { &*other }),
        }
    }

    /// True if calls of this process may have data copied from a backing store.
    pub(crate) fn recalls(&self) -> bool {
        self.recalls
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// The pool's directory, as given to attach.
    pub fn directory(&self) -> &[u8] {
        self.address.directory()
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Sends an encoded request. `then` gets the reply before the slot is used again.
    pub(crate) fn exchange<T>(
        &self,
        request: &[u8],
        buffer: &mut [u8],
        then: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, Code> {
        self.exchange_on_slot(request, buffer, || {}, |reply, _, _| then(reply))
    }

    /// The same. `meanwhile` is called while the daemon serves the request, and `then` also gets the slot.
    pub(crate) fn exchange_on_slot<T>(
        &self,
        request: &[u8],
        buffer: &mut [u8],
        meanwhile: impl FnOnce(),
        then: impl FnOnce(&[u8], &Claim<'_>, &Attached) -> T,
    ) -> Result<T, Code> {
        let attached = self.attached()?;
        let alive = || self.is_alive(attached);
        let claim = attached.ring.claim(&alive).map_err(|failure| self.failed(attached, failure))?;
        self.post(attached, &claim, request);
        meanwhile();
        let result = claim.finish(buffer, &alive, |reply, claim| then(reply, claim, attached));
        result.map_err(|failure| self.failed(attached, failure))
    }

    /// Posts a request, then unlinks the backing file that the slot's last removal left (a late removal): the client
    /// would otherwise only wait for the daemon.
    pub(crate) fn post(&self, attached: &Attached, claim: &Claim<'_>, request: &[u8]) {
        // Unlinks first, so that the reported free space includes it.
        if request.first() == Some(&Request::Space.number()) {
            claim.take_owed().into_iter().for_each(|removal| self.unlink_backing_file(attached, removal));
        }
        if let Some(removal) = claim.post(request) {
            self.unlink_backing_file(attached, removal);
        }
    }

    /// True while the daemon serves this attachment.
    pub(crate) fn is_alive(&self, attached: &Attached) -> bool {
        self.address.is_alive(attached.reply.session)
    }

    /// The code of a call without a reply.
    pub(crate) fn failed(&self, attached: &Attached, failure: CallFailure) -> Code {
        match failure {
            CallFailure::Gone => {
                attached.gone.store(true, Ordering::Relaxed);
                Code::PoolGone
            }
            CallFailure::Malformed => Code::Malformed,
        }
    }

    /// Sends a request, and calls `then` with the reply before the slot is used again.
    pub(crate) fn ask_then<T>(
        &self,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        // Only requests that create an inode need its owner; the others save two system calls.
        let makes = matches!(
            request,
            Request::Create { .. }
                | Request::MakeNode { .. }
                | Request::MakeDirectory { .. }
                | Request::Symlink { .. }
                | Request::MakeDirectoryAt { .. }
        );
        self.ask_as(if makes { caller() } else { Caller { uid: 0, gid: 0 } }, request, then)
    }

    /// The same on behalf of `caller`.
    pub(crate) fn ask_as<T>(
        &self,
        caller: Caller,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        let mut message = [0; SHORT_REQUEST_BYTES];
        let mut buffer = [0; SHORT_REPLY_BYTES];
        let n = request.encode(caller, &mut message)?;
        self.exchange(&message[..n], &mut buffer, |reply| then(Reply::decode(reply)?))?
    }

    /// Sends a request whose reply is an inode.
    pub(crate) fn ask_entry(&self, request: &Request<'_>) -> Result<Entry, Code> {
        self.ask_then(request, |reply| match reply {
            Reply::Entry(entry) => Ok(entry),
            _ => Err(Code::Malformed),
        })
    }

    /// Sends a request of any length with a reply of any length, in memory that is mapped for the call.
    #[cold]
    pub(crate) fn ask_long<T>(
        &self,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        self.request_in(&mut RequestMemory::new()?, request, then)
    }

    /// Sends a request of any length, and passes its reply, of any length, to `then`.
    pub fn request<T>(
        &self,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        self.ask_long(request, then)
    }

    /// The same in memory that the caller keeps: for threads that send many requests, since mapping memory for each
    /// holds up all threads of the process.
    pub fn request_in<T>(
        &self,
        memory: &mut RequestMemory,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        let (message, buffer) = memory.halves();
        let n = request.encode(caller(), message)?;
        self.exchange(&message[..n], buffer, |reply| then(Reply::decode(reply)?))?
    }

    /// Sends a request with the caller's buffer for the reply. Returns the number of bytes of the encoded reply.
    ///
    /// # Errors
    /// An error means that there is no reply. Errors of the request are encoded in the reply.
    pub fn call(&self, request: &Request<'_>, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut message = [0; SHORT_REQUEST_BYTES];
        let n = request.encode(caller(), &mut message)?;
        self.exchange(&message[..n], buffer, |reply| reply.len())
    }

    /// The board's entry of a name.
    #[inline]
    fn look_on_board(&self, parent: Ino, name: &[u8]) -> Result<Lookup, Code> {
        Ok(self.on_board(|board| Some(board.lookup(parent, name)))?.unwrap_or(Lookup::Unknown))
    }

    /// The result of `read` on the board; `None` if the board is not valid.
    #[inline]
    pub(crate) fn on_board<T>(&self, read: impl FnOnce(&Board) -> Option<T>) -> Result<Option<T>, Code> {
        let attached = self.attached()?;
        if let Some((board, epoch)) = attached.board(&self.address) {
            let found = read(board);
            if attached.ring.epoch() == epoch {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// [`Pool::lookup_name`], except that with `to_create` a name that the board does not have counts as missing.
    #[inline]
    pub(crate) fn lookup_last(
        &self,
        parent: Ino,
        name: &[u8],
        to_create: bool,
        asked: &mut Option<Entry>,
    ) -> Result<NameRef, Code> {
        match self.look_on_board(parent, name)? {
            Lookup::Hit(entry) => Ok(entry),
            Lookup::Absent => Err(Code::NotFound),
            Lookup::Unknown if to_create => Err(Code::NotFound),
            Lookup::Unknown => {
                let entry = self.ask_name(parent, name)?;
                let attr = &asked.insert(entry).attr;
                let permissions =
                    if attr.is_directory() { (attr.mode, attr.uid, attr.gid) } else { (0, 0, 0) };
                Ok(NameRef { ino: attr.ino, kind: attr.kind(), permissions })
            }
        }
    }

    /// The entry `name` of `parent`, from the board or by a request.
    #[inline]
    pub(crate) fn lookup_name(&self, parent: Ino, name: &[u8]) -> Result<NameRef, Code> {
        self.lookup_last(parent, name, false, &mut None)
    }

    fn ask_name(&self, parent: Ino, name: &[u8]) -> Result<Entry, Code> {
        match self.ask_then(&Request::Lookup { parent, name }, |reply| match reply {
            Reply::Entry(entry) => Ok(Ok(entry)),
            Reply::Elsewhere { ino, .. } => Ok(Err(ino)),
            _ => Err(Code::Malformed),
        })? {
            Ok(entry) => Ok(entry),
            // Another node has the inode.
            Err(ino) => self.get_attr(ino),
        }
    }

    /// An inode's attributes and layout, from the board or by a request.
    #[inline]
    pub fn get_attr(&self, ino: Ino) -> Result<Entry, Code> {
        match self.on_board(|board| board.inode(ino))? {
            Some(entry) => Ok(entry),
            None => self.ask_entry(&Request::GetAttr { ino }),
        }
    }

    /// The flags of a file whose attributes were read before, if the board shows that its data are in the pool, in the same
    /// epoch. None where the attributes have to be read again.
    #[inline]
    pub(crate) fn flags_if_same_data(&self, attr: &Attr) -> Option<u32> {
        let (epoch, flags) = self.on_board(|board| board.data_state(attr.ino)).ok()??;
        (epoch == attr.epoch() && flags & FLAG_RESIDENT != 0).then_some(flags)
    }

    /// An inode's mode, owner and group, from the board or by a request.
    #[inline]
    pub(crate) fn permissions_of(&self, ino: Ino) -> Result<(u32, u32, u32), Code> {
        match self.on_board(|board| board.permissions(ino))? {
            Some(permissions) => Ok(permissions),
            None => self.get_attr(ino).map(|entry| (entry.attr.mode, entry.attr.uid, entry.attr.gid)),
        }
    }

    /// Prefetches the board's entry of an inode into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, ino: Ino) {
        let _ = self.on_board(|board| {
            board.prefetch(ino);
            None::<()>
        });
    }
}

/// An attachment, unless there is none or its pool is gone.
#[inline]
fn served(attached: *mut Attached) -> Option<&'static Attached> {
    // SAFETY: attachments are never freed.
    let attached = unsafe { attached.as_ref() };
    attached.filter(|attached| !attached.gone.load(Ordering::Relaxed))
}

/// The caller of requests: effective IDs of the calling thread.
pub(crate) fn caller() -> Caller {
    // SAFETY: these calls cannot fail.
    unsafe { Caller { uid: libc::geteuid(), gid: libc::getegid() } }
}

/// Memory for one request and its reply, each of any length.
#[derive(Debug)]
pub struct RequestMemory {
    base: *mut u8,
}

impl RequestMemory {
    const HALF: usize = forebay_types::limits::MESSAGE_BYTES_MAX;

    /// Maps the memory. [`Code::NoMemory`] if there is none.
    pub fn new() -> Result<RequestMemory, Code> {
        // SAFETY: a fresh anonymous mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * RequestMemory::HALF,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Code::NoMemory);
        }
        Ok(RequestMemory { base: base.cast() })
    }

    fn halves(&mut self) -> (&mut [u8], &mut [u8]) {
        // SAFETY: the mapping has two halves of this length, is zero-initialised, and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base, 2 * RequestMemory::HALF) }
            .split_at_mut(RequestMemory::HALF)
    }
}

impl Drop for RequestMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours.
        unsafe { libc::munmap(self.base.cast(), 2 * RequestMemory::HALF) };
    }
}
