//! Large files: cut into ranges that all threads copy and verify together.
//!
//! The copy gets its final size before the first range is written, so that a tmpfs with `huge=within_size` gives it
//! huge pages. One job represents all remaining ranges: a thread that takes it claims the next range and queues the job
//! again. The thread that finishes the last range continues with the whole file.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::copy::{check_range, copy_range, Failure};
use crate::engine::Engine;
use crate::job::{Copying, Job, Large, Worker};
use crate::report::add;
use crate::tree::{File, Tree};

/// Files of at least this size are cut into ranges.
pub(crate) const LARGE_BYTES: u64 = 64 << 20;
/// Bytes of a range: a multiple of the huge page size, and some milliseconds of work.
const RANGE_BYTES: u64 = 32 << 20;

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Starts to copy a large file.
    pub(crate) fn start_large(&self, copying: Copying<S, D>, source: S::File) {
        if let Err(code) = copying.file.set_size(copying.meta.size) {
            return self.abandon(&copying, Failure::Destination(code));
        }
        let ranges = copying.meta.size.div_ceil(RANGE_BYTES);
        let method = self.method(&source, &copying.file, &copying.meta);
        self.queue.push(Job::Large(Arc::new(Large {
            copying,
            source,
            method,
            ranges,
            checking: AtomicBool::new(false),
            next: AtomicU64::new(0),
            left: AtomicU64::new(ranges),
            data_bytes: AtomicU64::new(0),
            failure: Mutex::new(None),
            sums: Mutex::new(vec![None; if method.sum { ranges as usize } else { 0 }]),
        })));
    }

    /// Copies or verifies the next range of a large file.
    pub(crate) fn large(&self, large: Arc<Large<S, D>>, worker: &mut Worker<S, D>) {
        let index = large.next.fetch_add(1, Ordering::AcqRel);
        if index >= large.ranges {
            return;
        }
        if index + 1 < large.ranges {
            self.queue.push(Job::Large(large.clone()));
        }
        let failed = large.failure.lock().unwrap_or_else(|e| e.into_inner()).is_some();
        if !failed {
            let done =
                if self.is_stopping() { Err(Failure::Stopped) } else { self.range(&large, index, worker) };
            if let Err(failure) = done {
                large.failure.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(failure);
            }
        }
        if large.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.large_ended(large, worker);
        }
    }

    fn range(&self, large: &Large<S, D>, index: u64, worker: &mut Worker<S, D>) -> Result<(), Failure> {
        let start = index * RANGE_BYTES;
        let range = start..(start + RANGE_BYTES).min(large.copying.meta.size);
        let copy = &large.copying.file;
        let buffer = worker.buffer.bytes();
        if large.checking.load(Ordering::Acquire) {
            let sum = large.sums.lock().unwrap_or_else(|e| e.into_inner())[index as usize].clone();
            let Some(sum) = sum else { return Err(Failure::Differs) };
            return check_range(copy, range, &sum, buffer, &|| !self.is_stopping());
        }
        let mut went = |bytes| {
            large.copying.reported.fetch_add(bytes, Ordering::Relaxed);
            self.done(0, bytes);
            !self.is_stopping()
        };
        let copied = copy_range(&large.source, copy, range, large.method, buffer, &mut went)?;
        add(&large.data_bytes, copied.data_bytes);
        if copied.sum.is_some() {
            large.sums.lock().unwrap_or_else(|e| e.into_inner())[index as usize] = copied.sum;
        }
        if self.settings.durable {
            copy.start_sync();
        }
        Ok(())
    }

    /// All ranges are done: verifies them next, or gives the copy its name.
    fn large_ended(&self, large: Arc<Large<S, D>>, worker: &mut Worker<S, D>) {
        let failure = *large.failure.lock().unwrap_or_else(|e| e.into_inner());
        let copying = &large.copying;
        let checking = large.checking.load(Ordering::Acquire);
        let next = match failure {
            Some(failure) => Err(failure),
            None if checking => Ok(()),
            None => self.set_attributes_of(copying, &large.source, worker),
        };
        let next = match next {
            Ok(()) if large.method.sum && !checking => self.sync_to_check(copying).map(|()| true),
            Ok(()) => self.give_name(copying).map(|()| false),
            Err(failure) => Err(failure),
        };
        match next {
            Ok(true) => {
                large.left.store(large.ranges, Ordering::Release);
                large.checking.store(true, Ordering::Release);
                large.next.store(0, Ordering::Release);
                self.queue.push(Job::Large(large));
            }
            Ok(false) => {
                self.done(1, 0);
                self.completed(copying, large.data_bytes.load(Ordering::Acquire));
            }
            Err(failure) => self.abandon(copying, failure),
        }
    }
}
