//! The calls behind this library: direct system calls, and libc's own functions.
//!
//! Calls that libc passes to the kernel unchanged are direct system calls: there is no look-up that could fail, and
//! they are safe in a signal handler. Functions with work of their own in libc, and those in which a thread may be
//! cancelled (open), are found by `dlsym(RTLD_NEXT)`, so that another preloaded library behind this one is called too.

use std::ffi::CStr;
use std::os::raw::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Makes a system call with up to six arguments. Returns the kernel's answer: 0 or more, or a negative errno.
///
/// # Safety
/// As the call's.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn call(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer: isize;
    // SAFETY: the kernel's convention for x86-64; the caller's promise about the call.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call with up to six arguments. Returns the kernel's answer: 0 or more, or a negative errno.
///
/// # Safety
/// As the call's.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) unsafe fn call(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer: isize;
    // SAFETY: the kernel's convention for aarch64; the caller's promise about the call.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    answer
}

/// `system_call!(NUMBER, arguments...)`: [`call`] with each argument cast, and zeros for the rest.
macro_rules! system_call {
    ($number:expr $(, $arg:expr)*) => { system_call!(@pad $number; $($arg as usize,)*; 0, 0, 0, 0, 0, 0,) };
    (@pad $n:expr; ; $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr,) => {
        $crate::real::call($n, $a, $b, $c, $d, $e, $f)
    };
    (@pad $n:expr; $g:expr,; $($z:expr,)*) => { $crate::real::call($n, $g, 0, 0, 0, 0, 0) };
    (@pad $n:expr; $g:expr, $h:expr,; $($z:expr,)*) => { $crate::real::call($n, $g, $h, 0, 0, 0, 0) };
    (@pad $n:expr; $g:expr, $h:expr, $i:expr,; $($z:expr,)*) => { $crate::real::call($n, $g, $h, $i, 0, 0, 0) };
    (@pad $n:expr; $g:expr, $h:expr, $i:expr, $j:expr,; $($z:expr,)*) => {
        $crate::real::call($n, $g, $h, $i, $j, 0, 0)
    };
    (@pad $n:expr; $g:expr, $h:expr, $i:expr, $j:expr, $k:expr,; $($z:expr,)*) => {
        $crate::real::call($n, $g, $h, $i, $j, $k, 0)
    };
    (@pad $n:expr; $g:expr, $h:expr, $i:expr, $j:expr, $k:expr, $l:expr,; $($z:expr,)*) => {
        $crate::real::call($n, $g, $h, $i, $j, $k, $l)
    };
}

/// fstat(2) by the kernel.
///
/// # Safety
/// `out` is writable.
#[inline]
pub(crate) unsafe fn fstat(fd: c_int, out: *mut libc::stat) -> isize {
    // SAFETY: the caller's promise.
    unsafe { system_call!(libc::SYS_fstat, fd, out) }
}

/// fstatat(2) by the kernel.
///
/// # Safety
/// `path` is a C string, `out` writable.
#[inline]
pub(crate) unsafe fn fstatat(dirfd: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> isize {
    // SAFETY: the caller's promise.
    unsafe { system_call!(libc::SYS_newfstatat, dirfd, path, out, flags) }
}

/// openat(2) by the kernel, which does not cancel a thread.
///
/// # Safety
/// `path` is a C string.
#[inline]
pub(crate) unsafe fn openat(dirfd: c_int, path: *const c_char, flags: c_int, mode: u32) -> isize {
    // SAFETY: the caller's promise.
    unsafe { system_call!(libc::SYS_openat, dirfd, path, flags, mode) }
}

/// readlinkat(2) by the kernel.
///
/// # Safety
/// `path` is a C string, `out` has room for `room` bytes.
#[inline]
pub(crate) unsafe fn readlinkat(dirfd: c_int, path: *const c_char, out: *mut u8, room: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { system_call!(libc::SYS_readlinkat, dirfd, path, out, room) }
}

/// close(2) by the kernel.
#[inline]
pub(crate) fn close(fd: c_int) -> isize {
    // SAFETY: closing touches no memory.
    unsafe { system_call!(libc::SYS_close, fd) }
}

/// pread(2) by the kernel.
#[inline]
pub(crate) fn pread(fd: c_int, out: &mut [u8], offset: i64) -> isize {
    // SAFETY: the slice is writable for its length.
    unsafe { system_call!(libc::SYS_pread64, fd, out.as_mut_ptr(), out.len(), offset) }
}

/// getpid(2).
#[inline]
pub(crate) fn getpid() -> i32 {
    // SAFETY: it touches no memory.
    unsafe { system_call!(libc::SYS_getpid) as i32 }
}

/// getppid(2).
#[inline]
pub(crate) fn getppid() -> i32 {
    // SAFETY: it touches no memory.
    unsafe { system_call!(libc::SYS_getppid) as i32 }
}

/// gettid(2).
#[inline]
pub(crate) fn gettid() -> i32 {
    // SAFETY: it touches no memory.
    unsafe { system_call!(libc::SYS_gettid) as i32 }
}

/// Finds the next definition of a libc function and keeps it. Null when libc has none.
fn find(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_NEXT with a C string; the caller of dlsym is this library.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    slot.store(found, Ordering::Relaxed);
    found
}

/// Declares libc functions that are found at their first use. Where libc lacks one, the call returns the value behind
/// the `=`, with errno ENOSYS.
macro_rules! libc_functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $missing:expr;)*) => {$(
        /// The address of libc's own function of this name.
        pub(crate) mod $name {
            use super::*;

            /// Its address, for a jump.
            #[allow(dead_code)]
            pub(crate) fn address() -> *const c_void {
                let known = SLOT.load(Ordering::Relaxed);
                if known.is_null() { find() } else { known }
            }

            pub(super) static SLOT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

            #[cold]
            pub(super) fn find() -> *mut c_void {
                let name = concat!(stringify!($name), "\0").as_bytes();
                super::super::find(&SLOT, CStr::from_bytes_with_nul(name).unwrap_or_default())
            }
        }

        /// libc's own function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[inline]
        pub(crate) unsafe fn $name($($arg: $ty),*) -> $ret {
            let mut function = $name::SLOT.load(Ordering::Relaxed);
            if function.is_null() {
                function = $name::find();
                if function.is_null() {
                    crate::interpose::set_errno(libc::ENOSYS);
                    return $missing;
                }
            }
            // SAFETY: the symbol of this name has this type in libc.
            let function: unsafe extern "C-unwind" fn($($ty),*) -> $ret = unsafe { std::mem::transmute(function) };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        }
    )*};
}

/// libc's own functions.
#[allow(clippy::unused_unit)]
pub(crate) mod libc_own {
    use super::*;
    use libc::{dirent, mode_t, statvfs as StatVfs, DIR, FILE};
    use std::ptr::null_mut;

    libc_functions! {
        fn openat(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int = -1;
        fn connect(fd: c_int, address: *const libc::sockaddr, bytes: libc::socklen_t) -> c_int = -1;
        fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void = null_mut();
        fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE = null_mut();
        fn fclose(file: *mut FILE) -> c_int = libc::EOF;
        fn freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE = null_mut();
        fn faccessat(dirfd: c_int, path: *const c_char, amode: c_int, flags: c_int) -> c_int = -1;
        fn fchmodat(dirfd: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int = -1;
        fn opendir(path: *const c_char) -> *mut DIR = null_mut();
        fn fdopendir(fd: c_int) -> *mut DIR = null_mut();
        fn readdir64(stream: *mut DIR) -> *mut dirent = null_mut();
        fn readdir64_r(stream: *mut DIR, entry: *mut dirent, out: *mut *mut dirent) -> c_int = libc::ENOSYS;
        fn closedir(stream: *mut DIR) -> c_int = -1;
        fn rewinddir(stream: *mut DIR) -> () = ();
        fn telldir(stream: *mut DIR) -> libc::c_long = -1;
        fn seekdir(stream: *mut DIR, position: libc::c_long) -> () = ();
        fn dirfd(stream: *mut DIR) -> c_int = -1;
        fn getcwd(buffer: *mut c_char, room: usize) -> *mut c_char = null_mut();
        fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char = null_mut();
        fn statvfs(path: *const c_char, out: *mut StatVfs) -> c_int = -1;
        fn fstatvfs(fd: c_int, out: *mut StatVfs) -> c_int = -1;
        fn glob(
            pattern: *const c_char,
            flags: c_int,
            error: Option<unsafe extern "C-unwind" fn(*const c_char, c_int) -> c_int>,
            out: *mut c_void,
        ) -> c_int = libc::GLOB_ABORTED;
        fn scandirat(
            dirfd: c_int,
            path: *const c_char,
            names: *mut *mut *mut dirent,
            select: Option<unsafe extern "C-unwind" fn(*const dirent) -> c_int>,
            compare: Option<unsafe extern "C-unwind" fn(*mut *const dirent, *mut *const dirent) -> c_int>,
        ) -> c_int = -1;
        fn nftw(
            path: *const c_char,
            visit: *const c_void,
            descriptors: c_int,
            flags: c_int,
        ) -> c_int = -1;
        fn ftw(
            path: *const c_char,
            visit: *const c_void,
            descriptors: c_int,
        ) -> c_int = -1;
        fn posix_spawn_file_actions_addopen(
            actions: *mut libc::posix_spawn_file_actions_t,
            fd: c_int,
            path: *const c_char,
            flags: c_int,
            mode: mode_t,
        ) -> c_int = libc::ENOSYS;
        fn posix_spawn_file_actions_addchdir_np(
            actions: *mut libc::posix_spawn_file_actions_t,
            path: *const c_char,
        ) -> c_int = libc::ENOSYS;
        fn posix_spawn_file_actions_addfchdir_np(
            actions: *mut libc::posix_spawn_file_actions_t,
            fd: c_int,
        ) -> c_int = libc::ENOSYS;
        fn posix_spawn_file_actions_destroy(actions: *mut libc::posix_spawn_file_actions_t) -> c_int = libc::ENOSYS;
        fn fts_open(argv: *const c_void, options: c_int, compare: *const c_void) -> *mut c_void = null_mut();
        fn fts_read(walk: *mut c_void) -> *mut c_void = null_mut();
        fn fts_children(walk: *mut c_void, options: c_int) -> *mut c_void = null_mut();
        fn fts_set(walk: *mut c_void, node: *mut c_void, instruction: c_int) -> c_int = -1;
        fn fts_close(walk: *mut c_void) -> c_int = -1;
        fn pathconf(path: *const c_char, name: c_int) -> libc::c_long = -1;
        fn ftok(path: *const c_char, id: c_int) -> libc::key_t = -1;
        fn mktemp(template: *mut c_char) -> *mut c_char = null_mut();
        fn tempnam(directory: *const c_char, prefix: *const c_char) -> *mut c_char = null_mut();
        fn posix_spawn(
            pid: *mut libc::pid_t,
            path: *const c_char,
            actions: *const libc::posix_spawn_file_actions_t,
            attributes: *const libc::posix_spawnattr_t,
            argv: *const *const c_char,
            envp: *const *const c_char,
        ) -> c_int = libc::ENOSYS;
        fn posix_spawnp(
            pid: *mut libc::pid_t,
            path: *const c_char,
            actions: *const libc::posix_spawn_file_actions_t,
            attributes: *const libc::posix_spawnattr_t,
            argv: *const *const c_char,
            envp: *const *const c_char,
        ) -> c_int = libc::ENOSYS;
    }

    /// Finds the functions that a signal handler may need, before a handler can run.
    pub(crate) fn find_ahead() {
        openat::find();
    }
}
