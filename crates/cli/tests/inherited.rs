//! What a pool's daemon inherits from its starter: limits, signals, umask, devices. It resets what it can, and reports
//! what it cannot.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::{as_nobody, is_root, Place, Ran};

/// A command with a limit that it cannot raise.
fn limited(mut command: Command, resource: libc::__rlimit_resource_t, limit: u64) -> Command {
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: between fork and exec one system call is made, which is async-signal-safe; the structure lives over it.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(resource, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// The command as a user who cannot raise limits and may write in the test's directory; `None` if this is not root.
fn nobodys(place: &Place, arguments: &[&str]) -> Option<Command> {
    if !common::can_be_nobody() {
        eprintln!("skipped: this needs root, who can become another user");
        return None;
    }
    common::give_to_nobody(&place.path);
    let mut command = as_nobody(place, arguments);
    command.env("LC_ALL", "C");
    Some(command)
}

#[test]
fn limit_of_open_files_that_does_not_suffice_is_refused_at_once() {
    let place = Place::new();
    for limit in [19, 21, 40] {
        let run = ["run", "--capacity", "64MiB", "--", "sh", "-c", "echo x >/forebay/x"];
        let Some(command) = nobodys(&place, &run) else { return };
        let ran = Ran::of(limited(command, libc::RLIMIT_NOFILE, limit).output().unwrap());
        ran.assert_refused(125, &[&format!("may open {limit} files"), "ulimit -n"]);
    }
    place.assert_nothing_left();
}

#[test]
fn client_that_the_daemon_has_no_descriptor_for_fails_with_emfile_and_a_later_one_works() {
    let place = Place::new();
    let pool = place.join("p");
    let text = pool.to_str().unwrap();
    let up = ["up", "--capacity", "64MiB", "--path", text];
    let Some(command) = nobodys(&place, &up) else { return };
    let ran = Ran::of(limited(command, libc::RLIMIT_NOFILE, 60).output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let program = |line: &str| {
        let run = ["run", "--pool", text, "--", "sh", "-c", line];
        Ran::of(nobodys(&place, &run).unwrap().output().unwrap())
    };
    // 40 processes attach at once, more than the worker has descriptors for: some get EMFILE, and no other error.
    let many = program("for i in $(seq 40); do (exec 3>/forebay/f; exec sleep 2) & done; wait");
    assert!(many.err.contains("Too many open files"), "{many:?}");
    assert!(!many.err.contains("Input/output error"), "{many:?}");
    // The same error occurs while idle connections use up the descriptors of the worker, or of the supervisor.
    for socket in ["socket", "supervisor"] {
        let silent: Vec<_> = (0..60).map(|_| UnixStream::connect(pool.join(socket)).unwrap()).collect();
        // The daemon accepts them one after the other: until it has, a program may still get a descriptor.
        common::eventually("a program is refused", || program("echo x >/forebay/x").code != Some(0));
        drop(silent);
        common::eventually("a program works again", || program("echo y >/forebay/y").code == Some(0));
    }
    let log = std::fs::read_to_string(pool.join("log")).unwrap();
    let refusals = log.lines().filter(|line| line.contains("Too many open files")).count();
    assert!(refusals < 10, "{refusals} lines of\n{log}");
    let down = Ran::of(nobodys(&place, &["down", "--pool", text]).unwrap().output().unwrap());
    assert!(!down.out.contains("killed") && down.code == Some(0), "{down:?}");
}

#[test]
fn program_that_may_open_too_few_files_gets_emfile() {
    let place = Place::new();
    let pool = place.up("p");
    place.ok(["run", "--pool", pool.to_str().unwrap(), "--", "sh", "-c", "echo x >/forebay/x"]);
    for limit in [4, 5, 6] {
        let line = format!("ulimit -n {limit}; LC_ALL=C exec cat /forebay/x");
        let ran = place.run(["run", "--pool", pool.to_str().unwrap(), "--", "sh", "-c", &line]);
        assert!(ran.err.contains("Too many open files") && !ran.err.contains("Input/output"), "{ran:?}");
    }
}

/// The soft value of one of a process's limits.
fn soft_limit(pid: u64, name: &str) -> String {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
    line[name.len()..].split_whitespace().next().unwrap().to_owned()
}

#[test]
fn pool_works_whatever_limits_signals_and_umask_its_starter_had() {
    let place = Place::new();
    let forebay = common::forebay().display().to_string();
    let hostile =
        "umask 0777; trap '' TERM INT CHLD HUP XFSZ PIPE; ulimit -S -f 0; ulimit -S -t 1; ulimit -S -n 30; \
                   ulimit -S -s 200; echo 800 >/proc/self/oom_score_adj; exec \"$@\"";
    let mut up = Command::new("sh");
    up.args(["-c", hostile, "sh", &forebay, "up", "--capacity", "64MiB"]);
    place.dress(&mut up);
    let ran = Ran::of(up.output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for pool in place.pools() {
        assert_eq!(mode(&pool), 0o700, "{}", pool.display());
        assert_eq!(mode(pool.parent().unwrap()), 0o700, "{}", pool.parent().unwrap().display());
    }
    place.ok([
        "run",
        "--",
        "sh",
        "-c",
        "head -c 9000000 /dev/zero >/forebay/big && mkdir /forebay/d && mv /forebay/big /forebay/d",
    ]);
    let status = place.json(["status", "--json"]);
    for process in ["supervisor", "worker"] {
        let pid = status["pids"][process].as_u64().unwrap();
        assert_eq!(soft_limit(pid, "Max file size"), "unlimited", "{process}");
        assert_eq!(soft_limit(pid, "Max cpu time"), "unlimited", "{process}");
        assert_ne!(soft_limit(pid, "Max open files"), "30", "{process}");
        let score = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert_eq!(score.trim(), "0", "{process}");
    }
    // SIGTERM stops the worker and SIGCHLD reports its end, so both signals must work.
    let down = place.ok(["down"]);
    assert!(!down.out.contains("killed"), "{down:?}");
    place.assert_nothing_left();
}

#[test]
fn limit_of_file_sizes_that_does_not_suffice_is_refused_in_words() {
    let place = Place::new();
    let Some(command) = nobodys(&place, &["up", "--capacity", "64MiB"]) else { return };
    let ran = Ran::of(limited(command, libc::RLIMIT_FSIZE, 1 << 20).output().unwrap());
    ran.assert_refused(1, &["1048576 bytes", "ulimit -f"]);
    let Some(command) = nobodys(&place, &["up", "--capacity", "64MiB"]) else { return };
    let ran = Ran::of(limited(command, libc::RLIMIT_FSIZE, 64 << 20).output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("EFBIG"), "{ran:?}");
    let mut down = nobodys(&place, &["down"]).unwrap();
    assert_eq!(Ran::of(down.output().unwrap()).code, Some(0));
}

/// Runs shell lines in a mount namespace of their own; `None` where that is impossible.
fn elsewhere(place: &Place, lines: &str) -> Option<Ran> {
    if !is_root() {
        eprintln!("skipped: this needs root, for mount namespaces");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", lines, "sh"]).arg(common::forebay());
    place.dress(&mut command);
    Some(Ran::of(command.output().unwrap()))
}

#[test]
fn missing_null_device_is_named() {
    let place = Place::new();
    let Some(ran) = elsewhere(&place, "mount -t tmpfs none /dev && exec \"$1\" up --capacity 64MiB") else {
        return;
    };
    ran.assert_refused(1, &["/dev/null"]);
    assert!(!ran.err.contains("program of this machine"), "{ran:?}");
}

#[test]
fn fuse_device_of_another_kind_is_named() {
    let place = Place::new();
    if !Path::new("/dev/fuse").exists() {
        return eprintln!("skipped: there is no /dev/fuse");
    }
    let lines = "mount --bind /dev/zero /dev/fuse && \"$1\" up --capacity 64MiB >&2 && mkdir \"$FOREBAY_TMPDIR/m\" && \
                 \"$1\" mount \"$FOREBAY_TMPDIR/m\"; status=$?; \"$1\" down >&2; exit $status";
    let Some(ran) = elsewhere(&place, lines) else { return };
    ran.assert_refused(1, &["/dev/fuse", "not the FUSE device"]);
}
