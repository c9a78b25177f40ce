//! The network of a test's cluster. Each node has a network namespace, and a bridge in one more namespace joins them,
//! so that a link can be cut unnoticed by the kernels at its ends. If this user may not create namespaces, nodes are
//! addresses of the loopback network.
//!
//! A sleeping process keeps each namespace alive. `Bed` kills these processes when it is dropped, and all in the
//! namespaces ends with them.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

enum Kind {
    /// The namespaces of the bridge and of each node.
    Namespaces {
        bridge: Child,
        nodes: Vec<Child>,
    },
    Loopback,
}

/// The network of a cluster.
pub(crate) struct Bed {
    kind: Kind,
}

/// Starts a process in a network namespace of its own. It ends with this process, when its input does.
fn namespace() -> Result<Child, String> {
    let child = Command::new("unshare")
        .args(["--net", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| e.to_string())?;
    let ours = std::fs::read_link("/proc/self/ns/net").map_err(|e| e.to_string())?;
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let theirs = std::fs::read_link(format!("/proc/{}/ns/net", child.id()));
        if theirs.as_ref().is_ok_and(|theirs| *theirs != ours) {
            return Ok(child);
        }
        if theirs.is_err() || Instant::now() > end {
            end_of(child);
            return Err("unshare --net gives no network of its own".to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn end_of(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn inside(process: &Child) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--net", "--target", &process.id().to_string()]);
    command
}

fn ip(process: &Child, line: &str) -> Result<(), String> {
    let output = inside(process).arg("ip").args(line.split(' ')).output().map_err(|e| e.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {line}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

fn joined(count: usize) -> Result<Kind, String> {
    let bridge = namespace()?;
    let mut nodes = Vec::new();
    let made = (1..=count).try_for_each(|i| {
        nodes.push(namespace()?);
        let node = &nodes[i - 1];
        if i == 1 {
            ip(&bridge, "link add joint type bridge")?;
            ip(&bridge, "link set joint up")?;
        }
        ip(&bridge, &format!("link add port{i} type veth peer name eth0 netns {}", node.id()))?;
        ip(&bridge, &format!("link set port{i} master joint"))?;
        ip(&bridge, &format!("link set port{i} up"))?;
        ip(node, &format!("addr add 10.78.0.{i}/24 dev eth0"))?;
        ip(node, "link set eth0 up")?;
        ip(node, "link set lo up")
    });
    if let Err(why) = made {
        nodes.into_iter().for_each(end_of);
        end_of(bridge);
        return Err(why);
    }
    Ok(Kind::Namespaces { bridge, nodes })
}

impl Bed {
    /// A network of `count` nodes, numbered from 1.
    pub(crate) fn new(count: usize) -> Bed {
        let kind = joined(count).unwrap_or_else(|why| {
            println!("no network namespaces here, so nodes are on 127.0.0.0/8: {why}");
            Kind::Loopback
        });
        Bed { kind }
    }

    /// The address of a node.
    pub(crate) fn address(&self, node: usize) -> String {
        match self.kind {
            Kind::Namespaces { .. } => format!("10.78.0.{node}"),
            // The process number separates tests that run at the same time.
            Kind::Loopback => {
                format!("127.{}.{}.{node}", std::process::id() / 251 % 251, std::process::id() % 251)
            }
        }
    }

    /// A command on a node.
    pub(crate) fn command(&self, node: usize, program: &std::path::Path) -> Command {
        match &self.kind {
            Kind::Namespaces { nodes, .. } => {
                let mut command = inside(&nodes[node - 1]);
                command.arg(program);
                command
            }
            Kind::Loopback => Command::new(program),
        }
    }

    /// Whether nodes have networks of their own.
    pub(crate) fn is_apart(&self) -> bool {
        matches!(self.kind, Kind::Namespaces { .. })
    }

    /// Limits a node's link in both directions, in megabits a second. False where that is not possible.
    pub(crate) fn limit(&self, node: usize, megabits: u32) -> bool {
        let Kind::Namespaces { bridge, nodes } = &self.kind else { return false };
        let rate = format!("{megabits}mbit");
        let ends = [(bridge, format!("port{node}")), (&nodes[node - 1], "eth0".to_owned())];
        ends.iter().all(|(end, device)| {
            let words = [
                "qdisc", "add", "dev", device, "root", "tbf", "rate", &rate, "burst", "64kb", "latency",
                "400ms",
            ];
            let output = inside(end).arg("tc").args(words).output();
            let limited = output.as_ref().is_ok_and(|output| output.status.success());
            if !limited {
                println!("tc cannot limit a link here: {output:?}");
            }
            limited
        })
    }

    /// A command on a node whose monotonic clock is `ahead_s` seconds ahead. None where that is not possible.
    pub(crate) fn command_with_clock(
        &self,
        node: usize,
        ahead_s: u64,
        program: &std::path::Path,
    ) -> Option<Command> {
        let arguments =
            ["--time".to_owned(), format!("--monotonic={ahead_s}"), format!("--boottime={ahead_s}")];
        let can = Command::new("unshare").args(&arguments).arg("true").output();
        if !can.is_ok_and(|output| output.status.success()) {
            return None;
        }
        let mut command = self.command(node, std::path::Path::new("unshare"));
        command.args(&arguments).arg(program);
        Some(command)
    }

    /// Cuts a node's link, or restores it. False where that is not possible.
    pub(crate) fn set_link(&self, node: usize, up: bool) -> bool {
        let Kind::Namespaces { bridge, .. } = &self.kind else { return false };
        ip(bridge, &format!("link set port{node} {}", if up { "up" } else { "down" }))
            .expect("the port is there");
        true
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Kind::Namespaces { bridge, nodes } = std::mem::replace(&mut self.kind, Kind::Loopback) {
            nodes.into_iter().for_each(end_of);
            end_of(bridge);
        }
    }
}
