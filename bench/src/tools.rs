//! ior and mdtest, when they are on PATH: runs the same command on every system, and prints their own summaries.

use crate::systems::{said, System};
use std::process::Command;

/// True when a program is installed.
pub(crate) fn on_path(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", "command -v \"$1\" >/dev/null", "find", program])
        .status()
        .is_ok_and(|s| s.success())
}

/// True when one of them is installed.
pub(crate) fn there() -> bool {
    on_path("ior") || on_path("mdtest")
}

/// Runs the installed ones, through the preload library on Forebay and without it elsewhere.
pub(crate) fn measure(systems: &[System<'_>]) -> Result<(), String> {
    if !there() {
        println!("\nneither ior nor mdtest is on PATH");
        return Ok(());
    }
    for (program, arguments, keep) in [
        (
            "ior",
            &["-a", "POSIX", "-t", "1m", "-b", "256m", "-i", "5", "-w", "-r", "-o"][..],
            ["write", "read"].as_slice(),
        ),
        (
            "mdtest",
            &["-n", "5000", "-i", "5", "-F", "-d"][..],
            ["File creation", "File stat", "File removal"].as_slice(),
        ),
    ] {
        if !on_path(program) {
            continue;
        }
        println!("\n{program} {}", arguments.join(" "));
        for system in systems {
            let text = said(system.command(program).args(arguments).arg(system.root.join(program)))?;
            // The summary comes last; lines of the repetitions before it begin with the same words.
            let summary = text.rsplit("ummary").next().unwrap_or(&text);
            println!("  {}", system.name);
            for line in summary.lines().filter(|line| keep.iter().any(|k| line.trim_start().starts_with(k))) {
                println!("    {}", line.trim());
            }
        }
    }
    Ok(())
}
