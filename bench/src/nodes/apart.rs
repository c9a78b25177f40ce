//! Two network namespaces, joined by a pair of Ethernet devices. A sleeping process holds each namespace; dropping
//! [`Apart`] ends the processes, and with them namespaces and devices.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::systems::said;

/// The nodes' addresses without the last number, which is the node's.
pub(super) const NET: &str = "10.79.0.";
/// Linux's default, with which clusters run. Some machines have bbr, which paces each segment of 64 KiB (docs/network.md).
const CONGESTION_CONTROL: &str = "cubic";
/// Seconds after which leftovers of a killed benchmark end.
const SLEEP_S: &str = "1800";

pub(super) struct Apart {
    nodes: Vec<Child>,
}

impl Apart {
    /// Creates the namespaces; fails if this user may not create them.
    pub(super) fn new(directory: &Path) -> Result<Apart, String> {
        let mut apart = Apart { nodes: Vec::new() };
        for _ in 0..2 {
            apart.nodes.push(namespace()?);
        }
        let peer = apart.nodes[1].id();
        apart.ip(1, &format!("link add eth0 type veth peer name eth0 netns {peer}"))?;
        for node in [1, 2] {
            apart.ip(node, &format!("addr add {NET}{node}/24 dev eth0"))?;
            apart.ip(node, "link set eth0 up")?;
            apart.ip(node, "link set lo up")?;
            let set = format!("echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control");
            if said(apart.command(node, Path::new("sh")).args(["-c", &set])).is_err() && node == 1 {
                println!(
                    "TCP's {CONGESTION_CONTROL} is not allowed here: rates are those of the machine's own"
                );
            }
            // The script that replaces ssh finds the namespace by the host's name.
            let of = directory.join(format!("net.{NET}{node}"));
            std::os::unix::fs::symlink(apart.network(node), &of)
                .map_err(|e| format!("{}: {e}", of.display()))?;
        }
        Ok(apart)
    }

    fn network(&self, node: usize) -> String {
        format!("/proc/{}/ns/net", self.nodes[node - 1].id())
    }

    /// Lines of shell that run a command on a host.
    pub(super) fn shell(&self) -> String {
        "host=$1\nshift\nexec nsenter --net=\"$(dirname \"$0\")/net.$host\" sh -c \"$*\"".to_owned()
    }

    /// A command that runs a program in a node's network.
    pub(super) fn command(&self, node: usize, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network(node))).arg(program);
        command
    }

    fn ip(&self, node: usize, line: &str) -> Result<(), String> {
        said(self.command(node, Path::new("ip")).args(line.split(' '))).map(drop)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

/// Starts a process with a network of its own.
fn namespace() -> Result<Child, String> {
    let mut command = Command::new("unshare");
    command
        .args(["--net", "sleep", SLEEP_S])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| format!("unshare: {e}"))?;
    let network = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).map_err(|e| e.to_string());
    let (ours, end) = (network("self")?, Instant::now() + Duration::from_secs(5));
    loop {
        let theirs = network(&child.id().to_string());
        if theirs.as_ref().is_ok_and(|theirs| *theirs != ours) {
            return Ok(child);
        }
        if theirs.is_err() || Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            return Err("unshare --net gives no network of its own".to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
