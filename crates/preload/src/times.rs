//! Calls that set times: utimensat and the older ones.

use std::os::raw::{c_char, c_int};

use libc::{timespec, timeval, utimbuf};

use crate::interpose::{answer_int, set_errno};
use crate::path::is_wild;
use crate::{descriptor, route};

const HERE: c_int = libc::AT_FDCWD;

type Times = *const [timespec; 2];

unsafe fn set_any(dirfd: c_int, path: *const c_char, times: Times, flags: c_int) -> isize {
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // SAFETY: libc's contract.
    unsafe {
        if !times.is_null() && is_wild(times) {
            return -(libc::EFAULT as isize);
        }
        // Nothing to do, whatever the path is.
        if times.as_ref().is_some_and(|times| times.iter().all(|time| time.tv_nsec == libc::UTIME_OMIT)) {
            return 0;
        }
        if path.is_null() || crate::stat::is_descriptor(path, flags) {
            return set_descriptor(dirfd, path, times, flags);
        }
        route::on_path(
            dirfd,
            path,
            follow,
            |dirfd, path| system_call!(libc::SYS_utimensat, dirfd, path, times, flags),
            |pool, place, escape| {
                if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
                    return -i64::from(libc::EINVAL);
                }
                pool.set_times(place, times, follow as i32, escape)
            },
        )
    }
}

unsafe fn set_descriptor(fd: c_int, path: *const c_char, times: Times, flags: c_int) -> isize {
    // SAFETY: libc's contract; the handle is attached.
    unsafe {
        // Without a path it is futimens, which refuses an O_PATH descriptor.
        let found = if path.is_null() { descriptor::opened_inode_of(fd) } else { descriptor::inode_of(fd) };
        match found {
            Some((pool, ino)) => pool.set_times_open(fd, ino, times) as isize,
            None => system_call!(libc::SYS_utimensat, fd, path, times, flags),
        }
    }
}

/// Times in microseconds as times in nanoseconds; null stays null. None, and errno, when they cannot be read or are out
/// of range.
unsafe fn from_microseconds(times: *const [timeval; 2], out: &mut [timespec; 2]) -> Option<Times> {
    if !times.is_null() && is_wild(times) {
        set_errno(libc::EFAULT);
        return None;
    }
    // SAFETY: libc's contract: null or two times.
    let Some(times) = (unsafe { times.as_ref() }) else {
        return Some(std::ptr::null());
    };
    for (to, from) in out.iter_mut().zip(times) {
        if !(0..1_000_000).contains(&from.tv_usec) {
            set_errno(libc::EINVAL);
            return None;
        }
        *to = timespec { tv_sec: from.tv_sec, tv_nsec: from.tv_usec * 1000 };
    }
    Some(out)
}

const ZERO: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

unsafe fn set_microseconds(
    dirfd: c_int,
    path: *const c_char,
    times: *const [timeval; 2],
    flags: c_int,
) -> c_int {
    let mut converted = [ZERO; 2];
    // SAFETY: libc's contract.
    unsafe {
        match from_microseconds(times, &mut converted) {
            Some(times) => answer_int(set_any(dirfd, path, times, flags)),
            None => -1,
        }
    }
}

interpose! {
    /// utimensat(2)
    utimensat = fn(dirfd: c_int, path: *const c_char, times: *const [timespec; 2], flags: c_int) -> c_int {
        if path.is_null() {
            set_errno(libc::EINVAL);
            return -1;
        }
        // SAFETY: libc's contract.
        answer_int(unsafe { set_any(dirfd, path, times, flags) })
    }

    /// futimens(3)
    futimens = fn(fd: c_int, times: *const [timespec; 2]) -> c_int {
        if fd < 0 {
            set_errno(libc::EBADF);
            return -1;
        }
        // SAFETY: libc's contract.
        answer_int(unsafe { set_any(fd, std::ptr::null(), times, 0) })
    }

    /// utime(2)
    utime = fn(path: *const c_char, times: *const utimbuf) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            if !times.is_null() && is_wild(times) {
                return answer_int(-(libc::EFAULT as isize));
            }
            match times.as_ref() {
                None => set_any(HERE, path, std::ptr::null(), 0),
                Some(t) => {
                    let times = [
                        timespec { tv_sec: t.actime, tv_nsec: 0 },
                        timespec { tv_sec: t.modtime, tv_nsec: 0 },
                    ];
                    set_any(HERE, path, &times, 0)
                }
            }
        })
    }

    /// utimes(2)
    utimes = fn(path: *const c_char, times: *const [timeval; 2]) -> c_int {
        // SAFETY: libc's contract.
        unsafe { set_microseconds(HERE, path, times, 0) }
    }

    /// lutimes(3)
    lutimes = fn(path: *const c_char, times: *const [timeval; 2]) -> c_int {
        // SAFETY: libc's contract.
        unsafe { set_microseconds(HERE, path, times, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// futimesat(2)
    futimesat = fn(dirfd: c_int, path: *const c_char, times: *const [timeval; 2]) -> c_int {
        // SAFETY: libc's contract.
        unsafe { set_microseconds(dirfd, path, times, 0) }
    }

    /// futimes(3)
    futimes = fn(fd: c_int, times: *const [timeval; 2]) -> c_int {
        // SAFETY: libc's contract.
        unsafe { set_microseconds(fd, std::ptr::null(), times, 0) }
    }
}
