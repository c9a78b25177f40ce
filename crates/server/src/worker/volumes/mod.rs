//! The pieces of volumes on this node (docs/decisions/0048): memory that the supervisor keeps over a worker, counted in
//! the capacity of its target.
//!
//! A target in memory is a tmpfs of the pool. A piece is not in it, since a file there could be truncated under those who
//! map it. So the tmpfs is first made smaller by the bytes of the piece, and grows again only after they are freed: files
//! and volumes together never have more than the capacity, and neither meets the OOM killer.
//!
//! A thin piece reserves nothing. It is a file of the tmpfs without a name, so that the kernel counts what it has, and
//! refuses a write for which there is no space. No process maps it.
//!
//! The shard thread has the table. Reserving and freeing memory takes long, and a helper thread does it: `MakePiece`
//! waits meanwhile. `core/volumes.rs` connects the two. A piece that no record names is dropped.

mod helper;
mod piece;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_data::{Media, NodeTargets};
use forebay_meta::Client;
use forebay_types::limits::{VOLUME_GRAIN_BYTES, VOLUME_SPACE_LEFT_BYTES};
use forebay_types::{Code, Error, Ino, PieceId, Result, Rights, SegmentId};

use super::call::Call;
use crate::identity::{Backing, PoolIdentity};
use crate::life::{LifeSeen, LIFE_TAG};
use crate::store::FdStore;
use crate::worker::piece_table::{PieceKind, PieceTable};
pub(super) use helper::Done;
use helper::Work;
use piece::Piece;

/// A piece that a process opens.
#[derive(Debug)]
pub(super) struct Opened {
    /// The piece.
    pub(super) piece: OwnedFd,
    /// Its bytes.
    pub(super) bytes: u64,
    /// The volume's head, for its first piece.
    pub(super) head: Option<OwnedFd>,
    /// The page with the word that says that the pool lives, read-only.
    pub(super) life: OwnedFd,
}

type Answer<T> = std::result::Result<T, Code>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    /// None where no supervisor keeps descriptors.
    parts: Option<Parts>,
    pieces: BTreeMap<PieceId, Piece>,
    /// The same, for the threads that serve other nodes.
    table: PieceTable,
    /// Pieces of segments that are gone, which processes still use, of this node's volumes too.
    gone: BTreeSet<PieceId>,
    /// Bytes of each target that are being freed.
    freeing: Vec<u64>,
    /// The number of its pieces that are being freed, thin ones too.
    frees: Vec<usize>,
    /// Calls that wait for the helper, or for space that it frees.
    waiting: Vec<(PieceId, bool, Call)>,
    answers: Vec<(Client, Answer<u64>)>,
    /// Calls that are taken into the pipeline again.
    pub(super) released: VecDeque<Call>,
    /// Sessions that are making volumes recorded here.
    pub(super) makers: HashSet<u64>,
    /// A record was removed: pieces without one are to be dropped.
    pub(super) is_to_settle: bool,
}

#[derive(Debug)]
struct Parts {
    store: FdStore,
    life: OwnedFd,
    life_seen: LifeSeen,
    targets: Arc<NodeTargets>,
    /// Of each target: its capacity, if it is a tmpfs of the pool.
    capacities: Vec<Option<u64>>,
    to_helper: Sender<Work>,
}

impl Parts {
    /// The number of a target in layouts.
    fn number(&self, target: u16) -> u32 {
        self.targets.first().target() & !0xffff | u32::from(target)
    }
}

impl Volumes {
    /// The pieces that an earlier worker left, taken out of `left`. `tell` reports to the shard thread what the helper
    /// thread has done; false when the shard thread has ended.
    pub(super) fn restored(
        identity: &PoolIdentity,
        targets: &Arc<NodeTargets>,
        store: FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
        table: PieceTable,
        tell: impl Fn(Done) -> bool + Send + 'static,
    ) -> Result<Volumes> {
        let life = left.extract_if(.., |(tag, _)| tag == LIFE_TAG).find_map(|(_, mut fds)| fds.pop());
        let Some(life) = life else { return Ok(Volumes { table, ..Volumes::default() }) };
        let of = |backing, bytes| match backing {
            Backing::Tmpfs | Backing::Detached => Some(bytes),
            Backing::Directory => None,
        };
        let mut capacities = vec![of(identity.backing, identity.capacity_bytes)];
        capacities.extend(identity.more.iter().map(|target| of(target.backing, target.capacity_bytes)));
        if identity.shard_only {
            capacities[0] = None;
        }
        let mut pieces = BTreeMap::new();
        for (tag, fds) in std::mem::take(left) {
            match Piece::restored(&tag, fds) {
                Ok((id, piece)) => {
                    table.add(id, (&piece.memory, piece.kind), piece.head());
                    pieces.insert(id, piece);
                }
                Err(fds) => left.push((tag, fds)),
            }
        }
        let (freeing, frees) = (vec![0; capacities.len()], vec![0; capacities.len()]);
        let to_helper = helper::start(tell)?;
        let life_seen = LifeSeen::new(&life)?;
        let parts = Parts { store, life, life_seen, targets: Arc::clone(targets), capacities, to_helper };
        let volumes = Volumes { parts: Some(parts), pieces, table, freeing, frees, ..Volumes::default() };
        for target in 0..volumes.freeing.len() as u16 {
            // A worker may have died between two steps; a pool may have lost its pieces with its supervisor.
            if volumes.held(target) == 0 && !volumes.is_shrunk(target) {
                continue;
            }
            volumes.fit(target, 0).map_err(|code| {
                let what = "cannot count volumes in the capacity of the pool";
                Error::new(code, what).why("its tmpfs cannot be given its size")
            })?;
        }
        Ok(volumes)
    }

    /// Bytes of a target that pieces have, those that are being freed too.
    fn held(&self, target: u16) -> u64 {
        let pieces = self.pieces.values().filter(|piece| piece.kind.target == target);
        pieces.map(Piece::held_bytes).sum::<u64>() + self.freeing.get(usize::from(target)).unwrap_or(&0)
    }

    /// True if the tmpfs of a target, without volumes, is smaller than its capacity.
    fn is_shrunk(&self, target: u16) -> bool {
        let Some(parts) = &self.parts else { return false };
        let Some(capacity) = parts.capacities[usize::from(target)] else { return false };
        let space = parts.targets.get(parts.number(target)).and_then(Media::space);
        space.is_ok_and(|space| space.total_bytes < capacity)
    }

    /// Targets whose files and volumes together have more or less than the capacity, in words. Where there are no volumes
    /// and never were, the size of the tmpfs is not this one's to judge.
    pub(super) fn problems_of_capacity(&self) -> Vec<String> {
        let Some(parts) = &self.parts else { return Vec::new() };
        let problem = |target: u16| {
            let (held, capacity) = (self.held(target), parts.capacities[usize::from(target)]?);
            let space = parts.targets.get(parts.number(target)).ok()?.space_for_files().ok()?;
            let expected = capacity.checked_sub(held);
            if held == 0
                || expected.is_some_and(|expected| expected.abs_diff(space.total_bytes) < VOLUME_GRAIN_BYTES)
            {
                return None;
            }
            Some(format!(
                "target {target}: its volumes have {held} bytes and its files may have {}, and its capacity is {capacity} \
                 bytes",
                space.total_bytes
            ))
        };
        (0..self.freeing.len() as u16).filter_map(problem).collect()
    }

    /// Gives the tmpfs of a target the bytes that pieces leave, if they have `more` than now.
    fn fit(&self, target: u16, more: u64) -> Answer<()> {
        let parts = self.parts.as_ref().ok_or(Code::NotSupported)?;
        let capacity = parts.capacities.get(usize::from(target)).copied().flatten();
        let capacity = capacity.ok_or(Code::NotSupported)?;
        let its = parts.targets.get(parts.number(target))?;
        let held = self.held(target).checked_add(more).ok_or(Code::NoSpace)?;
        let left = capacity.checked_sub(held).ok_or(Code::NoSpace)?;
        if more > 0 && its.space()?.free_bytes < more.saturating_add(VOLUME_SPACE_LEFT_BYTES) {
            return Err(Code::NoSpace);
        }
        its.set_volume_bytes(left, held)
    }

    /// The pieces of volumes of this node, for the check: number and bytes; none that is to be dropped.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (PieceId, u64)> + '_ {
        let is_here = |id: &PieceId, piece: &Piece| piece.kind.rights.is_none() && !self.gone.contains(id);
        let here = self.pieces.iter().filter(move |(id, piece)| is_here(id, piece));
        here.map(|(id, piece)| (*id, piece.kind.bytes))
    }

    /// The number of all pieces on this node, and the bytes that they take.
    pub(super) fn taken(&self) -> (usize, u64) {
        (self.pieces.len(), self.pieces.values().map(Piece::taken_bytes).sum())
    }

    /// True if a piece is here and its memory is reserved.
    pub(super) fn is_whole(&self, id: PieceId, bytes: u64) -> bool {
        self.pieces.get(&id).is_some_and(|piece| piece.kind.bytes == bytes && piece.reserved == bytes)
    }

    /// True if a piece is here.
    pub(super) fn has(&self, id: PieceId) -> bool {
        self.pieces.contains_key(&id)
    }

    /// The answer to `MakePiece` if its call was released; none for another call.
    pub(super) fn answer_for(&mut self, client: &Client) -> Option<Answer<u64>> {
        let i = self.answers.iter().position(|(other, _)| other == client)?;
        Some(self.answers.swap_remove(i).1)
    }

    /// Makes a piece unless it is there, and reserves it up to `until`. None: the call waits.
    pub(super) fn make(
        &mut self,
        call: &Call,
        id: PieceId,
        kind: PieceKind,
        until: u64,
    ) -> Option<Answer<u64>> {
        match self.try_make(call, id, kind, until) {
            // What is being freed may be enough.
            Err(Code::NoSpace) if self.frees.get(usize::from(kind.target)).is_some_and(|n| *n > 0) => {
                self.wait(id, false, call);
                None
            }
            Ok(None) => None,
            Ok(Some(reserved)) => Some(Ok(reserved)),
            Err(code) => Some(Err(code)),
        }
    }

    fn wait(&mut self, id: PieceId, is_at_work: bool, call: &Call) {
        // A slot has one call: a later one takes its place.
        let Client { session, slot, .. } = call.client;
        self.waiting.retain(|(_, _, call)| (call.client.session, call.client.slot) != (session, slot));
        self.waiting.push((id, is_at_work, call.clone()));
    }

    fn try_make(&mut self, call: &Call, id: PieceId, kind: PieceKind, until: u64) -> Answer<Option<u64>> {
        let PieceKind { target, bytes, .. } = kind;
        if !self.pieces.contains_key(&id) {
            self.fit(target, Piece::held(id, &kind).ok_or(Code::NoSpace)?)?;
            let parts = self.parts.as_ref().ok_or(Code::NotSupported)?;
            let its = parts.targets.get(parts.number(target))?;
            let made = Piece::make(id, kind, its.directory()).and_then(|piece| {
                let tag = Piece::tag(id, &kind);
                parts.store.put(&tag, &piece.kept()).map_err(|e| e.code)?;
                // After it was stored: either the supervisor sees the piece when it begins to stop, or this sees that.
                if parts.life_seen.is_closed_to_volumes() {
                    let _ = parts.store.remove(&tag);
                    return Err(Code::PoolGone);
                }
                Ok(piece)
            });
            match made {
                Ok(piece) => {
                    self.table.add(id, (&piece.memory, kind), piece.head());
                    self.pieces.insert(id, piece);
                }
                Err(code) => {
                    self.fit(target, 0)?;
                    return Err(code);
                }
            }
        }
        let piece = &self.pieces[&id];
        if piece.kind != kind || until > bytes {
            return Err(Code::Stale);
        }
        if piece.reserved >= until {
            return Ok(Some(piece.reserved));
        }
        let work = Work::Reserve { id, memory: Arc::clone(&piece.memory), from: piece.reserved, until };
        self.give(work);
        self.wait(id, true, call);
        Ok(None)
    }

    fn give(&self, work: Work) {
        if let Some(parts) = &self.parts {
            // The helper ends with this thread.
            let _ = parts.to_helper.send(work);
        }
    }

    /// Takes what the helper has done.
    pub(super) fn done(&mut self, done: Done) {
        match done {
            Done::Reserved(id, result) => {
                if let (Some(piece), Ok(until)) = (self.pieces.get_mut(&id), result) {
                    piece.reserved = piece.reserved.max(until);
                }
                for (_, _, call) in self.waiting.extract_if(.., |(its, at_work, _)| *its == id && *at_work) {
                    self.answers.push((call.client, result));
                    self.released.push_back(call);
                }
            }
            Done::Freed(target, bytes) => {
                if let Some(freeing) = self.freeing.get_mut(usize::from(target)) {
                    *freeing -= bytes.min(*freeing);
                }
                if let Some(frees) = self.frees.get_mut(usize::from(target)) {
                    *frees = frees.saturating_sub(1);
                }
                if let Err(code) = self.fit(target, 0) {
                    tracing::error!("the memory of a volume was freed, and files cannot have it: {code}");
                }
                let waits = |(_, at_work, _): &mut (PieceId, bool, Call)| !*at_work;
                self.released.extend(self.waiting.extract_if(.., waits).map(|(_, _, call)| call));
            }
        }
    }

    /// Drops the pieces of volumes of this node that are not among `named`: those in use when they are used no longer. No
    /// process opens them from now on.
    pub(super) fn keep_only(&mut self, named: &BTreeSet<PieceId>) {
        let here = self.pieces.iter().filter(|(_, piece)| piece.kind.rights.is_none());
        let gone: Vec<PieceId> = here.map(|(id, _)| *id).filter(|id| !named.contains(id)).collect();
        self.drop_when_unused(gone);
    }

    /// Drops pieces of segments that are gone which were in use until now.
    pub(super) fn drop_unused(&mut self) {
        let is_unused = |id: &PieceId| self.pieces.get(id).is_none_or(Piece::is_unused);
        let unused: Vec<PieceId> = self.gone.iter().copied().filter(is_unused).collect();
        self.drop_pieces(unused);
    }

    /// To free memory that is mapped somewhere would have those who write there take memory that is counted nowhere: a
    /// process, or the network for a process of another node.
    fn drop_when_unused(&mut self, gone: Vec<PieceId>) {
        gone.iter().for_each(|id| self.hide(*id));
        self.gone.extend(gone);
        self.drop_unused();
    }

    /// Who may open the pieces of each volume of this node.
    pub(super) fn publish(&self, rights: impl Iterator<Item = (Ino, Rights)>) {
        self.table.publish(rights);
    }

    /// The segments of volumes of other homes that have pieces here.
    pub(super) fn away(&self) -> Vec<SegmentId> {
        let away = self.pieces.iter().filter(|(_, piece)| piece.kind.rights.is_some());
        let mut all: Vec<SegmentId> = away.map(|(id, _)| id.of_segment()).collect();
        all.dedup();
        all
    }

    /// Drops the pieces of segments that are gone, as their homes say: those in use when they are used no longer. No
    /// process opens them from now on.
    pub(super) fn drop_away(&mut self, gone: &[SegmentId]) {
        let away = self.pieces.iter().filter(|(_, piece)| piece.kind.rights.is_some());
        let theirs: Vec<PieceId> =
            away.map(|(id, _)| *id).filter(|id| gone.contains(&id.of_segment())).collect();
        self.drop_when_unused(theirs);
    }

    /// No process of another node opens or accesses the piece from now on.
    fn hide(&self, id: PieceId) {
        let mapping = self.table.remove(id);
        mapping.into_iter().for_each(|mapping| self.give(Work::Unmap(mapping)));
    }

    fn drop_pieces(&mut self, gone: Vec<PieceId>) {
        for id in gone {
            self.hide(id);
            self.gone.remove(&id);
            let Some(piece) = self.pieces.remove(&id) else { continue };
            let (kind, bytes) = (piece.kind, piece.held_bytes());
            let target = kind.target;
            let memory = piece.memory;
            if let Some(freeing) = self.freeing.get_mut(usize::from(target)) {
                *freeing += bytes;
            }
            if let Some(frees) = self.frees.get_mut(usize::from(target)) {
                *frees += 1;
            }
            self.give(Work::Free { target, bytes, memory });
            if let Some(Err(e)) = self.parts.as_ref().map(|parts| parts.store.remove(&Piece::tag(id, &kind)))
            {
                tracing::error!("{e}");
            }
        }
    }

    /// True if no process has a piece of a volume open or mapped.
    pub(super) fn is_unused(&self, volume: Ino) -> bool {
        self.pieces.iter().filter(|(id, _)| id.volume == volume).all(|(_, piece)| piece.is_unused())
    }

    /// Who may use a piece of a volume of another home. [`Code::Io`] if it is lost, or its segment is gone.
    pub(super) fn rights(&self, id: PieceId) -> Answer<Rights> {
        let piece = self.pieces.get(&id).filter(|_| !self.gone.contains(&id));
        piece.and_then(|piece| piece.kind.rights).ok_or(Code::Io)
    }

    /// Opens a piece for a process. [`Code::Io`] if its memory is lost.
    pub(super) fn open(&self, id: PieceId, writes: bool) -> Answer<Opened> {
        let parts = self.parts.as_ref().ok_or(Code::NotSupported)?;
        let piece = self.pieces.get(&id).ok_or(Code::Io)?;
        let life = rustix::fs::open(
            forebay_sys::descriptor::path(&parts.life),
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        let life = life.map_err(piece::code)?;
        let (head, bytes) = (piece.open_head(writes)?, piece.kind.bytes);
        Ok(Opened { piece: piece.open(writes)?, bytes, head, life })
    }

    /// A process has ended: its calls wait no longer.
    pub(super) fn end(&mut self, session: u64) {
        self.waiting.retain(|(_, _, call)| call.client.session != session);
        self.answers.retain(|(client, _)| client.session != session);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use forebay_types::NodeId;
    use std::os::fd::AsFd;

    /// A piece of a volume of this node, and a descriptor by which a process uses it.
    pub(in crate::worker) fn used_piece() -> (Volumes, PieceId, OwnedFd) {
        let id = PieceId { volume: Ino::new(NodeId(3), 77), segment: 0, index: 0 };
        let kind = PieceKind { target: 0, bytes: 1 << 20, rights: None, is_thin: false };
        let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
        let piece = Piece::make(id, kind, directory.as_fd()).unwrap();
        let used = piece.open(true).unwrap();
        let mut volumes = Volumes::default();
        volumes.table.add(id, (&piece.memory, kind), None);
        volumes.pieces.insert(id, piece);
        (volumes, id, used)
    }

    #[test]
    fn piece_of_a_segment_that_is_gone_is_opened_no_more_and_dropped_when_it_is_used_no_longer() {
        let id = PieceId { volume: Ino::new(NodeId(3), 77), segment: 1, index: 0 };
        let rights = Rights { uid: 7, gid: 7, mode: 0o600 };
        let kind = PieceKind { target: 0, bytes: 1 << 20, rights: Some(rights), is_thin: false };
        let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
        let piece = Piece::make(id, kind, directory.as_fd()).unwrap();
        let used = piece.open(true).unwrap();
        let mut volumes = Volumes::default();
        volumes.pieces.insert(id, piece);
        volumes.drop_away(&[SegmentId { number: 0, ..id.of_segment() }]);
        assert_eq!(volumes.rights(id), Ok(rights));
        volumes.drop_away(&[id.of_segment()]);
        assert_eq!((volumes.rights(id), volumes.has(id)), (Err(Code::Io), true));
        drop(used);
        volumes.drop_away(&[id.of_segment()]);
        assert!(!volumes.has(id) && volumes.gone.is_empty());
    }

    #[test]
    fn memory_of_a_piece_that_no_record_names_is_not_freed_while_it_is_written() {
        let (mut volumes, id, used) = used_piece();
        volumes.keep_only(&BTreeSet::from([id]));
        assert!(volumes.gone.is_empty() && volumes.table.bytes(id).is_ok());
        volumes.keep_only(&BTreeSet::new());
        assert!(volumes.has(id) && volumes.table.bytes(id).is_err(), "no process opens it from now on");
        assert_eq!((volumes.pieces().count(), volumes.held(0)), (0, (1 << 20) + VOLUME_GRAIN_BYTES));
        volumes.drop_unused();
        assert!(volumes.has(id));
        drop(used);
        volumes.drop_unused();
        assert!(!volumes.has(id) && volumes.gone.is_empty());
    }
}
