//! Which node serves a request. An inode is served by the node that it was born on, a directory's entries by the same: so
//! the number that a request names is all that it takes to route it, and no table of directories is needed.

use crate::id::NodeId;
use crate::request::Request;

impl Request<'_> {
    /// The node that serves it; none: whoever is asked.
    pub fn node(&self) -> Option<NodeId> {
        match *self {
            Request::Ping
            | Request::Space
            | Request::Reserve
            | Request::EndSession { .. }
            | Request::Place { .. }
            | Request::Targets
            | Request::AreThere { .. }
            | Request::RenewLease
            | Request::RecallName { .. }
            | Request::RecallDirectory { .. } => None,
            Request::Lookup { parent, .. }
            | Request::Create { parent, .. }
            | Request::MakeNode { parent, .. }
            | Request::MakeDirectory { parent, .. }
            | Request::Symlink { parent, .. }
            | Request::Link { parent, .. }
            | Request::Unlink { parent, .. }
            | Request::RemoveDirectory { parent, .. }
            | Request::Rename { parent, .. }
            | Request::EnterDirectory { parent, .. }
            | Request::LeaveDirectory { parent, .. }
            | Request::NameOf { parent, .. } => Some(parent.birth_node()),
            Request::GetAttr { ino }
            | Request::SetAttr { ino, .. }
            | Request::ReadDirectory { ino, .. }
            | Request::ReadLink { ino }
            | Request::GetXattr { ino, .. }
            | Request::SetXattr { ino, .. }
            | Request::ListXattr { ino }
            | Request::RemoveXattr { ino, .. }
            | Request::MarkDirty { ino }
            | Request::MakeBacking { ino }
            | Request::PathOf { ino }
            | Request::SetLayout { ino, .. }
            | Request::CondemnDirectory { ino }
            | Request::PardonDirectory { ino }
            | Request::FreeDirectory { ino } => Some(ino.birth_node()),
            Request::AllocateDirectory { node, .. } => Some(node),
            Request::Backing(id, _) => Some(id.node()),
        }
    }
}
