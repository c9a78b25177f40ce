//! What the threads say to one another of directories that are watched.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_types::{Code, Cookie, Ino, Kind};

/// A name after a change, and what it leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::worker) struct Named {
    pub(super) parent: Ino,
    pub(super) name: Vec<u8>,
    pub(super) entry: Option<(Ino, Kind)>,
}

/// A change to what is watched.
#[derive(Debug)]
pub(in crate::worker) enum Change {
    /// Names of one change, each with what it leads to now.
    Names(Vec<Named>),
    /// The two names of a rename: the source's, then the destination's.
    Rename(Named, Named),
    /// Mode, owner or extended attributes of an inode were set.
    Attributes(Ino),
    /// The watches of a directory end: it was removed, was spread over several nodes, or changed faster than its
    /// mirror. Requests that still wait get the code.
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

/// Entries of a directory, and the cookie behind which there are more.
pub(in crate::worker) type Chunk = (Vec<(Vec<u8>, Ino, Kind)>, Option<Cookie>);

/// What the watch thread receives. Of words from the shard thread, each holds from the moment at which it was sent.
#[derive(Debug)]
pub(in crate::worker) enum Word {
    Ask(Ask),
    Changes(Vec<Change>),
    Listed(Ino, std::result::Result<Chunk, Code>),
}

impl Word {
    /// Changes in it, or one.
    pub(super) fn size(&self) -> usize {
        match self {
            Word::Changes(changes) => changes.len(),
            Word::Ask(_) | Word::Listed(..) => 1,
        }
    }
}

/// The watch thread, as others reach it.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Words {
    pub(in crate::worker) words: Sender<Word>,
    /// The sizes of the words sent and not yet heard.
    pub(in crate::worker) waiting: Arc<AtomicUsize>,
    /// An eventfd that the thread polls.
    pub(super) wake: Arc<OwnedFd>,
}

impl Words {
    /// The thread lives as long as the worker, so that nothing sent is lost.
    pub(in crate::worker) fn send(&self, word: Word) {
        // Counted first: what the thread has received was counted before.
        self.waiting.fetch_add(word.size(), Ordering::Relaxed);
        let _ = self.words.send(word);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// What the watch thread asks of the shard thread. Answered by [`Word::Listed`].
#[derive(Debug)]
pub(in crate::worker) enum Command {
    /// Send changes of this directory from now on, and the first of its entries.
    Enrol(Ino, Words),
    /// The entries behind a cookie.
    List(Ino, Cookie),
    /// Send no more changes of this directory.
    Leave(Ino),
}
