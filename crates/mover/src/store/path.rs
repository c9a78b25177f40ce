//! Paths in a store: raw bytes, relative to the store's root, checked when they are made.
//!
//! A [`StorePath`] never leaves its store: it has no empty component, no `.` and no `..`, and no NUL byte. Symbolic
//! links are another matter, which each store has to refuse by itself.

use std::fmt;

use forebay_types::limits::{NAME_MAX, PATH_MAX};
use forebay_types::Code;

/// A path relative to a store's root. The empty path is the root itself.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StorePath(Vec<u8>);

/// Checks one component: not empty, not `.` or `..`, no `/`, no NUL, at most 255 bytes.
pub fn check_name(name: &[u8]) -> Result<(), Code> {
    match name {
        b"" | b"." | b".." => Err(Code::Invalid),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Code::Invalid),
        _ if name.len() > NAME_MAX => Err(Code::NameTooLong),
        _ => Ok(()),
    }
}

/// `name` with `suffix` behind it, cut before the suffix where the whole would be too long for a name. Text stays text:
/// no character is cut in two.
pub fn with_suffix(name: &[u8], suffix: &str) -> Vec<u8> {
    let mut end = name.len().min(NAME_MAX.saturating_sub(suffix.len()));
    if let Ok(text) = std::str::from_utf8(name) {
        while !text.is_char_boundary(end) {
            end -= 1;
        }
    }
    [&name[..end], suffix.as_bytes()].concat()
}

impl StorePath {
    /// The store's root.
    pub fn root() -> StorePath {
        StorePath(Vec::new())
    }

    /// A path from its bytes, components separated by single slashes, none at the ends. [`Code::Invalid`] for a
    /// component that [`check_name`] refuses, [`Code::NameTooLong`] for a component or path that is too long.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<StorePath, Code> {
        let bytes = bytes.into();
        if bytes.len() > PATH_MAX {
            return Err(Code::NameTooLong);
        }
        if !bytes.is_empty() {
            bytes.split(|&b| b == b'/').try_for_each(check_name)?;
        }
        Ok(StorePath(bytes))
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Result<StorePath, Code> {
        check_name(name)?;
        let mut bytes = Vec::with_capacity(self.0.len() + 1 + name.len());
        bytes.extend_from_slice(&self.0);
        if !bytes.is_empty() {
            bytes.push(b'/');
        }
        bytes.extend_from_slice(name);
        if bytes.len() > PATH_MAX {
            return Err(Code::NameTooLong);
        }
        Ok(StorePath(bytes))
    }

    /// The directory that has this path's name; none for the root.
    pub fn parent(&self) -> Option<StorePath> {
        self.split().map(|(directory, _)| StorePath(directory.to_vec()))
    }

    /// The last component; none for the root.
    pub fn name(&self) -> Option<&[u8]> {
        self.split().map(|(_, name)| name)
    }

    /// The bytes of the parent and the name; none for the root.
    pub(super) fn split(&self) -> Option<(&[u8], &[u8])> {
        if self.0.is_empty() {
            return None;
        }
        Some(match self.0.iter().rposition(|&b| b == b'/') {
            Some(slash) => (&self.0[..slash], &self.0[slash + 1..]),
            None => (b"", &self.0),
        })
    }

    /// True for the store's root.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes, without a slash at either end.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The components in order; none for the root.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&b| b == b'/').filter(|component| !component.is_empty())
    }
}

/// For people: bytes that are not printable ASCII or UTF-8 are escaped.
impl fmt::Display for StorePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                if c.is_control() || c == '\\' {
                    write!(f, "{}", c.escape_default())?;
                } else {
                    write!(f, "{c}")?;
                }
            }
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for StorePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_leaves_the_store_or_is_malformed_is_refused() {
        for bad in ["/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/./b", "a\0b", "a/../../b"] {
            assert_eq!(StorePath::new(bad), Err(Code::Invalid), "{bad:?}");
        }
        assert_eq!(StorePath::new(vec![b'x'; 256]), Err(Code::NameTooLong));
        assert_eq!(StorePath::new(b"ab/".repeat(1400)), Err(Code::NameTooLong));
        assert_eq!(StorePath::root().join(b"a/b"), Err(Code::Invalid));
        assert_eq!(StorePath::root().join(b""), Err(Code::Invalid));
        let deep = StorePath::new([b"a/".repeat(2047), b"a".to_vec()].concat()).unwrap();
        assert_eq!(deep.as_bytes().len(), 4095);
        assert_eq!(deep.join(b"b"), Err(Code::NameTooLong));
    }

    #[test]
    fn path_splits_and_joins_raw_bytes() {
        let path = StorePath::new(*b"a/b\xff\n%/...").unwrap();
        assert_eq!(path.name(), Some(&b"..."[..]));
        let parent = path.parent().unwrap();
        assert_eq!(parent.as_bytes(), b"a/b\xff\n%");
        assert_eq!(parent.join(b"...").unwrap(), path);
        assert_eq!(path.components().count(), 3);
        assert_eq!(StorePath::root().components().count(), 0);
        assert_eq!((StorePath::root().parent(), StorePath::root().name()), (None, None));
        assert_eq!(StorePath::new("a").unwrap().parent(), Some(StorePath::root()));
    }

    #[test]
    fn name_with_a_suffix_is_a_name_and_text_stays_text() {
        assert_eq!(with_suffix(b"a\xff", ".x"), b"a\xff.x");
        let long = with_suffix(&[b'n'; NAME_MAX], ".kept");
        assert!(long.len() == NAME_MAX && long.ends_with(b"n.kept"));
        let text = with_suffix("\u{fc}".repeat(127).as_bytes(), ".x");
        assert_eq!(std::str::from_utf8(&text).unwrap(), format!("{}.x", "\u{fc}".repeat(126)));
        assert_eq!(with_suffix(&[0xbc; NAME_MAX], ".x").len(), NAME_MAX);
    }

    #[test]
    fn path_shown_to_people_has_no_control_bytes() {
        assert_eq!(StorePath::new(*b"a\xff\n\x1b[1m/b").unwrap().to_string(), "a\\xff\\n\\u{1b}[1m/b");
    }
}
