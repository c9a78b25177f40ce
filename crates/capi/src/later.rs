//! Asynchronous reads and writes: `forebay_request` of include/forebay.h.
//!
//! A few threads of the library's own do them, started by the first such call and by no other, with all signals blocked,
//! and kept for the life of the process. They take requests from one queue, oldest first. A request belongs to who started
//! it until it is waited for or found done; one without a handle is gone when its callback returns. A child that was
//! forked has none of the threads: its first call starts its own, and requests of its parent are its parent's.
//!
//! Locks: the queue's, and each request's own; none is held during a transfer or a callback, and no thread takes two.

use forebay_sys::signals::SignalMask;
use std::collections::VecDeque;
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_client::File;
use forebay_types::limits::{ASYNC_QUEUE_MAX, ASYNC_THREADS};
use forebay_types::Code;

use crate::file::forebay_file;
use crate::guard::{guard, negative, Answer, FAULT};

/// `forebay_done` of forebay.h.
type Done = unsafe extern "C" fn(state: *mut c_void, result: i64);

/// What was started: `forebay_request`.
#[allow(non_camel_case_types)]
pub struct forebay_request {
    result: Mutex<Option<i64>>,
    done: Condvar,
}

/// One transfer that is to be made.
struct Work {
    file: Arc<File>,
    buffer: *mut u8,
    bytes: usize,
    offset: u64,
    writes: bool,
    callback: Option<Done>,
    state: *mut c_void,
    request: Option<Arc<forebay_request>>,
}

// SAFETY: the caller promises that the buffer stays, and is nobody else's, until the transfer is done, and that its
// callback may run on any thread with that state.
unsafe impl Send for Work {}

/// The queue of one process and what its threads wait at. Never freed: its threads use it for ever.
struct IoThreads {
    process: u32,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    /// Threads that serve it; none when none could be started.
    threads: usize,
}

static CREW: AtomicPtr<IoThreads> = AtomicPtr::new(std::ptr::null_mut());

/// This process's I/O threads, whose threads run. A child's is another: its parent's may be locked by a thread that it lacks.
fn io_threads() -> &'static IoThreads {
    let process = std::process::id();
    let known = CREW.load(Ordering::Acquire);
    // SAFETY: never freed.
    if let Some(io_threads) = unsafe { known.as_ref() }.filter(|io_threads| io_threads.process == process) {
        return io_threads;
    }
    let made =
        Box::into_raw(Box::new(IoThreads { process, queue: Mutex::default(), arrived: Condvar::new() }));
    // SAFETY: nobody else has seen it, and it is never freed once somebody has.
    let io_threads = unsafe { &*made };
    // Whoever finds it waits here until it is known whether it has threads.
    let mut queue = lock(&io_threads.queue);
    if CREW.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // Another thread was faster.
        drop(queue);
        // SAFETY: nobody else has seen it.
        drop(unsafe { Box::from_raw(made) });
        return self::io_threads();
    }
    queue.threads = start_threads(io_threads);
    io_threads
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work {
    fn transfer(&self) -> i64 {
        guard(|| {
            let done = if self.bytes == 0 {
                Ok(0)
            } else if self.writes {
                // SAFETY: see `Send`.
                self.file
                    .write_at(unsafe { std::slice::from_raw_parts(self.buffer, self.bytes) }, self.offset)
            } else {
                // SAFETY: see `Send`.
                self.file
                    .read_at(unsafe { std::slice::from_raw_parts_mut(self.buffer, self.bytes) }, self.offset)
            };
            done.map(|n| n as i64).map_err(negative)
        })
    }

    fn run(self) {
        let result = self.transfer();
        // The file may be closed from here on, also in the callback.
        drop(self.file);
        if let Some(callback) = self.callback {
            // SAFETY: the caller's function and state.
            unsafe { callback(self.state, result) };
        }
        if let Some(request) = self.request {
            *lock(&request.result) = Some(result);
            request.done.notify_all();
        }
    }
}

/// A thread's life.
fn serve(io_threads: &'static IoThreads) {
    loop {
        let mut queue = lock(&io_threads.queue);
        let work = loop {
            match queue.waiting.pop_front() {
                Some(work) => break work,
                None => queue = io_threads.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(queue);
        work.run();
    }
}

/// Starts the threads; how many could be.
fn start_threads(io_threads: &'static IoThreads) -> usize {
    // The host program's signals are for its own threads.
    let before = SignalMask::full().set();
    let spawn =
        || std::thread::Builder::new().name("forebay-io".into()).spawn(move || serve(io_threads)).is_ok();
    let started = (0..ASYNC_THREADS).filter(|_| spawn()).count();
    before.set();
    started
}

fn start(mut work: Work, wants_handle: bool) -> Result<*mut forebay_request, i64> {
    let request = Arc::new(forebay_request { result: Mutex::new(None), done: Condvar::new() });
    if wants_handle {
        work.request = Some(Arc::clone(&request));
    }
    let io_threads = io_threads();
    let mut queue = lock(&io_threads.queue);
    if queue.threads == 0 {
        queue.threads = start_threads(io_threads);
    }
    if queue.threads == 0 || queue.waiting.len() >= ASYNC_QUEUE_MAX {
        return Err(-i64::from(libc::EAGAIN));
    }
    queue.waiting.push_back(work);
    drop(queue);
    io_threads.arrived.notify_one();
    Ok(if wants_handle { Arc::into_raw(request).cast_mut() } else { std::ptr::null_mut() })
}

/// The body of both starts.
///
/// # Safety
/// As forebay.h says of the arguments.
#[allow(clippy::too_many_arguments)]
unsafe fn begin(
    file: *const forebay_file,
    buffer: *mut u8,
    bytes: usize,
    offset: i64,
    writes: bool,
    callback: Option<Done>,
    state: *mut c_void,
    out: *mut *mut forebay_request,
) -> c_int {
    let answer = || -> Answer {
        // SAFETY: the caller's promise.
        let (file, out) = unsafe { (file.as_ref().ok_or(FAULT)?, out.as_mut()) };
        if buffer.is_null() && bytes > 0 {
            return Err(FAULT);
        }
        let offset = u64::try_from(offset).map_err(|_| negative(Code::Invalid))?;
        // Whose end nobody could learn of.
        if (out.is_none() && callback.is_none()) || bytes > isize::MAX as usize {
            return Err(negative(Code::Invalid));
        }
        let work =
            Work { file: file.shared(), buffer, bytes, offset, writes, callback, state, request: None };
        let handle = start(work, out.is_some())?;
        if let Some(out) = out {
            *out = handle;
        }
        Ok(0)
    };
    guard(answer) as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_read_start(
    file: *const forebay_file,
    buffer: *mut c_void,
    bytes: usize,
    offset: i64,
    callback: Option<Done>,
    state: *mut c_void,
    out: *mut *mut forebay_request,
) -> c_int {
    // SAFETY: forebay.h tells C callers what the arguments must be.
    unsafe { begin(file, buffer.cast(), bytes, offset, false, callback, state, out) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_write_start(
    file: *const forebay_file,
    buffer: *const c_void,
    bytes: usize,
    offset: i64,
    callback: Option<Done>,
    state: *mut c_void,
    out: *mut *mut forebay_request,
) -> c_int {
    // SAFETY: as above; the buffer is only read.
    unsafe { begin(file, buffer.cast_mut().cast(), bytes, offset, true, callback, state, out) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_request_wait(request: *mut forebay_request) -> i64 {
    guard(|| {
        if request.is_null() {
            return Err(FAULT);
        }
        // SAFETY: it came from a start, and this is the last that is done with it.
        let request = unsafe { Arc::from_raw(request.cast_const()) };
        let mut result = lock(&request.result);
        loop {
            match *result {
                Some(result) => return Ok(result),
                None => result = request.done.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    })
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_request_test(request: *mut forebay_request, result: *mut i64) -> c_int {
    let answer = guard(|| {
        // SAFETY: it came from a start, and was not found done yet.
        let (held, out) = unsafe { (request.as_ref().ok_or(FAULT)?, result.as_mut().ok_or(FAULT)?) };
        let Some(found) = *lock(&held.result) else { return Ok(0) };
        *out = found;
        // SAFETY: as above; it is not used again.
        drop(unsafe { Arc::from_raw(request.cast_const()) });
        Ok(1)
    });
    answer as c_int
}
