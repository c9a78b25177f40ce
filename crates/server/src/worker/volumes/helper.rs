//! The thread that reserves and frees the memory of pieces, one step after the other.

use std::sync::mpsc::{self, Sender};
use std::sync::Arc;

use forebay_ring::Mapping;
use forebay_types::{Code, Error, PieceId, Result};

use super::piece::{free, reserve, Memory};

/// What the helper thread has done.
#[derive(Debug)]
pub(in crate::worker) enum Done {
    /// Reserved a piece up to here, or not.
    Reserved(PieceId, std::result::Result<u64, Code>),
    /// Freed the memory of a piece that was dropped: target and bytes.
    Freed(u16, u64),
}

/// A step.
#[derive(Debug)]
pub(super) enum Work {
    /// Reserve a range of a piece.
    Reserve { id: PieceId, memory: Memory, from: u64, until: u64 },
    /// Unmap a piece that no process opens any more.
    Unmap(Arc<Mapping>),
    /// Free a piece that was dropped, of a target.
    Free { target: u16, bytes: u64, memory: Memory },
}

/// Starts the thread; it ends when the sender is dropped, or when `tell` returns false.
pub(super) fn start(tell: impl Fn(Done) -> bool + Send + 'static) -> Result<Sender<Work>> {
    let (sender, works) = mpsc::channel::<Work>();
    std::thread::Builder::new()
        .name("volumes".into())
        .spawn(move || {
            while let Ok(work) = works.recv() {
                let done = match work {
                    Work::Reserve { id, memory, from, until } => {
                        Done::Reserved(id, reserve(&memory, from, until).map(|()| until))
                    }
                    Work::Unmap(mapping) => {
                        drop(mapping);
                        continue;
                    }
                    Work::Free { target, bytes, memory } => {
                        free(&memory);
                        Done::Freed(target, bytes)
                    }
                };
                if !tell(done) {
                    return;
                }
            }
        })
        .map_err(|e| Error::io("cannot start a thread", &e))?;
    Ok(sender)
}
