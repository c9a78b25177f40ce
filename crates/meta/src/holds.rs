//! What prepared parts hold until their transaction is finished: names, which nobody may look up or change meanwhile,
//! and directories, which must not move or go. In memory; read from the parts' records when the shard is opened.
//!
//! A part that meets what another transaction holds is refused with [`Code::Busy`], and its coordinator begins anew:
//! parts never wait for one another, so there is no deadlock. Other requests wait, and hold nothing themselves.

use std::collections::{BTreeMap, HashMap};

use forebay_types::{Code, Ino, NodeId, Part, Reader, TxId};

use crate::keys::{self, Key};
use crate::lmdb_txn::Transaction;
use crate::record::Inode;

/// Directories above one another that are followed: more than there can be, so that a damaged shard ends a walk too.
const DEPTH_MAX: u64 = 1 << 24;

/// How a directory is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hold {
    /// It gets an entry: it must not go.
    Entered,
    /// It lies above where a directory goes: it must not go nor move.
    Pinned,
    /// It moves.
    Moving,
    /// It goes, and gets no entry.
    Condemned,
    /// It is being made, and gets no entry: who makes it may change it.
    Born,
    /// It becomes wide, and gets no entry of its own.
    Widening,
    /// It is wide, and what its parts are to have too changes.
    Changing,
}

impl Hold {
    fn bears(self, other: Hold) -> bool {
        use Hold::{Born, Changing, Condemned, Entered, Moving, Pinned, Widening};
        match (self, other) {
            (Condemned | Widening | Born, _) | (_, Condemned | Widening | Born) => false,
            (Moving, Pinned | Moving) | (Pinned, Moving) | (Changing, Changing) => false,
            (Entered | Changing, _) | (_, Entered | Changing) | (Pinned, Pinned) => true,
        }
    }
}

/// All that is held.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    names: BTreeMap<(u64, Vec<u8>), TxId>,
    directories: HashMap<u64, Vec<(TxId, Hold)>>,
    /// Transactions with prepared parts, and how many each has.
    prepared: BTreeMap<TxId, u32>,
}

/// A prepared part's record: seconds since 1970, the inode that it made, the part.
pub(crate) struct PreparedRecord<'a> {
    pub(crate) seconds: u64,
    pub(crate) born: Ino,
    pub(crate) part: Part<'a>,
}

impl<'a> PreparedRecord<'a> {
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<PreparedRecord<'a>, Code> {
        let mut r = Reader::new(bytes);
        let mut read = || -> Result<PreparedRecord<'a>, Code> {
            Ok(PreparedRecord { seconds: r.u64()?, born: Ino(r.u64()?), part: Part::decode(&mut r)? })
        };
        read().map_err(|_| Code::Corrupt)
    }
}

impl Holds {
    /// What the records say is held.
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
            holds.note(id, &record.part, record.born, here);
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

    /// Holds what a part holds that made `born`, if it made anything; of a climb, whose directories are its caller's,
    /// nothing but that it is there.
    pub(crate) fn note(&mut self, tx: TxId, part: &Part<'_>, born: Ino, here: NodeId) {
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
            // Nobody knows its number yet; who guesses it is not to put anything into what may go.
            Part::CreateInode { .. } | Part::BearPart { .. } => self.hold_directory(tx, born, Hold::Born),
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

    /// Lets go of all that a transaction holds.
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

    /// True when a directory cannot be held so, as another than `tx` holds it otherwise; or `tx` itself, when it is to
    /// go: no change both removes a directory and does something else with it.
    pub(crate) fn forbids(&self, tx: TxId, ino: Ino, hold: Hold) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        let counts = |of: TxId, other: Hold| of != tx || hold == Hold::Condemned || other == Hold::Condemned;
        holders.iter().any(|(holder, other)| counts(*holder, *other) && !hold.bears(*other))
    }

    /// True for a directory that a change under way is making: nobody has looked into it.
    pub(crate) fn is_born(&self, ino: Ino) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        holders.iter().any(|(_, hold)| matches!(hold, Hold::Born))
    }

    /// True when a directory takes no entries, as it may be about to go, or to become wide.
    pub(crate) fn is_condemned(&self, ino: Ino) -> bool {
        let holders = self.directories.get(&ino.0).map_or(&[][..], Vec::as_slice);
        holders.iter().any(|(_, hold)| matches!(hold, Hold::Condemned | Hold::Widening | Hold::Born))
    }
}
