//! Operations on wide directories as a whole. Operations on names need nothing of this module: the daemon redirects
//! each request to the part that has the name.

use forebay_types::{Attr, Code, Ino, Parts, Reply, Request, SetAttr};

use crate::attributes::check_owner;
use crate::pool::Pool;

impl Pool {
    /// True if this node serves a directory and, according to its board, all its entries.
    #[inline]
    pub(crate) fn has_entries_here(&self, dir: Ino) -> bool {
        let is_wide =
            || matches!(self.on_board(|board| board.inode(dir)), Ok(Some(e)) if e.attr.width_log2 != 0);
        self.is_served_here(dir) && !(self.spans_nodes() && is_wide())
    }

    /// True if this node's daemon makes all changes of a directory, because it serves all its entries.
    pub fn hears_of_all_changes_in(&self, dir: Ino) -> bool {
        let is_narrow = || self.get_attr(dir).is_ok_and(|entry| entry.attr.width_log2 == 0);
        self.is_served_here(dir) && (!self.spans_nodes() || is_narrow())
    }

    /// A directory's parent from the programs' view, which is never a part.
    ///
    /// # Errors
    /// [`Code::NotFound`] if a wide directory was removed meanwhile.
    pub fn parent_of(&self, directory: &Attr) -> Result<Ino, Code> {
        match directory.parent {
            part if part.is_part() => Ok(self.get_attr(part)?.attr.parent),
            parent => Ok(parent),
        }
    }

    /// The parts of a directory; `None` if it is not wide.
    pub fn parts_of(&self, dir: Ino) -> Result<Option<Parts>, Code> {
        let told = self.ask_then(&Request::PartsOf { ino: dir }, |reply| match reply {
            Reply::Parts(parts) => Ok(parts),
            _ => Err(Code::Malformed),
        });
        match told {
            Ok(parts) => Ok(Some(parts)),
            Err(Code::NoAttribute) => Ok(None),
            Err(code) => Err(code),
        }
    }

    /// Attributes of a wide directory combined with those of its parts: number of entries, links, and change times. All
    /// parts are queried at the same time.
    ///
    /// # Errors
    /// [`Code::Io`] if a node with a part is down, because its changes are unknown; [`Code::Stale`] if the directory
    /// was removed since its look-up.
    pub(crate) fn with_parts(&self, directory: &Attr) -> Result<Attr, Code> {
        let mut whole = *directory;
        let gone = |code| if code == Code::NotFound { Code::Stale } else { code };
        let Some(parts) = self.parts_of(directory.ino).map_err(gone)? else { return Ok(whole) };
        let mut asks = parts.as_slice().iter().map(|part| ((), Request::GetAttr { ino: *part }));
        let mut all = Ok(());
        self.ask_each(&mut asks, |(), reply| {
            let part = match reply {
                Ok(Reply::Entry(entry)) => entry.attr,
                Ok(_) => return all = all.and(Err(Code::Malformed)),
                Err(code) => return all = all.and(Err(gone(code))),
            };
            whole.size = whole.size.saturating_add(part.size);
            whole.nlink = whole.nlink.saturating_add(part.nlink.saturating_sub(2));
            whole.mtime = whole.mtime.max(part.mtime);
            whole.ctime = whole.ctime.max(part.ctime);
        })?;
        all.map(|()| whole)
    }

    /// Sets the width of directories that are created in `dir` from now on, and in those: 2 to 16 nodes, or all nodes
    /// if the pool has fewer. 0 means narrow.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] if the caller does not own the directory; [`Code::NotDirectory`]; [`Code::Invalid`] for
    /// another width.
    pub fn set_width_of_new(&self, dir: Ino, width: u8) -> Result<(), Code> {
        let attr = self.get_attr(dir)?.attr;
        if !attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        check_owner(attr.uid)?;
        self.set_attr(dir, SetAttr { width_of_new: Some(width), ..SetAttr::default() }).map(drop)
    }

    /// Distributes the entries of an empty directory over `width` nodes, and returns the parts. 0 means all nodes up to
    /// the largest width.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] if the caller does not own the directory: the change cannot be undone;
    /// [`Code::NotDirectory`]; [`Code::NotEmpty`]; [`Code::Exists`] if the directory is wide already;
    /// [`Code::NoDevice`] if the pool does not have that many nodes.
    pub fn set_width(&self, dir: Ino, width: u16) -> Result<Parts, Code> {
        let attr = self.get_attr(dir)?.attr;
        if !attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        check_owner(attr.uid)?;
        self.ask_then(&Request::SetWidth { ino: dir, width }, |reply| match reply {
            Reply::Parts(parts) => Ok(parts),
            _ => Err(Code::Malformed),
        })
    }
}
