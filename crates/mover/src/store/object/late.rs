//! Uploads whose answer did not come: they may land after the temporary was removed, so it is removed once more.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Keys that are remembered; beyond that the oldest is left to the sweep of a later mover.
const KEYS_MAX: usize = 1024;

/// Keys of such uploads, the oldest first.
#[derive(Debug, Default)]
pub(super) struct LateUploads(Mutex<Vec<(Instant, String)>>);

impl LateUploads {
    /// An upload failed; with `may_land` it may take effect later.
    pub(super) fn note(&self, key: &str, may_land: bool) {
        if !may_land {
            return;
        }
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() >= KEYS_MAX {
            keys.remove(0);
        }
        keys.push((Instant::now(), key.to_owned()));
    }

    /// Keys that failed this long ago; they are forgotten.
    pub(super) fn take_due(&self, after: Duration) -> Vec<String> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = keys.iter().take_while(|(at, _)| at.elapsed() >= after).count();
        keys.drain(..due).map(|(_, key)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_may_land_are_due_once_and_not_too_early() {
        let late = LateUploads::default();
        late.note("refused", false);
        late.note("a", true);
        assert!(late.take_due(Duration::from_secs(3600)).is_empty());
        assert_eq!(late.take_due(Duration::ZERO), ["a"]);
        assert!(late.take_due(Duration::ZERO).is_empty());
        (0..=KEYS_MAX).for_each(|i| late.note(&i.to_string(), true));
        assert_eq!(late.take_due(Duration::ZERO).first().map(String::as_str), Some("1"));
    }
}
