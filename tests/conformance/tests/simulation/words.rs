//! Atomic operations by clients of several nodes on a word of a volume's piece, which is on the first node. They are no part
//! of the tree that `checker` judges: a search of their own finds out whether an order of them explains all results.
//!
//! Clients of the first node take no part: they would map the piece, which takes more of a daemon than is simulated.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use forebay_conformance::linearizable::after;
use forebay_conformance::linearizable::{check, Call};
use forebay_fabric::Numbers;
use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::VOLUME_GRAIN_BYTES;
use forebay_types::{target_of, AtomicOp, BackingId, Code, Ino, NodeId, PieceId, PieceWord};

use crate::history::Recorder;
use crate::IMPOSSIBLE;

/// The node of the piece.
pub(crate) const HOME: u16 = 1;
/// Where the word is in the piece.
const OFFSET: u64 = 64;
/// A number that no inode of a history gets.
const VOLUME: u64 = 1 << 30;

/// The piece.
pub(crate) fn piece() -> PieceId {
    PieceId { volume: Ino::new(NodeId(HOME), VOLUME), segment: 0, index: 0 }
}

/// The piece, as requests name it.
pub(crate) fn backing() -> BackingId {
    BackingId::of_piece(target_of(NodeId(HOME), 0), piece())
}

/// The word, as requests name it.
pub(crate) fn word() -> PieceWord {
    PieceWord::At(OFFSET)
}

#[derive(Debug, Default)]
struct Calls {
    all: Vec<Call>,
    /// The number of beginnings and ends so far, which is the time.
    now: u64,
}

/// The piece's memory, and the calls of all clients.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    memory: Arc<OwnedFd>,
    calls: Arc<Mutex<Calls>>,
    recorder: Recorder,
}

impl Words {
    pub(crate) fn new(recorder: Recorder) -> Words {
        let (memory, _) = memfd_sealed(c"piece", VOLUME_GRAIN_BYTES as usize, Seal::Size).expect("a memfd");
        Words { memory: Arc::new(memory), calls: Arc::default(), recorder }
    }

    /// The piece with its memory, for its node.
    pub(crate) fn piece(&self) -> (PieceId, Arc<OwnedFd>) {
        (piece(), Arc::clone(&self.memory))
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation of a client that has last seen `seen`. Values are unique, so that results tell much.
    pub(crate) fn choose(&self, numbers: &mut Numbers, seen: u64) -> AtomicOp {
        let unique = (self.calls().all.len() as u64 + 1) << 20;
        match numbers.below(4) {
            0 => AtomicOp::Swap { new: unique },
            // Each its own: one that is executed twice is no other one that is in doubt.
            1 | 2 => AtomicOp::Add { by: unique },
            _ => AtomicOp::CompareAndSwap { expected: seen, new: unique },
        }
    }

    /// Records that a client begins a call. Returns its number.
    pub(crate) fn asked(&self, client: usize, op: AtomicOp) -> usize {
        let mut calls = self.calls();
        let (index, began) = (calls.all.len(), calls.now);
        calls.now += 1;
        calls.all.push(Call { began, ended: None, op });
        self.recorder.tell(format!("client {client}  word #{index} {op:?} ..."));
        index
    }

    /// Records the result of a call. Without one, or with an error, its outcome stays unknown.
    pub(crate) fn answered(&self, client: usize, index: usize, result: Result<u64, Code>) {
        let mut calls = self.calls();
        let ended = calls.now;
        calls.now += 1;
        calls.all[index].ended = result.ok().map(|was| (ended, was));
        self.recorder.tell(format!("client {client}  word #{index} -> {result:?}"));
    }

    /// Judges the calls and the word that is left: the error describes what no order explains, or says that it is undecided. Returns how many calls there
    /// were, and of how many the outcome is unknown.
    pub(crate) fn judge(&self) -> Result<(usize, usize), String> {
        use std::os::fd::AsFd;
        let mapping = Mapping::new(self.memory.as_fd(), VOLUME_GRAIN_BYTES as usize, false)
            .map_err(|e| format!("cannot map the piece: {e}"))?;
        let left = mapping.word64(OFFSET as usize).load(std::sync::atomic::Ordering::SeqCst);
        let calls = self.calls();
        let mut all = calls.all.clone();
        all.push(Call { began: calls.now, ended: Some((calls.now + 1, left)), op: AtomicOp::Load });
        check(0, &all).map_err(|why| match why.starts_with("undecided") {
            true => why,
            false => format!("{IMPOSSIBLE}{why}"),
        })?;
        Ok((calls.all.len(), calls.all.iter().filter(|call| call.ended.is_none()).count()))
    }
}
