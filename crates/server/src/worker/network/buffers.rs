//! Buffers of this node's processes for data of other nodes (docs/decisions/0018).

use std::os::fd::OwnedFd;

use forebay_fabric::Region;
use forebay_ring::{memfd_sealed, Seal};
use forebay_types::limits::BUFFER_BYTES;
use forebay_types::{Error, Result};

use super::commands::{Command, Commands};

/// Creates a buffer of [`BUFFER_BYTES`] for a session's process, which replaces the one it has. The network thread
/// knows it under this number before a request can name it.
pub(in crate::worker) fn give_buffer(commands: &Commands, session: u64, number: u64) -> Result<OwnedFd> {
    let memory = memfd_sealed(c"forebay-buffer", BUFFER_BYTES, Seal::Size);
    let (fd, mapping) = memory.map_err(|e| Error::io("cannot give a process a buffer", &e))?;
    let (start, bytes) = (mapping.start(), mapping.len());
    // SAFETY: the mapping is as long, its memory is sealed against shrinking, and it lives as long as the region. No
    // code makes a reference into it.
    let memory = unsafe { Region::foreign(start, bytes, Box::new(mapping)) };
    commands.give(Command::Buffer { session, number, memory });
    Ok(fd)
}
