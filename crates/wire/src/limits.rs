//! Every number that bounds something between nodes, with the reason beside it.

use forebay_types::limits::{MESSAGE_BYTES_MAX, XATTR_VALUE_MAX};

/// Oldest protocol that this build speaks.
pub const PROTOCOL_MIN: u16 = 4;
/// Newest protocol that this build speaks.
pub const PROTOCOL_MAX: u16 = 4;
/// Bytes of an endpoint's address: libfabric's longest in use (psm3, efa, cxi) are under 64, names of the shm provider
/// 256.
pub const ADDRESS_BYTES_MAX: usize = 256;
/// Bytes of data within a message; more goes by RMA. As large as the largest extended attribute, so that one size of
/// receive buffer serves both.
pub const INLINE_BYTES_MAX: usize = 64 * 1024;
/// Bytes of one data request: what a bounce buffer may hold.
pub const DATA_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the words in an error or goodbye: for a log line.
pub const DETAIL_BYTES_MAX: usize = 512;
/// Largest node number (`forebay_types::NodeId`).
pub const NODE_MAX: u16 = 32_767;
/// Slots of a session: a client's 64 by ring, with room for daemons that ask on behalf of many.
pub const SLOT_MAX: u16 = 4095;
/// Bytes of a body: the largest request or reply, or inline data with its fields.
pub const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
/// Bytes of a frame in front of its body.
pub const HEADER_BYTES: usize = 56;
/// Bytes of the MAC behind the body.
pub const MAC_BYTES: usize = 32;
/// Bytes of a frame.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX + MAC_BYTES;
/// Bytes of several frames in one message: many small ones, in one of the endpoint's small buffers.
pub const BUNDLE_BYTES_MAX: usize = 8 * 1024;
/// Frames that may overtake one another: how far behind the newest counter a frame is still taken, once.
pub const WINDOW_FRAMES: u64 = 1024;

const _: () = assert!(PROTOCOL_MIN <= PROTOCOL_MAX && PROTOCOL_MIN > 0);
const _: () = assert!(BODY_BYTES_MAX >= INLINE_BYTES_MAX + 64 && INLINE_BYTES_MAX >= XATTR_VALUE_MAX);
const _: () = assert!(BODY_BYTES_MAX < u32::MAX as usize);
const _: () = assert!(BUNDLE_BYTES_MAX <= FRAME_BYTES_MAX);
const _: () = assert!(WINDOW_FRAMES.trailing_zeros() >= 6);
