//! Reads the promises of docs/semantics.md.

use std::path::PathBuf;

/// The path of the document.
pub fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md")
}

/// The promised sentences of a document: its list items that begin with ✔, each on one line.
pub fn promises(document: &str) -> Vec<String> {
    let mut promises: Vec<String> = Vec::new();
    let mut open = false;
    for line in document.lines() {
        if let Some(first) = line.strip_prefix("- ✔ ") {
            promises.push(first.trim().to_owned());
            open = true;
        } else if open && line.starts_with("  ") {
            if let Some(last) = promises.last_mut() {
                last.push(' ');
                last.push_str(line.trim());
            }
        } else {
            open = false;
        }
    }
    promises
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_of_a_document_are_joined_lines() {
        let text = "# T\n- ✔ One\n  goes on.\n- ✘ Not this.\n  Nor this.\n- ✔ Two.\n\n  apart\n";
        assert_eq!(promises(text), ["One goes on.", "Two."]);
    }
}
