//! Files of several backing files, from each source of names.

use std::path::Path;
use std::process::Command;

use crate::bed::{backing_files, Bed};
use crate::common::{forebay, Ran};

/// What `striped.c` writes.
fn content() -> Vec<u8> {
    (0..1_000_003).map(|i| if (300_000..600_000).contains(&i) { 0 } else { (i % 251 + 1) as u8 }).collect()
}

/// Writes the file through `forebay.h`.
fn write(bed: &Bed, path: &str, sync: bool) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let libraries = forebay().parent().unwrap();
    let program = bed.place.join("striped");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(crates.join("capi/include"))
        .arg(crates.join("cli/tests/recover/striped.c"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(libraries)
        .args(["-lforebay", &format!("-Wl,-rpath,{}", libraries.display())])
        .output()
        .unwrap();
    let compiled = Ran::of(compiled);
    assert_eq!(compiled.code, Some(0), "{compiled:?}");
    let mut run = Command::new(&program);
    let done = Ran::of(run.arg(&bed.pool).arg(path).arg(if sync { "sync" } else { "no" }).output().unwrap());
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(backing_files(&bed.pool).len(), 3, "its backing files");
}

fn check(bed: &Bed) {
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    assert!(std::fs::read(bed.store.join("f")).unwrap() == content(), "{report}");
    assert_eq!(bed.names(), ["f".to_owned()].into());
}

#[test]
fn striped_file_is_put_together_by_a_shard_that_was_left() {
    let bed = Bed::new(&["--drain", "request"]);
    write(&bed, "/f", false);
    bed.die();
    check(&bed);
}

#[test]
fn striped_file_is_put_together_by_marks_alone() {
    let bed = Bed::new(&["--drain", "request"]);
    write(&bed, "/f", true);
    bed.die();
    bed.lose_shard();
    check(&bed);
}

#[test]
fn striped_file_is_put_together_by_a_snapshot_alone() {
    let bed = Bed::new(&["--drain", "request"]);
    write(&bed, "/f", false);
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    bed.remove_marks();
    std::fs::remove_file(bed.shard("data.mdb")).unwrap();
    std::fs::remove_file(bed.shard("journal")).unwrap();
    check(&bed);
}

#[test]
fn striped_file_of_which_no_record_is_left_is_named_and_not_guessed() {
    let bed = Bed::new(&["--drain", "request"]);
    write(&bed, "/f", false);
    bed.die();
    bed.lose_shard();
    bed.remove_marks();
    let report = bed.recovered(&["--unnamed", "--to", bed.store.to_str().unwrap()]);
    assert_eq!(report["complete"], false, "{report}");
    assert!(report.to_string().contains("striped, and no record"), "{report}");
    let written: Vec<_> = bed.names().into_iter().filter(|name| bed.store.join(name).is_file()).collect();
    assert!(written.is_empty(), "{written:?}");
}
