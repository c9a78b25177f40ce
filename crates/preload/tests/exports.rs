//! The library exports the functions in interposed.txt and no others.

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

/// Headers that declare functions with paths.
const HEADERS: &str = "dirent dlfcn fcntl fts ftw glob libgen libintl mntent nl_types pty spawn stdio stdlib sys/acct \
    sys/fanotify sys/inotify sys/ipc sys/mount sys/quota sys/stat sys/statfs sys/statvfs sys/swap sys/time sys/vfs \
    sys/xattr unistd utime utmp utmpx wordexp";

/// Functions in libc's headers with a parameter whose name suggests a path.
fn functions_with_paths() -> BTreeSet<String> {
    let source: String = HEADERS.split_whitespace().map(|h| format!("#include <{h}.h>\n")).collect();
    let path = std::env::temp_dir().join(format!("forebay-headers-{}.c", std::process::id()));
    std::fs::write(&path, format!("#define _GNU_SOURCE\n{source}")).unwrap();
    let text = Command::new("cc").args(["-E", "-P"]).arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    let text = String::from_utf8(text.unwrap().stdout).unwrap();
    let is_path = |parameter: &str| {
        let name = parameter.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
        let name = name.trim_start_matches('_');
        let like = ["path", "file", "name", "old", "new", "dir", "template", "from", "special", "source"];
        parameter.contains("char *") && like.iter().any(|start| name.starts_with(start))
            || parameter.contains("char *const *")
    };
    let mut found = BTreeSet::new();
    for declaration in text.split(';') {
        // Inline functions of the headers have bodies. The declaration is the text after them.
        let declaration = declaration.rsplit('}').next().unwrap().replace('\n', " ");
        let head = declaration.split("__attribute__").next().unwrap();
        let Some((before, behind)) = head.split_once('(') else { continue };
        let Some(name) = before.split(|c: char| !c.is_alphanumeric() && c != '_').rfind(|w| !w.is_empty())
        else {
            continue;
        };
        if !before.contains("typedef") && behind.split(',').any(|p| is_path(p.trim_end_matches([')', ' ']))) {
            found.insert(name.to_owned());
        }
    }
    found
}

#[test]
fn every_function_of_libc_with_a_path_is_interposed_or_has_a_reason_not_to_be() {
    let found = functions_with_paths();
    assert!(found.len() > 100, "the headers were not understood: {found:?}");
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("uninterposed.txt");
    let text = std::fs::read_to_string(place).unwrap();
    let reasons = text.lines().filter(|line| !line.starts_with('#'));
    let excused: BTreeSet<String> = reasons
        .map(|line| {
            let (name, reason) = line.split_once(": ").expect("name: reason");
            assert!(!reason.trim().is_empty(), "{name} has no reason");
            name.to_owned()
        })
        .collect();
    let listed = listed();
    let forgotten: Vec<_> = found.difference(&listed).filter(|name| !excused.contains(*name)).collect();
    assert!(forgotten.is_empty(), "neither interposed nor in uninterposed.txt: {forgotten:?}");
    let both: Vec<_> = excused.intersection(&listed).collect();
    assert!(both.is_empty(), "interposed, and in uninterposed.txt: {both:?}");
}

#[test]
fn document_lists_exactly_what_is_interposed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table = text.split("## Calls that the preload library serves").nth(1).expect("the section");
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let words = rows.flat_map(|line| line.split('`').skip(1).step_by(2));
    assert_eq!(words.map(str::to_owned).collect::<BTreeSet<_>>(), listed());
}
