//! A daemon of a pool of two nodes; the test is the other node.

#![allow(unreachable_pub)] // each test program includes this module
#![allow(dead_code)] // each test program uses only some of it

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forebay_client::{PathBuffer, Place, Pool};
use forebay_fabric::libfabric::{self, LibfabricEndpoint, Settings};
use forebay_fabric::{secret_file, Calls, CallsSettings, Identity};
use forebay_types::NodeId;
use forebay_wire::Secret;

/// Node 1 of a pool of two, stopped and removed on drop; the test is node 2.
pub struct Daemon {
    pub dir: PathBuf,
    pub supervisor: Child,
    pub hosts: [String; 2],
    pub port: u16,
}

impl Daemon {
    /// Starts a daemon with data on a disk.
    pub fn start(name: &str, net: u8) -> Daemon {
        Daemon::start_in(&std::env::temp_dir(), name, net)
    }

    /// Starts a daemon in a directory within `parent`.
    pub fn start_in(parent: &Path, name: &str, net: u8) -> Daemon {
        let dir = parent.join(format!("forebay-peers-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let own = std::process::id();
        let hosts =
            [1, 2].map(|node| format!("127.{}.{}.{}", 1 + own / 250 % 250, own % 250, net * 2 + node));
        let port = 7851;
        let nodes: String = hosts
            .iter()
            .enumerate()
            .map(|(i, host)| {
                format!(
                    "[[node]]\nname = \"n{i}\"\nhost = \"{host}\"\nport = {port}\n\
                     target = [{{ media = \"ssd\", path = \"{}/n{i}\", capacity = \"256MiB\" }}]\n",
                    dir.display()
                )
            })
            .collect();
        std::fs::write(dir.join("pool.toml"), nodes).unwrap();
        secret_file::make(&dir.join("pool.key")).unwrap();
        let supervisor = spawn(&dir);
        let daemon = Daemon { dir, supervisor, hosts, port };
        daemon.wait_until_up();
        daemon
    }

    fn wait_until_up(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        while self.status().is_none_or(|s| s.pids.worker.is_none()) {
            assert!(Instant::now() < until, "the daemon does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops it by SIGTERM; returns its exit status.
    pub fn stop(&mut self) -> ExitStatus {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(self.supervisor.id() as i32, libc::SIGTERM) };
        self.supervisor.wait().unwrap()
    }

    /// Starts it again after a stop.
    pub fn start_again(&mut self) {
        self.supervisor = spawn(&self.dir);
        self.wait_until_up();
    }

    /// The path of the file that requests a fault.
    pub fn fault(&self) -> PathBuf {
        self.dir.join("fault")
    }

    /// The daemon's log and messages.
    pub fn messages(&self) -> String {
        let log = std::fs::read_to_string(self.pool().join("log")).unwrap_or_default();
        log + &std::fs::read_to_string(self.dir.join("messages")).unwrap_or_default()
    }

    pub fn pool(&self) -> PathBuf {
        self.dir.join("n0")
    }

    pub fn status(&self) -> Option<forebay_server::control::Status> {
        forebay_server::control::status(&self.pool()).ok()
    }

    /// Makes node 2 with this secret.
    pub fn peer(&self, secret: &Secret) -> Calls {
        let settings = CallsSettings { unreachable: Duration::from_secs(3), ..CallsSettings::default() };
        self.peer_with(secret, settings)
    }

    /// Makes node 2 with this secret and these settings.
    pub fn peer_with(&self, secret: &Secret, settings: CallsSettings) -> Calls {
        let endpoint = LibfabricEndpoint::open(Settings {
            provider: Some("tcp;ofi_rxm".to_owned()),
            host: Some(self.hosts[1].clone()),
            port: Some(self.port),
            ..Settings::default()
        });
        let identity = Identity { pool: secret.pool(), node: NodeId(2), capacity_bytes: 0 };
        let mut calls = Calls::new(Box::new(endpoint.unwrap()), identity, secret.clone(), settings);
        let ip: std::net::Ipv4Addr = self.hosts[0].parse().unwrap();
        let mut address = (libc::AF_INET as u16).to_ne_bytes().to_vec();
        address.extend(self.port.to_be_bytes());
        address.extend(ip.octets());
        address.extend([0; 8]);
        calls.add_node(NodeId(1), &address).unwrap();
        calls
    }

    pub fn secret(&self) -> Secret {
        secret_file::read(&self.dir.join("pool.key")).unwrap()
    }

    /// Checks that this worker still runs and serves its own clients, and that its shard is clean.
    pub fn assert_unharmed(&self, worker: Option<u32>) {
        let pool = Pool::attach(&self.pool()).unwrap();
        let place = Place { dir: pool.root().unwrap(), path: b"a client of its own" };
        pool.make_directory(place, 0o755, &mut PathBuffer::new()).unwrap();
        assert_eq!(self.status().unwrap().pids.worker, worker, "the worker must not have died");
        let report = forebay_server::control::check(&self.pool()).unwrap();
        assert_eq!(report["clean"], true, "{report}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(None) = self.supervisor.try_wait() {
            self.stop();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.messages());
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn spawn(dir: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_forebayd"))
        .args(["--foreground", "--node", "n0", "--pool-file"])
        .arg(dir.join("pool.toml"))
        .env("RUST_BACKTRACE", "0")
        .env("FOREBAY_FAULT", dir.join("fault"))
        .stdout(Stdio::null())
        .stderr(std::fs::File::options().append(true).create(true).open(dir.join("messages")).unwrap())
        .spawn()
        .unwrap()
}

/// True, with the reason printed, if libfabric is unusable.
pub fn skipped() -> bool {
    libfabric::unusable().inspect(|why| println!("skipped: {why}")).is_some()
}
