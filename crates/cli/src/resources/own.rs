//! Forebay's own form: `capacity`, `media`, `mount`, the stores by name, and the directories in front of them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr;

use forebay_tasks::{Durable, Policy, Rule, StoreSettings};
use forebay_types::Result;

use super::contents::{check_disjoint, Attachment, Place, Resources};
use super::tree::{Node, Value};
use crate::arguments::recall;
use crate::backing::Url;
use crate::pool;

const KEYS: [&str; 5] = ["capacity", "media", "mount", "stores", "directories"];
const KEYS_OF_STORE: [&str; 1] = ["url"];
const KEYS_OF_DIRECTORY: [&str; 10] =
    ["at", "store", "url", "read-only", "explicit", "drain", "rules", "durable", "recall", "prestage"];

/// The stores by name, with their lines.
type Stores = BTreeMap<String, Url>;

pub(super) fn resources(root: &Node, place: &Place) -> Result<Resources> {
    let mut resources = Resources::default();
    let mut stores = Stores::new();
    let entries = table(root, place)?;
    for (key, line, node) in entries {
        let at = place.below(key);
        match key {
            "capacity" => {
                let bytes = forebay_server::parse_size(text(node, &at)?);
                resources.capacity = Some(bytes.map_err(|e| at.because(line, &e))?);
            }
            "media" => {
                let media = text(node, &at)?.parse();
                resources.media = Some(media.map_err(|e| at.because(line, &e))?);
            }
            "mount" => resources.mount = Some(PathBuf::from(text(node, &at)?)),
            "stores" => {
                for (name, line, node) in table(node, &at)? {
                    stores.insert(name.to_owned(), store(node, line, &at.below(name))?);
                }
            }
            "directories" => {} // below, when all stores are known
            _ => return Err(place.unknown(key, line, &KEYS)),
        }
    }
    let at = place.below("directories");
    if let Some(node) = root.get("directories") {
        for (i, node) in list(node, &at)?.iter().enumerate() {
            let at = at.below(&format!("[{i}]"));
            let made = directory(node, &stores, &at)?;
            check_disjoint(&made.at, &resources.directories, &at, node.line)?;
            resources.directories.push(made);
        }
    }
    Ok(resources)
}

fn store(node: &Node, line: usize, place: &Place) -> Result<Url> {
    if let Value::Text(url) = &node.value {
        return parse_url(url, line, place);
    }
    for (key, line, _) in table(node, place)? {
        if !KEYS_OF_STORE.contains(&key) {
            return Err(place.unknown(key, line, &KEYS_OF_STORE));
        }
    }
    let url = node.get("url").ok_or_else(|| place.wrong(line, "it has no url"))?;
    parse_url(text(url, &place.below("url"))?, url.line, &place.below("url"))
}

fn parse_url(url: &str, line: usize, place: &Place) -> Result<Url> {
    Url::parse(OsStr::new(url)).map_err(|e| place.because(line, &e))
}

fn directory(node: &Node, stores: &Stores, place: &Place) -> Result<Attachment> {
    let (mut at, mut url) = (None, None);
    let mut settings = StoreSettings::of("");
    let mut prestage = Vec::new();
    let entries = table(node, place)?;
    let line = entries.first().map_or(node.line, |(_, line, _)| *line);
    for (key, line, node) in entries {
        let below = place.below(key);
        match key {
            "at" => at = Some(pool::path_within(OsStr::new(path(node, &below)?))),
            "store" => {
                let name = text(node, &below)?;
                let known = || stores.keys().cloned().collect::<Vec<_>>().join(", ");
                let found = stores.get(name).cloned().ok_or_else(|| {
                    let cure = format!("define it under stores, or name one of them: {}", known());
                    below.wrong(line, format!("there is no store {name:?}")).cure(cure)
                })?;
                url = Some(found);
            }
            "url" => url = Some(parse_url(text(node, &below)?, line, &below)?),
            "read-only" => settings.read_only = flag(node, &below)?,
            "explicit" => settings.explicit = flag(node, &below)?,
            "drain" => settings.drain = parsed::<Policy>(node, &below)?,
            "durable" => settings.durable = parsed::<Durable>(node, &below)?,
            "recall" => {
                // YAML takes `yes` and `no` for booleans.
                let text = match &node.value {
                    Value::Flag(flag) => {
                        if *flag {
                            "yes"
                        } else {
                            "no"
                        }
                    }
                    _ => text(node, &below)?,
                };
                settings.recall = recall(text).map_err(|why| below.wrong(line, why))?;
            }
            "rules" => settings.rules = rules(node, &below)?,
            "prestage" => {
                for (i, node) in list(node, &below)?.iter().enumerate() {
                    prestage.push(path(node, &below.below(&format!("[{i}]")))?.to_owned());
                }
            }
            _ => return Err(place.unknown(key, line, &KEYS_OF_DIRECTORY)),
        }
    }
    if node.get("store").is_some() && node.get("url").is_some() {
        return Err(place.wrong(line, "it has both store and url: leave one out"));
    }
    let at = at.ok_or_else(|| place.wrong(line, "it has no `at`: the directory in the pool"))?;
    let url = url.ok_or_else(|| place.wrong(line, "it has neither store nor url"))?;
    settings.url = url.text.clone();
    Ok(Attachment { at, url, settings, prestage })
}

/// `["*.tmp=temporary"]`, or a table of patterns and policies.
fn rules(node: &Node, place: &Place) -> Result<Vec<Rule>> {
    if let Some(entries) = node.entries() {
        let rule = |(pattern, line, node): (&str, usize, &Node)| {
            let below = place.below(pattern);
            let rule = Rule { pattern: pattern.to_owned(), policy: parsed::<Policy>(node, &below)? };
            rule.checked().map_err(|why| below.wrong(line, why))
        };
        return entries.into_iter().map(rule).collect();
    }
    let nodes = list(node, place)?;
    nodes.iter().enumerate().map(|(i, node)| parsed::<Rule>(node, &place.below(&format!("[{i}]")))).collect()
}

fn parsed<T: FromStr<Err = String>>(node: &Node, place: &Place) -> Result<T> {
    text(node, place)?.parse().map_err(|why: String| place.wrong(node.line, why))
}

pub(super) fn table<'n>(node: &'n Node, place: &Place) -> Result<Vec<(&'n str, usize, &'n Node)>> {
    let entries =
        node.entries().ok_or_else(|| place.wrong(node.line, "a table is wanted: keys with values"))?;
    for (i, (key, line, _)) in entries.iter().enumerate() {
        if entries[..i].iter().any(|(other, ..)| other == key) {
            return Err(place.below(key).wrong(*line, "it comes twice"));
        }
    }
    Ok(entries)
}

pub(super) fn list<'n>(node: &'n Node, place: &Place) -> Result<&'n [Node]> {
    match &node.value {
        Value::List(nodes) => Ok(nodes),
        _ => Err(place.wrong(node.line, "a list is wanted")),
    }
}

pub(super) fn text<'n>(node: &'n Node, place: &Place) -> Result<&'n str> {
    match &node.value {
        Value::Text(text) => Ok(text),
        _ => Err(place.wrong(node.line, "a text is wanted")),
    }
}

/// A path, which is not empty: it is not taken for all there is.
fn path<'n>(node: &'n Node, place: &Place) -> Result<&'n str> {
    match text(node, place)? {
        "" => Err(place.wrong(node.line, "it is empty: write / for the root")),
        path => Ok(path),
    }
}

fn flag(node: &Node, place: &Place) -> Result<bool> {
    match &node.value {
        Value::Flag(flag) => Ok(*flag),
        _ => Err(place.wrong(node.line, "true or false is wanted")),
    }
}
