//! What the keeper's program reports to the command that started it, and the start.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_types::{Code, Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The result of a start, or of a part of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report<T> {
    /// It succeeded.
    Up(Box<T>),
    /// It failed.
    Failed {
        /// The code of the error.
        code: u16,
        /// What was tried.
        what: String,
        /// Why it failed.
        why: String,
        /// What can be done.
        cure: String,
    },
}

impl<T> Report<T> {
    /// The report of a result.
    pub fn of(result: Result<T>) -> Report<T> {
        match result {
            Ok(up) => Report::Up(Box::new(up)),
            Err(e) => Report::Failed { code: e.code as u16, what: e.what, why: e.why, cure: e.cure },
        }
    }

    /// What was reported.
    pub fn into_result(self) -> Result<T> {
        match self {
            Report::Up(up) => Ok(*up),
            Report::Failed { code, what, why, cure } => {
                Err(Error::new(Code::from_u16(code), what).why(why).cure(cure))
            }
        }
    }
}

/// Starts the program `name`, which is beside this one, with one argument, in a session of its own, and waits for its
/// report. `errors` gets its standard error. `what` is what is tried, for messages, `log` what is known of a program that
/// ended without a report.
///
/// # Errors
/// What the program reports; [`Code::Io`] if it ends without a report.
pub fn start<T: DeserializeOwned>(
    what: &str,
    name: &str,
    argument: &str,
    errors: File,
    log: impl FnOnce() -> String,
) -> Result<T> {
    let io = |e: std::io::Error| Error::io(what, &e);
    let program = std::env::current_exe().map_err(io)?.with_file_name(name);
    let mut command = Command::new(&program);
    command.arg(argument).current_dir(Path::new("/"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
    // SAFETY: between fork and exec only a system call that is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            Ok(())
        });
    }
    let started = command.spawn();
    let mut child = started.map_err(|e| io(e).cure(format!("is {} installed?", program.display())))?;
    let mut report = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut report).map_err(io)?;
    }
    match serde_json::from_str::<Report<T>>(report.trim()) {
        Ok(report) => report.into_result(),
        Err(_) => Err(Error::new(Code::Io, what).why(format!("its process ended: {}", log().trim()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_a_failure_keeps_code_and_words() {
        let failure = Error::new(Code::Busy, "what").why("why").cure("cure");
        let text = serde_json::to_string(&Report::<u8>::of(Err(failure))).unwrap();
        let read = serde_json::from_str::<Report<u8>>(&text).unwrap().into_result().unwrap_err();
        assert_eq!((read.code, &*read.what, &*read.why, &*read.cure), (Code::Busy, "what", "why", "cure"));
        let text = serde_json::to_string(&Report::of(Ok(7u8))).unwrap();
        assert_eq!(serde_json::from_str::<Report<u8>>(&text).unwrap().into_result().unwrap(), 7);
    }
}
