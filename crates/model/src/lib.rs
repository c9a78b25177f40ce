//! The cost model of collective and independent I/O: a pattern of access and a calibration give times.
//!
//! The base is the paper's model (ROMIO-style two-phase I/O on emulated media): a collective call takes T_comm + T_io +
//! T_other, where T_comm sums T_s + T_w · msg · tau over the rounds of the exchange, and T_io is bytes / bw_seq. An
//! independent access takes bytes / bw_ran. [`Extensions`] add what the base leaves out. Each can be switched off, so that
//! its gain in error can be measured.
//!
//! The crate does no I/O: `forebay model` and the MPI driver measure, and pass numbers. All results follow from the
//! arguments by IEEE additions, multiplications and divisions alone. So ranks that pass equal numbers get equal results.
//!
//! Invariants, each with a test: times are positive and finite for any numbers; an interval contains its estimate; more
//! bytes never take less time; a correction stays within its limits whatever was measured.

#![forbid(unsafe_code)]

mod advice;
mod calibration;
mod correction;
mod document;
mod ior;
mod pattern;
mod prediction;

pub use advice::{advise, Advice, Choice};
pub use calibration::{Calibration, Value, NUMBERS};
pub use correction::{Corrections, FACTORS};
pub use document::{Document, VERSION};
pub use ior::{parse as parse_ior, IorRun};
pub use pattern::{Access, Pattern};
pub use prediction::{
    predict, predict_best, predict_calls, predict_with, Estimate, Extensions, Parts, Prediction,
};
