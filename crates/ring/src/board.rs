//! The board as its readers see it: names to inodes, and inodes to attributes, without a request or a system call.
//!
//! ```text
//! page 0   word 0  buckets of the name table   word 8  buckets of the attribute table
//!          word 16 this node; 0: there are no others   word 24 depth of the index
//! leases   a word for each node: until when, in ns of CLOCK_BOOTTIME, this node's lease from it runs
//! names    groups of 4 buckets of 4 entries of 128 bytes:
//!          0 u32 sequence  4 u8 name bytes  5 u8 kind  6 u16 guests  8 u64 parent  16 u64 inode  24 u32 mode
//!          28 u32 uid  32 u32 gid  40 name
//! inodes   buckets of 4 entries of 256 bytes, in the order of inode numbers, wrapping around:
//!          0 u32 sequence  4 u32 bit 0: in use, bit 1: complete, bit 2: leased  8 u64 inode  16 attributes and layout
//! index    a u32 for each value of the last *depth* bits of a name's hash: the group of the names with that value
//! ```
//!
//! The name table grows by extendible hashing (Fagin et al. 1979, docs/decisions/0038), so that few pages hold many
//! names; groups are used in their order. A full group is *split*: its names with another bit of their hash set move
//! to the same places of the next group, and the index leads there. The index doubles when a group uses all its bits.
//! A reader that finds no name reads the index again: it has missed a name that moved only if the index has changed.
//!
//! If the bucket of a name is full, the name becomes a guest in another bucket of the group. The first entry of its
//! own bucket counts them (*guests*), so that a reader searches the other buckets only when there are any.
//! `Board::is_complete` explains the mark *complete*, `Board::may_be_believed` what is *leased*.

use std::sync::atomic::{fence, Ordering};

use forebay_types::limits::{BOARD_NAME_MAX, NODE_NUMBER_MAX};
use forebay_types::{
    Code, Entry, Ino, Kind, NodeId, Reader, ATTR_BYTES, COMPONENT_BYTES, EPOCH_OFFSET, FLAGS_OFFSET,
    PERMISSIONS_OFFSET,
};

use crate::shared::{Mapping, PAGE_BYTES};
use crate::waiter::lease_clock;

pub(crate) const WAYS: usize = 4;
/// Offset of this node's number.
pub(crate) const NODE_OFFSET: usize = 16;
/// Offset of the index's depth.
pub(crate) const DEPTH_OFFSET: usize = 24;
/// Offset of the leases: one word for each number that a node may have. Pages of unused numbers are never allocated.
pub(crate) const LEASES_OFFSET: usize = 4096;
pub(crate) const HEADER_BYTES: usize = LEASES_OFFSET + 8 * NODE_NUMBERS;
/// Node numbers are below this.
const NODE_NUMBERS: usize = 1 << 15;
const _: () = assert!((NODE_NUMBER_MAX as usize) < NODE_NUMBERS);
pub(crate) const NAME_BYTES: usize = 128;
/// Buckets of names whose entries stand in for each other.
pub(crate) const GROUP: usize = 4;
/// Bytes of a bucket of names.
pub(crate) const BUCKET_BYTES: usize = WAYS * NAME_BYTES;
/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = GROUP * BUCKET_BYTES;
/// Bits that the index may have beyond those that number the groups: hashes are not distributed evenly, and a group is
/// split by its own bits. With 16 names in a group the index gets that large for some millions of names.
const INDEX_BITS_MORE: u32 = 3;
/// Most bytes of the index for each group: the number of groups is rounded up to a power of two, and has those bits
/// more.
const INDEX_BYTES_A_GROUP: usize = (4 * 2) << INDEX_BITS_MORE;
pub(crate) const NAME_OFFSET: usize = 40;
pub(crate) const INODE_BYTES: usize = 256;
pub(crate) const ENTRY_OFFSET: usize = 16;
/// Most bytes that an encoded entry takes on the board.
pub(crate) const ENTRY_BYTES_MAX: usize = INODE_BYTES - ENTRY_OFFSET;
pub(crate) const USED: u32 = 1;
pub(crate) const COMPLETE: u32 = 2;
pub(crate) const LEASED: u32 = 4;
pub(crate) const KIND_EMPTY: u8 = 0;
pub(crate) const KIND_ABSENT: u8 = 255;
/// Position of the number of guests in the word that starts with a name's length.
pub(crate) const GUESTS_SHIFT: u32 = 16;

/// Bytes of an encoded entry with one component, rounded up. Nearly all entries have no more.
const COMMON_BYTES: usize = (ATTR_BYTES + 1 + COMPONENT_BYTES).next_multiple_of(8);
const CACHE_LINE_BYTES: usize = 64;

const _: () = assert!(COMMON_BYTES <= ENTRY_BYTES_MAX);
const _: () = assert!(NAME_OFFSET + BOARD_NAME_MAX == NAME_BYTES);
const _: () =
    assert!(ATTR_BYTES + 1 + forebay_types::limits::COMPONENTS_MAX * COMPONENT_BYTES <= ENTRY_BYTES_MAX);

/// How often a reader retries an entry that is being written, before it sends the daemon a request instead.
const RETRIES: u32 = 64;

/// An inode as its name entry shows it. The entry has what a path walk checks (mode, owner, group), so that a walk
/// reads one entry for each component, and not the attributes of a directory in which other programs are creating.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameRef {
    /// Inode.
    pub ino: Ino,
    /// Kind.
    pub kind: Kind,
    /// For a directory: mode, uid, gid. Zeros for other kinds.
    pub permissions: (u32, u32, u32),
}

/// The result of a look-up of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// The name leads to this inode.
    Hit(NameRef),
    /// There is no such name.
    Absent,
    /// Not on the board: a request is needed.
    Unknown,
}

/// The result of searching one bucket.
enum Scan {
    Found(Lookup),
    /// The name is not in the bucket. So many names that belong to the bucket are in others of the group.
    Missing {
        guests: u32,
    },
}

/// The positions of the tables; the same for readers and the writer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    pub(crate) name_buckets: u64,
    pub(crate) inode_buckets: u64,
}

impl Tables {
    /// Tables that fill at most `bytes`, leases not counted: a third for names and their index.
    pub(crate) fn fitting(bytes: u64) -> Tables {
        let bytes = bytes.saturating_sub(LEASES_OFFSET as u64);
        let groups = bytes / 3 / (GROUP_BYTES + INDEX_BYTES_A_GROUP) as u64;
        let name_buckets = GROUP as u64 * groups.clamp(1, u64::from(u32::MAX));
        let inode_buckets = (bytes * 2 / 3 / (WAYS * INODE_BYTES) as u64).max(1);
        Tables { name_buckets, inode_buckets }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.index_offset() + (4 << self.depth_max())
    }

    /// Number of groups of names.
    pub(crate) fn groups(&self) -> usize {
        self.name_buckets as usize / GROUP
    }

    /// Bits of hashes that the index has room for.
    pub(crate) fn depth_max(&self) -> u32 {
        self.groups().next_power_of_two().trailing_zeros() + INDEX_BITS_MORE
    }

    /// Byte offset of the index, behind the inodes.
    pub(crate) fn index_offset(&self) -> usize {
        HEADER_BYTES
            + self.name_buckets as usize * BUCKET_BYTES
            + self.inode_buckets as usize * WAYS * INODE_BYTES
    }

    /// Byte offset of the group that has the names with this hash.
    #[inline]
    pub(crate) fn group_of(&self, mapping: &Mapping, hash: u64) -> usize {
        let depth = mapping.word64(DEPTH_OFFSET).load(Ordering::Acquire).min(u64::from(self.depth_max()));
        let place = (hash & ((1 << depth) - 1)) as usize;
        let group = mapping.word32(self.index_offset() + 4 * place).load(Ordering::Acquire);
        HEADER_BYTES + (group as usize).min(self.groups() - 1) * GROUP_BYTES
    }

    /// Byte offset of the bucket for names with this hash in the group at a byte offset.
    #[inline]
    pub(crate) fn bucket_in(group: usize, hash: u64) -> usize {
        const _: () = assert!(GROUP == 4);
        group + (hash >> 62) as usize * BUCKET_BYTES
    }

    /// Calls `look` with the byte offsets of the slots for names, and returns its first result. Pages that were never
    /// written are left out, because reading a missing page of a memfd would allocate it.
    pub(crate) fn find_name<T>(
        &self,
        mapping: &Mapping,
        mut look: impl FnMut(usize) -> Option<T>,
    ) -> Option<T> {
        let end = HEADER_BYTES + self.name_buckets as usize * BUCKET_BYTES;
        let mut resident = [0; 512];
        for start in (HEADER_BYTES..end).step_by(PAGE_BYTES * resident.len()) {
            mapping.resident(start, &mut resident);
            for (i, _) in resident.iter().enumerate().filter(|(_, state)| **state & 1 == 1) {
                let page = start + i * PAGE_BYTES;
                let found = (page..end.min(page + PAGE_BYTES)).step_by(NAME_BYTES).find_map(&mut look);
                if found.is_some() {
                    return found;
                }
            }
        }
        None
    }

    /// The buckets of a bucket's group, the bucket itself first.
    #[inline]
    pub(crate) fn group(bucket: usize) -> impl Iterator<Item = usize> + Clone {
        const _: () = assert!(HEADER_BYTES.is_multiple_of(GROUP_BYTES) && GROUP.is_power_of_two());
        (0..GROUP).map(move |i| bucket ^ (i * BUCKET_BYTES))
    }

    /// The hash of a name: its last bits select the group, its first bits the bucket.
    #[inline]
    pub(crate) fn hash(parent: Ino, name: &[u8]) -> u64 {
        mix(forebay_types::name_hash(name) ^ mix(parent.0))
    }

    /// Byte offsets of the entries that may hold an inode, the likeliest first. Inodes that were created one after the
    /// other lie side by side, because they are often used in that order: a page of memory holds 16 of them.
    #[inline]
    pub(crate) fn inode_ways(&self, ino: Ino) -> impl Iterator<Item = usize> + Clone {
        let (place, node) = (ino.counter() / WAYS as u64, u64::from(ino.birth_node().0));
        let bucket = (place + (mix(node) >> 16)) % self.inode_buckets;
        let at =
            HEADER_BYTES + self.name_buckets as usize * BUCKET_BYTES + bucket as usize * WAYS * INODE_BYTES;
        let first = ino.counter() as usize;
        (0..WAYS).map(move |way| at + (first + way) % WAYS * INODE_BYTES)
    }
}

/// A cheap bijection that spreads neighbouring numbers (the finaliser of MurmurHash3's 64-bit variant).
#[inline]
fn mix(mut v: u64) -> u64 {
    v ^= v >> 33;
    v = v.wrapping_mul(0xff51_afd7_ed55_8ccd);
    v ^= v >> 33;
    v = v.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    v ^ v >> 33
}

/// Offset of a node's lease.
pub(crate) fn lease_offset(node: NodeId) -> usize {
    LEASES_OFFSET + 8 * (node.0 as usize % NODE_NUMBERS)
}

/// A process's read-only view of the board.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
    tables: Tables,
}

impl Board {
    /// Opens a board that was handed over; [`Code::Malformed`] when its header does not match its length.
    pub fn open(mapping: Mapping) -> Result<Board, Code> {
        let tables = Tables {
            name_buckets: mapping.word64(0).load(Ordering::Relaxed),
            inode_buckets: mapping.word64(8).load(Ordering::Relaxed),
        };
        let bounded = tables.name_buckets < 1 << 40 && tables.inode_buckets < 1 << 40;
        let some = tables.name_buckets != 0
            && tables.name_buckets.is_multiple_of(GROUP as u64)
            && tables.inode_buckets != 0;
        if !bounded || !some || tables.bytes() > mapping.len() {
            return Err(Code::Malformed);
        }
        Ok(Board { mapping, tables })
    }

    /// The mapping, in which a new daemon's board can replace this one.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Looks up `name` in `parent`. The caller checks the epoch before and after.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Lookup {
        if name.len() > BOARD_NAME_MAX {
            return Lookup::Unknown;
        }
        let hash = Tables::hash(parent, name);
        let mut group = self.tables.group_of(&self.mapping, hash);
        for _ in 0..RETRIES {
            if let Some(found) = self.scan_group(Tables::bucket_in(group, hash), parent, name) {
                return found;
            }
            fence(Ordering::Acquire);
            let now = self.tables.group_of(&self.mapping, hash);
            if now == group {
                return if self.is_complete(parent) { Lookup::Absent } else { Lookup::Unknown };
            }
            // The group was split meanwhile.
            group = now;
        }
        Lookup::Unknown
    }

    /// Searches a bucket, and if it has guests, the other buckets of its group.
    #[inline]
    fn scan_group(&self, bucket: usize, parent: Ino, name: &[u8]) -> Option<Lookup> {
        for (i, bucket) in Tables::group(bucket).enumerate() {
            match self.scan(bucket, parent, name) {
                Scan::Found(found) => return Some(found),
                Scan::Missing { guests: 0 } if i == 0 => break,
                Scan::Missing { .. } => {}
            }
        }
        None
    }

    /// Searches one bucket.
    #[inline]
    fn scan(&self, bucket: usize, parent: Ino, name: &[u8]) -> Scan {
        let mut guests = 0;
        for way in 0..WAYS {
            let at = bucket + way * NAME_BYTES;
            let mut tries = 0;
            loop {
                tries += 1;
                if tries > RETRIES {
                    return Scan::Found(Lookup::Unknown);
                }
                let before = self.mapping.word32(at).load(Ordering::Acquire);
                if before & 1 == 1 {
                    std::hint::spin_loop();
                    continue;
                }
                let head = self.mapping.word32(at + 4).load(Ordering::Relaxed);
                let (len, kind) = (head as u8 as usize, (head >> 8) as u8);
                let same = kind != KIND_EMPTY
                    && len == name.len()
                    && self.mapping.word64(at + 8).load(Ordering::Relaxed) == parent.0
                    && self.same_bytes(at + NAME_OFFSET, name);
                let ino = Ino(self.mapping.word64(at + 16).load(Ordering::Relaxed));
                let mode = self.mapping.word32(at + 24).load(Ordering::Relaxed);
                let uid = self.mapping.word32(at + 28).load(Ordering::Relaxed);
                let gid = self.mapping.word32(at + 32).load(Ordering::Relaxed);
                fence(Ordering::Acquire);
                if self.mapping.word32(at).load(Ordering::Relaxed) != before {
                    continue;
                }
                if way == 0 {
                    guests = head >> GUESTS_SHIFT;
                }
                if !same {
                    break;
                }
                return Scan::Found(match Kind::from_u8(kind) {
                    _ if kind == KIND_ABSENT => Lookup::Absent,
                    Ok(Kind::Directory) if !self.may_be_believed([parent, ino]) => Lookup::Unknown,
                    Ok(kind) => Lookup::Hit(NameRef { ino, kind, permissions: (mode, uid, gid) }),
                    Err(_) => Lookup::Unknown,
                });
            }
        }
        Scan::Missing { guests }
    }

    /// True unless one of these inodes belongs to another node whose lease has run out. Of other nodes the board has
    /// only what path walks need: names of directories, and permissions of directories (*leased* inodes, the rest of
    /// whose attributes is not valid). A name is valid while the leases last from the nodes of its directory and of
    /// its inode.
    #[inline]
    fn may_be_believed<const N: usize>(&self, inodes: [Ino; N]) -> bool {
        let here = self.mapping.word64(NODE_OFFSET).load(Ordering::Relaxed);
        here == 0
            || inodes.iter().all(|ino| {
                let node = ino.birth_node();
                u64::from(node.0) == here
                    || self.mapping.word64(lease_offset(node)).load(Ordering::Relaxed) > lease_clock()
            })
    }

    /// Finds a name that leads to an inode. Returns its directory and the number of its bytes, which are in `name`.
    /// Searches the whole table, except pages that were never written. The caller checks the epoch before and after.
    pub fn name_of(&self, ino: Ino, name: &mut [u8; BOARD_NAME_MAX]) -> Option<(Ino, usize)> {
        self.tables.find_name(&self.mapping, |at| {
            let hit = self.mapping.word64(at + 16).load(Ordering::Relaxed) == ino.0;
            hit.then(|| self.name_at(at, ino, name)).flatten()
        })
    }

    /// The name of the entry at a byte offset, if the entry belongs to this inode.
    fn name_at(&self, at: usize, ino: Ino, name: &mut [u8; BOARD_NAME_MAX]) -> Option<(Ino, usize)> {
        let (head, parent, found) = self.settled(at, || {
            self.mapping.load(at + NAME_OFFSET, name);
            let head = self.mapping.word32(at + 4).load(Ordering::Relaxed);
            let parent = self.mapping.word64(at + 8).load(Ordering::Relaxed);
            (head, Ino(parent), self.mapping.word64(at + 16).load(Ordering::Relaxed))
        })?;
        let (len, kind) = (head as u8 as usize, (head >> 8) as u8);
        let named = found == ino.0 && !matches!(kind, KIND_EMPTY | KIND_ABSENT) && len <= BOARD_NAME_MAX;
        named.then_some((parent, len))
    }

    /// What `read` returns for the entry at a byte offset while the writer does not write it. None when that takes too
    /// long.
    #[inline]
    fn settled<T>(&self, at: usize, mut read: impl FnMut() -> T) -> Option<T> {
        for _ in 0..RETRIES {
            let before = self.mapping.word32(at).load(Ordering::Acquire);
            if before & 1 == 1 {
                std::hint::spin_loop();
                continue;
            }
            let found = read();
            fence(Ordering::Acquire);
            if self.mapping.word32(at).load(Ordering::Relaxed) == before {
                return Some(found);
            }
        }
        None
    }

    /// True when a directory is *complete*: all its names that are not too long for the board are on it, from the time
    /// when the directory is empty until one of its names is evicted. A name that is not found in a complete directory
    /// does not exist, so look-ups of absent names need no request either. A reader searches for the name first and
    /// checks the mark second; an eviction clears the mark first.
    fn is_complete(&self, ino: Ino) -> bool {
        self.tables.inode_ways(ino).any(|at| {
            let before = self.mapping.word32(at).load(Ordering::Acquire);
            let state = self.mapping.word32(at + 4).load(Ordering::Relaxed);
            let same = self.mapping.word64(at + 8).load(Ordering::Relaxed) == ino.0;
            fence(Ordering::Acquire);
            let whole = before & 1 == 0 && self.mapping.word32(at).load(Ordering::Relaxed) == before;
            whole && same && state == USED | COMPLETE
        })
    }

    #[inline]
    fn same_bytes(&self, at: usize, name: &[u8]) -> bool {
        let mut offset = at;
        let mut chunks = name.chunks_exact(8);
        for chunk in &mut chunks {
            let word = u64::from_le_bytes([
                chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
            ]);
            if self.mapping.word64(offset).load(Ordering::Relaxed) != word {
                return false;
            }
            offset += 8;
        }
        let rest = chunks.remainder();
        if rest.is_empty() {
            return true;
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let mask = u64::MAX >> (64 - 8 * rest.len());
        self.mapping.word64(offset).load(Ordering::Relaxed) & mask == u64::from_le_bytes(last)
    }

    /// Begins to load an inode's entry into the cache, for a read after some other work.
    #[inline]
    pub fn prefetch(&self, ino: Ino) {
        let Some(at) = self.tables.inode_ways(ino).next() else { return };
        for line in (0..ENTRY_OFFSET + COMMON_BYTES).step_by(CACHE_LINE_BYTES) {
            self.mapping.prefetch(at + line);
        }
    }

    /// What `read` returns for an inode's entry at a byte offset, if the board has the inode. An entry that was
    /// overwritten meanwhile is read again.
    #[inline]
    fn entry<T>(&self, ino: Ino, read: impl Fn(usize, u32) -> T) -> Option<T> {
        self.tables.inode_ways(ino).find_map(|at| {
            self.settled(at, || {
                let state = self.mapping.word32(at + 4).load(Ordering::Relaxed);
                (state & USED != 0 && self.mapping.word64(at + 8).load(Ordering::Relaxed) == ino.0)
                    .then(|| read(at + ENTRY_OFFSET, state))
            })?
        })
    }

    /// Attributes and layout of an inode, if the board has them. The caller checks the epoch before and after.
    #[inline]
    pub fn inode(&self, ino: Ino) -> Option<Entry> {
        // Decoded in place, because copying entries would take most of the time.
        self.entry(ino, |at, state| {
            if state & LEASED != 0 {
                return None;
            }
            let mut bytes = [0; ENTRY_BYTES_MAX];
            self.mapping.load(at, &mut bytes[..COMMON_BYTES]);
            // The layout's count of components.
            if bytes[ATTR_BYTES] > 1 {
                self.mapping.load(at + COMMON_BYTES, &mut bytes[COMMON_BYTES..]);
            }
            Entry::decode(&mut Reader::new(&bytes)).ok()
        })?
    }

    /// Mode, owner and group of an inode, if the board has them. The caller checks the epoch before and after.
    #[inline]
    pub fn permissions(&self, ino: Ino) -> Option<(u32, u32, u32)> {
        self.entry(ino, |at, state| {
            let word = |at| u32::from_le(self.mapping.word32(at).load(Ordering::Relaxed));
            let at = at + PERMISSIONS_OFFSET;
            let believed = state & LEASED == 0 || self.may_be_believed([ino]);
            believed.then(|| (word(at), word(at + 4), word(at + 8)))
        })?
    }

    /// Epoch and flags of a file's data, if the board has them. The caller checks the board's epoch before and after.
    #[inline]
    pub fn data_state(&self, ino: Ino) -> Option<(u64, u32)> {
        self.entry(ino, |at, state| {
            let epoch = u64::from_le(self.mapping.word64(at + EPOCH_OFFSET).load(Ordering::Relaxed));
            let flags = u32::from_le(self.mapping.word32(at + FLAGS_OFFSET).load(Ordering::Relaxed));
            (state & LEASED == 0).then_some((epoch, flags))
        })?
    }
}
