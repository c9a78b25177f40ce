//! Kills processes, for the tests of one node and of several.

use std::process::{Command, Stdio};

/// Kills a process.
pub(crate) fn kill(pid: u64) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Kills a process and all processes below it.
pub(crate) fn kill_below(pid: u32) {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    kill(u64::from(pid));
    children.split_whitespace().flat_map(str::parse).for_each(kill_below);
}
