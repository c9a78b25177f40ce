//! Names of one file in a backing store: they become names of one inode, also when they are imported at different times
//! (docs/decisions/0047).
//!
//! | record | key | holds |
//! |---|---|---|
//! | linked file | the directory with the store, and the file's number in it | the inode that was made of it, the file's file system, its version and the one before |
//!
//! A file of the store that has several names when it is imported gets a record. A further name joins the inode if the
//! store's file at it is the one of the record: the same number, file system and version. The pool may have written the
//! file meanwhile, and published another one under the names that it knew: then the further name is pending, and the
//! mover links it to the new file. The version before is kept because a listing may have looked at a name just before
//! the mover set the file's times.
//!
//! A name that the pool forgets (`Forget`), and that leads to one of several places of a file, leaves a record too: when
//! it is imported again, it joins the file again.
//!
//! A record says what the pool did to a file. As soon as the store is found to have another program's file at one of the
//! names, the record is removed: names that are imported later are files of their own. So is, with the last place of the
//! inode, a record that is of no more use. One whose inode does not exist is void.

use forebay_types::limits::{FOUND_SHOWN_MAX, LINKS_MAX};
use forebay_types::{
    Code, Ino, Kind, Placed, Reader, StoreObject, StoreVersion, TxId, Writer, FLAG_ATTACHED, FLAG_UNLISTED,
    STORE_VERSION_BYTES,
};

use crate::batch::{Answer, Batch, Context};
use crate::keys;
use crate::namespace::Entered;
use crate::record::{EntryRecord, Inode, RECORD_VERSION};

/// The file system of a file that the pool has made: any.
const ANY_FILE_SYSTEM: u64 = u64::MAX;
const LINKED_BYTES: usize = 1 + 16 + 2 * STORE_VERSION_BYTES;

/// A file of a store that had several names when it was imported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LinkedFile {
    /// The inode of its names.
    pub(crate) ino: Ino,
    file_system: u64,
    version: StoreVersion,
    before: StoreVersion,
}

impl LinkedFile {
    fn encode(&self, buffer: &mut [u8; LINKED_BYTES]) -> Answer<()> {
        let mut w = Writer::new(buffer);
        w.u8(RECORD_VERSION)?;
        w.u64(self.ino.0)?;
        w.u64(self.file_system)?;
        self.version.encode(&mut w)?;
        self.before.encode(&mut w)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Answer<LinkedFile> {
        let read = |r: &mut Reader<'_>| {
            if r.u8()? != RECORD_VERSION {
                return Err(Code::Corrupt);
            }
            let (ino, file_system) = (Ino(r.u64()?), r.u64()?);
            let (version, before) = (StoreVersion::decode(r)?, StoreVersion::decode(r)?);
            match r.rest().is_empty() {
                true => Ok(LinkedFile { ino, file_system, version, before }),
                false => Err(Code::Corrupt),
            }
        };
        read(&mut Reader::new(bytes)).map_err(|_| Code::Corrupt)
    }

    fn is_of(&self, object: &StoreObject<'_>) -> bool {
        let is_there = self.file_system == ANY_FILE_SYSTEM || self.file_system == object.file_system;
        is_there && [self.version, self.before].contains(&object.version)
    }
}

/// A file that a further name of the store leads to.
pub(crate) struct Joined {
    inode: Inode,
    /// What the store has at the name.
    version: StoreVersion,
    /// The generation of the data there; none if the pool has published others under the names that it knew.
    generation: Option<u64>,
}

impl Batch<'_> {
    /// True if any file of a store has a record.
    fn has_linked_files(&mut self) -> Answer<bool> {
        match self.state.has_linked_files {
            Some(has) => Ok(has),
            None => {
                let (first, last) = keys::all_linked_files();
                let has = self.tx.first_in(&first, &last)?.is_some();
                self.state.has_linked_files = Some(has);
                Ok(has)
            }
        }
    }

    fn linked_file(&mut self, root: Ino, number: u64) -> Answer<Option<LinkedFile>> {
        if number == 0 || !self.has_linked_files()? {
            return Ok(None);
        }
        self.tx.get(&keys::linked_file(root, number))?.map(LinkedFile::decode).transpose()
    }

    fn put_linked_file(&mut self, root: Ino, file: &LinkedFile) -> Answer<()> {
        let mut buffer = [0; LINKED_BYTES];
        file.encode(&mut buffer)?;
        self.state.has_linked_files = Some(true);
        self.tx.put(&keys::linked_file(root, file.version.ino), &buffer)
    }

    /// Notes that a file with several names was imported.
    pub(crate) fn note_linked_file(&mut self, parent: Ino, ino: Ino, object: &StoreObject<'_>) -> Answer<()> {
        if object.nlink < 2 || object.version.ino == 0 {
            return Ok(());
        }
        let Some(root) = self.store_of(parent)? else { return Ok(()) };
        let (version, file_system) = (object.version, object.file_system);
        self.put_linked_file(root, &LinkedFile { ino, file_system, version, before: version })
    }

    /// The pool forgets one of several names of a file, and will import it anew: it is to be a name of the file again.
    pub(crate) fn expect_name_again(&mut self, parent: Ino, placed: &Placed) -> Answer<()> {
        let Placed { ino, version, .. } = *placed;
        if placed.kind != Kind::File || !version.is_same_file(&version) {
            return Ok(());
        }
        let Some(root) = self.store_of(parent)? else { return Ok(()) };
        match self.linked_file(root, version.ino)? {
            Some(file) if file.ino == ino => Ok(()),
            _ => {
                let file_system = ANY_FILE_SYSTEM;
                self.put_linked_file(root, &LinkedFile { ino, file_system, version, before: version })
            }
        }
    }

    /// The inode to which a name of the store leads that is about to be imported, if the pool has it under another name.
    pub(crate) fn joined_by(&mut self, parent: Ino, object: &StoreObject<'_>) -> Answer<Option<Joined>> {
        if object.kind != Kind::File || object.version.ino == 0 || !self.has_linked_files()? {
            return Ok(None);
        }
        let Some(root) = self.store_of(parent)? else { return Ok(None) };
        let file = self.linked_file(root, object.version.ino)?.filter(|file| file.is_of(object));
        let Some(file) = file else { return Ok(None) };
        let inode = self.find_inode(file.ino)?.filter(|inode| {
            inode.attr.is_file() && inode.attr.flags & FLAG_ATTACHED != 0 && inode.attr.nlink < LINKS_MAX
        });
        let (Some(inode), Some(copy)) = (inode, self.copy_record(file.ino)?) else { return Ok(None) };
        let placed = self.placed(copy.parent, &copy.name)?;
        let generation = match placed {
            Some(placed) if placed.version == file.version => Some(copy.generation()),
            Some(placed) if placed.version.is_same_file(&file.version) => return Ok(None),
            _ => None,
        };
        Ok(Some(Joined { inode, version: file.version, generation }))
    }

    /// Creates the entry of a further name of a file. The file has had the name all along: its change time stays.
    pub(crate) fn join(
        &mut self,
        c: &mut Context<'_>,
        slot: usize,
        name: &[u8],
        joined: Joined,
    ) -> Answer<()> {
        let Joined { mut inode, version, generation } = joined;
        let above = self.state.directories.get(slot).attr;
        let (ino, kind) = (inode.attr.ino, Kind::File);
        let record = EntryRecord { ino, kind, home: inode.attr.home, width_log2: 0, link: TxId::NONE, name };
        let Entered::New(_) = self.enter(slot, &record)? else { return Ok(()) };
        inode.attr.nlink += 1;
        self.store_inode(&inode)?;
        self.state.ledger.entries += 1;
        self.put_place(above.ino, name, &Placed { ino, kind, version })?;
        self.put_further_place(ino, above.ino, name, generation)?;
        if generation.is_none() {
            self.note_place(c.now, above.ino, name)?;
        }
        if above.flags & FLAG_UNLISTED == 0 {
            c.effects.name(above.ino, name, Some((ino, kind)));
        } else if above.size < FOUND_SHOWN_MAX {
            c.effects.find_further(above.ino, name, (ino, kind));
        }
        c.effects.inode(inode.entry());
        let unchanged = Context { caller: c.caller, now: above.mtime, effects: c.effects };
        self.touch_directory(&mut { unchanged }, slot, 1, 0);
        Ok(())
    }

    /// What the store has of an inode at a place has changed from one version to another: `in_place` if it is the same
    /// file. Otherwise the pool has published its data there, if it has any; else another program has put a file there.
    pub(crate) fn follow_linked_file(
        &mut self,
        parent: Ino,
        inode: &Inode,
        (from, to): (StoreVersion, StoreVersion),
    ) -> Answer<()> {
        if from == to || !self.has_linked_files()? {
            return Ok(());
        }
        match from.is_same_file(&to) {
            true => {
                let Some(root) = self.store_of(parent)? else { return Ok(()) };
                match self.linked_file(root, from.ino)? {
                    Some(file) if file.ino == inode.attr.ino && file.version == from => {
                        self.put_linked_file(root, &LinkedFile { version: to, before: from, ..file })
                    }
                    _ => Ok(()),
                }
            }
            false if inode.attr.is_resident() => Ok(()),
            false => self.forget_linked_file(parent, inode.attr.ino, &from),
        }
    }

    /// Removes the record of a file of the store that led to an inode.
    pub(crate) fn forget_linked_file(&mut self, parent: Ino, ino: Ino, version: &StoreVersion) -> Answer<()> {
        if version.ino == 0 || !self.has_linked_files()? {
            return Ok(());
        }
        // Of a directory that is gone the store cannot be told: the record is void with its inode.
        let root = match self.root_of_place(parent)? {
            Some(root) => root,
            None => return Ok(()),
        };
        match self.linked_file(root, version.ino)? {
            Some(file) if file.ino == ino => self.tx.delete(&keys::linked_file(root, version.ino)).map(drop),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linked_file_is_read_as_it_was_written() {
        let version = |ino| StoreVersion { bytes: 5, ino, ..StoreVersion::default() };
        let file = LinkedFile { ino: Ino(7), file_system: 8, version: version(9), before: version(10) };
        let mut buffer = [0; LINKED_BYTES];
        file.encode(&mut buffer).unwrap();
        assert_eq!(LinkedFile::decode(&buffer), Ok(file));
        for short in 0..buffer.len() {
            assert_eq!(LinkedFile::decode(&buffer[..short]), Err(Code::Corrupt));
        }
        assert_eq!(LinkedFile::decode(&[buffer.as_slice(), &[0]].concat()), Err(Code::Corrupt));
    }
}
