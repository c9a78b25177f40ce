//! Bindings to libfabric 1.15 or later, and nothing else.
//!
//! The types in [`bindings`] are made from libfabric's headers by `tools/bind-libfabric` and kept in the tree; the
//! library is found at run time ([`Library::get`]). A machine without libfabric, its headers or libclang builds all of
//! Forebay and runs pools of one node. The symbols are asked for by the version of their ABI, which every libfabric
//! since 1.9 has kept, also 2.x: docs/decisions/0007-libfabric-bindings.md.
//!
//! What C programs get as inline functions are here functions of the same names. As those, they call through tables
//! that a library fills; a call that a provider's table does not have answers -FI_ENOSYS.
//!
//! Tests: `tests/abi.rs` compares the kept types with a C compiler's view of the installed headers.

/// Types and constants as the headers have them.
#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, missing_debug_implementations)]
#[allow(clippy::all, unreachable_pub)]
pub mod bindings;
#[allow(clippy::too_many_arguments)] // as many as the C functions
mod calls;
mod library;

pub use bindings::*;
pub use calls::*;
/// Any peer, and no place in an address vector: `(uint64_t) -1` in the headers, which bindgen does not evaluate.
pub const FI_ADDR_UNSPEC: fi_addr_t = fi_addr_t::MAX;

pub use library::{Library, FI_VERSION_ASKED, FI_VERSION_LEAST};
