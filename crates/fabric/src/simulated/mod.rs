//! A network that is not there: its clock moves only when told, and one seed gives one history.
//!
//! [`Network::turn`] applies the next thing that is due. Messages and transfers are delayed, dropped, duplicated and
//! reordered as [`Faults`] say; hosts are cut off, stopped, killed and started again by whoever drives the test. All
//! that happens goes into [`Network::trace`], a number that two equal histories share.
//!
//! It is meaner than a reliable transport: what a sender believes to have sent may be lost (a connection that broke
//! after the kernel had taken the bytes), and what failed may have arrived.

mod endpoint;
mod network;

pub use endpoint::SimulatedEndpoint;
pub use network::{Faults, Network};
