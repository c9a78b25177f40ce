//! `forebay up` of many nodes: those of a pool file, of a list of hosts, or of a job's ranks.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use forebay_server::bundle::Bundle;
use forebay_server::hosts_file::{self, path_on, Alike, NamedHost};
use forebay_server::pool_file::{NodeEntry, PoolFile};
use forebay_types::{Code, Error, NodeId, Result};
use serde_json::{json, Value};

use crate::arguments::Up;
use crate::backing::Url;
use crate::everywhere::{self, Outcome, RemoteCommand};
use crate::rendezvous::{self, Rank};
use crate::{failure, hosts, pool, table};

/// Up to this many nodes are listed one by one; beyond it only the totals are printed.
const LISTED_MAX: usize = 32;
/// This host's address for the others, if it is not the host's name.
const HOST_VARIABLE: &str = "FOREBAY_HOST";

/// The words by which the node with the root attaches a store.
fn backing_words(backing: &Option<Url>, node: &NodeEntry) -> Vec<String> {
    let url = backing.as_ref().filter(|_| node.number == NodeId::FIRST.0);
    url.map(|url| vec!["--backing".to_owned(), url.text.clone()]).unwrap_or_default()
}

/// Starts every node of a pool file.
pub(super) fn of_file(file: Option<&Path>, arguments: &Up) -> Result<ExitCode> {
    let file = pool::file(file, "start all nodes")?;
    // The key is created here first, so that nodes with a shared file system do not each create one.
    file.ensure_key()?;
    let path = file.path.to_string_lossy().into_owned();
    let backing = arguments.backing.as_deref().map(Url::parse).transpose()?;
    let remote_commands: Vec<RemoteCommand> = file
        .nodes
        .iter()
        .map(|node| {
            let mut words =
                ["up", "--json", "--pool", &path, "--node", &node.name].map(str::to_owned).to_vec();
            words.extend(backing_words(&backing, node));
            words.extend(setting_words(arguments));
            RemoteCommand::new(node, words)
        })
        .collect();
    start(&file, &remote_commands, arguments)
}

/// Starts a pool over a list of hosts. Each gets the pool file and the secret on the standard input of its remote
/// shell.
pub(super) fn by_hosts(list: &str, path: Option<PathBuf>, arguments: &Up) -> Result<ExitCode> {
    let named = |list: &str, capacity_bytes| -> Result<Vec<NamedHost>> {
        let hosts = hosts::expand(list)?.into_iter();
        Ok(hosts.map(|host| NamedHost { name: host.clone(), host, capacity_bytes }).collect())
    };
    let mut hosts = named(list, arguments.capacity)?;
    if let Some(without) = &arguments.no_target {
        hosts.extend(named(without, Some(0))?);
    }
    let bundle = Bundle::new(hosts_file::text(&hosts, &alike(path, arguments)?))?;
    let file = bundle.pool_file(Path::new("/"))?;
    if let Some(path) = &arguments.write {
        keep(&bundle, path)?;
    }
    let input = bundle.encode();
    let backing = arguments.backing.as_deref().map(Url::parse).transpose()?;
    let remote_commands: Vec<RemoteCommand> = file
        .nodes
        .iter()
        .map(|node| {
            let mut words: Vec<String> =
                ["up", "--json", "--handed", "--node", &node.name].map(str::to_owned).to_vec();
            if let Some(mount) = &arguments.mount {
                let at = path_on(mount, &node.name);
                words.extend(["--mount".to_owned(), at.to_string_lossy().into_owned()]);
                words.extend(arguments.allow_other.then(|| "--allow-other".to_owned()));
            }
            words.extend(backing_words(&backing, node));
            words.extend(setting_words(arguments));
            RemoteCommand { input: input.clone(), ..RemoteCommand::new(node, words) }
        })
        .collect();
    let started = start(&file, &remote_commands, arguments);
    if let (Err(_), Some(path)) = (&started, &arguments.write) {
        let _ = std::fs::remove_file(path);
        let _ = std::fs::remove_file(path.with_extension("key"));
    }
    started
}

/// The settings that each node gets. A media profile travels as its values, since other nodes may not have its file.
fn setting_words(arguments: &Up) -> Vec<String> {
    let text = |ms: u64| if ms == 0 { "off".to_owned() } else { format!("{}", ms as f64 / 1000.0) };
    let snapshots = arguments.snapshots.map(|ms| ["--snapshots".to_owned(), text(ms)]);
    let profile = arguments.media_profile.as_ref();
    let profile = profile.map(|profile| ["--media-profile".to_owned(), profile.to_string()]);
    snapshots.into_iter().chain(profile).flatten().collect()
}

/// The pool of this job's ranks, and the name of this host's node.
pub(super) fn by_job(job: &str, path: Option<PathBuf>, arguments: &Up) -> Result<(Bundle, String)> {
    let rank = Rank::of_this_process(job)?;
    let alike = alike(path, arguments)?;
    let shared = match &arguments.shared {
        Some(shared) => shared.clone(),
        None => std::env::home_dir().filter(|home| home.is_dir()).ok_or_else(|| {
            failure::invalid(
                "cannot meet the other ranks",
                "this user has no home directory here",
                "name a directory that all ranks see: --shared DIR",
            )
        })?,
    };
    let name = match std::env::var(pool::NODE_VARIABLE) {
        Ok(name) if !name.is_empty() => name,
        _ => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    let host = std::env::var(HOST_VARIABLE).ok().filter(|h| !h.is_empty()).unwrap_or_else(|| name.clone());
    let me = NamedHost { name: name.clone(), host, capacity_bytes: arguments.capacity };
    let bundle = rendezvous::meet(&shared, &rank, &me, Duration::from_secs(arguments.wait), |hosts| {
        Bundle::new(hosts_file::text(hosts, &alike))
    })?;
    Ok((bundle, name))
}

fn alike(path: Option<PathBuf>, arguments: &Up) -> Result<Alike> {
    let path = match path {
        Some(path) if path.is_file() => {
            return Err(failure::invalid(
                "cannot tell what pool to start",
                format!("{} is a pool file, and --hosts and --job make one", path.display()),
                "start the nodes that it names with --all, or leave it out (unset FOREBAY_POOL)",
            ))
        }
        path => pool::directory(path)?,
    };
    Ok(Alike { path, media: arguments.media, port: arguments.port, provider: arguments.provider.clone() })
}

/// Writes the pool file and the secret to the path that the user named.
fn keep(bundle: &Bundle, path: &Path) -> Result<()> {
    for (path, mode, bytes) in bundle.files(path)? {
        let what = || format!("cannot write {}", path.display());
        let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        let mut file = made.map_err(|e| {
            Error::io(what(), &e)
                .cure("name a file that is not there yet: a pool that is up may need the old one")
        })?;
        file.write_all(&bytes).map_err(|e| Error::io(what(), &e))?;
    }
    Ok(())
}

/// Runs the remote commands. If one fails, the nodes that were not up before are stopped again, unless --partial allows
/// a part of the pool.
fn start(file: &PoolFile, remote_commands: &[RemoteCommand], arguments: &Up) -> Result<ExitCode> {
    let outcomes = everywhere::run("starting", remote_commands);
    let failed: Vec<&Outcome> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
    let what =
        || format!("cannot start {} of {}", failed.len(), table::count(remote_commands.len() as u64, "node"));
    let why = || failed.iter().take(3).map(|o| o.name.as_str()).collect::<Vec<_>>().join(", ");
    let first = &file.nodes[0];
    let root_is_up = failed.iter().all(|o| o.name != first.name);
    let goes_on = failed.is_empty() || arguments.partial && root_is_up;
    if !arguments.json {
        let listed = goes_on && outcomes.len() <= LISTED_MAX;
        let lines: Vec<String> =
            outcomes.iter().filter(|o| listed || o.failure.is_some()).map(line).collect();
        failure::put(lines.concat());
    }
    if goes_on {
        print(&outcomes, arguments, failed.len());
        return Ok(ExitCode::SUCCESS);
    }
    let more = if failed.len() > 3 { " and others" } else { "" };
    let left = stop(file, &outcomes);
    let fate = match left.as_slice() {
        [] => "no node that it started is left up".to_owned(),
        names => format!("and what was started on {} could not be stopped again", names.join(", ")),
    };
    let cure = match (arguments.partial, root_is_up) {
        (true, false) => format!("{}, the first node, has the root: without it there is no pool", first.name),
        _ => "see above for each; --partial leaves up those that could be started".to_owned(),
    };
    Err(Error::new(Code::Io, what()).why(format!("{}{more}; {fate}", why())).cure(cure))
}

/// Stops the nodes that these commands started; returns the names of those that could not be stopped.
fn stop(file: &PoolFile, outcomes: &[Outcome]) -> Vec<String> {
    let remote_commands: Vec<RemoteCommand> = file
        .nodes
        .iter()
        .zip(outcomes)
        .filter_map(|(node, outcome)| {
            let told = outcome.json().filter(|_| outcome.failure.is_none())?;
            if told["already_up"] == Value::Bool(true) {
                return None;
            }
            let mut words = down_words(node);
            words.push("--force".to_owned());
            words.extend((told["reopened"] == Value::Bool(true)).then(|| "--keep".to_owned()));
            Some(RemoteCommand::new(node, words))
        })
        .collect();
    let stopped = everywhere::run("stopping", &remote_commands);
    stopped.into_iter().filter(|o| o.failure.is_some()).map(|o| o.name).collect()
}

fn down_words(node: &NodeEntry) -> Vec<String> {
    ["down", "--pool", &node.dir().to_string_lossy()].map(str::to_owned).to_vec()
}

/// One node's result.
fn line(outcome: &Outcome) -> String {
    if let Some(why) = &outcome.failure {
        return format!("{}: {why}\n", outcome.name);
    }
    let told = outcome.json().unwrap_or_default();
    let text = |key: &str| told[key].as_str().unwrap_or_default().to_owned();
    let state = match (&told["already_up"], &told["reopened"]) {
        (Value::Bool(true), _) => "; it was already",
        (_, Value::Bool(true)) => ", with its data from before",
        _ => "",
    };
    let gives = match told["has_target"].as_bool() {
        Some(false) => "no target".to_owned(),
        _ => format!("{}, {}", text("media"), table::bytes(told["capacity_bytes"].as_u64().unwrap_or(0))),
    };
    let mount = told["mounted"]["at"].as_str().map(|at| format!(", mounted on {at}")).unwrap_or_default();
    format!("{}: pool {} is up, node {}: {gives}{mount}{state}\n", outcome.name, text("pool"), told["node"])
}

fn print(outcomes: &[Outcome], arguments: &Up, failed: usize) {
    let told: Vec<Value> = outcomes
        .iter()
        .map(|o| match &o.failure {
            Some(why) => json!({ "name": o.name, "error": why }),
            None => {
                let mut told = o.json().unwrap_or_default();
                told["name"] = o.name.clone().into();
                told
            }
        })
        .collect();
    let capacity: u64 = told.iter().filter_map(|t| t["capacity_bytes"].as_u64()).sum();
    if arguments.json {
        failure::print_json(&json!({ "nodes": told, "capacity_bytes": capacity }));
        return;
    }
    let up = outcomes.len() - failed;
    let all = table::count(outcomes.len() as u64, "node");
    let of = if failed > 0 { format!("{up} of {all}") } else { all };
    let verb = if up == 1 { "is" } else { "are" };
    let mut text = format!("{of} {verb} up: {}\n", table::bytes(capacity));
    // A note is printed once, with the number of nodes that it applies to.
    let mut notes: Vec<(String, usize)> = Vec::new();
    for note in
        told.iter().flat_map(|t| t["costs"].as_array().into_iter().flatten()).filter_map(Value::as_str)
    {
        match notes.iter_mut().find(|(said, _)| said == note) {
            Some((_, count)) => *count += 1,
            None => notes.push((note.to_owned(), 1)),
        }
    }
    for (note, count) in notes {
        let on =
            if count == up { String::new() } else { format!(" (on {})", table::count(count as u64, "node")) };
        text.push_str(&format!("  note{on}: {note}\n"));
    }
    let dir = told.iter().find_map(|t| t["pool"].as_str()).unwrap_or_default();
    text.push_str(&match (arguments.hosts.as_ref(), pool::directory(None)) {
        (None, _) => "  use it on each:  forebay run --pool FILE -- COMMAND\n".to_owned(),
        (Some(_), Ok(default)) if default == Path::new(dir) => {
            "  use it on each:  forebay run -- COMMAND\n".to_owned()
        }
        (Some(_), _) => {
            format!("  use it on each:  forebay run --pool {} -- COMMAND\n", arguments_path(arguments, dir))
        }
    });
    failure::put(text);
}

/// The pool's directory as the user wrote it, with `%n` for the node's name.
fn arguments_path(arguments: &Up, dir: &str) -> String {
    arguments.path.as_ref().map_or(dir.to_owned(), |p| p.to_string_lossy().into_owned())
}
