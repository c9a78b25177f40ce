//! A pool's identity: the record in `pool.json`, which is written when the pool is made and read before any other file
//! of the pool is used. A pool of a newer format is refused here, before its shard is opened.

use std::fmt;
use std::io::{Read, Write};

use forebay_data::Medium;
use forebay_types::{Code, Error, NodeId, Result};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::directory::{or_elsewhere, PoolDirectory, IDENTITY_FILE};

/// The format of a pool that this version writes, and the newest that it reads.
pub const POOL_FORMAT: u32 = 3;
/// The format of a pool on a node with several targets.
const FORMAT_OF_SEVERAL_TARGETS: u32 = 2;
/// The format of a pool on a node with one target, which older versions read too.
const FORMAT_OF_ONE_TARGET: u32 = 1;

/// The kind of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// A tmpfs that the pool owns, mounted at `target`.
    Tmpfs,
    /// The plain directory `target`, on whatever file system it lies.
    Directory,
    /// A tmpfs that the pool owns and that is mounted nowhere: it lives as long as the supervisor.
    Detached,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backing::Tmpfs => "tmpfs",
            Backing::Directory => "directory",
            Backing::Detached => "detached",
        })
    }
}

/// A medium as the text that `--media` takes.
mod medium_text {
    use forebay_data::Medium;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(medium: &Medium, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(medium)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Medium, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A target after a node's first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TargetRecord {
    /// The directory that the pool file names.
    pub path: std::path::PathBuf,
    /// The medium.
    #[serde(with = "medium_text")]
    pub media: Medium,
    /// Capacity for data, in bytes.
    pub capacity_bytes: u64,
    /// The kind of the target.
    pub backing: Backing,
    /// True when the directory was made with the target and is removed with it.
    pub made_directory: bool,
}

/// A pool's identity, as `pool.json` holds it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolIdentity {
    /// The format that a version must support to use the pool: 2 for several targets, 3 for a node without a target.
    pub format: u32,
    /// A random name, unique to this pool.
    pub uuid: String,
    /// The node's number in the pool.
    pub node: u16,
    /// The medium.
    #[serde(with = "medium_text")]
    pub media: Medium,
    /// Bytes that data and shard may take.
    pub capacity_bytes: u64,
    /// The kind of the target.
    pub backing: Backing,
    /// True for a node without targets: the directory of its first target holds only the shard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shard_only: bool,
    /// The targets after the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<TargetRecord>,
    /// The number of this node in the pool file, if that number belonged to data that are lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<u16>,
    /// Milliseconds between two snapshots of the shard on targets that outlive the node; 0 for none. Without it the
    /// default holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_ms: Option<u64>,
    /// The medium that the targets emulate, as the text of a profile (docs/emulation.md).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_profile: Option<String>,
    /// True for a pool that ends with its last member.
    #[serde(default)]
    pub embedded: bool,
    /// True when the pool directory was made with the pool and is removed with it.
    #[serde(default)]
    pub made_directory: bool,
}

impl PoolIdentity {
    /// A new identity with a random name.
    pub fn new(media: Medium, backing: Backing, capacity_bytes: u64) -> Result<PoolIdentity> {
        Ok(PoolIdentity {
            format: FORMAT_OF_ONE_TARGET,
            uuid: random_uuid()?,
            node: NodeId::FIRST.0,
            media,
            capacity_bytes,
            backing,
            shard_only: false,
            more: Vec::new(),
            instead_of: None,
            snapshots_ms: None,
            media_profile: None,
            embedded: false,
            made_directory: false,
        })
    }

    /// Capacity for data and shard on the node's first target, in bytes; 0 on a node without a target.
    pub fn capacity_of_first(&self) -> u64 {
        if self.shard_only {
            0
        } else {
            self.capacity_bytes
        }
    }

    /// Capacity for data and shard on all targets, in bytes; 0 on a node without a target.
    pub fn capacity_of_all(&self) -> u64 {
        self.more
            .iter()
            .fold(self.capacity_of_first(), |sum, target| sum.saturating_add(target.capacity_bytes))
    }

    /// The number of the node's target directories. On a node without a target the directory of its shard counts.
    pub fn target_count(&self) -> usize {
        1 + self.more.len()
    }

    /// Sets the targets after the first.
    pub(crate) fn set_more(&mut self, more: Vec<TargetRecord>) {
        self.format = match more.len() {
            _ if self.shard_only => POOL_FORMAT,
            0 => FORMAT_OF_ONE_TARGET,
            _ => FORMAT_OF_SEVERAL_TARGETS,
        };
        self.more = more;
    }

    /// The identity of the pool in `dir`; none when there is no pool in it. Fails with [`Code::NewerFormat`] and
    /// [`Code::Corrupt`].
    pub fn read(dir: &PoolDirectory) -> Result<Option<PoolIdentity>> {
        let what = || format!("cannot read {}", dir.file(IDENTITY_FILE).display());
        let fd = match dir.open_file(IDENTITY_FILE, OFlags::RDONLY) {
            Ok(fd) => fd,
            Err(e) if e.code == Code::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut text = String::new();
        std::fs::File::from(fd)
            .take(64 * 1024)
            .read_to_string(&mut text)
            .map_err(|e| Error::io(what(), &e))?;
        let damaged = |e: serde_json::Error| {
            Error::new(Code::Corrupt, what())
                .why(format!("it is not the identity of a pool ({e})"))
                .cure("if the pool's data is no longer needed, remove the directory and start anew")
        };
        // The format is parsed first, because the rest of a newer identity may have other fields.
        #[derive(Deserialize)]
        struct FormatOnly {
            format: u32,
        }
        let FormatOnly { format } = serde_json::from_str(&text).map_err(damaged)?;
        if format > POOL_FORMAT {
            return Err(Error::new(Code::NewerFormat, format!("cannot use pool {}", dir.path().display()))
                .why(format!("its format is {format}, and this Forebay knows {POOL_FORMAT} at most"))
                .cure("use the Forebay that made it or a newer one, or name another directory"));
        }
        serde_json::from_str(&text).map(Some).map_err(damaged)
    }

    /// Writes the identity: a reader sees the old file or the new one, never a part.
    pub fn write(&self, dir: &PoolDirectory) -> Result<()> {
        let what = || format!("cannot write {}", dir.file(IDENTITY_FILE).display());
        let mut text = serde_json::to_string_pretty(self).map_err(|e| Error::new(Code::Io, what()).why(e))?;
        text.push('\n');
        let new = "pool.json.new";
        let fd = dir.open_file(new, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        std::fs::File::from(fd)
            .write_all(text.as_bytes())
            .map_err(|e| or_elsewhere(Error::io(what(), &e)))?;
        rustix::fs::renameat(dir.fd(), new, dir.fd(), IDENTITY_FILE).map_err(|e| Error::io(what(), &e.into()))
    }
}

fn random_uuid() -> Result<String> {
    let bytes = random_bytes()?;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    Ok(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// 16 unpredictable bytes.
pub(crate) fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0u8; 16];
    let mut got = 0;
    while got < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[got..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => got += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("cannot draw random bytes", &e.into())),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> (std::path::PathBuf, PoolDirectory) {
        let path = std::env::temp_dir().join(format!("forebay-identity-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let (dir, made) = PoolDirectory::make(&path).unwrap();
        assert!(made);
        (path, dir)
    }

    #[test]
    fn write_then_read_gives_the_same_identity() {
        let (path, dir) = directory("same");
        assert_eq!(PoolIdentity::read(&dir).unwrap(), None);
        let mut identity = PoolIdentity::new(Medium::Ssd, Backing::Directory, 1 << 30).unwrap();
        identity.made_directory = true;
        identity.write(&dir).unwrap();
        assert_eq!(PoolIdentity::read(&dir).unwrap(), Some(identity.clone()));
        let other = PoolIdentity::new(Medium::Dram, Backing::Tmpfs, 1).unwrap();
        assert_ne!(identity.uuid, other.uuid);
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn read_of_a_newer_format_is_refused_whatever_else_it_holds() {
        let (path, dir) = directory("newer");
        std::fs::write(path.join(IDENTITY_FILE), r#"{"format": 4, "media": ["cxl"]}"#).unwrap();
        let e = PoolIdentity::read(&dir).unwrap_err();
        assert_eq!(e.code, Code::NewerFormat);
        assert!(e.to_string().contains("its format is 4"), "{e}");
        std::fs::write(path.join(IDENTITY_FILE), "{\"format\": 1").unwrap();
        assert_eq!(PoolIdentity::read(&dir).unwrap_err().code, Code::Corrupt);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
