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
    FileAttr, Filesystem, KernelConfig, MountOption, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Result as IoResult;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

mod behind;

use behind::{c_string, check, errno, link_to, locked, own, Bucket, Change, Open, Shared};

/// How long the kernel may use a name and attributes.
const VALID: Duration = Duration::from_secs(1);
/// Requests that are served at a time.
const THREADS: usize = 128;
/// Bytes of one write of the kernel.
const WRITE_BYTES: u32 = 1 << 20;

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
