//! Waiting for space on this node, in a pool of several nodes in front of a store.
//!
//! The daemon of a tree's home holds the calls of its own node's programs while that node is full. It does not know how
//! full the nodes of others are, where their data go: there the call waits before it is sent.

use std::time::{Duration, Instant};

use forebay_types::limits::HIGH_WATER_PERCENT;
use forebay_types::{Ino, FLAG_ATTACHED};

use crate::pool::Pool;

/// How long a call waits, as in the daemon (`crates/server/src/worker/store_waits.rs`).
const PATIENCE: Duration = Duration::from_secs(25);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(20);

impl Pool {
    /// Waits, before data are added to a directory or file of another node's tree, until this node's mover has made
    /// space, for a limited time.
    #[inline]
    pub(crate) fn wait_for_room(&self, ino: Ino) {
        if !self.is_served_here(ino) && self.attached().is_ok_and(|here| here.is_scarce()) {
            self.wait_for_room_of(ino);
        }
    }

    #[cold]
    fn wait_for_room_of(&self, ino: Ino) {
        let is_attached = || self.get_attr(ino).is_ok_and(|entry| entry.attr.flags & FLAG_ATTACHED != 0);
        if !self.takes_files() || !is_attached() {
            return;
        }
        let until = Instant::now() + PATIENCE;
        let is_full = || self.attached().is_ok_and(|here| here.used_percent() >= HIGH_WATER_PERCENT);
        while is_full() && Instant::now() < until {
            std::thread::sleep(PAUSE);
        }
    }
}
