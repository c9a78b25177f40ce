//! Imports between the modules of one crate form no cycle.
//!
//! A module is a file; an inline `mod` belongs to its file. A module imports another one if it names an item of it,
//! in a `use` or in any other path, macro arguments included. The arrow goes to the file that defines the item:
//! re-exports (`pub use`) are followed, so a `mod.rs` that only declares and re-exports has no arrows. A child that
//! names an item of its parent and a parent that names an item of its child are a cycle like any other. Code under
//! `#[cfg(test)]` does not count. Method calls name no module, so arrows that exist only through methods are not seen.
//!
//! `FOREBAY_PRINT=1` prints every group of modules that import one another, with the names that they import.

mod cycles;
mod modules;

use std::path::{Path, PathBuf};

/// Each crate's name, and the root files of its library and programs.
fn crates() -> Vec<(String, Vec<PathBuf>)> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders = vec![top.join("bench"), top.join("tests/conformance")];
    let entries = std::fs::read_dir(top.join("crates")).expect("crates/ can be listed");
    folders.extend(entries.map(|entry| entry.expect("crates/ can be listed").path()));
    folders.sort();
    let name = |folder: &Path| folder.file_name().expect("a crate has a name").to_string_lossy().into_owned();
    folders.iter().map(|folder| (name(folder), roots(&folder.join("src")))).collect()
}

fn roots(src: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["lib.rs", "main.rs"].iter().map(|file| src.join(file)).collect();
    if let Ok(programs) = std::fs::read_dir(src.join("bin")) {
        roots.extend(programs.map(|entry| entry.expect("src/bin can be listed").path()));
    }
    roots.retain(|root| root.is_file());
    assert!(!roots.is_empty(), "{} has no root file", src.display());
    roots
}

#[test]
fn modules_of_a_crate_import_one_another_in_no_cycle() {
    let print = std::env::var_os("FOREBAY_PRINT").is_some();
    let mut complaints = Vec::new();
    for (name, roots) in crates() {
        for root in roots {
            let graph = modules::read(&root, &|path| std::fs::read_to_string(path).ok());
            if print {
                graph.groups().iter().for_each(|group| println!("{name}: {}", graph.describe(group)));
            }
            let cycle = graph.shortest_cycle();
            complaints.extend(cycle.map(|cycle| format!("{name}: {}", graph.describe(&cycle))));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// The shortest cycle in a crate of these files. The first one is the root file.
fn cycle(files: &[(&str, &str)]) -> Option<String> {
    let text = |path: &Path| {
        let file = files.iter().find(|(name, _)| Path::new(name) == path);
        file.map(|(_, text)| (*text).to_owned())
    };
    let cycle = modules::read(Path::new(files[0].0), &text).shortest_cycle()?;
    Some(cycle.into_iter().collect::<Vec<_>>().join(" "))
}

const LIB: (&str, &str) = ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;");

#[test]
fn cycle_through_a_re_export_is_found() {
    let first = ("a.rs", "use crate::B; pub struct A(B);");
    assert_eq!(cycle(&[LIB, first, ("b.rs", "pub struct B(Box<crate::A>);")]).as_deref(), Some("a b"));
    let glob = ("lib.rs", "mod a; mod b; pub use a::*; pub use b::*;");
    assert_eq!(
        cycle(&[glob, first, ("b.rs", "use super::*; pub struct B(Box<A>);")]).as_deref(),
        Some("a b")
    );
}

#[test]
fn cycle_through_the_argument_of_a_macro_is_found() {
    let first = ("a.rs", "pub struct A; fn f() { println!(\"{}\", [super::b::B]); }");
    assert_eq!(
        cycle(&[LIB, first, ("b.rs", "use super::a; pub struct B; fn f() -> a::A {}")]).as_deref(),
        Some("a b")
    );
}

#[test]
fn cycle_of_parent_and_child_is_found() {
    let parent = ("a/mod.rs", "mod child; use child::Child; pub struct A(Child);");
    let child = ("a/child.rs", "pub struct Child(Box<super::A>);");
    assert_eq!(cycle(&[LIB, parent, child, ("b.rs", "pub struct B;")]).as_deref(), Some("a a::child"));
}

#[test]
fn re_exports_and_tests_close_no_cycle() {
    let parent = ("a.rs", "mod child; pub use child::Child; pub struct A;");
    let child = ("a/child.rs", "pub struct Child(super::A, crate::B);");
    let test = ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::A; }");
    assert_eq!(cycle(&[LIB, parent, child, test]), None);
    let using = ("a.rs", "mod child; pub use child::Child; pub struct A(Box<Child>);");
    assert_eq!(cycle(&[LIB, using, child, test]).as_deref(), Some("a a::child"));
}
