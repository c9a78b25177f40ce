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
    let (start, bytes) = (mapping.start(), mapping.len());
    // SAFETY: the mapping is as long, its memory is sealed against shrinking, and it lives as long as the region. No
    // code makes a reference into it.
    unsafe { Region::foreign(start, bytes, Box::new(mapping)) }
}

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
    const WHAT: &str = "cannot register memory of a process";
    let refused = |why: &str| Error::new(Code::Invalid, WHAT).why(why);
    let failed = |e: rustix::io::Errno| Error::io(WHAT, &e.into());
    // A file that has no seals is none that can be sealed.
    let seals = fcntl_get_seals(fd).map_err(|_| refused("it is no memfd"))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) || seals.contains(SealFlags::FUTURE_WRITE) {
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
    let mapping = Mapping::new(fd.as_fd(), bytes, true).map_err(|e| Error::io(WHAT, &e))?;
    let (registered, outcome) = mpsc::channel();
    commands.give(Command::ProgramMemory { session, number, memory: region(mapping), registered });
    outcome.recv().unwrap_or(Err(Code::PoolGone)).map_err(|code| Error::new(code, WHAT))
}
