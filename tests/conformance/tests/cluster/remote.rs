//! Ranks that mpirun and mpiexec start on other nodes under one `forebay run`, by a remote shell that passes no
//! environment. They must see the pool, and users' options must keep their effect.
//!
//! The nodes have their own networks, host names and mounts, so that the pool's directory has one name on all of them,
//! that of the first node's directory.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::launch::{built, Mpi, MPICH, OPEN_MPI};
use crate::nodes::{program, said, Cluster, PATIENCE_S};

/// Writes a script in place of ssh: it starts a shell on the node with PATH as its only variable.
fn remote_shell(c: &Cluster, count: usize) -> PathBuf {
    let script = c.file().with_file_name("bare-rsh");
    let mut text =
        "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1; shift\ncase $host in\n"
            .to_owned();
    for node in 1..=count {
        let shell = c.bed.command(node, "unshare".as_ref());
        let parts: Vec<_> = std::iter::once(shell.get_program()).chain(shell.get_args()).collect();
        let line: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
        text += &format!(
            "{}) exec {} --mount --uts sh -c 'hostname n{node}; mount --bind {} {}; exec env -i PATH=/usr/bin:/bin sh -c \"$1\"' sh \"$*\";;\n",
            c.bed.address(node),
            line.join(" "),
            c.pool(node).display(),
            c.pool(1).display(),
        );
    }
    std::fs::write(&script, text + "esac\necho no such host: $host >&2; exit 1\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
    script
}

/// Runs a launcher under `forebay run` on the first node.
fn run(c: &Cluster, variables: &[(&str, &str)], words: &[String]) -> Output {
    let mut command = c.bed.command(1, "/usr/bin/timeout".as_ref());
    command
        .arg(PATIENCE_S)
        .arg(program("forebay"))
        .args(["run", "--quiet", "--pool"])
        .arg(c.pool(1))
        .arg("--");
    command
        .args(words)
        .env_remove("FOREBAY_POOL")
        .envs(c.apart())
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn words(line: &str, program: &[&str]) -> Vec<String> {
    line.split_whitespace().chain(program.iter().copied()).map(str::to_owned).collect()
}

fn ranks(mpi: &Mpi) -> Option<&'static str> {
    let runs = Command::new("unshare").args(["--mount", "--uts", "true"]).output();
    let can = mpi.is_here() && runs.is_ok_and(|output| output.status.success());
    can.then_some(if mpi.name == OPEN_MPI.name { "OMPI_COMM_WORLD_RANK" } else { "PMI_RANK" })
}

/// The launcher's command line up to the program, with the remote shell and a rank on each of three nodes.
fn line(c: &Cluster, mpi: &Mpi, shell: &str, more: &str) -> String {
    let hosts: Vec<String> = (1..=3).map(|node| c.bed.address(node)).collect();
    let hosts = hosts.join(",");
    match mpi.name == OPEN_MPI.name {
        true => format!(
            "mpirun.openmpi --allow-run-as-root --host {hosts} -n 3 --mca plm_rsh_agent {shell} --mca btl tcp,self \
             --mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0 {more}"
        ),
        false => format!("mpiexec.hydra -hosts {hosts} -ppn 1 -n 3 -launcher ssh -launcher-exec {shell} {more}"),
    }
}

#[test]
fn ranks_that_a_bare_remote_shell_starts_see_the_pool() {
    let c = Cluster::up("remote", 3);
    if !c.bed.is_apart() {
        return;
    }
    c.tell(1, "mkdir /forebay/d");
    for mpi in [&OPEN_MPI, &MPICH] {
        let Some(rank) = ranks(mpi) else { continue };
        let shell = remote_shell(&c, 3);
        let shell = shell.to_str().unwrap();
        // Each rank runs on its own node: a directory's home is the node that creates it.
        let script = format!("mkdir /forebay/d/${rank}-$(hostname)");
        let ran = run(&c, &[], &words(&line(&c, mpi, shell, ""), &["sh", "-c", &script]));
        assert!(ran.status.success(), "{}: {}", mpi.name, said(&ran));
        let homes = c.tell(3, "cd /forebay/d; stat -c %i 1-n2 2-n3");
        let homes: Vec<u64> = homes.lines().map(|ino| ino.parse::<u64>().unwrap() >> 48).collect();
        assert_eq!(homes, [2, 3], "{}: a directory's home is its maker's node", mpi.name);
        c.tell(1, "rmdir /forebay/d/*");
        // The MPI-IO driver works too.
        let records = built(&c, mpi.compiler, "records", &[]).expect("it builds");
        let program = [records.to_str().unwrap(), "/forebay/d/file", "1000", "100"];
        let ran = run(&c, &[("FOREBAY_MPI_DEBUG", "1")], &words(&line(&c, mpi, shell, ""), &program));
        let text = said(&ran);
        assert!(ran.status.success() && text.contains("passed"), "{}: {text}", mpi.name);
        assert!(text.contains("/d/file: open by 3 ranks") && text.contains("data on other nodes"), "{text}");
        c.tell(2, "[ $(stat -c %s /forebay/d/file) = 300000 ] && rm /forebay/d/file");
    }
    c.check();
}

#[test]
fn users_options_of_mpirun_are_as_without_forebay() {
    let c = Cluster::up("remote-options", 3);
    if !c.bed.is_apart() || ranks(&OPEN_MPI).is_none() {
        return;
    }
    let shell = remote_shell(&c, 3);
    let shell = shell.to_str().unwrap();
    let told = "echo $OMPI_COMM_WORLD_RANK: mine=$MINE pool=${FOREBAY_POOL:+there} of=$OF_AGENT";
    let says = |variables: &[(&str, &str)], more: &str| {
        let ran = run(&c, variables, &words(&line(&c, &OPEN_MPI, shell, more), &["sh", "-c", told]));
        assert!(ran.status.success(), "{more}: {}", said(&ran));
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    // The user's variables reach the ranks beside Forebay's, also with `--prefix`.
    let all = ["0: mine=yes pool=there of=", "1: mine=yes pool=there of=", "2: mine=yes pool=there of="];
    assert_eq!(says(&[("MINE", "yes")], "-x MINE"), all);
    assert_eq!(says(&[("MINE", "yes")], "-x MINE --prefix /usr"), all);
    assert_eq!(says(&[("MINE", "yes")], "-x MINE --mca plm_rsh_no_tree_spawn 1"), all);
    // A launch agent of the user or the site is used, and its ranks see the pool. If the command line names the agent,
    // its ranks on other nodes do not see the pool.
    let theirs =
        ["0: mine= pool=there of=", "1: mine= pool=there of=theirs", "2: mine= pool=there of=theirs"];
    let alone = ["0: mine= pool=there of=", "1: mine= pool= of=theirs", "2: mine= pool= of=theirs"];
    let agent = c.file().with_file_name("agent");
    std::fs::write(&agent, "#!/bin/sh\nOF_AGENT=theirs exec orted \"$@\"\n").unwrap();
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755)).unwrap();
    let agent = agent.to_str().unwrap();
    assert_eq!(says(&[], &format!("--launch-agent {agent}")), alone);
    assert_eq!(says(&[("OMPI_MCA_orte_launch_agent", agent)], ""), theirs);
    // Likewise with parameter files, which also name the remote shell.
    let directory = c.file().with_file_name("etc");
    let parameters = directory.join("openmpi-mca-params.conf");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(
        &parameters,
        format!("# a site's\norte_launch_agent = {agent}\nplm_rsh_agent = {shell}\n"),
    )
    .unwrap();
    let files = parameters.to_str().unwrap();
    let line = line(&c, &OPEN_MPI, shell, "").replace(&format!("--mca plm_rsh_agent {shell}"), "");
    assert!(!line.contains(shell));
    for (name, value) in
        [("OMPI_MCA_mca_base_param_files", files), ("OPAL_SYSCONFDIR", directory.to_str().unwrap())]
    {
        let ran = run(&c, &[(name, value)], &words(&line, &["sh", "-c", told]));
        assert!(ran.status.success(), "{name}: {}", said(&ran));
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, theirs, "{name}");
    }
    c.check();
}
