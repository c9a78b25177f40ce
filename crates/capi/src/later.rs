//! Asynchronous reads and writes: `forebay_request` of include/forebay.h.
//!
//! The I/O threads of the library execute them (`io_threads.rs`). The caller owns a request until it has waited for it or
//! found it done. A request without a handle ends when its callback returns. A forked child cannot use requests of its
//! parent.
//!
//! Locks: one of each request. None is held during a transfer or a callback.

use std::os::raw::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::answer::{call, Failed, FAULT, INVALID};
use crate::file::{forebay_file, unsigned};
use crate::io_threads::{self, lock};
use crate::opened::Opened;

/// A callback.
#[allow(non_camel_case_types)]
pub type forebay_done = unsafe extern "C" fn(state: *mut c_void, result: i64);

/// A transfer that was started.
#[allow(non_camel_case_types)]
pub struct forebay_request {
    result: Mutex<Option<i64>>,
    done: Condvar,
}

/// A transfer in the queue.
struct Work {
    file: Opened,
    buffer: *mut u8,
    bytes: usize,
    offset: u64,
    writes: bool,
    callback: Option<forebay_done>,
    state: *mut c_void,
    request: Option<Arc<forebay_request>>,
}

// SAFETY: the caller promises that the buffer stays valid and unused until the transfer is done, and that its callback
// may run on any thread with that state.
unsafe impl Send for Work {}

impl Work {
    fn transfer(&self) -> i64 {
        call(|| {
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
            Ok(done?)
        })
    }

    fn run(self) {
        let result = self.transfer();
        // The file may be closed from here on, also in the callback.
        drop(self.file);
        if let Some(callback) = self.callback {
            // SAFETY: the caller passed this function and its state.
            unsafe { callback(self.state, result) };
        }
        if let Some(request) = self.request {
            *lock(&request.result) = Some(result);
            request.done.notify_all();
        }
    }
}

fn start(mut work: Work, wants_handle: bool) -> Result<*mut forebay_request, Failed> {
    let request = Arc::new(forebay_request { result: Mutex::new(None), done: Condvar::new() });
    if wants_handle {
        work.request = Some(Arc::clone(&request));
    }
    io_threads::start(Box::new(move || work.run()))?;
    Ok(if wants_handle { Arc::into_raw(request).cast_mut() } else { std::ptr::null_mut() })
}

/// Starts a transfer.
#[allow(clippy::too_many_arguments)] // As the C functions.
fn begin(
    file: &forebay_file,
    buffer: *mut u8,
    bytes: usize,
    offset: i64,
    writes: bool,
    callback: Option<forebay_done>,
    state: *mut c_void,
    out: Option<&mut *mut forebay_request>,
) -> Result<(), Failed> {
    if buffer.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let offset = unsigned(offset)?;
    // Without a handle or a callback the caller could not detect the end of the transfer.
    if (out.is_none() && callback.is_none()) || bytes > isize::MAX as usize {
        return Err(INVALID);
    }
    let work = Work { file: file.shared(), buffer, bytes, offset, writes, callback, state, request: None };
    let handle = start(work, out.is_some())?;
    if let Some(out) = out {
        *out = handle;
    }
    Ok(())
}

pub(crate) fn file_read_start(
    file: &forebay_file,
    buffer: *mut c_void,
    bytes: usize,
    offset: i64,
    callback: Option<forebay_done>,
    state: *mut c_void,
    out: Option<&mut *mut forebay_request>,
) -> Result<(), Failed> {
    begin(file, buffer.cast(), bytes, offset, false, callback, state, out)
}

pub(crate) fn file_write_start(
    file: &forebay_file,
    buffer: *const c_void,
    bytes: usize,
    offset: i64,
    callback: Option<forebay_done>,
    state: *mut c_void,
    out: Option<&mut *mut forebay_request>,
) -> Result<(), Failed> {
    // The buffer is only read.
    begin(file, buffer.cast_mut().cast(), bytes, offset, true, callback, state, out)
}

/// # Safety
/// `request` is null, or was started and is not used again.
pub(crate) unsafe fn request_wait(request: *mut forebay_request) -> Result<i64, Failed> {
    if request.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    let request = unsafe { Arc::from_raw(request.cast_const()) };
    let mut result = lock(&request.result);
    loop {
        match *result {
            Some(result) => return Ok(result),
            None => result = request.done.wait(result).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// # Safety
/// `request` is null, or was started and not found done yet. It is not used again when it is found done.
pub(crate) unsafe fn request_test(
    request: *mut forebay_request,
    result: Option<&mut i64>,
) -> Result<bool, Failed> {
    // SAFETY: the caller's promise.
    let held = unsafe { request.as_ref() }.ok_or(FAULT)?;
    let out = result.ok_or(FAULT)?;
    let Some(found) = *lock(&held.result) else { return Ok(false) };
    *out = found;
    // SAFETY: the caller's promise.
    drop(unsafe { Arc::from_raw(request.cast_const()) });
    Ok(true)
}
