//! The door: the private interface between libforebay_preload.so and libforebay.so.
//!
//! Both crates compile this one file, so they agree on every layout. [`DOOR_VERSION`] detects libraries of different
//! builds. libforebay.so exports the function `forebay_door(version)`, which returns the table [`Door`], or null for
//! another version. [`door_calls`] lists the table's functions: one entry is a function of the table, a function of
//! `door.rs` in `capi`, and a method of `Pool` in the preload library.
//!
//! Every function returns 0 or more, a negative errno, or [`ESCAPED`]. All but `attach`, `directory_open` and
//! `directory_close` may be called from a signal handler: they neither allocate nor lock. None changes errno.

use std::os::raw::c_char;

/// Changes with every change of this file.
pub const DOOR_VERSION: u32 = 7;
/// The flag of descriptors that the pool opened on its mount. The kernel owns other descriptors on that mount.
pub const MOUNTED_MARK: i32 = libc::O_DSYNC;
/// The path left the pool. The `escape` buffer has the kernel's path to continue with, NUL-terminated.
pub const ESCAPED: i64 = i64::MIN;
/// Bytes of an `escape` buffer: the longest path and its NUL.
pub const PATH_BYTES: usize = 4097;

/// An attached pool. Never freed.
#[repr(C)]
pub struct PoolHandle {
    _opaque: [u8; 0],
}

/// A directory being read.
#[repr(C)]
pub struct DirectoryHandle {
    _opaque: [u8; 0],
}

/// A path from a directory of the pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Place {
    /// Inode number of the directory that the path starts from. With an empty path, inode number of any file.
    pub dir: u64,
    /// The path's first byte. The path has no NUL at its end.
    pub path: *const u8,
    /// Bytes of the path; 0 for `dir` itself.
    pub bytes: usize,
}

/// One entry of a directory.
#[repr(C)]
pub struct Entry {
    /// Position behind this entry; greater than 128.
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

/// Times of access and modification. Null sets both to the present time.
pub type Times = *const [libc::timespec; 2];

/// Passes the table's functions on a pool to the macro `$use`.
///
/// `follow` and `effective` are 0 or 1. `escape` points to [`PATH_BYTES`] bytes, which need not be initialized. An
/// owner or group of `u32::MAX` stays as it is. A `mode` has the umask applied.
macro_rules! door_calls {
    ($use:ident) => {
        $use! {
            /// open(2): the descriptor. If the call would wait for the other end of a FIFO: ESCAPED, and the path of
            /// the backing file.
            open(at: Place, flags: i32, mode: u32, escape: *mut u8);
            /// stat(2), lstat(2).
            stat(at: Place, follow: i32, out: *mut libc::stat, escape: *mut u8);
            /// statx(2), with every field that is known.
            statx(at: Place, follow: i32, out: *mut libc::statx, escape: *mut u8);
            /// faccessat(2).
            access(at: Place, amode: i32, effective: i32, follow: i32, escape: *mut u8);
            /// mkdir(2).
            make_directory(at: Place, mode: u32, escape: *mut u8);
            /// rmdir(2).
            remove_directory(at: Place, escape: *mut u8);
            /// unlink(2).
            unlink(at: Place, escape: *mut u8);
            /// renameat2(2).
            rename(from: Place, to: Place, flags: u32, escape: *mut u8);
            /// linkat(2).
            link(from: Place, to: Place, follow: i32, escape: *mut u8);
            /// linkat(2) of a file on the target that was opened with O_TMPFILE.
            link_unnamed(fd: i32, to: Place, escape: *mut u8);
            /// symlink(2) to `bytes` bytes at `target`.
            symlink(target: *const u8, bytes: usize, at: Place, escape: *mut u8);
            /// readlink(2): the number of bytes stored.
            read_link(at: Place, buffer: *mut u8, room: usize, escape: *mut u8);
            /// mknod(2): the inode number.
            make_node(at: Place, mode: u32, rdev: u64, escape: *mut u8);
            /// chmod(2).
            chmod(at: Place, mode: u32, follow: i32, escape: *mut u8);
            /// chown(2).
            chown(at: Place, uid: u32, gid: u32, follow: i32, escape: *mut u8);
            /// utimensat(2).
            set_times(at: Place, times: Times, follow: i32, escape: *mut u8);
            /// truncate(2).
            truncate(at: Place, size: u64, escape: *mut u8);
            /// getxattr(2): the bytes of the value.
            get_xattr(
                at: Place, follow: i32, name: *const c_char, value: *mut u8, room: usize, escape: *mut u8
            );
            /// setxattr(2).
            set_xattr(
                at: Place,
                follow: i32,
                name: *const c_char,
                value: *const u8,
                bytes: usize,
                flags: u32,
                escape: *mut u8
            );
            /// listxattr(2): the bytes of all names.
            list_xattr(at: Place, follow: i32, names: *mut u8, room: usize, escape: *mut u8);
            /// removexattr(2).
            remove_xattr(at: Place, follow: i32, name: *const c_char, escape: *mut u8);
            /// Walks to an inode and stores its number in `ino`. Returns its mode.
            resolve(at: Place, follow: i32, ino: *mut u64, escape: *mut u8);
            /// statfs(2) of the pool.
            statfs(out: *mut libc::statfs);
            /// statvfs(3) of the pool.
            statvfs(out: *mut libc::statvfs);
            /// The number of descriptors of directories that this process has made, in all pools.
            directories_opened();
            /// A descriptor of the directory `ino` for fchdir(2).
            open_to_enter(ino: u64);
            /// The inode behind a descriptor for which fstat(2) returned `kernel`: 1 and its number, or 0 when it is
            /// not in the pool.
            inode_of(fd: i32, kernel: *const libc::stat, ino: *mut u64);
            /// The inode of the working directory, for whose `.` stat(2) returned `kernel`. Returns as `inode_of`.
            working_directory(kernel: *const libc::stat, ino: *mut u64);
            /// Replaces the attributes that fstat(2) returned for a descriptor by the pool's. Returns 1, or 0 if the
            /// file is not in the pool.
            fstat(fd: i32, stat: *mut libc::stat);
            /// stat(2) by inode number.
            stat_inode(ino: u64, out: *mut libc::stat);
            /// fchmod(2) of a descriptor. `ino` is the inode that `inode_of` returned for it, which need not have a
            /// name. The same holds for the following calls that end in `_open`.
            chmod_open(fd: i32, ino: u64, mode: u32);
            /// fchown(2).
            chown_open(fd: i32, ino: u64, uid: u32, gid: u32);
            /// futimens(3).
            set_times_open(fd: i32, ino: u64, times: Times);
            /// fgetxattr(2).
            get_xattr_open(fd: i32, ino: u64, name: *const c_char, value: *mut u8, room: usize);
            /// fsetxattr(2).
            set_xattr_open(
                fd: i32, ino: u64, name: *const c_char, value: *const u8, bytes: usize, flags: u32
            );
            /// flistxattr(2).
            list_xattr_open(fd: i32, ino: u64, names: *mut u8, room: usize);
            /// fremovexattr(2).
            remove_xattr_open(fd: i32, ino: u64, name: *const c_char);
            /// Waits until the backing store has a file's data, where the store is attached so that fsync does (`closes`
            /// 0), or close of a file that was open for writing (`closes` 1).
            persist(ino: u64, closes: i32);
            /// Has the backing files of a file, or of a directory's files, marked before they are synced, where a target
            /// outlives the node.
            mark_to_recover(ino: u64);
            /// 1 if this process has opened a file whose close waits, else 0.
            close_waits();
            /// Stores a path of an inode from the pool's root, with `/` at its start and a NUL, in [`PATH_BYTES`]
            /// bytes. Returns its length without the NUL. A directory always has such a path. A file has one if a name
            /// of it was used recently.
            path_of(ino: u64, path: *mut u8);
            /// Stores a path by which the kernel finds the first backing file of a file, or the node of a bound socket,
            /// through a descriptor of this process. Returns its length without the NUL.
            backing_path(ino: u64, path: *mut u8);
            /// inotify_add_watch(2) of the directory `ino` with the inotify instance `fd`.
            watch_directory(ino: u64, fd: i32, mask: u32);
            /// Starts reading a directory. Allocates.
            directory_open(ino: u64, directory: *mut *mut DirectoryHandle);
            /// The next entry: 1 and the entry, or 0 at the end.
            directory_next(directory: *mut DirectoryHandle, out: *mut Entry);
            /// Continues behind `cookie`; 0 is the start. Discards entries that were read ahead.
            directory_seek(directory: *mut DirectoryHandle, cookie: u64);
            /// Frees a directory.
            directory_close(directory: *mut DirectoryHandle);
        }
    };
}
pub(crate) use door_calls;

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*);)*) => {
        /// The table of the door's functions, which take the pool first.
        #[repr(C)]
        pub struct Door {
            /// [`DOOR_VERSION`].
            pub version: u32,
            /// Attaches to the pool with the directory `dir`. Programs see it under `prefix`. On failure, up to `room`
            /// bytes of `words` get the reason, NUL-terminated.
            pub attach: unsafe extern "C" fn(
                dir: *const c_char,
                prefix: *const c_char,
                words: *mut c_char,
                room: usize,
                pool: *mut *const PoolHandle,
            ) -> i64,
            $($(#[$doc])* pub $name: unsafe extern "C" fn(*const PoolHandle, $($arg: $ty),*) -> i64,)*
        }
    };
}
door_calls!(table);
