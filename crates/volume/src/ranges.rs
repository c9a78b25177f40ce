//! Puts and gets of volumes with pieces on other nodes: ranges of a volume become ranges of its pieces, which this node's
//! daemon transfers (`far.rs`). What is on this node is copied as always.

use forebay_types::Code;

use crate::far::{Far, FarRange};
use crate::mapped::Place;
use crate::striped::Striped;

/// True if no byte is in two of the ranges.
fn are_apart(runs: &[(u64, u64)]) -> bool {
    let mut sorted: Vec<(u64, u64)> = runs.iter().filter(|(_, bytes)| *bytes > 0).copied().collect();
    sorted.sort_unstable();
    sorted.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0)
}

impl Striped {
    /// The ranges of pieces on other nodes of checked ranges. `copy` gets what is on this node: the place, the offset in
    /// the caller's memory, the bytes.
    fn far_ranges(
        &self,
        runs: impl Iterator<Item = (u64, usize, usize)>,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> Vec<FarRange> {
        let mut far: Vec<FarRange> = Vec::new();
        for (offset, at, bytes) in runs {
            let mut done = 0;
            while done < bytes {
                let (place, run) = self.place(offset + done as u64);
                let n = (bytes - done).min(usize::try_from(run).unwrap_or(usize::MAX));
                match place {
                    Place::Here(pointer) => copy(pointer, at + done, n),
                    Place::There(piece, offset) => {
                        far.push(FarRange { piece, offset, at: at + done, bytes: n });
                    }
                }
                done += n;
            }
        }
        far
    }

    /// The ranges of a list with their offsets in the caller's memory, in groups that may be moved in any order.
    fn groups(runs: &[(u64, u64)]) -> Vec<Vec<(u64, usize, usize)>> {
        let mut at = 0;
        let placed = runs.iter().map(|(offset, bytes)| {
            let placed = (*offset, at, *bytes as usize);
            at += *bytes as usize;
            placed
        });
        match are_apart(runs) {
            true => vec![placed.collect()],
            false => placed.map(|one| vec![one]).collect(),
        }
    }

    /// Puts ranges that were checked.
    ///
    /// # Safety
    /// `from` is readable for the bytes of all ranges together.
    pub(crate) unsafe fn put_far(
        &self,
        far: &dyn Far,
        runs: &[(u64, u64)],
        from: *const u8,
    ) -> Result<(), Code> {
        for group in Striped::groups(runs) {
            let ranges = self.far_ranges(group.into_iter(), |place, at, n| {
                // SAFETY: `place` is mapped writable for `n` bytes; the caller's promise.
                unsafe { libc::memmove(place.cast(), from.add(at).cast(), n) };
            });
            if !ranges.is_empty() {
                // SAFETY: the caller's promise.
                unsafe { far.put(&ranges, from) }?;
            }
        }
        Ok(())
    }

    /// Gets ranges that were checked.
    ///
    /// # Safety
    /// `to` is writable for the bytes of all ranges together.
    pub(crate) unsafe fn get_far(&self, far: &dyn Far, runs: &[(u64, u64)], to: *mut u8) -> Result<(), Code> {
        for group in Striped::groups(runs) {
            let ranges = self.far_ranges(group.into_iter(), |place, at, n| {
                // SAFETY: as in `put_far`.
                unsafe { libc::memmove(to.add(at).cast(), place.cast(), n) };
            });
            if !ranges.is_empty() {
                // SAFETY: the caller's promise.
                unsafe { far.get(&ranges, to) }?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_apart_unless_they_share_a_byte() {
        for apart in [&[][..], &[(5, 3)], &[(8, 2), (5, 3)], &[(5, 3), (6, 0)]] {
            assert!(are_apart(apart), "{apart:?}");
        }
        for shared in [&[(5, 3), (7, 1)][..], &[(5, 3), (5, 3)], &[(9, 9), (0, 10)]] {
            assert!(!are_apart(shared), "{shared:?}");
        }
        assert_eq!(Striped::groups(&[(8, 2), (5, 3)]), [[(8, 0, 2), (5, 2, 3)]]);
        assert_eq!(Striped::groups(&[(5, 3), (7, 1)]), [[(5, 0, 3)], [(7, 3, 1)]]);
    }
}
