//! Random operations on files, compared with a model: on the mount alone, and on the mount and by preload at once.
//! FOREBAY_EXERCISE_OPERATIONS sets the number of operations, FOREBAY_EXERCISE_SEED repeats a seed that was printed.

mod common;

use common::{binaries, Place};
use std::path::{Path, PathBuf};
use std::process::Command;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The program that does the operations, which the preload library's tests also run. None without a compiler.
fn exerciser(directory: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/exerciser/exerciser.c");
    let program = directory.join("exerciser");
    match Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source).status() {
        Ok(status) => assert!(status.success()),
        Err(e) => {
            eprintln!("skipped: there is no cc: {e}");
            return None;
        }
    }
    Some(program)
}

/// Runs the exerciser; `add` adds its arguments.
fn exercise(mount: &[&str], add: impl Fn(&mut Command, &Place, &str, &str)) {
    let Some(place) = Place::mounted_as(&["--capacity", "256MiB"], mount) else { return };
    let Some(program) = exerciser(&place.dir) else { return };
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.subsec_nanos().into());
    let seed = number("FOREBAY_EXERCISE_SEED").unwrap_or_else(clock);
    println!("FOREBAY_EXERCISE_SEED={seed}");
    let operations = number("FOREBAY_EXERCISE_OPERATIONS").unwrap_or(15_000);
    let mut command = Command::new(program);
    add(&mut command, &place, &seed.to_string(), &operations.to_string());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(place.mnt()).unwrap().count(), 0);
    place.is_clean();
}

fn on_the_mount(command: &mut Command, place: &Place, seed: &str, operations: &str) {
    command.arg(place.mnt()).args([seed, operations]);
}

#[test]
fn files_on_the_mount_hold_what_was_written_last_by_passthrough() {
    exercise(&[], on_the_mount);
}

#[test]
fn files_on_the_mount_hold_what_was_written_last_by_requests() {
    exercise(&["--no-passthrough"], on_the_mount);
}

/// A preloaded program also uses the mount: it opens each file through both interfaces.
#[test]
fn files_hold_what_was_written_last_by_either_door() {
    exercise(&[], |command, place, seed, operations| {
        command.env("LD_PRELOAD", binaries().join("libforebay_preload.so"));
        command.env("FOREBAY_POOL", place.pool()).env("FOREBAY_PREFIX", "/forebay");
        command.args(["/forebay", seed, operations]).arg(place.mnt());
    });
}
