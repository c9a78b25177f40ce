//! Lists directories ahead of the program that walks a tree.
//!
//! `ls -R`, `find` and backups list one directory after the other, and each first listing of one waits for the store. The
//! second directory that a program needs of the same parent tells such a walk: then all others of that parent are listed,
//! many at a time, while the program goes on. What a directory ahead costs is what its names take in the pool.

use forebay_types::{Ino, Kind, FLAG_ATTACHED, FLAG_UNLISTED};

use super::list::list;
use super::parallel::in_order_if_slow;
use super::shared::{for_programs, Shared};

/// Directories that are listed ahead for one parent.
const AHEAD_MAX: usize = 1024;

/// Directories of one parent that are read, to be put in order.
const BESIDE_MAX: usize = 16 * AHEAD_MAX;

/// The directories of a parent in the order in which a program probably needs them, whose second one is `second`. `ls`
/// sorts names; most others take them as they come. If `beside` may lack some, it says nothing of the order of all.
fn in_order_of_walk(mut beside: Vec<(Vec<u8>, Ino)>, second: Ino) -> Vec<Ino> {
    if beside.len() >= BESIDE_MAX {
        return beside.into_iter().map(|(_, ino)| ino).collect();
    }
    let name = beside.iter().find(|(_, ino)| *ino == second).map(|(name, _)| name);
    let is_sorted = name.is_some_and(|name| beside.iter().filter(|(other, _)| other < name).count() < 2);
    if is_sorted {
        beside.sort();
    }
    beside.into_iter().map(|(_, ino)| ino).collect()
}

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
    // More threads for the same directories would only make the program wait for each longer.
    if !shared.ahead.begin(parent) {
        return;
    }
    list_beside(shared, parent, directory);
    shared.ahead.end(parent);
}

/// Lists the directories of `parent`, of which a program has needed `directory`.
fn list_beside(shared: &Shared, parent: Ino, directory: Ino) {
    let link = &shared.link;
    let Ok(located) = shared.stores.locate(directory) else { return };
    let mut beside = Vec::new();
    let mut names = link.pool.read_directory(parent);
    while let Ok(Some(found)) = names.next(link.pool) {
        if found.kind == Kind::Directory && found.name != b"." && found.name != b".." {
            beside.push((found.name.to_vec(), found.ino));
            if beside.len() >= BESIDE_MAX {
                break;
            }
        }
    }
    let is_unlisted = |ino: Ino| link.inode(ino).is_ok_and(|entry| entry.attr.flags & FLAG_UNLISTED != 0);
    let in_order = in_order_of_walk(beside, directory).into_iter();
    let while_running = in_order.take_while(|_| !shared.stores.is_stopping());
    let beside: Vec<_> = while_running.filter(|ino| is_unlisted(*ino)).take(AHEAD_MAX).collect();
    in_order_if_slow(&located.at.store, &beside, |&directory| {
        if shared.stores.is_stopping() || !shared.listing.begin(directory) {
            return None;
        }
        let listed = is_unlisted(directory).then(|| list(link, &shared.stores, directory));
        shared.listing.end(directory);
        match listed? {
            Ok(first_answer) => Some(first_answer),
            Err(e) => {
                // A program may wait for it by now.
                let _ = link.failed(directory, for_programs(e.code));
                None
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_sorted_for_a_program_that_began_with_the_first_names() {
        let as_they_come =
            || [("c", 3), ("a", 1), ("d", 4), ("b", 2)].map(|(n, i)| (n.as_bytes().to_vec(), Ino(i)));
        let order = |second| {
            in_order_of_walk(as_they_come().to_vec(), Ino(second)).iter().map(|i| i.0).collect::<Vec<_>>()
        };
        assert_eq!(order(2), [1, 2, 3, 4]);
        assert_eq!(order(1), [1, 2, 3, 4]);
        assert_eq!(order(3), [3, 1, 4, 2], "two names are before it");
        assert_eq!(order(9), [3, 1, 4, 2], "it is gone");
        let many = || (0..BESIDE_MAX as u64).rev().map(|i| (format!("{i:08}").into_bytes(), Ino(i)));
        let first = |count| {
            in_order_of_walk(many().take(count).collect(), Ino(BESIDE_MAX as u64 - count as u64))[0].0
        };
        assert_eq!(first(100), BESIDE_MAX as u64 - 100);
        assert_eq!(first(BESIDE_MAX), BESIDE_MAX as u64 - 1, "there may be others");
    }
}
