//! Lists directories ahead of the program that walks a tree.
//!
//! `ls -R`, `find` and backups list one directory after the other, and each first listing of one waits for the store. The
//! second directory that a program needs of the same parent tells such a walk: then all others of that parent are listed,
//! many at a time, while the program goes on. What a directory ahead costs is what its names take in the pool.

use forebay_types::{Ino, Kind, FLAG_ATTACHED, FLAG_UNLISTED};

use super::list::list;
use super::parallel::in_parallel;
use super::shared::{for_programs, Shared};

/// Directories that are listed ahead for one parent.
const AHEAD_MAX: usize = 1024;

/// After a directory was listed because a program needs it: lists those beside it, if a program walks there.
pub(super) fn list_ahead(shared: &Shared, directory: Ino) {
    let link = &shared.link;
    let Ok(entry) = link.inode(directory) else { return };
    let parent = entry.attr.parent;
    let is_listed = |flags: u32| flags & FLAG_ATTACHED != 0 && flags & FLAG_UNLISTED == 0;
    if !link.inode(parent).is_ok_and(|parent| is_listed(parent.attr.flags)) || !shared.walks.is_second(parent)
    {
        return;
    }
    let Ok(located) = shared.stores.locate(directory) else { return };
    let mut beside = Vec::new();
    let mut names = link.pool.read_directory(parent);
    while let Ok(Some(found)) = names.next(link.pool) {
        let is_child = found.kind == Kind::Directory && found.name != b"." && found.name != b"..";
        if is_child && link.inode(found.ino).is_ok_and(|entry| entry.attr.flags & FLAG_UNLISTED != 0) {
            beside.push(found.ino);
            if beside.len() >= AHEAD_MAX {
                break;
            }
        }
    }
    in_parallel(&located.at.store, &beside, |_, &directory| {
        if shared.stores.is_stopping() || !shared.listing.begin(directory) {
            return;
        }
        let is_unlisted = link.inode(directory).is_ok_and(|entry| entry.attr.flags & FLAG_UNLISTED != 0);
        let listed = if is_unlisted { list(link, &shared.stores, directory) } else { Ok(()) };
        shared.listing.end(directory);
        if let Err(e) = listed {
            // A program may wait for it by now.
            let _ = link.failed(directory, for_programs(e.code));
        }
    });
}
