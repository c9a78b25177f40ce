//! libforebay.so exports what forebay.h declares, the man pages show it, and no call of the library can be interposed.

#[path = "../build/header.rs"]
#[allow(dead_code)] // The build script uses all of it.
mod header;

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

/// The names that the header declares.
fn declared() -> BTreeSet<String> {
    let functions = header::read(Path::new(env!("CARGO_MANIFEST_DIR"))).functions;
    assert!(functions.len() > 60, "only {} functions were found in the header", functions.len());
    functions.into_iter().map(|function| function.name).collect()
}

#[test]
fn exports_are_the_functions_of_the_header_and_the_door() {
    let mut exported = symbols("--defined-only");
    assert!(exported.remove("forebay_door"), "the preload library looks for forebay_door");
    assert_eq!(exported, declared());
}

/// A prototype of the header in the synopsis of a man page, on one line.
fn prototype(function: &header::Function) -> String {
    let spaced = |kind: &str| if kind.ends_with('*') { kind.to_owned() } else { format!("{kind} ") };
    let parameters = function.parameters.iter().map(|header::Variable { kind, name }| {
        let (kind, array) = kind.split_at(kind.find('[').unwrap_or(kind.len()));
        format!("{}\" {name}{array} \"", spaced(kind))
    });
    let parameters: Vec<_> = parameters.collect();
    format!(".BI \"{}{}({});\"\n", spaced(&function.returns), function.name, parameters.join(", "))
}

/// The prototypes of a synopsis, without quotes, spaces and line breaks.
fn prototypes(synopsis: &str) -> String {
    let lines = synopsis.lines().filter_map(|line| line.strip_prefix(".BI "));
    lines.flat_map(str::chars).filter(|c| !c.is_whitespace() && *c != '"').collect()
}

/// `make install` finds the names of each page by the line below its .SH NAME. With FOREBAY_PRINT=1 the test prints the
/// prototypes for each page.
#[test]
fn man_pages_have_the_prototypes_of_the_header() {
    let functions = header::read(Path::new(env!("CARGO_MANIFEST_DIR"))).functions;
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/man");
    let pages = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|page| page.extension().is_some_and(|extension| extension == "3"));
    let mut described = Vec::new();
    for page in pages.filter(|page| !page.ends_with("libforebay.3")) {
        let text = std::fs::read_to_string(&page).unwrap();
        let section = |heading: &str| {
            let (_, rest) = text
                .split_once(&format!(".SH {heading}\n"))
                .unwrap_or_else(|| panic!("{}: no {heading}", page.display()));
            rest.split("\n.SH ").next().unwrap().to_owned()
        };
        let title = section("NAME");
        let (names, _) = title.lines().next().unwrap().split_once(" \\- ").unwrap();
        let names: Vec<_> = names.split(", ").collect();
        assert!(names.iter().any(|name| page.ends_with(format!("{name}.3"))), "{}", page.display());
        let here = names.iter().map(|name| {
            functions.iter().find(|f| f.name == *name).unwrap_or_else(|| panic!("forebay.h has no {name}"))
        });
        let expected: String = here.map(prototype).collect();
        if std::env::var_os("FOREBAY_PRINT").is_some() {
            println!("{}:\n{expected}", page.display());
        }
        assert_eq!(
            prototypes(&section("SYNOPSIS")),
            prototypes(&expected),
            "{}: run with FOREBAY_PRINT=1",
            page.display()
        );
        described.extend(names.iter().map(|name| (*name).to_owned()));
    }
    let count = described.len();
    let described: BTreeSet<_> = described.into_iter().collect();
    assert_eq!((count, &described), (functions.len(), &declared()), "each function has one page");
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
