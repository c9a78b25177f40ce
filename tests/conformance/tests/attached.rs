//! The suite through every door, in a directory that shows a backing store, while the mover drains and releases files
//! between two calls. At the end the store must equal the pool.
//!
//! Each run prints its seed; FOREBAY_DOORS_SEED repeats it. With FOREBAY_SOAK each door runs with more seeds, and with
//! paths under descriptors of directories too.

use forebay_conformance::harness::{not_me, said, Scratch, Summary, TestPool};
use std::path::Path;

const CAPACITY_MIB: u64 = 512;
/// The directory with the store.
const AT: &str = "s";
/// Bytes of files that a run must have released to prove anything. Most files of the suite are small.
const RELEASED_BYTES_MIN: u64 = 100_000;

fn soaks() -> bool {
    std::env::var_os("FOREBAY_SOAK").is_some()
}

/// The seeds of a test's runs.
fn seeds() -> Vec<u64> {
    if let Some(seed) = std::env::var("FOREBAY_DOORS_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return vec![seed];
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let count = if soaks() { 20 } else { 1 };
    (0..count).map(|i| now.as_nanos() as u64 / 1000 + i).collect()
}

/// A pool in front of a store.
struct Attached {
    store: Scratch,
    pool: TestPool,
}

impl Attached {
    fn up() -> Attached {
        let (pool, store) = (TestPool::up(CAPACITY_MIB), Scratch::on_disk());
        said(pool.forebay().args(["attach", store.text(), &format!("/{AT}")]));
        Attached { store, pool }
    }

    /// The options of a run that is disturbed.
    fn disturbed(&self, seed: u64) -> Vec<String> {
        println!("FOREBAY_DOORS_SEED={seed}");
        // A store on a disk has no room for large attributes.
        let claims = ["--claim", "xattrs", "--lacks", "large-xattrs"].map(str::to_owned);
        let mover = self.pool.directory().display().to_string();
        [&claims[..], &["--disturb".into(), seed.to_string(), "--mover".into(), mover]].concat()
    }

    /// Checks a run of the suite, that it was disturbed, and that the store has what the pool has.
    #[track_caller]
    fn judge(&self, summary: &Summary, lacking: &[&str]) {
        summary.passed_but_for(&[&[not_me(), "LargeXattrs", "OwnSpace", "SmallSpace"], lacking].concat());
        let line = summary.output.lines().find(|line| line.starts_with("disturbances: ")).unwrap_or_default();
        println!("{line}");
        let released =
            line.split("released_bytes: ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        assert!(released > Some(RELEASED_BYTES_MIN), "too little was disturbed to prove anything: {line}");
        said(self.pool.forebay().args(["sync", "-r", &format!("/{AT}")]));
        let mut compare = self.pool.program("forebay-conformance");
        compare.args(["--equal", &format!("/forebay/{AT}"), "--to", self.store.text()]);
        said(&mut compare);
        let report = self.pool.fsck();
        assert_eq!(report["clean"], true, "{report:#}");
        let status = self.pool.status();
        assert_eq!(status["restarts"], 0, "the worker crashed: see {}/log", self.pool.directory().display());
        assert_eq!(status["mover"]["restarts"], 0, "the mover crashed: {status:#}");
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn refs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn client_door_keeps_every_promise_on_an_attached_tree() {
    for seed in seeds() {
        let at = Attached::up();
        let arguments = [&["--under".to_owned(), AT.to_owned()], &at.disturbed(seed)[..]].concat();
        let summary = at.pool.suite_by_client(&refs(&arguments));
        at.judge(&summary, &["Outside", "DirectoryDescriptors"]);
    }
}

fn preload_door(spelling: &str) {
    for seed in seeds() {
        let at = Attached::up();
        let root = ["--root", &format!("/forebay/{AT}"), "--spelling", spelling].map(str::to_owned);
        let summary = at.pool.suite_by_run(&refs(&[&root[..], &at.disturbed(seed)].concat()));
        at.judge(&summary, &[]);
    }
}

#[test]
fn preload_door_with_absolute_paths_keeps_every_promise_on_an_attached_tree() {
    preload_door("absolute");
}

#[test]
fn preload_door_with_directory_descriptors_keeps_every_promise_on_an_attached_tree() {
    if soaks() {
        preload_door("at");
    }
}

fn mount_door(spelling: &str) {
    for seed in seeds() {
        let at = Attached::up();
        let Some(mount) = at.pool.mount() else { return };
        let arguments = [&["--spelling".to_owned(), spelling.to_owned()], &at.disturbed(seed)[..]].concat();
        let summary = at.pool.suite_at(&mount.join(AT), &refs(&arguments));
        at.judge(&summary, &[]);
    }
}

#[test]
fn mount_door_with_absolute_paths_keeps_every_promise_on_an_attached_tree() {
    mount_door("absolute");
}

#[test]
fn mount_door_with_directory_descriptors_keeps_every_promise_on_an_attached_tree() {
    if soaks() {
        mount_door("at");
    }
}

/// Changes through one door, reads through the other.
fn pair(of: impl Fn(&str, &str) -> [String; 4]) {
    for seed in seeds() {
        let at = Attached::up();
        let Some(mount) = at.pool.mount() else { return };
        let roots = of(&text(&mount.join(AT)), &format!("/forebay/{AT}"));
        let summary = at.pool.suite_by_run(&refs(&[&roots[..], &at.disturbed(seed)].concat()));
        at.judge(&summary, &["OneDoor"]);
    }
}

#[test]
fn what_the_mount_changes_in_an_attached_tree_the_preloaded_see_at_once() {
    pair(|mount, preload| ["--root", mount, "--looks-at", preload].map(str::to_owned));
}

#[test]
fn what_the_preloaded_change_in_an_attached_tree_the_mount_sees_at_once() {
    pair(|mount, preload| ["--root", preload, "--looks-at", mount].map(str::to_owned));
}
