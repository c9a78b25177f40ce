//! `forebay wait-durable`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_tasks::DrainPolicy;
use forebay_types::{
    Code, Entry, Error, Ino, NodeId, PendingPlace, Result, Timestamp, Wanted, FLAG_ATTACHED,
};
use serde_json::{json, Value};

use super::ls::put_name;
use crate::arguments::WaitDurable;
use crate::backing::{self, Lacking, Trees};
use crate::staging::Style;
use crate::{failure, pool, table};

/// The poll interval.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Period of the lines about what is still missing.
const LINE_PERIOD: Duration = Duration::from_secs(5);

/// Places that were pending when the waiting began, with the time since which they were.
type Awaited = HashMap<(Ino, Vec<u8>), Timestamp>;

pub(super) fn wait_durable(named: Option<PathBuf>, arguments: &WaitDurable) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let until = arguments.timeout.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let style = Style::of_stderr(!arguments.no_progress && !arguments.json);
    let mut trees = Trees::new(pool);
    let mut all = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        let waited = backing::look(pool, &path, "wait for")
            .and_then(|entry| Ok((backing::nodes_of(&dir, &entry)?, entry)))
            .and_then(|(nodes, entry)| {
                let waiting = Waiting { entry: &entry, path: &path, recursive: arguments.recursive, nodes };
                wait(pool, &mut trees, &waiting, until, style)
            });
        let durable = waited.is_ok();
        if let Err(e) = &waited {
            failure::say(e);
            status = ExitCode::from(failure::FAILED);
        }
        if arguments.json {
            let mut object = json!({ "durable": durable });
            if let Err(e) = &waited {
                object["error"] = failure::value(e);
            }
            put_name(&mut object, "path", &path);
            all.push(object);
        } else if durable {
            failure::put(format!("{} is on the store\n", table::printable(&path)));
        }
    }
    if arguments.json {
        failure::print_json(&Value::Array(all));
    }
    Ok(status)
}

/// What is waited for.
struct Waiting<'a> {
    entry: &'a Entry,
    path: &'a [u8],
    recursive: bool,
    /// The nodes that have what is pending.
    nodes: Vec<NodeId>,
}

fn wait(
    pool: &'static Pool,
    trees: &mut Trees,
    waiting: &Waiting<'_>,
    until: Option<Instant>,
    style: Style,
) -> Result<()> {
    let Waiting { entry, path, recursive, ref nodes } = *waiting;
    if entry.attr.flags & FLAG_ATTACHED == 0 && !(recursive && entry.attr.is_directory()) {
        return Err(backing::failed(Code::NoAttribute, "wait for", path));
    }
    let mut awaited: Option<Awaited> = None;
    let mut next_line = Instant::now() + LINE_PERIOD;
    loop {
        let mut places = backing::all(pool, nodes)?;
        places.retain(|place| concerns(trees, place, entry, recursive));
        // What was written after the call is not waited for.
        let awaited = awaited.get_or_insert_with(|| {
            places.iter().map(|place| ((place.parent, place.name.clone()), place.since)).collect()
        });
        places.retain(|place| awaited.get(&(place.parent, place.name.clone())) == Some(&place.since));
        let Some(first) = places.first() else { return Ok(()) };
        refuse_never(pool, trees, &places, path)?;
        let lacking = Lacking::of(pool, &places);
        if until.is_some_and(|until| Instant::now() >= until) {
            let what = format!("{} is not on the store yet", table::printable(path));
            let above = backing::path_of(pool, first.parent);
            let name = format!("{}/{}", above.trim_end_matches('/'), table::printable(&first.name));
            return Err(Error::new(Code::TimedOut, what)
                .why(format!("the store lacks {}, {name} among them", lacking.words()))
                .cure("files are copied once no program has them open for writing; `forebay status` shows errors"));
        }
        if style != Style::Messages && Instant::now() >= next_line {
            next_line = Instant::now() + LINE_PERIOD;
            note!("forebay: the store lacks {}", lacking.words());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn concerns(trees: &mut Trees, place: &PendingPlace, entry: &Entry, recursive: bool) -> bool {
    let ino = entry.attr.ino;
    let is_it = match (&place.wanted, &place.placed) {
        (Some(Wanted::Here(wanted, _)), _) => wanted.attr.ino == ino,
        (_, Some(placed)) => placed.ino == ino,
        _ => false,
    };
    match entry.attr.is_directory() {
        false => is_it,
        true => is_it || place.parent == ino || recursive && trees.is_below(place.parent, ino),
    }
}

/// Waiting for what does not happen by itself makes no sense.
fn refuse_never(pool: &'static Pool, trees: &mut Trees, places: &[PendingPlace], path: &[u8]) -> Result<()> {
    let what = || format!("cannot wait for {}", table::printable(path));
    if let Some(place) = places.iter().find(|place| place.conflict) {
        let above = backing::path_of(pool, place.parent);
        let name = format!("{}/{}", above.trim_end_matches('/'), table::printable(&place.name));
        return Err(Error::new(Code::Exists, what())
            .why(format!("the store has another version of {name}, which others wrote"))
            .cure(format!("settle it: forebay resolve {name} --keep pool|store|both")));
    }
    for place in places {
        let Some(settings) = trees.settings(place.parent) else { continue };
        let Some(policy) = trees.policy(place) else { continue };
        let why = match policy.drain {
            _ if settings.read_only => "its store is attached read-only",
            DrainPolicy::Never => "its policy is never",
            DrainPolicy::Request => "its policy is request",
            DrainPolicy::Watermark => "its policy is watermark",
            DrainPolicy::Close | DrainPolicy::Age(_) => continue,
        };
        let error = Error::new(Code::Invalid, what()).why(format!("nothing copies it by itself: {why}"));
        return Err(match settings.read_only {
            true => error.cure("copy it elsewhere: forebay stage-out"),
            false => error.cure(format!("copy it now: forebay sync {}", table::printable(path))),
        });
    }
    Ok(())
}
