//! Mapped files.

use crate::case::{case, equal, holds, Case};
use crate::door::{Door, Errno, Outcome, Verdict};
use libc::O_RDONLY;
use std::os::fd::{AsRawFd, OwnedFd};

pub(super) const CASES: &[Case] = &[
    case!(mapping_shared_and_calls_see_each_other [OwnData];
        "A shared mapping shows writes to the file at once, and reads return the mapping's stores at once."),
    case!(mapping_private_keeps_its_stores; "A private mapping's stores stay private."),
    case!(mapping_outlives_descriptor_and_name;
        "A mapping stays valid after its descriptor is closed and its file's name is removed."),
];

struct Mapping {
    at: *mut u8,
    length: usize,
}

impl Mapping {
    fn new(fd: &OwnedFd, length: usize, protection: i32, flags: i32) -> Outcome<Mapping> {
        // SAFETY: a new mapping at a place that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            Err(Errno::last())
        } else {
            Ok(Mapping { at: at.cast(), length })
        }
    }

    fn load(&self, offset: usize) -> u8 {
        assert!(offset < self.length);
        // SAFETY: within the mapping, and the cases keep the file as long as it.
        unsafe { self.at.add(offset).read_volatile() }
    }

    fn store(&self, offset: usize, byte: u8) {
        assert!(offset < self.length);
        // SAFETY: as for load; the cases store only to writable mappings.
        unsafe { self.at.add(offset).write_volatile(byte) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and is not used afterwards.
        unsafe { libc::munmap(self.at.cast(), self.length) };
    }
}

const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;

fn mapping_shared_and_calls_see_each_other(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.truncate_handle(&fd, 100_000)?;
    let map = Mapping::new(&fd, 100_000, BOTH, libc::MAP_SHARED)?;
    door.write_at(&fd, b"call", 50_000)?;
    equal((map.load(50_000), map.load(50_003)), (b'c', b'l'))?;
    map.store(99_999, b'm');
    map.store(0, b'z');
    let mut one = [0];
    door.read_at(&fd, &mut one, 99_999)?;
    equal(&one, b"m")?;
    let other = door.open("f", O_RDONLY, 0)?;
    let again = Mapping::new(&other, 100_000, libc::PROT_READ, libc::MAP_SHARED)?;
    equal((again.load(0), again.load(99_999)), (b'z', b'm'))?;
    // SAFETY: the range is the mapping.
    let synced = unsafe { libc::msync(map.at.cast(), map.length, libc::MS_SYNC) };
    equal(synced, 0)
}

fn mapping_private_keeps_its_stores(door: &dyn Door) -> Verdict {
    door.put("f", &[b'o'; 8192])?;
    let fd = door.open("f", O_RDONLY, 0)?;
    let map = Mapping::new(&fd, 8192, BOTH, libc::MAP_PRIVATE)?;
    map.store(5000, b'p');
    equal(map.load(5000), b'p')?;
    holds(door.get("f")?.iter().all(|b| *b == b'o'), "the file has no private store")
}

fn mapping_outlives_descriptor_and_name(door: &dyn Door) -> Verdict {
    door.put("f", &[b'k'; 4096])?;
    let fd = door.open("f", libc::O_RDWR, 0)?;
    let map = Mapping::new(&fd, 4096, BOTH, libc::MAP_SHARED)?;
    drop(fd);
    door.unlink("f")?;
    map.store(1, b'!');
    equal((map.load(0), map.load(1)), (b'k', b'!'))
}
