//! The thread that reserves and frees the memory of pieces, one step after the other.

use std::sync::mpsc::{self, Sender};
use std::sync::Arc;

use forebay_ring::Doorbell;
use forebay_types::{Error, PieceId, Result};

use super::piece::{free, reserve, Memory};
use super::Done;
use crate::worker::message::Message;

/// A step.
#[derive(Debug)]
pub(super) enum Work {
    /// Reserve a range of a piece.
    Reserve { id: PieceId, memory: Memory, from: u64, until: u64 },
    /// Free a piece that was dropped, of a target.
    Free { target: u16, bytes: u64, memory: Memory },
}

/// Starts the thread; it ends when the sender is dropped.
pub(super) fn start(to_shard: Sender<Message>, doorbell: Arc<Doorbell>) -> Result<Sender<Work>> {
    let (sender, works) = mpsc::channel::<Work>();
    std::thread::Builder::new()
        .name("volumes".into())
        .spawn(move || {
            while let Ok(work) = works.recv() {
                let done = match work {
                    Work::Reserve { id, memory, from, until } => {
                        Done::Reserved(id, reserve(&memory, from, until).map(|()| until))
                    }
                    Work::Free { target, bytes, memory } => {
                        free(&memory);
                        Done::Freed(target, bytes)
                    }
                };
                if to_shard.send(Message::Volumes(done)).is_err() {
                    return;
                }
                doorbell.ring();
            }
        })
        .map_err(|e| Error::io("cannot start a thread", &e))?;
    Ok(sender)
}
