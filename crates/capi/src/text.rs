//! Texts: what each errno means for a pool, and why this thread's last attach failed.

use std::cell::RefCell;
use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

use crate::answer::Failed;
use crate::boundary::Returned;

/// A text that C receives.
impl Returned for *const c_char {
    const PANICKED: *const c_char = c"unknown error".as_ptr();
}

/// The longest text about a failed attach that is kept, in bytes with its NUL.
const WORDS_BYTES: usize = 1024;

thread_local! {
    static WORDS: RefCell<[u8; WORDS_BYTES]> = const { RefCell::new([0; WORDS_BYTES]) };
}

/// Copies as many whole characters of `words` as fit into `out`, and a NUL.
pub(crate) fn store(words: &str, out: &mut [u8]) {
    let Some(most) = out.len().checked_sub(1) else { return };
    let mut bytes = words.len().min(most);
    while !words.is_char_boundary(bytes) {
        bytes -= 1;
    }
    out[..bytes].copy_from_slice(&words.as_bytes()[..bytes]);
    out[bytes] = 0;
}

/// Keeps the text about this thread's last failed attach.
pub(crate) fn remember(words: &str) {
    WORDS.with_borrow_mut(|kept| store(words, kept));
}

pub(crate) fn strerror(error: c_int) -> *const c_char {
    let words: &'static CStr = match error.unsigned_abs() as i32 {
        0 => c"success",
        libc::ENOENT => {
            c"no such file or directory: paths in the pool start at its root, without the prefix of \
              `forebay run`; staging needs the forebay command beside the library"
        }
        libc::EEXIST => c"the name exists, or it was set before: open without O_EXCL, or remove it first",
        libc::ENOTDIR => c"a component of the path is not a directory",
        libc::EISDIR => c"it is a directory",
        libc::ENOTEMPTY => c"the directory is not empty: remove what is in it first",
        libc::ENAMETOOLONG => c"a name exceeds 255 bytes or the path 4095",
        libc::ENOSPC => c"the pool is full: stage files out or remove some, or start it with more --capacity",
        libc::EIO => {
            c"the pool's daemon is gone or its medium failed: see its log, `forebay status` and dmesg"
        }
        libc::EPERM => c"only the file's owner, or root, may do this",
        libc::EACCES => {
            c"not allowed: by the mode bits of the file or of a directory on its path, or because the pool \
              belongs to another user"
        }
        libc::EINVAL => c"an argument is invalid",
        libc::ELOOP => c"too many symbolic links, or they lead in a circle",
        libc::EMLINK => c"the inode has as many links as it can",
        libc::EXDEV => c"the path leaves the pool: use the kernel's own call for it",
        libc::ENODATA => c"no such extended attribute",
        libc::ERANGE => {
            c"the buffer is too small: ask for the size with room for 0 bytes; or the range is not in the volume"
        }
        libc::E2BIG => c"the value is too large",
        libc::EOPNOTSUPP => {
            c"a pool does not support this, or not for this file: a descriptor of another node's file \
              needs the pool's mount (`forebay mount`), and a file with several backing files needs \
              `forebay_file_open`"
        }
        libc::ESTALE => c"it was removed or replaced meanwhile: open it again",
        libc::EBUSY => {
            c"it is in use: another process has it open or locked, so try again when that has closed it"
        }
        libc::EOVERFLOW => c"the value does not fit its type",
        libc::EINTR => c"interrupted by a signal, or stopped: start it again",
        libc::EBADF => c"the descriptor is not open, or not for this: see the flags that it was opened with",
        libc::EMFILE => c"out of descriptors: close files, or raise `ulimit -n`",
        libc::ENOMEM => c"out of memory: give the process, or its cgroup, more",
        libc::ETXTBSY => c"a running program uses this file: write to it when the program has ended",
        libc::EFAULT => c"a pointer is bad",
        libc::EFBIG => c"the file is larger than its medium, or `ulimit -f`, allows",
        libc::EROFS => c"read-only file system",
        libc::EAGAIN => c"too many requests are in progress: wait for some of them",
        libc::ENXIO => {
            c"the pool has no such node or target, or fewer nodes (see `forebay status`); or there are no \
              data behind the offset, or no process has the other end of the socket or FIFO open"
        }
        _ => c"unknown error",
    };
    words.as_ptr()
}

pub(crate) fn attach_error(words: &mut [u8]) -> Result<usize, Failed> {
    Ok(WORDS.with_borrow(|kept| {
        let text = CStr::from_bytes_until_nul(kept).unwrap_or_default().to_str().unwrap_or_default();
        store(text, words);
        text.len()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Code;

    #[test]
    fn strerror_of_every_code_has_words() {
        for code in Code::ALL {
            // SAFETY: a static C string.
            let words = unsafe { CStr::from_ptr(strerror(-code.errno())) };
            assert_ne!(words, c"unknown error", "{code}");
        }
    }

    #[test]
    fn store_of_long_words_cuts_at_a_character() {
        let mut out = [9; 6];
        store("abcdé", &mut out);
        assert_eq!(&out, b"abcd\0\x09");
        store("x", &mut []);
    }
}
