//! Attributes onto objects, and extended attributes from them.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::limits::{XATTR_LIST_MAX, XATTR_VALUE_MAX};
use forebay_types::{Kind, Timestamp};
use rustix::fs::{AtFlags, Gid, Mode, Stat, Timespec, Timestamps, Uid, XattrFlags, CWD, UTIME_OMIT};
use rustix::io::Errno;

use super::super::attributes::{Attributes, Warnings, Xattrs};
use super::super::source::retried;

const NAMESPACE: &[u8] = b"user.";
const SET_ID_BITS: u32 = 0o6000;

/// Counts what was not kept.
#[derive(Debug, Default)]
pub(super) struct Lost {
    owners: AtomicU64,
    modes: AtomicU64,
    times: AtomicU64,
    xattrs: AtomicU64,
}

impl Lost {
    pub(super) fn warnings(&self) -> Warnings {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Warnings {
            owners: get(&self.owners),
            modes: get(&self.modes),
            times: get(&self.times),
            xattrs: get(&self.xattrs),
        }
    }
}

/// An open object. `is_path`: an O_PATH descriptor, which most calls reach only through /proc.
#[derive(Clone, Copy)]
pub(super) struct Handle<'a> {
    pub(super) fd: BorrowedFd<'a>,
    pub(super) is_path: bool,
}

impl Handle<'_> {
    fn path(&self) -> PathBuf {
        forebay_sys::descriptor::path(&self.fd.as_fd())
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The file system or the server does not keep the attribute, or does not let this process set it.
fn is_not_kept(e: Errno) -> bool {
    matches!(e, Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL)
}

/// Whether an object was made just now: it has no extended attributes of programs.
#[derive(Clone, Copy)]
pub(super) struct IsNew(pub(super) bool);

/// Sets attributes. Those that the store does not keep are counted; an owner that root may not set is an error, because
/// the whole store then refuses owners. Set-ID bits are not set on a file whose owner is not the wanted one.
pub(super) fn apply(
    handle: Handle<'_>,
    stat: &Stat,
    attributes: &Attributes,
    is_new: IsNew,
    is_root: bool,
    lost: &Lost,
) -> Result<(), Errno> {
    let kind = Kind::from_mode(stat.st_mode);
    let mut owner_kept = true;
    let uid = attributes.uid.filter(|&uid| uid != stat.st_uid);
    let gid = attributes.gid.filter(|&gid| gid != stat.st_gid);
    // One after the other: a user may set groups that are its own, but no owner.
    for (uid, gid) in [(None, gid), (uid, None)] {
        if uid.is_none() && gid.is_none() {
            continue;
        }
        match set_owner(handle, uid.map(Uid::from_raw), gid.map(Gid::from_raw)) {
            Err(e) if is_not_kept(e) && !(is_root && e == Errno::PERM) => {
                owner_kept = false;
                count(&lost.owners);
            }
            other => other?,
        }
    }
    // Links have no mode. A change of owner clears set-ID bits, so the mode comes after it.
    let changes_owner = uid.is_some() || gid.is_some();
    let mode = attributes.mode.or(changes_owner.then_some(stat.st_mode & 0o7777));
    if let (Some(mode), true) = (mode, kind != Some(Kind::Symlink)) {
        let safe = if owner_kept { mode } else { mode & !SET_ID_BITS };
        match set_mode(handle, safe) {
            Err(e) if is_not_kept(e) => count(&lost.modes),
            Err(e) => return Err(e),
            Ok(()) if safe != mode => count(&lost.modes),
            Ok(()) => {}
        }
    }
    if let (Some(wanted), Some(Kind::File | Kind::Directory)) = (&attributes.xattrs, kind) {
        match set_xattrs(handle, wanted, is_new) {
            Err(e)
                if is_not_kept(e)
                    || matches!(e, Errno::NOSPC | Errno::DQUOT | Errno::TOOBIG | Errno::RANGE) =>
            {
                count(&lost.xattrs);
            }
            other => other?,
        }
    }
    // Last: setting anything else may move the times.
    if attributes.atime.is_some() || attributes.mtime.is_some() {
        match set_times(handle, attributes.atime, attributes.mtime) {
            Err(e) if is_not_kept(e) => count(&lost.times),
            other => other?,
        }
    }
    Ok(())
}

fn set_owner(handle: Handle<'_>, uid: Option<Uid>, gid: Option<Gid>) -> Result<(), Errno> {
    if handle.is_path {
        return retried(|| rustix::fs::chownat(handle.fd, c"", uid, gid, AtFlags::EMPTY_PATH));
    }
    retried(|| rustix::fs::fchown(handle.fd, uid, gid))
}

fn set_mode(handle: Handle<'_>, mode: u32) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(mode);
    if handle.is_path {
        let path = handle.path();
        return retried(|| rustix::fs::chmodat(CWD, &path, mode, AtFlags::empty()));
    }
    retried(|| rustix::fs::fchmod(handle.fd, mode))
}

fn set_times(handle: Handle<'_>, atime: Option<Timestamp>, mtime: Option<Timestamp>) -> Result<(), Errno> {
    let time = |time: Option<Timestamp>| match time {
        Some(time) => Timespec { tv_sec: time.sec, tv_nsec: i64::from(time.nsec) },
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
    if handle.is_path {
        return retried(|| rustix::fs::utimensat(handle.fd, c"", &times, AtFlags::EMPTY_PATH));
    }
    retried(|| rustix::fs::futimens(handle.fd, &times))
}

/// Makes `wanted` all attributes of the namespace.
fn set_xattrs(handle: Handle<'_>, wanted: &Xattrs, is_new: IsNew) -> Result<(), Errno> {
    if is_new.0 && wanted.is_empty() {
        return Ok(());
    }
    let path = handle.path();
    let wanted = || wanted.iter().filter(|(name, _)| name.starts_with(NAMESPACE));
    let there = if is_new.0 { Vec::new() } else { names(handle)? };
    for name in there {
        if !wanted().any(|(other, _)| *other == name) {
            match retried(|| rustix::fs::removexattr(&path, &name[..])) {
                Err(Errno::NODATA) => {}
                other => other?,
            }
        }
    }
    let mut refused = Ok(());
    for (name, value) in wanted() {
        // The others are set all the same.
        let set = retried(|| rustix::fs::setxattr(&path, &name[..], value, XattrFlags::empty()));
        refused = refused.and(set);
    }
    refused
}

/// All attributes of the namespace.
pub(super) fn xattrs(handle: Handle<'_>) -> Result<Xattrs, Errno> {
    let path = handle.path();
    let mut found = Xattrs::new();
    for name in names(handle)? {
        match filled(XATTR_VALUE_MAX, |buffer| rustix::fs::getxattr(&path, &name[..], buffer)) {
            Ok(value) => found.push((name, value)),
            // Removed meanwhile.
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}

fn names(handle: Handle<'_>) -> Result<Vec<Vec<u8>>, Errno> {
    let path = handle.path();
    let list = match filled(XATTR_LIST_MAX, |buffer| rustix::fs::listxattr(&path, buffer)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Vec::new()),
        other => other?,
    };
    let names = list.split(|&b| b == 0).filter(|name| name.starts_with(NAMESPACE));
    Ok(names.map(<[u8]>::to_vec).collect())
}

/// What `call` writes into a buffer of at most `most` bytes; nearly all lists and values are short.
fn filled(most: usize, call: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    for room in [1024, most] {
        let mut buffer = vec![0; room];
        match retried(|| call(&mut buffer)) {
            Err(Errno::RANGE) if room < most => {}
            Err(e) => return Err(e),
            Ok(bytes) => {
                buffer.truncate(bytes);
                return Ok(buffer);
            }
        }
    }
    Err(Errno::RANGE)
}
