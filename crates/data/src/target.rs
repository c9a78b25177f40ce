//! A target: one directory on one medium that holds backing files, anchors and, on a node's first target, the shard.
//!
//! All paths are relative to the directory's descriptor. So a target works the same in a mounted tmpfs, a plain
//! directory and a mount in no namespace, and it keeps working if the directory is renamed. Everything in it has mode
//! 0700, as a target serves one user.
//!
//! The last part of a path is never followed if it is a symbolic link. Only Forebay creates the directories above it.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_sys::opening;
use forebay_types::{Code, Error, Ino, TimeSet};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::capacity::Medium;
use crate::code_of;
use crate::media::{backing_stat, timestamps, Access, BackingStat, Media, Space};
use crate::mount::resize_tmpfs;
use crate::name::{AnchorName, BackingName, ANCHORS_DIRECTORY, DATA_DIRECTORY, SHARD_DIRECTORY};

/// Mode of every file and directory of a target.
const MODE: Mode = Mode::RWXU;

/// A directory on a medium with this node's backing files.
#[derive(Debug)]
pub struct Target {
    directory: OwnedFd,
    number: u32,
    medium: Medium,
    /// Bytes of the medium that volumes have, beside the file system ([`Target::set_volume_bytes`]).
    volume_bytes: AtomicU64,
}

impl Target {
    /// Makes the directories of a target: `data/00` to `data/ff`, `anchors` and `shard`. Sets their mode and that of
    /// `directory` to 0700. Existing ones keep their contents.
    pub fn format(directory: impl AsFd) -> forebay_types::Result<()> {
        let directory = reopen(directory.as_fd()).map_err(|e| {
            Error::io("cannot open the target's directory", &e.into())
                .cure("give a directory that you own, with --path")
        })?;
        let make = |path: &[u8]| -> Result<(), Errno> {
            match rustix::fs::mkdirat(&directory, path, MODE) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
            let made = rustix::fs::openat(&directory, path, DIRECTORY, Mode::empty())?;
            rustix::fs::fchmod(made, MODE)
        };
        let make_all = || {
            rustix::fs::fchmod(&directory, MODE)?;
            for fixed in [DATA_DIRECTORY, ANCHORS_DIRECTORY, SHARD_DIRECTORY] {
                make(fixed.to_bytes())?;
            }
            (0..256).try_for_each(|low| make(format!("data/{low:02x}").as_bytes()))
        };
        make_all().map_err(|e| {
            Error::io("cannot make the directories of a target", &e.into())
                .cure("give an empty directory that you own, on a medium that is writable and not full")
        })
    }

    /// Opens the target in `directory`, which [`Target::format`] made. `number` is its number in layouts.
    pub fn open(directory: impl AsFd, number: u32) -> forebay_types::Result<Target> {
        let failed = |e: Errno| {
            Error::io("cannot open the target", &e.into())
                .cure("it holds no pool, or one that was made by another user: check --pool")
        };
        let directory = reopen(directory.as_fd()).map_err(failed)?;
        for needed in [c"data/00", c"data/ff", ANCHORS_DIRECTORY, SHARD_DIRECTORY] {
            rustix::fs::openat(&directory, needed, DIRECTORY, Mode::empty()).map_err(failed)?;
        }
        Ok(Target { directory, number, medium: Medium::Dram, volume_bytes: AtomicU64::new(0) })
    }

    /// Removes anchors of clients that were killed between making and removing one. Call it only while there are no
    /// clients, as a live client may be about to open its anchor. Returns the number removed.
    pub fn remove_anchors(&self) -> Result<u64, Code> {
        let anchors = rustix::fs::openat(&self.directory, ANCHORS_DIRECTORY, DIRECTORY, Mode::empty());
        let anchors = anchors.map_err(code_of)?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&anchors).map_err(code_of)? {
            let entry = entry.map_err(code_of)?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        let is_link = |name: &CStr| {
            AnchorName::parse(name.to_bytes()).is_some()
                && rustix::fs::readlinkat(&anchors, name, Vec::new()).is_ok()
        };
        let remove =
            |name: &&CString| match rustix::fs::unlinkat(&anchors, name.as_c_str(), AtFlags::REMOVEDIR) {
                Err(Errno::NOTDIR) if is_link(name) => {
                    rustix::fs::unlinkat(&anchors, name.as_c_str(), AtFlags::empty()).is_ok()
                }
                done => done.is_ok(),
            };
        Ok(names.iter().filter(remove).count() as u64)
    }

    /// The same target with this medium. The default is memory.
    pub fn on(self, medium: Medium) -> Target {
        Target { medium, ..self }
    }

    /// Gives this tmpfs a size, and notes how many bytes of its capacity volumes have instead: [`Media::space`] counts
    /// them as used. The two together never exceed the capacity if the caller shrinks first and reserves afterwards.
    ///
    /// # Errors
    /// [`Code::NoSpace`] if files have more than `bytes`; [`Code::NotSupported`] if this process may not change the
    /// mount.
    pub fn set_volume_bytes(&self, bytes: u64, volume_bytes: u64) -> Result<(), Code> {
        resize_tmpfs(self.directory.as_fd(), bytes).map_err(|e| match e {
            Errno::INVAL => Code::NoSpace,
            Errno::PERM | Errno::ACCESS | Errno::NOSYS | Errno::OPNOTSUPP => Code::NotSupported,
            e => code_of(e),
        })?;
        self.volume_bytes.store(volume_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The space that files share: [`Media::space`] without volumes.
    pub fn space_for_files(&self) -> Result<Space, Code> {
        let s = rustix::fs::fstatvfs(&self.directory).map_err(code_of)?;
        let bytes = |blocks: u64| blocks.saturating_mul(s.f_frsize);
        Ok(Space { total_bytes: bytes(s.f_blocks), free_bytes: bytes(s.f_bavail) })
    }

    /// The target's medium.
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// The directory that [`BackingName`] and [`crate::AnchorName`] are relative to. Clients may receive the
    /// descriptor.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A descriptor of the same directory that can be read and synced, even if `directory` was opened with O_PATH.
fn reopen(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(directory, c".", DIRECTORY, Mode::empty())
}

/// Opens a backing file. This waits while a mover has a lease on it.
fn open_waiting(directory: BorrowedFd<'_>, name: &BackingName, access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = opening::open_existing(directory.as_raw_fd(), name.as_c_str(), flags.bits() as i32);
    opened.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

impl Media for Target {
    fn target(&self) -> u32 {
        self.number
    }

    fn create(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        let name = BackingName::new(ino, component, stripe);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.directory, name.as_c_str(), flags, MODE) {
            // The umask may have removed bits.
            Ok(made) => rustix::fs::fchmod(made, MODE).map_err(code_of),
            Err(Errno::EXIST) => Ok(()),
            Err(e) => Err(code_of(e)),
        }
    }

    fn open(&self, ino: Ino, component: usize, stripe: u16, access: Access) -> Result<OwnedFd, Code> {
        let name = BackingName::new(ino, component, stripe);
        let access = match access {
            Access::Read => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        open_waiting(self.directory.as_fd(), &name, access).map_err(code_of)
    }

    fn remove(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        let name = BackingName::new(ino, component, stripe);
        match rustix::fs::unlinkat(&self.directory, name.as_c_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(code_of(e)),
        }
    }

    fn stat(&self, ino: Ino, component: usize, stripe: u16) -> Result<BackingStat, Code> {
        let name = BackingName::new(ino, component, stripe);
        let stat = rustix::fs::statat(&self.directory, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW);
        Ok(backing_stat(&stat.map_err(code_of)?))
    }

    fn truncate(&self, ino: Ino, component: usize, stripe: u16, bytes: u64) -> Result<(), Code> {
        let name = BackingName::new(ino, component, stripe);
        let file = open_waiting(self.directory.as_fd(), &name, OFlags::WRONLY);
        rustix::fs::ftruncate(file.map_err(code_of)?, bytes).map_err(code_of)
    }

    fn set_times(
        &self,
        ino: Ino,
        component: usize,
        stripe: u16,
        atime: TimeSet,
        mtime: TimeSet,
    ) -> Result<(), Code> {
        let name = BackingName::new(ino, component, stripe);
        let (times, flags) = (timestamps(atime, mtime), AtFlags::SYMLINK_NOFOLLOW);
        rustix::fs::utimensat(&self.directory, name.as_c_str(), &times, flags).map_err(code_of)
    }

    fn space(&self) -> Result<Space, Code> {
        let Space { total_bytes, free_bytes } = self.space_for_files()?;
        let volume_bytes = self.volume_bytes.load(Ordering::Relaxed);
        Ok(Space { total_bytes: total_bytes.saturating_add(volume_bytes), free_bytes })
    }

    fn sync(&self) -> Result<(), Code> {
        rustix::fs::syncfs(&self.directory).map_err(code_of)
    }

    fn for_each(&self, visit: &mut dyn FnMut(Ino, usize, u16) -> Result<(), Code>) -> Result<(), Code> {
        for low in 0..=255u8 {
            let path = format!("data/{low:02x}");
            let directory = rustix::fs::openat(&self.directory, path.as_bytes(), DIRECTORY, Mode::empty());
            // Reads all names before visiting, as some file systems list a directory wrongly while entries are removed.
            let mut found = Vec::new();
            for entry in Dir::new(directory.map_err(code_of)?).map_err(code_of)? {
                let entry = entry.map_err(code_of)?;
                if matches!(entry.file_type(), FileType::Directory) {
                    continue;
                }
                match BackingName::parse(entry.file_name().to_bytes()) {
                    Some(file) if file.0 .0 as u8 == low => found.push(file),
                    _ => {}
                }
            }
            for (ino, component, stripe) in found {
                visit(ino, component, stripe)?;
            }
        }
        Ok(())
    }
}
