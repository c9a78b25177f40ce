//! `forebay up`.

mod nodes;
mod stay;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_server::bundle::Bundle;
use forebay_server::control::{self, MountFacts, MountOptions, Status};
use forebay_server::directory::PoolDirectory;
use forebay_server::hosts_file::path_on;
use forebay_server::launch::{self, Described, DownOptions, Started, UpOptions};
use forebay_server::pool_file::PoolFile;
use forebay_server::{Backing, PoolIdentity};
use forebay_tasks::{MoverClient, StoreSettings, Verb};
use forebay_types::{Code, Error, NodeId, Result};
use serde_json::json;

use crate::backing::{self, Attached, Url};
use crate::resources::{self, Attachment};
use crate::{arguments, failure, pool, table};

/// How long a rank waits while another rank is starting its node.
const STARTING_GRACE: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A node that is up, for printing.
struct Up<'a> {
    started: Started,
    /// It was up before, as the same node of the same pool.
    already: bool,
    mounted: Option<(&'a Path, MountFacts)>,
    attached: Option<Attached>,
    /// The directories of a resources file, with the tasks that copy data into the pool.
    directories: Vec<(Attached, Vec<u64>)>,
}

pub(super) fn up(named: Option<PathBuf>, arguments: &arguments::Up) -> Result<ExitCode> {
    let path = which(named.as_ref(), arguments.path.as_ref())?;
    if let Some(list) = &arguments.hosts {
        return nodes::by_hosts(list, path, arguments);
    }
    if arguments.all {
        return nodes::of_file(path.as_deref(), arguments);
    }
    let alone = [(arguments.port.is_some(), "--port"), (arguments.provider.is_some(), "--provider")];
    if let (Some((_, option)), None) = (alone.iter().find(|(given, _)| *given), &arguments.job) {
        return Err(failure::invalid(
            "cannot start the pool",
            format!("{option} is for pools of several nodes"),
            "name them: --hosts LIST",
        ));
    }
    let backing = arguments.backing.as_deref().map(Url::parse).transpose()?;
    let resources = arguments.resources.as_deref().map(resources::read).transpose()?.unwrap_or_default();
    let mut chosen = path.is_some();
    let mut node = None;
    let mut mount = arguments.mount.clone().or_else(|| resources.mount.clone());
    let path = match path {
        _ if arguments.handed || arguments.job.is_some() => {
            let (bundle, name) = match &arguments.job {
                Some(job) => nodes::by_job(job, path, arguments)?,
                None => (handed()?, arguments.node.clone().unwrap_or_default()),
            };
            let entry = bundle.pool_file(Path::new("/"))?.node(Some(&name))?.clone();
            chosen = entry.dir() != pool::directory(None)?;
            node = Some((Described::Bundle(bundle), entry.name.clone()));
            mount = mount.map(|mount| path_on(&mount, &name));
            entry.dir().to_owned()
        }
        Some(file) if file.is_file() => {
            let file = PoolFile::read(&file)?;
            let name = arguments.node.clone().or_else(|| std::env::var(pool::NODE_VARIABLE).ok());
            let entry = file.node(name.as_deref())?;
            file.ensure_key()?;
            mount = mount.or_else(|| file.mount.clone());
            node = Some((Described::File(file.path.clone()), entry.name.clone()));
            entry.dir().to_owned()
        }
        _ if arguments.node.is_some() => {
            return Err(failure::invalid(
                "cannot tell which node to start",
                "--node names a node of a pool file",
                "name the file: --pool FILE",
            ))
        }
        path => pool::directory(path)?,
    };
    let described = matches!(node, Some((Described::Bundle(_), _)));
    if let Some(at) = mount.as_ref().filter(|_| described) {
        // With many hosts, users do not create the directory by hand on each. If it cannot be created, the mount below
        // is refused.
        let _ = std::fs::create_dir(at);
    }
    if arguments.renumber && node.is_none() {
        return Err(failure::invalid(
            "cannot renumber a pool of one node",
            "its number says nothing to anybody",
            "leave out --renumber",
        ));
    }
    let mount = mount.as_deref().map(super::mount::place).transpose()?;
    let options = UpOptions {
        path: path.clone(),
        // The pool's description already contains the medium and the capacity.
        media: arguments.media.or(resources.media).filter(|_| !described),
        capacity_bytes: arguments.capacity.or(resources.capacity).filter(|_| !described),
        snapshots_ms: arguments.snapshots,
        media_profile: arguments.media_profile.clone(),
        embedded: false,
        elsewhere_allowed: !chosen,
        node,
        renumber: arguments.renumber,
    };
    let (started, already) = start(&options)?;
    // The user requested the pool with a mount or stores: without these it does not stay. Data from before are kept. A pool
    // that was up before is in use, perhaps, and stays as it is.
    let take_back = || {
        if !already {
            let _ = launch::down(
                &path,
                DownOptions { keep: started.reopened, force: true, ..DownOptions::default() },
            );
        }
    };
    let options = MountOptions { allow_other: arguments.allow_other, no_passthrough: false };
    let mounted = match &mount {
        None => None,
        Some(at) => match ensure_mounted(&path, at, options, already) {
            Ok(facts) => Some((at.as_path(), facts)),
            Err(e) => {
                take_back();
                return Err(e);
            }
        },
    };
    let attached = match &backing {
        None => None,
        // Of a pool of several nodes, the node with the root attaches it.
        Some(_) if started.identity.node != NodeId::FIRST.0 => None,
        Some(url) => match attach(&path, url) {
            Ok(attached) => Some(attached),
            Err(e) => {
                take_back();
                return Err(e);
            }
        },
    };
    let directories = attach_all(&path, &resources.directories).inspect_err(|_| take_back())?;
    let daemon = started.pid;
    print(&Up { started, already, mounted, attached, directories }, chosen, arguments.json);
    resources.notes.iter().for_each(|text| note!("forebay: {text}"));
    // Of several ranks on a node, only the one that started the pool stays.
    let asked_to_stay = arguments.foreground;
    let has_to = !already && !arguments.background && stay::step_would_end_it();
    if !asked_to_stay && !has_to {
        return Ok(ExitCode::SUCCESS);
    }
    let signals = stay::signals()?;
    if !asked_to_stay {
        stay::tell();
    }
    stay::until_down(&path, daemon, &signals)
}

fn print(up: &Up<'_>, chosen: bool, as_json: bool) {
    let Up { started, already, mounted, attached, directories } = up;
    if as_json {
        failure::print_json(&json!({
            "pool": started.pool,
            "pid": started.pid,
            "uuid": started.identity.uuid,
            "node": started.identity.node,
            "media": started.identity.media.to_string(),
            "backing": started.identity.backing,
            "capacity_bytes": started.identity.capacity_of_first(),
            "has_target": !started.identity.shard_only,
            "reopened": started.reopened,
            "already_up": already,
            "costs": started.costs,
            "mounted": mounted.as_ref().map(|(at, facts)| json!({ "at": at, "data": facts.data, "why": facts.why })),
            "attached": attached.as_ref().map(super::attach::as_json),
            "directories": directories.iter().map(|(attached, tasks)| {
                let mut object = super::attach::as_json(attached);
                object["tasks"] = json!(tasks);
                object
            }).collect::<Vec<_>>(),
        }));
        return;
    }
    failure::put(text(started, *already, chosen));
    if let Some((at, facts)) = mounted {
        failure::put(super::mount::text(at, facts));
    }
    if let Some(attached) = attached {
        failure::put(attached.text());
    }
    for (attached, tasks) in directories {
        failure::put(attached.text());
        for id in tasks {
            failure::put(format!("  data are copied into the pool: forebay tasks wait {id}\n"));
        }
    }
}

/// Puts the directories of a resources file in front of their stores, and has data copied into the pool.
fn attach_all(path: &Path, all: &[Attachment]) -> Result<Vec<(Attached, Vec<u64>)>> {
    let mut done = Vec::new();
    for Attachment { at, url, settings, prestage } in all {
        let pool = pool::attach(path)?;
        let attached = backing::attach(path, pool, at, url, settings.clone(), false)?;
        let mut tasks = Vec::new();
        for below in prestage {
            let full = [at.strip_suffix(b"/").unwrap_or(at), below.trim_matches('/').as_bytes()].join(&b'/');
            let entry = backing::look(pool, &full, "prestage")?;
            let shown = table::printable(&full);
            let task = MoverClient::connect(path)?.start(Verb::Prestage, entry.attr.ino.0, &shown, true)?;
            tasks.push(task.id);
        }
        done.push((attached, tasks));
    }
    Ok(done)
}

/// Puts a pool that has just been started in front of a store.
fn attach(path: &Path, url: &Url) -> Result<Attached> {
    let pool = pool::attach(path)?;
    backing::attach(path, pool, b"/", url, StoreSettings::of(&url.text), false)
}

/// Reads the bundle that `up --hosts` sends to this node.
fn handed() -> Result<Bundle> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io("cannot read the pool bundle from standard input", &e))?;
    Bundle::decode(&bytes)
}

/// Starts a pool. True: it was already up as the same node of the same pool. Another process may also be starting it:
/// of several ranks on a node the first starts it.
fn start(options: &UpOptions) -> Result<(Started, bool)> {
    loop {
        let busy = match launch::up(options) {
            Err(e) if e.code == Code::Busy => e,
            result => return result.map(|started| (started, false)),
        };
        let Some((described, name)) = &options.node else { return Err(busy) };
        let (id, file) = match described {
            Described::File(path) => (Bundle::of_files(path)?.pool_id()?, PoolFile::read(path)?),
            Described::Bundle(bundle) => (bundle.pool_id()?, bundle.pool_file(&options.path)?),
        };
        let number = file.node(Some(name))?.number;
        let until = Instant::now() + STARTING_GRACE;
        // A start that fails removes the pool, and the next attempt reports why.
        while let Ok(status) = control::status(&options.path) {
            if status.more.get("pool_id") != Some(&json!(id)) || status.node != number {
                return Err(busy);
            }
            if status.state == "up" {
                return Ok((started(&options.path, &status)?, true));
            }
            if Instant::now() >= until {
                return Err(busy);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// The result of a start, for a pool that is already up.
fn started(path: &Path, status: &Status) -> Result<Started> {
    let identity = PoolIdentity::read(&PoolDirectory::open(path)?)?;
    let gone =
        || Error::new(Code::PoolGone, format!("cannot use pool {}", path.display())).why("it has ended");
    Ok(Started {
        pool: path.to_owned(),
        pid: status.pids.supervisor,
        identity: identity.ok_or_else(gone)?,
        costs: status.costs.clone(),
        reopened: true,
    })
}

/// Mounts a pool, or finds the mount made by the process that started the pool.
fn ensure_mounted(path: &Path, at: &Path, options: MountOptions, already: bool) -> Result<MountFacts> {
    let until = Instant::now() + STARTING_GRACE;
    loop {
        let failed = match control::mount(path, at, options) {
            Err(e) if already => e,
            result => return result,
        };
        let status = control::status(path)?;
        let Some(mount) = status.mounts.iter().find(|m| Path::new(&m.at) == at) else { return Err(failed) };
        if mount.state == "mounted" {
            return Ok(MountFacts { data: mount.data.clone().unwrap_or_default(), why: mount.why.clone() });
        }
        if Instant::now() >= until {
            return Err(failed);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// `--path` and `--pool` (or FOREBAY_POOL) name the same directory.
fn which(pool: Option<&PathBuf>, path: Option<&PathBuf>) -> Result<Option<PathBuf>> {
    // FOREBAY_POOL does not conflict with --path: an option takes precedence over a variable.
    let pool_is_option = std::env::var_os("FOREBAY_POOL").is_none_or(|v| Some(&PathBuf::from(v)) != pool);
    match (pool, path) {
        (Some(a), Some(b)) if a != b && pool_is_option => Err(failure::invalid(
            "the pool's directory is ambiguous",
            format!("--pool says {} and --path says {}", a.display(), b.display()),
            "name one: for `up` they are the same",
        )),
        (_, Some(path)) => Ok(Some(path.clone())),
        (pool, None) => Ok(pool.cloned()),
    }
}

/// Medium and backing of the target, in a few words.
pub(crate) fn backing_words(media: &str, backing: Backing) -> String {
    match backing {
        Backing::Tmpfs => format!("{media}, a tmpfs of its own"),
        Backing::Directory => format!("{media}, in its directory"),
        Backing::Detached => format!("{media}, a private tmpfs"),
    }
}

fn text(started: &Started, already: bool, chosen: bool) -> String {
    let identity = &started.identity;
    let node = if identity.node == 1 { String::new() } else { format!(", node {}", identity.node) };
    let mut text = format!(
        "pool {} is up{node}: {}{}\n",
        started.pool.display(),
        match identity.shard_only {
            true => "no target, so that files of its programs lie on other nodes".to_owned(),
            false => format!(
                "{}, {}",
                backing_words(&identity.media.to_string(), identity.backing),
                table::bytes(identity.capacity_bytes)
            ),
        },
        match (already, started.reopened) {
            (true, _) => "; it was already",
            (false, true) => ", with its data from before",
            (false, false) => "",
        },
    );
    for cost in &started.costs {
        text.push_str(&format!("  note: {cost}\n"));
    }
    if chosen {
        text.push_str(&format!("  use it:  export FOREBAY_POOL={}\n", started.pool.display()));
        text.push_str("           forebay run -- COMMAND\n");
    } else {
        text.push_str("  use it:  forebay run -- COMMAND\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_refuses_two_places_and_takes_either() {
        let (a, b) = (PathBuf::from("/nowhere/a"), PathBuf::from("/nowhere/b"));
        assert_eq!(which(Some(&a), None).unwrap(), Some(a.clone()));
        assert_eq!(which(None, Some(&b)).unwrap(), Some(b.clone()));
        assert_eq!(which(Some(&a), Some(&a)).unwrap(), Some(a.clone()));
        assert_eq!(which(None, None).unwrap(), None);
        assert!(which(Some(&a), Some(&b)).is_err());
    }
}
