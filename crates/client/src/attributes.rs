//! Calls that change attributes: chmod, chown, utimensat, truncate.

use forebay_data::BackingName;
use forebay_types::{BackingOp, Code, Entry, Ino, Kind, Request, SetAttr, TimeSet, FLAG_ATTACHED};

use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{caller, Door, Pool};
use crate::remembered::remember_changed;
use crate::walk::{permits, WRITE};

const SET_UID: u32 = 0o4000;
pub(crate) const SET_GID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

pub(crate) fn timespec(t: TimeSet) -> libc::timespec {
    match t {
        TimeSet::Omit => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
        TimeSet::Now => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
        TimeSet::At(t) => libc::timespec { tv_sec: t.sec, tv_nsec: t.nsec as libc::c_long },
    }
}

/// Fails unless the caller is the owner or root.
pub(crate) fn check_owner(owner: u32) -> Result<(), Code> {
    let me = caller().uid;
    if me == 0 || me == owner {
        Ok(())
    } else {
        Err(Code::NotPermitted)
    }
}

fn is_in_group(gid: u32) -> bool {
    gid == caller().gid || permits((0o070, !0, gid), 4, false)
}

/// Mode, owner and group after a chown, if the caller may make it. `None` leaves an ID unchanged. As in Linux, all
/// kinds but directories lose their set-ID bits. The set-group-ID bit of a file that its group may not execute stays if
/// the caller is in the group.
pub(crate) fn owners_after(
    (mode, owner, group): (u32, u32, u32),
    uid: Option<u32>,
    gid: Option<u32>,
) -> Result<(u32, u32, u32), Code> {
    let me = caller().uid;
    let drops_uid = mode & SET_UID != 0;
    let drops_gid = mode & SET_GID != 0 && (mode & GROUP_EXECUTE != 0 || me != 0 && !is_in_group(group));
    let drops = (drops_uid || drops_gid) && mode & libc::S_IFMT != libc::S_IFDIR;
    if me != 0 && (uid.is_some() || gid.is_some() || drops) {
        let keeps_owner = uid.is_none_or(|uid| uid == owner);
        let own_group = gid.is_none_or(|gid| gid == group || is_in_group(gid));
        if owner != me || !keeps_owner || !own_group {
            return Err(Code::NotPermitted);
        }
    }
    let dropped = match (drops, drops_gid) {
        (false, _) => 0,
        (true, false) => SET_UID,
        (true, true) => SET_UID | SET_GID,
    };
    Ok((mode & !dropped, uid.unwrap_or(owner), gid.unwrap_or(group)))
}

/// Checks that the caller may set times.
pub(crate) fn check_times(
    (mode, uid, gid): (u32, u32, u32),
    atime: TimeSet,
    mtime: TimeSet,
) -> Result<(), Code> {
    match check_owner(uid) {
        // Setting both times to now requires write permission only.
        Err(_) if atime == TimeSet::Now && mtime == TimeSet::Now => {
            if permits((mode, uid, gid), WRITE, false) {
                Ok(())
            } else {
                Err(Code::AccessDenied)
            }
        }
        checked => checked,
    }
}

impl Pool {
    /// Sets attributes in the shard, without a permission check. The times of a regular file are those of its backing
    /// files: use [`Pool::set_times_inode`].
    pub fn set_attr(&self, ino: Ino, set: SetAttr) -> Result<Entry, Code> {
        self.ask_entry(&Request::SetAttr { ino, set })
    }

    /// `fchmodat`.
    pub fn chmod(&self, place: Place<'_>, mode: u32, follow: bool, escape: &mut PathBuffer) -> Door<()> {
        self.with_entry(place, follow, escape, |entry| self.chmod_inode(entry.attr.ino, mode))
    }

    /// `fchmod` of an inode.
    pub fn chmod_inode(&self, ino: Ino, mode: u32) -> Result<(), Code> {
        let attr = self.get_attr(ino)?.attr;
        check_owner(attr.uid)?;
        if attr.is_symlink() {
            return Err(Code::NotSupported);
        }
        // As in Linux: a caller outside the file's group cannot set the set-group-ID bit.
        let is_strange = mode & SET_GID != 0 && caller().uid != 0 && !is_in_group(attr.gid);
        let mode = if is_strange { mode & !SET_GID } else { mode };
        let entry = self.set_attr(ino, SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() })?;
        remember_changed(&entry.attr);
        Ok(())
    }

    /// `fchownat`; `None` leaves an ID unchanged.
    pub fn chown(
        &self,
        place: Place<'_>,
        uid: Option<u32>,
        gid: Option<u32>,
        follow: bool,
        escape: &mut PathBuffer,
    ) -> Door<()> {
        self.with_entry(place, follow, escape, |entry| self.chown_inode(entry.attr.ino, uid, gid))
    }

    /// `fchown` of an inode. All kinds but directories lose their set-ID bits, as in Linux.
    pub fn chown_inode(&self, ino: Ino, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code> {
        let attr = self.get_attr(ino)?.attr;
        let (mode, ..) = owners_after((attr.mode, attr.uid, attr.gid), uid, gid)?;
        let mode = (mode != attr.mode).then_some(mode & 0o7777);
        let entry = self.set_attr(ino, SetAttr { mode, uid, gid, ..SetAttr::default() })?;
        remember_changed(&entry.attr);
        if (entry.attr.uid, entry.attr.gid) != (attr.uid, attr.gid) {
            self.show_owner(&entry);
        }
        Ok(())
    }

    /// `utimensat`.
    pub fn set_times(
        &self,
        place: Place<'_>,
        atime: TimeSet,
        mtime: TimeSet,
        follow: bool,
        escape: &mut PathBuffer,
    ) -> Door<()> {
        self.with_entry(place, follow, escape, |entry| self.set_times_inode(entry.attr.ino, atime, mtime))
    }

    /// `futimens` of an inode: times of a regular file are set on its backing files, all others in the shard.
    pub fn set_times_inode(&self, ino: Ino, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        if atime == TimeSet::Omit && mtime == TimeSet::Omit {
            return Ok(());
        }
        let entry = self.get_attr(ino)?;
        let attr = &entry.attr;
        check_times((attr.mode, attr.uid, attr.gid), atime, mtime)?;
        self.set_times_entry(&entry, atime, mtime)
    }

    /// Sets times without a permission check.
    pub fn set_times_entry(&self, entry: &Entry, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        let attr = &entry.attr;
        if attr.kind() != Kind::File {
            self.set_attr(attr.ino, SetAttr { atime, mtime, ..SetAttr::default() })?;
            return Ok(());
        }
        if attr.flags & FLAG_ATTACHED == 0 {
            return self.set_times_of_data(entry, atime, mtime);
        }
        // The shard hears of it too: the backing store gets the times, and a released file has them there alone.
        let set = |entry: &Entry| match entry.attr.is_resident() {
            true => match self.set_times_of_data(entry, atime, mtime) {
                Ok(()) => Ok(Some(entry.attr.epoch())),
                // Released meanwhile.
                Err(Code::Stale) => Ok(None),
                Err(code) => Err(code),
            },
            false => Ok(None),
        };
        let epoch = set(entry)?;
        let now = self.set_attr(attr.ino, SetAttr { atime, mtime, ..SetAttr::default() })?;
        // It was restored meanwhile, with the times from before. A later restore has those that the shard has now.
        if epoch != Some(now.attr.epoch()) {
            set(&now)?;
        }
        Ok(())
    }

    /// Sets the times of a file's backing files. [`Code::Stale`] if it was released.
    pub(crate) fn set_times_of_data(
        &self,
        entry: &Entry,
        atime: TimeSet,
        mtime: TimeSet,
    ) -> Result<(), Code> {
        let attr = &entry.attr;
        let times = [timespec(atime), timespec(mtime)];
        for (component, stripe) in entry.layout.stripes() {
            if let Some(id) = self.backing_elsewhere(entry, component, stripe) {
                self.ensure_backing(id)?;
                self.ask_backing(id, BackingOp::SetTimes { atime, mtime })?;
                continue;
            }
            let name = BackingName::new(attr.ino, entry.layout.file_number(component), stripe);
            let set = || {
                let target = self.attached()?.target_of(&entry.layout, component, stripe);
                // SAFETY: the name is NUL-terminated, the array has two elements.
                errno::check(unsafe {
                    libc::utimensat(
                        target,
                        name.as_c_str().as_ptr(),
                        times.as_ptr(),
                        libc::AT_SYMLINK_NOFOLLOW,
                    )
                })
            };
            match set() {
                Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory) => {
                    if !self.attached()?.target_was_lost(self.address()) {
                        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
                        crate::open::close(self.open_stripe(entry, component, stripe, flags)?);
                    }
                    set()?;
                }
                result => {
                    result?;
                }
            }
        }
        Ok(())
    }

    /// `truncate`.
    pub fn truncate(&self, place: Place<'_>, size: u64, escape: &mut PathBuffer) -> Door<()> {
        self.with_entry(place, true, escape, |entry| {
            let attr = &entry.attr;
            match attr.kind() {
                Kind::File => {}
                Kind::Directory => return Err(Code::IsDirectory),
                _ => return Err(Code::Invalid),
            }
            if !permits((attr.mode, attr.uid, attr.gid), WRITE, false) {
                return Err(Code::AccessDenied);
            }
            self.open_file(entry, true)?.truncate(size)
        })
    }
}
