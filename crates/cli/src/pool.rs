//! Selects the pool, and handles paths in it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_client::{Door, Fail, Place, Pool, Role};
use forebay_server::directory::NODES_FILE;
use forebay_server::pool_file::PoolFile;
use forebay_types::{Code, Error, Ino, Result};

/// The prefix under which programs see a pool unless another is set.
pub(crate) const DEFAULT_PREFIX: &str = "/forebay";

/// Selects the node of a pool file, where no node has this host's name.
pub(crate) const NODE_VARIABLE: &str = "FOREBAY_NODE";

/// The directory of the pool: `named`, else the default pool. For a pool file, the directory of this node.
pub(crate) fn directory(named: Option<PathBuf>) -> Result<PathBuf> {
    match named {
        Some(dir) if dir.as_os_str().is_empty() => Err(crate::failure::invalid(
            "cannot use pool \"\"",
            "its name is empty",
            "name a directory, or unset FOREBAY_POOL",
        )),
        Some(file) if file.is_file() => {
            let file = PoolFile::read(&file)?;
            let node = std::env::var(NODE_VARIABLE).ok();
            Ok(file.node(node.as_deref())?.dir().to_owned())
        }
        Some(dir) => std::path::absolute(&dir)
            .map_err(|e| Error::io(format!("cannot find the pool {}", dir.display()), &e)),
        None => forebay_server::directory::default_pool(),
    }
}

/// The pool file for a verb that needs one: `named`, else the file of the running pool in the directory.
pub(crate) fn file(named: Option<&Path>, verb: &str) -> Result<PoolFile> {
    let dir = match named {
        Some(file) if file.is_file() => return PoolFile::read(file),
        Some(dir) => dir.to_owned(),
        None => forebay_server::directory::default_pool()?,
    };
    match dir.join(NODES_FILE) {
        file if file.is_file() => PoolFile::read(&file),
        _ => Err(crate::failure::invalid(
            format!("cannot {verb}"),
            "no pool file says which there are",
            "name it: --pool FILE",
        )),
    }
}

/// Attaches to a pool that is up.
pub(crate) fn attach(dir: &Path) -> Result<&'static Pool> {
    // The daemon is queried first: its errors distinguish a missing directory from a pool that is down or newer.
    forebay_server::control::ensure_up(dir)?;
    let pool = Pool::attach_as(dir, Role::Tool)?;
    pool.set_prefix(prefix().as_bytes());
    Ok(pool)
}

fn prefix() -> String {
    std::env::var("FOREBAY_PREFIX").unwrap_or_else(|_| DEFAULT_PREFIX.to_owned())
}

/// The path within the pool that the user means: `/forebay/a` is `/a`, `a` is `/a`. The result starts with a slash; a
/// trailing slash is kept.
pub(crate) fn path_within(text: &OsStr) -> Vec<u8> {
    let prefix = prefix();
    let prefix = prefix.trim_end_matches('/').as_bytes();
    let bytes = text.as_bytes();
    let rest = match bytes.strip_prefix(prefix) {
        Some(rest) if !prefix.is_empty() && (rest.is_empty() || rest[0] == b'/') => rest,
        _ => bytes,
    };
    let mut path = b"/".to_vec();
    path.extend_from_slice(rest.strip_prefix(b"/").unwrap_or(rest));
    path
}

/// The place of a path within the pool.
pub(crate) fn place(path: &[u8]) -> Place<'_> {
    Place { dir: Ino::ROOT, path: path.strip_prefix(b"/").unwrap_or(path) }
}

/// Adds words to a client call's failure: `verb` is what was tried on `path`.
pub(crate) fn worded<T>(result: Door<T>, verb: &str, path: &[u8]) -> Result<T> {
    result.map_err(|fail| {
        let what = format!("cannot {verb} {} in the pool", String::from_utf8_lossy(path));
        match fail {
            Fail::Escape if climbs_out(path) => Error::new(Code::CrossDevice, what)
                .why("`..` of the pool's root leads out of the pool")
                .cure("paths here begin at the pool's root: leave out the `..`"),
            Fail::Escape => Error::new(Code::CrossDevice, what).why("a symbolic link leads out of the pool"),
            Fail::Code(Code::NotFound) => Error::new(Code::NotFound, what)
                .why("there is no such name")
                .cure("`forebay ls` shows what there is"),
            Fail::Code(code) => Error::new(code, what).why(words(code)),
        }
    })
}

/// True for a path that has more `..` than names before them. Symbolic links are not considered.
fn climbs_out(path: &[u8]) -> bool {
    let mut depth = 0usize;
    for name in path.split(|&b| b == b'/') {
        match name {
            b"" | b"." => {}
            b".." if depth == 0 => return true,
            b".." => depth -= 1,
            _ => depth += 1,
        }
    }
    false
}

/// The kernel's text for a code's errno.
pub(crate) fn words(code: Code) -> String {
    match code {
        Code::PoolGone => "the pool's daemon is gone".to_owned(),
        Code::TimedOut => "the pool's daemon does not answer".to_owned(),
        _ => {
            let text = std::io::Error::from_raw_os_error(code.errno()).to_string();
            text.split(" (os error").next().unwrap_or(&text).to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_within_takes_the_prefix_away_and_no_more() {
        for (text, path) in [
            ("/a/b", "/a/b"),
            ("a", "/a"),
            ("/forebay", "/"),
            ("/forebay/", "/"),
            ("/forebay/a/", "/a/"),
            ("/forebays", "/forebays"),
            ("/", "/"),
            ("", "/"),
        ] {
            assert_eq!(String::from_utf8(path_within(OsStr::new(text))).unwrap(), path, "{text}");
        }
    }
}
