//! The file system: dispatches requests to their handlers, and holds the state that all handlers share.
//!
//! A handler takes a request and builds the body of its reply. It does not read or write the device for this. Handlers
//! reach the pool through the client library, as every other interface does. Node numbers are the pool's inode numbers,
//! except the root's, which is 1, and those of files without a name ([`TEMPORARY`]).
//!
//! The kernel checks permissions (`default_permissions`) against the attributes that it has cached. Where it may have
//! an old owner, [`crate::rights`] checks again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use forebay_client::{nameless, Pool};
use forebay_types::limits::NODE_NUMBER_MAX;
use forebay_types::{Caller, Code, Entry, Ino};

use crate::cache_rules::CacheRules;
use crate::closing::Nameless;
use crate::errno::Errno;
use crate::handles::{Handle, Handles};
use crate::lock_table::Locks;
use crate::lookup_pins::LookupPins;
use crate::moved::Moved;
use crate::nodes::{Nodes, Place, Seen};
use crate::opened::{fstat, is_unwritten, open_backing};
use crate::registrar::Registrar;
use crate::waiting::Waiting;
use forebay_fuse::protocol::{self, op, Body, Request, Validity, ROOT_NODE};
use forebay_fuse::Device;

/// Node numbers of files made without a name begin here. No inode of the pool has a number as high, because no node has
/// such a number.
pub(crate) const TEMPORARY: u64 = (NODE_NUMBER_MAX as u64 + 1) << Ino::COUNTER_BITS;

/// How a request is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The body is the reply.
    Reply,
    /// No reply is needed, or another function sends it.
    Silence,
}

/// How the data of files is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataPath {
    /// The kernel accesses the backing files itself.
    Passthrough,
    /// The same; a helper registers the files, because this user may not.
    PassthroughByHelper,
    /// By requests to this process, for the given reason.
    Requests(String),
}

/// A mounted pool.
#[derive(Debug)]
pub struct FileSystem {
    pub(crate) pool: &'static Pool,
    pub(crate) root: Ino,
    pub(crate) device: Arc<Device>,
    /// Registers files for passthrough. Set once this is known to be permitted.
    pub(crate) registrar: OnceLock<Arc<Registrar>>,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    pub(crate) locks: Locks,
    pub(crate) cache_rules: CacheRules,
    pub(crate) lookup_pins: LookupPins,
    pub(crate) nameless: Nameless,
    pub(crate) moved: Moved,
    pub(crate) waiting: Arc<Waiting>,
    /// Opens of files that are read while they are restored.
    pub(crate) arriving: Arc<AtomicUsize>,
    next_temporary: AtomicU64,
    /// The inodes that files without a name got with their first name, by node number; and how many they are.
    named: Mutex<HashMap<u64, u64>>,
    second_nodes: AtomicUsize,
}

impl FileSystem {
    /// A file system of the pool, to be served on a connection.
    pub fn new(pool: &'static Pool, device: Arc<Device>) -> Result<FileSystem, Code> {
        Ok(FileSystem {
            pool,
            root: pool.root()?,
            device,
            registrar: OnceLock::new(),
            nodes: Nodes::new(),
            handles: Handles::default(),
            locks: Locks::new(),
            cache_rules: CacheRules::default(),
            lookup_pins: LookupPins::default(),
            nameless: Nameless::default(),
            moved: Moved::default(),
            waiting: Arc::new(Waiting::new()),
            arriving: Arc::default(),
            next_temporary: AtomicU64::new(TEMPORARY),
            named: Mutex::default(),
            second_nodes: AtomicUsize::new(0),
        })
    }

    /// The inode of a node.
    pub(crate) fn ino(&self, node: u64) -> Ino {
        match node {
            ROOT_NODE => self.root,
            node if node >= TEMPORARY => Ino(self.named().get(&node).copied().unwrap_or(node)),
            node => Ino(node),
        }
    }

    /// The node of an inode.
    pub(crate) fn node(&self, ino: Ino) -> u64 {
        if ino == self.root {
            ROOT_NODE
        } else {
            ino.0
        }
    }

    /// Records the place of a directory that the reply is about to give to the kernel.
    pub(crate) fn note_place(&self, parent: Ino, name: &[u8], st: &libc::stat) {
        if st.st_mode & libc::S_IFMT == libc::S_IFDIR && self.pool.spans_nodes() {
            let place = Place { parent: self.node(parent), name: name.into() };
            self.moved.note_place(&self.nodes, &self.device, st.st_ino, place);
        }
    }

    pub(crate) fn new_temporary(&self) -> u64 {
        self.next_temporary.fetch_add(1, Ordering::Relaxed)
    }

    /// The registrar of backing files, if registration is permitted.
    pub(crate) fn registrar(&self) -> Option<&Arc<Registrar>> {
        self.registrar.get()
    }

    pub(crate) fn caller(rq: &Request<'_>) -> Caller {
        Caller { uid: rq.uid, gid: rq.gid }
    }

    /// An inode's entry; none for an inode that has lost its last name or never had one.
    pub(crate) fn entry(&self, ino: Ino) -> Result<Option<Entry>, Errno> {
        if ino.0 >= TEMPORARY {
            return Ok(None);
        }
        match self.pool.get_attr(ino) {
            Ok(entry) => Ok(Some(entry)),
            Err(Code::NotFound) => Ok(None),
            Err(code) => Err(code.into()),
        }
    }

    /// Attributes of a node's inode, also of one that has no name any more.
    pub(crate) fn stat(&self, node: u64) -> Result<(libc::stat, Option<Entry>), Errno> {
        let found = self.lookup_pins.take_found(self.ino(node).0);
        for _ in 0..2 {
            let Some(entry) = self.entry(self.ino(node))? else { break };
            match self.stat_entry(node, &entry) {
                Ok(st) => return Ok((st, Some(entry))),
                Err(Code::Stale | Code::NotFound) => {} // removed between the two
                Err(code) => return Err(code.into()),
            }
        }
        self.stat_nameless(self.open_ino(node), self.ino(node), found).map(|st| (st, None))
    }

    /// Attributes of an inode that has a name. An open file need not be looked up on the target.
    fn stat_entry(&self, node: u64, entry: &Entry) -> Result<libc::stat, Code> {
        let is_one = entry.attr.is_file() && self.pool.is_one_here(&entry.layout);
        let opened = if is_one { self.nodes.opened(self.open_ino(node).0) } else { None };
        match opened.and_then(|opened| opened.any()).map(|file| fstat(&file)) {
            Some(Ok(backing)) => Ok(self.pool.stat_opened(entry, &backing)),
            _ => self.pool.stat_entry(entry),
        }
    }

    /// Attributes of an inode without a name, from what was recorded of it and from its open file. Size and times of a
    /// file that nobody has open are those that its look-up has just `found`. Otherwise they are not known any more: it
    /// has lost its name since the kernel looked that up, and with ESTALE the kernel looks it up again. `named` is the
    /// inode that a file without a name got with its first name, else `ino`.
    fn stat_nameless(&self, ino: Ino, named: Ino, found: Option<libc::stat>) -> Result<libc::stat, Errno> {
        let mut seen = self.nodes.seen(ino.0).ok_or(Errno(libc::ESTALE))?;
        // SAFETY: an all-zero stat is valid.
        let mut st: libc::stat = unsafe { std::mem::zeroed() };
        if let Some(file) = self.nodes.opened(ino.0).and_then(|opened| opened.any()) {
            st = fstat(&file)?;
            // Another interface may have changed mode, owner and group since.
            if let Some((mode, uid, gid)) = nameless::stored_owner(std::os::fd::AsRawFd::as_raw_fd(&*file)) {
                seen = Seen { mode, uid, gid };
            }
        } else if let Some(Handle::Parts(file, _)) =
            self.handles.parts_of(ino.0).or_else(|| self.handles.parts_of(named.0)).as_deref()
        {
            st = file.stat()?;
        } else if let Some(Handle::Arriving(arriving)) = self.handles.arriving_of(named.0).as_deref() {
            st = arriving.stat()?;
        } else if let Some(found) = found {
            st = found;
        } else if seen.mode & libc::S_IFMT == libc::S_IFREG {
            return Err(self.lookup_pins.came_too_late());
        }
        st.st_ino = ino.0;
        st.st_nlink = 0;
        st.st_rdev = 0;
        st.st_blksize = 128 * 1024;
        (st.st_mode, st.st_uid, st.st_gid) = (seen.mode, seen.uid, seen.gid);
        Ok(st)
    }

    /// Gives the kernel an inode, as an entry of `parent`.
    pub(crate) fn put_entry(&self, out: &mut Body, parent: Ino, name: &[u8], st: &libc::stat) {
        let ino = Ino(st.st_ino);
        self.nodes.add_lookup(ino.0, Seen::of(st));
        self.lookup_pins.note_found(st);
        self.note_place(parent, name, st);
        let (entry, attr) = (self.entry_validity(parent), self.found_validity(st));
        protocol::put_entry_out(out, self.node(ino), st, entry, attr);
    }

    /// How long the kernel may use a name in `parent`. No notice arrives of changes by other nodes.
    pub(crate) fn entry_validity(&self, parent: Ino) -> Validity {
        if self.pool.hears_of_all_changes_in(parent) {
            self.cache_rules.entry()
        } else {
            Validity::NONE
        }
    }

    /// How long the kernel may use the attributes of an inode that it requests by number, and so already knows.
    pub(crate) fn attr_validity(&self, node: u64, st: &libc::stat) -> Validity {
        // This node gets no notice when other nodes change inodes that they serve, or when their programs write files.
        let is_file = st.st_mode & libc::S_IFMT == libc::S_IFREG;
        let is_told = self.pool.is_served_here(Ino(st.st_ino)) && !(is_file && self.pool.spans_nodes());
        // A node that does not serve all entries of a directory gets no notice of changes to the others.
        let is_dir = st.st_mode & libc::S_IFMT == libc::S_IFDIR;
        let is_told = is_told && (!is_dir || self.pool.hears_of_all_changes_in(Ino(st.st_ino)));
        if !is_told || node >= TEMPORARY || self.has_second_node(st.st_ino) {
            return Validity::NONE;
        }
        // The kernel itself knows of writes through the mount.
        self.cache_rules.attr(st, || self.may_be_stored_to(st.st_ino))
    }

    /// True when stores through a mapping may change an inode's times without notice to the kernel's FUSE code. A
    /// mapping may outlive the last close; the backing file then refuses a read lease.
    fn may_be_stored_to(&self, ino: u64) -> bool {
        if !self.nodes.was_written(ino) {
            return false;
        }
        let is_mapped = || {
            let entry = self.pool.get_attr(Ino(ino));
            // No process has a released file open.
            if entry.as_ref().is_ok_and(|entry| entry.attr.is_file() && !entry.attr.is_resident()) {
                return false;
            }
            let file = entry.and_then(|e| open_backing(self.pool, &e, libc::O_RDONLY));
            file.map_or(true, |file| !is_unwritten(&file))
        };
        self.nodes.is_open(ino) || is_mapped() || !self.nodes.forget_writer(ino)
    }

    /// The same for an inode in the reply to a look-up. Until the kernel has read the reply it may not know the inode,
    /// and then it ignores invalidations of it. So while other programs use the pool, these attributes are valid for a
    /// moment only: the kernel soon requests them again, by number.
    pub(crate) fn found_validity(&self, st: &libc::stat) -> Validity {
        let validity = self.attr_validity(st.st_ino, st);
        if self.cache_rules.is_alone() && !self.pool.spans_nodes() {
            validity
        } else {
            validity.min(Validity::BRIEF)
        }
    }

    /// True when the kernel knows an inode under two node numbers, because it was opened with O_TMPFILE and linked
    /// later. A change through one number does not update what the kernel has cached under the other.
    fn has_second_node(&self, ino: u64) -> bool {
        self.second_nodes.load(Ordering::Acquire) > 0 && self.named().values().any(|named| *named == ino)
    }

    /// The inodes that files without a name got with their first name.
    fn named(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the inode that a file without a name got with its first name.
    pub(crate) fn note_second_node(&self, node: u64, ino: Ino) {
        let mut named = self.named();
        named.insert(node, ino.0);
        self.second_nodes.store(named.len(), Ordering::Release);
    }

    /// Forgets the inode of a file that was made without a name, if the kernel has released and forgotten its node.
    pub(crate) fn forget_second_node_if_gone(&self, node: u64) {
        if node < TEMPORARY || self.nodes.seen(node).is_some() {
            return;
        }
        let mut named = self.named();
        named.remove(&node);
        self.second_nodes.store(named.len(), Ordering::Release);
    }

    /// Serves one request. The session itself serves READ, UNLINK, INTERRUPT and lock requests that may wait, because
    /// their replies are not sent in the usual place.
    pub(crate) fn serve(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        match rq.opcode {
            op::LOOKUP => self.lookup(rq, out),
            op::FORGET => self.forget(rq),
            op::BATCH_FORGET => self.batch_forget(rq),
            op::GETATTR => self.getattr(rq, out),
            op::STATX => self.statx(rq, out),
            op::SETATTR => self.setattr(rq, out),
            op::READLINK => self.readlink(rq, out),
            op::SYMLINK => self.symlink(rq, out),
            op::MKNOD => self.mknod(rq, out),
            op::MKDIR => self.mkdir(rq, out),
            op::RMDIR => self.rmdir(rq),
            op::RENAME => self.rename(rq, false),
            op::RENAME2 => self.rename(rq, true),
            op::LINK => self.link(rq, out),
            op::OPEN => self.open(rq, out),
            op::CREATE => self.create(rq, out),
            op::TMPFILE => self.tmpfile(rq, out),
            op::RELEASE => self.release(rq),
            op::WRITE => self.write(rq, out),
            op::FLUSH => self.flush(rq),
            op::FSYNC => self.fsync(rq),
            op::FALLOCATE => self.fallocate(rq),
            op::LSEEK => self.lseek(rq, out),
            op::COPY_FILE_RANGE => self.copy_file_range(rq, out, false),
            op::COPY_FILE_RANGE_64 => self.copy_file_range(rq, out, true),
            op::OPENDIR => self.opendir(rq, out),
            op::READDIR => self.readdir(rq, out, false),
            op::READDIRPLUS => self.readdir(rq, out, true),
            op::FSYNCDIR => {
                self.pool.mark_to_recover(self.ino(rq.node))?;
                Ok(Outcome::Reply)
            }
            op::RELEASEDIR | op::SYNCFS => Ok(Outcome::Reply),
            op::STATFS => self.statfs(out),
            op::GETXATTR => self.getxattr(rq, out),
            op::LISTXATTR => self.listxattr(rq, out),
            op::SETXATTR => self.setxattr(rq),
            op::REMOVEXATTR => self.removexattr(rq),
            op::GETLK => self.getlk(rq, out),
            op::DESTROY => Ok(Outcome::Reply),
            // The kernel checks access itself. BMAP, IOCTL and others are not supported.
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    fn statfs(&self, out: &mut Body) -> Result<Outcome, Errno> {
        self.nameless.settle_space(&self.nodes);
        let st = self.pool.statfs()?;
        for v in [st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree] {
            out.u64(v);
        }
        out.u32(st.f_bsize as u32);
        out.u32(st.f_namelen as u32);
        out.u32(st.f_frsize as u32);
        out.zeros(4 + 6 * 4);
        Ok(Outcome::Reply)
    }
}
