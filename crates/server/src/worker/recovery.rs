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

use std::collections::{HashMap, HashSet};

use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Ino, Request, Result};

use super::journal::MARK_SESSION;
use super::session::Session;
use super::shard_thread::ShardThread;
use super::statistics::Statistics;

/// Sequence and reply of the last change of a slot.
type LastChanges = HashMap<(u64, usize), (u64, Vec<u8>)>;

impl ShardThread<'_> {
    /// Takes over. Behind this the shard is as it was acknowledged, and every client's ring is served.
    pub(super) fn recover(&mut self, sessions: Vec<Session>) -> Result<()> {
        let replayed = self.replay_journal()?;
        let mut scratch = vec![0; MESSAGE_BYTES_MAX];
        let mut owed: HashSet<Ino> = HashSet::new();
        for mut session in sessions {
            self.batch()?.add_session(session.id)?;
            // From here on the client reads the new board, so what is answered below is what it sees there.
            session.ring.set_epoch(self.epoch);
            for slot in 0..RING_SLOTS {
                let change = match replayed.get(&(session.id, slot)) {
                    Some(change) => Some(change.clone()),
                    None => self
                        .batch()?
                        .kept_reply(session.id, slot as u8)?
                        .map(|(seq, reply)| (seq, reply.to_vec())),
                };
                let Some((seq, reply)) = change else { continue };
                let state = &mut session.slots[slot];
                state.restore(&reply);
                self.births.extend(state.birth);
                owed.extend(state.orphans.iter().map(|(ino, _)| *ino));
                if session.ring.take(slot, &mut scratch).is_some_and(|(asked, _)| asked == seq) {
                    session.ring.answer(slot, &reply);
                    Statistics::add(&self.statistics.replayed, 1);
                }
                let state = &mut session.slots[slot];
                state.last_change = (seq, reply);
                state.unkept = true;
                self.unkept.push((session.id, slot));
            }
            session.ring.repend();
            self.sessions.push(session);
        }
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
        self.journal.clear();
        if !left.is_empty() {
            tracing::info!("sweeping the backing files of {} inodes that a crash left", left.len());
            let _ = self.sweeper.send(left);
        }
        self.count_clients();
        Ok(())
    }

    /// Applies what the journal holds beyond the last commit; the last change of each slot.
    fn replay_journal(&mut self) -> Result<LastChanges> {
        let mark = self.batch()?.kept_reply(MARK_SESSION, 0)?.map_or(0, |(number, _)| number);
        let records = self.journal.records();
        self.journal.continue_behind(mark);
        let mut last = LastChanges::new();
        let mut out = vec![0; MESSAGE_BYTES_MAX];
        let mut applied = 0;
        for record in records {
            if record.number <= mark {
                continue;
            }
            let (caller, request) = match Request::decode(&record.message) {
                Ok(decoded) => decoded,
                Err(code) => {
                    tracing::error!("record {} of the journal cannot be decoded: {code}", record.number);
                    continue;
                }
            };
            self.effects.clear();
            let Some(batch) = &mut self.batch else { unreachable!("begun above") };
            let len = batch.apply(caller, &request, record.now, &mut self.effects, &mut out);
            if out.first_chunk::<2>() != Some(&[0, 0]) {
                tracing::error!(
                    "record {} of the journal, {request:?}, fails when it is applied again",
                    record.number
                );
            }
            last.insert((record.session, record.slot), (record.seq, out[..len].to_vec()));
            applied += 1;
        }
        if applied > 0 {
            tracing::info!("applied {applied} changes again that the last worker had acknowledged");
        }
        Ok(last)
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
