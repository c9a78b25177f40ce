//! The workload of the crash tests: `forebay-churn run DIR SEED JOURNAL STEPS`, `forebay-churn check DIR JOURNAL`,
//! `forebay-churn remove DIR`. It accesses DIR through the C library; `run` creates it.

use forebay_conformance::churn;
use forebay_conformance::door::Door;
use forebay_conformance::libc_door::{LibcDoor, Spelling};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match act(&words) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("forebay-churn: {message}");
            ExitCode::FAILURE
        }
    }
}

fn act(words: &[&str]) -> Result<String, String> {
    match *words {
        ["run", directory, seed, journal, steps] => {
            let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text} is no number"));
            let path = Path::new(directory);
            let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
            let mut door = LibcDoor::new(parent, Spelling::Absolute, &[]);
            door.enter(&name.to_string_lossy()).map_err(|errno| format!("{directory}: {errno}"))?;
            churn::run(&door, number(seed)?, Path::new(journal), number(steps)?)?;
            Ok(String::new())
        }
        ["check", directory, journal] => {
            let done = churn::check(
                &LibcDoor::new(Path::new(directory), Spelling::Absolute, &[]),
                Path::new(journal),
            )?;
            Ok(done.to_string())
        }
        ["remove", directory] => {
            churn::clear(&LibcDoor::new(Path::new(directory), Spelling::Absolute, &[]))
                .map_err(|errno| format!("{directory}: {errno}"))?;
            std::fs::remove_dir(directory).map_err(|e| format!("{directory}: {e}"))?;
            Ok(String::new())
        }
        _ => Err("run DIR SEED JOURNAL STEPS, check DIR JOURNAL or remove DIR".into()),
    }
}
