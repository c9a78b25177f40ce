//! Kinds of file systems: the magic numbers of statfs(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The kind of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileSystem(u32);

macro_rules! kinds {
    ($($constant:ident $name:literal $magic:expr,)*) => {
        impl FileSystem {
            $(
                #[doc = concat!("`", $name, "`.")]
                pub const $constant: FileSystem = FileSystem($magic as u32);
            )*
            const NAMES: &[(FileSystem, &'static str)] = &[$((FileSystem::$constant, $name),)*];
        }
    };
}

// Numbers that libc lacks are from the headers of the file systems.
kinds! {
    TMPFS "tmpfs" libc::TMPFS_MAGIC,
    RAMFS "ramfs" 0x8584_58f6u32,
    EXT4 "ext4" libc::EXT4_SUPER_MAGIC,
    XFS "xfs" libc::XFS_SUPER_MAGIC,
    BTRFS "btrfs" libc::BTRFS_SUPER_MAGIC,
    BCACHEFS "bcachefs" 0xca45_1a4eu32,
    ZFS "zfs" 0x2fc1_2fc1u32,
    F2FS "f2fs" libc::F2FS_SUPER_MAGIC,
    OCFS2 "ocfs2" libc::OCFS2_SUPER_MAGIC,
    OVERLAY "overlay" libc::OVERLAYFS_SUPER_MAGIC,
    NFS "nfs" libc::NFS_SUPER_MAGIC,
    LUSTRE "lustre" 0x0bd0_0bd0u32,
    GPFS "gpfs" 0x4750_4653u32,
    CEPH "ceph" 0x00c3_6400u32,
    BEEGFS "beegfs" 0x1983_0326u32,
    CIFS "cifs" 0xff53_4d42u32,
    SMB3 "smb3" 0xfe53_4d42u32,
    AFS "afs" libc::AFS_SUPER_MAGIC,
    NINE_P "9p" 0x0102_1997u32,
    VFAT "vfat" libc::MSDOS_SUPER_MAGIC,
    EXFAT "exfat" 0x2011_bab0u32,
    FUSE "fuse" libc::FUSE_SUPER_MAGIC,
    PROC "proc" libc::PROC_SUPER_MAGIC,
    SYSFS "sysfs" libc::SYSFS_MAGIC,
    CGROUP "cgroup" libc::CGROUP_SUPER_MAGIC,
    CGROUP2 "cgroup2" libc::CGROUP2_SUPER_MAGIC,
    DEBUGFS "debugfs" libc::DEBUGFS_MAGIC,
    TRACEFS "tracefs" libc::TRACEFS_MAGIC,
    SECURITYFS "securityfs" libc::SECURITYFS_MAGIC,
    DEVPTS "devpts" libc::DEVPTS_SUPER_MAGIC,
    BPF "bpf" libc::BPF_FS_MAGIC,
}

impl FileSystem {
    /// The kind of the file system that holds an open file.
    pub fn of(file: impl AsFd) -> io::Result<FileSystem> {
        // SAFETY: an all-zero statfs is valid, and writable for the call.
        unsafe {
            let mut found: libc::statfs = std::mem::zeroed();
            if libc::fstatfs(file.as_fd().as_raw_fd(), &mut found) < 0 {
                return Err(io::Error::last_os_error());
            }
            // The kernel's number has 32 bits, which some machines sign-extend.
            Ok(FileSystem(found.f_type as u32))
        }
    }

    /// True if a directory keeps its inode number over mounts and on all nodes, as far as the kind tells: these kinds
    /// make numbers up at each mount, or may.
    pub fn keeps_inode_numbers(self) -> bool {
        ![
            FileSystem::FUSE,
            FileSystem::OVERLAY,
            FileSystem::CIFS,
            FileSystem::SMB3,
            FileSystem::VFAT,
            FileSystem::EXFAT,
            FileSystem::NINE_P,
        ]
        .contains(&self)
    }

    /// The magic number.
    pub fn magic(self) -> u32 {
        self.0
    }

    /// The file system's name in the mount table, if this list has it.
    pub fn name(self) -> Option<&'static str> {
        FileSystem::NAMES.iter().find(|(kind, _)| *kind == self).map(|(_, name)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::fs::File;
    use std::os::fd::FromRawFd;

    #[test]
    fn of_knows_proc_and_memory() {
        assert_eq!(FileSystem::of(File::open("/proc").unwrap()).unwrap(), FileSystem::PROC);
        // SAFETY: the name is NUL-terminated; the descriptor is new and ours.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"file".as_ptr(), libc::MFD_CLOEXEC)) };
        assert_eq!(FileSystem::of(&file).unwrap(), FileSystem::TMPFS);
        assert_eq!(FileSystem::TMPFS.name(), Some("tmpfs"));
    }

    #[test]
    fn kinds_have_each_a_number_and_a_name_of_their_own() {
        let numbers: HashSet<u32> = FileSystem::NAMES.iter().map(|(kind, _)| kind.magic()).collect();
        let names: HashSet<&str> = FileSystem::NAMES.iter().map(|(_, name)| *name).collect();
        assert_eq!((numbers.len(), names.len()), (FileSystem::NAMES.len(), FileSystem::NAMES.len()));
        assert_eq!(FileSystem(1).name(), None);
        assert!(FileSystem::EXT4.keeps_inode_numbers() && !FileSystem::FUSE.keeps_inode_numbers());
        assert_eq!(FileSystem::BTRFS.magic(), 0x9123_683e);
    }
}
