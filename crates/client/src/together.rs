//! Short parts of one backing file on another node that travel in one request.
//!
//! They are in the order of the caller's memory, so what is missing after the end of the file is all behind one place.

use forebay_types::limits::{BACKING_BYTES_MAX, TOGETHER_BYTES_MAX};
use forebay_types::{BackingOp, BackingRuns, Code, Reply, Request};

use crate::far_parts::{Memory, Part};
use crate::pool::caller;

/// Two or more parts.
pub(crate) struct Together {
    parts: Vec<Part>,
    /// Their ranges, encoded. Ranges that follow each other, in memory too, are one.
    list: Vec<u8>,
    bytes: usize,
}

impl Together {
    /// The part with those behind it that can travel with it. None if it travels alone. The first that does not fit becomes
    /// `next`.
    pub(crate) fn of(
        first: Part,
        parts: &mut dyn Iterator<Item = Part>,
        next: &mut Option<Part>,
    ) -> Option<Together> {
        if first.len > TOGETHER_BYTES_MAX || next.is_some() {
            return None;
        }
        let mut all = vec![first];
        let mut bytes = first.len;
        let mut ranges = vec![(first.offset, first.len)];
        let mut last = first;
        for part in parts {
            let follows = part.offset == last.offset + last.len as u64 && part.at == last.at + last.len;
            let size = BackingRuns::EACH_BYTES * (ranges.len() + 1) + bytes + part.len;
            let fits = part.id == first.id && part.at >= last.at + last.len && size <= BACKING_BYTES_MAX;
            if part.len > TOGETHER_BYTES_MAX || !fits {
                *next = Some(part);
                break;
            }
            match ranges.last_mut() {
                Some((_, length)) if follows => *length += part.len,
                _ => ranges.push((part.offset, part.len)),
            }
            bytes += part.len;
            all.push(part);
            last = part;
        }
        if all.len() < 2 {
            return None;
        }
        let mut list = Vec::with_capacity(ranges.len() * BackingRuns::EACH_BYTES);
        for (offset, length) in ranges {
            BackingRuns::add(&mut list, offset, length as u32);
        }
        Some(Together { parts: all, list, bytes })
    }

    /// The bytes of the request's list and data.
    pub(crate) fn message_bytes(&self) -> usize {
        self.list.len() + self.bytes
    }

    /// Encodes the request, and copies the data of a write.
    ///
    /// # Safety
    /// For a write, the memory of all parts is readable.
    pub(crate) unsafe fn encode(&self, memory: Memory, message: &mut [u8]) -> Result<usize, Code> {
        let (runs, id) = (BackingRuns::of(&self.list)?, self.parts[0].id);
        let Memory::From(from) = memory else {
            return Request::Backing { id, op: BackingOp::ReadRuns { runs } }.encode(caller(), message);
        };
        let mut bytes = Vec::with_capacity(self.bytes);
        for part in &self.parts {
            // SAFETY: the caller's promise; the slice is gone when this returns.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.place(from), part.len) });
        }
        let op = BackingOp::WriteRuns { runs, bytes: &bytes };
        Request::Backing { id, op }.encode(caller(), message)
    }

    /// Decodes the reply, copies the data of a read, and returns the number of bytes moved.
    ///
    /// # Safety
    /// For a read, the memory of all parts is writable.
    pub(crate) unsafe fn take(&self, memory: Memory, reply: &[u8]) -> Result<usize, Code> {
        match (Reply::decode(reply)?, memory) {
            (Reply::Bytes(bytes), Memory::Into(to)) if bytes.len() <= self.bytes => {
                let mut rest = bytes;
                for part in &self.parts {
                    let (some, behind) = rest.split_at(part.len.min(rest.len()));
                    // SAFETY: the caller's promise.
                    unsafe { std::ptr::copy_nonoverlapping(some.as_ptr(), part.place(to), some.len()) };
                    rest = behind;
                }
                Ok(bytes.len())
            }
            (Reply::Count(n), Memory::From(_)) if n == self.bytes as u64 => Ok(self.bytes),
            _ => Err(Code::Malformed),
        }
    }

    /// Where in memory the first byte is that was not moved, if `done` bytes were.
    pub(crate) fn end(&self, done: usize) -> Option<usize> {
        let mut left = done;
        for part in &self.parts {
            if left < part.len {
                return Some(part.at + left);
            }
            left -= part.len;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{BackingId, Ino};

    const ID: BackingId = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };

    fn part(offset: u64, at: usize, len: usize) -> Part {
        Part { id: ID, offset, at, len }
    }

    fn of(all: &[Part]) -> (Option<Together>, Option<Part>) {
        let mut rest = all[1..].iter().copied();
        let mut next = None;
        (Together::of(all[0], &mut rest, &mut next), next)
    }

    #[test]
    fn parts_travel_together_up_to_one_that_is_long_elsewhere_backward_or_too_much() {
        let other = BackingId { stripe: 1, ..ID };
        let long = TOGETHER_BYTES_MAX + 1;
        for stranger in [part(500, 20, long), Part { id: other, ..part(500, 20, 10) }, part(500, 19, 10)] {
            let (together, next) = of(&[part(0, 0, 10), part(100, 10, 10), stranger, part(900, 90, 1)]);
            assert_eq!(together.unwrap().parts.len(), 2);
            assert_eq!(next.unwrap().at, stranger.at);
        }
        assert!(of(&[part(0, 0, long), part(100_000, long, 10)]).0.is_none());
        assert!(of(&[part(0, 0, 10)]).0.is_none());
        let many: Vec<Part> = (0..10).map(|i| part(i * 100_000, i as usize * 16384, 16384)).collect();
        let (together, next) = of(&many);
        assert_eq!((together.unwrap().bytes, next.unwrap().at), (3 * 16384, 3 * 16384));
    }

    #[test]
    fn data_are_gathered_and_handed_out_and_the_end_is_found() {
        let (together, _) = of(&[part(50, 2, 3), part(53, 5, 2), part(10, 9, 4)]);
        let together = together.unwrap();
        let from: Vec<u8> = (0..20).collect();
        let mut message = vec![0; 1 << 17];
        // SAFETY: all parts lie in `from`.
        let n = unsafe { together.encode(Memory::From(from.as_ptr()), &mut message) }.unwrap();
        let (_, request) = Request::decode(&message[..n]).unwrap();
        let Request::Backing { op: BackingOp::WriteRuns { runs, bytes }, .. } = request else {
            panic!("{request:?}")
        };
        assert_eq!(runs.iter().collect::<Vec<_>>(), [(50, 5), (10, 4)], "two follow each other");
        assert_eq!(bytes, [2, 3, 4, 5, 6, 9, 10, 11, 12]);
        for (done, end) in [(0, Some(2)), (4, Some(6)), (5, Some(9)), (8, Some(12)), (9, None)] {
            assert_eq!(together.end(done), end, "{done}");
            let mut to = vec![0; 20];
            let mut reply = [0; 64];
            let n = Reply::encode(&Ok(Reply::Bytes(&bytes[..done])), &mut reply).unwrap();
            // SAFETY: all parts lie in `to`.
            let taken = unsafe { together.take(Memory::Into(to.as_mut_ptr()), &reply[..n]) };
            assert_eq!(taken, Ok(done));
            let there =
                |at: usize| end.is_none_or(|end| at < end) && [2, 3, 4, 5, 6, 9, 10, 11, 12].contains(&at);
            let expected: Vec<u8> = (0..20).map(|at| if there(at) { at as u8 } else { 0 }).collect();
            assert_eq!(to, expected, "{done}");
        }
        let n = Reply::encode(&Ok(Reply::Count(8)), &mut message).unwrap();
        // SAFETY: nothing is copied.
        let taken = unsafe { together.take(Memory::From(from.as_ptr()), &message[..n]) };
        assert_eq!(taken, Err(Code::Malformed), "a write is whole");
    }
}
