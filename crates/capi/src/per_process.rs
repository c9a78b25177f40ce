//! State that each process has for itself. A forked child has its own, because a thread of its parent may have locked the
//! parent's, which it does not have.

use std::sync::atomic::{AtomicPtr, Ordering};

/// The state of a process, made when it is first used. Never freed, as threads use it until the process ends.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<Own<T>>);

struct Own<T> {
    process: u32,
    state: T,
}

impl<T: Default + Sync> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The state of the calling process, which is made at its first call.
    pub(crate) fn get(&self) -> &'static T {
        let process = std::process::id();
        let known = self.0.load(Ordering::Acquire);
        // SAFETY: never freed.
        if let Some(own) = unsafe { known.as_ref() }.filter(|own| own.process == process) {
            return &own.state;
        }
        let made = Box::into_raw(Box::new(Own { process, state: T::default() }));
        if self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // Another thread was faster.
            // SAFETY: no other thread has its address.
            drop(unsafe { Box::from_raw(made) });
            return self.get();
        }
        // SAFETY: never freed.
        unsafe { &(*made).state }
    }
}
