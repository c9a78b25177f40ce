//! Writes the pool file of a pool that is started by a list of hosts.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use forebay_data::Medium;

/// Stands for the node's name in paths.
const NAME_MARK: &str = "%n";

/// A host that is to be a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedHost {
    /// The node's name.
    pub name: String,
    /// The name or address at which other nodes reach it.
    pub host: String,
    /// Bytes of its target; by default as `forebay up` chooses. With 0 the node has no target.
    pub capacity_bytes: Option<u64>,
}

impl NamedHost {
    fn has_target(&self) -> bool {
        self.capacity_bytes != Some(0)
    }
}

/// The settings that all nodes share.
#[derive(Clone, Debug)]
pub struct Alike {
    /// The pool's directory on each node; `%n` in it stands for the node's name.
    pub path: PathBuf,
    /// The medium; by default as `forebay up` chooses.
    pub media: Option<Medium>,
    /// The port; by default that of pool files.
    pub port: Option<u16>,
    /// libfabric's provider; none: TCP.
    pub provider: Option<String>,
}

/// Replaces `%n` in a path by the node's name.
pub fn path_on(path: &Path, name: &str) -> PathBuf {
    match path.to_str() {
        Some(text) => PathBuf::from(text.replace(NAME_MARK, name)),
        None => path.to_owned(),
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// The pool file's text. The hosts are in their order, except that those without a target come last, because the first
/// node has the root.
pub fn text(hosts: &[NamedHost], alike: &Alike) -> String {
    let mut text = String::from("# Made by `forebay up`.\n");
    if let Some(provider) = &alike.provider {
        let _ = writeln!(text, "[network]\nprovider = {}\n", quoted(provider));
    }
    let media = alike.media.map(|m| format!("media = {}, ", quoted(&m.to_string()))).unwrap_or_default();
    let (with, without) = hosts.iter().partition::<Vec<_>, _>(|host| host.has_target());
    for named in with.into_iter().chain(without) {
        let NamedHost { name, host, capacity_bytes } = named;
        let path = path_on(&alike.path, name);
        let _ = writeln!(text, "[[node]]\nname = {}\nhost = {}", quoted(name), quoted(host));
        if let Some(port) = alike.port {
            let _ = writeln!(text, "port = {port}");
        }
        let path = quoted(&path.to_string_lossy());
        let capacity = capacity_bytes.map(|c| format!(", capacity = \"{c}\"")).unwrap_or_default();
        let _ = match named.has_target() {
            true => writeln!(text, "target = [{{ {media}path = {path}{capacity} }}]\n"),
            false => writeln!(text, "state = {path}\n"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool_file::PoolFile;

    #[test]
    fn text_is_a_pool_file_of_what_was_asked_for() {
        let host =
            |n: &str, capacity_bytes| NamedHost { name: n.into(), host: format!("{n}-ib"), capacity_bytes };
        let alike = Alike {
            path: "/scratch/it's \"%n\"".into(),
            media: Some(Medium::Ssd),
            port: Some(7),
            provider: Some("verbs;ofi_rxm".into()),
        };
        let file =
            PoolFile::from_text(Path::new("/f"), &text(&[host("a", None), host("b", Some(5 << 30))], &alike))
                .unwrap();
        assert_eq!(file.provider.as_deref(), Some("verbs;ofi_rxm"));
        let b = file.node(Some("b")).unwrap();
        assert_eq!((b.number, b.host.as_str(), b.port), (2, "b-ib", 7));
        assert_eq!(b.dir(), Path::new("/scratch/it's \"b\""));
        assert_eq!((b.first().media, b.first().capacity_bytes), (Some(Medium::Ssd), Some(5 << 30)));
        let plain = Alike { path: "/p".into(), media: None, port: None, provider: None };
        let file = PoolFile::from_text(Path::new("/f"), &text(&[host("a", None)], &plain)).unwrap();
        assert_eq!(file.nodes[0].port, crate::pool_file::DEFAULT_PORT);
        assert_eq!(file.nodes[0].first().capacity_bytes, None);
        // A host without a target is not the first node, which has the root.
        let hosts = [host("none", Some(0)), host("some", Some(9 << 30)), host("more", None)];
        let file = PoolFile::from_text(Path::new("/f"), &text(&hosts, &plain)).unwrap();
        let names: Vec<(&str, bool)> =
            file.nodes.iter().map(|n| (n.name.as_str(), n.is_shard_only())).collect();
        assert_eq!(names, [("some", false), ("more", false), ("none", true)]);
        assert_eq!(file.nodes[2].dir(), Path::new("/p"));
        let nobody = PoolFile::from_text(Path::new("/f"), &text(&hosts[..1], &plain)).unwrap_err();
        assert!(nobody.to_string().contains("no node of it has a target"), "{nobody}");
    }
}
