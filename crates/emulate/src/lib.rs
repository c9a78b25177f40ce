//! Block devices in memory that are as slow as a profile says (docs/emulation.md, docs/decisions/0050).
//!
//! A device is one of `forebay-block`. The *server* ([`serve`]) keeps the bytes ([`store`]) and paces the requests; its
//! memory is all locked and allocated before the device appears, and serving a request allocates nothing. The *keeper*
//! ([`program`]) measures how long requests are on their way through the kernel ([`way`]), and describes the device for
//! commands ([`description`]).
//!
//! Threads: the server has one for each request that the medium serves at the same time, and two more. A block's lock is
//! a leaf. Tests: beside the code, and `crates/cli/tests/emulate.rs`.

mod control;
mod description;
pub mod program;
mod serve;
mod store;
mod way;

pub use control::Faults;
pub use description::{all, directory, find, is_name, Description, Options};
pub use way::Way;
