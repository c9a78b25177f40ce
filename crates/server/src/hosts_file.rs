//! The pool file of a pool that was started by a list of hosts.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use forebay_data::Medium;

/// Stands for the node's name in paths.
const NAME_MARK: &str = "%n";

/// A host that is to be a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedHost {
    /// By which people call it.
    pub name: String,
    /// Where the others reach it.
    pub host: String,
}

/// What all nodes have alike.
#[derive(Clone, Debug)]
pub struct Alike {
    /// The pool's directory on each; `%n` in it is the node's name.
    pub path: PathBuf,
    /// The medium; by default as `forebay up` chooses.
    pub media: Option<Medium>,
    /// Bytes; likewise.
    pub capacity_bytes: Option<u64>,
    /// The port; by default that of pool files.
    pub port: Option<u16>,
    /// libfabric's provider; none: TCP.
    pub provider: Option<String>,
}

/// A path with the node's name where `%n` is.
pub fn path_on(path: &Path, name: &str) -> PathBuf {
    match path.to_str() {
        Some(text) => PathBuf::from(text.replace(NAME_MARK, name)),
        None => path.to_owned(),
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// The pool file.
pub fn text(hosts: &[NamedHost], alike: &Alike) -> String {
    let mut text = String::from("# Made by `forebay up`.\n");
    if let Some(provider) = &alike.provider {
        let _ = writeln!(text, "[network]\nprovider = {}\n", quoted(provider));
    }
    let media = alike.media.map(|m| format!("media = {}, ", quoted(&m.to_string()))).unwrap_or_default();
    let capacity = alike.capacity_bytes.map(|c| format!(", capacity = \"{c}\"")).unwrap_or_default();
    for NamedHost { name, host } in hosts {
        let path = path_on(&alike.path, name);
        let _ = writeln!(text, "[[node]]\nname = {}\nhost = {}", quoted(name), quoted(host));
        if let Some(port) = alike.port {
            let _ = writeln!(text, "port = {port}");
        }
        let _ =
            writeln!(text, "target = [{{ {media}path = {}{capacity} }}]\n", quoted(&path.to_string_lossy()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool_file::PoolFile;

    #[test]
    fn text_is_a_pool_file_of_what_was_asked_for() {
        let host = |n: &str| NamedHost { name: n.into(), host: format!("{n}-ib") };
        let alike = Alike {
            path: "/scratch/it's \"%n\"".into(),
            media: Some(Medium::Ssd),
            capacity_bytes: Some(5 << 30),
            port: Some(7),
            provider: Some("verbs;ofi_rxm".into()),
        };
        let file = PoolFile::from_text(Path::new("/f"), &text(&[host("a"), host("b")], &alike)).unwrap();
        assert_eq!(file.provider.as_deref(), Some("verbs;ofi_rxm"));
        let b = file.node(Some("b")).unwrap();
        assert_eq!((b.number, b.host.as_str(), b.port), (2, "b-ib", 7));
        assert_eq!(b.dir(), Path::new("/scratch/it's \"b\""));
        assert_eq!((b.first().media, b.first().capacity_bytes), (Some(Medium::Ssd), Some(5 << 30)));
        let plain =
            Alike { path: "/p".into(), media: None, capacity_bytes: None, port: None, provider: None };
        let file = PoolFile::from_text(Path::new("/f"), &text(&[host("a")], &plain)).unwrap();
        assert_eq!(file.nodes[0].port, crate::pool_file::DEFAULT_PORT);
        assert_eq!(file.nodes[0].first().capacity_bytes, None);
    }
}
