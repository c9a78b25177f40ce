//! Frames: a header of fixed size, a body, a MAC.
//!
//! ```text
//!  0  4  "FBAY"            8  4  bytes of the body      24  8  counter        48  8  sequence
//!  4  2  protocol         12  2  slot                   32  8  request        56     body
//!  6  1  kind             14  2  0                      40  8  session           32  MAC over all before it
//!  7  1  0                16  8  link of the receiver
//! ```
//! Frames of a handshake have protocol 0, link 0, counter 0. Their form never changes.

use forebay_types::{Code, Reader};

use crate::limits::{BODY_BYTES_MAX, HEADER_BYTES, MAC_BYTES, SLOT_MAX};

const MAGIC: &[u8; 4] = b"FBAY";

/// The kind of a frame's body.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Opens a handshake.
    Hello = 1,
    /// Accepts a handshake.
    Welcome = 2,
    /// Refuses a handshake.
    Refuse = 3,
    /// Completes a handshake. It is usually the first frame under the session's key.
    Finish = 4,
    /// A request of `forebay-types`.
    Ask = 10,
    /// Its reply.
    Answer = 11,
    /// A read from a backing file.
    ReadStripe = 12,
    /// A write to a backing file.
    WriteStripe = 13,
    // 14 to 19 are reserved. They were kinds that were never sent, and are refused like any unknown number.
    /// The sender is alive.
    Heartbeat = 20,
    /// Answers a heartbeat.
    Alive = 21,
    /// The sender leaves in order.
    Goodbye = 22,
    /// A request could not be served.
    Failure = 23,
    /// Requests memory of the receiver into which the sender may write data ahead of its requests.
    TakeEagerBuffers = 24,
    /// Grants that memory.
    GrantEagerBuffers = 25,
}

impl Kind {
    /// Every kind, for tests that walk them.
    pub const ALL: [Kind; 14] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Refuse,
        Kind::Finish,
        Kind::Ask,
        Kind::Answer,
        Kind::ReadStripe,
        Kind::WriteStripe,
        Kind::Heartbeat,
        Kind::Alive,
        Kind::Goodbye,
        Kind::Failure,
        Kind::TakeEagerBuffers,
        Kind::GrantEagerBuffers,
    ];

    /// The kind with this number.
    pub fn from_u8(v: u8) -> Result<Kind, Code> {
        Kind::ALL.into_iter().find(|k| *k as u8 == v).ok_or(Code::Malformed)
    }

    /// True for frames of a handshake, whose MAC uses a key of the pool.
    pub fn is_handshake(self) -> bool {
        matches!(self, Kind::Hello | Kind::Welcome | Kind::Refuse)
    }

    /// True for kinds that must be answered.
    pub fn asks(self) -> bool {
        matches!(self, Kind::Ask | Kind::ReadStripe | Kind::WriteStripe | Kind::TakeEagerBuffers)
    }

    /// True for kinds that answer a request.
    pub fn answers(self) -> bool {
        matches!(self, Kind::Answer | Kind::GrantEagerBuffers | Kind::Failure)
    }
}

/// Identifies a request. A retry has the same stamp, and is answered from the kept reply instead of being executed
/// again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stamp {
    /// The session of the client that made the request.
    pub session: u64,
    /// Slot of the session, at most 4095. A slot has one request at a time.
    pub slot: u16,
    /// Increases with every request of the slot.
    pub sequence: u64,
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Protocol version of the session, 0 in a handshake.
    pub protocol: u16,
    /// The kind of the body.
    pub kind: Kind,
    /// The receiver's number for the link; 0 in a handshake.
    pub link: u64,
    /// The number of the frame in its direction of the session.
    pub counter: u64,
    /// The requester's number of the request, in the request and in its answer. 0 for other kinds.
    pub request: u64,
    /// The stamp of the request.
    pub stamp: Stamp,
    /// Bytes of the body.
    pub body_bytes: usize,
}

impl Header {
    /// Replaces the contents of `out` by header and body, and reserves space for the MAC.
    pub(crate) fn put(&self, body: &[u8], out: &mut Vec<u8>) -> Result<(), Code> {
        if body.len() > BODY_BYTES_MAX || self.stamp.slot > SLOT_MAX {
            return Err(Code::TooBig);
        }
        out.clear();
        out.reserve(HEADER_BYTES + body.len() + MAC_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.protocol.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, 0]);
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.stamp.slot.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        for v in [self.link, self.counter, self.request, self.stamp.session, self.stamp.sequence] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        debug_assert_eq!(out.len(), HEADER_BYTES);
        out.extend_from_slice(body);
        Ok(())
    }

    /// Reads the header of a frame, and checks the frame's length. The header is not authenticated yet. It may only be
    /// used to select the key.
    ///
    /// # Errors
    /// [`Code::Malformed`] for anything that Forebay does not send.
    pub fn peek(frame: &[u8]) -> Result<Header, Code> {
        let mut r = Reader::new(frame);
        if r.array::<4>()? != MAGIC {
            return Err(Code::Malformed);
        }
        let protocol = r.u16()?;
        let kind = Kind::from_u8(r.u8()?)?;
        let zero = r.u8()?;
        let body_bytes = r.u32()? as usize;
        let slot = r.u16()?;
        let zeros = r.u16()?;
        let (link, counter, request) = (r.u64()?, r.u64()?, r.u64()?);
        let stamp = Stamp { session: r.u64()?, slot, sequence: r.u64()? };
        let sound = zero == 0
            && zeros == 0
            && slot <= SLOT_MAX
            && body_bytes <= BODY_BYTES_MAX
            && frame.len() == HEADER_BYTES + body_bytes + MAC_BYTES
            && kind.is_handshake() == (protocol == 0)
            && (!kind.is_handshake() || (link, counter, request, stamp) == (0, 0, 0, Stamp::default()));
        if !sound {
            return Err(Code::Malformed);
        }
        Ok(Header { protocol, kind, link, counter, request, stamp, body_bytes })
    }

    /// The length of the frame that starts at the first of these bytes. There may be fewer or more bytes.
    pub(crate) fn frame_bytes(bytes: &[u8]) -> Result<usize, Code> {
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(Code::Malformed)?;
        let body_bytes = rest.get(4..8).and_then(|word| word.first_chunk()).ok_or(Code::Malformed)?;
        let body_bytes = u32::from_le_bytes(*body_bytes) as usize;
        if magic != MAGIC || body_bytes > BODY_BYTES_MAX {
            return Err(Code::Malformed);
        }
        Ok(HEADER_BYTES + body_bytes + MAC_BYTES)
    }

    /// True for bytes that start with a frame of a handshake, judged by its header.
    pub(crate) fn is_handshake(bytes: &[u8]) -> bool {
        bytes.get(4..6) == Some(&[0, 0])
    }

    /// The body of a frame that [`Header::peek`] accepted.
    pub(crate) fn body(frame: &[u8]) -> &[u8] {
        &frame[HEADER_BYTES..frame.len() - MAC_BYTES]
    }
}

/// Appends the MAC of the contents of `out`.
pub(crate) fn seal(key: &[u8; 32], out: &mut Vec<u8>) {
    let mac = blake3::keyed_hash(key, out);
    out.extend_from_slice(mac.as_bytes());
}

/// True if the frame's last bytes are the MAC of the others. The comparison takes constant time.
pub(crate) fn proven(key: &[u8; 32], frame: &[u8]) -> bool {
    let Some((said, mac)) = frame.split_last_chunk::<MAC_BYTES>() else { return false };
    blake3::keyed_hash(key, said) == blake3::Hash::from_bytes(*mac)
}
