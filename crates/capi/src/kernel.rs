//! The library's own system calls, which no preloaded library can interpose.
//!
//! Programs load libforebay.so together with libforebay_preload.so. The preload library's `openat` and so on precede
//! those of libc for every library of the process. If the client's own calls on backing files reached them, they would
//! be classified again, at a cost, and would recurse while the pool is being attached. So within this library the
//! linker resolves these names to the definitions below (`--wrap`, build/main.rs). They make the system call, and are
//! hidden outside. `tests/exports.rs` checks that no interposed name stays undefined.
//!
//! Calls at which libc may cancel a thread are here too, interposed or not: a cancelled thread unwinds, which must not
//! happen during a call on the pool. The thread is cancelled at the program's own next call that allows it.

use std::arch::{asm, global_asm};
use std::os::raw::{c_char, c_int, c_uint, c_void};

/// Makes a system call with up to five arguments. Returns the kernel's answer.
///
/// # Safety
/// As for the system call itself.
#[inline(always)]
unsafe fn call(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call_of_six(number, a, b, c, d, e, 0) }
}

/// Makes a system call with up to six arguments. Returns the kernel's answer.
///
/// # Safety
/// As for the system call itself.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn call_of_six(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer: isize;
    // SAFETY: the kernel's convention for x86-64; the caller's promise about the call.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call with up to six arguments. Returns the kernel's answer.
///
/// # Safety
/// As for the system call itself.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn call_of_six(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer: isize;
    // SAFETY: the kernel's convention for aarch64; the caller's promise about the call.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    answer
}

/// The kernel's answer as libc returns it: -1 and errno for an error.
#[inline(always)]
fn answer(result: isize) -> isize {
    if result < 0 {
        // SAFETY: the address of this thread's errno is valid for the thread's life.
        unsafe { *libc::__errno_location() = -result as c_int };
        return -1;
    }
    result
}

/// Defines a function that replaces libc's of this name within this library.
macro_rules! wrap {
    ($($name:literal = fn $function:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $body:expr;)*) => {$(
        // SAFETY: libc's contract.
        unsafe extern "C" fn $function($($arg: $ty),*) -> $ret {
            // SAFETY: the caller keeps libc's contract, which is the kernel's.
            answer(unsafe { $body }) as $ret
        }

        #[cfg(target_arch = "x86_64")]
        global_asm!(
            concat!(".globl __wrap_", $name),
            concat!(".hidden __wrap_", $name),
            concat!(".type __wrap_", $name, ", @function"),
            concat!("__wrap_", $name, ":"),
            "jmp {function}",
            concat!(".size __wrap_", $name, ", . - __wrap_", $name),
            function = sym $function,
        );

        #[cfg(target_arch = "aarch64")]
        global_asm!(
            concat!(".globl __wrap_", $name),
            concat!(".hidden __wrap_", $name),
            concat!(".type __wrap_", $name, ", %function"),
            concat!("__wrap_", $name, ":"),
            "b {function}",
            concat!(".size __wrap_", $name, ", . - __wrap_", $name),
            function = sym $function,
        );
    )*};
}

/// usleep(3)
unsafe fn pause(us: c_uint) -> isize {
    let time = libc::timespec {
        tv_sec: libc::time_t::from(us / 1_000_000),
        tv_nsec: libc::c_long::from(us % 1_000_000) * 1000,
    };
    // SAFETY: the time is readable.
    unsafe { call(libc::SYS_nanosleep, &raw const time as usize, 0, 0, 0, 0) }
}

const HERE: usize = libc::AT_FDCWD as usize;

// build/main.rs reads these names.
wrap! {
    "syscall" = fn syscall(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> i64 =
        call_of_six(number, a, b, c, d, e, f);
    "open" = fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        call(libc::SYS_openat, HERE, path as usize, flags as usize, mode as usize, 0);
    "open64" = fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        call(libc::SYS_openat, HERE, path as usize, flags as usize, mode as usize, 0);
    "openat" = fn openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        call(libc::SYS_openat, at as usize, path as usize, flags as usize, mode as usize, 0);
    "openat64" = fn openat64(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        call(libc::SYS_openat, at as usize, path as usize, flags as usize, mode as usize, 0);
    "fstat" = fn fstat(fd: c_int, out: *mut libc::stat) -> c_int =
        call(libc::SYS_fstat, fd as usize, out as usize, 0, 0, 0);
    "fstat64" = fn fstat64(fd: c_int, out: *mut libc::stat) -> c_int =
        call(libc::SYS_fstat, fd as usize, out as usize, 0, 0, 0);
    "fstatat" = fn fstatat(at: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int =
        call(libc::SYS_newfstatat, at as usize, path as usize, out as usize, flags as usize, 0);
    "fstatat64" = fn fstatat64(at: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int =
        call(libc::SYS_newfstatat, at as usize, path as usize, out as usize, flags as usize, 0);
    "stat" = fn stat(path: *const c_char, out: *mut libc::stat) -> c_int =
        call(libc::SYS_newfstatat, HERE, path as usize, out as usize, 0, 0);
    "stat64" = fn stat64(path: *const c_char, out: *mut libc::stat) -> c_int =
        call(libc::SYS_newfstatat, HERE, path as usize, out as usize, 0, 0);
    "statx" = fn statx(at: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut libc::statx) -> c_int =
        call(libc::SYS_statx, at as usize, path as usize, flags as usize, mask as usize, out as usize);
    "fstatfs" = fn fstatfs(fd: c_int, out: *mut libc::statfs) -> c_int =
        call(libc::SYS_fstatfs, fd as usize, out as usize, 0, 0, 0);
    "mkdirat" = fn mkdirat(at: c_int, path: *const c_char, mode: libc::mode_t) -> c_int =
        call(libc::SYS_mkdirat, at as usize, path as usize, mode as usize, 0, 0);
    "unlinkat" = fn unlinkat(at: c_int, path: *const c_char, flags: c_int) -> c_int =
        call(libc::SYS_unlinkat, at as usize, path as usize, flags as usize, 0, 0);
    "linkat" = fn linkat(
        from_at: c_int,
        from: *const c_char,
        to_at: c_int,
        to: *const c_char,
        flags: c_int
    ) -> c_int =
        call(libc::SYS_linkat, from_at as usize, from as usize, to_at as usize, to as usize, flags as usize);
    "fchmodat" = fn fchmodat(at: c_int, path: *const c_char, mode: libc::mode_t, flags: c_int) -> c_int =
        if flags == 0 {
            call(libc::SYS_fchmodat, at as usize, path as usize, mode as usize, 0, 0)
        } else {
            -(libc::EINVAL as isize)
        };
    "fchmod" = fn fchmod(fd: c_int, mode: libc::mode_t) -> c_int =
        call(libc::SYS_fchmod, fd as usize, mode as usize, 0, 0, 0);
    "readlink" = fn readlink(path: *const c_char, out: *mut c_char, room: usize) -> isize =
        call(libc::SYS_readlinkat, HERE, path as usize, out as usize, room, 0);
    "readlinkat" = fn readlinkat(at: c_int, path: *const c_char, out: *mut c_char, room: usize) -> isize =
        call(libc::SYS_readlinkat, at as usize, path as usize, out as usize, room, 0);
    "utimensat" = fn utimensat(
        at: c_int,
        path: *const c_char,
        times: *const libc::timespec,
        flags: c_int
    ) -> c_int =
        call(libc::SYS_utimensat, at as usize, path as usize, times as usize, flags as usize, 0);
    "futimens" = fn futimens(fd: c_int, times: *const libc::timespec) -> c_int =
        call(libc::SYS_utimensat, fd as usize, 0, times as usize, 0, 0);
    "getxattr" = fn getxattr(path: *const c_char, name: *const c_char, value: *mut c_void, room: usize) -> isize =
        call(libc::SYS_getxattr, path as usize, name as usize, value as usize, room, 0);
    "setxattr" = fn setxattr(
        path: *const c_char,
        name: *const c_char,
        value: *const c_void,
        length: usize,
        flags: c_int
    ) -> c_int =
        call(libc::SYS_setxattr, path as usize, name as usize, value as usize, length, flags as usize);
    "listxattr" = fn listxattr(path: *const c_char, names: *mut c_char, room: usize) -> isize =
        call(libc::SYS_listxattr, path as usize, names as usize, room, 0, 0);
    "removexattr" = fn removexattr(path: *const c_char, name: *const c_char) -> c_int =
        call(libc::SYS_removexattr, path as usize, name as usize, 0, 0, 0);
    "close" = fn close(fd: c_int) -> c_int =
        call(libc::SYS_close, fd as usize, 0, 0, 0, 0);
    "connect" = fn connect(fd: c_int, address: *const libc::sockaddr, bytes: libc::socklen_t) -> c_int =
        call(libc::SYS_connect, fd as usize, address as usize, bytes as usize, 0, 0);
    "sendmsg" = fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize =
        call(libc::SYS_sendmsg, fd as usize, message as usize, flags as usize, 0, 0);
    "recvmsg" = fn recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize =
        call(libc::SYS_recvmsg, fd as usize, message as usize, flags as usize, 0, 0);
    "send" = fn send(fd: c_int, bytes: *const c_void, length: usize, flags: c_int) -> isize =
        call_of_six(libc::SYS_sendto, fd as usize, bytes as usize, length, flags as usize, 0, 0);
    "recv" = fn recv(fd: c_int, bytes: *mut c_void, length: usize, flags: c_int) -> isize =
        call_of_six(libc::SYS_recvfrom, fd as usize, bytes as usize, length, flags as usize, 0, 0);
    "pread" = fn pread(fd: c_int, bytes: *mut c_void, length: usize, offset: libc::off_t) -> isize =
        call(libc::SYS_pread64, fd as usize, bytes as usize, length, offset as usize, 0);
    "pwrite" = fn pwrite(fd: c_int, bytes: *const c_void, length: usize, offset: libc::off_t) -> isize =
        call(libc::SYS_pwrite64, fd as usize, bytes as usize, length, offset as usize, 0);
    "preadv" = fn preadv(fd: c_int, parts: *const libc::iovec, count: c_int, offset: libc::off_t) -> isize =
        call(libc::SYS_preadv, fd as usize, parts as usize, count as usize, offset as usize, 0);
    "pwritev" = fn pwritev(fd: c_int, parts: *const libc::iovec, count: c_int, offset: libc::off_t) -> isize =
        call(libc::SYS_pwritev, fd as usize, parts as usize, count as usize, offset as usize, 0);
    "fsync" = fn fsync(fd: c_int) -> c_int =
        call(libc::SYS_fsync, fd as usize, 0, 0, 0, 0);
    "fallocate" = fn fallocate(fd: c_int, mode: c_int, offset: libc::off_t, length: libc::off_t) -> c_int =
        call(libc::SYS_fallocate, fd as usize, mode as usize, offset as usize, length as usize, 0);
    "flock" = fn flock(fd: c_int, operation: c_int) -> c_int =
        call(libc::SYS_flock, fd as usize, operation as usize, 0, 0, 0);
    "usleep" = fn usleep(us: c_uint) -> c_int = pause(us);
}
