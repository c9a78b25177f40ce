//! Data sieving: reads of many small ranges near one another. The whole stretch of the file is read into a buffer, and
//! the ranges are copied from there.
//!
//! The kernel takes longer to change from one element of an iovec to the next than to copy a few bytes, and a buffer
//! that is used repeatedly stays in the processor's cache. The process has one buffer, from its first read of this kind
//! on. While one thread uses it, others read without. Measurements: docs/decisions/0021. The buffer starts at a page
//! boundary, and data have the same offset within a page there as in the file: processors copy slowly between addresses
//! that differ by little more than a multiple of the page size.

use std::sync::{Mutex, MutexGuard, TryLockError};

use forebay_types::limits::SIEVE_BUFFER_BYTES;

const PAGE_BYTES: usize = 4096;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

static BUFFER: Mutex<Vec<Page>> = Mutex::new(Vec::new());

/// The buffer, locked for one read.
pub(crate) struct Sieve(MutexGuard<'static, Vec<Page>>);

impl Sieve {
    /// `None` while another thread uses the buffer.
    pub(crate) fn take() -> Option<Sieve> {
        let mut buffer = match BUFFER.try_lock() {
            Ok(buffer) => buffer,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if buffer.is_empty() {
            *buffer = vec![Page([0; PAGE_BYTES]); SIEVE_BUFFER_BYTES / PAGE_BYTES + 1];
        }
        Some(Sieve(buffer))
    }

    /// Room for `bytes` bytes of a file at offset `at`, at most [`SIEVE_BUFFER_BYTES`].
    pub(crate) fn room(&mut self, at: u64, bytes: usize) -> &mut [u8] {
        let start = at as usize % PAGE_BYTES;
        let (first, len) = (self.0.as_mut_ptr().cast::<u8>(), self.0.len() * PAGE_BYTES);
        // SAFETY: pages are consecutive bytes, and borrowed as long as the guard.
        let all = unsafe { std::slice::from_raw_parts_mut(first, len) };
        &mut all[start..start + bytes]
    }
}
