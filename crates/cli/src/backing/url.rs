//! A store's URL as the user writes it: checked as far as that needs no store, and brought into the form that the pool
//! keeps.
//!
//! The mover parses it again, with all options (`crates/mover/src/store/url`). Here are the checks that need the user's
//! working directory or the pool's places. No message repeats what may be a credential.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_server::control::Status;
use forebay_sys::file_system::FileSystem;
use forebay_types::{Code, Error, Result};

use crate::failure::invalid;

const FORMS: &str = "write /DIR, file:///DIR or s3://BUCKET/PREFIX";
const CREDENTIALS: &str =
    "leave it out: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY before `forebay up`, or use \
                           ~/.aws/credentials (AWS_PROFILE), or the instance's role";
/// Parts of names of options that are credentials.
const SECRET_WORDS: [&str; 6] = ["key", "secret", "token", "password", "passwd", "credential"];

/// A URL that was checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Url {
    /// As the pool keeps it.
    pub(crate) text: String,
    /// The directory, if it is one.
    directory: Option<PathBuf>,
}

fn wrong(why: impl std::fmt::Display, cure: impl Into<String>) -> Error {
    invalid("cannot use this as a backing store", why, cure)
}

impl Url {
    /// Checks the form. A relative path is meant from the working directory.
    pub(crate) fn parse(text: &OsStr) -> Result<Url> {
        let bytes = text.as_bytes();
        if bytes.is_empty() {
            return Err(wrong("it is empty", FORMS));
        }
        let Some(colon) = bytes.windows(3).position(|window| window == b"://") else {
            let path = std::path::absolute(Path::new(text))
                .map_err(|e| Error::io(format!("cannot find {}", text.to_string_lossy()), &e))?;
            return Url::of_directory(path);
        };
        let Ok(text) = std::str::from_utf8(bytes) else {
            return Err(wrong("its URL is not UTF-8", "write other bytes of a path as %XX"));
        };
        let (scheme, rest) = (text[..colon].to_ascii_lowercase(), &text[colon + 3..]);
        let (location, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = location.split_at(location.find('/').unwrap_or(location.len()));
        if authority.contains('@') {
            return Err(wrong("its URL has a user or a password before @", CREDENTIALS));
        }
        let mut names = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let name = option.split('=').next().unwrap_or_default().to_ascii_lowercase();
            if SECRET_WORDS.iter().any(|word| name.contains(word)) {
                return Err(wrong(format!("its option {name:?} looks like a credential"), CREDENTIALS));
            }
            if names.contains(&name) {
                return Err(wrong(format!("its option {name:?} comes twice"), "leave out one of them"));
            }
            names.push(name);
        }
        match &*scheme {
            "file" if !matches!(authority, "" | "localhost") => {
                Err(wrong(format!("{authority:?} stands where file: URLs have no host"), "write file:///DIR"))
            }
            "file" => match decoded(path) {
                Some(path) if path.starts_with(b"/") => {
                    let directory = Some(OsString::from_vec(path).into());
                    Ok(Url { text: text.to_owned(), directory })
                }
                Some(_) => Err(wrong("its URL has no path", "write file:///DIR")),
                None => Err(wrong("its path has a % that is no %XX", "write % itself as %25")),
            },
            "s3" if authority.is_empty() => Err(wrong("its URL names no bucket", "write s3://BUCKET/PREFIX")),
            "s3" => Ok(Url { text: text.to_owned(), directory: None }),
            other => Err(wrong(format!("{other:?} is no kind of store"), FORMS)),
        }
    }

    /// The directory, if it is one.
    pub(crate) fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    fn of_directory(path: PathBuf) -> Result<Url> {
        let text = match path.to_str() {
            Some(text) if !text.chars().any(char::is_control) => text.to_owned(),
            _ => format!("file://{}", encoded(path.as_os_str().as_bytes())),
        };
        Ok(Url { text, directory: Some(path) })
    }

    /// Refuses a directory that is missing, and one that the pool itself is in, or that is in the pool. Returns what tells the
    /// directory from others: its inode number, or its file system's kind where that number does not last.
    pub(crate) fn check_place(&self, pool: &Path, status: &Status) -> Result<(Option<u64>, Option<u32>)> {
        let Some(directory) = &self.directory else { return Ok((None, None)) };
        let what = || format!("cannot use {} as a backing store", directory.display());
        let found = directory.canonicalize().map_err(|e| {
            let error = Error::io(what(), &e);
            match error.code {
                Code::NotFound => error.why("there is no such directory").cure("make it, or check the path"),
                _ => error,
            }
        })?;
        let metadata = found.metadata().map_err(|e| Error::io(what(), &e))?;
        if !metadata.is_dir() {
            return Err(Error::new(Code::NotDirectory, what()).why("it is no directory"));
        }
        let mounts =
            status.mounts.iter().map(|mount| ("the pool is mounted there", PathBuf::from(&mount.at)));
        let targets = status.more.get("targets").and_then(|list| list.as_array()).into_iter().flatten();
        let targets = targets.filter_map(|target| target["path"].as_str()).map(PathBuf::from);
        let targets = targets.map(|path| ("a target of the pool is there", path));
        let own = std::iter::once(("it is the pool's own directory", pool.to_owned()));
        for (why, own) in own.chain(targets).chain(mounts) {
            // A mount point is not accessed: a mount that hangs would hang this command.
            let own = match why.starts_with("the pool") {
                true => own,
                false => own.canonicalize().unwrap_or(own),
            };
            if found.starts_with(&own) {
                return Err(Error::new(Code::Invalid, what())
                    .why(format!("{why}: {}", own.display()))
                    .cure("name a directory outside the pool"));
            }
            if own.starts_with(&found) {
                return Err(Error::new(Code::Invalid, what())
                    .why(format!("the pool would show itself: {} is in it", own.display()))
                    .cure("name a directory beside the pool's, or start the pool elsewhere (--path)"));
            }
        }
        let kind = std::fs::File::open(&found).and_then(FileSystem::of).map_err(|e| Error::io(what(), &e))?;
        Ok(match kind.keeps_inode_numbers() {
            true => (Some(metadata.ino()), None),
            false => (None, Some(kind.magic())),
        })
    }
}

/// Decodes `%XX`; none for a `%` without two hex digits.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut rest = text.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &rest[2..];
    }
    Some(bytes)
}

fn encoded(bytes: &[u8]) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    bytes.iter().map(|&b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Url> {
        Url::parse(OsStr::new(text))
    }

    #[test]
    fn paths_become_absolute_and_urls_stay() {
        assert_eq!(parse("/lustre/a").unwrap().text, "/lustre/a");
        let here = std::env::current_dir().unwrap();
        assert_eq!(Path::new(&parse("sub/dir").unwrap().text), here.join("sub/dir"));
        let file = parse("file:///a%20b?rate=100MB/s").unwrap();
        assert_eq!(file.directory, Some("/a b".into()));
        assert_eq!(file.text, "file:///a%20b?rate=100MB/s");
        assert_eq!(parse("s3://bucket/p?region=eu").unwrap().directory, None);
        let odd = Url::parse(OsStr::from_bytes(b"/a\xff")).unwrap();
        assert_eq!(odd.text, "file:///a%FF");
        assert_eq!(parse(&odd.text).unwrap().directory, odd.directory);
    }

    #[test]
    fn credentials_are_refused_and_not_repeated() {
        for text in
            ["s3://me:hunter2@bucket/p", "s3://b/p?secret_access_key=hunter2", "s3://b?a=1&Token=hunter2"]
        {
            let e = parse(text).unwrap_err();
            assert!(!e.to_string().contains("hunter2") && e.cure.contains("AWS_"), "{e}");
        }
    }

    #[test]
    fn other_urls_are_refused_with_the_forms_that_there_are() {
        let twice = "file:///a?rate=1MB/s&parallel=4&rate=2MB/s";
        for text in ["", "http://host/x", "file://host/x", "file://", "file:///%zz", "s3:///p", twice] {
            let e = parse(text).unwrap_err();
            assert!(e.code == Code::Invalid && !e.cure.is_empty(), "{text}: {e}");
        }
    }

    #[test]
    fn store_that_holds_the_pool_or_is_in_it_is_refused() {
        let base = std::env::temp_dir().join(format!("forebay-url-{}", std::process::id()));
        let pool = base.join("pool");
        std::fs::create_dir_all(pool.join("target/x")).unwrap();
        std::fs::create_dir_all(base.join("store")).unwrap();
        std::os::unix::fs::symlink(&pool, base.join("link")).unwrap();
        let status = Status::default();
        let check = |name: &str| Url::of_directory(base.join(name)).unwrap().check_place(&pool, &status);
        let results = [check("store"), check("pool/target/x"), check("link"), check(""), check("missing")];
        std::fs::remove_dir_all(&base).unwrap();
        let codes = results.map(|result| result.err().map(|e| e.code));
        let refused = Some(Code::Invalid);
        assert_eq!(codes, [None, refused, refused, refused, Some(Code::NotFound)]);
    }
}
