//! Stage-outs from a pool that has lost a node: what the other nodes have is staged out, what is lost is named.

use std::path::Path;

use serde::Deserialize;

use super::command;
use crate::table;

/// In the directory of what is kept of a run: the names of what was lost, a line each.
pub(crate) const LOST_FILE: &str = "lost";

/// The nodes of a pool that do not answer, by name. Fails if its daemon on this node does not either.
pub(crate) fn nodes_gone(pool: &Path) -> std::result::Result<Vec<String>, String> {
    // It fails if one of the nodes is not up.
    let (text, why) = command::answered(pool, &["status", "--json"])?;
    if text.trim().is_empty() {
        Err(why)
    } else {
        Ok(gone_of(&text))
    }
}

fn gone_of(status: &str) -> Vec<String> {
    let status: serde_json::Value = serde_json::from_str(status).unwrap_or_default();
    let nodes = status["nodes"].as_array().into_iter().flatten();
    let gone = nodes.filter(|node| node["state"].as_str().is_some_and(|state| state != "up"));
    gone.filter_map(|node| node["name"].as_str().map(str::to_owned)).collect()
}

/// For messages: `node a`, or `nodes a, b`.
fn nodes(names: &[String]) -> String {
    format!("{} {}", if names.len() == 1 { "node" } else { "nodes" }, names.join(", "))
}

/// What a stage-out has not copied.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Missed {
    /// The paths, on the side that failed, and why. A directory stands for what is in it.
    files: Vec<(String, String)>,
    /// Their number; the list may be shorter.
    count: u64,
}

/// The report of `stage-out --json`, as far as it matters here.
#[derive(Deserialize)]
struct Report {
    errors: Vec<Failure>,
    errors_total: u64,
}

#[derive(Deserialize)]
struct Failure {
    path: String,
    what: String,
}

impl Missed {
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the destination has not taken something.
    pub(crate) fn names(&self, destination: &str) -> bool {
        let destination = destination.trim_end_matches('/');
        self.files.iter().any(|(path, _)| Path::new(path).starts_with(destination))
    }

    /// For messages: how many files are lost, and the first of them.
    pub(crate) fn text(&self, gone: &[String]) -> String {
        let first = self.files.first().map_or("", |(path, _)| path);
        format!("{} lost with {}, the first {first}", table::count(self.count, "file"), nodes(gone))
    }

    fn of(report: &str) -> Option<Missed> {
        let report: Report = serde_json::from_str(report).ok()?;
        let files = report.errors.into_iter().map(|failure| (failure.path, failure.what)).collect();
        Some(Missed { files, count: report.errors_total })
    }
}

/// Stages out a pair; files that fail do not keep the others from it.
pub(crate) fn staged_out(pool: &Path, pair: &str) -> Missed {
    let whole = |why: String| {
        let source = pair.split(':').next().unwrap_or(pair);
        Missed { files: vec![(source.to_owned(), why)], count: 1 }
    };
    match command::answered(pool, &["stage-out", "--no-progress", "--json", pair]) {
        Ok((text, why)) => Missed::of(&text).unwrap_or_else(|| whole(why)),
        Err(why) => whole(why),
    }
}

/// Adds to the list of what was lost.
pub(crate) fn write_lost(dir: &Path, gone: &[String], missed: &Missed) -> std::result::Result<(), String> {
    use std::io::Write as _;
    let path = dir.join(LOST_FILE);
    let mut text = format!("# with {}:\n", nodes(gone));
    for (file, why) in &missed.files {
        text += &format!("{file}\t{why}\n");
    }
    let listed = missed.files.len() as u64;
    if missed.count > listed {
        text += &format!("# and {} more\n", missed.count - listed);
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
    written.map_err(|e| format!("cannot write {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_do_not_answer_are_gone() {
        let status = r#"{"state": "up", "nodes": [
            {"name": "a", "state": "up"}, {"name": "c", "state": "unreachable", "why": "it refused"}]}"#;
        assert_eq!(gone_of(status), ["c"]);
        assert!(gone_of(r#"{"state": "up"}"#).is_empty(), "a pool of one node");
        assert!(gone_of("").is_empty(), "its own daemon does not answer");
        assert_eq!(nodes(&["a".into(), "b".into()]), "nodes a, b");
    }

    #[test]
    fn missed_files_are_counted_named_and_listed() {
        let report = r#"{"files": 3, "errors": [{"path": "/r/a", "code": "EIO", "what": "node c is down", "cure": ""}],
            "errors_total": 2}"#;
        let missed = Missed::of(report).unwrap();
        assert_eq!(missed.text(&["c".into()]), "2 files lost with node c, the first /r/a");
        assert!(!missed.names("/store/out/") && missed.names("/r"));
        assert!(Missed::of(r#"{"errors": [], "errors_total": 0}"#).unwrap().is_empty());
        assert!(Missed::of("no report").is_none());
        let dir = std::env::temp_dir().join(format!("forebay-lost-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        write_lost(&dir, &["c".into()], &missed).unwrap();
        write_lost(&dir, &["c".into()], &missed).unwrap();
        let list = std::fs::read_to_string(dir.join(LOST_FILE)).unwrap();
        let once = "# with node c:\n/r/a\tnode c is down\n# and 1 more\n";
        assert_eq!(list, format!("{once}{once}"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
