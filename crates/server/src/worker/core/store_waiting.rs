//! Connects the calls that wait for a backing store (`store_waits.rs`).

use forebay_ring::call_clock;
use forebay_types::{Code, Refusal, Reply, Request, Result, StoreTask, Writer};

use super::state::ShardThread;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::store_waits::Released;

/// Encoded bytes of a task.
const TASK_BYTES: usize = 9;

impl ShardThread<'_> {
    /// Serves requests of movers and for files that are to be restored. True when the call waits, or was answered.
    pub(in crate::worker) fn serve_for_store(&mut self, session: usize, call: &Call) -> Result<bool> {
        match *call.request() {
            Request::StoreWork { restart } => {
                let tasks = self.store.tasks(restart, call_clock());
                if tasks.is_empty() && !self.store.has_waited(&call.client) {
                    self.store.rest(call.clone(), call_clock());
                    return Ok(true);
                }
                let mut bytes = vec![0; TASK_BYTES * tasks.len()];
                let mut w = Writer::new(&mut bytes);
                let encoded = tasks.iter().try_for_each(|task| task.encode(&mut w));
                let answer = encoded.map(|()| Reply::Bytes(&bytes)).map_err(Refusal::Code);
                self.conclude(session, call.clone(), &answer, None);
                Ok(true)
            }
            Request::StoreFailed { ino, code } => {
                self.store.done(ino, Some(Code::from_u16(code)));
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            Request::Restore { ino } => {
                let is_over = self.store.has_waited(&call.client);
                if is_over || !self.batch()?.is_to_be_restored(ino) {
                    return Ok(false);
                }
                self.store.wait(call.clone(), StoreTask::Restore(ino), call_clock());
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// A call was refused because a directory is not listed: it waits, if its reply goes to a client.
    pub(in crate::worker) fn wait_for_listing(&mut self, call: &Call) -> bool {
        let Some(ino) = self.batch.as_mut().and_then(|batch| batch.take_unlisted()) else { return false };
        self.store.wait(call.clone(), StoreTask::List(ino), call_clock());
        true
    }

    /// A change may be what calls wait for.
    #[inline]
    pub(in crate::worker) fn note_for_store(&mut self, request: &Request<'_>) {
        if let Request::Listed { ino } | Request::Restored { ino, .. } = *request {
            self.store.done(ino, None);
        }
    }

    /// Takes calls that have waited into the batch, until it has `most` calls, and answers those that failed.
    pub(in crate::worker) fn take_calls_of_store(&mut self, most: usize) {
        if !self.store.is_empty() {
            self.store.expire(call_clock());
        }
        while self.pipeline.taken.len() < most {
            let Some(released) = self.store.released.pop_front() else { break };
            let (call, failed) = match released {
                Released::Again(call) => (call, None),
                Released::Failed(call, code) => (call, Some(code)),
            };
            let client = call.client;
            let Some(session) = self.sessions.index_of(client.session) else { continue };
            if !self.sessions[session].is_waiting(client.slot, client.seq) {
                continue;
            }
            let call = failed.map_or(Ok(call), Err);
            self.pipeline.taken.push_back(Taken { session, client, call });
        }
    }

    /// Milliseconds until a call has waited long enough for a store.
    pub(in crate::worker) fn next_store_ms(&self) -> Option<u64> {
        let next = self.store.next_ns()?;
        Some(next.saturating_sub(call_clock()) / 1_000_000 + 1)
    }
}
