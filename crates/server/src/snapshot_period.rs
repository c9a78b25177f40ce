//! How often a pool's shard is copied to targets that outlive the node (docs/decisions/0043): a setting of the pool.

use std::time::Duration;

use forebay_types::{Code, Error, Result};

/// The period of a pool for which none was set.
const DEFAULT: Duration = Duration::from_secs(60);

/// Milliseconds between two snapshots, from text: seconds with or without `s`, minutes with `m`, or `off` (0).
///
/// # Errors
/// [`Code::Invalid`] for anything else, and for a time below 0.01 s.
pub fn parse_snapshot_period(text: &str) -> Result<u64> {
    let text = text.trim();
    if text == "off" {
        return Ok(0);
    }
    let (number, factor) = match text.strip_suffix('m') {
        Some(minutes) => (minutes, 60.0),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * factor);
    match seconds {
        Some(seconds) if (0.01..=1e7).contains(&seconds) => Ok((seconds * 1000.0).round() as u64),
        _ => Err(Error::new(Code::Invalid, format!("`{text}` is no time between two snapshots"))
            .cure("write 30s, 5m or off")),
    }
}

/// The period of a setting; none if there are to be no snapshots.
pub(crate) fn period_of(setting_ms: Option<u64>) -> Option<Duration> {
    match setting_ms {
        None => Some(DEFAULT),
        Some(0) => None,
        Some(ms) => Some(Duration::from_millis(ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_times_or_off() {
        let good = [("off", 0), ("60", 60_000), ("0.5", 500), ("30s", 30_000), (" 2m ", 120_000)];
        for (text, ms) in good {
            assert_eq!(parse_snapshot_period(text).unwrap(), ms, "{text:?}");
        }
        for bad in ["", "0", "-1", "often", "1e9", "nan", "5h", "1ms"] {
            assert!(parse_snapshot_period(bad).is_err(), "{bad:?}");
        }
        assert_eq!(period_of(None), Some(DEFAULT));
        assert_eq!(period_of(Some(0)), None);
        assert_eq!(period_of(Some(500)), Some(Duration::from_millis(500)));
    }
}
