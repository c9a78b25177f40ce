//! Faults that a test asks a real worker for, in debug builds alone: a round that fails, and a panic, in the thread and
//! at the moment that it says.
//!
//! `FOREBAY_FAULT` in the daemon's environment names a file. Once there are three words in it, a moment, a thread's
//! name, and `fail` or `panic`, the thread that comes to the moment takes the file away and does so. Should this worker
//! go on serving after a round that failed, it leaves a file beside it, whose name ends with `.after`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error};

use super::moments::{Moment, Watcher};

/// The file's name.
const VARIABLE: &str = "FOREBAY_FAULT";

/// What watches for the fault; none where nobody asks for one.
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

/// True for a panic, false for a failure, if it is this thread's turn.
fn taken(path: &Path, moment: Moment) -> Option<bool> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut words = text.split_whitespace();
    let is_here = words.next()? == format!("{moment:?}") && words.next() == std::thread::current().name();
    let panics = words.next()? == "panic";
    (is_here && std::fs::remove_file(path).is_ok()).then_some(panics)
}
