//! Backing files that clients unlink late, and requests for the free space, which wait until those are gone.
//!
//! A client unlinks the backing file of a removed file while the daemon serves its slot's next request
//! (docs/decisions/0037). Until the request after that, the orphan stays in the shard, so that a crash of either side
//! loses nothing. The sweeper unlinks what is left when a slot rests, and when a request asks for the free space: as
//! far as programs can see, space is free as soon as a removal is acknowledged.
//!
//! Tests: `tests/steps/late_removals.rs`, and the crash tests of the conformance crate.

use std::sync::mpsc::Sender;

use forebay_meta::Client;
use serde_json::Value;

use super::call::Call;

/// Batches between two checks for slots that rest while other clients keep the daemon busy: some milliseconds.
pub(super) const LOOK_AFTER_BATCHES: u32 = 256;
/// Free space is reported after this time, even if the sweeper is not done. It may have many large files to unlink, and
/// `forebay status` waits no longer than `WORKER_TIMEOUT` (`control.rs`).
pub(super) const WAIT_NS: u64 = 1_000_000_000;

/// A request for the free space that waits.
#[derive(Debug)]
pub(super) enum Waiter {
    Call(Call),
    /// `forebay status`.
    Status(Sender<Value>),
}

/// Requests that wait for the sweeper.
#[derive(Debug, Default)]
pub(super) struct LateRemovals {
    /// The mark that the sweeper has to reach, and the end of the wait by [`forebay_ring::call_clock`].
    pub(super) waiting: Vec<(u64, u64, Waiter)>,
    /// Calls that have waited, to be taken into a batch.
    pub(super) ready: Vec<Call>,
    /// Those that are in the batch. They do not wait again, because other clients may remove files for ever.
    pub(super) released: Vec<Client>,
    /// The last mark given to the sweeper, and the last that it reached.
    pub(super) given: u64,
    pub(super) reached: u64,
    pub(super) batches: u32,
}
