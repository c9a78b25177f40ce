//! The route of a call along its path, between the kernel's tree and the pool.

use std::os::raw::{c_char, c_int};

use crate::abi::{Place, ESCAPED};
use crate::boundary::{guard, Returned};
use crate::classify::{classify, may_lead_to_pool, Leads};
use crate::crossing::crossing;
use crate::door::{heard, Pool};
use crate::path::{is_wild, Buffer};
use crate::{mounted, real};

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
                        result => Next::Done(heard(result) as isize),
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
                (Ok(Side::Pool(door, from)), Ok(Side::Kernel)) => {
                    match door.reach(from, follow, escape.first()) {
                        Err(ESCAPED) | Ok(_) => crossed(to, false),
                        Err(failed) if failed as isize == ENOENT && !looks_up => crossed(to, false),
                        Err(failed) => heard(failed) as isize,
                    }
                }
                (Ok(Side::Kernel), Ok(Side::Pool(..))) => crossed(from, looks_up),
            }
        })
    }
}

/// The answer for two paths on two sides: EXDEV, or what is wrong with the one in the kernel's tree, whose last name must
/// exist if `looks_up` is true.
///
/// # Safety
/// `path` is a C string.
#[cold]
unsafe fn crossed((dirfd, path): (c_int, *const c_char), looks_up: bool) -> isize {
    // SAFETY: the caller's promise.
    if unsafe { *path } == 0 {
        return ENOENT;
    }
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the caller's promise, and a writable structure.
    match unsafe { real::fstatat(dirfd, path, stat.as_mut_ptr(), libc::AT_SYMLINK_NOFOLLOW) } {
        0.. => -(libc::EXDEV as isize),
        ENOENT if !looks_up => -(libc::EXDEV as isize),
        failed => failed,
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
