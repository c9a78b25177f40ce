//! Backing files that clients unlink late, and requests for the free space, which wait until those are gone.
//!
//! A client unlinks the backing file of a removed file while the daemon serves its slot's next request
//! (docs/decisions/0037). Until the request after that, the orphan stays in the shard, so that a crash of either side
//! loses nothing. The sweeper unlinks what a slot leaves at rest, and what is left when a request asks for the free
//! space: as far as programs can see, space is free as soon as a removal is acknowledged.
//!
//! Tests: `tests/steps.rs`, and the crash tests of the conformance crate.

use std::sync::mpsc::Sender;

use forebay_meta::Client;
use serde_json::Value;

use super::call::Call;

/// Batches between two looks at slots that are at rest while others keep the daemon busy: some milliseconds.
pub(super) const LOOK_AFTER_BATCHES: u32 = 256;
/// Free space is told after this, whatever the sweeper still has to do: it may be behind by many large files, and
/// `forebay status` waits no longer than `WORKER_TIMEOUT` (`control.rs`).
pub(super) const WAIT_NS: u64 = 1_000_000_000;

/// What waits to be told of the free space.
#[derive(Debug)]
pub(super) enum Waiter {
    Call(Call),
    /// `forebay status`.
    Status(Sender<Value>),
}

/// What waits for the sweeper.
#[derive(Debug, Default)]
pub(super) struct LateRemovals {
    /// By the mark that the sweeper is to reach, and until when by [`forebay_ring::call_clock`].
    pub(super) waiting: Vec<(u64, u64, Waiter)>,
    /// Calls that have waited, to be taken into a batch.
    pub(super) ready: Vec<Call>,
    /// Those that were taken into it: they do not wait again, as others may remove files for ever.
    pub(super) released: Vec<Client>,
    /// The last mark given to the sweeper, and the last that it reached.
    pub(super) given: u64,
    pub(super) reached: u64,
    pub(super) batches: u32,
}
