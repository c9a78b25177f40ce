//! The operations of a door: on paths, on open descriptors, and on directory streams.
//!
//! Paths are relative to the directory that the door last entered, or absolute as programs see them. Descriptors are
//! the kernel's, because every door of Forebay returns such. So reading, writing, seeking, mapping and locking have one
//! implementation here, over the C library, which the preload library may interpose.

use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::Location;

/// An errno.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's errno.
    pub fn last() -> Errno {
        Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::EIO => "EIO",
            libc::EBADF => "EBADF",
            libc::EACCES => "EACCES",
            libc::EBUSY => "EBUSY",
            libc::EEXIST => "EEXIST",
            libc::EXDEV => "EXDEV",
            libc::ENOTDIR => "ENOTDIR",
            libc::EISDIR => "EISDIR",
            libc::EINVAL => "EINVAL",
            libc::ENOSPC => "ENOSPC",
            libc::ERANGE => "ERANGE",
            libc::ENAMETOOLONG => "ENAMETOOLONG",
            libc::ENOTEMPTY => "ENOTEMPTY",
            libc::ELOOP => "ELOOP",
            libc::ENODATA => "ENODATA",
            libc::E2BIG => "E2BIG",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            other => return write!(f, "errno {other}"),
        };
        f.write_str(name)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result of an operation.
pub type Outcome<T> = Result<T, Errno>;

/// Why a case failed, and where in the case.
#[derive(Debug)]
pub struct Failure {
    /// What was seen and what was expected.
    pub what: String,
    /// The case's line.
    pub place: &'static Location<'static>,
}

impl From<Errno> for Failure {
    #[track_caller]
    fn from(errno: Errno) -> Failure {
        Failure { what: format!("a call that must succeed gave {errno}"), place: Location::caller() }
    }
}

/// The result of a case: nothing, or why it failed.
pub type Verdict = Result<(), Failure>;

/// An ability that a door, or the file system behind it, may lack. A case lists the abilities that it needs, and is
/// skipped for a door that lacks one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ability {
    /// Descriptors of directories for the `*at` calls, fchdir, and a working directory.
    DirectoryDescriptors,
    /// Forked children can use the door.
    Children,
    /// The door sees paths outside the pool too.
    Outside,
    /// All paths and descriptors belong to one door.
    OneDoor,
    /// Every call is made on one node, so that the exceptions of docs/network.md for several nodes do not apply.
    OneNode,
    /// The files that a program creates lie on its node, so that its descriptors are of files of the node's own file
    /// system.
    OwnData,
    /// The program runs as root.
    Root,
    /// The program does not run as root.
    NotRoot,
    /// Extended attributes named `user.`.
    Xattrs,
    /// Values of extended attributes up to 65,536 bytes.
    LargeXattrs,
    /// No other process writes to the file system, so that changes of its free space can be checked.
    OwnSpace,
    /// The file system is so small (at most 256 MiB, some thousand inodes) that a case may fill it.
    SmallSpace,
}

/// A point in time, like `struct timespec`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Time {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: i64,
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// UTIME_OMIT.
    Omit,
    /// UTIME_NOW.
    Now,
    /// Set this time.
    At(Time),
}

impl SetTime {
    /// The value for `utimensat`.
    pub fn timespec(self) -> libc::timespec {
        match self {
            SetTime::Omit => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
            SetTime::Now => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
            SetTime::At(t) => libc::timespec { tv_sec: t.sec, tv_nsec: t.nsec },
        }
    }
}

/// The result of stat.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the fields of struct stat
pub struct Stat {
    pub dev: u64,
    pub ino: u64,
    pub mode: u32,
    pub nlink: u64,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: i64,
    pub blocks: i64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
}

impl Stat {
    /// From the C structure.
    pub fn from_c(s: &libc::stat) -> Stat {
        Stat {
            dev: s.st_dev,
            ino: s.st_ino,
            mode: s.st_mode,
            nlink: s.st_nlink,
            uid: s.st_uid,
            gid: s.st_gid,
            rdev: s.st_rdev,
            size: s.st_size,
            blocks: s.st_blocks,
            atime: Time { sec: s.st_atime, nsec: s.st_atime_nsec },
            mtime: Time { sec: s.st_mtime, nsec: s.st_mtime_nsec },
            ctime: Time { sec: s.st_ctime, nsec: s.st_ctime_nsec },
        }
    }

    /// The type bits of the mode.
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    /// The twelve permission bits.
    pub fn permissions(&self) -> u32 {
        self.mode & 0o7777
    }
}

/// The result of statfs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Size of the file system, in bytes.
    pub total_bytes: u64,
    /// Free space, in bytes.
    pub free_bytes: u64,
    /// Maximum length of a name, in bytes.
    pub name_max: u64,
}

/// One entry of a directory stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Name.
    pub name: Vec<u8>,
    /// Inode number.
    pub ino: u64,
    /// DT_REG and so on.
    pub kind: u8,
}

/// An open directory.
pub trait Stream {
    /// The next entry, including `.` and `..`. None at the end.
    fn next(&mut self) -> Outcome<Option<Item>>;
    /// The position before the next entry.
    fn tell(&mut self) -> i64;
    /// Moves to a position that `tell` returned.
    fn seek(&mut self, position: i64);
    /// Moves to the beginning.
    fn rewind(&mut self);
}

/// A name of a file: a path, or a path under the descriptor of a directory.
#[derive(Clone, Copy)]
pub struct At<'a> {
    /// The directory, or none for the directory that the door entered.
    pub dir: Option<RawFd>,
    /// The path.
    pub path: &'a [u8],
}

impl<'a, P: AsRef<[u8]> + ?Sized> From<&'a P> for At<'a> {
    fn from(path: &'a P) -> At<'a> {
        At { dir: None, path: path.as_ref() }
    }
}

/// The operations. Every method is the call of that name in POSIX or Linux, with the same results.
#[allow(missing_docs)] // named after the calls
pub trait Door {
    /// For messages.
    fn name(&self) -> String;
    fn can(&self, ability: Ability) -> bool;
    /// Creates a directory of that name under the door's root. Paths are relative to it from now on.
    fn enter(&mut self, directory: &str) -> Outcome<()>;
    /// Like `enter`, for a directory that another door to the same pool has created.
    fn enter_existing(&mut self, directory: &str) -> Outcome<()>;
    /// The absolute form of `path`, as programs see it.
    fn absolute(&self, path: &[u8]) -> Vec<u8>;

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd>;
    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat>;
    fn make_directory_at(&self, at: At<'_>, mode: u32) -> Outcome<()>;
    fn unlink_at(&self, at: At<'_>) -> Outcome<()>;
    fn remove_directory_at(&self, at: At<'_>) -> Outcome<()>;
    fn rename_at(&self, from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()>;
    fn link_at(&self, from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()>;
    /// linkat(2) of a descriptor.
    fn link_handle(&self, fd: RawFd, to: At<'_>) -> Outcome<()>;
    fn symlink_at(&self, target: &[u8], at: At<'_>) -> Outcome<()>;
    fn read_link_at(&self, at: At<'_>, buffer: &mut [u8]) -> Outcome<usize>;
    fn make_node_at(&self, at: At<'_>, mode: u32, rdev: u64) -> Outcome<()>;
    fn chmod_at(&self, at: At<'_>, mode: u32) -> Outcome<()>;
    fn chown_at(&self, at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()>;
    fn set_times_at(&self, at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()>;
    fn access_at(&self, at: At<'_>, amode: i32) -> Outcome<()>;
    fn truncate(&self, path: &[u8], size: i64) -> Outcome<()>;
    fn get_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
    fn set_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
    fn list_xattr(&self, path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize>;
    fn remove_xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Outcome<()>;
    fn space(&self) -> Outcome<Space>;
    fn set_umask(&self, mask: u32) -> u32;
    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>>;
    fn stream_of(&self, directory: OwnedFd) -> Outcome<Box<dyn Stream>>;
    fn change_directory(&self, directory: RawFd) -> Outcome<()>;
    fn working_directory(&self) -> Outcome<Vec<u8>>;

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat>;
    fn chmod_handle(&self, fd: RawFd, mode: u32) -> Outcome<()>;
    fn chown_handle(&self, fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()>;
    fn set_times_handle(&self, fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()>;
    fn get_xattr_handle(&self, fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
    fn set_xattr_handle(&self, fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
    fn list_xattr_handle(&self, fd: RawFd, names: &mut [u8]) -> Outcome<usize>;
    fn remove_xattr_handle(&self, fd: RawFd, name: &[u8]) -> Outcome<()>;

    fn read(&self, fd: &OwnedFd, buffer: &mut [u8]) -> Outcome<usize> {
        // SAFETY: the buffer is ours and of the length given.
        count(unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) })
    }
    fn write(&self, fd: &OwnedFd, bytes: &[u8]) -> Outcome<usize> {
        // SAFETY: the bytes are ours and of the length given.
        count(unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) })
    }
    fn read_at(&self, fd: &OwnedFd, buffer: &mut [u8], offset: i64) -> Outcome<usize> {
        // SAFETY: the buffer is ours and of the length given.
        count(unsafe { libc::pread(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), offset) })
    }
    fn write_at(&self, fd: &OwnedFd, bytes: &[u8], offset: i64) -> Outcome<usize> {
        // SAFETY: the bytes are ours and of the length given.
        count(unsafe { libc::pwrite(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset) })
    }
    fn seek(&self, fd: &OwnedFd, offset: i64, whence: i32) -> Outcome<i64> {
        // SAFETY: no memory is passed.
        let at = unsafe { libc::lseek(fd.as_raw_fd(), offset, whence) };
        if at < 0 {
            Err(Errno::last())
        } else {
            Ok(at)
        }
    }
    fn truncate_handle(&self, fd: &OwnedFd, size: i64) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe { libc::ftruncate(fd.as_raw_fd(), size) })
    }
    fn allocate(&self, fd: &OwnedFd, mode: i32, offset: i64, bytes: i64) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset, bytes) })
    }
    fn sync(&self, fd: &OwnedFd, data_only: bool) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe {
            if data_only {
                libc::fdatasync(fd.as_raw_fd())
            } else {
                libc::fsync(fd.as_raw_fd())
            }
        })
    }
    fn duplicate(&self, fd: &OwnedFd) -> Outcome<OwnedFd> {
        // SAFETY: no memory is passed.
        owned(unsafe { libc::dup(fd.as_raw_fd()) })
    }
}

/// Short forms for the cases: paths in place of [`At`], whole files, whole directories.
impl dyn Door + '_ {
    /// open(2).
    pub fn open(&self, path: impl AsRef<[u8]>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        self.open_at(path.as_ref().into(), flags, mode)
    }
    /// A new file, open for reading and writing.
    pub fn create(&self, path: impl AsRef<[u8]>) -> Outcome<OwnedFd> {
        self.open(path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o644)
    }
    /// A new file with these bytes.
    pub fn put(&self, path: impl AsRef<[u8]>, bytes: &[u8]) -> Outcome<()> {
        let fd = self.open(path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC, 0o644)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = self.write(&fd, rest)?;
            rest = &rest[n..];
        }
        Ok(())
    }
    /// A file's bytes.
    pub fn get(&self, path: impl AsRef<[u8]>) -> Outcome<Vec<u8>> {
        let fd = self.open(path, libc::O_RDONLY, 0)?;
        self.drain(&fd)
    }
    /// The bytes from the current offset to the end.
    pub fn drain(&self, fd: &OwnedFd) -> Outcome<Vec<u8>> {
        let mut all = Vec::new();
        let mut buffer = [0; 8192];
        loop {
            match self.read(fd, &mut buffer)? {
                0 => return Ok(all),
                n => all.extend_from_slice(&buffer[..n]),
            }
        }
    }
    /// stat(2).
    pub fn stat(&self, path: impl AsRef<[u8]>) -> Outcome<Stat> {
        self.stat_at(path.as_ref().into(), true)
    }
    /// lstat(2).
    pub fn lstat(&self, path: impl AsRef<[u8]>) -> Outcome<Stat> {
        self.stat_at(path.as_ref().into(), false)
    }
    /// mkdir(2), 0755.
    pub fn make_directory(&self, path: impl AsRef<[u8]>) -> Outcome<()> {
        self.make_directory_at(path.as_ref().into(), 0o755)
    }
    /// unlink(2).
    pub fn unlink(&self, path: impl AsRef<[u8]>) -> Outcome<()> {
        self.unlink_at(path.as_ref().into())
    }
    /// rmdir(2).
    pub fn remove_directory(&self, path: impl AsRef<[u8]>) -> Outcome<()> {
        self.remove_directory_at(path.as_ref().into())
    }
    /// rename(2).
    pub fn rename(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Outcome<()> {
        self.rename_with(from, to, 0)
    }
    /// renameat2(2).
    pub fn rename_with(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>, flags: u32) -> Outcome<()> {
        self.rename_at(from.as_ref().into(), to.as_ref().into(), flags)
    }
    /// link(2).
    pub fn link(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Outcome<()> {
        self.link_at(from.as_ref().into(), to.as_ref().into(), false)
    }
    /// symlink(2).
    pub fn symlink(&self, target: impl AsRef<[u8]>, path: impl AsRef<[u8]>) -> Outcome<()> {
        self.symlink_at(target.as_ref(), path.as_ref().into())
    }
    /// readlink(2) with a buffer that is long enough.
    pub fn read_link(&self, path: impl AsRef<[u8]>) -> Outcome<Vec<u8>> {
        let mut buffer = vec![0; 5000];
        let n = self.read_link_at(path.as_ref().into(), &mut buffer)?;
        buffer.truncate(n);
        Ok(buffer)
    }
    /// chmod(2).
    pub fn chmod(&self, path: impl AsRef<[u8]>, mode: u32) -> Outcome<()> {
        self.chmod_at(path.as_ref().into(), mode)
    }
    /// access(2).
    pub fn access(&self, path: impl AsRef<[u8]>, amode: i32) -> Outcome<()> {
        self.access_at(path.as_ref().into(), amode)
    }
    /// A directory's names, sorted, without `.` and `..`.
    pub fn names(&self, path: impl AsRef<[u8]>) -> Outcome<Vec<Vec<u8>>> {
        let mut names: Vec<_> = self
            .items(path)?
            .into_iter()
            .map(|item| item.name)
            .filter(|name| name != b"." && name != b"..")
            .collect();
        names.sort();
        Ok(names)
    }
    /// A directory's entries in the order of the listing.
    pub fn items(&self, path: impl AsRef<[u8]>) -> Outcome<Vec<Item>> {
        let mut stream = self.open_stream(path.as_ref())?;
        let mut items = Vec::new();
        while let Some(item) = stream.next()? {
            items.push(item);
        }
        Ok(items)
    }
}

/// The result of a call that returns a count.
pub(crate) fn count(n: isize) -> Outcome<usize> {
    if n < 0 {
        Err(Errno::last())
    } else {
        Ok(n as usize)
    }
}

/// The result of a call that returns zero.
pub(crate) fn done(result: i32) -> Outcome<()> {
    if result < 0 {
        Err(Errno::last())
    } else {
        Ok(())
    }
}

/// The result of a call that returns a descriptor.
pub(crate) fn owned(fd: i32) -> Outcome<OwnedFd> {
    if fd < 0 {
        return Err(Errno::last());
    }
    // SAFETY: the kernel just returned this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
