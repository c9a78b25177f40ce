//! What the mover has read of files for which the pool has no room (`through.rs`): the last few ranges, each of one version
//! of a file. The mutex is a leaf. Tests: here.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_types::{Ino, StoreVersion};

use super::readers::Readers;
use crate::host::Instant;

/// Ranges that are kept: 16 MiB of memory. Those that are being read are as many as threads.
const RANGES_MAX: usize = 16;
/// How long a range is kept that no program reads.
const KEPT: Duration = Duration::from_secs(10);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of a version of a file.
pub(super) type Key = (Ino, StoreVersion, u64);

#[derive(Debug)]
struct Kept {
    key: Key,
    /// None while a thread reads it.
    data: Option<Arc<Vec<u8>>>,
    used: Instant,
}

/// The ranges that were read last, the latest at the end.
#[derive(Debug, Default)]
pub(super) struct Through {
    kept: Mutex<VecDeque<Kept>>,
    /// Messages that are being served.
    pub(super) readers: Readers,
}

/// What a thread finds that needs a range.
#[derive(Debug)]
pub(super) enum Found {
    There(Arc<Vec<u8>>),
    /// Another thread reads it.
    Later,
    /// The caller is to read it, and to end that by [`Through::end`].
    Mine,
}

impl Through {
    pub(super) fn find(&self, key: Key) -> Found {
        let mut kept = locked(&self.kept);
        if let Some(i) = kept.iter().position(|kept| kept.key == key) {
            let Some(data) = kept[i].data.clone() else { return Found::Later };
            if let Some(mut one) = kept.remove(i) {
                one.used = Instant::now();
                kept.push_back(one);
            }
            return Found::There(data);
        }
        let is_there = |kept: &Kept| kept.data.is_some();
        if kept.iter().filter(|kept| is_there(kept)).count() >= RANGES_MAX {
            if let Some(i) = kept.iter().position(is_there) {
                kept.remove(i);
            }
        }
        kept.push_back(Kept { key, data: None, used: Instant::now() });
        Found::Mine
    }

    /// A range was read, or could not be.
    pub(super) fn end(&self, key: Key, data: Option<Arc<Vec<u8>>>) {
        let mut kept = locked(&self.kept);
        match (data, kept.iter().position(|kept| kept.key == key)) {
            (Some(data), Some(i)) => kept[i].data = Some(data),
            (None, Some(i)) => drop(kept.remove(i)),
            (_, None) => {}
        }
    }

    /// Frees ranges that no program reads any more.
    pub(super) fn forget_old(&self) {
        locked(&self.kept).retain(|kept| kept.data.is_none() || kept.used.elapsed() < KEPT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::limits::RANGE_BYTES;

    fn key(number: u64) -> Key {
        (Ino(7), StoreVersion { bytes: 100 * RANGE_BYTES, ..StoreVersion::default() }, number)
    }

    fn read(through: &Through, number: u64) {
        assert!(matches!(through.find(key(number)), Found::Mine), "{number}");
        through.end(key(number), Some(Arc::new(vec![number as u8])));
    }

    #[test]
    fn ranges_are_read_once_and_the_ones_used_last_are_kept() {
        let through = Through::default();
        (0..RANGES_MAX as u64).for_each(|number| read(&through, number));
        assert!(matches!(through.find(key(0)), Found::There(data) if *data == [0]));
        read(&through, 99);
        assert!(matches!(through.find(key(0)), Found::There(_)), "it was used");
        assert!(matches!(through.find(key(1)), Found::Mine), "it was the oldest");
        let other = StoreVersion { bytes: 5, ..StoreVersion::default() };
        assert!(matches!(through.find((Ino(7), other, 0)), Found::Mine), "another version");
    }

    #[test]
    fn one_thread_reads_a_range_and_after_a_failure_another() {
        let through = Through::default();
        assert!(matches!(through.find(key(3)), Found::Mine));
        assert!(matches!(through.find(key(3)), Found::Later));
        through.forget_old();
        assert!(matches!(through.find(key(3)), Found::Later), "it is being read");
        through.end(key(3), None);
        assert!(matches!(through.find(key(3)), Found::Mine));
        for number in 10..10 + 2 * RANGES_MAX as u64 {
            assert!(matches!(through.find(key(number)), Found::Mine), "those that are read are not kept yet");
        }
    }
}
