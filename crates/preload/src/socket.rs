//! Sockets with a name in the pool: bind, connect, getsockname and getpeername.
//!
//! The pool has the entry. The kernel's socket is where the backing file of a file would be, and is reached through the
//! target's descriptor, as an address has room for 107 bytes. So a server that binds first and a client that connects
//! later meet as on any file system.

use std::os::raw::{c_char, c_int};

use libc::{sockaddr, sockaddr_un, socklen_t};

use crate::abi::{Place, ESCAPED};
use crate::boundary::guard;
use crate::door::{either, Pool};
use crate::interpose::{answer_int, raw};
use crate::magic::is_backing;
use crate::path::{self, Buffer};
use crate::{real, route, settings, umask};

/// The offset of the path in an address.
const PATH_OFFSET: usize = std::mem::offset_of!(sockaddr_un, sun_path);
/// Bytes of the path in an address.
const ROOM: usize = size_of::<sockaddr_un>() - PATH_OFFSET;

/// Stores the path of an address in `out`, NUL-terminated. False for an address without a path.
///
/// # Safety
/// `address` is null or has `bytes` readable bytes.
unsafe fn path_of(address: *const sockaddr, bytes: socklen_t, out: &mut [c_char; ROOM + 1]) -> bool {
    let bytes = bytes as usize;
    // SAFETY: the caller's promise.
    unsafe {
        if crate::path::is_wild(address)
            || bytes <= PATH_OFFSET
            || i32::from((*address).sa_family) != libc::AF_UNIX
        {
            return false;
        }
        let text = address.cast::<c_char>().add(PATH_OFFSET);
        let n = (bytes - PATH_OFFSET).min(ROOM);
        out[..n].copy_from_slice(std::slice::from_raw_parts(text, n));
    }
    // A path that begins with NUL is an abstract name, which the kernel serves.
    out[0] != 0
}

/// Runs `call` with the address of a socket's node in the pool.
unsafe fn at_backing(
    pool: Pool,
    ino: u64,
    backing: &mut Buffer,
    call: impl FnOnce(*const sockaddr, socklen_t) -> isize,
) -> Result<i64, i64> {
    // SAFETY: the handle is attached, the buffer has room for a path.
    let n = unsafe { pool.backing_path(ino, backing.first()) };
    let n = usize::try_from(n).map_err(|_| n)?;
    // SAFETY: an address of zeros has no path.
    let mut address: sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    // SAFETY: the call stored n bytes.
    let text = unsafe { std::slice::from_raw_parts(backing.as_c(), n) };
    let room = address.sun_path.get_mut(..n).ok_or(-i64::from(libc::ENAMETOOLONG))?;
    room.copy_from_slice(text);
    Ok(call((&raw const address).cast(), (PATH_OFFSET + n + 1) as socklen_t) as i64)
}

/// How often a bind starts again when its entry is removed before the socket exists.
const ATTEMPTS: u32 = 4096;
/// Mode of a socket's node. The shard checks who may connect.
const NODE_MODE: libc::mode_t = 0o700;

/// Creates the entry, and the kernel's socket behind it.
unsafe fn bind_place(fd: c_int, pool: Pool, place: Place, escape: *mut u8) -> i64 {
    let mode = libc::S_IFSOCK | umask::apply(0o777);
    for _ in 0..ATTEMPTS {
        // SAFETY: the contract of abi.rs is kept.
        unsafe {
            let ino = match pool.make_node(place, mode, 0, escape) {
                made if made == -i64::from(libc::EEXIST) => return -i64::from(libc::EADDRINUSE),
                made if made < 0 => return made,
                ino => ino as u64,
            };
            let mut node = Buffer::new();
            let bound = match at_backing(pool, ino, &mut node, |address, bytes| {
                system_call!(libc::SYS_bind, fd, address, bytes)
            }) {
                Ok(result) | Err(result) => result,
            };
            let mut seen = std::mem::MaybeUninit::<libc::stat>::uninit();
            let is_gone = pool.stat_inode(ino, seen.as_mut_ptr()) == -i64::from(libc::ENOENT);
            match bound {
                0 => {
                    system_call!(libc::SYS_fchmodat, libc::AT_FDCWD, node.as_c(), NODE_MODE);
                    // The entry was unlinked before the node existed. The socket is bound nevertheless, as on any file
                    // system.
                    if is_gone {
                        system_call!(libc::SYS_unlinkat, libc::AT_FDCWD, node.as_c(), 0);
                    }
                    return 0;
                }
                _ if is_gone => {}
                failed => {
                    if pool.reach(place, false, escape).is_ok_and(|(there, _)| there.dir == ino) {
                        pool.unlink(place, escape);
                    }
                    return failed;
                }
            }
        }
    }
    -i64::from(libc::ENOENT)
}

/// Finds the kernel's socket behind an entry. libc connects on its path, as that call may wait.
unsafe fn connect_place(pool: Pool, place: Place, escape: *mut u8) -> Result<i64, i64> {
    // SAFETY: the contract of abi.rs is kept; there is room for a path at `escape`.
    unsafe {
        let (itself, kind) = pool.reach(place, true, escape)?;
        if kind != libc::S_IFSOCK {
            return Err(-i64::from(libc::ECONNREFUSED));
        }
        pool.allows(itself, libc::W_OK, escape)?;
        match pool.backing_path(itself.dir, escape) {
            0.. => Ok(ESCAPED),
            failed => Err(failed),
        }
    }
}

/// Replaces the path of a node on the target, as the kernel stored it, by the path in the pool.
///
/// # Safety
/// As getsockname's, of which the kernel stored an address and its length.
unsafe fn show(address: *mut sockaddr, room: socklen_t, bytes: *mut socklen_t) {
    let mut text = [0; ROOM + 1];
    // SAFETY: the caller's promise.
    let named = unsafe { path_of(address, (*bytes).min(room), &mut text) };
    if !named || settings::prefix_bytes() == 0 {
        return;
    }
    // SAFETY: a C string was stored.
    let text = unsafe { path::bytes(text.as_ptr()) };
    if !is_backing(text) {
        return;
    }
    let digits = text.rsplit(|b| *b == b'/').next().and_then(|name| std::str::from_utf8(name).ok());
    let Some(ino) = digits.and_then(|name| u64::from_str_radix(name, 16).ok()) else { return };
    guard(|| {
        let Ok(pool) = crate::door::pool() else { return 0 };
        let mut inside = Buffer::new();
        // SAFETY: the handle is attached, the buffers have the given sizes.
        unsafe {
            if pool.path_of(ino, inside.first()) < 0 {
                return 0;
            }
            let inside = path::bytes(inside.as_c());
            let whole = PATH_OFFSET + settings::prefix().len() + inside.len() + 1;
            if whole > size_of::<sockaddr_un>() {
                return 0;
            }
            let mut out = address.cast::<u8>().add(PATH_OFFSET);
            let mut left = (room as usize).saturating_sub(PATH_OFFSET);
            for part in [settings::prefix(), inside, b"\0"] {
                let n = part.len().min(left);
                out.copy_from_nonoverlapping(part.as_ptr(), n);
                out = out.add(n);
                left -= n;
            }
            bytes.write(whole as socklen_t);
        }
        0isize
    });
}

interpose! {
    /// bind(2)
    bind = fn(fd: c_int, address: *const sockaddr, bytes: socklen_t) -> c_int {
        let mut path = [0; ROOM + 1];
        // SAFETY: libc's contract.
        unsafe {
            if !path_of(address, bytes, &mut path) {
                return answer_int(system_call!(libc::SYS_bind, fd, address, bytes));
            }
            let given = path.as_ptr();
            answer_int(route::on_path(
                libc::AT_FDCWD,
                given,
                false,
                |_, path| with_path(address, bytes, path, path == given, |address, bytes| {
                    system_call!(libc::SYS_bind, fd, address, bytes)
                }),
                |pool, place, escape| bind_place(fd, pool, place, escape),
            ))
        }
    }

    /// connect(2)
    connect = fn(fd: c_int, address: *const sockaddr, bytes: socklen_t) -> c_int {
        let mut path = [0; ROOM + 1];
        // SAFETY: libc's contract.
        unsafe {
            if !path_of(address, bytes, &mut path) {
                return real::libc_own::connect(fd, address, bytes);
            }
            let given = path.as_ptr();
            answer_int(route::on_path(
                libc::AT_FDCWD,
                given,
                true,
                |_, path| {
                    let same = path == given;
                    let result = with_path(address, bytes, path, same, |address, bytes| {
                        raw(real::libc_own::connect(fd, address, bytes))
                    });
                    // No program has bound it: mknod created it, or a program was killed during its bind.
                    if result == -(libc::ENOENT as isize) && !same && is_backing(path::bytes(path)) {
                        return -(libc::ECONNREFUSED as isize);
                    }
                    result
                },
                |pool, place, escape| either(connect_place(pool, place, escape)),
            ))
        }
    }

    /// getsockname(2)
    getsockname = fn(fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { named(libc::SYS_getsockname, fd, address, bytes) })
    }

    /// getpeername(2)
    getpeername = fn(fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { named(libc::SYS_getpeername, fd, address, bytes) })
    }
}

/// getsockname or getpeername, by the number of the call.
///
/// # Safety
/// As theirs.
unsafe fn named(call: libc::c_long, fd: c_int, address: *mut sockaddr, bytes: *mut socklen_t) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        let room = if bytes.is_null() { 0 } else { *bytes };
        let result = system_call!(call, fd, address, bytes);
        if result == 0 && room > 0 {
            show(address, room, bytes);
        }
        result
    }
}

/// Makes a call with the program's own address, or with another path that its path led to.
///
/// # Safety
/// As the call's; `path` is a C string.
unsafe fn with_path(
    address: *const sockaddr,
    bytes: socklen_t,
    path: *const c_char,
    same: bool,
    call: impl FnOnce(*const sockaddr, socklen_t) -> isize,
) -> isize {
    if same {
        return call(address, bytes);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { path::bytes(path) };
    // SAFETY: an address of zeros has no path.
    let mut other: sockaddr_un = unsafe { std::mem::zeroed() };
    other.sun_family = libc::AF_UNIX as u16;
    let Some(room) = other.sun_path.get_mut(..text.len()) else { return -(libc::ENAMETOOLONG as isize) };
    for (to, from) in room.iter_mut().zip(text) {
        *to = *from as c_char;
    }
    call((&raw const other).cast(), (PATH_OFFSET + text.len() + 1) as socklen_t)
}
