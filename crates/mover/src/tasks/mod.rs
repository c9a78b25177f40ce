//! Tasks: what users have the mover do to files and trees, beside what it does by itself.
//!
//! [`Operations`] is what the engine offers. A task is one call of [`Operations::run`]. Its number and its outcome
//! outlive the command that started it, and the mover: a task that was running when the mover died is started again.
//!
//! Threads: [`RUNNERS`] that run tasks, one that accepts connections, and one for each connection. They share
//! [`table::Table`], whose mutex is held for no call of the engine and for no message.
//!
//! Tests: here, and `tests/tasks.rs` with operations of its own.

mod progress;
mod server;
mod table;

use forebay_tasks::{Keep, Verb};
use forebay_types::{Code, Ino, Result};

use crate::store::{MoverId, Store, StoreError, StorePath, StoreUrl};

pub use progress::Progress;
pub use server::TaskServer;

/// Tasks that run at a time. Each copies files in parallel.
const RUNNERS: usize = 4;

/// What the engine does for tasks. Calls come from several threads at a time.
pub trait Operations: Send + Sync {
    /// Does `verb` to a file, or to what is below a directory: its files alone, or with `recursive` the whole tree.
    ///
    /// A path that fails does not end the task: it is reported by [`Progress::failed`]. An error returned is one that
    /// ends the task, such as a store that cannot be reached. With `recursive`, a directory that belongs to no store
    /// stands for all stores attached below it: the pool's root stands for all. A call that finds [`Progress::is_cancelled`] true returns
    /// soon; what it returns then is not looked at. A task may be run again from its beginning, after a crash.
    fn run(&self, verb: Verb, ino: Ino, recursive: bool, progress: &Progress) -> Result<()>;

    /// Settles the conflict at a place. [`forebay_types::Code::NotFound`] if there is none.
    fn resolve(&self, parent: Ino, name: &[u8], keep: Keep) -> Result<()>;

    /// Opens a store that is not attached yet, and lists its root.
    fn probe(&self, url: &str) -> Result<()> {
        probe(url)
    }
}

/// Opens a store and lists its root, without more than one call to it.
fn probe(url: &str) -> Result<()> {
    let store = StoreUrl::parse(url.as_bytes())?.open(MoverId::own())?;
    // The first object is enough; its error ends the listing.
    let mut found = false;
    let listed = store.list(&StorePath::root(), &mut |_| {
        found = true;
        Err(StoreError::lasting(Code::Interrupted, "enough"))
    });
    match listed {
        Err(_) if found => Ok(()),
        listed => Ok(listed.map(drop)?),
    }
}
