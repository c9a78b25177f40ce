//! Mounts of a tmpfs for a target: at a directory, or in no namespace at all.
//!
//! `forebay up` makes an attached mount where it may. The mount outlives every process, and `forebay down` unmounts it.
//! A detached mount exists only through its descriptors. It vanishes when the last of them is closed, however their
//! holders end, so embedded pools use it. Where mounting is not allowed, a child makes the detached mount in a user
//! namespace: see `namespace.rs`.
//!
//! Tests: `tests/mounts.rs`.

use std::fmt::Display;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_sys::mounts;
use forebay_types::{Code, Error, Result};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags};

use crate::namespace::{mount_in_child, pick_in_child, Step, Way};
use crate::size::format_size;
use crate::tmpfs::{self, root_of, Tmpfs, SOURCE};

/// How to unmount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmount {
    /// At once, or fail if the mount is in use.
    Now,
    /// Detaches the mount from its directory at once. The kernel frees it when it is no longer used.
    WhenUnused,
}

/// Mounts a tmpfs of `bytes` bytes on the empty directory `at`. `owner` is the user and group of its root, or None for
/// the caller's. Returns a descriptor of its root. [`Code::NotPermitted`] if the caller may not mount.
pub fn attached_tmpfs(at: &Path, bytes: u64, owner: Option<(u32, u32)>) -> Result<OwnedFd> {
    let what = || format!("cannot mount a tmpfs of {} on {}", format_size(bytes), at.display());
    let mut entries =
        std::fs::read_dir(at).map_err(|e| Error::io(what(), &e).cure("make the directory first"))?;
    if entries.next().is_some() {
        return Err(Error::new(Code::NotEmpty, what())
            .why("the directory is not empty, and the mount would hide what is in it")
            .cure("give an empty directory"));
    }
    let directory = File::open(at).map_err(|e| Error::io(what(), &e))?;
    attach(&Tmpfs::new(bytes, owner), &directory).map_err(|e| {
        Error::io(what(), &e.into()).cure(match e {
            Errno::PERM | Errno::ACCESS => {
                "only a user with CAP_SYS_ADMIN may mount: use the directory as it is"
            }
            _ => "use the directory as it is, or one on another file system",
        })
    })
}

fn attach(tmpfs: &Tmpfs, directory: &File) -> std::result::Result<OwnedFd, Errno> {
    match tmpfs.mount() {
        Ok(mount) => {
            let by_descriptors =
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            rustix::mount::move_mount(mount.as_fd(), c"", directory.as_fd(), c"", by_descriptors)?;
            root_of(mount.as_fd())
        }
        // The seccomp filter of a container may refuse only fsopen.
        Err(Errno::NOSYS | Errno::PERM) => attach_old(tmpfs, directory),
        Err(e) => Err(e),
    }
}

/// The same by mount(2), for Linux before 5.2.
fn attach_old(tmpfs: &Tmpfs, directory: &File) -> std::result::Result<OwnedFd, Errno> {
    let path = std::fs::read_link(forebay_sys::descriptor::path(directory))
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let path =
        std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).map_err(|_| Errno::INVAL)?;
    tmpfs.mount_at(&path)?;
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path.as_c_str(), flags, rustix::fs::Mode::empty())
}

/// Makes a tmpfs of `bytes` bytes in no namespace. Returns a descriptor of its root. The tmpfs vanishes with its
/// contents when the last descriptor of it or of a file in it is closed and the last mapping is gone. Where user
/// namespaces are allowed this needs no privilege. Any process that receives the descriptor can use it.
///
/// If it was made without privilege, only processes of the caller's user and group can create files in it: others get
/// EOVERFLOW.
pub fn detached_tmpfs(bytes: u64) -> Result<OwnedFd> {
    let tmpfs = Tmpfs::new(bytes, None);
    let direct = match tmpfs.mount().and_then(|mount| root_of(mount.as_fd())) {
        Ok(root) => return Ok(root),
        Err(e) => e,
    };
    let mut failure = (Step::Start, direct);
    for way in ways(direct) {
        match mount_in_child(&tmpfs, way) {
            Ok(root) => return Ok(root),
            Err(e) => failure = e,
        }
    }
    Err(no_detached(bytes, direct, failure.0, failure.1))
}

/// The ways to try after fsmount by this process failed with `direct`. A container's seccomp filter may refuse fsmount
/// and allow mount(2).
fn ways(direct: Errno) -> [Way; 2] {
    match direct {
        Errno::NOSYS => [Way::MountOld, Way::UserOld],
        _ => [Way::UserNew, Way::UserOld],
    }
}

/// Sets the size of the tmpfs whose root is `directory`, as a user who may mount, or who made it in a user namespace. Its
/// contents and its other options stay.
///
/// # Errors
/// [`Errno::INVAL`] if more is in use, [`Errno::PERM`] for other users, [`Errno::OPNOTSUPP`] where no mount begins.
pub(crate) fn resize_tmpfs(directory: BorrowedFd<'_>, bytes: u64) -> std::result::Result<(), Errno> {
    let picked = match tmpfs::pick(directory) {
        Err(Errno::PERM) => pick_in_child(directory).map_err(|(_, e)| e)?,
        // It is not the root of a mount.
        Err(Errno::INVAL) => return Err(Errno::OPNOTSUPP),
        picked => picked?,
    };
    tmpfs::resize(picked.as_fd(), bytes)
}

fn no_detached(bytes: u64, direct: Errno, step: Step, e: Errno) -> Error {
    let reason: &dyn Display = match (step, e) {
        (Step::Enter, Errno::NOSPC | Errno::USERS) => {
            &"their number is limited (sysctl user.max_user_namespaces)"
        }
        (Step::Mount, Errno::PERM | Errno::ACCESS) => {
            &"the namespace gives no right to mount (sysctl kernel.apparmor_restrict_unprivileged_userns)"
        }
        _ => &e,
    };
    Error::new(
        Code::from_errno(e.raw_os_error()),
        format!("cannot make a private tmpfs of {}", format_size(bytes)),
    )
    .why(format!("mounting: {direct}; without privilege, {}: {reason}", step.name()))
    .cure("allow user namespaces, run it as root, or give a directory in memory: --path /dev/shm/NAME")
}

/// True if the root of a tmpfs that Forebay mounted is visible at `path`.
pub fn is_mounted_here(path: &Path) -> Result<bool> {
    Ok(find(path)?.is_some())
}

/// The canonical form of `path` if Forebay's tmpfs is mounted there.
fn find(path: &Path) -> Result<Option<PathBuf>> {
    let failed =
        |e: &std::io::Error| Error::io(format!("cannot see what is mounted at {}", path.display()), e);
    let missing = |e: &std::io::Error| {
        matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
    };
    let canonical = match path.canonicalize() {
        Ok(canonical) => canonical,
        Err(e) if missing(&e) => return Ok(None),
        Err(e) => return Err(failed(&e)),
    };
    let device = canonical.metadata().map_err(|e| failed(&e))?.dev();
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    // The mounts of this thread's namespace, as mount namespaces are per thread. If several mounts are stacked at one
    // point, only the top one has this device number.
    let ours = mounts::own().map_err(|e| failed(&e))?.into_iter().any(|mount| {
        mount.point == canonical
            && mount.device == device
            && mount.fs_type == "tmpfs"
            && mount.source.as_bytes() == SOURCE.to_bytes()
            && mount.root == Path::new("/")
    });
    Ok(ours.then_some(canonical))
}

/// True if the kernel's mount table has a mount of this source and type at this full path. The file system itself is
/// not accessed, as it may be dead.
pub fn is_in_table(point: &Path, fs_type: &str, source: &Path) -> bool {
    let source = source.to_string_lossy();
    mounts::own()
        .unwrap_or_default()
        .iter()
        .any(|m| m.point == point && m.fs_type == fs_type && m.source == source)
}

/// Unmounts the tmpfs at `path`. [`Code::Invalid`] if Forebay did not mount it, [`Code::Busy`] if it is in use and
/// `when` is [`Unmount::Now`].
pub fn unmount(path: &Path, when: Unmount) -> Result<()> {
    let what = || format!("cannot unmount {}", path.display());
    let Some(canonical) = find(path)? else {
        return Err(Error::new(Code::Invalid, what()).why("no tmpfs of Forebay's is mounted there"));
    };
    let flags = match when {
        Unmount::Now => UnmountFlags::NOFOLLOW,
        Unmount::WhenUnused => UnmountFlags::NOFOLLOW | UnmountFlags::DETACH,
    };
    rustix::mount::unmount(&canonical, flags).map_err(|e| {
        Error::io(what(), &e.into()).cure(match e {
            Errno::BUSY => "end the programs that have files open or work in it (fuser -m names them)",
            Errno::PERM => "only a user with CAP_SYS_ADMIN may unmount",
            _ => "",
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn find_ordinary_and_missing_directories_are_not_ours() {
        let scratch = Scratch::new();
        for path in [scratch.path(), Path::new("/"), Path::new("/proc"), &scratch.path().join("none")] {
            assert!(!is_mounted_here(path).unwrap(), "{}", path.display());
            let e = unmount(path, Unmount::Now).unwrap_err();
            assert_eq!(e.code, Code::Invalid, "{e}");
        }
    }

    #[test]
    fn attached_tmpfs_over_files_is_refused() {
        let scratch = Scratch::with(&[("precious", "text")]);
        let e = attached_tmpfs(scratch.path(), 1 << 20, None).unwrap_err();
        assert_eq!(e.code, Code::NotEmpty, "{e}");
    }

    #[test]
    fn no_detached_says_why_both_ways_failed_and_what_to_do() {
        let e = no_detached(1 << 30, Errno::PERM, Step::Enter, Errno::NOSPC);
        let text = e.to_string();
        assert!(
            text.contains("1 GiB") && text.contains("max_user_namespaces") && text.contains("--path"),
            "{e}"
        );
    }

    #[test]
    fn attach_old_mounts_the_same_file_system() {
        crate::testing::in_mount_namespace(|| {
            let scratch = Scratch::new();
            let directory = File::open(scratch.path()).unwrap();
            let root = attach_old(&Tmpfs::new(1 << 20, Some((1000, 1000))), &directory).unwrap();
            assert!(is_mounted_here(scratch.path()).unwrap());
            let stat = rustix::fs::fstat(&root).unwrap();
            assert_eq!((stat.st_uid, stat.st_mode & 0o7777), (1000, 0o700));
            drop(root);
            crate::testing::when_free(|| {
                unmount(scratch.path(), Unmount::Now).map_err(|e| e.code == Code::Busy)
            });
        });
    }

    #[test]
    fn mount_in_child_every_way_gives_a_tmpfs_that_works() {
        for way in [Way::UserNew, Way::UserOld, Way::MountOld] {
            match mount_in_child(&Tmpfs::new(4 << 20, None), way) {
                Ok(root) => {
                    let target = root.as_fd();
                    crate::Target::format(target).unwrap();
                    let space = rustix::fs::fstatvfs(target).unwrap();
                    assert_eq!(space.f_blocks * space.f_frsize, 4 << 20, "{way:?}");
                }
                Err((step, e)) => println!("skipped {way:?}: {}: {e}", step.name()),
            }
        }
    }
}
