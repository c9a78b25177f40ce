//! Snapshots of a shard: a copy of its last commit, on a medium that outlives the node, taken while the shard goes on.
//!
//! LMDB never overwrites the pages of the last two commits. So [`Shard::snapshot_source`] takes the last commit's meta
//! page, and another thread copies the pages that it leads to, as long as at most one further commit has ended: after
//! the second one the copy may be torn, and is void. The copy is an LMDB data file with both meta pages alike, followed
//! by a trailer: who wrote it, when, and a checksum of all pages. A copy without a good trailer is not opened. The
//! trailer is in docs/disk-format.md. Tests: here, and the recovery tests of the command.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_types::{name_hash, Code, Error, NodeId, Reader, Result, Timestamp, Writer};

use crate::shard::Shard;

/// The name of a snapshot in a target's directory `shard`, and of one that is being written.
pub const SNAPSHOT_FILE: &str = "snapshot";
/// See [`SNAPSHOT_FILE`].
pub const SNAPSHOT_FILE_NEW: &str = "snapshot.new";

const PAGE_BYTES: usize = 4096;
const TRAILER_BYTES: usize = PAGE_BYTES;
const TRAILER_MAGIC: u64 = u64::from_le_bytes(*b"fbysnap1");
/// Bytes that are copied and hashed at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Offsets in an LMDB meta page: flags, magic, last page, transaction.
const FLAGS_OFFSET: usize = 10;
const META_MAGIC_OFFSET: usize = 16;
const LAST_PAGE_OFFSET: usize = 136;
const TRANSACTION_OFFSET: usize = 144;
const META_MAGIC: u32 = 0xBEEF_C0DE;
const META_FLAG: u16 = 8;

/// What a snapshot says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotHead {
    /// The node whose shard it is.
    pub node: NodeId,
    /// The pool's identity on that node.
    pub pool: String,
    /// When the commit was the last one.
    pub taken: Timestamp,
}

/// The last commit of a shard, for a thread that copies it.
#[derive(Debug)]
pub struct SnapshotSource {
    file: File,
    meta: Vec<u8>,
    pages: u64,
}

fn number(page: &[u8], at: usize) -> u64 {
    page.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn is_meta(page: &[u8]) -> bool {
    let magic = page.get(META_MAGIC_OFFSET..META_MAGIC_OFFSET + 4);
    let flags = page.get(FLAGS_OFFSET..FLAGS_OFFSET + 2);
    magic == Some(&META_MAGIC.to_le_bytes()[..]) && flags == Some(&META_FLAG.to_le_bytes()[..])
}

impl Shard {
    /// The shard's last commit. No batch may be open: its pages are not to be part of the copy's bounds.
    pub fn snapshot_source(&self) -> Result<SnapshotSource> {
        drop(self.borrow("take a snapshot")?);
        let path = self.dir().join("data.mdb");
        let what = || format!("cannot take a snapshot of the shard {}", self.dir().display());
        let file = File::open(path).map_err(|e| Error::io(what(), &e))?;
        let mut both = vec![0; 2 * PAGE_BYTES];
        file.read_exact_at(&mut both, 0).map_err(|e| Error::io(what(), &e))?;
        let newest = both.chunks(PAGE_BYTES).filter(|page| is_meta(page));
        let newest = newest.max_by_key(|page| number(page, TRANSACTION_OFFSET));
        let Some(meta) = newest.map(<[u8]>::to_vec) else {
            return Err(Error::new(Code::Corrupt, what()).why("it has no meta page"));
        };
        let pages = number(&meta, LAST_PAGE_OFFSET) + 1;
        Ok(SnapshotSource { file, meta, pages })
    }
}

/// A checksum over chunks.
#[derive(Default)]
struct Sum(u64);

impl Sum {
    fn add(&mut self, chunk: &[u8]) {
        let mut both = [0; 16];
        both[..8].copy_from_slice(&self.0.to_le_bytes());
        both[8..].copy_from_slice(&name_hash(chunk).to_le_bytes());
        self.0 = name_hash(&both);
    }
}

impl SnapshotSource {
    /// Bytes of the copy.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES as u64 + TRAILER_BYTES as u64
    }

    /// Copies the commit into an empty file, with `head`. False if `is_valid` became false: the copy is void then.
    /// The caller syncs and renames the file.
    pub fn copy_to(&self, into: &File, head: &SnapshotHead, is_valid: &dyn Fn() -> bool) -> Result<bool> {
        let failed = |e: &std::io::Error| Error::io("cannot write a snapshot of the shard", e);
        let total = self.pages * PAGE_BYTES as u64;
        let (mut at, mut sum, mut buffer) = (0, Sum::default(), vec![0; CHUNK_BYTES]);
        while at < total {
            let n = (total - at).min(CHUNK_BYTES as u64) as usize;
            let chunk = &mut buffer[..n];
            self.file.read_exact_at(chunk, at).map_err(|e| failed(&e))?;
            if at == 0 {
                for (i, page) in chunk.chunks_mut(PAGE_BYTES).take(2).enumerate() {
                    page.copy_from_slice(&self.meta);
                    page[..8].copy_from_slice(&(i as u64).to_le_bytes());
                }
            }
            if !is_valid() {
                return Ok(false);
            }
            sum.add(chunk);
            into.write_all_at(chunk, at).map_err(|e| failed(&e))?;
            at += n as u64;
        }
        if !is_valid() {
            return Ok(false);
        }
        let mut trailer = vec![0; TRAILER_BYTES];
        let mut write = || -> std::result::Result<usize, Code> {
            let mut w = Writer::new(&mut trailer);
            w.u64(TRAILER_MAGIC)?;
            w.u64(0)?;
            w.u64(sum.0)?;
            w.u64(self.pages)?;
            w.u64(head.taken.sec as u64)?;
            w.u32(head.taken.nsec)?;
            w.u16(head.node.0)?;
            w.short_bytes(head.pool.as_bytes())?;
            Ok(w.len())
        };
        write().map_err(|code| Error::new(code, "cannot write a snapshot of the shard"))?;
        let own = name_hash(&trailer[16..]);
        trailer[8..16].copy_from_slice(&own.to_le_bytes());
        into.write_all_at(&trailer, total).map_err(|e| failed(&e))?;
        Ok(true)
    }
}

/// What a snapshot says of itself, after all of it was checked. [`Code::Corrupt`] for a file that is damaged, torn or
/// no snapshot; [`Code::NotFound`] if there is none.
pub fn check_snapshot(path: &Path) -> Result<SnapshotHead> {
    let what = || format!("cannot use the snapshot {}", path.display());
    let corrupt = |why: &str| {
        Error::new(Code::Corrupt, what())
            .why(why)
            .cure("an older one, or the marks of the backing files, are used instead")
    };
    let file = File::open(path).map_err(|e| Error::io(what(), &e))?;
    let bytes = file.metadata().map_err(|e| Error::io(what(), &e))?.len();
    let Some(total) = bytes.checked_sub(TRAILER_BYTES as u64).filter(|n| n % PAGE_BYTES as u64 == 0) else {
        return Err(corrupt("it has not the length of one"));
    };
    let mut trailer = vec![0; TRAILER_BYTES];
    file.read_exact_at(&mut trailer, total).map_err(|e| Error::io(what(), &e))?;
    let read = || -> std::result::Result<(u64, u64, SnapshotHead), Code> {
        let mut r = Reader::new(&trailer);
        let (magic, own) = (r.u64()?, r.u64()?);
        if magic != TRAILER_MAGIC || own != name_hash(&trailer[16..]) {
            return Err(Code::Corrupt);
        }
        let (sum, pages) = (r.u64()?, r.u64()?);
        let taken = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
        let node = NodeId(r.u16()?);
        let pool = String::from_utf8(r.short_bytes()?.to_vec()).map_err(|_| Code::Corrupt)?;
        Ok((sum, pages, SnapshotHead { node, pool, taken }))
    };
    let Ok((expected, pages, head)) = read() else { return Err(corrupt("it was not written to its end")) };
    if pages.checked_mul(PAGE_BYTES as u64) != Some(total) {
        return Err(corrupt("it has not the length of one"));
    }
    let (mut at, mut sum, mut buffer) = (0, Sum::default(), vec![0; CHUNK_BYTES]);
    while at < total {
        let n = (total - at).min(CHUNK_BYTES as u64) as usize;
        file.read_exact_at(&mut buffer[..n], at).map_err(|e| Error::io(what(), &e))?;
        sum.add(&buffer[..n]);
        at += n as u64;
    }
    if sum.0 != expected {
        return Err(corrupt("its checksum is wrong"));
    }
    Ok(head)
}
