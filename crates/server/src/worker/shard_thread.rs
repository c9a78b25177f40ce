//! The shard thread: takes requests from the rings in batches, applies each batch in one transaction, and answers.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;

use forebay_data::Target;
use forebay_meta::{Effects, Shard};
use forebay_ring::{BoardWriter, Doorbell};
use forebay_types::limits::{BATCH_MAX, BATCH_PER_RING, DOORBELL_POLL_MS, RING_SLOTS};
use forebay_types::{Ino, Layout, Result};
use serde_json::Value;

use super::batch::Answers;
use super::pace::Pace;
use super::recorder::FlightRecorder;
use super::session::Session;
use super::statistics::Statistics;

/// What other threads tell the shard thread; each send is followed by a ring of the doorbell.
#[derive(Debug)]
pub(super) enum Message {
    /// A process attached.
    Attached(Box<Session>, Sender<bool>),
    /// A process is gone.
    Ended(u64),
    /// These backing files were unlinked.
    Swept(Vec<Ino>),
    /// Facts for `status`.
    Status(Sender<Value>),
    /// Check shard and target.
    Check(Sender<Result<Value>>),
    /// Is this session known?
    Known(u64, Sender<bool>),
    /// Stop serving.
    Stop,
}

/// Orphan records are deleted this many at a time.
const FORGET_AT: usize = 256;

/// The shard thread's state.
pub(super) struct ShardThread<'a> {
    pub(super) shard: &'a Shard,
    pub(super) target: Arc<Target>,
    pub(super) board: BoardWriter,
    doorbell: Arc<Doorbell>,
    pub(super) recorder: FlightRecorder,
    messages: Receiver<Message>,
    pub(super) sweeper: Sender<Vec<(Ino, Layout)>>,
    pub(super) statistics: Arc<Statistics>,
    epoch: u64,
    pub(super) sessions: Vec<Session>,
    /// The session that the next batch starts with.
    turn: usize,
    pub(super) effects: Effects,
    pub(super) answers: Answers,
    /// Files that were made by a request whose client may still be making the backing file.
    pub(super) births: Vec<Ino>,
    /// Files unlinked while in `births`: to be swept when their client has moved on.
    pub(super) stillborn: Vec<(Ino, Layout)>,
    /// Orphans whose backing files are gone, and whose records can go.
    pub(super) done_orphans: Vec<Ino>,
    stop: bool,
}

impl<'a> ShardThread<'a> {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        shard: &'a Shard,
        target: Arc<Target>,
        board: BoardWriter,
        doorbell: Arc<Doorbell>,
        recorder: FlightRecorder,
        messages: Receiver<Message>,
        sweeper: Sender<Vec<(Ino, Layout)>>,
        statistics: Arc<Statistics>,
        epoch: u64,
    ) -> ShardThread<'a> {
        ShardThread {
            shard,
            target,
            board,
            doorbell,
            recorder,
            messages,
            sweeper,
            statistics,
            epoch,
            sessions: Vec::new(),
            turn: 0,
            effects: Effects::new(),
            answers: Answers::new(),
            births: Vec::new(),
            stillborn: Vec::new(),
            done_orphans: Vec::new(),
            stop: false,
        }
    }

    /// Takes over the sessions of a dead worker: answers what it had committed, and takes up the rest; unlinks what
    /// clients that died meanwhile left.
    pub(super) fn adopt(&mut self, sessions: Vec<Session>) -> Result<()> {
        let mut batch = self.shard.begin()?;
        let mut owed: Vec<Ino> = Vec::new();
        for mut session in sessions {
            // From here on the client reads the new board, so what is answered below is what it sees there.
            session.ring.set_epoch(self.epoch);
            for slot in 0..RING_SLOTS {
                let Some((seq, reply)) = batch.kept_reply(session.id, slot as u8)? else { continue };
                session.slots[slot].restore(reply);
                if let Some(ino) = session.slots[slot].birth {
                    self.births.push(ino);
                }
                owed.extend(session.slots[slot].orphans.iter().map(|(ino, _)| *ino));
                let mut scratch = vec![0; forebay_types::limits::MESSAGE_BYTES_MAX];
                if let Some((asked, _)) = session.ring.take(slot, &mut scratch) {
                    if asked == seq {
                        session.ring.answer(slot, reply);
                        Statistics::add(&self.statistics.replayed, 1);
                    }
                }
            }
            session.ring.repend();
            self.sessions.push(session);
        }
        let gone: Vec<u64> = batch
            .sessions()?
            .into_iter()
            .filter(|id| !self.sessions.iter().any(|session| session.id == *id))
            .collect();
        for id in gone {
            batch.forget_session(id)?;
        }
        let mut left = Vec::new();
        for (ino, layout) in batch.orphans()? {
            if self.births.contains(&ino) {
                self.stillborn.push((ino, layout));
            } else if !owed.contains(&ino) {
                left.push((ino, layout));
            }
        }
        batch.commit()?;
        if !left.is_empty() {
            tracing::info!("sweeping backing files of {} inodes that a crash left", left.len());
            let _ = self.sweeper.send(left);
        }
        self.statistics.clients.store(self.sessions.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Serves until told to stop.
    pub(super) fn serve(&mut self) -> Result<()> {
        let mut pace = Pace::new();
        let mut idle_rounds = 0u32;
        loop {
            while let Ok(message) = self.messages.try_recv() {
                self.hear(message)?;
            }
            if self.stop {
                return Ok(());
            }
            self.take_requests();
            if !self.answers.is_empty() {
                idle_rounds = 0;
                self.serve_batch()?;
                continue;
            }
            let sessions = &self.sessions;
            if pace.spin(|| sessions.iter().any(|s| s.ring.has_pending())) {
                Statistics::add(&self.statistics.spun, 1);
                continue;
            }
            if !self.done_orphans.is_empty() {
                self.forget_orphans()?;
                continue;
            }
            // Nobody asks: the poll by timer, there for scribbled doorbells, may slow down.
            idle_rounds = idle_rounds.saturating_add(1);
            let timeout = DOORBELL_POLL_MS * if idle_rounds > 20 { 10 } else { 1 };
            Statistics::add(&self.statistics.sleeps, 1);
            let messages = &self.messages;
            let mut heard = None;
            self.doorbell.sleep(timeout, || {
                heard = messages.try_recv().ok();
                heard.is_none() && !sessions.iter().any(|s| s.ring.has_pending())
            });
            if let Some(message) = heard {
                self.hear(message)?;
            }
        }
    }

    /// Collects a batch: from every ring in turn, a bounded number each, starting with another ring each time.
    fn take_requests(&mut self) {
        self.answers.clear();
        let most = if self.recorder.has_suspects() { 1 } else { BATCH_MAX };
        let n = self.sessions.len();
        for k in 0..n {
            let i = (self.turn + k) % n;
            let room = most - self.answers.len();
            if room == 0 {
                self.turn = i;
                return;
            }
            let ring = &self.sessions[i].ring;
            let mut bits = ring.take_pending(room.min(BATCH_PER_RING));
            while bits != 0 {
                let slot = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                self.answers.take(i, slot, ring);
            }
        }
        if n > 0 {
            self.turn = (self.turn + 1) % n;
        }
    }

    /// Deletes the records of orphans whose backing files are gone.
    pub(super) fn forget_orphans(&mut self) -> Result<()> {
        let mut batch = self.shard.begin()?;
        batch.remove_orphans(&self.done_orphans)?;
        batch.commit()?;
        self.done_orphans.clear();
        Ok(())
    }

    /// True when enough orphan records wait to be deleted.
    pub(super) fn has_orphans_to_forget(&self) -> bool {
        self.done_orphans.len() >= FORGET_AT
    }

    fn hear(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Attached(session, done) => {
                session.ring.set_epoch(self.epoch);
                let id = session.id;
                let mut batch = self.shard.begin()?;
                let known = batch.add_session(id);
                batch.commit()?;
                if let Err(e) = known {
                    tracing::error!("cannot add a session: {e}");
                    let _ = done.send(false);
                    return Ok(());
                }
                self.sessions.push(*session);
                self.statistics.clients.store(self.sessions.len() as u64, Ordering::Relaxed);
                Statistics::add(&self.statistics.attached, 1);
                let _ = done.send(true);
            }
            Message::Ended(id) => self.end_session(id)?,
            Message::Swept(inos) => {
                Statistics::add(&self.statistics.swept, inos.len() as u64);
                self.done_orphans.extend(inos);
            }
            Message::Status(reply) => {
                let _ = reply.send(self.status());
            }
            Message::Check(reply) => {
                // What is swept and not yet forgotten would look like damage.
                if !self.done_orphans.is_empty() {
                    self.forget_orphans()?;
                }
                let _ = reply.send(super::check::check(self.shard, &self.target));
            }
            Message::Known(id, reply) => {
                let _ = reply.send(self.sessions.iter().any(|s| s.id == id));
            }
            Message::Stop => self.stop = true,
        }
        Ok(())
    }

    /// A process is gone: what it left half done is finished.
    fn end_session(&mut self, id: u64) -> Result<()> {
        let Some(i) = self.sessions.iter().position(|s| s.id == id) else { return Ok(()) };
        let mut session = self.sessions.swap_remove(i);
        self.statistics.clients.store(self.sessions.len() as u64, Ordering::Relaxed);
        self.recorder.forget_session(id);
        let mut left = Vec::new();
        for slot in session.slots.iter_mut() {
            left.append(&mut slot.orphans);
            if let Some(ino) = slot.birth.take() {
                if let Some(orphan) = self.grown_up(ino) {
                    left.push(orphan);
                }
            }
        }
        let mut batch = self.shard.begin()?;
        batch.forget_session(id)?;
        batch.commit()?;
        if !left.is_empty() {
            let _ = self.sweeper.send(left);
        }
        Ok(())
    }

    /// The client that made `ino` has moved on: if the file was unlinked meanwhile, what is to be swept.
    pub(super) fn grown_up(&mut self, ino: Ino) -> Option<(Ino, Layout)> {
        if let Some(i) = self.births.iter().position(|&b| b == ino) {
            self.births.swap_remove(i);
        }
        let i = self.stillborn.iter().position(|(s, _)| *s == ino)?;
        Some(self.stillborn.swap_remove(i))
    }

    fn status(&self) -> Value {
        use forebay_data::Media;
        let space = self.target.space().unwrap_or_default();
        let mut status = serde_json::json!({
            "used_bytes": space.total_bytes.saturating_sub(space.free_bytes),
            "free_bytes": space.free_bytes,
            "clients": self.sessions.len(),
            "ring": self.statistics.to_json(),
            "board": { "bytes": self.board.bytes(), "evicted": self.board.evicted() },
        });
        if let Ok(s) = self.shard.statistics() {
            status["inodes"] = s.inodes.into();
            status["shard"] = serde_json::json!({ "entries": s.entries, "orphans": s.orphans });
        }
        status
    }
}
