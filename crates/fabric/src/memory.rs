//! Memory that the network may read and write on its own.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use forebay_types::Code;

/// Bytes that are copied at once to a file.
const COPIED_BYTES: usize = 16 * 1024;

/// The access that peers have to registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// Peers may read it.
    pub read: bool,
    /// Peers may write it.
    pub write: bool,
}

impl Access {
    /// For local use only.
    pub const LOCAL: Access = Access { read: false, write: false };
    /// Peers may read.
    pub const READ: Access = Access { read: true, write: false };
    /// Peers may write.
    pub const WRITE: Access = Access { read: false, write: true };
    /// Peers may do both.
    pub const BOTH: Access = Access { read: true, write: true };
}

/// A range of memory. While it is registered, peers may change it at any time, as another process may change a shared
/// mapping. So it is accessed only by copying, and no reference into it is ever made.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps memory alive that was mapped elsewhere. None for memory that [`Region::new`] mapped.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: all access is by copies through raw pointers, as to memory that is shared with other machines.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory, mapped for this region and aligned to pages.
    ///
    /// # Errors
    /// [`Code::Invalid`] for 0 bytes, [`Code::NoMemory`] if the memory cannot be mapped.
    pub fn new(bytes: usize) -> Result<Region, Code> {
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
        // SAFETY: a new private mapping overlaps nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let start = start.ok().and_then(|p| NonNull::new(p.cast())).ok_or(Code::NoMemory)?;
        Ok(Region { start, bytes, owner: None })
    }

    /// Memory that was mapped elsewhere and stays mapped while `owner` lives, such as the buffers of a pool's clients.
    ///
    /// # Safety
    /// `bytes` bytes at `start` can be read and written as long as `owner` lives, and no Rust reference to them exists.
    pub unsafe fn foreign(start: NonNull<u8>, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Region {
        Region { start, bytes, owner: Some(owner) }
    }

    /// A part of a region, which keeps it.
    ///
    /// # Errors
    /// [`Code::Fault`] for a part that is not in it.
    pub fn part(of: &Arc<Region>, offset: usize, bytes: usize) -> Result<Region, Code> {
        let start = of.at(offset, bytes)?;
        Ok(Region { start, bytes, owner: Some(Box::new(Arc::clone(of))) })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True after [`Region::quarantine`], and for foreign memory of 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The address of `bytes` bytes at `offset`.
    pub(crate) fn range(&self, offset: usize, bytes: usize) -> Result<*mut u8, Code> {
        match offset.checked_add(bytes) {
            // SAFETY: within the region.
            Some(end) if end <= self.bytes => Ok(unsafe { self.start.as_ptr().add(offset) }),
            _ => Err(Code::Fault),
        }
    }

    /// The address of `bytes` bytes at `offset`. The caller ensures that no other code accesses them meanwhile.
    ///
    /// # Errors
    /// [`Code::Fault`] beyond the end.
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, Code> {
        self.range(offset, bytes).and_then(|at| NonNull::new(at).ok_or(Code::Fault))
    }

    /// Returns the pages of shared memory to the kernel, but not those of the ranges in `kept`. They read as zeros
    /// afterwards, and later writes allocate pages again.
    pub fn discard(&self, kept: &[Range<usize>]) {
        for range in self.others(kept) {
            // SAFETY: the range is mapped, and no reference into it exists. The kernel leaves private memory as it is.
            let _ = unsafe {
                let start = self.start.as_ptr().add(range.start);
                rustix::mm::madvise(start.cast(), range.len(), rustix::mm::Advice::LinuxRemove)
            };
        }
    }

    /// Puts other memory in the place of shared pages, which the kernel frees when nothing else maps them. The ranges in
    /// `kept` have the same bytes afterwards, and all else reads as zeros; what a peer still writes there changes no memory
    /// of others. All of the region is replaced by one call, or nothing.
    ///
    /// The memory is a file of holes that only this region maps. Private memory would count in full against the kernel's
    /// limit of committed memory, also without pages, and memory without access would kill the process when the network's
    /// library copies what a peer sends late.
    ///
    /// # Errors
    /// [`Code::NoMemory`] if there is no memory, mapping or descriptor left: the region is as before, and the call can be
    /// repeated.
    pub fn detach(&self, kept: &[Range<usize>]) -> Result<(), Code> {
        use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
        use rustix::mm::{mmap, MapFlags, ProtFlags};
        let file = memfd_create("forebay-detached", MemfdFlags::CLOEXEC).map_err(|_| Code::NoMemory)?;
        ftruncate(&file, self.bytes as u64).map_err(|_| Code::NoMemory)?;
        for range in self.pages(kept) {
            self.copy_to(&file, range)?;
        }
        // SAFETY: the range belongs to this region alone, and no reference into it exists. It can be accessed at any
        // moment: an access waits in the kernel while one mapping takes the place of the other.
        let replaced = unsafe {
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            mmap(self.start.as_ptr().cast(), self.bytes, access, flags, &file, 0)
        };
        replaced.map(drop).map_err(|_| Code::NoMemory)
    }

    /// Copies a range to the same place of a file.
    fn copy_to(&self, file: &OwnedFd, range: Range<usize>) -> Result<(), Code> {
        let mut piece = [0; COPIED_BYTES];
        let mut at = range.start;
        while at < range.end {
            let piece = &mut piece[..(range.end - at).min(COPIED_BYTES)];
            self.read_at(at, piece)?;
            match rustix::io::pwrite(file, piece, at as u64) {
                Ok(0) => return Err(Code::NoMemory),
                Ok(written) => at += written,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Code::NoMemory),
            }
        }
        Ok(())
    }

    /// The pages of these ranges: sorted, and apart from one another.
    fn pages(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let page = rustix::param::page_size();
        let whole = |range: &Range<usize>| {
            range.start / page * page..range.end.next_multiple_of(page).min(self.bytes)
        };
        let mut all: Vec<Range<usize>> = ranges.iter().map(whole).filter(|range| !range.is_empty()).collect();
        all.sort_by_key(|range| range.start);
        let mut apart: Vec<Range<usize>> = Vec::with_capacity(all.len());
        for range in all {
            match apart.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => apart.push(range),
            }
        }
        apart
    }

    /// What is not in the pages of these ranges.
    fn others(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let pages = self.pages(ranges);
        let starts = std::iter::once(0).chain(pages.iter().map(|range| range.end));
        let ends = pages.iter().map(|range| range.start).chain(std::iter::once(self.bytes));
        starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty()).collect()
    }

    /// Returns the memory to the kernel but keeps its addresses reserved while the process lives. If a peer's write
    /// arrives an hour late, after a network outage, it finds no memory there, and no memory of another use.
    pub fn quarantine(&mut self) {
        use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range belongs to this region alone. `&mut self` excludes concurrent copies, and the region is
        // empty afterwards.
        let quarantined =
            unsafe { mmap_anonymous(self.start.as_ptr().cast(), self.bytes, ProtFlags::empty(), flags) };
        if quarantined.is_ok() {
            self.bytes = 0;
            // Dropping the owner would unmap the addresses.
            std::mem::forget(self.owner.replace(Box::new(())));
        }
    }

    /// Copies bytes at `offset` into `into`.
    ///
    /// # Errors
    /// [`Code::Fault`] beyond the end.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Code> {
        let from = self.range(offset, into.len())?;
        // SAFETY: the range is mapped. `into` is exclusively borrowed, so they do not overlap. The bytes read may mix
        // old bytes with those that a peer is writing, as in any shared mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// [`Code::Fault`] beyond the end.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), Code> {
        let into = self.range(offset, from.len())?;
        // SAFETY: as in `read_at`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.owner.is_none() {
            // SAFETY: `new` mapped it with this length. The user of a registered region keeps it until the network no
            // longer accesses it.
            let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a file, which the test never unmaps.
    fn shared(name: &std::ffi::CStr, bytes: usize) -> Region {
        use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
        use rustix::mm::{mmap, MapFlags, ProtFlags};
        let memory = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, bytes as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping overlaps nothing, and stays.
        unsafe {
            let start = mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &memory, 0).unwrap();
            Region::foreign(NonNull::new(start.cast()).unwrap(), bytes, Box::new(()))
        }
    }

    #[test]
    fn buried_memory_is_reached_no_more_and_its_addresses_are_nobody_s() {
        let mut region = Region::new(1 << 20).unwrap();
        let start = region.start();
        region.write_at(0, b"x").unwrap();
        region.quarantine();
        assert_eq!((region.len(), region.write_at(0, b"x")), (0, Err(Code::Fault)));
        drop(region);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.starts_with(&format!("{:x}-", start as usize)));
        assert!(line.is_some_and(|line| line.contains("---p")), "{line:?}");
    }

    #[test]
    fn detached_memory_changes_no_shared_pages() {
        use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
        let memory = memfd_create("detached", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 8192).unwrap();
        let map = || {
            use rustix::mm::{mmap, MapFlags, ProtFlags};
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping overlaps nothing.
            let start = unsafe { mmap(std::ptr::null_mut(), 8192, access, MapFlags::SHARED, &memory, 0) };
            // SAFETY: the test never unmaps it.
            unsafe { Region::foreign(NonNull::new(start.unwrap().cast()).unwrap(), 8192, Box::new(())) }
        };
        let (mine, theirs) = (map(), map());
        let mut bytes = [0; 3];
        mine.write_at(5000, b"old").unwrap();
        mine.detach(&[]).unwrap();
        mine.read_at(5000, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 3]);
        mine.write_at(5000, b"new").unwrap();
        theirs.read_at(5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"old");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert_eq!(maps.lines().filter(|line| line.contains("/memfd:detached")).count(), 1);
    }

    #[test]
    fn kept_ranges_of_detached_or_discarded_memory_have_their_bytes() {
        const PAGES: usize = 8;
        for detaches in [true, false] {
            let region = shared(c"kept", PAGES * 4096);
            region.write_at(0, &[7; PAGES * 4096]).unwrap();
            // Of no whole pages, one within another, and one behind another.
            let kept = [20_000..20_010, 4096..8192, 5000..6000, 8192..9000];
            match detaches {
                true => region.detach(&kept).unwrap(),
                false => region.discard(&kept),
            }
            let first = |page: usize| {
                let mut byte = [0];
                region.read_at(page * 4096 + 100, &mut byte).unwrap();
                byte[0]
            };
            let pages: Vec<u8> = (0..PAGES).map(first).collect();
            assert_eq!(pages, [0, 7, 7, 0, 7, 0, 0, 0], "{detaches}");
            if detaches {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                assert!(!maps.contains("/memfd:kept"));
            }
        }
    }

    #[test]
    fn memory_is_detached_as_a_whole_or_not_at_all_and_counts_as_no_private_memory() {
        let of_process = |name: &str| {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        const BYTES: usize = 4 << 30;
        let memory = Arc::new(shared(c"large", BYTES));
        memory.write_at(BYTES - 5000, b"kept").unwrap();
        let private_kib = of_process("VmData:");
        memory.detach(std::slice::from_ref(&(BYTES - 5000..BYTES - 4000))).unwrap();
        // Other tests of this process map little.
        assert!(of_process("VmData:") < private_kib + (BYTES as u64 >> 11));
        let mut bytes = [0; 4];
        memory.read_at(BYTES - 5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
        // It is of no whole pages, so the kernel refuses.
        let part = Region::part(&memory, BYTES - 5000, 5000).unwrap();
        assert_eq!(part.detach(std::slice::from_ref(&(0..4))), Err(Code::NoMemory));
        memory.read_at(BYTES - 5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
    }

    #[test]
    fn copies_beyond_the_end_are_refused() {
        let region = Region::new(100).unwrap();
        region.write_at(90, b"0123456789").unwrap();
        let mut back = [0; 10];
        region.read_at(90, &mut back).unwrap();
        assert_eq!(&back, b"0123456789");
        assert_eq!(region.write_at(91, b"0123456789"), Err(Code::Fault));
        assert_eq!(region.read_at(usize::MAX, &mut back), Err(Code::Fault));
        assert_eq!(Region::new(0).err(), Some(Code::Invalid));
    }
}
