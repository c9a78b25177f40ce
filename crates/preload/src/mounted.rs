//! Whether the pool is mounted at the prefix. Then the kernel follows a symbolic link to a path under the prefix to the
//! mount, and a file that the kernel does not find does not exist. So `crossing` need not examine the path.
//!
//! The answer is kept for a moment, as a program may search for many files that do not exist.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::PATH_BYTES;
use crate::path::Buffer;
use crate::{real, settings};

/// How long the answer is kept. A new or removed mount is noticed after this time.
const BELIEVED_MS: u64 = 100;
/// The link in the pool's directory in which the mount stores where it is: `DEVICE:PATH`.
const LINK: &[u8] = b"/mounted";

/// The time of the last check in milliseconds, doubled. The lowest bit is its answer.
static SEEN: AtomicU64 = AtomicU64::new(0);

fn now_ms() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut t) };
    t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000
}

/// True when the pool is mounted at the prefix.
pub(crate) fn is_prefix() -> bool {
    let (seen, now) = (SEEN.load(Ordering::Relaxed), now_ms());
    if seen != 0 && now.wrapping_sub(seen >> 1) < BELIEVED_MS {
        return seen & 1 == 1;
    }
    let is = look().is_some();
    SEEN.store(now.max(1) << 1 | u64::from(is), Ordering::Relaxed);
    is
}

#[cold]
fn look() -> Option<()> {
    let (prefix, pool) = (settings::prefix(), settings::pool_c().to_bytes());
    let mut link = Buffer::new();
    if prefix.is_empty() || pool.is_empty() || !link.set(&[pool, LINK]) {
        return None;
    }
    let mut text = Buffer::new();
    // SAFETY: a C string, and a buffer of the given size.
    let n = unsafe { real::readlinkat(libc::AT_FDCWD, link.as_c(), text.first(), PATH_BYTES - 1) };
    let n = usize::try_from(n).ok()?;
    // SAFETY: the kernel stored that many bytes.
    let device = device_of_link(unsafe { std::slice::from_raw_parts(text.first(), n) }, prefix)?;
    if !link.set(&[prefix]) {
        return None;
    }
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    let flags: c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_DONT_SYNC;
    // SAFETY: a C string and a writable structure, filled after success.
    let stat = unsafe {
        if real::fstatat(libc::AT_FDCWD, link.as_c(), stat.as_mut_ptr(), flags) != 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.st_dev == device).then_some(())
}

/// The device of a link's mount, if that is at the prefix.
fn device_of_link(link: &[u8], prefix: &[u8]) -> Option<u64> {
    let colon = link.iter().position(|b| *b == b':')?;
    let (device, at) = (link.get(..colon)?, link.get(colon + 1..)?);
    let mut number = 0u64;
    for digit in device {
        let digit = digit.checked_sub(b'0').filter(|d| *d < 10)?;
        number = number.checked_mul(10)?.checked_add(digit.into())?;
    }
    (at == prefix && number != 0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_of_link_is_that_of_a_mount_at_the_prefix() {
        assert_eq!(device_of_link(b"47:/forebay", b"/forebay"), Some(47));
        for link in [
            "47:/forebay2",
            "47:",
            "",
            ":/forebay",
            "4a:/forebay",
            "0:/forebay",
            "99999999999999999999:/forebay",
        ] {
            assert_eq!(device_of_link(link.as_bytes(), b"/forebay"), None, "{link}");
        }
    }
}
