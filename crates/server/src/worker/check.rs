//! Check of shard and targets together: the shard in itself, then its files against the backing files.
//!
//! In a pool of several nodes it checks this node only; `cross_check.rs` continues while the pool is up. Data of other
//! nodes' files are counted and not checked. The shard serves nothing meanwhile. A file without a backing file is no
//! problem: it is empty. A backing file without an inode is lost space, unless the inode is an orphan whose client is
//! unlinking it, or its number is reserved for a client that is about to create it. A single backing file of a file
//! that has several is lost space too, unless a client holds a lease on those: then it is the copy that will replace
//! them (`crates/client/src/migrate.rs`).

use std::collections::{HashMap, HashSet};

use forebay_data::{BackingName, Media, NodeTargets, Target};
use forebay_meta::Shard;
use forebay_types::{node_of, Entry, Error, Ino, NodeId, Result};
use serde_json::{json, Value};

use super::layout_change;

/// A cross-node transaction that waits for this long waits for a node that is down, or is a defect.
const OLD_S: u64 = 60;
/// Problems that are described. Further ones are only counted.
const LISTED_MAX: usize = 100;

/// A bit for each target of this node on which an inode has backing files.
fn targets_of(entry: &Entry, here: NodeId) -> u16 {
    if !entry.attr.is_file() {
        return 1; // FIFOs and devices are on the first
    }
    let its =
        entry.layout.stripes().map(|(component, stripe)| entry.layout.components()[component].target(stripe));
    its.filter(|target| node_of(*target) == here)
        .fold(0, |bits, target| bits | 1u16.checked_shl(target & 0xffff).unwrap_or(0))
}

/// `of_volumes` are problems of volumes, in words. Returns a report in JSON with `clean`, counts, and `problems` as texts.
pub(crate) fn check(shard: &Shard, targets: &NodeTargets, of_volumes: Vec<String>) -> Result<Value> {
    let here = shard.node();
    let mut files: HashMap<Ino, u16> = HashMap::new();
    let mut spread: HashMap<Ino, (u32, BackingName)> = HashMap::new();
    let mut regular = 0u64;
    let report = shard.check(&mut |entry| {
        let attr = &entry.attr;
        regular += u64::from(attr.is_file());
        files.insert(attr.ino, targets_of(entry, here));
        if attr.is_file() && !entry.layout.is_single() {
            let first = BackingName::new(attr.ino, entry.layout.file_number(0), 0);
            spread.insert(attr.ino, (entry.layout.components()[0].target(0), first));
        }
    })?;
    // A damaged shard may refuse a batch. The report names the damage in that case.
    let listed = shard.begin().and_then(|batch| batch.orphans()).unwrap_or_default();
    let orphans: HashSet<Ino> = listed.into_iter().map(|(ino, _)| ino).collect();
    let numbers = shard.begin().and_then(|batch| super::shard_queries::reserved(&batch)).unwrap_or_default();
    let reserved: HashSet<Ino> = numbers.into_iter().collect();
    let mut problems = report.problems.clone();
    let (mut backing_files, mut leaked, mut foreign) = (0u64, 0u64, 0u64);
    let mut look = |target: &Target, ino: Ino, component: usize, stripe: u16| {
        backing_files += 1;
        // Data of another node's inode: that node knows whether the inode exists.
        if ino.birth_node() != here {
            foreign += 1;
            return;
        }
        let mut found = |what: String| {
            leaked += 1;
            if problems.len() < LISTED_MAX {
                problems.push(what);
            }
        };
        let index = target.target() as u16;
        let lost =
            |why: &str| format!("backing file of inode {ino} (component {component}, stripe {stripe}) {why}");
        let copied = spread.get(&ino).filter(|_| component == 0);
        match files.get(&ino) {
            None if !orphans.contains(&ino) && !reserved.contains(&ino) => found(lost("has no inode")),
            Some(its) if copied.is_none() && its & 1 << index == 0 => {
                found(lost(&format!("lies on target {index}, and the file does not")));
            }
            _ => {}
        }
        let is_held = |first: &(u32, BackingName)| {
            targets.get(first.0).is_ok_and(|target| layout_change::is_held(target, &first.1))
        };
        if copied.is_some_and(|first| !is_held(first)) {
            found(format!(
                "inode {ino} has a backing file left by an interrupted copy: `forebay layout migrate` of the \
                 file removes it, and so does the file's removal"
            ));
        }
    };
    for target in targets.iter() {
        target
            .for_each(&mut |ino, component, stripe| {
                look(target, ino, component, stripe);
                Ok(())
            })
            .map_err(|code| Error::new(code, "cannot list the target's backing files"))?;
    }
    let now = super::now().sec.max(0) as u64;
    let old = report.oldest_seconds != 0 && now.saturating_sub(report.oldest_seconds) > OLD_S;
    if old {
        problems.push(format!(
            "cross-node transactions have waited for {} s ({} parts in doubt, {} deliveries): is one of their nodes down?",
            now - report.oldest_seconds,
            report.prepared,
            report.deliveries
        ));
    }
    let found = report.problem_count + leaked + u64::from(old) + of_volumes.len() as u64;
    problems.extend(of_volumes);
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
        "links_elsewhere": report.links,
        "parts_in_doubt": report.prepared,
        "deliveries": report.deliveries,
        "volumes": report.volumes,
    }))
}
