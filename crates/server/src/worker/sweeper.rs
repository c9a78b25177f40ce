//! The sweeper: unlinks backing files that nobody else will (their clients died, or a worker did), outside the shard
//! thread, as unlinking a large file takes long.

use std::sync::mpsc::{self, Sender};
use std::sync::Arc;

use forebay_data::{Media, Target};
use forebay_ring::Doorbell;
use forebay_types::{Error, Ino, Layout, Result};

use super::shard_thread::Message;
use super::special;

/// What is to be swept.
#[derive(Debug)]
pub(super) enum Sweep {
    /// Backing files of inodes that are gone, or of numbers that none will have; their records go then.
    Orphans(Vec<(Ino, Layout)>),
    /// Backing files of files that are there and have others now.
    Replaced(Vec<(Ino, Layout)>),
}

/// Starts the sweeper; it ends when the sender is dropped.
pub(super) fn start(
    target: Arc<Target>,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
) -> Result<Sender<Sweep>> {
    let (sender, sweeps) = mpsc::channel::<Sweep>();
    std::thread::Builder::new()
        .name("sweeper".into())
        .spawn(move || {
            while let Ok(sweep) = sweeps.recv() {
                let some = match sweep {
                    Sweep::Orphans(some) => some,
                    Sweep::Replaced(some) => {
                        for (ino, layout) in some {
                            if let Err(code) = target.remove_all(ino, &layout) {
                                tracing::warn!(
                                    "cannot unlink the former backing files of inode {ino}: {code}"
                                );
                            }
                        }
                        continue;
                    }
                };
                let mut swept = Vec::with_capacity(some.len());
                for (ino, layout) in some {
                    let removed =
                        target.remove_all(ino, &layout).and_then(|()| special::remove(&target, ino));
                    match removed {
                        Ok(()) => swept.push(ino),
                        // The record stays: the next worker tries again.
                        Err(code) => tracing::warn!("cannot unlink the backing files of inode {ino}: {code}"),
                    }
                }
                if to_shard.send(Message::Swept(swept)).is_err() {
                    return;
                }
                doorbell.ring();
            }
        })
        .map_err(|e| Error::io("cannot start a thread", &e))?;
    Ok(sender)
}
