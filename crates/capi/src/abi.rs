//! The door: the private interface between libforebay.so and libforebay_preload.so.
//!
//! Both crates compile this one file, so that they cannot disagree about a layout; [`DOOR_VERSION`] keeps apart libraries
//! of two builds. libforebay.so exports one function, `forebay_door(version)`, whose answer is the table [`Door`] or
//! null. Every function returns 0 or more, or a negative errno, or [`ESCAPED`].
//!
//! All of them but `attach`, `directory_open` and `directory_close` neither allocate nor lock: they may be called from
//! signal handlers. None moves errno. Tests: `tests/interface.rs` of both crates.

use std::os::raw::c_char;

/// Moves with any change in this file.
pub const DOOR_VERSION: u32 = 5;
/// The flag of descriptors that the pool opened on its mount; others there are the kernel's.
pub const MOUNTED_MARK: i32 = libc::O_DSYNC;
/// The walk left the pool: the kernel's path to go on with is in the call's `escape` buffer, NUL-terminated.
pub const ESCAPED: i64 = i64::MIN;
/// Bytes of an `escape` buffer: the longest path and its NUL.
pub const PATH_BYTES: usize = 4097;

/// An attached pool, to be handed back as it is. Never freed.
#[repr(C)]
pub struct PoolHandle {
    _opaque: [u8; 0],
}

/// A directory being read, to be handed back as it is.
#[repr(C)]
pub struct DirectoryHandle {
    _opaque: [u8; 0],
}

/// A path from a directory of the pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Place {
    /// Inode number of the directory that the path starts from, or of anything when the path is empty.
    pub dir: u64,
    /// The path's first byte; without NUL at its end.
    pub path: *const u8,
    /// Bytes of the path; 0 means `dir` itself.
    pub bytes: usize,
}

/// One entry of a directory.
#[repr(C)]
pub struct Entry {
    /// Position behind which the next entry is; greater than 128.
    pub cookie: u64,
    /// Inode number.
    pub ino: u64,
    /// DT_REG and so on.
    pub kind: u8,
    /// Bytes of the name.
    pub name_bytes: u8,
    /// The name and a NUL.
    pub name: [u8; 256],
}

type Pool = *const PoolHandle;
type Times = *const [libc::timespec; 2];

/// The table of the door's functions. `follow` and `effective` are 0 or 1; `escape` points to [`PATH_BYTES`] bytes, as
/// they may be uninitialised. An owner or group of `u32::MAX` stays; null times are the present.
#[repr(C)]
pub struct Door {
    /// [`DOOR_VERSION`].
    pub version: u32,
    /// Attaches to the pool whose directory is `dir`; programs see it under `prefix`. On failure up to `room` bytes of
    /// `words` say why, NUL-terminated.
    pub attach: unsafe extern "C" fn(
        dir: *const c_char,
        prefix: *const c_char,
        words: *mut c_char,
        room: usize,
        pool: *mut Pool,
    ) -> i64,
    /// Opens as open(2) does; `mode` has the umask applied. The descriptor; where it would wait for a FIFO's other end,
    /// ESCAPED and the path of its backing file.
    pub open: unsafe extern "C" fn(Pool, Place, flags: i32, mode: u32, escape: *mut u8) -> i64,
    /// stat(2), lstat(2).
    pub stat: unsafe extern "C" fn(Pool, Place, follow: i32, *mut libc::stat, escape: *mut u8) -> i64,
    /// statx(2): all that is known, whatever was asked for.
    pub statx: unsafe extern "C" fn(Pool, Place, follow: i32, *mut libc::statx, escape: *mut u8) -> i64,
    /// faccessat(2).
    pub access:
        unsafe extern "C" fn(Pool, Place, amode: i32, effective: i32, follow: i32, escape: *mut u8) -> i64,
    /// mkdir(2); `mode` has the umask applied.
    pub make_directory: unsafe extern "C" fn(Pool, Place, mode: u32, escape: *mut u8) -> i64,
    /// rmdir(2).
    pub remove_directory: unsafe extern "C" fn(Pool, Place, escape: *mut u8) -> i64,
    /// unlink(2).
    pub unlink: unsafe extern "C" fn(Pool, Place, escape: *mut u8) -> i64,
    /// renameat2(2).
    pub rename: unsafe extern "C" fn(Pool, from: Place, to: Place, flags: u32, escape: *mut u8) -> i64,
    /// linkat(2).
    pub link: unsafe extern "C" fn(Pool, from: Place, to: Place, follow: i32, escape: *mut u8) -> i64,
    /// linkat(2) of a file of the target that was opened with O_TMPFILE.
    pub link_unnamed: unsafe extern "C" fn(Pool, fd: i32, to: Place, escape: *mut u8) -> i64,
    /// symlink(2) to `bytes` bytes at `target`.
    pub symlink:
        unsafe extern "C" fn(Pool, target: *const u8, bytes: usize, at: Place, escape: *mut u8) -> i64,
    /// readlink(2): the bytes that were stored.
    pub read_link: unsafe extern "C" fn(Pool, Place, buffer: *mut u8, room: usize, escape: *mut u8) -> i64,
    /// mknod(2); `mode` has the umask applied. The inode.
    pub make_node: unsafe extern "C" fn(Pool, Place, mode: u32, rdev: u64, escape: *mut u8) -> i64,
    /// chmod(2).
    pub chmod: unsafe extern "C" fn(Pool, Place, mode: u32, follow: i32, escape: *mut u8) -> i64,
    /// chown(2).
    pub chown: unsafe extern "C" fn(Pool, Place, uid: u32, gid: u32, follow: i32, escape: *mut u8) -> i64,
    /// utimensat(2).
    pub set_times: unsafe extern "C" fn(Pool, Place, Times, follow: i32, escape: *mut u8) -> i64,
    /// truncate(2).
    pub truncate: unsafe extern "C" fn(Pool, Place, size: u64, escape: *mut u8) -> i64,
    /// getxattr(2) of the NUL-terminated `name`: the value's bytes.
    pub get_xattr: unsafe extern "C" fn(
        Pool,
        Place,
        follow: i32,
        name: *const c_char,
        value: *mut u8,
        room: usize,
        escape: *mut u8,
    ) -> i64,
    /// setxattr(2).
    pub set_xattr: unsafe extern "C" fn(
        Pool,
        Place,
        follow: i32,
        name: *const c_char,
        value: *const u8,
        bytes: usize,
        flags: u32,
        escape: *mut u8,
    ) -> i64,
    /// listxattr(2): the bytes of all names.
    pub list_xattr:
        unsafe extern "C" fn(Pool, Place, follow: i32, names: *mut u8, room: usize, escape: *mut u8) -> i64,
    /// removexattr(2).
    pub remove_xattr:
        unsafe extern "C" fn(Pool, Place, follow: i32, name: *const c_char, escape: *mut u8) -> i64,
    /// Walks to an inode: its number in `ino`; returns its mode.
    pub resolve: unsafe extern "C" fn(Pool, Place, follow: i32, ino: *mut u64, escape: *mut u8) -> i64,
    /// statfs(2) of the pool, whatever in it was asked about.
    pub statfs: unsafe extern "C" fn(Pool, *mut libc::statfs) -> i64,
    /// statvfs(3) of the pool.
    pub statvfs: unsafe extern "C" fn(Pool, *mut libc::statvfs) -> i64,
    /// How many descriptors of directories this process has made. Of no pool in particular.
    pub directories_opened: unsafe extern "C" fn() -> u64,
    /// A descriptor of the directory `ino` for fchdir(2).
    pub open_to_enter: unsafe extern "C" fn(Pool, ino: u64) -> i64,
    /// The inode behind a descriptor of which fstat(2) gave `kernel`: 1 and its number, or 0 when it is not the pool's.
    pub inode_of: unsafe extern "C" fn(Pool, fd: i32, kernel: *const libc::stat, ino: *mut u64) -> i64,
    /// The pool's directory in which the process works, of whose `.` stat(2) gave `kernel`: as `inode_of`.
    pub working_directory: unsafe extern "C" fn(Pool, kernel: *const libc::stat, ino: *mut u64) -> i64,
    /// Turns the kernel's answer to fstat(2) into the pool's: 1, or 0 when the descriptor is not the pool's.
    pub fstat: unsafe extern "C" fn(Pool, fd: i32, stat: *mut libc::stat) -> i64,
    /// stat(2) by inode number.
    pub stat_inode: unsafe extern "C" fn(Pool, ino: u64, *mut libc::stat) -> i64,
    /// fchmod(2) of a descriptor whose inode [`Door::inode_of`] gave, also when that has no name any more; so are the next ones.
    pub chmod_open: unsafe extern "C" fn(Pool, fd: i32, ino: u64, mode: u32) -> i64,
    /// fchown(2).
    pub chown_open: unsafe extern "C" fn(Pool, fd: i32, ino: u64, uid: u32, gid: u32) -> i64,
    /// futimens(3).
    pub set_times_open: unsafe extern "C" fn(Pool, fd: i32, ino: u64, Times) -> i64,
    /// fgetxattr(2).
    pub get_xattr_open: unsafe extern "C" fn(
        Pool,
        fd: i32,
        ino: u64,
        name: *const c_char,
        value: *mut u8,
        room: usize,
    ) -> i64,
    /// fsetxattr(2).
    pub set_xattr_open: unsafe extern "C" fn(
        Pool,
        fd: i32,
        ino: u64,
        name: *const c_char,
        value: *const u8,
        bytes: usize,
        flags: u32,
    ) -> i64,
    /// flistxattr(2).
    pub list_xattr_open: unsafe extern "C" fn(Pool, fd: i32, ino: u64, names: *mut u8, room: usize) -> i64,
    /// fremovexattr(2).
    pub remove_xattr_open: unsafe extern "C" fn(Pool, fd: i32, ino: u64, name: *const c_char) -> i64,
    /// A path of an inode from the pool's root, starting with `/`, NUL-terminated, into [`PATH_BYTES`] bytes. Its length
    /// without NUL. Of anything but a directory only if one of its names was used of late.
    pub path_of: unsafe extern "C" fn(Pool, ino: u64, path: *mut u8) -> i64,
    /// A path by which the kernel finds a file's first backing file, or a bound socket's node, through a descriptor of this process: the bytes
    /// before its NUL.
    pub backing_path: unsafe extern "C" fn(Pool, ino: u64, path: *mut u8) -> i64,
    /// inotify_add_watch(2) of the directory `ino` with the inotify instance `fd`.
    pub watch_directory: unsafe extern "C" fn(Pool, ino: u64, fd: i32, mask: u32) -> i64,
    /// Starts to read a directory. Allocates.
    pub directory_open: unsafe extern "C" fn(Pool, ino: u64, directory: *mut *mut DirectoryHandle) -> i64,
    /// The next entry: 1 and the entry, or 0 at the end.
    pub directory_next: unsafe extern "C" fn(Pool, *mut DirectoryHandle, *mut Entry) -> i64,
    /// Goes to behind `cookie`; 0 is the start. What was read ahead is forgotten.
    pub directory_seek: unsafe extern "C" fn(*mut DirectoryHandle, cookie: u64) -> i64,
    /// Frees.
    pub directory_close: unsafe extern "C" fn(*mut DirectoryHandle) -> i64,
}
