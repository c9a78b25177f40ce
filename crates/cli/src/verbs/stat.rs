//! `forebay stat`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{PathBuffer, Pool};
use forebay_types::{Component, Entry, Error, Kind, Result, FLAG_DIRTY, FLAG_RESIDENT};
use serde_json::{json, Value};

use super::ls::{failed_path, kind_name, link_target, put_name};
use crate::arguments::Stat;
use crate::table::{self, Facts};
use crate::{failure, pool};

pub(super) fn stat(named: Option<PathBuf>, arguments: &Stat) -> Result<ExitCode> {
    let pool = pool::attach(&pool::directory(named)?)?;
    let mut all = Vec::new();
    let mut failed = false;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        match look(pool, &path, arguments.dereference) {
            Ok((entry, stat)) => {
                if arguments.json {
                    all.push(as_json(pool, &path, &entry, &stat));
                } else {
                    failure::put(as_text(pool, &path, &entry, &stat));
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
        failure::print_json(&Value::Array(all));
    }
    Ok(if failed { ExitCode::from(failure::FAILED) } else { ExitCode::SUCCESS })
}

fn look(pool: &Pool, path: &[u8], follow: bool) -> Result<(Entry, libc::stat)> {
    let found = pool.resolve(pool::place(path), follow, &mut PathBuffer::new());
    let entry = pool::worded(found, "look at", path)?;
    let stat = pool.stat_inode(entry.attr.ino).map_err(|code| {
        Error::new(code, format!("cannot look at {}", table::printable(path))).why(pool::words(code))
    })?;
    Ok((entry, stat))
}

fn data_words(entry: &Entry) -> &'static str {
    match (entry.attr.flags & FLAG_RESIDENT != 0, entry.attr.flags & FLAG_DIRTY != 0) {
        (true, true) => "resident, dirty",
        (true, false) => "resident, clean",
        (false, _) => "released",
    }
}

/// The targets named by a layout: node and index.
fn targets(c: &Component) -> Vec<String> {
    c.targets[..c.target_count as usize].iter().map(|t| format!("{}.{}", t >> 16, t & 0xffff)).collect()
}

fn as_text(pool: &Pool, path: &[u8], entry: &Entry, s: &libc::stat) -> String {
    let kind = entry.attr.kind();
    let mut facts = Facts::default();
    let link = match (kind, link_target(pool, path)) {
        (Kind::Symlink, Some(to)) => format!(" -> {}", table::printable(&to)),
        _ => String::new(),
    };
    facts.add("path", format!("{}{link}", table::printable(path)));
    facts.add("kind", kind_name(kind));
    facts.add("inode", format!("{} (node {})", entry.attr.ino, entry.attr.ino.birth_node()));
    match kind {
        Kind::Directory => facts.add("entries", s.st_size.to_string()),
        Kind::CharDevice | Kind::BlockDevice => {
            facts.add("device", format!("{}, {}", libc::major(s.st_rdev), libc::minor(s.st_rdev)));
        }
        _ => facts.add(
            "size",
            format!("{} bytes, {} allocated", s.st_size, table::bytes(s.st_blocks as u64 * 512)),
        ),
    }
    facts.add("mode", format!("{} ({:04o})", table::mode(s.st_mode), s.st_mode & 0o7777));
    facts.add("owner", format!("{}, group {}", table::user(s.st_uid), table::group(s.st_gid)));
    facts.add("links", s.st_nlink.to_string());
    for (name, seconds, nanoseconds) in [
        ("accessed", s.st_atime, s.st_atime_nsec),
        ("modified", s.st_mtime, s.st_mtime_nsec),
        ("changed", s.st_ctime, s.st_ctime_nsec),
        ("born", entry.attr.btime.sec, i64::from(entry.attr.btime.nsec)),
    ] {
        facts.add(name, format!("{}.{nanoseconds:09}", table::local_time(seconds)));
    }
    if kind == Kind::File {
        facts.add("data", data_words(entry));
        for (i, c) in entry.layout.components().iter().enumerate() {
            let range =
                if c.end == u64::MAX { String::new() } else { format!(" up to {}", table::bytes(c.end)) };
            let stripes = match c.stripe_count {
                1 => "one backing file".to_owned(),
                n => format!("{n} stripes of {}", table::bytes(u64::from(c.stripe_bytes))),
            };
            let name = if i == 0 { "layout" } else { "" };
            facts.add(name, format!("{stripes} on target {}{range}", targets(c).join(", ")));
        }
    }
    facts.text()
}

fn as_json(pool: &Pool, path: &[u8], entry: &Entry, s: &libc::stat) -> Value {
    let kind = entry.attr.kind();
    let time = |seconds: i64, nanoseconds: i64| seconds as f64 + nanoseconds as f64 / 1e9;
    let mut object = json!({
        "kind": kind_name(kind),
        "ino": s.st_ino,
        "node": entry.attr.ino.birth_node().0,
        "home": entry.attr.home.0,
        "size": s.st_size,
        "allocated_bytes": s.st_blocks * 512,
        "mode": format!("{:04o}", s.st_mode & 0o7777),
        "uid": s.st_uid,
        "gid": s.st_gid,
        "nlink": s.st_nlink,
        "rdev": s.st_rdev,
        "atime": time(s.st_atime, s.st_atime_nsec),
        "mtime": time(s.st_mtime, s.st_mtime_nsec),
        "ctime": time(s.st_ctime, s.st_ctime_nsec),
        "btime": time(entry.attr.btime.sec, i64::from(entry.attr.btime.nsec)),
    });
    put_name(&mut object, "path", path);
    if kind == Kind::Symlink {
        if let Some(to) = link_target(pool, path) {
            put_name(&mut object, "target", &to);
        }
    }
    if kind == Kind::File {
        object["dirty"] = json!(entry.attr.flags & FLAG_DIRTY != 0);
        object["resident"] = json!(entry.attr.flags & FLAG_RESIDENT != 0);
        object["layout"] = entry
            .layout
            .components()
            .iter()
            .map(|c| {
                json!({
                    "end": if c.end == u64::MAX { Value::Null } else { json!(c.end) },
                    "stripe_bytes": c.stripe_bytes,
                    "stripe_count": c.stripe_count,
                    "targets": targets(c),
                })
            })
            .collect();
    }
    object
}
