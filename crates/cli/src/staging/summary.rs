//! The result of staging as a line, a table or JSON.

use forebay_stage::StageReport;
use serde_json::{json, Value};

use super::Direction;
use crate::table::{self, Facts};

/// How many failures are printed; the JSON has all.
const ERRORS_SHOWN: usize = 20;

/// The report in one line: `staged in 12 files, 3.4 GiB in 1.2 s (2.8 GB/s)`.
pub(crate) fn line(direction: Direction, r: &StageReport) -> String {
    let mut text = format!(
        "{} {}, {} in {} ({:.2} GB/s)",
        direction.done(),
        table::count(r.files, "file"),
        table::bytes(r.bytes),
        table::duration(r.seconds),
        r.gb_per_s
    );
    if r.skipped_files > 0 {
        text.push_str(&format!("; {} there already", table::count(r.skipped_files, "file")));
    }
    if r.errors_total > 0 {
        text.push_str(&format!("; {} failed", table::count(r.errors_total, "file")));
    }
    text
}

/// Prints the report on stdout, and failures and attributes that could not be kept on stderr.
pub(crate) fn print_report(direction: Direction, r: &StageReport, as_json: bool) {
    print_problems(r);
    if as_json {
        let mut value = serde_json::to_value(r).unwrap_or(Value::Null);
        value["direction"] = json!(match direction {
            Direction::In => "in",
            Direction::Out => "out",
        });
        value["complete"] = json!(r.is_complete());
        crate::failure::print_json(&value);
    } else {
        crate::failure::put(as_table(direction, r));
    }
}

/// Prints failures, and warnings about attributes that could not be kept.
pub(crate) fn print_problems(r: &StageReport) {
    for e in r.errors.iter().take(ERRORS_SHOWN) {
        let cure = if e.cure.is_empty() { String::new() } else { format!("\n  hint: {}", e.cure) };
        note!("forebay: {}: {}{cure}", e.path, e.what);
    }
    if r.errors_total > ERRORS_SHOWN as u64 {
        note!("forebay: and {} more failures", r.errors_total - ERRORS_SHOWN as u64);
    }
    for w in &r.warnings {
        let more = if w.count > 1 { format!(" and {} more", w.count - 1) } else { String::new() };
        note!("forebay: warning: {}: {}{more}", w.what, w.path);
    }
}

fn as_table(direction: Direction, r: &StageReport) -> String {
    let mut facts = Facts::default();
    let holes = if r.holes_bytes > 0 {
        format!(" and {} of holes", table::bytes(r.holes_bytes))
    } else {
        String::new()
    };
    facts.add(
        direction.done(),
        format!("{}, {}{holes}", table::count(r.files, "file"), table::bytes(r.bytes)),
    );
    facts.add("in", format!("{}, {:.2} GB/s", table::duration(r.seconds), r.gb_per_s));
    for (n, one) in [
        (r.directories, "directory"),
        (r.symlinks, "symbolic link"),
        (r.hard_links, "hard link"),
        (r.special, "special file"),
    ] {
        if n > 0 {
            facts.add("also", table::count(n, one));
        }
    }
    if r.skipped_files > 0 {
        let text = format!("{}, {}", table::count(r.skipped_files, "file"), table::bytes(r.skipped_bytes));
        facts.add("there already", text);
    }
    if r.verified > 0 {
        facts.add("verified", table::count(r.verified, "file"));
    }
    if r.retries > 0 {
        facts.add("changed meanwhile", table::count(r.retries, "copy"));
    }
    if r.leftovers_removed > 0 {
        facts.add("cleaned up", table::count(r.leftovers_removed, "leftover"));
    }
    if r.errors_total > 0 {
        facts.add("failed", table::count(r.errors_total, "file"));
    }
    facts.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_says_what_matters() {
        let r = StageReport {
            files: 12,
            bytes: 3 << 30,
            seconds: 1.5,
            gb_per_s: 2.147,
            ..StageReport::default()
        };
        assert_eq!(line(Direction::In, &r), "staged in 12 files, 3 GiB in 1.5 s (2.15 GB/s)");
        let r = StageReport { errors_total: 2, skipped_files: 1, ..r };
        assert!(line(Direction::Out, &r).ends_with("; 1 file there already; 2 files failed"));
    }
}
