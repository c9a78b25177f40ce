//! Whether a file may come to lie so: on nodes and targets that there are. And whether a file's layout may change now:
//! whether who asks has copied its data, and nobody can have changed it since.
//!
//! The client that asks may be dead, or have lost its leases, by the time that its request is served. A write lease on
//! the first backing file shows when it is opened without waiting; it is the lease of somebody whose copy is done if
//! the copy has its name, as that name is removed before any lease is taken (`client/migrate.rs`).

use forebay_data::{BackingName, Media, NodeTargets, Target};
use forebay_meta::{Batch, Effects};
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{node_of, Caller, Code, Ino, Kind, Layout, Reply, Request};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::network::Network;

/// Whether a request names targets for files that there are, as far as this node knows. Its own it does; how many
/// another node has that one alone knows, which may have got one more since this node read the pool file.
///
/// # Errors
/// [`Code::NoDevice`] for a node that the pool has not, or no more, or not met by this node yet; for a target that this node has not; for one of
/// a node without any, and a number that no target has.
pub(super) fn check_targets(
    own: &NodeTargets,
    network: Option<&Network>,
    request: &Request<'_>,
) -> std::result::Result<(), Code> {
    let (Request::SetLayout { layout, .. } | Request::Create { layout: Some(layout), .. }) = request else {
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

/// Whether the layout of `ino` may change now to `wanted`; a reason that the shard has is for it to give. `alone` says
/// that the pool has no other nodes.
///
/// # Errors
/// [`Code::Stale`] when who asks holds no lease, or not any more; [`Code::NotSupported`] for a file in a pool of several
/// nodes: leases keep only this node's programs from the backing files.
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

/// Whether a client holds a backing file under a write lease.
pub(super) fn is_held(target: &Target, name: &BackingName) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(target.directory(), name.as_c_str(), flags, Mode::empty());
    matches!(opened, Err(Errno::WOULDBLOCK))
}
