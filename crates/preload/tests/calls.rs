//! The C program of calls/ in the pool, and on a plain file system to prove that it expects what Linux does.

mod support;

use std::process::Command;
use support::{compile, succeeds, Pool, Scratch};

const SECTIONS: [&str; 32] = [
    "stdio",
    "directories",
    "walks",
    "paths",
    "crossings",
    "attributes",
    "xattrs",
    "names",
    "exec",
    "signals",
    "threads",
    "descriptors",
    "fifos",
    "numbers",
    "objects",
    "lists",
    "questions",
    "trees",
    "magic",
    "sockets",
    "locks",
    "directory locks",
    "closing",
    "handlers",
    "stopped",
    "cancelled",
    "children",
    "nameless",
    "pointers",
    "path descriptors",
    "open flags",
    "slashes",
];

#[test]
fn calls_on_a_plain_file_system_do_what_is_expected() {
    let scratch = Scratch::new();
    let program = compile("calls", scratch.path());
    for section in SECTIONS {
        let root = scratch.path().join(section);
        std::fs::create_dir(&root).unwrap();
        succeeds(Command::new(&program).arg(&root).arg(section));
    }
}

#[test]
fn calls_in_the_pool_do_what_is_expected() {
    let pool = Pool::start();
    let scratch = Scratch::new();
    let program = compile("calls", scratch.path());
    for section in SECTIONS {
        let root = format!("/forebay/{section}");
        succeeds(pool.command("mkdir").arg(&root));
        succeeds(pool.command(&program).arg(&root).arg(section));
    }
    // Races and kills must leave no files behind.
    succeeds(Command::new(support::binary("forebay")).arg("fsck").arg("--pool").arg(pool.path()));
}

#[test]
fn calls_under_a_prefix_that_is_deep_do_what_is_expected() {
    let pool = Pool::start();
    let scratch = Scratch::new();
    let program = compile("calls", scratch.path());
    let prefix = scratch.path().join("prefix");
    for section in ["paths", "crossings", "exec"] {
        let root = prefix.join(section);
        succeeds(pool.command("mkdir").arg(&root).env("FOREBAY_PREFIX", &prefix));
        succeeds(pool.command(&program).arg(&root).arg(section).env("FOREBAY_PREFIX", &prefix));
    }
    assert!(!prefix.exists(), "nothing is made in the kernel's tree");
}
