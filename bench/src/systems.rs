//! The file systems to compare, and how a command runs on each.

use crate::orders::Orders;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where programs see the pool.
const PREFIX: &str = "/forebay";

/// The pool of one run; dropping it stops it.
pub(crate) struct Pool {
    binaries: PathBuf,
    directory: PathBuf,
}

impl Pool {
    /// Starts a pool of `capacity_bytes` in memory, in a new directory.
    pub(crate) fn up(binaries: &Path, capacity_bytes: u64) -> Result<Pool, String> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let directory =
            std::env::temp_dir().join(format!("forebay-bench-pool-{}-{number}", std::process::id()));
        let pool = Pool { binaries: binaries.to_owned(), directory };
        let mut up = pool.forebay();
        up.args(["up", "--media", "dram", "--capacity", &capacity_bytes.to_string(), "--path"])
            .arg(&pool.directory);
        said(&mut up)?;
        Ok(pool)
    }

    /// Starts another pool with the same binaries.
    pub(crate) fn another(&self, capacity_bytes: u64) -> Result<Pool, String> {
        Pool::up(&self.binaries, capacity_bytes)
    }

    /// The mount point of the pool's target, if it is mounted.
    pub(crate) fn target(&self) -> PathBuf {
        self.directory.join("target")
    }

    /// The pool's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn forebay(&self) -> Command {
        let mut command = Command::new(self.binaries.join("forebay"));
        command.env_remove("FOREBAY_POOL");
        command
    }

    /// `forebay --pool DIR`, to which a verb is added.
    pub(crate) fn command(&self) -> Command {
        let mut command = self.forebay();
        command.arg("--pool").arg(&self.directory);
        command
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // What a store lacks is of no use any more, unless a measurement compares it, and then it is there.
        let down = said(self.command().args(["down", "--discard"]));
        if let Err(message) = down {
            eprintln!("forebay-bench: {message}");
        }
        std::fs::remove_dir_all(&self.directory).ok();
    }
}

/// One of the file systems.
pub(crate) struct System<'a> {
    /// The name in tables.
    pub(crate) name: String,
    /// The directory that programs work in, as they see it.
    pub(crate) root: PathBuf,
    /// The pool, if the system is Forebay.
    pub(crate) pool: Option<&'a Pool>,
    /// True for the disk.
    pub(crate) is_disk: bool,
}

impl<'a> System<'a> {
    /// Forebay, tmpfs, and the disk that holds `disk`, each with a new directory.
    pub(crate) fn all(pool: &'a Pool, disk: &Path) -> Result<Vec<System<'a>>, String> {
        let name = format!("forebay-bench-{}", std::process::id());
        let systems = vec![
            System {
                name: "Forebay".into(),
                root: Path::new(PREFIX).join(&name),
                pool: Some(pool),
                is_disk: false,
            },
            System {
                name: "tmpfs".into(),
                root: Path::new("/dev/shm").join(&name),
                pool: None,
                is_disk: false,
            },
            System {
                name: crate::machine::file_system_of(disk),
                root: disk.join(&name),
                pool: None,
                is_disk: true,
            },
        ];
        for system in &systems {
            said(system.command("mkdir").arg("-p").arg(&system.root))?;
        }
        Ok(systems)
    }

    /// A new directory in the pool.
    pub(crate) fn in_pool(pool: &'a Pool, name: &str, directory: &str) -> Result<System<'a>, String> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let root = Path::new(PREFIX).join(format!("{directory}-{}-{number}", std::process::id()));
        let system = System { name: name.into(), root, pool: Some(pool), is_disk: false };
        said(system.command("mkdir").arg("-p").arg(&system.root))?;
        Ok(system)
    }

    /// A new directory outside the pool.
    pub(crate) fn at(name: &str, directory: &Path) -> Result<System<'static>, String> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let root = directory.join(format!("bench-{}-{number}", std::process::id()));
        std::fs::create_dir(&root).map_err(|e| format!("{}: {e}", root.display()))?;
        Ok(System { name: name.into(), root, pool: None, is_disk: false })
    }

    /// A command that sees this system.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        match self.pool {
            None => Command::new(program),
            Some(pool) => {
                let mut command = pool.command();
                command.args(["run", "--prefix", PREFIX, "--"]).arg(program);
                command
            }
        }
    }

    /// Runs a driver in a new directory; returns the rates that it printed.
    pub(crate) fn drive(&self, what: &str, orders: &Orders) -> Result<Vec<(String, f64)>, String> {
        self.drive_in(&self.root, what, orders)
    }

    /// As [`System::drive`], in a new directory elsewhere.
    pub(crate) fn drive_in(
        &self,
        root: &Path,
        what: &str,
        orders: &Orders,
    ) -> Result<Vec<(String, f64)>, String> {
        let root = root.join("drive");
        said(self.command("mkdir").arg(&root))?;
        let orders = Orders { root: root.to_string_lossy().into_owned(), ..orders.clone() };
        let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
        let text = said(self.command(this).args(orders.arguments(what)))?;
        said(self.command("rmdir").arg(&root))?;
        let rates: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text.trim()).map_err(|e| format!("the driver said {text:?}: {e}"))?;
        Ok(rates.into_iter().filter_map(|(name, rate)| Some((name, rate.as_f64()?))).collect())
    }
}

impl Drop for System<'_> {
    fn drop(&mut self) {
        // The pool's files are removed with the pool.
        if self.pool.is_none() {
            std::fs::remove_dir_all(&self.root).ok();
        }
    }
}

/// The indices of the systems, rotated by one in each repetition.
pub(crate) fn turns(systems: &[System<'_>], repetition: usize) -> impl Iterator<Item = usize> {
    let count = systems.len();
    (0..count).map(move |i| (i + repetition) % count)
}

/// Runs a command that must succeed; returns its standard output.
pub(crate) fn said(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("{command:?} cannot be run: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{command:?} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}
