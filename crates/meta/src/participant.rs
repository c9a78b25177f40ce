//! A node's parts in a cross-node transaction (docs/decisions/0016): preparing and finishing them.
//!
//! A prepared part can be committed: everything that could refuse it was checked, and everything that could change the
//! result of these checks is held ([`crate::holds`]). Each prepared part has a record, so it survives a restart.
//! Finishing commits or drops all parts of the transaction on this node, in one step, and can be repeated.
//!
//! | part | prepared | committed | aborted |
//! |---|---|---|---|
//! | leave | name held | entry removed; a file of this node gets a link in its place | |
//! | enter | name held, directory cannot be removed | entry created, a replaced file loses a link | |
//! | count | link counted | | link removed |
//! | create inode | directory created, gets no entry | | directory removed |
//! | move | directory cannot be moved, removed, or passed by a climb | other parent | |
//! | condemn | directory cannot get entries | directory removed | |
//! | widen | directory cannot get entries or be removed | its parts have its entries | |
//! | create part | part created | | part removed |
//! | change | wide directory cannot get another such change | changed | |
//! | climb | ancestors cannot be moved or removed | | |

use forebay_types::limits::{LINKS_MAX, NAME_MAX};
use forebay_types::{
    Attr, Code, Ino, Kind, Layout, NodeId, Part, Reply, Request, TxId, Writer, FLAG_ATTACHED,
    RENAME_NOREPLACE,
};

use crate::batch::{Answer, Batch, Context};
use crate::holds::{Hold, PreparedRecord};
use crate::keys;
use crate::namespace::{Entered, Found};
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode, INODE_BYTES_MAX};
use crate::rename::removed_nothing;
use crate::wide::check_narrow;

/// Bytes of the largest prepared part's record.
const PREPARED_BYTES_MAX: usize = 16 + 128 + NAME_MAX;
/// Bound on a walk towards the root: above any possible depth.
const DEPTH_MAX: u64 = 1 << 24;

impl Batch<'_> {
    /// True when a request must wait for a transaction to be finished.
    pub fn must_wait(&mut self, request: &Request<'_>) -> bool {
        if !self.state.holds.any() {
            return false;
        }
        let holds = &self.state.holds;
        match *request {
            Request::Lookup { parent, name } | Request::Unlink { parent, name } => {
                holds.has_name(parent, name)
            }
            Request::Create { parent, name, .. }
            | Request::MakeNode { parent, name, .. }
            | Request::MakeDirectory { parent, name, .. }
            | Request::Symlink { parent, name, .. }
            | Request::Link { parent, name, .. } => {
                holds.has_name(parent, name) || holds.is_condemned(parent)
            }
            // Two changes of a wide directory wait for each other.
            Request::SetAttr { ino, .. } | Request::SetLayout { ino, .. } => {
                holds.forbids(TxId::NONE, ino, Hold::Changing)
            }
            Request::RemoveDirectory { parent, name } => {
                holds.has_name(parent, name) || self.leads_to_held(parent, name, Hold::Condemned)
            }
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                let moves = parent != new_parent;
                let exchange = flags & forebay_types::RENAME_EXCHANGE != 0;
                holds.has_name(parent, name)
                    || holds.has_name(new_parent, new_name)
                    || holds.is_condemned(new_parent)
                    || moves && self.leads_to_held(parent, name, Hold::Moving)
                    || self.leads_to_held(
                        new_parent,
                        new_name,
                        if exchange { Hold::Moving } else { Hold::Condemned },
                    )
            }
            Request::ReadDirectory { ino, .. } | Request::NameOf { parent: ino, .. } => {
                holds.has_name_in(ino)
            }
            _ => false,
        }
    }

    /// True when a name leads to a directory that a transaction holds in conflict with `hold`.
    fn leads_to_held(&mut self, parent: Ino, name: &[u8], hold: Hold) -> bool {
        let Ok(slot) = self.directory(parent) else { return false };
        let found = self.find_entry(slot, name).ok().flatten();
        found.is_some_and(|found| self.state.holds.forbids(TxId::NONE, found.ino, hold))
    }

    /// Transactions with parts that are prepared on this node.
    pub fn prepared(&self) -> Vec<TxId> {
        self.state.holds.transactions().collect()
    }

    /// Names held by prepared parts. The board must not show their entries.
    pub fn held_names(&self) -> impl Iterator<Item = (Ino, &[u8])> {
        self.state.holds.names()
    }

    /// True when anything is held.
    #[inline]
    pub fn has_holds(&self) -> bool {
        self.state.holds.any()
    }

    pub(crate) fn prepare(
        &mut self,
        c: &mut Context<'_>,
        tx: TxId,
        index: u8,
        part: Part<'_>,
    ) -> Answer<Reply<'static>> {
        if tx == TxId::NONE {
            return Err(Code::Invalid);
        }
        let key = keys::prepared(tx, index);
        if self.tx.get(&key)?.is_some() {
            return Err(Code::Busy);
        }
        let class = match part {
            Part::Enter { .. }
            | Part::Count { .. }
            | Part::CreateInode { .. }
            | Part::CreatePart { .. }
            | Part::Widen { .. } => Class::Growth,
            Part::Condemn { .. } => Class::Removal,
            _ => Class::Change,
        };
        // The part, an inode and a link, kept reply, ledger.
        self.admit(class, Work::writes(5))?;
        let mut created = Ino(0);
        let n = match part {
            Part::Leave { parent, name, ino, link } => self.prepare_leave((parent, name), ino, link),
            Part::Enter { .. } => self.prepare_enter(tx, &part),
            Part::Count { ino, link } => self.prepare_count(c, ino, link),
            Part::CreateInode { parent, mode } => {
                // A directory whose entry is on this node is created together with the entry, in one step, unless this
                // node itself coordinates the transaction.
                if self.is_ours(parent) && tx.coordinator() != self.shard.node() {
                    return Err(Code::Invalid);
                }
                let inode = self.create_detached(c, parent, mode)?;
                created = inode.attr.ino;
                Ok(Reply::Entry(inode.entry()))
            }
            Part::Move { ino, .. } => {
                self.directory(ino)?;
                if self.is_with_store(ino)? {
                    return Err(Code::Busy); // like a mount point
                }
                self.check_hold(tx, ino, Hold::Moving)?;
                Ok(Reply::Done)
            }
            Part::Widen { ino, .. } => self.prepare_widen(tx, ino),
            Part::CreatePart { .. } => {
                let inode = self.create_part(c, &part)?;
                created = inode.attr.ino;
                Ok(Reply::Entry(inode.entry()))
            }
            Part::Change { ino, ref change } => self.prepare_change(c, tx, ino, change),
            Part::Condemn { ino } => self.prepare_condemn(tx, ino),
            Part::Climb { from, avoid } => self.prepare_climb(tx, from, avoid),
        }?;
        let mut buffer = [0; PREPARED_BYTES_MAX];
        let mut w = Writer::new(&mut buffer);
        w.u64(c.now.sec as u64)?;
        w.u64(created.0)?;
        part.encode(&mut w)?;
        let len = w.len();
        self.tx.put(&key, &buffer[..len])?;
        let here = self.shard.node();
        self.state.holds.note(tx, &part, created, here);
        Ok(n)
    }

    fn check_hold(&self, tx: TxId, ino: Ino, hold: Hold) -> Answer<()> {
        match self.state.holds.forbids(tx, ino, hold) {
            true => Err(Code::Busy),
            false => Ok(()),
        }
    }

    fn check_name(&self, parent: Ino, name: &[u8]) -> Answer<()> {
        match self.state.holds.has_name(parent, name) {
            true => Err(Code::Busy),
            false => Ok(()),
        }
    }

    fn prepare_leave(
        &mut self,
        (parent, name): (Ino, &[u8]),
        ino: Ino,
        link: TxId,
    ) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        self.check_outside_stores(parent)?;
        self.check_name(parent, name)?;
        let found = self.find_entry(slot, name)?.ok_or(Code::NotFound)?;
        // Since the plan was made, the name has come to lead to another inode, or by another link to the same file.
        let foreign_file = found.kind != Kind::Directory && !self.is_ours(ino);
        if found.ino != ino || foreign_file && found.link != link {
            return Err(Code::Stale);
        }
        // A file of this node whose entry here is removed needs a link in its place; a directory has no link.
        let needs_link = found.kind != Kind::Directory && self.is_ours(ino);
        if needs_link && link == TxId::NONE || found.kind == Kind::Directory && link != TxId::NONE {
            return Err(Code::Invalid);
        }
        Ok(Reply::Done)
    }

    fn prepare_enter(&mut self, tx: TxId, part: &Part<'_>) -> Answer<Reply<'static>> {
        let Part::Enter { parent, name, ino, kind, link, flags } = *part else { return Err(Code::Invalid) };
        let slot = self.entries_for(parent, name)?;
        self.check_outside_stores(parent)?;
        self.check_name(parent, name)?;
        self.check_hold(tx, parent, Hold::Entered)?;
        let directory = kind == Kind::Directory;
        if directory && self.is_ours(ino) {
            self.directory(ino)?;
            self.check_hold(tx, ino, Hold::Moving)?;
        }
        // A file that gets an entry on its own node was counted by the link of its entry elsewhere.
        if !directory && self.is_ours(ino) {
            let counted = self.tx.get(&keys::link(ino, link))?.is_some();
            if self.inode(ino)?.attr.kind() != kind || !counted {
                return Err(Code::Invalid);
            }
        }
        let Some(found) = self.find_entry(slot, name)? else {
            if directory && self.state.directories.get(slot).attr.nlink >= LINKS_MAX {
                return Err(Code::TooManyLinks);
            }
            if directory && flags == RENAME_NOREPLACE {
                // A new directory inherits from its parent.
                let above = self.state.directories.get(slot).entry();
                return Ok(Reply::Entry(above));
            }
            return Ok(removed_nothing(kind));
        };
        match (directory, found.kind == Kind::Directory) {
            _ if flags & RENAME_NOREPLACE != 0 => return Err(Code::Exists),
            (true, false) => return Err(Code::NotDirectory),
            (false, true) => return Err(Code::IsDirectory),
            _ => {}
        }
        let (ino, kind) = (found.ino, found.kind);
        Ok(Reply::Removed { ino, last: false, kind, layout: Layout::single(ino.birth_node(), 0) })
    }

    fn prepare_count(&mut self, c: &mut Context<'_>, ino: Ino, link: TxId) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        if inode.attr.is_directory() {
            return Err(Code::NotPermitted);
        }
        if inode.attr.flags & FLAG_ATTACHED != 0 {
            return Err(Code::CrossDevice);
        }
        if inode.attr.nlink >= LINKS_MAX {
            return Err(Code::TooManyLinks);
        }
        if link == TxId::NONE || !self.add_link(ino, link)? {
            return Err(Code::Invalid);
        }
        inode.attr.nlink += 1;
        inode.attr.ctime = c.now;
        self.store_and_show(c, &inode)?;
        Ok(Reply::Entry(inode.entry()))
    }

    /// Creates a directory without an entry.
    fn create_detached(&mut self, c: &mut Context<'_>, parent: Ino, mode: u32) -> Answer<Inode> {
        let home = self.shard.node();
        let attr = self.attr_of_detached(c, Ino::new, parent, mode)?;
        let inode = Inode { attr, layout: Layout::single(home, 0), cookie: 0, marks: 0 };
        self.add_detached(inode)?;
        c.effects.inode(inode.entry());
        Ok(inode)
    }

    /// Attributes of a new directory of the caller, with the next number and no entry. `number` makes an inode number
    /// from a counter.
    pub(crate) fn attr_of_detached(
        &self,
        c: &Context<'_>,
        number: fn(NodeId, u64) -> Ino,
        parent: Ino,
        mode: u32,
    ) -> Answer<Attr> {
        let next = self.state.ledger.next_counter;
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        let home = self.shard.node();
        Ok(Attr {
            ino: number(home, next),
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
        })
    }

    /// Stores a directory that has the next number.
    pub(crate) fn add_detached(&mut self, inode: Inode) -> Answer<()> {
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(inode.attr.ino), &buffer[..n])?;
        self.state.ledger.next_counter += 1;
        self.state.ledger.inodes += 1;
        self.state.directories.insert(inode);
        Ok(())
    }

    fn prepare_condemn(&mut self, tx: TxId, ino: Ino) -> Answer<Reply<'static>> {
        match self.directory(ino) {
            Ok(slot) => {
                if ino == Ino::ROOT || self.is_with_store(ino)? {
                    return Err(Code::Busy);
                }
                self.check_hold(tx, ino, Hold::Condemned)?;
                if self.state.directories.get(slot).attr.size != 0 {
                    return Err(Code::NotEmpty);
                }
                // A wide directory is empty when its parts are. The coordinator sends parts for these next.
                if let Some(parts) = self.parts_if_wide(ino)? {
                    return Ok(Reply::Parts(parts));
                }
            }
            // An entry without an inode is the result of damage: it can be removed.
            Err(Code::NotFound) => {}
            Err(code) => return Err(code),
        }
        Ok(Reply::Done)
    }

    fn prepare_climb(&mut self, tx: TxId, from: Ino, avoid: Ino) -> Answer<Reply<'static>> {
        let (mut at, mut above) = (from, Vec::new());
        let top = loop {
            if at == avoid {
                return Err(Code::Invalid);
            }
            let slot = self.directory(at)?;
            self.check_hold(tx, at, Hold::Pinned)?;
            above.push(at);
            let parent = self.state.directories.get(slot).attr.parent;
            if at == Ino::ROOT || !self.is_ours(parent) {
                break parent;
            }
            if above.len() as u64 > DEPTH_MAX {
                return Err(Code::Corrupt);
            }
            at = parent;
        };
        for ino in above {
            self.state.holds.hold_directory(tx, ino, Hold::Pinned);
        }
        Ok(Reply::Number(top))
    }

    pub(crate) fn finish(&mut self, c: &mut Context<'_>, tx: TxId, commit: bool) -> Answer<Reply<'static>> {
        let (first, last) = keys::parts_of(tx);
        let mut parts = Vec::new();
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            parts.push((key.to_vec(), bytes.to_vec()));
        }
        // Kept reply and ledger; for each part its record, and what it writes.
        let mut work = Work::writes(2);
        for (_, bytes) in &parts {
            let more = self.work_of(&PreparedRecord::decode(bytes)?.part, commit)?;
            work = Work { writes: work.writes + 1 + more.writes, run: work.run + more.run };
        }
        self.admit(Class::Removal, work)?;
        let mut records = Vec::with_capacity(parts.len());
        for (_, bytes) in &parts {
            records.push(PreparedRecord::decode(bytes)?);
        }
        // A moved directory leaves its place before another one takes it. A directory is removed when no entry leads to
        // it any longer.
        records.sort_by_key(|record| match record.part {
            Part::Leave { .. } => 0,
            Part::Condemn { .. } => 2,
            _ => 1,
        });
        for PreparedRecord { created, part, .. } in &records {
            match commit {
                true if !self.is_whole(part, &records)? => {}
                true => self.commit_part(c, part)?,
                false => self.abort_part(c, part, *created)?,
            }
        }
        for (key, _) in &parts {
            self.tx.delete(key)?;
        }
        self.state.holds.release(tx);
        // The batch needs something to commit, and to store the reply with.
        self.write_ledger()?;
        Ok(Reply::Done)
    }

    /// True for a part whose transaction has all other parts on this node that it requires. A coordinator that follows
    /// the protocol always sends them. One that does not must not leave this shard with an inode without an entry, or
    /// with two names of a directory.
    fn is_whole(&mut self, part: &Part<'_>, all: &[PreparedRecord<'_>]) -> Answer<bool> {
        let goes = |of: Ino| all.iter().any(|r| matches!(r.part, Part::Condemn { ino } if ino == of));
        let moves = |of: Ino| {
            all.iter().any(|r| match r.part {
                Part::Enter { ino, .. } | Part::Move { ino, .. } => ino == of,
                _ => false,
            })
        };
        Ok(match *part {
            Part::Leave { ino, .. } if !self.is_ours(ino) => true,
            Part::Leave { ino, link: TxId::NONE, .. } => moves(ino) || goes(ino),
            Part::Leave { ino, link, .. } => self.tx.get(&keys::link(ino, link))?.is_none(),
            Part::Enter { parent, name, ino, kind, link, .. } => {
                let slot = self.directory(parent)?;
                let replaced = self.find_entry(slot, name)?;
                let leaves_none = replaced.is_none_or(|found| {
                    found.kind != Kind::Directory || !self.is_ours(found.ino) || goes(found.ino)
                });
                let is_free = match (self.is_ours(ino), kind) {
                    (true, Kind::Directory) => !self.is_entered_here(ino)?,
                    (true, _) => self.tx.get(&keys::link(ino, link))?.is_some(),
                    (false, _) => true,
                };
                leaves_none && is_free
            }
            Part::Move { ino, .. } => !self.is_entered_here(ino)?,
            Part::Condemn { ino } => {
                let Some(inode) = self.find_inode(ino)? else { return Ok(true) };
                // A wide directory is removed with its parts.
                let parts = self.parts_if_wide(ino)?;
                let of_here =
                    parts.iter().flat_map(|parts| parts.as_slice()).filter(|part| self.is_ours(**part));
                let above = inode.attr.parent;
                inode.attr.size == 0
                    && !self.is_entered_here(ino)?
                    && of_here.copied().all(goes)
                    && (!ino.is_part() || !self.is_ours(above) || goes(above))
            }
            Part::Widen { parts: Some(_), ino } => {
                let directory = self.find_inode(ino)?;
                directory.is_some_and(|inode| inode.attr.is_directory() && check_narrow(&inode).is_ok())
            }
            Part::Widen { parts: None, .. }
            | Part::Change { .. }
            | Part::Count { .. }
            | Part::CreateInode { .. }
            | Part::CreatePart { .. }
            | Part::Climb { .. } => true,
        })
    }

    /// True for a directory with an entry in this shard.
    fn is_entered_here(&self, ino: Ino) -> Answer<bool> {
        let Some(inode) = self.find_inode(ino)?.filter(|inode| self.is_ours(inode.attr.parent)) else {
            return Ok(false);
        };
        let entry = self.tx.get(&keys::entry(inode.attr.parent, inode.cookie))?;
        Ok(entry.map(EntryRecord::decode).transpose()?.is_some_and(|record| record.ino == ino))
    }

    /// The largest work of finishing a part.
    fn work_of(&mut self, part: &Part<'_>, commit: bool) -> Answer<Work> {
        let goes = match *part {
            Part::Enter { parent, name, .. } if commit => {
                let slot = self.directory(parent)?;
                self.find_entry(slot, name)?.map(|found| found.ino)
            }
            Part::Count { ino, .. } if !commit => Some(ino),
            Part::Condemn { ino } if commit => Some(ino),
            _ => None,
        };
        let inode = match goes.filter(|ino| self.is_ours(*ino)) {
            Some(ino) => self.find_inode(ino)?,
            None => None,
        };
        let mut work = inode.map_or(Work::writes(0), |inode| Self::removal_work(&inode));
        work.writes += match part {
            Part::Leave { .. } | Part::Enter { .. } => 4,
            _ => 2,
        };
        Ok(work)
    }

    fn commit_part(&mut self, c: &mut Context<'_>, part: &Part<'_>) -> Answer<()> {
        match *part {
            Part::Leave { parent, name, ino, link } => self.commit_leave(c, parent, name, ino, link),
            Part::Enter { .. } => self.commit_enter(c, part),
            Part::Move { ino, parent } => self.commit_move(c, ino, parent, 0),
            Part::Condemn { ino } => {
                if let Some(inode) = self.find_inode(ino)?.filter(|inode| inode.attr.is_directory()) {
                    self.directory(ino)?;
                    self.remove_inode(c, &inode)?;
                    self.state.directories.remove(ino);
                }
                Ok(())
            }
            Part::Widen { parts: Some(ref parts), .. } => self.commit_widen(c, parts),
            Part::Change { ino, ref change } => self.commit_change(c, ino, change),
            Part::Widen { parts: None, .. }
            | Part::Count { .. }
            | Part::CreateInode { .. }
            | Part::CreatePart { .. }
            | Part::Climb { .. } => Ok(()),
        }
    }

    fn commit_leave(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
        link: TxId,
    ) -> Answer<()> {
        let slot = self.directory(parent)?;
        let Some(found) = self.find_entry(slot, name)?.filter(|found| found.ino == ino) else {
            return Ok(()); // only a peer that breaks the protocol causes this
        };
        self.tx.delete(&keys::entry(parent, found.cookie))?;
        self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
        c.effects.name(parent, name, None);
        let directory = found.kind == Kind::Directory;
        if !directory && self.is_ours(ino) && link != TxId::NONE {
            self.add_link(ino, link)?;
            let mut inode = self.entered_inode(ino)?;
            inode.attr.ctime = c.now;
            self.store_and_show(c, &inode)?;
        }
        self.touch_directory(c, slot, -1, -i64::from(directory));
        Ok(())
    }

    fn commit_enter(&mut self, c: &mut Context<'_>, part: &Part<'_>) -> Answer<()> {
        let Part::Enter { parent, name, ino, kind, link, .. } = *part else { return Err(Code::Invalid) };
        let (ours, directory) = (self.is_ours(ino), kind == Kind::Directory);
        let slot = self.directory(parent)?;
        let link = if ours || directory { TxId::NONE } else { link };
        let record = EntryRecord { ino, kind, home: ino.birth_node(), width_log2: 0, link, name };
        let replaced = self.find_entry(slot, name)?;
        let cookie = match replaced {
            Some(Found { cookie, .. }) => {
                self.put_entry(parent, cookie, &record)?;
                cookie
            }
            None => match self.enter(slot, &record)? {
                Entered::New(cookie) => {
                    self.state.ledger.entries += 1;
                    cookie
                }
                Entered::Taken(_) => return Err(Code::Corrupt),
            },
        };
        c.effects.name(parent, name, Some((ino, kind)));
        if let Some(replaced) = replaced.filter(|r| r.kind != Kind::Directory) {
            let inode = self.find_inode(replaced.ino)?;
            if inode.is_some() || !self.is_ours(replaced.ino) {
                self.lose_entry(c, &replaced, inode)?;
            }
        }
        let came = i64::from(replaced.is_none());
        self.touch_directory(c, slot, came, came * i64::from(directory));
        match (ours, directory) {
            (true, true) => self.commit_move(c, ino, parent, cookie),
            (true, false) => {
                // From now on its entry here is counted, instead of the link of its entry elsewhere.
                let Part::Enter { link, .. } = *part else { return Err(Code::Invalid) };
                self.take_link(ino, link)?;
                let Some(mut inode) = self.find_inode(ino)? else { return Ok(()) };
                inode.attr.ctime = c.now;
                self.store_and_show(c, &inode)
            }
            (false, _) => Ok(()),
        }
    }

    fn commit_move(&mut self, c: &mut Context<'_>, ino: Ino, parent: Ino, cookie: u64) -> Answer<()> {
        let slot = self.directory(ino)?;
        let (inode, first) = self.state.directories.change_whole(slot);
        inode.attr.parent = parent;
        inode.attr.ctime = c.now;
        inode.cookie = cookie;
        let entry = inode.entry();
        self.expect_write(first);
        c.effects.inode(entry);
        Ok(())
    }

    fn abort_part(&mut self, c: &mut Context<'_>, part: &Part<'_>, created: Ino) -> Answer<()> {
        match *part {
            Part::Count { ino, link } => self.end_link(c, ino, link),
            Part::CreateInode { .. } | Part::CreatePart { .. } => {
                if let Some(inode) = self.find_inode(created)? {
                    self.directory(created)?;
                    self.remove_inode(c, &inode)?;
                    self.state.directories.remove(created);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
