//! mkstemp and similar calls, for templates in the pool. This library also chooses the names for templates in the
//! kernel's tree, as a template may lead from one to the other.

use std::os::raw::{c_char, c_int};

use crate::interpose::{errno, set_errno};
use crate::names::mkdir;
use crate::open::open_any;
use crate::stat::lstat;
use crate::stdio::libc_would_miss;
use crate::{path, real};

/// The maximum number of names to try, as in glibc.
const ATTEMPTS: u32 = 62 * 62 * 62;
const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
const MARK: &[u8; 6] = b"XXXXXX";

/// Six random letters.
fn draw(out: &mut [u8]) {
    let mut random = 0u64;
    let bytes = size_of_val(&random);
    // SAFETY: the word is writable.
    let got = unsafe { system_call!(libc::SYS_getrandom, &raw mut random, bytes, libc::GRND_NONBLOCK) };
    if got != bytes as isize {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the time is writable.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
        random =
            (now.tv_nsec as u64 ^ (crate::real::gettid() as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    for letter in out {
        *letter = LETTERS[(random % 62) as usize];
        random /= 62;
    }
}

/// Fills the six X of the template, which are before a suffix of `suffix_bytes` bytes, until `make` succeeds with a
/// name.
unsafe fn with_names(template: *mut c_char, suffix: c_int, make: impl Fn() -> c_int) -> c_int {
    // SAFETY: libc's contract: a writable C string.
    let bytes = unsafe { path::bytes(template) }.len();
    let end = usize::try_from(suffix).ok().and_then(|suffix| bytes.checked_sub(suffix));
    let Some(start) = end.and_then(|end| end.checked_sub(MARK.len())) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: these six bytes are in the template, before its NUL.
    let mark = unsafe { std::slice::from_raw_parts_mut(template.cast::<u8>().add(start), MARK.len()) };
    if mark != MARK {
        set_errno(libc::EINVAL);
        return -1;
    }
    let before = errno();
    for _ in 0..ATTEMPTS {
        draw(mark);
        let made = make();
        if made >= 0 {
            set_errno(before);
            return made;
        }
        if errno() != libc::EEXIST {
            return -1;
        }
    }
    set_errno(libc::EEXIST);
    -1
}

unsafe fn make_file(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    let flags = flags & !libc::O_ACCMODE | libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    // SAFETY: libc's contract.
    unsafe {
        with_names(template, suffix, || {
            crate::interpose::answer_int(open_any(libc::AT_FDCWD, template, flags, 0o600))
        })
    }
}

interpose! {
    /// mkstemp(3)
    mkstemp, mkstemp64 = fn(template: *mut c_char) -> c_int {
        // SAFETY: libc's contract.
        unsafe { make_file(template, 0, 0) }
    }

    /// mkostemp(3)
    mkostemp, mkostemp64 = fn(template: *mut c_char, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        unsafe { make_file(template, 0, flags) }
    }

    /// mkstemps(3)
    mkstemps, mkstemps64 = fn(template: *mut c_char, suffix: c_int) -> c_int {
        // SAFETY: libc's contract.
        unsafe { make_file(template, suffix, 0) }
    }

    /// mkostemps(3)
    mkostemps, mkostemps64 = fn(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        unsafe { make_file(template, suffix, flags) }
    }

    /// mktemp(3): a name that does not exist, for a template in the pool. The template is emptied when there is none.
    mktemp = fn(template: *mut c_char) -> *mut c_char {
        // SAFETY: libc's contract.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, template, false, true) {
                return real::libc_own::mktemp(template);
            }
            let unused = || {
                let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
                if lstat(template, stat.as_mut_ptr()) == 0 {
                    set_errno(libc::EEXIST);
                    return -1;
                }
                if errno() == libc::ENOENT { 0 } else { -1 }
            };
            if with_names(template, 0, unused) != 0 {
                *template = 0;
            }
            template
        }
    }

    /// tempnam(3), for a directory in the pool
    tempnam = fn(directory: *const c_char, prefix: *const c_char) -> *mut c_char {
        // SAFETY: libc's contract; TMPDIR is a C string.
        unsafe {
            let named = libc::getenv(c"TMPDIR".as_ptr());
            let is_directory = |path: *const c_char| {
                let mut stat: libc::stat = std::mem::zeroed();
                !path.is_null()
                    && crate::stat::stat(path, &mut stat) == 0
                    && stat.st_mode & libc::S_IFMT == libc::S_IFDIR
            };
            let chosen = if is_directory(named) { named.cast_const() } else { directory };
            let ours = is_directory(chosen) && libc_would_miss(libc::AT_FDCWD, chosen, false, true);
            if !ours {
                return real::libc_own::tempnam(directory, prefix);
            }
            let start = if prefix.is_null() { b"file".as_slice() } else { path::bytes(prefix) };
            let mut template = path::Buffer::new();
            if !template.set(&[path::bytes(chosen), b"/", &start[..start.len().min(5)], MARK]) {
                set_errno(libc::ENAMETOOLONG);
                return std::ptr::null_mut();
            }
            let made = mktemp(template.first().cast());
            if *made == 0 {
                return std::ptr::null_mut();
            }
            libc::strdup(made)
        }
    }

    /// mkdtemp(3)
    mkdtemp = fn(template: *mut c_char) -> *mut c_char {
        // SAFETY: libc's contract.
        match unsafe { with_names(template, 0, || mkdir(template, 0o700)) } {
            0 => template,
            _ => std::ptr::null_mut(),
        }
    }
}
