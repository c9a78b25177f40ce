//! fsync on a target that outlives the node: before it, the mover marks the backing file with its place in the store
//! (docs/decisions/0043), so that the mark is durable together with the data.
//!
//! A file whose mark has its present attributes needs nothing: one getxattr. On a target in memory there is not
//! even that. No call here allocates, except for the request.

use std::io::Write;

use forebay_data::{marked_attr, MARK_BYTES_MAX, MARK_XATTR};
use forebay_types::{Code, Ino, Reply, Request, FLAG_ATTACHED, FLAG_DIRTY};

use crate::path::PathBuffer;
use crate::pool::Pool;

/// How often a mover that was started again is asked.
const ATTEMPTS: u32 = 4;
/// The mover's answer (`crates/mover/src/engine/peers/letters.rs`).
const DONE: &[u8] = b"\"Done\"";

impl Pool {
    /// True if this node has a target that outlives it, as far as can be known without a system call.
    #[inline]
    pub fn may_outlive_node(&self) -> bool {
        self.attached().is_ok_and(|here| here.targets().any(|(index, _)| !here.is_stable(index)))
    }

    /// Marks a file's backing files, or those of a directory's files, before they are synced. Nothing is to be done for
    /// what is in memory or of no store.
    ///
    /// # Errors
    /// [`Code::Io`] if the mover does not answer, or could not write the mark.
    pub fn mark_to_recover(&self, ino: Ino) -> Result<(), Code> {
        if !self.may_outlive_node() {
            return Ok(());
        }
        let entry = match self.get_attr(ino) {
            Ok(entry) => entry,
            Err(Code::NotFound | Code::Stale) => return Ok(()),
            Err(code) => return Err(code),
        };
        let attr = &entry.attr;
        if attr.flags & FLAG_ATTACHED == 0 {
            return Ok(());
        }
        if attr.is_file() {
            let is_changed = attr.flags & FLAG_DIRTY != 0 && attr.is_resident();
            if !is_changed || self.is_here(&entry.layout) && self.attached()?.is_in_memory(&entry.layout) {
                return Ok(());
            }
            if self.is_one_here(&entry.layout) && self.has_mark(&entry) {
                return Ok(());
            }
        } else if !attr.is_directory() {
            return Ok(());
        }
        self.ask_for_mark(ino)
    }

    /// True if a file's only backing file is marked with the present epoch of its data and with its present attributes.
    fn has_mark(&self, entry: &forebay_types::Entry) -> bool {
        let mut path = PathBuffer::new();
        if self.path_of_backing(entry, &mut path).is_err() {
            return false;
        }
        let (mut name, mut value) = ([0u8; MARK_XATTR.len() + 1], [0u8; MARK_BYTES_MAX]);
        name[..MARK_XATTR.len()].copy_from_slice(MARK_XATTR.as_bytes());
        // SAFETY: both strings end with a NUL, and the buffer has the given length.
        let n = unsafe {
            libc::getxattr(path.as_c_str_ptr(), name.as_ptr().cast(), value.as_mut_ptr().cast(), value.len())
        };
        let found = usize::try_from(n).ok().and_then(|n| marked_attr(value.get(..n)?));
        let attr = &entry.attr;
        found.is_some_and(|marked| (marked.epoch(), marked.ctime) == (attr.epoch(), attr.ctime))
    }

    fn ask_for_mark(&self, ino: Ino) -> Result<(), Code> {
        let node = self.node()?;
        let mut message = [0u8; 48];
        let room = message.len();
        let mut left = &mut message[..];
        write!(left, "{{\"Mark\":{{\"ino\":{}}}}}", ino.0).map_err(|_| Code::Io)?;
        let length = room - left.len();
        for _ in 0..ATTEMPTS {
            let request = Request::AskMover { node, message: &message[..length] };
            let answer = self.request(&request, |reply| match reply {
                Reply::Bytes(bytes) => Ok(bytes == DONE),
                _ => Err(Code::Malformed),
            });
            match answer {
                Ok(true) => return Ok(()),
                Ok(false) => return Err(Code::Io),
                // It died with the message, and is started again.
                Err(Code::TimedOut | Code::NoResources) => {}
                Err(code) => return Err(code),
            }
        }
        Err(Code::Io)
    }
}
