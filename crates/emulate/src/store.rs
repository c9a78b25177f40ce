//! The bytes of a device, in memory, with a checksum of each block where that is requested.
//!
//! The memory is a memfd that is allocated whole. Reads are copies from a mapping. With write protection the mapping is
//! read-only and writes go through the descriptor, so that a stray store of this process ends it instead of changing
//! data.
//!
//! A checksum is verified at each read of its block, and made anew by each write of it. All requests are multiples of
//! [`BLOCK_BYTES`], which is the device's sector size. A block is locked while it is copied and summed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::Control;

/// Bytes of a block: what a checksum covers, and the sector size of the device.
pub(crate) const BLOCK_BYTES: usize = 4096;
/// Number of locks; blocks share them.
const LOCKS: usize = 1024;

/// What is wrong with a request or with the bytes that it wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Not a range of whole blocks of the device.
    Range,
    /// A block does not have its checksum.
    Checksum { block: usize },
    /// A block does not read back as it was written.
    Written { block: usize },
    /// The memory cannot be written.
    Memory(i32),
}

/// How a device guards its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Guards {
    pub(crate) write_protect: bool,
    pub(crate) checksum: bool,
    pub(crate) verify_writes: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) memory: OwnedFd,
    base: *mut u8,
    bytes: usize,
    guards: Guards,
    sums: Vec<AtomicU64>,
    locks: Vec<Mutex<()>>,
}

// SAFETY: threads copy from and to the mapping through raw pointers only; what they may see half-written, a device may
// show too.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

fn sum(block: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(block)
}

impl Store {
    /// Allocates a device of zeros. `bytes` is a multiple of [`BLOCK_BYTES`].
    pub(crate) fn new(bytes: usize, guards: Guards) -> io::Result<Store> {
        let failed = || Err(io::Error::last_os_error());
        // SAFETY: plain system calls; the descriptor is new and ours; a fresh mapping at an address of the kernel's
        // choice.
        let (memory, base) = unsafe {
            let fd =
                libc::memfd_create(c"forebay-medium".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if fd < 0 {
                return failed();
            }
            let memory = OwnedFd::from_raw_fd(fd);
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if libc::fallocate(fd, 0, 0, bytes as libc::off_t) != 0
                || libc::fcntl(fd, libc::F_ADD_SEALS, seals) != 0
            {
                return failed();
            }
            let access = libc::PROT_READ | if guards.write_protect { 0 } else { libc::PROT_WRITE };
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            let base = libc::mmap(std::ptr::null_mut(), bytes, access, flags, fd, 0);
            if base == libc::MAP_FAILED {
                return failed();
            }
            // A core dump would have all of the medium.
            libc::madvise(base, bytes, libc::MADV_DONTDUMP);
            (memory, base)
        };
        let blocks = if guards.checksum { bytes / BLOCK_BYTES } else { 0 };
        let of_zeros = sum(&[0; BLOCK_BYTES]);
        Ok(Store {
            memory,
            base: base.cast(),
            bytes,
            guards,
            sums: (0..blocks).map(|_| AtomicU64::new(of_zeros)).collect(),
            locks: (0..LOCKS).map(|_| Mutex::new(())).collect(),
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first address of the mapping.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    fn lock(&self, block: usize) -> Option<MutexGuard<'_, ()>> {
        let needed = self.guards.checksum || self.guards.verify_writes;
        needed.then(|| self.locks[block % LOCKS].lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn check(&self, offset: u64, len: usize) -> Result<usize, Fault> {
        let at = usize::try_from(offset).map_err(|_| Fault::Range)?;
        let end = at.checked_add(len).ok_or(Fault::Range)?;
        match end <= self.bytes && at.is_multiple_of(BLOCK_BYTES) && len.is_multiple_of(BLOCK_BYTES) {
            true => Ok(at),
            false => Err(Fault::Range),
        }
    }

    /// Copies a block out of the mapping.
    fn copy_out(&self, at: usize, to: &mut [u8]) {
        // SAFETY: the callers have checked the range. The copy is of bytes that other threads may write.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at), to.as_mut_ptr(), to.len()) };
    }

    /// Reads whole blocks.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), Fault> {
        let start = self.check(offset, to.len())?;
        if !self.guards.checksum {
            self.copy_out(start, to);
            return Ok(());
        }
        for (i, part) in to.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let block = start / BLOCK_BYTES + i;
            let _locked = self.lock(block);
            self.copy_out(block * BLOCK_BYTES, part);
            if sum(part) != self.sums[block].load(Ordering::Relaxed) {
                return Err(Fault::Checksum { block });
            }
        }
        Ok(())
    }

    fn put(&self, at: usize, from: &[u8]) -> Result<(), Fault> {
        if !self.guards.write_protect {
            // SAFETY: the callers have checked the range, and the mapping is writable.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.base.add(at), from.len()) };
            return Ok(());
        }
        let mut done = 0;
        while done < from.len() {
            let (rest, place) = (&from[done..], (at + done) as libc::off_t);
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::pwrite(self.memory.as_raw_fd(), rest.as_ptr().cast(), rest.len(), place) };
            match n {
                n if n > 0 => done += n as usize,
                _ => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    errno => return Err(Fault::Memory(errno.unwrap_or(libc::EIO))),
                },
            }
        }
        Ok(())
    }

    /// Writes whole blocks.
    pub(crate) fn write(&self, offset: u64, from: &[u8], control: &Control) -> Result<(), Fault> {
        let start = self.check(offset, from.len())?;
        if !self.guards.checksum && !self.guards.verify_writes {
            return self.put(start, from);
        }
        for (i, part) in from.chunks_exact(BLOCK_BYTES).enumerate() {
            let block = start / BLOCK_BYTES + i;
            let _locked = self.lock(block);
            self.put(block * BLOCK_BYTES, part)?;
            if let Some(sums) = self.sums.get(block) {
                sums.store(sum(part), Ordering::Relaxed);
            }
            if self.guards.verify_writes {
                if control.takes_spoilt_write() {
                    self.put(block * BLOCK_BYTES, &[!part[0]])?;
                }
                let mut back = [0; BLOCK_BYTES];
                self.copy_out(block * BLOCK_BYTES, &mut back);
                if back != *part {
                    return Err(Fault::Written { block });
                }
            }
        }
        Ok(())
    }

    /// Sets whole blocks to zero.
    pub(crate) fn zero(&self, offset: u64, len: u64, control: &Control) -> Result<(), Fault> {
        let len = usize::try_from(len).map_err(|_| Fault::Range)?;
        let start = self.check(offset, len)?;
        let zeros = [0; BLOCK_BYTES];
        (0..len / BLOCK_BYTES).try_for_each(|i| self.write((start + i * BLOCK_BYTES) as u64, &zeros, control))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nothing refers to it any longer.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCKS: usize = 16;

    fn store(guards: Guards) -> (Store, Control) {
        (Store::new(BLOCKS * BLOCK_BYTES, guards).unwrap(), Control::create().unwrap().0)
    }

    fn all_guards() -> impl Strategy<Value = Guards> {
        any::<(bool, bool, bool)>().prop_map(|(write_protect, checksum, verify_writes)| Guards {
            write_protect,
            checksum,
            verify_writes,
        })
    }

    fn flip(store: &Store, byte: u64) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::from(store.memory.try_clone().unwrap());
        let mut one = [0];
        file.read_exact_at(&mut one, byte).unwrap();
        file.write_all_at(&[one[0] ^ 4], byte).unwrap();
    }

    proptest! {
        #[test]
        fn store_is_an_array_of_bytes(
            guards in all_guards(),
            steps in proptest::collection::vec((0..BLOCKS, 1..=4usize, any::<u8>(), 0..3u8), 1..40),
        ) {
            let (store, control) = store(guards);
            let mut model = vec![0u8; BLOCKS * BLOCK_BYTES];
            for (block, count, fill, what) in steps {
                let (at, len) = (block * BLOCK_BYTES, count * BLOCK_BYTES);
                let fits = at + len <= model.len();
                let done = match what {
                    0 => store.write(at as u64, &vec![fill; len], &control),
                    1 => store.zero(at as u64, len as u64, &control),
                    _ => {
                        let mut read = vec![1; len];
                        let done = store.read(at as u64, &mut read);
                        prop_assert!(!fits || read == model[at..at + len]);
                        done
                    }
                };
                prop_assert_eq!(done, if fits { Ok(()) } else { Err(Fault::Range) });
                if fits && what < 2 {
                    model[at..at + len].fill(if what == 0 { fill } else { 0 });
                }
            }
        }

        #[test]
        fn flipped_bit_is_found_by_the_read_of_its_block_alone(byte in 0..(BLOCKS * BLOCK_BYTES)) {
            let (store, control) = store(Guards { checksum: true, ..Guards::default() });
            flip(&store, byte as u64);
            let bad = byte / BLOCK_BYTES;
            for block in 0..BLOCKS {
                let expected = if block == bad { Err(Fault::Checksum { block }) } else { Ok(()) };
                prop_assert_eq!(store.read((block * BLOCK_BYTES) as u64, &mut [0; BLOCK_BYTES]), expected);
            }
            store.write((bad * BLOCK_BYTES) as u64, &[7; BLOCK_BYTES], &control).unwrap();
            prop_assert_eq!(store.read(0, &mut vec![0; BLOCKS * BLOCK_BYTES]), Ok(()), "a write heals it");
        }
    }

    #[test]
    fn requests_of_parts_of_blocks_are_refused() {
        let (store, control) = store(Guards::default());
        for (offset, len) in [(1, 4096), (0, 512), (u64::MAX, 4096), (BLOCKS as u64 * 4096, 4096)] {
            assert_eq!(store.read(offset, &mut vec![0; len]), Err(Fault::Range));
            assert_eq!(store.write(offset, &vec![0; len], &control), Err(Fault::Range));
            assert_eq!(store.zero(offset, len as u64, &control), Err(Fault::Range));
        }
    }

    #[test]
    fn write_that_does_not_read_back_is_found_only_where_writes_are_verified() {
        for verify_writes in [true, false] {
            let (store, control) = store(Guards { verify_writes, ..Guards::default() });
            control.spoil_a_write();
            let written = store.write(8192, &[9; 8192], &control);
            assert_eq!(written, if verify_writes { Err(Fault::Written { block: 2 }) } else { Ok(()) });
        }
    }
}
