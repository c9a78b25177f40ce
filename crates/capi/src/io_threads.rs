//! The I/O threads of the library, which execute asynchronous calls.
//!
//! The first such call starts the threads. They block all signals and run until the process ends. They take jobs from
//! one queue, oldest first. A forked child has no such threads: its first call starts them.
//!
//! Locks: one of the queue. None is held while a job runs.

use forebay_sys::signals::SignalMask;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use forebay_types::limits::{ASYNC_QUEUE_MAX, ASYNC_THREADS};

use crate::answer::Failed;

/// A job.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The queue of one process, and the condition that its threads wait for. Never freed, as its threads use it until the
/// process ends.
struct IoThreads {
    process: u32,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// I/O threads that run; 0 when none could be started.
    threads: usize,
}

static IO_THREADS: AtomicPtr<IoThreads> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the I/O threads of this process, and starts them if necessary. A forked child does not use the queue of its
/// parent, as a thread of the parent may have locked it.
fn io_threads() -> &'static IoThreads {
    let process = std::process::id();
    let known = IO_THREADS.load(Ordering::Acquire);
    // SAFETY: never freed.
    if let Some(io_threads) = unsafe { known.as_ref() }.filter(|io_threads| io_threads.process == process) {
        return io_threads;
    }
    let made =
        Box::into_raw(Box::new(IoThreads { process, queue: Mutex::default(), arrived: Condvar::new() }));
    // SAFETY: no other thread has its address yet, and it is not freed once one has.
    let io_threads = unsafe { &*made };
    // Other threads that find this queue wait for its lock until the I/O threads are started.
    let mut queue = lock(&io_threads.queue);
    if IO_THREADS.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // Another thread was faster.
        drop(queue);
        // SAFETY: no other thread has its address.
        drop(unsafe { Box::from_raw(made) });
        return self::io_threads();
    }
    queue.threads = start_threads(io_threads);
    io_threads
}

/// Locks a mutex of asynchronous calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Executes jobs. Never returns.
fn serve(io_threads: &'static IoThreads) {
    loop {
        let mut queue = lock(&io_threads.queue);
        let job = loop {
            match queue.waiting.pop_front() {
                Some(job) => break job,
                None => queue = io_threads.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(queue);
        job();
    }
}

/// Starts the threads. Returns how many could be started.
fn start_threads(io_threads: &'static IoThreads) -> usize {
    // Signals of the host program must be delivered to its own threads.
    let before = SignalMask::full().set();
    let spawn =
        || std::thread::Builder::new().name("forebay-io".into()).spawn(move || serve(io_threads)).is_ok();
    let started = (0..ASYNC_THREADS).filter(|_| spawn()).count();
    before.set();
    started
}

/// Has an I/O thread run a job.
///
/// # Errors
/// EAGAIN when too many wait, or no thread can be started: the job is not run.
pub(crate) fn start(job: Job) -> Result<(), Failed> {
    let io_threads = io_threads();
    let mut queue = lock(&io_threads.queue);
    if queue.threads == 0 {
        queue.threads = start_threads(io_threads);
    }
    if queue.threads == 0 || queue.waiting.len() >= ASYNC_QUEUE_MAX {
        return Err(Failed::errno(libc::EAGAIN));
    }
    queue.waiting.push_back(job);
    drop(queue);
    io_threads.arrived.notify_one();
    Ok(())
}
