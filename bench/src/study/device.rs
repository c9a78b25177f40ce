//! A file system on an emulated medium, and programs in it whose memory, and so page cache, is limited.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::systems::said;

/// An emulated block device with an ext4, mounted. Dropping it ends all.
pub(super) struct Device {
    forebay: PathBuf,
    name: String,
    path: String,
    pub(super) mount: PathBuf,
}

impl Device {
    pub(super) fn up(forebay: &Path, profile: &str, bytes: u64, directory: &Path) -> Result<Device, String> {
        let name = format!("study-{}-{profile}", std::process::id());
        let mut up = Command::new(forebay);
        up.args([
            "emulate",
            "up",
            "--profile",
            profile,
            "--size",
            &bytes.to_string(),
            "--name",
            &name,
            "--json",
        ]);
        let text = said(&mut up)?;
        let found: Value =
            serde_json::from_str(&text).map_err(|e| format!("emulate up said {text:?}: {e}"))?;
        let path = found["device"].as_str().unwrap_or_default().to_owned();
        let mount = directory.join(format!("ext4-{profile}"));
        let device = Device { forebay: forebay.to_owned(), name, path, mount };
        // Nothing of the file system's is left to be written later.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        said(Command::new("mkfs.ext4").args(["-q", "-E", options]).arg(&device.path))?;
        std::fs::create_dir_all(&device.mount).map_err(|e| format!("{}: {e}", device.mount.display()))?;
        device.attach()?;
        Ok(device)
    }

    fn attach(&self) -> Result<(), String> {
        said(Command::new("mount").args(["-t", "ext4"]).arg(&self.path).arg(&self.mount)).map(drop)
    }

    /// Writes and forgets what the page cache has.
    pub(super) fn settle(&self) -> Result<(), String> {
        said(Command::new("umount").arg(&self.mount))?;
        self.attach()
    }

    /// Runs a command in a memory cgroup; returns its standard output and the most memory that it had.
    pub(super) fn limited(&self, memory: u64, command: &Command) -> Result<(String, u64), String> {
        let mut run = Command::new(&self.forebay);
        run.args(["emulate", "run", "--memory", &memory.to_string(), "--"]);
        run.arg(command.get_program()).args(command.get_args()).current_dir(&self.mount);
        let output = run.output().map_err(|e| format!("{run:?}: {e}"))?;
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(format!("{run:?} failed ({}): {}", output.status, told.trim()));
        }
        let peak = told.lines().find_map(peak_of).ok_or_else(|| format!("emulate run said {told:?}"))?;
        Ok((String::from_utf8_lossy(&output.stdout).into_owned(), peak))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).output();
        let _ = Command::new(&self.forebay).args(["emulate", "down", &self.name, "--force"]).output();
    }
}

/// The bytes in "the program had up to 61.5 MiB of memory, page cache included, of 1.0 GiB".
fn peak_of(line: &str) -> Option<u64> {
    let mut words = line.split_once("the program had up to ")?.1.split_whitespace();
    let number: f64 = words.next()?.parse().ok()?;
    let shift = match words.next()? {
        "B" | "bytes" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    Some((number * f64::from(1u32 << shift)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_is_read_from_what_emulate_run_says() {
        let line = "forebay: the program had up to 61.5 MiB of memory, page cache included, of 1.0 GiB";
        assert_eq!(peak_of(line), Some(61_500_000 * 1_048_576 / 1_000_000));
        assert_eq!(peak_of("forebay: something else"), None);
    }
}
