//! The backing store: any file system that the kernel mounts.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use forebay_sys::descriptor::path_of_entry;
use forebay_sys::file_system::FileSystem;
use forebay_types::limits::{XATTR_LIST_MAX, XATTR_VALUE_MAX};
use forebay_types::{Code, Kind, Timestamp};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, SeekFrom, Uid, XattrFlags, CWD};
use rustix::io::Errno;

use crate::kernel_file::{code, meta_of, retried, timestamps, KernelFile};
use crate::tree::{Meta, Names, Object, OwnerAndMode, Space, Tree, Wanted};

/// Bytes of one directory listing: about 1000 short names.
const LISTING_BYTES: usize = 32 * 1024;

/// File systems whose calls cross a network. FUSE is one, because many network file systems use it.
const REMOTE: [FileSystem; 10] = [
    FileSystem::NFS,
    FileSystem::SMB3,
    FileSystem::CIFS,
    FileSystem::LUSTRE,
    FileSystem::GPFS,
    FileSystem::BEEGFS,
    FileSystem::CEPH,
    FileSystem::AFS,
    FileSystem::NINE_P,
    FileSystem::FUSE,
];

/// File systems that show the kernel's own state, and in which no process can create files.
const KERNELS_OWN: [FileSystem; 9] = [
    FileSystem::PROC,
    FileSystem::SYSFS,
    FileSystem::CGROUP,
    FileSystem::CGROUP2,
    FileSystem::DEBUGFS,
    FileSystem::TRACEFS,
    FileSystem::SECURITYFS,
    FileSystem::DEVPTS,
    FileSystem::BPF,
];

/// False for a directory of a file system that shows the kernel's own state: no files can be created in it, whatever
/// its permission bits are.
pub fn takes_files(directory: impl AsFd) -> bool {
    !FileSystem::of(directory).is_ok_and(|kind| KERNELS_OWN.contains(&kind))
}

/// The kernel's tree.
#[derive(Debug)]
pub(crate) struct PosixTree {
    umask: u32,
    uid: u32,
    gid: u32,
}

impl PosixTree {
    pub(crate) fn new() -> PosixTree {
        PosixTree {
            umask: umask(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }
}

/// This process's umask, read without changing it. Without /proc it is the strictest one, because modes are set again
/// later.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|v| u32::from_str_radix(v.trim(), 8).ok()).unwrap_or(0o077)
}

fn kind_of(file_type: FileType) -> Option<Kind> {
    Some(match file_type {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::Socket => Kind::Socket,
        FileType::Unknown => return None,
    })
}

/// Opens for reading, without changing the access time if the kernel allows that.
fn open_for_reading(at: impl AsFd, name: &[u8], flags: OFlags) -> Result<OwnedFd, Code> {
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    match retried(|| rustix::fs::openat(&at, name, flags | OFlags::NOATIME, Mode::empty())) {
        Err(Code::NotPermitted) => retried(|| rustix::fs::openat(&at, name, flags, Mode::empty())),
        other => other,
    }
}

/// Calls `call` on a vector with room for at most `most` bytes, and keeps the bytes that it filled.
fn filled(
    into: &mut Vec<u8>,
    most: usize,
    call: impl Fn(&mut [u8]) -> Result<usize, Errno>,
) -> Result<(), Code> {
    // Nearly all lists and values are short; `call` is repeated for long ones.
    for room in [1024, most] {
        into.resize(room, 0);
        match call(into) {
            Err(Errno::RANGE) if room < most => {}
            Err(e) => {
                into.clear();
                return Err(code(e));
            }
            Ok(len) => {
                into.truncate(len);
                return Ok(());
            }
        }
    }
    Err(Code::Range)
}

impl Tree for PosixTree {
    type Directory = OwnedFd;
    type File = KernelFile;

    fn title(&self) -> &'static str {
        "the store"
    }

    fn open_path(&self, path: &[u8]) -> Result<(OwnedFd, Meta), Code> {
        let fd = open_for_reading(CWD, path, OFlags::DIRECTORY)?;
        let meta = meta_of(&retried(|| rustix::fs::fstat(&fd))?)?;
        Ok((fd, meta))
    }

    fn open_directory(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<(OwnedFd, Meta), Code> {
        let flags = if follow { OFlags::DIRECTORY } else { OFlags::DIRECTORY | OFlags::NOFOLLOW };
        let fd = open_for_reading(at, name, flags)?;
        let meta = meta_of(&retried(|| rustix::fs::fstat(&fd))?)?;
        Ok((fd, meta))
    }

    fn list(&self, at: &OwnedFd, cursor: u64, names: &mut Names) -> Result<Option<u64>, Code> {
        retried(|| rustix::fs::seek(at, SeekFrom::Start(cursor)))?;
        let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
        let mut listing = RawDir::new(at, &mut buffer);
        let mut next = None;
        while let Some(entry) = listing.next() {
            let entry = entry.map_err(code)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(name, kind_of(entry.file_type()));
            }
            next = Some(entry.next_entry_cookie());
            if listing.is_buffer_empty() {
                break;
            }
        }
        Ok(next)
    }

    fn stat(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<Meta, Code> {
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        meta_of(&retried(|| rustix::fs::statat(at, name, flags))?)
    }

    fn open(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<(KernelFile, Meta), Code> {
        // NONBLOCK: the open must not wait for a writer if the entry is a FIFO by now.
        let flags = if follow { OFlags::NONBLOCK } else { OFlags::NONBLOCK | OFlags::NOFOLLOW };
        let fd = open_for_reading(at, name, flags)?;
        let file = KernelFile(fd);
        let meta = file.meta()?;
        Ok((file, meta))
    }

    fn create(&self, at: &OwnedFd, name: &[u8], wanted: &Wanted) -> Result<KernelFile, Code> {
        // Until the file has its owner, only the present owner may read it. Set-ID bits are set only then.
        let other_owner =
            wanted.uid.is_some_and(|u| u != self.uid) || wanted.gid.is_some_and(|g| g != self.gid);
        let bits = if other_owner { wanted.mode & 0o700 } else { wanted.mode & 0o777 };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(bits & !self.umask);
        retried(|| rustix::fs::openat(at, name, flags, mode)).map(KernelFile)
    }

    fn make_directory(&self, at: &OwnedFd, name: &[u8], mode: u32) -> Result<(), Code> {
        retried(|| rustix::fs::mkdirat(at, name, Mode::from_raw_mode(mode)))
    }

    fn symlink(&self, target: &[u8], at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        retried(|| rustix::fs::symlinkat(target, at, name))
    }

    fn read_link(&self, at: &OwnedFd, name: &[u8]) -> Result<Vec<u8>, Code> {
        retried(|| rustix::fs::readlinkat(at, name, Vec::new())).map(|target| target.into_bytes())
    }

    fn make_node(&self, at: &OwnedFd, name: &[u8], meta: &Meta) -> Result<(), Code> {
        let file_type = FileType::from_raw_mode(meta.kind.mode_bits());
        let mode = Mode::from_raw_mode(meta.mode & 0o700);
        retried(|| rustix::fs::mknodat(at, name, file_type, mode, meta.rdev))
    }

    fn link(&self, from: (&OwnedFd, &[u8]), to: (&OwnedFd, &[u8])) -> Result<(), Code> {
        retried(|| rustix::fs::linkat(from.0, from.1, to.0, to.1, AtFlags::empty()))
    }

    fn rename(&self, from: (&OwnedFd, &[u8]), to: (&OwnedFd, &[u8]), flags: u32) -> Result<(), Code> {
        if flags == 0 {
            return retried(|| rustix::fs::renameat(from.0, from.1, to.0, to.1));
        }
        let flags = RenameFlags::from_bits_retain(flags);
        retried(|| rustix::fs::renameat_with(from.0, from.1, to.0, to.1, flags))
    }

    fn unlink(&self, at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        retried(|| rustix::fs::unlinkat(at, name, AtFlags::empty()))
    }

    fn remove_directory(&self, at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        retried(|| rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR))
    }

    fn check_writable(&self, at: &OwnedFd) -> Result<(), Code> {
        if !takes_files(at) {
            return Err(Code::NotSupported);
        }
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        retried(|| rustix::fs::accessat(at, ".", access, AtFlags::EACCESS))
    }

    fn set_owner(&self, object: Object<'_, Self>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        match object {
            Object::File(file) => retried(|| rustix::fs::fchown(&file.0, uid, gid)),
            Object::Directory(fd) => retried(|| rustix::fs::fchown(fd, uid, gid)),
            Object::Entry(at, name) => {
                retried(|| rustix::fs::chownat(at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW))
            }
        }
    }

    fn set_mode(&self, object: Object<'_, Self>, mode: u32) -> Result<(), Code> {
        let mode = Mode::from_raw_mode(mode);
        match object {
            Object::File(file) => retried(|| rustix::fs::fchmod(&file.0, mode)),
            Object::Directory(fd) => retried(|| rustix::fs::fchmod(fd, mode)),
            // Only for nodes that this process has just created: kernels before 6.6 always follow links here.
            Object::Entry(at, name) => retried(|| rustix::fs::chmodat(at, name, mode, AtFlags::empty())),
        }
    }

    fn owner_and_mode(&self, object: Object<'_, Self>) -> Result<OwnerAndMode, Code> {
        let meta = match object {
            Object::File(file) => file.meta()?,
            Object::Directory(fd) => meta_of(&retried(|| rustix::fs::fstat(fd))?)?,
            Object::Entry(at, name) => self.stat(at, name, false)?,
        };
        Ok(meta.into())
    }

    fn set_times(&self, object: Object<'_, Self>, atime: Timestamp, mtime: Timestamp) -> Result<(), Code> {
        let times = timestamps(atime, mtime);
        match object {
            Object::File(file) => file.set_times(atime, mtime),
            Object::Directory(fd) => retried(|| rustix::fs::futimens(fd, &times)),
            Object::Entry(at, name) => {
                retried(|| rustix::fs::utimensat(at, name, &times, AtFlags::SYMLINK_NOFOLLOW))
            }
        }
    }

    fn list_xattrs(&self, object: Object<'_, Self>, names: &mut Vec<u8>) -> Result<(), Code> {
        match object {
            Object::File(file) => filled(names, XATTR_LIST_MAX, |b| rustix::fs::flistxattr(&file.0, b)),
            Object::Directory(fd) => filled(names, XATTR_LIST_MAX, |b| rustix::fs::flistxattr(fd, b)),
            Object::Entry(at, name) => {
                let path = path_of_entry(at, name);
                filled(names, XATTR_LIST_MAX, |b| rustix::fs::llistxattr(&path, b))
            }
        }
    }

    fn get_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &mut Vec<u8>) -> Result<(), Code> {
        match object {
            Object::File(file) => filled(value, XATTR_VALUE_MAX, |b| rustix::fs::fgetxattr(&file.0, name, b)),
            Object::Directory(fd) => filled(value, XATTR_VALUE_MAX, |b| rustix::fs::fgetxattr(fd, name, b)),
            Object::Entry(at, entry) => {
                let path = path_of_entry(at, entry);
                filled(value, XATTR_VALUE_MAX, |b| rustix::fs::lgetxattr(&path, name, b))
            }
        }
    }

    fn set_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &[u8]) -> Result<(), Code> {
        let flags = XattrFlags::empty();
        match object {
            Object::File(file) => retried(|| rustix::fs::fsetxattr(&file.0, name, value, flags)),
            Object::Directory(fd) => retried(|| rustix::fs::fsetxattr(fd, name, value, flags)),
            Object::Entry(at, entry) => {
                let path = path_of_entry(at, entry);
                retried(|| rustix::fs::lsetxattr(&path, name, value, flags))
            }
        }
    }

    fn space(&self, at: &OwnedFd) -> Result<Space, Code> {
        let s = retried(|| rustix::fs::fstatvfs(at))?;
        // File systems without a fixed number of inodes report 0 of 0.
        let free_inodes = if s.f_files == 0 { u64::MAX } else { s.f_favail };
        Ok(Space { free_bytes: s.f_bavail.saturating_mul(s.f_frsize), free_inodes })
    }

    fn sync_directory(&self, at: &OwnedFd) -> Result<(), Code> {
        match retried(|| rustix::fs::fsync(at)) {
            // Some network file systems do not support this, and need no sync.
            Err(Code::Invalid) => Ok(()),
            other => other,
        }
    }

    fn is_remote(&self, at: &OwnedFd) -> bool {
        FileSystem::of(at).is_ok_and(|kind| REMOTE.contains(&kind))
    }
}
