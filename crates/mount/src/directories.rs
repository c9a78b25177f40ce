//! Requests about the contents of directories. A position is an entry's cookie, which changes of the directory do not
//! move, so an open directory has no state here. Positions 1 and 2 are behind `.` and `..`; cookies are greater.

use forebay_types::{Code, Cookie, Ino};

use crate::errno::Errno;
use crate::filesystem::{FileSystem, Outcome};
use crate::nodes::Seen;
use forebay_fuse::protocol::{self, Body, Request};

/// Position behind `.`.
const BEHIND_SELF: u64 = 1;
/// Position behind `..`.
const BEHIND_PARENT: u64 = 2;

impl FileSystem {
    pub(crate) fn opendir(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        // A directory whose names are in its store alone is listed here, not under a look-up.
        if self.is_unlisted(self.ino(rq.node)) {
            self.pool.read_directory(self.ino(rq.node)).next(self.pool)?;
        }
        protocol::put_open_out(out, 0, 0, 0);
        Ok(Outcome::Reply)
    }

    pub(crate) fn readdir(&self, rq: &Request<'_>, out: &mut Body, plus: bool) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (_handle, offset, room) = (f.u64()?, f.u64()?, f.u32()? as usize);
        let ino = self.ino(rq.node);
        let own = match self.pool.get_attr(ino) {
            Ok(entry) => entry.attr,
            // Removed while open: it lists nothing.
            Err(Code::NotFound) => return Ok(Outcome::Reply),
            Err(code) => return Err(code.into()),
        };
        let parent = if own.parent == Ino(0) { ino } else { self.pool.parent_of(&own).unwrap_or(own.parent) };
        for (before, position, name, number) in
            [(0, BEHIND_SELF, b".".as_slice(), ino), (BEHIND_SELF, BEHIND_PARENT, b"..", parent)]
        {
            if offset <= before {
                if out.len() + protocol::dirent_bytes(name.len(), plus) > room {
                    return Ok(Outcome::Reply);
                }
                if plus {
                    // No node, because the kernel already knows these two.
                    out.zeros(protocol::ENTRY_OUT_BYTES);
                }
                protocol::put_dirent(out, number.0, position, libc::DT_DIR, name);
            }
        }
        let from: Cookie = if offset <= BEHIND_PARENT { 0 } else { offset };
        match self.list(ino, from, room, plus, out) {
            Ok(()) | Err(Code::NotFound) => Ok(Outcome::Reply),
            Err(_) if !out.is_empty() => Ok(Outcome::Reply),
            Err(code) => Err(code.into()),
        }
    }

    fn list(&self, ino: Ino, from: Cookie, room: usize, plus: bool, out: &mut Body) -> Result<(), Code> {
        let mut directory = self.pool.read_directory(ino);
        directory.seek(from);
        while let Some(entry) = directory.next(self.pool)? {
            if out.len() + protocol::dirent_bytes(entry.name.len(), plus) > room {
                break;
            }
            if plus {
                match self.pool.stat_inode(entry.ino) {
                    Ok(st) => {
                        self.nodes.add_lookup(entry.ino.0, Seen::of(&st));
                        self.note_place(ino, entry.name, &st);
                        let attr = self.found_validity(&st);
                        protocol::put_entry_out(
                            out,
                            self.node(entry.ino),
                            &st,
                            self.entry_validity(ino),
                            attr,
                        );
                    }
                    // Removed since it was listed: the name alone, as in READDIR.
                    Err(_) => out.zeros(protocol::ENTRY_OUT_BYTES),
                }
            }
            protocol::put_dirent(out, entry.ino.0, entry.cookie, entry.kind.dirent_type(), entry.name);
        }
        Ok(())
    }
}
