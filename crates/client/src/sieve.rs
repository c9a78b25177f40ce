//! Reads of many small ranges near each other: the whole stretch of the file goes into a buffer, and from there to
//! where it belongs.
//!
//! The kernel takes longer to change from one piece of memory to the next than to copy a small one, and a buffer that
//! is used again and again stays in the processor's cache. The process has one, from its first read of this kind on;
//! while a thread reads by it, others do without. Measured: docs/decisions/0021. It begins with a page, and what is
//! read begins in it where it does in a page of the file: processors are slow to copy between addresses that differ by
//! little more than pages.

use std::sync::{Mutex, MutexGuard, TryLockError};

use forebay_types::limits::SIEVE_BUFFER_BYTES;

const PAGE_BYTES: usize = 4096;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

static BUFFER: Mutex<Vec<Page>> = Mutex::new(Vec::new());

/// The buffer, as long as it is read by.
pub(crate) struct Sieve(MutexGuard<'static, Vec<Page>>);

impl Sieve {
    /// None while another thread has it.
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

    /// Room for what a file has at `at`: so many bytes, at most [`SIEVE_BUFFER_BYTES`].
    pub(crate) fn room(&mut self, at: u64, bytes: usize) -> &mut [u8] {
        let start = at as usize % PAGE_BYTES;
        let (first, len) = (self.0.as_mut_ptr().cast::<u8>(), self.0.len() * PAGE_BYTES);
        // SAFETY: pages are bytes, one after the other, and borrowed as the guard is.
        let all = unsafe { std::slice::from_raw_parts_mut(first, len) };
        &mut all[start..start + bytes]
    }
}
