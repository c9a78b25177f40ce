//! The FUSE protocol (docs/decisions/0005): what `forebay-mount` and the server of block devices have in common. Messages
//! are in [`protocol`], the descriptor that they pass through is a [`Device`], and [`Requests`] says which of several
//! threads takes the next one.

mod device;
// The kernel's header documents its names.
#[allow(missing_docs)]
pub mod protocol;
mod requests;
mod serving_threads;

pub use device::Device;
pub use requests::Requests;
