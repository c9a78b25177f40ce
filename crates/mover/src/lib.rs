//! Between the pool and its backing stores.
//!
//! [`store`] is the one door to the stores: directories and object stores behind one trait. [`program`] is the process,
//! which runs an [`program::Engine`]; [`tasks`] is what users have it do. [`recovery`] copies
//! into the stores what a dead pool has left; [`volume_copy`] copies between a volume and an object of a store.

#![forbid(unsafe_code)]

mod engine;
pub mod host;
pub mod program;
pub mod recovery;
pub mod store;
pub mod tasks;
pub mod volume_copy;

pub use engine::start;
