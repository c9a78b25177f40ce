//! Connects late removals (`late_removals.rs`): the sweeper unlinks what clients leave, and requests for the free space
//! wait for it.

use std::sync::mpsc::Sender;

use forebay_meta::Client;
use forebay_ring::call_clock;
use forebay_types::{Ino, Layout, Request, Result};
use serde_json::Value;

use super::state::ShardThread;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::late_removals::{Waiter, LOOK_AFTER_BATCHES, WAIT_NS};
use crate::worker::sweeper::Sweep;

impl ShardThread<'_> {
    /// The daemon has nothing to do: the sweeper unlinks all that clients have left.
    pub(in crate::worker) fn sweep_late(&mut self) {
        let mut late = Vec::new();
        self.sessions.iter_mut().for_each(|session| session.take_orphans(&mut late));
        self.give_to_sweeper(late);
    }

    /// After a batch, as a busy node does not rest: the same for slots that have been at rest for a while, and pieces of
    /// volumes that are used no longer.
    pub(in crate::worker) fn sweep_late_if_due(&mut self) {
        self.late.batches += 1;
        if self.late.batches >= LOOK_AFTER_BATCHES {
            self.late.batches = 0;
            let mut late = Vec::new();
            self.sessions.iter_mut().for_each(|session| session.take_resting_orphans(&mut late));
            self.give_to_sweeper(late);
            self.volumes.drop_unused();
        }
    }

    /// Gives the sweeper what clients have left, and a mark behind it.
    pub(in crate::worker) fn give_to_sweeper(&mut self, late: Vec<(Ino, Layout)>) {
        if !late.is_empty() {
            self.late.given += 1;
            self.backing.sweep(Sweep::Orphans(late));
            self.backing.sweep(Sweep::Mark(self.late.given));
        }
    }

    /// Makes a waiter wait until clients' late removals are done. Returns it when there is nothing to wait for.
    fn wait_for_removals(&mut self, waiter: Waiter) -> Option<Waiter> {
        self.sweep_late();
        if self.late.given <= self.late.reached {
            return Some(waiter);
        }
        if let Waiter::Call(call) = &waiter {
            // A slot has one call: a later one takes its place.
            let Client { session, slot, .. } = call.client;
            let is_same = |other: &Waiter| matches!(other, Waiter::Call(other) if (other.client.session, other.client.slot) == (session, slot));
            self.late.waiting.retain(|(.., other)| !is_same(other));
        }
        self.late.waiting.push((self.late.given, call_clock() + WAIT_NS, waiter));
        None
    }

    /// Parks a call for the free space until clients' late removals are done. False when it need not wait.
    #[inline]
    pub(in crate::worker) fn park_for_removals(&mut self, call: &Call) -> bool {
        matches!(call.request(), Request::Space | Request::Targets) && self.is_held_for_space(call)
    }

    #[cold]
    fn is_held_for_space(&mut self, call: &Call) -> bool {
        if let Some(i) = self.late.released.iter().position(|client| *client == call.client) {
            self.late.released.swap_remove(i);
            return false;
        }
        self.wait_for_removals(Waiter::Call(call.clone())).is_none()
    }

    /// Answers `forebay status` when clients' late removals are done.
    pub(in crate::worker) fn tell_status(&mut self, reply: Sender<Value>) -> Result<()> {
        match self.wait_for_removals(Waiter::Status(reply)) {
            Some(waiter) => self.release(waiter),
            None => Ok(()),
        }
    }

    /// The sweeper has removed what it was given before this mark.
    pub(in crate::worker) fn swept_up_to(&mut self, mark: u64) -> Result<()> {
        self.late.reached = mark;
        self.release_where(|waits_for, _| waits_for <= mark)
    }

    /// Releases what has waited too long for the sweeper.
    #[inline]
    pub(in crate::worker) fn stop_waiting_for_removals(&mut self) -> Result<()> {
        if self.late.waiting.is_empty() {
            return Ok(());
        }
        let now = call_clock();
        self.release_where(|_, until| until <= now)
    }

    fn release_where(&mut self, is_over: impl Fn(u64, u64) -> bool) -> Result<()> {
        let all = std::mem::take(&mut self.late.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) = all.partition(|(mark, until, _)| is_over(*mark, *until));
        self.late.waiting = waiting;
        over.into_iter().try_for_each(|(_, _, waiter)| self.release(waiter))
    }

    fn release(&mut self, waiter: Waiter) -> Result<()> {
        match waiter {
            Waiter::Call(call) => self.late.ready.push(call),
            Waiter::Status(reply) => {
                self.commit()?;
                let _ = reply.send(self.status());
            }
        }
        Ok(())
    }

    /// Milliseconds until a waiter has waited long enough.
    pub(in crate::worker) fn next_release_ms(&self) -> Option<u64> {
        let first = self.late.waiting.iter().map(|(_, until, _)| *until).min()?;
        Some(first.saturating_sub(call_clock()) / 1_000_000 + 1)
    }

    /// True when a call that has waited is to be served.
    #[inline]
    pub(in crate::worker) fn has_released_calls(&self) -> bool {
        !self.late.ready.is_empty()
    }

    /// Takes calls that have waited into the batch, until it has `most` calls.
    pub(in crate::worker) fn take_released_calls(&mut self, most: usize) {
        while self.pipeline.taken.len() < most {
            let Some(call) = self.late.ready.pop() else { break };
            let client = call.client;
            if let Some(session) = self.sessions.index_of(client.session) {
                self.late.released.push(client);
                self.pipeline.taken.push_back(Taken { session, client, call: Ok(call) });
            }
        }
    }
}
