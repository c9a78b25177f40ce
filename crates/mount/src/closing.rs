//! Files that are being closed, waited for where their space must be free.
//!
//! The kernel does not wait for the answer to a release: a program that removes a file, closes it and writes another would
//! find the space taken for as long as the descriptor here is open. But it waits for the flush that goes before, so that a
//! removal, a creation or a look at the free space that comes after a close also comes after its flush: they wait for the
//! releases that are due by then. A flush with no release behind it, as a copy of the descriptor lives on, is waited for
//! once and not again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::filesystem::FileSystem;
use crate::opened::Opened;

/// A release comes so soon after its flush, or not at all.
const RELEASE_DUE: Duration = Duration::from_millis(10);
/// The same on a busy machine. So long waits who asks for nothing but the free space, and who needs space in a pool that is
/// nearly full.
const RELEASE_DUE_FOR_SPACE: Duration = Duration::from_millis(500);
/// A pool with a smaller part of its space free is nearly full.
const NEARLY_FULL: u64 = 16;

/// Inodes that have no name any more and were open when they lost it.
#[derive(Debug, Default)]
pub(crate) struct Nameless {
    count: AtomicUsize,
    inos: Mutex<Vec<u64>>,
}

impl FileSystem {
    /// An inode has lost its last name, or never had one: its space is free with its last close.
    pub(crate) fn note_nameless(&self, ino: u64) {
        if self.nodes.opened(ino).is_some() {
            let mut inos = self.nameless.inos.lock().unwrap_or_else(PoisonError::into_inner);
            inos.push(ino);
            self.nameless.count.store(inos.len(), Ordering::Release);
        }
    }

    /// Waits until an inode is closed here, if it is about to be.
    pub(crate) fn settle(&self, ino: u64) {
        self.settle_within(ino, RELEASE_DUE);
    }

    fn settle_within(&self, ino: u64, due: Duration) {
        while let Some(opened) = self.nodes.opened(ino) {
            match opened.flushed() {
                Some(at) if at.elapsed() < due => {
                    drop(opened);
                    std::thread::sleep(Duration::from_micros(20));
                }
                _ => return,
            }
        }
    }

    /// Waits for the space of what has no name and is about to be closed, before some of it is taken.
    pub(crate) fn settle_nameless(&self) {
        self.settle_all_nameless(RELEASE_DUE);
        if self.closes_nameless() && self.is_nearly_full() {
            self.settle_all_nameless(RELEASE_DUE_FOR_SPACE);
        }
    }

    /// True when a release of what has no name may still be on its way here.
    fn closes_nameless(&self) -> bool {
        if self.nameless.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let inos = self.nameless.inos.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let closes =
            |opened: Arc<Opened>| opened.flushed().is_some_and(|at| at.elapsed() < RELEASE_DUE_FOR_SPACE);
        inos.into_iter().any(|ino| self.nodes.opened(ino).is_some_and(closes))
    }

    fn is_nearly_full(&self) -> bool {
        self.pool.statfs().is_ok_and(|st| st.f_bfree < st.f_blocks / NEARLY_FULL)
    }

    /// Waits for the space of what has no name and is about to be closed, before it is told.
    pub(crate) fn settle_space(&self) {
        self.settle_all_nameless(RELEASE_DUE_FOR_SPACE);
    }

    fn settle_all_nameless(&self, due: Duration) {
        if self.nameless.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let inos = self.nameless.inos.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let end = Instant::now() + 2 * due;
        for ino in inos {
            if Instant::now() < end {
                self.settle_within(ino, due);
            }
        }
        let mut inos = self.nameless.inos.lock().unwrap_or_else(PoisonError::into_inner);
        inos.retain(|ino| self.nodes.opened(*ino).is_some());
        self.nameless.count.store(inos.len(), Ordering::Release);
    }
}
