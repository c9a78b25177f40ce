//! Puts and gets of volumes that are not mapped as a whole: ranges of a volume become ranges of its pieces. Those on other
//! nodes are transferred by this node's daemon (`far.rs`), those of thin pieces of this node by the kernel (`thin.rs`).
//! What is mapped is copied as always.

use std::os::fd::RawFd;

use forebay_types::{BackingId, Code};

use crate::far::{memory_at, FarRange};
use crate::mapped::Place;
use crate::striped::Striped;
use crate::thin;

/// Bytes of pieces on other nodes that are set to zero by one transfer.
const ZERO_BYTES: u64 = 1 << 20;
/// Bytes that one request to another node frees: far less than takes as long as a caller waits.
const DISCARD_BYTES: u64 = 1 << 30;

/// A put or a get of one of several calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// The offset in the volume.
    pub offset: u64,
    /// The caller's memory.
    pub memory: *mut u8,
    /// Its bytes.
    pub bytes: usize,
}

/// The ranges of calls, and where their memory is behind the lowest address.
fn placed(calls: &[Access], start: *mut u8) -> impl Iterator<Item = (u64, usize, usize)> + '_ {
    let some = calls.iter().filter(|call| call.bytes > 0);
    some.map(move |call| (call.offset, call.memory.expose_provenance() - start.addr(), call.bytes))
}

/// A thin piece, part of which is to be freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Thin {
    Here(RawFd),
    There(BackingId),
}

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
        mut copy: impl FnMut(Place, usize, usize) -> Result<(), Code>,
    ) -> Result<Vec<FarRange>, Code> {
        let mut far: Vec<FarRange> = Vec::new();
        for (offset, at, bytes) in runs {
            let mut done = 0;
            while done < bytes {
                let (place, run) = self.place(offset + done as u64);
                let n = (bytes - done).min(usize::try_from(run).unwrap_or(usize::MAX));
                match place {
                    Place::Here(_) | Place::File(..) => copy(place, at + done, n)?,
                    Place::There(piece, offset) => {
                        far.push(FarRange { piece, offset, at: at + done, bytes: n });
                    }
                }
                done += n;
            }
        }
        Ok(far)
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
    pub(crate) unsafe fn put_ranges(&self, runs: &[(u64, u64)], from: *const u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        Striped::groups(runs)
            .into_iter()
            .try_for_each(|group| unsafe { self.put_group(group.into_iter(), from) })
    }

    /// Puts checked ranges, with their offsets behind `from`, in any order.
    ///
    /// # Safety
    /// The memory of all ranges is readable.
    unsafe fn put_group(
        &self,
        group: impl Iterator<Item = (u64, usize, usize)>,
        from: *const u8,
    ) -> Result<(), Code> {
        let ranges = self.far_ranges(group, |place, at, n| match place {
            Place::Here(pointer) => {
                // SAFETY: mapped writable for `n` bytes; the caller's promise.
                unsafe { libc::memmove(pointer.cast(), memory_at(from, at).cast(), n) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Place::File(file, offset) => unsafe { thin::write(file, offset, memory_at(from, at), n) },
            Place::There(..) => Err(Code::Io),
        })?;
        match ranges.is_empty() {
            true => Ok(()),
            // SAFETY: the caller's promise.
            false => unsafe { self.way()?.put(&ranges, from) },
        }
    }

    /// Gets ranges that were checked.
    ///
    /// # Safety
    /// `to` is writable for the bytes of all ranges together.
    pub(crate) unsafe fn get_ranges(&self, runs: &[(u64, u64)], to: *mut u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        Striped::groups(runs)
            .into_iter()
            .try_for_each(|group| unsafe { self.get_group(group.into_iter(), to) })
    }

    /// Gets checked ranges, with their offsets behind `to`, in any order.
    ///
    /// # Safety
    /// The memory of all ranges is writable.
    unsafe fn get_group(
        &self,
        group: impl Iterator<Item = (u64, usize, usize)>,
        to: *mut u8,
    ) -> Result<(), Code> {
        let ranges = self.far_ranges(group, |place, at, n| match place {
            Place::Here(pointer) => {
                // SAFETY: as in `put_group`.
                unsafe { libc::memmove(memory_at(to, at).cast(), pointer.cast(), n) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Place::File(file, offset) => unsafe { thin::read(file, offset, memory_at(to, at), n) },
            Place::There(..) => Err(Code::Io),
        })?;
        match ranges.is_empty() {
            true => Ok(()),
            // SAFETY: the caller's promise.
            false => unsafe { self.way()?.get(&ranges, to) },
        }
    }

    /// The piece on another node that has all bytes of a range, if there is one, and a put or get of the range may be
    /// executed with others of the piece. Not a put to a thin piece: where one finds no space, the others that succeeded
    /// would be executed again.
    pub fn far_piece(&self, offset: u64, bytes: usize, puts: bool) -> Option<BackingId> {
        self.check(offset, bytes as u64, false).ok().filter(|()| bytes > 0)?;
        match self.place(offset) {
            (Place::There(..), _) if puts && self.is_thin_at(offset) => None,
            (Place::There(piece, _), run) if bytes as u64 <= run => Some(piece),
            _ => None,
        }
    }

    /// Executes puts of several calls at the same time, in any order.
    ///
    /// # Errors
    /// As [`Striped::put`], for any of them. If one is refused, nothing is copied; after another error it is not known which
    /// were executed.
    ///
    /// # Safety
    /// The memory of all calls is readable.
    pub unsafe fn put_all(&self, calls: &[Access]) -> Result<(), Code> {
        let start = self.check_accesses(calls, true)?;
        // SAFETY: the caller's promise.
        unsafe { self.put_group(placed(calls, start), start) }
    }

    /// Executes gets of several calls at the same time, in any order.
    ///
    /// # Errors
    /// As [`Striped::get`] and [`Striped::put_all`].
    ///
    /// # Safety
    /// The memory of all calls is writable.
    pub unsafe fn get_all(&self, calls: &[Access]) -> Result<(), Code> {
        let start = self.check_accesses(calls, false)?;
        // SAFETY: the caller's promise.
        unsafe { self.get_group(placed(calls, start), start) }
    }

    /// Checks calls, and returns the lowest address of their memory.
    fn check_accesses(&self, calls: &[Access], writes: bool) -> Result<*mut u8, Code> {
        calls.iter().try_for_each(|call| self.check(call.offset, call.bytes as u64, writes))?;
        let memory = calls.iter().filter(|call| call.bytes > 0).map(|call| call.memory);
        Ok(memory.min().unwrap_or(std::ptr::null_mut()))
    }

    /// Frees the space of a range, which reads as zeros then.
    ///
    /// # Errors
    /// As [`Striped::put`]; [`Code::NotSupported`] unless all of its volumes are thin, for a range of 0 bytes too.
    pub fn discard(&self, offset: u64, bytes: u64) -> Result<(), Code> {
        self.check(offset, bytes, true)?;
        match self.is_thin() {
            true => self.zero_ranges(offset, bytes),
            false => Err(Code::NotSupported),
        }
    }

    /// Sets a checked range to zero: thin pieces give its pages back, the others keep them.
    pub(crate) fn zero_ranges(&self, offset: u64, bytes: u64) -> Result<(), Code> {
        let zeros = vec![0u8; bytes.min(ZERO_BYTES) as usize];
        // Of each piece the range that is to be freed so far: stripes that follow each other in a piece are freed together.
        let mut freed: Vec<(Thin, (u64, u64))> = Vec::new();
        let mut done = 0;
        while done < bytes {
            let (place, run) = self.place(offset + done);
            let mut n = run.min(bytes - done);
            let mut free =
                |thin, at| match freed.iter_mut().find(|(of, _)| *of == thin).map(|(_, range)| range) {
                    Some((from, length)) if *from + *length == at => {
                        *length += n;
                        Ok(())
                    }
                    Some(range) => self.free(thin, std::mem::replace(range, (at, n))),
                    None => {
                        freed.push((thin, (at, n)));
                        Ok(())
                    }
                };
            match place {
                // SAFETY: mapped writable for `run` bytes.
                Place::Here(pointer) => unsafe {
                    libc::memset(pointer.cast(), 0, n as usize);
                },
                Place::File(file, at) => free(Thin::Here(file), at)?,
                Place::There(piece, at) if self.is_thin_at(offset + done) => free(Thin::There(piece), at)?,
                // One transfer for the ranges of several pieces.
                Place::There(..) => {
                    n = self.thick_bytes(offset + done, (bytes - done).min(ZERO_BYTES));
                    // SAFETY: the zeros are readable.
                    unsafe { self.put_ranges(&[(offset + done, n)], zeros.as_ptr()) }?;
                }
            }
            done += n;
        }
        freed.into_iter().try_for_each(|(thin, range)| self.free(thin, range))
    }

    /// How many bytes from a place on, at most so many, are of volumes that are not thin: zeros that are put into a thin one
    /// would take space.
    fn thick_bytes(&self, offset: u64, bytes_max: u64) -> u64 {
        let mut n = 0;
        while n < bytes_max && !self.is_thin_at(offset + n) {
            n += self.place(offset + n).1;
        }
        n.min(bytes_max)
    }

    /// Frees a range of a thin piece.
    fn free(&self, thin: Thin, (from, bytes): (u64, u64)) -> Result<(), Code> {
        match thin {
            Thin::Here(file) => thin::discard(file, from, bytes),
            Thin::There(piece) => {
                let way = self.way()?;
                let mut steps = (0..bytes).step_by(DISCARD_BYTES as usize);
                steps.try_for_each(|at| way.discard(piece, from + at, DISCARD_BYTES.min(bytes - at)))
            }
        }
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
