//! Objects and versions from stats.

use forebay_types::{Code, Kind, StoreVersion, Timestamp};
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::super::attributes::Object;
use super::super::source::retried;
use super::resolve::At;

/// The version of an object. A directory's has only its inode number.
///
/// The time of the last change of the inode (ctime) is not in it: the mover's own links and renames move it.
pub(super) fn version_of(stat: &Stat) -> StoreVersion {
    if Kind::from_mode(stat.st_mode) == Some(Kind::Directory) {
        return StoreVersion { ino: stat.st_ino, ..StoreVersion::default() };
    }
    StoreVersion { bytes: stat.st_size as u64, mtime: mtime(stat), ino: stat.st_ino, tag: 0 }
}

fn mtime(stat: &Stat) -> Timestamp {
    Timestamp { sec: stat.st_mtime, nsec: stat.st_mtime_nsec as u32 }
}

/// The stat of an object, not of what a link leads to.
pub(super) fn stat(at: At<'_>) -> Result<Stat, Errno> {
    retried(|| rustix::fs::statat(at.directory, at.name, AtFlags::SYMLINK_NOFOLLOW))
}

/// The object at a place, none if there is none.
pub(super) fn look(at: At<'_>) -> Result<Option<Object>, Errno> {
    match stat(at) {
        Ok(stat) => describe(at, &stat).map(Some),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The object at a place, from its stat.
pub(super) fn describe(at: At<'_>, stat: &Stat) -> Result<Object, Errno> {
    let mut object = without_target(at.name, stat).map_err(|_| Errno::INVAL)?;
    if object.kind == Kind::Symlink {
        let target = retried(|| rustix::fs::readlinkat(at.directory, at.name, Vec::new()))?;
        object.link_target = target.into_bytes();
    }
    Ok(object)
}

/// An object, without the target of a link.
pub(super) fn without_target(name: &[u8], stat: &Stat) -> Result<Object, Code> {
    let kind = Kind::from_mode(stat.st_mode).ok_or(Code::Invalid)?;
    Ok(Object {
        name: name.to_vec(),
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: Timestamp { sec: stat.st_atime, nsec: stat.st_atime_nsec as u32 },
        mtime: mtime(stat),
        rdev: if matches!(kind, Kind::CharDevice | Kind::BlockDevice) { stat.st_rdev } else { 0 },
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        file_system: stat.st_dev,
        link_target: Vec::new(),
        version: version_of(stat),
        mark: 0,
        is_complete: true,
    })
}
