//! The `forebay` command: pools started and stopped, looked into, staged in and out, and programs run over them.
//!
//! A verb a file in `verbs`; `arguments` is the whole command line. What `forebay run` needs beyond a verb is in `run`.
//! Every failure is one [`forebay_types::Error`], which `failure` prints with what the user can do about it; with
//! `--json` it is JSON on stdout too. Exit status: 0 done, 1 failed, 2 a command line that makes no sense; `fsck` 4
//! when it found problems; `run` that of the program, or 125, 126, 127 as env(1), and it dies of the signal that its
//! program died of.

#[macro_use]
mod note;

mod arguments;
mod everywhere;
mod failure;
mod hosts;
mod pool;
mod rendezvous;
mod run;
mod staging;
mod table;
mod verbs;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::Parser;

use arguments::{Arguments, Verb};

/// Runs the command with this process's arguments.
pub fn main() -> ExitCode {
    run::preload::shed();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(e) => {
            let _ = e.print();
            return match e.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
                _ => ExitCode::from(failure::USAGE),
            };
        }
    };
    let json = arguments.verb.is_json();
    let is_run = matches!(arguments.verb, Verb::Run(_));
    match verbs::dispatch(arguments) {
        Ok(code) => code,
        Err(e) => {
            let code = if is_run { failure::FOREBAY_FAILED } else { failure::FAILED };
            failure::report(&e, json, code)
        }
    }
}
