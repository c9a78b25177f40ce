//! Pools of several nodes, all on this machine: what data and names of another node cost beside what the network gives, how fast
//! pools start, what clients on different nodes get done together, and how evenly names would lie on many. Nodes are addresses
//! of the loopback network, or two network namespaces (`apart`), started by `forebay up --hosts` with a script in ssh's place;
//! clients of all nodes share this machine's processors, so rates do not grow with nodes here.

mod apart;
mod collective;
mod evenness;
mod far;
mod library;
mod raw;
mod starting;
mod trees;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::report::Table;
use crate::run::Sizes;
use crate::systems::said;

use apart::Apart;

pub(crate) use far::{drive as drive_far, make as drive_far_make};
pub(crate) use raw::{ask as drive_raw_ask, serve as drive_raw_serve};
pub(crate) use trees::drive;

/// Nodes at most.
const NODES_MAX: usize = 8;

/// All tables.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let mut tables = measure_far(binaries, sizes)?;
    tables.extend([
        starting::measure(binaries, sizes)?,
        trees::measure(binaries, sizes)?,
        evenness::placement(),
    ]);
    tables.extend(measure_ranks(binaries, sizes)?);
    Ok(tables)
}

/// Those of what one node asks of another.
pub(crate) fn measure_far(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    Ok(vec![far::measure(binaries, sizes)?, trees::measure_far(binaries, sizes)?])
}

/// Those of MPI ranks on several nodes.
pub(crate) fn measure_ranks(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    collective::measure(binaries, sizes)
}

/// Addresses of nodes, a directory for their pools, and what takes ssh's place. Whatever is up goes when it is dropped.
struct Hosts {
    binaries: PathBuf,
    directory: PathBuf,
    net: String,
    /// Where nodes have networks of their own.
    apart: Option<Apart>,
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
            apart: None,
        };
        hosts.write_shell("shift\nexec sh -c \"$*\"")?;
        Ok(hosts)
    }

    /// Two nodes in network namespaces that a pair of Ethernet devices joins; addresses of the loopback network, which the
    /// second result says, where this user may make none.
    fn apart(binaries: &Path) -> Result<(Hosts, &'static str), String> {
        let mut hosts = Hosts::new(binaries)?;
        match Apart::new(&hosts.directory) {
            Ok(apart) => {
                hosts.net = apart::NET.to_owned();
                hosts.write_shell(&apart.shell())?;
                hosts.apart = Some(apart);
                Ok((hosts, "two network namespaces"))
            }
            Err(why) => {
                eprintln!("forebay-bench: no network namespaces, so nodes are on 127.0.0.0/8: {why}");
                Ok((hosts, "the loopback network"))
            }
        }
    }

    fn write_shell(&self, lines: &str) -> Result<(), String> {
        let shell = self.shell();
        let wrong = |e: std::io::Error| format!("{}: {e}", shell.display());
        std::fs::write(&shell, format!("#!/bin/sh\n{lines}\n")).map_err(wrong)?;
        std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o700)).map_err(wrong)
    }

    /// A program in a node's network.
    fn on(&self, node: usize, program: &Path) -> Command {
        match &self.apart {
            Some(apart) => apart.command(node, program),
            None => Command::new(program),
        }
    }

    fn address(&self, node: usize) -> String {
        format!("{}{node}", self.net)
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
