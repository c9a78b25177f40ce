//! Waiting until the backing store has a file's data: what fsync and close do where a store is attached with that setting.

use forebay_types::{Attr, Code, Ino, Reply, Request, FLAG_CLOSE_WAITS, FLAG_FSYNC_WAITS};

use crate::pool::Pool;

/// The call that may have to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durable {
    /// fsync, fdatasync, MPI_File_sync.
    Sync,
    /// close of a file that was open for writing.
    Close,
}

impl Durable {
    /// True if the file's store is attached so that this call waits.
    #[inline]
    pub fn waits(self, attr: &Attr) -> bool {
        let flag = match self {
            Durable::Sync => FLAG_FSYNC_WAITS,
            Durable::Close => FLAG_CLOSE_WAITS,
        };
        attr.flags & flag != 0 && attr.is_file()
    }
}

impl Pool {
    /// Waits until the backing store has what a file contains now. A file that is open for writing is copied as it is:
    /// the copy has all that was written before this call. Nothing is to be waited for in a file that no store has.
    ///
    /// # Errors
    /// [`Code::Io`] or [`Code::TimedOut`] if the store does not get it: the mover and the daemon limit the wait while
    /// there is no progress. [`Code::NoSpace`] and [`Code::AccessDenied`] as the store reports them.
    pub fn persist(&self, ino: Ino) -> Result<(), Code> {
        let mut since = 0;
        loop {
            let answer = self.request(&Request::Persist { ino, since }, |reply| match reply {
                Reply::Count(count) => Ok(count),
                _ => Err(Code::Malformed),
            });
            match answer {
                Ok(0) => return Ok(()),
                Ok(again) => since = again,
                // Its last name was removed: the store is not to have it.
                Err(Code::NotFound | Code::Stale) => return Ok(()),
                Err(code) => return Err(code),
            }
        }
    }

    /// [`Pool::persist`] where the file's store is attached so that this call waits. Without a request otherwise.
    pub fn persist_for(&self, ino: Ino, call: Durable) -> Result<(), Code> {
        match self.get_attr(ino) {
            Ok(entry) if call.waits(&entry.attr) => self.persist(ino),
            Ok(_) | Err(Code::NotFound | Code::Stale) => Ok(()),
            Err(code) => Err(code),
        }
    }
}
