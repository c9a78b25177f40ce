//! Rename: moving, replacing and exchanging entries, with every case of POSIX and of Linux's renameat2.
//!
//! Refusals are checked in the order in which Linux checks them, all before the first write:
//!
//! 1. the source must exist; with NOREPLACE the destination must not, with EXCHANGE it must;
//! 2. a directory cannot go into itself or below (`Invalid`), nor replace what it lies in (`NotEmpty`);
//! 3. two names of one inode: nothing to do;
//! 4. a directory replaces only an empty directory, anything else only what is no directory.
//!
//! Between shards, and where it takes another node to tell what lies above a directory, it is [`Code::CrossDevice`], on
//! which programs copy. A directory of another node can get another name in its parent, whose node that does not concern.

use forebay_types::limits::{LINKS_MAX, NAME_MAX};
use forebay_types::{Code, Ino, Kind, Layout, Reply, RENAME_EXCHANGE, RENAME_NOREPLACE};

use crate::batch::{Answer, Batch, Context};
use crate::keys;
use crate::namespace::{Entered, Found};
use crate::record::{EntryRecord, Inode, ENTRY_HEADER_BYTES};
use crate::space::{Class, Work};

/// One side of a rename: a directory in memory, and a name in it.
#[derive(Clone, Copy)]
struct Side<'n> {
    slot: usize,
    parent: Ino,
    name: &'n [u8],
}

impl Batch<'_> {
    pub(crate) fn rename(
        &mut self,
        c: &mut Context<'_>,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
    ) -> Answer<usize> {
        let from = Side { slot: self.directory(from.0)?, parent: from.0, name: from.1 };
        if !self.is_ours(to.0) {
            return Err(Code::CrossDevice);
        }
        let to = Side { slot: self.directory(to.0)?, parent: to.0, name: to.1 };
        let source = self.find_entry(from.slot, from.name)?.ok_or(Code::NotFound)?;
        let target = self.find_entry(to.slot, to.name)?;
        match (flags, target) {
            (RENAME_NOREPLACE, Some(_)) => return Err(Code::Exists),
            (RENAME_EXCHANGE, None) => return Err(Code::NotFound),
            (0 | RENAME_NOREPLACE | RENAME_EXCHANGE, _) => {}
            _ => return Err(Code::Invalid),
        }
        // A directory is not above the one that it lies in.
        let moves = from.slot != to.slot;
        let ours = |found: &Found| self.is_ours(found.ino);
        if flags != RENAME_EXCHANGE && source.kind != Kind::Directory && target.is_some_and(|t| !ours(&t)) {
            return Err(Code::IsDirectory);
        }
        if target.is_some_and(|target| !ours(&target) && target.ino != source.ino) || moves && !ours(&source)
        {
            return Err(Code::CrossDevice);
        }
        if moves && source.kind == Kind::Directory && self.is_above(source.ino, to.parent)? {
            return Err(Code::Invalid);
        }
        if let Some(target) = target {
            if moves && target.kind == Kind::Directory && self.is_above(target.ino, from.parent)? {
                return Err(if flags == RENAME_EXCHANGE { Code::Invalid } else { Code::NotEmpty });
            }
            if target.ino == source.ino {
                return nothing_replaced(c, source.kind);
            }
            if flags == RENAME_EXCHANGE {
                if !self.is_ours(source.ino) {
                    return Err(Code::CrossDevice);
                }
                return self.exchange(c, from, source, to, target);
            }
        }
        self.move_over(c, from, source, to, target)
    }

    fn move_over(
        &mut self,
        c: &mut Context<'_>,
        from: Side<'_>,
        source: Found,
        to: Side<'_>,
        target: Option<Found>,
    ) -> Answer<usize> {
        let moves_directory = source.kind == Kind::Directory;
        let same_parent = from.slot == to.slot;
        let victim = match target {
            Some(target) => Some((target, self.replaceable(moves_directory, target)?)),
            None => None,
        };
        let inode = match self.is_ours(source.ino) {
            true => Some(self.entered_inode(source.ino)?),
            false => None,
        };
        if moves_directory && !same_parent && victim.is_none() {
            self.check_links(to.slot)?;
        }
        let run = victim.as_ref().map_or(0, |(_, victim)| Self::removal_work(victim).run);
        // Two entries, two inodes, an orphan, the kept reply.
        self.admit(Class::Change, Work { writes: 6, run })?;
        let cookie = match target {
            Some(target) => {
                self.put_entry(to.parent, target.cookie, &source.record(to.name))?;
                target.cookie
            }
            None => match self.enter(to.slot, &source.record(to.name))? {
                Entered::New(cookie) => cookie,
                Entered::Taken(_) => return Err(Code::Corrupt),
            },
        };
        self.tx.delete(&keys::entry(from.parent, source.cookie))?;
        c.effects.name(from.parent, from.name, None);
        c.effects.name(to.parent, to.name, Some((source.ino, source.kind)));
        if let Some(inode) = inode {
            self.move_inode(c, inode, to.parent, cookie)?;
        }
        let mut last = false;
        let victim = match victim {
            Some((target, mut victim)) => {
                self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
                last = if target.kind == Kind::Directory {
                    self.remove_inode(c, &victim)?;
                    self.state.directories.remove(target.ino);
                    true
                } else {
                    self.drop_link(c, &mut victim)?
                };
                Some((target, victim))
            }
            None => None,
        };
        let replaced = victim.is_some() as i64;
        let directory_replaced = (replaced != 0 && moves_directory) as i64;
        if same_parent {
            self.touch_directory(c, from.slot, -replaced, -directory_replaced);
        } else {
            let moved = moves_directory as i64;
            self.touch_directory(c, from.slot, -1, -moved);
            self.touch_directory(c, to.slot, 1 - replaced, moved - directory_replaced);
        }
        match victim {
            Some((target, inode)) => {
                c.reply(Reply::Removed { ino: target.ino, last, kind: target.kind, layout: inode.layout })
            }
            None => nothing_replaced(c, source.kind),
        }
    }

    fn exchange(
        &mut self,
        c: &mut Context<'_>,
        from: Side<'_>,
        source: Found,
        to: Side<'_>,
        target: Found,
    ) -> Answer<usize> {
        // Directories that come to `to` less those that leave it.
        let links = (source.kind == Kind::Directory) as i64 - (target.kind == Kind::Directory) as i64;
        let same_parent = from.slot == to.slot;
        if links != 0 && !same_parent {
            self.check_links(if links > 0 { to.slot } else { from.slot })?;
        }
        let (a, b) = (self.entered_inode(source.ino)?, self.entered_inode(target.ino)?);
        // Two entries, two inodes, the kept reply.
        self.admit(Class::Change, Work::writes(5))?;
        self.put_entry(from.parent, source.cookie, &target.record(from.name))?;
        self.put_entry(to.parent, target.cookie, &source.record(to.name))?;
        c.effects.name(from.parent, from.name, Some((target.ino, target.kind)));
        c.effects.name(to.parent, to.name, Some((source.ino, source.kind)));
        self.move_inode(c, a, to.parent, target.cookie)?;
        self.move_inode(c, b, from.parent, source.cookie)?;
        if same_parent {
            self.touch_directory(c, from.slot, 0, 0);
        } else {
            self.touch_directory(c, from.slot, 0, -links);
            self.touch_directory(c, to.slot, 0, links);
        }
        nothing_replaced(c, source.kind)
    }

    /// The inode that a rename replaces, if it may be replaced.
    fn replaceable(&self, moves_directory: bool, target: Found) -> Answer<Inode> {
        match (moves_directory, target.kind == Kind::Directory) {
            (true, false) => return Err(Code::NotDirectory),
            (false, true) => return Err(Code::IsDirectory),
            _ => {}
        }
        let victim = self.entered_inode(target.ino)?;
        if moves_directory && victim.attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        Ok(victim)
    }

    fn check_links(&self, slot: usize) -> Answer<()> {
        if self.state.directories.get(slot).attr.nlink >= LINKS_MAX {
            return Err(Code::TooManyLinks);
        }
        Ok(())
    }

    fn put_entry(&mut self, parent: Ino, cookie: u64, record: &EntryRecord<'_>) -> Answer<()> {
        let mut buffer = [0; ENTRY_HEADER_BYTES + NAME_MAX];
        let n = record.encode(&mut buffer)?;
        self.tx.put(&keys::entry(parent, cookie), &buffer[..n])
    }

    /// The inode's entry is in another place now.
    fn move_inode(&mut self, c: &mut Context<'_>, mut inode: Inode, parent: Ino, cookie: u64) -> Answer<()> {
        inode.attr.ctime = c.now;
        if inode.attr.is_directory() {
            inode.attr.parent = parent;
            inode.cookie = cookie;
        }
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(())
    }
}

/// The reply of a rename that replaced nothing.
fn nothing_replaced(c: &mut Context<'_>, kind: Kind) -> Answer<usize> {
    let layout = Layout::single(forebay_types::NodeId::FIRST, 0);
    c.reply(Reply::Removed { ino: Ino(0), last: false, kind, layout })
}
