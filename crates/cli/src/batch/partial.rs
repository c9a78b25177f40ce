//! Stage-outs from a pool that has lost a node: what the other nodes have is staged out, what is lost is named.

use std::path::Path;

use forebay_tasks::{TaskError, TaskState};
use forebay_types::{Code, Error};
use serde::Deserialize;

use super::command;
use crate::table;

/// In the directory of what is kept of a run: the names of what was lost, a line each.
pub(crate) const LOST_FILE: &str = "lost";

/// The nodes of a pool that do not answer, by name. Fails if its daemon on this node does not either.
pub(crate) fn nodes_gone(pool: &Path) -> std::result::Result<Vec<String>, String> {
    // It fails if one of the nodes is not up.
    let (text, why) = command::answered(pool, &["status", "--json"])?;
    gone_of(&text).ok_or(why)
}

/// None if it is no status, but an error.
fn gone_of(status: &str) -> Option<Vec<String>> {
    let status: serde_json::Value = serde_json::from_str(status).ok()?;
    if status.get("error").is_some() {
        return None;
    }
    let nodes = status["nodes"].as_array().into_iter().flatten();
    let gone = nodes.filter(|node| node["state"].as_str().is_some_and(|state| state != "up"));
    Some(gone.filter_map(|node| node["name"].as_str().map(str::to_owned)).collect())
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
    /// How many of them the pool could not give.
    lost: u64,
    /// It ended before it had tried everything.
    stopped: bool,
}

/// Why a stage-out gave no report: it has not begun, or was killed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Refused {
    /// The name of the error's code, if it gave one.
    code: String,
    pub(crate) why: String,
}

/// The report of `stage-out --json`, as far as it matters here.
#[derive(Deserialize)]
struct Report {
    errors: Vec<Failure>,
    errors_total: u64,
    errors_unreachable: u64,
    stopped: bool,
}

#[derive(Deserialize)]
struct Failure {
    path: String,
    what: String,
}

impl Missed {
    /// A source of which nothing can be reached.
    pub(crate) fn whole(source: &str, why: String) -> Missed {
        Missed { files: vec![(source.to_owned(), why)], count: 1, lost: 1, stopped: false }
    }

    /// Whether there is nothing that was not copied.
    pub(crate) fn is_complete(&self) -> bool {
        self.count == 0 && !self.stopped
    }

    /// Whether the pool could not give any of it. What the destination has not taken and what was not tried is there
    /// still: its only copy is in the pool.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost == self.count && !self.stopped
    }

    /// For messages: the first failure.
    pub(crate) fn first(&self) -> String {
        match self.files.first() {
            Some((path, why)) => format!("{path}: {why}"),
            None => "it was stopped".to_owned(),
        }
    }

    /// For messages: how many files are lost, and the first of them.
    pub(crate) fn text(&self, gone: &[String]) -> String {
        let first = self.files.first().map_or("", |(path, _)| path);
        format!("{} lost with {}, the first {first}", table::count(self.count, "file"), nodes(gone))
    }

    fn of(report: &str) -> Option<Missed> {
        let report: Report = serde_json::from_str(report).ok()?;
        let files = report.errors.into_iter().map(|failure| (failure.path, failure.what)).collect();
        Some(Missed {
            files,
            count: report.errors_total,
            lost: report.errors_unreachable,
            stopped: report.stopped,
        })
    }
}

impl Refused {
    fn of(answer: &str, why: String) -> Refused {
        let answer: serde_json::Value = serde_json::from_str(answer).unwrap_or_default();
        let code = answer["error"]["code"].as_str().unwrap_or_default().to_owned();
        let why = if why.is_empty() { "the stage-out gave no report".to_owned() } else { why };
        Refused { code, why }
    }

    /// Whether the source or the destination cannot be reached. Its code does not tell which.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.code == Code::Io.name()
    }
}

/// A task of `sync --json`, as far as it matters here.
#[derive(Deserialize)]
struct Drain {
    state: TaskState,
    errors: Vec<TaskError>,
    error_count: u64,
    unreachable_count: u64,
}

impl Missed {
    /// What a drain has not copied. None if it has not begun, or does not tell.
    fn of_drain(answer: &str) -> Option<Missed> {
        let tasks: Vec<Drain> = serde_json::from_str(answer).ok()?;
        let [task] = <[Drain; 1]>::try_from(tasks).ok()?;
        let why = |failure| Error::from(failure).to_string();
        let files = task.errors.into_iter().map(|e| (e.path, command::reason(&why(e.error)))).collect();
        Some(Missed {
            files,
            count: task.error_count,
            lost: task.unreachable_count,
            stopped: !matches!(task.state, TaskState::Done | TaskState::Failed),
        })
    }
}

/// Copies to a pool's backing store what that lacks, as far as it can be reached.
pub(crate) fn drained(pool: &Path, tally: Option<&str>, is_over: &dyn Fn() -> bool) -> Option<Missed> {
    let words: Vec<&str> = ["sync", "--no-progress", "--json", "-r", "/"].into_iter().chain(tally).collect();
    Missed::of_drain(&command::answered_unless(pool, &words, is_over).ok()?.0)
}

/// Stages out a pair; files that fail do not keep the others from it. `tally` is the option of its turn.
pub(crate) fn staged_out(
    pool: &Path,
    pair: &str,
    tally: Option<&str>,
    is_over: &dyn Fn() -> bool,
) -> std::result::Result<Missed, Refused> {
    let words: Vec<&str> = ["stage-out", "--no-progress", "--json", pair].into_iter().chain(tally).collect();
    let (text, why) = command::answered_unless(pool, &words, is_over)
        .map_err(|why| Refused { code: String::new(), why })?;
    Missed::of(&text).ok_or_else(|| Refused::of(&text, why))
}

/// Whether a pool can be asked for a path, be it there or not.
pub(crate) fn answers(pool: &Path, path: &str) -> bool {
    // It prints a list unless it cannot ask at all.
    let asked = command::answered(pool, &["stat", "--json", path]);
    asked.is_ok_and(|(text, _)| serde_json::from_str::<Vec<serde_json::Value>>(&text).is_ok())
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
        assert_eq!(gone_of(status).unwrap(), ["c"]);
        assert!(gone_of(r#"{"state": "up"}"#).unwrap().is_empty(), "a pool of one node");
        assert_eq!(gone_of(""), None);
        let none =
            r#"{"error": {"code": "not-found", "what": "cannot reach pool /p", "why": "it is not up"}}"#;
        assert_eq!(gone_of(none), None, "its own daemon does not answer");
        assert_eq!(nodes(&["a".into(), "b".into()]), "nodes a, b");
    }

    #[test]
    fn missed_files_are_counted_named_and_listed() {
        let report = r#"{"files": 3, "errors": [{"path": "/r/a", "code": "EIO", "what": "node c is down", "cure": ""}],
            "errors_total": 2, "errors_unreachable": 2, "stopped": false}"#;
        let missed = Missed::of(report).unwrap();
        assert_eq!(missed.text(&["c".into()]), "2 files lost with node c, the first /r/a");
        assert_eq!(missed.first(), "/r/a: node c is down");
        let dir = std::env::temp_dir().join(format!("forebay-lost-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        write_lost(&dir, &["c".into()], &missed).unwrap();
        write_lost(&dir, &["c".into()], &missed).unwrap();
        let list = std::fs::read_to_string(dir.join(LOST_FILE)).unwrap();
        let once = "# with node c:\n/r/a\tnode c is down\n# and 1 more\n";
        assert_eq!(list, format!("{once}{once}"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn only_what_the_pool_could_not_give_is_lost() {
        let of = |total: u64, unreachable: u64, stopped: bool| {
            // The destination begins as the source does.
            let error = r#"{"path": "/data/a", "code": "io", "what": "cannot read it", "cure": ""}"#;
            let errors = if total > 0 { error } else { "" };
            let report = format!(
                r#"{{"errors": [{errors}], "errors_total": {total}, "errors_unreachable": {unreachable},
                "stopped": {stopped}, "cancelled": {stopped}}}"#
            );
            Missed::of(&report).unwrap()
        };
        for (report, is_complete, is_lost) in [
            (of(0, 0, false), true, true),
            (of(2, 2, false), false, true),
            // The destination has not taken one that the list does not have.
            (of(2000, 1999, false), false, false),
            (of(1, 0, false), false, false),
            // The rest was not tried.
            (of(2, 2, true), false, false),
            (of(0, 0, true), false, false),
        ] {
            assert_eq!((report.is_complete(), report.is_lost()), (is_complete, is_lost), "{report:?}");
        }
        assert!(Missed::whole("/data", "it is down".into()).is_lost());
    }

    #[test]
    fn drain_has_lost_what_nodes_have_that_do_not_answer_and_only_if_that_is_all() {
        let of = |state: &str, count: u64, unreachable: u64| {
            let error =
                r#"{"path": "/r/1", "error": {"code": 5, "what": "cannot drain /r/1", "why": "node 1"}}"#;
            Missed::of_drain(&format!(
                r#"[{{"id": 3, "state": "{state}", "errors": [{error}], "error_count": {count},
                "unreachable_count": {unreachable}}}]"#
            ))
            .unwrap()
        };
        assert!(of("failed", 30, 30).is_lost());
        assert!(!of("failed", 30, 29).is_lost(), "the store has refused one");
        assert!(!of("cancelled", 1, 1).is_lost() && !of("running", 1, 1).is_lost());
        assert!(of("done", 0, 0).is_complete());
        assert_eq!(of("failed", 1, 1).text(&["c".into()]), "1 file lost with node c, the first /r/1");
        assert!(Missed::of_drain("[]").is_none() && Missed::of_drain("").is_none());
    }

    #[test]
    fn stage_out_without_a_report_has_lost_nothing() {
        for (answer, is_unreachable) in [
            (r#"{"error": {"code": "access-denied", "what": "cannot stage", "why": "", "cure": ""}}"#, false),
            (r#"{"error": {"code": "io", "what": "cannot stage", "why": "", "cure": ""}}"#, true),
            ("", false),
            (r#"{"errors": [], "errors_total": 0}"#, false),
        ] {
            assert!(Missed::of(answer).is_none(), "{answer}");
            let refused = Refused::of(answer, String::new());
            assert_eq!(refused.is_unreachable(), is_unreachable, "{answer}");
            assert!(!refused.why.is_empty());
        }
    }
}
