//! Checks of layouts: that a file's targets exist, and that a file's layout may change now. It may change if the client
//! that sends the request has copied the data, and no program can have changed them since.
//!
//! That client may have died or lost its leases before its request is served. So the daemon checks two things. An open
//! of the first backing file without waiting shows whether a write lease is held on it. The copy must have its final
//! name: a client removes a leftover copy of that name before it takes leases, so whoever holds a lease while the name
//! exists has copied all data (`crates/client/src/migrate.rs`).

use forebay_data::{BackingName, Media, NodeTargets, Target};
use forebay_meta::{Batch, Effects};
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{node_of, Caller, Code, Ino, Kind, Layout, Reply, Request};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::network::Network;

/// Checks that the targets in a request exist, as far as this node knows. It knows its own targets. Of another node it
/// knows only whether it has any: the node may have got one more since this node read the pool file.
///
/// # Errors
/// [`Code::NoDevice`] for a node that the pool does not have, or no longer has, or that this node has had no contact
/// with yet; for a target that this node does not have; for a target of a node without any; and for a number beyond the
/// last possible target.
pub(super) fn check_targets(
    own: &NodeTargets,
    network: Option<&Network>,
    request: &Request<'_>,
) -> std::result::Result<(), Code> {
    let (Request::SetLayout { layout, .. }
    | Request::Create { layout: Some(layout), .. }
    | Request::Restored { layout, .. }) = request
    else {
        return Ok(());
    };
    let check = |target: u32| {
        if node_of(target) == node_of(own.first().target()) {
            return own.get(target).map(drop);
        }
        let homes = network.is_some_and(|network| network.has_targets(node_of(target)));
        (homes && usize::from(target as u16) < NODE_TARGETS_MAX).then_some(()).ok_or(Code::NoDevice)
    };
    match layout.wish() {
        Some(target) => check(target),
        None if !layout.is_placed() => Ok(()),
        None => layout.components().iter().try_for_each(|component| {
            (0..component.target_count.into()).try_for_each(|stripe| check(component.target(stripe)))
        }),
    }
}

/// Checks that the layout of `ino` may change now to `wanted`. Refusals that the shard itself can give are left to it.
/// `alone`: the pool has no other nodes.
///
/// # Errors
/// [`Code::Stale`] when the client holds no lease, or no longer does; [`Code::NotSupported`] for a file in a pool of
/// several nodes, because leases exclude only programs of this node.
pub(super) fn check_change(
    targets: &NodeTargets,
    batch: &mut Batch<'_>,
    ino: Ino,
    wanted: &Layout,
    alone: bool,
) -> std::result::Result<(), Code> {
    let (request, caller) = (Request::GetAttr { ino }, Caller { uid: 0, gid: 0 });
    let answer = batch.apply(caller, &request, super::now(), &mut Effects::new(), &mut []);
    let Ok(Reply::Entry(entry)) = answer else { return Ok(()) };
    if entry.attr.kind() != Kind::File {
        return Ok(());
    }
    if !alone {
        return Err(Code::NotSupported);
    }
    if entry.layout.is_single() || !wanted.is_single() {
        return Err(Code::Stale);
    }
    let on = |layout: &Layout| targets.get(layout.components()[0].target(0));
    let first = BackingName::new(ino, entry.layout.file_number(0), 0);
    if is_held(on(&entry.layout)?, &first) && !matches!(on(wanted)?.stat(ino, 0, 0), Err(Code::NotFound)) {
        Ok(())
    } else {
        Err(Code::Stale)
    }
}

/// True if a client holds a write lease on a backing file.
pub(super) fn is_held(target: &Target, name: &BackingName) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(target.directory(), name.as_c_str(), flags, Mode::empty());
    matches!(opened, Err(Errno::WOULDBLOCK))
}
