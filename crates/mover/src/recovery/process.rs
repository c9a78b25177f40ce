//! `forebay-mover --recover`: reads a plan on its standard input, recovers, and writes an event a line. The command
//! `forebay recover` starts it. It ends when its reader is gone.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;

use forebay_sys::process::shed_preload;
use forebay_tasks::recovery::{RecoveryEvent, RecoveryPlan};
use forebay_tasks::Failure;
use forebay_types::{Code, Error, Result};

use super::names::{check_shard, CHECK_SHARD};
use super::run::recover;

const RECOVER: &str = "--recover";

/// True if the first argument of the program says that it is started for a recovery.
pub fn is_meant(first: Option<OsString>) -> bool {
    first.is_some_and(|first| first == RECOVER || first == CHECK_SHARD)
}

/// Runs the program for a recovery.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebay-mover: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    let arguments: Vec<OsString> = arguments.collect();
    if let [first, path] = &arguments[..] {
        if first == CHECK_SHARD {
            return match check_shard(Path::new(path)) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
    }
    forebay_log::to_stderr();
    let out = Mutex::new(std::io::stdout());
    let event = |event: RecoveryEvent| {
        let Ok(mut line) = serde_json::to_vec(&event) else { return };
        line.push(b'\n');
        let mut out = out.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if out.write_all(&line).and_then(|()| out.flush()).is_err() {
            // The command is gone. What is written stays; temporaries are removed by the next recovery.
            std::process::exit(1);
        }
    };
    match read_plan().and_then(|plan| recover(&plan, &event)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            event(RecoveryEvent::Failed(Failure::from(&e)));
            ExitCode::FAILURE
        }
    }
}

fn read_plan() -> Result<RecoveryPlan> {
    let what = "cannot read what to recover";
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text).map_err(|e| Error::io(what, &e))?;
    serde_json::from_slice(&text).map_err(|e| {
        Error::new(Code::Malformed, what).why(e).cure("`forebay recover` starts this program: run that")
    })
}
