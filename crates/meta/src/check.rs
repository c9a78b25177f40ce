//! Checking a shard: one walk over all records, then comparisons between them.
//!
//! Nothing is repaired here. Every problem becomes a line of text that names the inode or entry. The check decodes as
//! carefully as the operations do, so that it can be run on a damaged shard.

use std::collections::{BTreeMap, HashMap, HashSet};

use forebay_types::limits::{WIDTH_MAX, XATTR_OVERHEAD, XATTR_TOTAL_MAX};
use forebay_types::{
    cookie_hash, part_of_hash, Code, Cookie, Entry, Error, Ino, Kind, NodeId, Parts, Reader, Result, TxId,
    DISCRIMINATOR_BITS, FLAG_STORE,
};

use crate::check_report::CheckReport;
use crate::check_stores::{shown, InStores};
use crate::foreign_links::decode_dated;
use crate::holds::PreparedRecord;
use crate::keys::{self, Key};
use crate::lmdb_txn::{code_of, walk};
use crate::record::{
    decode_format, decode_orphan, EntryRecord, Inode, Ledger, Pending, MARK_COLLISIONS, MARK_VALUES,
};
use crate::shard::Shard;
use crate::volumes::CheckedVolumes;
use crate::wide::{decode_place, width_log2};

/// An inode according to its entries.
#[derive(Clone, Copy)]
struct Led {
    links: u32,
    kind: Kind,
    /// The position of the last entry seen; a directory has only one.
    parent: Ino,
    cookie: Cookie,
}

/// A directory according to its entries.
#[derive(Clone, Copy, Default)]
struct Content {
    entries: u64,
    directories: u32,
    discriminated: bool,
    /// The hashes of the first and the last name.
    hashes: Option<(u64, u64)>,
}

/// An inode according to its values.
#[derive(Clone, Copy, Default)]
struct Values {
    target_bytes: Option<u64>,
    /// What the extended attributes count towards their bound.
    xattr_bytes: usize,
    /// The parts in a directory's value of the empty name.
    parts: Option<Parts>,
}

/// What a part is a part of.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PartOf {
    directory: Ino,
    /// The part's index, and the number of parts.
    place: (usize, usize),
}

#[derive(Default)]
struct Check {
    report: CheckReport,
    ledger: Option<Ledger>,
    pending: HashMap<u64, Pending>,
    led: HashMap<u64, Led>,
    contents: HashMap<u64, Content>,
    values: HashMap<u64, Values>,
    orphans: HashSet<u64>,
    /// Links from entries on other nodes, by inode.
    links: HashMap<u64, u32>,
    parents: HashMap<u64, Ino>,
    volumes: CheckedVolumes,
    /// What backing stores have.
    in_stores: InStores,
    /// Directories with a store.
    stores: u64,
    /// Parts of wide directories that are or should be on this node, by number: what the list of a directory here says,
    /// and what the part's own record says.
    parts: BTreeMap<u64, (Option<PartOf>, Option<PartOf>)>,
    /// The last value's inode and name, and the piece that must follow.
    value: (u64, Vec<u8>, u32),
    /// The directory and hash that the walk has reached, and the names there, to find duplicates.
    names: (u64, u64, Vec<Vec<u8>>),
    counter: u64,
}

impl Shard {
    /// Checks the whole shard. Passes attributes and layouts of all inodes that have something on a target to
    /// `each_file`, so that the caller can compare them with the backing files.
    ///
    /// # Errors
    /// If the shard cannot be read at all, or a batch is open ([`Code::Busy`]).
    pub fn check(&self, each_file: &mut dyn FnMut(&Entry)) -> Result<CheckReport> {
        let _state = self.borrow("run a check")?;
        let broken = |code: Code| {
            Error::new(code, format!("cannot walk the shard {}", self.dir().display()))
                .cure("the pool is damaged: copy the data out of the backing files, then create a new pool")
        };
        let txn = self.env.read_txn().map_err(|e| broken(code_of(&e)))?;
        let mut check = Check::default();
        // Values first, though their keys are last: an inode is compared with its values, its entries and its pending
        // attributes.
        let (first, last) = keys::all_values();
        for item in walk(self.tree, &txn, &first, &last).map_err(broken)? {
            let (key, bytes) = item.map_err(broken)?;
            if let Some(Key::Value(ino, name, piece)) = keys::decode(key) {
                check.value(ino, name, piece, bytes);
            }
        }
        for item in walk(self.tree, &txn, &[0], &[0xff; 16]).map_err(broken)? {
            let (key, bytes) = item.map_err(broken)?;
            check.record(self, key, bytes, each_file);
        }
        check.conclude(self.node());
        Ok(check.report)
    }
}

impl Check {
    fn record(&mut self, shard: &Shard, key: &[u8], bytes: &[u8], each_file: &mut dyn FnMut(&Entry)) {
        match keys::decode(key) {
            Some(Key::Format) => {
                if decode_format(bytes).is_err() {
                    self.report.problem(|| "the format record is damaged".into());
                }
            }
            Some(Key::Ledger) => match Ledger::decode(bytes) {
                Ok((ledger, pending)) => {
                    self.ledger = Some(ledger);
                    for p in pending {
                        if self.pending.insert(p.ino.0, p).is_some() {
                            self.report.problem(|| format!("directory {} is pending twice", p.ino));
                        }
                    }
                }
                Err(_) => self.report.problem(|| "the ledger is damaged".into()),
            },
            Some(Key::Session(_)) => {}
            Some(Key::Reply(session, slot)) => {
                if bytes.len() < 8 {
                    self.report.problem(|| format!("the reply kept for {session:x}/{slot} is damaged"));
                }
            }
            Some(Key::Orphan(ino)) => {
                self.report.orphans += 1;
                self.counter_seen(shard, ino);
                self.orphans.insert(ino.0);
                if decode_orphan(bytes).is_err() {
                    self.report.problem(|| format!("orphan {ino}: its record is damaged"));
                }
            }
            Some(Key::Value(..)) => {}
            Some(Key::Link(ino, _)) => {
                self.report.links += 1;
                *self.links.entry(ino.0).or_default() += 1;
            }
            Some(Key::Prepared(tx, index)) => match PreparedRecord::decode(bytes) {
                Ok(record) => {
                    self.report.prepared += 1;
                    self.dated(record.seconds);
                }
                Err(_) => self.report.problem(|| format!("part {index} of transaction {tx} is damaged")),
            },
            Some(Key::Decision(..) | Key::Owed(..)) => match decode_dated(bytes) {
                Ok((_, seconds)) => {
                    self.report.deliveries += 1;
                    self.dated(seconds);
                }
                Err(_) => self.report.problem(|| format!("the record under {key:02x?} is damaged")),
            },
            Some(Key::Volume(name)) => {
                if let Some(volume) = self.volumes.record(&mut self.report, shard.node(), name, bytes) {
                    self.counter_seen(shard, volume.ino);
                }
            }
            Some(
                Key::Place(..) | Key::Copy(_) | Key::Pending(..) | Key::Further(..) | Key::LinkedFile(..),
            ) => self.in_stores.record(&mut self.report, key, bytes),
            Some(Key::Entry(parent, cookie)) => self.entry(shard, parent, cookie, bytes),
            Some(Key::Inode(ino)) => self.inode(shard, ino, bytes, each_file),
            None => self.report.problem(|| format!("a record under the unknown key {key:02x?}")),
        }
    }

    fn dated(&mut self, seconds: u64) {
        let oldest = &mut self.report.oldest_seconds;
        *oldest = if *oldest == 0 { seconds } else { seconds.min(*oldest) };
    }

    fn counter_seen(&mut self, shard: &Shard, ino: Ino) {
        if ino.birth_node() == shard.node() {
            self.counter = self.counter.max(ino.counter() & Ino::MAX_COUNTER);
        }
    }

    fn value(&mut self, ino: Ino, name: &[u8], piece: u16, bytes: &[u8]) {
        let continues = self.value.0 == ino.0 && self.value.1 == name;
        let expected = if continues { self.value.2 } else { 0 };
        if piece as u32 != expected {
            self.report.problem(|| format!("inode {ino}: a piece of value \"{}\" is missing", shown(name)));
        }
        if !continues {
            self.value.0 = ino.0;
            self.value.1.clear();
            self.value.1.extend_from_slice(name);
        }
        self.value.2 = piece as u32 + 1;
        let values = self.values.entry(ino.0).or_default();
        if name.is_empty() {
            values.target_bytes = Some(values.target_bytes.unwrap_or(0) + bytes.len() as u64);
            values.parts = Parts::decode(&mut Reader::new(bytes)).ok();
        } else {
            values.xattr_bytes += bytes.len() + if continues { 0 } else { name.len() + XATTR_OVERHEAD };
        }
    }

    fn entry(&mut self, shard: &Shard, parent: Ino, cookie: Cookie, bytes: &[u8]) {
        self.report.entries += 1;
        let Ok(record) = EntryRecord::decode(bytes) else {
            return self.report.problem(|| format!("directory {parent}: the entry at {cookie:x} is damaged"));
        };
        let (ino, name) = (record.ino, record.name);
        let at = || format!("directory {parent}: entry \"{}\"", shown(name));
        if matches!(name, b"." | b"..") || name.iter().any(|&b| b == b'/' || b == 0) {
            self.report.problem(|| format!("{} has an invalid name", at()));
        }
        if cookie_hash(cookie) != (shard.hash)(name) {
            self.report.problem(|| format!("{} has a cookie that does not match the hash of its name", at()));
        }
        if (self.names.0, self.names.1) != (parent.0, cookie_hash(cookie)) {
            self.names = (parent.0, cookie_hash(cookie), Vec::new());
        }
        if self.names.2.iter().any(|n| n == name) {
            self.report.problem(|| format!("{} exists twice", at()));
        }
        self.names.2.push(name.to_vec());
        let content = self.contents.entry(parent.0).or_default();
        content.entries += 1;
        content.directories += (record.kind == Kind::Directory) as u32;
        let hash = cookie_hash(cookie);
        content.hashes = Some((content.hashes.map_or(hash, |(first, _)| first), hash));
        content.discriminated |= cookie & ((1 << DISCRIMINATOR_BITS) - 1) != 0;
        self.in_stores.entry(&mut self.report, parent, name, ino);
        let foreign = ino.birth_node() != shard.node() && record.kind != Kind::Directory;
        if (record.link != TxId::NONE) != foreign {
            self.report.problem(|| {
                let has = if foreign { "no link" } else { "a link" };
                format!("{} leads to inode {ino}, but has {has}", at())
            });
        }
        if foreign {
            return; // its node's check looks for that inode and the link
        }
        let led = self.led.entry(ino.0).or_insert(Led { links: 0, kind: record.kind, parent, cookie });
        led.links += 1;
        if led.kind != record.kind {
            self.report.problem(|| format!("{} disagrees with another entry on its inode's kind", at()));
        } else if led.kind == Kind::Directory && led.links > 1 {
            self.report.problem(|| format!("{} is a second link to directory {ino}", at()));
        }
    }

    fn inode(&mut self, shard: &Shard, ino: Ino, bytes: &[u8], each_file: &mut dyn FnMut(&Entry)) {
        self.report.inodes += 1;
        if self.volumes.has(ino) {
            self.report.problem(|| format!("inode {ino} has the number of a volume"));
        }
        self.counter_seen(shard, ino);
        let led = self.led.remove(&ino.0);
        let values = self.values.remove(&ino.0).unwrap_or_default();
        let content = self.contents.remove(&ino.0);
        let pending = self.pending.remove(&ino.0);
        let Ok(mut inode) = Inode::decode(ino, bytes) else {
            return self.report.problem(|| format!("inode {ino}: its record is damaged"));
        };
        if let Some(pending) = pending {
            pending.apply(&mut inode.attr);
            if !inode.attr.is_directory() {
                self.report
                    .problem(|| format!("inode {ino}: is pending in the ledger, but is not a directory"));
            }
        }
        if self.orphans.contains(&ino.0) {
            self.report.problem(|| format!("inode {ino}: is listed as an orphan, but still exists"));
        }
        let attr = &inode.attr;
        match attr.kind() {
            Kind::Directory => {
                self.report.directories += 1;
                self.parents.insert(ino.0, attr.parent);
                self.wide(shard, &inode, values.parts, content.unwrap_or_default());
                self.directory(shard, &inode, led, content.unwrap_or_default());
            }
            kind => {
                if content.is_some() {
                    self.report.problem(|| format!("inode {ino}: has entries, but is not a directory"));
                }
                let elsewhere = self.links.remove(&ino.0).unwrap_or(0);
                let here = led.map_or(0, |led| led.links);
                match led {
                    None if elsewhere == 0 => {
                        self.report.problem(|| format!("inode {ino}: no entry leads to it"));
                    }
                    _ if here + elsewhere != attr.nlink => self.report.problem(|| {
                        let nlink = attr.nlink;
                        format!(
                            "inode {ino}: has {nlink} links, but {here} entries here and {elsewhere} elsewhere"
                        )
                    }),
                    None => {}
                    Some(led) if led.kind != kind => self
                        .report
                        .problem(|| format!("inode {ino}: its entry says that it is a {:?}", led.kind)),
                    Some(_) => {}
                }
            }
        }
        if attr.is_symlink() && values.target_bytes != Some(attr.size) {
            self.report.problem(|| format!("symlink {ino}: its target is not {} bytes long", attr.size));
        }
        let is_wide = attr.is_directory() && attr.width_log2 != 0;
        if !attr.is_symlink() && !is_wide && values.target_bytes.is_some() {
            self.report.problem(|| format!("inode {ino}: has a target, but is not a symlink"));
        }
        if values.xattr_bytes > XATTR_TOTAL_MAX {
            self.report.problem(|| format!("inode {ino}: too many extended attributes"));
        }
        let has_values = values.target_bytes.is_some() || values.xattr_bytes > 0;
        if has_values && inode.marks & MARK_VALUES == 0 {
            self.report.problem(|| format!("inode {ino}: has values, but lacks the mark for them"));
        }
        self.report.files += u64::from(attr.is_file());
        self.stores += u64::from(attr.flags & FLAG_STORE != 0);
        self.in_stores.inode(&mut self.report, attr);
        if attr.kind().has_backing() {
            each_file(&inode.entry());
        }
    }

    /// Compares wide directories and their parts.
    fn wide(&mut self, shard: &Shard, inode: &Inode, listed: Option<Parts>, content: Content) {
        let (attr, ino) = (&inode.attr, inode.attr.ino);
        if attr.width_log2 != 0 {
            let parts = listed.filter(|parts| parts.of == ino);
            if parts.is_none() {
                self.report.problem(|| format!("directory {ino}: is wide, but has no list of its parts"));
            }
            let all = parts.as_ref().map_or(&[][..], |parts| parts.as_slice());
            if !all.is_empty() && width_log2(all.len()) != attr.width_log2 {
                let (listed, width) = (all.len(), attr.width_log2);
                self.report.problem(|| {
                    format!("directory {ino}: lists {listed} parts, but its width is 2^{width}, rounded up")
                });
            }
            for (index, part) in all.iter().enumerate().filter(|(_, part)| part.birth_node() == shard.node())
            {
                let listed = PartOf { directory: ino, place: (index, all.len()) };
                self.parts.entry(part.0).or_default().0 = Some(listed);
            }
            if content.entries > 0 {
                self.report.problem(|| format!("directory {ino}: is wide, but has entries of its own"));
            }
        }
        if !ino.is_part() {
            return;
        }
        let (index, width) = decode_place(inode.cookie);
        let own = PartOf { directory: attr.parent, place: (index, width) };
        self.parts.entry(ino.0).or_default().1 = Some(own);
        let falls_here = |hash| part_of_hash(hash, width) == index;
        if !(2..=WIDTH_MAX).contains(&width) {
            self.report.problem(|| {
                format!("part {ino} of directory {}: its index or number of parts is damaged", attr.parent)
            });
        } else if !content.hashes.is_none_or(|(first, last)| falls_here(first) && falls_here(last)) {
            self.report.problem(|| {
                format!("part {ino} of directory {}: has names that belong to other parts", attr.parent)
            });
        }
    }

    fn directory(&mut self, shard: &Shard, inode: &Inode, led: Option<Led>, content: Content) {
        let (attr, ino) = (&inode.attr, inode.attr.ino);
        if attr.size != content.entries {
            self.report
                .problem(|| format!("directory {ino}: says {} entries, has {}", attr.size, content.entries));
        }
        if attr.nlink != 2 + content.directories {
            self.report.problem(|| {
                format!("directory {ino}: has {} links, and {} directories", attr.nlink, content.directories)
            });
        }
        if content.discriminated && inode.marks & MARK_COLLISIONS == 0 {
            self.report.problem(|| {
                format!("directory {ino}: has names with equal hashes, but lacks the mark for it")
            });
        }
        match led {
            None if ino == Ino::ROOT && shard.node() == NodeId::FIRST => {
                if attr.parent != ino {
                    self.report.problem(|| "the root directory has a parent".into());
                }
            }
            // A part has no entry; its directory lists it.
            None if ino.is_part() => {}
            // Its entry is on another node, whose check covers it.
            None if attr.parent.birth_node() != shard.node() => {}
            None => self.report.problem(|| format!("directory {ino}: no entry leads to it")),
            Some(_) if ino == Ino::ROOT => {
                self.report.problem(|| "an entry leads to the root directory".into());
            }
            Some(led) => {
                if led.kind != Kind::Directory {
                    self.report
                        .problem(|| format!("directory {ino}: its entry says that it is a {:?}", led.kind));
                }
                if (led.parent, led.cookie) != (attr.parent, inode.cookie) {
                    self.report.problem(|| {
                        format!(
                            "directory {ino}: records {} as its parent, but its entry is in {}",
                            attr.parent, led.parent
                        )
                    });
                }
            }
        }
    }

    /// Checks that need all records.
    fn conclude(&mut self, node: NodeId) {
        let report = &mut self.report;
        for (ino, led) in &self.led {
            if Ino(*ino).birth_node() != node && led.kind == Kind::Directory {
                continue; // another node has it
            }
            report.problem(|| {
                format!("directory {}: an entry leads to inode {ino:016x}, which does not exist", led.parent)
            });
        }
        for ino in self.links.keys() {
            report.problem(|| {
                format!("there are links to inode {ino:016x}, which does not exist, or a directory")
            });
        }
        for ino in self.contents.keys() {
            report.problem(|| format!("there are entries in directory {ino:016x}, which does not exist"));
        }
        for (part, (listed, own)) in &self.parts {
            let (part, here) = (Ino(*part), |of: Ino| of.birth_node() == node);
            match (listed, own) {
                (Some(listed), Some(own)) if listed == own => {}
                (Some(listed), Some(own)) if listed.directory == own.directory => {
                    let directory = own.directory;
                    report.problem(|| {
                        format!(
                            "part {part} of directory {directory}: has another place in the directory's list"
                        )
                    });
                }
                (Some(PartOf { directory, .. }), _) => {
                    report.problem(|| format!("directory {directory}: its part {part} does not exist"));
                }
                // Whether a directory of another node lists it is a matter of the check over several nodes.
                (None, Some(PartOf { directory, .. })) if here(*directory) => {
                    report.problem(|| format!("part {part}: directory {directory} does not list it"));
                }
                (None, _) => {}
            }
        }
        for ino in self.values.keys() {
            report.problem(|| format!("there are values of inode {ino:016x}, which does not exist"));
        }
        for ino in self.pending.keys() {
            report.problem(|| format!("directory {ino:016x} is pending in the ledger, but does not exist"));
        }
        if node == NodeId::FIRST && !self.parents.contains_key(&Ino::ROOT.0) {
            report.problem(|| "there is no root directory".into());
        }
        match &self.ledger {
            None => report.problem(|| "there is no ledger".into()),
            Some(ledger) => {
                for (what, said, counted) in [
                    ("inodes", ledger.inodes, report.inodes),
                    ("entries", ledger.entries, report.entries),
                    ("orphans", ledger.orphans, report.orphans),
                ] {
                    if said != counted {
                        report.problem(|| format!("the ledger counts {said} {what}, there are {counted}"));
                    }
                }
                if ledger.stores != self.stores {
                    let (said, counted) = (ledger.stores, self.stores);
                    report
                        .problem(|| format!("the ledger counts {said} backing stores, there are {counted}"));
                }
                if ledger.next_counter <= self.counter {
                    report.problem(|| {
                        format!(
                            "inode numbers up to {} exist, the next would be {}",
                            self.counter, ledger.next_counter
                        )
                    });
                }
            }
        }
        self.in_stores.conclude(report);
        self.find_loops();
    }

    /// Checks that every directory is below the root.
    fn find_loops(&mut self) {
        let mut done = HashSet::from([Ino::ROOT.0]);
        let mut path = HashSet::new();
        for &start in self.parents.keys() {
            path.clear();
            let mut at = start;
            while !done.contains(&at) {
                if !path.insert(at) {
                    self.report.problem(|| format!("directory {at:016x}: lies in itself"));
                    break;
                }
                match self.parents.get(&at) {
                    Some(parent) => at = parent.0,
                    // Reported already, as an entry or a directory without an inode.
                    None => break,
                }
            }
            // Reported once: directories below it are not reported again.
            done.extend(path.drain());
        }
    }
}
