//! Jobs of a batch system: what `slurm/burst_buffer.lua`, prolog and epilog call.
//!
//! ```text
//! slurmctld ─► burst_buffer.lua ─► hooks      write records and orders, read results; never open a user's file
//!                                   └► reconcile   asks Slurm which jobs it has, and does what lost hooks have left
//! slurmd    ─► prolog, epilog   ─► node       root: makes the user's directory, then runs the rest as the user
//!                                   └► user   starts the pool, stages, drains, stops it; writes results
//! ```
//! The two sides meet in a directory that controller and nodes share, the registry (`registry`). Its records belong to
//! SlurmUser, its results to the user whose job it is; the controller takes a result only from a directory of that
//! user. State is keyed by job and run: a run is one life of the burst buffer of a job, and a requeued job has another.

pub(crate) mod command;
pub(crate) mod config;
pub(crate) mod destroying;
pub(crate) mod directives;
pub(crate) mod hooks;
pub(crate) mod lost;
pub(crate) mod node;
pub(crate) mod outdated;
pub(crate) mod partial;
pub(crate) mod queue;
pub(crate) mod reconcile;
pub(crate) mod recover;
pub(crate) mod registry;
pub(crate) mod script;
pub(crate) mod sharing;
pub(crate) mod staging;
pub(crate) mod steward;
pub(crate) mod tickets;
pub(crate) mod turns;
pub(crate) mod user;
