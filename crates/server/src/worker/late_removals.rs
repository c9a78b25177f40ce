//! Backing files that clients unlink late, and requests for the free space, which wait until those are gone.
//!
//! A client unlinks the backing file of a removed file while the daemon serves its slot's next request (docs/decisions/0037).
//! Until the request after that, the orphan stays in the shard, so that a crash of either side loses nothing. The sweeper
//! unlinks what a slot leaves at rest, and what is left when the free space is to be told: space is free as soon as a
//! removal is acknowledged, as far as programs can see.
//!
//! Tests: `tests/steps.rs`, and the crash tests of the conformance crate.

use std::sync::mpsc::Sender;

use forebay_ring::call_clock;
use forebay_types::{Ino, Layout, Request, Result};
use serde_json::Value;

use super::call::Call;
use super::pipeline::Taken;
use super::shard_thread::ShardThread;
use super::sweeper::Sweep;

/// Batches between two looks at slots that are at rest while others keep the daemon busy: some milliseconds.
const LOOK_AFTER_BATCHES: u32 = 256;
/// Free space is told after this, whatever the sweeper still has to do: it may be behind by many large files, and a call
/// waits no longer than `CALL_TIMEOUT_MS`.
const WAIT_NS: u64 = 5_000_000_000;

/// Who waits to be told of the free space.
#[derive(Debug)]
enum Waiter {
    /// A call.
    Call(Call),
    /// `forebay status`.
    Status(Sender<Value>),
}

/// What waits for the sweeper.
#[derive(Debug, Default)]
pub(super) struct LateRemovals {
    /// By the mark that the sweeper is to come to, and until when.
    waiting: Vec<(u64, u64, Waiter)>,
    /// Requests that have waited, to be served now.
    ready: Vec<Waiter>,
    /// The last mark given to the sweeper, and the last that it came to.
    given: u64,
    reached: u64,
    batches: u32,
}

impl ShardThread<'_> {
    /// The daemon is at rest: it does what clients have left.
    pub(super) fn sweep_late(&mut self) {
        let mut late = Vec::new();
        self.sessions.iter_mut().for_each(|session| session.take_orphans(&mut late));
        self.give_to_sweeper(late);
    }

    /// Behind a batch: the same of slots that have been at rest for a while.
    pub(super) fn sweep_late_if_due(&mut self) {
        self.late.batches += 1;
        if self.late.batches >= LOOK_AFTER_BATCHES {
            self.late.batches = 0;
            let mut late = Vec::new();
            self.sessions.iter_mut().for_each(|session| session.take_resting_orphans(&mut late));
            self.give_to_sweeper(late);
        }
    }

    /// Gives the sweeper what clients have left; free space is told behind it.
    pub(super) fn give_to_sweeper(&mut self, late: Vec<(Ino, Layout)>) {
        if !late.is_empty() {
            self.late.given += 1;
            self.backing.sweep(Sweep::Orphans(late));
            self.backing.sweep(Sweep::Mark(self.late.given));
        }
    }

    /// Has clients' late removals done; the mark to wait for, if there is any.
    fn removals_to_wait_for(&mut self) -> Option<u64> {
        self.sweep_late();
        (self.late.given > self.late.reached).then_some(self.late.given)
    }

    /// True when a call asks for the free space, and waits until clients' late removals are done.
    #[inline]
    pub(super) fn waits_for_removals(&mut self, call: &Call) -> bool {
        matches!(call.request(), Request::Space | Request::Targets) && self.is_held_for_space(call)
    }

    #[cold]
    fn is_held_for_space(&mut self, call: &Call) -> bool {
        let is_it = |waiter: &Waiter| matches!(waiter, Waiter::Call(other) if other.client == call.client);
        if let Some(i) = self.late.ready.iter().position(is_it) {
            // It has waited once; others may remove files for ever.
            self.late.ready.swap_remove(i);
            return false;
        }
        let Some(mark) = self.removals_to_wait_for() else { return false };
        self.late.waiting.push((mark, call_clock() + WAIT_NS, Waiter::Call(call.clone())));
        true
    }

    /// Tells `forebay status`, when clients' late removals are done.
    pub(super) fn tell_status(&mut self, reply: Sender<Value>) -> Result<()> {
        match self.removals_to_wait_for() {
            Some(mark) => {
                self.late.waiting.push((mark, call_clock() + WAIT_NS, Waiter::Status(reply)));
                Ok(())
            }
            None => self.tell_status_now(&reply),
        }
    }

    fn tell_status_now(&mut self, reply: &Sender<Value>) -> Result<()> {
        self.commit()?;
        let _ = reply.send(self.status());
        Ok(())
    }

    /// The sweeper has removed what it was given before this mark.
    pub(super) fn swept_up_to(&mut self, mark: u64) -> Result<()> {
        self.late.reached = mark;
        self.release(|reached, _| reached <= mark)
    }

    /// What has waited too long for the sweeper waits no longer.
    #[inline]
    pub(super) fn stop_waiting_for_removals(&mut self) -> Result<()> {
        if self.late.waiting.is_empty() {
            return Ok(());
        }
        let now = call_clock();
        self.release(|_, until| until <= now)
    }

    fn release(&mut self, is_over: impl Fn(u64, u64) -> bool) -> Result<()> {
        let (over, waiting) = std::mem::take(&mut self.late.waiting)
            .into_iter()
            .partition(|(mark, until, _)| is_over(*mark, *until));
        self.late.waiting = waiting;
        for (_, _, waiter) in Vec::from(over) {
            match waiter {
                Waiter::Status(reply) => self.tell_status_now(&reply)?,
                request => self.late.ready.push(request),
            }
        }
        Ok(())
    }

    /// True when a request that has waited is to be served.
    #[inline]
    pub(super) fn has_requests_for_space(&self) -> bool {
        !self.late.ready.is_empty()
    }

    /// Puts calls that have waited into the batch, up to so many in all.
    pub(super) fn take_requests_for_space(&mut self, most: usize) {
        let (sessions, taken) = (&self.sessions, &mut self.pipeline.taken);
        self.late.ready.retain(|waiter| {
            let Waiter::Call(call) = waiter else { return false };
            let client = call.client;
            let Some(session) = sessions.iter().position(|s| s.id == client.session) else { return false };
            if taken.len() < most {
                taken.push_back(Taken { session, client, call: Ok(call.clone()) });
            }
            true
        });
    }
}
