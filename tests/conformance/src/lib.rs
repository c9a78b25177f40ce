//! The conformance suite: tests the promises of docs/semantics.md through every door.
//!
//! [`case::Case`]s quote the document and try to break it. A [`door::Door`] defines how calls reach a file system. The
//! program `forebay-conformance` runs the cases through one door, in one process with one thread, and prints a line for
//! each case. tests/reference.rs runs it on plain directories, and on a door with a planted defect, which it must
//! detect; tests/doors.rs runs it through every door. The program `forebay-churn` is the workload that the crash tests
//! kill ([`churn`]).

pub mod case;
pub mod cases;
pub mod churn;
pub mod client_door;
pub mod disturbed_door;
pub mod document;
pub mod door;
pub mod harness;
pub mod libc_door;
pub mod linearizable;
pub mod nodes_door;
pub mod pair_door;
pub mod trees;
pub mod wrong_door;
