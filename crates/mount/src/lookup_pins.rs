//! Files kept openable for a moment after their name was looked up.
//!
//! Another program may replace a file between the kernel's look-up of its name and the open that follows, or the request
//! for its attributes. The kernel then looks up and opens once more. If programs replace the file again and again, the second attempt fails too, and
//! the program gets an error that no local file system returns. So after an open has failed in this way, the mount
//! opens each file when it is looked up, and keeps it open for a moment. The second open then finds the file of its
//! look-up, even if that file has lost its name.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_types::{Code, Entry};

use crate::errno::Errno;
use crate::nodes::Nodes;

/// How long look-ups pin files after an open that came too late, and how long each file stays pinned. It is longer
/// than the scheduler keeps a program from its processor between look-up and open on a crowded node.
const PIN_TIME: Duration = Duration::from_millis(400);
/// Most files pinned at one time. Beyond it the oldest is closed.
const KEPT_MAX: usize = 64;

#[derive(Debug, Default)]
struct State {
    until: Option<Instant>,
    kept: VecDeque<(Instant, u64)>,
}

/// The pinned files, and until when look-ups pin more.
#[derive(Debug, Default)]
pub(crate) struct LookupPins {
    is_on: AtomicBool,
    state: Mutex<State>,
}

impl LookupPins {
    /// Returns the error of an open, or of a stat, whose file is gone. From now on look-ups pin files for a while.
    pub(crate) fn came_too_late(&self) -> Errno {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.until = Some(Instant::now() + PIN_TIME);
        self.is_on.store(true, Ordering::Release);
        Errno(libc::ESTALE)
    }

    /// Pins a regular file that was looked up, if look-ups pin files now. Returns [`Code::Stale`] if the file is gone
    /// already.
    pub(crate) fn pin_for_a_moment(&self, nodes: &Nodes, pool: &Pool, entry: &Entry) -> Result<(), Code> {
        // A look-up restores nothing.
        if !self.is_on.load(Ordering::Acquire) || !entry.attr.is_resident() {
            return Ok(());
        }
        let ino = entry.attr.ino;
        let opened = nodes.open(ino.0);
        if let Err(e) = opened.open(pool, None, false) {
            nodes.close(ino.0);
            return if e == Errno(libc::ESTALE) { Err(Code::Stale) } else { Ok(()) };
        }
        let oldest = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.kept.push_back((Instant::now() + PIN_TIME, ino.0));
            if state.kept.len() > KEPT_MAX {
                state.kept.pop_front()
            } else {
                None
            }
        };
        if let Some((_, ino)) = oldest {
            nodes.close(ino);
        }
        Ok(())
    }

    /// Closes the files that were pinned long enough. The main thread calls this repeatedly.
    pub(crate) fn end_grace(&self, nodes: &Nodes) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let mut over = Vec::new();
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            while let Some((_, ino)) = state.kept.pop_front_if(|(until, _)| *until <= now) {
                over.push(ino);
            }
            if state.until.is_none_or(|until| until <= now) && state.kept.is_empty() {
                self.is_on.store(false, Ordering::Release);
            }
        }
        for ino in over {
            nodes.close(ino);
        }
    }
}
