//! Directories whose entry and inode are on two nodes, step by step. Each request here is one step, on one shard; the door
//! that makes or removes such a directory takes them in this order (docs/decisions/0012):
//!
//! ```text
//! make     home: allocate          parent: enter                    home, if the name was taken: free
//! remove   home: condemn if empty  parent: leave, if it leads there home: free | pardon, as its entry stays
//! ```
//! What is left when a door dies between two steps: an empty directory that no entry leads to, or one that is condemned
//! and still has its entry; the next removal of that one completes it.

use forebay_types::limits::LINKS_MAX;
use forebay_types::{Attr, Code, Ino, Kind, Layout, Reply};

use crate::batch::{Answer, Batch, Context};
use crate::keys::{self, Key};
use crate::namespace::Entered;
use crate::record::{EntryRecord, Inode, INODE_BYTES_MAX, MARK_CONDEMNED};
use crate::space::{Class, Work};

impl Batch<'_> {
    /// True for an inode that this shard has or had.
    #[inline]
    pub(crate) fn is_ours(&self, ino: Ino) -> bool {
        ino.birth_node() == self.shard.node()
    }

    pub(crate) fn allocate_directory(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        mode: u32,
    ) -> Answer<usize> {
        // What has its entry here is made with it, in one step.
        if self.is_ours(parent) {
            return Err(Code::Invalid);
        }
        // Inode, kept reply, ledger.
        self.admit(Class::Growth, Work::writes(3))?;
        let next = self.state.ledger.next_counter;
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        let home = self.shard.node();
        let attr = Attr {
            ino: Ino::new(home, next),
            size: 0,
            rdev: 0,
            parent,
            mode: Kind::Directory.mode_bits() | mode,
            uid: c.caller.uid,
            gid: c.caller.gid,
            nlink: 2,
            flags: 0,
            home,
            width_log2: 0,
            atime: c.now,
            mtime: c.now,
            ctime: c.now,
            btime: c.now,
        };
        let inode = Inode { attr, layout: Layout::single(home, 0), cookie: 0, marks: 0 };
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(attr.ino), &buffer[..n])?;
        self.state.ledger.next_counter += 1;
        self.state.ledger.inodes += 1;
        self.write_ledger()?;
        self.state.directories.insert(inode);
        c.effects.inode(inode.entry());
        c.reply(Reply::Entry(inode.entry()))
    }

    pub(crate) fn enter_directory(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
    ) -> Answer<usize> {
        if self.is_ours(ino) {
            return Err(Code::Invalid);
        }
        let slot = self.directory(parent)?;
        // Entry, kept reply, ledger, a directory that is written out.
        if let Err(code) = self.admit(Class::Growth, Work::writes(4)) {
            return Err(self.find_entry(slot, name)?.map_or(code, |_| Code::Exists));
        }
        if self.state.directories.get(slot).attr.nlink >= LINKS_MAX {
            return Err(self.find_entry(slot, name)?.map_or(Code::TooManyLinks, |_| Code::Exists));
        }
        let record = EntryRecord { ino, kind: Kind::Directory, home: ino.birth_node(), width_log2: 0, name };
        if let Entered::Taken(_) = self.enter(slot, &record)? {
            return Err(Code::Exists);
        }
        self.state.ledger.entries += 1;
        c.effects.name(parent, name, Some((ino, Kind::Directory)));
        self.touch_directory(c, slot, 1, 1);
        c.reply(Reply::Done)
    }

    pub(crate) fn condemn_directory(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        condemned: bool,
    ) -> Answer<usize> {
        let slot = self.directory(ino)?;
        let inode = self.state.directories.get(slot);
        if condemned && inode.attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        if ino == Ino::ROOT {
            return Err(Code::Busy);
        }
        self.admit(Class::Removal, Work::writes(3))?;
        let (inode, first) = self.state.directories.change_whole(slot);
        inode.marks = inode.marks & !MARK_CONDEMNED | if condemned { MARK_CONDEMNED } else { 0 };
        self.owe_write(first);
        c.reply(Reply::Done)
    }

    pub(crate) fn leave_directory(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
    ) -> Answer<usize> {
        let slot = self.directory(parent)?;
        let found = self.find_entry(slot, name)?.filter(|found| found.ino == ino).ok_or(Code::NotFound)?;
        if self.is_ours(ino) || found.kind != Kind::Directory {
            return Err(Code::Invalid);
        }
        self.admit(Class::Removal, Work::writes(4))?;
        self.tx.delete(&keys::entry(parent, found.cookie))?;
        self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
        c.effects.name(parent, name, None);
        self.touch_directory(c, slot, -1, -1);
        c.reply(Reply::Done)
    }

    pub(crate) fn free_directory(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<usize> {
        let slot = match self.directory(ino) {
            Ok(slot) => slot,
            Err(Code::NotFound) => return c.reply(Reply::Done),
            Err(code) => return Err(code),
        };
        let inode = *self.state.directories.get(slot);
        // An entry of this shard leads to what has its parent here.
        if ino == Ino::ROOT || self.is_ours(inode.attr.parent) {
            return Err(Code::Invalid);
        }
        if inode.attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        self.admit(Class::Removal, Self::removal_work(&inode))?;
        self.remove_inode(c, &inode)?;
        self.state.directories.remove(ino);
        self.write_ledger()?;
        c.reply(Reply::Done)
    }

    pub(crate) fn name_of(&mut self, c: &mut Context<'_>, parent: Ino, ino: Ino) -> Answer<usize> {
        self.directory(parent)?;
        for item in self.tx.range(&keys::entry(parent, 0), &keys::entry(parent, u64::MAX))? {
            let (key, bytes) = item?;
            let Some(Key::Entry(..)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = EntryRecord::decode(bytes)?;
            if record.ino == ino {
                return c.reply(Reply::Bytes(record.name));
            }
        }
        Err(Code::NotFound)
    }
}
