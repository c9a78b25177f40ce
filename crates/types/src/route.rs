//! Which node serves a request. The node that created an inode serves the inode, and a directory's entries. So the
//! inode number in a request is enough to route it, without a table of directories.

use crate::error::Code;
use crate::id::{Ino, NodeId};
use crate::request::Request;
use crate::wide::Parts;

impl<'a> Request<'a> {
    /// Redirects the request to the parts of wide directories that have its names, if `parts_of` knows the directories
    /// as wide. None when the request names no such directory. `here` is the node of the requesting client: a new
    /// directory is created there, wherever its name is.
    ///
    /// # Errors
    /// [`Code::Stale`] for a create by a number of `here` in a part on another node.
    pub fn in_parts(
        self,
        here: NodeId,
        parts_of: impl Fn(Ino) -> Option<Parts>,
    ) -> Result<Option<Request<'a>>, Code> {
        let part = |parent: Ino, name: &[u8]| parts_of(parent).map(|parts| parts.of_name(name));
        Ok(match self {
            Request::Lookup { parent, name } => {
                part(parent, name).map(|parent| Request::Lookup { parent, name })
            }
            Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve } => {
                let Some(parent) = part(parent, name) else { return Ok(None) };
                let elsewhere = parent.birth_node() != here;
                if elsewhere && number.is_some() {
                    return Err(Code::Stale);
                }
                let reserve = reserve && !elsewhere;
                Some(Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve })
            }
            Request::MakeNode { parent, name, mode, rdev } => {
                part(parent, name).map(|parent| Request::MakeNode { parent, name, mode, rdev })
            }
            Request::MakeDirectory { parent, name, mode }
            | Request::MakeDirectoryAt { parent, name, mode, .. } => {
                part(parent, name).map(|parent| match parent.birth_node() == here {
                    true => Request::MakeDirectory { parent, name, mode },
                    false => Request::MakeDirectoryAt { node: here, parent, name, mode },
                })
            }
            Request::Symlink { parent, name, target } => {
                part(parent, name).map(|parent| Request::Symlink { parent, name, target })
            }
            Request::Link { ino, parent, name } => {
                part(parent, name).map(|parent| Request::Link { ino, parent, name })
            }
            Request::Unlink { parent, name } => {
                part(parent, name).map(|parent| Request::Unlink { parent, name })
            }
            Request::RemoveDirectory { parent, name } => {
                part(parent, name).map(|parent| Request::RemoveDirectory { parent, name })
            }
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                let (from, to) = (part(parent, name), part(new_parent, new_name));
                (from.is_some() || to.is_some()).then(|| Request::Rename {
                    parent: from.unwrap_or(parent),
                    name,
                    new_parent: to.unwrap_or(new_parent),
                    new_name,
                    flags,
                })
            }
            Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino } => {
                let (from, to) = (part(parent, name), part(new_parent, new_name));
                (from.is_some() || to.is_some()).then(|| Request::MoveDirectory {
                    parent: from.unwrap_or(parent),
                    name,
                    new_parent: to.unwrap_or(new_parent),
                    new_name,
                    flags,
                    ino,
                })
            }
            Request::ReadDirectory { ino, cookie, attributes } => parts_of(ino).map(|parts| {
                let ino = parts.as_slice()[parts.index_of_cookie(cookie)];
                Request::ReadDirectory { ino, cookie, attributes }
            }),
            _ => None,
        })
    }
}
