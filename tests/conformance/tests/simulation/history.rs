//! The requests and replies of all clients, in the order in which they happened.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_types::{Code, Ino, Kind};

/// An entry's name: one letter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(pub(crate) u8);

impl Name {
    pub(crate) fn bytes(&self) -> &[u8] {
        std::slice::from_ref(&self.0)
    }

    /// Its bit among letters.
    pub(crate) fn bit(self) -> u32 {
        1 << (self.0 - b'a')
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 as char)
    }
}

/// An inode number for readers: birth node and count.
pub(crate) fn short(ino: Ino) -> String {
    format!("{}.{}", ino.birth_node(), ino.0 & ((1 << 48) - 1))
}

/// One operation of a client, on inodes and names, as a kernel requests them from a file system.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Op {
    /// `spread`: over backing files of two nodes.
    Create {
        dir: Ino,
        name: Name,
        spread: bool,
    },
    Mkdir {
        dir: Ino,
        name: Name,
    },
    Symlink {
        dir: Ino,
        name: Name,
    },
    Link {
        ino: Ino,
        dir: Ino,
        name: Name,
    },
    Unlink {
        dir: Ino,
        name: Name,
    },
    Rmdir {
        dir: Ino,
        name: Name,
    },
    Rename {
        dir: Ino,
        name: Name,
        to_dir: Ino,
        to_name: Name,
        replaces: bool,
    },
    Lookup {
        dir: Ino,
        name: Name,
    },
    List {
        dir: Ino,
    },
    /// Lists the names of one part of a wide directory. `letters`: the part's letters, as bits. A listing is recorded
    /// as one `ListPart` for each part.
    ListPart {
        dir: Ino,
        letters: u32,
    },
    Widen {
        dir: Ino,
    },
    /// Directories created in it are wide from now on.
    WidenNew {
        dir: Ino,
    },
    Stat {
        ino: Ino,
    },
    Chmod {
        ino: Ino,
        mode: u32,
    },
    SetXattr {
        ino: Ino,
        value: u32,
    },
    GetXattr {
        ino: Ino,
    },
    /// Writes a word at the file's beginning, which travels in the request. `large`: writes a block behind it, filled
    /// with this word, which the network moves by RMA.
    Write {
        ino: Ino,
        value: u32,
        large: bool,
    },
    Read {
        ino: Ino,
        large: bool,
    },
    /// Appends a word. `large`: repeats the word, so that the data are too long for a request. `spread`: the file lies
    /// over two nodes.
    Append {
        ino: Ino,
        value: u32,
        large: bool,
        spread: bool,
    },
    /// Reads everything that was appended.
    ReadAppended {
        ino: Ino,
    },
    /// Changes the size of a spread file. Only the file's creator does this, because it is done on one node after the
    /// other.
    Truncate {
        ino: Ino,
        bytes: u32,
    },
    Allocate {
        ino: Ino,
        bytes: u32,
    },
    /// Takes an exclusive lock of the whole file, without waiting.
    Lock {
        ino: Ino,
        client: usize,
    },
    Unlock {
        ino: Ino,
        client: usize,
    },
    Size {
        ino: Ino,
    },
    /// The numbers of names and of directories in a directory with all its parts. Only used when nothing else happens.
    Count {
        dir: Ino,
    },
}

impl Op {
    /// True when the operation changes nothing. Without a reply such an operation has no meaning for the checker.
    pub(crate) fn only_reads(&self) -> bool {
        matches!(
            self,
            Op::Lookup { .. }
                | Op::List { .. }
                | Op::ListPart { .. }
                | Op::Stat { .. }
                | Op::GetXattr { .. }
                | Op::Read { .. }
                | Op::ReadAppended { .. }
                | Op::Size { .. }
                | Op::Count { .. }
        )
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Create { dir, name, spread } => {
                write!(f, "create {}/{name:?}{}", short(*dir), if *spread { " over two nodes" } else { "" })
            }
            Op::Mkdir { dir, name } => write!(f, "mkdir {}/{name:?}", short(*dir)),
            Op::Symlink { dir, name } => write!(f, "symlink {}/{name:?}", short(*dir)),
            Op::Link { ino, dir, name } => write!(f, "link {} as {}/{name:?}", short(*ino), short(*dir)),
            Op::Unlink { dir, name } => write!(f, "unlink {}/{name:?}", short(*dir)),
            Op::Rmdir { dir, name } => write!(f, "rmdir {}/{name:?}", short(*dir)),
            Op::Rename { dir, name, to_dir, to_name, replaces } => {
                let how = if *replaces { "" } else { " if it is free" };
                write!(f, "rename {}/{name:?} to {}/{to_name:?}{how}", short(*dir), short(*to_dir))
            }
            Op::Lookup { dir, name } => write!(f, "lookup {}/{name:?}", short(*dir)),
            Op::List { dir } => write!(f, "list {}", short(*dir)),
            Op::ListPart { dir, letters } => write!(f, "list letters {letters:05b} of {}", short(*dir)),
            Op::WidenNew { dir } => write!(f, "widen what is made in {}", short(*dir)),
            Op::Widen { dir } => write!(f, "widen {}", short(*dir)),
            Op::Stat { ino } => write!(f, "stat {}", short(*ino)),
            Op::Chmod { ino, mode } => write!(f, "chmod {} {mode:o}", short(*ino)),
            Op::SetXattr { ino, value } => write!(f, "setxattr {} {value}", short(*ino)),
            Op::GetXattr { ino } => write!(f, "getxattr {}", short(*ino)),
            Op::Write { ino, value, large } => {
                write!(f, "write {} {value}{}", short(*ino), if *large { " all over" } else { "" })
            }
            Op::Read { ino, large } => {
                write!(f, "read {}{}", short(*ino), if *large { "'s block" } else { "" })
            }
            Op::Append { ino, value, large, .. } => {
                write!(f, "append {value} to {}{}", short(*ino), if *large { " many times" } else { "" })
            }
            Op::ReadAppended { ino } => write!(f, "read all of {}", short(*ino)),
            Op::Truncate { ino, bytes } => write!(f, "truncate {} to {bytes}", short(*ino)),
            Op::Allocate { ino, bytes } => write!(f, "allocate {bytes} of {}", short(*ino)),
            Op::Lock { ino, .. } => write!(f, "lock {}", short(*ino)),
            Op::Unlock { ino, .. } => write!(f, "unlock {}", short(*ino)),
            Op::Size { ino } => write!(f, "size of {}", short(*ino)),
            Op::Count { dir } => write!(f, "count {}", short(*dir)),
        }
    }
}

/// The reply to an operation.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// This inode was created or found.
    Inode(Ino),
    Names(BTreeMap<Name, Ino>),
    Attr {
        kind: Kind,
        links: u32,
        mode: u32,
    },
    Value(Option<u32>),
    /// The values of whole appends, in order, and the values of which the file has anything else; 0 stands for a hole.
    Appended {
        whole: Vec<u32>,
        torn: BTreeSet<u32>,
    },
    Count {
        names: u64,
        directories: u32,
        wide: bool,
    },
    Failed(Code),
}

impl Outcome {
    /// True when it is unknown whether the operation happened. Programs see this as EIO.
    pub(crate) fn is_doubtful(&self) -> bool {
        matches!(self, Outcome::Failed(Code::Io | Code::PoolGone | Code::TimedOut))
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => write!(f, "done"),
            Outcome::Inode(ino) => write!(f, "{}", short(*ino)),
            Outcome::Names(names) => {
                f.debug_map().entries(names.iter().map(|(name, ino)| (name, short(*ino)))).finish()
            }
            Outcome::Attr { kind, links, mode } => write!(f, "{kind:?} {mode:o}, links: {links}"),
            Outcome::Value(value) => write!(f, "{value:?}"),
            Outcome::Appended { whole, torn } if torn.is_empty() => write!(f, "{whole:?}"),
            Outcome::Appended { whole, torn } => write!(f, "{whole:?}, and something of {torn:?}"),
            Outcome::Count { names, directories, wide } => {
                let how = if *wide { ", wide" } else { "" };
                write!(f, "{names} names, {directories} directories{how}")
            }
            Outcome::Failed(code) => write!(f, "{}", code.name()),
        }
    }
}

/// An operation of the history.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) client: usize,
    /// The client's node, or 0 if it has no target.
    pub(crate) node: u16,
    pub(crate) op: Op,
    /// None: the client was killed before the reply.
    pub(crate) outcome: Option<Outcome>,
}

/// The beginning or the end of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Asked(usize),
    Answered(usize),
    /// The operation happened before this event, or never will.
    Over(usize),
}

/// The operations and events of one simulation.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) entries: Vec<Entry>,
    pub(crate) events: Vec<Event>,
    /// The first operation after which no delivery between nodes is pending.
    pub(crate) settled: Option<usize>,
    /// Number of node starts.
    starts: u64,
    /// The lines of the trace, with the time.
    pub(crate) told: Vec<(Duration, String)>,
    prints: bool,
    hash: u64,
}

/// A history that scheduler and clients write. Clones share the history.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder {
    history: Arc<Mutex<History>>,
}

impl Recorder {
    pub(crate) fn new(prints: bool) -> Recorder {
        let history = History { prints, hash: 0xcbf2_9ce4_8422_2325, ..History::default() };
        Recorder { history: Arc::new(Mutex::new(history)) }
    }

    pub(crate) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line to the trace.
    pub(crate) fn tell(&self, text: String) {
        self.history().tell(text);
    }

    pub(crate) fn asked(&self, client: usize, node: u16, op: &Op) -> usize {
        let mut history = self.history();
        let index = history.entries.len();
        history.tell(format!("client {client}  #{index} {op:?} ..."));
        history.entries.push(Entry { client, node, op: op.clone(), outcome: None });
        history.events.push(Event::Asked(index));
        index
    }

    /// Records that a node starts.
    pub(crate) fn started(&self, node: u16) {
        let mut history = self.history();
        history.starts += 1;
        history.tell(format!("node {node} starts"));
    }

    /// The number of node starts until now.
    pub(crate) fn starts(&self) -> u64 {
        self.history().starts
    }

    /// Records that an operation with unknown outcome happens no later than now, if it ever does.
    pub(crate) fn is_over(&self, index: usize) {
        self.history().events.push(Event::Over(index));
    }

    /// The lock operations with unknown outcome of those clients for which `of` is true.
    pub(crate) fn unanswered_locks(&self, of: impl Fn(usize) -> bool) -> Vec<usize> {
        let history = self.history();
        let is_it = |entry: &Entry| {
            let locks = matches!(entry.op, Op::Lock { .. } | Op::Unlock { .. });
            locks && of(entry.client) && entry.outcome.as_ref().is_none_or(Outcome::is_doubtful)
        };
        (0..history.entries.len()).filter(|i| is_it(&history.entries[*i])).collect()
    }

    /// The files that a client has tried to lock.
    pub(crate) fn locked(&self, client: usize) -> BTreeSet<Ino> {
        let history = self.history();
        let locks = history.entries.iter().filter(|entry| entry.client == client);
        locks.filter_map(|entry| if let Op::Lock { ino, .. } = entry.op { Some(ino) } else { None }).collect()
    }

    /// Records that an operation may have been executed twice before its reply. Called before the reply is recorded.
    pub(crate) fn may_have_been_repeated(&self, index: usize) {
        let mut history = self.history();
        let asked = history.asked_at(index);
        let again = history.entries.len();
        history.tell(format!("#{again} is #{index}, if it was done twice"));
        let entry = Entry { outcome: None, ..history.entries[index].clone() };
        history.entries.push(entry);
        history.events.insert(asked + 1, Event::Asked(again));
        history.events.push(Event::Over(again));
    }

    /// Records that a directory became wide during its listing. `letters` has one entry for each part. Returns the
    /// operations that replace the listing, with their letters, for [`Recorder::answered`].
    pub(crate) fn is_of_parts(&self, index: usize, letters: &[u32]) -> Vec<(usize, u32)> {
        let mut history = self.history();
        let Op::List { dir } = history.entries[index].op else { panic!("no listing") };
        let asked = history.asked_at(index);
        let mut parts = Vec::new();
        for (i, letters) in letters.iter().copied().enumerate() {
            let op = Op::ListPart { dir, letters };
            if i == 0 {
                history.entries[index].op = op;
                parts.push((index, letters));
                continue;
            }
            let part = history.entries.len();
            history.tell(format!("#{part} is #{index} {op:?}"));
            let entry = Entry { op, ..history.entries[index].clone() };
            history.entries.push(entry);
            history.events.insert(asked + 1, Event::Asked(part));
            parts.push((part, letters));
        }
        parts
    }

    pub(crate) fn answered(&self, index: usize, outcome: Outcome) {
        let mut history = self.history();
        let Entry { client, op, .. } = history.entries[index].clone();
        history.tell(format!("client {client}  #{index} {op:?} -> {outcome:?}"));
        history.entries[index].outcome = Some(outcome);
        history.events.push(Event::Answered(index));
    }
}

impl History {
    fn asked_at(&self, index: usize) -> usize {
        self.events.iter().position(|event| *event == Event::Asked(index)).expect("it was asked")
    }

    /// The inodes that clients found when they read the whole tree at the end.
    pub(crate) fn found_in_the_end(&self) -> BTreeSet<Ino> {
        let last = self.entries.iter().skip(self.settled.unwrap_or(usize::MAX));
        let names = last.filter_map(|entry| match &entry.outcome {
            Some(Outcome::Names(names)) => Some(names.values()),
            _ => None,
        });
        names.flatten().copied().collect()
    }

    fn tell(&mut self, text: String) {
        let now = Duration::from_nanos(crate::baton::NOW_NS.load(std::sync::atomic::Ordering::Relaxed));
        // FNV-1a, like the trace of the network.
        for byte in now.as_nanos().to_le_bytes().iter().chain(text.as_bytes()) {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        if self.prints {
            println!("{:>12.6} s  {text}", now.as_secs_f64());
        }
        self.told.push((now, text));
    }

    /// A hash of the trace: equal histories have equal hashes.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}
