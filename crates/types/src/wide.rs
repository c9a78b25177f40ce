//! Wide directories, whose entries lie on several nodes (docs/decisions/0024).
//!
//! Each of the nodes has a *part*: an inode like a directory's, to which no entry leads. The parts have the directory's
//! entries. The hashes of names are cut into partitions, whose number is a power of two and at least four times the
//! number of nodes. Each part has consecutive partitions, so the parts one after the other give the entries in the
//! order of cookies.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::{cookie_hash, name_hash, Cookie, COOKIE_MAX, DISCRIMINATOR_BITS, HASH_BITS};
use crate::id::Ino;
use crate::limits::WIDTH_MAX;

/// Partitions for each node of a wide directory, at least: no node has more than five quarters of the mean then.
const PARTITIONS_OF_A_NODE: usize = 4;

/// The tag, behind the code, of a refusal with parts.
pub(crate) const REFUSAL_TAG: u16 = 38;

/// Number of bits of a hash that select its partition.
fn partition_bits(width: usize) -> u32 {
    (width * PARTITIONS_OF_A_NODE).next_power_of_two().ilog2()
}

/// The index of the part that has the names with a hash. `width` may be any number of nodes.
pub fn part_of_hash(hash: u64, width: usize) -> usize {
    let width = width.max(1);
    let bits = partition_bits(width);
    let partition = (hash >> (HASH_BITS - bits)) as usize;
    (partition * width) >> bits
}

/// The parts of a wide directory, in the order of their ranges of hashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Parts {
    /// The directory.
    pub of: Ino,
    count: u8,
    inos: [Ino; WIDTH_MAX],
}

impl Parts {
    /// Two to [`WIDTH_MAX`] parts, no two on one node; [`Code::Invalid`] for anything else.
    pub fn new(of: Ino, parts: &[Ino]) -> Result<Parts, Code> {
        if !(2..=WIDTH_MAX).contains(&parts.len()) || of.is_part() {
            return Err(Code::Invalid);
        }
        let mut inos = [Ino(0); WIDTH_MAX];
        for (i, part) in parts.iter().enumerate() {
            let again = parts[..i].iter().any(|before| before.birth_node() == part.birth_node());
            if again || !part.is_part() {
                return Err(Code::Invalid);
            }
            inos[i] = *part;
        }
        Ok(Parts { of, count: parts.len() as u8, inos })
    }

    /// The parts.
    pub fn as_slice(&self) -> &[Ino] {
        &self.inos[..usize::from(self.count)]
    }

    /// The part responsible for a name.
    pub fn of_name(&self, name: &[u8]) -> Ino {
        self.inos[part_of_hash(name_hash(name), usize::from(self.count))]
    }

    /// The index of the part that has the first entries behind a cookie.
    pub fn index_of_cookie(&self, cookie: Cookie) -> usize {
        part_of_hash(cookie_hash(cookie.min(COOKIE_MAX - 1) + 1), usize::from(self.count))
    }

    /// The last cookie of a part's range. The next part has the entries behind it.
    pub fn last_cookie(&self, index: usize) -> Cookie {
        let bits = partition_bits(usize::from(self.count));
        // The first partition of the next part.
        let end = ((index as u64 + 1) << bits).div_ceil(u64::from(self.count));
        (end << (HASH_BITS - bits + DISCRIMINATOR_BITS)) - 1
    }

    /// Appends directory and parts.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.of.0)?;
        w.u8(self.count)?;
        self.as_slice().iter().try_for_each(|ino| w.u64(ino.0))
    }

    /// Reads directory and parts; [`Code::Malformed`] for values that [`Parts::new`] refuses.
    pub fn decode(r: &mut Reader<'_>) -> Result<Parts, Code> {
        let (of, count) = (Ino(r.u64()?), usize::from(r.u8()?));
        let mut inos = [Ino(0); WIDTH_MAX];
        let inos = inos.get_mut(..count).ok_or(Code::Malformed)?;
        for ino in inos.iter_mut() {
            *ino = Ino(r.u64()?);
        }
        Parts::new(of, inos).map_err(|_| Code::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NodeId;
    use crate::reply::{Refusal, Reply};

    fn parts(width: usize) -> Parts {
        let inos: Vec<Ino> = (0..width).map(|n| Ino::part(NodeId(n as u16 + 1), 7)).collect();
        Parts::new(Ino::new(NodeId(9), 3), &inos).unwrap()
    }

    #[test]
    fn part_of_hash_cuts_the_hashes_into_neighbouring_ranges_of_like_size() {
        for width in 1..=WIDTH_MAX {
            let steps = 1 << 12;
            let owners: Vec<usize> = (0..steps).map(|i| part_of_hash(i << (HASH_BITS - 12), width)).collect();
            assert!(owners.is_sorted() && owners[0] == 0 && owners[owners.len() - 1] == width - 1);
            for part in 0..width {
                let share = owners.iter().filter(|o| **o == part).count() * width;
                assert!((share * 4).abs_diff(owners.len() * 4) <= owners.len(), "{width}: {share}");
            }
        }
    }

    #[test]
    fn last_cookie_of_a_part_is_the_last_of_its_hashes() {
        for width in 2..=WIDTH_MAX {
            let parts = parts(width);
            for index in 0..width {
                let last = parts.last_cookie(index);
                assert_eq!(part_of_hash(cookie_hash(last), width), index);
                assert_eq!(parts.index_of_cookie(last - 1), index);
                assert_eq!(parts.index_of_cookie(last), (index + 1).min(width - 1));
            }
            assert_eq!(parts.last_cookie(width - 1), COOKIE_MAX);
        }
    }

    #[test]
    fn parts_round_trip_as_they_are_and_in_a_refusal() {
        for width in 2..=WIDTH_MAX {
            let parts = parts(width);
            let mut bytes = [0; 200];
            let refusal = Err(Refusal::Wide(parts));
            let n = Reply::encode_answer(&refusal, &mut bytes).unwrap();
            assert_eq!(Reply::decode_answer(&bytes[..n]), refusal);
            assert_eq!(Reply::decode(&bytes[..n]), Err(Code::Wide));
            assert_eq!(bytes[..2], (Code::Wide as u16).to_le_bytes(), "no success");
            for short in 0..n {
                assert!(!matches!(Reply::decode_answer(&bytes[..short]), Ok(_) | Err(Refusal::Wide(_))));
            }
            let names = (0..100u32).map(|i| i.to_le_bytes());
            assert!(names.map(|name| parts.of_name(&name)).all(|part| parts.as_slice().contains(&part)));
            assert_eq!((parts.index_of_cookie(0), parts.index_of_cookie(i64::MAX as u64)), (0, width - 1));
        }
    }

    #[test]
    fn parts_that_cannot_be_are_refused() {
        let (d, a, b) = (Ino::new(NodeId(1), 5), Ino::part(NodeId(1), 6), Ino::part(NodeId(2), 6));
        assert!(Parts::new(d, &[a, b]).is_ok());
        for bad in [&[][..], &[a], &[a, a], &[a, Ino::new(NodeId(2), 6)], &[a, Ino::part(NodeId(1), 8)]] {
            assert_eq!(Parts::new(d, bad), Err(Code::Invalid));
        }
        assert_eq!(Parts::new(a, &[a, b]), Err(Code::Invalid));
    }
}
