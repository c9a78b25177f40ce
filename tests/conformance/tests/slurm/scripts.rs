//! `forebay job` in scripts that end in each way, on one node, and on the nodes of each scheduler.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use super::bed::Bed;

/// Longer than a pool takes to stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn program() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    me.parent().and_then(Path::parent).unwrap().join("forebay")
}

#[test]
fn job_ends_with_its_script_however_that_ends() {
    let dir = std::env::temp_dir().join(format!("fbj-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("input"), "hi\n").unwrap();
    let run = |name: &str, begin: &str, end: &str| {
        let out = dir.join(name);
        let script = format!(
            "eval \"$({0} job begin --capacity 64MiB {begin} --stage-out /out:{1})\"\n\
             {0} run --quiet -- cp /forebay/in /forebay/out\n{end}",
            program().display(),
            out.display()
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).env("FOREBAY_TMPDIR", &dir).env_remove("FOREBAY_POOL");
        command.env("LSB_JOBID", name);
        for other in ["SLURM_JOB_ID", "PBS_JOBID"] {
            command.env_remove(other);
        }
        let output = command.output().unwrap();
        // What SIGKILL leaves, the watcher ends.
        let until = Instant::now() + PATIENCE;
        let left = || {
            let users = std::fs::read_dir(&dir).unwrap().flatten().filter(|e| e.path().is_dir());
            users.flat_map(|user| std::fs::read_dir(user.path()).unwrap().flatten()).count()
        };
        while left() > 0 {
            assert!(Instant::now() < until, "{name} has left {} pools: {output:?}", left());
            std::thread::sleep(Duration::from_millis(50));
        }
        (output.status, std::fs::read_to_string(&out).unwrap_or_default())
    };
    let input = format!("--stage-in {}:/in", dir.join("input").display());
    let (status, out) = run("status", &input, "exit 3");
    assert_eq!((status.code(), out.as_str()), (Some(3), "hi\n"));
    let (status, out) = run("term", &input, "kill -TERM $$; sleep 60");
    assert_eq!((status.code(), out.as_str()), (Some(143), "hi\n"));
    let (status, out) = run("kill", &input, "kill -KILL $$");
    assert_eq!((status.signal(), out.as_str()), (Some(9), "hi\n"));
    let (status, out) = run("missing", "--stage-in /nowhere/at/all:/in", "true");
    assert_eq!((status.code(), out.as_str()), (Some(125), ""), "the script does not go on without its data");
    // A directory beside those in which it is looked for what is left.
    let store = std::env::temp_dir().join(format!("fbjs-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&store);
    std::fs::create_dir(&store).unwrap();
    std::fs::write(store.join("in"), "behind\n").unwrap();
    let backing = format!("--backing {} --policy request", store.display());
    let looks = format!(
        "{0} state / | grep -q 'drained: request' && ! [ -e {1}/out ]",
        program().display(),
        store.display()
    );
    let (status, out) = run("backed", &backing, &looks);
    assert_eq!((status.code(), out.as_str()), (Some(0), "behind\n"));
    assert_eq!(std::fs::read_to_string(store.join("out")).unwrap(), "behind\n");
    std::fs::remove_dir_all(&store).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Two nodes with networks, host names and temporary directories of their own, and a script in the place of ssh.
struct Nodes {
    dir: PathBuf,
    bed: Bed,
}

const COUNT: usize = 2;

impl Nodes {
    fn up() -> Nodes {
        let dir = std::env::temp_dir().join(format!("fbjn-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        for name in ["", "here", "node1", "node2", "bin"] {
            std::fs::create_dir(dir.join(name)).unwrap();
        }
        let nodes = Nodes { bed: Bed::new(COUNT), dir };
        let mut rsh = "#!/bin/sh\nhost=$1; shift\ncase $host in\n".to_owned();
        for node in 1..=COUNT {
            let line: Vec<String> = nodes.words(node).iter().map(|word| format!("'{word}'")).collect();
            rsh += &format!("{}) exec {} \"$*\";;\n", nodes.bed.address(node), line.join(" "));
        }
        nodes.program("rsh", &(rsh + "esac\necho no such host: $host >&2; exit 255\n"));
        // The command of Flux that says which nodes the job has.
        nodes
            .program("bin/flux", "#!/bin/sh\n[ \"$1 $2\" = 'resource list' ] && echo \"$FLUX_TEST_HOSTS\"\n");
        nodes
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.dir.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The words that run one more, a shell's command line, on a node.
    fn words(&self, node: usize) -> Vec<String> {
        let mut command = self.bed.command(node, Path::new("unshare"));
        let dir = self.dir.display();
        let script =
            format!("mount --bind {dir}/node{node} {dir}/here && hostname fbjn{node} && exec bash -c \"$1\"");
        command.args(["--uts", "--mount", "bash", "-c", &script, "node"]);
        let all = std::iter::once(command.get_program()).chain(command.get_args());
        all.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    /// A script as the first process of a job on the first node, with a scheduler's variables.
    fn run(&self, script: &str, variables: &[(&str, &str)]) -> (ExitStatus, String) {
        let words = self.words(1);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(script);
        for name in
            ["FOREBAY_POOL", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"]
        {
            command.env_remove(name);
        }
        command.env("FOREBAY_TMPDIR", self.dir.join("here")).env("FOREBAY_RSH", self.dir.join("rsh"));
        command
            .env("PATH", format!("{}/bin:{}", self.dir.display(), std::env::var("PATH").unwrap_or_default()));
        let output = command.envs(variables.iter().copied()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status, text(&output.stdout) + &text(&output.stderr))
    }

    /// What jobs have left in the nodes' temporary directories, and their daemons.
    fn left(&self) -> String {
        let mut left = String::new();
        for node in 1..=COUNT {
            for user in std::fs::read_dir(self.dir.join(format!("node{node}"))).unwrap().flatten() {
                for job in std::fs::read_dir(user.path()).into_iter().flatten().flatten() {
                    left += &format!("{} ", job.path().display());
                }
            }
        }
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            if line.contains("forebay") && line.contains(&self.dir.display().to_string()) {
                left += &format!("process {}: {line} ", entry.file_name().to_string_lossy());
            }
        }
        left
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn job_of_two_hosts_of_each_scheduler_ends_with_its_script_however_that_ends() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return println!("skipped: this user is not root, who alone can make nodes with their own mounts");
    }
    let nodes = Nodes::up();
    if !nodes.bed.is_apart() {
        return println!("skipped: no nodes with networks of their own here");
    }
    let hosts: Vec<String> = (1..=COUNT).map(|node| nodes.bed.address(node)).collect();
    std::fs::write(nodes.dir.join("input"), "hi\n").unwrap();
    let file = |name: &str, text: String| {
        let path = nodes.dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let slots = file("slots", format!("{0}\n{0}\n{1}\n{1}\n", hosts[0], hosts[1]));
    let plain = file("plain", format!("# two\n{} slots=4\n{}\n", hosts[0], hosts[1]));
    let pairs = format!("{} 4 {} 4", hosts[0], hosts[1]);
    let list = hosts.join(",");
    // A scheduler, the end of a script, its exit status, or else the signal that ends it.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, Option<i32>);
    let cases: [Case<'_>; 8] = [
        ("pbs", &[("PBS_JOBID", "7.pbs"), ("PBS_NODEFILE", &slots)], "exit 3", Some(3)),
        ("lsf", &[("LSB_JOBID", "8"), ("LSB_DJOB_HOSTFILE", &slots)], "kill -TERM $$; sleep 60", Some(143)),
        ("lsf-pairs", &[("LSB_JOBID", "9"), ("LSB_MCPU_HOSTS", &pairs)], "set -e; false; touch no", Some(1)),
        ("flux", &[("FLUX_JOB_ID", "f1A"), ("FLUX_TEST_HOSTS", &list)], "kill -HUP $$; sleep 60", Some(129)),
        ("hostfile", &[("FOREBAY_HOSTFILE", &plain)], "kill -KILL $$", None),
        ("list", &[("FOREBAY_HOSTS", &list)], "kill -INT $$; sleep 60", Some(130)),
        ("own-trap", &[("FOREBAY_HOSTS", &list)], "trap 'exit 4' EXIT; exit 0", Some(4)),
        ("exec", &[("PBS_JOBID", "9.pbs"), ("PBS_NODEFILE", &slots)], "exec true", Some(0)),
    ];
    for (name, variables, end, status) in cases {
        let out = nodes.dir.join(format!("out.{name}"));
        // The second node writes through its own daemon; data of other nodes need a mount there.
        let script = format!(
            "eval \"$({0} job begin --capacity 64MiB --stage-in {1}/input:/in --stage-out /out:{2})\"\n\
             {0} status | grep {3} | grep -c ' up ' >{1}/up.{name}\n\
             $FOREBAY_RSH {3} \"env FOREBAY_POOL=$FOREBAY_POOL {0} run --quiet -- sh -c 'echo hi >/forebay/out'\"\n\
             {0} run --quiet -- cmp /forebay/in {1}/input && touch {1}/in.{name}\n{end}",
            program().display(),
            nodes.dir.display(),
            out.display(),
            hosts[1]
        );
        let (ended, text) = nodes.run(&script, variables);
        match status {
            Some(code) => assert_eq!(ended.code(), Some(code), "{name}: {text}"),
            None => assert_eq!(ended.signal(), Some(libc::SIGKILL), "{name}: {text}"),
        }
        // What the trap does not do, the watcher does a moment later.
        let until = Instant::now() + PATIENCE;
        while !nodes.left().is_empty() {
            assert!(Instant::now() < until, "{name} has left {}: {text}", nodes.left());
            std::thread::sleep(Duration::from_millis(50));
        }
        let got = std::fs::read_to_string(&out).unwrap_or_default();
        assert_eq!(got, "hi\n", "{name}: {text}");
        assert!(nodes.dir.join(format!("in.{name}")).exists(), "{name}: it is staged in: {text}");
        let up = std::fs::read_to_string(nodes.dir.join(format!("up.{name}"))).unwrap_or_default();
        assert_eq!(up.trim(), "1", "{name}: the second node is in the pool: {text}");
    }
    // A host that cannot be reached: the script does not begin.
    let bad = format!("{},10.78.0.99", hosts[0]);
    let script = format!(
        "eval \"$({} job begin --capacity 64MiB)\"\ntouch {}/no",
        program().display(),
        nodes.dir.display()
    );
    let (ended, text) = nodes.run(&script, &[("FOREBAY_HOSTS", &bad)]);
    assert_eq!(ended.code(), Some(125), "{text}");
    assert!(!nodes.dir.join("no").exists() && nodes.left().is_empty(), "{}", nodes.left());
}
