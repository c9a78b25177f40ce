//! The conformance suite: what docs/semantics.md promises, tried through every door.
//!
//! [`case::Case`]s quote the document and try to break it; a [`door::Door`] says how calls reach a file system. The
//! program `forebay-conformance` runs the cases through one door, in one process of one thread, and prints a line for
//! each; tests/suite.rs runs it for every door, on plain directories first, and on a door that lies, which must be
//! caught. The same program is the workload that the crash tests kill ([`churn`]).

pub mod case;
pub mod cases;
pub mod churn;
pub mod client_door;
pub mod document;
pub mod door;
pub mod harness;
pub mod libc_door;
pub mod nodes_door;
pub mod pair_door;
pub mod wrong_door;
