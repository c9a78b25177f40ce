//! `forebay down`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_server::control::{self, Status};
use forebay_server::hosts_file::path_on;
use forebay_server::launch::{self, DownOptions};
use forebay_types::Result;
use serde_json::json;

use crate::arguments::Down;
use crate::everywhere::{self, RemoteCommand};
use crate::{failure, hosts, pool, table};

pub(super) fn down(named: Option<PathBuf>, arguments: &Down) -> Result<ExitCode> {
    if arguments.all {
        return down_all(named.as_deref(), arguments);
    }
    if let Some(list) = &arguments.hosts {
        return down_hosts(list, named, arguments);
    }
    let dir = pool::directory(named)?;
    // Read before the stop, as the daemon cannot answer afterwards. A dead pool has no status.
    let before = control::status(&dir).ok();
    let stopped = launch::down(&dir, DownOptions { keep: arguments.keep, force: arguments.force })?;
    let files = before.as_ref().and_then(|s| s.inodes).map(|n| n.saturating_sub(1)); // the root does not count
    let bytes = before.as_ref().and_then(|s| s.used_bytes);
    if arguments.json {
        failure::print_json(&json!({
            "pool": dir,
            "was_up": before.is_some(),
            "data_kept": stopped.data_kept,
            "killed": stopped.killed,
            "inodes": files,
            "used_bytes": bytes,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let state = match (&before, stopped.killed) {
        (_, true) => "did not answer and was killed",
        (Some(_), false) => "is down",
        (None, false) => "was not up: what it had left is cleared away",
    };
    let mut text = format!("pool {} {state}{}\n", dir.display(), fate(before.as_ref(), stopped.data_kept));
    if arguments.keep && !stopped.data_kept {
        text.push_str("  note: it had no memory of its own that could be kept\n");
    }
    failure::put(text);
    Ok(ExitCode::SUCCESS)
}

/// Stops every node of a pool file.
fn down_all(file: Option<&Path>, arguments: &Down) -> Result<ExitCode> {
    let file = pool::file(file, "stop all nodes")?;
    everywhere::on_every_node(&file, "stop", "stopping", |node| words(node.dir(), arguments))
}

/// Stops the nodes that `up --hosts` started.
fn down_hosts(list: &str, named: Option<PathBuf>, arguments: &Down) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let remote_commands: Vec<RemoteCommand> = hosts::expand(list)?
        .into_iter()
        .map(|host| RemoteCommand {
            words: words(&path_on(&dir, &host), arguments),
            name: host.clone(),
            host,
            input: Vec::new(),
        })
        .collect();
    everywhere::report("stop", &everywhere::run("stopping", &remote_commands))
}

fn words(path: &Path, arguments: &Down) -> Vec<String> {
    let mut words = ["down", "--pool", &path.to_string_lossy()].map(str::to_owned).to_vec();
    words.extend(arguments.keep.then(|| "--keep".to_owned()));
    words.extend(arguments.force.then(|| "--force".to_owned()));
    words
}

/// Whether the data still exist, in words.
fn fate(before: Option<&Status>, kept: bool) -> String {
    let Some(Status { inodes: Some(inodes), used_bytes: Some(bytes), .. }) = before else {
        return if kept { "; its data is kept".to_owned() } else { String::new() };
    };
    match (kept, inodes.saturating_sub(1)) {
        (true, _) => "; its data is kept for the next `forebay up`".to_owned(),
        (false, 0) => "; it was empty".to_owned(),
        (false, n) => format!("; {} in it ({}) are gone", table::count(n, "entry"), table::bytes(*bytes)),
    }
}
