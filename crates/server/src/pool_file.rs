//! The pool file: the nodes of a pool, their addresses, and their targets. It is TOML, and the same on all nodes:
//!
//! ```toml
//! name = "case"                    # optional, for messages
//! key = "/home/u/case.key"         # the pool's secret; optional: the pool file's name, ending in .key
//! mount = "/mnt/case"              # optional: where every node mounts the pool
//!
//! [network]
//! provider = "tcp;ofi_rxm"         # optional: libfabric's name, or "auto"
//!
//! [[node]]
//! name = "n1"                      # the host's name, or the argument of `--node`
//! host = "10.0.0.1"                # name or address at which other nodes reach it
//! port = 7850                      # optional
//! target = [{ media = "dram", path = "/tmp/case", capacity = "8GiB" }]      # several (new ones at the end), or none
//!
//! [[node]]
//! name = "login1"                  # a node without a target: its programs' files lie on other nodes
//! state = "/tmp/case"              # optional: the pool's directory there
//! ```
//! A node's number is its position in the file, from 1, or the value of `number`. It is bound to the node's data for
//! ever, so a node that leaves the pool keeps its position. Unknown settings are refused, so that a misspelt one is not
//! silently ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_data::Medium;
use forebay_types::limits::{NODES_MAX, NODE_NUMBER_MAX, NODE_TARGETS_MAX};
use forebay_types::{Code, Error, NodeId, Result};
use serde::{Deserialize, Serialize};

/// The port of a node whose entry names none.
pub const DEFAULT_PORT: u16 = 7850;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    #[serde(default)]
    name: String,
    key: Option<PathBuf>,
    mount: Option<PathBuf>,
    #[serde(default)]
    network: NetworkText,
    #[serde(default)]
    node: Vec<NodeText>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct NetworkText {
    provider: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeText {
    name: String,
    number: Option<u16>,
    host: Option<String>,
    port: Option<u16>,
    state: Option<PathBuf>,
    #[serde(default)]
    target: Vec<TargetText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetText {
    media: Option<String>,
    path: PathBuf,
    capacity: Option<String>,
}

/// A target of a node, as the pool file describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetEntry {
    /// The medium; by default memory.
    pub media: Option<Medium>,
    /// The target's directory; for a node's first target, the pool's directory.
    pub path: PathBuf,
    /// Capacity in bytes; by default as `forebay up` chooses.
    pub capacity_bytes: Option<u64>,
}

/// A node of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeEntry {
    /// The node's name.
    pub name: String,
    /// The node's number.
    pub number: u16,
    /// Name or address at which other nodes reach it.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Its targets, in the order of their numbers; none of a node whose programs' files lie on other nodes.
    pub targets: Vec<TargetEntry>,
    /// The directory for the shard of a node without a target.
    pub state: Option<TargetEntry>,
}

impl NodeEntry {
    /// The directory with its shard: its first target, or `state` on a node without one.
    pub fn first(&self) -> &TargetEntry {
        self.state.as_ref().unwrap_or_else(|| &self.targets[0])
    }

    /// True when the node has no target.
    pub fn is_shard_only(&self) -> bool {
        self.targets.is_empty()
    }

    /// The pool's directory on the node.
    pub fn dir(&self) -> &Path {
        &self.first().path
    }
}

/// A valid pool file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolFile {
    /// The file's path.
    pub path: PathBuf,
    /// The pool's name.
    pub name: String,
    /// The file of its secret.
    pub key: PathBuf,
    /// The directory on which every node mounts the pool.
    pub mount: Option<PathBuf>,
    /// libfabric's provider; none: TCP.
    pub provider: Option<String>,
    /// The nodes, in the order of their numbers.
    pub nodes: Vec<NodeEntry>,
}

/// The description of the pool that a node's daemon gets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Membership {
    /// The pool's name.
    pub pool: String,
    /// This node's number.
    pub node: u16,
    /// The file of the secret.
    pub key: PathBuf,
    /// See [`PoolFile::provider`].
    pub provider: Option<String>,
    /// All nodes, this one too.
    pub nodes: Vec<Member>,
    /// The pool's directory.
    pub dir: PathBuf,
    /// The ID of the node's data: a number drawn when the data were made, never 0.
    pub data: u32,
    /// True when the node's data are new.
    pub fresh: bool,
    /// The number of this node in the pool file, if that number belonged to data that are lost.
    pub instead_of: Option<u16>,
}

impl Membership {
    /// Fills in the node's number and data ID from the identity of its data.
    pub(crate) fn take(&mut self, identity: &crate::identity::PoolIdentity, dir: &Path, fresh: bool) {
        for node in self.nodes.iter_mut().filter(|n| n.number == self.node) {
            node.number = identity.node;
        }
        self.node = identity.node;
        self.dir = dir.to_owned();
        self.data = u32::from_str_radix(identity.uuid.get(..8).unwrap_or_default(), 16).unwrap_or(1).max(1);
        self.fresh = fresh;
        self.instead_of = identity.instead_of;
    }
}

/// A node, as the other nodes need it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// The node's name.
    pub name: String,
    /// The node's number.
    pub number: u16,
    /// Name or address at which other nodes reach it.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The number of its targets.
    pub targets: u16,
    /// The media of its targets.
    pub media: Vec<String>,
}

impl PoolFile {
    /// Reads and checks a pool file.
    ///
    /// # Errors
    /// [`Code::Invalid`], with the place in the file, when the file is invalid.
    pub fn read(path: &Path) -> Result<PoolFile> {
        let path = std::path::absolute(path)
            .map_err(|e| Error::io(format!("cannot find {}", path.display()), &e))?;
        let text = std::fs::read_to_string(&path)
            .map_err(|e| Error::io(format!("cannot read the pool file {}", path.display()), &e))?;
        PoolFile::from_text(&path, &text)
    }

    /// Checks a pool file's text as if it lay at `path`.
    ///
    /// # Errors
    /// As [`PoolFile::read`].
    pub fn from_text(path: &Path, text: &str) -> Result<PoolFile> {
        let wrong = |why: String| {
            Error::new(Code::Invalid, format!("cannot use the pool file {}", path.display())).why(why)
        };
        if let Err(e) = text.parse::<toml::Table>() {
            return Err(wrong(format!(
                "it is not a directory, which would be a pool, and not TOML either: {e}"
            ))
            .cure("name a directory, or a pool file as `man forebay-pool` shows it"));
        }
        let file: FileText = toml::from_str(text)
            .map_err(|e| wrong(e.to_string()).cure("`man forebay-pool` shows what a pool file may hold"))?;
        if file.node.is_empty() {
            return Err(wrong("it names no node".into())
                .cure("add one: [[node]] with name, host and target = [{ path = … }]"));
        }
        if file.node.iter().all(|node| node.target.is_empty()) {
            return Err(wrong("no node of it has a target, and files lie on targets".into())
                .cure("give one to a node at least: target = [{ path = … }]"));
        }
        if file.node.len() > NODES_MAX {
            return Err(wrong(format!("it names {} nodes, and {NODES_MAX} is the most", file.node.len())));
        }
        let mut nodes = Vec::with_capacity(file.node.len());
        for (i, node) in file.node.into_iter().enumerate() {
            nodes.push(checked(node, i as u16 + 1, path).map_err(wrong)?);
        }
        find_duplicates(&nodes).map_err(wrong)?;
        nodes.sort_by_key(|n| n.number);
        if let Some(first) = nodes.iter().find(|n| n.number == NodeId::FIRST.0 && n.is_shard_only()) {
            return Err(wrong(format!(
                "node {:?} is number 1, which has the pool's root, and has no target",
                first.name
            ))
            .cure("list a node with a target first, or give one number = 1 and this one another"));
        }
        if let Some(relative) = file.mount.iter().find(|m| !m.is_absolute()) {
            return Err(wrong(format!("mount {} is not an absolute path", relative.display())));
        }
        let beside = |key: PathBuf| path.parent().map_or(key.clone(), |dir| dir.join(&key));
        let key = file.key.map_or_else(|| path.with_extension("key"), beside);
        let provider = file.network.provider.filter(|p| p != "auto");
        Ok(PoolFile { path: path.to_owned(), name: file.name, key, mount: file.mount, provider, nodes })
    }

    /// Makes the pool's secret unless it exists. If the nodes share a file system, the first node that starts makes it
    /// for all; otherwise a user must copy the file to the other nodes.
    ///
    /// # Errors
    /// [`Code::AccessDenied`] when other users than its owner may read it.
    pub fn ensure_key(&self) -> Result<()> {
        match forebay_fabric::secret_file::make(&self.key) {
            Err(e) if e.code == Code::Exists => {}
            made => return made.map(drop),
        }
        // Another process may have made the file and not filled it yet.
        let mut tries = 0;
        loop {
            match forebay_fabric::secret_file::read(&self.key) {
                Err(e) if e.code == Code::Invalid && tries < 50 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                read => return read.map(drop),
            }
        }
    }

    /// The node with this name; without a name, the node that is this host.
    ///
    /// # Errors
    /// [`Code::NotFound`], with a list of the existing nodes.
    pub fn node(&self, name: Option<&str>) -> Result<&NodeEntry> {
        let uname = rustix::system::uname();
        let host = uname.nodename().to_string_lossy().into_owned();
        let short = host.split('.').next().unwrap_or_default();
        let found = match name {
            Some(name) => self.nodes.iter().find(|n| n.name == name),
            None if self.nodes.len() == 1 => self.nodes.first(),
            None => self.nodes.iter().find(|n| n.name == host || n.name == short || n.host == host),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.nodes.iter().map(|n| n.name.as_str()).take(16).collect();
            let which = name.map_or(format!("this host, {host}"), |n| format!("node {n:?}"));
            Error::new(Code::NotFound, format!("cannot find {which} in {}", self.path.display()))
                .why(format!("it names {}", names.join(", ")))
                .cure("say which one this is: FOREBAY_NODE=NAME, or with `up` --node NAME")
        })
    }

    /// The description of the pool for the daemon of a node.
    pub fn membership(&self, node: &NodeEntry) -> Membership {
        let members = self.nodes.iter().map(|n| Member {
            name: n.name.clone(),
            number: n.number,
            host: n.host.clone(),
            port: n.port,
            targets: n.targets.len() as u16,
            media: n
                .targets
                .iter()
                .map(|target| target.media.map_or_else(|| "-".to_owned(), |m| m.to_string()))
                .collect(),
        });
        Membership {
            pool: self.name.clone(),
            node: node.number,
            key: self.key.clone(),
            provider: self.provider.clone(),
            nodes: members.collect(),
            dir: PathBuf::new(),
            data: 0,
            fresh: false,
            instead_of: None,
        }
    }
}

fn checked(node: NodeText, place: u16, file: &Path) -> std::result::Result<NodeEntry, String> {
    let at = format!("node {:?}", node.name);
    if node.name.is_empty() || node.name.contains(['/', '\0']) {
        return Err(format!("{at}: a name has at least one character, and no slash"));
    }
    let number = node.number.unwrap_or(place);
    if !NodeId(number).is_valid() {
        return Err(format!("{at}: its number {number} is not between 1 and {NODE_NUMBER_MAX}"));
    }
    if node.target.len() > NODE_TARGETS_MAX {
        let n = node.target.len();
        return Err(format!("{at}: it gives {n} targets, and {NODE_TARGETS_MAX} is the most"));
    }
    let state = match (node.state, node.target.is_empty()) {
        (Some(path), false) => {
            return Err(format!(
            "{at}: state = {path:?} is for nodes without a target; this one's state is on its first target"
        ))
        }
        (Some(path), true) if !path.is_absolute() => {
            return Err(format!("{at}: state {} is not an absolute path", path.display()));
        }
        (path, true) => Some(TargetEntry {
            media: None,
            path: path.unwrap_or_else(|| default_state(file, &node.name)),
            capacity_bytes: None,
        }),
        (None, false) => None,
    };
    let targets = node.target.into_iter().map(|target| checked_target(target, &at));
    let targets = targets.collect::<std::result::Result<Vec<_>, _>>()?;
    for (i, inner) in targets.iter().enumerate() {
        let within = |(j, outer): (usize, &TargetEntry)| {
            i != j && inner.path != outer.path && inner.path.starts_with(&outer.path)
        };
        if targets.iter().enumerate().any(within) {
            return Err(format!("{at}: target {} is within another target", inner.path.display()));
        }
    }
    let host = node.host.unwrap_or_else(|| node.name.clone());
    let port = node.port.unwrap_or(DEFAULT_PORT);
    Ok(NodeEntry { name: node.name, number, host, port, targets, state })
}

/// The default directory for the shard of a node without a target.
fn default_state(file: &Path, node: &str) -> PathBuf {
    let pool = file.file_stem().unwrap_or_default().to_string_lossy();
    crate::directory::user_directory_path().join(format!("{pool}-{node}"))
}

fn checked_target(target: TargetText, at: &str) -> std::result::Result<TargetEntry, String> {
    if !target.path.is_absolute() {
        return Err(format!("{at}: target {} is not an absolute path", target.path.display()));
    }
    let media = target.media.map(|m| m.parse::<Medium>()).transpose().map_err(|e| format!("{at}: {e}"))?;
    let capacity = target.capacity.map(|c| forebay_data::parse_size(&c)).transpose();
    let capacity_bytes = capacity.map_err(|e| format!("{at}: {e}"))?;
    Ok(TargetEntry { media, path: target.path, capacity_bytes })
}

/// Refuses names, numbers, addresses and targets that two nodes share.
fn find_duplicates(nodes: &[NodeEntry]) -> std::result::Result<(), String> {
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    for node in nodes {
        let targets = node.targets.iter().chain(&node.state).map(|target| {
            let path: PathBuf = target.path.components().collect();
            ("target", format!("{} on {}", path.display(), node.host))
        });
        let own = [
            ("name", node.name.clone()),
            ("number", node.number.to_string()),
            ("address", format!("{}:{}", node.host, node.port)),
        ];
        for (what, which) in own.into_iter().chain(targets) {
            if let Some(other) = seen.insert(format!("{what} {which}"), &node.name) {
                if *other == node.name && what == "target" {
                    return Err(format!("{what} {which} is listed twice by node {other:?}"));
                }
                return Err(format!(
                    "{what} {which} is listed twice, by node {other:?} and node {:?}",
                    node.name
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PoolFile> {
        PoolFile::from_text(Path::new("/etc/p.toml"), text)
    }

    const TWO: &str = r#"
        mount = "/mnt/p"
        [[node]]
        name = "a"
        host = "10.0.0.1"
        target = [{ media = "dram", path = "/tmp/p", capacity = "1GiB" }]
        [[node]]
        name = "b"
        port = 9
        target = [{ path = "/tmp/p" }]
    "#;

    #[test]
    fn parse_of_a_whole_file_gives_numbers_and_defaults() {
        let file = parse(TWO).unwrap();
        assert_eq!(file.key, PathBuf::from("/etc/p.key"));
        assert_eq!(file.provider, None);
        let [a, b] = &file.nodes[..] else { panic!("{file:?}") };
        assert_eq!((a.number, a.host.as_str(), a.port), (1, "10.0.0.1", DEFAULT_PORT));
        assert_eq!((b.number, b.host.as_str(), b.port), (2, "b", 9));
        assert_eq!(a.first().capacity_bytes, Some(1 << 30));
        assert_eq!(file.node(Some("b")).unwrap().number, 2);
        let error = file.node(Some("c")).unwrap_err();
        assert!(error.to_string().contains("it names a, b"), "{error}");
        let membership = file.membership(b);
        assert_eq!((membership.node, membership.nodes.len()), (2, 2));
    }

    #[test]
    fn parse_of_nodes_without_a_target_gives_them_a_place_for_their_shard() {
        let rest = "[[node]]\nname = \"c\"\n[[node]]\nname = \"d\"\nstate = \"/var/p\"\n";
        let file = parse(&format!("{TWO}{rest}")).unwrap();
        let [a, b, c, d] = &file.nodes[..] else { panic!("{file:?}") };
        assert_eq!([a, b, c, d].map(NodeEntry::is_shard_only), [false, false, true, true]);
        assert_eq!(d.dir(), Path::new("/var/p"));
        assert!(c.dir().ends_with("p-c") && c.dir().is_absolute(), "{:?}", c.dir());
        let given: Vec<u16> = file.membership(c).nodes.iter().map(|n| n.targets).collect();
        assert_eq!(given, [1, 1, 0, 0]);
        // The first node in the file may have no target, if it is not number 1.
        let first = "[[node]]\nname = \"c\"\nnumber = 3\n[[node]]\nname = \"d\"\nnumber = 1\ntarget = [{ path = \"/x\" }]";
        assert_eq!(parse(first).unwrap().nodes[0].name, "d");
    }

    #[test]
    fn parse_of_what_makes_no_sense_names_it() {
        let node = |rest: &str| format!("[[node]]\nname = \"a\"\n{rest}\n");
        let two = |rest: &str| format!("{}{}", node("target = [{ path = \"/x\" }]"), rest);
        for (text, word) in [
            ("".to_owned(), "names no node"),
            ("colour = 1".to_owned(), "colour"),
            (node("target = [{ path = \"/x\", capacity = \"4 parsecs\" }]"), "parsecs"),
            (node("target = [{ path = \"/x\", media = \"tape\" }]"), "tape"),
            (node("target = [{ path = \"/x\", speed = 3 }]"), "speed"),
            (node("target = [{ path = \"x\" }]"), "absolute"),
            ("x".to_owned(), "not a directory"),
            (node(""), "no node of it has a target"),
            (node("state = \"/s\""), "no node of it has a target"),
            (two("[[node]]\nname = \"b\"\nstate = \"s\""), "state s is not an absolute path"),
            (
                two("[[node]]\nname = \"b\"\nstate = \"/s\"\ntarget = [{ path = \"/y\" }]"),
                "state is on its first target",
            ),
            (
                two("[[node]]\nname = \"b\"\nhost = \"a\"\nport = 7\nstate = \"/x\""),
                "target /x on a is listed twice",
            ),
            (
                "[[node]]\nname = \"c\"\n[[node]]\nname = \"d\"\ntarget = [{ path = \"/x\" }]".to_owned(),
                "node \"c\" is number 1, which has the pool's root",
            ),
            (
                node("target = [{ path = \"/x\" }, { path = \"/x/.\" }]"),
                "target /x on a is listed twice by node \"a\"",
            ),
            (node("target = [{ path = \"/x\" }, { path = \"/x/y\" }]"), "/x/y is within another"),
            (node(&format!("target = [{}]", "{ path = \"/x\" },".repeat(9))), "gives 9 targets, and 8"),
            (
                two("[[node]]\nname = \"a\"\nhost = \"h\"\ntarget = [{ path = \"/y\" }]"),
                "name a is listed twice",
            ),
            (
                two("[[node]]\nname = \"b\"\nhost = \"a\"\nport = 7\ntarget = [{ path = \"/x\" }]"),
                "target /x on a is listed twice",
            ),
            (
                two("[[node]]\nname = \"b\"\nhost = \"a\"\ntarget = [{ path = \"/y\" }]"),
                "address a:7850 is listed twice",
            ),
            (
                two("[[node]]\nname = \"b\"\nnumber = 1\ntarget = [{ path = \"/y\" }]"),
                "number 1 is listed twice",
            ),
            (two("[network]\nprovider = \"tcp\"\nfast = true"), "fast"),
        ] {
            let error = parse(&text).expect_err(&text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
