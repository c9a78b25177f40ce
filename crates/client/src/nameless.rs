//! Attributes of an open inode that has no names.
//!
//! The shard removes an inode with its last name. Size, times and data remain in the backing file until its last
//! descriptor is closed. Changed values of mode, owner and group are stored in an extended attribute of the backing
//! file, so that all processes that have the file open see them, including the mount's process. Unchanged values are
//! those at the time when this process opened the file, or last changed them. If the medium does not support such attributes, and for FIFOs
//! and devices, only this process remembers the change. Other extended attributes are set on the backing file; those in
//! the shard were removed with the name.
//!
//! The backing file is accessed through its link in /proc: under the preload library only this path reaches the kernel.

use std::ffi::CStr;
use std::os::fd::RawFd;

use forebay_types::limits::XATTR_NAME_MAX;
use forebay_types::{Code, Ino, TimeSet};

use crate::attributes::{check_owner, owners_after, timespec};
use crate::descriptor::proc_fd;
use crate::errno;
use crate::pool::Pool;
use crate::remembered::{opened_as, reopened_as};
use crate::xattr::check_name;

/// The attribute that holds mode, owner and group, 4 bytes each.
const KEPT: &CStr = c"user.forebay.inode";

/// Mode with its type bits, owner and group.
pub type Owned = (u32, u32, u32);

fn with_link<T>(fd: RawFd, body: impl FnOnce(&CStr) -> Result<T, Code>) -> Result<T, Code> {
    let mut buffer = [0; 32];
    body(proc_fd(fd, &mut buffer).ok_or(Code::BadDescriptor)?)
}

fn with_name<T>(name: &[u8], body: impl FnOnce(&CStr) -> Result<T, Code>) -> Result<T, Code> {
    let mut buffer = [0; XATTR_NAME_MAX + 1];
    buffer
        .get_mut(..name.len())
        .filter(|_| name.len() <= XATTR_NAME_MAX)
        .ok_or(Code::Range)?
        .copy_from_slice(name);
    let name = CStr::from_bytes_until_nul(&buffer).map_err(|_| Code::Range)?;
    if name == KEPT {
        return Err(Code::NoAttribute);
    }
    body(name)
}

fn counted(n: isize) -> Result<usize, Code> {
    usize::try_from(n).map_err(|_| errno::last())
}

/// Mode, owner and group of a descriptor's inode, if they were changed after it lost its last name.
pub fn stored_owner(fd: RawFd) -> Option<Owned> {
    let mut bytes = [0u8; 12];
    let read = |link: &CStr| {
        // SAFETY: NUL-terminated, and the buffer has the given length.
        counted(unsafe {
            libc::getxattr(link.as_ptr(), KEPT.as_ptr(), bytes.as_mut_ptr().cast(), bytes.len())
        })
    };
    if with_link(fd, read) != Ok(bytes.len()) {
        return None;
    }
    let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some((word(0), word(4), word(8)))
}

/// Stores them for all processes; false if the medium cannot.
pub fn store_owner(fd: RawFd, (mode, uid, gid): Owned) -> bool {
    let mut bytes = [0u8; 12];
    for (at, word) in bytes.chunks_exact_mut(4).zip([mode, uid, gid]) {
        at.copy_from_slice(&word.to_ne_bytes());
    }
    let store = |link: &CStr| {
        // SAFETY: NUL-terminated, and the value has the given length.
        errno::check(unsafe {
            libc::setxattr(link.as_ptr(), KEPT.as_ptr(), bytes.as_ptr().cast(), bytes.len(), 0)
        })
    };
    with_link(fd, store).is_ok()
}

/// Removes the stored values of a file that got a name. Its attributes are in the shard from now on, and the stored
/// values must not apply when it loses that name.
pub(crate) fn forget(fd: RawFd) {
    // SAFETY: NUL-terminated. Most files have no such attribute, so errors are ignored.
    let _ = with_link(fd, |link| errno::check(unsafe { libc::removexattr(link.as_ptr(), KEPT.as_ptr()) }));
}

/// `fgetxattr` of the backing file.
pub fn get_xattr(fd: RawFd, name: &[u8], value: &mut [u8]) -> Result<usize, Code> {
    with_name(name, |name| {
        with_link(fd, |link| {
            // SAFETY: NUL-terminated, and the buffer has the given length.
            counted(unsafe {
                libc::getxattr(link.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
            })
        })
    })
}

/// `fsetxattr` of the backing file.
pub fn set_xattr(fd: RawFd, name: &[u8], value: &[u8], flags: u32) -> Result<(), Code> {
    with_name(name, |name| {
        with_link(fd, |link| {
            let (bytes, flags) = (value.as_ptr().cast(), flags as i32);
            // SAFETY: NUL-terminated, and the value has the given length.
            errno::check(unsafe { libc::setxattr(link.as_ptr(), name.as_ptr(), bytes, value.len(), flags) })
        })
    })
    .map(|_| ())
}

/// `fremovexattr` of the backing file.
pub fn remove_xattr(fd: RawFd, name: &[u8]) -> Result<(), Code> {
    with_name(name, |name| {
        // SAFETY: NUL-terminated.
        with_link(fd, |link| errno::check(unsafe { libc::removexattr(link.as_ptr(), name.as_ptr()) }))
    })
    .map(|_| ())
}

/// `flistxattr` of the backing file, without Forebay's own attribute. With an empty buffer the result may exceed the
/// list's length.
pub fn list_xattr(fd: RawFd, names: &mut [u8]) -> Result<usize, Code> {
    let room = names.len();
    let n = with_link(fd, |link| {
        // SAFETY: NUL-terminated, and the buffer has the given length.
        counted(unsafe { libc::listxattr(link.as_ptr(), names.as_mut_ptr().cast(), room) })
    })?;
    if room == 0 {
        return Ok(n);
    }
    Ok(hide_own(&mut names[..n]))
}

/// Removes Forebay's own attribute from a list of names, each followed by a NUL. Returns the length of the rest.
fn hide_own(names: &mut [u8]) -> usize {
    let (n, mut at) = (names.len(), 0);
    let hidden = KEPT.to_bytes_with_nul();
    for name in names.split_inclusive(|&b| b == 0) {
        if name == hidden {
            names.copy_within(at + hidden.len().., at);
            return n - hidden.len();
        }
        at += name.len();
    }
    n
}

/// Mode, owner and group of an inode without names: as last changed, else as this process opened it. After an exec the
/// latter are lost, and the result is a mode for the owner alone and the owner of the backing file. `kernel` is the
/// result of `fstat` of the backing file.
pub(crate) fn owned(fd: RawFd, ino: Ino, kernel: &libc::stat) -> Owned {
    let kind = kernel.st_mode & libc::S_IFMT;
    let unknown = if kind == libc::S_IFDIR { 0o700 } else { 0o600 };
    changed(fd, ino).unwrap_or((kind | unknown, kernel.st_uid, kernel.st_gid))
}

/// The same if the values are known.
pub(crate) fn changed(fd: RawFd, ino: Ino) -> Option<Owned> {
    stored_owner(fd).or_else(|| opened_as(ino))
}

fn set_owned(fd: RawFd, ino: Ino, owned: Owned) {
    if !store_owner(fd, owned) {
        reopened_as(ino, fd, owned);
    }
}

impl Pool {
    /// Calls `inode`, and if the inode has no name, `nameless` with its mode, owner and group.
    fn or_nameless<T>(
        &self,
        fd: RawFd,
        ino: Ino,
        inode: impl FnOnce() -> Result<T, Code>,
        nameless: impl FnOnce(Owned) -> Result<T, Code>,
    ) -> Result<T, Code> {
        match inode() {
            Err(Code::NotFound) => nameless(owned(fd, ino, &errno::stat(fd)?)),
            result => result,
        }
    }

    /// `fchmod` of a descriptor whose inode is known.
    pub fn chmod_open(&self, fd: RawFd, ino: Ino, mode: u32) -> Result<(), Code> {
        let nameless = |(old, uid, gid): Owned| {
            check_owner(uid)?;
            set_owned(fd, ino, (old & libc::S_IFMT | mode & 0o7777, uid, gid));
            Ok(())
        };
        self.or_nameless(fd, ino, || self.chmod_inode(ino, mode), nameless)
    }

    /// `fchown` of a descriptor whose inode is known.
    pub fn chown_open(&self, fd: RawFd, ino: Ino, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code> {
        let nameless = |owned: Owned| {
            set_owned(fd, ino, owners_after(owned, uid, gid)?);
            Ok(())
        };
        self.or_nameless(fd, ino, || self.chown_inode(ino, uid, gid), nameless)
    }

    /// `futimens` of a descriptor whose inode is known.
    pub fn set_times_open(&self, fd: RawFd, ino: Ino, atime: TimeSet, mtime: TimeSet) -> Result<(), Code> {
        let nameless = |owned: Owned| {
            crate::attributes::check_times(owned, atime, mtime)?;
            let times = [timespec(atime), timespec(mtime)];
            with_link(fd, |link| {
                // SAFETY: NUL-terminated, and an array of two.
                errno::check(unsafe { libc::utimensat(libc::AT_FDCWD, link.as_ptr(), times.as_ptr(), 0) })
            })
            .map(|_| ())
        };
        self.or_nameless(fd, ino, || self.set_times_inode(ino, atime, mtime), nameless)
    }

    /// `fgetxattr` of a descriptor whose inode is known.
    pub fn get_xattr_open(&self, fd: RawFd, ino: Ino, name: &[u8], value: &mut [u8]) -> Result<usize, Code> {
        match self.get_xattr_inode(ino, name, value) {
            Err(Code::NotFound) => {
                check_name(owned(fd, ino, &errno::stat(fd)?), name, false)?;
                get_xattr(fd, name, value)
            }
            result => result,
        }
    }

    /// `fsetxattr` of a descriptor whose inode is known.
    pub fn set_xattr_open(
        &self,
        fd: RawFd,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<(), Code> {
        let nameless = |owned: Owned| {
            check_name(owned, name, true)?;
            set_xattr(fd, name, value, flags)
        };
        self.or_nameless(fd, ino, || self.set_xattr_inode(ino, name, value, flags), nameless)
    }

    /// `flistxattr` of a descriptor whose inode is known.
    pub fn list_xattr_open(&self, fd: RawFd, ino: Ino, names: &mut [u8]) -> Result<usize, Code> {
        match self.list_xattr_inode(ino, names) {
            Err(Code::NotFound) => list_xattr(fd, names),
            result => result,
        }
    }

    /// `fremovexattr` of a descriptor whose inode is known.
    pub fn remove_xattr_open(&self, fd: RawFd, ino: Ino, name: &[u8]) -> Result<(), Code> {
        let nameless = |owned: Owned| {
            check_name(owned, name, true)?;
            remove_xattr(fd, name)
        };
        self.or_nameless(fd, ino, || self.remove_xattr_inode(ino, name), nameless)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_attribute_is_hidden_and_others_that_contain_its_name_are_not() {
        for (names, shown) in [
            (&b""[..], &b""[..]),
            (b"user.forebay.inode\0", b""),
            (b"user.a\0user.forebay.inode\0user.b\0", b"user.a\0user.b\0"),
            (b"user.user.forebay.inode\0", b"user.user.forebay.inode\0"),
            (
                b"user.user.forebay.inode\0user.forebay.inode\0user.forebay.inode2\0",
                b"user.user.forebay.inode\0user.forebay.inode2\0",
            ),
        ] {
            let mut list = names.to_vec();
            let n = hide_own(&mut list);
            assert_eq!(list[..n].escape_ascii().to_string(), shown.escape_ascii().to_string());
        }
    }
}
