//! `forebay layout`: how files lie in a pool, and changing it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{PathBuffer, Pool, Striping};
use forebay_types::limits::{STRIPES_MAX, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};
use forebay_types::{Code, Entry, Error, Kind, Layout, Result};
use serde_json::{json, Value};

use super::ls::put_name;
use crate::arguments::{LayoutGet, LayoutMigrate, LayoutSet, LayoutVerb};
use crate::{failure, pool, table};

pub(super) fn layout(named: Option<PathBuf>, verb: &LayoutVerb) -> Result<ExitCode> {
    let pool = pool::attach(&pool::directory(named)?)?;
    match verb {
        LayoutVerb::Get(arguments) => Ok(get(pool, arguments)),
        LayoutVerb::Set(arguments) => set(pool, arguments),
        LayoutVerb::Migrate(arguments) => Ok(migrate(pool, arguments)),
    }
}

/// Does something to each path; all are tried.
fn each(paths: &[OsString], mut on: impl FnMut(&[u8]) -> Result<()>) -> ExitCode {
    let mut status = ExitCode::SUCCESS;
    for text in paths {
        if let Err(e) = on(&pool::path_within(text)) {
            failure::say(&e);
            status = ExitCode::from(failure::FAILED);
        }
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

fn get(pool: &Pool, arguments: &LayoutGet) -> ExitCode {
    let mut all = Vec::new();
    let status = each(&arguments.paths, |path| {
        let entry = look(pool, path, "look at")?;
        if arguments.json {
            all.push(as_json(path, &entry));
        } else {
            let said = match (entry.attr.is_directory(), entry.layout.is_single()) {
                (true, true) => "nothing set for files made in it".to_owned(),
                (true, false) => {
                    format!("files that MPI-IO and forebay.h make in it: {}", words(&entry.layout))
                }
                (false, _) => words(&entry.layout),
            };
            failure::put(format!("{}: {said}\n", table::printable(path)));
        }
        Ok(())
    });
    if arguments.json {
        failure::print_json(&Value::Array(all));
    }
    status
}

/// A layout as one line has it.
fn words(layout: &Layout) -> String {
    let parts = layout.components().iter().map(|c| {
        let range = if c.end == u64::MAX { String::new() } else { format!(" up to {}", table::bytes(c.end)) };
        match c.stripe_count {
            1 => format!("one backing file{range}"),
            n => format!("{n} backing files, stripes of {}{range}", table::bytes(u64::from(c.stripe_bytes))),
        }
    });
    parts.collect::<Vec<_>>().join("; ")
}

fn as_json(path: &[u8], entry: &Entry) -> Value {
    let components = entry.layout.components().iter().map(|c| {
        json!({
            "end": if c.end == u64::MAX { Value::Null } else { json!(c.end) },
            "stripe_count": c.stripe_count,
            "stripe_bytes": c.stripe_bytes,
        })
    });
    let kind = if entry.attr.is_directory() { "directory" } else { "file" };
    let mut object = json!({ "kind": kind, "layout": components.collect::<Vec<_>>() });
    put_name(&mut object, "path", path);
    object
}

/// The stripes that the command line asks for.
fn wanted(arguments: &LayoutSet) -> Result<Striping> {
    let bad = |why: String| Err(Error::new(Code::Invalid, "cannot set this layout").why(why));
    let count = arguments.stripe_count;
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
    Ok(Striping { stripe_count: count, stripe_bytes: bytes, yields: false })
}

fn set(pool: &Pool, arguments: &LayoutSet) -> Result<ExitCode> {
    let striping = wanted(arguments)?;
    Ok(each(&arguments.paths, |path| {
        let found = pool.resolve(pool::place(path), true, &mut PathBuffer::new());
        match found {
            Ok(entry) if entry.attr.is_directory() => {
                let done = pool.set_default_striping(&entry, striping.stripe_count, striping.stripe_bytes);
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
                let made = pool.open_striped(
                    pool::place(path),
                    flags,
                    0o666 & !umask(),
                    striping,
                    &mut PathBuffer::new(),
                );
                pool::worded(made, "make", path).map(drop)
            }
        }
    }))
}

/// The process's umask, which this asks for by setting it: the command has one thread here.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    mask.bits()
}

fn migrate(pool: &Pool, arguments: &LayoutMigrate) -> ExitCode {
    each(&arguments.paths, |path| {
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
