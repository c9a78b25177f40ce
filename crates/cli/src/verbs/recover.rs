//! `forebay recover`.

use std::process::ExitCode;

use forebay_tasks::recovery::{Fate, RecoveredFile};
use forebay_types::{Code, Error, Result};
use serde_json::{json, Value};

use crate::arguments::Recover;
use crate::backing::Url;
use crate::recovery::{recover as run, Recovered, Wanted};
use crate::staging::Style;
use crate::{failure, table};

/// Exit status when the targets still have data that the stores lack.
const LEFT: u8 = 4;
/// Lines about single files.
const LINES_MAX: usize = 40;

pub(super) fn recover(arguments: &Recover) -> Result<ExitCode> {
    if arguments.unnamed && arguments.to.is_none() {
        return Err(failure::invalid(
            "cannot recover data without names",
            "no store is known for them",
            "name one with --to",
        ));
    }
    let wanted = Wanted {
        directories: arguments.directories.clone(),
        to: arguments.to.as_deref().map(Url::parse).transpose()?.map(|url| url.text),
        list: arguments.list,
        dry_run: arguments.dry_run,
        partial: arguments.partial,
        unnamed: arguments.unnamed,
        replaced: arguments.replaced,
    };
    let mut files = Vec::new();
    let style = Style::of_stderr(!arguments.no_progress && !arguments.list);
    let (recovered, dead) = run(&wanted, style, &mut |file| {
        // All are kept for JSON alone: a pool may have millions.
        if arguments.json || (is_told(&file, arguments.list) && files.len() <= LINES_MAX) {
            files.push(file);
        }
    })?;
    files.sort_by(|a, b| (a.fate, &a.path).cmp(&(b.fate, &b.path)));
    let mut discarded = false;
    if arguments.discard && !recovered.is_open() {
        dead.discard()?;
        discarded = true;
    }
    if arguments.json {
        failure::print_json(&as_json(&recovered, &files, discarded));
    } else {
        print(arguments, &recovered, &files, discarded);
    }
    if arguments.discard && !discarded {
        return Err(Error::new(Code::NotEmpty, "the targets are not removed")
            .why("they have data that the stores lack")
            .cure("recover these too, or remove the directories by hand"));
    }
    match recovered.is_open() && !arguments.list {
        true => Ok(ExitCode::from(LEFT)),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// True for a file that is worth a line.
fn is_told(file: &RecoveredFile, list: bool) -> bool {
    match file.fate {
        Fate::Clean | Fate::Already | Fate::Recovered => false,
        Fate::Dirty => list,
        _ => true,
    }
}

fn as_json(recovered: &Recovered, files: &[RecoveredFile], discarded: bool) -> Value {
    let sums: serde_json::Map<String, Value> = recovered
        .sums
        .iter()
        .map(|(fate, (files, bytes))| (fate.name().to_owned(), json!({ "files": files, "bytes": bytes })))
        .collect();
    json!({
        "sums": sums,
        "complete": !recovered.is_open(),
        "discarded": discarded,
        "notes": recovered.notes,
        "files": files,
    })
}

/// What a fate means, for people. `dry`: nothing was written.
fn meaning(fate: Fate, dry: bool) -> &'static str {
    match (fate, dry) {
        (Fate::Dirty, _) => "to be recovered",
        (Fate::Recovered, false) => "recovered under their own names",
        (Fate::Recovered, true) => "would be recovered under their own names",
        (Fate::Beside, false) => "recovered beside another version",
        (Fate::Beside, true) => "would be recovered beside another version",
        (Fate::Already, _) => "in the store already",
        (Fate::Incomplete, _) => "incomplete: parts are missing",
        (Fate::Unnamed, _) => "without a known name",
        (Fate::NoStore, _) => "of no store: name one with --to",
        (Fate::Temporary, _) => "not for the store, by policy",
        (Fate::Clean, _) => "clean: the store has them",
        (Fate::Failed, _) => "not recovered",
    }
}

fn print(arguments: &Recover, recovered: &Recovered, files: &[RecoveredFile], discarded: bool) {
    for note in &recovered.notes {
        note!("forebay: {note}");
    }
    for file in files.iter().take(LINES_MAX) {
        let path = table::printable(file.path.as_bytes());
        let mut line = format!("{:10}  {path}", file.fate.name());
        if matches!(file.fate, Fate::Beside | Fate::Incomplete | Fate::Dirty) && !file.name.is_empty() {
            line.push_str(&format!(" -> {}", table::printable(file.name.as_bytes())));
        }
        if !file.note.is_empty() {
            line.push_str(&format!(" ({})", file.note));
        }
        failure::put(line + "\n");
        if let Some(e) = &file.error {
            note!("forebay: {}", Error::from(e.clone()));
        }
    }
    if files.len() > LINES_MAX {
        failure::put("... (--json lists all)\n");
    }
    let row = |fate: &Fate, (count, bytes): (u64, u64)| {
        let (count, bytes) = (table::count(count, "file"), table::bytes(bytes));
        format!("{count:>12}  {bytes:>10}  {}\n", meaning(*fate, arguments.dry_run))
    };
    for (fate, sum) in &recovered.sums {
        failure::put(row(fate, *sum));
    }
    if recovered.sums.is_empty() {
        failure::put("nothing is to be recovered: the targets have no files\n");
    }
    match (discarded, recovered.is_open(), arguments.list || arguments.dry_run) {
        (true, _, _) => failure::put("the targets are removed\n"),
        (_, _, true) => {}
        (false, false, _) => {
            failure::put("everything is in the stores; the targets stay until `forebay recover --discard`\n");
        }
        (false, true, _) => failure::put("the targets keep what is not recovered\n"),
    }
}
