//! PostgreSQL with its data directory on the mount, killed under load: what it acknowledged is there, and its tables
//! are consistent.

mod common;

use common::{wait_for, Place};
use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// Where Debian and others install programs that are not for every user's PATH.
const PROGRAM_DIRECTORIES: &str =
    "/usr/lib/postgresql /usr/pgsql /usr/lib64/pgsql /usr/local/pgsql /usr/local /usr";

/// The newest server's directory of programs, if one is installed.
fn programs() -> Option<PathBuf> {
    let line = format!(
        "ls -d $(for p in {PROGRAM_DIRECTORIES}; do echo $p/bin $p/*/bin; done) 2>/dev/null | sort -rV"
    );
    let said = Command::new("sh").args(["-c", &line]).output().ok()?.stdout;
    let all = |dir: &&str| {
        ["initdb", "postgres", "pgbench", "psql"].iter().all(|p| Path::new(dir).join(p).is_file())
    };
    String::from_utf8_lossy(&said).lines().find(all).map(PathBuf::from)
}

/// The number of a user that is not root, because the server refuses root: `postgres`, or `nobody`.
fn user() -> u32 {
    let said = Command::new("id").args(["-u", "postgres"]).output().unwrap().stdout;
    String::from_utf8_lossy(&said).trim().parse().unwrap_or(65_534)
}

/// A server whose data is on a mount.
struct Server<'a> {
    programs: &'a Path,
    data: PathBuf,
    /// The directory of its socket and its log, outside the mount.
    run: PathBuf,
    postmaster: Option<Child>,
}

impl Server<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.uid(user()).current_dir("/").env("PGHOST", &self.run).env("PGUSER", "owner");
        command.env("LC_ALL", "C").env("HOME", &self.run).stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn done(&self, program: &str, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.command(program).args(arguments).output().unwrap();
        let log = fs::read_to_string(self.run.join("log")).unwrap_or_default();
        let words = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{program} {arguments:?}: {words}\n--- the server said\n{log}");
        String::from_utf8_lossy(&stdout).trim().to_owned()
    }

    fn ask(&self, query: &str) -> String {
        self.done("psql", &["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", query, "postgres"])
    }

    /// Starts the server, and waits until its recovery is complete.
    fn start(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.run.join("log")).unwrap();
        let mut command = self.command("postgres");
        command.arg("-D").arg(&self.data).arg("-k").arg(&self.run).args(["-h", ""]);
        // Shared memory is in files of the mount: this uses more of the mount, and leaves nothing in /dev/shm.
        for setting in [
            "dynamic_shared_memory_type=mmap",
            "shared_buffers=16MB",
            "wal_level=minimal",
            "max_wal_senders=0",
        ] {
            command.args(["-c", setting]);
        }
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.postmaster = Some(command.process_group(0).spawn().unwrap());
        wait_for("the server answers", || {
            let mut asked = self.command("psql");
            std::thread::sleep(Duration::from_millis(100));
            asked.args(["-XAtqc", "select 1", "postgres"]).output().unwrap().status.success()
        });
    }

    /// Ends the server by a signal to its first process, and waits for the others.
    fn end(&mut self, signal: i32) {
        let Some(mut postmaster) = self.postmaster.take() else { return };
        let group = postmaster.id() as i32;
        // SAFETY: a process of this test that is not reaped yet.
        unsafe { libc::kill(group, signal) };
        postmaster.wait().unwrap();
        // SAFETY: signal 0 does nothing to a group that has no member but what this test started.
        wait_for("its processes end", || unsafe { libc::kill(-group, 0) } != 0);
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        self.end(libc::SIGQUIT);
    }
}

fn survives(mount: &[&str]) {
    let Some(programs) = programs() else {
        eprintln!("skipped: PostgreSQL is not installed");
        return;
    };
    let Some(place) = Place::mounted_as(&["--capacity", "1GiB"], mount) else { return };
    let (data, run) = (place.file("data"), place.dir.join("run"));
    for dir in [&data, &run] {
        fs::create_dir(dir).unwrap();
        chown(dir, Some(user()), None).unwrap();
    }
    let mut server = Server { programs: &programs, data, run, postmaster: None };
    let at = server.data.to_str().unwrap().to_owned();
    server.done("initdb", &["-D", &at, "-U", "owner", "-A", "trust", "--data-checksums"]);
    server.start();
    server.done("pgbench", &["-iq", "-s", "2", "postgres"]);
    let mut acknowledged = 0;
    for _ in 0..2 {
        // Each client records acknowledgements: one line for each transaction, in a file of its own.
        let logs = server.run.join(format!("acknowledged-{acknowledged}"));
        let mut bench = server.command("pgbench");
        bench.args(["-n", "-c", "4", "-j", "2", "-T", "60", "-l", "--log-prefix"]).arg(&logs).arg("postgres");
        let mut bench = bench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun: u64 = server.ask("select count(*) from pgbench_history").parse().unwrap();
        wait_for("transactions are made", || {
            server.ask("select count(*) from pgbench_history").parse::<u64>().unwrap() > begun + 300
        });
        // The death of the pool's own process meanwhile must go unnoticed.
        place.kill("worker");
        wait_for("transactions are made", || {
            server.ask("select count(*) from pgbench_history").parse::<u64>().unwrap() > begun + 400
        });
        server.end(libc::SIGKILL);
        bench.wait().unwrap();
        for entry in fs::read_dir(&server.run).unwrap().flatten() {
            if entry.path().to_str().unwrap().starts_with(logs.to_str().unwrap()) {
                acknowledged += fs::read_to_string(entry.path()).unwrap().lines().count() as u64;
            }
        }
        server.start();
        let sums = server.ask(
            "select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers), \
             (select sum(bbalance) from pgbench_branches), (select sum(delta) from pgbench_history)",
        );
        let sums: Vec<&str> = sums.split('|').collect();
        assert!(sums.len() == 4 && sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
        let made: u64 = server.ask("select count(*) from pgbench_history").parse().unwrap();
        assert!(made >= acknowledged, "{made} of {acknowledged} acknowledged transactions are there");
    }
    assert!(acknowledged > 300, "{acknowledged}: this tests nothing");
    if programs.join("pg_amcheck").is_file() {
        server.done("pg_amcheck", &["--install-missing", "--heapallindexed", "--database", "postgres"]);
    }
    for change in
        ["vacuum full pgbench_accounts", "reindex table pgbench_accounts", "drop table pgbench_history"]
    {
        server.ask(change);
    }
    server.end(libc::SIGINT);
    if programs.join("pg_checksums").is_file() {
        server.done("pg_checksums", &["--check", "-D", &at]);
    }
    place.is_clean();
}

#[test]
fn server_killed_under_load_has_what_it_acknowledged_by_passthrough() {
    survives(&["--allow-other"]);
}

#[test]
fn server_killed_under_load_has_what_it_acknowledged_by_requests() {
    survives(&["--allow-other", "--no-passthrough"]);
}
