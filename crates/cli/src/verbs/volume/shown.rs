//! What all verbs of `forebay volume` print: failures in words, progress, and what became of each name.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use forebay_client::{Pool, VolumeFailure};
use forebay_types::{Code, Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{json, Value};

use crate::staging::Style;
use crate::verbs::ls::put_name;
use crate::{failure, pool, table};

/// A failure in words: `verb` is what was tried.
pub(super) fn failed(pool: &Pool, code: Code, verb: &str, name: &OsStr, bytes: u64) -> Error {
    let error = Error::new(code, format!("cannot {verb} volume {}", table::printable(name.as_bytes())));
    match code {
        Code::NotFound if name.is_empty() => error.why("a volume needs a name"),
        Code::NotFound => {
            error.why("there is no such volume").cure("`forebay volume list` shows what there is")
        }
        Code::Exists => error
            .why("there is one of this name, or one is being made")
            .cure("choose another name, or `forebay volume delete` it"),
        Code::NameTooLong => error.why("its name has more than 255 bytes"),
        Code::Invalid if bytes == 0 => error.why("its size is zero").cure("give a size: --size 64MiB"),
        Code::Invalid if forebay_types::check_volume_name(name.as_bytes()).is_err() => {
            error.why("its name is `.` or `..`, or has a `/`, `:`, `+` or control character, which no specifier can hold")
        }
        Code::Invalid if verb == "create" => error
            .why(format!("it cannot have a size of {}", table::bytes(bytes)))
            .cure("give it a smaller one"),
        Code::Invalid => error
            .why(format!("it cannot have a size of {}", table::bytes(bytes)))
            .cure("a volume shrinks to a size that it had before it grew: `forebay volume show` lists them"),
        Code::NoSpace => {
            let free = pool.space().map_or(0, |space| space.free_bytes);
            error
                .why(format!(
                    "{} are needed, and the pool has {} free",
                    table::bytes(bytes),
                    table::bytes(free)
                ))
                .cure("remove files or volumes, or start the pool with a larger --capacity")
        }
        Code::NotSupported => error
            .why("volumes need a pool with a tmpfs of its own")
            .cure("start a pool in memory without naming a directory on another tmpfs: `forebay up`"),
        Code::NoDevice => error.why("one of its nodes has no targets"),
        Code::Io => error
            .why("one of its nodes is down or has lost its piece, or the pool's daemon is gone")
            .cure("`forebay status` tells which nodes are up"),
        Code::NotPermitted => error.why("it belongs to another user"),
        Code::AccessDenied => error.why("its mode does not allow it"),
        Code::Busy => {
            error.why("a program has it open, or it is being resized").cure("end the programs that use it")
        }
        Code::TooManyLinks => error.why("it has grown too often").cure("make a new one of the full size"),
        Code::Stale => error.why("it was replaced meanwhile"),
        code => error.why(pool::words(code)),
    }
}

/// Why a volume was not made or resized, in words that name the node which was the reason.
pub(super) fn not_made(
    pool: &Pool,
    VolumeFailure { code, piece }: VolumeFailure,
    verb: &str,
    name: &OsStr,
    bytes: u64,
) -> Error {
    let error = Error::new(code, format!("cannot {verb} volume {}", table::printable(name.as_bytes())));
    match (code, piece) {
        (Code::NoSpace, Some((node, bytes))) => {
            let free = pool.space().map_or(0, |space| space.free_bytes);
            error
                .why(format!(
                    "{} are needed on node {node}, which has less, and the pool has {} free",
                    table::bytes(bytes),
                    table::bytes(free)
                ))
                .cure("remove files or volumes on that node, or start the pool with a larger --capacity")
        }
        (Code::Io, Some((node, _))) => error
            .why(format!("node {node} is down or cannot be reached"))
            .cure("`forebay status` tells which nodes are up"),
        _ => failed(pool, code, verb, name, bytes),
    }
}

/// A bar on stderr, if it is a terminal.
pub(super) fn bar(verb: &'static str, bytes: u64, is_wanted: bool) -> ProgressBar {
    let bar = match Style::of_stderr(is_wanted) {
        Style::Bar => ProgressBar::new(bytes),
        _ => ProgressBar::hidden(),
    };
    bar.set_prefix(verb);
    let style = "{prefix}  {wide_bar} {binary_bytes} of {binary_total_bytes}, {eta}";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Does the same with each name. Reports every failure, and fails if one did.
pub(super) fn each(
    names: &[OsString],
    json: bool,
    act: impl Fn(&OsStr) -> Result<(Value, String)>,
) -> Result<ExitCode> {
    let (mut all, mut status) = (Vec::new(), ExitCode::SUCCESS);
    for name in names {
        match act(name) {
            Ok((value, _)) if json => all.push(value),
            Ok((_, text)) => failure::put(text),
            Err(e) => {
                failure::say(&e);
                let mut object = json!({ "error": failure::value(&e) });
                put_name(&mut object, "name", name.as_bytes());
                all.push(object);
                status = ExitCode::from(failure::FAILED);
            }
        }
    }
    if json {
        failure::print_json(&Value::Array(all));
    }
    Ok(status)
}
