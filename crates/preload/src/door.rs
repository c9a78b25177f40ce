//! Access to the pool: libforebay.so, loaded and attached at the first call that needs it.
//!
//! dlopen loads it; the ELF header does not name it. So a program that never uses the pool does not pay for it. If the
//! library is missing or of another build, the calls that need it fail, but the program starts. The version of the
//! table that `forebay_door` returns is checked.
//!
//! Attaching is the only step that may allocate or wait. One thread attaches, and others wait for it. A call that the
//! attaching itself makes, or a signal handler that interrupts it, goes to the kernel or is EIO.

use std::ffi::CStr;
use std::os::raw::{c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU64, Ordering};

use crate::abi::{door_calls, DirectoryHandle, Door, Entry, Place, PoolHandle, Times, DOOR_VERSION};
use crate::interpose::{errno, set_errno};
use crate::{path::Buffer, process, real, settings};

/// After a failed attach, calls fail for this time before the next one tries again.
const RETRY_AFTER_MS: i64 = 1000;
/// How long a thread sleeps between checks whether another thread has attached.
const WAIT_NS: i64 = 200_000;

/// The attached pool.
#[derive(Clone, Copy)]
pub(crate) struct Pool {
    door: &'static Door,
    handle: *const PoolHandle,
}

impl Pool {
    /// Walks to a place. Returns the place as that of its inode, and the type of the inode (S_IFMT); or a negative
    /// errno, or ESCAPED.
    ///
    /// # Safety
    /// `escape` has room for a path.
    pub(crate) unsafe fn reach(
        self,
        place: Place,
        follow: bool,
        escape: *mut u8,
    ) -> Result<(Place, u32), i64> {
        let mut ino = 0;
        // SAFETY: the contract of abi.rs is kept: the place is valid, the buffers are writable.
        match unsafe { self.resolve(place, i32::from(follow), &mut ino, escape) } {
            mode @ 0.. => {
                Ok((Place { dir: ino, path: std::ptr::null(), bytes: 0 }, mode as u32 & libc::S_IFMT))
            }
            failed => Err(failed),
        }
    }

    /// Whether the effective ids of the caller permit R_OK, W_OK or X_OK of what [`Pool::reach`] found.
    ///
    /// # Safety
    /// `escape` has room for a path.
    pub(crate) unsafe fn allows(self, itself: Place, amode: i32, escape: *mut u8) -> Result<(), i64> {
        // SAFETY: the caller's promise.
        match unsafe { self.access(itself, amode, 1, 1, escape) } {
            0.. => Ok(()),
            failed => Err(failed),
        }
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*);)*) => {
        /// The calls of the door's table.
        #[allow(clippy::too_many_arguments)]
        impl Pool {$(
            $(#[$doc])*
            ///
            /// # Safety
            /// As `abi.rs` says of its arguments.
            #[inline]
            pub(crate) unsafe fn $name(self, $($arg: $ty),*) -> i64 {
                // SAFETY: the handle is attached; the caller's promise.
                unsafe { (self.door.$name)(self.handle, $($arg),*) }
            }
        )*}
    };
}
door_calls!(methods);

/// The result of a call where success and failure are both numbers.
pub(crate) fn either(result: Result<i64, i64>) -> i64 {
    result.unwrap_or_else(|failed| failed)
}

/// Why there is no pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Absent {
    /// The attach failed: the errno of calls that need the pool.
    Failed(i32),
    /// This thread is attaching.
    Attaching,
}

static DOOR: AtomicPtr<Door> = AtomicPtr::new(std::ptr::null_mut());
static HANDLE: AtomicPtr<PoolHandle> = AtomicPtr::new(std::ptr::null_mut());
/// The pool as attached by a child that runs in the memory of its parent, and that child. The child's descriptors are
/// not those of the parent.
static BORROWER: AtomicI32 = AtomicI32::new(0);
static BORROWED: AtomicPtr<PoolHandle> = AtomicPtr::new(std::ptr::null_mut());
/// Process and thread that attach, or 0.
static ATTACHING: AtomicU64 = AtomicU64::new(0);
static FAILED_AT_MS: AtomicI64 = AtomicI64::new(i64::MIN);
/// The errno of calls after the last failed attach.
static FAILED_BY: AtomicI32 = AtomicI32::new(libc::EIO);
static COMPLAINED: AtomicBool = AtomicBool::new(false);

/// The pool. The first call attaches.
#[inline]
pub(crate) fn pool() -> Result<Pool, Absent> {
    let handle = HANDLE.load(Ordering::Acquire);
    if handle.is_null() {
        return pool_slowly();
    }
    // SAFETY: DOOR is stored before HANDLE, and tables are static.
    Ok(Pool { door: unsafe { &*DOOR.load(Ordering::Relaxed) }, handle })
}

/// True when the pool is attached.
#[inline]
pub(crate) fn is_attached() -> bool {
    !HANDLE.load(Ordering::Relaxed).is_null()
}

/// The errno of calls that need the pool, if this process tried to attach and could not.
pub(crate) fn failed() -> Option<i32> {
    let has_failed = !is_attached() && FAILED_AT_MS.load(Ordering::Relaxed) != i64::MIN;
    has_failed.then(|| FAILED_BY.load(Ordering::Relaxed))
}

#[cold]
#[inline(never)]
fn pool_slowly() -> Result<Pool, Absent> {
    let before = errno();
    let me = (real::getpid() as u64) << 32 | real::gettid() as u64;
    let answer = loop {
        if is_attached() {
            break pool();
        }
        if let Some(pool) = borrowed() {
            break Ok(pool);
        }
        match ATTACHING.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => {
                let answer = match recently_failed() {
                    true => Err(Absent::Failed(FAILED_BY.load(Ordering::Relaxed))),
                    false => attach(),
                };
                ATTACHING.store(0, Ordering::Release);
                break answer;
            }
            Err(other) if other == me => break Err(Absent::Attaching),
            // A fork copied the state, but not the thread that was attaching.
            Err(other) if other >> 32 != me >> 32 => {
                let _ = ATTACHING.compare_exchange(other, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            Err(_) => {
                let pause = libc::timespec { tv_sec: 0, tv_nsec: WAIT_NS };
                // SAFETY: the time is readable.
                unsafe { system_call!(libc::SYS_nanosleep, &raw const pause, 0) };
            }
        }
    };
    set_errno(before);
    answer
}

/// The pool as this process attached it in the memory of its parent.
fn borrowed() -> Option<Pool> {
    let handle = BORROWED.load(Ordering::Acquire);
    if handle.is_null() || BORROWER.load(Ordering::Relaxed) != real::getpid() {
        return None;
    }
    // SAFETY: DOOR is stored before BORROWED.
    Some(Pool { door: unsafe { &*DOOR.load(Ordering::Relaxed) }, handle })
}

/// Passes on a result of the pool. Calls return EIO once the pool's daemon has ended; the first EIO is reported on
/// standard error.
#[inline]
pub(crate) fn heard(answer: i64) -> i64 {
    if answer == -i64::from(libc::EIO) {
        complain_of_pool();
    }
    answer
}

#[cold]
fn complain_of_pool() {
    if !COMPLAINED.swap(true, Ordering::Relaxed) {
        let dir = settings::pool_c().to_bytes();
        settings::complain(&[
            b"forebay: calls on the pool at ",
            dir,
            b" fail with EIO; `forebay status --pool ",
            dir,
            b"` says whether its daemon is gone\n",
        ]);
    }
}

fn now_ms() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

fn recently_failed() -> bool {
    now_ms().saturating_sub(FAILED_AT_MS.load(Ordering::Relaxed)) < RETRY_AFTER_MS
}

fn attach() -> Result<Pool, Absent> {
    let mut words = [0u8; 768];
    let door = load_door(&mut words).ok_or(libc::EIO);
    match door.and_then(|door| attach_to(door, &mut words)) {
        Ok(pool) => Ok(pool),
        Err(by) => {
            FAILED_BY.store(by, Ordering::Relaxed);
            FAILED_AT_MS.store(now_ms(), Ordering::Relaxed);
            if !COMPLAINED.swap(true, Ordering::Relaxed) {
                let why = CStr::from_bytes_until_nul(&words).unwrap_or_default().to_bytes();
                let line = &mut why.split(|b| *b == b'\n').map(<[u8]>::trim_ascii);
                let first = line.next().unwrap_or_default();
                let hint = line.next().unwrap_or_default();
                let gap: &[u8] = if hint.is_empty() { b"" } else { b"; " };
                settings::complain(&[b"forebay: ", first, gap, hint, b"\n"]);
            }
            Err(Absent::Failed(by))
        }
    }
}

/// Attaches, or returns the errno of calls on the pool.
fn attach_to(door: &'static Door, words: &mut [u8]) -> Result<Pool, i32> {
    let mut handle: *const PoolHandle = std::ptr::null();
    // SAFETY: C strings, a buffer of the given size, and a writable pointer.
    let answer = unsafe {
        (door.attach)(
            settings::pool_c().as_ptr(),
            settings::prefix_c(),
            words.as_mut_ptr().cast::<c_char>(),
            words.len(),
            &mut handle,
        )
    };
    if answer < 0 || handle.is_null() {
        // The program can handle these. Everything else means that the pool is not available.
        let own = [libc::EMFILE, libc::ENOMEM].into_iter().find(|own| answer == -i64::from(*own));
        return Err(own.unwrap_or(libc::EIO));
    }
    DOOR.store(std::ptr::from_ref(door).cast_mut(), Ordering::Relaxed);
    if process::borrows_memory() {
        BORROWER.store(real::getpid(), Ordering::Relaxed);
        BORROWED.store(handle.cast_mut(), Ordering::Release);
    } else {
        HANDLE.store(handle.cast_mut(), Ordering::Release);
    }
    Ok(Pool { door, handle })
}

/// Finds the libforebay.so that is loaded already, as a program may be linked with it, or loads the one beside this
/// library. On failure `words` have the reason.
fn load_door(words: &mut [u8]) -> Option<&'static Door> {
    let door = DOOR.load(Ordering::Relaxed);
    if !door.is_null() {
        // SAFETY: tables are static.
        return Some(unsafe { &*door });
    }
    let mut library = Buffer::new();
    if !loaded_already(&mut library) && !beside_this_library(&mut library) {
        say(words, &[b"cannot find where libforebay_preload.so was loaded from, to load libforebay.so"]);
        return None;
    }
    // SAFETY: a C string.
    let loaded = unsafe { libc::dlopen(library.as_c(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if loaded.is_null() {
        // SAFETY: after a failure dlerror returns a C string or null.
        let why = unsafe { libc::dlerror() };
        // SAFETY: not null.
        let why = if why.is_null() { b"unknown error" } else { unsafe { crate::path::bytes(why) } };
        say(words, &[b"cannot load ", why, b"; install libforebay.so beside libforebay_preload.so"]);
        return None;
    }
    // SAFETY: the library is loaded and never unloaded.
    let found = unsafe { libc::dlsym(loaded, c"forebay_door".as_ptr()) };
    if !found.is_null() {
        // SAFETY: libforebay.so exports it with this type.
        let door: extern "C" fn(u32) -> *const Door = unsafe { std::mem::transmute::<*mut c_void, _>(found) };
        // SAFETY: null or a static table of this version.
        if let Some(door) = unsafe { door(DOOR_VERSION).as_ref() } {
            return Some(door);
        }
    }
    // SAFETY: a C string was stored.
    let library = unsafe { crate::path::bytes(library.as_c()) };
    say(words, &[library, b" is of another build than libforebay_preload.so; install both together"]);
    None
}

/// The path of the libforebay.so that is loaded, if one is. The list of objects is read without dlopen, which would
/// search the file system and set the error that the program's dlerror returns.
fn loaded_already(out: &mut Buffer) -> bool {
    unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _bytes: usize, out: *mut c_void) -> i32 {
        // SAFETY: the loader passes a valid object. `out` is the buffer that is passed below.
        let (name, out) = unsafe { ((*object).dlpi_name, &mut *out.cast::<Buffer>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: the name of a loaded object is a C string.
        let name = unsafe { crate::path::bytes(name) };
        i32::from(name.ends_with(b"/libforebay.so") && out.set(&[name]))
    }
    // SAFETY: `look` gets the arguments that it expects, and lives as long as this call.
    unsafe { libc::dl_iterate_phdr(Some(look), std::ptr::from_mut(out).cast()) != 0 }
}

/// The path of libforebay.so in the directory that this library was loaded from.
fn beside_this_library(out: &mut Buffer) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let here: fn(&mut Buffer) -> bool = beside_this_library;
    // SAFETY: dladdr takes any address. The structure is writable.
    if unsafe { libc::dladdr(here as *const c_void, found.as_mut_ptr()) } == 0 {
        return false;
    }
    // SAFETY: zeroed and then filled.
    let name = unsafe { found.assume_init() }.dli_fname;
    if name.is_null() {
        return false;
    }
    // SAFETY: the name of a loaded object is a C string.
    let name = unsafe { crate::path::bytes(name) };
    let directory = name.iter().rposition(|b| *b == b'/').map_or(b"./".as_slice(), |slash| &name[..=slash]);
    out.set(&[directory, b"libforebay.so"])
}

fn say(words: &mut [u8], parts: &[&[u8]]) {
    let mut at = 0;
    for part in parts {
        let n = part.len().min(words.len() - 1 - at);
        words[at..at + n].copy_from_slice(&part[..n]);
        at += n;
    }
    words[at] = 0;
}
