//! Writes the functions of include/forebay.h as Rust, and the link settings of libforebay.so.

mod exports;
mod header;

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libforebay.so");
    // Its threads, and handles that it returned, outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=include/forebay.h");
    println!("cargo:rerun-if-changed=src/kernel.rs");
    wrap_calls();
    let header = header::read(Path::new("."));
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let write = |name, text| fs::write(Path::new(&out).join(name), text).expect("OUT_DIR is writable");
    write("types.rs", exports::types(&header));
    write("functions.rs", exports::functions(&header));
}

/// Has the linker resolve the calls that `src/kernel.rs` defines to those definitions.
fn wrap_calls() {
    let source = fs::read_to_string("src/kernel.rs").expect("src/kernel.rs is in the crate");
    let names = source.lines().filter_map(|line| line.strip_prefix("    \"")?.split_once("\" = fn "));
    let mut count = 0;
    for (name, _) in names {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
        count += 1;
    }
    assert!(count > 0, "src/kernel.rs defines no calls in the form that this script looks for");
}
