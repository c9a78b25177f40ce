//! Permission checks for the caller of a request, against the current attributes.
//!
//! The kernel checks permissions too (`default_permissions`). Before it checks permission bits, it refreshes
//! invalidated attributes. But for operations that only the owner may do (chmod, chown, setting times, removing from a
//! sticky directory, linking) it compares with the owner that it has in memory. If another interface has changed the
//! owner, that value stays old until the kernel sends a GETATTR. So these checks are repeated here, and their result
//! is final.
//!
//! Root passes all of the checks, and the owner nearly all; for both the checks cost nothing. For other callers,
//! groups and capabilities are read from `/proc`, because a request does not contain them. A capability in a user
//! namespace counts only for inodes whose owner and group are mapped there, as in the kernel.

use forebay_types::{Attr, Code};

use crate::errno::Errno;
use forebay_fuse::protocol::Request;

pub(crate) const READ: u32 = 4;
pub(crate) const WRITE: u32 = 2;

const CAP_CHOWN: u32 = 0;
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const STICKY: u32 = 0o1000;
const GROUP_EXECUTE: u32 = 0o010;

const NOT_PERMITTED: Errno = Errno(libc::EPERM);

/// Mode, owner and group of an inode, which determine the permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owned {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl From<&Attr> for Owned {
    fn from(attr: &Attr) -> Owned {
        Owned { mode: attr.mode, uid: attr.uid, gid: attr.gid }
    }
}

/// The caller of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rights {
    uid: u32,
    gid: u32,
    thread: u32,
}

impl Rights {
    pub(crate) fn of(rq: &Request<'_>) -> Rights {
        Rights { uid: rq.uid, gid: rq.gid, thread: rq.thread }
    }

    fn is_root(self) -> bool {
        self.uid == 0
    }

    /// True for the owner, and for a caller with CAP_FOWNER.
    fn owns(self, inode: Owned) -> bool {
        self.is_root() || self.uid == inode.uid || self.has(CAP_FOWNER, inode)
    }

    fn is_in_group(self, gid: u32) -> bool {
        self.gid == gid || self.status().is_some_and(|status| groups(&status).any(|group| group == gid))
    }

    /// True when the caller may keep and set the set-group-ID bit of the inode.
    fn keeps_set_gid(self, inode: Owned) -> bool {
        self.is_root() || self.is_in_group(inode.gid) || self.has(CAP_FSETID, inode)
    }

    fn permits(self, inode: Owned, want: u32) -> bool {
        let class = if self.uid == inode.uid {
            inode.mode >> 6
        } else if self.is_in_group(inode.gid) {
            inode.mode >> 3
        } else {
            inode.mode
        };
        class & want == want || self.is_root() || self.has(CAP_DAC_OVERRIDE, inode)
    }

    /// The mode after a chmod to `mode`.
    pub(crate) fn chmod(self, inode: Owned, mode: u32) -> Result<u32, Errno> {
        if !self.owns(inode) {
            return Err(NOT_PERMITTED);
        }
        Ok(if mode & SET_GID != 0 && !self.keeps_set_gid(inode) { mode & !SET_GID } else { mode })
    }

    /// Checks a chown. `None` leaves an id as it is.
    pub(crate) fn chown(self, inode: Owned, uid: Option<u32>, gid: Option<u32>) -> Result<(), Errno> {
        if uid.is_none() && gid.is_none() || self.is_root() {
            return Ok(());
        }
        let owns = self.uid == inode.uid;
        let keeps_owner = uid.is_none_or(|uid| owns && uid == inode.uid);
        let own_group = gid.is_none_or(|gid| owns && (gid == inode.gid || self.is_in_group(gid)));
        if keeps_owner && own_group || self.has(CAP_CHOWN, inode) {
            Ok(())
        } else {
            Err(NOT_PERMITTED)
        }
    }

    /// Checks that the caller may set the times: with `both_now` both to the current time, else to any.
    pub(crate) fn set_times(self, inode: Owned, both_now: bool) -> Result<(), Errno> {
        match (self.owns(inode), both_now) {
            (true, _) => Ok(()),
            (false, true) if self.permits(inode, WRITE) => Ok(()),
            (false, true) => Err(Errno(libc::EACCES)),
            (false, false) => Err(NOT_PERMITTED),
        }
    }

    /// The mode after a write, a truncation or a chown: set-ID bits are dropped, except those of directories.
    pub(crate) fn drop_set_ids(self, inode: Owned) -> u32 {
        let mode = inode.mode & 0o7777;
        if inode.mode & libc::S_IFMT == libc::S_IFDIR || mode & (SET_UID | SET_GID) == 0 {
            return mode;
        }
        let drops_gid = mode & GROUP_EXECUTE != 0 || mode & SET_GID != 0 && !self.keeps_set_gid(inode);
        mode & !SET_UID & if drops_gid { !SET_GID } else { !0 }
    }

    /// Checks that the caller may drop set-id bits by a chown that names no id.
    pub(crate) fn touch_mode(self, inode: Owned) -> Result<(), Errno> {
        if self.owns(inode) {
            Ok(())
        } else {
            Err(NOT_PERMITTED)
        }
    }

    /// Checks the removal of `victim` from a directory. From a sticky directory only the owner of the directory and
    /// the owner of the entry may remove it.
    pub(crate) fn remove(
        self,
        directory: impl FnOnce() -> Result<Owned, Code>,
        victim: impl FnOnce() -> Result<Owned, Code>,
    ) -> Result<(), Errno> {
        if self.is_root() {
            return Ok(());
        }
        let directory = directory()?;
        if directory.mode & STICKY == 0 || self.uid == directory.uid {
            return Ok(());
        }
        match victim() {
            Ok(victim) if !self.owns(victim) => Err(NOT_PERMITTED),
            // If the name does not exist, the removal itself returns the error.
            _ => Ok(()),
        }
    }

    /// Checks a hard link, where `fs.protected_hardlinks` is set: the owner may link any inode, others only a regular
    /// file without set-ID bits that they may read and write.
    pub(crate) fn link(self, inode: Owned) -> Result<(), Errno> {
        if self.is_root() || self.uid == inode.uid {
            return Ok(());
        }
        let is_file = inode.mode & libc::S_IFMT == libc::S_IFREG;
        let set_group = SET_GID | GROUP_EXECUTE;
        let sets_ids = inode.mode & SET_UID != 0 || inode.mode & set_group == set_group;
        if is_file && !sets_ids && self.permits(inode, READ | WRITE) || self.has(CAP_FOWNER, inode) {
            return Ok(());
        }
        let protected = std::fs::read("/proc/sys/fs/protected_hardlinks");
        if protected.is_ok_and(|text| text.starts_with(b"0")) {
            Ok(())
        } else {
            Err(NOT_PERMITTED)
        }
    }

    /// Checks a change of a `user.` attribute: for a sticky directory only its owner may make one.
    pub(crate) fn set_user_xattr(self, inode: Owned) -> Result<(), Errno> {
        let is_directory = inode.mode & libc::S_IFMT == libc::S_IFDIR;
        if is_directory && inode.mode & STICKY != 0 && !self.owns(inode) {
            Err(NOT_PERMITTED)
        } else {
            Ok(())
        }
    }

    /// The `/proc` status of the calling thread. None if the thread is in a process namespace that this process cannot
    /// see.
    fn status(self) -> Option<String> {
        std::fs::read_to_string(format!("/proc/{}/status", self.thread)).ok()
    }

    fn has(self, capability: u32, inode: Owned) -> bool {
        let Some(status) = self.status() else { return false };
        let effective = line(&status, "CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok());
        let covers = |map: &str, id| {
            let text = std::fs::read_to_string(format!("/proc/{}/{map}", self.thread));
            text.is_ok_and(|text| maps(&text, id))
        };
        effective.is_some_and(|set| set >> capability & 1 != 0)
            && covers("uid_map", inode.uid)
            && covers("gid_map", inode.gid)
    }
}

fn line<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn groups(status: &str) -> impl Iterator<Item = u32> + '_ {
    let text = line(status, "Groups:").unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|group| group.parse().ok())
}

/// True when the map of a user namespace contains an id of this namespace.
fn maps(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut words = line.split_ascii_whitespace().map(str::parse::<u64>);
        match (words.next(), words.next(), words.next()) {
            (Some(Ok(_)), Some(Ok(first)), Some(Ok(count))) => {
                (first..first.saturating_add(count)).contains(&u64::from(id))
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thread 0 is no process: these callers have no capabilities, and no groups but their own.
    const OWNER: Rights = Rights { uid: 1000, gid: 100, thread: 0 };
    const OTHER: Rights = Rights { uid: 1001, gid: 101, thread: 0 };
    const ROOT: Rights = Rights { uid: 0, gid: 0, thread: 0 };

    fn file(mode: u32) -> Owned {
        Owned { mode: libc::S_IFREG | mode, uid: 1000, gid: 100 }
    }

    #[test]
    fn chmod_and_times_are_the_owners() {
        assert_eq!(OWNER.chmod(file(0o644), 0o600), Ok(0o600));
        assert_eq!(OTHER.chmod(file(0o666), 0o600), Err(NOT_PERMITTED));
        assert_eq!(ROOT.chmod(file(0o644), 0o6755), Ok(0o6755));
        let foreign = Owned { gid: 7, ..file(0o644) };
        assert_eq!(OWNER.chmod(foreign, 0o2755), Ok(0o755), "a group that the caller is not in");
        assert_eq!(OTHER.set_times(file(0o666), true), Ok(()));
        assert_eq!(OTHER.set_times(file(0o666), false), Err(NOT_PERMITTED));
        assert_eq!(OTHER.set_times(file(0o644), true), Err(Errno(libc::EACCES)));
        assert_eq!(OWNER.set_times(file(0o400), false), Ok(()));
    }

    #[test]
    fn chown_is_roots_but_for_the_owners_groups() {
        for (who, uid, gid, allowed) in [
            (OWNER, None, Some(100), true),
            (OWNER, Some(1000), Some(100), true),
            (OWNER, Some(1001), None, false),
            (OWNER, None, Some(7), false),
            (OTHER, Some(1001), None, false),
            (OTHER, None, Some(101), false),
            (OTHER, None, None, true),
            (ROOT, Some(7), Some(7), true),
        ] {
            assert_eq!(who.chown(file(0o644), uid, gid).is_ok(), allowed, "{who:?} {uid:?} {gid:?}");
        }
    }

    #[test]
    fn set_ids_go_from_all_but_directories() {
        for kind in [libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR, libc::S_IFBLK] {
            let inode = Owned { mode: kind | 0o6755, ..file(0) };
            assert_eq!(ROOT.drop_set_ids(inode), 0o755);
            assert_eq!(ROOT.drop_set_ids(Owned { mode: kind | 0o6744, ..inode }), 0o2744);
            assert_eq!(OTHER.drop_set_ids(Owned { mode: kind | 0o6744, ..inode }), 0o744);
        }
        let directory = Owned { mode: libc::S_IFDIR | 0o6755, ..file(0) };
        assert_eq!(ROOT.drop_set_ids(directory), 0o6755);
    }

    #[test]
    fn removal_from_a_sticky_directory_is_the_owners() {
        let sticky = || Ok(Owned { mode: libc::S_IFDIR | 0o1777, uid: 7, gid: 7 });
        let plain = || Ok(Owned { mode: libc::S_IFDIR | 0o777, uid: 7, gid: 7 });
        assert_eq!(OWNER.remove(sticky, || Ok(file(0o600))), Ok(()));
        assert_eq!(OTHER.remove(sticky, || Ok(file(0o666))), Err(NOT_PERMITTED));
        assert_eq!(OTHER.remove(plain, || Ok(file(0o600))), Ok(()));
        assert_eq!(OTHER.remove(sticky, || Err(Code::NotFound)), Ok(()));
        assert_eq!(OTHER.set_user_xattr(sticky().unwrap()), Err(NOT_PERMITTED));
        assert_eq!(OTHER.set_user_xattr(plain().unwrap()), Ok(()));
    }

    #[test]
    fn maps_of_a_namespace_cover_the_ids_outside() {
        assert!(maps("         0          0 4294967295\n", 1000));
        let rootless = "0 1000 1\n1 100000 65536\n";
        assert!(maps(rootless, 1000) && maps(rootless, 100_000) && maps(rootless, 165_535));
        assert!(!maps(rootless, 0) && !maps(rootless, 1001) && !maps(rootless, 165_536));
    }

    #[test]
    fn capabilities_and_groups_are_read_of_the_calling_thread() {
        let status = "Name:\tx\nGroups:\t4 20 1000 \nCapEff:\t000001ffffffffff\n";
        assert_eq!(groups(status).collect::<Vec<_>>(), [4, 20, 1000]);
        assert_eq!(line(status, "CapEff:"), Some("000001ffffffffff"));
        // SAFETY: cannot fail.
        let (uid, thread) = unsafe { (libc::geteuid(), libc::gettid() as u32) };
        let me = Rights { uid: 4_000_000, gid: 4_000_000, thread };
        let text = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap();
        let all = u64::from_str_radix(line(&text, "CapEff:").unwrap(), 16).unwrap();
        assert_eq!(me.has(CAP_FOWNER, Owned { mode: 0, uid, gid: 0 }), all >> CAP_FOWNER & 1 != 0);
    }
}
