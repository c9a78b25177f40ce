//! Sessions: one for each attached process, with its slots, and what the shard must do when the process sends its next
//! request or ends.

use std::sync::Arc;

use forebay_ring::ServedRing;
use forebay_types::limits::RING_SLOTS;
use forebay_types::{Ino, Kind, Layout, NodeId, Reply};

use super::attached_ring::AttachedRing;
use super::call::Call;
use super::channel::Channel;
use super::wide::Listing;

/// An attached process, of this node or of another.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) channel: Channel,
    pub(super) slots: Box<[Slot; RING_SLOTS]>,
    /// The shard has a record of the session, for its kept replies.
    pub(super) noted: bool,
    /// Other nodes that keep replies to changes for it.
    pub(super) asked_nodes: Vec<NodeId>,
    /// A bit for each slot with backing files that the client will unlink.
    owing: u64,
    /// Those of them that have sent nothing since the last check.
    at_rest: u64,
}

/// The daemon's state of a slot. Nothing of it comes from the client's memory.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The file that the last request created. The client may be about to create its backing file.
    pub(super) pending_create: Option<Ino>,
    /// Inodes that the last request left without links. The client unlinks their backing files at once, or while the
    /// daemon serves the slot's next request.
    orphans: Vec<(Ino, Layout)>,
    /// Those of the request before.
    late_orphans: Vec<(Ino, Layout)>,
    /// Sequence of the last request that was served.
    served: u64,
    /// Files whose layout the last request changed, with the old layout. The client is unlinking the old backing files.
    pub(super) relaid: Vec<(Ino, Layout)>,
    /// The inode number that the slot's next `Create` may use. The client may have created the backing file.
    pub(super) reserved: Option<Ino>,
    /// Sequence and reply of the last change, which the next commit keeps.
    pub(super) last_change: (u64, Vec<u8>),
    /// True while the shard lacks `last_change`.
    pub(super) unkept: bool,
    /// Sequence of the request that was forwarded and is not answered.
    pub(super) forwarded: Option<u64>,
    /// A forwarded call of a process of this node, until it is answered: it may be redirected.
    pub(super) sent: Option<Call>,
    /// Sequence of a request that was redirected to parts of wide directories, and how often.
    pub(super) asked_anew: (u64, u8),
    /// The listing of a wide directory in progress.
    pub(super) listing: Option<Box<Listing>>,
}

impl Session {
    /// A process of this node.
    pub(super) fn local(id: u64, ring: ServedRing) -> Session {
        Session::new(id, Channel::Ring(Arc::new(AttachedRing::new(ring))))
    }

    pub(super) fn new(id: u64, channel: Channel) -> Session {
        let slots = Box::new(std::array::from_fn(|_| Slot::default()));
        Session { id, channel, slots, noted: false, asked_nodes: Vec::new(), owing: 0, at_rest: 0 }
    }

    /// The slot's last request left these inodes without links, and the client will unlink their backing files.
    pub(super) fn owes(&mut self, slot: usize, orphans: impl IntoIterator<Item = (Ino, Layout)>) {
        let kept = &mut self.slots[slot].orphans;
        kept.extend(orphans);
        if !kept.is_empty() {
            self.owing |= 1 << slot;
            self.at_rest &= !(1 << slot);
        }
    }

    /// A slot carries its next request, of this sequence. The backing files of the orphans of the request before the
    /// last are gone: `settled` gets these inodes. A request that is served again settles nothing.
    #[inline]
    pub(super) fn moves_on(&mut self, slot: usize, seq: u64, settled: &mut Vec<Ino>) {
        let (bit, state) = (1 << slot, &mut self.slots[slot]);
        if std::mem::replace(&mut state.served, seq) == seq || self.owing & bit == 0 {
            return;
        }
        settled.extend(state.late_orphans.drain(..).map(|(ino, _)| ino));
        std::mem::swap(&mut state.orphans, &mut state.late_orphans);
        self.at_rest &= !bit;
        if state.late_orphans.is_empty() {
            self.owing &= !bit;
        }
    }

    /// Takes the orphans of all slots, whose backing files the daemon now unlinks.
    pub(super) fn take_orphans(&mut self, into: &mut Vec<(Ino, Layout)>) {
        self.take_orphans_of(self.owing, into);
    }

    /// Takes the orphans of slots that have sent nothing since the last call of this function.
    pub(super) fn take_resting_orphans(&mut self, into: &mut Vec<(Ino, Layout)>) {
        self.take_orphans_of(self.owing & self.at_rest, into);
        self.at_rest = self.owing;
    }

    fn take_orphans_of(&mut self, slots: u64, into: &mut Vec<(Ino, Layout)>) {
        let mut left = slots;
        while left != 0 {
            let slot = &mut self.slots[left.trailing_zeros() as usize];
            into.append(&mut slot.late_orphans);
            into.append(&mut slot.orphans);
            left &= left - 1;
        }
        self.owing &= !slots;
    }

    /// Has the shard thread take the slot's next request, whatever it is for, while its client has something to finish.
    #[inline]
    pub(super) fn note_obligation(&self, slot: usize) {
        if let Channel::Ring(ring) = &self.channel {
            let Slot { pending_create, relaid, .. } = &self.slots[slot];
            ring.set_obliged(
                slot,
                pending_create.is_some() || !relaid.is_empty() || self.owing >> slot & 1 != 0,
            );
        }
    }

    /// True when a request may be waiting in its ring.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.channel.ring().is_some_and(|ring| ring.has_pending())
    }

    /// True for a process of this node.
    pub(super) fn is_here(&self) -> bool {
        self.channel.ring().is_some()
    }

    /// False for a request that a process of another node has given up.
    pub(super) fn is_waiting(&self, slot: usize, seq: u64) -> bool {
        match &self.channel {
            Channel::Remote(slots) => slots.is_waiting(slot, seq),
            Channel::Ring(_) => true,
        }
    }

    /// The node keeps state for this process, and will be notified when the process ends.
    pub(super) fn note_asked(&mut self, node: NodeId) {
        if !self.asked_nodes.contains(&node) {
            self.asked_nodes.push(node);
        }
    }

    /// Keeps a call until it is answered, because it may name a wide directory.
    pub(super) fn remember_sent(&mut self, call: &Call) {
        self.slots[call.client.slot].sent = Some(call.clone());
    }

    /// Answers a request, unless its process has given it up.
    pub(super) fn answer_if_waiting(&self, slot: usize, seq: u64, reply: &[u8]) {
        if self.is_waiting(slot, seq) {
            self.answer(slot, reply);
        }
    }

    /// Answers a request.
    #[inline]
    pub(super) fn answer(&self, slot: usize, reply: &[u8]) {
        self.note_obligation(slot);
        let (last, kept) = &self.slots[slot].last_change;
        self.channel.answer(slot, reply, if kept.is_empty() { 0 } else { *last });
    }
}

/// The file that a reply says was created, and the number that it reserves.
pub(super) fn created(reply: &Reply<'_>) -> Option<(Ino, Option<Ino>)> {
    match *reply {
        Reply::Created { entry, created: true, next } => Some((entry.attr.ino, next)),
        _ => None,
    }
}

/// The file whose layout a reply says was changed, with its old layout. A directory has no backing files.
pub(super) fn relaid(reply: &Reply<'_>) -> Option<(Ino, Layout)> {
    match *reply {
        Reply::Relaid { ino, layout } => Some((ino, layout)),
        _ => None,
    }
}

/// The number reserved for a slot after a reply, where `before` was reserved, and a number that was given up unused: a
/// backing file may exist under it.
pub(super) fn reserve_behind(before: Option<Ino>, reply: &Reply<'_>) -> (Option<Ino>, Option<Ino>) {
    if let Reply::Number(next) = *reply {
        return (Some(next), before);
    }
    match created(reply) {
        Some((made, next)) if before == Some(made) => (next, None),
        Some((_, Some(next))) => (Some(next), before),
        Some((_, None)) | None => (before, None),
    }
}

/// Encodes what the shard keeps of a slot: its reserved number, and the reply to its last change.
pub(super) fn encode_kept(reserved: Option<Ino>, reply: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&reserved.map_or(0, |ino| ino.0).to_le_bytes());
    out.extend_from_slice(reply);
}

/// Decodes what [`encode_kept`] wrote.
pub(super) fn decode_kept(bytes: &[u8]) -> (Option<Ino>, &[u8]) {
    match bytes.split_first_chunk() {
        Some((number, reply)) => (Some(Ino(u64::from_le_bytes(*number))).filter(|ino| *ino != Ino(0)), reply),
        None => (None, bytes),
    }
}

impl Slot {
    /// Restores the obligations that a kept reply leaves. Returns the inode that it left without links.
    pub(super) fn restore(&mut self, reply: &Reply<'_>) -> Option<(Ino, Layout)> {
        self.pending_create = created(reply).map(|(ino, _)| ino);
        match *reply {
            Reply::Removed { ino, last: true, kind, layout } if kind != Kind::Directory => {
                Some((ino, layout))
            }
            _ => {
                self.relaid.extend(relaid(reply));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_round_trips() {
        let mut bytes = Vec::new();
        for reserved in [None, Some(Ino(1 << 48 | 7))] {
            for reply in [b"".as_slice(), b"a reply"] {
                encode_kept(reserved, reply, &mut bytes);
                assert_eq!(decode_kept(&bytes), (reserved, reply));
            }
        }
        assert_eq!(decode_kept(b""), (None, b"".as_slice()));
    }

    #[test]
    fn reserve_moves_on_when_it_is_used_and_is_given_up_when_another_takes_its_place() {
        let reply = |created, next| {
            let layout = Layout::single(forebay_types::NodeId(1), 0);
            let time = forebay_types::Timestamp::default();
            let attr = forebay_types::Attr {
                ino: Ino(5),
                size: 0,
                rdev: 0,
                parent: Ino(0),
                mode: 0o100_644,
                uid: 0,
                gid: 0,
                nlink: 1,
                flags: 0,
                home: forebay_types::NodeId(1),
                width_log2: 0,
                atime: time,
                mtime: time,
                ctime: time,
                btime: time,
            };
            let entry = forebay_types::Entry { attr, layout };
            Reply::Created { entry, created, next }
        };
        let (five, six, nine) = (Some(Ino(5)), Some(Ino(6)), Some(Ino(9)));
        assert_eq!(reserve_behind(five, &reply(true, six)), (six, None), "used");
        assert_eq!(reserve_behind(five, &reply(true, None)), (None, None), "used, and none is wanted");
        assert_eq!(reserve_behind(nine, &reply(true, six)), (six, nine), "another number was");
        assert_eq!(reserve_behind(nine, &reply(true, None)), (nine, None));
        assert_eq!(reserve_behind(nine, &reply(false, None)), (nine, None), "the file was there");
        assert_eq!(reserve_behind(None, &Reply::Done), (None, None));
        assert_eq!(reserve_behind(nine, &Reply::Number(Ino(6))), (six, nine), "asked for");
    }

    #[test]
    fn orphans_are_settled_a_request_late_and_not_by_a_request_that_is_served_again() {
        let layout = Layout::single(NodeId(1), 0);
        let mut session = Session::local(1, ServedRing::create().unwrap().1);
        let mut settled = Vec::new();
        session.owes(3, [(Ino(7), layout)]);
        session.moves_on(3, 2, &mut settled);
        session.moves_on(3, 2, &mut settled);
        assert_eq!(settled, [], "the client unlinks it now");
        session.owes(3, [(Ino(8), layout)]);
        session.moves_on(4, 9, &mut settled);
        session.moves_on(3, 3, &mut settled);
        assert_eq!(settled, [Ino(7)]);
        let mut left = Vec::new();
        session.take_resting_orphans(&mut left);
        assert_eq!(left, [], "it has just moved on");
        session.take_resting_orphans(&mut left);
        assert_eq!(left, [(Ino(8), layout)]);
        session.take_orphans(&mut left);
        session.moves_on(3, 4, &mut settled);
        assert_eq!((left.len(), settled), (1, vec![Ino(7)]), "the daemon has it now");
    }
}
