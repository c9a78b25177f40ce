//! What prepared parts hold until their transaction is finished: names, which cannot be looked up or changed meanwhile,
//! and directories, which cannot be moved or removed. Holds are in memory, and are read from the parts' records when
//! the shard is opened.
//!
//! A part that meets a hold of another transaction is refused with [`Code::Busy`], and its coordinator starts again.
//! Parts never wait for one another, so there is no deadlock. Other requests wait, and hold nothing themselves.

use std::collections::{BTreeMap, HashMap};

use forebay_types::{Code, Ino, NodeId, Part, Reader, TxId};

use crate::keys::{self, Key};
use crate::lmdb_txn::Transaction;
use crate::record::Inode;

/// Bound on a walk towards the root, above any possible depth, so that a walk in a damaged shard ends too.
const DEPTH_MAX: u64 = 1 << 24;

/// How a directory is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hold {
    /// It gets an entry: it must not be removed.
    Entered,
    /// It is an ancestor of the destination of a moving directory: it must not be removed or moved.
    Pinned,
    /// It is being moved.
    Moving,
    /// It is being removed, and gets no entry.
    Condemned,
    /// It is being created, and gets no entry. Only the transaction that creates it may change it.
    BeingCreated,
    /// It is becoming wide, and gets no entry of its own.
    Widening,
    /// It is wide, and attributes that its parts share are being changed.
    Changing,
}

impl Hold {
    fn is_compatible(self, other: Hold) -> bool {
        use Hold::{BeingCreated, Changing, Condemned, Entered, Moving, Pinned, Widening};
        match (self, other) {
            (Condemned | Widening | BeingCreated, _) | (_, Condemned | Widening | BeingCreated) => false,
            (Moving, Pinned | Moving) | (Pinned, Moving) | (Changing, Changing) => false,
            (Entered | Changing, _) | (_, Entered | Changing) | (Pinned, Pinned) => true,
        }
    }
}

/// All holds.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    names: BTreeMap<(u64, Vec<u8>), TxId>,
    directories: HashMap<u64, Vec<(TxId, Hold)>>,
    /// Transactions with prepared parts, and the number of parts of each.
    prepared: BTreeMap<TxId, u32>,
}

/// A prepared part's record: seconds since 1970, the inode that it created, the part.
pub(crate) struct PreparedRecord<'a> {
    pub(crate) seconds: u64,
    pub(crate) created: Ino,
    pub(crate) part: Part<'a>,
}

impl<'a> PreparedRecord<'a> {
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<PreparedRecord<'a>, Code> {
        let mut r = Reader::new(bytes);
        let mut read = || -> Result<PreparedRecord<'a>, Code> {
            Ok(PreparedRecord { seconds: r.u64()?, created: Ino(r.u64()?), part: Part::decode(&mut r)? })
        };
        read().map_err(|_| Code::Corrupt)
    }
}

impl Holds {
    /// The holds of all prepared parts on record.
    pub(crate) fn read(tx: &Transaction<'_>, here: NodeId) -> Result<Holds, Code> {
        let mut holds = Holds::default();
        let (first, last) = keys::all_prepared();
        for item in tx.range(&first, &last)? {
            let (key, bytes) = item?;
            let Some(Key::Prepared(id, _)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = PreparedRecord::decode(bytes)?;
            if let Part::Climb { from, .. } = record.part {
                let mut at = from;
                for _ in 0..DEPTH_MAX {
                    holds.hold_directory(id, at, Hold::Pinned);
                    let Some(bytes) = tx.get(&keys::inode(at))? else { break };
                    let parent = Inode::decode(at, bytes)?.attr.parent;
                    if at == Ino::ROOT || parent.birth_node() != here {
                        break;
                    }
                    at = parent;
                }
            }
            holds.note(id, &record.part, record.created, here);
        }
        Ok(holds)
    }

    /// True when anything is held.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        !self.prepared.is_empty()
    }

    /// Transactions with prepared parts.
    pub(crate) fn transactions(&self) -> impl Iterator<Item = TxId> + '_ {
        self.prepared.keys().copied()
    }

    /// Names that are held.
    pub(crate) fn names(&self) -> impl Iterator<Item = (Ino, &[u8])> {
        self.names.keys().map(|(parent, name)| (Ino(*parent), name.as_slice()))
    }

    /// Adds the holds of a prepared part, which created the inode `created`, if any. For [`Part::Climb`] the caller
    /// holds the directories.
    pub(crate) fn note(&mut self, tx: TxId, part: &Part<'_>, created: Ino, here: NodeId) {
        *self.prepared.entry(tx).or_default() += 1;
        match *part {
            Part::Leave { parent, name, .. } => self.hold_name(tx, parent, name),
            Part::Enter { parent, name, ino, kind, .. } => {
                self.hold_name(tx, parent, name);
                self.hold_directory(tx, parent, Hold::Entered);
                if kind == forebay_types::Kind::Directory && ino.birth_node() == here {
                    self.hold_directory(tx, ino, Hold::Moving);
                }
            }
            Part::Move { ino, .. } => self.hold_directory(tx, ino, Hold::Moving),
            Part::Condemn { ino } => self.hold_directory(tx, ino, Hold::Condemned),
            Part::Widen { ino, .. } => self.hold_directory(tx, ino, Hold::Widening),
            Part::Change { ino, .. } => self.hold_directory(tx, ino, Hold::Changing),
            // Its number is not known yet. A client that guesses it must not put an entry into a directory that may be
            // removed.
            Part::CreateInode { .. } | Part::CreatePart { .. } => {
                self.hold_directory(tx, created, Hold::BeingCreated)
            }
            Part::Count { .. } | Part::Climb { .. } => {}
        }
    }

    fn hold_name(&mut self, tx: TxId, parent: Ino, name: &[u8]) {
        self.names.insert((parent.0, name.to_vec()), tx);
    }

    /// Holds a directory.
    pub(crate) fn hold_directory(&mut self, tx: TxId, ino: Ino, hold: Hold) {
        self.directories.entry(ino.0).or_default().push((tx, hold));
    }

    /// Releases all holds of a transaction.
    pub(crate) fn release(&mut self, tx: TxId) {
        self.names.retain(|_, holder| *holder != tx);
        self.directories.retain(|_, holders| {
            holders.retain(|(holder, _)| *holder != tx);
            !holders.is_empty()
        });
        self.prepared.remove(&tx);
    }

    /// True when a name is held.
    pub(crate) fn has_name(&self, parent: Ino, name: &[u8]) -> bool {
        self.any() && self.names.contains_key(&(parent.0, name.to_vec()))
    }

    /// True when a name in a directory is held.
    pub(crate) fn has_name_in(&self, parent: Ino) -> bool {
        self.names.range((parent.0, Vec::new())..).next().is_some_and(|((of, _), _)| *of == parent.0)
    }

    /// True when `tx` cannot hold a directory this way because another transaction has a conflicting hold. Holds of
    /// `tx` itself conflict only if one is [`Hold::Condemned`]: no transaction both removes a directory and does
    /// something else with it.
    pub(crate) fn forbids(&self, tx: TxId, ino: Ino, hold: Hold) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        let counts = |of: TxId, other: Hold| of != tx || hold == Hold::Condemned || other == Hold::Condemned;
        holders.iter().any(|(holder, other)| counts(*holder, *other) && !hold.is_compatible(*other))
    }

    /// True for a directory that a transaction in progress is creating: no client has seen it yet.
    pub(crate) fn is_being_created(&self, ino: Ino) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        holders.iter().any(|(_, hold)| matches!(hold, Hold::BeingCreated))
    }

    /// True when a directory takes no entries, because it may be removed or become wide.
    pub(crate) fn is_condemned(&self, ino: Ino) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        holders.iter().any(|(_, hold)| matches!(hold, Hold::Condemned | Hold::Widening | Hold::BeingCreated))
    }
}
