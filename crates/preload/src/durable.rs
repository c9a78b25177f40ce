//! fsync and close of files whose backing store is attached so that they wait until it has the data.
//!
//! Close waits after the descriptor is closed, so that the file may be copied once it is open nowhere. The process
//! remembers which descriptors it opened for writing to such files: other closes cost one comparison. Descriptors that
//! came from elsewhere (dup, exec, a socket), and those that the end of a process or dup2 closes, are not waited for.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::door::Pool;
use crate::interpose::answer_int;
use crate::{descriptor, settings};

/// Descriptors whose close waits, one bit each. Greater ones are not waited for.
static WAITING: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
/// True once there was any.
static IS_ANY: AtomicBool = AtomicBool::new(false);

fn bit(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((WAITING.get(fd / 64)?, 1 << (fd % 64)))
}

/// A file of the pool was opened with `flags`.
#[inline]
pub(crate) fn note_opened(pool: Pool, fd: c_int, flags: c_int) {
    // SAFETY: the handle is attached.
    if flags & libc::O_ACCMODE != libc::O_RDONLY && unsafe { pool.close_waits() } == 1 {
        if let Some((word, bit)) = bit(fd) {
            word.fetch_or(bit, Ordering::Relaxed);
            IS_ANY.store(true, Ordering::Relaxed);
        }
    }
}

/// Syncs a descriptor. What is synced is marked before, where the target outlives the node, and waits for the store
/// after, where that is attached so.
fn sync(fd: c_int, sync: impl FnOnce() -> isize) -> c_int {
    let file = match settings::prefix_bytes() {
        0 => None,
        _ => descriptor::inode_of(fd),
    };
    let Some((pool, ino)) = file else { return answer_int(sync()) };
    // SAFETY: the handle is attached.
    let marked = unsafe { pool.mark_to_recover(ino) } as isize;
    match sync() {
        // SAFETY: as above.
        0 if marked == 0 => answer_int(unsafe { pool.persist(ino, 0) } as isize),
        0 => answer_int(marked),
        failed => answer_int(failed),
    }
}

/// The file behind a descriptor that is about to be closed, if that waits.
#[inline]
fn to_wait_for(fd: c_int) -> Option<(Pool, u64)> {
    if !IS_ANY.load(Ordering::Relaxed) {
        return None;
    }
    let (word, bit) = bit(fd)?;
    match word.fetch_and(!bit, Ordering::Relaxed) & bit {
        0 => None,
        _ => descriptor::inode_of(fd),
    }
}

interpose! {
    /// close(2)
    close = fn(fd: c_int) -> c_int {
        let waits = to_wait_for(fd);
        // SAFETY: it touches no memory.
        let done = unsafe { system_call!(libc::SYS_close, fd) };
        match waits {
            // SAFETY: the handle is attached.
            Some((pool, ino)) if done == 0 => answer_int(unsafe { pool.persist(ino, 1) } as isize),
            _ => answer_int(done),
        }
    }

    /// fclose(3)
    fclose = fn(stream: *mut libc::FILE) -> c_int {
        // SAFETY: the caller's promise.
        unsafe {
            let waits = match IS_ANY.load(Ordering::Relaxed) {
                true => to_wait_for(libc::fileno(stream)),
                false => None,
            };
            let done = crate::real::libc_own::fclose(stream);
            match waits {
                Some((pool, ino)) if done == 0 => answer_int(pool.persist(ino, 1) as isize),
                _ => done,
            }
        }
    }

    /// fsync(2)
    fsync = fn(fd: c_int) -> c_int {
        // SAFETY: it touches no memory.
        sync(fd, || unsafe { system_call!(libc::SYS_fsync, fd) })
    }

    /// fdatasync(2)
    fdatasync = fn(fd: c_int) -> c_int {
        // SAFETY: it touches no memory.
        sync(fd, || unsafe { system_call!(libc::SYS_fdatasync, fd) })
    }
}
