//! What libforebay.so exports is exports.txt and what forebay.h declares, and none of its calls can be interposed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("libforebay.so")
}

/// The dynamic symbols of the library, without versions.
fn symbols(which: &str) -> BTreeSet<String> {
    let library = library();
    assert!(library.exists(), "{} is not built: run `cargo build -p forebay-capi`", library.display());
    let output =
        Command::new("nm").args(["-D", which]).arg(&library).output().expect("nm (binutils) is installed");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let names = text.lines().filter_map(|line| line.split_whitespace().last());
    names.map(|name| name.split('@').next().unwrap_or(name).to_owned()).collect()
}

fn crate_file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn exports_are_those_listed() {
    let listed: BTreeSet<String> = crate_file("exports.txt").lines().map(str::to_owned).collect();
    assert_eq!(symbols("--defined-only"), listed);
}

#[test]
fn exports_but_the_door_are_declared_in_the_header() {
    let header = crate_file("include/forebay.h");
    for name in crate_file("exports.txt").lines().filter(|name| *name != "forebay_door") {
        assert!(header.contains(&format!("{name}(")), "{name} is exported and not in forebay.h");
    }
    let declared = header
        .lines()
        .filter(|line| line.ends_with(';') || line.ends_with(','))
        .filter(|line| !line.starts_with("typedef"))
        .filter_map(|line| {
            let (before, _) = line.split_once('(')?;
            before.rsplit([' ', '*']).next().filter(|name| name.starts_with("forebay_"))
        });
    let exported = symbols("--defined-only");
    let declared: Vec<_> = declared.collect();
    assert!(declared.len() > 25, "only {} functions were found in the header", declared.len());
    for name in declared {
        assert!(exported.contains(name), "{name} is in forebay.h and not exported");
    }
}

/// `make install` finds by this line which pages `man` is to give for which names.
#[test]
fn exports_but_the_door_have_a_man_page_with_their_prototype() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/man");
    let pages = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|page| page.extension().is_some_and(|extension| extension == "3"));
    let mut described = Vec::new();
    for page in pages.filter(|page| !page.ends_with("libforebay.3")) {
        let text = std::fs::read_to_string(&page).unwrap();
        let (_, rest) =
            text.split_once(".SH NAME\n").unwrap_or_else(|| panic!("{} has no name", page.display()));
        let (names, _) = rest.lines().next().unwrap().split_once(" \\- ").unwrap();
        for name in names.split(", ") {
            assert!(text.contains(&format!("{name}(")), "{}: no prototype of {name}", page.display());
            described.push(name.to_owned());
        }
        assert!(described.iter().any(|name| page.ends_with(format!("{name}.3"))), "{}", page.display());
    }
    described.sort();
    let exported: Vec<_> =
        symbols("--defined-only").into_iter().filter(|name| name != "forebay_door").collect();
    assert_eq!(described, exported);
}

/// Standard library functions that are reached only while a panic prints its backtrace.
const ON_PANIC: [&str; 2] = ["getcwd", "realpath"];

#[test]
fn own_calls_are_not_interposed() {
    let interposed = crate_file("../preload/interposed.txt");
    let interposed: BTreeSet<&str> = interposed.lines().collect();
    assert!(interposed.contains("openat"), "the list of interposed functions is there");
    let undefined = symbols("--undefined-only");
    let caught: Vec<_> = undefined
        .iter()
        .filter(|name| interposed.contains(name.as_str()) && !ON_PANIC.contains(&name.as_str()))
        .collect();
    assert!(caught.is_empty(), "add to src/kernel.rs, or the preload library answers them: {caught:?}");
}

/// Functions at which libc cancels a thread. It reads and writes files itself only while a panic prints its backtrace.
const CANCELS: [&str; 16] = [
    "accept",
    "accept4",
    "close",
    "connect",
    "fallocate",
    "fsync",
    "nanosleep",
    "poll",
    "pread",
    "pwrite",
    "recv",
    "recvmsg",
    "send",
    "sendmsg",
    "sleep",
    "usleep",
];

#[test]
fn own_calls_cancel_no_thread() {
    let undefined = symbols("--undefined-only");
    let found: Vec<_> = CANCELS.iter().filter(|name| undefined.contains(**name)).collect();
    assert!(
        found.is_empty(),
        "add to src/kernel.rs, or a thread that is cancelled there ends the program: {found:?}"
    );
}
