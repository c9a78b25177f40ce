//! Connects the pieces of volumes (`volumes`) with their records in the shard.

use std::collections::BTreeSet;

use forebay_fabric::Ticket;
use forebay_types::{
    node_of, Code, Ino, NodeId, PieceId, Refusal, Reply, Request, Result, Rights, Segment, SegmentId, Volume,
    REPLY_HEADER_BYTES,
};

use super::state::ShardThread;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::network::{Command, BEING_MADE, COMPLETE, GONE};
use crate::worker::piece_table::PieceKind;
use crate::worker::volumes::{Done, Opened};

type Answer<T> = std::result::Result<T, Code>;

impl ShardThread<'_> {
    /// The record of a volume by its number. All records are read: there are few.
    fn volume(&mut self, ino: Ino) -> Result<Option<Volume>> {
        Ok(self.batch()?.volumes()?.into_iter().map(|(_, volume)| volume).find(|volume| volume.ino == ino))
    }

    /// Serves requests for pieces, and refuses changes of volumes that must wait for their pieces or users. True when
    /// the call waits, or was answered.
    pub(in crate::worker) fn serve_for_volumes(&mut self, session: usize, call: &Call) -> Result<bool> {
        let refused = match *call.request() {
            Request::MakePiece { piece, target, bytes, until, .. } => {
                let answer = match self.volumes.answer_for(&call.client) {
                    Some(answer) => Some(answer),
                    None => match self.may_make(call, piece, target, bytes)? {
                        Ok(is_thin) => {
                            let kind = PieceKind { target: target as u16, bytes, rights: None, is_thin };
                            self.volumes.make(call, piece, kind, until)
                        }
                        Err(code) => Some(Err(code)),
                    },
                };
                return self.made_piece(session, call, answer);
            }
            Request::MakePieceAway { piece, target, bytes, until, mode, is_thin, .. } => {
                let answer = match self.volumes.answer_for(&call.client) {
                    Some(answer) => Some(answer),
                    // The home would not be asked for it.
                    None if piece.volume.birth_node() == self.shard.node() => Some(Err(Code::Invalid)),
                    None => {
                        let (uid, gid) = (call.caller().uid, call.caller().gid);
                        let rights = Some(Rights { uid, gid, mode });
                        self.volumes.make(
                            call,
                            piece,
                            PieceKind { target: target as u16, bytes, rights, is_thin },
                            until,
                        )
                    }
                };
                self.list_away_volumes();
                return self.made_piece(session, call, answer);
            }
            Request::CreateVolume { maker, segment, .. } | Request::GrowVolume { maker, segment, .. } => {
                self.check_new(call, maker, &segment).err()
            }
            // Another process makes it by now: what this one began was abandoned, and it cannot know of the pieces.
            Request::CommitVolume { ino, .. } | Request::AbandonVolume { ino, .. }
                if self.has_other_maker(call, ino)? =>
            {
                Some(Code::Stale)
            }
            Request::CommitVolume { ino, .. } => match self.volume(ino)? {
                Some(volume) if !self.is_whole(&volume) => Some(Code::Stale),
                _ => None,
            },
            Request::ShrinkVolume { ino, .. } | Request::DeleteVolume { ino, .. } => {
                (!self.volumes.is_unused(ino)).then_some(Code::Busy)
            }
            Request::PiecesUnused { volume, .. } => {
                let answer = match self.volumes.is_unused(volume) {
                    true => Ok(Reply::Done),
                    false => Err(Refusal::Code(Code::Busy)),
                };
                self.conclude(session, call.clone(), &answer, None);
                return Ok(true);
            }
            Request::ReviewPieces { .. } => {
                if let Some(network) = &self.network {
                    network.commands.give(Command::ReviewVolumes);
                }
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                return Ok(true);
            }
            _ => None,
        };
        let Some(code) = refused else { return Ok(false) };
        self.conclude(session, call.clone(), &Err(Refusal::Code(code)), None);
        Ok(true)
    }

    /// Whether a segment can be begun: what a process makes must go with it, and its nodes must have targets.
    fn check_new(&self, call: &Call, maker: u64, segment: &Segment) -> Answer<()> {
        let exists = |node: NodeId| match &self.network {
            Some(network) => network.has_targets(node),
            None => node == self.shard.node(),
        };
        let exist = segment.targets.as_slice().iter().all(|target| exists(node_of(*target)));
        match (maker == call.client.session, exist) {
            (false, _) => Err(Code::Invalid),
            (true, false) => Err(Code::NoDevice),
            (true, true) => Ok(()),
        }
    }

    /// True if a volume is being made by another process than the caller.
    fn has_other_maker(&mut self, call: &Call, ino: Ino) -> Result<bool> {
        let maker = self.volume(ino)?.map_or(0, |volume| volume.maker);
        Ok(maker != 0 && maker != call.client.session)
    }

    /// Answers a request to make a piece, unless it waits.
    fn made_piece(&mut self, session: usize, call: &Call, answer: Option<Answer<u64>>) -> Result<bool> {
        if let Some(answer) = answer {
            let answer = answer.map(Reply::Count).map_err(Refusal::Code);
            self.conclude(session, call.clone(), &answer, None);
        }
        Ok(true)
    }

    /// Whether the pieces of a volume's last segment on this node are reserved. Its maker knows of those on other nodes.
    fn is_whole(&self, volume: &Volume) -> bool {
        let here = self.shard.node();
        volume.open_pieces().filter(|(_, target, _)| node_of(*target) == here).all(|(id, _, bytes)| {
            // A worker that has only the shard has no pieces.
            self.volumes.is_whole(id, bytes)
        })
    }

    /// Tells the network thread of which segments of other homes' volumes this node has pieces.
    pub(in crate::worker) fn list_away_volumes(&self) {
        if let Some(network) = &self.network {
            network.commands.give(Command::AwayVolumes(self.volumes.away()));
        }
    }

    /// Another node has pieces of these segments, and asks whether they exist.
    pub(in crate::worker) fn are_segments(&mut self, ticket: Ticket, segments: &[SegmentId]) -> Result<()> {
        let all = self.batch()?.volumes()?;
        let state = |id: &SegmentId| {
            let volume = all.iter().map(|(_, volume)| volume).find(|volume| volume.ino == id.volume);
            let found = volume.and_then(|volume| {
                let place = volume.numbers.iter().position(|number| *number == id.number)?;
                Some(place < usize::from(volume.complete))
            });
            match found {
                None => GONE,
                Some(true) => COMPLETE,
                Some(false) => BEING_MADE,
            }
        };
        let states: Vec<u8> = segments.iter().map(state).collect();
        let mut reply = vec![0; states.len() + REPLY_HEADER_BYTES];
        let n = Reply::encode(&Ok(Reply::Bytes(&states)), &mut reply).unwrap_or(0);
        reply.truncate(n);
        if let Some(network) = &self.network {
            network.commands.give(Command::Answer { ticket, reply });
        }
        Ok(())
    }

    /// These segments are gone, as their homes say.
    pub(in crate::worker) fn segments_gone(&mut self, gone: &[SegmentId]) {
        self.volumes.drop_away(gone);
        self.list_away_volumes();
    }

    /// Whether a process may make this piece: it is making the volume, whose record names the piece. True for a thin one.
    fn may_make(&mut self, call: &Call, piece: PieceId, target: u32, bytes: u64) -> Result<Answer<bool>> {
        let Some(volume) = self.volume(piece.volume)? else { return Ok(Err(Code::Stale)) };
        let is_named = volume.open_pieces().any(|named| named == (piece, target, bytes));
        Ok(match volume.maker == call.client.session && is_named {
            true => Ok(volume.is_thin()),
            false => Err(Code::Stale),
        })
    }

    /// A change was journaled.
    #[inline]
    pub(in crate::worker) fn note_for_volumes(&mut self, call: &Call) {
        match *call.request() {
            Request::CreateVolume { maker, .. } | Request::GrowVolume { maker, .. } => {
                self.volumes.makers.insert(maker);
            }
            // Its pieces can be opened for other nodes from now on.
            Request::CommitVolume { .. }
            | Request::AbandonVolume { .. }
            | Request::ShrinkVolume { .. }
            | Request::DeleteVolume { .. } => {
                self.volumes.is_to_settle = true;
            }
            _ => {}
        }
    }

    /// Drops the pieces that no record names any longer, after a change that removed some, and publishes the others.
    #[inline]
    pub(in crate::worker) fn settle_volumes(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.volumes.is_to_settle) {
            return Ok(());
        }
        let all = self.batch()?.volumes()?;
        let named: BTreeSet<PieceId> =
            all.iter().flat_map(|(_, volume)| volume.pieces()).map(|(id, ..)| id).collect();
        self.volumes.keep_only(&named);
        let rights = |volume: &Volume| Rights { uid: volume.uid, gid: volume.gid, mode: volume.mode };
        self.volumes.publish(all.iter().map(|(_, volume)| (volume.ino, rights(volume))));
        Ok(())
    }

    /// A process has ended: what it was making goes.
    pub(in crate::worker) fn end_maker(&mut self, session: u64) -> Result<()> {
        self.volumes.end(session);
        if self.volumes.makers.remove(&session) {
            self.abandon_volumes()?;
        }
        Ok(())
    }

    /// Abandons what processes were making that are gone.
    pub(in crate::worker) fn abandon_volumes(&mut self) -> Result<()> {
        let living: BTreeSet<u64> = self
            .batch()?
            .volumes()?
            .iter()
            .map(|(_, volume)| volume.maker)
            .filter(|maker| *maker != 0)
            .collect();
        let (living, gone): (BTreeSet<u64>, BTreeSet<u64>) =
            living.into_iter().partition(|maker| self.sessions.find(*maker).is_some());
        self.volumes.makers = living.into_iter().collect();
        if !gone.is_empty() {
            if !self
                .remove_in_batch(|batch| batch.abandon_volumes(|maker| gone.contains(&maker)).map(drop))?
            {
                tracing::warn!("no room to remove a volume whose maker ended: the next worker will");
            }
            // The removal is in no journal. A later change of the same name must not be applied again before it.
            self.commit()?;
        }
        self.volumes.is_to_settle = true;
        self.list_away_volumes();
        self.settle_volumes()
    }

    /// The helper thread has done something.
    pub(in crate::worker) fn volumes_done(&mut self, done: Done) {
        self.volumes.done(done);
    }

    /// Takes calls that have waited for it into the batch, until it has `most` calls.
    pub(in crate::worker) fn take_calls_of_volumes(&mut self, most: usize) {
        while self.pipeline.taken.len() < most {
            let Some(call) = self.volumes.released.pop_front() else { break };
            let client = call.client;
            let Some(session) = self.sessions.index_of(client.session) else { continue };
            if self.sessions[session].is_waiting(client.slot, client.seq) {
                self.pipeline.taken.push_back(Taken { session, client, call: Ok(call) });
            }
        }
    }

    /// Opens a piece for a process of this user.
    pub(in crate::worker) fn open_piece(
        &mut self,
        id: PieceId,
        writes: bool,
        (uid, gid): (u32, u32),
    ) -> Result<Answer<Opened>> {
        if id.volume.birth_node() != self.shard.node() {
            let opened = self.volumes.rights(id).and_then(|rights| match rights.allow(uid, gid, writes) {
                true => self.volumes.open(id, writes),
                false => Err(Code::AccessDenied),
            });
            return Ok(opened);
        }
        let Some(volume) = self.volume(id.volume)? else { return Ok(Err(Code::NotFound)) };
        if !volume.usable_pieces().any(|(usable, ..)| usable == id) {
            return Ok(Err(Code::NotFound));
        }
        Ok(match volume.allows(uid, gid, writes) {
            true => self.volumes.open(id, writes),
            false => Err(Code::AccessDenied),
        })
    }

    /// What a check finds about volumes on this node: pieces that are gone or have another size than their record says,
    /// pieces without a record, and a capacity that is not what files and volumes have together.
    pub(in crate::worker) fn problems_of_volumes(&mut self) -> Result<Vec<String>> {
        let here = self.shard.node();
        let mut problems = Vec::new();
        let mut named = BTreeSet::new();
        for (name, volume) in self.batch()?.volumes()? {
            // One that is being made may not be there yet.
            named.extend(volume.open_pieces().map(|(id, ..)| id));
            for (id, _, bytes) in volume.usable_pieces().filter(|(_, target, _)| node_of(*target) == here) {
                named.insert(id);
                if self.volumes.is_whole(id, bytes) {
                    continue;
                }
                let what = match self.volumes.has(id) {
                    true => format!("has not the {bytes} bytes of its record"),
                    false => "is lost, as memory does not outlive the pool's daemon: delete it".to_owned(),
                };
                let name = String::from_utf8_lossy(&name).escape_debug().to_string();
                problems.push(format!("volume \"{name}\": its piece {id} {what}"));
            }
        }
        for (id, bytes) in self.volumes.pieces().filter(|(id, _)| !named.contains(id)) {
            problems
                .push(format!("piece {id} of {bytes} bytes belongs to no volume: the next worker drops it"));
        }
        problems.extend(self.volumes.problems_of_capacity());
        Ok(problems)
    }
}
