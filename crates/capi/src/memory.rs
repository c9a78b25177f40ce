//! Memory that transfers use repeatedly: `forebay_memory` of include/forebay.h.
//!
//! A local transfer needs its pages to be present. Data of other nodes pass through memory of the node's daemon, which
//! is registered with the network. So registering memory only makes its pages present, at once and together. The handle
//! keeps the interface open for a client with an endpoint of its own.

use std::os::raw::{c_int, c_void};

use forebay_client::Pool;

use crate::answer::{Failed, FAULT, INVALID};
use crate::public::free_handle;

/// `MADV_POPULATE_WRITE` and `MADV_POPULATE_READ` of madvise(2), Linux 5.14.
const POPULATE: [c_int; 2] = [23, 22];

/// Registered memory.
#[allow(non_camel_case_types)]
pub struct forebay_memory {
    _first: usize,
    _bytes: usize,
}

pub(crate) fn memory_register(
    _pool: &Pool,
    first: *mut c_void,
    bytes: usize,
    out: Option<&mut *mut forebay_memory>,
) -> Result<(), Failed> {
    let out = out.ok_or(FAULT)?;
    if first.is_null() {
        return Err(FAULT);
    }
    let end = (first as usize).checked_add(bytes).filter(|_| bytes > 0).ok_or(INVALID)?;
    populate(first as usize, end)?;
    *out = Box::into_raw(Box::new(forebay_memory { _first: first as usize, _bytes: bytes }));
    Ok(())
}

/// Makes all pages of a range present: writable, or if the range is read-only, readable.
pub(crate) fn populate(first: usize, end: usize) -> Result<(), Failed> {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let start = first / page * page;
    for advice in POPULATE {
        // SAFETY: makes pages of the caller present, and changes no byte.
        if unsafe { libc::madvise(start as *mut c_void, end - start, advice) } == 0 {
            return Ok(());
        }
        // The range is not mapped, or there is no memory for a page. With any other error, the range is read-only or
        // the kernel does not know the advice.
        if [libc::ENOMEM, libc::EFAULT].map(Failed::errno).contains(&Failed::last()) {
            return Err(FAULT);
        }
    }
    Ok(())
}

/// # Safety
/// `memory` is null or registered, and not used again.
pub(crate) unsafe fn memory_unregister(memory: *mut forebay_memory) -> Result<(), Failed> {
    // SAFETY: the caller's promise.
    unsafe { free_handle(memory) }
}
