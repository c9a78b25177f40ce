//! How failures are reported: on stderr in words; with `--json` on stdout too.

use std::io::Write;
use std::process::ExitCode;

use forebay_types::{Code, Error};
use serde_json::{json, Value};

/// Exit status of a verb that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit status of `run` when Forebay failed, not the program; the statuses for a program that cannot be started or is
/// not found are in `run::program`.
pub(crate) const FOREBAY_FAILED: u8 = 125;
/// Exit status for an invalid command line.
pub(crate) const USAGE: u8 = 2;

/// Prints the error, with `json` also on stdout, and returns `code` as the exit status.
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

/// Exit status that a shell gives for a program that SIGPIPE ended.
const READER_GONE: i32 = 128 + libc::SIGPIPE;

/// Prints on stdout. If the reader has gone (`| head`), this process exits quietly; another failure, such as a full
/// disk, is reported.
pub(crate) fn put(text: impl AsRef<[u8]>) {
    let mut out = std::io::stdout().lock();
    let Err(e) = out.write_all(text.as_ref()).and_then(|()| out.flush()) else { return };
    if e.kind() == std::io::ErrorKind::BrokenPipe {
        std::process::exit(READER_GONE);
    }
    say(&Error::io("cannot print", &e));
    std::process::exit(i32::from(FAILED));
}

/// Prints a value on stdout, followed by a newline.
pub(crate) fn print_json(value: &Value) {
    let text = serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string());
    put(text + "\n");
}

/// An error in the user's input.
pub(crate) fn invalid(
    what: impl Into<String>,
    why: impl std::fmt::Display,
    cure: impl Into<String>,
) -> Error {
    Error::new(Code::Invalid, what).why(why).cure(cure)
}
