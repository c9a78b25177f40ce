//! A node's identity, as the first two frames of a handshake carry it.

use forebay_types::{Code, NodeId, Reader};

use crate::limits::{ADDRESS_BYTES_MAX, NODE_MAX};

/// A node's description of itself at the start of a link. Its encoding never changes: newer protocols add messages, but
/// no fields here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Oldest and newest protocol version that the node supports.
    pub protocols: (u16, u16),
    /// The pool's ID ([`Secret::pool`](crate::Secret::pool)).
    pub pool: [u8; 16],
    /// Its node number.
    pub node: NodeId,
    /// New at each start of the daemon, to distinguish a restart from a network outage. The lower half is random. The
    /// upper half is the ID of the node's data, the same at each start with them, or 0.
    pub incarnation: u64,
    /// The node's number for the link, never 0. Every frame to the node has it.
    pub link: u64,
    /// Capacity of its targets.
    pub capacity_bytes: u64,
    /// Its clock, in microseconds since 1970. A pool refuses nodes whose clocks differ too much.
    pub clock_us: u64,
    /// 32 random bytes, new for each handshake.
    pub nonce: [u8; 32],
    /// The address of its endpoint, in the transport's format.
    pub address: Vec<u8>,
}

impl Hello {
    /// The newest protocol version that both support.
    pub fn common(&self, other: &Hello) -> Option<u16> {
        let newest = self.protocols.1.min(other.protocols.1);
        (newest >= self.protocols.0 && newest >= other.protocols.0).then_some(newest)
    }

    pub(crate) fn check(&self) -> Result<(), Code> {
        let sound = self.protocols.0 > 0
            && self.protocols.0 <= self.protocols.1
            && (1..=NODE_MAX).contains(&self.node.0)
            && self.link != 0
            && self.clock_us <= i64::MAX as u64
            && !self.address.is_empty()
            && self.address.len() <= ADDRESS_BYTES_MAX;
        if sound {
            Ok(())
        } else {
            Err(Code::Malformed)
        }
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) -> Result<(), Code> {
        self.check()?;
        out.extend_from_slice(&self.protocols.0.to_le_bytes());
        out.extend_from_slice(&self.protocols.1.to_le_bytes());
        out.extend_from_slice(&self.pool);
        out.extend_from_slice(&self.node.0.to_le_bytes());
        for v in [self.incarnation, self.link, self.capacity_bytes, self.clock_us] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&(self.address.len() as u16).to_le_bytes());
        out.extend_from_slice(&self.address);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Hello, Code> {
        let hello = Hello {
            protocols: (r.u16()?, r.u16()?),
            pool: *r.array()?,
            node: NodeId(r.u16()?),
            incarnation: r.u64()?,
            link: r.u64()?,
            capacity_bytes: r.u64()?,
            clock_us: r.u64()?,
            nonce: *r.array()?,
            address: {
                let bytes = r.short_bytes()?;
                if bytes.len() > ADDRESS_BYTES_MAX {
                    return Err(Code::Malformed);
                }
                bytes.to_vec()
            },
        };
        hello.check()?;
        Ok(hello)
    }
}
