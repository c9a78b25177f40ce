//! Scripts that run on a plain file system and in the pool, and their results.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{has, said, succeeds, Pool, Scratch};

/// A script beside the tests, and its requirements: programs, and `python:MODULE` for modules of Python.
pub struct Script {
    pub name: &'static str,
    pub needs: &'static [&'static str],
}

/// The output of a script, and the tree that it left.
#[derive(PartialEq, Eq)]
pub struct Outcome {
    said: String,
    left: String,
}

/// Pythons to try: a user's own may lack modules that the system's has.
const PYTHONS: [&str; 2] = ["python3", "/usr/bin/python3"];

/// The tree of $1, without files that have random names.
const TREE: &str =
    "cd \"$1\" && find . ! -name '*.idx' ! -name '*.pack' ! -name '*.rev' -printf '%P %y %m %n %l\\n' | sort";

impl Script {
    /// The command for the script. None, and a line with the reason, when something is not installed.
    fn interpreter(&self) -> Option<&'static str> {
        let missing = self.needs.iter().find(|need| !need.starts_with("python:") && !has(need));
        if let Some(missing) = missing {
            eprintln!("{} is left out: {missing} is not installed", self.name);
            return None;
        }
        if !self.name.ends_with(".py") {
            return Some("bash");
        }
        let modules: Vec<&str> = self.needs.iter().filter_map(|need| need.strip_prefix("python:")).collect();
        let import: String = modules.iter().map(|module| format!("import {module}\n")).collect();
        let able = |python: &&&str| {
            let output = Command::new(python).args(["-c", &import]).output();
            output.is_ok_and(|output| output.status.success())
        };
        let found = PYTHONS.iter().find(able);
        if found.is_none() {
            eprintln!("{} is left out: there is no Python with {}", self.name, modules.join(" and "));
        }
        found.copied()
    }

    fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(self.name)
    }

    fn run(&self, command: &mut Command, root: &Path) -> String {
        let home = std::env::var_os("HOME").unwrap_or_default();
        let command = command.arg(self.path()).arg(root).env("LC_ALL", "C").env("OWN_HOME", home);
        let (output, text) = said(command.env("HOME", "/nonexistent"));
        format!("{}{}\n", text.replace(root.to_str().unwrap(), "ROOT"), output.status)
    }

    /// Runs the script on a plain file system, and then `times` times in the pool. Fails at the first difference.
    /// `beside` runs while the script runs in the pool.
    #[track_caller]
    pub fn compare(&self, pool: &Pool, times: usize, beside: impl Fn(&dyn Fn())) {
        let Some(interpreter) = self.interpreter() else { return };
        let name = self.name;
        let scratch = Scratch::new();
        let stem = name.split('.').next().unwrap();
        // All roots have names of one length, as some programs print paths in columns.
        let plain = scratch.path().join("root");
        std::fs::create_dir(&plain).unwrap();
        let text = plain.to_str().unwrap();
        let expected = Outcome {
            said: self.run(Command::new(interpreter).current_dir("/"), &plain),
            left: succeeds(Command::new("sh").args(["-c", TREE, "sh", text]).env("LC_ALL", "C")),
        };
        assert!(expected.said.lines().count() > 5, "{name} prints too little for a test:\n{}", expected.said);
        let width = text.len() - "/forebay/".len();
        for time in 0..times {
            let root = format!("/forebay/{:r<width$}", format!("{stem}{time}"));
            assert_eq!(root.len(), text.len());
            succeeds(pool.command("mkdir").arg(&root));
            let found = std::sync::OnceLock::new();
            beside(&|| {
                found.set(self.run(&mut pool.command(interpreter), Path::new(&root))).ok();
            });
            let left = succeeds(pool.command("sh").args(["-c", TREE, "sh", &root]).env("LC_ALL", "C"));
            let said = found.into_inner().expect("the script was run");
            assert_eq!(said, expected.said, "{name} in the pool differs");
            assert_eq!(
                left.replace(&root, "ROOT"),
                expected.left.replace(text, "ROOT"),
                "{name} leaves another tree"
            );
        }
    }
}
