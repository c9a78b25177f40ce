//! A slow directory: `forebay-bench slow` (`slowfs.rs`) over a directory of the disk.
//!
//! Programs that use it themselves and `forebay-mover` are limited alike, because both go through the same mount.

use crate::systems::said;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Bytes per second, of reads and of writes.
pub(crate) const RATE: u64 = 100_000_000;
/// How long the mount may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How slow it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slowness {
    /// Bytes per second, of reads and of writes; 0: no limit.
    pub(crate) rate: u64,
    /// Of each call.
    pub(crate) latency_ms: u64,
}

/// The slow directory; dropping it unmounts and removes it.
pub(crate) struct SlowStore {
    /// The directory behind it, at the disk's own speed.
    pub(crate) behind: PathBuf,
    /// The slow view of it.
    pub(crate) at: PathBuf,
    top: PathBuf,
    serving: Option<Child>,
}

impl SlowStore {
    /// A new, empty one in a directory of the disk, of [`RATE`].
    pub(crate) fn new(disk: &Path) -> Result<SlowStore, String> {
        SlowStore::of(disk, Slowness { rate: RATE, latency_ms: 0 })
    }

    /// A new, empty one in a directory of the disk.
    pub(crate) fn of(disk: &Path, slowness: Slowness) -> Result<SlowStore, String> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let top = disk.join(format!("forebay-bench-slow-{}-{number}", std::process::id()));
        let (behind, at) = (top.join("behind"), top.join("slow"));
        for directory in [&top, &behind, &at] {
            std::fs::create_dir(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        }
        let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
        let mut command = Command::new(this);
        command.arg("slow").args([&behind, &at]);
        command.args([slowness.rate.to_string(), slowness.latency_ms.to_string()]);
        let serving = command.spawn().map_err(|e| format!("{command:?} cannot be run: {e}"))?;
        let mut store = SlowStore { behind, at, top, serving: Some(serving) };
        store.wait_mounted()?;
        Ok(store)
    }

    fn is_mounted(&self) -> bool {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let at = self.at.to_string_lossy().replace(' ', "\\040");
        mounts.lines().any(|line| line.split(' ').nth(1) == Some(&at))
    }

    fn wait_mounted(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        while !self.is_mounted() {
            let ended = self.serving.as_mut().and_then(|serving| serving.try_wait().ok()).flatten();
            if ended.is_some() || begun.elapsed() > PATIENCE {
                return Err("a slow directory cannot be mounted: that needs root and /dev/fuse".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for SlowStore {
    fn drop(&mut self) {
        let Some(mut serving) = self.serving.take() else { return };
        if self.is_mounted() {
            if let Err(message) = said(Command::new("umount").arg(&self.at)) {
                // What is behind a mount that stays is not removed through it.
                eprintln!("forebay-bench: {message}");
                return;
            }
        } else {
            serving.kill().ok();
        }
        serving.wait().ok();
        std::fs::remove_dir_all(&self.top).ok();
    }
}
