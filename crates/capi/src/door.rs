//! The door's functions: `forebay_client::Pool` as a table of C functions (`abi.rs`), for libforebay_preload.so.

use std::os::raw::c_char;
use std::path::Path;

use forebay_client::{Directory, Pool};
use forebay_types::{Ino, TimeSet, Timestamp};

use crate::abi::{DirectoryHandle, Door, Entry, Place, PoolHandle, DOOR_VERSION, PATH_BYTES};
use crate::guard::{bytes, guard, negative, on_pool, on_walk, place, room, text, FAULT};

type Handle = *const PoolHandle;
type Times = *const [libc::timespec; 2];

static DOOR: Door = Door {
    version: DOOR_VERSION,
    attach,
    open,
    stat,
    statx,
    access,
    make_directory,
    remove_directory,
    unlink,
    rename,
    link,
    link_unnamed,
    symlink,
    read_link,
    make_node,
    chmod,
    chown,
    set_times,
    truncate,
    get_xattr,
    set_xattr,
    list_xattr,
    remove_xattr,
    resolve,
    statfs,
    statvfs,
    directories_opened,
    open_to_enter,
    inode_of,
    working_directory,
    fstat,
    stat_inode,
    chmod_open,
    chown_open,
    set_times_open,
    get_xattr_open,
    set_xattr_open,
    list_xattr_open,
    remove_xattr_open,
    path_of,
    backing_path,
    watch_directory,
    directory_open,
    directory_next,
    directory_seek,
    directory_close,
};

/// The door's table for a caller that was built with `version` of it; null for another version.
#[no_mangle]
pub extern "C" fn forebay_door(version: u32) -> *const Door {
    if version == DOOR_VERSION {
        &DOOR
    } else {
        std::ptr::null()
    }
}

fn done<E>(result: Result<(), E>) -> Result<i64, E> {
    result.map(|()| 0)
}

fn owner(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

/// Access and modification time as utimensat(2) takes them.
///
/// # Safety
/// `times` is null or valid.
pub(crate) unsafe fn time_sets(times: Times) -> Result<[TimeSet; 2], i64> {
    // SAFETY: the caller's promise.
    let Some(times) = (unsafe { times.as_ref() }) else {
        return Ok([TimeSet::Now; 2]);
    };
    let mut sets = [TimeSet::Omit; 2];
    for (set, time) in sets.iter_mut().zip(times) {
        *set = match time.tv_nsec {
            libc::UTIME_NOW => TimeSet::Now,
            libc::UTIME_OMIT => TimeSet::Omit,
            nsec @ 0..=999_999_999 => TimeSet::At(Timestamp { sec: time.tv_sec, nsec: nsec as u32 }),
            _ => return Err(-i64::from(libc::EINVAL)),
        };
    }
    Ok(sets)
}

unsafe extern "C" fn attach(
    dir: *const c_char,
    prefix: *const c_char,
    words: *mut c_char,
    words_room: usize,
    pool: *mut Handle,
) -> i64 {
    use std::os::unix::ffi::OsStrExt;
    guard(|| {
        // SAFETY: the door's contract: C strings, and room for as much as is said.
        let (dir, prefix, words) = unsafe { (text(dir)?, text(prefix)?, room(words.cast(), words_room)) };
        // SAFETY: the door's contract.
        let out = unsafe { pool.as_mut() }.ok_or(FAULT)?;
        match Pool::attach(Path::new(std::ffi::OsStr::from_bytes(dir))) {
            Ok(attached) => {
                attached.set_prefix(prefix);
                *out = std::ptr::from_ref(attached).cast();
                Ok(0)
            }
            Err(error) => {
                crate::text::store(&error.to_string(), words);
                Err(negative(error.code))
            }
        }
    })
}

// SAFETY of all functions below: the preload library keeps the door's contract (abi.rs): handles come from `attach` and
// `directory_open`, pointers are valid for their lengths, `escape` has room for a path.

unsafe extern "C" fn open(pool: Handle, at: Place, flags: i32, mode: u32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            // A wait for a FIFO's other end is no part of the library: signals end it, and threads are cancelled in it.
            pool.open_unwaiting(place(at), flags, mode, escape).map(i64::from)
        })
    }
}

unsafe extern "C" fn stat(
    pool: Handle,
    at: Place,
    follow: i32,
    out: *mut libc::stat,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            out.write(pool.stat(place(at), follow != 0, escape)?);
            Ok(0)
        })
    }
}

unsafe extern "C" fn statx(
    pool: Handle,
    at: Place,
    follow: i32,
    out: *mut libc::statx,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            out.write(pool.statx(place(at), follow != 0, escape)?);
            Ok(0)
        })
    }
}

unsafe extern "C" fn access(
    pool: Handle,
    at: Place,
    amode: i32,
    effective: i32,
    follow: i32,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            done(pool.access(place(at), amode, effective != 0, follow != 0, escape))
        })
    }
}

unsafe extern "C" fn make_directory(pool: Handle, at: Place, mode: u32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.make_directory(place(at), mode, escape))) }
}

unsafe extern "C" fn remove_directory(pool: Handle, at: Place, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.remove_directory(place(at), escape))) }
}

unsafe extern "C" fn unlink(pool: Handle, at: Place, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.unlink(place(at), escape))) }
}

unsafe extern "C" fn rename(pool: Handle, from: Place, to: Place, flags: u32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.rename(place(from), place(to), flags, escape))) }
}

unsafe extern "C" fn link(pool: Handle, from: Place, to: Place, follow: i32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| done(pool.link(place(from), place(to), follow != 0, escape)))
    }
}

unsafe extern "C" fn link_unnamed(pool: Handle, fd: i32, to: Place, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.link_unnamed(fd, place(to), escape))) }
}

unsafe extern "C" fn symlink(
    pool: Handle,
    target: *const u8,
    target_bytes: usize,
    at: Place,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let target = bytes(target, target_bytes);
        on_walk(pool, escape, |pool, escape| done(pool.symlink(target, place(at), escape)))
    }
}

unsafe extern "C" fn read_link(
    pool: Handle,
    at: Place,
    buffer: *mut u8,
    buffer_room: usize,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let buffer = room(buffer, buffer_room);
        on_walk(pool, escape, |pool, escape| pool.read_link(place(at), buffer, escape).map(|n| n as i64))
    }
}

unsafe extern "C" fn make_node(pool: Handle, at: Place, mode: u32, rdev: u64, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            pool.make_node(place(at), mode, rdev, escape).map(|ino| ino.0 as i64)
        })
    }
}

unsafe extern "C" fn chmod(pool: Handle, at: Place, mode: u32, follow: i32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.chmod(place(at), mode, follow != 0, escape))) }
}

unsafe extern "C" fn chown(pool: Handle, at: Place, uid: u32, gid: u32, follow: i32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            done(pool.chown(place(at), owner(uid), owner(gid), follow != 0, escape))
        })
    }
}

unsafe extern "C" fn set_times(pool: Handle, at: Place, times: Times, follow: i32, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        let [atime, mtime] = match time_sets(times) {
            Ok(sets) => sets,
            Err(errno) => return errno,
        };
        on_walk(pool, escape, |pool, escape| {
            done(pool.set_times(place(at), atime, mtime, follow != 0, escape))
        })
    }
}

unsafe extern "C" fn truncate(pool: Handle, at: Place, size: u64, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { on_walk(pool, escape, |pool, escape| done(pool.truncate(place(at), size, escape))) }
}

unsafe extern "C" fn get_xattr(
    pool: Handle,
    at: Place,
    follow: i32,
    name: *const c_char,
    value: *mut u8,
    value_room: usize,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let name = match text(name) {
            Ok(name) => name,
            Err(errno) => return errno,
        };
        let value = room(value, value_room);
        on_walk(pool, escape, |pool, escape| {
            pool.get_xattr(place(at), follow != 0, name, value, escape).map(|n| n as i64)
        })
    }
}

unsafe extern "C" fn set_xattr(
    pool: Handle,
    at: Place,
    follow: i32,
    name: *const c_char,
    value: *const u8,
    value_bytes: usize,
    flags: u32,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let name = match text(name) {
            Ok(name) => name,
            Err(errno) => return errno,
        };
        let value = bytes(value, value_bytes);
        on_walk(pool, escape, |pool, escape| {
            done(pool.set_xattr(place(at), follow != 0, name, value, flags, escape))
        })
    }
}

unsafe extern "C" fn list_xattr(
    pool: Handle,
    at: Place,
    follow: i32,
    names: *mut u8,
    names_room: usize,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let names = room(names, names_room);
        on_walk(pool, escape, |pool, escape| {
            pool.list_xattr(place(at), follow != 0, names, escape).map(|n| n as i64)
        })
    }
}

unsafe extern "C" fn remove_xattr(
    pool: Handle,
    at: Place,
    follow: i32,
    name: *const c_char,
    escape: *mut u8,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        let name = match text(name) {
            Ok(name) => name,
            Err(errno) => return errno,
        };
        on_walk(pool, escape, |pool, escape| done(pool.remove_xattr(place(at), follow != 0, name, escape)))
    }
}

unsafe extern "C" fn resolve(pool: Handle, at: Place, follow: i32, ino: *mut u64, escape: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, escape, |pool, escape| {
            let entry = pool.resolve(place(at), follow != 0, escape)?;
            ino.write(entry.attr.ino.0);
            Ok(i64::from(entry.attr.mode))
        })
    }
}

unsafe extern "C" fn statfs(pool: Handle, out: *mut libc::statfs) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            out.write(pool.statfs().map_err(negative)?);
            Ok(0)
        })
    }
}

unsafe extern "C" fn statvfs(pool: Handle, out: *mut libc::statvfs) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            out.write(pool.statvfs().map_err(negative)?);
            Ok(0)
        })
    }
}

const _: () = assert!(crate::abi::MOUNTED_MARK == forebay_client::MOUNTED_MARK);

unsafe extern "C" fn directories_opened() -> u64 {
    forebay_client::directories_opened()
}

unsafe extern "C" fn open_to_enter(pool: Handle, ino: u64) -> i64 {
    // SAFETY: see above.
    unsafe { on_pool(pool, |pool| pool.open_to_enter(Ino(ino)).map(i64::from).map_err(negative)) }
}

unsafe extern "C" fn inode_of(pool: Handle, fd: i32, kernel: *const libc::stat, ino: *mut u64) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| match pool.inode_of(fd, &*kernel) {
            None => Ok(0),
            Some(found) => {
                ino.write(found.0);
                Ok(1)
            }
        })
    }
}

unsafe extern "C" fn working_directory(pool: Handle, kernel: *const libc::stat, ino: *mut u64) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| match pool.inode_of_working_directory(&*kernel) {
            None => Ok(0),
            Some(found) => {
                ino.write(found.0);
                Ok(1)
            }
        })
    }
}

unsafe extern "C" fn fstat(pool: Handle, fd: i32, stat: *mut libc::stat) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| match pool.fstat(fd, &*stat) {
            None => Ok(0),
            Some(ours) => {
                stat.write(ours);
                Ok(1)
            }
        })
    }
}

unsafe extern "C" fn stat_inode(pool: Handle, ino: u64, out: *mut libc::stat) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            out.write(pool.stat_inode(Ino(ino)).map_err(negative)?);
            Ok(0)
        })
    }
}

unsafe extern "C" fn chmod_open(pool: Handle, fd: i32, ino: u64, mode: u32) -> i64 {
    // SAFETY: see above.
    unsafe { on_pool(pool, |pool| done(pool.chmod_open(fd, Ino(ino), mode)).map_err(negative)) }
}

unsafe extern "C" fn chown_open(pool: Handle, fd: i32, ino: u64, uid: u32, gid: u32) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| done(pool.chown_open(fd, Ino(ino), owner(uid), owner(gid))).map_err(negative))
    }
}

unsafe extern "C" fn set_times_open(pool: Handle, fd: i32, ino: u64, times: Times) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            let [atime, mtime] = time_sets(times)?;
            done(pool.set_times_open(fd, Ino(ino), atime, mtime)).map_err(negative)
        })
    }
}

unsafe extern "C" fn get_xattr_open(
    pool: Handle,
    fd: i32,
    ino: u64,
    name: *const c_char,
    value: *mut u8,
    value_room: usize,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            let n = pool.get_xattr_open(fd, Ino(ino), text(name)?, room(value, value_room));
            n.map(|n| n as i64).map_err(negative)
        })
    }
}

unsafe extern "C" fn set_xattr_open(
    pool: Handle,
    fd: i32,
    ino: u64,
    name: *const c_char,
    value: *const u8,
    value_bytes: usize,
    flags: u32,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            done(pool.set_xattr_open(fd, Ino(ino), text(name)?, bytes(value, value_bytes), flags))
                .map_err(negative)
        })
    }
}

unsafe extern "C" fn list_xattr_open(
    pool: Handle,
    fd: i32,
    ino: u64,
    names: *mut u8,
    names_room: usize,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            pool.list_xattr_open(fd, Ino(ino), room(names, names_room)).map(|n| n as i64).map_err(negative)
        })
    }
}

unsafe extern "C" fn remove_xattr_open(pool: Handle, fd: i32, ino: u64, name: *const c_char) -> i64 {
    // SAFETY: see above.
    unsafe { on_pool(pool, |pool| done(pool.remove_xattr_open(fd, Ino(ino), text(name)?)).map_err(negative)) }
}

/// Stores the path that `make` gives.
///
/// # Safety
/// As of all functions here.
unsafe fn store_path(
    pool: Handle,
    path: *mut u8,
    make: impl FnOnce(&Pool, &mut forebay_client::PathBuffer) -> Result<(), forebay_types::Code>,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            let mut buffer = forebay_client::PathBuffer::new();
            make(pool, &mut buffer).map_err(negative)?;
            let bytes = buffer.as_bytes();
            let out = room(path, PATH_BYTES);
            let (head, tail) = out.split_at_mut_checked(bytes.len()).ok_or(FAULT)?;
            *tail.first_mut().ok_or(-i64::from(libc::ENAMETOOLONG))? = 0;
            head.copy_from_slice(bytes);
            Ok(bytes.len() as i64)
        })
    }
}

unsafe extern "C" fn path_of(pool: Handle, ino: u64, path: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { store_path(pool, path, |pool, buffer| pool.path_of(Ino(ino), buffer)) }
}

unsafe extern "C" fn backing_path(pool: Handle, ino: u64, path: *mut u8) -> i64 {
    // SAFETY: see above.
    unsafe { store_path(pool, path, |pool, buffer| pool.backing_path(Ino(ino), buffer)) }
}

unsafe extern "C" fn watch_directory(pool: Handle, ino: u64, fd: i32, mask: u32) -> i64 {
    if fd < 0 {
        return -i64::from(libc::EBADF);
    }
    // SAFETY: see above. The program's descriptor is open, or the kernel says EBADF: it is only sent.
    unsafe {
        on_pool(pool, |pool| {
            let inotify = std::os::fd::BorrowedFd::borrow_raw(fd);
            pool.watch_directory(Ino(ino), inotify, mask).map(i64::from).map_err(negative)
        })
    }
}

unsafe extern "C" fn directory_open(pool: Handle, ino: u64, out: *mut *mut DirectoryHandle) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_pool(pool, |pool| {
            let directory = Box::new(pool.read_directory(Ino(ino)));
            out.write(Box::into_raw(directory).cast());
            Ok(0)
        })
    }
}

unsafe extern "C" fn directory_next(pool: Handle, directory: *mut DirectoryHandle, out: *mut Entry) -> i64 {
    // SAFETY: see above; the caller holds the stream's lock, so nothing else uses the directory.
    unsafe {
        on_pool(pool, |pool| {
            let directory = directory.cast::<Directory>().as_mut().ok_or(FAULT)?;
            let Some(entry) = directory.next(pool).map_err(negative)? else {
                return Ok(0);
            };
            let out = out.as_mut().ok_or(FAULT)?;
            let name = &mut out.name;
            let name_bytes = entry.name.len().min(name.len() - 1);
            name[..name_bytes].copy_from_slice(&entry.name[..name_bytes]);
            name[name_bytes] = 0;
            out.name_bytes = name_bytes as u8;
            out.cookie = entry.cookie;
            out.ino = entry.ino.0;
            out.kind = entry.kind.dirent_type();
            Ok(1)
        })
    }
}

unsafe extern "C" fn directory_seek(directory: *mut DirectoryHandle, cookie: u64) -> i64 {
    guard(|| {
        // SAFETY: see above.
        let directory = unsafe { directory.cast::<Directory>().as_mut() }.ok_or(FAULT)?;
        directory.seek(cookie);
        Ok(0)
    })
}

unsafe extern "C" fn directory_close(directory: *mut DirectoryHandle) -> i64 {
    guard(|| {
        if !directory.is_null() {
            // SAFETY: it came from `directory_open` and is not used again.
            drop(unsafe { Box::from_raw(directory.cast::<Directory>()) });
        }
        Ok(0)
    })
}
