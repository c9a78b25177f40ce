//! What the verbs for backing stores share: attaching and detaching, what is pending, draining with progress.

mod attaching;
mod detaching;
mod draining;
mod holding;
mod pending;
mod progress;
mod trees;
mod url;

pub(crate) use attaching::{attach, recall_in_words, Attached};
pub(crate) use detaching::detach;
pub(crate) use draining::{drain_until_stopped, would_lose, Drained};
pub(crate) use holding::hold_back;
pub(crate) use pending::{all, nodes, nodes_of, Lacking};
pub(crate) use progress::{wait, Waited};
pub(crate) use trees::{place_of, settings_of, store_of, Trees};
pub(crate) use url::Url;

use forebay_client::{PathBuffer, Pool};
use forebay_types::{Entry, Error, Result};

use crate::{pool, table};

/// The inode that a path leads to.
pub(crate) fn look(pool: &Pool, path: &[u8], verb: &str) -> Result<Entry> {
    let found = pool.resolve(pool::place(path), true, &mut PathBuffer::new());
    pool::worded(found, verb, path)
}

/// Adds words to the failure of a request: `verb` is what was tried on `path`.
pub(crate) fn failed(code: forebay_types::Code, verb: &str, path: &[u8]) -> Error {
    use forebay_types::Code;
    let error = Error::new(code, format!("cannot {verb} {} in the pool", table::printable(path)));
    match code {
        Code::NoAttribute => error
            .why("it belongs to no backing store")
            .cure("`forebay attach URL DIR` puts a directory in front of one"),
        code => error.why(pool::words(code)),
    }
}

/// The path of an inode, for people.
pub(crate) fn path_of(pool: &Pool, ino: forebay_types::Ino) -> String {
    let mut path = PathBuffer::new();
    match pool.path_of(ino, &mut path) {
        Ok(()) => table::printable(path.as_bytes()),
        Err(_) => format!("inode {ino}"),
    }
}
