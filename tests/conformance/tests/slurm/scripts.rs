//! `forebay job` in scripts that end in each way.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

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
    std::fs::remove_dir_all(&dir).unwrap();
}
