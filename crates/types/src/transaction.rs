//! Cross-node transactions: two-phase commit (docs/decisions/0016).
//!
//! Each node that has a part in a change prepares it: it checks that the change can be made, and holds the names and
//! directories concerned. When all have prepared, the coordinator decides, once, and sends the decision to all. A
//! participant whose part stays prepared without a message asks the coordinator for the outcome. A transaction that the
//! coordinator does not know was aborted.

use std::fmt;

use crate::attr::{permission_bits, Kind};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::WIDTH_MAX;
use crate::name;
use crate::request::RENAME_NOREPLACE;
use crate::set_attr::SetAttr;
use crate::wide::Parts;

/// A transaction's number: its coordinator's node in the upper 16 bits, a number of that node's in the lower 48.
///
/// It also names the link from an entry on one node to a file of another: a link has the number of the transaction that
/// made it, and keeps the number when its entry is renamed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TxId(pub u64);

impl TxId {
    /// Bits of the number below the node's.
    pub const NUMBER_BITS: u32 = 48;
    /// No transaction: the link of an entry whose inode is on its own node, or is a directory.
    pub const NONE: TxId = TxId(0);

    /// The `number`-th transaction that `node` coordinates.
    pub fn new(node: NodeId, number: u64) -> TxId {
        TxId(u64::from(node.0) << TxId::NUMBER_BITS | number & ((1 << TxId::NUMBER_BITS) - 1))
    }

    /// The node that decides it.
    pub fn coordinator(self) -> NodeId {
        NodeId((self.0 >> TxId::NUMBER_BITS) as u16)
    }
}

impl fmt::Display for TxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for TxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TxId({self})")
    }
}

/// The outcome of a transaction, from its coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Outcome {
    /// It was aborted, or is not known: no part of it takes effect.
    Aborted = 1,
    /// All of it takes effect.
    Committed = 2,
    /// Some participants have not prepared yet.
    Undecided = 3,
}

impl Outcome {
    /// The outcome that a number stands for in an encoding.
    pub fn from_u8(v: u8) -> Result<Outcome, Code> {
        Ok(match v {
            1 => Outcome::Aborted,
            2 => Outcome::Committed,
            3 => Outcome::Undecided,
            _ => return Err(Code::Malformed),
        })
    }
}

/// A part of a transaction, for one node. A node may have several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part<'a> {
    /// Removes an entry. [`Code::Stale`] when it leads to another inode. → `Done`
    Leave {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// The inode that it must lead to.
        ino: Ino,
        /// The link that is counted instead of the entry, if the inode is a file of this node that gets an entry on
        /// another.
        link: TxId,
    },
    /// Creates an entry, or makes an entry lead to another inode. → `Removed`: the inode replaced, if any; for a
    /// directory that replaces nothing ([`RENAME_NOREPLACE`]) `Entry`: its parent's
    Enter {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// The inode that it will lead to.
        ino: Ino,
        /// Its kind.
        kind: Kind,
        /// The entry's link, unless the inode is a directory. On the inode's own node the entry itself is counted
        /// instead.
        link: TxId,
        /// 0, or [`RENAME_NOREPLACE`]. A directory can only replace an empty directory, which another part removes.
        flags: u32,
    },
    /// Counts a link for an entry on another node: at once, and takes it back when the transaction is aborted. →
    /// `Entry`
    Count {
        /// Inode.
        ino: Ino,
        /// The link.
        link: TxId,
    },
    /// Creates a directory whose entry another node will have. → `Entry`
    CreateInode {
        /// The directory that will have its entry.
        parent: Ino,
        /// Permission bits, umask applied.
        mode: u32,
    },
    /// Changes the parent of a directory to one on another node. → `Done`
    Move {
        /// The directory.
        ino: Ino,
        /// Its new parent.
        parent: Ino,
    },
    /// Removes an empty directory whose entry another part removes. → `Done`
    Condemn {
        /// The directory.
        ino: Ino,
    },
    /// Makes an empty directory wide. Without parts, the first step: holds the directory. With parts: sets them. →
    /// `Entry`
    Widen {
        /// The directory.
        ino: Ino,
        /// Its parts.
        parts: Option<Parts>,
    },
    /// Creates a part of a directory that becomes wide. → `Entry`
    CreatePart {
        /// The node that creates it.
        node: NodeId,
        /// The directory.
        of: Ino,
        /// The index of this part,
        index: u8,
        /// and the number of parts.
        width: u8,
        /// The attributes and layout that it takes over from the directory.
        like: Change,
    },
    /// Changes attributes or layout of a wide directory, or of a part of one. Two changes of one directory never
    /// overlap. → for a directory the reply to the request
    Change {
        /// The directory, or part.
        ino: Ino,
        /// The change.
        change: Change,
    },
    /// Holds all directories from `from` up to the topmost ancestor on this node, so that none of them is moved.
    /// [`Code::Invalid`] when `avoid` is among them. → `Number`: the parent of the topmost, on another node, or the
    /// root
    Climb {
        /// The lowest of them.
        from: Ino,
        /// The directory that must not be an ancestor.
        avoid: Ino,
    },
}

/// A change of a wide directory's attributes or layout, in which its parts take part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change {
    /// Attributes.
    pub set: SetAttr,
    /// The new layout of files that are created in it.
    pub layout: Option<Layout>,
}

impl Change {
    fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        self.set.encode(w)?;
        w.u8(u8::from(self.layout.is_some()))?;
        self.layout.map_or(Ok(()), |layout| layout.encode(w))
    }

    fn decode(r: &mut Reader<'_>) -> Result<Change, Code> {
        let set = SetAttr::decode(r)?;
        let layout = match r.u8()? {
            0 => None,
            1 => Some(Layout::decode(r)?),
            _ => return Err(Code::Malformed),
        };
        Ok(Change { set, layout })
    }
}

impl<'a> Part<'a> {
    /// Appends the part.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        match *self {
            Part::Leave { parent, name, ino, link } => {
                w.u8(1)?;
                w.u64(parent.0)?;
                w.u64(ino.0)?;
                w.u64(link.0)?;
                w.short_bytes(name)
            }
            Part::Enter { parent, name, ino, kind, link, flags } => {
                w.u8(2)?;
                w.u64(parent.0)?;
                w.u64(ino.0)?;
                w.u8(kind as u8)?;
                w.u64(link.0)?;
                w.u32(flags)?;
                w.short_bytes(name)
            }
            Part::Count { ino, link } => {
                w.u8(3)?;
                w.u64(ino.0)?;
                w.u64(link.0)
            }
            Part::CreateInode { parent, mode } => {
                w.u8(4)?;
                w.u64(parent.0)?;
                w.u32(mode)
            }
            Part::Move { ino, parent } => {
                w.u8(5)?;
                w.u64(ino.0)?;
                w.u64(parent.0)
            }
            Part::Condemn { ino } => {
                w.u8(6)?;
                w.u64(ino.0)
            }
            Part::Widen { ino, parts } => {
                w.u8(8)?;
                w.u64(ino.0)?;
                w.u8(u8::from(parts.is_some()))?;
                parts.map_or(Ok(()), |parts| parts.encode(w))
            }
            Part::CreatePart { node, of, index, width, ref like } => {
                w.u8(9)?;
                w.u16(node.0)?;
                w.u64(of.0)?;
                w.u8(index)?;
                w.u8(width)?;
                like.encode(w)
            }
            Part::Change { ino, ref change } => {
                w.u8(10)?;
                w.u64(ino.0)?;
                change.encode(w)
            }
            Part::Climb { from, avoid } => {
                w.u8(7)?;
                w.u64(from.0)?;
                w.u64(avoid.0)
            }
        }
    }

    /// Reads a part. Checks names and flags.
    pub fn decode(r: &mut Reader<'a>) -> Result<Part<'a>, Code> {
        Ok(match r.u8()? {
            1 => {
                let (parent, ino, link) = (Ino(r.u64()?), Ino(r.u64()?), TxId(r.u64()?));
                Part::Leave { parent, name: name::read(r)?, ino, link }
            }
            2 => {
                let (parent, ino, kind) = (Ino(r.u64()?), Ino(r.u64()?), Kind::from_u8(r.u8()?)?);
                let (link, flags) = (TxId(r.u64()?), r.u32()?);
                if !matches!(flags, 0 | RENAME_NOREPLACE) {
                    return Err(Code::Invalid);
                }
                Part::Enter { parent, name: name::read(r)?, ino, kind, link, flags }
            }
            3 => Part::Count { ino: Ino(r.u64()?), link: TxId(r.u64()?) },
            4 => Part::CreateInode { parent: Ino(r.u64()?), mode: permission_bits(r.u32()?)? },
            5 => Part::Move { ino: Ino(r.u64()?), parent: Ino(r.u64()?) },
            6 => Part::Condemn { ino: Ino(r.u64()?) },
            7 => Part::Climb { from: Ino(r.u64()?), avoid: Ino(r.u64()?) },
            8 => {
                let ino = Ino(r.u64()?);
                let parts = match r.u8()? {
                    0 => None,
                    1 => Some(Parts::decode(r)?),
                    _ => return Err(Code::Malformed),
                };
                if parts.is_some_and(|parts| parts.of != ino) {
                    return Err(Code::Invalid);
                }
                Part::Widen { ino, parts }
            }
            9 => {
                let (node, of, index, width) = (NodeId(r.u16()?), Ino(r.u64()?), r.u8()?, r.u8()?);
                if index >= width || usize::from(width) > WIDTH_MAX {
                    return Err(Code::Invalid);
                }
                Part::CreatePart { node, of, index, width, like: Change::decode(r)? }
            }
            10 => Part::Change { ino: Ino(r.u64()?), change: Change::decode(r)? },
            _ => return Err(Code::Malformed),
        })
    }

    /// The node that prepares it. None for a directory to be created: the coordinator prepares it.
    pub fn node(&self) -> Option<NodeId> {
        match *self {
            Part::Leave { parent, .. } | Part::Enter { parent, .. } => Some(parent.birth_node()),
            Part::Count { ino, .. }
            | Part::Move { ino, .. }
            | Part::Condemn { ino }
            | Part::Widen { ino, .. }
            | Part::Change { ino, .. } => Some(ino.birth_node()),
            Part::CreatePart { node, .. } => Some(node),
            Part::Climb { from, .. } => Some(from.birth_node()),
            Part::CreateInode { .. } => None,
        }
    }
}

/// The nodes of a decision, two bytes each.
pub fn decode_nodes(bytes: &[u8]) -> impl Iterator<Item = NodeId> + '_ {
    bytes.chunks_exact(2).map(|pair| NodeId(u16::from_le_bytes([pair[0], pair[1]])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_round_trips_and_is_refused_when_cut() {
        let (ino, parent, link) =
            (Ino::new(NodeId(3), 7), Ino::new(NodeId(2), 9), TxId::new(NodeId(5), 1 << 40));
        let name = b"a name".as_slice();
        let set = SetAttr { gid: Some(5), ..SetAttr::default() };
        let change = Change { set, layout: Some(Layout::single(NodeId(2), 0)) };
        let parts = Parts::new(ino, &[Ino::part(NodeId(2), 1), Ino::part(NodeId(3), 1)]).unwrap();
        let all = [
            (Part::Widen { ino, parts: None }, Some(NodeId(3))),
            (Part::Widen { ino, parts: Some(parts) }, Some(NodeId(3))),
            (
                Part::CreatePart { node: NodeId(4), of: ino, index: 2, width: 3, like: change },
                Some(NodeId(4)),
            ),
            (Part::Change { ino, change: Change { layout: None, ..change } }, Some(NodeId(3))),
            (Part::Leave { parent, name, ino, link }, Some(NodeId(2))),
            (
                Part::Enter { parent, name, ino, kind: Kind::Fifo, link, flags: RENAME_NOREPLACE },
                Some(NodeId(2)),
            ),
            (Part::Count { ino, link }, Some(NodeId(3))),
            (Part::CreateInode { parent, mode: 0o1755 }, None),
            (Part::Move { ino, parent }, Some(NodeId(3))),
            (Part::Condemn { ino }, Some(NodeId(3))),
            (Part::Climb { from: ino, avoid: parent }, Some(NodeId(3))),
        ];
        for (part, node) in all {
            let mut bytes = [0; 300];
            let mut w = Writer::new(&mut bytes);
            part.encode(&mut w).unwrap();
            let n = w.len();
            assert_eq!(Part::decode(&mut Reader::new(&bytes[..n])), Ok(part));
            assert_eq!(part.node(), node);
            for short in 0..n {
                assert!(Part::decode(&mut Reader::new(&bytes[..short])).is_err(), "{part:?}");
            }
        }
        assert_eq!(link.coordinator(), NodeId(5));
    }
}
