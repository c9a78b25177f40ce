//! Wide directories, of which programs notice little: the daemon leads each request to the part that has the name. What
//! is done here is what concerns the directory as a whole.

use forebay_types::{Attr, Code, Ino, Parts, Reply, Request, SetAttr};

use crate::attributes::check_owner;
use crate::pool::Pool;

impl Pool {
    /// True when this node serves a directory and, as far as its board tells, all its entries.
    #[inline]
    pub(crate) fn has_entries_here(&self, dir: Ino) -> bool {
        let is_wide =
            || matches!(self.on_board(|board| board.inode(dir)), Ok(Some(e)) if e.attr.width_log2 != 0);
        self.is_served_here(dir) && !(self.spans_nodes() && is_wide())
    }

    /// True when nothing of a directory changes without this node's daemon: it serves all its entries.
    pub fn hears_of_all_changes_in(&self, dir: Ino) -> bool {
        let is_narrow = || self.get_attr(dir).is_ok_and(|entry| entry.attr.width_log2 == 0);
        self.is_served_here(dir) && (!self.spans_nodes() || is_narrow())
    }

    /// A directory's parent as programs know it.
    ///
    /// # Errors
    /// [`Code::NotFound`] when a wide directory was removed meanwhile.
    pub fn parent_of(&self, directory: &Attr) -> Result<Ino, Code> {
        match directory.parent {
            part if part.is_part() => Ok(self.get_attr(part)?.attr.parent),
            parent => Ok(parent),
        }
    }

    /// The parts of a directory; none of one that is not wide.
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

    /// Attributes of a wide directory with what its parts add, which are asked at the same time: entries, directories,
    /// and times of changes of these.
    ///
    /// # Errors
    /// [`Code::Io`] when a node is down that has a part: what changed there is not known. [`Code::Stale`] when it was removed
    /// since it was looked at.
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

    /// Has the entries of directories that are made in `dir` from now on, and in these, cut over so many nodes, 2 to
    /// 16, or as many as the pool has; 0: they are narrow.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] for another's than the caller's own; [`Code::NotDirectory`]; [`Code::Invalid`] for another width.
    pub fn set_width_of_new(&self, dir: Ino, width: u8) -> Result<(), Code> {
        let attr = self.get_attr(dir)?.attr;
        if !attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        check_owner(attr.uid)?;
        self.set_attr(dir, SetAttr { width_of_new: Some(width), ..SetAttr::default() }).map(drop)
    }

    /// Cuts the entries of an empty directory over `width` nodes, 0 being all up to the most that there can be; the
    /// parts.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] for another's than the caller's own, as it cannot be undone; [`Code::NotDirectory`]; [`Code::NotEmpty`];
    /// [`Code::Exists`] for one that is wide already; [`Code::NoDevice`] when the pool has not so many nodes.
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
