//! The inline functions of the headers: calls through the tables of an object.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use crate::bindings::*;

const NOT_THERE: c_int = -(FI_ENOSYS as c_int);

/// Calls `op` of the table that `object.field` points to, if the table is long enough and has the entry.
macro_rules! through {
    ($table:expr, $ops:ty, $op:ident ( $($argument:expr),* )) => {{
        let table: *const $ops = $table;
        if table.is_null() || (*table).size <= offset_of!($ops, $op) {
            return NOT_THERE as _;
        }
        match (*table).$op {
            Some(call) => call($($argument),*),
            None => NOT_THERE as _,
        }
    }};
}

macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $returns:ty { $($body:tt)* })*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As in the page of that name in section 3 of libfabric's manual: objects are open, buffers live until the
        /// operation's completion, and the domain's threading model is kept.
        #[inline]
        pub unsafe fn $name($($argument: $type),*) -> $returns {
            // SAFETY: the caller's promise; tables of open objects are sound, and shorter ones are not read beyond.
            unsafe { through!($($body)*) }
        }
    )*};
}

calls! {
    /// Closes any object.
    fn fi_close(fid: *mut fid) -> c_int { (*fid).ops, fi_ops, close(fid) }
    /// Sends a command to an object.
    fn fi_control(fid: *mut fid, command: c_int, argument: *mut c_void) -> c_int {
        (*fid).ops, fi_ops, control(fid, command, argument)
    }
    /// Opens a domain.
    fn fi_domain(fabric: *mut fid_fabric, info: *mut fi_info, domain: *mut *mut fid_domain, context: *mut c_void) -> c_int {
        (*fabric).ops, fi_ops_fabric, domain(fabric, info, domain, context)
    }
    /// Checks whether it is safe to wait on the descriptors of these objects.
    fn fi_trywait(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int {
        (*fabric).ops, fi_ops_fabric, trywait(fabric, fids, count)
    }
    /// Opens a completion queue.
    fn fi_cq_open(domain: *mut fid_domain, attr: *mut fi_cq_attr, cq: *mut *mut fid_cq, context: *mut c_void) -> c_int {
        (*domain).ops, fi_ops_domain, cq_open(domain, attr, cq, context)
    }
    /// Opens an address vector.
    fn fi_av_open(domain: *mut fid_domain, attr: *mut fi_av_attr, av: *mut *mut fid_av, context: *mut c_void) -> c_int {
        (*domain).ops, fi_ops_domain, av_open(domain, attr, av, context)
    }
    /// Makes an endpoint.
    fn fi_endpoint(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep, context: *mut c_void) -> c_int {
        (*domain).ops, fi_ops_domain, endpoint(domain, info, ep, context)
    }
    /// Binds an endpoint to a queue or vector.
    fn fi_ep_bind(ep: *mut fid_ep, to: *mut fid, flags: u64) -> c_int {
        (*ep).fid.ops, fi_ops, bind(&raw mut (*ep).fid, to, flags)
    }
    /// Makes an endpoint ready.
    fn fi_enable(ep: *mut fid_ep) -> c_int {
        (*ep).fid.ops, fi_ops, control(&raw mut (*ep).fid, FI_ENABLE as c_int, std::ptr::null_mut())
    }
    /// Cancels an operation.
    fn fi_cancel(fid: *mut fid_ep, context: *mut c_void) -> isize {
        (*fid).ops, fi_ops_ep, cancel(&raw mut (*fid).fid, context)
    }
    /// An endpoint's own address.
    fn fi_getname(ep: *mut fid_ep, address: *mut c_void, bytes: *mut usize) -> c_int {
        (*ep).cm, fi_ops_cm, getname(&raw mut (*ep).fid, address, bytes)
    }
    /// Sets an option of an endpoint.
    fn fi_setopt(ep: *mut fid_ep, level: c_int, name: c_int, value: *const c_void, bytes: usize) -> c_int {
        (*ep).ops, fi_ops_ep, setopt(&raw mut (*ep).fid, level, name, value, bytes)
    }
    /// Adds addresses to a vector.
    fn fi_av_insert(
        av: *mut fid_av, address: *const c_void, count: usize, fi_addr: *mut fi_addr_t, flags: u64, context: *mut c_void,
    ) -> c_int {
        (*av).ops, fi_ops_av, insert(av, address, count, fi_addr, flags, context)
    }
    /// Removes addresses from a vector.
    fn fi_av_remove(av: *mut fid_av, fi_addr: *mut fi_addr_t, count: usize, flags: u64) -> c_int {
        (*av).ops, fi_ops_av, remove(av, fi_addr, count, flags)
    }
    /// Registers memory.
    fn fi_mr_reg(
        domain: *mut fid_domain, buffer: *const c_void, bytes: usize, access: u64, offset: u64, key: u64, flags: u64,
        mr: *mut *mut fid_mr, context: *mut c_void,
    ) -> c_int {
        (*domain).mr, fi_ops_mr, reg(&raw mut (*domain).fid, buffer, bytes, access, offset, key, flags, mr, context)
    }
    /// Binds registered memory to an endpoint.
    fn fi_mr_bind(mr: *mut fid_mr, to: *mut fid, flags: u64) -> c_int {
        (*mr).fid.ops, fi_ops, bind(&raw mut (*mr).fid, to, flags)
    }
    /// Makes registered memory usable.
    fn fi_mr_enable(mr: *mut fid_mr) -> c_int {
        (*mr).fid.ops, fi_ops, control(&raw mut (*mr).fid, FI_ENABLE as c_int, std::ptr::null_mut())
    }
    /// Reads completions.
    fn fi_cq_read(cq: *mut fid_cq, entries: *mut c_void, count: usize) -> isize {
        (*cq).ops, fi_ops_cq, read(cq, entries, count)
    }
    /// Reads one error.
    fn fi_cq_readerr(cq: *mut fid_cq, entry: *mut fi_cq_err_entry, flags: u64) -> isize {
        (*cq).ops, fi_ops_cq, readerr(cq, entry, flags)
    }
    /// Sends a tagged message.
    fn fi_tsend(
        ep: *mut fid_ep, buffer: *const c_void, bytes: usize, desc: *mut c_void, to: fi_addr_t, tag: u64,
        context: *mut c_void,
    ) -> isize {
        (*ep).tagged, fi_ops_tagged, send(ep, buffer, bytes, desc, to, tag, context)
    }
    /// Posts a buffer for a tagged message.
    fn fi_trecv(
        ep: *mut fid_ep, buffer: *mut c_void, bytes: usize, desc: *mut c_void, from: fi_addr_t, tag: u64, ignore: u64,
        context: *mut c_void,
    ) -> isize {
        (*ep).tagged, fi_ops_tagged, recv(ep, buffer, bytes, desc, from, tag, ignore, context)
    }
    /// Reads remote memory.
    fn fi_readmsg(ep: *mut fid_ep, message: *const fi_msg_rma, flags: u64) -> isize {
        (*ep).rma, fi_ops_rma, readmsg(ep, message, flags)
    }
    /// Writes remote memory.
    fn fi_writemsg(ep: *mut fid_ep, message: *const fi_msg_rma, flags: u64) -> isize {
        (*ep).rma, fi_ops_rma, writemsg(ep, message, flags)
    }
}

/// The key that peers need to reach registered memory.
///
/// # Safety
/// `mr` is open, and enabled if its domain's mode requires that.
pub unsafe fn fi_mr_key(mr: *mut fid_mr) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { (*mr).key }
}

/// The descriptor of registered memory, for local buffers.
///
/// # Safety
/// As [`fi_mr_key`].
pub unsafe fn fi_mr_desc(mr: *mut fid_mr) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { (*mr).mem_desc }
}
