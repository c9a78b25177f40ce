//! `forebay status`.

pub(crate) mod emulated;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_server::control::{self, MoverStatus, Status};
use forebay_types::limits::HIGH_WATER_PERCENT;
use forebay_types::{Code, Error, Result};

use crate::table::{self, Facts};
use crate::{arguments, failure, pool};

/// Exit status when other nodes of the pool are not up.
const NODES_LACKING: u8 = 5;
const NODE_COLUMNS: [&str; 10] =
    ["NAME", "NODE", "HOST", "STATE", "FOR", "TARGET", "MEDIUM", "USED", "FREE", "OF"];

/// The poll interval while waiting for a pool to come up.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

pub(super) fn status(named: Option<PathBuf>, arguments: &arguments::Status) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let status = match arguments.wait {
        Some(seconds) => when_up(&dir, Duration::from_secs(seconds))?,
        None => control::status(&dir)?,
    };
    if arguments.json {
        failure::print_json(&serde_json::to_value(&status).unwrap_or_default());
    } else {
        failure::put(text(&status));
    }
    Ok(match not_up(&status).is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(NODES_LACKING),
    })
}

/// Waits until a pool and all its nodes are up, and returns its status.
fn when_up(dir: &Path, timeout: Duration) -> Result<Status> {
    let until = Instant::now() + timeout;
    loop {
        let status = control::status(dir);
        let lacking = match &status {
            Ok(status) => not_up(status),
            Err(_) => Vec::new(),
        };
        match status {
            Ok(status) if status.state == "up" && lacking.is_empty() => return Ok(status),
            // The directory may not exist yet, or the pool may not have started.
            Err(e) if !matches!(e.code, Code::NotFound | Code::PoolGone | Code::TimedOut) => return Err(e),
            Err(e) if Instant::now() >= until => return Err(e),
            Ok(status) if Instant::now() >= until => {
                let why = match lacking.as_slice() {
                    [] => format!("it is {}", status.state),
                    names => format!("not up: {}", names.join(", ")),
                };
                let what = format!("pool {} is not up after {} s", dir.display(), timeout.as_secs());
                return Err(Error::new(Code::TimedOut, what)
                    .why(why)
                    .cure(format!("see {}/log, and those of the nodes that are not up", dir.display())));
            }
            _ => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// A table of all nodes and their targets, in a pool of several nodes.
fn nodes(s: &Status) -> Vec<String> {
    let list = |of: &serde_json::Value, key: &str| of[key].as_array().cloned().unwrap_or_default();
    let text = |of: &serde_json::Value, key: &str| of[key].as_str().unwrap_or("-").to_owned();
    let mut all = s.more.get("nodes").and_then(|n| n.as_array()).cloned().unwrap_or_default();
    if all.is_empty() {
        return Vec::new();
    }
    let of_pool = |key: &str| s.more.get(key).cloned().unwrap_or_default();
    all.push(serde_json::json!({
        "name": of_pool("node_name"), "node": s.node, "host": "this host", "state": s.state,
        "since_s": s.uptime_s, "targets": of_pool("target_spaces"), "media": own_media(s),
    }));
    all.sort_by_key(|node| node["node"].as_u64());
    let mut table = vec![NODE_COLUMNS.map(str::to_owned)];
    let (mut sum_total, mut sum_free) = (0, 0);
    for node in &all {
        let since = node["since_s"].as_f64().map_or("-".to_owned(), table::duration);
        let mut lead =
            [text(node, "name"), node["node"].to_string(), text(node, "host"), text(node, "state"), since];
        let mut targets = list(node, "targets");
        // The targets of a node that did not answer are unknown.
        let has_none = node["targets"].is_array() && targets.is_empty();
        if targets.is_empty() {
            targets.push(serde_json::Value::Null);
        }
        for (i, target) in targets.iter().enumerate() {
            let [name, number, host, state, since] = std::mem::take(&mut lead);
            let index = if has_none { "none".to_owned() } else { i.to_string() };
            let space = target["total_bytes"].as_u64().zip(target["free_bytes"].as_u64());
            let [used, free, total] = match space {
                Some((total, free)) => {
                    (sum_total, sum_free) = (sum_total + total, sum_free + free);
                    let used = total.saturating_sub(free);
                    let full = if used.saturating_mul(100) >= total.saturating_mul(HIGH_WATER_PERCENT) {
                        " (full)"
                    } else {
                        ""
                    };
                    [table::bytes(used) + full, table::bytes(free), table::bytes(total)]
                }
                None => ["-", "-", "-"].map(str::to_owned),
            };
            let medium = node["media"][i].as_str().unwrap_or("-").to_owned();
            table.push([name, number, host, state, since, index, medium, used, free, total]);
        }
    }
    let sum = [sum_total - sum_free, sum_free, sum_total].map(table::bytes);
    let [used, free, total] = sum;
    let none = String::new;
    table.push(["all".to_owned(), none(), none(), none(), none(), none(), none(), used, free, total]);
    let mut lines = aligned(&table);
    let whys = all.iter().filter_map(|node| Some((text(node, "name"), node["why"].as_str()?)));
    lines.extend(whys.map(|(name, why)| format!("{name}: {why}")));
    lines
}

/// The media of this node's targets.
fn own_media(s: &Status) -> Vec<String> {
    let targets = s.more.get("targets").and_then(|list| list.as_array());
    match targets.map(Vec::as_slice) {
        None => vec![s.media.clone()],
        Some(targets) => {
            targets.iter().map(|target| target["media"].as_str().unwrap_or("-").to_owned()).collect()
        }
    }
}

/// Rows with aligned columns.
fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let line = |row: &[String; N]| {
        let cells: Vec<String> =
            row.iter().enumerate().map(|(i, cell)| format!("{cell:0$}", width(i))).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The names of the other nodes that are not up.
fn not_up(status: &Status) -> Vec<String> {
    let nodes = status.more.get("nodes").and_then(|n| n.as_array()).into_iter().flatten();
    nodes
        .filter(|node| node["state"].as_str() != Some("up"))
        .map(|node| {
            let name = node["name"].as_str().unwrap_or_default();
            node["why"].as_str().map_or_else(|| name.to_owned(), |why| format!("{name} ({why})"))
        })
        .collect()
}

/// True when this node has no target.
fn is_shard_only(s: &Status) -> bool {
    s.more.get("targets").and_then(|list| list.as_array()).is_some_and(Vec::is_empty)
}

/// A line for each target of this node, where it has several.
fn targets(s: &Status) -> Vec<String> {
    let list = |key| s.more.get(key).and_then(|list| list.as_array()).map_or(&[][..], Vec::as_slice);
    let (targets, spaces) = (list("targets"), list("target_spaces"));
    if targets.len() < 2 {
        return Vec::new();
    }
    let line = |(i, target): (usize, &serde_json::Value)| {
        let word = |key: &str| target[key].as_str().unwrap_or_default();
        let bytes = |key: &str| spaces.get(i).and_then(|space| space[key].as_u64());
        let space = match (bytes("total_bytes"), bytes("free_bytes")) {
            (Some(total), Some(free)) => {
                let used = total.saturating_sub(free);
                format!("{} used, {} free of {}", table::bytes(used), table::bytes(free), table::bytes(total))
            }
            _ => target["capacity_bytes"].as_u64().map(table::bytes).unwrap_or_default(),
        };
        format!("{i}: {} in {}, {space}", word("media"), word("path"))
    };
    targets.iter().enumerate().map(line).collect()
}

/// The mover and the stores.
fn add_mover(facts: &mut Facts, mover: &MoverStatus) {
    let report = &mover.report;
    for store in &report.stores {
        facts.add("store", format!("{} at {}", store.url, store.at));
        if let Some(error) = &store.last_error {
            let when = store
                .last_error_s
                .map_or_else(String::new, |at| format!(" ({})", table::local_time(at as i64)));
            facts.add("", format!("last error{when}: {error}"));
        }
    }
    let drain = match report.pending_places {
        None => "not known until the mover has looked".to_owned(),
        Some(0) => "the stores have everything".to_owned(),
        Some(n) => format!(
            "{} to be copied in {}, {} pending",
            table::bytes(report.dirty_bytes),
            table::count(report.dirty_files, "file"),
            table::count(n, "place")
        ),
    };
    facts.add("drain", drain);
    if report.restoring > 0 {
        facts.add("restore", format!("{} for programs", table::count(report.restoring, "file")));
    }
    if report.conflicts > 0 {
        facts.add(
            "conflicts",
            format!("{}: `forebay state` shows each, `forebay resolve` settles it", report.conflicts),
        );
    }
    let pid = mover.pid.map_or_else(String::new, |pid| format!(", process {pid}"));
    let since = mover.uptime_s.map_or_else(String::new, |s| format!(" for {}", table::duration(s as f64)));
    facts.add("mover", format!("{}{since}{pid}", mover.state));
    if let Some(failure) = &mover.last_failure {
        facts.add("", format!("it failed: {failure}"));
    }
    if mover.restarts > 0 {
        let how = mover.last_crash.as_deref().unwrap_or("ended");
        facts.add("", format!("started again {}; the last one {how}", table::count(mover.restarts, "time")));
    }
}

/// Pieces of volumes on this node, and their bytes. None if the worker has not answered.
pub(super) fn volumes(s: &Status) -> Option<(u64, u64)> {
    let number = |name: &str| s.more.get(name).and_then(serde_json::Value::as_u64);
    Some((number("volume_pieces")?, number("volume_bytes")?))
}

fn text(s: &Status) -> String {
    let mut facts = Facts::default();
    let kind = if s.embedded { ", of `forebay run`" } else { "" };
    facts.add("pool", format!("{} is {} for {}{kind}", s.pool, s.state, table::duration(s.uptime_s as f64)));
    let backing = match s.backing.as_str() {
        "tmpfs" => "a tmpfs of its own",
        "detached" => "a private tmpfs",
        _ => "in its directory",
    };
    let what = if is_shard_only(s) { " for its state alone" } else { "" };
    facts.add("medium", format!("{}, {backing}{what}", s.media));
    let space = match (s.used_bytes, s.free_bytes) {
        _ if is_shard_only(s) => "no target: files of its programs lie on other nodes".to_owned(),
        (Some(used), Some(free)) => format!(
            "{} used, {} free of {}",
            table::bytes(used),
            table::bytes(free),
            // A target that is a directory has the size of its file system, whatever capacity was requested.
            table::bytes(s.capacity_bytes.max(used + free))
        ),
        _ => table::bytes(s.capacity_bytes),
    };
    facts.add("space", space);
    if let Some((pieces @ 1.., bytes)) = volumes(s) {
        facts.add("volumes", format!("{} of it, in {}", table::bytes(bytes), table::count(pieces, "piece")));
    }
    for line in targets(s) {
        facts.add("target", line);
    }
    if let Some(profile) = s.more.get("media_profile").filter(|profile| profile.is_object()) {
        let mut name = "emulates";
        for line in emulated::lines(profile) {
            facts.add(std::mem::take(&mut name), line);
        }
    }
    if let Some(inodes) = s.inodes {
        facts.add("entries", inodes.saturating_sub(1).to_string());
    }
    let mut name = "nodes";
    for line in nodes(s) {
        facts.add(std::mem::take(&mut name), line);
    }
    let mut users = Vec::new();
    if let Some(clients) = s.clients {
        users.push(table::count(clients, "process"));
    }
    if s.members > 0 {
        users.push(format!("{} ({})", table::count(s.members, "run"), s.member_labels.join("; ")));
    }
    if !users.is_empty() {
        facts.add("used by", users.join(", "));
    }
    for mount in &s.mounts {
        let data = match (mount.data.as_deref(), &mount.why) {
            (Some("passthrough"), _) => ", data by the kernel itself".to_owned(),
            (Some(_), Some(why)) => format!(", data by requests: {why}"),
            _ => String::new(),
        };
        let others = if mount.allow_other { ", for all users" } else { "" };
        facts.add("mount", format!("{} is {}{data}{others}", mount.at, mount.state));
        if mount.restarts > 0 {
            let how = mount.last_crash.as_deref().unwrap_or("ended");
            facts.add("", format!("started {} times again; the last process {how}", mount.restarts));
        }
    }
    if let Some(mover) = &s.mover {
        add_mover(&mut facts, mover);
    }
    let worker = s.pids.worker.map_or("none just now".to_owned(), |pid| pid.to_string());
    facts.add("daemon", format!("supervisor {}, worker {worker}", s.pids.supervisor));
    if s.restarts > 0 {
        let how = s.last_crash.as_deref().unwrap_or("ended");
        facts.add("restarts", format!("{}; the last worker {how}: see {}/log", s.restarts, s.pool));
    }
    for cost in &s.costs {
        facts.add("note", cost);
    }
    facts.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_pool_without_its_worker_says_what_is_known() {
        let s = Status {
            pool: "/p".into(),
            state: "restarting".into(),
            media: "dram".into(),
            backing: "tmpfs".into(),
            capacity_bytes: 4 << 30,
            restarts: 2,
            last_crash: Some("was killed by signal 11".into()),
            ..Status::default()
        };
        let text = text(&s);
        assert!(
            text.contains("/p is restarting") && text.contains("signal 11") && text.contains("4 GiB"),
            "{text}"
        );
        assert!(text.contains("none just now"));
    }

    #[test]
    fn text_of_a_node_without_a_target_says_so_of_it_and_of_others_alone_that_answer() {
        let mut s = Status { node: 2, state: "up".into(), ..Status::default() };
        s.more.insert("targets".into(), serde_json::json!([]));
        s.more.insert("target_spaces".into(), serde_json::json!([]));
        s.more.insert("node_name".into(), "me".into());
        let space = serde_json::json!({ "total_bytes": 4u64 << 30, "free_bytes": 1u64 << 30 });
        s.more.insert(
            "nodes".into(),
            serde_json::json!([
                { "name": "a", "node": 1, "host": "a", "state": "up", "targets": [space], "media": ["ssd"] },
                { "name": "c", "node": 3, "host": "c", "state": "unreachable", "why": "node 3 refused" },
            ]),
        );
        let text = text(&s);
        assert!(text.contains("no target: files of its programs lie on other nodes"), "{text}");
        let row = |name: &str| text.lines().find(|l| l.contains(&format!(" {name} "))).unwrap_or_default();
        assert!(row("me").contains("none") && !row("c").contains("none"), "{text}");
        assert!(row("all").contains("4 GiB"), "{text}");
        assert!(row("a").contains("ssd") && text.contains("c: node 3 refused"), "{text}");
        assert_eq!(not_up(&s), ["c (node 3 refused)"]);
    }

    #[test]
    fn text_of_a_node_with_several_targets_has_a_line_for_each() {
        let mut s = Status::default();
        assert!(targets(&s).is_empty());
        let of = |path: &str, media: &str| serde_json::json!({ "path": path, "media": media, "capacity_bytes": 1 << 30 });
        s.more.insert("targets".into(), serde_json::json!([of("/a", "dram"), of("/b", "ssd")]));
        assert!(text(&s).contains("1: ssd in /b, 1 GiB"), "{}", text(&s));
        let space = |free: u64| serde_json::json!({ "total_bytes": 4u64 << 30, "free_bytes": free << 30 });
        s.more.insert("target_spaces".into(), serde_json::json!([space(1), space(4)]));
        assert!(text(&s).contains("0: dram in /a, 3 GiB used, 1 GiB free of 4 GiB"), "{}", text(&s));
    }
}
