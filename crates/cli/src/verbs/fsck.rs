//! `forebay fsck`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_server::control;
use forebay_types::{Code, Result};
use serde_json::Value;

use crate::arguments::Fsck;
use crate::{failure, pool, table};

/// Exit status when problems were found; fsck(8) uses the same.
const PROBLEMS: u8 = 4;

pub(super) fn fsck(named: Option<PathBuf>, arguments: &Fsck) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let report = match control::check(&dir) {
        Err(e) if e.code == Code::NotFound => forebay_server::rest::check(&dir)?,
        other => other?,
    };
    let clean = report["clean"].as_bool().unwrap_or(false);
    if arguments.json {
        failure::print_json(&report);
    } else {
        failure::put(text(&dir.display().to_string(), &report, clean));
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(PROBLEMS) })
}

fn text(pool: &str, report: &Value, clean: bool) -> String {
    let number = |key: &str| report[key].as_u64().unwrap_or(0);
    let counts = format!(
        "{}, {}, {}",
        table::count(number("inodes"), "inode"),
        table::count(number("entries"), "entry"),
        table::count(number("backing_files"), "backing file"),
    );
    let silent = report["nodes_silent"].as_array().map_or(&[][..], Vec::as_slice);
    let silent: String = silent
        .iter()
        .map(|node| {
            format!("node {node} does not answer: what this node and it have of each other was not checked\n")
        })
        .collect();
    if clean {
        return format!("pool {pool} is clean: {counts}\n{silent}");
    }
    let listed = report["problems"].as_array().map_or(&[][..], Vec::as_slice);
    let found = number("problems_found").max(listed.len() as u64);
    let mut text = format!("pool {pool} has {}: {counts}\n", table::count(found, "problem"));
    for problem in listed {
        text.push_str(&format!("  {}\n", problem.as_str().unwrap_or_default()));
    }
    if found > listed.len() as u64 {
        text.push_str(&format!("  and {} more\n", found - listed.len() as u64));
    }
    text + &silent
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_counts_what_is_not_listed() {
        let report =
            json!({"clean": false, "problems": ["a", "b"], "problems_found": 7, "inodes": 1, "entries": 2});
        let text = text("/p", &report, false);
        assert!(
            text.contains("7 problems") && text.contains("  a\n") && text.contains("and 5 more"),
            "{text}"
        );
    }
}
