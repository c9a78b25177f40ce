//! Asynchronous calls on volumes. Each call that was started ends with one completion, also if it fails
//! (`completion_queue.rs`). The I/O threads of the library execute the calls (`io_threads.rs`), puts and gets of pieces on
//! other nodes together (`transfers.rs`).

use std::os::raw::c_void;
use std::sync::Arc;

use forebay_types::{AtomicOp, Code};

use ::forebay_volume::{Access, Striped};
use forebay_client::memory_in_use;

use crate::answer::{call, Failed, FAULT};
use crate::completion_queue::{forebay_queue, Ended};
use crate::file::unsigned;
use crate::io_threads;
use crate::transfers::{self, Transfer};
use crate::volume::forebay_volume;

type Done = Result<(), Failed>;

fn begin(
    volume: &forebay_volume,
    access: (i64, *mut c_void, usize),
    puts: bool,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    let (offset, memory, bytes) = access;
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    let (offset, queue) = (unsigned(offset)?, queue.ok_or(FAULT)?.shared());
    if memory.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let in_use = memory_in_use(memory.cast_const().cast(), bytes)?;
    let access = Access { offset, memory: memory.cast(), bytes };
    let transfer =
        Transfer { volume: volume.shared(), access, puts, in_use, queue: Arc::clone(&queue), state };
    queue.begin();
    let started = transfers::start(transfer);
    if started.is_err() {
        queue.cancel();
    }
    started
}

fn execute(volume: &Striped, offset: u64, operation: AtomicOp) -> Result<u64, Code> {
    match operation {
        AtomicOp::CompareAndSwap { expected, new } => volume.compare_and_swap(offset, expected, new),
        AtomicOp::Add { by } => volume.fetch_add(offset, by),
        AtomicOp::Swap { new } => volume.swap(offset, new),
        // Not offered by forebay.h.
        AtomicOp::Max { .. } | AtomicOp::Load => Err(Code::NotSupported),
    }
}

fn begin_atomic(
    volume: &forebay_volume,
    offset: i64,
    operation: AtomicOp,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // SAFETY: the caller passes an open queue or null.
    let queue = unsafe { queue.as_ref() };
    let (offset, queue) = (unsigned(offset)?, queue.ok_or(FAULT)?.shared());
    let (volume, ended) = (volume.shared(), Ended { state, result: 0, was: 0 });
    queue.begin();
    let its = Arc::clone(&queue);
    let started = io_threads::start(Box::new(move || {
        let (mut ended, mut was) = (ended, 0);
        ended.result = call(|| {
            was = execute(&volume, offset, operation)?;
            Ok(0usize)
        });
        ended.was = was;
        // The volume may be closed from here on.
        drop(volume);
        its.end(std::iter::once(ended));
    }));
    if started.is_err() {
        queue.cancel();
    }
    started
}

pub(crate) fn volume_put_start(
    volume: &forebay_volume,
    from: *const c_void,
    bytes: usize,
    offset: i64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    // The memory is only read.
    begin(volume, (offset, from.cast_mut(), bytes), true, queue, state)
}

pub(crate) fn volume_get_start(
    volume: &forebay_volume,
    to: *mut c_void,
    bytes: usize,
    offset: i64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    begin(volume, (offset, to, bytes), false, queue, state)
}

pub(crate) fn volume_cas_start(
    volume: &forebay_volume,
    offset: i64,
    expected: u64,
    value: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    begin_atomic(volume, offset, AtomicOp::CompareAndSwap { expected, new: value }, queue, state)
}

pub(crate) fn volume_fetch_add_start(
    volume: &forebay_volume,
    offset: i64,
    by: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    begin_atomic(volume, offset, AtomicOp::Add { by }, queue, state)
}

pub(crate) fn volume_swap_start(
    volume: &forebay_volume,
    offset: i64,
    value: u64,
    queue: *mut forebay_queue,
    state: *mut c_void,
) -> Done {
    begin_atomic(volume, offset, AtomicOp::Swap { new: value }, queue, state)
}
