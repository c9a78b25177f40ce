//! Extended attributes, all of which are in the shard.

use forebay_types::limits::{XATTR_NAME_MAX, XATTR_VALUE_MAX};
use forebay_types::{Attr, Code, Ino, Reply, Request, FLAG_HAS_VALUES, XATTR_CREATE, XATTR_REPLACE};

use crate::path::{PathBuffer, Place};
use crate::pool::{caller, Door, Pool};
use crate::walk::{permits, READ, WRITE};

/// Checks the namespace rules of xattr(7). A hidden attribute reads and lists as if it did not exist.
pub(crate) fn check_name((mode, uid, gid): (u32, u32, u32), name: &[u8], write: bool) -> Result<(), Code> {
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return Err(Code::Range);
    }
    if matches!(name, b"user." | b"trusted." | b"security.") {
        return Err(Code::Invalid);
    }
    // Asked only where it counts: `ls -l` reads `security.selinux` of each file.
    let is_root = || caller().uid == 0;
    if name.starts_with(b"user.") {
        if !matches!(mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFDIR) {
            return Err(if write { Code::NotPermitted } else { Code::NoAttribute });
        }
        let want = if write { WRITE } else { READ };
        return if permits((mode, uid, gid), want, false) { Ok(()) } else { Err(Code::AccessDenied) };
    }
    if name.starts_with(b"trusted.") {
        return match (is_root(), write) {
            (true, _) => Ok(()),
            (false, true) => Err(Code::NotPermitted),
            (false, false) => Err(Code::NoAttribute),
        };
    }
    if name.starts_with(b"security.") {
        return if !write || is_root() { Ok(()) } else { Err(Code::NotPermitted) };
    }
    // POSIX ACLs are not enforced here, so they are not stored: programs fall back to the mode.
    Err(Code::NotSupported)
}

fn owned(attr: &Attr) -> (u32, u32, u32) {
    (attr.mode, attr.uid, attr.gid)
}

impl Pool {
    /// `getxattr` or `lgetxattr`: the bytes of the value; with an empty buffer only its length.
    pub fn get_xattr(
        &self,
        place: Place<'_>,
        follow: bool,
        name: &[u8],
        value: &mut [u8],
        escape: &mut PathBuffer,
    ) -> Door<usize> {
        self.with_entry(place, follow, escape, |entry| self.get_xattr_of(&entry.attr, name, value))
    }

    /// `setxattr` or `lsetxattr`.
    pub fn set_xattr(
        &self,
        place: Place<'_>,
        follow: bool,
        name: &[u8],
        value: &[u8],
        flags: u32,
        escape: &mut PathBuffer,
    ) -> Door<()> {
        self.with_entry(place, follow, escape, |entry| {
            self.set_xattr_inode(entry.attr.ino, name, value, flags)
        })
    }

    /// `listxattr` or `llistxattr`: the names, each followed by a NUL. Returns the number of bytes.
    pub fn list_xattr(
        &self,
        place: Place<'_>,
        follow: bool,
        names: &mut [u8],
        escape: &mut PathBuffer,
    ) -> Door<usize> {
        self.with_entry(place, follow, escape, |entry| self.list_xattr_of(&entry.attr, names))
    }

    /// `removexattr` or `lremovexattr`.
    pub fn remove_xattr(
        &self,
        place: Place<'_>,
        follow: bool,
        name: &[u8],
        escape: &mut PathBuffer,
    ) -> Door<()> {
        self.with_entry(place, follow, escape, |entry| self.remove_xattr_inode(entry.attr.ino, name))
    }

    /// [`Pool::get_xattr`] of an inode.
    pub fn get_xattr_inode(&self, ino: Ino, name: &[u8], value: &mut [u8]) -> Result<usize, Code> {
        self.get_xattr_of(&self.get_attr(ino)?.attr, name, value)
    }

    /// The same with the inode's attributes, which were read in this call.
    fn get_xattr_of(&self, attr: &Attr, name: &[u8], value: &mut [u8]) -> Result<usize, Code> {
        check_name(owned(attr), name, false)?;
        if attr.flags & FLAG_HAS_VALUES == 0 {
            return Err(Code::NoAttribute);
        }
        let ino = attr.ino;
        self.ask_long(&Request::GetXattr { ino, name }, |reply| copy_bytes(reply, value))
    }

    /// [`Pool::set_xattr`] of an inode.
    pub fn set_xattr_inode(&self, ino: Ino, name: &[u8], value: &[u8], flags: u32) -> Result<(), Code> {
        if value.len() > XATTR_VALUE_MAX {
            return Err(Code::TooBig);
        }
        check_name(owned(&self.get_attr(ino)?.attr), name, true)?;
        // Both at once: the attribute must be absent and there, so nothing is ever set.
        if flags == XATTR_CREATE | XATTR_REPLACE {
            return self.get_xattr_inode(ino, name, &mut []).and(Err(Code::Exists));
        }
        let request = Request::SetXattr { ino, name, value, flags };
        if value.len() > 256 {
            return self.ask_long(&request, |_| Ok(()));
        }
        self.ask_then(&request, |_| Ok(()))
    }

    /// [`Pool::list_xattr`] of an inode.
    pub fn list_xattr_inode(&self, ino: Ino, names: &mut [u8]) -> Result<usize, Code> {
        self.list_xattr_of(&self.get_attr(ino)?.attr, names)
    }

    /// The same with the inode's attributes, which were read in this call.
    fn list_xattr_of(&self, attr: &Attr, names: &mut [u8]) -> Result<usize, Code> {
        if attr.flags & FLAG_HAS_VALUES == 0 {
            return Ok(0);
        }
        let ino = attr.ino;
        let root = caller().uid == 0;
        self.ask_long(&Request::ListXattr { ino }, |reply| {
            let Reply::Bytes(all) = reply else { return Err(Code::Malformed) };
            let (mut n, counting) = (0, names.is_empty());
            for name in all.split_inclusive(|&b| b == 0) {
                if name.starts_with(b"trusted.") && !root {
                    continue;
                }
                if !counting {
                    names.get_mut(n..n + name.len()).ok_or(Code::Range)?.copy_from_slice(name);
                }
                n += name.len();
            }
            Ok(n)
        })
    }

    /// [`Pool::remove_xattr`] of an inode.
    pub fn remove_xattr_inode(&self, ino: Ino, name: &[u8]) -> Result<(), Code> {
        check_name(owned(&self.get_attr(ino)?.attr), name, true)?;
        self.ask_then(&Request::RemoveXattr { ino, name }, |_| Ok(()))
    }
}

fn copy_bytes(reply: Reply<'_>, to: &mut [u8]) -> Result<usize, Code> {
    let Reply::Bytes(bytes) = reply else { return Err(Code::Malformed) };
    if !to.is_empty() {
        to.get_mut(..bytes.len()).ok_or(Code::Range)?.copy_from_slice(bytes);
    }
    Ok(bytes.len())
}
