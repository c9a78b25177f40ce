//! Recovery after the death of a worker: replays its journal, takes over its clients, and removes what clients that
//! died meanwhile left.
//!
//! | what the next worker finds | what it does |
//! |---|---|
//! | a change in the journal, not in the shard | applies it again; the reply is the same as before |
//! | a record in the journal that cannot be decoded or applied | refuses to start; journal and shard stay as they are |
//! | a change in both (killed between commit and clear) | skips it: the shard keeps the journal's mark |
//! | a waiting request, its reply known | answers it again, after the change's deliveries to other nodes |
//! | a waiting request, its reply unknown | serves it as a new one: nothing of it was done |
//! | a living client whose last reply created or removed a file | expects it to create or unlink the backing file |
//! | the same, with another node's reply in its ring | expects it to create the backing file |
//! | a reserved number of a client that is gone | the sweeper unlinks the backing file that may exist under it |
//! | a file with a new layout whose client is gone | the sweeper unlinks the backing files of the old layout |
//! | an orphan that no living client has to unlink | the sweeper unlinks its backing files |
//! | a session in the shard without a ring | drops it: the process has ended |
//! | a session of another node's process | keeps its last replies until that node reports the process's end |

use std::collections::{BTreeMap, HashSet};

use forebay_meta::{Batch, Client, Effects, Shard, PAYLOAD_BYTES_MAX};
use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Caller, Code, Ino, Reply, Request, Result};

use super::state::ShardThread;
use crate::worker::acks::ReplyBuf;
use crate::worker::backing_files::layout_of_number;
use crate::worker::call::Call;
use crate::worker::channel::{Channel, RemoteSlots};
use crate::worker::journal::{damaged, Journal, MARK_SESSION};
use crate::worker::network::{all_here, Command};
use crate::worker::notifier::{invalidations_of, HeldReply};
use crate::worker::recorder::InFlight;
use crate::worker::session::{created, decode_kept, encode_kept, relaid, reserve_behind, Session};
use crate::worker::session_id::{is_of_daemon, node_of_session};
use crate::worker::shard_queries::{has_inode, reserved_for};
use crate::worker::statistics::Statistics;
use crate::worker::sweeper::Sweep;

/// A slot's last change: sequence, reply, and the number reserved after it.
struct Last {
    seq: u64,
    reply: Vec<u8>,
    reserved: Option<Ino>,
}

/// Stores the last reply of each slot.
fn keep(batch: &mut Batch<'_>, last: &BTreeMap<(u64, usize), Last>) -> Result<()> {
    let mut kept = Vec::new();
    for ((session, slot), last) in last {
        // The session may have started after the last commit.
        batch.add_session(*session)?;
        encode_kept(last.reserved, &last.reply, &mut kept);
        batch.keep_reply(*session, *slot as u8, last.seq, &kept)?;
    }
    Ok(())
}

/// Applies the journal's records behind the last commit, and commits them with the last reply of each slot. The journal
/// is empty then. Reserved numbers that are no longer needed become orphans.
///
/// # Errors
/// [`Code::Corrupt`] for a record that cannot be decoded or that fails: it was acknowledged to a client, so the pool
/// must not run without it. The journal is kept, and the shard ends before that record.
pub(in crate::worker) fn replay(shard: &Shard, journal: &mut Journal) -> Result<()> {
    let mut batch = shard.begin()?;
    batch.open_reserve();
    let mark = batch.kept_reply(MARK_SESSION, 0)?.map_or(0, |(number, _)| number);
    let records = journal.records()?;
    let mut last: BTreeMap<(u64, usize), Last> = BTreeMap::new();
    let (mut payload, mut effects) = (vec![0; PAYLOAD_BYTES_MAX], Effects::new());
    let mut applied = 0;
    for record in records.iter().filter(|record| record.number > mark) {
        let (caller, request) = match Request::decode(&record.message) {
            Ok(decoded) => decoded,
            Err(code) => {
                let why = format!("its request cannot be decoded: {code}");
                return Err(damaged(record.number, record.offset, why));
            }
        };
        if batch.is_spent() {
            keep(&mut batch, &std::mem::take(&mut last))?;
            batch.keep_reply(MARK_SESSION, 0, record.number - 1, &[])?;
            batch.commit()?;
            batch = shard.begin()?;
            batch.open_reserve();
        }
        effects.clear();
        let reply = match batch.apply(caller, &request, record.now, &mut effects, &mut payload) {
            Ok(reply) => reply,
            Err(refusal) => {
                let code = refusal.code();
                let why = format!("{request:?} was acknowledged, and fails when it is applied again: {code}");
                return Err(damaged(record.number, record.offset, why));
            }
        };
        let before = match last.get(&(record.session, record.slot)) {
            Some(last) => last.reserved,
            None => {
                batch.kept_reply(record.session, record.slot as u8)?.and_then(|(_, kept)| decode_kept(kept).0)
            }
        };
        let (reserved, given_up) = match is_of_daemon(record.session) {
            true => (None, None),
            false => reserve_behind(before, &reply),
        };
        if let Some(ino) = given_up.filter(|ino| !has_inode(&mut batch, *ino)) {
            batch.list_orphan(ino, &layout_of_number(ino))?;
        }
        let behind = Last { seq: record.seq, reply: ReplyBuf::encode(&Ok(reply)).bytes, reserved };
        last.insert((record.session, record.slot), behind);
        applied += 1;
    }
    keep(&mut batch, &last)?;
    if applied > 0 {
        batch.keep_reply(MARK_SESSION, 0, journal.last(), &[])?;
        tracing::info!("applied {applied} changes again that the last worker had acknowledged");
    }
    batch.commit()?;
    journal.continue_behind(mark);
    journal.clear();
    Ok(())
}

/// The inodes that a rename has moved, as its names lead to them now. If a later rename moved them again, that rename
/// causes its own invalidations.
fn moved_by(request: &Request<'_>, batch: &mut Batch<'_>) -> Vec<Ino> {
    let Request::Rename { parent, name, new_parent, new_name, .. } = *request else { return Vec::new() };
    let caller = Caller { uid: 0, gid: 0 };
    let mut effects = Effects::new();
    let mut find = |(parent, name)| {
        let request = Request::Lookup { parent, name };
        match batch.apply(caller, &request, crate::worker::now(), &mut effects, &mut []) {
            Ok(Reply::Entry(entry)) => Some(entry.attr.ino),
            _ => None,
        }
    };
    [(parent, name), (new_parent, new_name)].into_iter().filter_map(&mut find).collect()
}

impl ShardThread<'_> {
    /// Takes over from the last worker. Then the shard has every acknowledged change, and every client's ring is
    /// served.
    pub(in crate::worker) fn recover(&mut self, sessions: Vec<Session>) -> Result<()> {
        replay(self.shard, &mut self.journal)?;
        if sessions.is_empty() {
            match self.targets.first().remove_anchors() {
                Ok(0) => {}
                Ok(n) => tracing::info!("removed {n} anchors that killed clients left"),
                Err(code) => tracing::warn!("cannot remove the anchors that killed clients left: {code}"),
            }
        }
        self.resume_steps()?;
        let mut scratch = vec![0; MESSAGE_BYTES_MAX];
        let mut owed: HashSet<Ino> = HashSet::new();
        // All clients switch to the new board before any gets an answer: what one client learns from its answer, the
        // other clients then see on the board.
        for session in &sessions {
            if let Some(ring) = session.channel.ring() {
                ring.set_epoch(self.epoch);
            }
        }
        if let Some(mount) = &self.mount {
            // Which invalidations the last worker's changes still need is unknown.
            mount.move_epoch();
        }
        let noted: HashSet<u64> = self.batch()?.sessions()?.into_iter().collect();
        for mut session in sessions {
            session.noted = noted.contains(&session.id);
            let mut held_slots = 0u64;
            for slot in 0..RING_SLOTS {
                let is_held = self.resume_slot(&mut session, slot, &mut scratch, &mut owed)?;
                held_slots |= u64::from(is_held) << slot;
            }
            if let Some(ring) = session.channel.ring() {
                ring.repend(held_slots);
            }
            (0..RING_SLOTS).for_each(|slot| session.note_obligation(slot));
            self.give_ring_to_network(&session);
            self.sessions.push(session);
        }
        if let Some(network) = &self.network {
            network.commands.give(Command::EndOthers);
        }
        self.restore_remote(&noted)?;
        let known: HashSet<u64> = self.sessions.iter().map(|s| s.id).collect();
        self.recorder.keep_sessions(&known);
        self.abandon_volumes()?;
        self.show_root()?;
        self.forget_ended()?;
        self.sweep_left(&owed)?;
        self.count_clients();
        Ok(())
    }

    /// Restores a slot from its kept reply, and answers the slot's request if it is the one that the reply belongs to.
    /// True when that answer must wait. Inodes whose backing files the client unlinks go to `owed`.
    fn resume_slot(
        &mut self,
        session: &mut Session,
        slot: usize,
        scratch: &mut [u8],
        owed: &mut HashSet<Ino>,
    ) -> Result<bool> {
        let created_elsewhere = self.created_elsewhere(session, slot, scratch);
        created_elsewhere.into_iter().for_each(|ino| self.backing.create_pending(ino));
        session.slots[slot].pending_create = created_elsewhere;
        let change =
            self.batch()?.kept_reply(session.id, slot as u8)?.map(|(seq, kept)| (seq, kept.to_vec()));
        let Some((seq, kept)) = change else { return Ok(false) };
        let (reserved, reply) = decode_kept(&kept);
        let Ok(kept) = Reply::decode(reply) else { return Ok(false) };
        let state = &mut session.slots[slot];
        // Clients do not unlink backing files on other nodes.
        let orphan = state.restore(&kept).filter(|(_, layout)| all_here(self.network.as_ref(), layout));
        // Never the number of an inode, whatever was kept.
        state.reserved = match reserved {
            Some(ino) if has_inode(self.batch()?, ino) => None,
            reserved => reserved,
        };
        match created_elsewhere {
            // A file that the slot created on this node is older.
            Some(_) => state.pending_create = created_elsewhere,
            None => state.pending_create.into_iter().for_each(|ino| self.backing.create_pending(ino)),
        }
        owed.extend(orphan.map(|(ino, _)| ino));
        session.owes(slot, orphan);
        match session.channel.take(session.id, slot, scratch).filter(|(client, _)| client.seq == seq) {
            Some((client, call)) => self.answer_again(session, client, call, &kept, reply),
            None => Ok(false),
        }
    }

    /// Answers a request that was done before the crash. True when the answer must wait, for other nodes or for the
    /// mount's kernel. Then it must not be mistaken for a new request.
    fn answer_again(
        &mut self,
        session: &Session,
        client: Client,
        call: std::result::Result<Call, Code>,
        kept: &Reply<'_>,
        reply: &[u8],
    ) -> Result<bool> {
        // Whether the kernel was notified before the crash is unknown.
        let moved = match &call {
            Ok(call) => moved_by(call.request(), self.batch()?),
            Err(_) => Vec::new(),
        };
        let invalidations = match (&self.mount, &call) {
            (Some(mount), Ok(call)) if mount.session != session.id => {
                invalidations_of(call.request(), kept, &moved)
            }
            _ => Vec::new(),
        };
        let held_reply = || HeldReply::Client { client, reply: reply.to_vec() };
        let is_held = call.is_ok_and(|call| {
            self.answer_when_delivered(&call, kept, &invalidations)
                || self.hold_cautiously(held_reply(), call.request(), &invalidations)
        });
        let waits = is_held || !invalidations.is_empty();
        match &mut self.mount {
            _ if is_held => {}
            Some(mount) if !invalidations.is_empty() => mount.hold(held_reply(), invalidations),
            _ => session.answer(client.slot, reply),
        }
        self.recorder.clear(InFlight::of(&client));
        Statistics::add(&self.statistics.replayed, 1);
        Ok(waits)
    }

    /// Has the sweeper unlink the backing files of all orphans that no client unlinks.
    fn sweep_left(&mut self, owed: &HashSet<Ino>) -> Result<()> {
        let mut left = Vec::new();
        for (ino, layout) in self.batch()?.orphans()? {
            if self.backing.is_pending(ino) {
                self.backing.unlinked_while_pending(ino, layout);
            } else if !owed.contains(&ino) {
                left.push((ino, layout));
            }
        }
        self.commit()?;
        if !left.is_empty() {
            tracing::info!("sweeping the backing files of {} inodes that a crash left", left.len());
            self.backing.sweep(Sweep::Orphans(left));
        }
        Ok(())
    }

    /// The file that another node has created for a slot's last request. Its client may be making the backing file on
    /// this node, and the only copy of the reply is in the ring. A forged reply there only delays the removal of a
    /// backing file.
    fn created_elsewhere(&self, session: &Session, slot: usize, scratch: &mut [u8]) -> Option<Ino> {
        let here = self.network.as_ref()?.node;
        let answer = session.channel.ring()?.last_answer(slot, scratch)?;
        let (ino, _) = created(&Reply::decode(answer).ok()?)?;
        Some(ino).filter(|ino| ino.birth_node() != here)
    }

    /// Restores the last replies to processes of other nodes, which may not have received them.
    fn restore_remote(&mut self, noted: &HashSet<u64>) -> Result<()> {
        let Some(network) = &self.network else { return Ok(()) };
        let (here, commands) = (network.node, network.commands.clone());
        let mut theirs: Vec<u64> = noted.iter().copied().filter(|id| node_of_session(*id) != here).collect();
        theirs.sort_unstable();
        for id in theirs {
            let slots = RemoteSlots::new(id, commands.clone(), self.arrivals.clone());
            let mut session = Session::new(id, Channel::Remote(slots));
            session.noted = true;
            for slot in 0..RING_SLOTS {
                let batch = self.batch()?;
                let Some((seq, kept)) = batch.kept_reply(id, slot as u8)? else { continue };
                let (reserved, reply) = decode_kept(kept);
                session.slots[slot].last_change = (seq, reply.to_vec());
                session.slots[slot].reserved = reserved.filter(|ino| !has_inode(batch, *ino));
            }
            self.sessions.push(session);
        }
        Ok(())
    }

    /// Publishes the root directory on the board: in a new pool it is empty, and so complete from the start.
    fn show_root(&mut self) -> Result<()> {
        let (request, caller) = (Request::GetAttr { ino: Ino::ROOT }, Caller { uid: 0, gid: 0 });
        self.batch()?;
        self.effects.clear();
        if let Some(batch) = &mut self.batch {
            let _ = batch.apply(caller, &request, crate::worker::now(), &mut self.effects, &mut []);
        }
        self.publish();
        Ok(())
    }

    /// Drops the sessions of processes that have ended. Their reserved numbers become orphans.
    fn forget_ended(&mut self) -> Result<()> {
        let known: HashSet<u64> = self.sessions.iter().map(|s| s.id).collect();
        let mut replaced = Vec::new();
        let batch = self.batch()?;
        for id in batch.sessions()? {
            if known.contains(&id) {
                continue;
            }
            for ino in reserved_for(batch, id)? {
                if !has_inode(batch, ino) {
                    batch.list_orphan(ino, &layout_of_number(ino))?;
                }
            }
            for slot in 0..RING_SLOTS {
                let kept = batch.kept_reply(id, slot as u8)?;
                let reply = kept.and_then(|(_, kept)| Reply::decode(decode_kept(kept).1).ok());
                replaced.extend(reply.as_ref().and_then(relaid));
            }
            batch.forget_session(id)?;
        }
        if !replaced.is_empty() {
            self.backing.sweep(Sweep::Replaced(replaced));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::path::{Path, PathBuf};

    use forebay_meta::ShardOptions;
    use forebay_types::{NodeId, Timestamp};

    use super::*;
    use crate::worker::journal::JOURNAL_FILE;

    const CALLER: Caller = Caller { uid: 0, gid: 0 };
    const NOW: Timestamp = Timestamp { sec: 5, nsec: 6 };

    /// A target with a shard and a journal, removed on drop.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let path = std::env::temp_dir().join(format!("forebay-replay-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(path.join("shard")).unwrap();
            let options = ShardOptions {
                node: NodeId(1),
                map_bytes: 64 << 20,
                root_mode: 0o755,
                root_uid: 0,
                root_gid: 0,
            };
            Shard::create(&path.join("shard"), &options, NOW).unwrap();
            Place(path)
        }

        fn journal(&self) -> Journal {
            Journal::open(std::fs::File::open(&self.0).unwrap().as_fd()).unwrap()
        }

        /// Replays into the shard, and returns which of these names exist then.
        fn replay(&self, names: &[&str]) -> (Result<()>, Vec<bool>) {
            let shard = Shard::open(&self.0.join("shard")).unwrap();
            let replayed = replay(&shard, &mut self.journal());
            let mut batch = shard.begin().unwrap();
            let mut effects = Effects::new();
            let mut is_there = |name: &&str| {
                let request = Request::Lookup { parent: Ino::ROOT, name: name.as_bytes() };
                batch.apply(CALLER, &request, NOW, &mut effects, &mut []).is_ok()
            };
            (replayed, names.iter().map(&mut is_there).collect())
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn make(name: &str) -> Vec<u8> {
        let request = Request::MakeDirectory { parent: Ino::ROOT, name: name.as_bytes(), mode: 0o755 };
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let len = request.encode(CALLER, &mut message).unwrap();
        message.truncate(len);
        message
    }

    fn bytes(path: &Path) -> Vec<u8> {
        std::fs::read(path.join(JOURNAL_FILE)).unwrap()
    }

    #[test]
    fn replay_of_whole_records_applies_each_once_and_empties_the_journal() {
        let place = Place::new("whole");
        let mut journal = place.journal();
        for (seq, name) in ["a", "b"].into_iter().enumerate() {
            journal.append(7, 0, seq as u64 + 1, NOW, &make(name));
        }
        let written = bytes(&place.0);
        let (replayed, there) = place.replay(&["a", "b", "c"]);
        replayed.unwrap();
        assert_eq!(there, [true, true, false]);
        assert!(place.journal().is_empty());
        // The worker dies after the commit and before it clears the journal: nothing is applied twice.
        std::fs::write(place.0.join(JOURNAL_FILE), written).unwrap();
        let (replayed, there) = place.replay(&["a", "b"]);
        replayed.unwrap();
        assert_eq!(there, [true, true]);
    }

    #[test]
    fn replay_of_a_record_that_cannot_be_decoded_or_fails_again_is_refused_and_keeps_the_journal() {
        // The record behind the creation of directory "a", and what the error contains.
        let twice = make("a");
        for (i, (message, said)) in
            [(b"\xff garbage".as_slice(), "cannot be decoded"), (&twice, "fails when it is applied again")]
                .into_iter()
                .enumerate()
        {
            let place = Place::new(&format!("bad-{i}"));
            let mut journal = place.journal();
            journal.append(7, 0, 1, NOW, &make("a"));
            journal.append(7, 1, 1, NOW, message);
            journal.append(7, 2, 1, NOW, &make("behind"));
            let written = bytes(&place.0);
            for _ in 0..2 {
                let (replayed, there) = place.replay(&["a", "behind"]);
                let error = replayed.unwrap_err();
                assert_eq!(error.code, Code::Corrupt, "{error}");
                let text = error.to_string();
                for part in ["record 2 at byte ", JOURNAL_FILE, said, "copy the target's shard directory"] {
                    assert!(text.contains(part), "{part}: {text}");
                }
                assert_eq!(there, [false, false], "a change was committed past the damage");
                assert_eq!(written, bytes(&place.0), "the journal is kept");
            }
        }
    }
}
