//! The pieces of volumes on this node, for the threads that serve processes of other nodes (docs/decisions/0048). The
//! shard thread adds, publishes and removes them; the I/O workers open them and the network thread changes their words.
//!
//! A piece is opened for a process after its rights were checked. Until the shard thread has read the records of volumes
//! ([`PieceTable::is_ready`]), it is not known who may open the pieces of this node's own volumes.
//!
//! Lock order: no other lock is taken while the table's is held.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_ring::Mapping;
use forebay_sys::descriptor;
use forebay_types::limits::VOLUME_GRAIN_BYTES;
use forebay_types::{AtomicOp, Code, Ino, PieceId, PieceWord, Rights};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

type Answer<T> = std::result::Result<T, Code>;

/// What a piece is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PieceKind {
    /// The index of its target.
    pub(super) target: u16,
    /// Its size.
    pub(super) bytes: u64,
    /// Who may use it, if the volume's home is another node: this node does not have the record.
    pub(super) rights: Option<Rights>,
    /// Nothing is reserved for it.
    pub(super) is_thin: bool,
}

/// Memory with words.
#[derive(Debug)]
struct Words {
    memory: Arc<OwnedFd>,
    bytes: u64,
    /// Made by the first atomic operation.
    mapping: Option<Arc<Mapping>>,
}

impl Words {
    fn new(memory: &Arc<OwnedFd>, bytes: u64) -> Words {
        Words { memory: Arc::clone(memory), bytes, mapping: None }
    }

    /// It mapped, if a word at `offset` is in it.
    fn with(&mut self, offset: u64) -> Answer<Arc<Mapping>> {
        if offset.checked_add(8).is_none_or(|end| end > self.bytes) {
            return Err(Code::Range);
        }
        if let Some(mapping) = &self.mapping {
            return Ok(Arc::clone(mapping));
        }
        let mapping = map(&self.memory, self.bytes)?;
        Ok(Arc::clone(self.mapping.insert(Arc::new(mapping))))
    }
}

#[derive(Debug)]
struct Entry {
    piece: Words,
    /// The volume's head, if it is beside this piece: its first word is the end of the volume's file.
    head: Option<Words>,
    /// None: nobody may open it for another node yet.
    rights: Option<Rights>,
    /// It is a file with holes, whose pages may be refused: it is not mapped.
    is_thin: bool,
}

#[derive(Debug, Default)]
struct Table {
    pieces: HashMap<PieceId, Entry>,
    is_ready: bool,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct PieceTable(Arc<Mutex<Table>>);

fn code(e: Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

/// Maps memory of a piece, which a core dump of this process leaves out: it may be larger than all else, and is others'.
fn map(memory: &OwnedFd, bytes: u64) -> Answer<Mapping> {
    let bytes = usize::try_from(bytes).map_err(|_| Code::NoMemory)?;
    let mapping = Mapping::new(memory.as_fd(), bytes, true)
        .map_err(|e| Code::from_errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
    mapping.leave_out_of_dumps();
    Ok(mapping)
}

/// Opens a piece once more, with a lock of its own, which says that a process uses it until the last descriptor and the
/// last mapping that come from it are gone: the kernel keeps the open file for a mapping too.
pub(super) fn open(memory: &OwnedFd, writes: bool) -> Answer<OwnedFd> {
    let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
    let opened =
        rustix::fs::open(descriptor::path(memory), access | OFlags::CLOEXEC, Mode::empty()).map_err(code)?;
    match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(opened),
        // The shard thread looks whether the piece is used, for a moment.
        Err(Errno::WOULDBLOCK) => Err(Code::Busy),
        Err(e) => Err(code(e)),
    }
}

impl PieceTable {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a piece, with the volume's head if that is beside it.
    pub(super) fn add(
        &self,
        id: PieceId,
        (memory, PieceKind { bytes, rights, is_thin, .. }): (&Arc<OwnedFd>, PieceKind),
        head: Option<&Arc<OwnedFd>>,
    ) {
        let head = head.map(|head| Words::new(head, VOLUME_GRAIN_BYTES));
        let entry = Entry { piece: Words::new(memory, bytes), head, rights, is_thin };
        self.table().pieces.insert(id, entry);
    }

    /// Removes a piece: no process opens it any more. Returns what this node has mapped of it. To unmap a large piece takes
    /// long, so that is not dropped in a thread that all clients share.
    pub(super) fn remove(&self, id: PieceId) -> Option<Arc<Mapping>> {
        self.table().pieces.remove(&id).and_then(|entry| entry.piece.mapping)
    }

    /// The records of this node's volumes are read: who may open the pieces of each.
    pub(super) fn publish(&self, rights: impl Iterator<Item = (Ino, Rights)>) {
        let rights: HashMap<Ino, Rights> = rights.collect();
        let mut table = self.table();
        for (id, entry) in &mut table.pieces {
            entry.rights = rights.get(&id.volume).copied().or(entry.rights);
        }
        table.is_ready = true;
    }

    /// Opens a piece for a process of another node. True with it: for writing.
    ///
    /// # Errors
    /// [`Code::Io`] if it is not here, [`Code::AccessDenied`]; [`Code::Busy`] for a moment.
    pub(super) fn open(&self, id: PieceId, (uid, gid): (u32, u32)) -> Answer<(OwnedFd, bool)> {
        let (memory, writes) = {
            let table = self.table();
            let unknown = if table.is_ready { Code::Io } else { Code::Busy };
            let entry = table.pieces.get(&id).ok_or(unknown)?;
            let rights = entry.rights.ok_or(unknown)?;
            if !rights.allow(uid, gid, false) {
                return Err(Code::AccessDenied);
            }
            (Arc::clone(&entry.piece.memory), rights.allow(uid, gid, true))
        };
        open(&memory, writes).map(|opened| (opened, writes))
    }

    /// The size of a piece. [`Code::Io`] if it is not here.
    pub(super) fn bytes(&self, id: PieceId) -> Answer<u64> {
        self.table().pieces.get(&id).map(|entry| entry.piece.bytes).ok_or(Code::Io)
    }

    /// True if a piece is thin. [`Code::Io`] if it is not here.
    pub(super) fn is_thin(&self, id: PieceId) -> Answer<bool> {
        self.table().pieces.get(&id).map(|entry| entry.is_thin).ok_or(Code::Io)
    }

    /// A new mapping of a piece. It holds no lock that says that the piece is in use.
    ///
    /// # Errors
    /// [`Code::Io`] if the piece is not here, [`Code::NotSupported`] for a thin one; those of the kernel.
    pub(super) fn map(&self, id: PieceId) -> Answer<Mapping> {
        let (memory, bytes) = {
            let table = self.table();
            let entry = table.pieces.get(&id).ok_or(Code::Io)?;
            if entry.is_thin {
                return Err(Code::NotSupported);
            }
            (Arc::clone(&entry.piece.memory), entry.piece.bytes)
        };
        map(&memory, bytes)
    }

    /// Changes a word of a piece, and returns what it was.
    ///
    /// # Errors
    /// [`Code::Io`] if the piece is not here, [`Code::Range`] beyond its end, [`Code::NotSupported`] for the end of the
    /// file at a piece that the head is not beside, and for a word of a thin piece. The word is as it was.
    pub(super) fn apply(&self, id: PieceId, word: PieceWord, op: AtomicOp) -> Answer<u64> {
        let (mapping, offset) = {
            let mut table = self.table();
            let entry = table.pieces.get_mut(&id).ok_or(Code::Io)?;
            match word {
                PieceWord::At(_) if entry.is_thin => return Err(Code::NotSupported),
                PieceWord::At(offset) => (entry.piece.with(offset)?, offset),
                PieceWord::End => (entry.head.as_mut().ok_or(Code::NotSupported)?.with(0)?, 0),
            }
        };
        Ok(op.apply(mapping.word64(offset as usize)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;

    const MINE: Rights = Rights { uid: 7, gid: 7, mode: 0o640 };

    fn piece(index: u16) -> PieceId {
        PieceId { volume: Ino::new(NodeId(3), 77), segment: 0, index }
    }

    fn kind(rights: Option<Rights>) -> PieceKind {
        PieceKind { target: 0, bytes: 8192, rights, is_thin: false }
    }

    fn memory() -> Arc<OwnedFd> {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 8192).unwrap();
        Arc::new(memory)
    }

    #[test]
    fn piece_is_opened_by_users_who_may_and_once_its_record_is_known() {
        let (table, memory) = (PieceTable::default(), memory());
        table.add(piece(0), (&memory, kind(None)), None);
        let open = |index, user| table.open(piece(index), user).map(|(_, writes)| writes);
        assert_eq!((open(0, (7, 7)), open(1, (7, 7))), (Err(Code::Busy), Err(Code::Busy)));
        table.publish([(piece(0).volume, MINE)].into_iter());
        assert_eq!((open(0, (7, 7)), open(0, (8, 7)), open(0, (0, 0))), (Ok(true), Ok(false), Ok(true)));
        assert_eq!((open(0, (8, 8)), open(1, (7, 7))), (Err(Code::AccessDenied), Err(Code::Io)));
        table.remove(piece(0));
        assert_eq!(open(0, (7, 7)), Err(Code::Io));
    }

    #[test]
    fn word_is_changed_where_other_mappings_see_it_and_never_beyond_the_end() {
        let (table, memory) = (PieceTable::default(), memory());
        let head = self::memory();
        table.add(piece(0), (&memory, kind(Some(MINE))), None);
        table.add(piece(2), (&memory, kind(Some(MINE))), Some(&head));
        let thin = PieceKind { is_thin: true, ..kind(Some(MINE)) };
        table.add(piece(3), (&memory, thin), None);
        assert_eq!(
            table.apply(piece(3), PieceWord::At(0), AtomicOp::Add { by: 1 }),
            Err(Code::NotSupported),
            "its page could be discarded under it"
        );
        let theirs = Mapping::new(memory.as_fd(), 8192, true).unwrap();
        assert_eq!(table.apply(piece(0), PieceWord::At(8184), AtomicOp::Add { by: 5 }), Ok(0));
        assert_eq!(theirs.word64(8184).load(std::sync::atomic::Ordering::SeqCst), 5);
        assert_eq!(table.apply(piece(0), PieceWord::At(8184), AtomicOp::Swap { new: 6 }), Ok(5));
        for offset in [8185, 8192, u64::MAX] {
            assert_eq!(
                table.apply(piece(0), PieceWord::At(offset), AtomicOp::Add { by: 1 }),
                Err(Code::Range),
                "{offset}"
            );
        }
        assert_eq!(table.apply(piece(1), PieceWord::At(0), AtomicOp::Add { by: 1 }), Err(Code::Io));
        let end = |index, op| table.apply(piece(index), PieceWord::End, op);
        assert_eq!(end(0, AtomicOp::Load), Err(Code::NotSupported), "the head is beside another piece");
        assert_eq!((end(2, AtomicOp::Max { least: 9 }), end(2, AtomicOp::Load)), (Ok(0), Ok(9)));
        assert_eq!(table.apply(piece(2), PieceWord::At(0), AtomicOp::Load), Ok(0), "it is not in the piece");
    }
}
