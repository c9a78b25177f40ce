//! fopen and freopen: libc's stream around a file that this library opened.

use std::os::raw::{c_char, c_int};

use libc::FILE;

use crate::interpose::{errno, set_errno};
use crate::path::{self, Buffer};
use crate::{classify, real};

/// Flags of open(2) for a mode of fopen(3); none for a mode that is not one.
fn flags_of(mode: &[u8]) -> Option<c_int> {
    let (access, makes) = match mode.first()? {
        b'r' => (libc::O_RDONLY, 0),
        b'w' => (libc::O_WRONLY, libc::O_CREAT | libc::O_TRUNC),
        b'a' => (libc::O_WRONLY, libc::O_CREAT | libc::O_APPEND),
        _ => return None,
    };
    let (mut access, mut flags) = (access, makes);
    for letter in &mode[1..] {
        match letter {
            b'+' => access = libc::O_RDWR,
            b'x' => flags |= libc::O_EXCL,
            b'e' => flags |= libc::O_CLOEXEC,
            b',' => break,
            _ => {}
        }
    }
    Some(access | flags)
}

/// The mode for a stream around an open file: the file is not created or truncated again.
fn mode_of_opened(mode: &[u8]) -> [c_char; 16] {
    let mut out = [0; 16];
    let kept = mode.iter().filter(|letter| **letter != b'x').take(15);
    for (to, from) in out.iter_mut().zip(kept) {
        *to = *from as c_char;
    }
    out
}

/// Opens a file in the pool for a stream. Returns the descriptor, or -1 and errno.
///
/// # Safety
/// `path` is a C string.
unsafe fn open_for(path: *const c_char, mode: &[u8]) -> c_int {
    let Some(flags) = flags_of(mode) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { crate::open::open(path, flags, 0o666) }
}

/// True when a function of libc that opens `path` itself would miss the pool: the path leads there, or libc found
/// nothing (`missed`) and a symbolic link or its text leads there.
///
/// # Safety
/// `path` is null or a C string.
pub(crate) unsafe fn libc_would_miss(dirfd: c_int, path: *const c_char, missed: bool, follow: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if !missed {
            return classify::may_lead_to_pool(dirfd, path)
                && !matches!(classify::classify(dirfd, path, follow), classify::Leads::Kernel);
        }
        crate::crossing::crossing(dirfd, path, follow, &mut Buffer::new())
    }
}

/// `/proc/self/fd/N`.
pub(crate) fn proc_path(fd: c_int) -> Buffer {
    let mut digits = [0; 12];
    let mut path = Buffer::new();
    path.set(&[b"/proc/self/fd/", path::digits(fd, &mut digits)]);
    path
}

interpose! {
    /// fopen(3)
    fopen, fopen64 = fn(name: *const c_char, mode: *const c_char) -> *mut FILE {
        // SAFETY: libc's contract: C strings.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, name, false, true) {
                let stream = real::libc_own::fopen(name, mode);
                if !stream.is_null()
                    || errno() != libc::ENOENT
                    || !libc_would_miss(libc::AT_FDCWD, name, true, true)
                {
                    return stream;
                }
            }
            let wanted = path::bytes(mode);
            let fd = open_for(name, wanted);
            if fd < 0 {
                return std::ptr::null_mut();
            }
            // Only fopen understands a mode that names a character set.
            let stream = if path::contains(wanted, b"ccs=") {
                let stream = real::libc_own::fopen(proc_path(fd).as_c(), mode);
                real::close(fd);
                return stream;
            } else {
                libc::fdopen(fd, mode_of_opened(wanted).as_ptr())
            };
            if stream.is_null() {
                real::close(fd);
            }
            stream
        }
    }

    /// freopen(3)
    freopen, freopen64 = fn(name: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
        // SAFETY: libc's contract: C strings and an open stream.
        unsafe {
            if name.is_null()
                || !(libc_would_miss(libc::AT_FDCWD, name, false, true)
                    || libc_would_miss(libc::AT_FDCWD, name, true, true))
            {
                return real::libc_own::freopen(name, mode, stream);
            }
            let wanted = path::bytes(mode);
            let fd = open_for(name, wanted);
            if fd < 0 {
                // As in libc, the stream is closed even then.
                let why = errno();
                libc::fclose(stream);
                set_errno(why);
                return std::ptr::null_mut();
            }
            let reopened = real::libc_own::freopen(proc_path(fd).as_c(), mode_of_opened(wanted).as_ptr(), stream);
            let why = errno();
            real::close(fd);
            set_errno(why);
            reopened
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_modes_are_those_of_fopen() {
        assert_eq!(flags_of(b"r"), Some(libc::O_RDONLY));
        assert_eq!(flags_of(b"rb+"), Some(libc::O_RDWR));
        assert_eq!(
            flags_of(b"wxe"),
            Some(libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_EXCL | libc::O_CLOEXEC)
        );
        assert_eq!(flags_of(b"a+"), Some(libc::O_RDWR | libc::O_CREAT | libc::O_APPEND));
        assert_eq!(flags_of(b"q"), None);
        assert_eq!(flags_of(b""), None);
    }

    #[test]
    fn proc_path_names_the_descriptor() {
        // SAFETY: just set.
        assert_eq!(unsafe { path::bytes(proc_path(1034).as_c()) }, b"/proc/self/fd/1034");
        // SAFETY: as above.
        assert_eq!(unsafe { path::bytes(proc_path(0).as_c()) }, b"/proc/self/fd/0");
    }
}
