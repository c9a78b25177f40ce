//! Asynchronous calls on volumes, and the completion queues in which they end: `forebay_queue` of include/forebay.h.
//!
//! The I/O threads of the library execute the calls (`io_threads.rs`). Each call that was started ends with one
//! completion, also if it fails. The queue's eventfd is readable while completions wait in it.
//!
//! Locks: one of each queue. None is held while a call is executed.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_types::{AtomicOp, Code};

use ::forebay_volume::Striped;
use forebay_client::memory_in_use;

use crate::answer::{call, Failed, FAULT, INVALID};
use crate::file::unsigned;
use crate::header::{forebay_completion, FOREBAY_QUEUE_SPIN};
use crate::io_threads::{lock, start};
use crate::volume::forebay_volume;

type Done = Result<(), Failed>;

/// A completion queue.
#[allow(non_camel_case_types)]
pub struct forebay_queue(Arc<Queue>);

struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    /// Completions that wait: for those who spin.
    count: AtomicUsize,
    event: OwnedFd,
    spins: bool,
}

#[derive(Default)]
struct State {
    done: VecDeque<Ended>,
    /// Calls that have not ended.
    pending: usize,
}

struct Ended {
    state: *mut c_void,
    result: i64,
    was: u64,
}

// SAFETY: the library only passes the caller's pointer on.
unsafe impl Send for Ended {}

/// The caller's memory of a call.
#[derive(Clone, Copy)]
struct Memory(*mut u8, usize);

// SAFETY: the caller promises that it stays valid and unused until the completion.
unsafe impl Send for Memory {}

enum Operation {
    Put(Memory),
    Get(Memory),
    Atomic(AtomicOp),
}

impl Queue {
    /// Ends a call. Its pending call is counted until here, so that a wait does not end before.
    fn end(&self, ended: Ended) {
        let mut state = lock(&self.state);
        state.pending -= 1;
        state.done.push_back(ended);
        self.count.store(state.done.len(), Ordering::Release);
        let one = 1u64;
        // SAFETY: the word lives over the call. It fails only when the counter is full, and then the eventfd is readable.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        drop(state);
        self.arrived.notify_all();
    }

    /// Takes completions, `most` at most.
    fn take(&self, state: &mut State, out: &mut [forebay_completion]) -> usize {
        let count = out.len().min(state.done.len());
        for (out, ended) in out.iter_mut().zip(state.done.drain(..count)) {
            *out = forebay_completion { state: ended.state, result: ended.result, was: ended.was };
        }
        self.count.store(state.done.len(), Ordering::Release);
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
    let (state, arrived, count) = (Mutex::default(), Condvar::new(), AtomicUsize::new(0));
    let queue = Queue { state, arrived, count, event, spins: flags & FOREBAY_QUEUE_SPIN != 0 };
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
        if !state.done.is_empty() || state.pending == 0 || is_over() {
            return Ok(queue.take(&mut state, out) as i32);
        }
        state = if queue.spins {
            drop(state);
            while queue.count.load(Ordering::Acquire) == 0 && !is_over() {
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

fn execute(volume: &Striped, offset: u64, operation: &Operation) -> Result<u64, Code> {
    match *operation {
        // SAFETY: see `Memory`.
        Operation::Put(Memory(from, bytes)) => unsafe { volume.put(offset, from, bytes) }.map(|()| 0),
        // SAFETY: see `Memory`.
        Operation::Get(Memory(to, bytes)) => unsafe { volume.get(offset, to, bytes) }.map(|()| 0),
        Operation::Atomic(AtomicOp::CompareAndSwap { expected, new }) => {
            volume.compare_and_swap(offset, expected, new)
        }
        Operation::Atomic(AtomicOp::Add { by }) => volume.fetch_add(offset, by),
        Operation::Atomic(AtomicOp::Swap { new }) => volume.swap(offset, new),
        // Not offered by forebay.h.
        Operation::Atomic(AtomicOp::Max { .. } | AtomicOp::Load) => Err(Code::NotSupported),
    }
}

fn begin(
    volume: &forebay_volume,
    offset: i64,
    operation: Operation,
    queue: Option<&forebay_queue>,
    state: *mut c_void,
) -> Done {
    let (offset, queue) = (unsigned(offset)?, Arc::clone(&queue.ok_or(FAULT)?.0));
    let mut in_use = None;
    if let Operation::Put(Memory(at, bytes)) | Operation::Get(Memory(at, bytes)) = operation {
        if at.is_null() && bytes > 0 {
            return Err(FAULT);
        }
        in_use = memory_in_use(at, bytes)?;
    }
    let (volume, ended) = (volume.shared(), Ended { state, result: 0, was: 0 });
    lock(&queue.state).pending += 1;
    let its = Arc::clone(&queue);
    let started = start(Box::new(move || {
        let mut ended = ended;
        let mut was = 0;
        ended.result = call(|| {
            was = execute(&volume, offset, &operation)?;
            Ok(0usize)
        });
        ended.was = was;
        // The volume may be closed, and the memory freed, from here on.
        drop((volume, in_use));
        its.end(ended);
    }));
    if started.is_err() {
        lock(&queue.state).pending -= 1;
        queue.arrived.notify_all();
    }
    started
}

pub(crate) fn volume_put_start(
    volume: &forebay_volume,
    from: *const c_void,
    bytes: usize,
    offset: i64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null. The memory is only read.
    let queue = unsafe { queue.as_ref() };
    begin(volume, offset, Operation::Put(Memory(from.cast_mut().cast(), bytes)), queue, state)
}

pub(crate) fn volume_get_start(
    volume: &forebay_volume,
    to: *mut c_void,
    bytes: usize,
    offset: i64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    begin(volume, offset, Operation::Get(Memory(to.cast(), bytes)), queue, state)
}

pub(crate) fn volume_cas_start(
    volume: &forebay_volume,
    offset: i64,
    expected: u64,
    value: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    let op = AtomicOp::CompareAndSwap { expected, new: value };
    begin(volume, offset, Operation::Atomic(op), queue, state)
}

pub(crate) fn volume_fetch_add_start(
    volume: &forebay_volume,
    offset: i64,
    by: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    begin(volume, offset, Operation::Atomic(AtomicOp::Add { by }), queue, state)
}

pub(crate) fn volume_swap_start(
    volume: &forebay_volume,
    offset: i64,
    value: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    begin(volume, offset, Operation::Atomic(AtomicOp::Swap { new: value }), queue, state)
}
