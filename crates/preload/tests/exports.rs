//! What the library exports is interposed.txt: no more, and nothing by accident less.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use support::{binary, succeeds};

fn listed() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("interposed.txt");
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

fn symbols(file: &Path) -> BTreeSet<String> {
    let text = succeeds(Command::new("nm").args(["-D", "--defined-only"]).arg(file));
    let names = text.lines().filter_map(|line| line.split_whitespace().last());
    names.map(|name| name.split('@').next().unwrap_or(name).to_owned()).collect()
}

#[test]
fn exports_are_those_listed() {
    assert_eq!(symbols(&binary("libforebay_preload.so")), listed());
}

#[test]
fn exports_are_all_functions_of_libc() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc =
        maps.split_whitespace().find(|word| word.ends_with("/libc.so.6")).expect("this test uses libc.so.6");
    let libc = symbols(Path::new(libc));
    assert!(libc.len() > 1000);
    let unknown: Vec<_> = listed().difference(&libc).cloned().collect();
    assert!(unknown.is_empty(), "libc has no functions of these names: {unknown:?}");
}
