//! Messages between movers, as JSON. All movers of a pool are of one version.

use forebay_tasks::{Failure, Keep, TaskError, Verb};
use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

/// What another node's mover is to do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(in crate::engine) enum Work {
    /// Upload and publish files.
    Upload {
        /// The directory with the store.
        root: u64,
        /// Whether temporaries of dead movers of that node are to be looked for.
        sweep: bool,
        /// The files, encoded (`drain/wanted.rs`), in hexadecimal.
        files: Vec<String>,
    },
    /// Write the stripes that this node has of a file into an upload, under the leases of a hold.
    Part {
        /// The directory with the store.
        root: u64,
        /// The hold.
        hold: u64,
        /// The path of the upload in the store, in hexadecimal.
        temporary: String,
        /// Bytes of the file.
        bytes: u64,
    },
    /// Restore a file.
    Restore {
        /// The file.
        ino: u64,
        /// Whether programs wait for the whole file, not for ranges of it alone.
        whole: bool,
    },
    /// Release a file.
    Release {
        /// The file.
        ino: u64,
    },
    /// Run a task of a user.
    Task {
        /// What to do.
        verb: Verb,
        /// The file or directory.
        ino: u64,
        /// Whether everything below the directory is meant.
        recursive: bool,
    },
    /// Settle a conflict.
    Resolve {
        /// The directory.
        parent: u64,
        /// The bytes of the name.
        name: Vec<u8>,
        /// Whose version survives.
        keep: Keep,
    },
}

/// How far a job is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(in crate::engine) struct Counted {
    /// Files found, files done, bytes found, bytes done.
    pub(in crate::engine) counts: [u64; 4],
}

/// What a job came to.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(in crate::engine) struct Outcome {
    /// How far it was at its end.
    pub(in crate::engine) counted: Counted,
    /// Of the files of an upload: those that wait for something.
    pub(in crate::engine) later: Vec<usize>,
    /// Those that failed, with the reason.
    pub(in crate::engine) failed: Vec<(usize, Failure)>,
    /// Of the files of an upload: those that were copied while they were open.
    #[serde(default)]
    pub(in crate::engine) snapshots: Vec<usize>,
    /// Why a file was not released.
    pub(in crate::engine) kept: Option<String>,
    /// Paths for which a task failed, the first of them.
    pub(in crate::engine) errors: Vec<TaskError>,
    /// How many there were.
    pub(in crate::engine) error_count: u64,
}

/// Failures of an outcome that keep their reasons, and characters of a reason: so an outcome fits into a message.
const FAILURES_MAX: usize = 8;
const TEXT_CHARS_MAX: usize = 240;

impl Outcome {
    /// The outcome with so few and short reasons that it fits into a message. Files whose reason is left out count as
    /// waiting.
    pub(in crate::engine) fn bounded(mut self) -> Outcome {
        if self.failed.len() > FAILURES_MAX {
            let rest = self.failed.split_off(FAILURES_MAX);
            self.later.extend(rest.into_iter().map(|(file, _)| file));
        }
        self.errors.truncate(FAILURES_MAX);
        let shorten = |text: &mut String| {
            if let Some((end, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
                text.truncate(end);
                text.push_str("...");
            }
        };
        let shorten_all = |failure: &mut Failure| {
            [&mut failure.what, &mut failure.why, &mut failure.cure].into_iter().for_each(shorten);
        };
        self.failed.iter_mut().for_each(|(_, failure)| shorten_all(failure));
        for error in &mut self.errors {
            shorten(&mut error.path);
            shorten_all(&mut error.error);
        }
        self
    }
}

/// A message to a mover.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(in crate::engine) enum Letter {
    /// End the jobs of the mover that was this node's before `owner`. → `Running` until they have ended, then `Done`
    Fence {
        /// The sender's node.
        from: u16,
        /// The sender's number, which no other mover has.
        owner: u64,
    },
    /// Begin a job, unless it was begun. → `Done`; `Running` while jobs of an earlier mover have not ended
    Begin {
        /// The sender's node.
        from: u16,
        /// The sender's number.
        owner: u64,
        /// The job's number.
        job: u64,
        /// What to do.
        work: Work,
    },
    /// How far is it? → `Running`, `Over`, `Unknown`
    Look {
        /// The job.
        job: u64,
    },
    /// Forget a job, and end it if it is not over. → `Done`
    Drop {
        /// The job.
        job: u64,
    },
    /// Hold leases on the backing files that this node has of a file. → `Done`, or `Failed` with the reason
    Hold {
        /// The hold's number.
        hold: u64,
        /// The file.
        ino: u64,
        /// Its epoch.
        epoch: u64,
        /// Exclude readers too.
        write: bool,
    },
    /// Are the leases undisturbed? They are held for some time after each question. → `Done`, `Unknown`
    Check {
        /// The hold.
        hold: u64,
    },
    /// End a hold. → `Done`
    Unhold {
        /// The hold.
        hold: u64,
        /// The file was released: unlink its backing files.
        unlink: bool,
    },
    /// Mark a file's backing files here, or those of a directory's files: a program of this node is about to sync them.
    /// `crates/client/src/marking.rs` sends it too. → `Done`, or `Failed`
    Mark {
        /// The file or directory.
        ino: u64,
    },
    /// A reader waits for a range of a file that this node restores: copy it first, and report it. → `Done`, or `Unknown`
    /// while the file is not being restored
    Range {
        /// The file.
        ino: u64,
        /// The range's number.
        range: u64,
    },
    /// Is this node's space filled? → `Done` if it is, `Unknown`
    IsFull,
}

/// The answer to a [`Letter`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(in crate::engine) enum Answer {
    /// It was done.
    Done,
    /// It is not over.
    Running(Counted),
    /// The job is over.
    Over(Box<Outcome>),
    /// There is no such job or hold, or no longer.
    Unknown,
    /// It failed.
    Failed(Failure),
}

/// Bytes in hexadecimal.
pub(in crate::engine) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// The bytes of [`to_hex`].
pub(in crate::engine) fn from_hex(text: &str) -> Result<Vec<u8>> {
    let bad = || Error::new(Code::Malformed, "cannot read a message of another node's mover");
    let digit = |c: u8| char::from(c).to_digit(16).map(|digit| digit as u8).ok_or_else(bad);
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| match *pair {
            [high, low] => Ok(digit(high)? << 4 | digit(low)?),
            _ => Err(bad()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_outcome_fits_into_a_message_and_loses_no_file() {
        let long = "ä".repeat(5000);
        let e = Error::new(Code::Io, long.clone()).why(&long).cure(long.clone());
        let failure = Failure::from(&e);
        let error = TaskError { path: long, error: failure.clone() };
        let outcome = Outcome {
            failed: (0..128).map(|i| (i, failure.clone())).collect(),
            errors: vec![error; 20],
            error_count: 20,
            ..Outcome::default()
        };
        let bounded = outcome.bounded();
        assert_eq!((bounded.failed.len(), bounded.later.len(), bounded.error_count), (8, 120, 20));
        let text = serde_json::to_vec(&Answer::Over(Box::new(bounded))).unwrap();
        assert!(text.len() < forebay_types::limits::XATTR_VALUE_MAX, "{}", text.len());
    }

    #[test]
    fn hexadecimal_round_trips_and_nonsense_is_refused() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)).unwrap(), bytes);
        for text in ["a", "0g", "ä"] {
            assert!(from_hex(text).is_err(), "{text:?}");
        }
    }
}
