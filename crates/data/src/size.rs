//! Parsing and formatting of sizes.
//!
//! Units are those of GNU coreutils: K, M, G, T, P and KiB, MiB... are powers of 1024; KB, MB... are powers of 1000.
//! Case does not matter. Fractions are exact, rounded down to a byte.

use forebay_types::{Code, Error, Result};

const UNITS: &[u8] = b"KMGTPE";
const CURE: &str =
    "write a number and a unit, for example 4GiB, 1.5TiB, 500M or 64MB (M and MiB are 2^20 bytes, MB is \
                    10^6), or plain bytes";

/// The bytes in `text`: a decimal number, optional blanks, and a unit: none or B, K M G T P E, KiB..., KB....
///
/// ```
/// use forebay_data::parse_size;
/// assert_eq!(parse_size("4GiB").unwrap(), 4 << 30);
/// assert_eq!(parse_size("1.5 t").unwrap(), 3 << 39);
/// assert_eq!(parse_size("500MB").unwrap(), 500_000_000);
/// assert!(parse_size("lots").is_err());
/// ```
pub fn parse_size(text: &str) -> Result<u64> {
    let bad = |code, why: &str| Error::new(code, format!("`{text}` is not a size")).why(why).cure(CURE);
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return Err(bad(Code::Invalid, "it does not begin with a number"));
    }
    let unit_bytes =
        unit_bytes(unit.trim_start()).ok_or_else(|| bad(Code::Invalid, "its unit is not known"))?;
    let digits = [whole, fraction].concat();
    let scale = u32::try_from(fraction.len()).ok().and_then(|n| 10u128.checked_pow(n));
    let bytes = match (digits.parse::<u128>().ok(), scale) {
        (Some(value), Some(scale)) => value.checked_mul(unit_bytes).map(|v| v / scale),
        _ => None,
    };
    match bytes {
        Some(bytes) if bytes <= i64::MAX as u128 => Ok(bytes as u64),
        _ => Err(bad(Code::Overflow, "it has too many digits or exceeds 8 EiB")),
    }
}

fn unit_bytes(unit: &str) -> Option<u128> {
    let upper = unit.to_ascii_uppercase();
    let (letter, base) = match upper.as_bytes() {
        [] | [b'B'] => return Some(1),
        [letter] | [letter, b'I', b'B'] | [letter, b'I'] => (letter, 1024u128),
        [letter, b'B'] => (letter, 1000),
        _ => return None,
    };
    let power = UNITS.iter().position(|u| u == letter)? as u32 + 1;
    Some(base.pow(power))
}

/// `bytes` as text for people: `17 B`, `64 MiB`, `15.5 GiB`. Rounded down, so that free space is never overstated.
pub fn format_size(bytes: u64) -> String {
    let power = (bytes.max(1).ilog2() / 10) as usize;
    if power == 0 {
        return format!("{bytes} B");
    }
    let unit = 1u64 << (10 * power);
    let tenths = (bytes % unit) as u128 * 10 / unit as u128;
    let (whole, letter) = (bytes / unit, UNITS[power - 1] as char);
    match tenths {
        0 => format!("{whole} {letter}iB"),
        _ => format!("{whole}.{tenths} {letter}iB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parse_size_every_spelling_is_understood() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("12b", 12),
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("4G", 4 << 30),
            ("4Gi", 4 << 30),
            (" 4 GiB ", 4 << 30),
            ("500M", 500 << 20),
            ("500MB", 500_000_000),
            ("1kB", 1000),
            ("1.5TiB", 3 << 39),
            (".5K", 512),
            ("2.K", 2048),
            ("0.1K", 102),
            ("1P", 1 << 50),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn parse_size_nonsense_is_refused_with_what_to_write() {
        for (text, code) in [
            ("", Code::Invalid),
            ("GiB", Code::Invalid),
            (".", Code::Invalid),
            ("1.2.3", Code::Invalid),
            ("-1", Code::Invalid),
            ("+1", Code::Invalid),
            ("4 Gigs", Code::Invalid),
            ("4XB", Code::Invalid),
            ("1e9", Code::Invalid),
            ("4G 5", Code::Invalid),
            ("٤G", Code::Invalid),
            ("8E", Code::Overflow),
            ("99999999999999999999999999999999999999999", Code::Overflow),
            ("0.000000000000000000000000000000000000000001G", Code::Overflow),
        ] {
            let e = parse_size(text).unwrap_err();
            assert_eq!(e.code, code, "{text}: {e}");
            assert!(e.to_string().contains("4GiB"), "{e}");
        }
    }

    #[test]
    fn format_size_rounds_down() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((64 << 20) - 1, "63.9 MiB"),
            (64 << 20, "64 MiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn parse_size_of_format_size_is_never_more(bytes in 0..i64::MAX as u64) {
            let back = parse_size(&format_size(bytes)).unwrap();
            prop_assert!(back <= bytes && bytes - back <= bytes / 10 + 1, "{back} of {bytes}");
        }

        #[test]
        fn parse_size_of_any_text_never_panics(text in ".{0,20}") {
            let _ = parse_size(&text);
        }
    }
}
