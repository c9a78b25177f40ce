//! Real programs in the pool: what they print, and what they leave, is what they print and leave on a plain file system.

mod support;

use std::path::Path;
use std::process::Command;
use support::{has, said, succeeds, Pool, Scratch};

/// The scripts, and the programs without which they say nothing.
const SCRIPTS: [(&str, &[&str]); 8] = [
    ("coreutils.sh", &[]),
    ("shell.sh", &["bash"]),
    ("archives.sh", &["tar"]),
    ("python.py", &["python3"]),
    ("compile.sh", &["cc", "make"]),
    ("database.sh", &["sqlite3"]),
    ("git.sh", &["git"]),
    ("copies.sh", &["rsync"]),
];

fn interpreter(script: &str) -> &'static str {
    if script.ends_with(".py") {
        "python3"
    } else {
        "bash"
    }
}

fn script(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

#[test]
fn programs_in_the_pool_say_and_leave_what_they_do_on_a_plain_file_system() {
    let pool = Pool::start();
    for (name, needs) in SCRIPTS {
        if let Some(missing) = needs.iter().find(|program| !has(program)) {
            eprintln!("{name} is left out: {missing} is not installed");
            continue;
        }
        let scratch = Scratch::new();
        // Both roots have names of one length, as some programs print paths in columns.
        let plain = scratch.path().join("root");
        std::fs::create_dir(&plain).unwrap();
        let width = plain.as_os_str().len() - "/forebay/".len();
        let root = format!("/forebay/{:r<width$}", name.split('.').next().unwrap());
        succeeds(pool.command("mkdir").arg(&root));
        let run = |command: &mut Command, root: &Path| {
            let command = command.arg(script(name)).arg(root).env("LC_ALL", "C").env("HOME", "/nonexistent");
            let (output, text) = said(command);
            let shown = text.replace(root.to_str().unwrap(), "ROOT");
            format!("{shown}{}\n", output.status)
        };
        let expected = run(Command::new(interpreter(name)).current_dir("/"), &plain);
        let found = run(&mut pool.command(interpreter(name)), Path::new(&root));
        assert!(expected.lines().count() > 5, "{name} says too little to be a test:\n{expected}");
        assert_eq!(found, expected, "{name} in the pool differs");
        let listing = |command: &mut Command, root: &str| {
            let tree = "cd \"$1\" && find . ! -name '*.idx' ! -name '*.pack' ! -name '*.rev' -printf '%P %y %m %n %l\\n' | sort";
            succeeds(command.args(["-c", tree, "sh", root])).replace(root, "ROOT")
        };
        let expected = listing(Command::new("sh").env("LC_ALL", "C"), plain.to_str().unwrap());
        let found = listing(pool.command("sh").env("LC_ALL", "C"), &root);
        assert_eq!(found, expected, "{name} leaves another tree in the pool");
    }
}

#[test]
fn a_difference_between_pool_and_plain_is_seen() {
    let pool = Pool::start();
    let (_, inside) = said(pool.command("sh").args(["-c", "cd /forebay && pwd"]));
    let (_, outside) = said(Command::new("sh").args(["-c", "cd /dev/shm && pwd"]));
    assert_ne!(inside, outside);
}
