//! The shared memory of a node's pacers: a header with the profile, and a pacer for each target.
//!
//! It is a memfd that is sealed against changes of its size, so that no process can make another one fault. Its profile
//! is read once, when the memory is opened, and checked.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::limits::NODE_TARGETS_MAX;

use crate::pacer::{Pacer, State};
use crate::profile::{Medium, Profile, Speed};

/// First word: the layout of the memory, and its version.
const MAGIC: u64 = u64::from_le_bytes(*b"FBYPACE1");

/// The memory.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// Both latencies, both bandwidths, seek, queue depth.
    medium: [AtomicU64; 6],
    /// The profile's name, filled with zeros.
    name: [AtomicU64; 4],
    pacers: [State; NODE_TARGETS_MAX],
}

/// Bytes of the memory.
pub const PACERS_BYTES: usize = size_of::<Layout>().next_multiple_of(4096);

/// The pacers of a node's targets. The memory is unmapped on drop.
#[derive(Debug)]
pub struct Pacers {
    layout: *const Layout,
    medium: Medium,
    name: [u8; 32],
}

// SAFETY: the memory is only accessed through atomics.
unsafe impl Send for Pacers {}
// SAFETY: as above.
unsafe impl Sync for Pacers {}

fn map(fd: BorrowedFd<'_>) -> io::Result<*const Layout> {
    // SAFETY: a fresh mapping at an address of the kernel's choice, as long as the layout.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PACERS_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(base.cast_const().cast())
}

/// True if the file is as long as the memory and can never get shorter.
fn is_whole(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: an all-zero stat is valid, and filled by the call; plain system calls on a live descriptor.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
        Ok(seals >= 0 && seals & libc::F_SEAL_SHRINK != 0 && stat.st_size as usize == PACERS_BYTES)
    }
}

impl Pacers {
    /// Makes the memory, for idle media of a valid profile. Returns it with its descriptor.
    pub fn create(profile: &Profile) -> io::Result<(Pacers, OwnedFd)> {
        let Medium { read, write, seek_ns, queue_depth } = profile.medium;
        if profile.medium.check().is_err() || !Profile::is_name(&profile.name) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // SAFETY: plain system calls; the descriptor is new and ours.
        let fd = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let fd = libc::memfd_create(c"forebay-pacing".as_ptr(), flags);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = OwnedFd::from_raw_fd(fd);
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if libc::ftruncate(fd.as_raw_fd(), PACERS_BYTES as libc::off_t) != 0
                || libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0
            {
                return Err(io::Error::last_os_error());
            }
            fd
        };
        let layout = map(std::os::fd::AsFd::as_fd(&fd))?;
        let mut name = [0; 32];
        name[..profile.name.len()].copy_from_slice(profile.name.as_bytes());
        let pacers = Pacers { layout, medium: profile.medium, name };
        let to = pacers.layout();
        let values = [
            read.latency_ns,
            write.latency_ns,
            read.bytes_per_s,
            write.bytes_per_s,
            seek_ns,
            u64::from(queue_depth),
        ];
        to.medium.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        for (word, bytes) in to.name.iter().zip(name.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        to.magic.store(MAGIC, Ordering::Release);
        Ok((pacers, fd))
    }

    /// Maps the memory that a descriptor leads to.
    ///
    /// # Errors
    /// InvalidData if it is something else, or of another version.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Pacers> {
        let strange = || io::Error::from_raw_os_error(libc::EBADMSG);
        if !is_whole(fd)? {
            return Err(strange());
        }
        let nothing = Speed { latency_ns: 0, bytes_per_s: 1 };
        let medium = Medium { read: nothing, write: nothing, seek_ns: 0, queue_depth: 1 };
        let mut pacers = Pacers { layout: map(fd)?, medium, name: [0; 32] };
        if pacers.layout().magic.load(Ordering::Acquire) != MAGIC {
            return Err(strange());
        }
        let words = pacers.layout().medium.each_ref().map(|word| word.load(Ordering::Relaxed));
        let [read_ns, write_ns, read_bytes, write_bytes, seek_ns, depth] = words;
        pacers.medium = Medium {
            read: Speed { latency_ns: read_ns, bytes_per_s: read_bytes },
            write: Speed { latency_ns: write_ns, bytes_per_s: write_bytes },
            seek_ns,
            queue_depth: u32::try_from(depth).unwrap_or(0),
        };
        let name = pacers.layout().name.each_ref().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        pacers.name.copy_from_slice(name.as_flattened());
        match pacers.medium.queue_depth {
            1..=crate::profile::QUEUE_DEPTH_MAX if pacers.medium.check().is_ok() => Ok(pacers),
            _ => Err(strange()),
        }
    }

    fn layout(&self) -> &Layout {
        // SAFETY: mapped until the drop, aligned to a page, and made of atomics, for which all values are valid.
        unsafe { &*self.layout }
    }

    /// The pacer of the node's target with an index, or of the only medium: 0. Targets with a
    /// greater index than the last pacer's use the last pacer.
    pub fn pacer(&self, index: usize) -> Pacer<'_> {
        Pacer { state: &self.layout().pacers[index.min(NODE_TARGETS_MAX - 1)], medium: self.medium }
    }

    /// The profile.
    pub fn profile(&self) -> Profile {
        let end = self.name.iter().position(|b| *b == 0).unwrap_or(self.name.len());
        Profile { name: String::from_utf8_lossy(&self.name[..end]).into_owned(), medium: self.medium }
    }
}

impl Drop for Pacers {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; every reference into it borrows `self`.
        unsafe { libc::munmap(self.layout.cast_mut().cast(), PACERS_BYTES) };
    }
}
