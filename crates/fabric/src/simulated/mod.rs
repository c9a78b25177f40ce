//! A simulated network. Its clock moves only when the test moves it, and a seed determines the history.
//!
//! [`Network::turn`] applies the next step that is due. Messages and transfers are delayed, dropped, duplicated and
//! reordered as [`Faults`] says. The test can cut hosts off from each other, stop them, kill them and start them again.
//! All events enter [`Network::trace`], a number that is the same for equal histories.
//!
//! The network is less reliable than a reliable transport: a send that was reported as done may be lost (as on a
//! connection that broke after the kernel had taken the bytes), and a send that was reported as failed may have
//! arrived.

mod endpoint;
mod network;

pub use endpoint::SimulatedEndpoint;
pub use network::{Faults, Network};
