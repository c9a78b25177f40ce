//! The network of a pool.
//!
//! [`Endpoint`] is one node's access to the network: tagged messages to peers by address, reads and writes of their
//! registered memory, completions by [`Endpoint::progress`]. [`libfabric`] implements it with libfabric's reliable
//! datagrams; [`simulated`] with a virtual network and clock, reproducible from a seed. [`Calls`] is the layer that
//! daemons use: authenticated links (crates/wire), many requests in flight, deadlines, retries with the same (session,
//! slot, sequence), heartbeats.
//!
//! Invariants: every accepted operation is reported once, as done or failed, at the latest at its deadline. Memory that
//! the network may still access is not freed. The death of one peer does not affect operations with other peers. Only
//! [`Endpoint::wait`] blocks. Threads: none, unless the user starts a [`CallsThread`], or libfabric's settings make its
//! provider start some. Locks: only that of the simulated network.
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
