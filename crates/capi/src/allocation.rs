//! The functions of include/forebay.h for memory of puts and gets: allocated by the pool, or the program's own.

use std::os::raw::c_void;

use forebay_client::{free_memory, unregister_memory, Pool};

use crate::answer::{Failed, FAULT, INVALID};
use crate::memory::populate;

type Done = Result<(), Failed>;

pub(crate) fn alloc(pool: &'static Pool, bytes: usize, memory: Option<&mut *mut c_void>) -> Done {
    let memory = memory.ok_or(FAULT)?;
    *memory = pool.allocate_memory(bytes)?.cast();
    Ok(())
}

/// # Safety
/// `memory` is not used again, if it is allocated.
pub(crate) unsafe fn free(memory: *mut c_void) -> Done {
    if memory.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { free_memory(memory.cast()) }?)
}

pub(crate) fn register(pool: &'static Pool, memory: *mut c_void, bytes: usize) -> Done {
    if memory.is_null() {
        return Err(FAULT);
    }
    let end = (memory as usize).checked_add(bytes).filter(|_| bytes > 0).ok_or(INVALID)?;
    populate(memory as usize, end)?;
    Ok(pool.register_memory(memory.cast(), bytes)?)
}

/// # Safety
/// Any address is allowed: the memory is not accessed.
pub(crate) unsafe fn unregister(memory: *mut c_void) -> Done {
    if memory.is_null() {
        return Err(FAULT);
    }
    Ok(unregister_memory(memory.cast())?)
}
