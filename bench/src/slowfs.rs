//! A file system that is slow for every program: it shows a directory, with limits of bytes per second and a latency of
//! each call.
//!
//! All programs together read at most so many bytes per second, and write at most as many, as behind a full-duplex link.
//! Each request of the kernel takes the latency in addition; requests wait for it side by side. Nothing that is written
//! is cached: a write returns when the directory behind has it. The kernel may use names and attributes for a second,
//! and what it has read of a file until the file is opened again, as an NFS client does. Runs as root.
//!
//! An inode is an O_PATH descriptor, kept until the kernel forgets it, so its number is not used again meanwhile.

use fuser::{
    FileAttr, FileType, Filesystem, KernelConfig, MountOption, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, FUSE_ROOT_ID,
};
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io::{Error, Result as IoResult};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the kernel may use a name and attributes.
const VALID: Duration = Duration::from_secs(1);
/// Requests that are served at a time.
const THREADS: usize = 128;
/// Time whose bytes may pass at once after a pause.
const CREDIT: Duration = Duration::from_millis(20);
/// Bytes of one write of the kernel.
const WRITE_BYTES: u32 = 1 << 20;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The errno of a failed call.
fn errno(e: &Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

fn check(result: i32) -> IoResult<i32> {
    if result < 0 {
        return Err(Error::last_os_error());
    }
    Ok(result)
}

fn c_string(name: &OsStr) -> IoResult<CString> {
    CString::new(name.as_bytes()).map_err(|_| Error::from_raw_os_error(libc::EINVAL))
}

/// A path that leads to an open descriptor's inode.
fn link_to(fd: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default()
}

/// Lets bytes pass at a rate: each request gets its own time, in the order of arrival.
struct Bucket {
    bytes_per_second: f64,
    free_at: Mutex<Instant>,
}

impl Bucket {
    fn take(&self, bytes: usize) {
        if self.bytes_per_second <= 0.0 {
            return;
        }
        let now = Instant::now();
        let end = {
            let mut free_at = locked(&self.free_at);
            let earliest = now.checked_sub(CREDIT).unwrap_or(now);
            *free_at =
                (*free_at).max(earliest) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
            *free_at
        };
        std::thread::sleep(end.saturating_duration_since(now));
    }
}

struct Node {
    fd: Arc<OwnedFd>,
    lookups: u64,
}

/// What is open, by handle.
enum Open {
    File(Arc<File>),
    /// Numbers, kinds and names of a directory, as they were when it was opened.
    Directory(Arc<Vec<(u64, FileType, OsString)>>),
}

struct Shared {
    root: Arc<OwnedFd>,
    nodes: Mutex<HashMap<u64, Node>>,
    open: Mutex<(u64, HashMap<u64, Open>)>,
    reads: Bucket,
    writes: Bucket,
    latency: Duration,
}

fn kind_of(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn attributes(st: &libc::stat) -> FileAttr {
    let time = |sec: i64, nsec: i64| match u64::try_from(sec) {
        Ok(sec) => UNIX_EPOCH + Duration::new(sec, nsec as u32),
        Err(_) => UNIX_EPOCH - Duration::from_secs(sec.unsigned_abs()) + Duration::from_nanos(nsec as u64),
    };
    FileAttr {
        ino: st.st_ino,
        size: st.st_size as u64,
        blocks: st.st_blocks as u64,
        atime: time(st.st_atime, st.st_atime_nsec),
        mtime: time(st.st_mtime, st.st_mtime_nsec),
        ctime: time(st.st_ctime, st.st_ctime_nsec),
        crtime: UNIX_EPOCH,
        kind: kind_of(st.st_mode),
        perm: (st.st_mode & 0o7777) as u16,
        nlink: st.st_nlink as u32,
        uid: st.st_uid,
        gid: st.st_gid,
        rdev: st.st_rdev as u32,
        blksize: st.st_blksize as u32,
        flags: 0,
    }
}

impl Shared {
    fn node(&self, ino: u64) -> IoResult<Arc<OwnedFd>> {
        if ino == FUSE_ROOT_ID {
            return Ok(Arc::clone(&self.root));
        }
        let nodes = locked(&self.nodes);
        nodes.get(&ino).map(|node| Arc::clone(&node.fd)).ok_or(Error::from_raw_os_error(libc::ESTALE))
    }

    fn stat(&self, ino: u64) -> IoResult<FileAttr> {
        let fd = self.node(ino)?;
        let mut attr = attributes(&stat_at(&fd, c"", libc::AT_EMPTY_PATH)?);
        if ino == FUSE_ROOT_ID {
            attr.ino = FUSE_ROOT_ID;
        }
        Ok(attr)
    }

    /// Finds a name, and keeps its inode until the kernel forgets it.
    fn enter(&self, parent: u64, name: &OsStr) -> IoResult<FileAttr> {
        let (directory, name) = (self.node(parent)?, c_string(name)?);
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the name ends in NUL, and the new descriptor is owned here alone.
        let fd = unsafe {
            OwnedFd::from_raw_fd(check(libc::openat(directory.as_raw_fd(), name.as_ptr(), flags))?)
        };
        let st = stat_at(&fd, c"", libc::AT_EMPTY_PATH)?;
        let mut nodes = locked(&self.nodes);
        nodes.entry(st.st_ino).or_insert_with(|| Node { fd: Arc::new(fd), lookups: 0 }).lookups += 1;
        Ok(attributes(&st))
    }

    fn open_inode(&self, ino: u64, flags: i32) -> IoResult<File> {
        let fd = self.node(ino)?;
        // The kernel gives each write its offset, also where the program appends.
        let unwanted = libc::O_NOFOLLOW | libc::O_CREAT | libc::O_EXCL | libc::O_APPEND;
        let flags = flags & !unwanted | libc::O_CLOEXEC;
        // SAFETY: the path ends in NUL, and the new descriptor is owned here alone.
        Ok(unsafe { File::from_raw_fd(check(libc::open(link_to(&fd).as_ptr(), flags))?) })
    }

    fn keep(&self, open: Open) -> u64 {
        let mut all = locked(&self.open);
        all.0 += 1;
        let handle = all.0;
        all.1.insert(handle, open);
        handle
    }

    fn file(&self, handle: u64) -> IoResult<Arc<File>> {
        match locked(&self.open).1.get(&handle) {
            Some(Open::File(file)) => Ok(Arc::clone(file)),
            _ => Err(Error::from_raw_os_error(libc::EBADF)),
        }
    }

    fn list(&self, ino: u64) -> IoResult<Vec<(u64, FileType, OsString)>> {
        use std::os::unix::fs::DirEntryExt;
        let fd = self.node(ino)?;
        let path = link_to(&fd);
        let mut all = vec![
            (ino, FileType::Directory, OsString::from(".")),
            (ino, FileType::Directory, OsString::from("..")),
        ];
        for entry in std::fs::read_dir(OsStr::from_bytes(path.as_bytes()))? {
            let entry = entry?;
            use std::os::unix::fs::FileTypeExt;
            let kind = match entry.file_type()? {
                kind if kind.is_dir() => FileType::Directory,
                kind if kind.is_symlink() => FileType::Symlink,
                kind if kind.is_fifo() => FileType::NamedPipe,
                kind if kind.is_socket() => FileType::Socket,
                kind if kind.is_char_device() => FileType::CharDevice,
                kind if kind.is_block_device() => FileType::BlockDevice,
                _ => FileType::RegularFile,
            };
            all.push((entry.ino(), kind, entry.file_name()));
        }
        Ok(all)
    }
}

fn stat_at(fd: &OwnedFd, name: &CStr, flags: i32) -> IoResult<libc::stat> {
    // SAFETY: all zeros is a valid structure, and the name ends in NUL.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        check(libc::fstatat(fd.as_raw_fd(), name.as_ptr(), &raw mut st, flags | libc::AT_SYMLINK_NOFOLLOW))?;
        Ok(st)
    }
}

/// What a SETATTR changes.
struct Change {
    mode: Option<u32>,
    owner: (Option<u32>, Option<u32>),
    size: Option<u64>,
    times: [Option<TimeOrNow>; 2],
}

impl Change {
    fn apply(self, fs: &Shared, ino: u64) -> IoResult<FileAttr> {
        let fd = fs.node(ino)?;
        let path = link_to(&fd);
        // SAFETY: the paths end in NUL, and the structures live over the calls.
        unsafe {
            if let (uid, gid @ Some(_)) | (uid @ Some(_), gid) = self.owner {
                let (uid, gid) = (uid.unwrap_or(u32::MAX), gid.unwrap_or(u32::MAX));
                check(libc::fchownat(fd.as_raw_fd(), c"".as_ptr(), uid, gid, libc::AT_EMPTY_PATH))?;
            }
            if let Some(mode) = self.mode {
                check(libc::chmod(path.as_ptr(), mode & 0o7777))?;
            }
            if let Some(size) = self.size {
                check(libc::truncate(path.as_ptr(), size as i64))?;
            }
            if self.times.iter().any(Option::is_some) {
                let times = self.times.map(|time| match time {
                    None => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
                    Some(TimeOrNow::Now) => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
                    Some(TimeOrNow::SpecificTime(time)) => timespec(time),
                });
                // A symbolic link's own times: the path through /proc leads to the link itself.
                check(libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), 0))?;
            }
        }
        fs.stat(ino)
    }
}

fn timespec(time: SystemTime) -> libc::timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => {
            libc::timespec { tv_sec: since.as_secs() as i64, tv_nsec: i64::from(since.subsec_nanos()) }
        }
        Err(before) => {
            let nanos = before.duration().as_nanos() as i128;
            let (sec, nsec) = ((-nanos).div_euclid(1_000_000_000), (-nanos).rem_euclid(1_000_000_000));
            libc::timespec { tv_sec: sec as i64, tv_nsec: nsec as i64 }
        }
    }
}

type Work = Box<dyn FnOnce(&Shared) + Send>;

/// The file system: requests are handed to threads, which wait and answer.
struct SlowFs {
    shared: Arc<Shared>,
    work: Sender<Work>,
}

impl SlowFs {
    fn start(behind: &Path, bytes_per_second: u64, latency: Duration) -> Result<SlowFs, String> {
        let root = File::open(behind).map_err(|e| format!("{}: {e}", behind.display()))?;
        let bucket =
            || Bucket { bytes_per_second: bytes_per_second as f64, free_at: Mutex::new(Instant::now()) };
        let shared = Arc::new(Shared {
            root: Arc::new(root.into()),
            nodes: Mutex::default(),
            open: Mutex::default(),
            reads: bucket(),
            writes: bucket(),
            latency,
        });
        let (work, queue) = channel::<Work>();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..THREADS {
            let (queue, shared) = (Arc::clone(&queue), Arc::clone(&shared));
            let run = move || loop {
                let Ok(work) = locked(&queue).recv() else { return };
                std::thread::sleep(shared.latency);
                work(&shared);
            };
            let started = std::thread::Builder::new().spawn(run);
            started.map_err(|e| format!("cannot start a thread: {e}"))?;
        }
        Ok(SlowFs { shared, work })
    }

    fn later(&self, work: impl FnOnce(&Shared) + Send + 'static) {
        // The threads live as long as this sender.
        let _ = self.work.send(Box::new(work));
    }

    fn entry(&self, reply: ReplyEntry, make: impl FnOnce(&Shared) -> IoResult<FileAttr> + Send + 'static) {
        self.later(move |fs| match make(fs) {
            Ok(attr) => reply.entry(&VALID, &attr, 0),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn done(&self, reply: ReplyEmpty, run: impl FnOnce(&Shared) -> IoResult<i32> + Send + 'static) {
        self.later(move |fs| match run(fs) {
            Ok(_) => reply.ok(),
            Err(e) => reply.error(errno(&e)),
        });
    }

    /// An answer for which the kernel's caller should not wait: no latency.
    fn at_once(&self, reply: ReplyEmpty, handle: u64) {
        locked(&self.shared.open).1.remove(&handle);
        reply.ok();
    }
}

/// Gives a new file the user and the group of the process that made it.
fn own(fs: &Shared, parent: u64, name: &CStr, (uid, gid): (u32, u32)) -> IoResult<i32> {
    let directory = fs.node(parent)?;
    // SAFETY: the name ends in NUL.
    check(unsafe {
        libc::fchownat(directory.as_raw_fd(), name.as_ptr(), uid, gid, libc::AT_SYMLINK_NOFOLLOW)
    })
}

impl Filesystem for SlowFs {
    fn init(&mut self, _: &Request<'_>, config: &mut KernelConfig) -> Result<(), i32> {
        let _ = config.set_max_write(WRITE_BYTES);
        Ok(())
    }

    fn lookup(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.entry(reply, move |fs| fs.enter(parent, &name));
    }

    fn forget(&mut self, _: &Request<'_>, ino: u64, count: u64) {
        let mut nodes = locked(&self.shared.nodes);
        if let Some(node) = nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 {
                nodes.remove(&ino);
            }
        }
    }

    fn getattr(&mut self, _: &Request<'_>, ino: u64, _: Option<u64>, reply: ReplyAttr) {
        self.later(move |fs| match fs.stat(ino) {
            Ok(attr) => reply.attr(&VALID, &attr),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn setattr(
        &mut self,
        _: &Request<'_>,
        ino: u64,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<u64>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<u32>,
        reply: ReplyAttr,
    ) {
        let change = Change { mode, owner: (uid, gid), size, times: [atime, mtime] };
        self.later(move |fs| match change.apply(fs, ino) {
            Ok(attr) => reply.attr(&VALID, &attr),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn readlink(&mut self, _: &Request<'_>, ino: u64, reply: ReplyData) {
        self.later(move |fs| {
            let target = fs.node(ino).and_then(|fd| {
                let mut buffer = vec![0_u8; 4096];
                // SAFETY: the buffer is as long as said.
                let n = check(unsafe {
                    libc::readlinkat(fd.as_raw_fd(), c"".as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
                } as i32)?;
                buffer.truncate(n as usize);
                Ok(buffer)
            });
            match target {
                Ok(target) => reply.data(&target),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn mknod(
        &mut self,
        rq: &Request<'_>,
        parent: u64,
        name: &OsStr,
        mode: u32,
        _: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let (name, caller) = (name.to_owned(), (rq.uid(), rq.gid()));
        self.entry(reply, move |fs| {
            let c_name = c_string(&name)?;
            // SAFETY: the name ends in NUL.
            check(unsafe {
                libc::mknodat(fs.node(parent)?.as_raw_fd(), c_name.as_ptr(), mode, u64::from(rdev))
            })?;
            own(fs, parent, &c_name, caller)?;
            fs.enter(parent, &name)
        });
    }

    fn mkdir(&mut self, rq: &Request<'_>, parent: u64, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let (name, caller) = (name.to_owned(), (rq.uid(), rq.gid()));
        self.entry(reply, move |fs| {
            let c_name = c_string(&name)?;
            // SAFETY: the name ends in NUL.
            check(unsafe { libc::mkdirat(fs.node(parent)?.as_raw_fd(), c_name.as_ptr(), mode) })?;
            own(fs, parent, &c_name, caller)?;
            fs.enter(parent, &name)
        });
    }

    fn unlink(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.done(reply, move |fs| {
            let name = c_string(&name)?;
            // SAFETY: the name ends in NUL.
            check(unsafe { libc::unlinkat(fs.node(parent)?.as_raw_fd(), name.as_ptr(), 0) })
        });
    }

    fn rmdir(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.done(reply, move |fs| {
            let name = c_string(&name)?;
            // SAFETY: the name ends in NUL.
            check(unsafe { libc::unlinkat(fs.node(parent)?.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) })
        });
    }

    fn symlink(&mut self, rq: &Request<'_>, parent: u64, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (name, target, caller) = (name.to_owned(), target.as_os_str().to_owned(), (rq.uid(), rq.gid()));
        self.entry(reply, move |fs| {
            let (c_name, target) = (c_string(&name)?, c_string(&target)?);
            // SAFETY: both strings end in NUL.
            check(unsafe {
                libc::symlinkat(target.as_ptr(), fs.node(parent)?.as_raw_fd(), c_name.as_ptr())
            })?;
            own(fs, parent, &c_name, caller)?;
            fs.enter(parent, &name)
        });
    }

    fn rename(
        &mut self,
        _: &Request<'_>,
        parent: u64,
        name: &OsStr,
        new_parent: u64,
        new_name: &OsStr,
        flags: u32,
        reply: ReplyEmpty,
    ) {
        let (name, new_name) = (name.to_owned(), new_name.to_owned());
        self.done(reply, move |fs| {
            let (from, to) = (fs.node(parent)?, fs.node(new_parent)?);
            let (name, new_name) = (c_string(&name)?, c_string(&new_name)?);
            // SAFETY: both names end in NUL.
            check(unsafe {
                libc::renameat2(from.as_raw_fd(), name.as_ptr(), to.as_raw_fd(), new_name.as_ptr(), flags)
            })
        });
    }

    fn link(&mut self, _: &Request<'_>, ino: u64, parent: u64, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.entry(reply, move |fs| {
            let (fd, directory) = (fs.node(ino)?, fs.node(parent)?);
            let c_name = c_string(&name)?;
            // SAFETY: both strings end in NUL.
            check(unsafe {
                libc::linkat(
                    libc::AT_FDCWD,
                    link_to(&fd).as_ptr(),
                    directory.as_raw_fd(),
                    c_name.as_ptr(),
                    libc::AT_SYMLINK_FOLLOW,
                )
            })?;
            fs.enter(parent, &name)
        });
    }

    fn open(&mut self, _: &Request<'_>, ino: u64, flags: i32, reply: ReplyOpen) {
        self.later(move |fs| match fs.open_inode(ino, flags) {
            Ok(file) => reply.opened(fs.keep(Open::File(Arc::new(file))), 0),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn create(
        &mut self,
        rq: &Request<'_>,
        parent: u64,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, caller) = (name.to_owned(), (rq.uid(), rq.gid()));
        self.later(move |fs| {
            let made = || -> IoResult<(FileAttr, File)> {
                let c_name = c_string(&name)?;
                let flags = flags & !libc::O_APPEND | libc::O_CREAT | libc::O_NOFOLLOW | libc::O_CLOEXEC;
                // SAFETY: the name ends in NUL, and the new descriptor is owned here alone.
                let file = unsafe {
                    File::from_raw_fd(check(libc::openat(
                        fs.node(parent)?.as_raw_fd(),
                        c_name.as_ptr(),
                        flags,
                        mode,
                    ))?)
                };
                own(fs, parent, &c_name, caller)?;
                Ok((fs.enter(parent, &name)?, file))
            };
            match made() {
                Ok((attr, file)) => {
                    reply.created(&VALID, &attr, 0, fs.keep(Open::File(Arc::new(file))), 0);
                }
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        _: u64,
        handle: u64,
        offset: i64,
        size: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyData,
    ) {
        self.later(move |fs| {
            let mut buffer = vec![0; size as usize];
            match fs.file(handle).and_then(|file| file.read_at(&mut buffer, offset as u64)) {
                Ok(n) => {
                    fs.reads.take(n);
                    reply.data(&buffer[..n]);
                }
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn write(
        &mut self,
        _: &Request<'_>,
        _: u64,
        handle: u64,
        offset: i64,
        data: &[u8],
        _: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyWrite,
    ) {
        let data = data.to_vec();
        self.later(move |fs| {
            fs.writes.take(data.len());
            match fs.file(handle).and_then(|file| file.write_all_at(&data, offset as u64)) {
                Ok(()) => reply.written(data.len() as u32),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    // A close need not ask the store: nothing is cached that it could write.
    fn flush(&mut self, _: &Request<'_>, _: u64, _: u64, _: u64, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &mut self,
        _: &Request<'_>,
        _: u64,
        handle: u64,
        _: i32,
        _: Option<u64>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.at_once(reply, handle);
    }

    fn fsync(&mut self, _: &Request<'_>, _: u64, handle: u64, _: bool, reply: ReplyEmpty) {
        self.done(reply, move |fs| fs.file(handle)?.sync_all().map(|()| 0));
    }

    fn opendir(&mut self, _: &Request<'_>, ino: u64, _: i32, reply: ReplyOpen) {
        self.later(move |fs| match fs.list(ino) {
            Ok(names) => reply.opened(fs.keep(Open::Directory(Arc::new(names))), 0),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn readdir(&mut self, _: &Request<'_>, _: u64, handle: u64, offset: i64, mut reply: ReplyDirectory) {
        self.later(move |fs| {
            let names = match locked(&fs.open).1.get(&handle) {
                Some(Open::Directory(names)) => Arc::clone(names),
                _ => return reply.error(libc::EBADF),
            };
            for (i, (ino, kind, name)) in names.iter().enumerate().skip(offset.max(0) as usize) {
                if reply.add(*ino, i as i64 + 1, *kind, name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn releasedir(&mut self, _: &Request<'_>, _: u64, handle: u64, _: i32, reply: ReplyEmpty) {
        self.at_once(reply, handle);
    }

    fn fsyncdir(&mut self, _: &Request<'_>, ino: u64, _: u64, _: bool, reply: ReplyEmpty) {
        self.done(reply, move |fs| {
            fs.open_inode(ino, libc::O_RDONLY | libc::O_DIRECTORY)?.sync_all().map(|()| 0)
        });
    }

    fn statfs(&mut self, _: &Request<'_>, _: u64, reply: ReplyStatfs) {
        self.later(move |fs| {
            // SAFETY: all zeros is a valid structure, which lives over the call.
            let space = unsafe {
                let mut space: libc::statvfs = std::mem::zeroed();
                check(libc::fstatvfs(fs.root.as_raw_fd(), &raw mut space)).map(|_| space)
            };
            match space {
                Ok(s) => reply.statfs(
                    s.f_blocks,
                    s.f_bfree,
                    s.f_bavail,
                    s.f_files,
                    s.f_ffree,
                    s.f_bsize as u32,
                    s.f_namemax as u32,
                    s.f_frsize as u32,
                ),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn setxattr(
        &mut self,
        _: &Request<'_>,
        ino: u64,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (name.to_owned(), value.to_vec());
        self.done(reply, move |fs| {
            let (path, name) = (link_to(&*fs.node(ino)?), c_string(&name)?);
            // SAFETY: both strings end in NUL, and the value is as long as said.
            check(unsafe {
                libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
            })
        });
    }

    fn getxattr(&mut self, _: &Request<'_>, ino: u64, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.to_owned();
        self.later(move |fs| {
            answer_xattr(reply, size, |buffer| {
                let (fd, name) = (fs.node(ino)?, c_string(&name)?);
                let path = link_to(&fd);
                // SAFETY: both strings end in NUL, and the buffer is as long as said.
                check(unsafe {
                    libc::getxattr(path.as_ptr(), name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
                } as i32)
            });
        });
    }

    fn listxattr(&mut self, _: &Request<'_>, ino: u64, size: u32, reply: ReplyXattr) {
        self.later(move |fs| {
            answer_xattr(reply, size, |buffer| {
                let fd = fs.node(ino)?;
                // SAFETY: the path ends in NUL, and the buffer is as long as said.
                check(unsafe {
                    libc::listxattr(link_to(&fd).as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
                } as i32)
            });
        });
    }

    fn removexattr(&mut self, _: &Request<'_>, ino: u64, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.done(reply, move |fs| {
            let (path, name) = (link_to(&*fs.node(ino)?), c_string(&name)?);
            // SAFETY: both strings end in NUL.
            check(unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) })
        });
    }
}

/// Answers with a value, or with its size when the kernel has no buffer.
fn answer_xattr(reply: ReplyXattr, size: u32, get: impl FnOnce(&mut [u8]) -> IoResult<i32>) {
    let mut buffer = vec![0; size as usize];
    match get(&mut buffer) {
        Ok(n) if size == 0 => reply.size(n as u32),
        Ok(n) => reply.data(&buffer[..n as usize]),
        Err(e) => reply.error(errno(&e)),
    }
}

/// Shows `behind` at `at`, slowly, until it is unmounted. The latency is in milliseconds.
pub(crate) fn main(words: &[String]) -> Result<(), String> {
    let [behind, at, rate, latency] = words else {
        return Err("slow BEHIND AT BYTES_PER_SECOND LATENCY_MS".into());
    };
    let number = |word: &String| word.parse::<u64>().map_err(|_| format!("{word}: not a number"));
    let (rate, latency) = (number(rate)?, Duration::from_millis(number(latency)?));
    // Files of the caller's mode: the kernel has applied the umask. Each node has a descriptor.
    // SAFETY: plain system calls on our own process.
    unsafe {
        libc::umask(0);
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
    let fs = SlowFs::start(Path::new(behind), rate, latency)?;
    let options = [
        MountOption::FSName("forebay-bench-slow".into()),
        MountOption::DefaultPermissions,
        MountOption::AllowOther,
    ];
    fuser::mount2(fs, at, &options).map_err(|e| format!("cannot mount {at}: {e}"))
}
