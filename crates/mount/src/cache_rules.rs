//! What the kernel may cache, and for how long.
//!
//! Names, and attributes of inodes without file data, change only by requests to the pool. The daemon invalidates those
//! that other interfaces change before it acknowledges the change, so the kernel may cache them until then. Attributes
//! of a regular file also change when a program writes it through its own descriptor, which nothing announces. The
//! kernel may cache them only while the mount is the only user of the pool. In a pool of several nodes the mount is
//! never the only user, and no invalidations arrive for what other nodes serve: the kernel sends a request each time.
//!
//! A look-up may be the first time that the kernel gets an inode, and the kernel ignores invalidations of an inode
//! that it does not know yet. So while other programs use the pool, attributes in the reply to a look-up are valid for
//! a moment ([`Validity::BRIEF`]). Attributes requested by number are valid until an invalidation.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_fuse::protocol::Validity;

/// The rules in force.
#[derive(Debug, Default)]
pub(crate) struct CacheRules {
    /// The daemon invalidates what other interfaces change.
    told: AtomicBool,
    /// No other program writes files of the pool.
    alone: AtomicBool,
}

impl CacheRules {
    /// Sets whether the daemon sends invalidations from now on.
    pub(crate) fn set_told(&self, told: bool) {
        self.told.store(told, Ordering::Release);
    }

    /// Sets whether the mount is the only user of the pool's files. Returns the previous value.
    pub(crate) fn set_alone(&self, alone: bool) -> bool {
        self.alone.swap(alone, Ordering::SeqCst)
    }

    /// True while the mount is the only user of the pool. Attributes in replies to look-ups are then valid for long,
    /// and are invalidated when another program attaches.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone.load(Ordering::SeqCst)
    }

    /// Validity of a name, existing or not.
    pub(crate) fn entry(&self) -> Validity {
        if self.told.load(Ordering::Acquire) {
            Validity::LONG
        } else {
            Validity::NONE
        }
    }

    /// Validity of attributes. `written` returns whether stores may change them that nothing announces.
    pub(crate) fn attr(&self, st: &libc::stat, written: impl FnOnce() -> bool) -> Validity {
        let told = self.told.load(Ordering::Acquire);
        let is_file = st.st_mode & libc::S_IFMT == libc::S_IFREG;
        if told && (!is_file || self.is_alone() && !written()) {
            Validity::LONG
        } else {
            Validity::NONE
        }
    }
}
