//! The shard: the part of the namespace that a node owns, on LMDB.
//!
//! A [`Shard`] answers [`forebay_types::Request`]s in batches: [`Shard::begin`] opens a [`Batch`], one LMDB write
//! transaction, [`Batch::apply`] answers a request in it, [`Batch::commit`] makes all of them permanent together. What
//! a request showed or changed is told in [`Effects`], for the board.
//!
//! What always holds, at every commit, and after a crash at any instant: an entry leads to an inode, and every inode is
//! led to; link counts and directory sizes are right; no inode number is given twice; what lost its last link and has
//! backing files is listed as an orphan. [`Shard::check`] checks all of it.
//!
//! Layers, top down: `namespace`, `rename`, `attributes`, `values` and `replies` are the operations; `batch` hands a
//! request to one of them; `directories` keeps directories in memory; `page_budget` counts pages, so that a full medium
//! is an error and never a signal; `record` and `keys` are what is stored; `lmdb_txn` is the only user of LMDB. The
//! format is in docs/disk-format.md.
//!
//! One thread has a shard. It does no I/O but page faults on its data file and a fallocate now and then, and a look-up
//! or create that finds its directory in memory allocates nothing. Tests: in the modules, and crates/meta/tests: a
//! reference model, crashes, a full medium, damage.

mod attributes;
mod batch;
mod check;
mod coordinator;
mod deliveries;
mod directories;
mod effects;
mod foreign_links;
mod holds;
mod keys;
mod lmdb_txn;
mod namespace;
mod page_budget;
mod participant;
mod record;
mod rename;
mod replies;
mod shard;
mod two_phase_commit;
mod values;
mod wide;

pub use batch::{Batch, PAYLOAD_BYTES_MAX};
pub use check::CheckReport;
pub use coordinator::Plan;
pub use effects::{Delivery, Effects, Mark, NameEffect, Since};
pub use foreign_links::{Beyond, BeyondEntry, Leading};
pub use replies::KEPT_REPLY_BYTES_MAX;
pub use shard::{Shard, ShardOptions, ShardStatistics};
pub use two_phase_commit::{Act, Client, Transactions};
