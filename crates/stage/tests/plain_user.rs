//! Limits of a user other than root. If root runs the tests, they start themselves again as another user.

mod trees;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, Way};
use forebay_types::Code;
use trees::{assert_same, is_root, make_odd, snapshot, Scratch};

/// User and group of `nobody` on every Linux.
const NOBODY: u32 = 65_534;

/// True for a user other than root. As root, the function runs the test as another user and returns false.
fn as_plain_user(test: &str) -> bool {
    if !is_root() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    match command.args([test, "--exact", "--nocapture"]).uid(NOBODY).gid(NOBODY).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
        Err(e) => eprintln!("SKIPPED: another user cannot run this test binary where it lies: {e}"),
    }
    false
}

fn pair(source: &Path, destination: &Path) -> [Pair; 1] {
    [Pair { source: source.into(), destination: destination.into() }]
}

#[test]
fn odd_tree_of_a_plain_user_keeps_everything() {
    if !as_plain_user("odd_tree_of_a_plain_user_keeps_everything") {
        return;
    }
    let scratch = Scratch::new();
    let store = scratch.join("store");
    make_odd(&store);
    let before = snapshot(&store);
    for (i, all_or_nothing) in [false, true].into_iter().enumerate() {
        let pool = scratch.join(&format!("pool-{i}"));
        for way in [Way::In, Way::Out] {
            // The second run merges into the result of the first, which has read-only directories.
            let options = StageOptions { all_or_nothing, ..StageOptions::default() };
            let report = stage_between(way, &pair(&store, &pool), &options, &Quiet).unwrap();
            report.outcome().unwrap();
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
            assert_same(&before, &snapshot(&pool));
        }
    }
}

#[test]
fn unreadable_sources_and_closed_destinations_are_told_before_anything_is_copied() {
    if !as_plain_user("unreadable_sources_and_closed_destinations_are_told_before_anything_is_copied") {
        return;
    }
    let scratch = Scratch::new();
    let at = |name: &str| scratch.join(name);
    let mode = |name: &str, mode: u32| {
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    std::fs::write(at("good"), b"g").unwrap();
    std::fs::write(at("secret"), b"s").unwrap();
    for name in ["closed", "closed-to-all", "read-only"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    std::fs::write(at("closed/f"), b"f").unwrap();
    std::fs::write(at("read-only/f"), b"f").unwrap();
    mode("secret", 0o000);
    mode("closed", 0o600);
    mode("closed-to-all", 0o000);
    mode("read-only", 0o500);
    for (source, destination, side) in [
        ("secret", "x", "cannot read"),
        ("closed/f", "x", "cannot read"),
        ("closed-to-all", "x", "cannot read"),
        ("good", "read-only/f", "cannot stage to"),
        ("good", "read-only/new", "cannot stage to"),
        ("good", "/usr/forebay-test", "cannot stage to"),
    ] {
        let pairs = [pair(&at("good"), &at("copied")), pair(&at(source), &at(destination))].concat();
        let error = stage_between(Way::Out, &pairs, &StageOptions::default(), &Quiet).unwrap_err();
        assert!(
            matches!(error.code, Code::AccessDenied | Code::ReadOnly),
            "{source} to {destination}: {error}"
        );
        assert!(error.what.contains(side) && !error.cure.is_empty(), "{source} to {destination}: {error}");
        assert!(!at("copied").exists());
    }
    // An unreadable file within a tree does not keep the others from being staged.
    std::fs::create_dir(at("tree")).unwrap();
    std::fs::rename(at("secret"), at("tree/secret")).unwrap();
    std::fs::write(at("tree/open"), b"o").unwrap();
    let report =
        stage_between(Way::Out, &pair(&at("tree"), &at("out")), &StageOptions::default(), &Quiet).unwrap();
    assert_eq!((report.files, report.errors_total, report.errors[0].code), (1, 1, Code::AccessDenied));
    assert!(
        report.errors[0].path.ends_with("tree/secret")
            && at("out/open").exists()
            && !at("out/secret").exists()
    );
    mode("closed", 0o700);
    mode("read-only", 0o700);
    mode("closed-to-all", 0o700);
}

#[test]
fn owners_that_cannot_be_kept_are_warnings_and_take_set_id_bits_with_them() {
    if !as_plain_user("owners_that_cannot_be_kept_are_warnings_and_take_set_id_bits_with_them") {
        return;
    }
    // A set-ID program of root that exists on every system and that all users may read.
    let program = ["/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount"]
        .iter()
        .map(Path::new)
        .find(|path| std::fs::metadata(path).is_ok_and(|m| m.permissions().mode() & 0o4004 == 0o4004));
    let Some(program) = program else {
        eprintln!("SKIPPED: no readable set-id program of root's is here");
        return;
    };
    let scratch = Scratch::new();
    for (preserve_owner, warned) in [(None, false), (Some(false), false), (Some(true), true)] {
        let copy = scratch.join(&format!("copy-{preserve_owner:?}"));
        let options = StageOptions { preserve_owner, ..StageOptions::default() };
        let report = stage_between(Way::In, &pair(program, &copy), &options, &Quiet).unwrap();
        report.outcome().unwrap();
        let warnings = &report.warnings;
        assert_eq!(warnings.iter().any(|w| w.code == Code::NotPermitted), warned, "{warnings:?}");
        assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o6000, 0, "{preserve_owner:?}");
    }
}
