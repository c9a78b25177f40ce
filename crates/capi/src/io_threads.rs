//! The I/O threads of the library, which execute asynchronous calls.
//!
//! The first such call starts the threads. They block all signals and run until the process ends. They take jobs from
//! one queue, oldest first. A forked child has no such threads: its first call starts them.
//!
//! Locks: one of the queue. None is held while a job runs.

use forebay_sys::signals::SignalMask;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use forebay_types::limits::{ASYNC_QUEUE_MAX, ASYNC_THREADS};

use crate::answer::Failed;
use crate::per_process::PerProcess;

/// A job.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The queue, and the condition that the threads wait for.
#[derive(Default)]
struct IoThreads {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// I/O threads that run; 0 when none could be started.
    threads: usize,
}

static IO_THREADS: PerProcess<IoThreads> = PerProcess::new();

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

/// True if jobs wait for a thread.
pub(crate) fn are_jobs_waiting() -> bool {
    !lock(&IO_THREADS.get().queue).waiting.is_empty()
}

/// Has an I/O thread run a job.
///
/// # Errors
/// EAGAIN when too many wait, or no thread can be started: the job is not run.
pub(crate) fn start(job: Job) -> Result<(), Failed> {
    let io_threads = IO_THREADS.get();
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
