//! Taking over from a dead worker: its journal, its clients, and what clients that died meanwhile left.
//!
//! | what the next worker finds | what it does |
//! |---|---|
//! | a change in the journal, not in the shard | applies it again; the reply is the one that was, or would have been, given |
//! | a change in both (killed between commit and clear) | skips it: the shard keeps the journal's mark |
//! | a request that waits, its reply known | answers it again |
//! | a request that waits, its reply unknown | serves it as if for the first time: nothing of it was done |
//! | a client that lives, its last reply made or removed a file | it still owes the backing file's making or unlinking |
//! | an orphan that no living client owes | the sweeper unlinks its backing files |
//! | a session in the shard without a ring | its process is gone: forgotten |

use std::collections::{BTreeMap, HashSet};

use forebay_meta::{Effects, Shard};
use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Caller, Ino, Request, Result};

use super::journal::{Journal, MARK_SESSION};
use super::recorder::InFlight;
use super::session::Session;
use super::shard_thread::ShardThread;
use super::statistics::Statistics;

/// Applies what the journal holds beyond the last commit, and commits it with the last reply of each slot. The journal
/// is empty then.
pub(super) fn replay(shard: &Shard, journal: &mut Journal) -> Result<()> {
    let mut batch = shard.begin()?;
    batch.open_reserve();
    let mark = batch.kept_reply(MARK_SESSION, 0)?.map_or(0, |(number, _)| number);
    let records = journal.records();
    let mut last: BTreeMap<(u64, usize), (u64, Vec<u8>)> = BTreeMap::new();
    let (mut out, mut effects) = (vec![0; MESSAGE_BYTES_MAX], Effects::new());
    let mut applied = 0;
    for record in records.iter().filter(|record| record.number > mark) {
        let (caller, request) = match Request::decode(&record.message) {
            Ok(decoded) => decoded,
            Err(code) => {
                tracing::error!("record {} of the journal cannot be decoded: {code}", record.number);
                continue;
            }
        };
        if batch.is_spent() {
            for ((session, slot), (seq, reply)) in std::mem::take(&mut last) {
                batch.keep_reply(session, slot as u8, seq, &reply)?;
            }
            batch.keep_reply(MARK_SESSION, 0, record.number - 1, &[])?;
            batch.commit()?;
            batch = shard.begin()?;
            batch.open_reserve();
        }
        effects.clear();
        let len = batch.apply(caller, &request, record.now, &mut effects, &mut out);
        if out.first_chunk::<2>() != Some(&[0, 0]) {
            tracing::error!(
                "record {} of the journal, {request:?}, fails when it is applied again",
                record.number
            );
        }
        last.insert((record.session, record.slot), (record.seq, out[..len].to_vec()));
        applied += 1;
    }
    for ((session, slot), (seq, reply)) in &last {
        batch.keep_reply(*session, *slot as u8, *seq, reply)?;
    }
    if applied > 0 {
        batch.keep_reply(MARK_SESSION, 0, journal.last(), &[])?;
        tracing::info!("applied {applied} changes again that the last worker had acknowledged");
    }
    batch.commit()?;
    journal.continue_behind(mark);
    journal.clear();
    Ok(())
}

impl ShardThread<'_> {
    /// Takes over. Behind this the shard is as it was acknowledged, and every client's ring is served.
    pub(super) fn recover(&mut self, sessions: Vec<Session>) -> Result<()> {
        replay(self.shard, &mut self.journal)?;
        let mut scratch = vec![0; MESSAGE_BYTES_MAX];
        let mut owed: HashSet<Ino> = HashSet::new();
        // All clients turn to the new board before any is answered: what one learns from its answer, the others see.
        for session in &sessions {
            session.ring.set_epoch(self.epoch);
        }
        for mut session in sessions {
            self.batch()?.add_session(session.id)?;
            for slot in 0..RING_SLOTS {
                let change = self
                    .batch()?
                    .kept_reply(session.id, slot as u8)?
                    .map(|(seq, reply)| (seq, reply.to_vec()));
                let Some((seq, reply)) = change else { continue };
                let state = &mut session.slots[slot];
                state.restore(&reply);
                self.births.extend(state.birth);
                owed.extend(state.orphans.iter().map(|(ino, _)| *ino));
                if session.ring.take(slot, &mut scratch).is_some_and(|(asked, _)| asked == seq) {
                    session.ring.answer(slot, &reply);
                    self.recorder.clear(InFlight { session: session.id, slot, seq });
                    Statistics::add(&self.statistics.replayed, 1);
                }
            }
            session.ring.repend();
            self.sessions.push(session);
        }
        let known: HashSet<u64> = self.sessions.iter().map(|s| s.id).collect();
        self.recorder.keep_sessions(&known);
        self.show_root()?;
        self.forget_ended()?;
        let mut left = Vec::new();
        for (ino, layout) in self.batch()?.orphans()? {
            if self.births.contains(&ino) {
                self.stillborn.push((ino, layout));
            } else if !owed.contains(&ino) {
                left.push((ino, layout));
            }
        }
        self.commit()?;
        if !left.is_empty() {
            tracing::info!("sweeping the backing files of {} inodes that a crash left", left.len());
            let _ = self.sweeper.send(left);
        }
        self.count_clients();
        Ok(())
    }

    /// Puts the root directory on the board: in a new pool it is empty, and so complete from the start.
    fn show_root(&mut self) -> Result<()> {
        let (request, caller) = (Request::GetAttr { ino: Ino::ROOT }, Caller { uid: 0, gid: 0 });
        let mut out = vec![0; MESSAGE_BYTES_MAX];
        self.batch()?;
        self.effects.clear();
        if let Some(batch) = &mut self.batch {
            batch.apply(caller, &request, super::now(), &mut self.effects, &mut out);
        }
        self.publish();
        Ok(())
    }

    /// Forgets the sessions of processes that are gone.
    fn forget_ended(&mut self) -> Result<()> {
        let known: HashSet<u64> = self.sessions.iter().map(|s| s.id).collect();
        let batch = self.batch()?;
        for id in batch.sessions()? {
            if !known.contains(&id) {
                batch.forget_session(id)?;
            }
        }
        Ok(())
    }
}
