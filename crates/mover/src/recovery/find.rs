//! Finds in the targets of a dead pool what no store may have, and where it belongs.
//!
//! A file's name, attributes and state come from the mark of its backing files or from the shard's records, whichever
//! is newer. Data that changed after that are taken for dirty: a comparison with the store's version decides
//! (`write.rs`).
//!
//! | state | taken for |
//! |---|---|
//! | dirty, or a copy of it was under way | dirty |
//! | clean, its data not changed since | clean: left alone |
//! | clean, its data or names changed since | dirty |
//! | released, with a backing file | a restore was under way, or it was written since: incomplete |
//! | marked, and an inode that a newer record does not have | removed: left alone |
//! | no mark, and an inode that the record does not have | removed if it has not changed since, else unnamed |

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use forebay_data::{BackingName, DataMark, Media, Target};
use forebay_meta::NameIn;
use forebay_tasks::recovery::{Fate, PlannedTarget, RecoveryPlan};
use forebay_tasks::StoreSettings;
use forebay_types::{
    Code, Entry, Error, Ino, Kind, Result, Timestamp, FLAG_DIRTY, FLAG_DRAINING, FLAG_STORE,
};
use rustix::fs::{Mode, OFlags};

use super::names::Names;
use super::parts::{bytes_of, Part};
use crate::store::{StoreDirectory, Xattrs};

/// Times of files are those of the kernel's last tick, and clocks are set: a change so long before a record may have
/// come after it.
const DOUBT_SECONDS: i64 = 2;

/// Where an item is to be written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Destination {
    /// The store's URL; empty if there is none.
    pub(super) url: Vec<u8>,
    /// The path in it.
    pub(super) key: Vec<u8>,
}

/// What was found of an inode.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) ino: Ino,
    /// Path in the pool, without a slash in front; empty if there is no name.
    pub(super) path: Vec<u8>,
    /// The first name is where its data go; others are further names of it.
    pub(super) destinations: Vec<Destination>,
    pub(super) entry: Option<Entry>,
    pub(super) parts: Vec<Part>,
    pub(super) bytes: u64,
    pub(super) xattrs: Option<Xattrs>,
    /// The target of a symbolic link.
    pub(super) link_target: Vec<u8>,
    pub(super) fate: Fate,
    pub(super) source: &'static str,
    pub(super) note: String,
}

/// Everything that was found.
pub(super) struct Found {
    pub(super) items: Vec<Item>,
    pub(super) targets: Vec<OwnedFd>,
    /// What tells the directories of the stores from others, by their URLs, as far as a record says so.
    pub(super) directories: HashMap<Vec<u8>, StoreDirectory>,
}

type Marks = BTreeMap<u64, DataMark>;

/// Looks through the targets.
pub(super) fn find(plan: &RecoveryPlan, note: &mut dyn FnMut(String)) -> Result<Found> {
    let mut targets = Vec::new();
    for target in &plan.targets {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&target.target, flags, Mode::empty());
        targets.push(
            opened.map_err(|e| {
                Error::io(format!("cannot open target {}", target.target.display()), &e.into())
            })?,
        );
    }
    let names = Names::read(&plan.targets, note);
    let (mut parts, mut marks) = (BTreeMap::new(), Marks::new());
    for (i, planned) in plan.targets.iter().enumerate() {
        look_through(i, planned, &plan.targets, &targets[i], (&mut parts, &mut marks), note)?;
    }
    let mut finder = Finder { plan, names: &names, items: Vec::new() };
    for (ino, parts) in parts {
        finder.file(Ino(ino), parts, marks.remove(&ino));
    }
    finder.others();
    let items = finder.items;
    Ok(Found { items, targets, directories: names.directories() })
}

/// Reads the backing files of one target, and their marks.
fn look_through(
    index: usize,
    planned: &PlannedTarget,
    all: &[PlannedTarget],
    directory: &OwnedFd,
    (parts, marks): (&mut BTreeMap<u64, Vec<Part>>, &mut Marks),
    note: &mut dyn FnMut(String),
) -> Result<()> {
    let target = Target::open(directory, 0)?;
    let mut foreign = 0u64;
    let mut damaged = 0u64;
    let looked = target.for_each(&mut |ino, number, stripe| {
        let stat = match target.stat(ino, number, stripe) {
            Ok(stat) => stat,
            Err(Code::NotFound) => return Ok(()),
            Err(code) => return Err(code),
        };
        let (atime, mtime, ctime) = (stat.atime, stat.mtime, stat.ctime);
        let part = Part { number, stripe, target: index, bytes: stat.bytes, atime, mtime, ctime };
        parts.entry(ino.0).or_default().push(part);
        match DataMark::read(directory, &BackingName::new(ino, number, stripe)) {
            Ok(None) => {}
            Ok(Some(mark)) if mark.entry.attr.ino != ino => damaged += 1,
            Ok(Some(mark)) if !all.iter().any(|target| target.pool == mark.pool) => foreign += 1,
            Ok(Some(mark)) => match marks.get(&ino.0) {
                Some(known) if known.written >= mark.written => {}
                _ => drop(marks.insert(ino.0, mark)),
            },
            Err(Code::Corrupt) => damaged += 1,
            Err(code) => return Err(code),
        }
        Ok(())
    });
    looked.map_err(|code| {
        Error::new(code, format!("cannot look through {}", planned.target.display()))
            .cure("check that the medium is mounted and works, and that the directory is yours")
    })?;
    let path = planned.path.display();
    if damaged > 0 {
        note(format!("{path}: {damaged} marks of backing files cannot be read and are not used"));
    }
    if foreign > 0 {
        note(format!(
            "{path}: {foreign} backing files are marked by another pool, or by a node whose targets are not named: \
             name all of them to recover those files"
        ));
    }
    Ok(())
}

/// True if something changed after a time, or not clearly before it.
fn is_since(changed: Timestamp, time: Timestamp) -> bool {
    changed.sec >= time.sec.saturating_sub(DOUBT_SECONDS)
}

struct Finder<'a> {
    plan: &'a RecoveryPlan,
    names: &'a Names,
    items: Vec<Item>,
}

impl Finder<'_> {
    fn file(&mut self, ino: Ino, parts: Vec<Part>, mark: Option<DataMark>) {
        let known = self.names.known(ino);
        let recorded = self.names.remains.inodes.get(&ino);
        let mtime = parts.iter().map(|part| part.mtime).max().unwrap_or_default();
        let ctime = parts.iter().map(|part| part.ctime).max().unwrap_or_default();
        let sum = parts.iter().map(|part| part.bytes).sum();
        let mut item = Item {
            ino,
            path: Vec::new(),
            destinations: Vec::new(),
            entry: None,
            parts,
            bytes: sum,
            xattrs: None,
            link_target: Vec::new(),
            fate: Fate::Dirty,
            source: "none",
            note: String::new(),
        };
        let from_mark = mark.filter(|mark| known.is_none_or(|known| mark.written >= known.taken));
        let (entry, time) = match (&from_mark, known, recorded) {
            (Some(mark), _, _) => (mark.entry, mark.written),
            (None, Some(known), Some(entry)) => (*entry, known.taken),
            (None, Some(known), None) if !is_since(ctime, known.taken) => return, // it was removed
            _ => {
                item.fate = Fate::Unnamed;
                item.note = "written just before the end: no record of its name is left".to_owned();
                if item.parts.iter().any(|part| (part.number, part.stripe) != (0, 0)) {
                    // Their order is not known either.
                    item.note = "striped, and no record of its name and layout is left".to_owned();
                    item.fate = Fate::Incomplete;
                }
                self.items.push(item);
                return;
            }
        };
        if !entry.attr.is_file() {
            return; // the node of a FIFO or device
        }
        // A layout that changed after the record was written: another number of backing files.
        item.parts.retain(|part| {
            let mut stripes = entry.layout.stripes();
            stripes.any(|(c, stripe)| (entry.layout.file_number(c), stripe) == (part.number, part.stripe))
        });
        item.bytes = bytes_of(&entry.layout, &item.parts);
        item.entry = Some(entry);
        match from_mark {
            Some(mark) => self.name_by_mark(&mut item, mark),
            None => self.name_by_record(&mut item),
        }
        let is_changed = is_since(mtime, time);
        let is_dirty = entry.attr.flags & (FLAG_DIRTY | FLAG_DRAINING) != 0;
        let is_copied = match item.source {
            "mark" => true,
            _ => {
                let remains = &self.names.remains;
                let is_pending =
                    |names: &Vec<NameIn>| names.iter().any(|name| remains.pending.contains(name));
                !remains.names.get(&ino).is_some_and(is_pending)
                    && remains.copies.get(&ino).is_some_and(|copy| copy.epoch == entry.attr.epoch())
            }
        };
        let has_name = !item.path.is_empty();
        item.fate = match item.fate {
            Fate::Dirty if !has_name => {
                item.note = "its name was removed, or is not known".to_owned();
                Fate::Unnamed
            }
            Fate::Dirty | Fate::NoStore if !entry.attr.is_resident() && is_changed => {
                item.note = "it was being restored, or was written just before the end".to_owned();
                Fate::Incomplete
            }
            Fate::Dirty if !entry.attr.is_resident() => Fate::Clean,
            Fate::Dirty if !is_dirty && !is_changed && is_copied => Fate::Clean,
            fate => fate,
        };
        if matches!(item.fate, Fate::Dirty | Fate::NoStore) {
            self.find_missing(&mut item, &entry);
        }
        self.items.push(item);
    }

    /// Backing files that are on targets which were not named.
    fn find_missing(&self, item: &mut Item, entry: &Entry) {
        let layout = &entry.layout;
        let is_given = |target: u32| {
            self.plan.targets.iter().any(|given| {
                let node = self.names.node_of.get(&given.pool);
                let index = u32::from(given.index);
                index == target & 0xffff && node.is_none_or(|node| u32::from(node.0) == target >> 16)
            })
        };
        let missing: Vec<String> = layout
            .stripes()
            .filter(|&(component, stripe)| {
                let number = layout.file_number(component);
                let is_here = item.parts.iter().any(|part| (part.number, part.stripe) == (number, stripe));
                !is_here && !is_given(layout.components()[component].target(stripe))
            })
            .map(|(component, stripe)| {
                let target = layout.components()[component].target(stripe);
                format!("stripe {stripe} (target {} of node {})", target & 0xffff, target >> 16)
            })
            .collect();
        if !missing.is_empty() {
            item.note = format!("missing: {}", missing.join(", "));
            item.fate = Fate::Incomplete;
        }
    }

    fn name_by_mark(&self, item: &mut Item, mark: DataMark) {
        item.source = "mark";
        let mut path = mark.at.clone();
        while path.first() == Some(&b'/') {
            path.remove(0);
        }
        if !path.is_empty() && path.last() != Some(&b'/') {
            path.push(b'/');
        }
        path.extend_from_slice(&mark.key);
        item.path = path;
        let by_record = || {
            let values = self.names.remains.values.get(&item.ino)?;
            Some(values.iter().filter(|(name, _)| name.starts_with(b"user.")).cloned().collect())
        };
        item.xattrs = match mark.lacks_xattrs {
            true => by_record(),
            false => Some(mark.xattrs),
        };
        if mark.lacks_xattrs && item.xattrs.is_none() {
            item.note = "its extended attributes are lost".to_owned();
        }
        item.destinations.push(Destination { url: mark.url, key: mark.key });
        self.redirect(item);
    }

    fn name_by_record(&self, item: &mut Item) {
        item.source = self.names.known(item.ino).map_or("snapshot", |known| known.source);
        let values = self.names.remains.values.get(&item.ino);
        let user = |name: &[u8]| name.starts_with(b"user.");
        item.xattrs = Some(
            values.map_or(Vec::new(), |all| all.iter().filter(|(name, _)| user(name)).cloned().collect()),
        );
        let none: &[NameIn] = &[];
        let names = self.names.remains.names.get(&item.ino).map_or(none, |names| names);
        for name in names {
            let Some(place) = self.names.place(name) else { continue };
            if item.path.is_empty() {
                item.path.clone_from(&place.path);
            }
            match place.store.and_then(|(top, key)| Some((self.names.store(top)?, key))) {
                Some(((_, settings), key)) if is_written(settings, &key) => {
                    item.destinations.push(Destination { url: settings.url.clone().into_bytes(), key });
                }
                Some(_) if item.destinations.is_empty() => item.fate = Fate::Temporary,
                None if item.destinations.is_empty() => item.fate = Fate::NoStore,
                _ => {}
            }
        }
        if !item.destinations.is_empty() {
            item.fate = Fate::Dirty;
        }
        self.redirect(item);
    }

    /// With a store for everything, data go there under their paths in the pool.
    fn redirect(&self, item: &mut Item) {
        let Some(to) = &self.plan.to else { return };
        if item.fate == Fate::Temporary || item.path.is_empty() {
            return;
        }
        item.destinations = vec![Destination { url: to.clone().into_bytes(), key: item.path.clone() }];
        if item.fate == Fate::NoStore {
            item.fate = Fate::Dirty;
        }
    }

    /// Symbolic links and directories that a store does not have: only records know them.
    fn others(&mut self) {
        let remains = &self.names.remains;
        for (ino, names) in &remains.names {
            let Some(entry) = remains.inodes.get(ino) else { continue };
            let is_wanted = |name: &NameIn| remains.pending.contains(name);
            let kind = entry.attr.kind();
            if !matches!(kind, Kind::Symlink | Kind::Directory) || entry.attr.flags & FLAG_STORE != 0 {
                continue;
            }
            if names.iter().any(is_wanted) {
                let mut item = Item {
                    ino: *ino,
                    path: Vec::new(),
                    destinations: Vec::new(),
                    entry: Some(*entry),
                    parts: Vec::new(),
                    bytes: 0,
                    xattrs: None,
                    link_target: remains.value(*ino, b"").unwrap_or_default().to_vec(),
                    fate: Fate::Dirty,
                    source: "snapshot",
                    note: String::new(),
                };
                self.name_by_record(&mut item);
                if item.fate == Fate::Dirty && !item.destinations.is_empty() {
                    if kind == Kind::Symlink {
                        item.xattrs = None;
                    }
                    self.items.push(item);
                }
            }
        }
    }
}

/// True if a store is to have what is at a path of it.
fn is_written(settings: &StoreSettings, key: &[u8]) -> bool {
    !settings.read_only && !settings.policy_of(key).is_temporary()
}
