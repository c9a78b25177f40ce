//! Parses pairs of source and destination: `SRC[:DST]` for stage-in, `SRC:DST` for stage-out, and manifests.
//!
//! The last colon separates. For stage-in it separates only if a slash follows, so that names with colons work without
//! a destination. `\:` is a colon that does not separate.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use forebay_stage::{Manifest, Pair};
use forebay_types::{Error, Result};

use crate::failure::invalid;
use crate::pool::path_within;
use crate::staging::Direction;

/// The pairs to stage in, from the command line and from a manifest.
pub(crate) fn pairs_in(texts: &[OsString], manifest: Option<&Path>) -> Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for text in texts {
        let (source, destination) = split(text.as_bytes(), |rest| rest.first() == Some(&b'/'));
        pairs.push(pair_in(text, source, destination)?);
    }
    for pair in read_manifest(manifest)? {
        pairs
            .push(Pair { source: outside(pair.source.as_os_str())?, destination: within(&pair.destination) });
    }
    Ok(pairs)
}

/// The pairs to stage out.
pub(crate) fn pairs_out(texts: &[OsString], manifest: Option<&Path>) -> Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for text in texts {
        let (source, destination) = split(text.as_bytes(), |rest| !rest.is_empty());
        let Some(destination) = destination else {
            return Err(invalid(
                format!("cannot stage out {}", text.to_string_lossy()),
                "it does not say where to",
                "write SRC:DST, for example /out:/lustre/case/out",
            ));
        };
        // As of a variable that is not set: it does not mean everything.
        if source.is_empty() {
            return Err(invalid(
                format!("cannot stage out {}", text.to_string_lossy()),
                "it names no path in the pool",
                "write SRC:DST, for example /out:/lustre/case/out; / is all of the pool",
            ));
        }
        pairs.push(Pair {
            source: PathBuf::from(OsString::from_vec(path_within(OsStr::from_bytes(&source)))),
            destination: outside(OsStr::from_bytes(&destination))?,
        });
    }
    for pair in read_manifest(manifest)? {
        if pair.destination.as_os_str().is_empty() {
            return Err(invalid(
                format!("cannot stage out {}", pair.source.display()),
                "the manifest does not say where to",
                "write SRC DST on every line",
            ));
        }
        pairs
            .push(Pair { source: within(&pair.source), destination: outside(pair.destination.as_os_str())? });
    }
    Ok(pairs)
}

/// The source of a pair to stage out, and the pair as it means the same in every working directory. Errors: those of
/// [`pairs_out`].
pub(crate) fn anchored_out(text: &str) -> Result<(OsString, String)> {
    let pairs = pairs_out(&[text.into()], None)?;
    let destination = pairs.first().and_then(|pair| pair.destination.to_str()).ok_or_else(|| {
        invalid(
            format!("cannot stage out {text}"),
            "the name of the working directory is not UTF-8",
            "name an absolute path",
        )
    })?;
    let (source, _) = split(text.as_bytes(), |rest| !rest.is_empty());
    let source = OsString::from_vec(source);
    let escaped = |path: &str| path.replace(':', "\\:");
    let anchored = format!("{}:{}", escaped(&source.to_string_lossy()), escaped(destination));
    Ok((source, anchored))
}

/// Refuses to stage the pool's own directory: stage-in would copy it while it grows, stage-out would overwrite it.
pub(crate) fn refuse_own(dir: &Path, direction: Direction, pairs: &[Pair]) -> Result<()> {
    // The target may be elsewhere, behind a link in the pool's directory.
    let own: Vec<PathBuf> = [dir.to_owned(), dir.join(forebay_server::directory::TARGET_FILE)]
        .iter()
        .filter_map(|path| path.canonicalize().ok())
        .collect();
    // A path that does not exist yet is judged by its nearest existing directory.
    let real = |path: &Path| path.ancestors().find_map(|p| p.canonicalize().ok());
    for pair in pairs {
        let (what, path, clash) = match direction {
            Direction::In => {
                let source = pair.source.canonicalize().ok();
                let clash = source.is_some_and(|s| own.iter().any(|o| o.starts_with(&s) || s.starts_with(o)));
                ("cannot stage in", &pair.source, clash)
            }
            Direction::Out => {
                let clash = real(&pair.destination).is_some_and(|d| own.iter().any(|o| d.starts_with(o)));
                ("cannot stage out to", &pair.destination, clash)
            }
        };
        if clash {
            return Err(invalid(
                format!("{what} {}", path.display()),
                format!("the pool itself is there, in {}", dir.display()),
                "name what lies beside the pool, or make the pool elsewhere with --path",
            ));
        }
    }
    Ok(())
}

fn read_manifest(path: Option<&Path>) -> Result<Vec<Pair>> {
    path.map_or(Ok(Vec::new()), Manifest::read)
}

fn pair_in(text: &OsStr, source: Vec<u8>, destination: Option<Vec<u8>>) -> Result<Pair> {
    if source.is_empty() {
        return Err(invalid(
            format!("cannot stage in {:?}", text.to_string_lossy()),
            "it names no file",
            "write SRC[:DST], for example /lustre/case:/case",
        ));
    }
    let destination = destination.map(|d| path_within(OsStr::from_bytes(&d))).unwrap_or_default();
    Ok(Pair {
        source: outside(OsStr::from_bytes(&source))?,
        destination: PathBuf::from(OsString::from_vec(destination)),
    })
}

/// A path of the backing store, made absolute. A trailing slash is kept, as it has a meaning.
fn outside(path: &OsStr) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::io(format!("cannot find {}", path.to_string_lossy()), &e))
}

fn within(path: &Path) -> PathBuf {
    if path.as_os_str().is_empty() {
        return PathBuf::new();
    }
    PathBuf::from(OsString::from_vec(path_within(path.as_os_str())))
}

/// Splits at the last colon that is not escaped and is followed by a destination.
fn split(text: &[u8], is_destination: impl Fn(&[u8]) -> bool) -> (Vec<u8>, Option<Vec<u8>>) {
    for i in (0..text.len()).rev() {
        let escaped = i > 0 && text[i - 1] == b'\\';
        if text[i] == b':' && !escaped && is_destination(&text[i + 1..]) {
            return (unescaped(&text[..i]), Some(unescaped(&text[i + 1..])));
        }
    }
    (unescaped(text), None)
}

fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for (i, &b) in text.iter().enumerate() {
        if b == b'\\' && text.get(i + 1) == Some(&b':') {
            continue;
        }
        out.push(b);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn into(text: &str) -> (String, String) {
        let pair = pairs_in(&[text.into()], None).unwrap().remove(0);
        (pair.source.display().to_string(), pair.destination.display().to_string())
    }

    fn out(text: &str) -> (String, String) {
        let pair = pairs_out(&[text.into()], None).unwrap().remove(0);
        (pair.source.display().to_string(), pair.destination.display().to_string())
    }

    fn pair(a: &str, b: &str) -> (String, String) {
        (a.to_owned(), b.to_owned())
    }

    #[test]
    fn pairs_in_are_read_as_documented() {
        assert_eq!(into("/s/case"), pair("/s/case", ""));
        assert_eq!(into("/s/case:/case"), pair("/s/case", "/case"));
        assert_eq!(into("/s/case/:/forebay/in/"), pair("/s/case/", "/in/"));
        assert_eq!(into("/s/t12:30.nc"), pair("/s/t12:30.nc", ""));
        assert_eq!(into("/s/t12:30.nc:/t"), pair("/s/t12:30.nc", "/t"));
        assert_eq!(into("/s/a\\:/b"), pair("/s/a:/b", ""));
        assert!(pairs_in(&[":/x".into()], None).is_err());
        let here = std::env::current_dir().unwrap();
        assert_eq!(into("rel:/x").0, here.join("rel").display().to_string());
    }

    #[test]
    fn anchored_pair_is_the_same_in_every_directory() {
        let here = std::env::current_dir().unwrap();
        for text in ["/out:dir/", "/forebay/forebay/out:dir", "a\\:b:c\\:d", "a\\\\:b:/s/x", "/out:/s/out"] {
            let (_, anchored) = anchored_out(text).unwrap();
            assert_eq!(out(&anchored), out(text), "{anchored}");
            assert!(anchored.contains(":/"), "{anchored}");
            assert_eq!(anchored_out(&anchored).unwrap().1, anchored);
        }
        let (source, anchored) = anchored_out("a\\:b:c").unwrap();
        assert_eq!((source, out(&anchored).1), ("a:b".into(), here.join("c").display().to_string()));
        assert!(anchored_out("/out").is_err());
    }

    #[test]
    fn pairs_out_need_a_destination() {
        assert_eq!(out("/out:/s/out"), pair("/out", "/s/out"));
        assert_eq!(out("/forebay/out/:/s/out/"), pair("/out/", "/s/out/"));
        assert_eq!(out("a\\:b:/s/x"), pair("/a:b", "/s/x"));
        let here = std::env::current_dir().unwrap();
        assert_eq!(out("/out:dir").1, here.join("dir").display().to_string());
        for bad in ["/out", "/out:", ":/s/out"] {
            let e = pairs_out(&[bad.into()], None).unwrap_err();
            assert!(e.cure.contains("SRC:DST"), "{e}");
        }
    }
}
