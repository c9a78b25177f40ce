//! Nodes on this machine, their pools, and the programs on them.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apart::{Apart, NET};
use crate::systems::said;

/// Maximum number of nodes.
const NODES_MAX: usize = 8;

/// Addresses of nodes, a directory for their pools, and the script that replaces ssh. Dropping it stops the nodes that
/// are up.
pub(super) struct Hosts {
    pub(super) binaries: PathBuf,
    pub(super) directory: PathBuf,
    net: String,
    /// Set if the nodes have networks of their own.
    apart: Option<Apart>,
}

impl Hosts {
    pub(super) fn new(binaries: &Path) -> Result<Hosts, String> {
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

    /// Two nodes in network namespaces joined by a pair of Ethernet devices. If this user may not create them:
    /// addresses of the loopback network. The second result says which.
    pub(super) fn apart(binaries: &Path) -> Result<(Hosts, &'static str), String> {
        let mut hosts = Hosts::new(binaries)?;
        match Apart::new(&hosts.directory) {
            Ok(apart) => {
                hosts.net = NET.to_owned();
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

    /// A command that runs a program in a node's network.
    pub(super) fn on(&self, node: usize, program: &Path) -> Command {
        match &self.apart {
            Some(apart) => apart.command(node, program),
            None => Command::new(program),
        }
    }

    pub(super) fn address(&self, node: usize) -> String {
        format!("{}{node}", self.net)
    }

    fn shell(&self) -> PathBuf {
        self.directory.join("shell")
    }

    pub(super) fn forebay(&self) -> Command {
        let mut command = Command::new(self.binaries.join("forebay"));
        command.env_remove("FOREBAY_POOL").env("FOREBAY_RSH", self.shell());
        command
    }

    /// A command with the verb's arguments, the first `count` hosts and their directories.
    pub(super) fn of(&self, words: &[&str], count: usize, directory_option: &str) -> Command {
        let mut command = self.forebay();
        command.args(words).args(["--hosts", &format!("{}[1-{count}]", self.net)]);
        command.arg(directory_option).arg(self.directory.join("n%n"));
        command
    }

    pub(super) fn up(&self, count: usize, capacity_bytes: u64) -> Result<(), String> {
        let mut up = self.of(&["up"], count, "--path");
        said(up.args(["--media", "dram", "--capacity", &capacity_bytes.to_string()])).map(drop)
    }

    pub(super) fn down(&self, count: usize) -> Result<(), String> {
        said(&mut self.of(&["down"], count, "--pool")).map(drop)
    }

    pub(super) fn pool(&self, node: usize) -> PathBuf {
        self.directory.join(format!("n{}{node}", self.net))
    }

    /// A command that runs a program on a node, numbered from 1; the program sees the pool at /forebay.
    pub(super) fn run(&self, node: usize, program: &Path) -> Command {
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
