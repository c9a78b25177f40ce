//! Tells for which operations the order may matter: the parts of a file tree that each operation may read, and those
//! that it may change. Too many parts cost the checker time. Too few would be an error: the checker would find possible
//! histories impossible.

use std::collections::{BTreeMap, BTreeSet};

use forebay_types::Ino;

use crate::history::{Name, Op, Outcome};
use crate::model::{Id, State};

/// Aspects of a file.
const LINKS: u16 = 1;
/// Whether the file has or had names on other nodes.
const ABROAD: u16 = 2;
const MODE: u16 = 4;
const XATTR: u16 = 8;
const WORD: u16 = 16;
const BLOCK: u16 = 32;
const APPENDED: u16 = 64;
const BYTES: u16 = 128;
const LOCK: u16 = 256;

/// A part of a tree.
#[derive(Clone, Copy, Debug)]
enum Thing {
    /// The existence of a directory, and whether it and new directories in it are wide.
    Directory(Id),
    /// Entries of a directory with these letters, as bits.
    Entries(Id, u32),
    /// Aspects of a file.
    File(Id, u16),
    /// Which directory contains which.
    Order,
}

/// Identifies an inode of unknown number by the operation that created it, without the node. No operation names such an
/// inode: a client names an inode only after a reply has contained its number, and then all trees have the number.
fn plain(id: Id) -> Id {
    match id {
        Id::MadeBy(index, _) => Id::MadeBy(index, 0),
        known => known,
    }
}

fn known(ino: Ino) -> Id {
    Id::Known(ino.0)
}

impl Thing {
    fn meets(self, other: Thing) -> bool {
        match (self, other) {
            (Thing::Directory(a), Thing::Directory(b)) => a == b,
            (Thing::Entries(a, its), Thing::Entries(b, others)) => a == b && its & others != 0,
            (Thing::File(a, its), Thing::File(b, others)) => a == b && its & others != 0,
            (Thing::Order, Thing::Order) => true,
            _ => false,
        }
    }
}

/// An operation that has no place in the order yet: its number, the operation, and its reply if it is known to have
/// happened.
pub(crate) type Pending<'h> = (usize, &'h Op, Option<&'h Outcome>);

/// The inodes to which entries may lead, as long as nothing but the pending operations happens.
#[derive(Debug, Default)]
pub(crate) struct Leads {
    to: BTreeMap<(Ino, Name), BTreeSet<Id>>,
    directories: BTreeSet<Id>,
}

impl Leads {
    /// Collects this for the entries that pending operations remove or move, in any of `trees`.
    pub(crate) fn new<'s>(pending: &[Pending<'_>], trees: impl Iterator<Item = &'s State>) -> Leads {
        let mut leads = Leads::default();
        for (_, op, _) in pending {
            match op {
                Op::Unlink { dir, name } | Op::Rmdir { dir, name } => {
                    leads.to.entry((*dir, *name)).or_default();
                }
                Op::Rename { dir, name, to_dir, to_name, .. } => {
                    leads.to.entry((*dir, *name)).or_default();
                    leads.to.entry((*to_dir, *to_name)).or_default();
                }
                _ => {}
            }
        }
        for tree in trees {
            for ((dir, name), to) in &mut leads.to {
                let entry = tree.directories.get(&known(*dir)).and_then(|d| d.entries.get(name));
                let Some(id) = entry.copied() else { continue };
                to.insert(plain(id));
                if tree.directories.contains_key(&id) {
                    leads.directories.insert(plain(id));
                }
            }
        }
        for (index, op, told) in pending {
            let (dir, name, id) = match op {
                Op::Create { dir, name, .. } | Op::Symlink { dir, name } | Op::Mkdir { dir, name } => {
                    (dir, name, made(*index, *told))
                }
                Op::Link { ino, dir, name } => (dir, name, known(*ino)),
                _ => continue,
            };
            if let Some(to) = leads.to.get_mut(&(*dir, *name)) {
                to.insert(id);
            }
            if matches!(op, Op::Mkdir { .. }) {
                leads.directories.insert(id);
            }
        }
        while leads.follow(pending) {}
        leads
    }

    /// Adds to each rename's target the inodes to which its source may lead. Returns true when that added any.
    fn follow(&mut self, pending: &[Pending<'_>]) -> bool {
        let mut new = false;
        for (_, op, _) in pending {
            if let Op::Rename { dir, name, to_dir, to_name, .. } = op {
                let moved = self.of(*dir, *name).clone();
                let to = self.to.entry((*to_dir, *to_name)).or_default();
                let before = to.len();
                to.extend(moved);
                new |= to.len() > before;
            }
        }
        new
    }

    fn of(&self, dir: Ino, name: Name) -> &BTreeSet<Id> {
        self.to.get(&(dir, name)).expect("asked for by `new`")
    }
}

fn made(index: usize, told: Option<&Outcome>) -> Id {
    match told {
        Some(Outcome::Inode(ino)) => known(*ino),
        _ => Id::MadeBy(index, 0),
    }
}

/// What an operation may read and change.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    looks: Vec<Thing>,
    changes: Vec<Thing>,
}

impl Reach {
    pub(crate) fn of((index, op, told): Pending<'_>, leads: &Leads) -> Reach {
        let mut reach = Reach::default();
        match op {
            Op::Create { dir, name, .. } | Op::Symlink { dir, name } | Op::Mkdir { dir, name } => {
                reach.changes_entry(*dir, *name);
                let id = made(index, told);
                reach.changes.push(Thing::File(id, u16::MAX));
                if matches!(op, Op::Mkdir { .. }) {
                    reach.changes.push(Thing::Directory(id));
                }
            }
            Op::Link { ino, dir, name } => {
                reach.changes_entry(*dir, *name);
                reach.changes_file(*ino, LINKS | ABROAD);
            }
            Op::Unlink { dir, name } => {
                reach.changes_entry(*dir, *name);
                for id in leads.of(*dir, *name) {
                    reach.ends(*id);
                }
            }
            Op::Rmdir { dir, name } => {
                reach.changes_entry(*dir, *name);
                for id in leads.of(*dir, *name) {
                    reach.removes(*id);
                }
            }
            Op::Rename { dir, name, to_dir, to_name, .. } => {
                reach.changes_entry(*dir, *name);
                reach.changes_entry(*to_dir, *to_name);
                for id in leads.of(*dir, *name) {
                    if leads.directories.contains(id) {
                        reach.changes.push(Thing::Order);
                    } else {
                        reach.changes.push(Thing::File(*id, ABROAD));
                    }
                }
                for id in leads.of(*to_dir, *to_name) {
                    reach.ends(*id);
                    reach.removes(*id);
                }
            }
            Op::Lookup { dir, name } => reach.looks_into(*dir, name.bit()),
            Op::List { dir } | Op::Count { dir } => reach.looks_into(*dir, u32::MAX),
            Op::ListPart { dir, letters } => reach.looks_into(*dir, *letters),
            Op::Widen { dir } => {
                reach.looks_into(*dir, u32::MAX);
                reach.changes.push(Thing::Directory(known(*dir)));
            }
            Op::WidenNew { dir } => reach.changes.push(Thing::Directory(known(*dir))),
            Op::Stat { ino } => {
                reach.looks_at(*ino, MODE | ABROAD);
                reach.looks.push(Thing::Directory(known(*ino)));
            }
            Op::Chmod { ino, .. } => reach.changes_file(*ino, MODE),
            Op::SetXattr { ino, .. } => reach.changes_file(*ino, XATTR),
            Op::GetXattr { ino } => reach.looks_at(*ino, XATTR),
            Op::Write { ino, large, .. } => reach.changes_file(*ino, if *large { BLOCK } else { WORD }),
            Op::Read { ino, large } => reach.looks_at(*ino, if *large { BLOCK } else { WORD }),
            Op::Append { ino, .. } => reach.changes_file(*ino, APPENDED),
            Op::ReadAppended { ino } => reach.looks_at(*ino, APPENDED),
            Op::Truncate { ino, .. } | Op::Allocate { ino, .. } => reach.changes_file(*ino, BYTES),
            Op::Lock { ino, .. } | Op::Unlock { ino, .. } => reach.changes_file(*ino, LOCK),
            Op::Size { ino } => reach.looks_at(*ino, BYTES),
        }
        reach
    }

    /// True when the order of the two operations may matter.
    pub(crate) fn meets(&self, other: &Reach) -> bool {
        let any = |changes: &[Thing], things: &[Thing]| {
            changes.iter().any(|changed| things.iter().any(|thing| changed.meets(*thing)))
        };
        any(&self.changes, &other.changes)
            || any(&self.changes, &other.looks)
            || any(&other.changes, &self.looks)
    }

    fn looks_into(&mut self, dir: Ino, letters: u32) {
        self.looks.push(Thing::Directory(known(dir)));
        self.looks.push(Thing::Entries(known(dir), letters));
    }

    fn changes_entry(&mut self, dir: Ino, name: Name) {
        self.looks.push(Thing::Directory(known(dir)));
        self.changes.push(Thing::Entries(known(dir), name.bit()));
    }

    /// Every reply also shows whether the file exists, hence `LINKS`.
    fn looks_at(&mut self, ino: Ino, aspects: u16) {
        self.looks.push(Thing::File(known(ino), aspects | LINKS));
    }

    fn changes_file(&mut self, ino: Ino, aspects: u16) {
        self.looks.push(Thing::File(known(ino), LINKS));
        self.changes.push(Thing::File(known(ino), aspects));
    }

    /// A name of a file is removed.
    fn ends(&mut self, id: Id) {
        self.changes.push(Thing::File(id, LINKS | ABROAD));
    }

    /// A directory is removed if it is empty.
    fn removes(&mut self, id: Id) {
        self.looks.push(Thing::Entries(id, u32::MAX));
        self.changes.push(Thing::Directory(id));
    }
}
