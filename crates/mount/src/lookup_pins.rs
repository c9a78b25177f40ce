//! Files kept openable for a moment after their name was looked up, and their attributes.
//!
//! Another program may replace a file between the kernel's look-up of its name and the open that follows, or the request
//! for its attributes. The kernel then looks up and opens once more. If programs replace the file again and again, the
//! second attempt fails too, and the program gets an error that no local file system returns. So after an open or a stat
//! has failed in this way, the mount opens each file when it is looked up, keeps it open for a moment, and remembers its
//! attributes. The second open then finds the file of its look-up, even if that file has lost its name, and the second
//! stat its attributes, also if the file is on another node, where it cannot be kept open.

use std::collections::VecDeque;
use std::fmt;
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

/// The attributes in the reply to the last look-up of an inode, how long they count, and for how many look-ups.
struct Found {
    until: Instant,
    st: libc::stat,
    look_ups: u32,
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Found")
            .field("until", &self.until)
            .field("ino", &self.st.st_ino)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    until: Option<Instant>,
    kept: VecDeque<(Instant, u64)>,
    /// The attributes in replies to look-ups, oldest first, until the kernel asks for them by number.
    found: VecDeque<Found>,
}

/// The pinned files, and until when look-ups pin more files.
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

    /// Remembers the attributes in the reply to a look-up of a regular file, if look-ups pin files now.
    pub(crate) fn note_found(&self, st: &libc::stat) {
        if !self.is_on.load(Ordering::Acquire) || st.st_mode & libc::S_IFMT != libc::S_IFREG {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.found.iter().position(|found| found.st.st_ino == st.st_ino);
        let before = before.and_then(|at| state.found.remove(at)).map_or(0, |found| found.look_ups);
        if state.found.len() == KEPT_MAX {
            state.found.pop_front();
        }
        state.found.push_back(Found { until: Instant::now() + PIN_TIME, st: *st, look_ups: before + 1 });
    }

    /// The attributes in the reply to the last look-up that found an inode. Each look-up serves one request, the one that
    /// follows it.
    pub(crate) fn take_found(&self, ino: u64) -> Option<libc::stat> {
        if !self.is_on.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let at = state.found.iter().position(|found| found.st.st_ino == ino)?;
        let found = &mut state.found[at];
        found.look_ups -= 1;
        let st = (found.until > Instant::now()).then_some(found.st);
        if found.look_ups == 0 {
            state.found.remove(at);
        }
        st
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
                state.found.clear();
                self.is_on.store(false, Ordering::Release);
            }
        }
        for ino in over {
            nodes.close(ino);
        }
    }
}
