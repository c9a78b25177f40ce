//! Calls on names and inodes rather than paths: what tools use that walk by themselves.

use forebay_data::BackingName;
use forebay_types::{Code, Entry, Ino, PoolSpace, Reply, Request};

use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Pool};

/// How often a look-up starts again when the inode is replaced under it.
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
                // Replaced between the two: the name is another inode's by now, or nobody's.
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

    /// True when a target is a tmpfs, whose files' times do not move with stores through mappings.
    pub fn is_in_memory(&self) -> bool {
        self.attached().is_ok_and(|a| a.reply.stable_inodes != 0)
    }

    /// True for a file that is small beside what is free on the medium, so that nobody waits for its space: at most
    /// 1 MiB while more than a sixteenth of the medium is free.
    pub fn is_soon_removed(&self, ino: Ino) -> bool {
        const BLOCKS_MAX: i64 = (1 << 20) / 512;
        const PART: u64 = 16;
        let Ok(attached) = self.attached() else { return false };
        let target = match attached.target_count() {
            1 => attached.target(),
            // Nobody is asked for what is only to save time.
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

    /// Says that this process serves the pool's mount, whose FUSE device this is. When it returns, the kernel is told
    /// of every change that another process makes before that is acknowledged to it. True when nobody else has files of
    /// the pool open; the socket tells when that changes ([`forebay_ring::KIND_MOUNT`]), and closes when the daemon's
    /// worker dies, who has to be told again then. So it has when this process has attached anew, as it does after a
    /// call that had no answer: compare [`Pool::session`].
    pub fn announce_mount(
        &self,
        device: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(std::os::fd::OwnedFd, bool), Code> {
        self.address().announce_mount(self.attached()?.reply.session, device)
    }

    /// inotify_add_watch(2) of a directory, with an inotify instance of this process; the watch's descriptor. The
    /// kernel delivers the events of a mirror of the directory, which the daemon keeps for as long as the instance is
    /// open in any process.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for a directory of another node and a wide one, [`Code::NoSpace`] beyond the limits of watched directories and
    /// names, and what inotify_add_watch(2) gives.
    pub fn watch_directory(
        &self,
        ino: Ino,
        inotify: std::os::fd::BorrowedFd<'_>,
        mask: u32,
    ) -> Result<i32, Code> {
        self.address().watch(ino, inotify, mask)
    }

    /// Asks the daemon for nothing: tells that it answers.
    pub fn ping(&self) -> Result<(), Code> {
        self.ask_then(&Request::Ping, |_| Ok(()))
    }
}
