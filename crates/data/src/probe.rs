//! The type and the abilities of the file system under a directory, and the costs of missing abilities.
//!
//! Abilities are tried on a file that is made in the directory and removed again, as an option that is set may not be
//! in effect. Those that cannot be tried are read from mountinfo. A mount in no namespace has no line there: its type
//! is then derived from its magic number, and `inode64` is unknown.

use std::os::fd::{AsFd, BorrowedFd};

use forebay_sys::file_system::FileSystem;
use forebay_sys::mounts::{self, Mount};
use forebay_types::{Error, Result};
use rustix::fs::{FallocateFlags, Mode, OFlags, StatVfsMountFlags, XattrFlags};
use rustix::io::Errno;

use crate::lease::lease_fault;
use crate::media::backing_stat;
use crate::probe_file::ProbeFile;

/// Larger than a huge page that backs files (2 MiB). On arm64 with pages of 64 KiB a huge page has 512 MiB, and the
/// probe reports none.
const HUGE_PROBE_BYTES: u64 = 4 << 20;
const BLOCK_BYTES: u64 = 64 << 10;

/// File systems that other nodes share, which are unsuitable for a target.
const REMOTE: &[&str] =
    &["nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "9p", "afs", "orangefs"];

/// The huge pages of a tmpfs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HugePages {
    /// Not a tmpfs.
    NotApplicable,
    /// None.
    Off,
    /// For files that fill them.
    On,
    /// For every file, however small (`huge=always`).
    Always,
}

/// The type and the abilities of the file system under a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// The type: `tmpfs`, `ext4`, `xfs`, `overlay`, `nfs4`, `lustre`, `fuse.sshfs` and so on.
    pub fs_type: String,
    /// Huge pages behind file data.
    pub huge_pages: HugePages,
    /// Inode numbers have 64 bits. None if unknown or not applicable.
    pub inode64: Option<bool>,
    /// O_TMPFILE works.
    pub o_tmpfile: bool,
    /// fallocate reserves space.
    pub fallocate: bool,
    /// Punching a hole frees space.
    pub punch_hole: bool,
    /// Extended attributes `user.*`.
    pub user_xattrs: bool,
    /// Programs can be run from it.
    pub exec: bool,
    /// The reason why leases are unusable ([`lease_fault`]). None if they work.
    pub lease_fault: Option<String>,
}

impl Capabilities {
    /// Tries the abilities of the file system of `directory`, which must be writable. Makes a file in it and removes
    /// it.
    pub fn of(directory: impl AsFd) -> Result<Capabilities> {
        let directory = directory.as_fd();
        probe(directory).map_err(|e| {
            Error::io("cannot try what the target's file system can do", &e.into())
                .cure("give a directory that you can write, with --path")
        })
    }

    /// True if leases show whether a file is in use.
    pub fn has_leases(&self) -> bool {
        self.lease_fault.is_none()
    }

    /// The costs of missing abilities, one line of text each, for `forebay status`.
    pub fn costs(&self) -> Vec<String> {
        let mut costs = Vec::new();
        let mut say = |applies: bool, text: &str| {
            if applies {
                costs.push(text.to_owned());
            }
        };
        say(
            REMOTE.contains(&self.fs_type.as_str()) || self.fs_type.starts_with("fuse"),
            "not a medium of this node: every access crosses the network or another program, so nothing is gained",
        );
        say(
            self.huge_pages == HugePages::Off,
            "not a tmpfs of its own: first writes run at about half speed because huge pages are off",
        );
        say(
            self.huge_pages == HugePages::Always,
            "mounted huge=always: every file takes at least 2 MiB, however small (huge=within_size does not)",
        );
        say(
            self.inode64 == Some(false),
            "inode numbers have 32 bits: after 4 billion files two may share one, which confuses tar and rsync",
        );
        say(
            !self.fallocate,
            "space cannot be reserved (no fallocate): when it is full, programs that map files get SIGBUS",
        );
        say(!self.punch_hole, "holes cannot be punched: space comes back only when a file is cut or removed");
        say(!self.o_tmpfile, "no unnamed files (O_TMPFILE)");
        say(!self.exec, "mounted noexec: programs kept in the pool cannot be run");
        if let Some(fault) = &self.lease_fault {
            costs.push(format!(
                "leases do not show whether a file is in use, which the conversion of striped files needs: {fault}"
            ));
        }
        costs
    }
}

/// True if the file system under `directory` keeps files in memory.
pub(crate) fn is_memory(directory: BorrowedFd<'_>) -> std::result::Result<bool, Errno> {
    Ok(matches!(kind(directory)?, FileSystem::TMPFS | FileSystem::RAMFS))
}

fn kind(directory: BorrowedFd<'_>) -> std::result::Result<FileSystem, Errno> {
    FileSystem::of(directory).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

fn probe(directory: BorrowedFd<'_>) -> std::result::Result<Capabilities, Errno> {
    let kind = kind(directory)?;
    let mount = mount_of(directory)?;
    let fs_type = match &mount {
        Some(mount) => mount.fs_type.clone(),
        None => match kind.name() {
            Some(name) => name.to_owned(),
            None => format!("unknown ({:#x})", kind.magic()),
        },
    };
    let (huge_pages, inode64) = match kind {
        FileSystem::TMPFS => {
            (huge_pages(directory, mount.as_ref())?, mount.map(|m| m.option("inode64").is_some()))
        }
        _ => (HugePages::NotApplicable, None),
    };
    let exec = !rustix::fs::fstatvfs(directory)?.f_flag.contains(StatVfsMountFlags::NOEXEC);
    let file = ProbeFile::new(directory, 0)?;
    let (fallocate, punch_hole) = space_calls(&file)?;
    let xattr = rustix::fs::fsetxattr(file.open(OFlags::RDWR)?, c"user.forebay", b"1", XattrFlags::empty());
    drop(file);
    let unnamed =
        rustix::fs::openat(directory, c".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RWXU);
    Ok(Capabilities {
        fs_type,
        huge_pages,
        inode64,
        o_tmpfile: unnamed.is_ok(),
        fallocate,
        punch_hole,
        user_xattrs: xattr.is_ok(),
        exec,
        lease_fault: lease_fault(directory),
    })
}

/// The mount with the file system of `directory`, if this process's namespace shows it.
fn mount_of(directory: BorrowedFd<'_>) -> std::result::Result<Option<Mount>, Errno> {
    let device = rustix::fs::fstat(directory)?.st_dev;
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    Ok(mounts::own().unwrap_or_default().into_iter().find(|mount| mount.device == device))
}

/// A tmpfs reports its huge page size as the preferred I/O size of a file that would get huge pages.
fn huge_pages(directory: BorrowedFd<'_>, mount: Option<&Mount>) -> std::result::Result<HugePages, Errno> {
    let file = ProbeFile::new(directory, HUGE_PROBE_BYTES)?;
    let preferred = rustix::fs::fstat(file.open(OFlags::RDONLY)?)?.st_blksize as u64;
    Ok(if preferred <= rustix::param::page_size() as u64 {
        HugePages::Off
    } else if mount.and_then(|m| m.option("huge")) == Some("always") {
        HugePages::Always
    } else {
        HugePages::On
    })
}

/// Whether fallocate reserves space, and whether punching a hole frees it.
fn space_calls(file: &ProbeFile<'_>) -> std::result::Result<(bool, bool), Errno> {
    let file = file.open(OFlags::RDWR)?;
    let allocated = || Ok::<u64, Errno>(backing_stat(&rustix::fs::fstat(&file)?).allocated_bytes);
    let fallocate = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BLOCK_BYTES).is_ok()
        && allocated()? >= BLOCK_BYTES;
    // The data are written and synced first, as some file systems allocate late and report late.
    let data = vec![1; BLOCK_BYTES as usize];
    rustix::io::pwrite(&file, &data, 0)?;
    rustix::fs::fdatasync(&file)?;
    let before = allocated()?;
    let punched = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punch_hole = rustix::fs::fallocate(&file, punched, 0, BLOCK_BYTES).is_ok() && allocated()? < before;
    Ok((fallocate, punch_hole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::fs::File;
    use std::path::Path;

    fn perfect() -> Capabilities {
        Capabilities {
            fs_type: "tmpfs".into(),
            huge_pages: HugePages::On,
            inode64: Some(true),
            o_tmpfile: true,
            fallocate: true,
            punch_hole: true,
            user_xattrs: true,
            exec: true,
            lease_fault: None,
        }
    }

    #[test]
    fn costs_of_a_tmpfs_of_our_own_are_none() {
        assert_eq!(perfect().costs(), Vec::<String>::new());
        assert!(perfect().has_leases());
    }

    #[test]
    fn costs_each_lack_has_one_line() {
        let lacks: [(Capabilities, &str); 10] = [
            (Capabilities { fs_type: "lustre".into(), ..perfect() }, "not a medium of this node"),
            (Capabilities { fs_type: "fuse.sshfs".into(), ..perfect() }, "not a medium of this node"),
            (Capabilities { huge_pages: HugePages::Off, ..perfect() }, "half speed"),
            (Capabilities { huge_pages: HugePages::Always, ..perfect() }, "2 MiB"),
            (Capabilities { inode64: Some(false), ..perfect() }, "32 bits"),
            (Capabilities { fallocate: false, ..perfect() }, "SIGBUS"),
            (Capabilities { punch_hole: false, ..perfect() }, "holes"),
            (Capabilities { o_tmpfile: false, ..perfect() }, "O_TMPFILE"),
            (Capabilities { exec: false, ..perfect() }, "noexec"),
            (Capabilities { lease_fault: Some("granted".into()), ..perfect() }, "in use"),
        ];
        for (capabilities, words) in lacks {
            let costs = capabilities.costs();
            assert!(costs.len() == 1 && costs[0].contains(words), "{words}: {costs:?}");
        }
    }

    #[test]
    fn capabilities_of_dev_shm_are_those_of_a_tmpfs_and_no_file_stays() {
        let scratch = Scratch::within(Path::new("/dev/shm"));
        let directory = File::open(scratch.path()).unwrap();
        if !is_memory(directory.as_fd()).unwrap() {
            println!("skipped: /dev/shm is not a tmpfs here");
            return;
        }
        let found = Capabilities::of(&directory).unwrap();
        assert_eq!(found.fs_type, "tmpfs");
        assert!(found.o_tmpfile && found.fallocate && found.punch_hole && found.has_leases(), "{found:?}");
        assert_ne!(found.huge_pages, HugePages::NotApplicable);
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn capabilities_of_a_directory_that_cannot_be_written_are_refused() {
        let e = Capabilities::of(File::open("/proc").unwrap()).unwrap_err();
        assert!(e.cure.contains("--path"), "{e}");
    }
}
