//! URLs of stores: `/dir`, `file:///dir?rate=100MB/s&latency=30ms`, `s3://bucket/prefix?endpoint=…&region=…`.
//!
//! A URL never holds credentials: it is shown in status, logs and process lists. One that has them is refused, with a
//! message that does not repeat them.

mod words;

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use forebay_types::{Code, Error};

use self::words::{bytes_per_second, decode, encode, nearest, range, show_rate, show_time, time};
use super::error::StoreResult;
use super::limited::{GateLimits, Limited, Limits};
use super::object::{ObjectStore, S3Place};
use super::path::StorePath;
use super::posix::{PosixOptions, PosixStore, StoreDirectory};
use super::temporary::MoverId;
use super::Store;

/// Options of every store, and those of S3 alone.
const OPTIONS: [&str; 3] = ["rate", "latency", "parallel"];
const S3_OPTIONS: [&str; 4] = ["endpoint", "region", "path_style", "timeout"];
/// Parts of words by which an option is taken for a credential.
const SECRET_WORDS: [&str; 6] = ["key", "secret", "token", "password", "passwd", "credential"];
const WHERE_CREDENTIALS_BELONG: &str = "put credentials into the environment (AWS_ACCESS_KEY_ID, \
    AWS_SECRET_ACCESS_KEY), into a profile file (~/.aws/credentials, AWS_PROFILE), or use the instance's role";

/// Where a store is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StorePlace {
    /// A directory, absolute.
    Directory(PathBuf),
    /// A bucket of an S3-compatible service.
    S3(S3Place),
}

/// A parsed URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreUrl {
    /// Where the store is.
    pub place: StorePlace,
    /// Its limits.
    pub limits: Limits,
}

impl StoreUrl {
    /// A directory without limits.
    pub fn directory(path: impl Into<PathBuf>) -> StoreUrl {
        StoreUrl { place: StorePlace::Directory(path.into()), limits: Limits::default() }
    }

    /// Parses the bytes of an argument. Paths may have any bytes.
    pub fn parse(text: &[u8]) -> Result<StoreUrl, Error> {
        if text.starts_with(b"/") {
            return Ok(StoreUrl::directory(OsString::from_vec(text.to_vec())));
        }
        let Some(colon) = text.windows(3).position(|window| window == b"://") else {
            let error = wrong("it is no absolute path and no URL");
            return Err(error.cure("write /DIR, file:///DIR or s3://BUCKET/PREFIX"));
        };
        let (scheme, rest) = (&text[..colon], &text[colon + 3..]);
        let (location, query) = match rest.iter().position(|&b| b == b'?') {
            Some(mark) => (&rest[..mark], &rest[mark + 1..]),
            None => (rest, &b""[..]),
        };
        let scheme = scheme.to_ascii_lowercase();
        let slash = location.iter().position(|&b| b == b'/').unwrap_or(location.len());
        let (authority, path) = location.split_at(slash);
        if authority.contains(&b'@') {
            return Err(wrong("it has a user or password before @").cure(WHERE_CREDENTIALS_BELONG));
        }
        match &scheme[..] {
            b"file" => StoreUrl::parse_file(authority, path, query),
            b"s3" => StoreUrl::parse_s3(authority, path, query),
            other => {
                let other = String::from_utf8_lossy(other).into_owned();
                let error = wrong(format!("{other:?} is no kind of store"));
                let near = nearest(&other, &["file", "s3"])
                    .map_or(String::new(), |near| format!("; did you mean {near}://?"));
                Err(error.cure(format!("use a directory, file:// or s3://{near}")))
            }
        }
    }

    /// The URL of one object as the store of its directory, and its path there.
    pub fn object(mut self) -> Result<(StoreUrl, StorePath), Error> {
        let name = match &mut self.place {
            StorePlace::Directory(path) => {
                let name = path.file_name().map(|name| name.as_bytes().to_vec());
                path.pop();
                name
            }
            StorePlace::S3(place) => {
                let (directory, name) = place.prefix.rsplit_once('/').unwrap_or(("", &place.prefix));
                let name = name.as_bytes().to_vec();
                place.prefix = directory.to_owned();
                Some(name)
            }
        };
        let path = name.filter(|name| !name.is_empty()).map(StorePath::new);
        match path {
            Some(Ok(path)) => Ok((self, path)),
            Some(Err(_)) => Err(wrong("its last component is no name of an object")),
            None => Err(wrong("it names no object").cure("write file:///DIR/FILE or s3://BUCKET/OBJECT")),
        }
    }

    fn parse_file(authority: &[u8], path: &[u8], query: &[u8]) -> Result<StoreUrl, Error> {
        if !authority.is_empty() && authority != b"localhost" {
            let host = String::from_utf8_lossy(authority).into_owned();
            return Err(
                wrong(format!("{host:?} stands where file: URLs have no host")).cure("write file:///DIR")
            );
        }
        let path = decode(path).ok_or_else(|| wrong("the path has a % that is no %XX"))?;
        if path.is_empty() {
            return Err(wrong("it names no directory").cure("write file:///DIR"));
        }
        let mut limits = Limits::default();
        for (name, value) in options(query)? {
            set_limit(&mut limits, &name, &value, &OPTIONS)?;
        }
        Ok(StoreUrl { place: StorePlace::Directory(OsString::from_vec(path).into()), limits })
    }

    fn parse_s3(authority: &[u8], path: &[u8], query: &[u8]) -> Result<StoreUrl, Error> {
        let bucket = String::from_utf8(authority.to_vec()).unwrap_or_default();
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
        if bucket.is_empty() || !bucket.bytes().all(plain) {
            let error = wrong(format!("{:?} is no name of a bucket", String::from_utf8_lossy(authority)));
            return Err(error
                .cure("write s3://BUCKET/PREFIX, the bucket in lower-case letters, digits, dots, hyphens"));
        }
        let prefix = decode(path).ok_or_else(|| wrong("the prefix has a % that is no %XX"))?;
        let prefix = String::from_utf8(prefix).map_err(|_| wrong("the prefix is not UTF-8"))?;
        let prefix = prefix.trim_matches('/').to_owned();
        if prefix.split('/').any(|part| matches!(part, "." | "..") || (part.is_empty() && !prefix.is_empty()))
        {
            return Err(wrong(format!("the prefix {prefix:?} has an empty component, . or ..")));
        }
        let mut place = S3Place { bucket, prefix, ..S3Place::default() };
        let mut limits = Limits::default();
        for (name, value) in options(query)? {
            match &name[..] {
                "endpoint" => place.endpoint = Some(endpoint(&value)?),
                "region" => place.region = Some(value),
                "timeout" => {
                    let limit = time(&value).filter(|limit| !limit.is_zero());
                    place.timeout = Some(limit.ok_or_else(|| wrong_option(&name, &value, "60s"))?);
                }
                "path_style" => {
                    place.path_style = match &value[..] {
                        "yes" | "true" => true,
                        "no" | "false" => false,
                        _ => return Err(wrong_option(&name, &value, "yes or no")),
                    }
                }
                _ => set_limit(&mut limits, &name, &value, &[&OPTIONS[..], &S3_OPTIONS[..]].concat())?,
            }
        }
        Ok(StoreUrl { place: StorePlace::S3(place), limits })
    }

    /// Opens the store, with its limits.
    pub fn open(&self, mover: MoverId) -> StoreResult<Arc<Limited>> {
        self.open_directory(StoreDirectory::default(), mover)
    }

    /// The same, but refuses another directory than this one.
    pub fn open_directory(&self, directory: StoreDirectory, mover: MoverId) -> StoreResult<Arc<Limited>> {
        let options = PosixOptions { directory, ..PosixOptions::default() };
        let store: Arc<dyn Store> = match &self.place {
            StorePlace::Directory(path) => Arc::new(PosixStore::open(path, options, mover)?),
            StorePlace::S3(place) => Arc::new(ObjectStore::open(place, mover)?),
        };
        #[cfg(feature = "simulation")]
        let store = match SIMULATED.get() {
            Some(wrap) => wrap(store),
            None => store,
        };
        Ok(Arc::new(Limited::new(store, self.limits)))
    }
}

/// What a simulation puts around each store.
#[cfg(feature = "simulation")]
type Wrap = Box<dyn Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync>;

#[cfg(feature = "simulation")]
static SIMULATED: std::sync::OnceLock<Wrap> = std::sync::OnceLock::new();

/// Puts `wrap` around all stores that are opened by their URLs from now on. Only the first use has an effect.
#[cfg(feature = "simulation")]
pub fn simulate_stores(wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static) {
    let _ = SIMULATED.set(Box::new(wrap));
}

fn wrong(why: impl fmt::Display) -> Error {
    Error::new(Code::Invalid, "cannot use the URL of a store").why(why)
}

fn wrong_option(name: &str, value: &str, wanted: &str) -> Error {
    wrong(format!("{value:?} is no value for {name}")).cure(format!("write {name}={wanted}"))
}

/// The options of a query, decoded.
fn options(query: &[u8]) -> Result<Vec<(String, String)>, Error> {
    let parts = query.split(|&b| b == b'&').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let equals = part.iter().position(|&b| b == b'=').unwrap_or(part.len());
            let text = |bytes: &[u8]| decode(bytes).and_then(|bytes| String::from_utf8(bytes).ok());
            let name = text(&part[..equals]).ok_or_else(|| wrong("an option's name is not UTF-8"))?;
            let lower = name.to_ascii_lowercase();
            if SECRET_WORDS.iter().any(|word| lower.contains(word)) {
                // The name only: the value is the secret.
                return Err(
                    wrong(format!("option {name:?} looks like a credential")).cure(WHERE_CREDENTIALS_BELONG)
                );
            }
            if equals == part.len() {
                return Err(
                    wrong(format!("option {name:?} has no value")).cure(format!("write {name}=VALUE"))
                );
            }
            let value =
                text(&part[equals + 1..]).ok_or_else(|| wrong(format!("option {name:?} is not UTF-8")))?;
            Ok((name, value))
        })
        .collect()
}

fn set_limit(limits: &mut Limits, name: &str, value: &str, known: &[&str]) -> Result<(), Error> {
    match name {
        "rate" => {
            limits.bytes_per_second =
                bytes_per_second(value).ok_or_else(|| wrong_option(name, value, "100MB/s"))?;
        }
        "latency" => {
            limits.latency = time(value).ok_or_else(|| wrong_option(name, value, "30ms"))?;
        }
        "parallel" => {
            let (least, most) = range(value).ok_or_else(|| wrong_option(name, value, "1-64"))?;
            limits.calls = GateLimits { least, most, ..limits.calls };
        }
        _ => {
            let error = wrong(format!("{name:?} is no option of this kind of store"));
            return Err(match nearest(name, known) {
                Some(near) => error.cure(format!("did you mean {near}?")),
                None => error.cure(format!("options are {}", known.join(", "))),
            });
        }
    }
    Ok(())
}

fn endpoint(value: &str) -> Result<String, Error> {
    let rest = value.strip_prefix("https://").or_else(|| value.strip_prefix("http://"));
    // The value is not repeated: it may have a password.
    let Some(rest) = rest else {
        return Err(
            wrong("the endpoint is no http:// or https:// URL").cure("write endpoint=https://HOST:PORT")
        );
    };
    if rest.contains('@') {
        return Err(wrong("the endpoint has a user or password before @").cure(WHERE_CREDENTIALS_BELONG));
    }
    let host = rest.trim_end_matches('/');
    if host.is_empty() || host.contains(['/', '?', '#']) {
        return Err(wrong("the endpoint is more, or less, than a host and a port")
            .cure("write endpoint=https://HOST:PORT"));
    }
    Ok(value.trim_end_matches('/').to_owned())
}

impl FromStr for StoreUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<StoreUrl, Error> {
        StoreUrl::parse(text.as_bytes())
    }
}

/// The URL that parses to the same store. A directory without options is its path.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = &self.limits;
        let (calls, default) = (limits.calls, GateLimits::default());
        let is_default = (calls.least, calls.most) == (default.least, default.most);
        let mut options = vec![
            ("rate", (limits.bytes_per_second > 0).then(|| show_rate(limits.bytes_per_second))),
            ("latency", (limits.latency > Duration::ZERO).then(|| show_time(limits.latency))),
            ("parallel", (!is_default).then(|| format!("{}-{}", calls.least, calls.most))),
        ];
        if let StorePlace::S3(place) = &self.place {
            options.push(("endpoint", place.endpoint.clone()));
            options.push(("region", place.region.clone()));
            options.push(("timeout", place.timeout.map(show_time)));
            options.push(("path_style", (!place.path_style).then(|| "no".to_owned())));
        }
        let options: Vec<String> = options
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name}={}", encode(value?.as_bytes(), b"/:"))))
            .collect();
        match &self.place {
            StorePlace::Directory(path) if options.is_empty() => return f.write_str(&show(path)),
            StorePlace::Directory(path) => write!(f, "file://{}", encode(path.as_os_str().as_bytes(), b"/"))?,
            StorePlace::S3(place) => {
                write!(f, "s3://{}", place.bucket)?;
                if !place.prefix.is_empty() {
                    write!(f, "/{}", encode(place.prefix.as_bytes(), b"/"))?;
                }
            }
        }
        if !options.is_empty() {
            write!(f, "?{}", options.join("&"))?;
        }
        Ok(())
    }
}

/// A path as it is, if it can be written so, else as a URL.
fn show(path: &Path) -> String {
    match path.to_str() {
        Some(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => format!("file://{}", encode(path.as_os_str().as_bytes(), b"/")),
    }
}

#[cfg(test)]
mod tests;
