//! The sweeper: unlinks backing files that no client unlinks, because the client or a worker died, the client's slot
//! rests, or the removal came from another node. It is a thread of its own, because unlinking a large file takes long.
//! It passes backing files on other nodes to the network thread.

use std::sync::mpsc::{self, Sender};
use std::sync::Arc;

use forebay_data::NodeTargets;
use forebay_ring::Doorbell;
use forebay_types::{Error, Ino, Layout, NodeId, Result};

use super::device_nodes;
use super::message::Message;
use super::network::{Command, Commands};

/// Work for the sweeper.
#[derive(Debug)]
pub(super) enum Sweep {
    /// Backing files of inodes that are gone, or of reserved numbers that will not be used. Their orphan records are
    /// deleted afterwards.
    Orphans(Vec<(Ino, Layout)>),
    /// Former backing files of files that have other ones now. They are on this node: in a pool of several nodes no
    /// file changes its backing files.
    Replaced(Vec<(Ino, Layout)>),
    /// Nothing: the shard thread is notified when all before it is removed.
    Mark(u64),
}

/// True when some of a layout's backing files are on other nodes.
fn reaches_beyond(layout: &Layout, here: NodeId) -> bool {
    let mut targets = layout.components().iter().flat_map(|c| &c.targets[..usize::from(c.target_count)]);
    targets.any(|target| target >> 16 != u32::from(here.0))
}

/// Starts the sweeper; it ends when the sender is dropped.
pub(super) fn start(
    targets: Arc<NodeTargets>,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
    network: Option<(NodeId, Commands)>,
) -> Result<Sender<Sweep>> {
    let (sender, sweeps) = mpsc::channel::<Sweep>();
    let sweeper = Sweeper { targets, to_shard, doorbell, network };
    std::thread::Builder::new()
        .name("sweeper".into())
        .spawn(move || {
            while let Ok(sweep) = sweeps.recv() {
                if !sweeper.sweep(sweep) {
                    return;
                }
            }
        })
        .map_err(|e| Error::io("cannot start a thread", &e))?;
    Ok(sender)
}

/// State of the sweeper's thread.
#[derive(Debug)]
pub(super) struct Sweeper {
    pub(super) targets: Arc<NodeTargets>,
    pub(super) to_shard: Sender<Message>,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) network: Option<(NodeId, Commands)>,
}

impl Sweeper {
    /// Executes a job. False when the shard thread has ended.
    pub(super) fn sweep(&self, sweep: Sweep) -> bool {
        let some = match sweep {
            Sweep::Orphans(some) => some,
            Sweep::Replaced(some) => {
                for (ino, layout) in some {
                    if let Err(code) = self.targets.remove_all(ino, &layout) {
                        tracing::warn!("cannot unlink the former backing files of inode {ino}: {code}");
                    }
                }
                return true;
            }
            Sweep::Mark(mark) => return self.tell(Message::SweptUpTo(mark)),
        };
        let (mut swept, mut elsewhere) = (Vec::with_capacity(some.len()), Vec::new());
        for (ino, layout) in some {
            // A client may have created a file under a reserved number on any of them.
            let removed = self
                .targets
                .remove_all(ino, &layout)
                .and_then(|()| self.targets.iter().try_for_each(|target| device_nodes::remove(target, ino)));
            match removed {
                Ok(()) => match &self.network {
                    Some((here, _)) if reaches_beyond(&layout, *here) => elsewhere.push((ino, layout)),
                    _ => swept.push(ino),
                },
                // The orphan record stays: the next worker tries again.
                Err(code) => tracing::warn!("cannot unlink the backing files of inode {ino}: {code}"),
            }
        }
        if let (Some((_, commands)), false) = (&self.network, elsewhere.is_empty()) {
            commands.give(Command::Remove(elsewhere));
        }
        if swept.is_empty() {
            return true;
        }
        self.tell(Message::Swept(swept))
    }

    /// False when the shard thread has ended.
    fn tell(&self, message: Message) -> bool {
        let told = self.to_shard.send(message).is_ok();
        self.doorbell.ring();
        told
    }
}
