//! Pools of several nodes, all on this machine: how fast they start, what clients on different nodes get done together, and how
//! evenly names would lie on many. Nodes are addresses of the loopback network, started by `forebay up --hosts` with a script in
//! ssh's place; clients of all nodes share this machine's processors, so rates do not grow with nodes here.

mod evenness;
mod starting;
mod trees;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::report::Table;
use crate::run::Sizes;
use crate::systems::said;

pub(crate) use trees::drive;

/// Nodes at most.
const NODES_MAX: usize = 8;

/// All tables.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    Ok(vec![starting::measure(binaries, sizes)?, trees::measure(binaries, sizes)?, evenness::placement()])
}

/// Addresses of nodes, a directory for their pools, and what takes ssh's place. Whatever is up goes when it is dropped.
struct Hosts {
    binaries: PathBuf,
    directory: PathBuf,
    net: String,
}

impl Hosts {
    fn new(binaries: &Path) -> Result<Hosts, String> {
        let own = std::process::id();
        let directory = std::env::temp_dir().join(format!("fbb-{own}"));
        let wrong = |e: std::io::Error| format!("{}: {e}", directory.display());
        std::fs::create_dir(&directory).map_err(wrong)?;
        let hosts = Hosts {
            binaries: binaries.to_owned(),
            directory: directory.clone(),
            net: format!("127.{}.{}.", 1 + own / 250 % 250, own % 250),
        };
        std::fs::write(hosts.shell(), "#!/bin/sh\nshift\nexec sh -c \"$*\"\n").map_err(wrong)?;
        std::fs::set_permissions(hosts.shell(), std::fs::Permissions::from_mode(0o700)).map_err(wrong)?;
        Ok(hosts)
    }

    fn shell(&self) -> PathBuf {
        self.directory.join("shell")
    }

    fn forebay(&self) -> Command {
        let mut command = Command::new(self.binaries.join("forebay"));
        command.env_remove("FOREBAY_POOL").env("FOREBAY_RSH", self.shell());
        command
    }

    /// With the verb's words, the first so many hosts and their directories.
    fn of(&self, words: &[&str], count: usize, directory_option: &str) -> Command {
        let mut command = self.forebay();
        command.args(words).args(["--hosts", &format!("{}[1-{count}]", self.net)]);
        command.arg(directory_option).arg(self.directory.join("n%n"));
        command
    }

    fn up(&self, count: usize, capacity_bytes: u64) -> Result<(), String> {
        let mut up = self.of(&["up"], count, "--path");
        said(up.args(["--media", "dram", "--capacity", &capacity_bytes.to_string()])).map(drop)
    }

    fn down(&self, count: usize) -> Result<(), String> {
        said(&mut self.of(&["down"], count, "--pool")).map(drop)
    }

    fn pool(&self, node: usize) -> PathBuf {
        self.directory.join(format!("n{}{node}", self.net))
    }

    /// A program on a node, numbered from 1, that sees the pool at /forebay.
    fn run(&self, node: usize, program: &Path) -> Command {
        let mut command = self.forebay();
        command.args(["run", "--quiet", "--pool"]).arg(self.pool(node)).arg("--").arg(program);
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for node in (1..=NODES_MAX).filter(|node| self.pool(*node).join("lock").exists()) {
            if let Err(message) =
                said(self.forebay().args(["down", "--force", "--pool"]).arg(self.pool(node)))
            {
                eprintln!("forebay-bench: {message}");
            }
        }
        std::fs::remove_dir_all(&self.directory).ok();
    }
}
