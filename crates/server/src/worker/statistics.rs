//! Counters that `forebay status` shows. The shard thread writes and reads them; the network thread adds to the data
//! requests.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{json, Value};

#[derive(Debug, Default)]
pub(super) struct Statistics {
    /// Requests served.
    pub(super) requests: AtomicU64,
    /// Requests for data of other nodes, and for locks and appends that all nodes share. The network thread counts
    /// those that it takes.
    pub(super) data_requests: AtomicU64,
    /// Requests answered with an error.
    pub(super) errors: AtomicU64,
    /// Batches answered.
    pub(super) batches: AtomicU64,
    /// Transactions committed.
    pub(super) commits: AtomicU64,
    /// Times that the shard thread went to sleep.
    pub(super) sleeps: AtomicU64,
    /// Requests that arrived during an adaptive spin.
    pub(super) spun: AtomicU64,
    /// Requests answered from a kept reply, after a crash.
    pub(super) replayed: AtomicU64,
    /// Acknowledgements that waited too long for a notification of the mount's kernel.
    pub(super) told_late: AtomicU64,
    /// Processes attached now.
    pub(super) clients: AtomicU64,
    /// Processes attached since the worker started.
    pub(super) attached: AtomicU64,
    /// Backing files of dead clients that the sweeper removed.
    pub(super) swept: AtomicU64,
}

impl Statistics {
    /// Adds to a counter that the network thread writes, in whichever thread runs its round.
    pub(super) fn count(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn add(counter: &AtomicU64, n: u64) {
        // One thread writes each counter: no read-modify-write is needed.
        counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    pub(super) fn to_json(&self) -> Value {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        json!({
            "requests": get(&self.requests) + get(&self.data_requests),
            "errors": get(&self.errors),
            "batches": get(&self.batches),
            "commits": get(&self.commits),
            "sleeps": get(&self.sleeps),
            "spun": get(&self.spun),
            "replayed": get(&self.replayed),
            "told_late": get(&self.told_late),
            "attached": get(&self.attached),
            "swept": get(&self.swept),
        })
    }
}
