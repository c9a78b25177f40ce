//! Atomic operations on the 64-bit words of a volume.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::bytes::{Reader, Writer};
use crate::error::Code;

/// A word of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PieceWord {
    /// At an offset, a multiple of 8.
    At(u64),
    /// The end of the volume's file, in the head beside the first piece.
    End,
}

/// An operation. Its result is what the word was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Replaces the word if it has a value.
    CompareAndSwap {
        /// The value.
        expected: u64,
        /// What replaces it.
        new: u64,
    },
    /// Adds, modulo 2^64.
    Add {
        /// What is added.
        by: u64,
    },
    /// Replaces the word.
    Swap {
        /// What replaces it.
        new: u64,
    },
    /// Replaces the word if it is smaller.
    Max {
        /// What replaces it.
        least: u64,
    },
    /// Changes nothing.
    Load,
}

impl AtomicOp {
    /// Executes it, in one order with all others on the word. Returns what the word was.
    #[inline]
    pub fn apply(&self, word: &AtomicU64) -> u64 {
        let order = Ordering::SeqCst;
        match *self {
            AtomicOp::CompareAndSwap { expected, new } => {
                word.compare_exchange(expected, new, order, order).unwrap_or_else(|was| was)
            }
            AtomicOp::Add { by } => word.fetch_add(by, order),
            AtomicOp::Swap { new } => word.swap(new, order),
            AtomicOp::Max { least } => word.fetch_max(least, order),
            AtomicOp::Load => word.load(order),
        }
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        let (tag, first, second) = match *self {
            AtomicOp::CompareAndSwap { expected, new } => (0, new, Some(expected)),
            AtomicOp::Add { by } => (1, by, None),
            AtomicOp::Swap { new } => (2, new, None),
            AtomicOp::Max { least } => (3, least, None),
            AtomicOp::Load => (4, 0, None),
        };
        w.u8(tag)?;
        w.u64(first)?;
        second.map_or(Ok(()), |value| w.u64(value))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<AtomicOp, Code> {
        let (tag, value) = (r.u8()?, r.u64()?);
        match tag {
            0 => Ok(AtomicOp::CompareAndSwap { expected: r.u64()?, new: value }),
            1 => Ok(AtomicOp::Add { by: value }),
            2 => Ok(AtomicOp::Swap { new: value }),
            3 => Ok(AtomicOp::Max { least: value }),
            4 if value == 0 => Ok(AtomicOp::Load),
            _ => Err(Code::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_changes_the_word_and_tells_what_it_was() {
        let word = AtomicU64::new(7);
        assert_eq!(AtomicOp::CompareAndSwap { expected: 8, new: 1 }.apply(&word), 7);
        assert_eq!(AtomicOp::CompareAndSwap { expected: 7, new: 9 }.apply(&word), 7);
        assert_eq!(AtomicOp::Add { by: u64::MAX }.apply(&word), 9);
        assert_eq!(AtomicOp::Swap { new: 3 }.apply(&word), 8);
        assert_eq!((AtomicOp::Max { least: 2 }.apply(&word), AtomicOp::Load.apply(&word)), (3, 3));
        assert_eq!((AtomicOp::Max { least: 5 }.apply(&word), AtomicOp::Load.apply(&word)), (3, 5));
        assert_eq!(word.into_inner(), 5);
    }
}
