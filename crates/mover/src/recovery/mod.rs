//! Recovery of a dead pool (docs/decisions/0043): copies into the stores what its targets have and the stores lack.
//!
//! [`recover`] is all of it, for the command and for the scheduler's hooks: a plan in, events out. It opens the targets
//! for reading only, needs no daemon, and never replaces anything in a store. The caller holds the pool's locks.
//!
//! `names.rs` reads snapshots and shards, `find.rs` decides what is recovered and where to, `parts.rs` puts striped files
//! together, `write.rs` writes, `run.rs` has the whole. Tests: `crates/cli/tests/recover.rs`.

mod find;
mod names;
mod parts;
mod process;
mod run;
mod write;

pub use process::{is_meant, main};
pub use run::recover;
