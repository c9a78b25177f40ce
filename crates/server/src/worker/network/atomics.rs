//! Atomic operations of processes of other nodes on words of this node's pieces of volumes: executed here, by the
//! processor, so that they are atomic against those of this node's processes too.
//!
//! The last operation of each slot ([`ReplyCache`]) is in a durable table. Its entry exists before the word changes, and
//! gets the result after. So a repeated request is answered from it, by the next worker too. An entry without a result
//! is of a worker that was killed between the two: whether the word has changed is not known, and the answer is EIO.
//!
//! The network thread serves these requests without the shard thread, and never blocks. Lock order: after the mutex here
//! those of open backing files and of the table of pieces, one at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::limits::REPLIES_KEPT;
use forebay_types::{AtomicOp, Code, PieceId, PieceWord};
use forebay_wire::Stamp;

use super::reply_cache::{ReplyCache, WORDS};
use crate::worker::durable_table::{DurableMemory, Format};
use crate::worker::piece_table::PieceTable;

/// Its tag in the descriptor store.
pub(in crate::worker) const TAG: &str = "atomics";
/// The table of last operations.
pub(super) const FORMAT: Format = Format {
    tag: TAG,
    what: "the last atomic operations of processes of other nodes",
    version: 1,
    tables: &[(REPLIES_KEPT, WORDS)],
};
/// The state of an operation that may have changed its word or not. Its words: the volume, the word, 0.
const BEGUN: u64 = 1;
/// The state of one whose third word is its result.
const DONE: u64 = 2;

/// A word as a number.
fn numbered(word: PieceWord) -> u64 {
    match word {
        PieceWord::At(offset) => offset,
        PieceWord::End => u64::MAX,
    }
}

/// The last operation of each slot.
#[derive(Debug)]
pub(in crate::worker) struct Atomics(Mutex<ReplyCache>);

impl Default for Atomics {
    fn default() -> Atomics {
        Atomics::open(&DurableMemory::none(&FORMAT))
    }
}

impl Atomics {
    /// Opens the table in a memory.
    pub(super) fn open(memory: &DurableMemory) -> Atomics {
        Atomics(Mutex::new(ReplyCache::open(memory, 0, |state, _| matches!(state, BEGUN | DONE))))
    }

    fn cache(&self) -> MutexGuard<'_, ReplyCache> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes an operation once. Returns what the word was. `may`: whether the process has the piece open for writing.
    pub(super) fn once(
        &self,
        stamp: &Stamp,
        pieces: &PieceTable,
        (id, word, op): (PieceId, PieceWord, AtomicOp),
        may: impl FnOnce() -> bool,
    ) -> Result<u64, Code> {
        let mut cache = self.cache();
        if let Some(kept) = cache.get(stamp) {
            return match kept.state {
                DONE => Ok(kept.words[2]),
                _ => Err(Code::Io),
            };
        }
        if cache.is_overtaken(stamp) || !may() {
            return Err(Code::Stale);
        }
        // A call that can only fail leaves no entry, which the next worker would take for one that may have been executed.
        pieces.apply(id, word, AtomicOp::Load)?;
        let number = cache.put(stamp, BEGUN, [id.volume.0, numbered(word), 0]);
        match pieces.apply(id, word, op) {
            Ok(was) => {
                cache.advance(number, DONE, was);
                Ok(was)
            }
            // The piece went meanwhile. The word is as it was. A retry by the next worker gets EIO.
            Err(code) => Err(code),
        }
    }

    /// A process has ended, and repeats nothing.
    pub(super) fn end(&self, session: u64) {
        self.cache().end(session);
    }

    /// The processes with stored operations.
    pub(super) fn sessions(&self) -> Vec<u64> {
        self.cache().sessions()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::piece_table::PieceKind;
    use forebay_types::{Ino, NodeId, Rights};
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    const ADD: AtomicOp = AtomicOp::Add { by: 5 };

    fn stamp(sequence: u64) -> Stamp {
        Stamp { session: 7, slot: 3, sequence }
    }

    fn piece() -> (PieceTable, PieceId) {
        let memory: OwnedFd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let (table, id) =
            (PieceTable::default(), PieceId { volume: Ino::new(NodeId(1), 9), segment: 0, index: 0 });
        let rights = Some(Rights { uid: 0, gid: 0, mode: 0o600 });
        let kind = PieceKind { target: 0, bytes: 4096, rights, is_thin: false };
        table.add(id, (&Arc::new(memory), kind), None);
        (table, id)
    }

    #[test]
    fn operation_is_executed_once_and_its_result_outlives_the_worker() {
        let (memory, (table, id)) = (DurableMemory::new(&FORMAT), piece());
        let ask = |atomics: &Atomics, sequence| {
            atomics.once(&stamp(sequence), &table, (id, PieceWord::At(8), ADD), || true)
        };
        let first = Atomics::open(&memory);
        assert_eq!((ask(&first, 1), ask(&first, 2), ask(&first, 2)), (Ok(0), Ok(5), Ok(5)));
        assert_eq!(ask(&first, 1), Err(Code::Stale), "a late duplicate");
        drop(first);
        let next = Atomics::open(&memory);
        assert_eq!((ask(&next, 2), ask(&next, 3)), (Ok(5), Ok(10)));
        assert_eq!(next.once(&stamp(4), &table, (id, PieceWord::At(8), ADD), || false), Err(Code::Stale));
        assert_eq!(next.sessions(), [7]);
        next.end(7);
        assert_eq!((ask(&next, 4), next.sessions()), (Ok(15), vec![7]));
        let beyond =
            |atomics: &Atomics| atomics.once(&stamp(5), &table, (id, PieceWord::At(4096), ADD), || true);
        assert_eq!(beyond(&next), Err(Code::Range));
        drop(next);
        assert_eq!(beyond(&Atomics::open(&memory)), Err(Code::Range), "and no doubt about it");
    }

    #[test]
    fn operation_that_a_killed_worker_has_begun_fails_and_is_not_executed_again() {
        let (memory, (table, id)) = (DurableMemory::new(&FORMAT), piece());
        let killed = Atomics::open(&memory);
        killed.cache().put(&stamp(6), BEGUN, [id.volume.0, 8, 0]);
        drop(killed);
        let next = Atomics::open(&memory);
        let ask = |sequence| next.once(&stamp(sequence), &table, (id, PieceWord::At(8), ADD), || true);
        assert_eq!((ask(6), ask(6), ask(7)), (Err(Code::Io), Err(Code::Io), Ok(0)));
    }
}
