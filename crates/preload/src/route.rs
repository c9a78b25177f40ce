//! The route of a call along its path, between the kernel's tree and the pool.

use std::os::raw::{c_char, c_int};

use crate::abi::{Place, ESCAPED};
use crate::boundary::{guard, Returned};
use crate::classify::{classify, may_lead_to_pool, Leads};
use crate::crossing::crossing;
use crate::door::{heard, Pool};
use crate::path::{is_wild, Buffer};
use crate::{cwd, mounted, real};

/// How often a path may cross between the kernel's tree and the pool.
const CHANGES_MAX: u32 = 40;

const ENOENT: isize = -(libc::ENOENT as isize);

/// Makes a call on a path, in the pool or outside: `kernel` with a path of the kernel's tree, `pool` with a place in
/// the pool and room for a path that leaves it. `follow` is true if the call follows a symbolic link at the end. Both
/// return 0 or more, or a negative errno; `pool` may return ESCAPED.
///
/// # Safety
/// `path` is null or a C string.
#[inline(always)]
pub(crate) unsafe fn on_path(
    dirfd: c_int,
    path: *const c_char,
    follow: bool,
    kernel: impl Fn(c_int, *const c_char) -> isize,
    pool: impl Fn(Pool, Place, *mut u8) -> i64,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        if may_lead_to_pool(dirfd, path) {
            return walk(dirfd, path, follow, None, &kernel, &pool);
        }
        let result = kernel(dirfd, path);
        if result == ENOENT {
            return walk(dirfd, path, follow, Some(result), &kernel, &pool);
        }
        result
    }
}

/// Continues with a path that the fast check did not settle. `tried` is the kernel's answer if it was called.
///
/// # Safety
/// `path` is null or a C string.
#[cold]
#[inline(never)]
unsafe fn walk(
    mut dirfd: c_int,
    mut path: *const c_char,
    follow: bool,
    mut tried: Option<isize>,
    kernel: &impl Fn(c_int, *const c_char) -> isize,
    pool: &impl Fn(Pool, Place, *mut u8) -> i64,
) -> isize {
    // The path is the caller's, or in one of these buffers. Its continuation is stored in the other.
    let (mut here, mut there) = (Buffer::new(), Buffer::new());
    for _ in 0..CHANGES_MAX {
        // SAFETY: the path is the caller's, or was stored in `here`. It is not in `there`.
        let next = guard(|| unsafe {
            match tried.take() {
                Some(result) if mounted::is_prefix() || !crossing(dirfd, path, follow, &mut there) => {
                    Next::Done(result)
                }
                Some(_) => Next::Path,
                None => match classify(dirfd, path, follow) {
                    Leads::Kernel => Next::Kernel,
                    Leads::Nowhere(errno) => Next::Done(errno),
                    Leads::Pool(door, place) => match pool(door, place, there.first()) {
                        ESCAPED => Next::Path,
                        result => match heard(result) as isize {
                            ENOENT if cwd::is_removed(dirfd, path) => Next::Removed,
                            result => Next::Done(result),
                        },
                    },
                },
            }
        });
        match next {
            Next::Done(result) => return result,
            Next::Path => {
                std::mem::swap(&mut here, &mut there);
                path = here.as_c();
                dirfd = libc::AT_FDCWD;
            }
            // To the kernel, too, it is a directory that was removed.
            Next::Removed => return kernel(dirfd, path),
            Next::Kernel => {
                // Outside the guard, as a thread may be cancelled in it.
                let result = kernel(dirfd, path);
                if result != ENOENT {
                    return result;
                }
                tried = Some(result);
            }
        }
    }
    -(libc::ELOOP as isize)
}

/// What a step along a path leads to.
enum Next {
    /// The result of the call.
    Done(isize),
    /// Another path of the kernel's tree, which is in the other buffer.
    Path,
    /// The kernel: the path does not lead to the pool.
    Kernel,
    /// A directory that was removed from the pool, by a path such as `.`.
    Removed,
}

impl Returned for Next {
    const PANICKED: Next = Next::Done(isize::PANICKED);
}

/// A place of the pool, or a path of the kernel's tree.
enum Side {
    Pool(Pool, Place),
    Kernel,
}

/// Makes a call on two paths: `kernel` when both are in the kernel's tree, `pool` when both are in the pool, otherwise
/// EXDEV, unless one of them leads nowhere. `follow` applies to the first path, and `looks_up` is true if its last name is looked up
/// before the two sides are compared. A link at the end of the second is never followed.
///
/// # Safety
/// The paths are null or C strings.
pub(crate) unsafe fn on_two_paths(
    from: (c_int, *const c_char),
    to: (c_int, *const c_char),
    (follow, looks_up): (bool, bool),
    kernel: impl Fn(c_int, *const c_char, c_int, *const c_char) -> isize,
    pool: impl Fn(Pool, Place, Place, *mut u8) -> i64,
) -> isize {
    // SAFETY: the caller's promise. Buffers keep their content as long as the places are used.
    unsafe {
        if is_wild(from.1) || (is_wild(to.1) && may_lead_to_pool(from.0, from.1)) {
            return -(libc::EFAULT as isize);
        }
        if !may_lead_to_pool(from.0, from.1) && !may_lead_to_pool(to.0, to.1) {
            let result = kernel(from.0, from.1, to.0, to.1);
            if result != ENOENT {
                return result;
            }
        }
        guard(|| {
            let (mut from_path, mut to_path, mut escape) = (Buffer::new(), Buffer::new(), Buffer::new());
            let from_side = side(from, follow, &mut from_path);
            let to_side = side(to, false, &mut to_path);
            match (from_side, to_side) {
                (Err(errno), _) | (_, Err(errno)) => errno,
                (Ok(Side::Kernel), Ok(Side::Kernel)) => kernel(from.0, from.1, to.0, to.1),
                (Ok(Side::Pool(door, from)), Ok(Side::Pool(_, to))) => {
                    match pool(door, from, to, escape.first()) {
                        ESCAPED => -(libc::EXDEV as isize),
                        result => heard(result) as isize,
                    }
                }
                (Ok(Side::Pool(door, source)), Ok(Side::Kernel)) => {
                    match found_in_pool(door, source, follow, escape.first()) {
                        Ok(false) if looks_up => ENOENT,
                        Ok(_) => across(found_by_kernel(to), looks_up),
                        Err(failed) => failed,
                    }
                }
                (Ok(Side::Kernel), Ok(Side::Pool(door, to))) => match found_by_kernel(from) {
                    Ok(false) if looks_up => ENOENT,
                    Ok(_) => across(found_in_pool(door, to, false, escape.first()), looks_up),
                    Err(failed) => failed,
                },
            }
        })
    }
}

/// The answer for two paths on two sides, of which the first leads somewhere: what is wrong with the second, else EXDEV. A link
/// looks its new name up before.
fn across(second: Result<bool, isize>, links: bool) -> isize {
    match second {
        Ok(true) if links => -(libc::EEXIST as isize),
        Ok(_) => -(libc::EXDEV as isize),
        Err(failed) => failed,
    }
}

/// The bytes of a path up to its last name.
fn above(path: &[u8]) -> &[u8] {
    let names = path.len() - path.iter().rev().take_while(|&&byte| byte == b'/').count();
    let last = path[..names].iter().rposition(|&byte| byte == b'/');
    &path[..last.map_or(0, |last| last + 1)]
}

/// True if a place exists, false if its directory does, else what is wrong with it.
///
/// # Safety
/// The place is valid, and `escape` has room for a path.
#[cold]
unsafe fn found_in_pool(door: Pool, place: Place, follow: bool, escape: *mut u8) -> Result<bool, isize> {
    // SAFETY: the caller's promise.
    unsafe {
        match door.reach(place, follow, escape) {
            Ok(_) | Err(ESCAPED) => Ok(true),
            Err(failed) if failed as isize == ENOENT && place.bytes > 0 => {
                let path = std::slice::from_raw_parts(place.path.cast::<u8>(), place.bytes);
                let directory = Place { bytes: above(path).len() as _, ..place };
                match door.reach(directory, true, escape) {
                    Ok(_) | Err(ESCAPED) => Ok(false),
                    Err(failed) => Err(heard(failed) as isize),
                }
            }
            Err(failed) => Err(heard(failed) as isize),
        }
    }
}

/// The same for a path in the kernel's tree.
///
/// # Safety
/// `path` is a C string.
#[cold]
unsafe fn found_by_kernel((dirfd, path): (c_int, *const c_char)) -> Result<bool, isize> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the caller's promise, and a writable structure.
    let mut look =
        |path| match unsafe { real::fstatat(dirfd, path, stat.as_mut_ptr(), libc::AT_SYMLINK_NOFOLLOW) } {
            0.. => Ok(()),
            failed => Err(failed),
        };
    // SAFETY: as above.
    let bytes = unsafe { crate::path::bytes(path) };
    match look(path) {
        Ok(()) => Ok(true),
        Err(ENOENT) if !bytes.is_empty() => {
            let (mut directory, parent) = (Buffer::new(), above(bytes));
            if !directory.set(&[parent, b"."]) {
                return Err(ENOENT);
            }
            look(directory.as_c()).map(|()| false)
        }
        Err(failed) => Err(failed),
    }
}

unsafe fn side(at: (c_int, *const c_char), follow: bool, buffer: &mut Buffer) -> Result<Side, isize> {
    let settled = |leads| match leads {
        Leads::Kernel => Ok(Side::Kernel),
        Leads::Pool(pool, place) => Ok(Side::Pool(pool, place)),
        Leads::Nowhere(errno) => Err(errno),
    };
    // SAFETY: the caller's promise. After a crossing the buffer holds a C string.
    unsafe {
        match classify(at.0, at.1, follow) {
            Leads::Kernel if crossing(at.0, at.1, follow, buffer) => {
                settled(classify(libc::AT_FDCWD, buffer.as_c(), follow))
            }
            leads => settled(leads),
        }
    }
}
