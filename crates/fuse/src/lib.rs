//! The FUSE protocol (docs/decisions/0005): what `forebay-mount` and the server of emulated block devices have in common.
//! Messages are in [`protocol`], the descriptor that they pass through is a [`Device`].

mod device;
// The kernel's header documents its names.
#[allow(missing_docs)]
pub mod protocol;

pub use device::Device;
