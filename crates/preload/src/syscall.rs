//! syscall(2), by which programs make calls that their libc lacks. Such a call acts on the same files.

use std::ffi::CStr;
use std::os::raw::{c_char, c_int, c_long, c_uint, c_void};

use crate::interpose::answer;
use crate::{
    attributes, chdir, directory, durable, exec, lock, names, open, socket, space, stat, times, watch, xattr,
};

/// faccessat2(2), the same number everywhere.
const FACCESSAT2: c_long = 439;
/// openat2(2).
const OPENAT2: c_long = 437;
/// fchmodat2(2).
const FCHMODAT2: c_long = 452;

type Text = *const c_char;

interpose! {
    /// syscall(2). C passes as many arguments as the call has. The others are arbitrary values, which the kernel does
    /// not use.
    syscall = fn(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
        // SAFETY: the arguments are those of the call with this number, which has the contract of its function.
        unsafe {
            match by_number(number, [a, b, c, d, e]) {
                Some(result) => result,
                None => answer(system_call!(number, a, b, c, d, e, f)) as c_long,
            }
        }
    }
}

/// The result of the call with this number, if the call may concern the pool.
///
/// # Safety
/// The arguments are the call's.
unsafe fn by_number(number: c_long, [a, b, c, d, e]: [usize; 5]) -> Option<c_long> {
    let (fd, at, path) = (a as c_int, a as c_int, b as Text);
    // SAFETY: the caller's promise.
    let result = unsafe {
        match number {
            libc::SYS_openat => open::openat(at, path, c as c_int, d as libc::mode_t),
            OPENAT2 => return open::openat2(at, path, c as *const open::OpenHow, d).map(c_long::from),
            libc::SYS_newfstatat => stat::fstatat(at, path, c as *mut libc::stat, d as c_int),
            libc::SYS_fstat => stat::fstat(fd, b as *mut libc::stat),
            libc::SYS_statx if b != 0 => {
                stat::statx(at, path, c as c_int, d as c_uint, e as *mut libc::statx)
            }
            libc::SYS_faccessat => stat::faccessat(at, path, c as c_int, 0),
            FACCESSAT2 => stat::faccessat(at, path, c as c_int, d as c_int),
            libc::SYS_mkdirat => names::mkdirat(at, path, c as libc::mode_t),
            libc::SYS_unlinkat => names::unlinkat(at, path, c as c_int),
            libc::SYS_renameat2 => names::renameat2(at, path, c as c_int, d as Text, e as c_uint),
            libc::SYS_linkat => names::linkat(at, path, c as c_int, d as Text, e as c_int),
            libc::SYS_symlinkat => names::symlinkat(a as Text, b as c_int, c as Text),
            libc::SYS_mknodat => names::mknodat(at, path, c as libc::mode_t, d as libc::dev_t),
            libc::SYS_fchmod => attributes::fchmod(fd, b as libc::mode_t),
            libc::SYS_fchmodat => attributes::fchmodat(at, path, c as libc::mode_t, 0),
            FCHMODAT2 => attributes::fchmodat(at, path, c as libc::mode_t, d as c_int),
            libc::SYS_fchown => attributes::fchown(fd, b as c_uint, c as c_uint),
            libc::SYS_fchownat => attributes::fchownat(at, path, c as c_uint, d as c_uint, e as c_int),
            libc::SYS_truncate => attributes::truncate(a as Text, b as libc::off_t),
            libc::SYS_utimensat if b != 0 => times::utimensat(at, path, c as _, d as c_int),
            libc::SYS_utimensat => times::futimens(fd, c as _),
            libc::SYS_setxattr => xattr::setxattr(a as Text, path, c as _, d, e as c_int),
            libc::SYS_lsetxattr => xattr::lsetxattr(a as Text, path, c as _, d, e as c_int),
            libc::SYS_fsetxattr => xattr::fsetxattr(fd, path, c as _, d, e as c_int),
            libc::SYS_removexattr => xattr::removexattr(a as Text, path),
            libc::SYS_lremovexattr => xattr::lremovexattr(a as Text, path),
            libc::SYS_fremovexattr => xattr::fremovexattr(fd, path),
            libc::SYS_statfs => space::statfs(a as Text, b as *mut libc::statfs),
            libc::SYS_fstatfs => space::fstatfs(fd, b as *mut libc::statfs),
            libc::SYS_chdir => chdir::chdir(a as Text),
            libc::SYS_fchdir => chdir::fchdir(fd),
            libc::SYS_flock => lock::flock(fd, b as c_int),
            libc::SYS_fsync => durable::fsync(fd),
            libc::SYS_fdatasync => durable::fdatasync(fd),
            libc::SYS_close => durable::close(fd),
            libc::SYS_bind => socket::bind(fd, b as _, c as _),
            libc::SYS_connect => socket::connect(fd, b as _, c as _),
            libc::SYS_getsockname => socket::getsockname(fd, b as _, c as _),
            libc::SYS_getpeername => socket::getpeername(fd, b as _, c as _),
            libc::SYS_inotify_add_watch => watch::inotify_add_watch(fd, path, c as u32),
            libc::SYS_execve => exec::execve(a as Text, b as _, c as _),
            libc::SYS_execveat => exec::execveat(at, path, c as _, d as _, e as c_int),
            _ => return by_number_wide(number, [a, b, c, d]),
        }
    };
    Some(c_long::from(result))
}

/// Calls that return a number of bytes, and calls that exist only on old architectures.
///
/// # Safety
/// As of [`by_number`].
unsafe fn by_number_wide(number: c_long, [a, b, c, d]: [usize; 4]) -> Option<c_long> {
    let (fd, at, path, value) = (a as c_int, a as c_int, b as Text, c as *mut c_void);
    // SAFETY: the caller's promise.
    let result = unsafe {
        match number {
            libc::SYS_readlinkat => names::readlinkat(at, path, c as *mut c_char, d),
            libc::SYS_getdents64 => directory::getdents64(fd, b as *mut c_void, c),
            libc::SYS_getxattr => xattr::getxattr(a as Text, path, value, d),
            libc::SYS_lgetxattr => xattr::lgetxattr(a as Text, path, value, d),
            libc::SYS_fgetxattr => xattr::fgetxattr(fd, path, value, d),
            libc::SYS_listxattr => xattr::listxattr(a as Text, b as *mut c_char, c),
            libc::SYS_llistxattr => xattr::llistxattr(a as Text, b as *mut c_char, c),
            libc::SYS_flistxattr => xattr::flistxattr(fd, b as *mut c_char, c),
            libc::SYS_getcwd => {
                let here = chdir::getcwd(a as *mut c_char, b);
                if here.is_null() {
                    -1
                } else {
                    // The kernel counts the NUL too.
                    CStr::from_ptr(here).to_bytes_with_nul().len() as isize
                }
            }
            #[cfg(target_arch = "x86_64")]
            _ => return by_old_number(number, [a, b, c]),
            #[cfg(not(target_arch = "x86_64"))]
            _ => return None,
        }
    };
    Some(result as c_long)
}

/// Calls without a directory's descriptor, which newer architectures do not have.
///
/// # Safety
/// As of [`by_number`].
#[cfg(target_arch = "x86_64")]
unsafe fn by_old_number(number: c_long, [a, b, c]: [usize; 3]) -> Option<c_long> {
    let (path, other) = (a as Text, b as Text);
    // SAFETY: the caller's promise.
    let result = unsafe {
        match number {
            libc::SYS_open => open::open(path, b as c_int, c as libc::mode_t),
            libc::SYS_creat => open::creat(path, b as libc::mode_t),
            libc::SYS_stat => stat::stat(path, b as *mut libc::stat),
            libc::SYS_lstat => stat::lstat(path, b as *mut libc::stat),
            libc::SYS_access => stat::access(path, b as c_int),
            libc::SYS_mkdir => names::mkdir(path, b as libc::mode_t),
            libc::SYS_rmdir => names::rmdir(path),
            libc::SYS_unlink => names::unlink(path),
            libc::SYS_rename => names::rename(path, other),
            libc::SYS_link => names::link(path, other),
            libc::SYS_symlink => names::symlink(path, other),
            libc::SYS_mknod => names::mknod(path, b as libc::mode_t, c as libc::dev_t),
            libc::SYS_chmod => attributes::chmod(path, b as libc::mode_t),
            libc::SYS_chown => attributes::chown(path, b as c_uint, c as c_uint),
            libc::SYS_lchown => attributes::lchown(path, b as c_uint, c as c_uint),
            libc::SYS_utime => times::utime(path, b as _),
            libc::SYS_utimes => times::utimes(path, b as _),
            libc::SYS_futimesat => times::futimesat(a as c_int, other, c as _),
            libc::SYS_readlink => {
                return Some(names::readlink(path, b as *mut c_char, c) as c_long);
            }
            _ => return None,
        }
    };
    Some(c_long::from(result))
}
