//! Link settings of libforebay.so: its soname, and `--wrap` for the calls that `src/kernel.rs` makes itself.

use std::fs;

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libforebay.so");
    // Its threads and what it gave out outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=src/kernel.rs");
    println!("cargo:rerun-if-changed=build.rs");
    let source = fs::read_to_string("src/kernel.rs").expect("src/kernel.rs is beside build.rs");
    let names = source.lines().filter_map(|line| line.strip_prefix("    \"")?.split_once("\" = fn "));
    let mut count = 0;
    for (name, _) in names {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
        count += 1;
    }
    assert!(count > 0, "src/kernel.rs defines no calls in the form that this script looks for");
}
