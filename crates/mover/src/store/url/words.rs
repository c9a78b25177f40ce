//! Words in URLs: percent encoding, rates, times, ranges, and the nearest known word.

use std::time::Duration;

/// Decodes `%XX`; none for a `%` that is not followed by two hex digits.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, tail)) = rest.split_first() {
        if first != b'%' {
            decoded.push(first);
            rest = tail;
            continue;
        }
        let digits = tail.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        decoded.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &tail[2..];
    }
    Some(decoded)
}

/// Encodes all bytes but letters, digits, `-._~` and those in `plain`.
pub(super) fn encode(bytes: &[u8], plain: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || plain.contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// A number and its unit: `100MB`, `1.5`.
fn number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let value: f64 = text[..end].parse().ok()?;
    (value.is_finite() && value > 0.0).then_some((value, &text[end..]))
}

const UNITS: [(&str, u64); 8] = [
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("", 1),
];

/// `100MB/s`, `1.5GiB/s`, `1000000`.
pub(super) fn bytes_per_second(text: &str) -> Option<u64> {
    let (value, unit) = number(text.strip_suffix("/s").unwrap_or(text))?;
    let (_, factor) = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    let rate = value * *factor as f64;
    (1.0..1e18).contains(&rate).then_some(rate as u64)
}

pub(super) fn show_rate(rate: u64) -> String {
    let (unit, factor) =
        UNITS[..4].iter().find(|(_, factor)| rate.is_multiple_of(*factor)).unwrap_or(&("B", 1));
    format!("{}{unit}/s", rate / factor)
}

/// `30ms`, `1s`, `500us`.
pub(super) fn time(text: &str) -> Option<Duration> {
    let (value, unit) = number(text)?;
    let factor = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        _ => return None,
    };
    let seconds = value * factor;
    (seconds <= 3600.0).then(|| Duration::from_micros((seconds * 1e6).round() as u64))
}

pub(super) fn show_time(time: Duration) -> String {
    match time.as_micros() {
        us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
        us if us % 1000 == 0 => format!("{}ms", us / 1000),
        us => format!("{us}us"),
    }
}

/// `8` (at most), `2-64`.
pub(super) fn range(text: &str) -> Option<(usize, usize)> {
    let (least, most) = match text.split_once('-') {
        Some((least, most)) => (least.parse().ok()?, most.parse().ok()?),
        None => (1, text.parse().ok()?),
    };
    (least >= 1 && most >= least && most <= 4096).then_some((least, most))
}

/// The known word that is at most two edits away, if there is one.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let distances = known.iter().map(|other| (edits(word, other), *other));
    distances.filter(|(edits, other)| *edits <= 2 && *edits < other.len()).min().map(|(_, other)| other)
}

/// The edit distance of two words.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in b.iter().enumerate() {
            let change = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_parse_and_show() {
        assert_eq!(bytes_per_second("100MB/s"), Some(100_000_000));
        assert_eq!(bytes_per_second("1.5GiB/s"), Some(3 << 29));
        assert_eq!(bytes_per_second("7"), Some(7));
        for bad in ["", "MB", "-1MB", "0", "1XB/s", "1e3", "inf"] {
            assert_eq!(bytes_per_second(bad), None, "{bad}");
        }
        assert_eq!((show_rate(100_000_000), show_rate(1 << 20)), ("100MB/s".into(), "1048576B/s".into()));
        assert_eq!(time("30ms"), Some(Duration::from_millis(30)));
        assert_eq!((time("30"), time("2h")), (None, None));
        assert_eq!(
            (show_time(Duration::from_millis(30)), show_time(Duration::from_micros(5))),
            ("30ms".into(), "5us".into())
        );
        assert_eq!(
            (range("8"), range("2-64"), range("0"), range("9-2")),
            (Some((1, 8)), Some((2, 64)), None, None)
        );
    }

    #[test]
    fn encoding_is_undone_by_decoding() {
        let all: Vec<u8> = (1..=255).collect();
        assert_eq!(decode(encode(&all, b"/").as_bytes()), Some(all));
        assert_eq!((decode(b"%"), decode(b"%4"), decode(b"%+1")), (None, None, None));
    }

    #[test]
    fn nearest_word_is_close() {
        assert_eq!(nearest("latancy", &["rate", "latency"]), Some("latency"));
        assert_eq!(nearest("colour", &["rate", "latency"]), None);
    }
}
