//! Directories that other nodes move.
//!
//! The kernel has one entry for a directory in its cache. When a look-up finds the directory under another name, the
//! kernel moves that entry. During a rename between two directories it cannot do so, because the rename holds the lock
//! that this needs. The rename fails with ESTALE, and the kernel tries it once more. So a program that moves a
//! directory which another node has moved before would get ESTALE, unless a look-up came in between. Therefore the
//! mount keeps the place of every directory that the kernel knows. When a look-up finds the directory elsewhere, a
//! thread invalidates the kernel's entry before the kernel tries again. The thread does nothing else, because its write
//! may wait in the kernel for the lock of a directory that the rename holds.
//!
//! In a pool of one node the daemon invalidates the kernel's entry at every move before it acknowledges the move, and
//! nothing of this module runs.

use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use crate::nodes::{Nodes, Place};
use forebay_fuse::Device;

/// The thread that writes invalidations, once there is one to write.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    writer: Mutex<Option<Sender<Vec<u8>>>>,
}

impl Moved {
    /// Sends an invalidation to the kernel. If no thread can be started it is not sent, and a rename may fail with
    /// ESTALE.
    fn drop_name(&self, device: &Arc<Device>, message: Vec<u8>) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.is_none() {
            let (sender, receiver) = channel::<Vec<u8>>();
            let device = Arc::clone(device);
            let thread = std::thread::Builder::new().name("moved".into()).stack_size(128 * 1024);
            // ENOENT: the kernel has dropped the entry by itself.
            let write_all = move || receiver.iter().for_each(|message| drop(device.write(&message)));
            if thread.spawn(write_all).is_ok() {
                *writer = Some(sender);
            }
        }
        if let Some(writer) = &*writer {
            let _ = writer.send(message);
        }
    }

    /// Records the place of a directory, whose inode is `ino`, before a reply gives it to the kernel.
    pub(crate) fn note_place(&self, nodes: &Nodes, device: &Arc<Device>, ino: u64, place: Place) {
        let Some(before) = nodes.place(ino, place) else { return };
        // If another directory has the old name by now, that name must stay cached.
        if !nodes.is_place(&before) {
            self.drop_name(device, forebay_sys::fuse::invalidate_entry(before.parent, &before.name));
        }
    }
}
