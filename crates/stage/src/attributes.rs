//! Attributes of copies, and the order in which they are set.
//!
//! The owner is set first, because changing it clears set-ID bits. Extended attributes follow, which a read-only file
//! does not accept, then the mode. Times are last, because a modification time equal to the source's marks a copy as
//! complete. An attribute that the destination cannot keep gives a warning.

use forebay_types::{Code, Kind, Timestamp};

use crate::report::{display, reason};
use crate::tree::{Meta, Object, Tree, Wanted};

/// Prefixes of extended attributes that describe how a file system stores the file, or that its server uses internally.
/// They are meaningless elsewhere, and would change how the copy is stored.
const PLACE_BOUND: [&[u8]; 12] = [
    b"lustre.",
    b"trusted.lov",
    b"trusted.lma",
    b"trusted.lmv",
    b"trusted.link",
    b"trusted.fid",
    b"trusted.som",
    b"trusted.hsm",
    b"trusted.dmv",
    b"trusted.overlay.",
    b"btrfs.",
    b"ceph.",
];

/// Reused memory for extended attributes.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    names: Vec<u8>,
    value: Vec<u8>,
}

/// Rules for owner and group of copies.
#[derive(Debug)]
pub(crate) struct OwnerRules {
    preserve: bool,
    uid: u32,
    gid: u32,
    /// Groups that this user may give files to without being root.
    groups: Vec<u32>,
}

impl OwnerRules {
    /// `preserve` is the user's option. `None` keeps owners if this process runs as root, else only groups of which the
    /// user is a member.
    pub(crate) fn new(preserve: Option<bool>) -> OwnerRules {
        let uid = rustix::process::geteuid().as_raw();
        let groups = match preserve {
            None => rustix::process::getgroups().unwrap_or_default().iter().map(|g| g.as_raw()).collect(),
            Some(_) => Vec::new(),
        };
        OwnerRules {
            preserve: preserve.unwrap_or(uid == 0),
            uid,
            gid: rustix::process::getegid().as_raw(),
            groups,
        }
    }

    /// The attributes for a copy of an object with these attributes. Set-ID bits are kept only if the copy has the
    /// owner or group whose rights they grant.
    pub(crate) fn wanted(&self, meta: &Meta) -> Wanted {
        let (uid, gid) = if self.preserve {
            (Some(meta.uid), Some(meta.gid))
        } else {
            (None, Some(meta.gid).filter(|g| self.groups.contains(g)))
        };
        let mut mode = meta.mode;
        if uid.unwrap_or(self.uid) != meta.uid {
            mode &= !0o4000;
        }
        if gid.unwrap_or(self.gid) != meta.gid {
            mode &= !0o2000;
        }
        Wanted { mode, uid, gid, atime: meta.atime, mtime: meta.mtime }
    }
}

/// Sets a copy's owner, mode and extended attributes, but not its times. Calls `warn` for each attribute that could not
/// be kept.
pub(crate) fn set_attributes<S: Tree, D: Tree>(
    from: (&S, Object<'_, S>),
    to: (&D, Object<'_, D>),
    wanted: &Wanted,
    scratch: &mut Scratch,
    warn: &dyn Fn(String, Code),
) -> Result<(), Code> {
    let (destination, object) = to;
    let present = destination.owner_and_mode(object)?;
    let uid = wanted.uid.filter(|&u| u != present.uid);
    let gid = wanted.gid.filter(|&g| g != present.gid);
    let mut mode = wanted.mode;
    let mut touched = false;
    if uid.is_some() || gid.is_some() {
        match destination.set_owner(object, uid, gid) {
            Ok(()) => touched = true,
            Err(c @ (Code::NotPermitted | Code::AccessDenied | Code::Invalid | Code::NotSupported)) => {
                mode &= !0o6000;
                warn(format!("owner or group not kept: {}", reason(c)), c);
            }
            Err(c) => return Err(c),
        }
    }
    touched |= copy_xattrs(from, to, mode, scratch, warn);
    if present.kind != Kind::Symlink && (mode != present.mode || touched) {
        destination.set_mode(object, mode)?;
    }
    Ok(())
}

/// Copies extended attributes. True if the copy was made writable for that, and its mode must be set again.
fn copy_xattrs<S: Tree, D: Tree>(
    from: (&S, Object<'_, S>),
    to: (&D, Object<'_, D>),
    mode: u32,
    scratch: &mut Scratch,
    warn: &dyn Fn(String, Code),
) -> bool {
    let Scratch { names, value } = scratch;
    match from.0.list_xattrs(from.1, names) {
        // A file system without extended attributes has none to keep.
        Err(Code::NotSupported) => return false,
        Err(c) => {
            warn(format!("extended attributes not kept: cannot list them: {}", reason(c)), c);
            return false;
        }
        Ok(()) => {}
    }
    let mut writable = false;
    for name in names.split(|&b| b == 0).filter(|n| !n.is_empty() && !is_place_bound(n)) {
        let kept = match from.0.get_xattr(from.1, name, value) {
            // Removed meanwhile, or listed but not readable by this process.
            Err(Code::NoAttribute) => continue,
            Err(c) => Err(c),
            Ok(()) => match to.0.set_xattr(to.1, name, value) {
                Err(Code::AccessDenied) if !writable => {
                    writable = to.0.set_mode(to.1, mode | 0o600).is_ok();
                    to.0.set_xattr(to.1, name, value)
                }
                other => other,
            },
        };
        if let Err(c) = kept {
            warn(format!("extended attribute {} not kept: {}", display(name), reason(c)), c);
        }
    }
    writable
}

fn is_place_bound(name: &[u8]) -> bool {
    PLACE_BOUND.iter().any(|prefix| name.starts_with(prefix))
}

/// True if a copy with time `copy` may come from a source with time `source`: the times are equal, or equal after
/// truncation to the resolution of a coarser file system (100 ns, 1 µs, 1 ms, 1 s).
pub(crate) fn same_time(source: Timestamp, copy: Timestamp) -> bool {
    source.sec == copy.sec
        && [1, 100, 1_000, 1_000_000, 1_000_000_000].iter().any(|unit| source.nsec / unit * unit == copy.nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(mode: u32, uid: u32, gid: u32) -> Meta {
        let t = Timestamp::default();
        Meta {
            kind: Kind::File,
            mode,
            uid,
            gid,
            links: 1,
            size: 0,
            allocated: 0,
            rdev: 0,
            device: 0,
            ino: 0,
            atime: t,
            mtime: t,
            ctime: t,
        }
    }

    #[test]
    fn wanted_of_foreign_files_keeps_set_id_bits_only_with_their_owner() {
        let user = OwnerRules { preserve: false, uid: 1000, gid: 100, groups: vec![100, 50] };
        let root = OwnerRules { preserve: true, uid: 0, gid: 0, groups: vec![] };
        let own = user.wanted(&meta(0o6755, 1000, 100));
        assert_eq!((own.mode, own.uid, own.gid), (0o6755, None, Some(100)));
        let group = user.wanted(&meta(0o6755, 7, 50));
        assert_eq!((group.mode, group.uid, group.gid), (0o2755, None, Some(50)));
        let foreign = user.wanted(&meta(0o6755, 7, 7));
        assert_eq!((foreign.mode, foreign.uid, foreign.gid), (0o755, None, None));
        let kept = root.wanted(&meta(0o6755, 7, 8));
        assert_eq!((kept.mode, kept.uid, kept.gid), (0o6755, Some(7), Some(8)));
    }

    #[test]
    fn same_time_allows_coarser_times_only() {
        let t = |sec, nsec| Timestamp { sec, nsec };
        assert!(same_time(t(5, 123_456_789), t(5, 123_456_789)));
        assert!(same_time(t(-5, 123_456_789), t(-5, 123_456_700)));
        assert!(same_time(t(5, 123_456_789), t(5, 0)));
        assert!(!same_time(t(5, 123_456_789), t(5, 123_456_788)));
        assert!(!same_time(t(5, 0), t(5, 1)));
        assert!(!same_time(t(5, 0), t(6, 0)));
    }
}
