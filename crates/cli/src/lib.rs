//! The `forebay` command: starts and stops pools, inspects them, stages in and out, and runs programs over them.
//!
//! Each verb has a file in `verbs`; `arguments` is the whole command line. `run` has the parts of `forebay run` beyond
//! the verb. Every failure is one [`forebay_types::Error`], which `failure` prints with what the user can do about it;
//! with `--json` it is JSON on stdout too. Exit status: 0 success, 1 failure, 2 invalid command line; `fsck` gives 4
//! when it found problems; `run` gives the program's status, or 125, 126, 127 as env(1). If a signal ended the program
//! of `run`, the same signal ends this process.

#[macro_use]
mod note;

mod arguments;
mod backing;
mod batch;
mod death;
mod everywhere;
mod failure;
mod hosts;
mod pool;
mod recovery;
mod rendezvous;
mod resources;
mod run;
mod staging;
mod table;
mod tally;
mod unseen;
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
