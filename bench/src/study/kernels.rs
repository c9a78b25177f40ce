//! The I/O kernels of kernels/, built for an MPI, and what they print.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::mpi::Mpi;
use crate::systems::said;

/// Builds them all in a directory.
pub(super) fn build(mpi: &Mpi, directory: &Path) -> Result<PathBuf, String> {
    let built = directory.join("kernels");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(source).arg(format!("OUT={}", built.display()));
    said(make.arg(format!("CC={}", mpi.compiler)))?;
    Ok(built)
}

/// A phase of a run: its bytes, and the longest time of a rank.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Phase {
    pub(super) name: String,
    pub(super) bytes: f64,
    pub(super) seconds: f64,
}

/// The phases in a kernel's JSON.
pub(super) fn phases(text: &str) -> Result<Vec<Phase>, String> {
    let line = text.lines().find(|line| line.starts_with('{')).ok_or(format!("a kernel said {text:?}"))?;
    let found: Value = serde_json::from_str(line).map_err(|e| format!("a kernel said {line:?}: {e}"))?;
    let phases = found["phases"].as_array().ok_or(format!("a kernel said {line:?}"))?;
    let phase = |p: &Value| {
        let name = p["name"].as_str()?.to_owned();
        Some(Phase { name, bytes: p["bytes"].as_f64()?, seconds: p["seconds"]["max"].as_f64()? })
    };
    phases.iter().map(|p| phase(p).ok_or(format!("a kernel's phase is {p}"))).collect()
}

/// Bytes per second of all phases whose names a test accepts.
pub(super) fn rate(phases: &[Phase], is_counted: impl Fn(&str) -> bool) -> f64 {
    let counted = || phases.iter().filter(|phase| is_counted(&phase.name));
    let seconds: f64 = counted().map(|phase| phase.seconds).sum();
    counted().map(|phase| phase.bytes).sum::<f64>() / seconds.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_that_of_the_phases_together() {
        let text = "a line of the launcher\n{\"kernel\": \"x\", \"phases\": [\
            {\"name\": \"write\", \"bytes\": 300, \"operations\": 3, \"seconds\": {\"min\": 1, \"mean\": 1, \"max\": 2}},\
            {\"name\": \"read\", \"bytes\": 100, \"operations\": 3, \"seconds\": {\"min\": 1, \"mean\": 1, \"max\": 3}},\
            {\"name\": \"work\", \"bytes\": 0, \"operations\": 0, \"seconds\": {\"min\": 5, \"mean\": 5, \"max\": 5}}]}\n";
        let found = phases(text).unwrap();
        assert_eq!(found.len(), 3);
        assert!((rate(&found, |name| name != "work") - 80.0).abs() < 1e-9);
        assert!((rate(&found, |_| true) - 40.0).abs() < 1e-9);
        assert!(phases("no results").is_err() && phases("{\"phases\": [{\"name\": 1}]}").is_err());
    }
}
