//! Appends of processes of other nodes that are too large for one request, and arrive in pieces because their process
//! has no free buffer. They are kept here until the last piece has arrived, so that an append is written as a whole.
//!
//! The pieces are in memory alone: a process whose pieces were lost with a worker starts again. Lock order: no other
//! lock is taken with the table's.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::call_clock;
use forebay_types::limits::{GATHERED_MAX, GATHERED_MS};
use forebay_types::Code;

/// How long an append without new pieces is kept when its room is needed.
const KEPT_NS: u64 = GATHERED_MS * 1_000_000;

/// A process and its number for the append.
type Key = (u64, u64);

#[derive(Debug)]
struct Gathered {
    bytes: Vec<u8>,
    total: usize,
    /// When the last piece arrived, by [`call_clock`].
    touched_ns: u64,
}

/// All appends in pieces.
#[derive(Debug, Default)]
pub(super) struct Gathering(Mutex<HashMap<Key, Gathered>>);

impl Gathering {
    fn all(&self) -> MutexGuard<'_, HashMap<Key, Gathered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a piece that begins at `at` of `total` bytes. With the last piece it returns and forgets the whole append.
    ///
    /// # Errors
    /// [`Code::Interrupted`] when the pieces before it are not here, [`Code::Busy`] when there is no room for another
    /// append.
    pub(super) fn add(
        &self,
        of: Key,
        (at, total): (u32, u32),
        piece: &[u8],
    ) -> Result<Option<Vec<u8>>, Code> {
        self.add_at(call_clock(), of, (at as usize, total as usize), piece)
    }

    fn add_at(
        &self,
        now: u64,
        of: Key,
        (at, total): (usize, usize),
        piece: &[u8],
    ) -> Result<Option<Vec<u8>>, Code> {
        let mut all = self.all();
        if at == 0 && !all.contains_key(&of) {
            if all.len() >= GATHERED_MAX {
                all.retain(|_, gathered| now.saturating_sub(gathered.touched_ns) < KEPT_NS);
            }
            if all.len() >= GATHERED_MAX {
                return Err(Code::Busy);
            }
            all.insert(of, Gathered { bytes: Vec::with_capacity(total), total, touched_ns: now });
        }
        let gathered = all.get_mut(&of).ok_or(Code::Interrupted)?;
        // A duplicate: the piece is here already.
        let known = gathered.bytes.len();
        if gathered.total != total || at > known || (at < known && at + piece.len() > known) {
            all.remove(&of);
            return Err(Code::Interrupted);
        }
        gathered.touched_ns = now;
        if at == known {
            gathered.bytes.extend_from_slice(piece);
        }
        if gathered.bytes.len() < total {
            return Ok(None);
        }
        Ok(all.remove(&of).map(|gathered| gathered.bytes))
    }

    /// A process has ended.
    pub(super) fn end(&self, session: u64) {
        self.all().retain(|(of, _), _| *of != session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_several_appends_come_together_each_once() {
        let gathering = Gathering::default();
        let add = |handle, at, piece: &[u8]| gathering.add((7, handle), (at, 6), piece);
        assert_eq!(add(1, 0, b"abc"), Ok(None));
        assert_eq!(add(2, 0, b"12"), Ok(None));
        assert_eq!(add(1, 0, b"abc"), Ok(None), "a retry");
        assert_eq!(add(2, 2, b"34"), Ok(None));
        assert_eq!(add(1, 3, b"def"), Ok(Some(b"abcdef".to_vec())));
        assert_eq!(add(2, 4, b"56"), Ok(Some(b"123456".to_vec())));
        assert_eq!(add(1, 3, b"def"), Err(Code::Interrupted), "nothing of it is here");
    }

    #[test]
    fn pieces_that_do_not_follow_are_told_to_begin_anew() {
        let gathering = Gathering::default();
        assert_eq!(gathering.add((7, 1), (3, 6), b"def"), Err(Code::Interrupted));
        gathering.add((7, 1), (0, 6), b"ab").unwrap();
        assert_eq!(gathering.add((7, 1), (3, 6), b"d"), Err(Code::Interrupted), "a gap");
        gathering.add((7, 1), (0, 6), b"ab").unwrap();
        assert_eq!(gathering.add((7, 1), (2, 7), b"c"), Err(Code::Interrupted), "another length");
        gathering.add((7, 1), (0, 6), b"ab").unwrap();
        gathering.end(7);
        assert_eq!(gathering.add((7, 1), (2, 6), b"c"), Err(Code::Interrupted), "its process is over");
    }

    #[test]
    fn no_more_than_the_bound_are_kept_and_old_ones_make_room() {
        let (gathering, now) = (Gathering::default(), call_clock());
        let later = now + KEPT_NS;
        for handle in 0..GATHERED_MAX as u64 {
            gathering.add_at(now, (7, handle), (0, 2), b"a").unwrap();
        }
        assert_eq!(gathering.add_at(now, (8, 1), (0, 2), b"a"), Err(Code::Busy));
        gathering.add_at(later, (7, 0), (1, 2), b"b").unwrap();
        gathering.add_at(later, (7, 1), (0, 2), b"a").unwrap();
        gathering.add_at(later, (8, 1), (0, 2), b"a").unwrap();
        gathering.add_at(later, (8, 2), (0, 2), b"a").unwrap();
        assert_eq!(gathering.all().len(), 3, "those that were not gone on with are forgotten");
        assert!(gathering.all().contains_key(&(7, 1)));
    }
}
