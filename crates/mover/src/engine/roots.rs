//! Finds the store to whose tree a directory belongs.

use forebay_types::{Code, Ino, FLAG_ATTACHED, FLAG_STORE};

use super::link::Link;

/// Bound on a walk to the root.
pub(super) const DEPTH_MAX: usize = 1 << 16;

/// The directory with the store to whose tree a directory belongs. For a directory that is gone from the pool, the
/// store's record of it is followed.
pub(super) fn root_of(link: &Link, mut ino: Ino) -> Option<Ino> {
    for _ in 0..DEPTH_MAX {
        match link.inode(ino) {
            Ok(entry) if entry.attr.flags & FLAG_STORE != 0 => return Some(ino),
            Ok(entry) if entry.attr.flags & FLAG_ATTACHED != 0 && entry.attr.parent != ino => {
                ino = entry.attr.parent;
            }
            Err(Code::NotFound) => {
                return link.store_place(ino).ok().filter(|place| place.is_root).map(|place| place.top)
            }
            _ => return None,
        }
    }
    None
}
