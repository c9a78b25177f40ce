//! `forebay attach` and `forebay detach`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_tasks::StoreSettings;
use forebay_types::Result;
use serde_json::{json, Value};

use super::ls::put_name;
use crate::arguments::{Attach, Detach};
use crate::backing::{self, Attached, Url};
use crate::staging::Style;
use crate::{failure, pool, table, unseen};

pub(super) fn attach(named: Option<PathBuf>, arguments: &Attach) -> Result<ExitCode> {
    let url = Url::parse(&arguments.url)?;
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let settings = StoreSettings {
        url: url.text.clone(),
        read_only: arguments.read_only,
        drain: arguments.drain,
        rules: arguments.rules.clone(),
        durable: arguments.durable,
        explicit: arguments.explicit,
        recall: arguments.recall,
        yield_to: arguments.yield_to.clone(),
        directory_ino: None,
        file_system: None,
    };
    let at = pool::path_within(&arguments.dir);
    let attached = backing::attach(&dir, pool, &at, &url, settings, arguments.replaced)?;
    match arguments.json {
        true => failure::print_json(&as_json(&attached)),
        false => failure::put(attached.text()),
    }
    Ok(ExitCode::SUCCESS)
}

/// What was attached, as JSON.
pub(super) fn as_json(attached: &Attached) -> Value {
    let mut object = serde_json::to_value(&attached.settings).unwrap_or_default();
    put_name(&mut object, "at", &attached.at);
    object["already"] = json!(attached.already);
    object
}

pub(super) fn detach(named: Option<PathBuf>, arguments: &Detach) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let path = pool::path_within(&arguments.dir);
    let signals = unseen::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
    let style = Style::of_stderr(!arguments.no_progress);
    let leave = |signal| {
        note!(
            "forebay: stopped: the pool is up; `forebay status` says whether {} is still attached",
            table::printable(&path)
        );
        crate::death::die_of(signal)
    };
    let (drained, lost) = unseen::guarded(&signals, leave, || {
        backing::detach(&dir, pool, &path, arguments.discard, style, &signals)
    })?;
    if arguments.json {
        let mut object = json!({
            "drained_files": drained.files,
            "drained_bytes": drained.bytes,
            "lost_files": lost.files,
            "lost_bytes": lost.bytes,
            "lost_changes": lost.changes,
        });
        put_name(&mut object, "at", &path);
        failure::print_json(&object);
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!("{} is detached", table::printable(&path));
    if drained.files > 0 {
        let (files, bytes) = (table::count(drained.files, "file"), table::bytes(drained.bytes));
        text.push_str(&format!("; {files} ({bytes}) were copied to the store first"));
    }
    if !lost.is_nothing() {
        text.push_str(&format!("; {} that only the pool had are gone", lost.words()));
    }
    failure::put(text + "\n");
    Ok(ExitCode::SUCCESS)
}
