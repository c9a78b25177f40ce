//! The messages between threads about watched directories.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_types::{Code, Cookie, Ino, Kind};

/// A name after a change, and the inode that it now has, if any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::worker) struct Named {
    pub(super) parent: Ino,
    pub(super) name: Vec<u8>,
    pub(super) entry: Option<(Ino, Kind)>,
}

/// A change to watched directories.
#[derive(Debug)]
pub(in crate::worker) enum Change {
    /// The names of one change, each with its inode now.
    Names(Vec<Named>),
    /// The two names of a rename: the source, then the destination.
    Rename(Named, Named),
    /// An inode's mode, owner or extended attributes were set.
    Attributes(Ino),
    /// The watches of a directory end: it was removed, was made wide, or changed faster than its mirror. Waiting
    /// requests fail with the code.
    Gone(Ino, Code),
}

/// A program's request to watch a directory.
#[derive(Debug)]
pub(in crate::worker) struct Ask {
    pub(super) directory: Ino,
    pub(super) inotify: OwnedFd,
    pub(super) mask: u32,
    pub(super) answer: Sender<std::result::Result<i32, Code>>,
}

/// Entries of a directory, and the cookie after which there are more.
pub(in crate::worker) type Chunk = (Vec<(Vec<u8>, Ino, Kind)>, Option<Cookie>);

/// The messages to the watch thread. A message of the shard thread describes the directory at the time when it was
/// sent.
#[derive(Debug)]
pub(in crate::worker) enum Word {
    Ask(Ask),
    Changes(Vec<Change>),
    Listed(Ino, std::result::Result<Chunk, Code>),
}

impl Word {
    /// The number of changes in it; 1 for other messages.
    pub(super) fn size(&self) -> usize {
        match self {
            Word::Changes(changes) => changes.len(),
            Word::Ask(_) | Word::Listed(..) => 1,
        }
    }
}

/// The sending end of the watch thread's channel.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Words {
    pub(in crate::worker) words: Sender<Word>,
    /// The total size of the messages that the thread has not processed.
    pub(in crate::worker) waiting: Arc<AtomicUsize>,
    /// An eventfd that the thread polls.
    pub(super) wake: Arc<OwnedFd>,
}

impl Words {
    /// Sends a message. The thread lives as long as the worker, so no message is lost.
    pub(in crate::worker) fn send(&self, word: Word) {
        // Counted before it is sent, so that every message that the thread receives is counted.
        self.waiting.fetch_add(word.size(), Ordering::Relaxed);
        let _ = self.words.send(word);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// Commands of the watch thread to the shard thread. [`Word::Listed`] is the answer.
#[derive(Debug)]
pub(in crate::worker) enum Command {
    /// Send changes of this directory from now on, and its first entries.
    Enrol(Ino, Words),
    /// Send the entries after a cookie.
    List(Ino, Cookie),
    /// Send no more changes of this directory.
    Leave(Ino),
}
