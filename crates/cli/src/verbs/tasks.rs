//! `forebay sync`, `prestage`, `release`, `purge` and `refresh`, and `forebay tasks`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_sys::signals::Signals;
use forebay_tasks::{MoverClient, Task, TaskState, Verb};
use forebay_types::{Code, Error, Result};
use serde_json::json;

use super::ls::failed_path;
use crate::arguments::{Tasks, TasksVerb, Work};
use crate::backing::{self, Waited};
use crate::staging::Style;
use crate::table::{self, Facts};
use crate::tally::Tally;
use crate::{failure, pool};

/// Errors of a task that are printed.
const ERRORS_SHOWN: usize = 10;

fn signals() -> Result<Signals> {
    Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))
}

fn style(arguments: &Work) -> Style {
    Style::of_stderr(!arguments.no_progress && !arguments.json)
}

/// Has the mover do something to paths.
pub(super) fn work(named: Option<PathBuf>, verb: Verb, arguments: &Work) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let signals = signals()?;
    let tally = arguments.tally.clone().map(Tally::new);
    let mut all = Vec::new();
    let mut failed = false;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        let done = backing::look(pool, &path, verb.name()).and_then(|entry| {
            if entry.attr.flags & forebay_types::FLAG_ATTACHED == 0 {
                return Err(backing::failed(Code::NoAttribute, verb.name(), &path));
            }
            let (ino, shown) = (entry.attr.ino.0, table::printable(&path));
            let task = MoverClient::connect(&dir)?.start(verb, ino, &shown, arguments.recursive)?;
            match arguments.no_wait {
                true => Ok(task),
                false => until_over(&dir, task.id, style(arguments), &signals, tally.as_ref()),
            }
        });
        match done {
            Ok(task) => {
                failed |= matches!(task.state, TaskState::Failed | TaskState::Cancelled);
                if arguments.json {
                    all.push(json!(task));
                } else {
                    print_result(&task);
                }
            }
            Err(e) => {
                failure::say(&e);
                all.push(failed_path(&path, &e));
                failed = true;
            }
        }
    }
    if arguments.json {
        failure::print_json(&json!(all));
    }
    Ok(if failed { ExitCode::from(failure::FAILED) } else { ExitCode::SUCCESS })
}

/// Waits for a task. A signal ends this process, and the task goes on.
fn until_over(dir: &Path, id: u64, style: Style, signals: &Signals, tally: Option<&Tally>) -> Result<Task> {
    match backing::wait(dir, id, style, signals, None, tally)? {
        Waited::Over(task) | Waited::TimedOut(task) => Ok(task),
        Waited::Interrupted(signal) => {
            note!("forebay: task {id} goes on: `forebay tasks wait {id}` waits for it, `forebay tasks cancel {id}` ends it");
            crate::death::die_of(signal);
        }
    }
}

/// What came of a task, and what failed.
fn print_result(task: &Task) {
    failure::put(line(task) + "\n");
    say_errors(task);
}

fn say_errors(task: &Task) {
    for error in task.errors.iter().take(ERRORS_SHOWN) {
        let (path, e) = (table::printable(error.path.as_bytes()), Error::from(error.error.clone()));
        // A store's own words name a temporary file.
        match e.what.contains(error.path.as_str()) {
            true => note!("forebay: {e}"),
            false => note!("forebay: {path}: {e}"),
        }
    }
    let shown = task.errors.len().min(ERRORS_SHOWN) as u64;
    if task.error_count > shown {
        note!("forebay: and {} more", task.error_count - shown);
    }
}

fn line(task: &Task) -> String {
    let state = match task.state {
        TaskState::Queued => format!("task {} is to do it", task.id),
        TaskState::Running => format!("task {} does it", task.id),
        state => state.name().to_owned(),
    };
    let mut line = format!("{} of {}: {state}", task.verb, task.path);
    if task.files_total > 0 {
        line.push_str(&format!(
            ", {} ({})",
            table::count(task.files_done, "file"),
            table::bytes(task.bytes_done)
        ));
    }
    if task.error_count > 0 {
        line.push_str(&format!(", {} failed", table::count(task.error_count, "path")));
    }
    line
}

/// `forebay tasks`.
pub(super) fn tasks(named: Option<PathBuf>, arguments: &Tasks) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    forebay_server::control::ensure_up(&dir)?;
    let mut mover = MoverClient::connect(&dir)?;
    match arguments.verb.as_ref().unwrap_or(&TasksVerb::List) {
        TasksVerb::List => {
            let tasks = mover.list()?;
            match arguments.json {
                true => failure::print_json(&json!(tasks)),
                false => failure::put(list(&tasks)),
            }
            Ok(ExitCode::SUCCESS)
        }
        TasksVerb::Show { id } => {
            let task = mover.show(*id)?;
            match arguments.json {
                true => failure::print_json(&json!(task)),
                false => {
                    failure::put(facts(&task).text());
                    say_errors(&task);
                }
            }
            Ok(ExitCode::SUCCESS)
        }
        TasksVerb::Wait { id, no_progress } => {
            let style = Style::of_stderr(!no_progress && !arguments.json);
            let task = until_over(&dir, *id, style, &signals()?, None)?;
            Ok(ended(&task, arguments.json))
        }
        TasksVerb::Cancel { id } => {
            let task = mover.cancel(*id)?;
            match arguments.json {
                true => failure::print_json(&json!(task)),
                false => failure::put(line(&task) + "\n"),
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn ended(task: &Task, as_json: bool) -> ExitCode {
    match as_json {
        true => failure::print_json(&json!(task)),
        false => print_result(task),
    }
    match task.state {
        TaskState::Done => ExitCode::SUCCESS,
        _ => ExitCode::from(failure::FAILED),
    }
}

/// A table of tasks.
fn list(tasks: &[Task]) -> String {
    if tasks.is_empty() {
        return "no tasks\n".to_owned();
    }
    let mut text =
        format!("{:>5}  {:8}  {:9}  {:>12}  {:>10}  PATH\n", "ID", "VERB", "STATE", "FILES", "BYTES");
    for task in tasks {
        let files = format!("{}/{}", task.files_done, task.files_total);
        let (verb, state, bytes) = (task.verb.name(), task.state.name(), table::bytes(task.bytes_done));
        let tree = if task.recursive { " (and below)" } else { "" };
        text.push_str(&format!(
            "{:>5}  {verb:8}  {state:9}  {files:>12}  {bytes:>10}  {}{tree}\n",
            task.id, task.path
        ));
    }
    text
}

fn facts(task: &Task) -> Facts {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let ago = |at: u64| format!("{} ago", table::duration(now.saturating_sub(at) as f64));
    let mut facts = Facts::default();
    facts.add("task", task.id.to_string());
    let tree = if task.recursive { ", and everything below" } else { "" };
    facts.add("verb", format!("{} of {}{tree}", task.verb, task.path));
    facts.add("state", task.state.name());
    facts.add("files", format!("{} of {}", task.files_done, task.files_total));
    facts.add("bytes", format!("{} of {}", table::bytes(task.bytes_done), table::bytes(task.bytes_total)));
    facts.add("created", ago(task.created_s));
    if let Some(ended) = task.ended_s {
        facts.add("over", ago(ended));
    }
    if task.starts > 1 {
        facts.add("starts", format!("{}: the mover was replaced meanwhile", task.starts));
    }
    if task.error_count > 0 {
        facts.add("failed", table::count(task.error_count, "path"));
    }
    facts
}
