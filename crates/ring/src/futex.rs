//! Futexes on shared memory.

use std::sync::atomic::AtomicU32;

/// Sleeps while `word` is `value`, for `timeout_ms` at most. Returns early on a wake, a signal, or no reason.
pub(crate) fn wait(word: &AtomicU32, value: u32, timeout_ms: u64) {
    let timeout = libc::timespec {
        tv_sec: (timeout_ms / 1000) as libc::time_t,
        tv_nsec: (timeout_ms % 1000 * 1_000_000) as libc::c_long,
    };
    // SAFETY: `word` and `timeout` are valid for the call; errors (EAGAIN, EINTR, ETIMEDOUT) need no answer.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            &timeout,
            std::ptr::null::<u32>(),
            0,
        );
    }
}

/// Wakes one sleeper on `word`.
pub(crate) fn wake_one(word: &AtomicU32) {
    // SAFETY: `word` is valid for the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            1,
            std::ptr::null::<u32>(),
            std::ptr::null::<u32>(),
            0,
        );
    }
}
