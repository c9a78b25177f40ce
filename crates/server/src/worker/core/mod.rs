//! The core: the shard thread's state and its stages. The components of the worker own their state and import nothing
//! from here; each file here connects one of them to the rest.

pub(super) mod pipeline;
pub(super) mod rounds;
pub(super) mod state;

mod notifying;
mod peers;
pub(super) mod recovery;
mod redirecting;
mod removing;
mod revoking;
mod snapshotting;
mod store_waiting;
mod transactions;
mod volumes;
mod watching;
