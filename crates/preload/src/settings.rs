//! Settings in the environment: the pool, its prefix, and whether the library is disabled.
//!
//! They are read once, by the library's constructor, or by the first call of a constructor that runs before it.
//! Afterwards nothing here changes, so the comparison of a path with the prefix needs one load.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::os::raw::c_char;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::abi::PATH_BYTES;
use crate::real;

/// The prefix unless FOREBAY_PREFIX sets another.
const PREFIX: &CStr = c"/forebay";
/// [`PREFIX_BYTES`] before the environment is read.
const UNREAD: usize = usize::MAX;

/// Bytes of the prefix; 0 when every call is passed through.
static PREFIX_BYTES: AtomicUsize = AtomicUsize::new(UNREAD);
static TEXTS: Texts =
    Texts { prefix: UnsafeCell::new([0; PATH_BYTES]), pool: UnsafeCell::new([0; PATH_BYTES]) };

/// NUL-terminated texts.
struct Texts {
    prefix: UnsafeCell<[u8; PATH_BYTES]>,
    pool: UnsafeCell<[u8; PATH_BYTES]>,
}

// SAFETY: written only before PREFIX_BYTES is stored (Release), read only after it was loaded (Acquire).
unsafe impl Sync for Texts {}

/// Runs when the library is loaded, before the program starts a thread.
#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), link_section = ".init_array")]
#[allow(dead_code)]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn constructor() {
        STDERR.store(identity_of_stderr(), Ordering::Relaxed);
        if prefix_bytes() != 0 {
            crate::process::begin();
            real::libc_own::find_ahead();
        }
    }
    constructor
};

/// Bytes of the prefix; 0 when every call is passed through.
#[inline(always)]
pub(crate) fn prefix_bytes() -> usize {
    match PREFIX_BYTES.load(Ordering::Acquire) {
        UNREAD => read_environment(),
        bytes => bytes,
    }
}

/// The prefix: absolute, normal, without a slash at its end. Empty when every call is passed through.
#[inline(always)]
pub(crate) fn prefix() -> &'static [u8] {
    let bytes = prefix_bytes();
    // SAFETY: the texts are written and do not change any more.
    let text: &'static [u8; PATH_BYTES] = unsafe { &*TEXTS.prefix.get() };
    &text[..bytes.min(PATH_BYTES)]
}

/// The prefix as a C string.
pub(crate) fn prefix_c() -> *const c_char {
    prefix_bytes();
    TEXTS.prefix.get().cast()
}

/// The pool's directory as a C string.
pub(crate) fn pool_c() -> &'static CStr {
    prefix_bytes();
    // SAFETY: as in `prefix`.
    CStr::from_bytes_until_nul(unsafe { &*TEXTS.pool.get() }).unwrap_or_default()
}

/// Reads the environment. Only one thread runs it: the thread of this constructor, or of another constructor before it.
#[cold]
fn read_environment() -> usize {
    // SAFETY: no other reference to the texts exists before PREFIX_BYTES is stored.
    let (prefix, pool) = unsafe { (&mut *TEXTS.prefix.get(), &mut *TEXTS.pool.get()) };
    let bytes = read(prefix, pool).unwrap_or(0);
    PREFIX_BYTES.store(bytes, Ordering::Release);
    bytes
}

fn read(prefix: &mut [u8; PATH_BYTES], pool: &mut [u8; PATH_BYTES]) -> Option<usize> {
    if variable(c"FOREBAY_DISABLE").is_some_and(|v| !v.is_empty() && v != c"0") {
        return None;
    }
    let named = variable(c"FOREBAY_POOL")?.to_bytes();
    let start = if named.first() == Some(&b'/') { 0 } else { working_directory(pool)? };
    let end = start.checked_add(named.len()).filter(|end| *end < PATH_BYTES)?;
    pool[start..end].copy_from_slice(named);
    pool[end] = 0;
    let named = variable(c"FOREBAY_PREFIX").filter(|prefix| !prefix.is_empty());
    let wanted = named.unwrap_or(PREFIX).to_bytes();
    let bytes = normalise(wanted, prefix);
    if bytes.is_none() {
        complain(&[
            b"forebay: FOREBAY_PREFIX=",
            wanted,
            b" is not an absolute path of a directory below / without `..`: every call passes through\n",
        ]);
    }
    bytes
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the environment does not change, as no thread of the program runs yet.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: not null; a C string of the environment.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// The working directory and a slash, for a pool with a relative path.
fn working_directory(out: &mut [u8; PATH_BYTES]) -> Option<usize> {
    // SAFETY: the buffer is writable for its length.
    let bytes = unsafe { system_call!(libc::SYS_getcwd, out.as_mut_ptr(), out.len()) };
    let bytes = usize::try_from(bytes).ok().filter(|n| *n > 1 && out[0] == b'/')?;
    out[bytes - 1] = b'/';
    Some(bytes)
}

/// Copies an absolute path without empty components, `.`, and a slash at the end. None if it is not absolute, or has
/// `..`.
fn normalise(path: &[u8], out: &mut [u8; PATH_BYTES]) -> Option<usize> {
    if path.first() != Some(&b'/') {
        return None;
    }
    let mut bytes = 0;
    for component in path.split(|b| *b == b'/').filter(|c| !c.is_empty() && *c != b".") {
        if component == b".." || bytes + component.len() + 2 > PATH_BYTES {
            return None;
        }
        out[bytes] = b'/';
        out[bytes + 1..][..component.len()].copy_from_slice(component);
        bytes += 1 + component.len();
    }
    out[bytes] = 0;
    (bytes > 0).then_some(bytes)
}

/// Writes a line to standard error.
pub(crate) fn complain(words: &[&[u8]]) {
    let mut line = [0; 1024];
    let mut bytes = 0;
    for word in words {
        let n = word.len().min(line.len() - bytes);
        line[bytes..bytes + n].copy_from_slice(&word[..n]);
        bytes += n;
    }
    // A program may have opened another file as its descriptor 2, and write its own data to it.
    let before = STDERR.load(Ordering::Relaxed);
    if before != UNSEEN && before != identity_of_stderr() {
        return;
    }
    // SAFETY: the buffer is readable for its length.
    unsafe { system_call!(libc::SYS_write, 2, line.as_ptr(), bytes) };
}

/// The identity of standard error when the library was loaded.
static STDERR: AtomicU64 = AtomicU64::new(UNSEEN);
/// [`STDERR`] before it is read.
const UNSEEN: u64 = u64::MAX;

/// A number that identifies the file behind descriptor 2; 0 for none.
fn identity_of_stderr() -> u64 {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure is writable, and filled on success.
    unsafe {
        if real::fstat(2, stat.as_mut_ptr()) != 0 {
            return 0;
        }
        let stat = stat.assume_init();
        stat.st_ino ^ stat.st_dev.rotate_left(32) | 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(path: &[u8]) -> Option<Vec<u8>> {
        let mut out = [9; PATH_BYTES];
        normalise(path, &mut out).map(|n| {
            assert_eq!(out[n], 0);
            out[..n].to_vec()
        })
    }

    #[test]
    fn normalise_of_prefixes_drops_empty_components() {
        assert_eq!(normal(b"/forebay").as_deref(), Some(b"/forebay".as_slice()));
        assert_eq!(normal(b"//a/.//b/").as_deref(), Some(b"/a/b".as_slice()));
    }

    #[test]
    fn normalise_of_bad_prefixes_is_none() {
        for bad in [
            b"".as_slice(),
            b"/",
            b"//./",
            b"a",
            b"/a/../b",
            &[b'/'; 9000],
            &[b"/", [b'a'; 4097].as_slice()].concat(),
        ] {
            assert_eq!(normal(bad), None);
        }
    }
}
