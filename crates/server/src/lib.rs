//! forebayd: the owner of a node's shard and targets, and the library by which the command speaks to it.
//!
//! A pool that is up is two processes of one program. The *supervisor* (`supervisor`) holds what must outlive a crash
//! (lock, target, listening socket, descriptors of rings) and restarts the *worker* ([`worker`]), which opens the shard
//! and answers. The command starts and stops pools with [`launch`] and asks them with [`control`]; what lies in a
//! pool's directory is in [`directory`] and [`identity`].
//!
//! Processes meet in four ways only: the lock (who owns the pool), two unix sockets in the pool's directory (the
//! worker's for clients, the supervisor's for the command), and the pair between supervisor and worker ([`store`]).

pub mod bundle;
mod connection;
pub mod control;
pub mod daemon;
pub mod directory;
#[cfg(feature = "simulation")]
pub mod exercise;
mod frame;
pub mod hosts_file;
pub mod identity;
mod inherited;
pub mod launch;
mod members;
mod more_targets;
mod mount_process;
mod notifier;
pub mod pool_file;
mod pool_options;
mod pool_place;
mod programs;
mod protocol;
mod reserve;
pub mod rest;
mod setup;
pub mod store;
mod supervisor;
mod supplies;
mod target;
pub mod worker;
mod worker_process;

pub use forebay_data::{format_size, parse_size, Medium};
pub use identity::{Backing, PoolIdentity, POOL_FORMAT};
pub use members::JoinRequest;
pub use programs::TOKEN_VARIABLE;
pub use protocol::Stopped;
pub use setup::{WorkerSetup, FLIGHT_RECORDER_BYTES};
#[cfg(feature = "simulation")]
pub use worker::stepped;
