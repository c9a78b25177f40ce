//! Memory that the network may read and write by itself.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use forebay_types::Code;

/// What peers may do with registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// Peers may read it.
    pub read: bool,
    /// Peers may write it.
    pub write: bool,
}

impl Access {
    /// For local use alone.
    pub const LOCAL: Access = Access { read: false, write: false };
    /// Peers may read.
    pub const READ: Access = Access { read: true, write: false };
    /// Peers may write.
    pub const WRITE: Access = Access { read: false, write: true };
    /// Peers may do both.
    pub const BOTH: Access = Access { read: true, write: true };
}

/// A range of memory. Peers may change it at any time while it is registered, as another process may change a shared
/// mapping: it is reached by copies alone, and no reference into it is ever made.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What keeps foreign memory alive; None for memory of our own.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: all access is by copies through raw pointers, as to memory that is shared with other machines.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory of its own, aligned to pages.
    ///
    /// # Errors
    /// [`Code::Invalid`] for 0 bytes, [`Code::NoMemory`] when there is none.
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

    /// Memory of someone else, kept mapped by `owner`: a volume.
    ///
    /// # Safety
    /// `bytes` bytes at `start` can be read and written as long as `owner` lives, and no Rust reference to them exists.
    pub unsafe fn foreign(start: NonNull<u8>, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Region {
        Region { start, bytes, owner: Some(owner) }
    }

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never true for memory of its own.
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

    /// Where `bytes` bytes at `offset` are, for who sees to it that nobody else touches them meanwhile.
    ///
    /// # Errors
    /// [`Code::Fault`] beyond the end.
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, Code> {
        self.range(offset, bytes).and_then(|at| NonNull::new(at).ok_or(Code::Fault))
    }

    /// Gives back what memory is behind it, where it is shared: it reads as zeros then. What is written later takes
    /// memory anew.
    pub fn discard(&self) {
        // SAFETY: the range is mapped, and nobody has a reference into it. Private memory the kernel leaves as it is.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, rustix::mm::Advice::LinuxRemove)
        };
    }

    /// Gives the memory back and keeps its addresses, as long as the process lives: what a peer began to write an hour
    /// ago, before a cut of the network, finds nothing there, and nobody else's memory.
    pub fn quarantine(&mut self) {
        use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is this region's, of which there is no copy under way, as nobody else has it; it is empty
        // from here on.
        let quarantined =
            unsafe { mmap_anonymous(self.start.as_ptr().cast(), self.bytes, ProtFlags::empty(), flags) };
        if quarantined.is_ok() {
            self.bytes = 0;
            // It would unmap them.
            std::mem::forget(self.owner.replace(Box::new(())));
        }
    }

    /// Copies out what is at `offset`.
    ///
    /// # Errors
    /// [`Code::Fault`] beyond the end.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Code> {
        let from = self.range(offset, into.len())?;
        // SAFETY: the range is mapped; `into` is of ours alone, so they do not overlap. What is read may be mixed with
        // what a peer writes at the same time, as in any shared mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies in.
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
            // SAFETY: mapped by `new` with this length; who registers a region keeps it until the network is done with
            // it.
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
