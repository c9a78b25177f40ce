//! Crates import only what the table in ARCHITECTURE.md allows, and the allowed imports have no cycle.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Libraries that only the listed crates may use, so that the crates of programs' interfaces depend neither on LMDB or
/// libfabric nor on command-line libraries.
const KEPT_TO: [(&str, &[&str]); 9] = [
    ("heed", &["meta"]),
    ("clap", &["cli"]),
    ("indicatif", &["cli"]),
    ("tracing-subscriber", &["log"]),
    ("blake3", &["wire"]),
    ("fabric-sys", &["fabric"]),
    ("opendal", &["mover"]),
    ("tokio", &["mover"]),
    ("rustls", &["mover"]),
];
/// Crates that are linked into every host program: they use no library except libc.
const IN_EVERY_HOST: [&str; 7] = ["client", "capi", "preload", "sys", "volume", "pacing", "model"];

/// The crates that each crate may import: the rows of the table whose first cell is a crate.
fn allowed() -> BTreeMap<String, BTreeSet<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let rows = text.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `crates/")?.split('|');
        let room = cells.next()?.trim().trim_end_matches('`').to_owned();
        Some((room, cells.nth(1)?.to_owned()))
    });
    let rows: BTreeMap<String, String> = rows.collect();
    let words = |cell: &str| cell.split([' ', ',', '(']).map(str::to_owned).collect::<BTreeSet<_>>();
    let rooms: BTreeSet<String> = rows.keys().cloned().collect();
    rows.iter()
        .map(|(room, cell)| (room.clone(), words(cell).intersection(&rooms).cloned().collect()))
        .collect()
}

/// The dependencies of each crate in crates/, from the manifests: our crates without `forebay-`, and other libraries.
/// Dependencies of tests are left out.
fn used() -> BTreeMap<String, BTreeSet<String>> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or("cargo".into()));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path", manifest]);
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().trim_start_matches("forebay-").to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages = list(&metadata["packages"]);
    let in_crates =
        packages.iter().filter(|p| p["manifest_path"].as_str().unwrap_or_default().contains("/crates/"));
    in_crates
        .map(|package| {
            let dependencies = list(&package["dependencies"]);
            let names = dependencies.iter().filter(|d| d["kind"] != "dev").map(|d| text(&d["name"]));
            (text(&package["name"]), names.collect())
        })
        .collect()
}

#[test]
fn rooms_import_what_the_architecture_allows() {
    let allowed = allowed();
    assert!(allowed.len() >= 10, "only {} rooms are in the table of ARCHITECTURE.md", allowed.len());
    for (room, libraries) in used() {
        let may = allowed
            .get(&room)
            .unwrap_or_else(|| panic!("crates/{room} is not in the table of ARCHITECTURE.md"));
        for import in libraries.iter().filter(|library| allowed.contains_key(*library)) {
            assert!(
                may.contains(import),
                "crates/{room} imports {import}; ARCHITECTURE.md allows it {may:?}"
            );
        }
    }
}

#[test]
fn allowed_imports_have_no_cycle() {
    let mut left = allowed();
    while !left.is_empty() {
        let free: Vec<String> = left
            .iter()
            .filter(|(_, may)| may.iter().all(|m| !left.contains_key(m)))
            .map(|(r, _)| r.clone())
            .collect();
        assert!(!free.is_empty(), "these import one another: {left:?}");
        left.retain(|room, _| !free.contains(room));
    }
}

#[test]
fn libraries_are_kept_to_their_rooms() {
    let used = used();
    let rooms: BTreeSet<&String> = used.keys().collect();
    for (room, libraries) in &used {
        for (library, keepers) in KEPT_TO {
            let kept = keepers.contains(&room.as_str()) || !libraries.contains(library);
            assert!(kept, "crates/{room} uses {library}, which is kept to {keepers:?}");
        }
        if IN_EVERY_HOST.contains(&room.as_str()) {
            let others: Vec<_> = libraries.iter().filter(|l| *l != "libc" && !rooms.contains(l)).collect();
            assert!(others.is_empty(), "crates/{room} is in every host program and uses {others:?}");
        }
    }
}
