//! Rename: moving, replacing and exchanging entries, with every case of POSIX and of Linux's renameat2.
//!
//! Refusals are checked in the order in which Linux checks them, all before the first write:
//!
//! 1. the source must exist; with NOREPLACE the destination must not, with EXCHANGE it must;
//! 2. a directory cannot be moved into itself or below (`Invalid`), nor replace one of its ancestors (`NotEmpty`);
//! 3. two names of one inode: nothing to do;
//! 4. a directory replaces only an empty directory, anything else only what is no directory.
//!
//! Renames that take several nodes are not executed here (`coordinator.rs`). A file's rename to another node is planned
//! before it gets here. A directory's rename is answered [`Reply::Elsewhere`] if other nodes must check its ancestors,
//! or what it replaces is on another node or wide. An entry that leads to another node's inode can be renamed here, for
//! a file also into another directory. An exchange of two nodes' entries or inodes fails with [`Code::CrossDevice`], on
//! which programs copy.

use forebay_types::limits::{LINKS_MAX, NAME_MAX};
use forebay_types::{Code, Ino, Kind, Layout, Reply, RENAME_EXCHANGE, RENAME_NOREPLACE};

use crate::batch::{Answer, Batch, Context};
use crate::foreign_links::Notification;
use crate::keys;
use crate::namespace::{Entered, Found};
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode, ENTRY_HEADER_BYTES};

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
    ) -> Answer<Reply<'static>> {
        let from = Side { slot: self.entries_for(from.0, from.1)?, parent: from.0, name: from.1 };
        if !self.is_ours(to.0) {
            let source = self.find_entry(from.slot, from.name)?.ok_or(Code::NotFound)?;
            if source.kind != Kind::Directory || flags == RENAME_EXCHANGE {
                return Err(Code::CrossDevice); // in a pool of several nodes a file's rename is planned
            }
            return Ok(Reply::Elsewhere { ino: source.ino, kind: source.kind });
        }
        let to = Side { slot: self.entries_for(to.0, to.1)?, parent: to.0, name: to.1 };
        self.check_same_store(from.parent, to.parent)?;
        let source = self.find_entry(from.slot, from.name)?.ok_or(Code::NotFound)?;
        let target = self.find_entry(to.slot, to.name)?;
        for side in [Some(source), target].into_iter().flatten() {
            if side.kind == Kind::Directory && self.is_with_store(side.ino)? {
                return Err(Code::Busy); // like a mount point
            }
        }
        match (flags, target) {
            (RENAME_NOREPLACE, Some(_)) => return Err(Code::Exists),
            (RENAME_EXCHANGE, None) => return Err(Code::NotFound),
            (0 | RENAME_NOREPLACE | RENAME_EXCHANGE, _) => {}
            _ => return Err(Code::Invalid),
        }
        let moves = from.slot != to.slot;
        let here = self.shard.node();
        let ours = |ino: Ino| ino.birth_node() == here;
        if flags == RENAME_EXCHANGE
            && (!ours(source.ino) || target.is_some_and(|t| !ours(t.ino)))
            && target.is_none_or(|target| target.ino != source.ino)
        {
            return Err(Code::CrossDevice);
        }
        if source.kind == Kind::Directory && flags != RENAME_EXCHANGE {
            let replaces_elsewhere =
                target.is_some_and(|t| t.kind == Kind::Directory && !ours(t.ino) && t.ino != source.ino);
            let replaces_wide = match target {
                Some(t) if t.kind == Kind::Directory && t.ino != source.ino => {
                    self.parts_if_wide(t.ino)?.is_some()
                }
                _ => false,
            };
            let replaces_elsewhere = replaces_elsewhere || replaces_wide;
            if replaces_elsewhere || moves && !ours(source.ino) {
                return Ok(Reply::Elsewhere { ino: source.ino, kind: source.kind });
            }
        }
        if moves && source.kind == Kind::Directory {
            match self.is_above(source.ino, to.parent) {
                Ok(false) => {}
                Ok(true) => return Err(Code::Invalid),
                // Only other nodes can decide this.
                Err(Code::CrossDevice) if flags != RENAME_EXCHANGE => {
                    return Ok(Reply::Elsewhere { ino: source.ino, kind: source.kind });
                }
                Err(code) => return Err(code),
            }
        }
        if let Some(target) = target {
            if moves && target.kind == Kind::Directory && self.is_ours(target.ino) {
                match self.is_above(target.ino, from.parent) {
                    Ok(false) => {}
                    Ok(true) if flags == RENAME_EXCHANGE => return Err(Code::Invalid),
                    Ok(true) => return Err(Code::NotEmpty),
                    // The replaced directory must be empty anyway, and then it is no ancestor.
                    Err(Code::CrossDevice) if flags != RENAME_EXCHANGE => {}
                    Err(code) => return Err(code),
                }
            }
            if target.ino == source.ino {
                return Ok(removed_nothing(source.kind));
            }
            if flags == RENAME_EXCHANGE {
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
    ) -> Answer<Reply<'static>> {
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
        let run = victim.as_ref().and_then(|(_, v)| v.as_ref()).map_or(0, |v| Self::removal_work(v).run);
        // Two entries, two inodes or debts to their nodes, an orphan, the kept reply.
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
        match inode {
            Some(inode) => self.move_inode(c, inode, to.parent, cookie)?,
            None => self.add_debt(c, source.ino, source.link, Notification::Touch)?,
        }
        let victim = match victim {
            Some((target, victim)) => {
                self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
                let (last, layout) = match victim {
                    Some(victim) if target.kind == Kind::Directory => {
                        self.remove_inode(c, &victim)?;
                        self.state.directories.remove(target.ino);
                        (true, victim.layout)
                    }
                    victim => self.lose_entry(c, &target, victim)?,
                };
                Some((target, last, layout))
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
            Some((target, last, layout)) => {
                Ok(Reply::Removed { ino: target.ino, last, kind: target.kind, layout })
            }
            None => Ok(removed_nothing(source.kind)),
        }
    }

    fn exchange(
        &mut self,
        c: &mut Context<'_>,
        from: Side<'_>,
        source: Found,
        to: Side<'_>,
        target: Found,
    ) -> Answer<Reply<'static>> {
        // The number of directories that move to `to`, less those that leave it.
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
        Ok(removed_nothing(source.kind))
    }

    /// Checks whether a rename may replace an inode, and returns it; none for a file of another node.
    fn replaceable(&mut self, moves_directory: bool, target: Found) -> Answer<Option<Inode>> {
        match (moves_directory, target.kind == Kind::Directory) {
            (true, false) => return Err(Code::NotDirectory),
            (false, true) => return Err(Code::IsDirectory),
            _ => {}
        }
        if !self.is_ours(target.ino) {
            return Ok(None);
        }
        let victim = self.entered_inode(target.ino)?;
        if moves_directory {
            self.check_listed(target.ino)?;
        }
        if moves_directory && victim.attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        Ok(Some(victim))
    }

    fn check_links(&self, slot: usize) -> Answer<()> {
        if self.state.directories.get(slot).attr.nlink >= LINKS_MAX {
            return Err(Code::TooManyLinks);
        }
        Ok(())
    }

    pub(crate) fn put_entry(&mut self, parent: Ino, cookie: u64, record: &EntryRecord<'_>) -> Answer<()> {
        let mut buffer = [0; ENTRY_HEADER_BYTES + NAME_MAX];
        let n = record.encode(&mut buffer)?;
        self.tx.put(&keys::entry(parent, cookie), &buffer[..n])
    }

    /// Updates an inode whose entry has moved.
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

/// The reply to a rename that replaced nothing.
pub(crate) fn removed_nothing(kind: Kind) -> Reply<'static> {
    let layout = Layout::single(forebay_types::NodeId::FIRST, 0);
    Reply::Removed { ino: Ino(0), last: false, kind, layout }
}
