//! Opening a directory as a store: checks, and what its file system can do.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use forebay_sys::file_system::FileSystem;
use forebay_types::Code;
use rustix::fs::{Mode, OFlags, XattrFlags, CWD};
use rustix::io::Errno;

use super::apply::Lost;
use super::copy::Copying;
use super::directory::StoreDirectory;
use super::durable::Durability;
use super::names::{unlink, NameCalls};
use super::resolve::{At, Root};
use super::sources::Sources;
use super::PosixStore;
use crate::store::error::{StoreError, StoreResult};
use crate::store::source::retried;
use crate::store::temporary::{MoverId, Temporaries};
use crate::store::StorePath;

/// The type of the pool's own mounts in the mount table.
const POOL_MOUNT_TYPE: &str = "fuse.forebay";

/// What a store may use of its file system; tests leave calls out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PosixOptions {
    /// RENAME_EXCHANGE, if the file system has it.
    pub exchange: bool,
    /// RENAME_NOREPLACE, if the file system has it.
    pub no_replace: bool,
    /// Hard links, if the file system has them.
    pub hard_links: bool,
    /// openat2, if the kernel has it.
    pub openat2: bool,
    /// Calls for names count as slow, however soon they end.
    pub slow_names: bool,
    /// The directory that is meant: another one is refused, and nothing is written there.
    pub directory: StoreDirectory,
}

impl Default for PosixOptions {
    fn default() -> PosixOptions {
        PosixOptions {
            exchange: true,
            no_replace: true,
            hard_links: true,
            openat2: true,
            slow_names: false,
            directory: StoreDirectory::default(),
        }
    }
}

impl PosixStore {
    /// Opens an existing directory. Errors: [`Code::NotFound`], [`Code::NotDirectory`], [`Code::Invalid`] for a directory
    /// in the mount of a pool, and [`Code::Io`] for another one than is meant.
    pub fn open(path: &Path, options: PosixOptions, mover: MoverId) -> StoreResult<PosixStore> {
        let title = path.to_string_lossy().into_owned();
        let what = format!("cannot open the store {title}");
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        refuse_pool_mount(&what, |mounts| {
            // By its path, before the mount is touched: a mover that waits for its own pool hangs.
            mounts
                .iter()
                .filter(|mount| path.starts_with(&mount.point))
                .max_by_key(|mount| mount.point.as_os_str().len())
        })?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = retried(|| rustix::fs::openat(CWD, &path, flags, Mode::empty()));
        let fd = opened.map_err(|e| {
            let failure = StoreError::system(&what, e);
            match e {
                Errno::NOENT => failure.cure("create the directory, or mount its file system"),
                Errno::NOTDIR => failure.cure("name a directory"),
                _ => failure,
            }
        })?;
        let stat = retried(|| rustix::fs::fstat(&fd)).map_err(|e| StoreError::system(&what, e))?;
        let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        refuse_pool_mount(&what, |mounts| mounts.iter().find(|mount| mount.device == device))?;
        let kind = FileSystem::of(&fd)
            .map_err(|e| StoreError::system(&what, Errno::from_io_error(&e).unwrap_or(Errno::IO)))?;
        let found = StoreDirectory { number: Some(stat.st_ino), file_system: Some(kind.magic()) };
        if !options.directory.may_be(found) {
            return Err(StoreError::lasting(Code::Io, what)
                .why("the directory there is not the one that was attached: is its file system mounted?")
                .cure(
                    "mount it, or put the directory back; if it was made anew, such as from a backup: \
                     `forebay attach --replaced` and the other options as before, or `forebay recover --replaced`",
                ));
        }
        let durability = Durability::of(fd.as_fd());
        let mut store = PosixStore {
            title,
            path,
            root: Root::new(fd, !options.openat2),
            device: stat.st_dev,
            directory: StoreDirectory { number: kind.keeps_inode_numbers().then_some(stat.st_ino), ..found },
            names: NameCalls {
                count_as_slow: options.slow_names,
                ..NameCalls::new(options.exchange, options.no_replace, options.hard_links)
            },
            temporaries: Temporaries::new(mover),
            lost: Lost::default(),
            is_root: rustix::process::geteuid().is_root(),
            keeps_xattrs: true,
            durability,
            links_across: OnceLock::new(),
            copying: Copying::default(),
            sources: Sources::default(),
        };
        store.probe();
        Ok(store)
    }

    /// Tries the calls that not all file systems have on two files. In a directory that this process may not write they
    /// count as there.
    fn probe(&mut self) {
        let (first, second) = (self.temporaries.next_name(), self.temporaries.next_name());
        let Ok(root) = self.root.directory(&StorePath::root()) else { return };
        let (first, second) =
            (At { directory: root.as_fd(), name: &first }, At { directory: root.as_fd(), name: &second });
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = |at: At<'_>| {
            retried(|| rustix::fs::openat(at.directory, at.name, flags, Mode::RUSR | Mode::WUSR))
        };
        let Ok(file) = create(first) else { return };
        self.keeps_xattrs = keeps_xattrs(&file);
        // Each call clears its flag by itself. The second file's absence or presence is what each needs.
        if self.names.link(first, second).is_err() {
            self.names.links.store(false, std::sync::atomic::Ordering::Relaxed);
        }
        let _ = unlink(second);
        let _ = self.names.put_new(first, second, false);
        if create(first).is_ok() {
            let _ = self.names.exchange(first, 0, second, &Default::default());
        }
        let _ = unlink(first);
        let _ = unlink(second);
    }
}

/// False if the file system has no extended attributes for users.
fn keeps_xattrs(file: &OwnedFd) -> bool {
    let set = rustix::fs::fsetxattr(file, c"user.forebay.probe", b"1", XattrFlags::empty());
    !matches!(set, Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

type Mounts = [forebay_sys::mounts::Mount];

fn refuse_pool_mount(
    what: &str,
    mount_of: impl Fn(&Mounts) -> Option<&forebay_sys::mounts::Mount>,
) -> StoreResult<()> {
    // Without a mount table nothing can be found out, and nothing is refused.
    let mounts = forebay_sys::mounts::own().unwrap_or_default();
    match mount_of(&mounts) {
        Some(mount) if mount.fs_type == POOL_MOUNT_TYPE => Err(StoreError::lasting(Code::Invalid, what)
            .why(format!("it lies in the mount of a pool, {}", mount.point.display()))
            .cure("name a directory of slow storage, outside every pool")),
        _ => Ok(()),
    }
}
