//! Requests that the worker answers from its targets, without the shard: space, targets, and the creation of backing
//! files.

use forebay_data::{Media, Medium, NodeTargets, Target};
use forebay_types::{
    Answer, Attr, Code, Kind, PoolSpace, Refusal, Reply, Request, TargetSpace, TargetSpaces, Targets,
};

use super::device_nodes;

/// True for a request that [`answer`] answers.
pub(super) fn answers(request: &Request<'_>) -> bool {
    matches!(request, Request::Ping | Request::Space | Request::Targets | Request::Place { .. })
}

/// The answer to such a request. `inodes`: inodes in the shard. In a pool of several nodes the network thread answers
/// `Space` and `Place` instead.
pub(super) fn answer<'o>(
    targets: &NodeTargets,
    inodes: u64,
    request: &Request<'_>,
    payload: &'o mut [u8],
) -> Answer<'o> {
    Ok(match request {
        Request::Ping => Reply::Done,
        Request::Space => Reply::Space(space(targets, inodes)?),
        Request::Targets => {
            let PoolSpace { inodes, free_inodes, .. } = space(targets, inodes)?;
            let spaces = TargetSpaces::encode(&own_targets(targets), payload)?;
            Reply::Targets { inodes, free_inodes, spaces }
        }
        Request::Place { .. } => {
            let own: Vec<u32> = own_targets(targets).iter().map(|s| s.target).collect();
            Reply::Placed(Targets::new(&own).ok_or(Code::NotSupported)?)
        }
        _ => return Err(Refusal::Code(Code::NotSupported)),
    })
}

/// Creates the backing files that are missing, and repairs the mode of a single one.
pub(super) fn make_backing(
    targets: &NodeTargets,
    entry: &forebay_types::Entry,
) -> std::result::Result<(), Code> {
    let attr: &Attr = &entry.attr;
    if attr.kind() != Kind::File {
        return device_nodes::create(targets.first(), attr);
    }
    targets.create_all(attr.ino, &entry.layout)?;
    // A backing file on another node is created there when it is needed.
    match targets.get(entry.layout.components()[0].target(0)) {
        Ok(target) if entry.layout.is_single() => device_nodes::repair_mode(target, attr.ino),
        _ => Ok(()),
    }
}

/// Space of this node's targets. Empty on a node without targets.
pub(super) fn own_targets(targets: &NodeTargets) -> Vec<TargetSpace> {
    let space_of = |target: &Target| {
        // A target whose space is unknown counts as full.
        let space = target.space().unwrap_or_default();
        let (total_bytes, free_bytes) = (space.total_bytes, space.free_bytes);
        let (target, in_memory) = (target.target(), target.medium() == Medium::Dram);
        TargetSpace { target, total_bytes, free_bytes, in_memory }
    };
    targets.for_files().iter().map(space_of).collect()
}

pub(super) fn space(targets: &NodeTargets, inodes: u64) -> std::result::Result<PoolSpace, Code> {
    let medium = targets.space()?;
    // About what an inode with its name takes in the shard.
    const INODE_BYTES: u64 = 512;
    // A node without targets is home to no directory.
    let free_inodes = match targets.for_files() {
        [] => 0,
        _ => targets.first().space()?.free_bytes / INODE_BYTES,
    };
    let (total_bytes, free_bytes) = (medium.total_bytes, medium.free_bytes);
    Ok(PoolSpace { total_bytes, free_bytes, inodes, free_inodes })
}
