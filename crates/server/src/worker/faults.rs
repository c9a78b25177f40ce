//! Faults that a test causes in a real worker, in debug builds only: a failed round or a panic, in a given thread at a
//! given moment.
//!
//! `FOREBAY_FAULT` in the daemon's environment names a file with three words: a moment, a thread's name, and `fail` or
//! `panic`. The thread that reaches the moment removes the file and fails or panics. If this worker serves anything
//! after a failed round, it creates a second file of that name with `.after` appended.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error};

use super::moments::{Moment, Watcher};

/// The environment variable.
const VARIABLE: &str = "FOREBAY_FAULT";

/// The watcher that causes the fault. None without the variable.
pub(super) fn asked_for() -> Option<Watcher> {
    let path = PathBuf::from(std::env::var_os(VARIABLE)?);
    let mut after: OsString = path.clone().into();
    after.push(".after");
    let mut failed = false;
    Some(Box::new(move |moment| {
        if failed {
            let _ = std::fs::write(&after, format!("{moment:?}"));
        }
        match taken(&path, moment) {
            None => Ok(()),
            Some(true) => panic!("a test asked for this"),
            Some(false) => {
                failed = true;
                Err(Error::new(Code::Io, "a test asked for this"))
            }
        }
    }))
}

/// True for a panic, false for a failure. None if this is not the thread and moment.
fn taken(path: &Path, moment: Moment) -> Option<bool> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut words = text.split_whitespace();
    let is_here = words.next()? == format!("{moment:?}") && words.next() == std::thread::current().name();
    let panics = words.next()? == "panic";
    (is_here && std::fs::remove_file(path).is_ok()).then_some(panics)
}
