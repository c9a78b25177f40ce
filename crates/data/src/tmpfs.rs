//! The tmpfs of a target: its options, and the system calls that make it.
//!
//! `huge=within_size` gives huge pages to files that fill them and small pages to small files. `nr_inodes=0` and
//! `inode64` remove the limits of inodes and their numbers. A kernel may lack huge and inode64, which are then omitted.
//! It must know the others.
//!
//! [`Tmpfs::new`] does everything that allocates. The other functions may run in a child of a process with threads,
//! between fork and exit.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags};

/// The source of Forebay's mounts in mountinfo.
pub(crate) const SOURCE: &CStr = c"forebay";

/// The options of a tmpfs.
pub(crate) struct Tmpfs {
    size: CString,
    owner: Option<(CString, CString)>,
    /// All options for mount(2): with and without those that a kernel may lack, best first.
    data: [CString; 4],
}

impl Tmpfs {
    /// A tmpfs of `bytes` bytes. `owner` is the user and group of its root directory, or None for the caller's.
    pub(crate) fn new(bytes: u64, owner: Option<(u32, u32)>) -> Tmpfs {
        let string = |text: String| CString::new(text).unwrap_or_default();
        let ids = owner.map_or(String::new(), |(uid, gid)| format!(",uid={uid},gid={gid}"));
        let data = [",huge=within_size,inode64", ",huge=within_size", ",inode64", ""]
            .map(|extra| string(format!("size={bytes},nr_inodes=0,mode=0700{ids}{extra}")));
        let owner = owner.map(|(uid, gid)| (string(uid.to_string()), string(gid.to_string())));
        Tmpfs { size: string(bytes.to_string()), owner, data }
    }

    /// Makes a mount in no namespace. Returns an O_PATH descriptor of its root. [`Errno::NOSYS`] before Linux 5.2.
    pub(crate) fn mount(&self) -> Result<OwnedFd, Errno> {
        use rustix::mount::{fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen};
        let fs = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let fs = fs.as_fd();
        fsconfig_set_string(fs, c"source", SOURCE)?;
        fsconfig_set_string(fs, c"size", self.size.as_c_str())?;
        fsconfig_set_string(fs, c"nr_inodes", c"0")?;
        fsconfig_set_string(fs, c"mode", c"0700")?;
        if let Some((uid, gid)) = &self.owner {
            fsconfig_set_string(fs, c"uid", uid.as_c_str())?;
            fsconfig_set_string(fs, c"gid", gid.as_c_str())?;
        }
        if_known(fsconfig_set_string(fs, c"huge", c"within_size"))?;
        if_known(fsconfig_set_flag(fs, c"inode64"))?;
        fsconfig_create(fs)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
        fsmount(fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    }

    /// Mounts it at `at`, by mount(2).
    pub(crate) fn mount_at(&self, at: &CStr) -> Result<(), Errno> {
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        let mut outcome = Err(Errno::INVAL);
        for data in &self.data {
            outcome = rustix::mount::mount(SOURCE, at, c"tmpfs", flags, data.as_c_str());
            if outcome != Err(Errno::INVAL) {
                break;
            }
        }
        outcome
    }
}

/// A descriptor by which the tmpfs whose root is `directory` can be configured.
pub(crate) fn pick(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    use rustix::mount::FsPickFlags;
    let flags = FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC;
    rustix::mount::fspick(directory, c"", flags)
}

/// Gives the tmpfs of such a descriptor a size. Its contents and its other options stay.
pub(crate) fn resize(picked: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    rustix::mount::fsconfig_set_string(picked, c"size", bytes.to_string())?;
    rustix::mount::fsconfig_reconfigure(picked)
}

/// A descriptor of a mount's root directory that can be read and synced. The mount lives as long as a descriptor of it.
pub(crate) fn root_of(mount: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(mount, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Ignores that the kernel does not know an option.
fn if_known(outcome: Result<(), Errno>) -> Result<(), Errno> {
    match outcome {
        Err(Errno::INVAL) => Ok(()),
        other => other,
    }
}
