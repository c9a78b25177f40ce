//! Records of the shard and their encoding: inodes, entries, the ledger, orphans. Little-endian. Absent fields are left
//! out, so that records stay small and many fit a page. docs/disk-format.md gives every offset.
//!
//! Decoding does not trust the bytes: an inconsistent record is [`Code::Corrupt`].

use forebay_types::limits::{COMPONENTS_MAX, NAME_MAX, TARGETS_MAX};
use forebay_types::{
    Attr, Code, Component, Cookie, Entry, Ino, Kind, Layout, NodeId, Reader, Timestamp, TxId, Writer,
    FLAG_ATTACHED, FLAG_CLOSE_WAITS, FLAG_HAS_VALUES,
};

/// Version byte of inode, entry and ledger records.
pub(crate) const RECORD_VERSION: u8 = 1;
/// Version byte of the record of an entry that leads to a file of another node: such an entry has a link.
const LINKED_VERSION: u8 = 2;
/// Bytes of the largest inode record: the fixed part, a directory's parent, cookie and epoch, and the layout.
pub(crate) const INODE_BYTES_MAX: usize = 82 + 24 + COMPONENTS_MAX * (15 + 4 * TARGETS_MAX);
/// Bytes of an entry record in front of the name.
pub(crate) const ENTRY_HEADER_BYTES: usize = 21;
/// Directories whose attributes may be pending in the ledger.
pub(crate) const PENDING_MAX: usize = 16;
const PENDING_BYTES: usize = 44;
const LEDGER_HEADER_BYTES: usize = 2 + 5 * 8;
/// Bytes of the largest ledger record; less than LMDB's largest in-page record.
pub(crate) const LEDGER_BYTES_MAX: usize = LEDGER_HEADER_BYTES + PENDING_MAX * PENDING_BYTES;

/// Mark of an inode with values: extended attributes, a symlink's target, or a wide directory's parts.
pub(crate) const MARK_VALUES: u8 = 1;
/// Mark of a directory in which two names have or had the same hash, so that a look-up must walk the discriminators.
pub(crate) const MARK_COLLISIONS: u8 = 2;
/// Mark, in the record alone, of an inode with an epoch: a file that was drained or released, a directory of whose names
/// some were forgotten.
const MARK_EPOCH: u8 = 4;
/// Mark, in the record alone, of a directory whose bit 8 of the flags belongs to the width of new directories.
const MARK_WIDTH: u8 = 8;
/// The bit that had [`FLAG_CLOSE_WAITS`] first: in a directory it is the lowest of the width of new directories, too.
const OLD_CLOSE_WAITS: u32 = 1 << 8;

const _: () = assert!(LEDGER_BYTES_MAX < 2000);

/// The code for an inconsistent record.
fn corrupt(_: Code) -> Code {
    Code::Corrupt
}

/// An inode in its stored form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Inode {
    /// Attributes.
    pub(crate) attr: Attr,
    /// Layout of a file. For a directory, the layout of files created in it.
    pub(crate) layout: Layout,
    /// For a directory, the cookie of its entry in its parent. For a part of a wide directory see `place_of_part`.
    pub(crate) cookie: Cookie,
    /// [`MARK_VALUES`], [`MARK_COLLISIONS`].
    pub(crate) marks: u8,
}

fn put_time(w: &mut Writer<'_>, t: Timestamp) -> Result<(), Code> {
    w.u64(t.sec as u64)?;
    w.u32(t.nsec)
}

fn time(r: &mut Reader<'_>) -> Result<Timestamp, Code> {
    let t = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
    if t.nsec >= 1_000_000_000 {
        return Err(Code::Corrupt);
    }
    Ok(t)
}

fn put_layout(w: &mut Writer<'_>, layout: &Layout) -> Result<(), Code> {
    for c in layout.components() {
        w.u64(c.end)?;
        w.u32(c.stripe_bytes)?;
        w.u16(c.stripe_count)?;
        w.u8(c.target_count)?;
        for t in &c.targets[..c.target_count as usize] {
            w.u32(*t)?;
        }
    }
    Ok(())
}

fn layout(r: &mut Reader<'_>, count: usize) -> Result<Layout, Code> {
    let mut components =
        [Component { end: 0, stripe_bytes: 0, stripe_count: 0, target_count: 0, targets: [0; TARGETS_MAX] };
            COMPONENTS_MAX];
    for c in components.get_mut(..count).ok_or(Code::Corrupt)? {
        c.end = r.u64()?;
        c.stripe_bytes = r.u32()?;
        c.stripe_count = r.u16()?;
        c.target_count = r.u8()?;
        for t in c.targets.get_mut(..c.target_count as usize).ok_or(Code::Corrupt)? {
            *t = r.u32()?;
        }
    }
    Layout::new(&components[..count]).map_err(corrupt)
}

/// The flags of a record whose bit 8 may be [`FLAG_CLOSE_WAITS`]. Outside the tree of a store it never was. A file has no
/// width. A directory has no width of 1; with another odd one, either may have been meant: it keeps both.
fn without_overlap(kind: Kind, flags: u32) -> u32 {
    if flags & OLD_CLOSE_WAITS == 0 {
        return flags;
    }
    let is_attached = flags & FLAG_ATTACHED != 0;
    let is_width = kind == Kind::Directory && (!is_attached || flags & 0x1e00 != 0);
    let kept = if is_width { flags } else { flags & !OLD_CLOSE_WAITS };
    kept | if is_attached { FLAG_CLOSE_WAITS } else { 0 }
}

impl Inode {
    /// Attributes and layout, the form in replies.
    pub(crate) fn entry(&self) -> Entry {
        Entry { attr: self.attr, layout: self.layout }
    }

    /// Notes that it has values.
    pub(crate) fn mark_values(&mut self) {
        self.marks |= MARK_VALUES;
        self.attr.flags |= FLAG_HAS_VALUES;
    }

    /// Writes the record. Returns its length.
    pub(crate) fn encode(&self, buffer: &mut [u8; INODE_BYTES_MAX]) -> Result<usize, Code> {
        let a = &self.attr;
        let mut w = Writer::new(buffer);
        let has_layout = a.is_file() || a.is_directory();
        let has_epoch = (a.is_file() || a.is_directory()) && a.epoch() != 0;
        w.u8(RECORD_VERSION)?;
        let has_width = a.is_directory() && a.flags & OLD_CLOSE_WAITS != 0;
        let mark = |is: bool, mark: u8| if is { mark } else { 0 };
        w.u8(self.marks | mark(has_epoch, MARK_EPOCH) | mark(has_width, MARK_WIDTH))?;
        w.u8(a.width_log2)?;
        w.u8(if has_layout { self.layout.components().len() as u8 } else { 0 })?;
        for v in [a.mode, a.uid, a.gid, a.nlink, a.flags & !FLAG_HAS_VALUES] {
            w.u32(v)?;
        }
        w.u16(a.home.0)?;
        w.u64(a.size)?;
        for t in [a.atime, a.mtime, a.ctime, a.btime] {
            put_time(&mut w, t)?;
        }
        match a.kind() {
            Kind::Directory => {
                w.u64(a.parent.0)?;
                w.u64(self.cookie)?;
                if has_epoch {
                    w.u64(a.epoch())?;
                }
            }
            Kind::CharDevice | Kind::BlockDevice => w.u64(a.rdev)?,
            Kind::File if has_epoch => w.u64(a.epoch())?,
            _ => {}
        }
        if has_layout {
            put_layout(&mut w, &self.layout)?;
        }
        Ok(w.len())
    }

    /// Reads the record of `ino`.
    pub(crate) fn decode(ino: Ino, bytes: &[u8]) -> Result<Inode, Code> {
        Inode::read(ino, &mut Reader::new(bytes)).map_err(corrupt)
    }

    fn read(ino: Ino, r: &mut Reader<'_>) -> Result<Inode, Code> {
        let (version, marks, width_log2, components) = (r.u8()?, r.u8()?, r.u8()?, r.u8()?);
        if version != RECORD_VERSION {
            return Err(Code::Corrupt);
        }
        let (mode, uid, gid, nlink, flags) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let kind = Kind::from_mode(mode).ok_or(Code::Corrupt)?;
        let home = NodeId(r.u16()?);
        let size = r.u64()?;
        let (atime, mtime, ctime, btime) = (time(r)?, time(r)?, time(r)?, time(r)?);
        let (mut parent, mut cookie, mut rdev) = (Ino(0), 0, 0);
        match kind {
            Kind::Directory => {
                (parent, cookie) = (Ino(r.u64()?), r.u64()?);
                rdev = if marks & MARK_EPOCH == 0 { 0 } else { r.u64()? };
            }
            Kind::CharDevice | Kind::BlockDevice => rdev = r.u64()?,
            Kind::File if marks & MARK_EPOCH != 0 => rdev = r.u64()?,
            _ => {}
        }
        let flags = if marks & MARK_WIDTH == 0 { without_overlap(kind, flags) } else { flags };
        let marks = marks & !(MARK_EPOCH | MARK_WIDTH);
        let values = if marks & MARK_VALUES == 0 { 0 } else { FLAG_HAS_VALUES };
        let layout = if matches!(kind, Kind::File | Kind::Directory) {
            layout(r, components as usize)?
        } else {
            Layout::single(home, 0)
        };
        if !r.rest().is_empty() {
            return Err(Code::Corrupt);
        }
        let attr = Attr {
            ino,
            size,
            rdev,
            parent,
            mode,
            uid,
            gid,
            nlink,
            flags: flags & !FLAG_HAS_VALUES | values,
            home,
            width_log2,
            atime,
            mtime,
            ctime,
            btime,
        };
        Ok(Inode { attr, layout, cookie, marks })
    }
}

/// A directory entry in its stored form. Its key has parent and cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EntryRecord<'a> {
    /// Inode.
    pub(crate) ino: Ino,
    /// Its kind.
    pub(crate) kind: Kind,
    /// A directory's home; for other kinds the node that owns the inode.
    pub(crate) home: NodeId,
    /// A directory's width as a power of two.
    pub(crate) width_log2: u8,
    /// The link under which the inode's node counts the entry, if it leads to a file of another node.
    pub(crate) link: TxId,
    /// Name.
    pub(crate) name: &'a [u8],
}

impl<'a> EntryRecord<'a> {
    /// Writes the record. Returns its length.
    pub(crate) fn encode(&self, buffer: &mut [u8; ENTRY_HEADER_BYTES + NAME_MAX]) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        w.u8(if self.link == TxId::NONE { RECORD_VERSION } else { LINKED_VERSION })?;
        w.u64(self.ino.0)?;
        w.u8(self.kind as u8)?;
        w.u16(self.home.0)?;
        w.u8(self.width_log2)?;
        if self.link != TxId::NONE {
            w.u64(self.link.0)?;
        }
        w.put(self.name)?;
        Ok(w.len())
    }

    /// Reads a record.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<EntryRecord<'a>, Code> {
        let mut r = Reader::new(bytes);
        let mut read = || -> Result<EntryRecord<'a>, Code> {
            let version = r.u8()?;
            if !matches!(version, RECORD_VERSION | LINKED_VERSION) {
                return Err(Code::Corrupt);
            }
            let (ino, kind, home, width_log2) =
                (Ino(r.u64()?), Kind::from_u8(r.u8()?)?, NodeId(r.u16()?), r.u8()?);
            let link = if version == LINKED_VERSION { TxId(r.u64()?) } else { TxId::NONE };
            let name = r.rest();
            if name.is_empty() || name.len() > NAME_MAX {
                return Err(Code::Corrupt);
            }
            Ok(EntryRecord { ino, kind, home, width_log2, link, name })
        };
        read().map_err(corrupt)
    }
}

/// The attributes of a directory that change with its entries. For the directories that changed last they are in the
/// ledger, so that a create need not rewrite its parent's inode record, which is on another page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pending {
    /// The directory.
    pub(crate) ino: Ino,
    /// Number of entries.
    pub(crate) size: u64,
    /// Link count.
    pub(crate) nlink: u32,
    /// Last change of entries.
    pub(crate) mtime: Timestamp,
    /// Last change of the inode.
    pub(crate) ctime: Timestamp,
}

impl Pending {
    /// The pending attributes of a directory.
    pub(crate) fn of(attr: &Attr) -> Pending {
        Pending { ino: attr.ino, size: attr.size, nlink: attr.nlink, mtime: attr.mtime, ctime: attr.ctime }
    }

    /// Overwrites the attributes from the inode record.
    pub(crate) fn apply(&self, attr: &mut Attr) {
        attr.size = self.size;
        attr.nlink = self.nlink;
        attr.mtime = self.mtime;
        attr.ctime = self.ctime;
    }
}

/// Counters of the shard, and pending attributes: one small record that every changing transaction writes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ledger {
    /// Counter of the next new inode. No number is assigned twice.
    pub(crate) next_counter: u64,
    /// Inodes that exist.
    pub(crate) inodes: u64,
    /// Entries that exist.
    pub(crate) entries: u64,
    /// Orphans that are listed.
    pub(crate) orphans: u64,
    /// Directories with a backing store.
    pub(crate) stores: u64,
}

/// Version byte of the ledger of a shard with backing stores: it has their number.
const LEDGER_WITH_STORES: u8 = 2;

impl Ledger {
    /// True if any directory has a backing store.
    #[inline]
    pub(crate) fn has_stores(&self) -> bool {
        self.stores != 0
    }

    /// Writes the record. Returns its length.
    pub(crate) fn encode(
        &self,
        pending: impl ExactSizeIterator<Item = Pending>,
        buffer: &mut [u8; LEDGER_BYTES_MAX],
    ) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        w.u8(if self.has_stores() { LEDGER_WITH_STORES } else { RECORD_VERSION })?;
        w.u8(pending.len() as u8)?;
        for v in [self.next_counter, self.inodes, self.entries, self.orphans] {
            w.u64(v)?;
        }
        if self.has_stores() {
            w.u64(self.stores)?;
        }
        for p in pending {
            w.u64(p.ino.0)?;
            w.u64(p.size)?;
            w.u32(p.nlink)?;
            put_time(&mut w, p.mtime)?;
            put_time(&mut w, p.ctime)?;
        }
        Ok(w.len())
    }

    /// Reads the record.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Ledger, Vec<Pending>), Code> {
        let mut r = Reader::new(bytes);
        let mut read = || -> Result<(Ledger, Vec<Pending>), Code> {
            let (version, count) = (r.u8()?, r.u8()? as usize);
            if !matches!(version, RECORD_VERSION | LEDGER_WITH_STORES) || count > PENDING_MAX {
                return Err(Code::Corrupt);
            }
            let (next_counter, inodes, entries, orphans) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
            let stores = if version == LEDGER_WITH_STORES { r.u64()? } else { 0 };
            let ledger = Ledger { next_counter, inodes, entries, orphans, stores };
            let mut pending = Vec::with_capacity(count);
            for _ in 0..count {
                pending.push(Pending {
                    ino: Ino(r.u64()?),
                    size: r.u64()?,
                    nlink: r.u32()?,
                    mtime: time(&mut r)?,
                    ctime: time(&mut r)?,
                });
            }
            if !r.rest().is_empty() {
                return Err(Code::Corrupt);
            }
            Ok((ledger, pending))
        };
        read().map_err(corrupt)
    }
}

/// Bytes of the largest orphan record.
pub(crate) const ORPHAN_BYTES_MAX: usize = 1 + COMPONENTS_MAX * (15 + 4 * TARGETS_MAX);

/// Writes an orphan's record: the layout that names its backing files.
pub(crate) fn encode_orphan(layout: &Layout, buffer: &mut [u8; ORPHAN_BYTES_MAX]) -> Result<usize, Code> {
    let mut w = Writer::new(buffer);
    w.u8(layout.components().len() as u8)?;
    put_layout(&mut w, layout)?;
    Ok(w.len())
}

/// Reads an orphan's record.
pub(crate) fn decode_orphan(bytes: &[u8]) -> Result<Layout, Code> {
    let mut r = Reader::new(bytes);
    let count = r.u8().map_err(corrupt)? as usize;
    let found = layout(&mut r, count).map_err(corrupt)?;
    if !r.rest().is_empty() {
        return Err(Code::Corrupt);
    }
    Ok(found)
}

/// Version of the whole format, stored in the format record.
pub(crate) const FORMAT_VERSION: u32 = 5;

/// Writes the format record: version, node number.
pub(crate) fn encode_format(version: u32, node: NodeId) -> [u8; 6] {
    let mut bytes = [0; 6];
    bytes[..4].copy_from_slice(&version.to_le_bytes());
    bytes[4..].copy_from_slice(&node.0.to_le_bytes());
    bytes
}

/// Reads version and node number. For a newer version only the first four bytes are read.
pub(crate) fn decode_format(bytes: &[u8]) -> Result<(u32, NodeId), Code> {
    let mut r = Reader::new(bytes);
    let version = r.u32().map_err(corrupt)?;
    let node = if version > FORMAT_VERSION { NodeId(0) } else { NodeId(r.u16().map_err(corrupt)?) };
    Ok((version, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode(mode: u32) -> Inode {
        let t = |n: u32| Timestamp { sec: -(n as i64), nsec: n };
        let kind = Kind::from_mode(mode).unwrap();
        let directory = kind == Kind::Directory;
        let device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
        let layout = if matches!(kind, Kind::File | Kind::Directory) {
            Layout::overstriped(NodeId(2), 1, 5, 4096).unwrap()
        } else {
            Layout::single(NodeId(7), 0)
        };
        let attr = Attr {
            ino: Ino(42),
            size: 1 << 50,
            rdev: if device { 77 } else { 0 },
            parent: if directory { Ino(41) } else { Ino(0) },
            mode,
            uid: 1,
            gid: u32::MAX,
            nlink: 3,
            flags: 3,
            home: NodeId(7),
            width_log2: 2,
            atime: t(1),
            mtime: t(2),
            ctime: t(3),
            btime: t(999_999_999),
        };
        let marks = MARK_COLLISIONS;
        let mut inode = Inode { attr, layout, cookie: if directory { 99 } else { 0 }, marks };
        inode.mark_values();
        inode
    }

    const MODES: [u32; 7] = [0o100_644, 0o041_777, 0o120_777, 0o010_600, 0o020_600, 0o060_600, 0o140_600];

    #[test]
    fn inode_of_every_kind_round_trips() {
        let with_epoch = |mode: u32| {
            let mut inode = inode(mode);
            inode.attr.next_epoch();
            inode
        };
        let all = MODES.map(inode).into_iter().chain([with_epoch(0o100_644), with_epoch(0o040_755)]);
        for inode in all {
            let mut buffer = [0; INODE_BYTES_MAX];
            let n = inode.encode(&mut buffer).unwrap();
            assert_eq!(Inode::decode(Ino(42), &buffer[..n]).unwrap(), inode);
            for short in 0..n {
                assert_eq!(Inode::decode(Ino(42), &buffer[..short]), Err(Code::Corrupt));
            }
            let mut longer = buffer[..n].to_vec();
            longer.push(0);
            assert_eq!(Inode::decode(Ino(42), &longer), Err(Code::Corrupt));
        }
    }

    #[test]
    fn a_close_that_waits_is_read_from_the_bit_that_had_it_first() {
        let flags_of = |mode: u32, flags: u32, mark: u8| {
            let mut buffer = [0; INODE_BYTES_MAX];
            let n = inode(mode).encode(&mut buffer).unwrap();
            buffer[1] = buffer[1] & !MARK_WIDTH | mark;
            buffer[20..24].copy_from_slice(&flags.to_le_bytes());
            Inode::decode(Ino(42), &buffer[..n]).unwrap().attr.flags & !FLAG_HAS_VALUES
        };
        let (file, directory, old) = (0o100_644, 0o040_755, OLD_CLOSE_WAITS);
        let waits = FLAG_ATTACHED | FLAG_CLOSE_WAITS;
        assert_eq!(flags_of(file, FLAG_ATTACHED | old, 0), waits);
        assert_eq!(flags_of(directory, FLAG_ATTACHED | old, 0), waits);
        assert_eq!(flags_of(file, old, 0), 0, "it came from the width of its directory");
        assert_eq!(flags_of(directory, 3 << 8, 0), 3 << 8);
        assert_eq!(flags_of(directory, FLAG_ATTACHED | 3 << 8, 0), waits | 3 << 8, "either may be meant");
        assert_eq!(flags_of(directory, FLAG_ATTACHED | 3 << 8, MARK_WIDTH), FLAG_ATTACHED | 3 << 8);
        // What is written now is read as it is.
        for flags in [FLAG_ATTACHED | 3 << 8, waits | 3 << 8, waits, 16 << 8] {
            let mut wide = inode(directory);
            wide.attr.flags = flags | FLAG_HAS_VALUES;
            let mut buffer = [0; INODE_BYTES_MAX];
            let n = wide.encode(&mut buffer).unwrap();
            assert_eq!(Inode::decode(Ino(42), &buffer[..n]).unwrap(), wide);
        }
    }

    #[test]
    fn entry_round_trips() {
        for (link, header) in [(TxId::NONE, 13), (TxId(9), ENTRY_HEADER_BYTES)] {
            let (kind, home) = (Kind::Fifo, NodeId(1));
            let record = EntryRecord { ino: Ino(5), kind, home, width_log2: 0, link, name: &[200; 255] };
            let mut buffer = [0; ENTRY_HEADER_BYTES + NAME_MAX];
            let n = record.encode(&mut buffer).unwrap();
            assert_eq!(EntryRecord::decode(&buffer[..n]).unwrap(), record);
            assert_eq!(EntryRecord::decode(&buffer[..header]), Err(Code::Corrupt));
        }
    }

    #[test]
    fn ledger_and_orphan_round_trip() {
        let ledger = Ledger { next_counter: 1, inodes: 2, entries: 3, orphans: 4, stores: 5 };
        let pending: Vec<_> = (0..PENDING_MAX as u64)
            .map(|i| Pending { ino: Ino(i), ..Pending::of(&inode(0o040_755).attr) })
            .collect();
        let mut buffer = [0; LEDGER_BYTES_MAX];
        let n = ledger.encode(pending.iter().copied(), &mut buffer).unwrap();
        assert_eq!(n, LEDGER_BYTES_MAX);
        assert_eq!(Ledger::decode(&buffer).unwrap(), (ledger, pending));
        let layout = inode(0o100_644).layout;
        let mut buffer = [0; ORPHAN_BYTES_MAX];
        let n = encode_orphan(&layout, &mut buffer).unwrap();
        assert_eq!(decode_orphan(&buffer[..n]).unwrap(), layout);
    }

    mod random {
        use super::super::*;
        use proptest::prelude::*;

        proptest! {
            #[test]
            fn decode_of_any_bytes_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 1..300),
                                                right_version in any::<bool>()) {
                if right_version {
                    bytes[0] = RECORD_VERSION;
                }
                let _ = Inode::decode(Ino(1), &bytes);
                let _ = EntryRecord::decode(&bytes);
                let _ = Ledger::decode(&bytes);
                let _ = decode_orphan(&bytes);
                let _ = decode_format(&bytes);
            }
        }
    }
}
