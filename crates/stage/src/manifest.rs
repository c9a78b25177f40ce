//! Manifests: a text file that names many pairs to stage.
//!
//! ```text
//! # One pair a line: SOURCE, white space, DESTINATION. Empty lines and lines that start with # are ignored.
//! /store/run7/input.nc        /input.nc
//! /store/run7/restart/        /restart
//! "/store/with space/a\tb.nc" "/a b.nc"
//! /store/table.csv
//! ```
//!
//! Source and destination follow the rules of [`Pair`]'s module: one side is an absolute path in the backing store, the
//! other a path in the pool. When staging in, the destination may be omitted. A field that contains white space, quotes
//! or a backslash, or that starts with `#`, is written in double quotes. In quotes, `\"`, `\\`, `\n`, `\t` and `\xNN`
//! (two hexadecimal digits, any byte) are escapes with their usual meaning. Only a comment may follow the second field.
//! All other bytes are taken unchanged and need not be UTF-8. No destination may occur twice.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error, Result};

use crate::pair::Pair;

/// Reads manifests.
#[derive(Clone, Copy, Debug)]
pub struct Manifest;

impl Manifest {
    /// The pairs that the manifest at `path` names, in its order.
    ///
    /// # Errors
    /// The error of reading the file, or [`Code::Invalid`] with the number of the wrong line.
    pub fn read(path: &Path) -> Result<Vec<Pair>> {
        let bytes = std::fs::read(path).map_err(|e| {
            Error::io(format!("cannot read the manifest {}", path.display()), &e)
                .cure("name a text file with one pair a line: SOURCE DESTINATION")
        })?;
        Manifest::parse(&bytes, &path.display().to_string())
    }

    /// The pairs that `bytes` name; `name` stands for the manifest in errors.
    ///
    /// # Errors
    /// [`Code::Invalid`] with the number of the wrong line.
    pub fn parse(bytes: &[u8], name: &str) -> Result<Vec<Pair>> {
        let mut pairs = Vec::new();
        let mut lines_of: HashMap<PathBuf, usize> = HashMap::new();
        for (index, line) in bytes.split(|&b| b == b'\n').enumerate() {
            let number = index + 1;
            let wrong = |why: &str, cure: &str| {
                Error::new(Code::Invalid, format!("{name}, line {number}")).why(why).cure(cure)
            };
            let Some(pair) = parse_line(line.strip_suffix(b"\r").unwrap_or(line))
                .map_err(|(why, cure)| wrong(why, cure))?
            else {
                continue;
            };
            if !pair.destination.as_os_str().is_empty()
                && !pair.destination.as_os_str().as_bytes().ends_with(b"/")
            {
                if let Some(before) = lines_of.insert(pair.destination.clone(), number) {
                    let why =
                        format!("line {before} has the same destination {}", pair.destination.display());
                    return Err(wrong(&why, "give each pair a destination of its own"));
                }
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

type Wrong = (&'static str, &'static str);

fn parse_line(line: &[u8]) -> std::result::Result<Option<Pair>, Wrong> {
    let mut rest = line;
    let Some(source) = field(&mut rest)? else { return Ok(None) };
    let destination = field(&mut rest)?;
    if destination.is_some() && field(&mut rest)?.is_some() {
        return Err((
            "more than two fields",
            "write SOURCE DESTINATION; put a path with spaces in double quotes",
        ));
    }
    if source.is_empty() || destination.as_ref().is_some_and(|d| d.is_empty()) {
        return Err(("an empty path", "name a path, or leave the destination out"));
    }
    let path = |bytes: Vec<u8>| PathBuf::from(OsString::from_vec(bytes));
    Ok(Some(Pair { source: path(source), destination: path(destination.unwrap_or_default()) }))
}

/// The next field of a line; `None` at its end or at a comment.
fn field(rest: &mut &[u8]) -> std::result::Result<Option<Vec<u8>>, Wrong> {
    const BLANK: fn(u8) -> bool = |b| b == b' ' || b == b'\t';
    let start = rest.iter().position(|&b| !BLANK(b)).unwrap_or(rest.len());
    *rest = &rest[start..];
    match rest.first() {
        None | Some(b'#') => Ok(None),
        Some(b'"') => {
            let value = quoted(rest)?;
            match rest.first() {
                Some(&b) if !BLANK(b) => Err((
                    "text directly behind a closing quote",
                    "put the whole path within the quotes, and a space behind it",
                )),
                _ => Ok(Some(value)),
            }
        }
        Some(_) => {
            let end = rest.iter().position(|&b| BLANK(b)).unwrap_or(rest.len());
            let (value, tail) = rest.split_at(end);
            if value.contains(&b'"') || value.contains(&b'\\') {
                return Err((
                    "a quote or backslash in a path without quotes",
                    "put the path in double quotes, with \\\" for a quote and \\\\ for a backslash",
                ));
            }
            if value.contains(&0) {
                return Err(("a NUL byte in a path", "a path cannot hold one; is this a text file?"));
            }
            *rest = tail;
            Ok(Some(value.to_vec()))
        }
    }
}

/// A field in double quotes, which `rest` starts with.
fn quoted(rest: &mut &[u8]) -> std::result::Result<Vec<u8>, Wrong> {
    const CURE: &str = "within double quotes \\\", \\\\, \\n, \\t and \\xNN are known";
    let mut value = Vec::new();
    let mut bytes = rest[1..].iter().copied();
    loop {
        match bytes.next() {
            None => return Err(("a quote that is not closed", "close it on the same line")),
            Some(b'"') => break,
            Some(b'\\') => value.push(match bytes.next() {
                Some(b @ (b'"' | b'\\')) => b,
                Some(b'n') => b'\n',
                Some(b't') => b'\t',
                Some(b'x') => {
                    let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
                    match (digit(bytes.next()), digit(bytes.next())) {
                        (Some(high), Some(low)) if high + low > 0 => (high * 16 + low) as u8,
                        _ => return Err(("\\x without two hexadecimal digits, or \\x00", CURE)),
                    }
                }
                _ => return Err(("an unknown escape behind a backslash", CURE)),
            }),
            Some(0) => return Err(("a NUL byte in a path", "a path cannot hold one; is this a text file?")),
            Some(b) => value.push(b),
        }
    }
    *rest = &rest[rest.len() - bytes.len()..];
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let bytes = |p: PathBuf| p.into_os_string().into_vec();
        let pairs = Manifest::parse(text, "m").unwrap();
        pairs.into_iter().map(|p| (bytes(p.source), bytes(p.destination))).collect()
    }

    #[test]
    fn parse_every_form_gives_its_bytes() {
        let text = b"# comment\n\n  /s/a /a # why\n/s/b/\t/b/\r\n\"/s/c \\\"d\\\\\\n\\t\\xfF\" \"/c d\"\n/s/e\n/s/f#1 /f\xff";
        assert_eq!(
            pairs(text),
            [
                (b"/s/a".to_vec(), b"/a".to_vec()),
                (b"/s/b/".to_vec(), b"/b/".to_vec()),
                (b"/s/c \"d\\\n\t\xff".to_vec(), b"/c d".to_vec()),
                (b"/s/e".to_vec(), b"".to_vec()),
                (b"/s/f#1".to_vec(), b"/f\xff".to_vec()),
            ]
        );
        assert!(pairs(b"").is_empty());
    }

    #[test]
    fn parse_wrong_lines_names_line_and_reason() {
        for (text, why) in [
            (b"/a /b\n/a /b /c\n".as_slice(), "more than two fields"),
            (b"\n\"/a /b", "not closed"),
            (b"#\n\"/a\"b /c", "behind a closing quote"),
            (b"\n/a\\ b /c", "backslash in a path without quotes"),
            (b"\n\"/a\\q\" /c", "unknown escape"),
            (b"\n\"/a\\x0\" /c", "two hexadecimal digits"),
            (b"\n\"/a\\x00\" /c", "two hexadecimal digits"),
            (b"\n\"\" /c", "empty path"),
            (b"\n/a\0 /c", "NUL"),
            (b"/s/a /x\n/s/b /x\n", "line 1 has the same destination"),
        ] {
            let error = Manifest::parse(text, "list").unwrap_err();
            assert_eq!(error.code, Code::Invalid);
            assert_eq!(error.what, "list, line 2", "{}", String::from_utf8_lossy(text));
            assert!(error.why.contains(why), "{error}");
            assert!(!error.cure.is_empty());
        }
    }

    #[test]
    fn read_a_missing_manifest_says_so() {
        let error = Manifest::read(Path::new("/nonexistent/list")).unwrap_err();
        assert_eq!(error.code, Code::NotFound);
        assert!(error.what.contains("/nonexistent/list"));
    }
}
