//! A batch: one write transaction for any number of requests, from begin to commit.
//!
//! [`Batch::apply`] answers a request and never fails itself: an error is the reply. A request that fails changes
//! nothing, because everything that can refuse it is checked before its first write. If LMDB itself fails during a
//! request, the batch is broken: every further request is answered with that code, and the commit fails.

use std::cell::RefMut;

use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{
    Caller, Code, Error, Ino, Layout, Parts, Reply, Request, Result, Timestamp, REPLY_HEADER_BYTES,
};

use crate::effects::Effects;
use crate::keys;
use crate::lmdb_txn::{code_of, Transaction};
use crate::page_budget::{Class, Usage, Work, STORE_REMOVAL_WRITES_MAX, STORE_WRITES_MAX};
use crate::record::{Inode, INODE_BYTES_MAX, LEDGER_BYTES_MAX};
use crate::shard::{Shard, State};

/// The largest number of bytes that a reply borrows.
pub const PAYLOAD_BYTES_MAX: usize = MESSAGE_BYTES_MAX - REPLY_HEADER_BYTES;

/// An unlisted directory, and the name of which the shard does not know whether the store has it; without a name if all
/// names are needed.
pub type Unlisted = (Ino, Option<Vec<u8>>);

/// The result of an operation; its error is a code, as on all hot paths.
pub(crate) type Answer<T> = std::result::Result<T, Code>;

/// The context of one request, passed to its operation.
pub(crate) struct Context<'c> {
    /// The user for whom the request is made.
    pub(crate) caller: Caller,
    /// The present time.
    pub(crate) now: Timestamp,
    /// Where the operation reports what it read or changed.
    pub(crate) effects: &'c mut Effects,
}

/// A write transaction on a [`Shard`]. If dropped without [`Batch::commit`] it changes nothing.
pub struct Batch<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) tx: Transaction<'a>,
    pub(crate) state: RefMut<'a, State>,
    /// The wide directory that the last request named.
    pub(crate) met_wide: Option<Parts>,
    /// The unlisted directory for which the last request was refused; with the name, if that is all that was needed.
    pub(crate) met_unlisted: Option<Unlisted>,
    usage: Option<Usage>,
    reserve_open: bool,
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("shard", &self.shard).finish_non_exhaustive()
    }
}

impl Shard {
    /// Begins a write transaction: a batch of requests that [`Batch::commit`] commits together. [`Code::Busy`] if one
    /// is open already.
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
                    .cure("run `forebay fsck` to see the damage; copy the data out of the backing files")
            })?;
        }
        state.directories.trim();
        Ok(Batch {
            shard: self,
            tx,
            state,
            met_wide: None,
            met_unlisted: None,
            usage: None,
            reserve_open: false,
        })
    }
}

impl<'a> Batch<'a> {
    /// Applies one request of `caller` at the time `now`. Bytes that the reply borrows (a listing, a value, a path) are
    /// written to `payload`, which should have [`PAYLOAD_BYTES_MAX`] bytes. What the request read or changed is
    /// appended to `effects`.
    ///
    /// A `Create` with a number: the caller guarantees that the number was reserved. [`Code::Stale`] if it was never
    /// assigned, or an inode has it.
    ///
    /// `Ping`, `Space`, `Place`, `Targets`, `Backing` and requests of class `peer` get [`Code::NotSupported`].
    /// `MakeBacking` returns the entry; the caller creates the files. The result depends only on the request, its time
    /// and the state before it: the same requests at the same times give the same shard, including inode numbers.
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
        let result = match (&result, self.state.ledger.has_stores() && request.changes()) {
            // It found the name, and changed nothing.
            (Ok(Reply::Created { created: false, .. }), _) => result,
            (Ok(_), true) => self.note_names(&mut context, request, mark).and(result),
            _ => result,
        };
        let written = self.count_writes();
        match (result, written) {
            (Ok(reply), Ok(())) => Ok(reply),
            (Err(code), _) | (_, Err(code)) => {
                // A failed look-up is an effect too: the board may hold the name.
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
            Request::ReadKnown { ino, cookie } => {
                self.narrow(ino)?;
                self.entries_behind(ino, cookie, false, payload)
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
            // Requests that take several shards are planned, and do not reach this point.
            Request::MakeDirectoryAt { .. } | Request::MoveDirectory { .. } => Err(Code::CrossDevice),
            Request::SetWidth { .. } => Err(Code::NoDevice),
            Request::PartsOf { ino } => self.tell_parts(ino),
            Request::NameOf { parent, ino } => self.name_of(parent, ino, payload),
            Request::Attach { ino, listed, settings } => self.attach_store(c, ino, listed, settings),
            Request::Detach { ino } => self.detach_store(c, ino),
            Request::Import { ino, objects } => self.import(c, ino, objects),
            Request::Listed { ino, epoch, objects } => self.listed(c, ino, epoch, objects),
            Request::Restore { ino } | Request::RestoreRange { ino, .. } => self.get_attr(c, ino),
            // The daemon has allowed it, or no store is concerned.
            Request::Recall { .. } => Ok(Reply::Done),
            // The daemon has waited, or nothing is to be waited for.
            Request::Persist { .. } => Ok(Reply::Count(0)),
            Request::WaitForStore { ino, fsync, close } => self.wait_for_store(c, ino, fsync, close),
            Request::Restored { ino, epoch, atime, mtime, layout } => {
                self.restored(c, ino, epoch, (atime, mtime), layout)
            }
            Request::BeginDrain { ino } => self.begin_drain(c, ino),
            Request::Pending { parent, name } => self.list_pending(parent, name, payload),
            Request::PendingChanges => Ok(Reply::Count(self.state.pending_changes)),
            Request::Intend { parent, name, version } => self.intend(c, parent, name, version),
            Request::Published { parent, name, ino, epoch, seen, version } => {
                self.published(c, parent, name, ino, epoch, seen, version)
            }
            Request::StoreReports { reports, .. } => self.take_reports(c, reports, payload),
            Request::Unpublished { parent, name, seen } => self.unpublished(c, parent, name, seen),
            Request::Settled { parent, name, seen } => self.settled(c, parent, name, seen),
            Request::Moved { parent, name, new_parent, new_name, version } => {
                self.moved(c, (parent, name), (new_parent, new_name), version)
            }
            Request::Release { ino, epoch, ref set } => self.release(c, ino, epoch, set),
            Request::Relocate { ino, node } => self.relocate(c, ino, node),
            Request::Pin { ino, pinned } => self.pin(c, ino, pinned),
            Request::StorePlace { ino } => self.store_place(ino, payload),
            Request::StorePlaces { inos, .. } => self.store_places(inos, payload),
            Request::Conflict { parent, name, found, version } => {
                self.note_conflict(c, parent, name, found, version)
            }
            Request::Forget { parent, name, relist, discard } => {
                self.forget(c, parent, name, relist, discard)
            }
            Request::CreateVolume { name, mode, maker, segment } => {
                self.create_volume(c, name, mode, maker, segment, payload)
            }
            Request::GrowVolume { name, ino, maker, segment } => {
                self.grow_volume(c, (name, ino), maker, segment, payload)
            }
            Request::CommitVolume { name, ino } => self.commit_volume(c, (name, ino), payload),
            Request::AbandonVolume { name, ino } => self.abandon_volume(c, name, ino),
            Request::ShrinkVolume { name, ino, bytes } => self.shrink_volume(c, (name, ino), bytes, payload),
            Request::DeleteVolume { name, ino } => self.delete_volume(c, name, ino),
            Request::GetVolume { name } => self.get_volume(name, payload),
            Request::ListVolumes { after } => self.list_volumes(after, payload),
            Request::Ping
            | Request::Space
            | Request::Place { .. }
            | Request::Targets
            | Request::Backing { .. }
            | Request::StoreWork { .. }
            | Request::StoreFailed { .. }
            | Request::RangeRestored { .. }
            | Request::Persisted { .. }
            | Request::LookedUp { .. }
            | Request::AskMover { .. }
            | Request::MoverWork
            | Request::MoverAnswer { .. }
            | Request::MakePiece { .. }
            | Request::MakePieceAway { .. }
            | Request::PiecesUnused { .. }
            | Request::ReviewPieces { .. }
            | Request::AreSegments { .. }
            | Request::EndSession { .. }
            | Request::AreThere { .. }
            | Request::RemoveBackings { .. }
            | Request::RenewLease
            | Request::RevokeName { .. }
            | Request::RevokeDirectory { .. } => Err(Code::NotSupported),
        }
    }

    /// Adds the writes since the last call to the estimate of pages that the transaction takes.
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

    /// Admits an operation that may write as much as `work`, or fails with [`Code::NoSpace`].
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
        let noted = match (self.state.ledger.has_stores(), class) {
            (false, _) => 0,
            (true, Class::Removal) => STORE_REMOVAL_WRITES_MAX,
            (true, _) => STORE_WRITES_MAX,
        };
        let work = Work { writes: work.writes + noted, ..work };
        let class = if self.reserve_open { Class::Removal } else { class };
        self.state.space.admit(usage, class, work)
    }

    /// Lets every request of this batch use the pages reserved for removals. Requests that were acknowledged before a
    /// crash are applied again this way: lack of a few pages must not refuse them.
    pub fn open_reserve(&mut self) {
        self.reserve_open = true;
    }

    /// True while requests are applied that were acknowledged before a crash.
    pub(crate) fn applies_again(&self) -> bool {
        self.reserve_open
    }

    /// Updates a directory in memory after its entries or links changed.
    #[inline]
    pub(crate) fn touch_directory(&mut self, c: &mut Context<'_>, slot: usize, entries: i64, links: i64) {
        let first = self.state.directories.touch(slot, entries, links, c.now);
        self.expect_write(first);
        c.effects.inode(self.state.directories.get(slot).entry());
    }

    /// If `first`, the commit will write one more record.
    #[inline]
    pub(crate) fn expect_write(&mut self, first: bool) {
        if let (true, Some(usage)) = (first, &mut self.usage) {
            usage.expect_write();
        }
    }

    /// The commit will write one more orphan.
    #[inline]
    pub(crate) fn expect_orphan(&mut self) {
        if let Some(usage) = &mut self.usage {
            usage.expect_orphan();
        }
    }

    /// The slot of a directory. [`Code::NotFound`] if there is no such inode, [`Code::NotDirectory`] if it is of
    /// another kind.
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

    /// An inode's record. For a directory that is in memory it may be outdated.
    #[inline]
    fn stored_inode(&self, ino: Ino) -> Answer<Option<Inode>> {
        self.tx.get(&keys::inode(ino))?.map(|bytes| Inode::decode(ino, bytes)).transpose()
    }

    /// An inode of any kind, if it exists.
    #[inline]
    pub(crate) fn find_inode(&self, ino: Ino) -> Answer<Option<Inode>> {
        match self.state.directories.peek(ino) {
            Some(inode) => Ok(Some(*inode)),
            None => self.stored_inode(ino),
        }
    }

    /// An inode that a request names; [`Code::NotFound`] if it is gone.
    #[inline]
    pub(crate) fn inode(&self, ino: Ino) -> Answer<Inode> {
        self.find_inode(ino)?.ok_or(Code::NotFound)
    }

    /// An inode that an entry leads to; [`Code::Corrupt`] if it does not exist.
    #[inline]
    pub(crate) fn entered_inode(&self, ino: Ino) -> Answer<Inode> {
        self.find_inode(ino)?.ok_or(Code::Corrupt)
    }

    /// Stores an inode. A directory that is in memory is changed there and written at commit.
    pub(crate) fn store_inode(&mut self, inode: &Inode) -> Answer<()> {
        if inode.attr.is_directory() {
            let slot = self.directory(inode.attr.ino)?;
            let (kept, first) = self.state.directories.change_whole(slot);
            *kept = *inode;
            self.expect_write(first);
            return Ok(());
        }
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(inode.attr.ino), &buffer[..n])
    }

    /// Writes the batch's state in memory to records: orphans, directories and the ledger.
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

    /// Writes the ledger.
    pub(crate) fn write_ledger(&mut self) -> Answer<()> {
        let mut buffer = [0; LEDGER_BYTES_MAX];
        let n = self.state.ledger.encode(self.state.directories.pending(), &mut buffer)?;
        self.tx.put(keys::LEDGER, &buffer[..n])
    }

    /// Writes the unchanged ledger, so that the batch has something to commit.
    pub(crate) fn rewrite_ledger(&mut self) -> Result<()> {
        self.write_back().map_err(|code| self.failed("write the ledger of", code))
    }

    /// An error with text.
    pub(crate) fn failed(&self, verb: &str, code: Code) -> Error {
        Error::new(code, format!("cannot {verb} the shard {}", self.shard.dir().display()))
    }

    /// True when the batch should be committed before the next request: that request might fail for lack of pages that
    /// another transaction will find free. Check this before each request when batches are long or space is short. A
    /// removal fails with [`Code::NoSpace`] for no other reason.
    pub fn is_spent(&self) -> bool {
        self.usage.as_ref().is_some_and(|usage| self.state.space.is_spent(usage))
    }

    /// True when the batch has something to commit.
    pub fn has_changes(&self) -> bool {
        self.tx.wrote() || self.state.directories.is_changed() || !self.state.new_orphans.is_empty()
    }

    /// Commits all requests of the batch. If it fails, none of them takes effect.
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

    /// Inodes without links whose backing files are still to be unlinked, with their layouts.
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
