//! A case: one or a few promises of docs/semantics.md, quoted, and a function that tries to break them.

use crate::door::{Ability, Door, Errno, Failure, Outcome, Verdict};
use std::fmt::Debug;
use std::panic::Location;

/// One case of the suite.
pub struct Case {
    /// Operation, condition and outcome.
    pub name: &'static str,
    /// The sentences of docs/semantics.md that it proves, word for word.
    pub promises: &'static [&'static str],
    /// The abilities that it needs of the door.
    pub needs: &'static [Ability],
    /// Tries to break the promises, in a directory of its own.
    pub run: fn(&dyn Door) -> Verdict,
}

/// The result of a case.
#[derive(Debug)]
pub enum Result {
    /// The promises held.
    Passed,
    /// The door lacks this ability.
    Skipped(Ability),
    /// A promise was broken.
    Failed(Failure),
}

/// Runs a case through a door. The door enters a new directory named after the case.
pub fn run(case: &Case, door: &mut dyn Door) -> Result {
    if let Some(lacking) = case.needs.iter().find(|need| !door.can(**need)) {
        return Result::Skipped(*lacking);
    }
    // A case may have changed the umask, which would affect the next one.
    door.set_umask(0o022);
    let verdict = match door.enter(case.name) {
        Ok(()) => (case.run)(door),
        Err(errno) => fail(format!("its directory cannot be made and entered: {errno}")),
    };
    match verdict {
        Ok(()) => Result::Passed,
        Err(failure) => Result::Failed(failure),
    }
}

/// Fails with the message `what`.
#[track_caller]
pub(crate) fn fail<T>(what: String) -> std::result::Result<T, Failure> {
    Err(Failure { what, place: Location::caller() })
}

/// Fails unless both are equal.
#[track_caller]
pub(crate) fn equal<T: PartialEq + Debug>(seen: T, expected: T) -> Verdict {
    if seen == expected {
        return Ok(());
    }
    fail(format!("saw {}, expected {}", short(&seen), short(&expected)))
}

/// Fails unless the condition holds.
#[track_caller]
pub(crate) fn holds(condition: bool, what: &str) -> Verdict {
    if condition {
        return Ok(());
    }
    fail(format!("does not hold: {what}"))
}

/// Fails unless the operation failed with this errno.
#[track_caller]
pub(crate) fn refused<T>(outcome: Outcome<T>, errno: i32) -> Verdict {
    match outcome {
        Err(Errno(seen)) if seen == errno => Ok(()),
        Err(seen) => fail(format!("failed with {seen}, expected {}", Errno(errno))),
        Ok(_) => fail(format!("succeeded, expected {}", Errno(errno))),
    }
}

fn short(value: &impl Debug) -> String {
    let mut text = format!("{value:?}");
    if text.len() > 300 {
        let cut = (0..=300).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("...");
    }
    text
}

/// A table row: `case!(function; "sentence", "sentence")` or with `[Need, Need]` behind the function.
macro_rules! case {
    ($run:ident $([$($need:ident),*])?; $($promise:literal),+ $(,)?) => {
        $crate::case::Case {
            name: stringify!($run),
            promises: &[$($promise),+],
            needs: &[$($($crate::door::Ability::$need),*)?],
            run: $run,
        }
    };
}
pub(crate) use case;
