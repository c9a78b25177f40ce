//! Links in /proc to open files: `/proc/self/fd/N`, `cwd` and `exe`, `/dev/fd/N`.
//!
//! The kernel follows them to a backing file or an anchor. A call through such a link must act on the file of the pool
//! (its attributes, its dirty mark, the entries of its directories), and reading the link must return the path in the
//! pool.

use std::os::raw::{c_char, c_int};

use crate::abi::Place;
use crate::descriptor;
use crate::door::Pool;
use crate::path::{self, Buffer};
use crate::{real, settings};

/// The number of hexadecimal digits in a backing file's name.
const NAME_BYTES: usize = 16;

/// False when a path is certainly no such link: a comparison of its first bytes.
///
/// # Safety
/// `path` is a C string that starts with a slash.
#[inline(always)]
pub(crate) unsafe fn may_be(path: *const c_char) -> bool {
    // SAFETY: each byte is read only if the bytes before it are not the NUL.
    unsafe {
        match *path.add(1) as u8 {
            b'p' => starts_with(path, b"/proc/"),
            b'd' => starts_with(path, b"/dev/fd/") || starts_with(path, b"/dev/std"),
            _ => false,
        }
    }
}

/// # Safety
/// `path` is a C string.
#[inline]
unsafe fn starts_with(path: *const c_char, front: &[u8]) -> bool {
    // SAFETY: a difference, such as the string's end, ends the comparison.
    front.iter().enumerate().all(|(i, byte)| unsafe { *path.add(i) } as u8 == *byte)
}

/// The length of the link that starts a path, if one does.
fn link_bytes(path: &[u8]) -> Option<usize> {
    let number = |at: usize| {
        let digits = path[at..].iter().take_while(|b| b.is_ascii_digit()).count();
        (digits > 0).then_some(at + digits)
    };
    let ends = |at: usize| matches!(path.get(at), None | Some(b'/')).then_some(at);
    if path.starts_with(b"/dev/fd/") {
        return number(b"/dev/fd/".len()).and_then(ends);
    }
    if let Some(stream) = [b"/dev/stdin".as_slice(), b"/dev/stdout", b"/dev/stderr"]
        .into_iter()
        .find(|stream| path.starts_with(stream))
    {
        return ends(stream.len());
    }
    let component = |at: usize| path[at..].iter().position(|b| *b == b'/').map(|n| at + n + 1);
    let mut at = path.starts_with(b"/proc/").then(|| component(b"/proc/".len()))??;
    if path[at..].starts_with(b"task/") {
        at = component(at + b"task/".len())?;
    }
    let rest = &path[at..];
    if rest.starts_with(b"fd/") {
        return number(at + b"fd/".len()).and_then(ends);
    }
    if rest.starts_with(b"cwd") || rest.starts_with(b"exe") {
        return ends(at + 3);
    }
    None
}

/// True for a path by which the kernel finds a backing file through the target's descriptor:
/// `/proc/self/fd/N/data/xx/` and the inode number in hexadecimal digits.
pub(crate) fn is_backing(path: &[u8]) -> bool {
    let mut parts = path.rsplitn(4, |b| *b == b'/');
    let name =
        parts.next().is_some_and(|name| name.len() == NAME_BYTES && name.iter().all(u8::is_ascii_hexdigit));
    let low = parts.next().is_some_and(|low| low.len() == 2);
    let data = parts.next() == Some(b"data");
    let link = parts.next().is_some_and(|link| {
        link.strip_prefix(b"/proc/self/fd/")
            .is_some_and(|fd| !fd.is_empty() && fd.iter().all(u8::is_ascii_digit))
    });
    name && low && data && link
}

/// True for the path by which the pool's mount shows an inode of another node.
pub(crate) fn is_by_mount(path: &[u8]) -> bool {
    let last = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    last.strip_prefix(b".forebay-inode-").is_some_and(|digits| digits.len() == NAME_BYTES)
}

/// Runs `body` on an O_PATH descriptor of a link's target.
///
/// # Safety
/// `link` is a C string.
unsafe fn opened<T>(
    dirfd: c_int,
    link: *const c_char,
    body: impl FnOnce(c_int) -> Option<T>,
) -> Result<Option<T>, isize> {
    // SAFETY: the caller's promise.
    let fd = unsafe { real::openat(dirfd, link, libc::O_PATH | libc::O_CLOEXEC, 0) };
    if fd < 0 {
        // A file that cannot be opened now may still be in the pool.
        return if matches!(-fd as c_int, libc::EMFILE | libc::ENFILE) { Err(fd) } else { Ok(None) };
    }
    let result = body(fd as c_int);
    real::close(fd as c_int);
    Ok(result)
}

/// Runs `body` on a descriptor of the target of the link at the start of `path`, and on the rest of the path.
fn behind<T>(
    path: &[u8],
    follow: bool,
    body: impl FnOnce(c_int, &[u8]) -> Option<T>,
) -> Result<Option<T>, isize> {
    let Some((link, rest)) = link_bytes(path).map(|bytes| path.split_at(bytes)) else { return Ok(None) };
    let mut text = Buffer::new();
    if (rest.is_empty() && !follow) || !text.set(&[link]) {
        return Ok(None);
    }
    // SAFETY: a C string was stored.
    unsafe { opened(libc::AT_FDCWD, text.as_c(), |fd| body(fd, rest)) }
}

/// The directory that a link of this process leads to, if it is on the mount and the pool opened it. Only the
/// descriptor itself shows by which path it was opened.
fn directory_of_mount(link: &[u8]) -> Option<(Pool, u64)> {
    if link == b"/proc/self/cwd" {
        return crate::cwd::directory();
    }
    let digits = link.strip_prefix(b"/proc/self/fd/").or_else(|| link.strip_prefix(b"/dev/fd/"))?;
    let number = digits.iter().try_fold(0 as c_int, |number, digit| {
        number.checked_mul(10)?.checked_add(c_int::from(digit.checked_sub(b'0').filter(|d| *d < 10)?))
    })?;
    descriptor::directory_of(number)
}

/// Where in the pool a path through such a link leads. `follow` is true if the call follows a link at the end. A file
/// without a name is left to the kernel, which alone can open it again.
pub(crate) fn place(path: &[u8], follow: bool) -> Result<Option<(Pool, Place)>, isize> {
    let found = behind(path, follow, |fd, rest| {
        let start = path.len() - rest.len();
        let (pool, ino) =
            descriptor::named_inode_of(fd).or_else(|| directory_of_mount(path.get(..start)?))?;
        Some((pool, ino, start))
    })?;
    Ok(found.map(|(pool, dir, start)| {
        let rest = &path[start..];
        (pool, Place { dir, path: rest.as_ptr(), bytes: rest.len() })
    }))
}

/// Runs a call on the descriptor of the inode without a name that a path leads to, if all of the path is such a link.
///
/// # Safety
/// `path` is wild or a C string.
#[inline(always)]
pub(crate) unsafe fn nameless(
    path: *const c_char,
    body: impl FnOnce(c_int, Pool, u64) -> isize,
) -> Option<isize> {
    // SAFETY: the caller's promise; a C string has a first byte.
    unsafe {
        if path::is_wild(path) || *path as u8 != b'/' || !may_be(path) || settings::prefix_bytes() == 0 {
            return None;
        }
        nameless_slowly(path::bytes(path), body)
    }
}

#[cold]
fn nameless_slowly(path: &[u8], body: impl FnOnce(c_int, Pool, u64) -> isize) -> Option<isize> {
    end_of(path, |fd| {
        if descriptor::named_inode_of(fd).is_some() {
            return None;
        }
        let (pool, ino) = descriptor::inode_of(fd)?;
        Some(body(fd, pool, ino))
    })
}

/// Runs `body` on a descriptor of the target of `path`, if the whole path is a link to an open file.
pub(crate) fn end_of<T>(path: &[u8], body: impl FnOnce(c_int) -> Option<T>) -> Option<T> {
    behind(path, true, |fd, rest| if rest.is_empty() { body(fd) } else { None }).ok()?
}

/// The content of a link as programs see it. The kernel stored `n` bytes at `out`, which has room for `room`. Returns
/// the bytes that are there afterwards.
///
/// # Safety
/// As readlinkat's.
#[inline(always)]
pub(crate) unsafe fn shown(dirfd: c_int, link: *const c_char, out: *mut u8, room: usize, n: isize) -> isize {
    let bytes = n as usize;
    // SAFETY: the kernel stored that many bytes.
    let byte = |from_end: usize| unsafe { *out.add(bytes - from_end) };
    let may_be_ours = bytes > NAME_BYTES + 4
        && (byte(1) == b')' || (byte(NAME_BYTES + 1) == b'/' && byte(NAME_BYTES + 4) == b'/'))
        || bytes == room;
    if !may_be_ours || settings::prefix_bytes() == 0 {
        return n;
    }
    // SAFETY: the caller's promise.
    unsafe { shown_of_pool(dirfd, link, out, room) }.unwrap_or(n)
}

#[cold]
unsafe fn shown_of_pool(dirfd: c_int, link: *const c_char, out: *mut u8, room: usize) -> Option<isize> {
    // SAFETY: the caller's promise. Structures are writable, and filled on success.
    unsafe {
        let itself = real::openat(dirfd, link, libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC, 0);
        let itself = c_int::try_from(itself).ok().filter(|fd| *fd >= 0)?;
        let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
        let known = system_call!(libc::SYS_fstatfs, itself, about.as_mut_ptr());
        real::close(itself);
        if known != 0 || about.assume_init().f_type != libc::PROC_SUPER_MAGIC {
            return None;
        }
        opened(dirfd, link, |fd| {
            let (pool, ino) = descriptor::inode_of(fd)?;
            let mut inside = Buffer::new();
            if pool.path_of(ino, inside.first()) < 0 {
                return None;
            }
            let inside = path::bytes(inside.as_c());
            let inside = if inside == b"/" { b"".as_slice() } else { inside };
            let mut whole = Buffer::new();
            if !whole.set(&[settings::prefix(), inside]) {
                return None;
            }
            let bytes = (settings::prefix().len() + inside.len()).min(room);
            out.copy_from_nonoverlapping(whole.as_c().cast(), bytes);
            Some(bytes as isize)
        })
        .ok()?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(path: &str) -> Option<&str> {
        link_bytes(path.as_bytes()).map(|n| &path[..n])
    }

    #[test]
    fn link_bytes_of_links_ends_where_they_do() {
        for (path, expected) in [
            ("/proc/self/fd/5", "/proc/self/fd/5"),
            ("/proc/self/fd/12/a/b", "/proc/self/fd/12"),
            ("/proc/12/cwd", "/proc/12/cwd"),
            ("/proc/thread-self/cwd/..", "/proc/thread-self/cwd"),
            ("/proc/12/task/13/fd/0", "/proc/12/task/13/fd/0"),
            ("/proc/self/exe", "/proc/self/exe"),
            ("/dev/fd/0", "/dev/fd/0"),
            ("/dev/fd/3/x", "/dev/fd/3"),
            ("/dev/stdin", "/dev/stdin"),
        ] {
            assert_eq!(link(path), Some(expected), "{path}");
        }
    }

    #[test]
    fn is_backing_requires_the_whole_form() {
        assert!(is_backing(b"/proc/self/fd/900/data/0a/000100000000000a"));
        for path in [
            "/proc/self/fd/5",
            "/proc/self/fd/5/data/0a/name",
            "/proc/self/fd/x/data/0a/000100000000000a",
            "/proc/self/fd/5/other/0a/000100000000000a",
            "/tmp/data/0a/000100000000000a",
            "000100000000000a",
        ] {
            assert!(!is_backing(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn is_by_mount_requires_a_number_behind_the_name() {
        assert!(is_by_mount(b"/mnt/p/.forebay-inode-000200000000001f"));
        assert!(
            !is_by_mount(b"/mnt/.forebay-inode-000200000000001f/x") && !is_by_mount(b"/mnt/.forebay-inode-")
        );
    }

    #[test]
    fn link_bytes_of_other_paths_is_none() {
        for path in [
            "/proc",
            "/proc/",
            "/proc/self",
            "/proc/self/fd",
            "/proc/self/fd/",
            "/proc/self/fd/x",
            "/proc/self/fd/5x",
            "/proc/self/cwdx",
            "/proc/self/maps",
            "/proc/task/fd",
            "/dev/fd",
            "/dev/fd/",
            "/dev/stdinx",
            "/dev/null",
            "/",
        ] {
            assert_eq!(link(path), None, "{path}");
        }
    }
}
