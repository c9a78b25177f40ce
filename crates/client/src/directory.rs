//! Reading directories.

use forebay_types::limits::{BOARD_NAME_MAX, READDIR_REPLY_BYTES};
use forebay_types::{Code, Cookie, DirEntry, Ino, Reader, Reply, Request, REPLY_HEADER_BYTES};

use crate::path::PathBuffer;
use crate::pool::Pool;

/// A cursor over a directory's entries, without `.` and `..`. Entries that exist from the first to the last call are
/// returned exactly once, even if other entries are created or removed meanwhile.
#[derive(Debug)]
pub struct Directory {
    ino: Ino,
    cookie: Cookie,
    attributes: bool,
    /// Only the entries that the shard has.
    is_known: bool,
    end: bool,
    at: usize,
    len: usize,
    buffer: [u8; READDIR_REPLY_BYTES],
}

impl Directory {
    /// The directory.
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// The cookie after the last returned entry; 0 at the start.
    pub fn tell(&self) -> Cookie {
        self.cookie
    }

    /// Continues after `cookie`; 0 starts again.
    pub fn seek(&mut self, cookie: Cookie) {
        self.cookie = cookie;
        self.end = false;
        self.at = 0;
        self.len = 0;
    }

    /// The next entry, or none at the end.
    pub fn next(&mut self, pool: &Pool) -> Result<Option<DirEntry<'_>>, Code> {
        if self.at >= self.len {
            if self.end {
                return Ok(None);
            }
            self.fill(pool)?;
            if self.at >= self.len {
                return Ok(None);
            }
        }
        let mut r = Reader::new(&self.buffer[self.at..self.len]);
        let before = r.rest().len();
        let entry = DirEntry::decode(&mut r)?;
        self.at += before - r.rest().len();
        self.cookie = entry.cookie;
        Ok(Some(entry))
    }

    fn fill(&mut self, pool: &Pool) -> Result<(), Code> {
        let Directory { ino, cookie, attributes, .. } = *self;
        let request = match self.is_known {
            true => Request::ReadKnown { ino, cookie },
            false => Request::ReadDirectory { ino, cookie, attributes },
        };
        let n = pool.call(&request, &mut self.buffer)?;
        match Reply::decode(&self.buffer[..n])? {
            Reply::Entries(entries) => self.end = entries.end || entries.bytes.is_empty(),
            _ => return Err(Code::Malformed),
        }
        self.at = REPLY_HEADER_BYTES;
        self.len = n;
        Ok(())
    }
}

impl Pool {
    /// A cursor over `dir`, without attributes.
    pub fn read_directory(&self, dir: Ino) -> Directory {
        self.read_directory_with(dir, false)
    }

    /// A cursor over `dir`. With `attributes` its entries carry attributes, in which a file's size is only a hint.
    pub fn read_directory_with(&self, dir: Ino, attributes: bool) -> Directory {
        Directory {
            ino: dir,
            cookie: 0,
            attributes,
            is_known: false,
            end: false,
            at: 0,
            len: 0,
            buffer: [0; READDIR_REPLY_BYTES],
        }
    }

    /// A cursor over the entries of `dir` that the pool has, although its backing store may have more.
    pub fn read_known(&self, dir: Ino) -> Directory {
        Directory { is_known: true, ..self.read_directory(dir) }
    }

    /// A path of an inode from the pool's root: `/`, or `/a/b`. For a directory it is its path. For any other inode it
    /// is any one of its names on the board, and the search takes time that grows with the size of the board.
    ///
    /// # Errors
    /// [`Code::NotFound`] if the inode was removed, or if the board has none of its names.
    pub fn path_of(&self, ino: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        if self.get_attr(ino)?.attr.is_directory() {
            return self.path_of_directory(ino, path);
        }
        let mut name = [0; BOARD_NAME_MAX];
        let (parent, len) = self.on_board(|board| board.name_of(ino, &mut name))?.ok_or(Code::NotFound)?;
        self.path_of_directory(parent, path)?;
        if path.as_bytes() != b"/" {
            path.push(b"/")?;
        }
        path.push(&name[..len])
    }
}
