//! The bytes of a volume, for the server of its device.

use forebay_block::{Medium, Served};
use forebay_types::{Code, Segment};
use forebay_volume::Striped;

use crate::found::joined_number;

/// Requests that are served at the same time if pieces are on other nodes: each mostly waits.
const FAR_THREADS: usize = 16;
/// The same if all pieces are here, at most: each mostly copies.
const NEAR_THREADS_MAX: usize = 8;
/// One more for a flush.
const SPARE_THREADS: usize = 1;
/// The largest transfer of a request.
const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct VolumeMedium {
    volume: Striped,
}

impl VolumeMedium {
    pub(crate) fn new(volume: Striped) -> VolumeMedium {
        VolumeMedium { volume }
    }

    /// The number of the volume, or that of the joined volumes.
    pub(crate) fn number(&self) -> u64 {
        joined_number(self.volume.numbers())
    }

    /// Has the pieces on this node stay in memory, with the tables that map them. Takes the segments of each of its volumes.
    /// Returns the first error.
    pub(crate) fn lock(&self, parts: &[Vec<Segment>]) -> std::io::Result<()> {
        for (index, segments) in parts.iter().enumerate() {
            for (at, bytes) in
                segments.iter().zip(starts(segments)).flat_map(|(one, start)| stripes(one, start))
            {
                for (at, bytes) in joined(parts.len(), index, at, bytes) {
                    let Ok((place, run)) = self.volume.map(at) else { continue };
                    // SAFETY: `run` bytes are mapped there.
                    if unsafe { libc::mlock(place.cast(), run.min(bytes) as usize) } != 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads some bytes of each piece on another node: what its first transfer needs is there then.
    pub(crate) fn warm(&self, parts: &[Vec<Segment>]) -> Result<(), Code> {
        let mut memory = vec![0; REQUEST_BYTES_MAX as usize];
        for (index, segments) in parts.iter().enumerate() {
            for (one, start) in segments.iter().zip(starts(segments)) {
                for (at, bytes) in stripes(one, start).take(one.targets.as_slice().len()) {
                    let Some((at, _)) = joined(parts.len(), index, at, bytes).next() else { continue };
                    let n = self.volume.bytes().saturating_sub(at).min(REQUEST_BYTES_MAX) as usize;
                    if n > 0 && self.volume.map(at) == Err(Code::NotSupported) {
                        self.volume.get_bytes(at, &mut memory[..n])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The errno of a request, which the log explains.
    fn served(&self, what: &str, offset: u64, done: Result<(), Code>) -> Served {
        done.map_err(|code| {
            let why = self.volume.reason().unwrap_or_else(|| code.to_string());
            tracing::error!("cannot {what} the volume at {offset}: {why}");
            match code {
                Code::BadDescriptor => libc::EROFS,
                Code::Range => libc::EINVAL,
                Code::NoSpace => libc::ENOSPC,
                _ => libc::EIO,
            }
        })
    }
}

/// Where each segment begins.
fn starts(segments: &[Segment]) -> impl Iterator<Item = u64> + '_ {
    segments.iter().scan(0, |next, one| {
        let start = *next;
        *next += one.bytes;
        Some(start)
    })
}

/// Where each stripe of a segment begins, and its bytes.
fn stripes(segment: &Segment, start: u64) -> impl Iterator<Item = (u64, u64)> {
    let (bytes, stripe) = (segment.bytes, segment.stripe_bytes);
    (0..bytes.div_ceil(stripe)).map(move |i| (start + i * stripe, stripe.min(bytes - i * stripe)))
}

/// Where a range of one of `count` joined volumes is in the joined one, in ranges of one stripe each.
fn joined(count: usize, index: usize, at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let (count, index, stripe) = (count as u64, index as u64, Striped::STRIPE_BYTES);
    let (mut next, end) = (at, at + bytes);
    std::iter::from_fn(move || {
        let at = next;
        if count == 1 {
            next = end;
        } else {
            next = end.min((at / stripe + 1) * stripe);
        }
        let place = if count == 1 { at } else { (at / stripe * count + index) * stripe + at % stripe };
        (at < end).then_some((place, next - at))
    })
}

impl Medium for VolumeMedium {
    fn bytes(&self) -> u64 {
        self.volume.bytes()
    }

    fn inode(&self) -> u64 {
        self.number()
    }

    fn threads(&self) -> usize {
        let near = || std::thread::available_parallelism().map_or(1, usize::from).min(NEAR_THREADS_MAX);
        SPARE_THREADS + if self.volume.far_pieces() > 0 { FAR_THREADS } else { near() }
    }

    fn waits(&self) -> bool {
        !self.volume.is_mapped()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Served {
        self.served("read", offset, self.volume.get_bytes(offset, to))
    }

    fn write(&self, offset: u64, from: &[u8]) -> Served {
        self.served("write", offset, self.volume.put_bytes(offset, from))
    }

    fn flush(&self) -> Served {
        self.served("flush", 0, self.volume.flush())
    }

    /// The space of a volume is reserved, so nothing is discarded, unless it is thin.
    fn zero(&self, offset: u64, bytes: u64, discards: bool) -> Served {
        if discards {
            return match self.volume.discard(offset, bytes) {
                Err(Code::NotSupported) => Err(libc::EOPNOTSUPP),
                done => self.served("discard a range of", offset, done),
            };
        }
        self.served("set zeros in", offset, self.volume.zero(offset, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Targets;

    #[test]
    fn stripes_cover_each_segment_once() {
        let one = |bytes, stripe| Segment::new(bytes, stripe, Targets::new(&[0, 1]).unwrap()).unwrap();
        let segments = [one(20 << 10, 8 << 10), one(4 << 10, 1 << 20)];
        assert_eq!(starts(&segments).collect::<Vec<_>>(), [0, 20 << 10]);
        let all: Vec<_> =
            segments.iter().zip(starts(&segments)).flat_map(|(one, start)| stripes(one, start)).collect();
        let kib = |(at, bytes): &(u64, u64)| (at >> 10, bytes >> 10);
        assert_eq!(all.iter().map(kib).collect::<Vec<_>>(), [(0, 8), (8, 8), (16, 4), (20, 4)]);
    }

    #[test]
    fn ranges_of_joined_volumes_are_at_their_stripes() {
        let mib = 1 << 20;
        assert_eq!(joined(1, 0, 5, 3 * mib).collect::<Vec<_>>(), [(5, 3 * mib)]);
        let second: Vec<_> = joined(3, 1, mib / 2, 2 * mib).collect();
        let expected = [(mib + mib / 2, mib / 2), (4 * mib, mib), (7 * mib, mib / 2)];
        assert_eq!(second, expected);
    }
}
