//! A storage node and compute nodes on this machine: network namespaces with host names of their own, joined by a bridge
//! in one more namespace, whose links are limited by a token bucket (tbf) in both directions. And a pool whose files are
//! all on the storage node. It needs root.
//!
//! A sleeping process holds each namespace. Dropping a [`Star`] ends these processes, and with them namespaces and
//! devices; dropping a [`StarPool`] stops the pool first.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::mpi::Mpi;
use crate::systems::said;

/// The storage node; compute nodes follow it.
pub(crate) const STORAGE: usize = 1;
/// Compute nodes.
pub(crate) const COMPUTE: usize = 4;
const NODES: usize = STORAGE + COMPUTE;
/// The nodes' addresses, without the last number. The number of the node is put there.
const NET: &str = "10.81.0.";
/// Rate of each node's link.
pub(crate) const LINK_MBIT: u32 = 1000;
/// What a link lets pass at once: little, for a link has no reserve, but more than the largest segment that it is given.
const BURST: &str = "72kb";
/// Network namespaces with limited links, and a directory for what runs on them.
pub(crate) struct Star {
    pub(crate) directory: PathBuf,
    bridge: Option<Child>,
    nodes: Vec<Child>,
}

/// Where the ranks of a program are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ranks {
    /// On the storage node.
    Here(usize),
    /// On the compute nodes, so many on each of the first ones.
    Compute { nodes: usize, each: usize },
}

impl Ranks {
    /// How many there are.
    pub(crate) fn count(self) -> usize {
        match self {
            Ranks::Here(count) => count,
            Ranks::Compute { nodes, each } => nodes * each,
        }
    }

    /// How many nodes they are on.
    pub(crate) fn nodes(self) -> usize {
        match self {
            Ranks::Here(_) => 1,
            Ranks::Compute { nodes, .. } => nodes,
        }
    }

    /// In tables.
    pub(crate) fn words(self) -> String {
        match self {
            Ranks::Here(count) => format!("{count} here"),
            Ranks::Compute { nodes, each } => format!("{nodes}x{each} far"),
        }
    }
}

impl Star {
    /// Fails if this user may not create namespaces, or the kernel has no tbf.
    pub(crate) fn new() -> Result<Star, String> {
        let directory = std::env::temp_dir().join(format!("fbs-{}", std::process::id()));
        std::fs::create_dir(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let mut star = Star { directory, bridge: None, nodes: Vec::new() };
        star.bridge = Some(namespace()?);
        star.at(None, "ip link add joint type bridge")?;
        star.at(None, "ip link set joint up")?;
        for node in 1..=NODES {
            star.nodes.push(namespace()?);
            let peer = star.nodes[node - 1].id();
            star.at(None, &format!("ip link add port{node} type veth peer name eth0 netns {peer}"))?;
            star.at(None, &format!("ip link set port{node} master joint"))?;
            star.at(None, &format!("ip link set port{node} up"))?;
            for line in [
                format!("hostname n{node}"),
                format!("ip addr add {NET}{node}/24 dev eth0"),
                "ip link set eth0 up".to_owned(),
                "ip link set lo up".to_owned(),
            ] {
                star.at(Some(node), &line)?;
            }
            let limit = |device: &str| {
                format!("tc qdisc add dev {device} root tbf rate {LINK_MBIT}mbit burst {BURST} latency 50ms")
            };
            star.at(None, &limit(&format!("port{node}")))?;
            star.at(Some(node), &limit("eth0"))?;
        }
        let shell = "while [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1\nshift\ncase $host in\n";
        let cases: String = (1..=NODES)
            .map(|node| {
                let pid = star.nodes[node - 1].id();
                format!("{NET}{node}) exec nsenter --target {pid} --net --uts sh -c \"$*\";;\n")
            })
            .collect();
        script(&star.shell(), &format!("{shell}{cases}esac\necho \"no host $host\" >&2\nexit 1"))?;
        Ok(star)
    }

    fn at(&self, node: Option<usize>, line: &str) -> Result<(), String> {
        let process = match node {
            Some(node) => Some(&self.nodes[node - 1]),
            None => self.bridge.as_ref(),
        };
        let id = process.map(Child::id).ok_or("there is no bridge")?;
        let mut command = Command::new("nsenter");
        said(command.args(["--target", &id.to_string(), "--net", "--uts"]).args(line.split(' '))).map(drop)
    }

    /// The script that replaces ssh.
    pub(crate) fn shell(&self) -> PathBuf {
        self.directory.join("shell")
    }

    /// A node's address, by which `forebay up --hosts` and launchers know it.
    pub(crate) fn address(node: usize) -> String {
        format!("{NET}{node}")
    }

    /// A command that runs a program on a node.
    pub(crate) fn command(&self, node: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.nodes[node - 1].id().to_string(), "--net", "--uts"]).arg(program);
        command
    }

    /// A launcher on the ranks' first node, to which the program and its arguments are added.
    pub(crate) fn launch(&self, mpi: &Mpi, ranks: Ranks) -> Command {
        let first = if let Ranks::Compute { .. } = ranks { STORAGE + 1 } else { STORAGE };
        let mut command = self.command(first, mpi.launcher[0]);
        let is_open_mpi = mpi.launcher[0].starts_with("mpirun");
        let shell = self.shell().display().to_string();
        if is_open_mpi {
            command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
            command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,vader,self"]);
            // The nodes are one machine, which may have fewer processors than there are ranks.
            command.args(["--mca", "mpi_yield_when_idle", "1"]);
        }
        match ranks {
            Ranks::Here(count) => command.args(["-n", &count.to_string()]),
            Ranks::Compute { nodes, each } => {
                let hosts: Vec<String> = (1..=nodes).map(|i| Star::address(STORAGE + i)).collect();
                if is_open_mpi {
                    let hosts: Vec<_> = hosts.iter().map(|host| format!("{host}:{each}")).collect();
                    command.args(["--host", &hosts.join(","), "--mca", "plm_rsh_agent", &shell]);
                    let only = ["--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"];
                    command.args(only);
                } else {
                    // UCX takes these nodes for one machine, with memory that they share.
                    command.args(["-hosts", &hosts.join(","), "-ppn", &each.to_string()]);
                    command.args(["-launcher", "ssh", "-launcher-exec", &shell]);
                    command.args(["-genv", "UCX_TLS", "tcp,self"]);
                }
                command.args(["-n", &ranks.count().to_string()])
            }
        };
        command.env_remove("FOREBAY_POOL");
        command
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        for child in self.nodes.iter_mut().chain(&mut self.bridge) {
            let _ = child.kill();
            let _ = child.wait();
        }
        std::fs::remove_dir_all(&self.directory).ok();
    }
}

/// Starts a process with a network and a host name of its own.
fn namespace() -> Result<Child, String> {
    let mut command = Command::new("unshare");
    // It ends with this process, also when that is killed.
    command.args(["--net", "--uts", "setpriv", "--pdeathsig", "KILL", "sleep", "infinity"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| format!("unshare: {e}"))?;
    let space = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/uts")).map_err(|e| e.to_string());
    let (ours, end) = (space("self")?, Instant::now() + Duration::from_secs(5));
    loop {
        let theirs = space(&child.id().to_string());
        if theirs.as_ref().is_ok_and(|theirs| *theirs != ours) {
            return Ok(child);
        }
        if theirs.is_err() || Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            return Err("unshare gives no network of its own: it needs root".to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes a shell script.
pub(crate) fn script(path: &Path, lines: &str) -> Result<(), String> {
    let wrong = |e: std::io::Error| format!("{}: {e}", path.display());
    std::fs::write(path, format!("#!/bin/sh\n{lines}\n")).map_err(wrong)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(wrong)
}

/// A pool of all nodes, whose data are on the storage node, on a medium that is as slow as a profile says.
pub(crate) struct StarPool<'a> {
    star: &'a Star,
    forebay: PathBuf,
    profile: String,
}

impl<'a> StarPool<'a> {
    /// Starts it, mounted on all nodes.
    pub(crate) fn up(
        star: &'a Star,
        binaries: &Path,
        profile: &str,
        capacity_bytes: u64,
    ) -> Result<StarPool<'a>, String> {
        let pool = StarPool { star, forebay: binaries.join("forebay"), profile: profile.to_owned() };
        let mut up = pool.forebay();
        up.args(["up", "--hosts", &Star::address(STORAGE), "--no-target"]);
        up.arg(format!("{NET}[{}-{NODES}]", STORAGE + 1)).arg("--path").arg(pool.of("%n"));
        up.arg("--mount").arg(pool.mount_of("%n")).args(["--media", "dram", "--media-profile", profile]);
        said(up.args(["--capacity", &capacity_bytes.to_string()]))?;
        let run = format!(
            "exec {} run --quiet --pool \"{}\" -- \"$@\"",
            pool.forebay.display(),
            pool.of(&format!("{NET}$(hostname | cut -c 2-)")).display(),
        );
        script(&pool.by_driver(), &run)?;
        let mount = pool.mount_of(&format!("{NET}$(hostname | cut -c 2-)"));
        let lines = format!("cd \"{}\" && exec \"$@\"", mount.display());
        script(&pool.by_mount(), &lines)?;
        Ok(pool)
    }

    fn forebay(&self) -> Command {
        let mut command = Command::new(&self.forebay);
        command.env_remove("FOREBAY_POOL").env("FOREBAY_RSH", self.star.shell());
        command
    }

    fn of(&self, host: &str) -> PathBuf {
        self.star.directory.join(format!("{}-{host}", self.profile))
    }

    /// The pool's directory on a node.
    pub(crate) fn on(&self, node: usize) -> PathBuf {
        self.of(&Star::address(node))
    }

    fn mount_of(&self, host: &str) -> PathBuf {
        self.star.directory.join(format!("mnt-{}-{host}", self.profile))
    }

    /// A script that runs a rank's program with the pool of its node: at /forebay, with the MPI-IO driver.
    pub(crate) fn by_driver(&self) -> PathBuf {
        self.star.directory.join(format!("driver-{}", self.profile))
    }

    /// A script that runs a rank's program in the mounted pool of its node, without a library of Forebay.
    pub(crate) fn by_mount(&self) -> PathBuf {
        self.star.directory.join(format!("mount-{}", self.profile))
    }
}

impl Drop for StarPool<'_> {
    fn drop(&mut self) {
        let down = || {
            let mut down = self.forebay();
            down.args(["down", "--discard", "--hosts", &format!("{NET}[{STORAGE}-{NODES}]"), "--pool"]);
            said(down.arg(self.of("%n")))
        };
        // A launcher's processes may keep a mount for a moment after it has ended.
        let again = |_| {
            std::thread::sleep(Duration::from_secs(2));
            down()
        };
        if let Err(message) = down().or_else(again) {
            eprintln!("forebay-bench: {message}");
            for node in (1..=NODES).filter(|node| self.on(*node).join("lock").exists()) {
                let _ = self.forebay().args(["down", "--force", "--pool"]).arg(self.on(node)).output();
            }
        }
    }
}
