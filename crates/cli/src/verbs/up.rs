//! `forebay up`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_server::control;
use forebay_server::launch::{self, DownOptions, Started, UpOptions};
use forebay_server::pool_file::PoolFile;
use forebay_server::Backing;
use forebay_types::Result;
use serde_json::json;

use crate::arguments::Up;
use crate::{everywhere, failure, pool, table};

pub(super) fn up(named: Option<PathBuf>, arguments: Up) -> Result<ExitCode> {
    let path = which(named.as_ref(), arguments.path.as_ref())?;
    let chosen = path.is_some();
    if arguments.all {
        return up_all(path.as_deref());
    }
    let mut node = None;
    let mut mount = arguments.mount.clone();
    let path = match path {
        Some(file) if file.is_file() => {
            let file = PoolFile::read(&file)?;
            let name = arguments.node.clone().or_else(|| std::env::var(pool::NODE_VARIABLE).ok());
            let entry = file.node(name.as_deref())?;
            file.ensure_key()?;
            mount = mount.or_else(|| file.mount.clone());
            node = Some((file.path.clone(), entry.name.clone()));
            entry.target.path.clone()
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
    let mount = mount.as_deref().map(super::mount::place).transpose()?;
    let started = launch::up(&UpOptions {
        path: path.clone(),
        media: arguments.media,
        capacity_bytes: arguments.capacity,
        embedded: false,
        elsewhere_allowed: !chosen,
        node,
    })?;
    let mounted = match &mount {
        None => None,
        Some(at) => match control::mount(
            &path,
            at,
            control::MountOptions { allow_other: arguments.allow_other, no_passthrough: false },
        ) {
            Ok(facts) => Some((at, facts)),
            Err(e) => {
                // Who asked for both has neither, and what was in it before is kept.
                let _ = launch::down(&path, DownOptions { keep: started.reopened, force: true });
                return Err(e);
            }
        },
    };
    if arguments.json {
        failure::print_json(&json!({
            "pool": started.pool,
            "pid": started.pid,
            "uuid": started.identity.uuid,
            "node": started.identity.node,
            "media": started.identity.media.to_string(),
            "backing": started.identity.backing,
            "capacity_bytes": started.identity.capacity_bytes,
            "reopened": started.reopened,
            "costs": started.costs,
            "mounted": mounted.map(|(at, facts)| json!({ "at": at, "data": facts.data, "why": facts.why })),
        }));
    } else {
        failure::put(text(&started, chosen));
        if let Some((at, facts)) = mounted {
            failure::put(super::mount::text(at, &facts));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts every node of a pool file.
fn up_all(file: Option<&Path>) -> Result<ExitCode> {
    let file = pool::file(file, "start all nodes")?;
    // Here first, so that nodes which share a file system do not each make one.
    file.ensure_key()?;
    let path = file.path.to_string_lossy().into_owned();
    everywhere::on_every_node(&file, "start", |node| {
        ["up", "--pool", &path, "--node", &node.name].map(str::to_owned).to_vec()
    })
}

/// `--path` and `--pool` (or FOREBAY_POOL) name the same thing.
fn which(pool: Option<&PathBuf>, path: Option<&PathBuf>) -> Result<Option<PathBuf>> {
    // FOREBAY_POOL alone does not contradict --path: the option is nearer.
    let pool_is_option = std::env::var_os("FOREBAY_POOL").is_none_or(|v| Some(&PathBuf::from(v)) != pool);
    match (pool, path) {
        (Some(a), Some(b)) if a != b && pool_is_option => Err(failure::invalid(
            "cannot tell where the pool is to be",
            format!("--pool says {} and --path says {}", a.display(), b.display()),
            "name one: for `up` they are the same",
        )),
        (_, Some(path)) => Ok(Some(path.clone())),
        (pool, None) => Ok(pool.cloned()),
    }
}

/// What the target is, in a word or two.
pub(crate) fn backing_words(media: &str, backing: Backing) -> String {
    match backing {
        Backing::Tmpfs => format!("{media}, a tmpfs of its own"),
        Backing::Directory => format!("{media}, in its directory"),
        Backing::Detached => format!("{media}, a private tmpfs"),
    }
}

fn text(started: &Started, chosen: bool) -> String {
    let identity = &started.identity;
    let node = if identity.node == 1 { String::new() } else { format!(", node {}", identity.node) };
    let mut text = format!(
        "pool {} is up{node}: {}, {}{}\n",
        started.pool.display(),
        backing_words(&identity.media.to_string(), identity.backing),
        table::bytes(identity.capacity_bytes),
        if started.reopened { ", with its data from before" } else { "" },
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
