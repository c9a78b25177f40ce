//! The mark of a backing file: what a backing store is to have of the file, in an extended attribute of the backing file
//! itself. After the death of the node, `forebay recover` finds by it where the data belong.
//!
//! The mover writes marks, on targets that outlive the node ([`outlives_node`]). A mark names the file's last known
//! place in its store, its attributes, its layout, and the epoch of its data; the flags in it say whether the store has
//! these data. A checksum tells a damaged mark from a good one. The format is in docs/disk-format.md.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use forebay_sys::file_system::FileSystem;
use forebay_types::{name_hash, Attr, Code, Entry, Reader, Timestamp, Writer};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::code_of;
use crate::name::BackingName;

/// The extended attribute that has the mark.
pub const MARK_XATTR: &str = "user.forebay.mark";
/// Maximum bytes of a mark. ext4 has one block for all extended attributes of a file.
pub const MARK_BYTES_MAX: usize = 3900;
const MAGIC: u64 = u64::from_le_bytes(*b"fbymark1");
/// Where the epoch is in a mark, behind magic and checksum.
const EPOCH_OFFSET: usize = 16;
/// Where the attributes are: behind the epoch and the time when it was written.
const ATTR_OFFSET: usize = EPOCH_OFFSET + 8 + 12;

/// A mark.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataMark {
    /// When it was written: of two that differ, the later one counts.
    pub written: Timestamp,
    /// The pool's identity on the node that wrote it.
    pub pool: String,
    /// Attributes and layout of the file.
    pub entry: Entry,
    /// The directory of the pool at which the store is attached.
    pub at: Vec<u8>,
    /// The store's URL, without credentials.
    pub url: Vec<u8>,
    /// The path in the store.
    pub key: Vec<u8>,
    /// Extended attributes of the namespace `user.`, as far as they fit.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// True if extended attributes were left out.
    pub lacks_xattrs: bool,
}

/// True for a target whose file system keeps its files when the node dies.
pub fn outlives_node(target: impl AsFd) -> bool {
    let kind = FileSystem::of(target.as_fd());
    kind.is_ok_and(|kind| !matches!(kind, FileSystem::TMPFS | FileSystem::RAMFS))
}

fn put_bytes(w: &mut Writer<'_>, bytes: &[u8]) -> Result<(), Code> {
    w.u16(u16::try_from(bytes.len()).map_err(|_| Code::NameTooLong)?)?;
    w.put(bytes)
}

fn bytes(r: &mut Reader<'_>) -> Result<Vec<u8>, Code> {
    let n = usize::from(r.u16()?);
    Ok(r.take(n)?.to_vec())
}

impl DataMark {
    /// The mark's bytes. Extended attributes that do not fit are left out. [`Code::NameTooLong`] if the rest does not
    /// fit either.
    pub fn encode(&self) -> Result<Vec<u8>, Code> {
        let mut buffer = vec![0; MARK_BYTES_MAX];
        let n = match self.write_to(&mut buffer, &self.xattrs, self.lacks_xattrs) {
            Ok(n) => n,
            Err(_) => self.write_to(&mut buffer, &[], true).map_err(|_| Code::NameTooLong)?,
        };
        buffer.truncate(n);
        let sum = name_hash(&buffer[EPOCH_OFFSET..]);
        buffer[8..EPOCH_OFFSET].copy_from_slice(&sum.to_le_bytes());
        Ok(buffer)
    }

    fn write_to(
        &self,
        buffer: &mut [u8],
        xattrs: &[(Vec<u8>, Vec<u8>)],
        lacks_xattrs: bool,
    ) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        w.u64(MAGIC)?;
        w.u64(0)?;
        w.u64(self.entry.attr.epoch())?;
        w.u64(self.written.sec as u64)?;
        w.u32(self.written.nsec)?;
        self.entry.encode(&mut w)?;
        for text in [self.pool.as_bytes(), &self.at, &self.url, &self.key] {
            put_bytes(&mut w, text)?;
        }
        w.u8(u8::from(lacks_xattrs))?;
        w.u16(u16::try_from(xattrs.len()).map_err(|_| Code::NameTooLong)?)?;
        for (name, value) in xattrs {
            put_bytes(&mut w, name)?;
            put_bytes(&mut w, value)?;
        }
        Ok(w.len())
    }

    /// Reads a mark. [`Code::Corrupt`] for bytes that are none.
    pub fn decode(text: &[u8]) -> Result<DataMark, Code> {
        let read = || -> Result<DataMark, Code> {
            let mut r = Reader::new(text);
            let (magic, sum) = (r.u64()?, r.u64()?);
            if magic != MAGIC || sum != name_hash(r.rest()) {
                return Err(Code::Corrupt);
            }
            let _epoch = r.u64()?;
            let written = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
            let entry = Entry::decode(&mut r)?;
            let pool = String::from_utf8(bytes(&mut r)?).map_err(|_| Code::Corrupt)?;
            let (at, url, key) = (bytes(&mut r)?, bytes(&mut r)?, bytes(&mut r)?);
            let lacks_xattrs = r.u8()? != 0;
            let count = r.u16()?;
            let mut xattrs = Vec::new();
            for _ in 0..count {
                xattrs.push((bytes(&mut r)?, bytes(&mut r)?));
            }
            Ok(DataMark { written, pool, entry, at, url, key, xattrs, lacks_xattrs })
        };
        read().map_err(|_| Code::Corrupt)
    }

    /// Writes the mark to a backing file below a target's directory. [`Code::NotFound`] if there is no such file.
    pub fn write(&self, target: impl AsFd, file: &BackingName) -> Result<(), Code> {
        let path = path_of(target, file);
        rustix::fs::setxattr(&path, MARK_XATTR, &self.encode()?, XattrFlags::empty()).map_err(code_of)
    }

    /// The mark of a backing file; none if it has none. [`Code::Corrupt`] for one that cannot be read.
    pub fn read(target: impl AsFd, file: &BackingName) -> Result<Option<DataMark>, Code> {
        let mut buffer = [0; MARK_BYTES_MAX];
        match rustix::fs::lgetxattr(path_of(target, file), MARK_XATTR, &mut buffer[..]) {
            Ok(n) => DataMark::decode(&buffer[..n]).map(Some),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(Errno::RANGE) => Err(Code::Corrupt),
            Err(e) => Err(code_of(e)),
        }
    }
}

/// The file's attributes in a mark's bytes; none for bytes that are no mark. It does not check the rest. No allocation.
#[inline]
pub fn marked_attr(text: &[u8]) -> Option<Attr> {
    let mut r = Reader::new(text);
    if r.u64().ok()? != MAGIC {
        return None;
    }
    r.take(ATTR_OFFSET - size_of::<u64>()).ok()?;
    Attr::decode(&mut r).ok()
}

fn path_of(target: impl AsFd, file: &BackingName) -> PathBuf {
    forebay_sys::descriptor::path(&target.as_fd()).join(OsStr::from_bytes(file.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Ino, Layout, NodeId};

    fn mark() -> DataMark {
        let time = Timestamp { sec: 5, nsec: 6 };
        let mut attr = Attr {
            ino: Ino::new(NodeId(3), 9),
            size: 7,
            rdev: 0,
            parent: Ino(0),
            mode: 0o100_640,
            uid: 1,
            gid: 2,
            nlink: 1,
            flags: 11,
            home: NodeId(3),
            width_log2: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
        };
        attr.next_epoch();
        DataMark {
            written: time,
            pool: "0123".to_owned(),
            entry: Entry { attr, layout: Layout::single(NodeId(3), 1) },
            at: b"/a".to_vec(),
            url: b"/store".to_vec(),
            key: b"d/\xff".to_vec(),
            xattrs: vec![(b"user.a".to_vec(), b"1".to_vec())],
            lacks_xattrs: false,
        }
    }

    #[test]
    fn mark_round_trips_and_any_changed_bit_is_found() {
        let mark = mark();
        let bytes = mark.encode().unwrap();
        assert_eq!(DataMark::decode(&bytes).as_ref(), Ok(&mark));
        assert_eq!(marked_attr(&bytes), Some(mark.entry.attr));
        assert_eq!(marked_attr(&[0; MARK_BYTES_MAX]), None);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(DataMark::decode(&changed), Err(Code::Corrupt), "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert_eq!(DataMark::decode(&bytes[..end]), Err(Code::Corrupt), "cut at {end}");
        }
    }

    #[test]
    fn mark_leaves_out_attributes_that_do_not_fit_and_refuses_a_path_that_does_not() {
        let mut large = mark();
        large.xattrs.push((b"user.b".to_vec(), vec![1; MARK_BYTES_MAX]));
        let read = DataMark::decode(&large.encode().unwrap()).unwrap();
        assert!(read.xattrs.is_empty() && read.lacks_xattrs);
        large.key = vec![b'k'; MARK_BYTES_MAX];
        assert_eq!(large.encode(), Err(Code::NameTooLong));
    }
}
