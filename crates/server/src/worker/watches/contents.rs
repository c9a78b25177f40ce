//! Contents that change: the kernel's events of this node's backing files, while somebody watches a directory for them.
//!
//! One inotify instance of the daemon's watches the directories of the backing files, 256 on each target. So there is no watch for each file,
//! and none that comes too late for a new one. While somebody watches for IN_MODIFY, each write to any file of the node costs its writer
//! what the kernel takes to note an event.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use forebay_data::{BackingName, NodeTargets};
use forebay_types::Ino;
use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;

/// The events that backing files raise for their names in watched directories.
pub(super) const RAISED: u32 = libc::IN_MODIFY | libc::IN_CLOSE_WRITE | libc::IN_ATTRIB;

/// What happened to backing files since the last look.
#[derive(Debug, Default)]
pub(super) struct Happened {
    /// Inodes and events, in order; what an inode's last event says again is left out.
    pub(super) events: Vec<(Ino, u32)>,
    /// True when the kernel dropped some: anything may have happened.
    pub(super) lost: bool,
}

/// The daemon's inotify instance.
#[derive(Debug)]
pub(super) struct Contents {
    targets: Arc<NodeTargets>,
    instance: OwnedFd,
    mask: u32,
    watches: Vec<i32>,
}

impl Contents {
    pub(super) fn new(targets: Arc<NodeTargets>) -> Result<Contents, Errno> {
        let instance = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        Ok(Contents { targets, instance, mask: 0, watches: Vec::new() })
    }

    pub(super) fn instance(&self) -> &OwnedFd {
        &self.instance
    }

    /// Watches for these of the events [`RAISED`], and for no others.
    pub(super) fn watch_for(&mut self, mask: u32) -> Result<(), Errno> {
        let mask = mask & RAISED;
        if mask == self.mask {
            return Ok(());
        }
        if mask == 0 {
            for watch in self.watches.drain(..) {
                let _ = inotify::remove_watch(&self.instance, watch);
            }
            self.mask = 0;
            return Ok(());
        }
        self.watches.clear();
        for target in self.targets.for_files() {
            for low in 0..=255u8 {
                let path = format!("/proc/self/fd/{}/data/{low:02x}", target.directory().as_raw_fd());
                let flags = WatchFlags::from_bits_retain(mask) | WatchFlags::ONLYDIR;
                self.watches.push(inotify::add_watch(&self.instance, path, flags)?);
            }
        }
        self.mask = mask;
        Ok(())
    }

    /// Takes what happened since the last look.
    pub(super) fn take(&mut self) -> Happened {
        let mut happened = Happened::default();
        let mut last: HashMap<Ino, u32> = HashMap::new();
        let mut room = [std::mem::MaybeUninit::uninit(); 64 * 1024];
        let mut reader = inotify::Reader::new(&self.instance, &mut room);
        while let Ok(event) = reader.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                happened.lost = true;
            }
            let parsed = event.file_name().and_then(|name| BackingName::parse(name.to_bytes()));
            let events = event.events().bits() & RAISED;
            if let (Some((ino, ..)), 1..) = (parsed, events) {
                if last.insert(ino, events) != Some(events) {
                    happened.events.push((ino, events));
                }
            }
        }
        happened
    }
}
