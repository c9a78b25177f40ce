//! Pools over several hosts, started and stopped by one command or by a job's ranks. The hosts are addresses of the
//! loopback network, and a script replaces ssh.

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use common::{forebay, Place, Ran};

/// A directory, some hosts, and a script that replaces ssh.
struct Hosts {
    place: Place,
    /// The common prefix of their addresses.
    net: String,
}

impl Hosts {
    fn new() -> Hosts {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (own, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let net = format!("127.{}.{}.{}", 1 + own / 250 % 250, own % 250, next + 1);
        let place = Place::new();
        // Hosts 1 to 8 are up, 9 is down, and 8 has no Forebay.
        let script = format!(
            "#!/bin/sh\nhost=$1; shift\necho \"$host $*\" >> {}\ncase $host in\n\
             {net}8) exec sh -c \"${{1#/}}\";;\n\
             {net}[1-7]) exec sh -c \"$*\";;\nesac\n\
             echo \"ssh: connect to host $host port 22: No route to host\" >&2; exit 255\n",
            place.join("words").display()
        );
        let rsh = place.write("rsh", script);
        std::fs::set_permissions(rsh, std::fs::Permissions::from_mode(0o700)).unwrap();
        Hosts { place, net }
    }

    fn list(&self, numbers: &str) -> String {
        format!("{}[{numbers}]", self.net)
    }

    fn pool(&self, number: u32) -> PathBuf {
        self.place.join(format!("n{}{number}", self.net))
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.place.command(words);
        command.env("FOREBAY_RSH", self.place.join("rsh"));
        command
    }

    fn run(&self, words: &[&str]) -> Ran {
        Ran::of(self.command(words).output().unwrap())
    }

    /// `up --hosts` of these numbers.
    fn up(&self, numbers: &str, more: &[&str]) -> Ran {
        let (list, path) = (self.list(numbers), self.place.join("n%n"));
        let words = ["up", "--hosts", &list, "--path", path.to_str().unwrap(), "--capacity", "64MiB"];
        self.run(&[&words, more].concat())
    }

    /// Runs a shell script over the pool on one of the hosts.
    fn tell(&self, number: u32, script: &str) -> String {
        let pool = self.pool(number);
        let ran = self.run(&["run", "--quiet", "--pool", pool.to_str().unwrap(), "--", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.out
    }
}

#[test]
fn up_of_hosts_gives_one_pool_and_no_secret_to_be_seen() {
    let hosts = Hosts::new();
    let up = hosts.up("1-3", &[]);
    assert!(up.code == Some(0) && up.out.contains("3 nodes are up: 192 MiB"), "{up:?}");
    hosts.tell(1, "mkdir /forebay/d");
    assert_eq!(hosts.tell(3, "echo x > /forebay/d/f; ls /forebay/d"), "f\n");
    assert_eq!(hosts.tell(2, "stat -c %s /forebay/d/f"), "2\n");
    // Each node has the list and the secret, readable by its user alone; the command lines do not contain the secret.
    let secret = std::fs::read(hosts.pool(1).join("nodes.key")).unwrap();
    assert_eq!(secret, std::fs::read(hosts.pool(3).join("nodes.key")).unwrap());
    let mode = std::fs::metadata(hosts.pool(2).join("nodes.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let words = std::fs::read_to_string(hosts.place.join("words")).unwrap();
    let digits: String = secret.iter().map(|b| format!("{b:02x}")).collect();
    assert!(words.contains("--handed") && !words.contains(&digits[..16]), "{words}");
    // A second start makes another pool, which the running nodes do not belong to; they stay as they are.
    let again = hosts.up("1-3", &[]);
    again.assert_refused(1, &["cannot start 3 of 3 nodes", "no node that it started is left up"]);
    assert!(again.out.contains("already up"), "{again:?}");
    assert_eq!(hosts.tell(1, "cat /forebay/d/f 2>/dev/null; ls /forebay/d"), "f\n");
    // `down --all` with any node's directory stops all nodes and leaves nothing.
    let pool = hosts.pool(2);
    let down = hosts.run(&["down", "--all", "--pool", pool.to_str().unwrap()]);
    assert!(down.code == Some(0) && down.out.lines().count() == 3, "{down:?}");
    assert!((1..4).all(|n| !hosts.pool(n).exists()));
    hosts.place.assert_nothing_left();
}

#[test]
fn up_of_hosts_some_without_a_target_gives_one_pool_on_the_others() {
    let hosts = Hosts::new();
    let up = hosts.up("2", &["--no-target", &hosts.list("1,3")]);
    assert!(up.code == Some(0) && up.out.contains("3 nodes are up: 64 MiB"), "{up:?}");
    assert_eq!(up.out.matches("no target").count(), 2, "{up:?}");
    assert_eq!(
        hosts.tell(2, "echo x > /forebay/f; stat -c %i /forebay | cut -c1-3"),
        "281\n",
        "node 1 has the root"
    );
    assert_eq!(hosts.tell(1, "mkdir /forebay/d; mv /forebay/f /forebay/d; ls /forebay/d"), "f\n");
    // Without a mount on this node no file can be opened for a descriptor, and the failed create leaves no file.
    let pool = hosts.pool(3);
    let words = ["run", "--pool", pool.to_str().unwrap(), "--", "sh", "-c", "echo y > /forebay/d/y"];
    hosts.run(&words).assert_refused(2, &["forebay mount --pool", "not supported"]);
    assert_eq!(hosts.tell(2, "cat /forebay/d/*"), "x\n");
    let status = hosts.run(&["status", "--pool", pool.to_str().unwrap()]);
    assert!(status.out.contains("no target: files of its programs lie on other nodes"), "{status:?}");
    assert_eq!(status.out.lines().filter(|line| line.contains(" none ")).count(), 2, "{status:?}");
    // Staging needs no descriptor.
    let file = hosts.place.write("in", "staged");
    let staged =
        hosts.run(&["stage-in", "--pool", pool.to_str().unwrap(), &format!("{}:/d/in", file.display())]);
    assert_eq!(staged.code, Some(0), "{staged:?}");
    let out = hosts.place.join("out");
    let staged =
        hosts.run(&["stage-out", "--pool", pool.to_str().unwrap(), &format!("/d/in:{}", out.display())]);
    assert_eq!(staged.code, Some(0), "{staged:?}");
    assert_eq!(std::fs::read(&out).unwrap(), b"staged");
    assert_eq!(hosts.tell(2, "cat /forebay/d/in"), "staged");
    let down = hosts.run(&["down", "--all", "--pool", pool.to_str().unwrap()]);
    assert!(down.code == Some(0) && down.out.lines().count() == 3, "{down:?}");
    std::fs::remove_file(out).unwrap();
    hosts.place.assert_nothing_left();
}

#[test]
fn up_of_hosts_that_cannot_all_start_leaves_none_up_unless_a_part_will_do() {
    let hosts = Hosts::new();
    // One host is down, one has no Forebay, and on one the port is taken.
    let taken = std::net::TcpListener::bind((format!("{}2", hosts.net), 7850)).unwrap();
    let up = hosts.up("1,2,8,9", &[]);
    up.assert_refused(1, &["cannot start 3 of 4 nodes", "no node that it started is left up", "--partial"]);
    let line = |number: u32| {
        let start = format!("{}{number}: ", hosts.net);
        up.out.lines().find(|l| l.starts_with(&start)).unwrap_or_else(|| panic!("{up:?}")).to_owned()
    };
    assert!(line(2).contains("cannot listen") && line(2).contains(":7850"), "{up:?}");
    assert!(line(8).contains("install Forebay there"), "{up:?}");
    assert!(line(9).contains("cannot be reached") && line(9).contains("No route to host"), "{up:?}");
    assert!((1..3).all(|n| !hosts.pool(n).exists()));
    // Without the first node there is no root, so --partial does not help.
    hosts.up("9,1", &["--partial"]).assert_refused(1, &["has the root"]);
    assert!(!hosts.pool(1).exists());
    let file = hosts.place.join("kept.toml");
    let file = file.to_str().unwrap();
    let part = hosts.up("1,9,3", &["--partial", "--write", file]);
    assert!(part.code == Some(0) && part.out.contains("2 of 3 nodes are up"), "{part:?}");
    hosts.tell(3, "echo x > /forebay/f");
    // The written file describes the pool: `up --all` with it leaves the running nodes as they are.
    let again = hosts.run(&["up", "--all", "--partial", "--pool", file]);
    assert!(again.code == Some(0) && again.out.matches("it was already").count() == 2, "{again:?}");
    assert_eq!(hosts.tell(1, "ls /forebay"), "f\n");
    hosts.up("1,3", &["--write", file]).assert_refused(1, &["not there yet"]);
    let down = hosts.run(&["down", "--pool", file, "--all"]);
    down.assert_refused(1, &["failed on", "9"]);
    assert!((1..4).all(|n| !hosts.pool(n).exists()));
    drop(taken);
}

#[test]
fn down_of_hosts_stops_none_while_a_program_uses_the_pool_on_one() {
    let hosts = Hosts::new();
    hosts.up("1-3", &[]);
    hosts.tell(1, "echo all > /forebay/f");
    let (pool, list) = (hosts.pool(2), hosts.list("1-3"));
    let words = ["run", "--quiet", "--pool", pool.to_str().unwrap(), "--", "sh", "-c", "echo in; read line"];
    let mut user = hosts.command(&words);
    let mut user = user.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 3];
    user.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let path = hosts.place.join("n%n");
    let all = ["down", "--all", "--pool", pool.to_str().unwrap()];
    let named = ["down", "--hosts", &list, "--pool", path.to_str().unwrap()];
    for words in [&all[..], &named] {
        let down = hosts.run(words);
        down.assert_refused(1, &["all stay up", "refused on", &format!("{}2", hosts.net), "--force"]);
        assert!(!down.err.contains(&format!("{}1:", hosts.net)), "{down:?}");
    }
    assert_eq!(hosts.tell(1, "cat /forebay/f"), "all\n");
    assert_eq!(hosts.tell(3, "stat -c %s /forebay/f"), "4\n");
    drop(user.stdin.take());
    user.wait().unwrap();
    // A host that cannot be asked is no reason to leave the others up.
    let with_dead = hosts.list("1-3,9");
    let more = [&named[..2], &[&with_dead], &named[3..]].concat();
    hosts.run(&more).assert_refused(1, &["cannot stop all of 4 nodes", &format!("failed on {}9", hosts.net)]);
    assert!((1..4).all(|n| !hosts.pool(n).exists()));
    hosts.place.assert_nothing_left();
}

#[test]
fn up_of_hosts_takes_kept_data_again_and_down_names_hosts() {
    let hosts = Hosts::new();
    hosts.up("1-2", &["--media", "ssd", "--port", "7951"]);
    hosts.tell(2, "mkdir /forebay/two; echo kept > /forebay/two/f");
    let (list, path) = (hosts.list("1-2"), hosts.place.join("n%n"));
    let down = hosts.run(&["down", "--hosts", &list, "--pool", path.to_str().unwrap()]);
    assert!(down.code == Some(0) && down.out.contains("kept for the next"), "{down:?}");
    // In another order each node would get the other's number.
    let turned = hosts.up("2,1", &[]);
    turned.assert_refused(1, &["cannot start 2 of 2 nodes"]);
    assert!(turned.out.contains("its data is node 2's"), "{turned:?}");
    let up = hosts.up("1-2", &[]);
    assert_eq!(up.out.matches("with its data from before").count(), 2, "{up:?}");
    assert_eq!(hosts.tell(2, "cat /forebay/two/f"), "kept\n");
    hosts.tell(1, "ls /forebay/two");
    // No medium was given this time: each node reports its own.
    let status = hosts.run(&["status", "--pool", hosts.pool(1).to_str().unwrap()]);
    assert_eq!(status.out.matches(" ssd ").count(), 2, "{status:?}");
    assert_eq!(hosts.run(&["down", "--hosts", &list, "--pool", path.to_str().unwrap()]).code, Some(0));
}

#[test]
fn up_of_hosts_refuses_what_makes_no_sense() {
    let hosts = Hosts::new();
    for (list, word) in [("a,a", "listed twice"), ("n[1-", "not closed"), ("@/nowhere", "/nowhere")] {
        hosts.run(&["up", "--hosts", list]).assert_refused(1, &[word]);
    }
    hosts.run(&["up", "--port", "7"]).assert_refused(1, &["--hosts"]);
    hosts.run(&["up", "--job"]).assert_refused(1, &["no launcher", "--hosts"]);
    assert_eq!(hosts.run(&["up", "--hosts", "a", "--job"]).code, Some(2));
    assert_eq!(hosts.run(&["up", "--hosts", "a", "--port", "0"]).code, Some(2));
    let other = hosts.place.write("other", r#"{"version": "9.9.9"}"#);
    let mut command = hosts.command(&["up", "--handed", "--node", "a"]);
    let version = Ran::of(command.stdin(std::fs::File::open(other).unwrap()).output().unwrap());
    version.assert_refused(1, &["9.9.9", "same version"]);
    hosts.place.assert_nothing_left();
}

/// Runs `forebay up --job` in ranks, two on each host, and then `then` in each.
fn ranks(hosts: &Hosts, launcher: &[&str], rank: &str, job: &str, then: &str) -> Option<Ran> {
    let available = Command::new(launcher[0]).arg("--version").output().is_ok_and(|o| o.status.success());
    if !available {
        println!("skipped: no {}", launcher[0]);
        return None;
    }
    let script = format!(
        "export FOREBAY_NODE={0}$(({rank} / 2 + 1)); export FOREBAY_HOST=$FOREBAY_NODE; \
         {1} up {job} --path {2}/n%n --capacity 64MiB --shared {2} || exit 9; {then}",
        hosts.net,
        forebay().display(),
        hosts.place.path.display()
    );
    let ran = (0..5).map(|_| {
        let mut command = Command::new(launcher[0]);
        command.args(&launcher[1..]).args(["sh", "-c", &script]);
        hosts.place.dress(&mut command);
        Ran::of(command.output().unwrap())
    });
    // Hydra itself can end by SIGPIPE, silently, when its proxy exits before Hydra has sent it everything.
    let is_hydras_end = |ran: &Ran| ran.signal == Some(libc::SIGPIPE) && ran.err.is_empty();
    Some(ran.into_iter().find(|ran| !is_hydras_end(ran)).expect("Hydra always ends by SIGPIPE"))
}

#[test]
fn up_by_ranks_of_open_mpi_starts_each_node_once() {
    let hosts = Hosts::new();
    let launcher = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "6"];
    let then = format!(
        "{} run --quiet --pool {}/n$FOREBAY_NODE -- sh -c 'echo $OMPI_COMM_WORLD_RANK > /forebay/r$OMPI_COMM_WORLD_RANK'",
        forebay().display(),
        hosts.place.path.display()
    );
    let Some(ran) = ranks(&hosts, &launcher, "OMPI_COMM_WORLD_RANK", "--job", &then) else { return };
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.out.matches("it was already").count(), 3, "of two ranks a node one starts it: {ran:?}");
    assert_eq!(hosts.tell(2, "echo $(ls /forebay)"), "r0 r1 r2 r3 r4 r5\n");
    let pool = hosts.pool(1);
    assert_eq!(hosts.run(&["down", "--all", "--pool", pool.to_str().unwrap()]).code, Some(0));
    hosts.place.assert_nothing_left();
}

#[test]
fn up_by_ranks_of_hydra_wants_a_name_for_the_job() {
    let hosts = Hosts::new();
    let launcher = ["mpiexec.hydra", "-n", "4"];
    let Some(nameless) = ranks(&hosts, &launcher, "PMI_RANK", "--job", "") else { return };
    nameless.assert_refused(9, &["--job=NAME"]);
    let ran = ranks(&hosts, &launcher, "PMI_RANK", "--job=mine", "").unwrap();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    hosts.tell(1, "echo x > /forebay/f");
    assert_eq!(hosts.tell(2, "ls /forebay"), "f\n");
}

/// Ranks as `srun` starts them, one on each host.
#[test]
fn up_by_ranks_of_slurm_finds_its_nodes_and_names_ranks_that_do_not_come() {
    let hosts = Hosts::new();
    let rank = |rank: u32, count: u32, capacity: &str, more: &[&str]| {
        let path = hosts.place.join("n%n");
        let words = ["up", "--job", "--path", path.to_str().unwrap(), "--capacity", capacity];
        let mut command = hosts.place.command([&words, more].concat());
        command.env("SLURM_JOB_ID", "71").env("SLURM_STEP_ID", "0").env("FOREBAY_SHARED", &hosts.place.path);
        command.env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", count.to_string());
        command.env("FOREBAY_NODE", format!("{}{}", hosts.net, rank + 1));
        command
    };
    let alone = Ran::of(rank(0, 3, "64MiB", &["--wait", "1"]).output().unwrap());
    alone.assert_refused(1, &["of 3 ranks 1, 2 have not come", "--shared"]);
    // The notes that it left do not disturb the next job.
    let mut running: Vec<_> = (0..3).map(|i| common::start(rank(i, 3, "64MiB", &[]))).collect();
    for child in &mut running {
        assert!(child.wait().success());
    }
    hosts.tell(3, "echo x > /forebay/f");
    assert_eq!(hosts.tell(1, "ls /forebay"), "f\n");
    let pool = hosts.pool(3);
    assert_eq!(hosts.run(&["down", "--all", "--pool", pool.to_str().unwrap()]).code, Some(0));
    hosts.place.assert_nothing_left();
    // The first rank's host has no target, so another host has the root.
    let mut running: Vec<_> =
        (0..2).map(|i| common::start(rank(i, 2, if i == 0 { "0" } else { "64MiB" }, &[]))).collect();
    for child in &mut running {
        assert!(child.wait().success());
    }
    assert_eq!(hosts.tell(1, "mkdir /forebay/d; df -B1M --output=size /forebay | tail -1").trim(), "64");
    let status = hosts.run(&["status", "--json", "--pool", hosts.pool(2).to_str().unwrap()]);
    assert!(status.out.contains("\"node\": 1,") && hosts.tell(2, "ls /forebay") == "d\n", "{status:?}");
    let pool = hosts.pool(1);
    assert_eq!(hosts.run(&["down", "--all", "--pool", pool.to_str().unwrap()]).code, Some(0));
    hosts.place.assert_nothing_left();
}
