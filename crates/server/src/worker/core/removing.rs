//! The core's removal of what clients leave: requests for the free space wait for it (`late_removals.rs`).

use super::state::ShardThread;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::late_removals::Waiter;
use crate::worker::late_removals::LOOK_AFTER_BATCHES;
use crate::worker::late_removals::WAIT_NS;
use crate::worker::sweeper::Sweep;
use forebay_ring::call_clock;
use forebay_types::{Ino, Layout, Request, Result};
use serde_json::Value;
use std::sync::mpsc::Sender;

impl ShardThread<'_> {
    /// The daemon is at rest: it does what clients have left.
    pub(in crate::worker) fn sweep_late(&mut self) {
        let mut late = Vec::new();
        self.sessions.iter_mut().for_each(|session| session.take_orphans(&mut late));
        self.give_to_sweeper(late);
    }

    /// Behind a batch: the same of slots that have been at rest for a while.
    pub(in crate::worker) fn sweep_late_if_due(&mut self) {
        self.late.batches += 1;
        if self.late.batches >= LOOK_AFTER_BATCHES {
            self.late.batches = 0;
            let mut late = Vec::new();
            self.sessions.iter_mut().for_each(|session| session.take_resting_orphans(&mut late));
            self.give_to_sweeper(late);
        }
    }

    /// Gives the sweeper what clients have left; free space is told behind it.
    pub(in crate::worker) fn give_to_sweeper(&mut self, late: Vec<(Ino, Layout)>) {
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
    pub(in crate::worker) fn waits_for_removals(&mut self, call: &Call) -> bool {
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
    pub(in crate::worker) fn tell_status(&mut self, reply: Sender<Value>) -> Result<()> {
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
    pub(in crate::worker) fn swept_up_to(&mut self, mark: u64) -> Result<()> {
        self.late.reached = mark;
        self.release(|reached, _| reached <= mark)
    }

    /// What has waited too long for the sweeper waits no longer.
    #[inline]
    pub(in crate::worker) fn stop_waiting_for_removals(&mut self) -> Result<()> {
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
    pub(in crate::worker) fn has_requests_for_space(&self) -> bool {
        !self.late.ready.is_empty()
    }

    /// Puts calls that have waited into the batch, up to so many in all.
    pub(in crate::worker) fn take_requests_for_space(&mut self, most: usize) {
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
