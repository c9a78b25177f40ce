//! What requests read or changed, for the board: names, inodes, orphans. The server passes one [`Effects`] to every
//! request of a round, publishes it before it replies, and clears it. Once its buffers have grown, nothing is
//! allocated.
//!
//! *Found* are names of an unlisted directory that were imported from its store, and their inodes. No cache has that they
//! are absent, because all absences are dropped when a directory becomes unlisted. So the board shows them and watches
//! report them, and nothing is invalidated.
//!
//! If several effects concern the same name or inode, the last one holds.

use forebay_types::{Entry, Ino, Kind, Layout, NodeId, TxId};

/// A notification that another node must receive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Delivery {
    /// A transaction was committed.
    Commit(TxId, NodeId),
    /// An entry here that led to an inode of that node was removed.
    DropLink(Ino, TxId),
    /// An entry here that leads to an inode of that node was renamed.
    Touch(Ino, TxId),
}

impl Delivery {
    /// The node that receives it.
    pub fn node(&self) -> NodeId {
        match self {
            Delivery::Commit(_, node) => *node,
            Delivery::DropLink(ino, _) | Delivery::Touch(ino, _) => ino.birth_node(),
        }
    }
}

/// What requests read or changed. *Found* are names that were imported into an unlisted directory, and their inodes.
#[derive(Debug, Default)]
pub struct Effects {
    arena: Vec<u8>,
    names: Vec<NameRecord>,
    inodes: Vec<(Ino, Option<Entry>)>,
    found: Vec<Entry>,
    orphaned: Vec<(Ino, Layout)>,
    deliveries: Vec<Delivery>,
    widened: Vec<Ino>,
    unlisted: Vec<UnlistedDirectory>,
}

/// A directory that has become unlisted: names may be in its store alone, so no cached absence of a name in it is valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnlistedDirectory {
    /// The directory.
    pub ino: Ino,
    /// It was in front of a store before. The board has no absent names of such directories.
    pub was_attached: bool,
}

#[derive(Debug)]
struct NameRecord {
    parent: Ino,
    start: usize,
    len: usize,
    entry: Option<(Ino, Kind)>,
    is_found: bool,
}

/// A name and the inode it leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameEffect<'a> {
    /// Directory.
    pub parent: Ino,
    /// Name in it.
    pub name: &'a [u8],
    /// The inode and its kind; none if there is no such entry.
    pub entry: Option<(Ino, Kind)>,
    /// The name was found: see [`Effects`].
    pub is_found: bool,
}

/// A position between the reports of two requests.
#[derive(Clone, Copy, Default, Debug)]
pub struct Mark {
    arena: usize,
    names: usize,
    inodes: usize,
    found: usize,
    orphaned: usize,
    deliveries: usize,
    widened: usize,
    unlisted: usize,
}

/// The reports behind a [`Mark`]: those of one request.
#[derive(Clone, Copy, Debug)]
pub struct Since<'a> {
    effects: &'a Effects,
    mark: Mark,
}

impl<'a> Since<'a> {
    /// See [`Effects::names`]. Without those that were found.
    pub fn names(&self) -> impl Iterator<Item = NameEffect<'a>> {
        let changed = self.effects.names[self.mark.names..].iter().filter(|n| !n.is_found);
        changed.map(|n| self.effects.effect_of(n))
    }

    /// See [`Effects::names`].
    pub fn names_and_found(&self) -> impl Iterator<Item = NameEffect<'a>> {
        self.effects.names[self.mark.names..].iter().map(|n| self.effects.effect_of(n))
    }

    /// See [`Effects::inodes`].
    pub fn inodes(&self) -> &'a [(Ino, Option<Entry>)] {
        &self.effects.inodes[self.mark.inodes..]
    }

    /// See [`Effects::orphaned`].
    pub fn orphaned(&self) -> &'a [(Ino, Layout)] {
        &self.effects.orphaned[self.mark.orphaned..]
    }

    /// See [`Effects::deliveries`].
    pub fn deliveries(&self) -> &'a [Delivery] {
        &self.effects.deliveries[self.mark.deliveries..]
    }
}

impl Effects {
    /// The reports behind a position.
    pub fn since(&self, mark: Mark) -> Since<'_> {
        Since { effects: self, mark }
    }

    /// No effects, nothing allocated.
    pub fn new() -> Effects {
        Effects::default()
    }

    /// Drops all reports, keeps the memory.
    pub fn clear(&mut self) {
        self.arena.clear();
        self.names.clear();
        self.inodes.clear();
        self.found.clear();
        self.orphaned.clear();
        self.deliveries.clear();
        self.widened.clear();
        self.unlisted.clear();
    }

    /// True when nothing was reported.
    pub fn is_empty(&self) -> bool {
        let Effects { arena, names, inodes, found, orphaned, deliveries, widened, unlisted } = self;
        arena.is_empty()
            && names.is_empty()
            && inodes.is_empty()
            && found.is_empty()
            && orphaned.is_empty()
            && deliveries.is_empty()
            && widened.is_empty()
            && unlisted.is_empty()
    }

    /// Names, in the order of the reports.
    pub fn names(&self) -> impl ExactSizeIterator<Item = NameEffect<'_>> {
        self.names.iter().map(|n| self.effect_of(n))
    }

    fn effect_of(&self, n: &NameRecord) -> NameEffect<'_> {
        let NameRecord { parent, start, len, entry, is_found } = *n;
        NameEffect { parent, name: &self.arena[start..start + len], entry, is_found }
    }

    /// New inodes of names that were found. To be published before [`Effects::inodes`], which may have changes of them.
    pub fn found(&self) -> &[Entry] {
        &self.found
    }

    /// Inodes with their attributes, in the order of the reports; none for an inode that is gone.
    pub fn inodes(&self) -> &[(Ino, Option<Entry>)] {
        &self.inodes
    }

    /// Files that lost their last link. The caller unlinks their backing files, then calls
    /// [`crate::Batch::remove_orphans`].
    pub fn orphaned(&self) -> &[(Ino, Layout)] {
        &self.orphaned
    }

    /// Notifications that other nodes must receive, until they acknowledge them ([`crate::Batch::settle`]).
    pub fn deliveries(&self) -> &[Delivery] {
        &self.deliveries
    }

    /// Directories that have become wide. Everything cached about their names, including absent ones, is no longer
    /// valid.
    pub fn all_widened(&self) -> &[Ino] {
        &self.widened
    }

    pub(crate) fn widened(&mut self, ino: Ino) {
        self.widened.push(ino);
    }

    /// Directories that have become unlisted, in the order of the reports.
    pub fn unlisted(&self) -> &[UnlistedDirectory] {
        &self.unlisted
    }

    pub(crate) fn becomes_unlisted(&mut self, ino: Ino, was_attached: bool) {
        self.unlisted.push(UnlistedDirectory { ino, was_attached });
    }

    pub(crate) fn delivery(&mut self, delivery: Delivery) {
        self.deliveries.push(delivery);
    }

    /// The position behind all reports.
    pub fn mark(&self) -> Mark {
        Mark {
            arena: self.arena.len(),
            names: self.names.len(),
            inodes: self.inodes.len(),
            found: self.found.len(),
            orphaned: self.orphaned.len(),
            deliveries: self.deliveries.len(),
            widened: self.widened.len(),
            unlisted: self.unlisted.len(),
        }
    }

    pub(crate) fn truncate(&mut self, mark: Mark) {
        self.arena.truncate(mark.arena);
        self.names.truncate(mark.names);
        self.inodes.truncate(mark.inodes);
        self.found.truncate(mark.found);
        self.orphaned.truncate(mark.orphaned);
        self.deliveries.truncate(mark.deliveries);
        self.widened.truncate(mark.widened);
        self.unlisted.truncate(mark.unlisted);
    }

    pub(crate) fn name(&mut self, parent: Ino, name: &[u8], entry: Option<(Ino, Kind)>) {
        let start = self.arena.len();
        self.arena.extend_from_slice(name);
        self.names.push(NameRecord { parent, start, len: name.len(), entry, is_found: false });
    }

    /// A name of an unlisted directory was imported, with a new inode.
    pub(crate) fn find(&mut self, parent: Ino, name: &[u8], entry: Entry) {
        self.find_further(parent, name, (entry.attr.ino, entry.attr.kind()));
        self.found.push(entry);
    }

    /// A name of an unlisted directory was imported, which leads to an inode that has other names.
    pub(crate) fn find_further(&mut self, parent: Ino, name: &[u8], entry: (Ino, Kind)) {
        self.name(parent, name, Some(entry));
        if let Some(last) = self.names.last_mut() {
            last.is_found = true;
        }
    }

    pub(crate) fn inode(&mut self, entry: Entry) {
        self.inodes.push((entry.attr.ino, Some(entry)));
    }

    pub(crate) fn gone(&mut self, ino: Ino) {
        self.inodes.push((ino, None));
    }

    pub(crate) fn orphan(&mut self, ino: Ino, layout: Layout) {
        self.orphaned.push((ino, layout));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Attr, NodeId, Timestamp};

    fn file(ino: Ino) -> Entry {
        let layout = Layout::single(NodeId(1), 0);
        let t = Timestamp::default();
        let attr = Attr {
            ino,
            size: 0,
            rdev: 0,
            parent: Ino(0),
            mode: Kind::File.mode_bits(),
            uid: 0,
            gid: 0,
            nlink: 1,
            flags: 0,
            home: NodeId(1),
            width_log2: 0,
            atime: t,
            mtime: t,
            ctime: t,
            btime: t,
        };
        Entry { attr, layout }
    }

    #[test]
    fn truncate_goes_back_to_the_mark() {
        let mut effects = Effects::new();
        effects.name(Ino(1), b"first", Some((Ino(2), Kind::File)));
        let mark = effects.mark();
        effects.name(Ino(1), b"second", None);
        effects.gone(Ino(3));
        effects.orphan(Ino(3), Layout::single(NodeId(1), 0));
        effects.truncate(mark);
        let names: Vec<_> = effects.names().collect();
        let entry = Some((Ino(2), Kind::File));
        assert_eq!(names, [NameEffect { parent: Ino(1), name: b"first", entry, is_found: false }]);
        assert!(effects.inodes().is_empty() && effects.orphaned().is_empty());
        effects.clear();
        assert!(effects.is_empty());
    }

    #[test]
    fn found_names_are_for_the_board_and_are_no_changes() {
        let mut effects = Effects::new();
        let start = effects.mark();
        effects.name(Ino(1), b"made", Some((Ino(4), Kind::File)));
        effects.find(Ino(1), b"found", file(Ino(5)));
        let changed: Vec<_> = effects.since(start).names().map(|n| n.name).collect();
        assert_eq!(changed, [b"made"]);
        let watched: Vec<_> = effects.since(start).names_and_found().map(|n| n.name).collect();
        assert_eq!(watched, [&b"made"[..], b"found"]);
        let shown: Vec<_> = effects.names().map(|n| (n.name, n.entry)).collect();
        let entry = |ino| Some((Ino(ino), Kind::File));
        assert_eq!(shown, [(&b"made"[..], entry(4)), (b"found", entry(5))]);
        assert_eq!(effects.found().len(), 1);
        assert!(effects.inodes().is_empty());
        effects.truncate(start);
        assert!(effects.is_empty());
    }

    #[test]
    fn is_empty_is_false_with_any_report() {
        let reports: [fn(&mut Effects); 7] = [
            |effects| effects.name(Ino(1), b"n", None),
            |effects| effects.find(Ino(1), b"n", file(Ino(5))),
            |effects| effects.gone(Ino(3)),
            |effects| effects.orphan(Ino(3), Layout::single(NodeId(1), 0)),
            |effects| effects.delivery(Delivery::Touch(Ino(3), TxId(4))),
            |effects| effects.widened(Ino(3)),
            |effects| effects.becomes_unlisted(Ino(3), false),
        ];
        for (i, report) in reports.into_iter().enumerate() {
            let mut effects = Effects::new();
            report(&mut effects);
            assert!(!effects.is_empty(), "report {i}");
            effects.clear();
            assert!(effects.is_empty(), "report {i}");
        }
    }
}
