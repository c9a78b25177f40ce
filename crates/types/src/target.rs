//! Targets in the encoding of layouts, and reports of their space.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::NodeId;
use crate::limits::TARGETS_MAX;

/// The number of a target: its node in the upper 16 bits, its index on that node in the lower.
pub const fn target_of(node: NodeId, index: u16) -> u32 {
    (node.0 as u32) << 16 | index as u32
}

/// The node of a target.
pub const fn node_of(target: u32) -> NodeId {
    NodeId((target >> 16) as u16)
}

/// One to [`TARGETS_MAX`] targets, for a layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Targets {
    count: u8,
    all: [u32; TARGETS_MAX],
}

impl Targets {
    /// The targets of a list; none when it is empty or too long.
    pub fn new(list: &[u32]) -> Option<Targets> {
        if list.is_empty() || list.len() > TARGETS_MAX {
            return None;
        }
        let mut all = [0; TARGETS_MAX];
        all[..list.len()].copy_from_slice(list);
        Some(Targets { count: list.len() as u8, all })
    }

    /// The targets.
    pub fn as_slice(&self) -> &[u32] {
        &self.all[..usize::from(self.count)]
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(self.count)?;
        self.as_slice().iter().try_for_each(|t| w.u32(*t))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Targets, Code> {
        let count = usize::from(r.u8()?);
        let mut all = [0; TARGETS_MAX];
        for t in all.get_mut(..count).ok_or(Code::Malformed)? {
            *t = r.u32()?;
        }
        Targets::new(&all[..count]).ok_or(Code::Malformed)
    }
}

/// Space of one target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetSpace {
    /// The target.
    pub target: u32,
    /// Bytes in total.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// True when it lies in memory (`--media`).
    pub in_memory: bool,
}

/// Encoded bytes of a [`TargetSpace`].
const SPACE_BYTES: usize = 4 + 8 + 8 + 1;

/// Space of several targets, encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetSpaces<'a> {
    bytes: &'a [u8],
}

impl<'a> TargetSpaces<'a> {
    /// Encodes a list into `buffer`.
    pub fn encode(list: &[TargetSpace], buffer: &'a mut [u8]) -> Result<TargetSpaces<'a>, Code> {
        let mut w = Writer::new(buffer);
        for s in list {
            w.u32(s.target)?;
            w.u64(s.total_bytes)?;
            w.u64(s.free_bytes)?;
            w.u8(s.in_memory.into())?;
        }
        let n = w.len();
        Ok(TargetSpaces { bytes: &buffer[..n] })
    }

    pub(crate) fn of(bytes: &'a [u8]) -> Result<TargetSpaces<'a>, Code> {
        match bytes.len() % SPACE_BYTES {
            0 => Ok(TargetSpaces { bytes }),
            _ => Err(Code::Malformed),
        }
    }

    pub(crate) fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The list.
    pub fn iter(&self) -> impl Iterator<Item = TargetSpace> + 'a {
        self.bytes.chunks_exact(SPACE_BYTES).filter_map(|bytes| {
            let mut r = Reader::new(bytes);
            Some(TargetSpace {
                target: r.u32().ok()?,
                total_bytes: r.u64().ok()?,
                free_bytes: r.u64().ok()?,
                in_memory: r.u8().ok()? != 0,
            })
        })
    }
}
