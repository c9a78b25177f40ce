//! The tally of a transfer: a small file that says how many files and bytes the transfer has copied. Others read it to
//! watch its rate.
//!
//! The file is there before the transfer, which never creates it: a tally that was removed stays removed.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often it is written.
const PERIOD: Duration = Duration::from_millis(250);
/// It has no more bytes.
pub(crate) const TEXT_MAX: u64 = 64;
/// A file costs as much as so many bytes: several calls to the store.
const FILE_BYTES: f64 = 65536.0;

/// The text of a tally. All have one length, so a later one replaces the one before.
pub(crate) fn text(files: u64, bytes: u64) -> String {
    format!("{files:>20} {bytes:>20}\n")
}

/// The work that a tally's text shows, in bytes; `None` if it is no tally.
pub(crate) fn work(text: &str) -> Option<f64> {
    let mut numbers = text.split_whitespace().map(str::parse::<u64>);
    let (files, bytes) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(files as f64 * FILE_BYTES + bytes as f64)
}

/// Writes a tally now and then.
#[derive(Debug)]
pub(crate) struct Tally {
    path: PathBuf,
    started: Instant,
    next_ms: AtomicU64,
}

impl Tally {
    pub(crate) fn new(path: PathBuf) -> Tally {
        Tally { path, started: Instant::now(), next_ms: AtomicU64::new(0) }
    }

    pub(crate) fn say(&self, files: u64, bytes: u64) {
        let now = self.started.elapsed().as_millis() as u64;
        let due = self.next_ms.load(Ordering::Relaxed);
        let next = now + PERIOD.as_millis() as u64;
        if now < due
            || self.next_ms.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        // A tally that cannot be written is no reason to stop copying.
        if let Ok(file) = OpenOptions::new().write(true).open(&self.path) {
            let _ = file.write_all_at(text(files, bytes).as_bytes(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tally_is_written_where_a_file_is_and_read_back_as_work() {
        let path = std::env::temp_dir().join(format!("forebay-tally-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Tally::new(path.clone()).say(1, 2);
        assert!(!path.exists(), "it is not created");
        std::fs::write(&path, text(0, 0)).unwrap();
        Tally::new(path.clone()).say(2, 1000);
        let said = std::fs::read_to_string(&path).unwrap();
        assert_eq!(work(&said), Some(2.0 * FILE_BYTES + 1000.0));
        assert!(said.len() as u64 <= TEXT_MAX && text(u64::MAX, u64::MAX).len() == said.len());
        assert_eq!((work(""), work("x y"), work("1")), (None, None, None));
        std::fs::remove_file(&path).unwrap();
    }
}
