//! Completion queues: `forebay_queue` of include/forebay.h. Each asynchronous call that was started on a volume ends with one
//! completion in one. The queue's eventfd is readable while completions wait in it.
//!
//! Locks: one of each queue.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{forebay_completion, FOREBAY_QUEUE_SPIN};
use crate::io_threads::lock;

type Done = Result<(), Failed>;

/// A completion queue.
#[allow(non_camel_case_types)]
pub struct forebay_queue(Arc<Queue>);

impl forebay_queue {
    /// It, for a call that ends after this.
    pub(crate) fn shared(&self) -> Arc<Queue> {
        Arc::clone(&self.0)
    }
}

/// See [`forebay_queue`].
pub(crate) struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    /// What [`State::ends_wait`] says: for those who spin.
    ends_wait: AtomicBool,
    event: OwnedFd,
    spins: bool,
}

#[derive(Default)]
struct State {
    done: VecDeque<Ended>,
    /// Calls that have not ended.
    pending: usize,
}

/// A completion.
pub(crate) struct Ended {
    /// The caller's pointer.
    pub(crate) state: *mut c_void,
    /// 0, or a negative errno.
    pub(crate) result: i64,
    /// What the word of an atomic operation was.
    pub(crate) was: u64,
}

// SAFETY: the library only passes the caller's pointer on.
unsafe impl Send for Ended {}

impl State {
    /// True if completions wait, or there is nothing to wait for.
    fn ends_wait(&self) -> bool {
        !self.done.is_empty() || self.pending == 0
    }
}

impl Queue {
    /// Begins a call.
    pub(crate) fn begin(&self) {
        let mut state = lock(&self.state);
        state.pending += 1;
        self.tell_spinning(&state);
    }

    /// A call that was begun was not started.
    pub(crate) fn cancel(&self) {
        let mut state = lock(&self.state);
        state.pending -= 1;
        self.tell_spinning(&state);
        drop(state);
        self.arrived.notify_all();
    }

    /// Ends calls. They are counted as pending until here, so that a wait does not end before.
    pub(crate) fn end(&self, ended: impl ExactSizeIterator<Item = Ended>) {
        let mut state = lock(&self.state);
        state.pending -= ended.len();
        state.done.extend(ended);
        self.tell_spinning(&state);
        let one = 1u64;
        // SAFETY: the word lives over the call. It fails only when the counter is full, and then the eventfd is readable.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        drop(state);
        self.arrived.notify_all();
    }

    /// Tells those who spin what the state is.
    fn tell_spinning(&self, state: &State) {
        self.ends_wait.store(state.ends_wait(), Ordering::Release);
    }

    /// Takes completions, as many as there is room for.
    fn take(&self, state: &mut State, out: &mut [forebay_completion]) -> usize {
        let count = out.len().min(state.done.len());
        for (out, ended) in out.iter_mut().zip(state.done.drain(..count)) {
            *out = forebay_completion { state: ended.state, result: ended.result, was: ended.was };
        }
        self.tell_spinning(state);
        if state.done.is_empty() {
            let mut word = 0u64;
            // SAFETY: the word is writable for the call, which does not wait.
            unsafe { libc::read(self.event.as_raw_fd(), (&raw mut word).cast(), 8) };
        }
        count
    }
}

pub(crate) fn queue_create(flags: c_int, out: Option<&mut *mut forebay_queue>) -> Done {
    let out = out.ok_or(FAULT)?;
    if flags & !FOREBAY_QUEUE_SPIN != 0 {
        return Err(INVALID);
    }
    // SAFETY: a system call without pointers; the descriptor is new and ours.
    let event = unsafe {
        let event = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        if event < 0 {
            return Err(Failed::last());
        }
        OwnedFd::from_raw_fd(event)
    };
    let (state, arrived, ends_wait) = (Mutex::default(), Condvar::new(), AtomicBool::new(true));
    let queue = Queue { state, arrived, ends_wait, event, spins: flags & FOREBAY_QUEUE_SPIN != 0 };
    *out = Box::into_raw(Box::new(forebay_queue(Arc::new(queue))));
    Ok(())
}

/// # Safety
/// `queue` is null or open, and not used again.
pub(crate) unsafe fn queue_close(queue: *mut forebay_queue) -> Done {
    if queue.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    let queue = unsafe { Box::from_raw(queue) };
    let mut state = lock(&queue.0.state);
    // The calls use the caller's memory.
    while state.pending > 0 {
        state = queue.0.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    Ok(())
}

pub(crate) fn queue_descriptor(queue: &forebay_queue) -> Result<i32, Failed> {
    Ok(queue.0.event.as_raw_fd())
}

pub(crate) fn queue_wait(
    queue: &forebay_queue,
    out: &mut [forebay_completion],
    timeout_ms: c_int,
) -> Result<i32, Failed> {
    let queue = &*queue.0;
    if out.is_empty() {
        return Err(INVALID);
    }
    let until = u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
    let is_over = || until.is_some_and(|until| Instant::now() >= until);
    let mut state = lock(&queue.state);
    loop {
        // With nothing to wait for, it does not wait.
        if state.ends_wait() || is_over() {
            return Ok(queue.take(&mut state, out) as i32);
        }
        state = if queue.spins {
            drop(state);
            while !queue.ends_wait.load(Ordering::Acquire) && !is_over() {
                std::hint::spin_loop();
            }
            lock(&queue.state)
        } else {
            let left = until
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            let waited = queue.arrived.wait_timeout(state, left);
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// The sorted results of two threads that wait in a queue that spins, with so many calls begun, when `done` was done.
    fn waits_of_two(calls: usize, done: impl FnOnce(&Queue)) -> Vec<i32> {
        let mut queue = std::ptr::null_mut();
        queue_create(FOREBAY_QUEUE_SPIN, Some(&mut queue)).unwrap();
        // SAFETY: open.
        let shared = unsafe { &*queue }.shared();
        (0..calls).for_each(|_| shared.begin());
        let (send, results) = mpsc::channel();
        for _ in 0..2 {
            let (queue, send) = (forebay_queue(Arc::clone(&shared)), send.clone());
            std::thread::spawn(move || {
                let mut out =
                    [0; 8].map(|was| forebay_completion { state: std::ptr::null_mut(), result: 0, was });
                send.send(queue_wait(&queue, &mut out, -1).unwrap()).unwrap();
            });
        }
        // Likely both spin then. The result is the same if not.
        std::thread::sleep(Duration::from_millis(50));
        done(&shared);
        let next = || results.recv_timeout(Duration::from_secs(60)).expect("it spins for ever");
        let mut all = vec![next(), next()];
        all.sort_unstable();
        // SAFETY: not used again.
        unsafe { queue_close(queue) }.unwrap();
        all
    }

    #[test]
    fn who_spins_ends_when_another_has_taken_all_or_no_call_is_left() {
        let ended = || Ended { state: std::ptr::null_mut(), result: 0, was: 0 };
        assert_eq!(waits_of_two(8, |queue| queue.end((0..8).map(|_| ended()))), [0, 8]);
        assert_eq!(waits_of_two(1, Queue::cancel), [0, 0]);
    }
}
