//! Memory of this node's processes for data of other nodes: buffers (docs/decisions/0018), and what programs have
//! allocated (docs/decisions/0053).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;

use forebay_fabric::Region;
use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::{BUFFER_BYTES, PROGRAM_MEMORY_BYTES_MAX};
use forebay_types::{Code, Error, Result};
use rustix::fs::{fcntl_get_seals, fstat, fstatfs, SealFlags};

use super::commands::{Command, Commands};

/// Creates a buffer of [`BUFFER_BYTES`] for a session's process, which replaces the one it has. The network thread
/// knows it under this number before a request can name it.
pub(in crate::worker) fn give_buffer(commands: &Commands, session: u64, number: u64) -> Result<OwnedFd> {
    let memory = memfd_sealed(c"forebay-buffer", BUFFER_BYTES, Seal::Size);
    let (fd, mapping) = memory.map_err(|e| Error::io("cannot give a process a buffer", &e))?;
    commands.give(Command::Buffer { session, number, memory: region(mapping) });
    Ok(fd)
}

/// Memory that is sealed against shrinking, for the network.
fn region(mapping: Mapping) -> Region {
    // A core dump of the program has it.
    mapping.leave_out_of_dumps();
    let (start, bytes) = (mapping.start(), mapping.len());
    // SAFETY: the mapping is as long, its memory is sealed against shrinking, and it lives as long as the region. No
    // code makes a reference into it.
    unsafe { Region::foreign(start, bytes, Box::new(mapping)) }
}

const REGISTERING: &str = "cannot register memory of a process";

/// Has memory of a session's process registered with the network under a number.
///
/// # Errors
/// [`Code::Invalid`] for memory that another process could take away, or that is no memory: the daemon would be killed
/// by a signal when it writes there; [`Code::NoResources`] if there is too much such memory.
pub(in crate::worker) fn accept_memory(
    commands: &Commands,
    session: u64,
    number: u64,
    fd: &OwnedFd,
) -> Result<()> {
    let bytes = check_memory(fd)?;
    let mapping = Mapping::new(fd.as_fd(), bytes, true).map_err(|e| Error::io(REGISTERING, &e))?;
    let (registered, outcome) = mpsc::channel();
    commands.give(Command::ProgramMemory { session, number, memory: region(mapping), registered });
    outcome.recv().unwrap_or(Err(Code::PoolGone)).map_err(|code| Error::new(code, REGISTERING))
}

/// Checks a descriptor of memory. Returns its bytes.
fn check_memory(fd: &OwnedFd) -> Result<usize> {
    let refused = |why: &str| Error::new(Code::Invalid, REGISTERING).why(why);
    let failed = |e: rustix::io::Errno| Error::io(REGISTERING, &e.into());
    // A file that has no seals is none that can be sealed.
    let seals = fcntl_get_seals(fd).map_err(|_| refused("it is no memfd"))?;
    let writes = SealFlags::WRITE | SealFlags::FUTURE_WRITE;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) || seals.intersects(writes) {
        return Err(refused("its size is not sealed, or its contents are"));
    }
    // Pages of other kinds may be refused at the first access.
    if fstatfs(fd).map_err(failed)?.f_type != libc::TMPFS_MAGIC {
        return Err(refused("it is not of ordinary pages"));
    }
    let bytes = usize::try_from(fstat(fd).map_err(failed)?.st_size).unwrap_or(usize::MAX);
    if bytes == 0 || bytes > PROGRAM_MEMORY_BYTES_MAX || !bytes.is_multiple_of(rustix::param::page_size()) {
        return Err(refused("its size is none that such memory has"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fcntl_add_seals, memfd_create, MemfdFlags};

    fn memory(bytes: u64, seals: SealFlags, flags: MemfdFlags) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | flags).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn memory_that_could_kill_the_daemon_is_refused() {
        let (size, ordinary) = (SealFlags::SHRINK | SealFlags::GROW, MemfdFlags::empty());
        assert_eq!(check_memory(&memory(8192, size | SealFlags::SEAL, ordinary)).unwrap(), 8192);
        let most = PROGRAM_MEMORY_BYTES_MAX as u64;
        for refused in [
            memory(8192, SealFlags::GROW, ordinary),
            memory(8192, SealFlags::empty(), ordinary),
            memory(8192, size | SealFlags::FUTURE_WRITE, ordinary),
            memory(8192, size | SealFlags::WRITE, ordinary),
            memory(0, size, ordinary),
            memory(8191, size, ordinary),
            memory(most + 4096, size, ordinary),
            std::fs::File::open("/dev/null").unwrap().into(),
            std::fs::File::open("/proc/self/exe").unwrap().into(),
        ] {
            assert_eq!(check_memory(&refused).unwrap_err().code, Code::Invalid);
        }
        assert!(check_memory(&memory(most, size, ordinary)).is_ok());
        // Where the kernel gives such memory.
        if let Ok(huge) = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB) {
            rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
            fcntl_add_seals(&huge, size).unwrap();
            assert_eq!(check_memory(&huge).unwrap_err().code, Code::Invalid);
        }
    }
}
