//! Node and inode numbers.

use std::fmt;

use crate::limits::NODE_NUMBER_MAX;

/// A node's number within a pool, 1 to [`NODE_NUMBER_MAX`]. A node that lost its shard rejoins under a new number, so a
/// number always names the same shard.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u16);

impl NodeId {
    /// The node of an embedded pool, and the first of any other.
    pub const FIRST: NodeId = NodeId(1);

    /// True for a number that a node may have.
    pub fn is_valid(self) -> bool {
        (1..=NODE_NUMBER_MAX).contains(&self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// An inode number: the birth node's number in the upper 16 bits, that node's counter in the lower 48. A number is
/// never used again, not even after a crash. The upper bits keep it apart from the small numbers of other file systems,
/// so (st_dev, st_ino) pairs never collide.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ino(pub u64);

impl Ino {
    /// The pool's root directory: counter 1 of node 1.
    pub const ROOT: Ino = Ino(NodeId::FIRST.0 as u64 * (1 << Ino::COUNTER_BITS) + 1);
    /// Bits of the counter.
    pub const COUNTER_BITS: u32 = 48;
    /// The bit of a counter that marks a part of a wide directory.
    const PART_BIT: u64 = 1 << (Ino::COUNTER_BITS - 1);
    /// The largest counter.
    pub const MAX_COUNTER: u64 = Ino::PART_BIT - 1;

    /// The number that `node` gives to its `counter`-th inode.
    pub fn new(node: NodeId, counter: u64) -> Ino {
        debug_assert!(counter <= Ino::MAX_COUNTER);
        Ino((node.0 as u64) << Ino::COUNTER_BITS | (counter & Ino::MAX_COUNTER))
    }

    /// The same for a part of a wide directory. The number may carry the mark because programs never see it.
    pub fn part(node: NodeId, counter: u64) -> Ino {
        Ino(Ino::new(node, counter).0 | Ino::PART_BIT)
    }

    /// True for a part of a wide directory.
    pub fn is_part(self) -> bool {
        self.0 & Ino::PART_BIT != 0
    }

    /// The node that created the inode.
    pub fn birth_node(self) -> NodeId {
        NodeId((self.0 >> Ino::COUNTER_BITS) as u16)
    }

    /// The birth node's counter.
    pub fn counter(self) -> u64 {
        self.0 & Ino::MAX_COUNTER
    }
}

impl fmt::Display for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ino({}:{})", self.birth_node().0, self.counter())
    }
}
