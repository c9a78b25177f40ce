//! The shard's environment: how it is created and opened, and its state in memory.
//!
//! The environment is opened WRITEMAP and NOSYNC: a commit is a few stores to the page cache. It survives the death of
//! this process at any instant, but not the loss of the node. NOLOCK is safe because only one process has the
//! environment: an flock on the file `lock` beside it enforces this. So a killed process leaves no reader slots and no
//! mutex behind, and a transaction makes no system call for locks.
//!
//! One thread at a time uses the shard. Tests: here, and crates/meta/tests.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_types::limits::NODE_NUMBER_MAX;
use forebay_types::{Attr, Code, Error, Ino, Layout, NodeId, Result, Timestamp};
use heed::{Env, EnvFlags, EnvOpenOptions, WithoutTls};
use rustix::fs::{flock, FlockOperation};

use crate::absences::Absences;
use crate::directories::Directories;
use crate::holds::Holds;
use crate::keys;
use crate::lmdb_txn::{code_of, pages, Transaction, Tree};
use crate::page_budget::Space;
use crate::record::{
    decode_format, encode_format, Inode, Ledger, FORMAT_VERSION, INODE_BYTES_MAX, LEDGER_BYTES_MAX,
};

const DATA_FILE: &str = "data.mdb";
const LOCK_FILE: &str = "lock";

/// Options of a new shard.
#[derive(Clone, Copy, Debug)]
pub struct ShardOptions {
    /// The node's number; the first node's shard has the pool's root directory.
    pub node: NodeId,
    /// Size in bytes to which the shard may grow.
    pub map_bytes: u64,
    /// Permission bits of the root directory.
    pub root_mode: u32,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
}

/// Statistics of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShardStatistics {
    /// Inodes.
    pub inodes: u64,
    /// Directory entries.
    pub entries: u64,
    /// Inodes without links whose backing files are still to be unlinked.
    pub orphans: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages that hold records.
    pub pages_used: u64,
    /// Pages that were used and are free now, or that hold LMDB's own lists.
    pub pages_free: u64,
    /// Pages that are allocated on the medium.
    pub pages_backed: u64,
    /// Number of pages to which the shard may grow.
    pub pages_max: u64,
    /// Height of the tree.
    pub depth: u64,
    /// Bytes that the data file takes on its medium.
    pub bytes: u64,
}

/// The shard's state in memory. An open batch borrows it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) directories: Directories,
    /// Orphans of the batch. They are written at commit, unless their backing files have been unlinked by then, as is
    /// the rule in long batches.
    pub(crate) new_orphans: BTreeMap<u64, Layout>,
    /// Names and directories held by cross-node transactions.
    pub(crate) holds: Holds,
    /// Names that unlisted directories' stores lack.
    pub(crate) absences: Absences,
    /// Changes of pending places since the shard was opened.
    pub(crate) pending_changes: u64,
    /// The greatest number of an inode that has a copy, or had one; none before that was looked up.
    pub(crate) last_copied: Option<u64>,
    /// Whether any file of a store has a record as one with several names; none before that was looked up.
    pub(crate) has_linked_files: Option<bool>,
    pub(crate) space: Space,
    /// A batch was dropped: ledger and directories must be read again.
    pub(crate) stale: bool,
}

/// The part of the namespace that a node owns.
pub struct Shard {
    pub(crate) env: Env<WithoutTls>,
    pub(crate) tree: Tree,
    pub(crate) state: RefCell<State>,
    pub(crate) hash: fn(&[u8]) -> u64,
    node: NodeId,
    dir: PathBuf,
    _lock: File,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("node", &self.node).field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// Takes the lock that excludes other processes.
fn take_lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK_FILE);
    let what = || format!("cannot lock the shard {}", dir.display());
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| Error::io(what(), &e).cure("check that the pool's directory exists and is yours"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::new(Code::Busy, what())
            .why("another process has it open")
            .cure("stop the pool first (forebay down), or wait until the other command has finished")),
        Err(e) => Err(Error::io(what(), &e.into())),
    }
}

fn open_env(dir: &Path, map_bytes: Option<u64>) -> Result<Env<WithoutTls>> {
    let what = || format!("cannot open the shard {}", dir.display());
    // heed opens by a path, and resolves it. A target that is mounted nowhere has no path, so the data file is opened
    // by its descriptor's path in /proc.
    let data = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(dir.join(DATA_FILE))
        .map_err(|e| Error::io(what(), &e).cure("check that the pool's directory exists and is yours"))?;
    let by_descriptor = forebay_sys::descriptor::path(&data);
    if let (Ok(ours), Ok(resolved)) = (data.metadata(), by_descriptor.canonicalize()) {
        // The resolved path may exist in this process's tree and be another file than the one within a private mount.
        if !std::fs::metadata(&resolved).is_ok_and(|m| (m.dev(), m.ino()) == (ours.dev(), ours.ino())) {
            return Err(Error::new(Code::Busy, what())
                .why(format!("{} exists under the same path as the pool's private mount", resolved.display()))
                .cure("move that file away, or give the pool a directory with --path"));
        }
    }
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    if let Some(bytes) = map_bytes {
        options.map_size(bytes as usize);
    }
    let flags = EnvFlags::WRITE_MAP
        | EnvFlags::NO_SYNC
        | EnvFlags::NO_META_SYNC
        | EnvFlags::NO_LOCK
        | EnvFlags::NO_READ_AHEAD
        | EnvFlags::NO_SUB_DIR;
    // SAFETY: NO_LOCK requires that no second process has the environment, and that no reader is older than the last
    // two transactions. The flock that the caller holds ensures the first; the second holds as only one thread uses it,
    // with either one write transaction or one read transaction. NO_SYNC and WRITE_MAP only give up what must survive
    // the loss of the node.
    unsafe { options.flags(flags) };
    // SAFETY: the map is of a file in a directory of mode 0700 that only this process changes, held by the flock.
    unsafe { options.open(&by_descriptor) }.map_err(|e| {
        Error::new(code_of(&e), what())
            .why(&e)
            .cure("if the pool is damaged, copy the data out of the backing files, then create a new pool")
    })
}

/// Refuses a file that is not an LMDB data file before LMDB maps it.
fn check_data_file(dir: &Path) -> Result<()> {
    const MAGIC_OFFSET: usize = 16;
    const MAGIC: [u8; 4] = 0xBEEF_C0DEu32.to_ne_bytes();
    let what = || format!("cannot open the shard {}", dir.display());
    let mut head = Vec::new();
    File::open(dir.join(DATA_FILE)).and_then(|f| f.take(64).read_to_end(&mut head)).map_err(|e| {
        Error::io(what(), &e)
            .cure("check the pool's directory; `forebay up` makes a pool where there is none")
    })?;
    if head.len() < 64 || head[MAGIC_OFFSET..MAGIC_OFFSET + 4] != MAGIC {
        return Err(Error::new(Code::Corrupt, what())
            .why(format!("{DATA_FILE} is not a shard's data file"))
            .cure("the pool is damaged: copy the data out of the backing files, then create a new pool"));
    }
    Ok(())
}

impl Shard {
    /// Creates a shard in a directory that has none. The first node's shard gets the root directory, created at `now`.
    pub fn create(dir: &Path, options: &ShardOptions, now: Timestamp) -> Result<Shard> {
        Shard::create_with_hash(dir, options, now, forebay_types::name_hash)
    }

    /// Opens the shard in a directory.
    ///
    /// # Errors
    /// [`Code::Busy`] if another process has it open; [`Code::NewerFormat`] if a newer Forebay wrote it;
    /// [`Code::Corrupt`] if its first records are damaged.
    pub fn open(dir: &Path) -> Result<Shard> {
        Shard::open_with_hash(dir, forebay_types::name_hash)
    }

    /// [`Shard::open`] for [`Shard::check`]: opens a damaged shard too, if its format is known. A batch on it may fail.
    pub fn open_for_check(dir: &Path) -> Result<Shard> {
        Shard::open_unsettled(dir, forebay_types::name_hash)
    }

    /// [`Shard::create`] with another hash of names, to test names of equal hash. A hash is 1 to 2^56 - 1.
    #[doc(hidden)]
    pub fn create_with_hash(
        dir: &Path,
        options: &ShardOptions,
        now: Timestamp,
        hash: fn(&[u8]) -> u64,
    ) -> Result<Shard> {
        let lock = take_lock(dir)?;
        let what = || format!("cannot make a shard in {}", dir.display());
        if dir.join(DATA_FILE).exists() {
            return Err(Error::new(Code::Exists, what())
                .why("the directory already has a shard")
                .cure("open it, or remove the directory if the pool is no longer needed"));
        }
        if !options.node.is_valid() {
            return Err(
                Error::new(Code::Invalid, what()).why(format!("node numbers are 1 to {NODE_NUMBER_MAX}"))
            );
        }
        let page = rustix::param::page_size() as u64;
        let made = make(dir, options, options.map_bytes / page * page, now, &what);
        let (env, tree, state) = made.inspect_err(|_| {
            // An incomplete file is of no use, and the next attempt would fail because of it.
            let _ = std::fs::remove_file(dir.join(DATA_FILE));
        })?;
        let dir = dir.to_path_buf();
        Ok(Shard { env, tree, state: RefCell::new(state), hash, node: options.node, dir, _lock: lock })
    }

    /// [`Shard::open`] for a shard that was created with another hash of names.
    #[doc(hidden)]
    pub fn open_with_hash(dir: &Path, hash: fn(&[u8]) -> u64) -> Result<Shard> {
        let shard = Shard::open_unsettled(dir, hash)?;
        // An empty transaction makes the pages that the last one freed usable again.
        let mut batch = shard.begin()?;
        batch.rewrite_ledger()?;
        batch.commit()?;
        Ok(shard)
    }

    fn open_unsettled(dir: &Path, hash: fn(&[u8]) -> u64) -> Result<Shard> {
        let what = || format!("cannot open the shard {}", dir.display());
        let corrupt = |why: &str| {
            Error::new(Code::Corrupt, what())
                .why(why)
                .cure("the pool is damaged: copy the data out of the backing files, then create a new pool")
        };
        if !dir.join(DATA_FILE).exists() {
            return Err(Error::new(Code::NotFound, what())
                .why("the directory has no shard")
                .cure("check the pool's directory; `forebay up` makes a pool where there is none"));
        }
        let lock = take_lock(dir)?;
        check_data_file(dir)?;
        let env = open_env(dir, None)?;
        let broken = |e: heed::Error| Error::new(code_of(&e), what()).why(&e);
        let (tree, format) = {
            let txn = env.read_txn().map_err(broken)?;
            let tree: Option<Tree> = env.open_database(&txn, None).map_err(broken)?;
            let tree = tree.ok_or_else(|| corrupt("it has no records"))?;
            let format = tree.get(&txn, keys::FORMAT).map_err(broken)?.map(decode_format);
            (tree, format)
        };
        let (version, node) = match format {
            Some(Ok(format)) => format,
            Some(Err(_)) => return Err(corrupt("its format record is damaged")),
            None => return Err(corrupt("its creation was not completed")),
        };
        if version > FORMAT_VERSION {
            return Err(Error::new(Code::NewerFormat, what())
                .why(format!(
                    "its format is version {version}, and this Forebay knows up to {FORMAT_VERSION}"
                ))
                .cure("use the Forebay that made the pool, or a newer one"));
        }
        if (1..FORMAT_VERSION).contains(&version) {
            return Err(Error::new(Code::NotSupported, what())
                .why(format!(
                    "its format is version {version}, of a Forebay before the first release; this one reads {FORMAT_VERSION}"
                ))
                .cure("stage its data out with the Forebay that made it, and make a new pool"));
        }
        if version == 0 || !node.is_valid() {
            return Err(corrupt("its format record is damaged"));
        }
        let space = new_space(&env, dir)?;
        let state = State::new(Ledger::default(), space);
        let dir = dir.to_path_buf();
        Ok(Shard { env, tree, state: RefCell::new(state), hash, node, dir, _lock: lock })
    }

    /// The node that owns the shard.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The shard's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Counts of the shard, and its size.
    pub fn statistics(&self) -> Result<ShardStatistics> {
        let state = self.borrow("count")?;
        let broken = |code| Error::new(code, format!("cannot read the shard {}", self.dir.display()));
        let txn = self.env.read_txn().map_err(|e| broken(code_of(&e)))?;
        if state.stale {
            drop(txn);
            drop(state);
            drop(self.begin()?);
            return self.statistics();
        }
        let tree = pages(self.tree, &txn).map_err(broken)?;
        let used = self.used_pages();
        let state = &*state;
        Ok(ShardStatistics {
            inodes: state.ledger.inodes,
            entries: state.ledger.entries,
            orphans: state.ledger.orphans,
            page_bytes: self.env.stat().page_size as u64,
            pages_used: tree.all(),
            pages_free: used.saturating_sub(2 + tree.all()),
            pages_backed: state.space.backed_pages(),
            pages_max: state.space.map_pages(),
            depth: tree.depth,
            bytes: state.space.bytes_on_medium(),
        })
    }

    /// Pages up to the last one ever used, as of the last commit.
    pub(crate) fn used_pages(&self) -> u64 {
        self.env.info().last_page_number as u64 + 1
    }

    pub(crate) fn borrow(&self, what: &str) -> Result<RefMut<'_, State>> {
        self.state.try_borrow_mut().map_err(|_| {
            Error::new(Code::Busy, format!("cannot {what} on the shard {}", self.dir.display()))
                .why("a batch is open")
        })
    }
}

impl State {
    /// The initial state, before anything was read.
    fn new(ledger: Ledger, space: Space) -> State {
        let directories = Directories::default();
        State {
            ledger,
            directories,
            new_orphans: BTreeMap::new(),
            holds: Holds::default(),
            absences: Absences::default(),
            pending_changes: 0,
            last_copied: None,
            has_linked_files: None,
            space,
            stale: true,
        }
    }

    /// Reads the ledger, and the directories with pending attributes.
    pub(crate) fn reload(&mut self, tx: &Transaction<'_>, node: NodeId) -> std::result::Result<(), Code> {
        let (ledger, pending) = Ledger::decode(tx.get(keys::LEDGER)?.ok_or(Code::Corrupt)?)?;
        let mut directories = Directories::default();
        for p in &pending {
            let record = tx.get(&keys::inode(p.ino))?.ok_or(Code::Corrupt)?;
            let inode = Inode::decode(p.ino, record)?;
            if !inode.attr.is_directory() || directories.find(p.ino).is_some() {
                return Err(Code::Corrupt);
            }
            directories.insert_pending(inode, p);
        }
        self.ledger = ledger;
        self.directories = directories;
        self.new_orphans.clear();
        self.last_copied = None;
        self.has_linked_files = None;
        self.holds = Holds::read(tx, node)?;
        self.stale = false;
        Ok(())
    }
}

/// Creates the data file and the first records.
fn make(
    dir: &Path,
    options: &ShardOptions,
    map_bytes: u64,
    now: Timestamp,
    what: &dyn Fn() -> String,
) -> Result<(Env<WithoutTls>, Tree, State)> {
    let broken = |code: Code| Error::new(code, what());
    let env = open_env(dir, Some(map_bytes))?;
    let space = new_space(&env, dir)?;
    space.check_reserve(env.info().last_page_number as u64 + 1)?;
    let mut txn = env.write_txn().map_err(|e| broken(code_of(&e)).why(&e))?;
    let tree: Tree = env.create_database(&mut txn, None).map_err(|e| broken(code_of(&e)).why(&e))?;
    let mut tx = Transaction::new(txn, tree);
    let ledger = first_records(&mut tx, options, now).map_err(broken)?;
    tx.commit().map_err(broken)?;
    drop(tx);
    Ok((env, tree, State::new(ledger, space)))
}

fn new_space(env: &Env<WithoutTls>, dir: &Path) -> Result<Space> {
    let path = dir.join(DATA_FILE);
    let file = File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|e| Error::io(format!("cannot open {}", path.display()), &e))?;
    let page_bytes = env.stat().page_size as u64;
    let info = env.info();
    Space::new(file, page_bytes, info.map_size as u64 / page_bytes, info.last_page_number as u64 + 1)
}

fn first_records(
    tx: &mut Transaction<'_>,
    options: &ShardOptions,
    now: Timestamp,
) -> std::result::Result<Ledger, Code> {
    let mut ledger = Ledger { next_counter: 1, ..Ledger::default() };
    if options.node == NodeId::FIRST {
        let attr = Attr {
            ino: Ino::ROOT,
            size: 0,
            rdev: 0,
            parent: Ino::ROOT,
            mode: 0o040_000 | options.root_mode & 0o7777,
            uid: options.root_uid,
            gid: options.root_gid,
            nlink: 2,
            flags: 0,
            home: options.node,
            width_log2: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
        };
        let root = Inode { attr, layout: Layout::single(options.node, 0), cookie: 0, marks: 0 };
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = root.encode(&mut buffer)?;
        tx.put(&keys::inode(Ino::ROOT), &buffer[..n])?;
        ledger.next_counter = Ino::ROOT.counter() + 1;
        ledger.inodes = 1;
    }
    let mut buffer = [0; LEDGER_BYTES_MAX];
    let n = ledger.encode(std::iter::empty(), &mut buffer)?;
    tx.put(keys::LEDGER, &buffer[..n])?;
    tx.put(keys::FORMAT, &encode_format(FORMAT_VERSION, options.node))?;
    Ok(ledger)
}
