//! The core: the shard thread's state, and what it does with the components of the worker. Components own their state and know
//! nothing of this; each file here joins one of them to the rest.

pub(super) mod pipeline;
pub(super) mod rounds;
pub(super) mod state;

mod notifying;
mod peers;
pub(super) mod recovery;
mod redirecting;
mod removing;
mod revoking;
mod transactions;
mod watching;
