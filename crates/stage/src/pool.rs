//! The pool's side: requests to the daemon for names, and the kernel for the data of files with one backing file.

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_client::{Fail, PathBuffer, Place, Pool};
use forebay_types::limits::{PATH_MAX, READDIR_REPLY_BYTES, XATTR_LIST_MAX, XATTR_VALUE_MAX};
use forebay_types::{
    Attr, Caller, Code, Entry, Ino, Kind, Reply, Request, TimeSet, Timestamp, REPLY_HEADER_BYTES,
};

use crate::kernel_file::KernelFile;
use crate::tree::{File, Meta, Names, Object, OwnerAndMode, Space, Tree, Wanted};

/// Longest reply without fixed size, in bytes: a value, a list of names, a path.
const LONGEST_REPLY: usize = XATTR_VALUE_MAX;
const _: () = assert!(LONGEST_REPLY >= XATTR_LIST_MAX && LONGEST_REPLY >= PATH_MAX);

thread_local! {
    /// The buffer of a thread's long replies. It is kept, because clearing so much memory would cost more than the
    /// call.
    static REPLY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The pool as a tree. A directory is its inode number and need not be opened.
pub(crate) struct PoolTree {
    pool: &'static Pool,
    root: Ino,
    caller: Caller,
}

/// An open file of the pool.
pub(crate) struct PoolFile {
    pool: &'static Pool,
    entry: Entry,
    data: Data,
}

enum Data {
    /// One backing file on this node, which has the file's bytes at their offsets.
    Kernel(KernelFile),
    /// Several backing files, or one on another node.
    Striped(Box<forebay_client::File>),
}

fn meta_of_attr(attr: &Attr, device: u64) -> Meta {
    Meta {
        kind: attr.kind(),
        mode: attr.mode & 0o7777,
        uid: attr.uid,
        gid: attr.gid,
        links: attr.nlink,
        size: attr.size,
        allocated: attr.size,
        rdev: attr.rdev,
        device,
        ino: attr.ino.0,
        atime: attr.atime,
        mtime: attr.mtime,
        ctime: attr.ctime,
    }
}

/// Attributes of a file: the shard's, with size and times of the backing files.
fn meta_of_stat(attr: &Attr, st: &libc::stat, device: u64) -> Meta {
    let time = |sec: i64, nsec: i64| Timestamp { sec, nsec: nsec as u32 };
    Meta {
        size: st.st_size as u64,
        allocated: st.st_blocks as u64 * 512,
        atime: time(st.st_atime, st.st_atime_nsec),
        mtime: time(st.st_mtime, st.st_mtime_nsec),
        ctime: time(st.st_ctime, st.st_ctime_nsec),
        ..meta_of_attr(attr, device)
    }
}

impl PoolTree {
    pub(crate) fn new(pool: &'static Pool) -> Result<PoolTree, Code> {
        let caller =
            Caller { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        Ok(PoolTree { pool, root: pool.root()?, caller })
    }

    fn entry_meta(&self, entry: &Entry) -> Result<Meta, Code> {
        let device = self.pool.device();
        if entry.attr.is_file() {
            let st = self.pool.stat_inode(entry.attr.ino)?;
            return Ok(meta_of_stat(&entry.attr, &st, device));
        }
        Ok(meta_of_attr(&entry.attr, device))
    }

    fn resolve(&self, dir: Ino, path: &[u8]) -> Result<Entry, Code> {
        let mut escape = PathBuffer::new();
        match self.pool.resolve(Place { dir, path }, true, &mut escape) {
            Ok(entry) => Ok(entry),
            Err(Fail::Code(code)) => Err(code),
            // A link leads out of the pool, so its target is not in this tree.
            Err(Fail::Escape) => Err(Code::CrossDevice),
        }
    }

    fn find(&self, at: Ino, name: &[u8], follow: bool) -> Result<Entry, Code> {
        match name {
            b"." => self.pool.get_attr(at),
            _ if follow => self.resolve(at, name),
            _ => self.pool.lookup(at, name),
        }
    }

    fn directory(&self, entry: &Entry) -> Result<(Ino, Meta), Code> {
        match entry.attr.kind() {
            Kind::Directory => Ok((entry.attr.ino, meta_of_attr(&entry.attr, self.pool.device()))),
            Kind::Symlink => Err(Code::TooManySymlinks),
            _ => Err(Code::NotDirectory),
        }
    }

    fn ino(&self, object: Object<'_, Self>) -> Result<Ino, Code> {
        Ok(match object {
            Object::File(file) => file.entry.attr.ino,
            Object::Directory(&ino) => ino,
            Object::Entry(&at, name) => self.find(at, name, false)?.attr.ino,
        })
    }

    fn open_data(&self, entry: &Entry, write: bool) -> Result<Data, Code> {
        // This node has no descriptor of a file on another node.
        if entry.attr.is_file() && !self.pool.is_one_here(&entry.layout) {
            return Ok(Data::Striped(Box::new(self.pool.open_file(entry, write)?)));
        }
        let access = if write { libc::O_RDWR } else { libc::O_RDONLY };
        let fd = match self.pool.open_backing(entry, access | libc::O_CLOEXEC | libc::O_NOATIME) {
            Err(Code::NotPermitted) => self.pool.open_backing(entry, access | libc::O_CLOEXEC)?,
            other => other?,
        };
        // SAFETY: the descriptor is new and ours.
        Ok(Data::Kernel(KernelFile(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Removes the entry of a file whose creation failed half-way, if it was created since `begin` and is the one that was
    /// made, where that is known.
    fn remove_half_made(&self, at: Ino, name: &[u8], begin: Timestamp, made: Option<Ino>) {
        if let Ok(entry) = self.pool.lookup(at, name) {
            let is_it = made.is_none_or(|ino| ino == entry.attr.ino);
            if is_it && entry.attr.is_file() && entry.attr.btime >= begin {
                // The first failure is the one to report.
                let _ = self.pool.unlink_in(at, name);
            }
        }
    }

    /// Stores a reply's bytes in `into`, which is cleared first.
    fn ask_bytes(&self, request: &Request<'_>, into: &mut Vec<u8>) -> Result<(), Code> {
        into.clear();
        REPLY.with_borrow_mut(|reply| {
            reply.resize(REPLY_HEADER_BYTES + LONGEST_REPLY, 0);
            let n = self.pool.call(request, reply)?;
            match Reply::decode(&reply[..n])? {
                Reply::Bytes(bytes) => into.extend_from_slice(bytes),
                _ => return Err(Code::Malformed),
            }
            Ok(())
        })
    }
}

/// The present time less 20 ms, because the daemon's clock may be coarser.
fn just_before_now() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let early = now.saturating_sub(std::time::Duration::from_millis(20));
    Timestamp { sec: early.as_secs() as i64, nsec: early.subsec_nanos() }
}

impl Tree for PoolTree {
    type Directory = Ino;
    type File = PoolFile;

    fn title(&self) -> &'static str {
        "the pool"
    }

    fn open_path(&self, path: &[u8]) -> Result<(Ino, Meta), Code> {
        self.directory(&self.resolve(self.root, path)?)
    }

    fn open_directory(&self, at: &Ino, name: &[u8], follow: bool) -> Result<(Ino, Meta), Code> {
        self.directory(&self.find(*at, name, follow)?)
    }

    fn list(&self, at: &Ino, cursor: u64, names: &mut Names) -> Result<Option<u64>, Code> {
        let mut buffer = [0; READDIR_REPLY_BYTES];
        let request = Request::ReadDirectory { ino: *at, cookie: cursor, attributes: false };
        let n = self.pool.call(&request, &mut buffer)?;
        let Reply::Entries(entries) = Reply::decode(&buffer[..n])? else { return Err(Code::Malformed) };
        let mut last = None;
        for entry in entries.iter() {
            let entry = entry?;
            names.push(entry.name, Some(entry.kind));
            last = Some(entry.cookie);
        }
        Ok(last.filter(|_| !entries.end))
    }

    fn stat(&self, at: &Ino, name: &[u8], follow: bool) -> Result<Meta, Code> {
        self.entry_meta(&self.find(*at, name, follow)?)
    }

    fn open(&self, at: &Ino, name: &[u8], follow: bool) -> Result<(PoolFile, Meta), Code> {
        let entry = self.find(*at, name, follow)?;
        match entry.attr.kind() {
            Kind::File => {}
            Kind::Directory => return Err(Code::IsDirectory),
            Kind::Symlink => return Err(Code::TooManySymlinks),
            _ => return Err(Code::NoDevice),
        }
        let file = PoolFile { pool: self.pool, entry, data: self.open_data(&entry, false)? };
        let meta = file.meta()?;
        Ok((file, meta))
    }

    fn create(&self, at: &Ino, name: &[u8], wanted: &Wanted) -> Result<PoolFile, Code> {
        let caller =
            Caller { uid: wanted.uid.unwrap_or(self.caller.uid), gid: wanted.gid.unwrap_or(self.caller.gid) };
        let begin = just_before_now();
        let mode = wanted.mode & 0o7777;
        match self.pool.create(caller, *at, name, mode, true, libc::O_NOATIME) {
            Ok((entry, _, Some(fd))) => {
                Ok(PoolFile { pool: self.pool, entry, data: Data::Kernel(KernelFile(fd)) })
            }
            // The file lies on another node: its entry was created, and its backing file is created when it is opened.
            Ok((entry, _, None)) => {
                let remove = |_: &Code| self.remove_half_made(*at, name, begin, Some(entry.attr.ino));
                let data = self.open_data(&entry, true).inspect_err(remove)?;
                Ok(PoolFile { pool: self.pool, entry, data })
            }
            // It is not known whether it was made.
            Err(code @ (Code::PoolGone | Code::Interrupted)) => {
                self.remove_half_made(*at, name, begin, None);
                Err(code)
            }
            Err(code) => Err(code),
        }
    }

    fn make_directory(&self, at: &Ino, name: &[u8], mode: u32) -> Result<(), Code> {
        self.pool.make_directory_in(self.caller, *at, name, mode & 0o1777).map(|_| ())
    }

    fn symlink(&self, target: &[u8], at: &Ino, name: &[u8]) -> Result<(), Code> {
        self.pool.symlink_in(self.caller, *at, name, target).map(|_| ())
    }

    fn read_link(&self, at: &Ino, name: &[u8]) -> Result<Vec<u8>, Code> {
        let ino = self.find(*at, name, false)?.attr.ino;
        let mut target = Vec::new();
        self.ask_bytes(&Request::ReadLink { ino }, &mut target)?;
        Ok(target)
    }

    fn make_node(&self, at: &Ino, name: &[u8], meta: &Meta) -> Result<(), Code> {
        if matches!(meta.kind, Kind::CharDevice | Kind::BlockDevice) && self.caller.uid != 0 {
            return Err(Code::NotPermitted);
        }
        let mode = meta.kind.mode_bits() | meta.mode & 0o700;
        self.pool.make_node_in(self.caller, *at, name, mode, meta.rdev).map(|_| ())
    }

    fn link(&self, from: (&Ino, &[u8]), to: (&Ino, &[u8])) -> Result<(), Code> {
        let ino = self.find(*from.0, from.1, false)?.attr.ino;
        self.pool.link_in(ino, *to.0, to.1).map(|_| ())
    }

    fn rename(&self, from: (&Ino, &[u8]), to: (&Ino, &[u8]), flags: u32) -> Result<(), Code> {
        self.pool.rename_in(*from.0, from.1, *to.0, to.1, flags)
    }

    fn unlink(&self, at: &Ino, name: &[u8]) -> Result<(), Code> {
        self.pool.unlink_in(*at, name)
    }

    fn remove_directory(&self, at: &Ino, name: &[u8]) -> Result<(), Code> {
        self.pool.remove_directory_in(*at, name)
    }

    fn check_writable(&self, at: &Ino) -> Result<(), Code> {
        let mut escape = PathBuffer::new();
        let place = Place { dir: *at, path: b"" };
        match self.pool.access(place, libc::W_OK | libc::X_OK, true, true, &mut escape) {
            Ok(()) => Ok(()),
            Err(Fail::Code(code)) => Err(code),
            Err(Fail::Escape) => Err(Code::CrossDevice),
        }
    }

    fn set_owner(&self, object: Object<'_, Self>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code> {
        self.pool.chown_inode(self.ino(object)?, uid, gid)
    }

    fn set_mode(&self, object: Object<'_, Self>, mode: u32) -> Result<(), Code> {
        self.pool.chmod_inode(self.ino(object)?, mode)
    }

    fn owner_and_mode(&self, object: Object<'_, Self>) -> Result<OwnerAndMode, Code> {
        let attr = match object {
            Object::File(file) => file.entry.attr,
            Object::Directory(&ino) => self.pool.get_attr(ino)?.attr,
            Object::Entry(&at, name) => self.find(at, name, false)?.attr,
        };
        Ok(meta_of_attr(&attr, 0).into())
    }

    fn set_times(&self, object: Object<'_, Self>, atime: Timestamp, mtime: Timestamp) -> Result<(), Code> {
        if let Object::File(PoolFile { data: Data::Kernel(file), .. }) = object {
            return file.set_times(atime, mtime);
        }
        self.pool.set_times_inode(self.ino(object)?, TimeSet::At(atime), TimeSet::At(mtime))
    }

    fn list_xattrs(&self, object: Object<'_, Self>, names: &mut Vec<u8>) -> Result<(), Code> {
        self.ask_bytes(&Request::ListXattr { ino: self.ino(object)? }, names)
    }

    fn get_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &mut Vec<u8>) -> Result<(), Code> {
        self.ask_bytes(&Request::GetXattr { ino: self.ino(object)?, name }, value)
    }

    fn set_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &[u8]) -> Result<(), Code> {
        self.pool.set_xattr_inode(self.ino(object)?, name, value, 0)
    }

    fn space(&self, _: &Ino) -> Result<Space, Code> {
        let space = self.pool.space()?;
        Ok(Space { free_bytes: space.free_bytes, free_inodes: space.free_inodes })
    }

    fn sync_directory(&self, _: &Ino) -> Result<(), Code> {
        // The shard survives the end of any process. Nothing is promised beyond the node.
        Ok(())
    }

    fn is_remote(&self, _: &Ino) -> bool {
        false
    }
}

impl PoolFile {
    /// A read or write of the only backing file, which takes as long as a medium that its target emulates does.
    fn paced(
        &self,
        writes: bool,
        offset: u64,
        call: impl FnOnce() -> Result<usize, Code>,
    ) -> Result<usize, Code> {
        let paced = self.pool.begin_paced(&self.entry);
        let moved = call();
        if let (Some(paced), Ok(bytes)) = (paced, &moved) {
            paced.complete(writes, offset, *bytes);
        }
        moved
    }

    fn meta(&self) -> Result<Meta, Code> {
        let device = self.pool.device();
        match &self.data {
            Data::Kernel(file) => {
                let inner = file.meta()?;
                Ok(Meta {
                    size: inner.size,
                    allocated: inner.allocated,
                    atime: inner.atime,
                    mtime: inner.mtime,
                    ctime: inner.ctime,
                    ..meta_of_attr(&self.entry.attr, device)
                })
            }
            Data::Striped(_) => {
                let st = self.pool.stat_inode(self.entry.attr.ino)?;
                Ok(meta_of_stat(&self.entry.attr, &st, device))
            }
        }
    }
}

impl File for PoolFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        match &self.data {
            Data::Kernel(file) => self.paced(false, offset, || file.read_at(buffer, offset)),
            Data::Striped(file) => file.read_at(buffer, offset),
        }
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Code> {
        match &self.data {
            Data::Kernel(file) => self.paced(true, offset, || file.write_at(data, offset)),
            Data::Striped(file) => file.write_at(data, offset),
        }
    }

    fn set_size(&self, bytes: u64) -> Result<(), Code> {
        match &self.data {
            Data::Kernel(file) => file.set_size(bytes),
            Data::Striped(file) => file.truncate(bytes),
        }
    }

    fn version(&self) -> Result<(u64, Timestamp), Code> {
        match &self.data {
            Data::Kernel(file) => file.version(),
            Data::Striped(_) => self.meta().map(|meta| (meta.size, meta.mtime)),
        }
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        match &self.data {
            Data::Kernel(file) => file.next_data(within),
            Data::Striped(_) => Ok(Some(within).filter(|range| !range.is_empty())),
        }
    }

    fn knows_holes(&self) -> bool {
        matches!(self.data, Data::Kernel(_))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.data {
            // The kernel copies at the speed of the real medium.
            Data::Kernel(file) if !self.pool.is_paced() => file.descriptor(),
            Data::Kernel(_) | Data::Striped(_) => None,
        }
    }

    fn start_sync(&self) {
        if let Data::Kernel(file) = &self.data {
            file.start_sync();
        }
    }

    fn sync(&self) -> Result<(), Code> {
        match &self.data {
            Data::Kernel(file) => file.sync(),
            // Stripes survive as long as the node; see `sync_directory`.
            Data::Striped(_) => Ok(()),
        }
    }

    fn forget_cached(&self) {
        if let Data::Kernel(file) = &self.data {
            file.forget_cached();
        }
    }
}
