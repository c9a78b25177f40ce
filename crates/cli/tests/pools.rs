//! Pools started, inspected and stopped by the command, and the errors of these verbs.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use common::{
    as_nobody, can_be_nobody, eventually, forebay, give_to_nobody, is_alive, is_root, kill, Place, Ran,
};

#[test]
fn up_status_down_leaves_nothing() {
    let place = Place::new();
    let up = place.json(["up", "--capacity", "128MiB", "--json"]);
    assert_eq!(up["capacity_bytes"], 128 << 20);
    assert_eq!(up["media"], "dram");
    let status = place.json(["status", "--json"]);
    assert_eq!(status["state"], "up");
    assert_eq!(status["pool"], up["pool"]);
    assert_eq!(status["restarts"], 0);
    assert_eq!(status["inodes"], 1);
    assert!(status["free_bytes"].as_u64().unwrap() > 64 << 20, "{status}");
    assert!(status["ring"].is_object() && status["board"].is_object(), "{status}");
    assert_eq!(status["capabilities"]["fallocate"], true, "{status}");
    let pids: Vec<i32> =
        ["supervisor", "worker"].map(|k| status["pids"][k].as_i64().unwrap() as i32).to_vec();
    assert!(pids.iter().all(|&p| is_alive(p)));
    assert!(place.ok(["status"]).out.contains("128 MiB"));
    let down = place.ok(["down"]);
    assert!(down.out.contains("is down; it was empty"), "{down:?}");
    eventually("its processes are gone", || !pids.iter().any(|&p| is_alive(p)));
    place.assert_nothing_left();
    place.run(["status"]).assert_refused(1, &["there is no such directory", "hint: `forebay up"]);
}

#[test]
fn up_twice_says_who_and_how_to_stop() {
    let place = Place::new();
    place.ok(["up", "--capacity", "128MiB"]);
    let pid = place.json(["status", "--json"])["pids"]["supervisor"].to_string();
    place.run(["up"]).assert_refused(1, &["already up", &format!("(pid {pid})"), "forebay down"]);
    let failed = place.run(["up", "--json"]);
    let error: serde_json::Value = serde_json::from_str(&failed.out).unwrap();
    assert_eq!(error["error"]["code"], "busy");
    place.ok(["down"]);
}

#[test]
fn up_in_the_foreground_stays_until_the_pool_is_down_and_says_when_it_was_killed() {
    let place = Place::new();
    let foreground = || {
        let mut command = place.command(["up", "--capacity", "64MiB", "--foreground"]);
        let child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn();
        let status = place.json(["status", "--wait", "60", "--json"]);
        assert_eq!(status["state"], "up");
        let pids: Vec<i32> =
            ["worker", "supervisor"].map(|k| status["pids"][k].as_i64().unwrap() as i32).to_vec();
        (child.unwrap(), pids)
    };
    // Stopped by another command.
    let (mut up, _) = foreground();
    assert!(up.try_wait().unwrap().is_none(), "it has not stayed");
    place.ok(["down"]);
    assert_eq!(up.wait().unwrap().code(), Some(0));
    place.assert_nothing_left();
    // SIGTERM to `up` stops the pool too.
    let (mut up, _) = foreground();
    kill(up.id() as i32, libc::SIGTERM);
    assert_eq!(up.wait().unwrap().code(), Some(0));
    place.assert_nothing_left();
    // The pool is killed while `up` waits.
    let (up, pids) = foreground();
    pids.iter().rev().for_each(|pid| kill(*pid, libc::SIGKILL));
    let ended = Ran::of(up.wait_with_output().unwrap());
    ended.assert_refused(1, &["its daemon was killed", "/log"]);
    place.ok(["down"]);
    place.assert_nothing_left();
}

#[test]
fn status_waits_no_longer_than_it_was_told() {
    let place = Place::new();
    place.run(["status", "--wait", "0"]).assert_refused(1, &["there is no such directory"]);
    place.run(["status", "--wait", "1"]).assert_refused(1, &["there is no such directory"]);
    place.run(["status", "--wait", "soon"]).assert_refused(2, &["soon"]);
}

#[test]
fn verbs_on_a_pool_that_is_not_there_say_how_to_start_it() {
    let place = Place::new();
    let dir = place.join("nothing");
    let file = place.write("file", "x");
    for verb in [
        vec!["status"],
        vec!["down"],
        vec!["ls"],
        vec!["stat", "/x"],
        vec!["fsck"],
        vec!["stage-in", file.to_str().unwrap()],
        vec!["stage-out", "/x:/tmp/y"],
    ] {
        let ran = Ran::of(place.command(&verb).arg("--pool").arg(&dir).output().unwrap());
        ran.assert_refused(1, &["there is no such directory", "hint: `forebay up --path"]);
    }
    let ran = Ran::of(place.command(["--pool"]).arg(&dir).args(["run", "true"]).output().unwrap());
    ran.assert_refused(125, &["there is no such directory", "leave out --pool"]);
    // That of a job of Slurm.
    let of_job = |pool: &str| {
        let mut command = place.command(["status"]);
        command.env("FOREBAY_JOB", "12.1").env("FOREBAY_POOL", &dir).args(["--pool", pool]);
        Ran::of(command.output().unwrap())
    };
    let why = "slurmd has run no prolog of job 12 on this node";
    of_job(dir.to_str().unwrap())
        .assert_refused(1, &["there is no such directory", why, "scontrol requeue 12"]);
    let other = of_job("/nowhere/at/all");
    assert!(!other.err.contains("slurmd"), "another pool than the job's: {other:?}");
    // A pool that existed and is down.
    place.up("p");
    place.ok(["down", "--keep", "--pool", place.join("p").to_str().unwrap()]);
    for verb in ["status", "ls"] {
        let ran = Ran::of(place.command([verb, "--pool"]).arg(place.join("p")).output().unwrap());
        ran.assert_refused(1, &["it is not up", "hint: `forebay up --path"]);
    }
}

#[test]
fn up_where_it_cannot_be_says_why() {
    let place = Place::new();
    let full = place.join("full");
    std::fs::create_dir(&full).unwrap();
    place.write("full/letter", "precious");
    let full = full.to_str().unwrap();
    place
        .run(["up", "--path", full])
        .assert_refused(1, &["it holds other files (letter)", "hint: name an empty"]);
    assert_eq!(std::fs::read(place.join("full/letter")).unwrap(), b"precious");
    let file = place.write("file", "x");
    place.run(["up", "--path", file.to_str().unwrap()]).assert_refused(1, &["cannot", "not a directory"]);
    let long = format!("{}/{}", place.path.display(), "x".repeat(100));
    place.run(["up", "--path", &long]).assert_refused(1, &["96 bytes", "shorter path"]);
    place.run(["up", "--pool", "/tmp/a", "--path", "/tmp/b"]).assert_refused(1, &["--pool says", "name one"]);
    if can_be_nobody() {
        let closed = place.join("closed");
        std::fs::create_dir(&closed).unwrap();
        let ran = Ran::of(as_nobody(&place, ["up", "--path"]).arg(closed.join("pool")).output().unwrap());
        ran.assert_refused(1, &["Permission denied", "name a directory that you may write"]);
        let ran = Ran::of(as_nobody(&place, ["up", "--path"]).arg(&closed).output().unwrap());
        ran.assert_refused(1, &["belongs to user 0", "--path"]);
    }
    assert_eq!(place.pools(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn up_with_a_capacity_that_cannot_be_is_refused_and_leaves_nothing() {
    let place = Place::new();
    place.run(["up", "--capacity", "900TiB"]).assert_refused(1, &["too large", "900 TiB", "ask for less"]);
    place.run(["up", "--capacity", "1MiB"]).assert_refused(1, &["1 MiB", "64 MiB"]);
    place.run(["up", "--capacity", "much"]).assert_refused(2, &["much", "4GiB"]);
    place.run(["up", "--media", "tape"]).assert_refused(2, &["tape", "dram"]);
    let disk = place.join("disk");
    place
        .run(["up", "--media", "ssd", "--capacity", "900TiB", "--path", disk.to_str().unwrap()])
        .assert_refused(1, &["too large", "the file system of"]);
    assert!(!disk.exists());
    place.assert_nothing_left();
}

#[test]
fn pool_of_a_newer_format_is_refused_by_every_verb_and_left_alone() {
    let place = Place::new();
    let dir = place.join("newer");
    std::fs::create_dir(&dir).unwrap();
    let text = r#"{"format": 99, "node": "many"}"#;
    place.write("newer/pool.json", text);
    let dir_text = dir.to_str().unwrap();
    for verb in ["up", "down", "status", "ls", "fsck"] {
        place
            .run([verb, "--pool", dir_text])
            .assert_refused(1, &["its format is 99", "knows 3", "hint: use the Forebay"]);
    }
    place.run(["--pool", dir_text, "run", "true"]).assert_refused(125, &["its format is 99"]);
    assert_eq!(std::fs::read_to_string(dir.join("pool.json")).unwrap(), text);
    assert!(!dir.join("target").exists());
}

#[test]
fn ssd_pool_keeps_its_data_when_it_is_down() {
    let place = Place::new();
    let dir = place.join("disk");
    let text = dir.to_str().unwrap();
    let up = place.json(["up", "--media", "ssd", "--capacity", "128MiB", "--path", text, "--json"]);
    assert_eq!((up["backing"].as_str(), up["reopened"].as_bool()), (Some("directory"), Some(false)));
    place.run(["up", "--media", "dram", "--path", text]).assert_refused(1, &["already up"]);
    let down = place.ok(["down", "--pool", text]);
    assert!(down.out.contains("its data is kept"), "{down:?}");
    place
        .run(["up", "--media", "dram", "--path", text])
        .assert_refused(1, &["its medium is ssd", "leave out --media"]);
    let again = place.json(["up", "--path", text, "--json"]);
    assert_eq!((again["media"].as_str(), again["reopened"].as_bool()), (Some("ssd"), Some(true)));
    assert_eq!(again["capacity_bytes"], 128 << 20);
    place.ok(["down", "--pool", text]);
}

#[test]
fn down_keep_leaves_the_memory_for_the_next_up() {
    if !is_root() {
        println!("skipped: only root may mount");
        return;
    }
    let place = Place::new();
    let dir = place.up("p");
    let text = dir.to_str().unwrap();
    let down = place.ok(["down", "--keep", "--pool", text]);
    assert!(down.out.contains("kept for the next"), "{down:?}");
    assert_eq!(place.mounts(), [format!("{text}/target")]);
    let up = place.json(["up", "--path", text, "--capacity", "256MiB", "--json"]);
    assert_eq!((up["reopened"].as_bool(), up["capacity_bytes"].as_u64()), (Some(true), Some(256 << 20)));
    let status = place.json(["status", "--pool", text, "--json"]);
    let sum = status["free_bytes"].as_u64().unwrap() + status["used_bytes"].as_u64().unwrap();
    assert_eq!(sum, 256 << 20, "the tmpfs has grown: {status}");
    place.ok(["down", "--pool", text]);
    assert_eq!(place.mounts(), Vec::<String>::new());
    assert!(!dir.exists());
}

#[test]
fn mount_that_a_lost_pool_left_is_cleared_by_the_next_up() {
    if !is_root() {
        println!("skipped: only root may mount");
        return;
    }
    let place = Place::new();
    let dir = place.up("p");
    let text = dir.to_str().unwrap();
    place.ok(["down", "--keep", "--pool", text]);
    std::fs::remove_file(dir.join("pool.json")).unwrap();
    let up = place.json(["up", "--path", text, "--capacity", "128MiB", "--json"]);
    assert_eq!(up["reopened"], false);
    assert_eq!(place.mounts().len(), 1, "one mount, not one over the other");
    place.ok(["down", "--pool", text]);
    // A mount that Forebay did not make is left alone.
    let other = place.join("other");
    std::fs::create_dir_all(other.join("target")).unwrap();
    assert!(Command::new("mount")
        .args(["-t", "tmpfs", "mine"])
        .arg(other.join("target"))
        .status()
        .unwrap()
        .success());
    place
        .run(["up", "--path", other.to_str().unwrap()])
        .assert_refused(1, &["something else is mounted", "umount"]);
}

/// A pool in a plain directory, started and stopped.
fn pool_on_disk_that_is_down(place: &Place) -> std::path::PathBuf {
    let dir = place.join("disk");
    let text = dir.to_str().unwrap();
    place.ok(["up", "--media", "ssd", "--capacity", "128MiB", "--path", text]);
    place.ok(["down", "--pool", text]);
    dir
}

#[test]
fn target_without_identity_is_not_overwritten() {
    let place = Place::new();
    let dir = pool_on_disk_that_is_down(&place);
    let text = dir.to_str().unwrap();
    std::fs::remove_file(dir.join("pool.json")).unwrap();
    place
        .run(["up", "--media", "ssd", "--path", text])
        .assert_refused(1, &["holds data but pool.json is missing"]);
    assert!(dir.join("target/shard").exists());
    place.write("disk/pool.json", "{\"format\": 1");
    place.run(["up", "--path", text]).assert_refused(1, &["not the identity of a pool"]);
}

#[test]
fn shard_that_is_damaged_is_refused_and_left_alone() {
    let place = Place::new();
    let dir = pool_on_disk_that_is_down(&place);
    let text = dir.to_str().unwrap();
    let shard = dir.join("target/shard/data.mdb");
    std::fs::write(&shard, "this is no shard").unwrap();
    place.run(["up", "--path", text]).assert_refused(1, &["cannot open the shard", "hint:"]);
    assert_eq!(std::fs::read(&shard).unwrap(), b"this is no shard");
    place.run(["fsck", "--pool", text]).assert_refused(1, &["cannot open the shard"]);
    assert!(dir.join("pool.json").exists());
    place.run(["status", "--pool", text]).assert_refused(1, &["it is not up"]);
}

#[test]
fn shard_of_a_newer_format_is_refused_and_left_alone() {
    let place = Place::new();
    let dir = pool_on_disk_that_is_down(&place);
    let text = dir.to_str().unwrap();
    // The format record as LMDB stores it: 6 bytes of value, no flags, 1 byte of key; then the key, and version 5 of
    // node 1.
    let shard = dir.join("target/shard/data.mdb");
    let mut bytes = std::fs::read(&shard).unwrap();
    let record = [6, 0, 0, 0, 0, 0, 1, 0, 1, 5, 0, 0, 0, 1, 0];
    let places: Vec<usize> =
        (0..bytes.len() - record.len()).filter(|&i| bytes[i..].starts_with(&record)).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at + 9] = 99;
    }
    std::fs::write(&shard, &bytes).unwrap();
    for verb in ["up", "fsck"] {
        place
            .run([verb, "--pool", text])
            .assert_refused(1, &["its format is version 99", "hint: use the Forebay"]);
    }
    assert_eq!(std::fs::read(&shard).unwrap(), bytes);
    assert!(dir.join("pool.json").exists());
}

#[test]
fn down_clears_what_a_killed_pool_left() {
    let place = Place::new();
    let dir = place.up("p");
    let text = dir.to_str().unwrap();
    let status = place.json(["status", "--pool", text, "--json"]);
    let pid = |k: &str| status["pids"][k].as_i64().unwrap() as i32;
    kill(pid("supervisor"), 9);
    eventually("the worker ends with its supervisor", || !is_alive(pid("worker")));
    place.run(["status", "--pool", text]).assert_refused(1, &["it is not up"]);
    let down = place.ok(["down", "--pool", text]);
    assert!(down.out.contains("was not up"), "{down:?}");
    assert!(!dir.exists() && place.mounts().is_empty());
}

#[test]
fn down_of_a_stopped_supervisor_does_not_hang() {
    let place = Place::new();
    let dir = place.up("p");
    let status = place.json(["status", "--json", "--pool", dir.to_str().unwrap()]);
    let pid = status["pids"]["supervisor"].as_i64().unwrap() as i32;
    kill(pid, libc::SIGSTOP);
    let down = place.run(["down", "--force", "--pool", dir.to_str().unwrap()]);
    kill(pid, libc::SIGCONT);
    assert_eq!(down.code, Some(0), "{down:?}");
    assert!(down.out.contains("killed"), "{down:?}");
    eventually("its processes are gone", || !is_alive(pid));
    assert!(!dir.exists());
}

#[test]
fn ordinary_user_has_a_pool_in_memory_and_is_told_what_it_costs() {
    if !can_be_nobody() {
        println!("skipped: needs root, to become somebody else");
        return;
    }
    let place = Place::new();
    give_to_nobody(&place.path);
    let up = Ran::of(as_nobody(&place, ["up", "--capacity", "128MiB", "--json"]).output().unwrap());
    assert_eq!(up.code, Some(0), "{up:?}");
    let up: serde_json::Value = serde_json::from_str(&up.out).unwrap();
    assert_ne!(up["backing"], "tmpfs", "a user may not mount");
    assert!(!up["costs"].as_array().unwrap().is_empty(), "{up}");
    let status = Ran::of(as_nobody(&place, ["status"]).output().unwrap());
    assert!(status.out.contains("note"), "{status:?}");
    let mode = std::fs::metadata(up["pool"].as_str().unwrap()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let down = Ran::of(as_nobody(&place, ["down"]).output().unwrap());
    assert_eq!(down.code, Some(0), "{down:?}");
    let user = place.join(format!("forebay-{}", common::NOBODY));
    eventually("nothing is left", || !user.exists());
}

#[test]
fn default_directory_of_another_or_a_link_is_refused() {
    let place = Place::new();
    let user = rustix::process::geteuid().as_raw();
    let elsewhere = place.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, place.join(format!("forebay-{user}"))).unwrap();
    place.run(["up"]).assert_refused(1, &["a link or a file", "remove it"]);
    std::fs::remove_file(place.join(format!("forebay-{user}"))).unwrap();
    if is_root() {
        let theirs = place.join(format!("forebay-{user}"));
        std::fs::create_dir(&theirs).unwrap();
        give_to_nobody(&theirs);
        place.run(["up"]).assert_refused(1, &["belongs to user 65534"]);
    }
}

#[test]
fn fsck_finds_a_backing_file_that_nobody_owns() {
    let place = Place::new();
    let dir = place.join("disk");
    let text = dir.to_str().unwrap();
    place.ok(["up", "--media", "ssd", "--capacity", "128MiB", "--path", text]);
    let clean = place.json(["fsck", "--json", "--pool", text]);
    assert_eq!(clean["clean"], true, "{clean}");
    // An inode number far beyond any that was assigned.
    std::fs::write(dir.join("target/data/42/0001000000777742"), "lost").unwrap();
    for state in ["up", "down"] {
        let ran = place.run(["fsck", "--pool", text]);
        assert_eq!(ran.code, Some(4), "{state}: {ran:?}");
        assert!(ran.out.contains("0001000000777742"), "{state}: {ran:?}");
        if state == "up" {
            place.ok(["down", "--pool", text]);
        }
    }
    std::fs::remove_file(dir.join("target/data/42/0001000000777742")).unwrap();
    assert!(place.ok(["fsck", "--pool", text]).out.contains("is clean"));
}

#[test]
fn help_and_completions_name_every_verb() {
    let place = Place::new();
    let help = place.ok(["--help"]);
    for verb in ["up", "down", "status", "ls", "stat", "run", "stage-in", "stage-out", "fsck", "completions"]
    {
        assert!(help.out.contains(&format!("\n  {verb} ")), "{verb} is missing: {}", help.out);
        assert!(place.ok([verb, "--help"]).out.contains("Examples:"), "{verb}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = place.ok(["completions", shell]);
        assert!(script.out.contains("stage-in") && script.out.contains("capacity"), "{shell}");
    }
    assert_eq!(place.run(["no-such-verb"]).code, Some(2));
    assert_eq!(Ran::of(Command::new(forebay()).output().unwrap()).code, Some(2));
}
