//! Reading directories: opendir, the calls that take its stream, and getdents64.

use std::os::raw::{c_char, c_int, c_long, c_void};

use libc::{dirent as Dirent, DIR};

use crate::abi::Place;
use crate::boundary::guard;
use crate::door::{either, Pool};
use crate::interpose::{answer, answer_int, errno, set_errno};
use crate::stream::{record_bytes, Stream};
use crate::{descriptor, real, route, settings};

/// Opens the directory at `place` for reading.
///
/// # Safety
/// `escape` has room for a path.
unsafe fn open_place(pool: Pool, place: Place, escape: *mut u8) -> Result<i64, i64> {
    // SAFETY: the caller's promise.
    let itself = unsafe {
        let (itself, kind) = pool.reach(place, true, escape)?;
        if kind != libc::S_IFDIR {
            return Err(-i64::from(libc::ENOTDIR));
        }
        pool.allows(itself, libc::R_OK, escape)?;
        itself
    };
    Stream::open(pool, itself.dir, -1).map(|stream| stream as i64)
}

/// A stream as the result of a call; null for a negative errno.
pub(crate) fn raw_stream(stream: *mut DIR) -> isize {
    if stream.is_null() {
        return -(errno() as isize);
    }
    stream as isize
}

/// True when `fd` may be a directory of the pool.
fn may_be_ours(fd: c_int) -> bool {
    settings::prefix_bytes() != 0 && fd >= 0 && descriptor::may_be_directory(fd)
}

/// The offset of an anchor whose position did not fit and is in [`POSITION`].
const ELSEWHERE: isize = 3;
/// The attribute of an anchor that has a position.
const POSITION: *const c_char = c"user.forebay.position".as_ptr();

/// Where getdents64 continues in a directory of the pool. The position is kept where the kernel keeps its own, in the
/// open file behind the descriptor, so that dup, fork and exec share it. This is possible as the anchor is empty and
/// its own offset has no use. ext4 refuses offsets as large as a cookie; there the position is an attribute of the
/// anchor.
fn position_of(fd: c_int) -> isize {
    let mut position = 0isize;
    // SAFETY: seeking touches no memory. The word is writable for its size.
    unsafe {
        let offset = system_call!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR);
        if offset != ELSEWHERE {
            return offset;
        }
        let bytes = size_of::<isize>();
        match system_call!(libc::SYS_fgetxattr, fd, POSITION, &raw mut position, bytes) {
            got if got == bytes as isize => position,
            got if got < 0 => got,
            _ => -(libc::EIO as isize),
        }
    }
}

/// Keeps a position. Returns 0 or a negative errno.
fn keep_position(fd: c_int, position: isize) -> isize {
    // SAFETY: seeking touches no memory. The word is readable for its size.
    unsafe {
        if system_call!(libc::SYS_lseek, fd, position, libc::SEEK_SET) == position {
            return 0;
        }
        match system_call!(libc::SYS_fsetxattr, fd, POSITION, &raw const position, size_of::<isize>(), 0) {
            0 => system_call!(libc::SYS_lseek, fd, ELSEWHERE, libc::SEEK_SET).min(0),
            failed => failed,
        }
    }
}

/// getdents64 of a directory of the pool.
unsafe fn read_entries(pool: Pool, ino: u64, fd: c_int, out: *mut u8, room: usize) -> isize {
    let position = position_of(fd);
    if position < 0 {
        return position;
    }
    let stream = match Stream::open(pool, ino, -1) {
        Ok(stream) => stream,
        Err(errno) => return errno as isize,
    };
    // SAFETY: just opened, and used by this thread only.
    let Some(mut held) = (unsafe { Stream::of(stream) }) else { return -(libc::EIO as isize) };
    held.seek(position as i64);
    let mut stored = 0;
    let result = loop {
        let before = held.position();
        match held.read() {
            Ok(None) => break stored as isize,
            Err(_) if stored > 0 => break stored as isize,
            Err(errno) => break -(errno as isize),
            // SAFETY: a filled entry, for which the caller's buffer has room.
            Ok(Some(entry)) => unsafe {
                let bytes = (*entry).d_reclen as usize;
                if bytes > room - stored {
                    held.seek(before);
                    break if stored > 0 { stored as isize } else { -(libc::EINVAL as isize) };
                }
                out.add(stored).copy_from_nonoverlapping(entry.cast(), bytes);
                stored += bytes;
            },
        }
    };
    let position = held.position() as isize;
    held.close();
    match keep_position(fd, position) {
        0 => result,
        failed => failed,
    }
}

interpose! {
    /// opendir(3)
    opendir = fn(path: *const c_char) -> *mut DIR {
        // SAFETY: libc's contract.
        let stream = answer(unsafe {
            route::on_path(
                libc::AT_FDCWD,
                path,
                true,
                |_, path| raw_stream(real::libc_own::opendir(path)),
                |pool, place, escape| either(open_place(pool, place, escape)),
            )
        });
        if stream == -1 { std::ptr::null_mut() } else { stream as *mut DIR }
    }

    /// fdopendir(3)
    fdopendir = fn(fd: c_int) -> *mut DIR {
        let Some((pool, ino)) = may_be_ours(fd).then(|| descriptor::directory_of(fd)).flatten() else {
            // SAFETY: libc's contract.
            return unsafe { real::libc_own::fdopendir(fd) };
        };
        // SAFETY: it touches no memory.
        let flags = unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_GETFL) };
        if flags as c_int & libc::O_PATH != 0 {
            set_errno(libc::EBADF);
            return std::ptr::null_mut();
        }
        match Stream::open(pool, ino, fd) {
            Ok(stream) => stream,
            Err(errno) => {
                set_errno(-errno as c_int);
                std::ptr::null_mut()
            }
        }
    }

    /// readdir(3)
    readdir, readdir64 = fn(stream: *mut DIR) -> *mut Dirent {
        // SAFETY: libc's contract: an open stream.
        let Some(mut held) = (unsafe { Stream::of(stream) }) else {
            // SAFETY: as above; it is a stream of libc.
            return unsafe { real::libc_own::readdir64(stream) };
        };
        match held.read() {
            Ok(entry) => entry.unwrap_or(std::ptr::null_mut()),
            Err(errno) => {
                set_errno(errno);
                std::ptr::null_mut()
            }
        }
    }

    /// readdir_r(3)
    readdir_r, readdir64_r = fn(stream: *mut DIR, entry: *mut Dirent, out: *mut *mut Dirent) -> c_int {
        // SAFETY: libc's contract: an open stream, writable structures.
        unsafe {
            let Some(mut held) = Stream::of(stream) else {
                return real::libc_own::readdir64_r(stream, entry, out);
            };
            match held.read() {
                Ok(Some(found)) => {
                    let bytes = (*found).d_reclen as usize;
                    entry.cast::<u8>().copy_from_nonoverlapping(found.cast(), bytes);
                    out.write(entry);
                    0
                }
                Ok(None) => {
                    out.write(std::ptr::null_mut());
                    0
                }
                Err(errno) => {
                    out.write(std::ptr::null_mut());
                    errno
                }
            }
        }
    }

    /// closedir(3)
    closedir = fn(stream: *mut DIR) -> c_int {
        // SAFETY: libc's contract: an open stream.
        match unsafe { Stream::of(stream) } {
            Some(held) => {
                held.close();
                0
            }
            // SAFETY: as above; it is a stream of libc.
            None => unsafe { real::libc_own::closedir(stream) },
        }
    }

    /// rewinddir(3)
    rewinddir = fn(stream: *mut DIR) -> () {
        // SAFETY: libc's contract: an open stream.
        match unsafe { Stream::of(stream) } {
            Some(mut held) => held.seek(0),
            // SAFETY: as above; it is a stream of libc.
            None => unsafe { real::libc_own::rewinddir(stream) },
        }
    }

    /// telldir(3)
    telldir = fn(stream: *mut DIR) -> c_long {
        // SAFETY: libc's contract: an open stream.
        match unsafe { Stream::of(stream) } {
            Some(held) => held.position(),
            // SAFETY: as above; it is a stream of libc.
            None => unsafe { real::libc_own::telldir(stream) },
        }
    }

    /// seekdir(3)
    seekdir = fn(stream: *mut DIR, position: c_long) -> () {
        // SAFETY: libc's contract: an open stream.
        match unsafe { Stream::of(stream) } {
            Some(mut held) => held.seek(position),
            // SAFETY: as above; it is a stream of libc.
            None => unsafe { real::libc_own::seekdir(stream, position) },
        }
    }

    /// dirfd(3)
    dirfd = fn(stream: *mut DIR) -> c_int {
        // SAFETY: libc's contract: an open stream.
        match unsafe { Stream::of(stream) } {
            Some(mut held) => answer_int(held.descriptor()),
            // SAFETY: as above; it is a stream of libc.
            None => unsafe { real::libc_own::dirfd(stream) },
        }
    }

    /// getdents64(2)
    getdents64 = fn(fd: c_int, out: *mut c_void, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe {
            // The kernel itself reads a directory of the mount.
            match may_be_ours(fd).then(|| descriptor::anchor_of(fd)).flatten() {
                Some((pool, ino)) => guard(|| read_entries(pool, ino, fd, out.cast(), room)),
                None => system_call!(libc::SYS_getdents64, fd, out, room),
            }
        })
    }
}

/// Opens a stream relative to a directory's descriptor.
///
/// # Safety
/// `path` is null or a C string.
pub(crate) unsafe fn opendir_at(at: c_int, path: *const c_char) -> *mut DIR {
    // SAFETY: the caller's promise.
    unsafe {
        if at == libc::AT_FDCWD {
            return opendir(path);
        }
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let fd = crate::open::openat(at, path, flags, 0);
        if fd < 0 {
            return std::ptr::null_mut();
        }
        let stream = fdopendir(fd);
        if stream.is_null() {
            let why = errno();
            real::close(fd);
            set_errno(why);
        }
        stream
    }
}

/// A copy of an entry in memory of malloc, as scandir returns them; null when there is no memory.
///
/// # Safety
/// `entry` is what readdir returned.
pub(crate) unsafe fn copy_entry(entry: *const Dirent) -> *mut Dirent {
    // SAFETY: the name of an entry is NUL-terminated. The copy has room for all bytes that are copied.
    unsafe {
        let name = (&raw const (*entry).d_name).cast::<c_char>();
        let bytes = record_bytes(crate::path::bytes(name).len());
        let copy = libc::malloc(bytes).cast::<u8>();
        if !copy.is_null() {
            copy.copy_from_nonoverlapping(entry.cast(), bytes.min((*entry).d_reclen as usize));
        }
        copy.cast()
    }
}
