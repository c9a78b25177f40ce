//! `forebay recover`: pools on a disk whose processes are all killed, and what is in their stores afterwards.
//!
//! A killed pool is made to look as after the death of its node: its run directory is removed, or its shard is older than
//! this boot, torn or gone.

#![allow(unreachable_pub, missing_docs)]

mod common;

#[path = "recover/bed.rs"]
mod bed;
#[path = "recover/killed.rs"]
mod killed;
#[path = "recover/refused.rs"]
mod refused;
#[path = "recover/sources.rs"]
mod sources;
#[path = "recover/striped.rs"]
mod striped;
