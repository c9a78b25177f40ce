//! Imports the names that a store has into a directory of the pool, at a look-up of one or when all are listed.
//! Tests: `tests/backing_store`.

use forebay_types::limits::{FOUND_SHOWN_MAX, LINKS_MAX};
use forebay_types::{
    Attr, Code, Ino, Kind, Layout, Placed, Reader, Reply, StoreObject, StoreVersion, Timestamp, TxId,
    FLAGS_INHERITED, FLAG_ATTACHED, FLAG_RESIDENT, FLAG_UNLISTED,
};

use crate::batch::{Answer, Batch, Context};
use crate::copies::Copy;
use crate::keys;
use crate::namespace::Entered;
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode, INODE_BYTES_MAX};

/// What is known of the names of a directory besides its entries.
#[derive(Clone, Copy)]
struct Known {
    /// The store may have something in it, as far as the pool knows.
    placed: bool,
    /// Some of its places are pending.
    pending: bool,
}

/// What became of the objects of an import.
struct Imported {
    /// How many of them, from the first, are there now.
    count: u64,
    is_all: bool,
}

/// What an import adds to a directory.
#[derive(Default)]
struct Added {
    entries: i64,
    directories: i64,
}

impl Batch<'_> {
    pub(crate) fn import(&mut self, c: &mut Context<'_>, ino: Ino, objects: &[u8]) -> Answer<Reply<'static>> {
        self.import_some(c, ino, objects).map(|imported| Reply::Count(imported.count))
    }

    /// Imports the last objects of a listing that began at this epoch. With all of them the directory is listed.
    pub(crate) fn listed(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        epoch: u64,
        objects: &[u8],
    ) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        if self.state.directories.get(slot).attr.epoch() != epoch {
            return Err(Code::Stale);
        }
        let Imported { count, is_all } = match objects {
            [] => Imported { count: 0, is_all: true },
            objects => self.import_some(c, ino, objects)?,
        };
        if !is_all {
            return Ok(Reply::Count(count));
        }
        match self.change_flags(c, ino, 0, FLAG_UNLISTED) {
            // It has changed nothing. What was imported stays.
            Err(Code::NoSpace) if count > 0 => Ok(Reply::Count(count)),
            listed => listed,
        }
    }

    fn import_some(&mut self, c: &mut Context<'_>, ino: Ino, objects: &[u8]) -> Answer<Imported> {
        let slot = self.directory(ino)?;
        if self.state.directories.get(slot).attr.flags & FLAG_ATTACHED == 0 {
            return Err(Code::NoAttribute);
        }
        let (mut r, mut list) = (Reader::new(objects), Vec::new());
        while !r.rest().is_empty() {
            list.push(StoreObject::decode(&mut r)?);
        }
        // Asked once for the directory: without places or pending ones, no name need be looked for among them.
        let store_has = Known { placed: self.learn_places(ino)?, pending: self.has_pending_in(ino)? };
        let mut added = Added::default();
        let mut count = 0;
        let mut outcome = Ok(());
        for object in &list {
            outcome = self.import_one(c, (slot, ino), object, store_has, &mut added);
            if outcome.is_err() {
                break;
            }
            count += 1;
            self.count_writes()?;
        }
        if added.entries > 0 {
            // The directory has had these entries all along: its times stay.
            let now = self.state.directories.get(slot).attr.mtime;
            let unchanged = Context { caller: c.caller, now, effects: c.effects };
            self.touch_directory(&mut { unchanged }, slot, added.entries, added.directories);
        }
        match outcome {
            // What came before stays.
            Err(Code::NoSpace | Code::TooManyLinks) if count > 0 => {}
            outcome => outcome?,
        }
        Ok(Imported { count, is_all: count == list.len() as u64 })
    }

    /// Creates the entry of one object, unless the name exists. The directory itself changes later.
    fn import_one(
        &mut self,
        c: &mut Context<'_>,
        (slot, parent): (usize, Ino),
        object: &StoreObject<'_>,
        store_has: Known,
        added: &mut Added,
    ) -> Answer<()> {
        // Entry, inode, place, copy or further place, directory; pending place or linked file; the kept reply, ledger. A
        // link's target.
        self.admit(Class::Growth, Work { writes: 8, run: Self::pieces_of(object.target.len()) })?;
        if store_has.placed && self.placed(parent, object.name)?.is_some() {
            return Ok(()); // known: perhaps removed in the pool, and to be removed in the store
        }
        if store_has.pending && self.is_intended(parent, object.name)? {
            return Ok(()); // a mover has just put it there; the pool may have removed it meanwhile
        }
        if let Some(joined) = self.joined_by(parent, object)? {
            return self.join(c, slot, object.name, joined);
        }
        let above = self.state.directories.get(slot);
        let layout = above.layout;
        let inherited = above.attr.flags & FLAGS_INHERITED;
        let (home, kind) = (self.shard.node(), object.kind);
        let next = self.state.ledger.next_counter;
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        let ino = Ino::new(home, next);
        let record = EntryRecord { ino, kind, home, width_log2: 0, link: TxId::NONE, name: object.name };
        let is_directory = kind == Kind::Directory;
        let links = i64::from(above.attr.nlink) + added.directories;
        if is_directory && links >= i64::from(LINKS_MAX) && self.find_entry(slot, object.name)?.is_none() {
            return Err(Code::TooManyLinks);
        }
        let Entered::New(cookie) = self.enter(slot, &record)? else { return Ok(()) };
        let changed = object.version.mtime;
        let attr = Attr {
            ino,
            size: match kind {
                Kind::File => object.version.bytes,
                Kind::Symlink => object.target.len() as u64,
                _ => 0,
            },
            rdev: if matches!(kind, Kind::CharDevice | Kind::BlockDevice) { object.rdev } else { 0 },
            parent: if is_directory { parent } else { Ino(0) },
            mode: kind.mode_bits() | object.mode,
            uid: object.uid,
            gid: object.gid,
            nlink: if is_directory { 2 } else { 1 },
            flags: inherited
                | match kind {
                    Kind::Directory => FLAG_UNLISTED,
                    // A file's data come at its first use. Other kinds have none.
                    Kind::File => 0,
                    _ => FLAG_RESIDENT,
                },
            home,
            width_log2: 0,
            atime: object.atime,
            mtime: changed,
            ctime: changed,
            btime: changed,
        };
        let mut inode = Inode {
            attr,
            layout: if is_directory { layout } else { Layout::single(home, 0) },
            cookie: if is_directory { cookie } else { 0 },
            marks: 0,
        };
        if kind == Kind::Symlink {
            inode.mark_values();
        }
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(ino), &buffer[..n])?;
        if kind == Kind::Symlink {
            self.put_value(ino, b"", object.target)?;
        }
        // The time of a directory is for programs alone: its version has none, as its entries change it.
        let mtime_of_version = if is_directory { Timestamp::default() } else { object.version.mtime };
        let version = StoreVersion { mtime: mtime_of_version, ..object.version };
        self.put_place(parent, object.name, &Placed { ino, kind, version })?;
        self.put_copy(ino, &Copy::first(0, parent, object.name))?;
        if kind == Kind::File {
            self.note_linked_file(parent, ino, object)?;
        }
        let ledger = &mut self.state.ledger;
        ledger.next_counter += 1;
        ledger.inodes += 1;
        ledger.entries += 1;
        let above = &self.state.directories.get(slot).attr;
        if above.flags & FLAG_UNLISTED == 0 {
            // The board may show that there is no such name.
            c.effects.name(parent, object.name, Some((ino, kind)));
            c.effects.inode(inode.entry());
        } else if above.size < FOUND_SHOWN_MAX {
            c.effects.find(parent, object.name, inode.entry());
        }
        added.entries += 1;
        added.directories += i64::from(is_directory);
        Ok(())
    }
}
