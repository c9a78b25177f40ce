//! Waits for files that are being closed, before requests that need their space.
//!
//! The kernel does not wait for the reply to a release. A program that removes a file, closes it and writes another
//! would find the space in use for as long as the mount's descriptor is open. But the kernel does wait for the flush
//! before the release. So a removal, a creation or a statfs that follows a close also follows its flush, and waits for
//! the releases that are due by then. If no release follows a flush, because a copy of the descriptor is open,
//! requests wait for it once and not again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::Pool;

use crate::nodes::Nodes;
use crate::opened::Opened;

/// Longest time from a flush to its release. Later no release is expected.
const RELEASE_DUE: Duration = Duration::from_millis(10);
/// The same on a busy machine. A statfs waits this long, and so do requests that need space in a pool that is nearly
/// full. If no release has arrived by then, a copy of the descriptor is open.
pub(crate) const RELEASE_DUE_BUSY: Duration = Duration::from_millis(500);
/// A pool is nearly full when less than one part in this many of its space is free.
const NEARLY_FULL: u64 = 16;

/// Inodes that have no name any more and were open when they lost it.
#[derive(Debug, Default)]
pub(crate) struct Nameless {
    count: AtomicUsize,
    inos: Mutex<Vec<u64>>,
}

/// Waits until an inode is closed here, if its release is due.
pub(crate) fn settle(nodes: &Nodes, ino: u64) {
    settle_within(nodes, ino, RELEASE_DUE);
}

fn settle_within(nodes: &Nodes, ino: u64, due: Duration) {
    while let Some(opened) = nodes.opened(ino) {
        match opened.flushed() {
            Some(at) if at.elapsed() < due => {
                drop(opened);
                std::thread::sleep(Duration::from_micros(20));
            }
            _ => return,
        }
    }
}

fn is_nearly_full(pool: &Pool) -> bool {
    pool.statfs().is_ok_and(|st| st.f_bfree < st.f_blocks / NEARLY_FULL)
}

impl Nameless {
    /// Records an inode that has lost its last name, or never had one: its last close frees its space.
    pub(crate) fn note(&self, nodes: &Nodes, ino: u64) {
        if nodes.opened(ino).is_some() {
            let mut inos = self.inos.lock().unwrap_or_else(PoisonError::into_inner);
            inos.push(ino);
            self.count.store(inos.len(), Ordering::Release);
        }
    }

    /// Waits for the space of nameless inodes that are about to be closed, before a request takes space.
    pub(crate) fn settle(&self, nodes: &Nodes, pool: &Pool) {
        self.settle_all(nodes, RELEASE_DUE);
        if self.is_closing(nodes) && is_nearly_full(pool) {
            self.settle_all(nodes, RELEASE_DUE_BUSY);
        }
    }

    /// True when the release of a nameless inode may still be on its way.
    fn is_closing(&self, nodes: &Nodes) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let inos = self.inos.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let closes = |opened: Arc<Opened>| opened.flushed().is_some_and(|at| at.elapsed() < RELEASE_DUE_BUSY);
        inos.into_iter().any(|ino| nodes.opened(ino).is_some_and(closes))
    }

    /// Waits for the space of nameless inodes that are about to be closed, before the free space is reported.
    pub(crate) fn settle_space(&self, nodes: &Nodes) {
        self.settle_all(nodes, RELEASE_DUE_BUSY);
    }

    fn settle_all(&self, nodes: &Nodes, due: Duration) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let inos = self.inos.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let end = Instant::now() + 2 * due;
        for ino in inos {
            if Instant::now() < end {
                settle_within(nodes, ino, due);
            }
        }
        let mut inos = self.inos.lock().unwrap_or_else(PoisonError::into_inner);
        inos.retain(|ino| nodes.opened(*ino).is_some());
        self.count.store(inos.len(), Ordering::Release);
    }
}
