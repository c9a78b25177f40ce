//! Document and suite agree: every promise has a case, and every quotation is in the document.

use forebay_conformance::{cases, document};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Promises that tests/crash.rs proves by kills, not a case.
const PROVED_BY_KILLING: [&str; 3] = [
    "A killed program loses no change whose call has returned, and harms no other program.",
    "A daemon killed at any instant restarts on the same shard: programs wait a moment and get no error.",
    "After any such kill no space is lost, and `forebay fsck` finds nothing wrong.",
];

/// The tests of crates/preload for the promises about watches; they quote the promises.
const PROVED_UNDER_PRELOAD: &str = include_str!("../../../crates/preload/tests/watches.rs");
const OF_WATCHES: [&str; 3] = [
    "A program under preload that watches a directory with inotify gets the kernel's events of its names, whichever program changes them: IN_CREATE, IN_DELETE, IN_MOVED_FROM and IN_MOVED_TO with one cookie, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF and IN_ISDIR.",
    "A change of the contents of a file in a watched directory raises IN_MODIFY, and IN_CLOSE_WRITE after the last byte.",
    "A watch lives as long as its inotify descriptor is open in any process, and outlives the daemon's worker.",
];

#[test]
fn sentences_about_watches_are_named_by_the_tests_that_prove_them() {
    // A string of several lines is one sentence.
    let text = PROVED_UNDER_PRELOAD.replace("\\\n", " ");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for sentence in OF_WATCHES {
        assert!(text.contains(sentence), "no test names it: {sentence}");
    }
}

#[test]
fn every_promise_has_a_test_and_every_quotation_is_promised() {
    let text = std::fs::read_to_string(document::path()).unwrap();
    let promised: BTreeSet<String> = document::promises(&text).into_iter().collect();
    assert!(promised.len() > 90, "only {} promises were found in the document", promised.len());
    let quoted: BTreeSet<String> = cases::all()
        .flat_map(|c| c.promises)
        .chain(&PROVED_BY_KILLING)
        .chain(&OF_WATCHES)
        .map(|s| s.to_string())
        .collect();
    let unproved: Vec<_> = promised.difference(&quoted).collect();
    let unpromised: Vec<_> = quoted.difference(&promised).collect();
    assert!(unproved.is_empty(), "promised, but no case quotes it: {unproved:#?}");
    assert!(unpromised.is_empty(), "quoted by a case, but not in docs/semantics.md: {unpromised:#?}");
}

#[test]
fn case_names_are_distinct() {
    let names: Vec<_> = cases::all().map(|c| c.name).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
}

/// Markdown files of the repository, from its root.
fn documents(root: &Path) -> Vec<PathBuf> {
    let mut all = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    for directory in ["docs", "docs/decisions"] {
        let entries = std::fs::read_dir(root.join(directory)).unwrap().map(|e| e.unwrap().path());
        all.extend(entries.filter(|path| path.extension().is_some_and(|e| e == "md")));
    }
    all
}

/// Paths of files that a text contains in backquotes.
fn named_paths(text: &str) -> impl Iterator<Item = &str> {
    const ENDINGS: [&str; 7] = [".rs", ".c", ".h", ".S", ".md", ".txt", ".golden"];
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let is_path = word.contains('/') && ENDINGS.iter().any(|ending| word.ends_with(ending));
        is_path && !word.contains([' ', '*', '\n']) && !word.starts_with(['/', '~'])
    })
}

#[test]
fn paths_that_documents_name_can_be_opened_as_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut missing = Vec::new();
    let mut found = 0;
    for document in documents(&root) {
        let text = std::fs::read_to_string(&document).unwrap();
        for path in named_paths(&text) {
            // In ARCHITECTURE.md paths begin in crates/, and `worker/` is in crates/server/src.
            let bases = ["", "crates/", "crates/server/src/", "docs/"];
            match bases.iter().any(|base| root.join(base).join(path).exists()) {
                true => found += 1,
                false => missing.push(format!("{}: {path}", document.display())),
            }
        }
    }
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
    assert!(found > 150, "only {found} paths were found");
    let canary: Vec<_> = named_paths("see `crates/x.rs`, `x.rs`, `a b/c.rs` and `P/lock`").collect();
    assert_eq!(canary, ["crates/x.rs"]);
}
