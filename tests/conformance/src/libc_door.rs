//! The door of the C library: a directory, as any program sees it.
//!
//! On a plain directory it is the reference for the suite. In a process under `forebay run` the same calls go through
//! the preload library, so the same code tests that door. Each call has three spellings, which the preload library
//! handles by different code; the suite runs with each of them.

use crate::door::{
    count, done, owned, Ability, At, Door, Errno, Item, Outcome, SetTime, Space, Stat, Stream,
};
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How a path is given to a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spelling {
    /// From the root directory: `/forebay/case/file`.
    Absolute,
    /// From the working directory.
    Relative,
    /// Under the descriptor of the case's directory.
    At,
}

/// See the module.
pub struct LibcDoor {
    root: PathBuf,
    spelling: Spelling,
    entered: PathBuf,
    entered_fd: Option<OwnedFd>,
    abilities: Vec<Ability>,
}

impl LibcDoor {
    /// A door to the directory `root`. `claimed`: abilities that cannot be probed.
    pub fn new(root: &Path, spelling: Spelling, claimed: &[Ability]) -> LibcDoor {
        let mut abilities = vec![
            Ability::DirectoryDescriptors,
            Ability::Children,
            Ability::Outside,
            Ability::OneDoor,
            Ability::OneNode,
            Ability::OwnData,
        ];
        // SAFETY: no memory is passed.
        abilities.push(if unsafe { libc::geteuid() } == 0 { Ability::Root } else { Ability::NotRoot });
        abilities.extend_from_slice(claimed);
        LibcDoor { root: root.into(), spelling, entered: root.into(), entered_fd: None, abilities }
    }

    /// The directory descriptor and path that a call takes.
    fn place(&self, at: At<'_>) -> (RawFd, CString) {
        let from_here = at.dir.is_none() && !at.path.is_empty() && at.path[0] != b'/';
        let dir = at.dir.unwrap_or(libc::AT_FDCWD);
        match self.spelling {
            Spelling::Absolute if from_here => (dir, text(&self.absolute(at.path))),
            Spelling::At if from_here => {
                (self.entered_fd.as_ref().map_or(libc::AT_FDCWD, AsRawFd::as_raw_fd), text(at.path))
            }
            _ => (dir, text(at.path)),
        }
    }

    /// A path for the calls that take no directory.
    fn path(&self, path: &[u8]) -> CString {
        match self.spelling {
            Spelling::Relative => text(path),
            _ if path.is_empty() || path[0] == b'/' => text(path),
            _ => text(&self.absolute(path)),
        }
    }
}

fn text(bytes: &[u8]) -> CString {
    CString::new(bytes).expect("cases use no NUL in paths")
}

impl Door for LibcDoor {
    fn name(&self) -> String {
        format!("libc ({:?}) on {}", self.spelling, self.root.display())
    }

    fn can(&self, ability: Ability) -> bool {
        self.abilities.contains(&ability)
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        let path = self.root.join(directory);
        let c = text(path.as_os_str().as_bytes());
        // SAFETY: the string ends in NUL.
        done(unsafe { libc::mkdir(c.as_ptr(), 0o755) })?;
        self.enter_existing(directory)
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        let path = self.root.join(directory);
        let c = text(path.as_os_str().as_bytes());
        if self.spelling == Spelling::Relative {
            // SAFETY: the string ends in NUL.
            done(unsafe { libc::chdir(c.as_ptr()) })?;
        }
        // SAFETY: the string ends in NUL.
        let fd = unsafe { libc::open(c.as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) };
        self.entered_fd = Some(owned(fd)?);
        self.entered = path;
        Ok(())
    }

    fn absolute(&self, path: &[u8]) -> Vec<u8> {
        let mut whole = self.entered.as_os_str().as_bytes().to_vec();
        whole.push(b'/');
        whole.extend_from_slice(path);
        whole
    }

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        owned(unsafe {
            if dir == libc::AT_FDCWD {
                libc::open(path.as_ptr(), flags, mode)
            } else {
                libc::openat(dir, path.as_ptr(), flags, mode)
            }
        })
    }

    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat> {
        let (dir, path) = self.place(at);
        // SAFETY: all zeros is a valid struct stat.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the string ends in NUL, the structure is ours.
        done(unsafe {
            match (dir == libc::AT_FDCWD, follow) {
                (true, true) => libc::stat(path.as_ptr(), &mut stat),
                (true, false) => libc::lstat(path.as_ptr(), &mut stat),
                (false, _) => {
                    let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
                    libc::fstatat(dir, path.as_ptr(), &mut stat, flags)
                }
            }
        })?;
        Ok(Stat::from_c(&stat))
    }

    fn make_directory_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::mkdir(path.as_ptr(), mode)
            } else {
                libc::mkdirat(dir, path.as_ptr(), mode)
            }
        })
    }

    fn unlink_at(&self, at: At<'_>) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::unlink(path.as_ptr())
            } else {
                libc::unlinkat(dir, path.as_ptr(), 0)
            }
        })
    }

    fn remove_directory_at(&self, at: At<'_>) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::rmdir(path.as_ptr())
            } else {
                libc::unlinkat(dir, path.as_ptr(), libc::AT_REMOVEDIR)
            }
        })
    }

    fn rename_at(&self, from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()> {
        let (from_dir, from) = self.place(from);
        let (to_dir, to) = self.place(to);
        // SAFETY: the strings end in NUL.
        done(unsafe {
            match flags {
                0 if from_dir == libc::AT_FDCWD && to_dir == libc::AT_FDCWD => {
                    libc::rename(from.as_ptr(), to.as_ptr())
                }
                0 => libc::renameat(from_dir, from.as_ptr(), to_dir, to.as_ptr()),
                _ => libc::renameat2(from_dir, from.as_ptr(), to_dir, to.as_ptr(), flags),
            }
        })
    }

    fn link_at(&self, from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()> {
        let (from_dir, from) = self.place(from);
        let (to_dir, to) = self.place(to);
        // SAFETY: the strings end in NUL.
        done(unsafe {
            if !follow && from_dir == libc::AT_FDCWD && to_dir == libc::AT_FDCWD {
                libc::link(from.as_ptr(), to.as_ptr())
            } else {
                let flags = if follow { libc::AT_SYMLINK_FOLLOW } else { 0 };
                libc::linkat(from_dir, from.as_ptr(), to_dir, to.as_ptr(), flags)
            }
        })
    }

    fn link_handle(&self, fd: RawFd, to: At<'_>) -> Outcome<()> {
        let from = text(format!("/proc/self/fd/{fd}").as_bytes());
        let (to_dir, to) = self.place(to);
        // SAFETY: the strings end in NUL.
        done(unsafe {
            libc::linkat(libc::AT_FDCWD, from.as_ptr(), to_dir, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
        })
    }

    fn symlink_at(&self, target: &[u8], at: At<'_>) -> Outcome<()> {
        let (dir, path) = self.place(at);
        let target = text(target);
        // SAFETY: the strings end in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::symlink(target.as_ptr(), path.as_ptr())
            } else {
                libc::symlinkat(target.as_ptr(), dir, path.as_ptr())
            }
        })
    }

    fn read_link_at(&self, at: At<'_>, buffer: &mut [u8]) -> Outcome<usize> {
        let (dir, path) = self.place(at);
        let room = buffer.as_mut_ptr().cast();
        // SAFETY: the string ends in NUL, the buffer is ours and of the length given.
        count(unsafe {
            if dir == libc::AT_FDCWD {
                libc::readlink(path.as_ptr(), room, buffer.len())
            } else {
                libc::readlinkat(dir, path.as_ptr(), room, buffer.len())
            }
        })
    }

    fn make_node_at(&self, at: At<'_>, mode: u32, rdev: u64) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            match (dir == libc::AT_FDCWD, mode & libc::S_IFMT == libc::S_IFIFO) {
                (true, true) => libc::mkfifo(path.as_ptr(), mode & 0o7777),
                (true, false) => libc::mknod(path.as_ptr(), mode, rdev),
                (false, true) => libc::mkfifoat(dir, path.as_ptr(), mode & 0o7777),
                (false, false) => libc::mknodat(dir, path.as_ptr(), mode, rdev),
            }
        })
    }

    fn chmod_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::chmod(path.as_ptr(), mode)
            } else {
                libc::fchmodat(dir, path.as_ptr(), mode, 0)
            }
        })
    }

    fn chown_at(&self, at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()> {
        let (dir, path) = self.place(at);
        let (uid, gid) = (uid.unwrap_or(u32::MAX), gid.unwrap_or(u32::MAX));
        // SAFETY: the string ends in NUL.
        done(unsafe {
            match (dir == libc::AT_FDCWD, follow) {
                (true, true) => libc::chown(path.as_ptr(), uid, gid),
                (true, false) => libc::lchown(path.as_ptr(), uid, gid),
                (false, _) => {
                    let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
                    libc::fchownat(dir, path.as_ptr(), uid, gid, flags)
                }
            }
        })
    }

    fn set_times_at(&self, at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()> {
        let (dir, path) = self.place(at);
        let times = [atime.timespec(), mtime.timespec()];
        let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        // SAFETY: the string ends in NUL, and there are two times.
        done(unsafe { libc::utimensat(dir, path.as_ptr(), times.as_ptr(), flags) })
    }

    fn access_at(&self, at: At<'_>, amode: i32) -> Outcome<()> {
        let (dir, path) = self.place(at);
        // SAFETY: the string ends in NUL.
        done(unsafe {
            if dir == libc::AT_FDCWD {
                libc::access(path.as_ptr(), amode)
            } else {
                libc::faccessat(dir, path.as_ptr(), amode, 0)
            }
        })
    }

    fn truncate(&self, path: &[u8], size: i64) -> Outcome<()> {
        // SAFETY: the string ends in NUL.
        done(unsafe { libc::truncate(self.path(path).as_ptr(), size) })
    }

    fn get_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        let (path, name) = (self.path(path), text(name));
        let call = if follow { libc::getxattr } else { libc::lgetxattr };
        // SAFETY: the strings end in NUL, the buffer is ours and of the length given.
        count(unsafe { call(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) })
    }

    fn set_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        let (path, name) = (self.path(path), text(name));
        let call = if follow { libc::setxattr } else { libc::lsetxattr };
        // SAFETY: the strings end in NUL, the value is of the length given.
        done(unsafe { call(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) })
    }

    fn list_xattr(&self, path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize> {
        let path = self.path(path);
        let call = if follow { libc::listxattr } else { libc::llistxattr };
        // SAFETY: the string ends in NUL, the buffer is ours and of the length given.
        count(unsafe { call(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) })
    }

    fn remove_xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Outcome<()> {
        let (path, name) = (self.path(path), text(name));
        let call = if follow { libc::removexattr } else { libc::lremovexattr };
        // SAFETY: the strings end in NUL.
        done(unsafe { call(path.as_ptr(), name.as_ptr()) })
    }

    fn space(&self) -> Outcome<Space> {
        // SAFETY: all zeros is a valid struct statvfs.
        let mut s: libc::statvfs = unsafe { std::mem::zeroed() };
        let path = text(self.entered.as_os_str().as_bytes());
        // SAFETY: the string ends in NUL, the structure is ours.
        done(unsafe { libc::statvfs(path.as_ptr(), &mut s) })?;
        Ok(Space {
            total_bytes: s.f_blocks * s.f_frsize,
            free_bytes: s.f_bavail * s.f_frsize,
            name_max: s.f_namemax,
        })
    }

    fn set_umask(&self, mask: u32) -> u32 {
        // SAFETY: no memory is passed.
        unsafe { libc::umask(mask) }
    }

    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>> {
        // SAFETY: the string ends in NUL.
        DirStream::boxed(unsafe { libc::opendir(self.path(path).as_ptr()) })
    }

    fn stream_of(&self, directory: OwnedFd) -> Outcome<Box<dyn Stream>> {
        let fd = directory.into_raw_fd();
        // SAFETY: the descriptor is ours; on success the stream owns it.
        let stream = DirStream::boxed(unsafe { libc::fdopendir(fd) });
        if stream.is_err() {
            // SAFETY: fdopendir failed, so the descriptor is still ours.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        stream
    }

    fn change_directory(&self, directory: RawFd) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe { libc::fchdir(directory) })
    }

    fn working_directory(&self) -> Outcome<Vec<u8>> {
        let mut buffer = [0_u8; 4097];
        // SAFETY: the buffer is ours and of the length given.
        if unsafe { libc::getcwd(buffer.as_mut_ptr().cast(), buffer.len()) }.is_null() {
            return Err(Errno::last());
        }
        Ok(buffer.split(|b| *b == 0).next().unwrap_or_default().to_vec())
    }

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat> {
        // SAFETY: all zeros is a valid struct stat.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours.
        done(unsafe { libc::fstat(fd, &mut stat) })?;
        Ok(Stat::from_c(&stat))
    }

    fn chmod_handle(&self, fd: RawFd, mode: u32) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe { libc::fchmod(fd, mode) })
    }

    fn chown_handle(&self, fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()> {
        // SAFETY: no memory is passed.
        done(unsafe { libc::fchown(fd, uid.unwrap_or(u32::MAX), gid.unwrap_or(u32::MAX)) })
    }

    fn set_times_handle(&self, fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()> {
        let times = [atime.timespec(), mtime.timespec()];
        // SAFETY: there are two times.
        done(unsafe { libc::futimens(fd, times.as_ptr()) })
    }

    fn get_xattr_handle(&self, fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        // SAFETY: the string ends in NUL, the buffer is ours and of the length given.
        count(unsafe { libc::fgetxattr(fd, text(name).as_ptr(), value.as_mut_ptr().cast(), value.len()) })
    }

    fn set_xattr_handle(&self, fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        // SAFETY: the string ends in NUL, the value is of the length given.
        done(unsafe { libc::fsetxattr(fd, text(name).as_ptr(), value.as_ptr().cast(), value.len(), flags) })
    }

    fn list_xattr_handle(&self, fd: RawFd, names: &mut [u8]) -> Outcome<usize> {
        // SAFETY: the buffer is ours and of the length given.
        count(unsafe { libc::flistxattr(fd, names.as_mut_ptr().cast(), names.len()) })
    }

    fn remove_xattr_handle(&self, fd: RawFd, name: &[u8]) -> Outcome<()> {
        // SAFETY: the string ends in NUL.
        done(unsafe { libc::fremovexattr(fd, text(name).as_ptr()) })
    }
}

/// A `DIR *`.
struct DirStream(*mut libc::DIR);

impl DirStream {
    fn boxed(dir: *mut libc::DIR) -> Outcome<Box<dyn Stream>> {
        if dir.is_null() {
            return Err(Errno::last());
        }
        Ok(Box::new(DirStream(dir)))
    }
}

impl Stream for DirStream {
    fn next(&mut self) -> Outcome<Option<Item>> {
        // SAFETY: the stream is open; errno is this thread's own; the entry is read before the next call; its name
        // ends in NUL.
        unsafe {
            *libc::__errno_location() = 0;
            let entry = libc::readdir(self.0);
            if entry.is_null() {
                return match *libc::__errno_location() {
                    0 => Ok(None),
                    errno => Err(Errno(errno)),
                };
            }
            let name = std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()).to_bytes().to_vec();
            Ok(Some(Item { name, ino: (*entry).d_ino, kind: (*entry).d_type }))
        }
    }

    fn tell(&mut self) -> i64 {
        // SAFETY: the stream is open.
        unsafe { libc::telldir(self.0) }
    }

    fn seek(&mut self, position: i64) {
        // SAFETY: the stream is open.
        unsafe { libc::seekdir(self.0, position) }
    }

    fn rewind(&mut self) {
        // SAFETY: the stream is open.
        unsafe { libc::rewinddir(self.0) }
    }
}

impl Drop for DirStream {
    fn drop(&mut self) {
        // SAFETY: the stream is open, and is not used afterwards.
        unsafe { libc::closedir(self.0) };
    }
}
