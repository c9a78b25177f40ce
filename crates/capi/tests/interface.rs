//! The functions of forebay.h called from C, against a pool.

#[path = "../../preload/tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;
use support::{binary, said, succeeds, Pool, Scratch};

fn build(scratch: &Scratch, words: &[&str]) -> std::path::PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = binary("libforebay.so").parent().unwrap().to_owned();
    let program = scratch.path().join("interface");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(words)
        .arg("-o")
        .arg(&program);
    compiler.arg("-I").arg(here.join("include")).arg(here.join("tests/interface.c"));
    compiler.arg("-L").arg(&libraries).arg("-lforebay").arg(format!("-Wl,-rpath,{}", libraries.display()));
    succeeds(&mut compiler);
    program
}

/// Makes the volumes of the program, where a pool may have some: its daemon may resize its tmpfs. Returns the value of the
/// variable that tells the program.
fn furnish(pool: &Pool) -> &'static str {
    // SAFETY: geteuid has no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return "";
    }
    for words in
        [&["v", "--size", "4MiB"][..], &["w", "--size", "2MiB"], &["thin", "--size", "1TiB", "--thin"]]
    {
        let mut forebay = Command::new(binary("forebay"));
        succeeds(forebay.arg("--pool").arg(pool.path()).args(["volume", "create"]).args(words));
    }
    "1"
}

#[test]
fn interface_from_c_does_what_the_header_says() {
    let pool = Pool::start();
    let volumes = furnish(&pool);
    let scratch = Scratch::new();
    let program = build(&scratch, &[]);
    let mut alone = Command::new(&program);
    succeeds(alone.env("FOREBAY_POOL", pool.path()).env("FOREBAY_TEST_VOLUMES", volumes));
    // The library's own calls go to the kernel, even under the preload library.
    succeeds(&mut pool.command(&program));
}

/// The library reads and writes only the memory of its caller that the header permits, also in asynchronous transfers.
#[test]
fn interface_from_c_is_clean_under_address_and_undefined_behaviour_sanitizers() {
    let pool = Pool::start();
    let volumes = furnish(&pool);
    let scratch = Scratch::new();
    let words = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let mut program = Command::new(build(&scratch, &words));
    succeeds(program.env("FOREBAY_POOL", pool.path()).env("FOREBAY_TEST_VOLUMES", volumes));
}

#[test]
fn attach_without_a_pool_says_what_to_set() {
    let scratch = Scratch::new();
    let (output, text) = said(Command::new(build(&scratch, &[])).env_remove("FOREBAY_POOL"));
    assert!(!output.status.success() && text.contains("forebay_attach(NULL, &pool) == 0"), "{text}");
}
