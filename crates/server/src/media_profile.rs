//! `--media-profile`: the medium that a pool's targets emulate (docs/emulation.md). A profile is named, or described in
//! TOML:
//!
//! ```toml
//! name = "slow-disk"           # optional: the file's name without its ending
//! read_latency = "4ms"         # ns, us, ms or s
//! write_latency = "5ms"
//! read_bandwidth = "120MB/s"   # of all processes of the node; kB, MB, GB (powers of 1000) or KiB, MiB, GiB
//! write_bandwidth = "100MB/s"
//! seek = "8ms"                 # optional: added where a request does not begin at the end of the one before
//! queue_depth = 1              # requests in service at the same time, 1 to 64
//! ```
//! Processes pass a profile on as one word ([`Profile`]'s text), so that other nodes need not have the file.

use std::fmt;
use std::path::Path;

use forebay_pacing::{Medium, Profile, Speed, PROFILES};
use forebay_types::{Code, Error, Result};
use serde::de::{Deserializer, Visitor};
use serde::Deserialize;

/// Longest file that is read as a profile.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// A setting of a pool: the medium that it emulates, or none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MediaProfile(pub Option<Profile>);

impl fmt::Display for MediaProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(profile) => profile.fmt(f),
            None => f.write_str("none"),
        }
    }
}

impl MediaProfile {
    /// Reads a setting: `none`, the name of a built-in profile, the path of a file, or the text of a setting.
    ///
    /// # Errors
    /// [`Code::Invalid`] with the names that there are, or with file, line and key of what is wrong.
    pub fn read(text: &str) -> Result<MediaProfile> {
        if text == "none" {
            return Ok(MediaProfile(None));
        }
        if let Some(profile) = Profile::named(text).or_else(|| Profile::parse(text)) {
            return Ok(MediaProfile(Some(profile)));
        }
        let path = Path::new(text);
        if !text.contains('/') && path.extension().is_none() && !path.exists() {
            return Err(Error::new(Code::Invalid, format!("there is no media profile `{text}`"))
                .cure(format!("name one of {}, or a file", names())));
        }
        of_file(path).map(|profile| MediaProfile(Some(profile)))
    }
}

fn names() -> String {
    PROFILES.map(|(name, ..)| name).join(", ")
}

fn of_file(path: &Path) -> Result<Profile> {
    use std::io::Read;
    let failed = |e: &std::io::Error| Error::io(format!("cannot read media profile {}", path.display()), e);
    let file = std::fs::File::open(path).map_err(|e| failed(&e))?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|e| failed(&e))?;
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    of_text(&text, name).map_err(|Wrong { line, key, why }| {
        let line = line.map_or(String::new(), |line| format!(":{line}"));
        let key = key.map_or(String::new(), |key| format!("`{key}`: "));
        Error::new(Code::Invalid, format!("media profile {}{line} is no profile", path.display()))
            .why(format!("{key}{why}"))
            .cure("docs/emulation.md has an example")
    })
}

/// What is wrong with a profile.
#[derive(PartialEq, Eq, Debug)]
struct Wrong {
    line: Option<usize>,
    key: Option<String>,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: Option<String>,
    read_latency: Nanoseconds,
    write_latency: Nanoseconds,
    read_bandwidth: BytesPerSecond,
    write_bandwidth: BytesPerSecond,
    #[serde(default)]
    seek: Nanoseconds,
    queue_depth: u32,
}

#[derive(Default)]
struct Nanoseconds(u64);
struct BytesPerSecond(u64);

/// A number with one of some units, as an integer number of the smallest.
fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = (text[..split].parse::<f64>().ok()?, text[split..].trim());
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    let value = number * *factor as f64;
    (value.is_finite() && value <= u64::MAX as f64).then_some(value.round() as u64)
}

struct Quantity {
    expected: &'static str,
    units: &'static [(&'static str, u64)],
}

impl Visitor<'_> for Quantity {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<u64, E> {
        quantity(text, self.units).ok_or_else(|| E::custom(format!("`{text}` is not {}", self.expected)))
    }
}

impl<'de> Deserialize<'de> for Nanoseconds {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Nanoseconds, D::Error> {
        let units = &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
        d.deserialize_str(Quantity { expected: "a time with its unit, such as \"90us\"", units })
            .map(Nanoseconds)
    }
}

impl<'de> Deserialize<'de> for BytesPerSecond {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<BytesPerSecond, D::Error> {
        let units = &[
            ("B/s", 1),
            ("kB/s", 1_000),
            ("MB/s", 1_000_000),
            ("GB/s", 1_000_000_000),
            ("KiB/s", 1 << 10),
            ("MiB/s", 1 << 20),
            ("GiB/s", 1 << 30),
        ];
        d.deserialize_str(Quantity { expected: "a bandwidth with its unit, such as \"500MB/s\"", units })
            .map(BytesPerSecond)
    }
}

/// The key of a line of TOML.
fn key_of(line: &str) -> Option<&str> {
    let key = line.split_once('=')?.0.trim();
    (!key.is_empty()).then_some(key)
}

fn of_text(text: &str, file_name: String) -> std::result::Result<Profile, Wrong> {
    let read: Text = toml::from_str(text).map_err(|e| {
        // An error of the whole document, such as a missing key, names the key in its message.
        let is_whole = |span: &std::ops::Range<usize>| *span == (0..text.len()) || *span == (0..0);
        let at = e.span().filter(|span| !is_whole(span));
        let line = at.map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let key = line.and_then(|line| key_of(text.lines().nth(line - 1)?)).map(str::to_owned);
        Wrong { line, key, why: e.message().trim().to_owned() }
    })?;
    let wrong = |key: &str, why: String| {
        let line = text.lines().position(|line| key_of(line) == Some(key)).map(|line| line + 1);
        Wrong { line, key: Some(key.to_owned()), why }
    };
    let medium = Medium {
        read: Speed { latency_ns: read.read_latency.0, bytes_per_s: read.read_bandwidth.0 },
        write: Speed { latency_ns: read.write_latency.0, bytes_per_s: read.write_bandwidth.0 },
        seek_ns: read.seek.0,
        queue_depth: read.queue_depth,
    };
    medium.check().map_err(|(key, why)| wrong(key, why))?;
    let name = read.name.unwrap_or(file_name);
    if !Profile::is_name(&name) || PROFILES.iter().any(|(known, ..)| *known == name) {
        let why = match Profile::is_name(&name) {
            true => format!("`{name}` is the name of a built-in profile"),
            false => format!("`{name}` is no name: 1 to 32 letters, digits, `-`, `_` and `.` are"),
        };
        return Err(wrong("name", why));
    }
    Ok(Profile { name, medium })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "read_latency = \"90us\"\nwrite_latency = \"0.5 ms\"\nread_bandwidth = \"500MB/s\"\n\
                        write_bandwidth = \"1 GiB/s\"\nqueue_depth = 32\n";

    fn wrong(text: &str) -> (Option<usize>, Option<String>, String) {
        let Wrong { line, key, why } = of_text(text, "mine".into()).unwrap_err();
        (line, key, why)
    }

    #[test]
    fn of_text_reads_times_and_bandwidths_with_units() {
        let profile = of_text(GOOD, "mine".into()).unwrap();
        assert_eq!(profile.name, "mine");
        let Medium { read, write, seek_ns, queue_depth } = profile.medium;
        assert_eq!((read.latency_ns, read.bytes_per_s), (90_000, 500_000_000));
        assert_eq!((write.latency_ns, write.bytes_per_s), (500_000, 1 << 30));
        assert_eq!((seek_ns, queue_depth), (0, 32));
        let named = format!("name = \"other\"\nseek = \"2s\"\n{GOOD}");
        let profile = of_text(&named, "mine".into()).unwrap();
        assert_eq!((profile.name.as_str(), profile.medium.seek_ns), ("other", 2_000_000_000));
    }

    #[test]
    fn of_text_names_line_and_key_of_what_is_wrong() {
        let changed = |from: &str, to: &str| {
            assert!(GOOD.contains(from));
            wrong(&GOOD.replace(from, to))
        };
        let at = |(line, key, _): (Option<usize>, Option<String>, String)| (line.unwrap(), key.unwrap());
        assert_eq!(at(changed("90us", "90")), (1, "read_latency".into()));
        assert_eq!(at(changed("0.5 ms", "-1ms")), (2, "write_latency".into()));
        assert_eq!(at(changed("\"500MB/s\"", "500")), (3, "read_bandwidth".into()));
        assert_eq!(at(changed("1 GiB/s", "1 GiB")), (4, "write_bandwidth".into()));
        assert_eq!(at(changed("1 GiB/s", "2000 GB/s")), (4, "write_bandwidth".into()));
        assert_eq!(at(changed("= 32", "= 65")), (5, "queue_depth".into()));
        assert_eq!(at(changed("= 32", "= \"many\"")), (5, "queue_depth".into()));
        assert_eq!(at(wrong(&format!("name = \"hdd\"\n{GOOD}"))), (1, "name".into()));
        assert_eq!(at(wrong(&format!("{GOOD}sekk = \"1ms\"\n"))), (6, "sekk".into()));
        assert_eq!(at(wrong(&format!("{GOOD}name = \"a b\"\n"))), (6, "name".into()));
        let (_, _, why) = changed("read_latency = \"90us\"\n", "");
        assert!(why.contains("read_latency"), "{why}");
        let (line, _, _) = changed("= 32", "32");
        assert_eq!(line, Some(5));
    }

    #[test]
    fn read_takes_names_texts_and_none_and_lists_the_names_otherwise() {
        for name in ["hdd", "dram"] {
            let read = MediaProfile::read(name).unwrap();
            assert_eq!(read.0.as_ref().map(|p| p.name.as_str()), Some(name));
            assert_eq!(MediaProfile::read(&read.to_string()).unwrap(), read, "its text");
        }
        assert_eq!(MediaProfile::read("none").unwrap(), MediaProfile(None));
        let e = MediaProfile::read("floppy").unwrap_err();
        assert!(e.to_string().contains("pcram"), "{e}");
        let e = MediaProfile::read("/nowhere/mine.toml").unwrap_err();
        assert!(e.to_string().contains("/nowhere/mine.toml"), "{e}");
    }

    #[test]
    fn read_of_a_file_says_file_line_and_key() {
        let dir = std::env::temp_dir().join(format!("forebay-profile-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("mine.toml");
        std::fs::write(&path, GOOD).unwrap();
        let good = MediaProfile::read(path.to_str().unwrap()).unwrap();
        std::fs::write(&path, GOOD.replace("90us", "soon")).unwrap();
        let bad = MediaProfile::read(path.to_str().unwrap()).unwrap_err().to_string();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(good.0.unwrap().name, "mine");
        assert!(bad.contains("mine.toml:1") && bad.contains("read_latency"), "{bad}");
    }
}
