//! Values of options that clap does not parse itself.

use std::ffi::OsString;

use clap::builder::{OsStringValueParser, TypedValueParser};
use forebay_server::media_profile::MediaProfile;
use forebay_server::Medium;
use forebay_tasks::Recall;

pub(super) fn medium(text: &str) -> Result<Medium, String> {
    text.parse().map_err(|e: forebay_types::Error| e.to_string())
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    forebay_server::parse_size(text).map_err(|e| e.to_string())
}

/// Permission bits in octal.
pub(super) fn permissions(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("write three octal digits, such as 640".to_owned()),
    }
}

/// Milliseconds between two snapshots, 0 for `off`.
pub(super) fn snapshots(text: &str) -> Result<u64, String> {
    forebay_server::parse_snapshot_period(text).map_err(|e| e.to_string())
}

/// A built-in media profile, a file with one, or `none`.
pub(super) fn media_profile(text: &str) -> Result<MediaProfile, String> {
    MediaProfile::read(text).map_err(|e| e.to_string())
}

/// `yes`, `no`, or a size.
pub(crate) fn recall(text: &str) -> Result<Recall, String> {
    match text {
        "yes" => Ok(Recall::Yes),
        "no" => Ok(Recall::No),
        text => size(text).map(Recall::UpTo).map_err(|why| format!("it is neither yes nor no, and {why}")),
    }
}

/// Seconds of a time: `30s`, `10m`, `2h`, or a number of seconds.
pub(super) fn seconds(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.as_bytes().last() {
        Some(b's') => (&text[..text.len() - 1], 1),
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    seconds.ok_or_else(|| "it is no time: write 30s, 10m or 2h".to_owned())
}

/// Seconds of a time between two runs, of which there are some.
pub(super) fn period(text: &str) -> Result<u64, String> {
    match seconds(text)? {
        0 => Err("it is no time between two copies: write at least 1s".to_owned()),
        seconds => Ok(seconds),
    }
}

/// A path in a pool. An empty one, such as of a variable that is not set, is not taken for the root.
pub(super) fn path() -> impl TypedValueParser<Value = OsString> {
    OsStringValueParser::new().try_map(|path| match path.is_empty() {
        true => Err("it is empty: write / for the pool's root"),
        false => Ok(path),
    })
}
