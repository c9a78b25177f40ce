//! The page budget: how many pages a transaction may still take, and fallocating them in advance.
//!
//! A store through the map to a page that the medium cannot provide raises SIGBUS, and if LMDB runs out of map during
//! an operation, the whole transaction is broken. Neither must ever happen. So before each operation its worst case is
//! compared with the pages that are certain: those behind the last used one that are allocated on the medium, and free
//! pages that LMDB may use again.
//!
//! LMDB does not report how many pages a transaction has taken, so an upper bound is computed. It takes a page for (a)
//! each leaf at the first write to it: at most one for each write, and a second one for each deletion, which may merge
//! with a sibling; (b) each branch page likewise, at most as many as there are; (c) each page by which the tree grew.
//! The next transaction cannot use pages that the last one freed, so these are bounded in the same way.
//!
//! When space runs out, operations that grow the shard are refused first, then those that change it, then those that
//! remove from it. Each removal frees pages for itself in the transactions after it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use forebay_types::limits::{SHARD_PAGES_AHEAD, SHARD_PAGES_FOR_REMOVALS, XATTR_TOTAL_MAX};
use forebay_types::{Code, Error, Result};
use rustix::fs::{fallocate, fstatvfs, FallocateFlags};

/// Pages at the end of the allocated range that are not counted: LMDB may need some consecutive pages for its list of
/// free pages.
const TAIL_PAGES: u64 = 64;
/// Pages that a commit may take for LMDB's list of free pages.
const COMMIT_PAGES: u64 = 64;
/// Pages that one more fallocate adds when an operation would not fit.
const EXTEND_PAGES: u64 = 512;
/// Pages that a transaction may take when it has only free pages: its record in LMDB's list of free pages then fits one
/// page.
const SCATTERED_PAGES_MAX: u64 = 400;

/// Records that one operation may write because its directory is attached: two names, the places and the copies of two
/// inodes.
pub(crate) const STORE_WRITES_MAX: u64 = 8;
/// The same of a removal: a name, the copy of an inode, and room for a further place.
pub(crate) const STORE_REMOVAL_WRITES_MAX: u64 = 4;

/// How an operation uses space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// It adds records; refused first.
    Growth,
    /// It changes records.
    Change,
    /// It removes records; refused last.
    Removal,
}

impl Class {
    /// Pages that must be left after an operation of this class.
    fn reserve(self) -> u64 {
        match self {
            Class::Growth => 2 * SHARD_PAGES_FOR_REMOVALS,
            Class::Change => SHARD_PAGES_FOR_REMOVALS,
            Class::Removal => 0,
        }
    }
}

/// The largest number of records that an operation may write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Work {
    /// Keys anywhere in the tree: each may take the pages on the path to its leaf, and as many for splits or siblings.
    pub(crate) writes: u64,
    /// Adjacent keys, like those of the pieces of an inode's values.
    pub(crate) run: u64,
}

impl Work {
    /// Keys anywhere in the tree.
    pub(crate) const fn writes(writes: u64) -> Work {
        Work { writes, run: 0 }
    }
}

/// Most pages that hold the values of one inode, with their siblings: XATTR_TOTAL_MAX bytes on pages that are a quarter
/// full.
const RUN_PAGES_MAX: u64 = 2 * (XATTR_TOTAL_MAX as u64 / 1000 + 2);
// The largest removal fits free pages alone, in a tree of up to seven levels.
const _: () = assert!(RUN_PAGES_MAX + (2 + 6) * (2 * 7 + 2) <= SCATTERED_PAGES_MAX);
// And with a backing store, in a tree of up to four levels.
const _: () =
    assert!(RUN_PAGES_MAX + (2 + 6 + STORE_REMOVAL_WRITES_MAX) * (2 * 4 + 2) <= SCATTERED_PAGES_MAX);
/// The largest removal: the last link of an inode with the most values that it can have.
const LARGEST_REMOVAL: Work = Work { writes: 6 + STORE_REMOVAL_WRITES_MAX, run: u64::MAX / 4 };

/// Sizes of the tree, as LMDB reports them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct TreePages {
    pub(crate) depth: u64,
    pub(crate) branches: u64,
    pub(crate) leaves: u64,
    pub(crate) overflow: u64,
}

impl TreePages {
    pub(crate) fn all(&self) -> u64 {
        self.branches + self.leaves + self.overflow
    }
}

/// The data file's pages.
#[derive(Debug)]
pub(crate) struct Space {
    file: File,
    page_bytes: u64,
    map_pages: u64,
    /// Pages from the start of the file that are allocated on the medium.
    backed_pages: u64,
    /// Upper bound of the pages that the last commit freed.
    freed_last: u64,
    /// A fallocate in advance failed at this number of used pages. It is not tried again at this number.
    refused_at: u64,
}

/// The pages that one transaction has taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// The file was used up to this page when it began.
    used: u64,
    room: u64,
    tail: u64,
    start: TreePages,
    peak: u64,
    leaf_touches: u64,
    branch_touches: u64,
    /// Writes that the commit will make.
    expected_writes: u64,
    /// Adjacent writes that the commit will make.
    expected_run: u64,
    depth: u64,
}

impl Usage {
    /// Upper bound of the pages taken so far, and by the commit.
    fn taken(&self) -> u64 {
        let path = 2 * self.depth + 2;
        let run =
            if self.expected_run == 0 { 0 } else { self.expected_run + self.expected_run / 32 + 2 * path };
        let owed = self.expected_writes * path + run;
        self.leaf_touches.min(self.start.leaves)
            + self.branch_touches.min(self.start.branches)
            + (self.peak - self.start.all())
            + owed
            + COMMIT_PAGES
    }

    /// Counts writes and deletions. `tree` is the tree after them.
    #[inline]
    pub(crate) fn count(&mut self, writes: u64, deletions: u64, tree: TreePages) {
        let touches = writes + 2 * deletions;
        self.leaf_touches += touches;
        self.branch_touches += touches * tree.depth.saturating_sub(1);
        self.peak = self.peak.max(tree.all());
        self.depth = self.depth.max(tree.depth);
    }

    /// The commit will make one more write.
    #[inline]
    pub(crate) fn expect_write(&mut self) {
        self.expected_writes += 1;
    }

    /// The commit will write one more orphan.
    #[inline]
    pub(crate) fn expect_orphan(&mut self) {
        self.expected_run += 1;
    }

    /// The worst case of an operation, in pages.
    #[inline]
    fn worst(&self, work: Work) -> u64 {
        let per_write = 2 * self.depth + 2;
        let run = if work.run == 0 { 0 } else { (2 * work.run).min(RUN_PAGES_MAX) + 2 * per_write };
        work.writes * per_write + run
    }
}

impl Space {
    /// The pages of `file`, of which `used` are in use. Allocates these, and up to [`SHARD_PAGES_AHEAD`] behind them,
    /// as many as the medium has.
    pub(crate) fn new(file: File, page_bytes: u64, map_pages: u64, used: u64) -> Result<Space> {
        let mut space = Space {
            file,
            page_bytes,
            map_pages,
            backed_pages: 0,
            freed_last: 2 * COMMIT_PAGES,
            refused_at: u64::MAX,
        };
        let no_space = |e: rustix::io::Errno| {
            Error::io("cannot allocate the shard's pages", &e.into())
                .cure("free space on the target, or choose a larger medium or a smaller capacity")
        };
        space.allocate(0, used).map_err(no_space)?;
        space.backed_pages = used;
        let (mut low, mut high) = (used, (used + SHARD_PAGES_AHEAD).min(map_pages));
        if space.allocate(used, high).is_ok() {
            low = high;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if space.allocate(low, middle).is_ok() {
                low = middle;
            } else {
                high = middle;
            }
        }
        space.backed_pages = low;
        Ok(space)
    }

    /// Fails unless there is enough space that a full shard can still be emptied.
    pub(crate) fn check_reserve(&self, used: u64) -> Result<()> {
        let needed = used + 2 * SHARD_PAGES_FOR_REMOVALS + TAIL_PAGES + COMMIT_PAGES;
        if self.backed_pages >= needed {
            return Ok(());
        }
        let mib = (needed * self.page_bytes).div_ceil(1 << 20);
        Err(Error::new(Code::NoSpace, format!("a shard needs at least {mib} MiB"))
            .why(format!("only {} MiB could be allocated", (self.backed_pages * self.page_bytes) >> 20))
            .cure("free space on the target, or choose a larger medium or capacity"))
    }

    fn allocate(&self, first: u64, end: u64) -> rustix::io::Result<()> {
        if end <= first {
            return Ok(());
        }
        loop {
            let done = fallocate(
                &self.file,
                FallocateFlags::empty(),
                first * self.page_bytes,
                (end - first) * self.page_bytes,
            );
            if done != Err(rustix::io::Errno::INTR) {
                return done;
            }
        }
    }

    /// Allocates pages up to `end` if the medium seems to have them. True if it did.
    fn extend(&mut self, end: u64) -> bool {
        let end = end.min(self.map_pages);
        if end <= self.backed_pages {
            return false;
        }
        let more = (end - self.backed_pages) * self.page_bytes;
        // A fallocate that fails halfway is slow, and would take the last pages from others meanwhile.
        let there = fstatvfs(&self.file).is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) > more);
        let done = there && self.allocate(self.backed_pages, end).is_ok();
        if done {
            self.backed_pages = end;
        }
        done
    }

    /// Pages that a transaction can take when the file is used up to page `used`: allocated ones behind it; and these
    /// plus the free ones before it.
    fn room(&self, used: u64, tree: TreePages) -> (u64, u64) {
        let end = self.backed_pages.min(self.map_pages - 1);
        let tail = end.saturating_sub(used + TAIL_PAGES);
        // LMDB's own list of free pages takes some too: 8 bytes a page and a header a transaction.
        let free = used.saturating_sub(2 + tree.all());
        let list = free / 32 + 16;
        (tail, tail + free.saturating_sub(list + self.freed_last))
    }

    /// Begins the count for a transaction on a tree of these pages, when the file is used up to page `used`.
    pub(crate) fn begin(&mut self, used: u64, tree: TreePages) -> Usage {
        if self.backed_pages < used + SHARD_PAGES_AHEAD / 2
            && self.backed_pages < self.map_pages
            && self.refused_at != used
            && !self.extend(used + SHARD_PAGES_AHEAD)
        {
            self.refused_at = used;
        }
        let (tail, room) = self.room(used, tree);
        Usage { used, room, tail, start: tree, peak: tree.all(), depth: tree.depth, ..Usage::default() }
    }

    /// Admits an operation, or fails with [`Code::NoSpace`].
    #[inline]
    pub(crate) fn admit(
        &mut self,
        usage: &mut Usage,
        class: Class,
        work: Work,
    ) -> std::result::Result<(), Code> {
        let taken = usage.taken() + usage.worst(work);
        if taken > usage.tail && taken > SCATTERED_PAGES_MAX {
            return self.admit_extended(usage, taken - usage.tail, taken + class.reserve());
        }
        let needed = taken + class.reserve();
        if needed <= usage.room {
            return Ok(());
        }
        self.admit_extended(usage, needed - usage.room, needed)
    }

    #[cold]
    fn admit_extended(
        &mut self,
        usage: &mut Usage,
        missing: u64,
        needed: u64,
    ) -> std::result::Result<(), Code> {
        let before = self.backed_pages;
        if !self.extend(before + missing.max(EXTEND_PAGES)) && !self.extend(before + missing) {
            return Err(Code::NoSpace);
        }
        let more = self.backed_pages.min(self.map_pages - 1) - before;
        usage.room += more;
        usage.tail += more;
        if needed <= usage.room {
            Ok(())
        } else {
            Err(Code::NoSpace)
        }
    }

    /// True when the transaction should be committed before it takes more: the next operation may not fit in it
    /// although it would fit in another.
    #[inline]
    pub(crate) fn is_spent(&self, usage: &Usage) -> bool {
        let next = usage.taken() + usage.worst(LARGEST_REMOVAL);
        next > usage.tail && (next > SCATTERED_PAGES_MAX || next > usage.room)
    }

    /// The transaction was committed; the file is now used up to page `used`.
    pub(crate) fn committed(&mut self, usage: &Usage, used: u64) {
        debug_assert!(used <= usage.used + usage.taken(), "{used} pages: more were taken than {usage:?}");
        debug_assert!(used <= self.backed_pages, "{used} pages: beyond {self:?}");
        self.freed_last = usage.taken();
    }

    /// Bytes of the data file on its medium.
    pub(crate) fn bytes_on_medium(&self) -> u64 {
        self.file.metadata().map_or(0, |m| m.blocks() * 512)
    }

    /// Pages from the start of the file that are allocated.
    pub(crate) fn backed_pages(&self) -> u64 {
        self.backed_pages
    }

    /// Pages of the map.
    pub(crate) fn map_pages(&self) -> u64 {
        self.map_pages
    }
}
