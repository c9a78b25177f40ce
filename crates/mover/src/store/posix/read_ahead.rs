//! A large range is read by a thread of its own, which is up to two buffers ahead of what is being written: to read memory
//! takes half as long as to write it into the page cache, where the kernel writes a file by one thread at a time. Only while no
//! other large range is copied to the store: otherwise the copies of several files do that for each other.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use forebay_types::Code;

use super::super::source::Source;

/// What is shorter is not worth a thread.
const BYTES_MIN: u64 = 32 << 20;
/// Buffers: one that is written, one that is read, and one between.
const BUFFERS: usize = 3;

/// The copies into one store that are in progress, each of at least [`BYTES_MIN`].
#[derive(Debug, Default)]
pub(super) struct LargeRanges(AtomicUsize);

/// One of them, until it is dropped.
pub(super) struct LargeRange<'a> {
    all: &'a LargeRanges,
    is_alone: bool,
}

impl LargeRanges {
    /// Begins the copy of a range, if it is a large one.
    pub(super) fn begin(&self, range: &Range<u64>) -> Option<LargeRange<'_>> {
        let is_large = range.end - range.start >= BYTES_MIN;
        is_large.then(|| LargeRange { all: self, is_alone: self.0.fetch_add(1, Ordering::Relaxed) == 0 })
    }
}

impl LargeRange<'_> {
    /// True if it is to be read ahead: no other was being copied when it began, and there is a processor for a second thread.
    pub(super) fn is_read_ahead(&self) -> bool {
        // A simulation knows no other threads than its own.
        self.is_alone
            && !crate::host::is_simulated()
            && std::thread::available_parallelism().is_ok_and(|threads| threads.get() > 1)
    }
}

impl Drop for LargeRange<'_> {
    fn drop(&mut self) {
        self.all.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads a range by another thread, in pieces of `piece` bytes at most, and writes each by this one. Returns false if nothing
/// was read, because there is no thread to be had. The error is what `unreadable` makes of the source's, or that of `write`.
pub(super) fn copy<E>(
    source: &dyn Source,
    range: Range<u64>,
    piece: usize,
    unreadable: impl Fn(Code) -> E,
    mut write: impl FnMut(&[u8], u64) -> Result<(), E>,
) -> Result<bool, E> {
    let (give_back, empty) = mpsc::channel::<Vec<u8>>();
    let (filled, take) = mpsc::channel::<Result<(Vec<u8>, u64), Code>>();
    for _ in 0..BUFFERS {
        let _ = give_back.send(vec![0; piece]);
    }
    let mut at = range.start;
    let read = move || {
        while at < range.end {
            // The writer has failed.
            let Ok(mut buffer) = empty.recv() else { return };
            buffer.resize((range.end - at).min(piece as u64) as usize, 0);
            let read = match source.read_at(&mut buffer, at) {
                // The source is shorter than it was.
                Ok(0) => Err(Code::Stale),
                other => other,
            };
            let sent = read.map(|bytes| {
                buffer.truncate(bytes);
                (buffer, at)
            });
            at += sent.as_ref().map_or(0, |(buffer, _)| buffer.len() as u64);
            let is_last = sent.is_err();
            if filled.send(sent).is_err() || is_last {
                return;
            }
        }
    };
    // It owns its ends of the channels: the reader, which the end of the scope waits for, ends with them.
    std::thread::scope(move |scope| {
        if std::thread::Builder::new().name("mover-read".into()).spawn_scoped(scope, read).is_err() {
            return Ok(false);
        }
        for read in take {
            let (buffer, at) = read.map_err(&unreadable)?;
            write(&buffer, at)?;
            // After the last piece nobody takes it.
            let _ = give_back.send(buffer);
        }
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A source of which each byte tells its place, and which ends early.
    struct Counting {
        bytes: u64,
        ends: u64,
        read: Mutex<u64>,
    }

    impl Source for Counting {
        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
            Ok(Some(within))
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
            // Short reads, too.
            let n = buffer.len().min(700).min(self.ends.saturating_sub(offset) as usize);
            buffer[..n].iter_mut().zip(offset..).for_each(|(byte, at)| *byte = (at % 251) as u8);
            *self.read.lock().unwrap() += n as u64;
            Ok(n)
        }
    }

    fn source(bytes: u64, ends: u64) -> Counting {
        Counting { bytes, ends, read: Mutex::new(0) }
    }

    #[test]
    fn range_is_written_in_order_and_whole() {
        let (from, mut into) = (source(100_000, 100_000), Vec::new());
        let write = |bytes: &[u8], at: u64| {
            assert_eq!(at, 10 + into.len() as u64);
            into.extend_from_slice(bytes);
            Ok(())
        };
        assert!(copy(&from, 10..90_001, 1000, |code| code, write).unwrap());
        assert!(into.iter().copied().eq((10..90_001u64).map(|at| (at % 251) as u8)));
    }

    #[test]
    fn source_that_ends_early_is_stale_and_a_failed_write_ends_the_reading() {
        let short = copy(&source(9000, 5000), 0..9000, 1000, |code| code, |_, _| Ok(()));
        assert_eq!(short, Err(Code::Stale));
        let from = source(1 << 30, 1 << 30);
        let full = copy(&from, 0..1 << 30, 1000, |code| code, |_, _| Err(Code::NoSpace));
        assert_eq!(full, Err(Code::NoSpace));
        assert!(*from.read.lock().unwrap() <= 700 * (BUFFERS as u64 + 1), "it read on");
    }

    #[test]
    fn one_large_range_at_a_time_is_read_ahead() {
        let all = LargeRanges::default();
        assert!(all.begin(&(0..BYTES_MIN - 1)).is_none());
        let first = all.begin(&(7..7 + BYTES_MIN)).unwrap();
        assert!(first.is_alone && !all.begin(&(0..BYTES_MIN)).unwrap().is_alone);
        drop(first);
        assert!(all.begin(&(0..BYTES_MIN)).unwrap().is_alone);
    }
}
