//! All limits of messages between nodes, each with its reason.

use forebay_types::limits::{MESSAGE_BYTES_MAX, XATTR_VALUE_MAX};

/// Oldest protocol version that this build supports.
pub const PROTOCOL_MIN: u16 = 5;
/// Newest protocol version that this build supports. Version 5 has the requests of backing stores and volumes, pieces and
/// lists of ranges in data requests, and attributes with their flags. `tests/conformance/tests/versions.rs` ties it to the
/// requests.
pub const PROTOCOL_MAX: u16 = 5;
/// Bytes of an endpoint's address. The longest addresses of libfabric's network providers (psm3, efa, cxi) are under 64
/// bytes, names of the shm provider 256.
pub const ADDRESS_BYTES_MAX: usize = 256;
/// Bytes of data within a message. More are moved by RMA. At least as large as the largest extended attribute, so that
/// one size of receive buffer serves both.
pub const INLINE_BYTES_MAX: usize = 64 * 1024;
/// Bytes of one data request: the most that a data buffer may hold.
pub const DATA_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the text in a failure or goodbye, which becomes a log line.
pub const DETAIL_BYTES_MAX: usize = 512;
/// Largest node number (`forebay_types::NodeId`).
pub const NODE_MAX: u16 = 32_767;
/// The highest slot number. A client's ring has 64 slots. More are allowed for daemons that send requests of many
/// clients.
pub const SLOT_MAX: u16 = 4095;
/// Bytes of a body: the largest request or reply, or inline data with its fields.
pub const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
/// Bytes of a frame in front of its body.
pub const HEADER_BYTES: usize = 56;
/// Bytes of the MAC behind the body.
pub const MAC_BYTES: usize = 32;
/// Bytes of a frame.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX + MAC_BYTES;
/// Bytes of a bundle: many small frames that fit into one of the endpoint's small buffers.
pub const BUNDLE_BYTES_MAX: usize = 8 * 1024;
/// Frames that may overtake each other: a frame is accepted, once, if its counter is at most about this far behind the
/// newest.
pub const WINDOW_FRAMES: u64 = 1024;

const _: () = assert!(PROTOCOL_MIN <= PROTOCOL_MAX && PROTOCOL_MIN > 0);
const _: () = assert!(BODY_BYTES_MAX >= INLINE_BYTES_MAX + 64 && INLINE_BYTES_MAX >= XATTR_VALUE_MAX);
const _: () = assert!(BODY_BYTES_MAX < u32::MAX as usize);
const _: () = assert!(BUNDLE_BYTES_MAX <= FRAME_BYTES_MAX);
const _: () = assert!(WINDOW_FRAMES.trailing_zeros() >= 6);
