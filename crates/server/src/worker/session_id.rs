//! Numbers of sessions, and the tags of their descriptors in the supervisor's store.

use forebay_types::NodeId;

use crate::store::PROGRAM_TAG;

/// Bits of a session's number below its node's.
const SESSION_BITS: u32 = 48;

/// The session with this number on a node.
pub(super) fn session_on(node: NodeId, number: u64) -> u64 {
    u64::from(node.0) << SESSION_BITS | number & ((1 << SESSION_BITS) - 1)
}

/// The node that a session's process is on.
pub(super) fn node_of_session(session: u64) -> NodeId {
    NodeId((session >> SESSION_BITS) as u16)
}

/// The bit of sessions that daemons use at other nodes for cross-node transactions.
const DAEMON: u64 = 1 << (SESSION_BITS - 1);

/// A random number.
pub(super) fn random_number() -> forebay_types::Result<u64> {
    let bytes = crate::identity::random_bytes()?;
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    Ok(u64::from_le_bytes(number))
}

/// A session with a random number, which no other session of any pool on this node has had. The number is never 0,
/// which stands for the daemon.
pub(super) fn new_session_id(node: NodeId) -> forebay_types::Result<u64> {
    Ok(session_on(node, (random_number()? & (DAEMON - 1)).max(1)))
}

/// A worker's own session at other nodes. They end the session of the worker before it when they learn of the new one.
pub(super) fn new_daemon_session(node: NodeId) -> forebay_types::Result<u64> {
    Ok(daemon_session(node, random_number()?))
}

/// The session of a worker with this number.
pub(super) fn daemon_session(node: NodeId, number: u64) -> u64 {
    session_on(node, number & (DAEMON - 1) | DAEMON)
}

/// True for a worker's session at other nodes.
pub(super) fn is_of_daemon(session: u64) -> bool {
    session & DAEMON != 0
}

/// True for a session of a process.
pub(super) fn is_of_process(session: u64) -> bool {
    !is_of_daemon(session) && session & (DAEMON - 1) != 0
}

/// What begins the tags of sessions of tools and mounts.
const OTHER_TAG: &str = "session ";

/// Tag of a session's ring and pidfd in the descriptor store. The supervisor counts those of programs.
pub(super) fn store_tag(id: u64, is_program: bool) -> String {
    let start = if is_program { PROGRAM_TAG } else { OTHER_TAG };
    format!("{start}{id:016x}")
}

/// Tag of the device of the mount that a session serves, in the descriptor store.
pub(super) fn mount_tag(id: u64) -> String {
    format!("mount {id:016x}")
}

/// The session of a mount's tag.
pub(super) fn session_of_mount_tag(tag: &str) -> Option<u64> {
    u64::from_str_radix(tag.strip_prefix("mount ")?, 16).ok()
}

/// The session that a tag names, and whether it belongs to a program. `None` for other tags.
pub(super) fn session_of_tag(tag: &str) -> Option<(u64, bool)> {
    let (number, is_program) = match tag.strip_prefix(PROGRAM_TAG) {
        Some(number) => (number, true),
        None => (tag.strip_prefix(OTHER_TAG)?, false),
    };
    Some((u64::from_str_radix(number, 16).ok()?, is_program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_tag_round_trips() {
        for id in [1, u64::MAX, 0xabc] {
            for is_program in [true, false] {
                assert_eq!(session_of_tag(&store_tag(id, is_program)), Some((id, is_program)));
            }
        }
        assert_eq!(session_of_tag("something else"), None);
    }
}
