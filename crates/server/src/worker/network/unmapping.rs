//! Unmaps memory of processes. The kernel needs long for gigabytes, so that is done in a thread beside the network thread,
//! which all clients share. A small range is unmapped at once.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;

use forebay_fabric::Region;
use forebay_sys::stopped;
use forebay_types::limits::BUFFER_BYTES;

/// What is to be done with a range.
#[derive(Debug)]
enum Wish {
    Drop(Arc<Region>),
    /// With the ranges that keep their bytes.
    Detach(Arc<Region>, Vec<Range<usize>>, Freeing),
}

impl Wish {
    fn fulfil(self) {
        match self {
            Wish::Drop(memory) => drop(memory),
            Wish::Detach(memory, kept, freeing) => {
                let done = memory.detach(&kept);
                // Before the outcome is seen: a quarantine ends when nothing else has the memory.
                drop(memory);
                freeing.end(done.is_ok());
                if let Err(code) = done {
                    tracing::warn!(
                        "cannot leave the pages of memory in quarantine to their program: {code}. They stay allocated until \
                         a later attempt, or the end of the quarantine"
                    );
                }
            }
        }
    }

    fn bytes(&self) -> usize {
        let (Wish::Drop(memory) | Wish::Detach(memory, ..)) = self;
        memory.len()
    }
}

/// Whether the pages of memory are freed, or about to be.
#[derive(Clone, Debug, Default)]
pub(super) struct Freeing(Arc<AtomicU8>);

const KEPT: u8 = 0;
const BEGUN: u8 = 1;
const FREED: u8 = 2;

impl Freeing {
    /// Begins an attempt. False if the pages are freed, or an attempt is under way.
    pub(super) fn begin(&self) -> bool {
        self.0.compare_exchange(KEPT, BEGUN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The attempt has ended. After one that failed, another can begin.
    pub(super) fn end(&self, is_freed: bool) {
        self.0.store(if is_freed { FREED } else { KEPT }, Ordering::Release);
    }

    /// True if the pages are freed, or an attempt is under way.
    pub(super) fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire) != KEPT
    }
}

/// The thread, once there was anything large. It ends with its owner.
#[derive(Debug, Default)]
pub(super) struct Unmapping {
    wishes: Option<Sender<Wish>>,
}

impl Unmapping {
    /// Unmaps a range, unless something else has it.
    pub(super) fn drop(&mut self, memory: Arc<Region>) {
        self.take(Wish::Drop(memory));
    }

    /// Leaves the pages of a range to the processes that map them, and keeps its addresses, and the bytes of the ranges in
    /// `kept`. The outcome is in `freeing`.
    pub(super) fn detach(&mut self, memory: &Arc<Region>, kept: Vec<Range<usize>>, freeing: &Freeing) {
        self.take(Wish::Detach(Arc::clone(memory), kept, freeing.clone()));
    }

    fn take(&mut self, wish: Wish) {
        if wish.bytes() <= BUFFER_BYTES {
            return wish.fulfil();
        }
        if self.wishes.is_none() {
            self.wishes = start();
        }
        // Without a thread it is done here.
        let left = match &self.wishes {
            Some(wishes) => wishes.send(wish).err().map(|refused| refused.0),
            None => Some(wish),
        };
        left.into_iter().for_each(Wish::fulfil);
    }
}

fn start() -> Option<Sender<Wish>> {
    let (wishes, taken) = channel::<Wish>();
    let run = move || {
        stopped::hears_not();
        taken.into_iter().for_each(Wish::fulfil);
    };
    let started = std::thread::Builder::new().name("unmapping".into()).stack_size(256 * 1024).spawn(run);
    started.is_ok().then_some(wishes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_is_unmapped_in_another_thread_and_small_memory_at_once() {
        let mut unmapping = Unmapping::default();
        let small = Arc::new(Region::new(4096).unwrap());
        let kept = Arc::downgrade(&small);
        unmapping.drop(small);
        assert!(kept.upgrade().is_none() && unmapping.wishes.is_none());
        let large = Arc::new(Region::new(BUFFER_BYTES + 4096).unwrap());
        large.write_at(BUFFER_BYTES, b"x").unwrap();
        let kept = Arc::downgrade(&large);
        unmapping.detach(&large, Vec::new(), &Freeing::default());
        assert!(unmapping.wishes.is_some());
        unmapping.drop(large);
        while kept.upgrade().is_some() {
            std::thread::yield_now();
        }
    }
}
