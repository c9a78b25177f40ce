//! inotify_add_watch of files and directories. For a file the kernel watches the backing file, which every write
//! changes. chmod and rename of the file raise no event there. For a directory the kernel watches a mirror that the
//! daemon keeps (docs/decisions/0036). The program's inotify descriptor is sent to the daemon for this call, and is
//! otherwise used as always.

use std::os::raw::{c_char, c_int};

use crate::abi::Place;
use crate::door::{either, Pool};
use crate::interpose::answer_int;
use crate::path::Buffer;
use crate::route;

/// Watches what is at a place.
unsafe fn watch_place(fd: c_int, pool: Pool, place: Place, mask: u32, escape: *mut u8) -> Result<i64, i64> {
    let mut backing = Buffer::new();
    // SAFETY: the contract of abi.rs is kept.
    unsafe {
        let (itself, kind) = pool.reach(place, mask & libc::IN_DONT_FOLLOW == 0, escape)?;
        if mask & libc::IN_ONLYDIR != 0 && kind != libc::S_IFDIR {
            return Err(-i64::from(libc::ENOTDIR));
        }
        pool.allows(itself, libc::R_OK, escape)?;
        if kind == libc::S_IFDIR {
            return match pool.watch_directory(itself.dir, fd, mask) {
                watch @ 0.. => Ok(watch),
                failed => Err(failed),
            };
        }
        // The backing file of an old file may not exist yet. Opening the file creates it, and with O_PATH raises no
        // event.
        if kind == libc::S_IFREG {
            let opened = pool.open(itself, libc::O_PATH | libc::O_CLOEXEC, 0, escape);
            if opened < 0 {
                return Err(opened);
            }
            crate::real::close(opened as c_int);
        }
        match pool.backing_path(itself.dir, backing.first()) {
            0.. => Ok(system_call!(libc::SYS_inotify_add_watch, fd, backing.as_c(), mask) as i64),
            failed => Err(failed),
        }
    }
}

interpose! {
    /// inotify_add_watch(2)
    inotify_add_watch = fn(fd: c_int, path: *const c_char, mask: u32) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            route::on_path(
                libc::AT_FDCWD,
                path,
                mask & libc::IN_DONT_FOLLOW == 0,
                |_, path| system_call!(libc::SYS_inotify_add_watch, fd, path, mask),
                |pool, place, escape| either(watch_place(fd, pool, place, mask, escape)),
            )
        })
    }
}
