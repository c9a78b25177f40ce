//! Calls by name and inode rather than path, for tools that walk trees themselves.

use forebay_data::BackingName;
use forebay_types::{Code, Entry, Ino, PoolSpace, Reply, Request, FLAG_UNLISTED};

use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Pool};

/// How often a look-up starts again when the inode is replaced meanwhile.
const ATTEMPTS: u32 = 4096;

impl Pool {
    /// The root directory.
    pub fn root(&self) -> Result<Ino, Code> {
        Ok(self.attached()?.reply.root)
    }

    /// The entry `name` of `parent`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, Code> {
        for _ in 0..ATTEMPTS {
            let found = self.lookup_name(parent, name)?;
            match self.get_attr(found.ino) {
                // Replaced between the two steps: the name leads to another inode by now, or is gone.
                Err(Code::NotFound) => {}
                result => return result,
            }
        }
        Err(Code::NotFound)
    }

    /// Walks a path to an inode.
    pub fn resolve(&self, place: Place<'_>, follow: bool, escape: &mut PathBuffer) -> Door<Entry> {
        self.with_entry(place, follow, escape, |entry| Ok(*entry))
    }

    /// True if a target is a tmpfs, where stores through mappings do not change the times of files.
    pub fn is_in_memory(&self) -> bool {
        self.attached().is_ok_and(|a| a.reply.stable_inodes != 0)
    }

    /// True for a file that is small compared with the medium's free space, so that its space is not needed soon: at
    /// most 1 MiB while more than a sixteenth of the medium is free.
    pub fn is_soon_removed(&self, ino: Ino) -> bool {
        const BLOCKS_MAX: i64 = (1 << 20) / 512;
        const PART: u64 = 16;
        let Ok(attached) = self.attached() else { return false };
        let target = match attached.target_count() {
            1 => attached.target(),
            // Only the board is read: a request would cost more than this saves.
            _ => match self.on_board(|board| board.inode(ino)) {
                Ok(Some(entry)) => attached.target_of(&entry.layout, 0, 0),
                _ => return false,
            },
        };
        let name = BackingName::new(ino, 0, 0);
        // SAFETY: all-zero structures are valid, and writable for the calls; the name is NUL-terminated.
        unsafe {
            let (mut space, mut st): (libc::statfs, libc::stat) = std::mem::zeroed();
            libc::fstatfs(target, &mut space) == 0
                && space.f_bavail > space.f_blocks / PART
                && libc::fstatat(target, name.as_c_str().as_ptr(), &mut st, libc::AT_SYMLINK_NOFOLLOW) == 0
                && st.st_blocks <= BLOCKS_MAX
        }
    }

    /// Space and inodes of the pool.
    pub fn space(&self) -> Result<PoolSpace, Code> {
        self.ask_then(&Request::Space, |reply| match reply {
            Reply::Space(space) => Ok(space),
            _ => Err(Code::Malformed),
        })
    }

    /// The percentage to which this node's target with the most space is filled. From [`HIGH_WATER_PERCENT`] on, programs
    /// that are about to write to the tree of a backing store wait.
    ///
    /// [`HIGH_WATER_PERCENT`]: forebay_types::limits::HIGH_WATER_PERCENT
    pub fn used_percent(&self) -> Result<u64, Code> {
        Ok(self.attached()?.used_percent())
    }

    /// Announces that this process serves the pool's mount, and sends the mount's FUSE device. After the call returns,
    /// the daemon notifies the kernel of each change by another process before it acknowledges the change.
    ///
    /// The flag is true if no other process has files of the pool open. The socket carries a message when that changes
    /// ([`forebay_ring::KIND_MOUNT`]), and closes when the daemon's worker dies. The mount must be announced again
    /// after the worker died, and after this process attached anew, as it does after a call without a reply: compare
    /// [`Pool::session`].
    pub fn announce_mount(
        &self,
        device: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(std::os::fd::OwnedFd, bool), Code> {
        self.address().announce_mount(self.attached()?.reply.session, device)
    }

    /// inotify_add_watch(2) of a directory, with an inotify instance of this process. Returns the watch descriptor. The
    /// kernel delivers the events of a mirror of the directory, which the daemon keeps while any process has the
    /// instance open.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for a directory of another node and for a wide directory, [`Code::NoSpace`] beyond the
    /// limits of watched directories and names, and the errors of inotify_add_watch(2).
    pub fn watch_directory(
        &self,
        ino: Ino,
        inotify: std::os::fd::BorrowedFd<'_>,
        mask: u32,
    ) -> Result<i32, Code> {
        // The mirror begins with all names, and those that a listing brings later are no events.
        if self.get_attr(ino)?.attr.flags & FLAG_UNLISTED != 0 {
            self.read_directory(ino).next(self)?;
        }
        self.address().watch(ino, inotify, mask)
    }

    /// Sends an empty request, to check that the daemon answers.
    pub fn ping(&self) -> Result<(), Code> {
        self.ask_then(&Request::Ping, |_| Ok(()))
    }
}
