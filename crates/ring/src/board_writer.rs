//! The board as the shard thread writes it: after a change was applied and journaled, and before it is acknowledged.
//!
//! A publication makes the sequence of each entry odd before it writes the entry, and [`BoardWriter::finish`] makes
//! all of them even. A reader that finds an odd sequence in between sends the daemon a request, and so sees all of a
//! transaction or nothing.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{fence, Ordering};

use forebay_types::limits::BOARD_NAME_MAX;
use forebay_types::{Entry, Ino, Kind, NodeId, Reader, Writer, FLAG_ATTACHED, FLAG_UNLISTED};

use crate::board::{
    lease_offset, Tables, BUCKET_BYTES, COMPLETE, DEPTH_OFFSET, ENTRY_BYTES_MAX, ENTRY_OFFSET, GROUP,
    GROUP_BYTES, GUESTS_SHIFT, HEADER_BYTES, KIND_ABSENT, KIND_EMPTY, LEASED, NAME_BYTES, NAME_OFFSET,
    NODE_OFFSET, USED, WAYS,
};
use crate::shared::{memfd_sealed, Mapping, Seal};

/// Whether a publication may displace what is on the board.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// Programs use what is published: it takes the place of something else.
    Used,
    /// It was found, and perhaps no program will use it: it takes free places alone.
    Found,
}

/// Writes the board. The shard thread has the only one.
#[derive(Debug)]
pub struct BoardWriter {
    mapping: Mapping,
    tables: Tables,
    /// Entries whose sequence is odd now.
    touched: Vec<usize>,
    /// Where the name entries of directories are, to change the permissions in them. Checked before use.
    directories: HashMap<Ino, usize>,
    /// For each group in use, how many of the last bits of their hashes its names have in common.
    group_bits: Vec<u8>,
    /// Number of hash bits by which the index is read.
    depth: u32,
    victim: usize,
    evicted: u64,
}

impl BoardWriter {
    /// A new board of at most `bytes`, and the descriptor to pass to clients, which can only map it read-only.
    pub fn create(bytes: u64) -> io::Result<(OwnedFd, BoardWriter)> {
        let tables = Tables::fitting(bytes);
        let (fd, mapping) = memfd_sealed(c"forebay-board", tables.bytes(), Seal::SizeAndWrites)?;
        mapping.word64(0).store(tables.name_buckets, Ordering::Relaxed);
        mapping.word64(8).store(tables.inode_buckets, Ordering::Relaxed);
        let writer = BoardWriter {
            mapping,
            tables,
            touched: Vec::new(),
            directories: HashMap::new(),
            // The first group has all names: it is group 0 everywhere in the index, which is all zeros.
            group_bits: vec![0],
            depth: 0,
            victim: 0,
            evicted: 0,
        };
        Ok((fd, writer))
    }

    /// Bytes that clients map.
    pub fn bytes(&self) -> usize {
        self.tables.bytes()
    }

    /// Entries that were evicted since the start.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Sets the number of this node, in a pool with other nodes. To be called before a client reads.
    pub fn set_node(&mut self, node: NodeId) {
        self.mapping.word64(NODE_OFFSET).store(u64::from(node.0), Ordering::Relaxed);
    }

    /// Sets the end of this node's lease from `node`, by [`crate::lease_clock`]. Entries published under it are valid
    /// until then.
    pub fn lease(&mut self, node: NodeId, until: u64) {
        self.mapping.word64(lease_offset(node)).store(until, Ordering::Release);
    }

    /// Publishes the permissions of another node's directory.
    pub fn leased_directory(&mut self, entry: &Entry) {
        self.place_inode(entry, true, Need::Used);
    }

    /// Publishes a directory's name under another node's lease, or a name that leads to another node's directory.
    /// Nothing is published while the directory's permissions are not on the board. Returns true when the name is on
    /// the board now.
    pub fn leased_name(&mut self, parent: Ino, name: &[u8], ino: Ino) -> bool {
        let fits = !name.is_empty() && name.len() <= BOARD_NAME_MAX;
        fits && self.place_name(parent, name, Some((ino, Kind::Directory)), Need::Used)
    }

    /// Removes a name from the board: it is unknown from now on.
    pub fn forget_name(&mut self, parent: Ino, name: &[u8]) {
        if name.is_empty() || name.len() > BOARD_NAME_MAX {
            return;
        }
        let mut ways = Self::name_ways(self.name_bucket(Tables::hash(parent, name)));
        let found = ways.find(|&at| self.holds(at, parent, name));
        self.erase_name(found);
        // The directory must not be complete, or the name would count as absent.
        self.clear_complete(parent);
    }

    /// Removes all names of a directory that has become wide or was attached to a store: they are unknown, and so is
    /// which names it does not have. Searches all names, so it is for what is rare in a directory's life.
    pub fn forget_names_of(&mut self, parent: Ino) {
        let mut its = Vec::new();
        self.tables.find_name(&self.mapping, |at| {
            let is_its = self.mapping.word64(at + 8).load(Ordering::Relaxed) == parent.0;
            if is_its && self.kind_at(at) != KIND_EMPTY {
                its.push(at);
            }
            None::<()>
        });
        its.into_iter().for_each(|at| self.erase_name(Some(at)));
    }

    /// Removes the permissions of another node's directory from the board.
    pub fn forget_directory_of(&mut self, ino: Ino) {
        self.inode(ino, None);
        let Some(&at) = self.directories.get(&ino) else { return };
        let still = self.kind_at(at) == Kind::Directory as u8
            && self.mapping.word64(at + 16).load(Ordering::Relaxed) == ino.0;
        if still {
            // The directory of its name may belong to this node and be complete, which ends here.
            self.clear_complete(Ino(self.mapping.word64(at + 8).load(Ordering::Relaxed)));
            self.erase_name(Some(at));
        }
        self.directories.remove(&ino);
    }

    /// Publishes an inode, or that it is gone. Publish a transaction's inodes before its names.
    pub fn inode(&mut self, ino: Ino, entry: Option<&Entry>) {
        match entry {
            Some(entry) => self.place_inode(entry, false, Need::Used),
            None => {
                if let Some(at) = self.find_inode(ino) {
                    self.touch(at);
                    self.mapping.word32(at + 4).store(0, Ordering::Relaxed);
                }
            }
        }
    }

    /// Publishes an inode that was found in a store, if that displaces nothing.
    pub fn found_inode(&mut self, entry: &Entry) {
        self.place_inode(entry, false, Need::Found);
    }

    fn place_inode(&mut self, entry: &Entry, leased: bool, need: Need) {
        let ino = entry.attr.ino;
        let found = self.find_inode(ino);
        if entry.attr.is_directory() {
            self.directory_permissions(entry);
        }
        let free = |b: &Self, at: usize| b.mapping.word32(at + 4).load(Ordering::Relaxed) == 0;
        let ways = self.tables.inode_ways(ino);
        let Some(at) = found.or_else(|| self.place(ways, free, |_, _| false, need)) else { return };
        let mut bytes = [0; ENTRY_BYTES_MAX];
        let mut w = Writer::new(&mut bytes);
        if entry.encode(&mut w).is_err() {
            return;
        }
        let len = w.len();
        self.touch(at);
        let mut state = if leased { USED | LEASED } else { USED };
        if entry.attr.is_directory() && !leased {
            let was = if found.is_some() { self.mapping.word32(at + 4).load(Ordering::Relaxed) } else { 0 };
            // Names of an unlisted directory are in its backing store alone.
            let has_all = entry.attr.flags & FLAG_UNLISTED == 0 && entry.attr.width_log2 == 0;
            if has_all && (entry.attr.size == 0 || was & COMPLETE != 0) {
                state |= COMPLETE;
            }
        }
        self.mapping.word32(at + 4).store(state, Ordering::Relaxed);
        self.mapping.word64(at + 8).store(ino.0, Ordering::Relaxed);
        self.mapping.store(at + ENTRY_OFFSET, &bytes[..len]);
    }

    /// Publishes what `name` in `parent` leads to now, or that it is absent. In front of a store, an absence is shown only
    /// by a complete directory: when the directory is to be listed again, all its absences are over with that.
    pub fn name(&mut self, parent: Ino, name: &[u8], target: Option<(Ino, Kind)>) {
        if name.len() > BOARD_NAME_MAX || name.is_empty() {
            return;
        }
        if target.is_none() && !self.is_complete(parent) && self.is_attached(parent) {
            return self.forget_name(parent, name);
        }
        if !self.place_name(parent, name, target, Need::Used) && target.is_some() {
            self.clear_complete(parent);
        }
    }

    /// Publishes a name that was found in a store, if that displaces nothing. A name that the board does not have room for
    /// is unknown.
    pub fn found_name(&mut self, parent: Ino, name: &[u8], target: (Ino, Kind)) {
        let fits = !name.is_empty() && name.len() <= BOARD_NAME_MAX;
        if fits && !self.place_name(parent, name, Some(target), Need::Found) {
            self.clear_complete(parent);
        }
    }

    /// Puts a name on the board. False when this was not possible.
    fn place_name(&mut self, parent: Ino, name: &[u8], target: Option<(Ino, Kind)>, need: Need) -> bool {
        let hash = Tables::hash(parent, name);
        let bucket = self.name_bucket(hash);
        let near = if self.guests(bucket) == 0 { WAYS } else { GROUP * WAYS };
        let found = Self::name_ways(bucket).take(near).find(|&at| self.holds(at, parent, name));
        let permissions = match target {
            Some((ino, Kind::Directory)) => match self.permissions_of(ino) {
                Some(p) => p,
                None => {
                    // A path walk could not check the directory, so the name has to be unknown.
                    self.erase_name(found);
                    return false;
                }
            },
            None if self.is_complete(parent) => {
                self.erase_name(found);
                return true;
            }
            _ => (0, 0, 0),
        };
        let at = match found {
            Some(at) => at,
            None => match self.place_new_name(hash, need) {
                Some(at) => at,
                None => return false,
            },
        };
        self.forget_directory(at);
        self.touch(at);
        let (ino, kind) = target.map_or((Ino(0), KIND_ABSENT), |(ino, kind)| (ino, kind as u8));
        self.write_head(at, name.len(), kind);
        self.mapping.word64(at + 8).store(parent.0, Ordering::Relaxed);
        self.mapping.word64(at + 16).store(ino.0, Ordering::Relaxed);
        self.write_permissions(at, permissions);
        self.mapping.store(at + NAME_OFFSET, name);
        if kind == Kind::Directory as u8 {
            self.directories.insert(ino, at);
        }
        true
    }

    fn erase_name(&mut self, found: Option<usize>) {
        if let Some(at) = found {
            self.forget_directory(at);
            self.leave(at);
            self.touch(at);
            self.write_head(at, 0, KIND_EMPTY);
        }
    }

    /// Finds a place for a name that the board does not have. A full group is split if there is room for another
    /// group.
    fn place_new_name(&mut self, hash: u64, need: Need) -> Option<usize> {
        let free = |b: &Self, at: usize| b.kind_at(at) == KIND_EMPTY;
        loop {
            let bucket = self.name_bucket(hash);
            if Self::name_ways(bucket).any(|at| free(self, at)) || !self.split(hash) {
                let cheap = |b: &Self, at: usize| b.kind_at(at) == KIND_ABSENT;
                let at = self.place(Self::name_ways(bucket), free, cheap, need)?;
                self.make_room(bucket, at);
                return Some(at);
            }
        }
    }

    /// The bucket for names with this hash.
    fn name_bucket(&self, hash: u64) -> usize {
        Tables::bucket_in(self.tables.group_of(&self.mapping, hash), hash)
    }

    /// The entries that may hold a name of a bucket, the bucket's own first.
    fn name_ways(bucket: usize) -> impl Iterator<Item = usize> + Clone {
        Tables::group(bucket).flat_map(|bucket| (0..WAYS).map(move |way| bucket + way * NAME_BYTES))
    }

    /// Splits the group that has the names with this hash: the names whose next bit is set move to a new group. False
    /// when there is no room for one.
    ///
    /// All entries that it writes are odd until the publication is finished, and the index leads to the new group
    /// before any of them is even. So a reader that misses a name in the old group finds another index.
    fn split(&mut self, hash: u64) -> bool {
        let from = self.tables.group_of(&self.mapping, hash);
        let (group, new) = ((from - HEADER_BYTES) / GROUP_BYTES, self.group_bits.len());
        let bits = u32::from(self.group_bits[group]);
        if new == self.tables.groups() || bits == self.depth && !self.double_index() {
            return false;
        }
        let to = HEADER_BYTES + new * GROUP_BYTES;
        for offset in (0..GROUP_BYTES).step_by(NAME_BYTES) {
            if self.kind_at(from + offset) == KIND_EMPTY {
                continue;
            }
            let hash = self.hash_at(from + offset);
            if hash >> bits & 1 == 1 {
                self.move_name(from + offset, to + offset, hash);
            }
        }
        self.group_bits[group] += 1;
        self.group_bits.push(bits as u8 + 1);
        let first = hash as usize & ((1 << bits) - 1) | 1 << bits;
        for place in (first..1 << self.depth).step_by(2 << bits) {
            self.mapping.word32(self.tables.index_offset() + 4 * place).store(new as u32, Ordering::Release);
        }
        true
    }

    /// Makes the index use one bit more. False when it has no room for that.
    fn double_index(&mut self) -> bool {
        if self.depth == self.tables.depth_max() {
            return false;
        }
        let (at, half) = (self.tables.index_offset(), 4usize << self.depth);
        for place in (at..at + half).step_by(4) {
            let group = self.mapping.word32(place).load(Ordering::Relaxed);
            self.mapping.word32(place + half).store(group, Ordering::Relaxed);
        }
        self.depth += 1;
        self.mapping.word64(DEPTH_OFFSET).store(self.depth.into(), Ordering::Release);
        true
    }

    /// Moves a name with this hash to the same place of another group, where nothing is.
    fn move_name(&mut self, from: usize, to: usize, hash: u64) {
        self.touch(from);
        self.touch(to);
        let head = self.mapping.word32(from + 4).load(Ordering::Relaxed);
        let (len, kind) = (head as u8 as usize, (head >> 8) as u8);
        self.write_head(to, len, kind);
        let mut rest = [0; NAME_BYTES - 8];
        self.mapping.load(from + 8, &mut rest);
        self.mapping.store(to + 8, &rest);
        self.write_head(from, 0, KIND_EMPTY);
        for (at, guests) in [(from, -1), (to, 1)] {
            let home = Tables::bucket_in(Self::group_at(at), hash);
            if !Self::is_in(home, at) {
                self.add_guests(home, guests);
            }
        }
        if kind == Kind::Directory as u8 {
            let ino = Ino(self.mapping.word64(to + 16).load(Ordering::Relaxed));
            if let Some(at) = self.directories.get_mut(&ino).filter(|at| **at == from) {
                *at = to;
            }
        }
    }

    /// The group of an entry, by their byte offsets.
    fn group_at(at: usize) -> usize {
        at - (at - HEADER_BYTES) % GROUP_BYTES
    }

    /// The hash of the name in an entry.
    fn hash_at(&self, at: usize) -> u64 {
        let len = self.mapping.word32(at + 4).load(Ordering::Relaxed) as u8 as usize;
        let mut name = [0; BOARD_NAME_MAX];
        let name = &mut name[..len.min(BOARD_NAME_MAX)];
        self.mapping.load(at + NAME_OFFSET, name);
        Tables::hash(Ino(self.mapping.word64(at + 8).load(Ordering::Relaxed)), name)
    }

    /// Prepares the entry at `at`, whatever its content, for a name that belongs to `bucket`.
    fn make_room(&mut self, bucket: usize, at: usize) {
        let kind = self.kind_at(at);
        if !matches!(kind, KIND_EMPTY | KIND_ABSENT) {
            // The name in it is evicted. Its directory is not complete any more, and readers must see this before the
            // name is gone.
            self.clear_complete(Ino(self.mapping.word64(at + 8).load(Ordering::Relaxed)));
        }
        if kind != KIND_EMPTY {
            self.leave(at);
        }
        if !Self::is_in(bucket, at) {
            self.add_guests(bucket, 1);
        }
    }

    fn is_in(bucket: usize, at: usize) -> bool {
        (bucket..bucket + BUCKET_BYTES).contains(&at)
    }

    /// Prepares the removal of the name in an entry: if it is a guest there, its own bucket has one guest less.
    fn leave(&mut self, at: usize) {
        let bucket = Tables::bucket_in(Self::group_at(at), self.hash_at(at));
        if !Self::is_in(bucket, at) {
            self.add_guests(bucket, -1);
        }
    }

    /// The number of names that belong to a bucket and are in others of its group.
    fn guests(&self, bucket: usize) -> u32 {
        self.mapping.word32(bucket + 4).load(Ordering::Relaxed) >> GUESTS_SHIFT
    }

    fn add_guests(&mut self, bucket: usize, n: i32) {
        self.touch(bucket);
        let head = self.mapping.word32(bucket + 4);
        head.store(head.load(Ordering::Relaxed).wrapping_add_signed(n << GUESTS_SHIFT), Ordering::Relaxed);
    }

    /// Writes a name's length and kind. The number of guests in the same word stays.
    fn write_head(&self, at: usize, len: usize, kind: u8) {
        let head = self.mapping.word32(at + 4);
        let guests = head.load(Ordering::Relaxed) >> GUESTS_SHIFT << GUESTS_SHIFT;
        head.store(guests | u32::from(kind) << 8 | len as u32, Ordering::Relaxed);
    }

    fn find_inode(&self, ino: Ino) -> Option<usize> {
        self.tables.inode_ways(ino).find(|&at| {
            self.mapping.word32(at + 4).load(Ordering::Relaxed) & USED != 0
                && self.mapping.word64(at + 8).load(Ordering::Relaxed) == ino.0
        })
    }

    fn is_complete(&self, ino: Ino) -> bool {
        self.has_state(ino, COMPLETE)
    }

    /// True if the board has the inode of a directory in front of a store.
    fn is_attached(&self, ino: Ino) -> bool {
        self.entry_of(ino).is_some_and(|entry| entry.attr.flags & FLAG_ATTACHED != 0)
    }

    fn has_state(&self, ino: Ino, bit: u32) -> bool {
        self.find_inode(ino).is_some_and(|at| self.mapping.word32(at + 4).load(Ordering::Relaxed) & bit != 0)
    }

    fn clear_complete(&mut self, ino: Ino) {
        if let Some(at) = self.find_inode(ino) {
            if self.mapping.word32(at + 4).load(Ordering::Relaxed) & COMPLETE != 0 {
                self.touch(at);
                self.mapping.word32(at + 4).store(USED, Ordering::Relaxed);
            }
        }
    }

    /// Ends a publication: readers see all of it.
    pub fn finish(&mut self) {
        for at in self.touched.drain(..) {
            let seq = self.mapping.word32(at);
            seq.store(seq.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
    }

    /// True when an inode's attributes are on the board.
    pub fn has_inode(&self, ino: Ino) -> bool {
        self.entry_of(ino).is_some()
    }

    fn entry_of(&self, ino: Ino) -> Option<Entry> {
        let at = self.find_inode(ino)?;
        let mut bytes = [0; ENTRY_BYTES_MAX];
        self.mapping.load(at + ENTRY_OFFSET, &mut bytes);
        Entry::decode(&mut Reader::new(&bytes)).ok()
    }

    fn permissions_of(&self, ino: Ino) -> Option<(u32, u32, u32)> {
        self.entry_of(ino).map(|e| (e.attr.mode, e.attr.uid, e.attr.gid))
    }

    fn directory_permissions(&mut self, entry: &Entry) {
        let Some(&at) = self.directories.get(&entry.attr.ino) else { return };
        let still = self.kind_at(at) == Kind::Directory as u8
            && self.mapping.word64(at + 16).load(Ordering::Relaxed) == entry.attr.ino.0;
        if !still {
            self.directories.remove(&entry.attr.ino);
            return;
        }
        let now = (entry.attr.mode, entry.attr.uid, entry.attr.gid);
        let shown = (
            self.mapping.word32(at + 24).load(Ordering::Relaxed),
            self.mapping.word32(at + 28).load(Ordering::Relaxed),
            self.mapping.word32(at + 32).load(Ordering::Relaxed),
        );
        if now != shown {
            self.touch(at);
            self.write_permissions(at, now);
        }
    }

    fn write_permissions(&self, at: usize, (mode, uid, gid): (u32, u32, u32)) {
        self.mapping.word32(at + 24).store(mode, Ordering::Relaxed);
        self.mapping.word32(at + 28).store(uid, Ordering::Relaxed);
        self.mapping.word32(at + 32).store(gid, Ordering::Relaxed);
    }

    fn kind_at(&self, at: usize) -> u8 {
        (self.mapping.word32(at + 4).load(Ordering::Relaxed) >> 8) as u8
    }

    fn holds(&self, at: usize, parent: Ino, name: &[u8]) -> bool {
        let head = self.mapping.word32(at + 4).load(Ordering::Relaxed);
        if (head >> 8) as u8 == KIND_EMPTY
            || head as u8 as usize != name.len()
            || self.mapping.word64(at + 8).load(Ordering::Relaxed) != parent.0
        {
            return false;
        }
        let mut stored = [0; BOARD_NAME_MAX];
        self.mapping.load(at + NAME_OFFSET, &mut stored[..name.len()]);
        &stored[..name.len()] == name
    }

    /// Finds a place among `ways`: a free entry, else, if the need is such, one to evict, preferably one that is `cheap` to
    /// lose. Entries of this publication are never evicted.
    fn place(
        &mut self,
        ways: impl Iterator<Item = usize> + Clone,
        free: impl Fn(&Self, usize) -> bool,
        cheap: impl Fn(&Self, usize) -> bool,
        need: Need,
    ) -> Option<usize> {
        if let Some(at) = ways.clone().find(|&at| free(self, at)) {
            return Some(at);
        }
        if need == Need::Found {
            return None;
        }
        let rests = |at: &usize| self.mapping.word32(*at).load(Ordering::Relaxed) & 1 == 0;
        let mut resting = ways.filter(rests);
        let at = match resting.clone().find(|&at| cheap(self, at)) {
            Some(at) => at,
            None => {
                let n = resting.clone().count();
                resting.nth(self.victim.checked_rem(n)?)?
            }
        };
        self.victim = self.victim.wrapping_add(1);
        self.evicted += 1;
        Some(at)
    }

    fn forget_directory(&mut self, at: usize) {
        if self.kind_at(at) == Kind::Directory as u8 {
            let ino = Ino(self.mapping.word64(at + 16).load(Ordering::Relaxed));
            if self.directories.get(&ino) == Some(&at) {
                self.directories.remove(&ino);
            }
        }
    }

    /// Makes an entry's sequence odd, once in a publication.
    fn touch(&mut self, at: usize) {
        let seq = self.mapping.word32(at);
        let now = seq.load(Ordering::Relaxed);
        if now & 1 == 0 {
            seq.store(now.wrapping_add(1), Ordering::Relaxed);
            fence(Ordering::Release);
            self.touched.push(at);
        }
    }
}
