//! The door's functions for libforebay_preload.so: `forebay_client::Pool` as the table of C functions in `abi.rs`.
//!
//! [`DOOR`] has one function for each entry of `door_calls!`. It checks the pool and calls the function of the same
//! name below inside the guard.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_client::{Directory, Durable, PathBuffer, Pool};
use forebay_types::Ino;

use crate::abi::{door_calls, DirectoryHandle, Door, Entry, Place, PoolHandle, Times, DOOR_VERSION};
use crate::answer::{bytes, call, given, room, store_path, text, walk, Failed, FAULT};
use crate::public::{owner, store_name, time_sets};

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*);)*) => {
        static DOOR: Door = Door {
            version: DOOR_VERSION,
            attach: attach_for_c,
            $($name: {
                unsafe extern "C" fn for_c(pool: *const PoolHandle, $($arg: $ty),*) -> i64 {
                    // SAFETY: the preload library keeps the contract of abi.rs.
                    call(|| unsafe { $name(given(pool.cast::<Pool>())?, $($arg),*) })
                }
                for_c
            },)*
        };
    };
}
door_calls!(table);

/// Returns the table if the caller was built with the same version of it, otherwise null.
#[no_mangle]
pub extern "C" fn forebay_door(version: u32) -> *const Door {
    if version == DOOR_VERSION {
        &DOOR
    } else {
        std::ptr::null()
    }
}

const _: () = assert!(crate::abi::MOUNTED_MARK == forebay_client::MOUNTED_MARK);

/// The result of a call that can fail.
type Answer<T = ()> = Result<T, Failed>;

// SAFETY of all functions below: the preload library keeps the contract of abi.rs. Handles come from `attach` and
// `directory_open`, pointers are valid for their lengths, and `escape` has room for a path.

unsafe extern "C" fn attach_for_c(
    dir: *const c_char,
    prefix: *const c_char,
    words: *mut c_char,
    words_room: usize,
    pool: *mut *const PoolHandle,
) -> i64 {
    call(|| {
        // SAFETY: see above.
        let (dir, prefix, words) = unsafe { (text(dir), text(prefix), room(words.cast(), words_room)) };
        let (dir, prefix) = (dir.ok_or(FAULT)?, prefix.ok_or(FAULT)?);
        // SAFETY: see above.
        let out = unsafe { pool.as_mut() }.ok_or(FAULT)?;
        let attached = Pool::attach(Path::new(OsStr::from_bytes(dir))).map_err(|error| {
            crate::text::store(&error.to_string(), words);
            error.code
        })?;
        attached.set_prefix(prefix);
        *out = std::ptr::from_ref(attached).cast();
        Ok(())
    })
}

/// Converts a place for the client.
///
/// # Safety
/// `path` points to `bytes` bytes, or `bytes` is 0.
unsafe fn place<'a>(place: Place) -> forebay_client::Place<'a> {
    // SAFETY: the caller's promise.
    forebay_client::Place { dir: Ino(place.dir), path: unsafe { bytes(place.path, place.bytes) } }
}

unsafe fn open(pool: &Pool, at: Place, flags: i32, mode: u32, escape: *mut u8) -> Answer<i32> {
    // SAFETY: see above.
    unsafe {
        // A wait for the other end of a FIFO must end by a signal or a thread's cancellation, so it is not done here.
        walk(escape, |path| pool.open_unwaiting(place(at), flags, mode, path))
    }
}

unsafe fn stat(pool: &Pool, at: Place, follow: i32, out: *mut libc::stat, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe {
        out.write(walk(escape, |path| pool.stat(place(at), follow != 0, path))?);
        Ok(())
    }
}

unsafe fn statx(pool: &Pool, at: Place, follow: i32, out: *mut libc::statx, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe {
        out.write(walk(escape, |path| pool.statx(place(at), follow != 0, path))?);
        Ok(())
    }
}

unsafe fn access(pool: &Pool, at: Place, amode: i32, effective: i32, follow: i32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.access(place(at), amode, effective != 0, follow != 0, path)) }
}

unsafe fn make_directory(pool: &Pool, at: Place, mode: u32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.make_directory(place(at), mode, path)) }
}

unsafe fn remove_directory(pool: &Pool, at: Place, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.remove_directory(place(at), path)) }
}

unsafe fn unlink(pool: &Pool, at: Place, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.unlink(place(at), path)) }
}

unsafe fn rename(pool: &Pool, from: Place, to: Place, flags: u32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.rename(place(from), place(to), flags, path)) }
}

unsafe fn link(pool: &Pool, from: Place, to: Place, follow: i32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.link(place(from), place(to), follow != 0, path)) }
}

unsafe fn link_unnamed(pool: &Pool, fd: i32, to: Place, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.link_unnamed(fd, place(to), path)) }
}

unsafe fn symlink(pool: &Pool, target: *const u8, target_bytes: usize, at: Place, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe {
        let target = bytes(target, target_bytes);
        walk(escape, |path| pool.symlink(target, place(at), path))
    }
}

unsafe fn read_link(
    pool: &Pool,
    at: Place,
    buffer: *mut u8,
    buffer_room: usize,
    escape: *mut u8,
) -> Answer<usize> {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.read_link(place(at), room(buffer, buffer_room), path)) }
}

unsafe fn make_node(pool: &Pool, at: Place, mode: u32, rdev: u64, escape: *mut u8) -> Answer<u64> {
    // SAFETY: see above.
    unsafe { Ok(walk(escape, |path| pool.make_node(place(at), mode, rdev, path))?.0) }
}

unsafe fn chmod(pool: &Pool, at: Place, mode: u32, follow: i32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.chmod(place(at), mode, follow != 0, path)) }
}

unsafe fn chown(pool: &Pool, at: Place, uid: u32, gid: u32, follow: i32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.chown(place(at), owner(uid), owner(gid), follow != 0, path)) }
}

unsafe fn set_times(pool: &Pool, at: Place, times: Times, follow: i32, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe {
        let [atime, mtime] = time_sets(times.as_ref())?;
        walk(escape, |path| pool.set_times(place(at), atime, mtime, follow != 0, path))
    }
}

unsafe fn truncate(pool: &Pool, at: Place, size: u64, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.truncate(place(at), size, path)) }
}

unsafe fn get_xattr(
    pool: &Pool,
    at: Place,
    follow: i32,
    name: *const c_char,
    value: *mut u8,
    value_room: usize,
    escape: *mut u8,
) -> Answer<usize> {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        let value = room(value, value_room);
        walk(escape, |path| pool.get_xattr(place(at), follow != 0, name, value, path))
    }
}

#[allow(clippy::too_many_arguments)] // As the entry of the table.
unsafe fn set_xattr(
    pool: &Pool,
    at: Place,
    follow: i32,
    name: *const c_char,
    value: *const u8,
    value_bytes: usize,
    flags: u32,
    escape: *mut u8,
) -> Answer {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        let value = bytes(value, value_bytes);
        walk(escape, |path| pool.set_xattr(place(at), follow != 0, name, value, flags, path))
    }
}

unsafe fn list_xattr(
    pool: &Pool,
    at: Place,
    follow: i32,
    names: *mut u8,
    names_room: usize,
    escape: *mut u8,
) -> Answer<usize> {
    // SAFETY: see above.
    unsafe { walk(escape, |path| pool.list_xattr(place(at), follow != 0, room(names, names_room), path)) }
}

unsafe fn remove_xattr(pool: &Pool, at: Place, follow: i32, name: *const c_char, escape: *mut u8) -> Answer {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        walk(escape, |path| pool.remove_xattr(place(at), follow != 0, name, path))
    }
}

unsafe fn resolve(pool: &Pool, at: Place, follow: i32, ino: *mut u64, escape: *mut u8) -> Answer<u64> {
    // SAFETY: see above.
    unsafe {
        let entry = walk(escape, |path| pool.resolve(place(at), follow != 0, path))?;
        ino.write(entry.attr.ino.0);
        Ok(entry.attr.mode.into())
    }
}

unsafe fn statfs(pool: &Pool, out: *mut libc::statfs) -> Answer {
    // SAFETY: see above.
    unsafe {
        out.write(pool.statfs()?);
        Ok(())
    }
}

unsafe fn statvfs(pool: &Pool, out: *mut libc::statvfs) -> Answer {
    // SAFETY: see above.
    unsafe {
        out.write(pool.statvfs()?);
        Ok(())
    }
}

fn directories_opened(_pool: &Pool) -> Answer<u64> {
    Ok(forebay_client::directories_opened())
}

fn open_to_enter(pool: &Pool, ino: u64) -> Answer<i32> {
    Ok(pool.open_to_enter(Ino(ino))?)
}

/// Stores the inode's number if one was found. Returns whether one was found.
///
/// # Safety
/// `ino` is writable.
unsafe fn store_found(found: Option<Ino>, ino: *mut u64) -> Answer<bool> {
    if let Some(found) = found {
        // SAFETY: the caller's promise.
        unsafe { ino.write(found.0) };
    }
    Ok(found.is_some())
}

unsafe fn inode_of(pool: &Pool, fd: i32, kernel: *const libc::stat, ino: *mut u64) -> Answer<bool> {
    // SAFETY: see above.
    unsafe { store_found(pool.inode_of(fd, &*kernel), ino) }
}

unsafe fn working_directory(pool: &Pool, kernel: *const libc::stat, ino: *mut u64) -> Answer<bool> {
    // SAFETY: see above.
    unsafe { store_found(pool.inode_of_working_directory(&*kernel), ino) }
}

unsafe fn fstat(pool: &Pool, fd: i32, stat: *mut libc::stat) -> Answer<bool> {
    // SAFETY: see above.
    unsafe {
        let found = pool.fstat(fd, &*stat);
        if let Some(attributes) = found {
            stat.write(attributes);
        }
        Ok(found.is_some())
    }
}

unsafe fn stat_inode(pool: &Pool, ino: u64, out: *mut libc::stat) -> Answer {
    // SAFETY: see above.
    unsafe {
        out.write(pool.stat_inode(Ino(ino))?);
        Ok(())
    }
}

fn persist(pool: &Pool, ino: u64, closes: i32) -> Answer {
    let call = if closes != 0 { Durable::Close } else { Durable::Sync };
    Ok(pool.persist_for(Ino(ino), call)?)
}

fn mark_to_recover(pool: &Pool, ino: u64) -> Answer {
    Ok(pool.mark_to_recover(Ino(ino))?)
}

fn close_waits(_pool: &Pool) -> Answer<i32> {
    Ok(i32::from(forebay_client::close_waits()))
}

fn chmod_open(pool: &Pool, fd: i32, ino: u64, mode: u32) -> Answer {
    Ok(pool.chmod_open(fd, Ino(ino), mode)?)
}

fn chown_open(pool: &Pool, fd: i32, ino: u64, uid: u32, gid: u32) -> Answer {
    Ok(pool.chown_open(fd, Ino(ino), owner(uid), owner(gid))?)
}

unsafe fn set_times_open(pool: &Pool, fd: i32, ino: u64, times: Times) -> Answer {
    // SAFETY: see above.
    unsafe {
        let [atime, mtime] = time_sets(times.as_ref())?;
        Ok(pool.set_times_open(fd, Ino(ino), atime, mtime)?)
    }
}

unsafe fn get_xattr_open(
    pool: &Pool,
    fd: i32,
    ino: u64,
    name: *const c_char,
    value: *mut u8,
    value_room: usize,
) -> Answer<usize> {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        Ok(pool.get_xattr_open(fd, Ino(ino), name, room(value, value_room))?)
    }
}

unsafe fn set_xattr_open(
    pool: &Pool,
    fd: i32,
    ino: u64,
    name: *const c_char,
    value: *const u8,
    value_bytes: usize,
    flags: u32,
) -> Answer {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        Ok(pool.set_xattr_open(fd, Ino(ino), name, bytes(value, value_bytes), flags)?)
    }
}

unsafe fn list_xattr_open(
    pool: &Pool,
    fd: i32,
    ino: u64,
    names: *mut u8,
    names_room: usize,
) -> Answer<usize> {
    // SAFETY: see above.
    unsafe { Ok(pool.list_xattr_open(fd, Ino(ino), room(names, names_room))?) }
}

unsafe fn remove_xattr_open(pool: &Pool, fd: i32, ino: u64, name: *const c_char) -> Answer {
    // SAFETY: see above.
    unsafe {
        let name = text(name).ok_or(FAULT)?;
        Ok(pool.remove_xattr_open(fd, Ino(ino), name)?)
    }
}

unsafe fn path_of(pool: &Pool, ino: u64, path: *mut u8) -> Answer<usize> {
    // SAFETY: see above.
    unsafe {
        let mut buffer = PathBuffer::new();
        pool.path_of(Ino(ino), &mut buffer)?;
        store_path(&buffer, path)
    }
}

unsafe fn backing_path(pool: &Pool, ino: u64, path: *mut u8) -> Answer<usize> {
    // SAFETY: see above.
    unsafe {
        let mut buffer = PathBuffer::new();
        pool.backing_path(Ino(ino), &mut buffer)?;
        store_path(&buffer, path)
    }
}

unsafe fn watch_directory(pool: &Pool, ino: u64, fd: i32, mask: u32) -> Answer<i32> {
    // SAFETY: see above.
    unsafe {
        if fd < 0 {
            return Err(Failed::errno(libc::EBADF));
        }
        // The descriptor is only sent, and the kernel refuses one that is not open.
        let inotify = BorrowedFd::borrow_raw(fd);
        Ok(pool.watch_directory(Ino(ino), inotify, mask)?)
    }
}

unsafe fn directory_open(pool: &Pool, ino: u64, out: *mut *mut DirectoryHandle) -> Answer {
    // SAFETY: see above.
    unsafe {
        let directory = Box::new(pool.read_directory(Ino(ino)));
        out.write(Box::into_raw(directory).cast());
        Ok(())
    }
}

unsafe fn directory_next(pool: &Pool, directory: *mut DirectoryHandle, out: *mut Entry) -> Answer<bool> {
    // SAFETY: see above.
    unsafe {
        // The caller holds the stream's lock, so nothing else uses the directory.
        let directory = directory.cast::<Directory>().as_mut().ok_or(FAULT)?;
        let out = out.as_mut().ok_or(FAULT)?;
        let Some(entry) = directory.next(pool)? else {
            return Ok(false);
        };
        out.name_bytes = store_name(entry.name, &mut out.name) as u8;
        out.cookie = entry.cookie;
        out.ino = entry.ino.0;
        out.kind = entry.kind.dirent_type();
        Ok(true)
    }
}

unsafe fn directory_seek(_pool: &Pool, directory: *mut DirectoryHandle, cookie: u64) -> Answer {
    // SAFETY: see above.
    unsafe {
        directory.cast::<Directory>().as_mut().ok_or(FAULT)?.seek(cookie);
        Ok(())
    }
}

unsafe fn directory_close(_pool: &Pool, directory: *mut DirectoryHandle) -> Answer {
    // SAFETY: see above.
    unsafe {
        if !directory.is_null() {
            drop(Box::from_raw(directory.cast::<Directory>()));
        }
        Ok(())
    }
}
