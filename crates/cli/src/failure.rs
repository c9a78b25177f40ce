//! How a failure reaches the user: on stderr in words, with `--json` on stdout too.

use std::io::Write;
use std::process::ExitCode;

use forebay_types::{Code, Error};
use serde_json::{json, Value};

/// Exit status of a verb that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit status of `run` when Forebay failed, not the program; the statuses for a program that cannot be started or is
/// not found are in `run::program`.
pub(crate) const FOREBAY_FAILED: u8 = 125;
/// Exit status of a command line that makes no sense.
pub(crate) const USAGE: u8 = 2;

/// Prints the error and gives the status: `code`, or [`USAGE`] when the command line is what is wrong.
pub(crate) fn report(e: &Error, json: bool, code: u8) -> ExitCode {
    say(e);
    if json {
        print_json(&json!({ "error": value(e) }));
    }
    ExitCode::from(code)
}

/// Prints the error on stderr.
pub(crate) fn say(e: &Error) {
    note!("forebay: {e}");
}

/// The error as JSON.
pub(crate) fn value(e: &Error) -> Value {
    json!({ "code": e.code.name(), "what": e.what, "why": e.why, "cure": e.cure })
}

/// Exit status of a program that SIGPIPE ends, as a shell has it.
const READER_GONE: i32 = 128 + libc::SIGPIPE;

/// Prints on stdout. A reader that has gone (`| head`) ends this program quietly; a full disk is said.
pub(crate) fn put(text: impl AsRef<[u8]>) {
    let mut out = std::io::stdout().lock();
    let Err(e) = out.write_all(text.as_ref()).and_then(|()| out.flush()) else { return };
    if e.kind() == std::io::ErrorKind::BrokenPipe {
        std::process::exit(READER_GONE);
    }
    say(&Error::io("cannot print", &e));
    std::process::exit(i32::from(FAILED));
}

/// Prints a value on stdout, with a newline behind.
pub(crate) fn print_json(value: &Value) {
    let text = serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string());
    put(text + "\n");
}

/// An error about what the user wrote.
pub(crate) fn invalid(
    what: impl Into<String>,
    why: impl std::fmt::Display,
    cure: impl Into<String>,
) -> Error {
    Error::new(Code::Invalid, what).why(why).cure(cure)
}
