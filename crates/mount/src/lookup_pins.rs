//! Files kept openable for a moment after their name was looked up.
//!
//! Between the kernel's look-up of a name and its open of what it found, the file may be replaced. The kernel then
//! looks up and opens once more. Where one file replaces another again and again, the second attempt fails too, and the
//! program gets an error that no local file system gives. So once an open came too late, the mount opens files as they
//! are looked up, and keeps them open for a moment: the second open finds what the look-up found, named or not.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_types::{Code, Ino};

use crate::errno::Errno;
use crate::nodes::Nodes;

/// How long look-ups keep files after an open that came too late, and how long each is kept: longer than a program is
/// kept from its processor between the two on a crowded node.
const PIN_TIME: Duration = Duration::from_millis(400);
/// Files kept at one time; more give up the oldest.
const KEPT_MAX: usize = 64;

#[derive(Debug, Default)]
struct State {
    until: Option<Instant>,
    kept: VecDeque<(Instant, u64)>,
}

/// Files that are kept, and until when more are.
#[derive(Debug, Default)]
pub(crate) struct LookupPins {
    is_on: AtomicBool,
    state: Mutex<State>,
}

impl LookupPins {
    /// The error of an open whose file is gone. From now on look-ups keep files for a while.
    pub(crate) fn came_too_late(&self) -> Errno {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.until = Some(Instant::now() + PIN_TIME);
        self.is_on.store(true, Ordering::Release);
        Errno(libc::ESTALE)
    }

    /// Keeps a regular file that was looked up, if files are kept just now. [`Code::Stale`] when it is gone already.
    pub(crate) fn pin_for_a_moment(&self, nodes: &Nodes, pool: &Pool, ino: Ino) -> Result<(), Code> {
        if !self.is_on.load(Ordering::Acquire) {
            return Ok(());
        }
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

    /// Closes what was kept long enough; to be called now and then.
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
