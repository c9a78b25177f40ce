//! How far a task is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_tasks::{Failure, TaskError};
use forebay_types::Error;

/// Errors of a task that are kept; all are counted.
const ERRORS_MAX: usize = 20;

/// How far a task is: counters, the first errors, and whether it was cancelled.
#[derive(Debug, Default)]
pub struct Progress {
    files_done: AtomicU64,
    files_total: AtomicU64,
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    error_count: AtomicU64,
    unreachable_count: AtomicU64,
    errors: Mutex<Vec<TaskError>>,
    cancelled: AtomicBool,
}

/// Values of the counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) files_done: u64,
    pub(crate) files_total: u64,
    pub(crate) bytes_done: u64,
    pub(crate) bytes_total: u64,
    pub(crate) errors: u64,
    pub(crate) unreachable: u64,
}

impl Progress {
    /// More files were found, with so many bytes.
    pub fn found(&self, files: u64, bytes: u64) {
        self.files_total.fetch_add(files, Ordering::Relaxed);
        self.bytes_total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// More files or bytes were done. Bytes may be reported while a file is copied.
    pub fn done(&self, files: u64, bytes: u64) {
        self.files_done.fetch_add(files, Ordering::Relaxed);
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A path failed; the task goes on.
    pub fn failed(&self, path: impl Into<String>, e: &Error) {
        self.error_count.fetch_add(1, Ordering::Relaxed);
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() < ERRORS_MAX {
            errors.push(TaskError { path: path.into(), error: Failure::from(e) });
        }
    }

    /// The same, as a node that has its data does not answer.
    pub(crate) fn unreachable(&self, path: impl Into<String>, e: &Error) {
        self.unreachable_count.fetch_add(1, Ordering::Relaxed);
        self.failed(path, e);
    }

    /// True once a user has cancelled the task, or the mover ends.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            files_done: self.files_done.load(Ordering::Relaxed),
            files_total: self.files_total.load(Ordering::Relaxed),
            bytes_done: self.bytes_done.load(Ordering::Relaxed),
            bytes_total: self.bytes_total.load(Ordering::Relaxed),
            errors: self.error_count.load(Ordering::Relaxed),
            unreachable: self.unreachable_count.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn errors(&self) -> Vec<TaskError> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
