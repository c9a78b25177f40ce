//! The network of a pool.
//!
//! [`Endpoint`] is what one node has of it: tagged messages to peers by address, reads and writes of their registered
//! memory, completions by [`Endpoint::progress`]. [`libfabric`] does it by libfabric's reliable datagrams;
//! [`simulated`] by a virtual network and clock that a seed replays. [`Calls`] is the layer that daemon and client use:
//! authenticated links (crates/wire), many requests in flight, deadlines, retries with the same (session, slot,
//! sequence), heartbeats.
//!
//! Invariants: every operation that was accepted is reported once, done or failed, at the latest at its deadline;
//! memory that the network may still touch is not freed; a peer that dies takes nothing of other peers with it; nothing
//! blocks but [`Endpoint::wait`]. Threads: none of its own. Who wants one asks for it ([`CallsThread`]); a provider of
//! libfabric may have threads that its settings ask for. No locks but the simulated network's one.
//!
//! Tests: `tests/suite.rs` over both kinds, `tests/death.rs` with processes that are killed, `tests/simulation.rs`.

mod calls;
mod endpoint;
pub mod libfabric;
mod memory;
mod numbers;
pub mod secret_file;
pub mod simulated;

pub use calls::{
    Body, CallEvent, CallId, Calls, CallsSettings, CallsThread, Failed, Identity, Statistics, Ticket,
};
pub use endpoint::{Direction, Endpoint, Event, Limits, Local, Peer, Registered, Sleep, Transfer, Waker};
pub use memory::{Access, Region};
pub use numbers::Numbers;
