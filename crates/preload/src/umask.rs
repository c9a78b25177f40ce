//! The umask. The kernel applies it to files that it creates, and this library to files that it creates in the pool.
//!
//! Only /proc/self/status shows the umask without changing it. So it is read there once, and updated by umask(2) from
//! then on.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{process, real};

/// [`UMASK`] before it is read.
const UNKNOWN: u32 = u32::MAX;

static UMASK: AtomicU32 = AtomicU32::new(UNKNOWN);

/// `mode` less the umask.
#[inline]
pub(crate) fn apply(mode: u32) -> u32 {
    let umask = match UMASK.load(Ordering::Relaxed) {
        UNKNOWN => read(),
        umask => umask,
    };
    mode & !umask
}

#[cold]
fn read() -> u32 {
    let umask = from_proc().unwrap_or_else(|| {
        // SAFETY: it touches no memory. Without /proc there is no better way: another thread may create a file between
        // the two calls.
        unsafe {
            let umask = system_call!(libc::SYS_umask, 0o077);
            system_call!(libc::SYS_umask, umask);
            umask as u32
        }
    });
    keep(umask);
    umask
}

fn keep(umask: u32) {
    // A child that runs in the memory of its parent has its own umask. The parent reads its umask again.
    let umask = if process::borrows_memory() { UNKNOWN } else { umask };
    UMASK.store(umask, Ordering::Relaxed);
}

fn from_proc() -> Option<u32> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let fd = unsafe { real::openat(libc::AT_FDCWD, c"/proc/self/status".as_ptr(), flags, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // It is on the second line, behind the name.
    let mut head = [0; 256];
    let n = real::pread(fd, &mut head, 0);
    real::close(fd);
    parse(head.get(..usize::try_from(n).ok()?)?)
}

fn parse(status: &[u8]) -> Option<u32> {
    let line = status.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(b"Umask:"))?;
    let digits = line.trim_ascii();
    digits.iter().try_fold(0, |umask, digit| match digit {
        b'0'..=b'7' => Some(umask * 8 + u32::from(digit - b'0')),
        _ => None,
    })
}

interpose! {
    /// umask(2)
    umask = fn(mask: libc::mode_t) -> libc::mode_t {
        // SAFETY: it touches no memory.
        let before = unsafe { system_call!(libc::SYS_umask, mask) };
        if crate::settings::prefix_bytes() != 0 {
            keep(mask & 0o777);
        }
        before as libc::mode_t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_status_finds_the_umask() {
        assert_eq!(parse(b"Name:\tcat\nUmask:\t0027\nState:\tR\n"), Some(0o027));
        assert_eq!(parse(b"Name:\tcat\nState:\tR\n"), None);
        assert_eq!(parse(b"Umask:\t00x7\n"), None);
    }

    #[test]
    fn umask_of_this_process_is_what_the_kernel_applies() {
        // SAFETY: it touches no memory.
        let before = unsafe { umask(0o027) };
        assert_eq!(from_proc(), Some(0o027));
        // SAFETY: as above.
        unsafe { umask(before) };
        assert_eq!(from_proc(), Some(before));
    }
}
