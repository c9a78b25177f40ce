//! Values of options that clap does not parse itself.

use forebay_server::Medium;

pub(super) fn medium(text: &str) -> Result<Medium, String> {
    text.parse().map_err(|e: forebay_types::Error| e.to_string())
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    forebay_server::parse_size(text).map_err(|e| e.to_string())
}
