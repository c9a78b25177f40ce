//! Whether this process owns its memory. A child made by vfork(2) runs in the memory of its parent, with a working
//! directory, umask and descriptors of its own. State that the child determines must not be used by the parent.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::real;

/// The process that owns this memory; 0 before it is known.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Notes the owner of the memory, now and in each forked child.
pub(crate) fn begin() {
    extern "C" fn in_child() {
        OWNER.store(real::getpid(), Ordering::Relaxed);
    }
    OWNER.store(real::getpid(), Ordering::Relaxed);
    // SAFETY: the handler stores one atomic and makes one system call. The library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// True in a child that runs in the memory of its parent. A child of a clone(2) that libc did not make also counts as
/// one while its parent lives. Then state is determined again at each call and not kept.
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
