//! A batch: one write transaction over any number of requests, from begin to commit.
//!
//! A request is answered by [`Batch::apply`], which never fails itself: what goes wrong is the reply. A request that
//! fails leaves no trace, as all that can refuse it is checked before its first write. If LMDB itself fails in the
//! middle, the batch is broken: every further request is answered with that code, and the commit fails.

use std::cell::RefMut;

use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{
    Caller, Code, Error, Ino, Layout, Parts, Reply, Request, Result, Timestamp, REPLY_HEADER_BYTES,
};

use crate::effects::Effects;
use crate::keys;
use crate::lmdb_txn::{code_of, Transaction};
use crate::page_budget::{Class, Usage, Work};
use crate::record::{Inode, INODE_BYTES_MAX, LEDGER_BYTES_MAX};
use crate::shard::{Shard, State};

/// The most bytes that a reply borrows.
pub const PAYLOAD_BYTES_MAX: usize = MESSAGE_BYTES_MAX - REPLY_HEADER_BYTES;

/// What an operation gives: a code on hot paths.
pub(crate) type Answer<T> = std::result::Result<T, Code>;

/// One request's surroundings, handed down to its operation.
pub(crate) struct Context<'c> {
    /// On whose behalf.
    pub(crate) caller: Caller,
    /// The time it is made at.
    pub(crate) now: Timestamp,
    /// Where it reports what it showed or changed.
    pub(crate) effects: &'c mut Effects,
}

/// A write transaction on a [`Shard`]. Dropped without [`Batch::commit`] it leaves no trace.
pub struct Batch<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) tx: Transaction<'a>,
    pub(crate) state: RefMut<'a, State>,
    /// The wide directory that the last request met.
    pub(crate) met_wide: Option<Parts>,
    usage: Option<Usage>,
    reserve_open: bool,
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("shard", &self.shard).finish_non_exhaustive()
    }
}

impl Shard {
    /// Begins a write transaction: a batch of requests that becomes permanent as a whole when it is committed. One at a
    /// time: [`Code::Busy`] when there is one.
    pub fn begin(&self) -> Result<Batch<'_>> {
        let mut state = self.borrow("begin a batch")?;
        let txn = self.env.write_txn().map_err(|e| {
            Error::new(code_of(&e), format!("cannot begin a batch on the shard {}", self.dir().display()))
                .why(&e)
        })?;
        let tx = Transaction::new(txn, self.tree);
        if state.stale {
            state.reload(&tx, self.node()).map_err(|code| {
                Error::new(code, format!("cannot open the shard {}", self.dir().display()))
                    .why("its ledger, or a directory that it names, is damaged")
                    .cure("run `forebay fsck` to see the damage; save what the backing files hold")
            })?;
        }
        state.directories.trim();
        Ok(Batch { shard: self, tx, state, met_wide: None, usage: None, reserve_open: false })
    }
}

impl<'a> Batch<'a> {
    /// Applies one request on behalf of `caller` at the time `now`. Bytes that the reply borrows (a listing, a value, a
    /// path) lie in `payload`, which should have [`PAYLOAD_BYTES_MAX`] bytes. What the request showed or changed is
    /// added to `effects`.
    ///
    /// A `Create` with a number: the caller knows that this number was put in reserve; [`Code::Stale`] when it was not
    /// counted yet, or an inode has it.
    ///
    /// `Ping`, `Space`, `Backing`, and what daemons ask each other: not answered here ([`Code::NotSupported`]).
    /// `MakeBacking` is answered with the entry; making the files is the caller's. A request and the state before it
    /// decide everything: the same requests at the same times give the same shard, inode numbers included.
    pub fn apply<'o>(
        &mut self,
        caller: Caller,
        request: &Request<'_>,
        now: Timestamp,
        effects: &mut Effects,
        payload: &'o mut [u8],
    ) -> forebay_types::Answer<'o> {
        let mark = effects.mark();
        let mut context = Context { caller, now, effects };
        let result = self.answer(&mut context, request, payload);
        let written = self.count_writes();
        match (result, written) {
            (Ok(reply), Ok(())) => Ok(reply),
            (Err(code), _) | (_, Err(code)) => {
                // A look-up that found nothing is an effect of its own: the board may hold it.
                if !(code == Code::NotFound
                    && matches!(request, Request::Lookup { .. } | Request::GetAttr { .. }))
                {
                    context.effects.truncate(mark);
                }
                Err(self.refusal(code))
            }
        }
    }

    fn answer<'o>(
        &mut self,
        c: &mut Context<'_>,
        request: &Request<'_>,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        match *request {
            Request::Lookup { parent, name } => self.lookup(c, parent, name),
            Request::GetAttr { ino } => self.get_attr(c, ino),
            Request::SetAttr { ino, set } => self.set_attr(c, ino, &set),
            Request::Create { .. } => self.create(c, request),
            Request::MakeNode { parent, name, mode, rdev } => self.make_node(c, parent, name, mode, rdev),
            Request::MakeDirectory { parent, name, mode } => self.make_directory(c, parent, name, mode),
            Request::Symlink { parent, name, target } => self.symlink(c, parent, name, target),
            Request::Link { ino, parent, name } => self.link(c, ino, parent, name),
            Request::Unlink { parent, name } => self.unlink(c, parent, name),
            Request::RemoveDirectory { parent, name } => self.remove_directory(c, parent, name),
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                self.rename(c, (parent, name), (new_parent, new_name), flags)
            }
            Request::ReadDirectory { ino, cookie, attributes } => {
                self.read_directory(ino, cookie, attributes, payload)
            }
            Request::ReadLink { ino } => self.read_link(ino, payload),
            Request::GetXattr { ino, name } => self.get_xattr(ino, name, payload),
            Request::SetXattr { ino, name, value, flags } => self.set_xattr(c, ino, name, value, flags),
            Request::ListXattr { ino } => self.list_xattr(ino, payload),
            Request::RemoveXattr { ino, name } => self.remove_xattr(c, ino, name),
            Request::MarkDirty { ino } => self.mark_dirty(c, ino),
            Request::MakeBacking { ino } => self.make_backing(c, ino),
            Request::PathOf { ino } => self.path_of(ino, payload),
            Request::Reserve => self.reserve(),
            Request::SetLayout { ino, layout } => self.set_layout(c, ino, layout),
            Request::Prepare { tx, index, part } => self.prepare(c, tx, index, part),
            Request::Finish { tx, commit } => self.finish(c, tx, commit),
            Request::AskOutcome { tx } => self.ask_outcome(tx),
            Request::Decide { tx, nodes, reply } => self.decide(c, tx, nodes, reply),
            Request::DropLink { ino, link } => self.drop_foreign_link(c, ino, link),
            Request::Touch { ino } => self.touch(c, ino),
            Request::IsLed { ino, parent, link } => self.is_led(ino, parent, link),
            Request::LeadsTo { node, parent, cookie } => self.leads_to(node, (parent, cookie), payload),
            // What takes several shards is planned, and does not come here.
            Request::MakeDirectoryAt { .. } | Request::MoveDirectory { .. } => Err(Code::CrossDevice),
            Request::SetWidth { .. } => Err(Code::NoDevice),
            Request::PartsOf { ino } => self.tell_parts(ino),
            Request::NameOf { parent, ino } => self.name_of(parent, ino, payload),
            Request::Ping
            | Request::Space
            | Request::Place { .. }
            | Request::Targets
            | Request::Backing { .. }
            | Request::EndSession { .. }
            | Request::AreThere { .. }
            | Request::RemoveBackings { .. }
            | Request::RenewLease
            | Request::RevokeName { .. }
            | Request::RevokeDirectory { .. } => Err(Code::NotSupported),
        }
    }

    /// Counts what was written since the last call towards the pages that the transaction takes.
    #[inline]
    pub(crate) fn count_writes(&mut self) -> Answer<()> {
        let (writes, deletions) = self.tx.take_counts();
        if writes + deletions > 0 {
            let tree = self.tx.pages()?;
            if let Some(usage) = &mut self.usage {
                usage.count(writes, deletions, tree);
            }
        }
        Ok(())
    }

    /// Lets an operation begin that may write as much as `work`, or answers [`Code::NoSpace`].
    #[inline]
    pub(crate) fn admit(&mut self, class: Class, work: Work) -> Answer<()> {
        let usage = match &mut self.usage {
            Some(usage) => usage,
            None => {
                let used = self.shard.used_pages();
                let tree = self.tx.pages()?;
                self.usage.insert(self.state.space.begin(used, tree))
            }
        };
        let class = if self.reserve_open { Class::Removal } else { class };
        self.state.space.admit(usage, class, work)
    }

    /// Lets every request of this batch use the pages that are kept for removals: for requests that were acknowledged
    /// before a crash and are applied again, which must not be refused for want of a few pages.
    pub fn open_reserve(&mut self) {
        self.reserve_open = true;
    }

    /// Entries of a directory in memory came or went, or its links changed.
    #[inline]
    pub(crate) fn touch_directory(&mut self, c: &mut Context<'_>, slot: usize, entries: i64, links: i64) {
        let first = self.state.directories.touch(slot, entries, links, c.now);
        self.owe_write(first);
        c.effects.inode(self.state.directories.get(slot).entry());
    }

    /// The commit will write one more record, if `first`.
    #[inline]
    pub(crate) fn owe_write(&mut self, first: bool) {
        if let (true, Some(usage)) = (first, &mut self.usage) {
            usage.owe_write();
        }
    }

    /// The commit will list one more orphan.
    #[inline]
    pub(crate) fn owe_orphan(&mut self) {
        if let Some(usage) = &mut self.usage {
            usage.owe_orphan();
        }
    }

    /// The slot of a directory: [`Code::NotFound`] when there is no such inode, [`Code::NotDirectory`] when it is
    /// something else.
    #[inline]
    pub(crate) fn directory(&mut self, ino: Ino) -> Answer<usize> {
        if let Some(slot) = self.state.directories.find(ino) {
            return Ok(slot);
        }
        self.load_directory(ino)
    }

    fn load_directory(&mut self, ino: Ino) -> Answer<usize> {
        let inode = self.stored_inode(ino)?.ok_or(Code::NotFound)?;
        if !inode.attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        Ok(self.state.directories.insert(inode))
    }

    /// An inode as its record has it, which for a directory in memory may be old.
    #[inline]
    fn stored_inode(&self, ino: Ino) -> Answer<Option<Inode>> {
        self.tx.get(&keys::inode(ino))?.map(|bytes| Inode::decode(ino, bytes)).transpose()
    }

    /// An inode of any kind, or none.
    #[inline]
    pub(crate) fn find_inode(&self, ino: Ino) -> Answer<Option<Inode>> {
        match self.state.directories.peek(ino) {
            Some(inode) => Ok(Some(*inode)),
            None => self.stored_inode(ino),
        }
    }

    /// An inode that a request names: [`Code::NotFound`] when it is gone.
    #[inline]
    pub(crate) fn inode(&self, ino: Ino) -> Answer<Inode> {
        self.find_inode(ino)?.ok_or(Code::NotFound)
    }

    /// An inode that an entry leads to: [`Code::Corrupt`] when there is none.
    #[inline]
    pub(crate) fn entered_inode(&self, ino: Ino) -> Answer<Inode> {
        self.find_inode(ino)?.ok_or(Code::Corrupt)
    }

    /// Stores an inode's record; a directory that is in memory is changed there and written at commit.
    pub(crate) fn store_inode(&mut self, inode: &Inode) -> Answer<()> {
        if inode.attr.is_directory() {
            let slot = self.directory(inode.attr.ino)?;
            let (kept, first) = self.state.directories.change_whole(slot);
            *kept = *inode;
            self.owe_write(first);
            return Ok(());
        }
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(inode.attr.ino), &buffer[..n])
    }

    /// Writes what memory holds of the batch: directories and the ledger.
    fn write_back(&mut self) -> Answer<()> {
        self.write_orphans()?;
        let directories = &mut self.state.directories;
        let tx = &mut self.tx;
        directories.settle(|inode| {
            let mut buffer = [0; INODE_BYTES_MAX];
            let n = inode.encode(&mut buffer)?;
            tx.put(&keys::inode(inode.attr.ino), &buffer[..n])
        })?;
        self.write_ledger()
    }

    /// Writes the ledger, so that there is something to commit.
    pub(crate) fn write_ledger(&mut self) -> Answer<()> {
        let mut buffer = [0; LEDGER_BYTES_MAX];
        let n = self.state.ledger.encode(self.state.directories.pending(), &mut buffer)?;
        self.tx.put(keys::LEDGER, &buffer[..n])
    }

    /// Writes the ledger as it is, so that the batch has something to commit.
    pub(crate) fn rewrite_ledger(&mut self) -> Result<()> {
        self.write_back().map_err(|code| self.failed("write the ledger of", code))
    }

    /// An error with words.
    pub(crate) fn failed(&self, verb: &str, code: Code) -> Error {
        Error::new(code, format!("cannot {verb} the shard {}", self.shard.dir().display()))
    }

    /// True when the batch should be committed before it takes on more requests, as the next one might be refused
    /// for want of pages that another transaction will find free. Ask before each request when batches are long or
    /// space is short; a removal is refused for no other reason.
    pub fn is_spent(&self) -> bool {
        self.usage.as_ref().is_some_and(|usage| self.state.space.is_spent(usage))
    }

    /// True when something was written, so that there is something to commit.
    pub fn has_changes(&self) -> bool {
        self.tx.wrote() || self.state.directories.is_changed() || !self.state.new_orphans.is_empty()
    }

    /// Makes all requests of the batch permanent, together. When it fails none of them was made.
    pub fn commit(mut self) -> Result<()> {
        if !self.has_changes() {
            return Ok(());
        }
        let done = self.write_back().and_then(|()| self.tx.commit());
        done.map_err(|code| self.failed("commit a batch on", code))?;
        if let Some(usage) = &self.usage {
            let usage = *usage;
            let used = self.shard.used_pages();
            self.state.space.committed(&usage, used);
        }
        Ok(())
    }

    /// Files without links whose backing files are still to be unlinked.
    pub fn orphans(&self) -> Result<Vec<(Ino, Layout)>> {
        self.list_orphans().map_err(|code| self.failed("list the orphans of", code))
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if self.has_changes() && !self.tx.is_over() {
            self.state.stale = true;
        }
    }
}
