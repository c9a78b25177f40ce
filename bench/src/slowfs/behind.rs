//! The directory behind the slow file system: its inodes, as descriptors, and calls on them; the limits of bytes per
//! second.

use fuser::{FileAttr, FileType, TimeOrNow, FUSE_ROOT_ID};
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io::{Error, Result as IoResult};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time whose bytes may pass at once after a pause.
const CREDIT: Duration = Duration::from_millis(20);

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The errno of a failed call.
pub(super) fn errno(e: &Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

pub(super) fn check(result: i32) -> IoResult<i32> {
    if result < 0 {
        return Err(Error::last_os_error());
    }
    Ok(result)
}

pub(super) fn c_string(name: &OsStr) -> IoResult<CString> {
    CString::new(name.as_bytes()).map_err(|_| Error::from_raw_os_error(libc::EINVAL))
}

/// A path that leads to an open descriptor's inode.
pub(super) fn link_to(fd: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default()
}

/// Lets bytes pass at a rate: each request gets its own time, in the order of arrival.
pub(super) struct Bucket {
    pub(super) bytes_per_second: f64,
    pub(super) free_at: Mutex<Instant>,
}

impl Bucket {
    pub(super) fn take(&self, bytes: usize) {
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

pub(super) struct Node {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) lookups: u64,
}

/// What is open, by handle.
pub(super) enum Open {
    File(Arc<File>),
    /// Numbers, kinds and names of a directory, as they were when it was opened.
    Directory(Arc<Vec<(u64, FileType, OsString)>>),
}

pub(super) struct Shared {
    pub(super) root: Arc<OwnedFd>,
    pub(super) nodes: Mutex<HashMap<u64, Node>>,
    pub(super) open: Mutex<(u64, HashMap<u64, Open>)>,
    pub(super) reads: Bucket,
    pub(super) writes: Bucket,
    pub(super) latency: Duration,
}

pub(super) fn kind_of(mode: u32) -> FileType {
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

pub(super) fn attributes(st: &libc::stat) -> FileAttr {
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
    pub(super) fn node(&self, ino: u64) -> IoResult<Arc<OwnedFd>> {
        if ino == FUSE_ROOT_ID {
            return Ok(Arc::clone(&self.root));
        }
        let nodes = locked(&self.nodes);
        nodes.get(&ino).map(|node| Arc::clone(&node.fd)).ok_or(Error::from_raw_os_error(libc::ESTALE))
    }

    pub(super) fn stat(&self, ino: u64) -> IoResult<FileAttr> {
        let fd = self.node(ino)?;
        let mut attr = attributes(&stat_at(&fd, c"", libc::AT_EMPTY_PATH)?);
        if ino == FUSE_ROOT_ID {
            attr.ino = FUSE_ROOT_ID;
        }
        Ok(attr)
    }

    /// Finds a name, and keeps its inode until the kernel forgets it.
    pub(super) fn enter(&self, parent: u64, name: &OsStr) -> IoResult<FileAttr> {
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

    pub(super) fn open_inode(&self, ino: u64, flags: i32) -> IoResult<File> {
        let fd = self.node(ino)?;
        // The kernel gives each write its offset, also where the program appends.
        let unwanted = libc::O_NOFOLLOW | libc::O_CREAT | libc::O_EXCL | libc::O_APPEND;
        let flags = flags & !unwanted | libc::O_CLOEXEC;
        // SAFETY: the path ends in NUL, and the new descriptor is owned here alone.
        Ok(unsafe { File::from_raw_fd(check(libc::open(link_to(&fd).as_ptr(), flags))?) })
    }

    pub(super) fn keep(&self, open: Open) -> u64 {
        let mut all = locked(&self.open);
        all.0 += 1;
        let handle = all.0;
        all.1.insert(handle, open);
        handle
    }

    pub(super) fn file(&self, handle: u64) -> IoResult<Arc<File>> {
        match locked(&self.open).1.get(&handle) {
            Some(Open::File(file)) => Ok(Arc::clone(file)),
            _ => Err(Error::from_raw_os_error(libc::EBADF)),
        }
    }

    pub(super) fn list(&self, ino: u64) -> IoResult<Vec<(u64, FileType, OsString)>> {
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

pub(super) fn stat_at(fd: &OwnedFd, name: &CStr, flags: i32) -> IoResult<libc::stat> {
    // SAFETY: all zeros is a valid structure, and the name ends in NUL.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        check(libc::fstatat(fd.as_raw_fd(), name.as_ptr(), &raw mut st, flags | libc::AT_SYMLINK_NOFOLLOW))?;
        Ok(st)
    }
}

/// What a SETATTR changes.
pub(super) struct Change {
    pub(super) mode: Option<u32>,
    pub(super) owner: (Option<u32>, Option<u32>),
    pub(super) size: Option<u64>,
    pub(super) times: [Option<TimeOrNow>; 2],
}

impl Change {
    pub(super) fn apply(self, fs: &Shared, ino: u64) -> IoResult<FileAttr> {
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

pub(super) fn timespec(time: SystemTime) -> libc::timespec {
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

/// Gives a new file the user and the group of the process that made it.
pub(super) fn own(fs: &Shared, parent: u64, name: &CStr, (uid, gid): (u32, u32)) -> IoResult<i32> {
    let directory = fs.node(parent)?;
    // SAFETY: the name ends in NUL.
    check(unsafe {
        libc::fchownat(directory.as_raw_fd(), name.as_ptr(), uid, gid, libc::AT_SYMLINK_NOFOLLOW)
    })
}
