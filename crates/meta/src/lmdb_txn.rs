//! One LMDB write transaction on the shard's only database, in bytes: get, put, insert, append, delete, walk.
//!
//! It counts its writes for [`crate::page_budget`], and remembers a failure of LMDB: after one, the transaction can
//! only be dropped. Operations check everything that can fail before their first write, so such a failure means a
//! broken medium or a broken tree.

use std::ops::Bound;

use forebay_types::Code;
use heed::types::Bytes;
use heed::{Database, MdbError, PutFlags, RoTxn, RwTxn};

use crate::page_budget::TreePages;

/// The shard's only database.
pub(crate) type Tree = Database<Bytes, Bytes>;

/// A key and its value.
pub(crate) type Pair<'t> = (&'t [u8], &'t [u8]);

/// The code for an LMDB error.
pub(crate) fn code_of(e: &heed::Error) -> Code {
    match e {
        heed::Error::Io(e) => e.raw_os_error().map_or(Code::Io, Code::from_errno),
        heed::Error::Mdb(MdbError::MapFull) => Code::NoSpace,
        heed::Error::Mdb(
            MdbError::Corrupted
            | MdbError::PageNotFound
            | MdbError::Invalid
            | MdbError::Incompatible
            | MdbError::VersionMismatch,
        ) => Code::Corrupt,
        heed::Error::EnvAlreadyOpened => Code::Busy,
        _ => Code::Io,
    }
}

/// A write transaction.
pub(crate) struct Transaction<'a> {
    txn: Option<RwTxn<'a>>,
    tree: Tree,
    writes: u64,
    deletions: u64,
    wrote: bool,
    broken: Option<Code>,
}

impl<'a> Transaction<'a> {
    pub(crate) fn new(txn: RwTxn<'a>, tree: Tree) -> Transaction<'a> {
        Transaction { txn: Some(txn), tree, writes: 0, deletions: 0, wrote: false, broken: None }
    }

    /// The transaction, to read from. It exists until the commit, which consumes the batch.
    fn reading(&self) -> Result<&RwTxn<'a>, Code> {
        match (&self.txn, self.broken) {
            (Some(txn), None) => Ok(txn),
            (_, broken) => Err(broken.unwrap_or(Code::Io)),
        }
    }

    fn fail(&mut self, e: &heed::Error) -> Code {
        let code = code_of(e);
        self.broken = Some(code);
        code
    }

    /// True once anything was written.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote
    }

    /// The value of a key.
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<&[u8]>, Code> {
        self.tree.get(self.reading()?, key).map_err(|e| code_of(&e))
    }

    fn writing(&mut self) -> Result<(&mut RwTxn<'a>, Tree), Code> {
        self.wrote = true;
        match (&mut self.txn, self.broken) {
            (Some(txn), None) => Ok((txn, self.tree)),
            (_, broken) => Err(broken.unwrap_or(Code::Io)),
        }
    }

    /// Stores a value. Replaces the old one.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Code> {
        let (txn, tree) = self.writing()?;
        let done = tree.put(txn, key, value);
        self.writes += 1;
        done.map_err(|e| self.fail(&e))
    }

    /// Stores a value unless the key exists. Returns true if it did. The existing value can then be read with
    /// [`Transaction::get`].
    pub(crate) fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Code> {
        let (txn, tree) = self.writing()?;
        match tree.put_with_flags(txn, PutFlags::NO_OVERWRITE, key, value) {
            Ok(()) => {
                self.writes += 1;
                Ok(true)
            }
            Err(heed::Error::Mdb(MdbError::KeyExist)) => Ok(false),
            Err(e) => Err(self.fail(&e)),
        }
    }

    /// Stores a value. Pages are filled better if the key is greater than all others, as it should be.
    pub(crate) fn append(&mut self, key: &[u8], value: &[u8]) -> Result<(), Code> {
        let (txn, tree) = self.writing()?;
        match tree.put_with_flags(txn, PutFlags::APPEND, key, value) {
            Ok(()) => {
                self.writes += 1;
                Ok(())
            }
            Err(heed::Error::Mdb(MdbError::KeyExist)) => self.put(key, value),
            Err(e) => Err(self.fail(&e)),
        }
    }

    /// Removes a key. Returns true if it existed.
    pub(crate) fn delete(&mut self, key: &[u8]) -> Result<bool, Code> {
        let (txn, tree) = self.writing()?;
        let done = tree.delete(txn, key);
        self.deletions += 1;
        done.map_err(|e| self.fail(&e))
    }

    /// Keys from `first` to `last`, both included, with their values.
    pub(crate) fn range<'t>(
        &'t self,
        first: &[u8],
        last: &[u8],
    ) -> Result<impl Iterator<Item = Result<Pair<'t>, Code>>, Code> {
        walk(self.tree, self.reading()?, first, last)
    }

    /// The first key from `first` to `last`, both included, with its value.
    pub(crate) fn first_in(&self, first: &[u8], last: &[u8]) -> Result<Option<Pair<'_>>, Code> {
        self.range(first, last)?.next().transpose()
    }

    /// The last key from `first` to `last`, both included, with its value.
    pub(crate) fn last_in(&self, first: &[u8], last: &[u8]) -> Result<Option<Pair<'_>>, Code> {
        let range = (Bound::Included(first), Bound::Included(last));
        let mut found = self.tree.rev_range(self.reading()?, &range).map_err(|e| code_of(&e))?;
        found.next().transpose().map_err(|e| code_of(&e))
    }

    /// The number of writes and deletions since the last call.
    #[inline]
    pub(crate) fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.writes), std::mem::take(&mut self.deletions))
    }

    /// Number of pages of the tree, at present.
    #[inline]
    pub(crate) fn pages(&self) -> Result<TreePages, Code> {
        pages(self.tree, self.reading()?)
    }

    /// Commits the transaction.
    pub(crate) fn commit(&mut self) -> Result<(), Code> {
        if let Some(code) = self.broken {
            return Err(code);
        }
        let txn = self.txn.take().ok_or(Code::Io)?;
        txn.commit().map_err(|e| self.fail(&e))
    }

    /// True after a failure of the shard itself: nothing of the transaction takes effect.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// True once the transaction was committed.
    pub(crate) fn is_over(&self) -> bool {
        self.txn.is_none() && self.broken.is_none()
    }
}

/// Keys from `first` to `last`, both included, with their values.
pub(crate) fn walk<'t>(
    tree: Tree,
    txn: &'t RoTxn,
    first: &[u8],
    last: &[u8],
) -> Result<impl Iterator<Item = Result<Pair<'t>, Code>>, Code> {
    let range = tree.range(txn, &(Bound::Included(first), Bound::Included(last))).map_err(|e| code_of(&e))?;
    Ok(range.map(|item| item.map_err(|e| code_of(&e))))
}

/// Number of pages of the tree.
pub(crate) fn pages(tree: Tree, txn: &RoTxn) -> Result<TreePages, Code> {
    let stat = tree.stat(txn).map_err(|e| code_of(&e))?;
    Ok(TreePages {
        depth: stat.depth as u64,
        branches: stat.branch_pages as u64,
        leaves: stat.leaf_pages as u64,
        overflow: stat.overflow_pages as u64,
    })
}
