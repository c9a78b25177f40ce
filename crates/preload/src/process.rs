//! Whose memory this is: a child made by vfork(2) runs in its parent's, with a working directory, umask and descriptors of
//! its own. What it finds out must not be taken for the parent's.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::real;

/// The process that this memory belongs to; 0 before it is known.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Notes whose memory this is, and sees to it that a forked child does too.
pub(crate) fn begin() {
    extern "C" fn in_child() {
        OWNER.store(real::getpid(), Ordering::Relaxed);
    }
    OWNER.store(real::getpid(), Ordering::Relaxed);
    // SAFETY: the handler touches one atomic and makes one system call; the library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// True in a child that runs in its parent's memory. A child of a clone(2) that libc did not make counts as one as long
/// as its parent lives: then things are found out again and again rather than kept.
pub(crate) fn borrows_memory() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    let me = real::getpid();
    if owner == me {
        return false;
    }
    if owner != 0 && real::getppid() == owner {
        return true;
    }
    OWNER.store(me, Ordering::Relaxed);
    false
}
