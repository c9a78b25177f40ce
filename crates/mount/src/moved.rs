//! Directories that other nodes move.
//!
//! The kernel has one entry for a directory in its cache. When it learns, by a look-up, that the directory has another name by
//! now, it moves that entry, which a rename between two directories cannot do while it holds the lock for its own purpose:
//! it fails with ESTALE, and is tried once more. So who moves a directory that another node moved before would get ESTALE,
//! unless somebody looked in between. Here the place of every directory is kept that the kernel knows, and when a look-up
//! finds it elsewhere, the kernel is told to drop what it has, before it tries again. It is told by a thread of its own, as
//! the kernel may have to wait for the lock of a directory that the rename holds.
//!
//! In a pool of one node the daemon tells the kernel of every move before it is acknowledged, and nothing of this runs.

use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_types::Ino;

use crate::device::Device;
use crate::filesystem::FileSystem;
use crate::nodes::Place;

/// The thread that tells the kernel, once there is something to tell.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    teller: Mutex<Option<Sender<Vec<u8>>>>,
}

impl Moved {
    /// Has the kernel drop a name. Where there is no thread to be had it is not told: a rename may fail with ESTALE then.
    fn drop_name(&self, device: &Arc<Device>, message: Vec<u8>) {
        let mut teller = self.teller.lock().unwrap_or_else(PoisonError::into_inner);
        if teller.is_none() {
            let (sender, receiver) = channel::<Vec<u8>>();
            let device = Arc::clone(device);
            let thread = std::thread::Builder::new().name("moved".into()).stack_size(128 * 1024);
            // ENOENT: the kernel has dropped it by itself.
            let tells = move || receiver.iter().for_each(|message| drop(device.write(&message)));
            if thread.spawn(tells).is_ok() {
                *teller = Some(sender);
            }
        }
        if let Some(teller) = &*teller {
            let _ = teller.send(message);
        }
    }
}

impl FileSystem {
    /// The kernel is about to be told that a name leads to this inode.
    pub(crate) fn note_place(&self, parent: Ino, name: &[u8], st: &libc::stat) {
        if st.st_mode & libc::S_IFMT != libc::S_IFDIR || !self.pool.spans_nodes() {
            return;
        }
        let place = Place { parent: self.node(parent), name: name.into() };
        let Some(before) = self.nodes.place(st.st_ino, place) else { return };
        // What another directory has by now is not the old one's any more.
        if !self.nodes.is_place(&before) {
            self.moved
                .drop_name(&self.device, forebay_sys::fuse::invalidate_entry(before.parent, &before.name));
        }
    }
}
