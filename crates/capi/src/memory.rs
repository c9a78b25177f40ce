//! Memory that transfers use again and again: `forebay_memory` of include/forebay.h.
//!
//! Local transfers need nothing of it but that its pages are there; data of other nodes goes through the node's daemon,
//! whose memory the network knows. So what registering does is to have the pages made, at once and together, and what the
//! handle is for is a door that has an endpoint of its own.

use std::os::raw::{c_int, c_void};

use forebay_types::Code;

use crate::abi::PoolHandle;
use crate::guard::{guard, negative, on_pool, FAULT};

/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` of madvise(2), Linux 5.14.
const POPULATE: [c_int; 2] = [22, 23];

/// Registered memory: `forebay_memory`.
#[allow(non_camel_case_types)]
pub struct forebay_memory {
    _first: usize,
    _bytes: usize,
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_memory_register(
    pool: *const PoolHandle,
    first: *mut c_void,
    bytes: usize,
    out: *mut *mut forebay_memory,
) -> c_int {
    // SAFETY: forebay.h tells C callers what the arguments must be.
    let answer = unsafe {
        on_pool(pool, |_| {
            let out = out.as_mut().ok_or(FAULT)?;
            if first.is_null() {
                return Err(FAULT);
            }
            let end = (first as usize).checked_add(bytes).filter(|_| bytes > 0);
            let end = end.ok_or(negative(Code::Invalid))?;
            populate(first as usize, end)?;
            *out = Box::into_raw(Box::new(forebay_memory { _first: first as usize, _bytes: bytes }));
            Ok(0)
        })
    };
    answer as c_int
}

/// Has all pages of a range made: for writing, or, where it can only be read, for reading.
fn populate(first: usize, end: usize) -> Result<(), i64> {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let start = first / page * page;
    for advice in POPULATE.into_iter().rev() {
        // SAFETY: makes pages of the caller's present, and changes no byte.
        if unsafe { libc::madvise(start as *mut c_void, end - start, advice) } == 0 {
            return Ok(());
        }
        // SAFETY: errno of this thread.
        match unsafe { *libc::__errno_location() } {
            // Not mapped, or a page that cannot be had.
            libc::ENOMEM | libc::EFAULT => return Err(FAULT),
            // Not writable, or a kernel that does not know the advice.
            _ => {}
        }
    }
    Ok(())
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_memory_unregister(memory: *mut forebay_memory) -> c_int {
    let answer = guard(|| {
        if memory.is_null() {
            return Err(FAULT);
        }
        // SAFETY: it came from forebay_memory_register and is not used again.
        drop(unsafe { Box::from_raw(memory) });
        Ok(0)
    });
    answer as c_int
}
