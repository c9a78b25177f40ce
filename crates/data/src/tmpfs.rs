//! The tmpfs that a target lives in: its options, and how the kernel is asked for it.
//!
//! `huge=within_size` gives huge pages to files that fill them and small pages to small files; `nr_inodes=0` and
//! `inode64` take the limits off inodes and their numbers. The two that a kernel may lack, huge and inode64, are left
//! out where it does; the rest it must know.
//!
//! Everything that allocates is done by [`Tmpfs::new`]: the rest may run in a child of a process with threads, between
//! fork and exit.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags};

/// The source under which our mounts appear in mountinfo.
pub(crate) const SOURCE: &CStr = c"forebay";

/// What a tmpfs is to be.
pub(crate) struct Tmpfs {
    size: CString,
    owner: Option<(CString, CString)>,
    /// The same for mount(2): with and without what a kernel may lack, best first.
    data: [CString; 4],
}

impl Tmpfs {
    /// A tmpfs of `bytes` bytes whose root directory has this user and group, or the caller's.
    pub(crate) fn new(bytes: u64, owner: Option<(u32, u32)>) -> Tmpfs {
        let string = |text: String| CString::new(text).unwrap_or_default();
        let ids = owner.map_or(String::new(), |(uid, gid)| format!(",uid={uid},gid={gid}"));
        let data = [",huge=within_size,inode64", ",huge=within_size", ",inode64", ""]
            .map(|extra| string(format!("size={bytes},nr_inodes=0,mode=0700{ids}{extra}")));
        let owner = owner.map(|(uid, gid)| (string(uid.to_string()), string(gid.to_string())));
        Tmpfs { size: string(bytes.to_string()), owner, data }
    }

    /// A mount that is in no namespace, as an O_PATH descriptor of its root. [`Errno::NOSYS`] before Linux 5.2.
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

    /// Mounts it at `at`, the old way.
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

/// The root directory of a mount, so that it can be read and synced; the mount lives as long as a descriptor does.
pub(crate) fn root_of(mount: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(mount, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// An option that this kernel does not know is left out.
fn if_known(outcome: Result<(), Errno>) -> Result<(), Errno> {
    match outcome {
        Err(Errno::INVAL) => Ok(()),
        other => other,
    }
}
