//! What the shard knows of a backing store: versions of objects in it, places, and what is still to be done there.
//!
//! A **place** is a directory of the pool and a name in it, as the store has them: the shard keeps what lies at each
//! place of an attached tree. A **copy** is the place that has a file's last published version. A place is *pending*
//! if the store may differ from the pool there; `forebay-mover` compares both and makes the store equal.

use crate::attr::Timestamp;
use crate::bytes::{Reader, Writer};
use crate::error::Code;

/// A version of an object in a store. Two equal versions have the same bytes, as far as the store can tell.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StoreVersion {
    /// Bytes of its data.
    pub bytes: u64,
    /// Time of its last modification, as the store has it.
    pub mtime: Timestamp,
    /// Inode number; 0 where the store has none.
    pub ino: u64,
    /// Hash of the store's own mark of the version (etag, version ID); 0 where it has none.
    pub tag: u64,
}

/// Encoded bytes of a [`StoreVersion`].
pub const STORE_VERSION_BYTES: usize = 36;

impl StoreVersion {
    /// Appends the version.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.bytes)?;
        w.u64(self.mtime.sec as u64)?;
        w.u32(self.mtime.nsec)?;
        w.u64(self.ino)?;
        w.u64(self.tag)
    }

    /// Reads a version.
    pub fn decode(r: &mut Reader<'_>) -> Result<StoreVersion, Code> {
        let bytes = r.u64()?;
        let mtime = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
        if mtime.nsec >= 1_000_000_000 {
            return Err(Code::Malformed);
        }
        Ok(StoreVersion { bytes, mtime, ino: r.u64()?, tag: r.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_as_it_was_written() {
        let version =
            StoreVersion { bytes: 1 << 40, mtime: Timestamp { sec: -5, nsec: 999_999_999 }, ino: 7, tag: u64::MAX };
        let mut buffer = [0; STORE_VERSION_BYTES];
        version.encode(&mut Writer::new(&mut buffer)).unwrap();
        assert_eq!(StoreVersion::decode(&mut Reader::new(&buffer)), Ok(version));
        buffer[16..20].copy_from_slice(&1_000_000_000u32.to_le_bytes());
        assert_eq!(StoreVersion::decode(&mut Reader::new(&buffer)), Err(Code::Malformed));
    }
}
