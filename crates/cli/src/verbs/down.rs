//! `forebay down`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_server::control::{self, MountOptions, Status};
use forebay_server::directory::PoolDirectory;
use forebay_server::hosts_file::path_on;
use forebay_server::launch::{self, DownOptions, Presence};
use forebay_server::{Backing, PoolIdentity};
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Ino, Result, STORES_MARK};
use serde_json::json;

use super::status;
use crate::arguments::Down;
use crate::backing::{self, Drained};
use crate::everywhere::{self, RemoteCommand};
use crate::staging::Style;
use crate::{failure, hosts, pool, table};

/// How often a pool is copied because a program has used it meanwhile.
const ROUNDS_MAX: u32 = 5;
/// How often a daemon that does not answer is asked when a signal ends it.
const STATUS_ATTEMPTS: u32 = 4;

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
    let volumes = before.as_ref().map_or((0, 0), status::volumes);
    if arguments.keep && !arguments.discard && volumes.0 > 0 {
        return Err(Error::new(Code::Busy, format!("cannot stop pool {} and keep its data", dir.display()))
            .why(format!("its volumes have {}, in memory that ends with the daemon", table::bytes(volumes.1)))
            .cure("delete them (`forebay volume list`), or let them go: `forebay down --keep --discard`"));
    }
    let mut drained = Drained::default();
    let mut rounds = 0;
    let (stopped, is_on_store) = loop {
        let copied = match &before {
            // An earlier round may have taken the mount away.
            Some(status) => drain(&dir, status, arguments).inspect_err(|_| mount_again(&dir, status))?,
            None => {
                refuse_undrained(&dir, arguments)?;
                Copied::default()
            }
        };
        drained.files += copied.drained.files;
        drained.bytes += copied.drained.bytes;
        let spares = !arguments.discard && may_lose(&dir, arguments.keep);
        let options = DownOptions { keep: arguments.keep, force: arguments.force, uses: copied.uses, spares };
        rounds += 1;
        match launch::down(&dir, options) {
            Ok(stopped) => break (stopped, copied.is_on_store),
            // A program may have written meanwhile.
            Err(e) if e.code == Code::Stale && before.is_some() && rounds < ROUNDS_MAX => {
                note!("forebay: a program has used the pool meanwhile: copying again");
            }
            Err(e) => {
                before.iter().for_each(|status| mount_again(&dir, status));
                return Err(e);
            }
        }
    };
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
            "drained_files": drained.files,
            "drained_bytes": drained.bytes,
            "volume_bytes": volumes.1,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let state = match (&before, stopped.killed) {
        (_, true) => "did not answer and was killed",
        (Some(_), false) => "is down",
        (None, false) => "was not up: what it had left is cleared away",
    };
    let mut text = String::new();
    if drained.files > 0 {
        let (files, bytes) = (table::count(drained.files, "file"), table::bytes(drained.bytes));
        text.push_str(&format!("copied to the backing store: {files} ({bytes})\n"));
    }
    let fate = fate(before.as_ref(), stopped.data_kept, is_on_store, volumes.1);
    text.push_str(&format!("pool {} {state}{fate}\n", dir.display()));
    if arguments.keep && !stopped.data_kept {
        text.push_str("  note: it had no memory of its own that could be kept\n");
    }
    failure::put(text);
    Ok(ExitCode::SUCCESS)
}

/// True for a pool that a kill would lose data of which its backing store may lack some.
fn may_lose(dir: &Path, keep: bool) -> bool {
    let identity = PoolDirectory::open(dir).and_then(|dir| PoolIdentity::read(&dir));
    let is_kept = |identity: &PoolIdentity| !identity.embedded && identity.backing != Backing::Detached;
    dir.join(STORES_MARK).exists() && !(keep && matches!(&identity, Ok(Some(identity)) if is_kept(identity)))
}

/// What was copied before a pool is stopped.
#[derive(Default)]
struct Copied {
    drained: Drained,
    /// One store has all files.
    is_on_store: bool,
    /// See [`DownOptions::uses`].
    uses: Option<u64>,
}

/// Copies to backing stores what they lack. Refuses if they still lack something that would be gone with the pool.
fn drain(dir: &Path, status: &Status, arguments: &Down) -> Result<Copied> {
    let keeps = arguments.keep && status.backing != "detached";
    if status.mover.is_none() || arguments.discard || keeps {
        return Ok(Copied::default());
    }
    // Programs could write by the mount after the copy, so it is taken away before. What uses the pool now may have ended
    // when the pool is to be stopped: what it wrote would be lost, so this is the end.
    let uses = if arguments.force { None } else { Some(launch::ensure_unused(dir)?) };
    let style = Style::of_stderr(!arguments.no_progress && !arguments.json);
    let copied = copy(dir, style, !arguments.force);
    if !arguments.force && !matches!(copied, Ok(Copied { drained: Drained { stopped_by: None, .. }, .. })) {
        mount_again(dir, status);
    }
    let copied = copied?;
    if let Some(signal) = copied.drained.stopped_by {
        note!("forebay: stopped: the pool is up, and goes on copying (`forebay tasks`)");
        crate::death::die_of(signal);
    }
    Ok(Copied { uses, ..copied })
}

/// Copies until stores have everything or a signal comes. Fails if they still lack something.
fn copy(dir: &Path, style: Style, is_unused: bool) -> Result<Copied> {
    let pool = pool::attach(dir)?;
    let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))?;
    let drained = backing::drain_until_stopped(dir, pool, None, style, &signals)?;
    if drained.stopped_by.is_some() {
        return Ok(Copied { drained, ..Copied::default() });
    }
    let lacking = backing::would_lose(dir, pool, None)?;
    if lacking.is_nothing() {
        let settings = backing::settings_of(pool, Ino::ROOT);
        let is_on_store = is_unused && settings.is_some_and(|settings| settings.is_all_written());
        return Ok(Copied { drained, is_on_store, uses: None });
    }
    let what = format!("cannot stop pool {}", dir.display());
    let path = dir.display();
    Err(drained.refusal(what, lacking, &format!("down --pool {path} --discard")))
}

/// Mounts a pool that stays up where it was mounted before.
fn mount_again(dir: &Path, before: &Status) {
    let Ok(now) = control::status(dir) else { return };
    let is_mounted = |at: &str| now.mounts.iter().any(|mount| mount.at == at);
    for mount in before.mounts.iter().filter(|mount| !is_mounted(&mount.at)) {
        let (allow_other, no_passthrough) = (mount.allow_other, mount.no_passthrough);
        if let Err(e) =
            control::mount(dir, Path::new(&mount.at), MountOptions { allow_other, no_passthrough })
        {
            failure::say(&e);
        }
    }
}

/// Stops a pool because `forebay up --foreground` got a signal, also under programs. What backing stores lack is copied
/// first; a further signal ends that. If they still lack something, the pool's data are kept for the next `up`, or, where
/// that is not possible, the pool stays up.
pub(super) fn by_signal(dir: &Path, signals: &Signals) -> Result<ExitCode> {
    let stop = |keep| {
        let spares = may_lose(dir, keep);
        launch::down(dir, DownOptions { keep, force: true, uses: None, spares })
    };
    // On a busy node the daemon may answer late.
    let answer = (0..STATUS_ATTEMPTS).find_map(|_| control::status(dir).ok());
    let Some(status) = answer else {
        let has_stores = dir.join(STORES_MARK).exists();
        if has_stores && may_lose(dir, true) {
            return Err(Error::new(Code::Busy, format!("cannot stop pool {}", dir.display()))
                .why("its daemon does not answer, and may have data that its backing store does not have")
                .cure(format!("`forebay down --pool {}` ends it", dir.display())));
        }
        return stop(has_stores).map(|_| ExitCode::SUCCESS);
    };
    if status.mover.is_none() {
        return stop(false).map(|_| ExitCode::SUCCESS);
    }
    let drained = pool::attach(dir).and_then(|pool| {
        let drained = backing::drain_until_stopped(dir, pool, None, Style::Messages, signals)?;
        Ok((drained, backing::would_lose(dir, pool, None)?))
    });
    let path = dir.display();
    let what = format!("cannot copy everything to the backing store of pool {path}");
    let e = match drained {
        Ok((_, lacking)) if lacking.is_nothing() => return stop(false).map(|_| ExitCode::SUCCESS),
        Ok((drained, lacking)) => drained.refusal(what, lacking, &format!("down --pool {path} --discard")),
        Err(e) => e,
    };
    if status.backing == "detached" {
        note!("forebay: the pool stays up, and goes on copying: `forebay down --pool {path}` ends it");
        return Err(e);
    }
    stop(true)?;
    note!("forebay: the data are kept: `forebay up --path {path}` starts the pool with them");
    Err(e)
}

/// Refuses to remove a pool that was killed while a backing store was attached, or to kill one: what the store lacks is not
/// known.
fn refuse_undrained(dir: &Path, arguments: &Down) -> Result<()> {
    if arguments.discard || !may_lose(dir, arguments.keep) {
        return Ok(());
    }
    let identity = PoolDirectory::open(dir).and_then(|dir| PoolIdentity::read(&dir));
    let goes = |kinds: &[Backing]| matches!(&identity, Ok(Some(identity)) if identity.embedded || kinds.contains(&identity.backing));
    let path = dir.display();
    match launch::presence(dir) {
        Ok(Presence::Down { has_data: true, .. }) if goes(&[Backing::Tmpfs]) => {}
        Ok(Presence::Up | Presence::Changing) | Err(_) if goes(&[Backing::Tmpfs, Backing::Detached]) => {
            return Err(Error::new(Code::Busy, format!("cannot stop pool {path}"))
                .why("its daemon does not answer, and may have data that its backing store does not have")
                .cure(format!("try again; `forebay down --pool {path} --discard` kills it with its data")));
        }
        _ => return Ok(()),
    }
    Err(Error::new(Code::Busy, format!("cannot remove pool {path}"))
        .why("it is down, and may have data that its backing store does not have")
        .cure(format!(
            "`forebay up --path {path}` starts it with its data, and `forebay down` then copies them; \
             `forebay down --pool {path} --discard` removes it as it is"
        )))
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
    words.extend(arguments.discard.then(|| "--discard".to_owned()));
    words
}

/// Whether the data still exist, in words.
fn fate(before: Option<&Status>, kept: bool, is_on_store: bool, volume_bytes: u64) -> String {
    let volumes = match volume_bytes {
        0 => String::new(),
        bytes => format!("; its volumes ({}) are gone", table::bytes(bytes)),
    };
    let Some(Status { inodes: Some(inodes), used_bytes: Some(bytes), .. }) = before else {
        return if kept { "; its data is kept".to_owned() } else { String::new() };
    };
    match (kept, inodes.saturating_sub(1)) {
        (true, _) => format!("; its data is kept for the next `forebay up`{volumes}"),
        (false, 0) if volume_bytes > 0 => volumes,
        (false, 0) => "; it was empty".to_owned(),
        (false, _) if is_on_store => format!("; its store has all files{volumes}"),
        (false, n) => {
            let bytes = bytes.saturating_sub(volume_bytes);
            format!("; {} in it ({}) are gone{volumes}", table::count(n, "entry"), table::bytes(bytes))
        }
    }
}
