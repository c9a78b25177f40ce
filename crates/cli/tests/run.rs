//! `forebay run`: programs, their status, what they see, what is staged, and what is left behind.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use common::{as_nobody, can_be_nobody, eventually, give_to_nobody, is_root, start, Place, Ran};
use serde_json::Value;

#[test]
fn exit_status_is_that_of_the_program() {
    let place = Place::new();
    for code in [0, 3, 125, 200] {
        let ran = place.run(["run", "--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!(ran.code, Some(code), "{ran:?}");
    }
    let ran = place.run(["run", "--", "sh", "-c", "kill -SEGV $$"]);
    assert_eq!((ran.signal, ran.code), (Some(libc::SIGSEGV), None), "{ran:?}");
    assert!(ran.err.contains("killed by signal 11"), "{ran:?}");
    place.assert_nothing_left();
}

#[test]
fn program_that_cannot_be_started_has_the_status_that_env_gives() {
    let place = Place::new();
    place.run(["run", "--", "no-such-program"]).assert_refused(127, &["no-such-program", "PATH"]);
    place.run(["run", "--", "./no/such"]).assert_refused(127, &["no such file"]);
    let plain = place.write("plain", "text");
    place.run(["run", "--", plain.to_str().unwrap()]).assert_refused(126, &["Permission denied", "chmod +x"]);
    let script = place.write("script", "#!/no/such/interpreter\n");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    place.run(["run", "--", script.to_str().unwrap()]).assert_refused(127, &["interpreter"]);
    place.run(["run", "--", "/forebay/absent"]).assert_refused(127, &["/forebay/absent"]);
    for directory in ["/etc", "/forebay", "/forebay/"] {
        let ran = place.run(["run", "--", directory]);
        ran.assert_refused(
            126,
            &[&format!("cannot run {directory}: it is a directory"), "hint: name a program"],
        );
        assert!(!ran.err.contains("chmod"), "{ran:?}");
    }
    place.assert_nothing_left();
}

#[test]
fn program_has_its_arguments_streams_and_environment() {
    use std::io::Write;
    let place = Place::new();
    let mut command = place.command([
        "run",
        "--quiet",
        "--",
        "sh",
        "-c",
        "cat; echo \"$0|$1|$KEEP\"; echo e >&2",
        "a b",
        "--pool",
    ]);
    command.env("KEEP", "kept").env("LD_PRELOAD", "").stdin(std::process::Stdio::piped());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"in\n").unwrap();
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(
        (ran.out.as_str(), ran.err.as_str()),
        ("in\na b|--pool|kept\n", "e\n"),
        "nothing of ours when quiet"
    );
    let ran = place.run(["run", "--", "sh", "-c", "echo $FOREBAY_PREFIX $FOREBAY_LEVEL $LD_PRELOAD"]);
    let words: Vec<&str> = ran.out.split_whitespace().collect();
    assert_eq!(words[..2], ["/forebay", "1"]);
    assert!(words[2].ends_with("/libforebay_preload.so"), "{ran:?}");
    assert!(ran.err.contains("sh ended with status 0 after"), "{ran:?}");
}

#[test]
fn prefix_that_hides_something_real_is_refused() {
    let place = Place::new();
    let text = place.path.to_str().unwrap();
    place
        .run(["run", "--prefix", text, "--", "true"])
        .assert_refused(125, &["real directory", "--prefix /forebay-pool"]);
    let file = place.write("file", "x");
    place.run(["run", "--prefix", file.to_str().unwrap(), "true"]).assert_refused(125, &["real file"]);
    for bad in ["relative", "/", "/a/../b"] {
        place.run(["run", "--prefix", bad, "true"]).assert_refused(125, &["hint: --prefix /forebay"]);
    }
    place.ok([
        "run",
        "--prefix",
        "/no-such-thing",
        "--",
        "sh",
        "-c",
        "test $FOREBAY_PREFIX = /no-such-thing",
    ]);
    place.assert_nothing_left();
}

#[test]
fn run_without_a_pool_has_its_own_and_with_one_uses_it() {
    let place = Place::new();
    let own = place.ok(["run", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert!(own.out.contains("/run-"), "{own:?}");
    let named = place.up("named");
    let named = named.to_str().unwrap();
    let ran = place.ok(["--pool", named, "run", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert_eq!(ran.out.trim(), named);
    let mut command = place.command(["run", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert_eq!(Ran::of(command.env("FOREBAY_POOL", named).output().unwrap()).out.trim(), named);
    place.ok(["down", "--pool", named]);
    // The default pool, once up, is used by every run that names none.
    place.ok(["up", "--capacity", "128MiB"]);
    let ran = place.ok(["run", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert!(ran.out.trim().ends_with("/pool"), "{ran:?}");
    let ran = place.ok(["run", "--own", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert!(ran.out.contains("/run-"), "{ran:?}");
    place.ok(["down"]);
    place.assert_nothing_left();
}

#[test]
fn nested_run_joins_the_pool_around_it_and_concurrent_ones_do_not_share() {
    let place = Place::new();
    let forebay = common::forebay().to_str().unwrap();
    let script =
        format!("echo $FOREBAY_POOL; {forebay} run --quiet -- sh -c 'echo $FOREBAY_POOL $FOREBAY_LEVEL'");
    let ran = place.ok(["run", "--quiet", "--", "sh", "-c", &script]);
    let words: Vec<&str> = ran.out.split_whitespace().collect();
    assert_eq!((words[0], words[2]), (words[1], "2"), "{ran:?}");
    let mut both: Vec<_> = (0..2)
        .map(|i| {
            let out = place.join(format!("out{i}"));
            let script = format!("echo $FOREBAY_POOL > {}; sleep 0.3", out.display());
            (start(place.command(["run", "--quiet", "--", "sh", "-c", &script])), out)
        })
        .collect();
    let pools: Vec<String> = both
        .iter_mut()
        .map(|(run, out)| {
            assert!(run.wait().success());
            std::fs::read_to_string(out).unwrap()
        })
        .collect();
    assert_ne!(pools[0], pools[1]);
    place.assert_nothing_left();
}

#[test]
fn program_works_on_what_was_staged_in_and_its_results_are_staged_out() {
    let place = Place::new();
    place.write("in/case/a.txt", "alpha");
    place.write("in/case/deep/b.txt", "beta");
    let report = place.join("report.json");
    let ran = place.run([
        "run",
        "--stage-in",
        place.join("in/case").to_str().unwrap(),
        "--stage-out",
        &format!("/out:{}", place.join("results").display()),
        "--report",
        report.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        "mkdir /forebay/out && cat /forebay/case/a.txt /forebay/case/deep/b.txt > /forebay/out/c.txt",
    ]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(std::fs::read_to_string(place.join("results/c.txt")).unwrap(), "alphabeta");
    assert!(ran.err.contains("staged in 2 files") && ran.err.contains("staged out 1 file"), "{ran:?}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!(report["status"], 0);
    assert_eq!(report["stage_in"]["files"], 2);
    assert_eq!(report["stage_out"]["bytes"], 9);
    assert_eq!(report["pool"]["embedded"], true);
    assert!(!std::path::Path::new("/forebay").exists());
    place.assert_nothing_left();
}

#[test]
fn results_of_a_program_that_failed_are_staged_out_only_if_asked() {
    let place = Place::new();
    for (when, there) in [("success", false), ("always", true)] {
        let out = place.join(when);
        let ran = place.run([
            "run",
            "--stage-out-on",
            when,
            "--stage-out",
            &format!("/f:{}", out.display()),
            "--",
            "sh",
            "-c",
            "echo partial > /forebay/f; exit 9",
        ]);
        assert_eq!(ran.code, Some(9), "{ran:?}");
        assert_eq!(out.exists(), there, "{ran:?}");
        assert_eq!(ran.err.contains("--stage-out-on always"), !there, "{ran:?}");
    }
    place.assert_nothing_left();
}

#[test]
fn stage_in_of_what_cannot_be_read_is_refused_before_the_program_starts() {
    let place = Place::new();
    let ran = place.run([
        "run",
        "--stage-in",
        "/no/such/input",
        "--",
        "touch",
        place.join("ran").to_str().unwrap(),
    ]);
    ran.assert_refused(125, &["/no/such/input", "No such file", "hint: check the path"]);
    place.run(["run", "--manifest", "/no/such/list", "true"]).assert_refused(125, &["/no/such/list"]);
    place.run(["run", "--stage-out", "/out", "true"]).assert_refused(125, &["where to", "SRC:DST"]);
    for kernels in ["/f:/proc/f", "/f:/sys/kernel/f", "/f:/proc/self/new/f"] {
        place
            .run(["run", "--stage-out", kernels, "--", "touch", place.join("ran").to_str().unwrap()])
            .assert_refused(125, &["cannot stage out to", "the kernel's own", "another file system"]);
    }
    assert!(!place.join("ran").exists());
    if can_be_nobody() {
        give_to_nobody(&place.path);
        let secret = place.write("secret/input", "x");
        std::fs::set_permissions(secret.parent().unwrap(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let mut command = as_nobody(&place, ["run", "--stage-in", secret.to_str().unwrap(), "true"]);
        Ran::of(command.output().unwrap()).assert_refused(125, &["secret/input", "Permission denied"]);
        let mut command = as_nobody(&place, ["run", "--stage-out", "/x:/usr/forebay-test-x", "true"]);
        Ran::of(command.output().unwrap())
            .assert_refused(125, &["/usr/forebay-test-x", "make /usr writable"]);
        // One unreadable file of many fails the stage-in, and with it the run.
        let tree = place.write("tree/open", "x");
        let closed = place.write("tree/closed", "x");
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
        let mut command =
            as_nobody(&place, ["run", "--stage-in", tree.parent().unwrap().to_str().unwrap(), "true"]);
        Ran::of(command.output().unwrap()).assert_refused(125, &["tree/closed", "Permission denied"]);
    }
    place.assert_nothing_left();
}

#[test]
fn results_that_do_not_fit_stay_in_their_pool() {
    if !is_root() {
        println!("skipped: only root may mount a full disk");
        return;
    }
    let place = Place::new();
    let small = place.join("small");
    std::fs::create_dir(&small).unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "small"]).arg(&small).status().unwrap();
    assert!(mounted.success());
    let ran = place.run([
        "run",
        "--stage-out",
        &format!("/f:{}/f", small.display()),
        "--",
        "dd",
        "if=/dev/zero",
        "of=/forebay/f",
        "bs=1M",
        "count=4",
    ]);
    ran.assert_refused(125, &["No space left", "the results are not lost", "forebay stage-out --pool"]);
    assert!(!small.join("f").exists(), "no torn file");
    let line = |word: &str| ran.err.lines().find(|l| l.trim_start().starts_with(word)).unwrap().to_owned();
    let pool = line("forebay down").split_whitespace().last().unwrap().to_owned();
    // The printed advice works: with more space the results are staged out, and the pool is stopped.
    assert!(Command::new("mount").args(["-o", "remount,size=16m"]).arg(&small).status().unwrap().success());
    let advice = line("forebay stage-out");
    place.ok(advice.split_whitespace().skip(1));
    assert_eq!(std::fs::metadata(small.join("f")).unwrap().len(), 4 << 20);
    place.ok(["down", "--pool", &pool]);
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    place.assert_nothing_left();
}

#[test]
fn program_and_script_in_the_pool_can_be_run() {
    let place = Place::new();
    let script = place.write("bin/hello", "#!/bin/sh\necho hello $1 from $0; cat \"$0\" | wc -l\n");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let bin = place.join("bin");
    let bin = bin.to_str().unwrap();
    let ran = place.run(["run", "--quiet", "--stage-in", bin, "--", "/forebay/bin/hello", "you"]);
    assert_eq!(ran.out, "hello you from /forebay/bin/hello\n2\n", "{ran:?}");
    std::fs::copy("/bin/echo", place.join("bin/echo")).unwrap();
    let ran = place.run(["run", "--quiet", "--stage-in", bin, "--", "/forebay/bin/echo", "binary"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "binary\n"), "{ran:?}");
    let plain = place.write("bin/plain", "x");
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644)).unwrap();
    if !is_root() {
        place
            .run(["run", "--stage-in", bin, "--", "/forebay/bin/plain"])
            .assert_refused(126, &["Permission denied", "chmod +x"]);
    }
    place.run(["run", "--stage-in", bin, "--", "/forebay/bin"]).assert_refused(126, &["it is a directory"]);
    place.assert_nothing_left();
}

#[test]
fn program_that_cannot_see_the_pool_is_warned_of() {
    let place = Place::new();
    let source = place.write("s.c", "int main(void) { return 0; }\n");
    let program = place.join("static");
    let built = Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&program).status();
    if !built.is_ok_and(|s| s.success()) {
        println!("skipped: no compiler with a static C library");
        return;
    }
    let ran = place.ok(["run", "--", program.to_str().unwrap()]);
    assert!(ran.err.contains("warning") && ran.err.contains("linked statically"), "{ran:?}");
    let ran = place.ok(["run", "--", "true"]);
    assert!(!ran.err.contains("warning"), "{ran:?}");
}

#[test]
fn ordinary_user_runs_as_well_as_root() {
    if !can_be_nobody() {
        println!("skipped: needs root, to become somebody else");
        return;
    }
    let place = Place::new();
    give_to_nobody(&place.path);
    let script = "echo x > /forebay/f && cat /forebay/f && stat -c %u /forebay/f";
    let ran = Ran::of(as_nobody(&place, ["run", "--", "sh", "-c", script]).output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "x\n65534\n"), "{ran:?}");
    let user = place.join(format!("forebay-{}", common::NOBODY));
    eventually("its pool is gone", || !user.exists());
}

#[test]
fn leftovers_of_a_killed_pool_are_cleared_by_the_next_run() {
    let place = Place::new();
    let script = "kill -9 $(cat $FOREBAY_POOL/lock); echo $FOREBAY_POOL; sleep 0.2";
    let ran = place.run(["run", "--quiet", "--", "sh", "-c", script]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.err.contains("the pool is gone"), "{ran:?}");
    place.assert_nothing_left();
    // If results are lost too, the run fails and reports it.
    let out = place.join("out");
    let ran = place.run(["run", "--stage-out", &format!("/f:{}", out.display()), "--", "sh", "-c", script]);
    ran.assert_refused(125, &["the pool is gone"]);
    place.assert_nothing_left();
}

#[test]
fn run_under_a_parent_that_ignores_its_children_still_sees_the_end() {
    let place = Place::new();
    let script = format!("trap '' CHLD; exec {} run --quiet -- sh -c 'exit 3'", common::forebay().display());
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    place.dress(&mut command);
    let mut run = start(command);
    assert_eq!(run.wait().code(), Some(3));
    place.assert_nothing_left();
}

#[test]
fn run_whose_stderr_nobody_reads_still_stages_out() {
    let place = Place::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let pair = format!("/f:{}", place.join("f").display());
    let mut command = place.command(["run", "--stage-out", &pair, "--", "sh", "-c", "echo x > /forebay/f"]);
    assert_eq!(Ran::of(command.stderr(writer).output().unwrap()).code, Some(0));
    assert_eq!(std::fs::read(place.join("f")).unwrap(), b"x\n");
    place.assert_nothing_left();
}
