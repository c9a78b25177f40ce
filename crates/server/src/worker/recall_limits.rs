//! Which files programs may have copied from a backing store by opening them for reading (`forebay attach --recall`).
//!
//! A program that scans a tree (`grep -r`, `file`, a backup) reads each file once. What it has copied displaces what other
//! programs need, so a store's setting may forbid such copies, or limit how many bytes one process has copied within
//! [`RECALL_WINDOW_NS`]. The window begins with the process's first copy, and another one behind its end. A file counts when
//! it is opened, with all its bytes. Opens for writing and the mover's own tasks are not asked about.
//!
//! The table is in memory and bounded: what is forgotten, or lost with the worker, is allowed once more. A process is known
//! by its number; one that ended and whose number another process got counts with that one. Tests: here, and
//! `crates/mount/tests/recall.rs`.

use std::collections::{HashMap, VecDeque};

use forebay_tasks::Recall;
use forebay_types::limits::{RECALLING_PROCESSES_MAX, RECALL_WINDOW_NS};
use forebay_types::{Ino, NodeId};

/// Files that are remembered for a process, so that an open that begins anew is not counted again.
const LAST_FILES: usize = 16;

/// A process, and the directory with the store of which it has files copied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Recaller {
    pub(super) store: Ino,
    pub(super) node: NodeId,
    /// 0 stands for all processes that the mount cannot see.
    pub(super) process: u64,
}

#[derive(Debug)]
struct Recalled {
    since_ns: u64,
    bytes: u64,
    last: VecDeque<Ino>,
    is_refused: bool,
}

/// Whether a file may be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Allowed,
    /// Not; the process had this many bytes copied. `is_first` for the first refusal in its window.
    Refused {
        bytes: u64,
        is_first: bool,
    },
}

/// What processes had copied lately.
#[derive(Debug, Default)]
pub(super) struct RecallLimits(HashMap<Recaller, Recalled>);

impl RecallLimits {
    /// A process is about to have a file of `bytes` bytes copied.
    pub(super) fn admit(
        &mut self,
        recaller: Recaller,
        ino: Ino,
        bytes: u64,
        recall: Recall,
        now_ns: u64,
    ) -> Verdict {
        let limit = match recall {
            Recall::Yes => return Verdict::Allowed,
            Recall::No => 0,
            Recall::UpTo(limit) => limit,
        };
        let is_over = |recalled: &Recalled| now_ns >= recalled.since_ns + RECALL_WINDOW_NS;
        if self.0.len() >= RECALLING_PROCESSES_MAX && !self.0.contains_key(&recaller) {
            self.0.retain(|_, recalled| !is_over(recalled));
            if self.0.len() >= RECALLING_PROCESSES_MAX {
                let oldest = self.0.iter().min_by_key(|(_, recalled)| recalled.since_ns);
                if let Some(oldest) = oldest.map(|(recaller, _)| *recaller) {
                    self.0.remove(&oldest);
                }
            }
        }
        let new = || Recalled { since_ns: now_ns, bytes: 0, last: VecDeque::new(), is_refused: false };
        let recalled = self.0.entry(recaller).or_insert_with(new);
        if is_over(recalled) {
            *recalled = new();
        }
        if recalled.last.contains(&ino) {
            return Verdict::Allowed;
        }
        match recalled.bytes.checked_add(bytes).filter(|sum| *sum <= limit && recall != Recall::No) {
            Some(sum) => {
                recalled.bytes = sum;
                if recalled.last.len() >= LAST_FILES {
                    recalled.last.pop_front();
                }
                recalled.last.push_back(ino);
                Verdict::Allowed
            }
            None => {
                let is_first = !std::mem::replace(&mut recalled.is_refused, true);
                Verdict::Refused { bytes: recalled.bytes, is_first }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Recall = Recall::UpTo(100);

    fn recaller(process: u64) -> Recaller {
        Recaller { store: Ino(5), node: NodeId(1), process }
    }

    #[test]
    fn process_has_as_much_copied_as_the_setting_says_until_its_window_ends() {
        let mut limits = RecallLimits::default();
        let mut admit =
            |process, ino, bytes, now| limits.admit(recaller(process), Ino(ino), bytes, LIMIT, now);
        assert_eq!(admit(1, 10, 60, 7), Verdict::Allowed);
        assert_eq!(admit(1, 11, 41, 8), Verdict::Refused { bytes: 60, is_first: true });
        assert_eq!(admit(1, 12, 41, 9), Verdict::Refused { bytes: 60, is_first: false });
        assert_eq!(admit(1, 13, 40, 10), Verdict::Allowed, "what is left is enough for it");
        assert_eq!(admit(1, 10, 60, 11), Verdict::Allowed, "the same open, once more");
        assert_eq!(admit(2, 11, 100, 12), Verdict::Allowed, "another process");
        assert_eq!(admit(2, 12, u64::MAX, 12), Verdict::Refused { bytes: 100, is_first: true });
        assert_eq!(
            admit(1, 14, 1, 7 + RECALL_WINDOW_NS - 1),
            Verdict::Refused { bytes: 100, is_first: false }
        );
        assert_eq!(admit(1, 14, 100, 7 + RECALL_WINDOW_NS), Verdict::Allowed);
        assert_eq!(admit(1, 15, 1, 8 + RECALL_WINDOW_NS), Verdict::Refused { bytes: 100, is_first: true });
    }

    #[test]
    fn nothing_is_copied_with_no_and_everything_with_yes() {
        let mut limits = RecallLimits::default();
        let mut admit = |bytes, recall| limits.admit(recaller(1), Ino(10), bytes, recall, 7);
        assert_eq!(admit(u64::MAX, Recall::Yes), Verdict::Allowed);
        assert_eq!(admit(u64::MAX, Recall::Yes), Verdict::Allowed);
        assert_eq!(admit(0, Recall::No), Verdict::Refused { bytes: 0, is_first: true });
    }

    #[test]
    fn table_is_bounded_and_forgets_what_is_over_or_oldest() {
        let mut limits = RecallLimits::default();
        let most = RECALLING_PROCESSES_MAX as u64;
        for process in 0..most + 5 {
            limits.admit(recaller(process), Ino(10), 100, LIMIT, 100 + process);
        }
        assert_eq!(limits.0.len(), RECALLING_PROCESSES_MAX);
        let refused = Verdict::Refused { bytes: 100, is_first: true };
        assert_eq!(limits.admit(recaller(most), Ino(11), 1, LIMIT, 100 + most), refused);
        assert!(!limits.0.contains_key(&recaller(0)));
        limits.admit(recaller(0), Ino(10), 1, LIMIT, 100 + most + 5 + RECALL_WINDOW_NS);
        assert_eq!(limits.0.len(), 1, "the windows of all others are over");
    }
}
