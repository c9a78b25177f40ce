//! `forebayd`, which owns a node's shard and targets, and the library with which the `forebay` command controls it.
//!
//! A pool that is up has two processes of one program on each node. The *supervisor* (`supervisor`) holds the resources
//! that must survive a crash (lock, target, listening socket, the rings' descriptors) and restarts the *worker*
//! ([`worker`]), which opens the shard and answers requests. The command starts and stops pools with [`launch`] and
//! sends requests to them with [`control`]. [`directory`] and [`identity`] describe the files in a pool's directory.
//!
//! Processes communicate in only these ways: the lock (which process owns the pool), two unix sockets in the pool's
//! directory (the worker's for clients, the supervisor's for the command), and the socket pair between supervisor and
//! worker ([`store`]).

pub mod bundle;
mod child_process;
mod connection;
pub mod control;
pub mod daemon;
mod dead_pool;
pub mod directory;
#[cfg(feature = "simulation")]
pub mod exercise;
mod frame;
pub mod hosts_file;
pub mod identity;
mod inherited;
pub mod launch;
mod life;
pub mod media_profile;
mod members;
mod more_targets;
mod mount_process;
mod mover_process;
mod notifier;
pub mod pacing;
pub mod pool_file;
mod pool_options;
mod pool_place;
mod programs;
mod protocol;
mod reserve;
pub mod rest;
mod setup;
mod snapshot_period;
pub mod store;
mod supervisor;
mod supplies;
mod target;
pub mod worker;
mod worker_process;

pub use dead_pool::DeadPool;
pub use forebay_data::{format_size, parse_size, Medium};
pub use identity::{Backing, PoolIdentity, POOL_FORMAT};
pub use members::JoinRequest;
pub use mover_process::mover_program;
pub use programs::TOKEN_VARIABLE;
pub use protocol::Stopped;
pub use setup::{WorkerSetup, FLIGHT_RECORDER_BYTES};
pub use snapshot_period::parse_snapshot_period;
#[cfg(feature = "simulation")]
pub use worker::stepped;
