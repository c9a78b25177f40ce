//! The form of echofs: `global-settings`, `backends` and `resources`.
//!
//! | echofs | here |
//! |---|---|
//! | `root-dir` | the store, at the root of the pool |
//! | `mount-dir` | where the pool is mounted |
//! | `capacity` of the backends | the pool's capacity, together |
//! | a resource | its data are copied into the pool at once; its `flags` are the policy |
//! | files that are no resource | temporary, as new files are there |
//!
//! Persistent files go back to where they came from: there is no results directory. What else is there only tunes
//! echofs; a note says that it is ignored.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use forebay_tasks::{DrainPolicy, Policy, Rule, StoreSettings};
use forebay_types::Result;

use super::contents::{Attachment, Place, Resources};
use super::own::{list, table, text};
use super::tree::{Node, Value};
use crate::backing::Url;

const KEYS: [&str; 3] = ["global-settings", "backends", "resources"];
const IGNORED_SETTINGS: [&str; 6] =
    ["results-dir", "log-file", "workers", "transfer-size", "debug", "api-sockfile"];
const SETTINGS: [&str; 2] = ["root-dir", "mount-dir"];
const KEYS_OF_BACKEND: [&str; 2] = ["id", "capacity"];
const IGNORED_OF_BACKEND: [&str; 3] = ["type", "daxfs", "segment-size"];
const KEYS_OF_RESOURCE: [&str; 3] = ["path", "backend", "flags"];

pub(super) fn is_of_echofs(root: &Node) -> bool {
    root.get("global-settings").is_some() || root.get("backends").is_some()
}

/// A directory's path without slashes at its end.
fn trimmed(text: &str) -> &str {
    match text.trim_end_matches('/') {
        "" if !text.is_empty() => "/",
        text => text,
    }
}

pub(super) fn resources(root: &Node, place: &Place) -> Result<Resources> {
    let mut resources = Resources::default();
    let mut top: Option<(PathBuf, usize)> = None;
    let mut backends: Vec<String> = Vec::new();
    for (key, line, node) in table(root, place)? {
        let at = place.below(key);
        match key {
            "global-settings" => settings(node, &at, &mut top, &mut resources)?,
            "backends" => {
                for (i, node) in list(node, &at)?.iter().enumerate() {
                    backends.push(backend(node, &at.below(&format!("[{i}]")), &mut resources)?);
                }
            }
            "resources" => {} // below, when the settings are known
            _ => return Err(place.unknown(key, line, &KEYS)),
        }
    }
    let missing = || place.below("global-settings").wrong(root.line, "it has no root-dir: the slow storage");
    let (directory, line) = top.ok_or_else(missing)?;
    let url = Url::parse(directory.as_os_str())
        .map_err(|e| place.below("global-settings.root-dir").because(line, &e))?;
    let mut settings = StoreSettings::of(&url.text);
    settings.drain = Policy::of(DrainPolicy::Never);
    let mut prestage = Vec::new();
    let at = place.below("resources");
    let nodes = match root.get("resources") {
        // An empty list may be written as nothing.
        Some(Node { value: Value::Other, .. }) | None => &[][..],
        Some(node) => list(node, &at)?,
    };
    for (i, node) in nodes.iter().enumerate() {
        let (path, policy) = resource(node, &directory, &backends, &at.below(&format!("[{i}]")))?;
        // The resource itself, and if it is a directory everything below.
        for pattern in [path.clone(), format!("{path}/**")] {
            // A name alone would match anywhere.
            let pattern = if pattern.contains('/') { pattern } else { format!("**/{pattern}") };
            let rule = Rule { pattern, policy }.checked().map_err(|why| at.wrong(node.line, why))?;
            settings.rules.push(rule);
        }
        prestage.push(path);
    }
    resources.directories.push(Attachment { at: b"/".to_vec(), url, settings, prestage });
    Ok(resources)
}

fn settings(
    node: &Node,
    place: &Place,
    top: &mut Option<(PathBuf, usize)>,
    resources: &mut Resources,
) -> Result<()> {
    for (key, line, node) in table(node, place)? {
        let at = place.below(key);
        match key {
            "root-dir" => {
                let path = PathBuf::from(trimmed(text(node, &at)?));
                if !path.is_absolute() {
                    return Err(at.wrong(line, "it is no absolute path"));
                }
                *top = Some((path, line));
            }
            "mount-dir" => resources.mount = Some(PathBuf::from(trimmed(text(node, &at)?))),
            "results-dir" => resources.notes.push(format!(
                "line {line}: results-dir is ignored: persistent files go back to root-dir under their own names"
            )),
            key if IGNORED_SETTINGS.contains(&key) => {
                resources.notes.push(format!("line {line}: {key} is ignored: it tunes echofs"));
            }
            _ => return Err(place.unknown(key, line, &[&SETTINGS[..], &IGNORED_SETTINGS[..]].concat())),
        }
    }
    Ok(())
}

/// Reads a backend: returns its id, and adds its capacity to the capacity of the pool.
fn backend(node: &Node, place: &Place, resources: &mut Resources) -> Result<String> {
    let mut id = None;
    for (key, line, node) in table(node, place)? {
        let at = place.below(key);
        match key {
            "id" => id = Some(text(node, &at)?.to_owned()),
            "capacity" => {
                let size: String = text(node, &at)?.split_whitespace().collect();
                let bytes = forebay_server::parse_size(&size).map_err(|e| at.because(line, &e))?;
                resources.capacity = Some(resources.capacity.unwrap_or(0).saturating_add(bytes));
            }
            key if IGNORED_OF_BACKEND.contains(&key) => {}
            _ => {
                return Err(place.unknown(
                    key,
                    line,
                    &[&KEYS_OF_BACKEND[..], &IGNORED_OF_BACKEND[..]].concat(),
                ))
            }
        }
    }
    id.ok_or_else(|| place.wrong(node.line, "it has no id"))
}

/// A resource's path below the directory, and its policy.
fn resource(node: &Node, directory: &Path, backends: &[String], place: &Place) -> Result<(String, Policy)> {
    let (mut path, mut policy) = (None, Policy::of(DrainPolicy::Never));
    for (key, line, node) in table(node, place)? {
        let at = place.below(key);
        match key {
            "path" => {
                let text = trimmed(text(node, &at)?);
                let below = Path::new(OsStr::new(text)).strip_prefix(directory);
                let below = below.ok().and_then(Path::to_str).filter(|below| !below.is_empty());
                let below = below.ok_or_else(|| {
                    at.wrong(line, format!("{text} is not below root-dir, {}", directory.display()))
                })?;
                path = Some(below.to_owned());
            }
            "backend" => {
                let id = text(node, &at)?;
                if !backends.iter().any(|known| known == id) {
                    let cure = format!("name one of the backends: {}", backends.join(", "));
                    return Err(at.wrong(line, format!("there is no backend {id:?}")).cure(cure));
                }
            }
            "flags" => policy = flags(text(node, &at)?, line, &at)?,
            _ => return Err(place.unknown(key, line, &KEYS_OF_RESOURCE)),
        }
    }
    let path = path.ok_or_else(|| place.wrong(node.line, "it has no path"))?;
    Ok((path, policy))
}

fn flags(text: &str, line: usize, place: &Place) -> Result<Policy> {
    let mut policy = Policy::of(DrainPolicy::Never);
    for word in text.split([',', '|', ' ']).filter(|word| !word.is_empty()) {
        match word {
            "persistent" => policy.drain = DrainPolicy::Close,
            "temporary" => {}
            // For the next job: it stays, and is kept longest.
            "reusable" => policy = Policy { drain: DrainPolicy::Close, reusable: true, ..policy },
            _ => {
                let error = place.wrong(line, format!("{word:?} is no flag"));
                return Err(error.cure("write persistent, temporary or reusable"));
            }
        }
    }
    Ok(policy)
}
