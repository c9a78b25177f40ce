//! The shard: the part of the namespace that a node owns, on LMDB.
//!
//! A [`Shard`] answers [`forebay_types::Request`]s in batches: [`Shard::begin`] opens a [`Batch`], one LMDB write
//! transaction; [`Batch::apply`] answers a request in it; [`Batch::commit`] commits all of them together. [`Effects`]
//! lists what a request read or changed, for the board.
//!
//! Invariants at every commit, and after a crash at any instant: every entry leads to an inode, here or on another
//! node; every inode has an entry that leads to it, except the root and the parts of wide directories; link counts and
//! directory sizes are right; no inode number is assigned twice; an inode that lost its last link and has backing files
//! is listed as an orphan. [`Shard::check`] checks all of this.
//!
//! Layers, top down: `namespace`, `rename`, `attributes`, `values`, `replies`, and for backing stores `backing_store`,
//! `importing`, `store_links`, `unlisted` and `places`, and for volumes `volumes`, are the operations; `batch` dispatches
//! a request to one of them; `directories` caches directories in memory; `page_budget` counts pages, so that a full
//! medium is an error and never a signal; `record` and `keys` define the stored records; `lmdb_txn` is the only user of
//! LMDB. The format is in docs/disk-format.md.
//!
//! One thread at a time uses a shard. It does no I/O except page faults on its data file and an occasional fallocate. A
//! look-up or create whose directory is in memory allocates nothing. Tests: in the modules, and crates/meta/tests: a
//! reference model, crashes, a full medium, damage.

mod absences;
mod attributes;
mod backing_store;
mod batch;
mod check;
mod check_report;
mod check_stores;
mod coordinator;
mod copies;
mod deliveries;
mod directories;
mod effects;
mod foreign_links;
mod holds;
mod importing;
mod keys;
mod lmdb_txn;
mod namespace;
mod page_budget;
mod participant;
mod places;
mod record;
mod remains;
mod rename;
mod replies;
mod reports;
mod shard;
mod snapshot;
mod store_links;
mod two_phase_commit;
mod unlisted;
mod values;
mod volumes;
mod wide;

pub use backing_store::STORE_SETTINGS;
pub use batch::{Batch, Unlisted, PAYLOAD_BYTES_MAX};
pub use check_report::CheckReport;
pub use coordinator::Plan;
pub use effects::{Delivery, Effects, Mark, NameEffect, Since, UnlistedDirectory};
pub use foreign_links::{ForeignEntry, ForeignPart, ForeignReferences, Leading};
pub use remains::{NameIn, Remains, Values};
pub use replies::KEPT_REPLY_BYTES_MAX;
pub use shard::{Shard, ShardOptions, ShardStatistics};
pub use snapshot::{check_snapshot, SnapshotHead, SnapshotSource, SNAPSHOT_FILE, SNAPSHOT_FILE_NEW};
pub use two_phase_commit::{Act, Client, Transactions};
