//! `forebay layout`: shows and changes the layouts of files in a pool.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{targets_of, PathBuffer, Pool, Striping};
use forebay_types::limits::{STRIPES_MAX, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN, TARGETS_MAX, WIDTH_MAX};
use forebay_types::{node_of, target_of, Code, Component, Entry, Error, Kind, Layout, NodeId, Result};
use serde_json::{json, Value};

use super::ls::{failed_path, put_name};
use super::nodes::Nodes;
use crate::arguments::{LayoutGet, LayoutMigrate, LayoutSet, LayoutVerb};
use crate::{failure, pool, table};

pub(super) fn layout(named: Option<PathBuf>, verb: &LayoutVerb) -> Result<ExitCode> {
    let directory = pool::directory(named)?;
    let pool = pool::attach(&directory)?;
    let nodes = Nodes::of(directory);
    match verb {
        LayoutVerb::Get(arguments) => Ok(get(pool, &nodes, arguments)),
        LayoutVerb::Set(arguments) => set(pool, &nodes, arguments),
        LayoutVerb::Migrate(arguments) => Ok(migrate(pool, arguments)),
    }
}

/// Applies `on` to each path, and prints what it returns as JSON if that is wanted. A failure does not stop the loop.
fn each(json: bool, paths: &[OsString], mut on: impl FnMut(&[u8]) -> Result<Option<Value>>) -> ExitCode {
    let (mut all, mut status) = (Vec::new(), ExitCode::SUCCESS);
    for text in paths {
        let path = pool::path_within(text);
        match on(&path) {
            Ok(shown) => all.extend(shown),
            Err(e) => {
                failure::say(&e);
                all.push(failed_path(&path, &e));
                status = ExitCode::from(failure::FAILED);
            }
        }
    }
    if json {
        failure::print_json(&Value::Array(all));
    }
    status
}

fn look(pool: &Pool, path: &[u8], verb: &str) -> Result<Entry> {
    let found = pool.resolve(pool::place(path), true, &mut PathBuffer::new());
    let entry = pool::worded(found, verb, path)?;
    match entry.attr.kind() {
        Kind::File | Kind::Directory => Ok(entry),
        _ => Err(Error::new(Code::Invalid, format!("cannot {verb} {} in the pool", table::printable(path)))
            .why("only files and directories have layouts")),
    }
}

fn get(pool: &Pool, nodes: &Nodes, arguments: &LayoutGet) -> ExitCode {
    each(arguments.json, &arguments.paths, |path| {
        let entry = look(pool, path, "look at")?;
        let on = nodes_of_entries(pool, path, &entry)?;
        if arguments.json {
            return Ok(Some(as_json(path, &entry, &on)));
        }
        let said = match (entry.attr.is_directory(), entry.layout.is_set(entry.attr.home)) {
            (true, false) => "nothing set for files made in it".to_owned(),
            (true, true) if pool.spans_nodes() => {
                format!("files made in it: {}", words(&entry.layout, nodes))
            }
            (true, true) => {
                format!("files that MPI-IO and forebay.h make in it: {}", words(&entry.layout, nodes))
            }
            (false, _) => words(&entry.layout, nodes),
        };
        let names: Vec<String> = on.iter().map(|node| nodes.name(target_of(*node, 0))).collect();
        let entries = match names.len() {
            0 => String::new(),
            n => format!("; entries on {n} nodes: {}", names.join(", ")),
        };
        let below = match entry.attr.width_of_new() {
            0 => String::new(),
            n => format!("; directories made in it: over {n} nodes, or all"),
        };
        failure::put(format!("{}: {said}{entries}{below}\n", table::printable(path)));
        Ok(None)
    })
}

/// The nodes that have a wide directory's entries; empty for anything else.
fn nodes_of_entries(pool: &Pool, path: &[u8], entry: &Entry) -> Result<Vec<NodeId>> {
    let wide = entry.attr.is_directory() && entry.attr.width_log2 != 0;
    let parts = if wide { pool.parts_of(entry.attr.ino) } else { Ok(None) };
    let parts = pool::worded(parts.map_err(forebay_client::Fail::Code), "look at", path)?;
    Ok(parts.iter().flat_map(|parts| parts.as_slice()).map(|part| part.birth_node()).collect())
}

/// Applies a change of layout to each path; with `--json` prints the resulting layouts of the changed paths.
fn changed(pool: &Pool, json: bool, paths: &[OsString], mut on: impl FnMut(&[u8]) -> Result<()>) -> ExitCode {
    each(json, paths, |path| {
        on(path)?;
        if !json {
            return Ok(None);
        }
        let entry = look(pool, path, "look at")?;
        let on = nodes_of_entries(pool, path, &entry)?;
        Ok(Some(as_json(path, &entry, &on)))
    })
}

/// The targets that a component names.
fn list(c: &Component) -> impl Iterator<Item = u32> {
    let named = targets_of(c);
    (0..TARGETS_MAX).map_while(move |i| named.as_ref()?.as_slice().get(i).copied())
}

/// A layout in one line.
fn words(layout: &Layout, nodes: &Nodes) -> String {
    let parts = layout.components().iter().map(|c| {
        let range = if c.end == u64::MAX { String::new() } else { format!(" up to {}", table::bytes(c.end)) };
        let names: Vec<String> = list(c).map(|target| nodes.name(target)).collect();
        let on = match names.len() {
            0 => String::new(),
            _ => format!(", on {}", names.join(", ")),
        };
        match c.stripe_count {
            1 => format!("one backing file{range}{on}"),
            n => {
                let bytes = table::bytes(u64::from(c.stripe_bytes));
                format!("{n} backing files, stripes of {bytes}{range}{on}")
            }
        }
    });
    parts.collect::<Vec<_>>().join("; ")
}

fn as_json(path: &[u8], entry: &Entry, entries_on: &[NodeId]) -> Value {
    let components = entry.layout.components().iter().map(|c| {
        json!({
            "end": if c.end == u64::MAX { Value::Null } else { json!(c.end) },
            "stripe_count": c.stripe_count,
            "stripe_bytes": c.stripe_bytes,
            "targets": list(c)
                .map(|target| json!({ "node": node_of(target).0, "target": target as u16 }))
                .collect::<Vec<_>>(),
        })
    });
    let kind = if entry.attr.is_directory() { "directory" } else { "file" };
    let mut object = json!({ "kind": kind, "layout": components.collect::<Vec<_>>() });
    put_name(&mut object, "path", path);
    if entry.attr.is_directory() {
        let home = [entry.attr.home];
        let on = if entries_on.is_empty() { &home[..] } else { entries_on };
        object["default_width"] = entry.attr.width_of_new().max(1).into();
        object["entries_on"] = on.iter().map(|node| node.0).collect::<Vec<u16>>().into();
    }
    object
}

/// The striping given on the command line.
fn wanted(arguments: &LayoutSet) -> Result<Striping> {
    let bad = |why: String| Err(Error::new(Code::Invalid, "cannot set this layout").why(why));
    let count = arguments.stripe_count.unwrap_or(arguments.targets.len().min(usize::from(u16::MAX)) as u16);
    if !(1..=STRIPES_MAX).contains(&count) {
        return bad(format!("a file has 1 to {STRIPES_MAX} backing files, not {count}"));
    }
    let bytes = u32::try_from(arguments.stripe_size).unwrap_or(u32::MAX);
    if !bytes.is_power_of_two() || !(STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&bytes) {
        return bad(format!(
            "a stripe is a power of two from {} to {}",
            table::bytes(u64::from(STRIPE_BYTES_MIN)),
            table::bytes(u64::from(STRIPE_BYTES_MAX))
        ));
    }
    Ok(Striping { stripe_count: count, stripe_bytes: bytes, directory_takes_precedence: false })
}

fn set(pool: &Pool, nodes: &Nodes, arguments: &LayoutSet) -> Result<ExitCode> {
    let has_stripes = arguments.stripe_count.is_some() || !arguments.targets.is_empty();
    let striping = if has_stripes { Some(wanted(arguments)?) } else { None };
    let targets: Vec<u32> = arguments.targets.iter().map(|word| nodes.target(word)).collect::<Result<_>>()?;
    if targets.len() > TARGETS_MAX {
        return Err(Error::new(Code::Invalid, "cannot set this layout")
            .why(format!("a file is on {TARGETS_MAX} targets at most, and these are {}", targets.len())));
    }
    Ok(changed(pool, arguments.json, &arguments.paths, |path| {
        arguments.width.map_or(Ok(()), |width| widen(pool, nodes, path, width))?;
        arguments.default_width.map_or(Ok(()), |width| widen_new(pool, path, width))?;
        striping.map_or(Ok(()), |striping| stripe(pool, path, striping, &targets))
    }))
}

/// Sets the layout of files that will be made in a directory, or makes an empty file with that layout.
fn stripe(pool: &Pool, path: &[u8], striping: Striping, targets: &[u32]) -> Result<()> {
    let found = pool.resolve(pool::place(path), true, &mut PathBuffer::new());
    match found {
        Ok(entry) if entry.attr.is_directory() => {
            let stripes = (striping.stripe_count, striping.stripe_bytes);
            let done = pool.set_layout_of_new(&entry, stripes, targets);
            pool::worded(done.map_err(forebay_client::Fail::Code), "set the layout of", path)
        }
        Ok(_) => Err(Error::new(
            Code::Exists,
            format!("cannot set the layout of {} in the pool", table::printable(path)),
        )
        .why("it is there, and a file's layout is settled when it is made")
        .cure("`forebay layout migrate` gives it one backing file")),
        Err(_) => {
            let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
            let (place, mode) = (pool::place(path), 0o666 & !umask());
            let made = pool.open_striped_on(place, flags, mode, striping, targets, &mut PathBuffer::new());
            pool::worded(made, "make", path).map(drop)
        }
    }
}

/// Distributes a directory's entries over several nodes.
fn widen(pool: &Pool, nodes: &Nodes, path: &[u8], width: u16) -> Result<()> {
    let entry = look(pool, path, "widen")?;
    let what = || format!("cannot set the width of {} in the pool", table::printable(path));
    if !entry.attr.is_directory() {
        return Err(Error::new(Code::NotDirectory, what()).why("only directories have one"));
    }
    if width == 1 && entry.attr.width_log2 == 0 {
        return Ok(()); // already narrow
    }
    pool.set_width(entry.attr.ino, width).map(drop).map_err(|code| {
        let error = Error::new(code, what());
        match code {
            Code::NotEmpty => error
                .why("it has entries, which lie on its node")
                .cure("set it before the first file is made, or make another directory and move them there"),
            Code::Exists | Code::Invalid if entry.attr.width_log2 != 0 => error
                .why("it is wide already, and stays as it is")
                .cure("make another directory, set its width, and move the entries there"),
            Code::Invalid => error.why(format!("a directory is over 2 to {WIDTH_MAX} nodes, not {width}")),
            Code::NoDevice if nodes.all().len() < 2 => error.why("the pool has one node"),
            Code::NoDevice => {
                let homes = nodes.all().iter().filter(|node| node.targets != Some(0)).count();
                error.why(format!("the pool has {homes} nodes with targets, which directories can be over"))
            }
            Code::Io => error
                .why("a node does not answer")
                .cure("`forebay status` tells which; a directory can be over the others"),
            code => error.why(pool::words(code)),
        }
    })
}

/// Sets the width of directories that will be made in this one.
fn widen_new(pool: &Pool, path: &[u8], width: u16) -> Result<()> {
    let entry = look(pool, path, "set the width of directories in")?;
    let what = || format!("cannot set the width of directories that are made in {}", table::printable(path));
    if !entry.attr.is_directory() {
        return Err(Error::new(Code::NotDirectory, what()).why("it is none itself"));
    }
    let width = match width {
        0 => WIDTH_MAX as u8,
        1 => 0,
        width => {
            u8::try_from(width).ok().filter(|width| usize::from(*width) <= WIDTH_MAX).ok_or_else(|| {
                Error::new(Code::Invalid, what())
                    .why(format!("a directory is over 2 to {WIDTH_MAX} nodes, not {width}"))
            })?
        }
    };
    let done = pool.set_width_of_new(entry.attr.ino, width);
    done.map_err(|code| Error::new(code, what()).why(pool::words(code)))
}

/// The process's umask. It can only be read by setting it, which is safe as the command has one thread here.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    mask.bits()
}

fn migrate(pool: &Pool, arguments: &LayoutMigrate) -> ExitCode {
    changed(pool, arguments.json, &arguments.paths, |path| {
        let entry = look(pool, path, "migrate")?;
        let what = || format!("cannot migrate {} in the pool", table::printable(path));
        if entry.attr.is_directory() {
            return Err(Error::new(Code::IsDirectory, what()).why("a directory has no data"));
        }
        pool.make_single(entry.attr.ino, false).map_err(|code| {
            let error = Error::new(code, what());
            match code {
                Code::Busy => error.why("a program has it open").cure("run it again when that has closed it"),
                Code::NoSpace => error
                    .why("there is no room for a copy of it")
                    .cure("`forebay stage-out` writes it as an ordinary file without one"),
                Code::NotSupported if pool.spans_nodes() => error
                    .why("the pool has several nodes, and programs of the others may have it open")
                    .cure("`forebay stage-out` writes it as an ordinary file"),
                Code::NotSupported => error.why("the medium's file system has no leases"),
                code => error.why(pool::words(code)),
            }
        })
    })
}
