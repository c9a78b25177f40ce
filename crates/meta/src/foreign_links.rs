//! Records about other nodes: links from their entries to files here, decisions that they have not acknowledged, and
//! debts: notifications that they have not acknowledged.
//!
//! A file with an entry on another node has a record of that link, so that counting up and down can be repeated: the
//! file's link count is the number of its entries here and of these records. Decisions and debts are delivered until
//! they are acknowledged ([`crate::Transactions`]); then their records are removed.

use forebay_types::{Code, Cookie, Ino, NodeId, Outcome, Reader, Reply, Result, TxId, Writer};

use crate::batch::{Answer, Batch, Context};
use crate::effects::Delivery;
use crate::keys::{self, Key};
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode};
use crate::wide::decode_place;

/// A notification that another node's inode is owed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Notification {
    /// An update of its ctime.
    Touch = 1,
    /// The removal of a link.
    Link = 2,
}

/// Bytes of a record of a debt or decision: kind, seconds since 1970.
const DEBT_BYTES: usize = 9;
/// Bytes that [`Batch::leads_to`] writes for an entry in front of its name.
const LEADING_BYTES: usize = 8 + 8 + 8 + 8 + 1 + 2;

fn dated(kind: u8, seconds: i64) -> [u8; DEBT_BYTES] {
    let mut bytes = [kind; DEBT_BYTES];
    bytes[1..].copy_from_slice(&(seconds as u64).to_le_bytes());
    bytes
}

/// Kind and seconds in a record of a debt or decision.
pub(crate) fn decode_dated(bytes: &[u8]) -> Answer<(u8, u64)> {
    let mut r = Reader::new(bytes);
    let mut read = || -> Answer<(u8, u64)> { Ok((r.u8()?, r.u64()?)) };
    read().map_err(|_| Code::Corrupt)
}

/// An entry that leads to another node's inode, from the reply to
/// [`Request::LeadsTo`](forebay_types::Request::LeadsTo).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leading<'a> {
    /// Directory.
    pub parent: Ino,
    /// Its position there.
    pub cookie: Cookie,
    /// The inode.
    pub ino: Ino,
    /// The link; none for a directory.
    pub link: TxId,
    /// Name.
    pub name: &'a [u8],
}

impl<'a> Leading<'a> {
    /// Decodes all entries of a reply.
    pub fn decode_all(bytes: &'a [u8]) -> impl Iterator<Item = std::result::Result<Leading<'a>, Code>> + 'a {
        let mut r = Reader::new(bytes);
        std::iter::from_fn(move || {
            if r.rest().is_empty() {
                return None;
            }
            let mut read = || -> std::result::Result<Leading<'a>, Code> {
                let (parent, cookie, ino, link) = (Ino(r.u64()?), r.u64()?, Ino(r.u64()?), TxId(r.u64()?));
                Ok(Leading { parent, cookie, ino, link, name: r.short_bytes()? })
            };
            let leading = read();
            if leading.is_err() {
                r = Reader::new(&[]);
            }
            Some(leading)
        })
    }
}

/// References between a shard and other nodes, for a check over several nodes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ForeignReferences {
    /// Links from other nodes' entries that are counted here: inode, link.
    pub links: Vec<(Ino, TxId)>,
    /// Directories of this node whose entry is on another node, and their parents.
    pub directories: Vec<(Ino, Ino)>,
    /// Entries of this node that lead to inodes of other nodes.
    pub entries: Vec<ForeignEntry>,
    /// Parts on this node whose wide directory is on another node.
    pub parts: Vec<ForeignPart>,
    /// Parts on other nodes of wide directories of this node, and the directory.
    pub parts_elsewhere: Vec<(Ino, Ino)>,
}

/// A part, on this node, of a wide directory of another node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForeignPart {
    /// The part.
    pub part: Ino,
    /// Its directory.
    pub of: Ino,
    /// Its index in the directory's list, according to its own record.
    pub index: usize,
    /// The number of parts, likewise.
    pub width: usize,
}

/// An entry that leads to another node's inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignEntry {
    /// Directory.
    pub parent: Ino,
    /// Name.
    pub name: Vec<u8>,
    /// The inode.
    pub ino: Ino,
    /// The link; none for a directory.
    pub link: TxId,
}

impl Batch<'_> {
    /// References between this shard and other nodes. Walks all entries and inodes.
    pub fn beyond(&self) -> Result<ForeignReferences> {
        let walk = || -> Answer<ForeignReferences> {
            let mut references = ForeignReferences::default();
            for item in self.tx.range(&[0], &[0xff; 16])? {
                let (key, bytes) = item?;
                match keys::decode(key) {
                    Some(Key::Link(ino, link)) => references.links.push((ino, link)),
                    Some(Key::Entry(parent, _)) => {
                        let record = EntryRecord::decode(bytes)?;
                        let EntryRecord { ino, link, name, .. } = record;
                        if !self.is_ours(ino) {
                            references.entries.push(ForeignEntry { parent, name: name.to_vec(), ino, link });
                        }
                    }
                    Some(Key::Inode(ino)) => {
                        let inode = match self.state.directories.peek(ino) {
                            Some(inode) => *inode,
                            None => Inode::decode(ino, bytes)?,
                        };
                        let elsewhere = inode.attr.is_directory() && !self.is_ours(inode.attr.parent);
                        if elsewhere && ino.is_part() {
                            let (index, width) = decode_place(inode.cookie);
                            references.parts.push(ForeignPart {
                                part: ino,
                                of: inode.attr.parent,
                                index,
                                width,
                            });
                        } else if elsewhere {
                            references.directories.push((ino, inode.attr.parent));
                        }
                        if inode.attr.is_directory() && inode.attr.width_log2 != 0 {
                            let parts = self.parts_of(ino)?;
                            let others = parts.as_slice().iter().filter(|part| !self.is_ours(**part));
                            references.parts_elsewhere.extend(others.map(|part| (*part, ino)));
                        }
                    }
                    _ => {}
                }
            }
            Ok(references)
        };
        walk().map_err(|code| self.failed("walk", code))
    }

    pub(crate) fn is_led(&mut self, ino: Ino, parent: Ino, link: TxId) -> Answer<Reply<'static>> {
        let inode = self.inode(ino)?;
        let led = match link {
            TxId::NONE => inode.attr.is_directory() && inode.attr.parent == parent,
            link => self.tx.get(&keys::link(ino, link))?.is_some(),
        };
        match led {
            true => Ok(Reply::Done),
            false => Err(Code::NotFound),
        }
    }

    /// True for an inode that this shard has or had.
    #[inline]
    pub(crate) fn is_ours(&self, ino: Ino) -> bool {
        ino.birth_node() == self.shard.node()
    }

    /// Records a debt to another node's inode.
    pub(crate) fn add_debt(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        link: TxId,
        debt: Notification,
    ) -> Answer<()> {
        self.tx.put(&keys::owed(ino, link), &dated(debt as u8, c.now.sec))?;
        c.effects.delivery(match debt {
            Notification::Touch => Delivery::Touch(ino, link),
            Notification::Link => Delivery::DropLink(ino, link),
        });
        Ok(())
    }

    /// Adds a link's record. False if it exists already.
    pub(crate) fn add_link(&mut self, ino: Ino, link: TxId) -> Answer<bool> {
        self.tx.insert(&keys::link(ino, link), &[])
    }

    /// Removes a link's record. False if there is none.
    pub(crate) fn take_link(&mut self, ino: Ino, link: TxId) -> Answer<bool> {
        self.tx.delete(&keys::link(ino, link))
    }

    /// Removes a link, and the inode if that was its last link.
    pub(crate) fn end_link(&mut self, c: &mut Context<'_>, ino: Ino, link: TxId) -> Answer<()> {
        if let (true, Some(mut inode)) = (self.take_link(ino, link)?, self.find_inode(ino)?) {
            self.drop_link(c, &mut inode)?;
        }
        Ok(())
    }

    pub(crate) fn drop_foreign_link(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        link: TxId,
    ) -> Answer<Reply<'static>> {
        let work = match self.find_inode(ino)? {
            Some(inode) if !inode.attr.is_directory() => Self::removal_work(&inode),
            Some(_) => return Err(Code::Invalid),
            None => Work::writes(2),
        };
        self.admit(Class::Removal, work)?;
        self.end_link(c, ino, link)?;
        // The batch needs something to commit, and to store the reply with.
        self.write_ledger()?;
        Ok(Reply::Done)
    }

    pub(crate) fn touch(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        if let Some(mut inode) = self.find_inode(ino)? {
            self.admit(Class::Removal, Work::writes(2))?;
            inode.attr.ctime = inode.attr.ctime.max(c.now);
            self.store_inode(&inode)?;
            c.effects.inode(inode.entry());
        }
        Ok(Reply::Done)
    }

    /// Records the coordinator's decision, of which these nodes must be notified, and returns the reply to the client's
    /// request.
    ///
    /// # Errors
    /// [`Code::Malformed`] if `reply` is not the reply of a cross-node transaction.
    pub(crate) fn decide(
        &mut self,
        c: &mut Context<'_>,
        tx: TxId,
        nodes: &[u8],
        reply: &[u8],
    ) -> Answer<Reply<'static>> {
        let reply = Reply::decode(reply)?.owned().ok_or(Code::Malformed)?;
        self.admit(Class::Removal, Work { writes: 2, run: nodes.len() as u64 / 2 })?;
        for node in forebay_types::decode_nodes(nodes) {
            self.tx.put(&keys::decision(tx, node), &dated(0, c.now.sec))?;
            c.effects.delivery(Delivery::Commit(tx, node));
        }
        Ok(reply)
    }

    pub(crate) fn ask_outcome(&mut self, tx: TxId) -> Answer<Reply<'static>> {
        let (first, last) = keys::decisions_of(tx);
        let decided = self.tx.first_in(&first, &last)?.is_some();
        Ok(Reply::Outcome(if decided { Outcome::Committed } else { Outcome::Aborted }))
    }

    /// A node has acknowledged a delivery.
    pub fn settle(&mut self, delivery: &Delivery) -> Result<()> {
        let mut settle = || -> Answer<()> {
            self.admit(Class::Removal, Work::writes(1))?;
            match *delivery {
                Delivery::Commit(tx, node) => self.tx.delete(&keys::decision(tx, node)).map(|_| ())?,
                Delivery::DropLink(ino, link) => self.tx.delete(&keys::owed(ino, link)).map(|_| ())?,
                // Meanwhile the debt may have become the removal of the link.
                Delivery::Touch(ino, link) => {
                    let bytes = self.tx.get(&keys::owed(ino, link))?.map(decode_dated).transpose()?;
                    if bytes.is_some_and(|(kind, _)| kind == Notification::Touch as u8) {
                        self.tx.delete(&keys::owed(ino, link))?;
                    }
                }
            }
            self.count_writes()
        };
        settle().map_err(|code| self.failed("settle a delivery on", code))
    }

    /// Everything that other nodes have not acknowledged.
    pub fn deliveries(&self) -> Result<Vec<Delivery>> {
        let list = || -> Answer<Vec<Delivery>> {
            let (first, last) = keys::all_unsettled();
            let mut all = Vec::new();
            for item in self.tx.range(&first, &last)? {
                let (key, bytes) = item?;
                all.push(match keys::decode(key) {
                    Some(Key::Decision(tx, node)) => Delivery::Commit(tx, node),
                    Some(Key::Owed(ino, link)) if decode_dated(bytes)?.0 == Notification::Touch as u8 => {
                        Delivery::Touch(ino, link)
                    }
                    Some(Key::Owed(ino, link)) => Delivery::DropLink(ino, link),
                    _ => return Err(Code::Corrupt),
                });
            }
            Ok(all)
        };
        list().map_err(|code| self.failed("list the deliveries of", code))
    }

    /// Entries behind a position that lead to inodes of `node`, as many as fit; empty at the end.
    pub(crate) fn leads_to<'o>(
        &mut self,
        node: NodeId,
        (parent, cookie): (Ino, Cookie),
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let payload =
            payload.get_mut(..forebay_types::limits::READDIR_REPLY_BYTES / 2).ok_or(Code::TooBig)?;
        let mut w = Writer::new(payload);
        let first = keys::entry(parent, cookie.saturating_add(1));
        for item in self.tx.range(&first, &keys::entry(Ino(u64::MAX), u64::MAX))? {
            let (key, bytes) = item?;
            let Some(Key::Entry(parent, cookie)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = EntryRecord::decode(bytes)?;
            if record.ino.birth_node() != node {
                continue;
            }
            if w.room() < LEADING_BYTES + record.name.len() {
                break;
            }
            w.u64(parent.0)?;
            w.u64(cookie)?;
            w.u64(record.ino.0)?;
            w.u64(record.link.0)?;
            w.short_bytes(record.name)?;
        }
        let n = w.len();
        Ok(Reply::Bytes(&payload[..n]))
    }

    pub(crate) fn name_of<'o>(&mut self, parent: Ino, ino: Ino, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        self.narrow(parent)?;
        for item in self.tx.range(&keys::entry(parent, 0), &keys::entry(parent, u64::MAX))? {
            let (key, bytes) = item?;
            let Some(Key::Entry(..)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = EntryRecord::decode(bytes)?;
            if record.ino == ino {
                let payload = payload.get_mut(..record.name.len()).ok_or(Code::TooBig)?;
                payload.copy_from_slice(record.name);
                return Ok(Reply::Bytes(payload));
            }
        }
        Err(Code::NotFound)
    }

    /// Stores an inode and reports it as an effect.
    pub(crate) fn store_and_show(&mut self, c: &mut Context<'_>, inode: &Inode) -> Answer<()> {
        self.store_inode(inode)?;
        c.effects.inode(inode.entry());
        Ok(())
    }
}
