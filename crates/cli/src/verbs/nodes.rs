//! Targets by the names of their nodes, as users write them: `node` or `node:target`.

use std::cell::OnceCell;
use std::path::PathBuf;

use forebay_server::control;
use forebay_types::{node_of, target_of, Code, Error, NodeId, Result};
use serde_json::Value;

/// A node of the pool.
pub(super) struct Known {
    pub(super) number: u16,
    pub(super) name: String,
    /// How many targets it has; `None` if the node cannot be reached.
    pub(super) targets: Option<usize>,
}

/// The pool's nodes, fetched once, on first use.
pub(super) struct Nodes {
    pool: PathBuf,
    known: OnceCell<Vec<Known>>,
}

impl Nodes {
    /// Those of the pool in a directory.
    pub(super) fn of(pool: PathBuf) -> Nodes {
        Nodes { pool, known: OnceCell::new() }
    }

    pub(super) fn all(&self) -> &[Known] {
        self.known.get_or_init(|| {
            let Ok(status) = control::status(&self.pool) else { return Vec::new() };
            let list = |value: &Value| value.as_array().map(Vec::len);
            let mine = Known {
                number: status.node,
                name: status.more.get("node_name").and_then(Value::as_str).unwrap_or_default().to_owned(),
                targets: status.more.get("targets").and_then(list),
            };
            let others = status.more.get("nodes").and_then(Value::as_array).into_iter().flatten();
            let others = others.filter_map(|node| {
                Some(Known {
                    number: node["node"].as_u64()? as u16,
                    name: node["name"].as_str().unwrap_or_default().to_owned(),
                    targets: list(&node["targets"]),
                })
            });
            std::iter::once(mine).chain(others).collect()
        })
    }

    /// The target that a word of the command line names.
    pub(super) fn target(&self, word: &str) -> Result<u32> {
        let bad = |why: String| Error::new(Code::Invalid, format!("cannot use target {word:?}")).why(why);
        let (node, index) = match word.rsplit_once(':') {
            Some((node, index)) => {
                (node, index.parse().map_err(|_| bad(format!("{index:?} is no number of a target")))?)
            }
            None => (word, 0),
        };
        if node.is_empty() {
            return Err(bad("it names no node".into()));
        }
        let number = node.parse::<u16>().ok();
        let found = self.all().iter().find(|k| k.name == node || Some(k.number) == number);
        let found = found.ok_or_else(|| {
            let shown = |k: &Known| match k.name.is_empty() {
                true => k.number.to_string(),
                false => format!("{} ({})", k.name, k.number),
            };
            let all: Vec<String> = self.all().iter().map(shown).collect();
            bad(format!("the pool has no node {node:?}")).cure(format!("it has {}", all.join(", ")))
        })?;
        match found.targets {
            Some(0) => Err(bad(format!("node {node} has no target: no file lies on it"))
                .cure("`forebay status` tells which nodes have some")),
            Some(count) if usize::from(index) >= count => Err(bad(format!(
                "node {node} has {count} target{}, and the first is number 0",
                if count == 1 { "" } else { "s" }
            ))),
            _ => Ok(target_of(NodeId(found.number), index)),
        }
    }

    /// A target's name for display.
    pub(super) fn name(&self, target: u32) -> String {
        let (node, index) = (node_of(target), target as u16);
        let found = self.all().iter().find(|k| k.number == node.0 && !k.name.is_empty());
        let node = found.map_or_else(|| node.to_string(), |k| k.name.clone());
        if index == 0 {
            node
        } else {
            format!("{node}:{index}")
        }
    }
}
