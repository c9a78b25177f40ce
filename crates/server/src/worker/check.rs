//! Check of shard and target together: the shard in itself, then its files against the backing files.
//!
//! Of a pool with several nodes it is this node's part alone: entries that lead to directories of other nodes, and data of
//! other nodes' files, are counted and not followed. It runs with the shard at rest. A file without a backing file is sound (it is empty); a backing file without an inode
//! is lost space, unless the inode is an orphan whose client is unlinking it, or its number is in reserve for a client that
//! is about to create it. So is a file's single backing file while the file has several, unless a client holds those under a
//! lease: then it is the copy that is to take their place (`client/migrate.rs`).

use std::collections::{HashMap, HashSet};

use forebay_data::{BackingName, Media, Target};
use forebay_meta::Shard;
use forebay_types::{Error, Ino, Result};
use serde_json::{json, Value};

use super::layouts;

/// Findings listed one by one; more are counted.
const LISTED_MAX: usize = 100;

/// Checks; the report as JSON with `clean`, counts, and `problems` as texts.
pub(crate) fn check(shard: &Shard, target: &Target) -> Result<Value> {
    let mut files: HashSet<Ino> = HashSet::new();
    let mut spread: HashMap<Ino, BackingName> = HashMap::new();
    let mut regular = 0u64;
    let report = shard.check(&mut |entry| {
        let attr = &entry.attr;
        regular += u64::from(attr.is_file());
        files.insert(attr.ino);
        if attr.is_file() && !entry.layout.is_single() {
            spread.insert(attr.ino, BackingName::new(attr.ino, entry.layout.file_number(0), 0));
        }
    })?;
    // A damaged shard may refuse a batch; what is damaged is in the report then.
    let listed = shard.begin().and_then(|batch| batch.orphans()).unwrap_or_default();
    let orphans: HashSet<Ino> = listed.into_iter().map(|(ino, _)| ino).collect();
    let numbers = shard.begin().and_then(|batch| super::recovery::reserved(&batch)).unwrap_or_default();
    let reserved: HashSet<Ino> = numbers.into_iter().collect();
    let mut problems = report.problems.clone();
    let (mut backing_files, mut leaked, mut foreign) = (0u64, 0u64, 0u64);
    let here = shard.node();
    target
        .for_each(&mut |ino, component, stripe| {
            backing_files += 1;
            // Data of another node's inode: whether that is there is for its node to say.
            if ino.birth_node() != here {
                foreign += 1;
                return Ok(());
            }
            if !files.contains(&ino) && !orphans.contains(&ino) && !reserved.contains(&ino) {
                leaked += 1;
                if problems.len() < LISTED_MAX {
                    problems.push(format!(
                        "backing file of inode {ino} (component {component}, stripe {stripe}) has no inode"
                    ));
                }
            }
            let copied = spread.get(&ino).filter(|_| component == 0);
            if copied.is_some_and(|first| !layouts::is_held(target, first)) {
                leaked += 1;
                if problems.len() < LISTED_MAX {
                    problems.push(format!(
                        "inode {ino} has a backing file that a copy left which ended early: `forebay layout migrate` of the \
                         file removes it, and so does the file's removal"
                    ));
                }
            }
            Ok(())
        })
        .map_err(|code| Error::new(code, "cannot list the target's backing files"))?;
    let found = report.problem_count + leaked;
    problems.truncate(LISTED_MAX);
    Ok(json!({
        "clean": found == 0,
        "problems": problems,
        "problems_found": found,
        "inodes": report.inodes,
        "entries": report.entries,
        "files": regular,
        "orphans": orphans.len(),
        "backing_files": backing_files,
        "leaked_backing_files": leaked,
        "foreign_backing_files": foreign,
    }))
}
