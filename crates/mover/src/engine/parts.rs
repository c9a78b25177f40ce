//! A file of several nodes is written into its store by all of them: each node's mover writes the stripes that it has,
//! under the leases that it holds ([`super::hold`]), into one upload. The mover of the first backing file begins the
//! upload, has the others write, and ends it.

use std::ops::Range;

use forebay_client::LeasedFiles;
use forebay_types::{Code, Error, Ino, Layout, NodeId, Result, StoreVersion};

use super::hold::Held;
use super::peers::{to_hex, Counted, Job, Peers, Work};
use super::shared::Shared;
use crate::host;
use crate::store::{Attributes, Source, Store, StoreError, StorePath};

/// From this length on. A shorter file is read through the pool by one mover, which takes fewer messages.
pub(super) const LEAST_BYTES: u64 = 4 << 20;

/// The bytes of a file that this node has: all others count as hole.
struct Part<'a> {
    files: &'a LeasedFiles,
    layout: Layout,
    bytes: u64,
    /// The error that ends the copy.
    stop: &'a (dyn Fn() -> Option<Code> + Sync),
}

impl Source for Part<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn next_data(&self, within: Range<u64>) -> std::result::Result<Option<Range<u64>>, Code> {
        let mut at = within.start;
        while at < within.end {
            let extent = self.layout.locate(at, within.end - at);
            let number = self.number_of(extent.component, extent.stripe)?;
            if let Some(file) = self.files.file(number) {
                use std::os::fd::AsFd;
                let there = extent.offset..extent.offset + extent.len;
                if let Some(data) = crate::store::next_data(file.as_fd(), there)? {
                    let start = at + (data.start - extent.offset);
                    return Ok(Some(start..start + (data.end - data.start)));
                }
            }
            at += extent.len;
        }
        Ok(None)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::result::Result<usize, Code> {
        if let Some(code) = (self.stop)() {
            return Err(code);
        }
        let room = (buffer.len() as u64).min(self.bytes.saturating_sub(offset));
        if room == 0 {
            return Ok(0);
        }
        let extent = self.layout.locate(offset, room);
        let number = self.number_of(extent.component, extent.stripe)?;
        let file = self.files.file(number).ok_or(Code::Io)?;
        let buffer = &mut buffer[..extent.len as usize];
        let read = rustix::io::pread(file, &mut *buffer, extent.offset);
        let read = read.map_err(|e| Code::from_errno(e.raw_os_error()))?;
        // Behind the end of a backing file the file has zeros.
        buffer[read..].fill(0);
        Ok(buffer.len())
    }
}

impl Part<'_> {
    fn number_of(&self, component: usize, stripe: u16) -> std::result::Result<usize, Code> {
        self.layout.stripes().position(|at| at == (component, stripe)).ok_or(Code::Io)
    }
}

/// What is uploaded.
pub(super) struct Whole<'a> {
    /// The directory with the store.
    pub(super) root: Ino,
    pub(super) temporary: &'a StorePath,
    pub(super) layout: Layout,
    pub(super) bytes: u64,
    pub(super) attributes: &'a Attributes,
}

/// Whether all nodes of a file write their parts of it.
pub(super) fn are_for(store: &dyn Store, held: &Held<'_>, bytes: u64) -> bool {
    bytes >= LEAST_BYTES && !held.there().is_empty() && store.abilities().parts
}

/// Uploads a file, of which each node writes its part.
pub(super) fn upload(
    peers: &Peers,
    store: &dyn Store,
    held: &Held<'_>,
    whole: &Whole<'_>,
) -> std::result::Result<StoreVersion, StoreError> {
    store.begin_parts(whole.temporary, whole.bytes)?;
    let stop = || (!held.is_undisturbed()).then_some(Code::Busy);
    let own = Part { files: held.here(), layout: whole.layout, bytes: whole.bytes, stop: &stop };
    let is_over = || stop().is_some();
    let one = |node: NodeId, hold: u64| {
        let work = Work::Part {
            root: whole.root.0,
            hold,
            temporary: to_hex(whole.temporary.as_bytes()),
            bytes: whole.bytes,
        };
        peers.run(node, work, &|_: Counted| {}, &is_over).map(drop)
    };
    let parts: Vec<_> = std::iter::once(None).chain(held.there().iter().map(Some)).collect();
    let nodes = parts.len();
    let done = host::for_each(parts, |part| match part {
        None => store.write_part(whole.temporary, &own),
        // What a node could not do may work when it is tried again.
        Some((node, hold)) => {
            one(*node, *hold).map_err(|error| StoreError { error, is_transient: true, is_of_pool: false })
        }
    });
    if done.len() < nodes {
        return Err(StoreError::transient(Code::Io, "cannot copy a part of a file: a thread has ended"));
    }
    done.into_iter().collect::<std::result::Result<(), _>>()?;
    store.end_parts(whole.temporary, whole.attributes)
}

/// Writes this node's part for the mover of another node.
pub(super) fn write(
    shared: &Shared,
    job: &Job,
    root: Ino,
    hold: u64,
    temporary: StorePath,
    bytes: u64,
) -> Result<()> {
    let at = shared.stores.of(root)?;
    let gone = || Error::new(Code::Busy, "cannot copy a part of a file").why("a program writes it");
    let held = shared.holds.get(hold).ok_or_else(gone)?;
    let go_on = || job.may_go_on() && !shared.stores.is_stopping();
    let stop = || match () {
        () if !held.leases.is_undisturbed() => Some(Code::Busy),
        () if !go_on() => Some(Code::Interrupted),
        () => None,
    };
    let part = Part { files: &held.leases, layout: held.entry.layout, bytes, stop: &stop };
    at.store.write_part(&temporary, &part).map_err(Error::from)?;
    tracing::debug!("wrote this node's part of file {}", held.entry.attr.ino);
    Ok(())
}
