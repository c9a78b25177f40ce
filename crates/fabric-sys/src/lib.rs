//! Bindings to libfabric 1.15 or later, and nothing else.
//!
//! `tools/bind-libfabric` generates the types in [`bindings`] from libfabric's headers, and they are kept in the tree.
//! The library is found at run time ([`Library::get`]). So a machine without libfabric, its headers or libclang builds
//! all of Forebay and runs pools of one node. Symbols are requested by the version of their ABI, which every libfabric
//! since 1.9 supports, also 2.x: docs/decisions/0007-libfabric-bindings.md.
//!
//! Inline functions of the C headers are functions of the same names here. Like those, they call through tables that a
//! library fills. A call that a provider's table lacks returns -FI_ENOSYS.
//!
//! Tests: `tests/abi.rs` compares the kept types with a C compiler's view of the installed headers.

/// Types and constants, as in the headers.
#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, missing_debug_implementations)]
#[allow(clippy::all, unreachable_pub)]
pub mod bindings;
#[allow(clippy::too_many_arguments)] // as many as the C functions
mod calls;
mod library;

pub use bindings::*;
pub use calls::*;
/// Any peer, and no index in an address vector: `(uint64_t) -1` in the headers, which bindgen does not evaluate.
pub const FI_ADDR_UNSPEC: fi_addr_t = fi_addr_t::MAX;

pub use library::{Library, FI_VERSION_ASKED, FI_VERSION_LEAST};
