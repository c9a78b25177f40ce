//! Whole, unmodified programs: each script of tests/programs runs in a plain directory and in a pool, with the same
//! output.

use forebay_conformance::harness::{said, Scratch, TestPool};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../programs")
}

/// Runs a script in a directory. Returns its output, with stderr, and its exit status.
fn outcome(mut shell: Command, script: &str, directory: &str) -> String {
    let path = scripts().join(script);
    let line = format!("mkdir -p {directory} && cd {directory} && . {} 2>&1; echo status $?", path.display());
    shell.args(["-c", &line]).env("TMPDIR", "/tmp").env("LC_ALL", "C.UTF-8");
    said(&mut shell)
}

fn same_as_on_the_disk(script: &str) {
    same_as_in(&Scratch::on_disk(), script);
}

fn same_as_in(scratch: &Scratch, script: &str) {
    let plain = outcome(Command::new("sh"), script, scratch.text());
    let pool = TestPool::up(512);
    let mut shell = pool.forebay();
    shell.args(["run", "--quiet", "--", "sh"]);
    let through = outcome(shell, script, "/forebay/work");
    assert!(
        plain.lines().count() > 3 && plain.ends_with("status 0\n"),
        "{script} is no test in a plain directory:\n{plain}"
    );
    // The two directories have different names, which some programs print.
    let (plain, through) = (plain.replace(scratch.text(), "HERE"), through.replace("/forebay/work", "HERE"));
    let differing: Vec<_> = plain.lines().zip(through.lines()).filter(|(a, b)| a != b).take(5).collect();
    assert!(
        plain == through,
        "{script} differs (plain directory, pool): {differing:#?}\n--- through the pool:\n{through}"
    );
    assert_eq!(pool.fsck()["clean"], true, "{:#}", pool.fsck());
}

#[test]
fn coreutils_do_the_same() {
    same_as_on_the_disk("coreutils");
}

#[test]
fn shells_do_the_same() {
    same_as_on_the_disk("shell");
}

#[test]
fn tar_does_the_same() {
    same_as_on_the_disk("tar");
}

#[test]
fn rsync_does_the_same() {
    same_as_on_the_disk("rsync");
}

#[test]
fn python_does_the_same() {
    same_as_on_the_disk("python");
}

#[test]
fn sqlite_does_the_same() {
    same_as_on_the_disk("sqlite");
}

#[test]
fn git_does_the_same() {
    same_as_on_the_disk("git");
}

#[test]
fn compiler_and_make_do_the_same() {
    same_as_on_the_disk("compiler");
}

#[test]
fn fio_does_the_same() {
    same_as_on_the_disk("fio");
}

#[test]
fn rare_calls_give_the_same_results_and_errors_as_in_tmpfs() {
    same_as_in(&Scratch::in_memory(), "fine_points");
}

#[test]
fn every_script_has_a_test() {
    let there: BTreeSet<String> = std::fs::read_dir(scripts())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    let tested =
        ["coreutils", "shell", "tar", "rsync", "python", "sqlite", "git", "compiler", "fio", "fine_points"];
    assert_eq!(there, tested.map(str::to_owned).into());
}
