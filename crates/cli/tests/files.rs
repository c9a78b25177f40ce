//! The content of a pool as `ls` and `stat` show it, and as `stage-in` and `stage-out` copy it.

mod common;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{as_nobody, can_be_nobody, give_to_nobody, is_root, Place, Ran};
use serde_json::Value;

/// A pool with a tree staged in: files, a link, an empty directory, odd names.
fn filled(place: &Place) -> PathBuf {
    let pool = place.up("p");
    place.write("src/a.txt", "alpha");
    let b = place.write("src/sub/b.bin", vec![7u8; 100_000]);
    std::fs::set_permissions(b, std::fs::Permissions::from_mode(0o640)).unwrap();
    place.write("src/.hidden", "");
    symlink("sub/b.bin", place.join("src/link")).unwrap();
    std::fs::create_dir(place.join("src/empty")).unwrap();
    std::fs::write(place.join(Path::new(std::ffi::OsStr::from_bytes(b"src/odd\xff\x1b[31m"))), "odd")
        .unwrap();
    place.ok(["stage-in", "--pool", pool.to_str().unwrap(), &format!("{}/:/t", place.join("src").display())]);
    pool
}

#[test]
fn ls_shows_what_is_there_as_asked() {
    let place = Place::new();
    let pool = filled(&place);
    let ls = |arguments: &[&str]| -> Ran {
        let mut all = vec!["ls", "--pool", pool.to_str().unwrap()];
        all.extend(arguments);
        place.ok(all)
    };
    assert_eq!(ls(&[]).out, "t\n");
    let raw = place.command(["ls", "--pool", pool.to_str().unwrap(), "/t"]).output().unwrap();
    assert_eq!(raw.stdout, b"a.txt\nempty\nlink\nodd\xff\x1b[31m\nsub\n", "names as bytes, sorted");
    assert_eq!(ls(&["/forebay/t/sub"]).out, "b.bin\n");
    assert_eq!(ls(&["t/a.txt"]).out, "/t/a.txt\n");
    assert!(ls(&["-a", "/t"]).out.starts_with(".hidden\na.txt\n"));
    let long = ls(&["-l", "/t", "/t/sub"]);
    assert!(long.out.starts_with("/t:\n-rw"), "{long:?}");
    assert!(long.out.contains("link -> sub/b.bin\n"), "{long:?}");
    assert!(long.out.contains("odd\\xff\\x1b[31m\n"), "a terminal is not told to turn red: {long:?}");
    let line = long.out.lines().find(|l| l.ends_with(" b.bin")).unwrap();
    assert!(line.starts_with("-rw-r----- 1 ") && line.contains(" 100000 "), "{line}");
    let all = ls(&["-R"]);
    assert!(all.out.contains("\n/t/sub:\nb.bin\n") && all.out.contains("\n/t/empty:\n"), "{all:?}");
    let json: Value = serde_json::from_str(&ls(&["--json", "-a", "/t"]).out).unwrap();
    let find = |name: &str| json.as_array().unwrap().iter().find(|e| e["name"] == name).unwrap().clone();
    assert_eq!((find("a.txt")["size"].as_u64(), find("a.txt")["kind"].as_str()), (Some(5), Some("file")));
    assert_eq!(find("link")["target"], "sub/b.bin");
    assert_eq!(find("a.txt")["path"], "/t/a.txt");
    let odd = json.as_array().unwrap().iter().find(|e| e["name_hex"].is_string()).unwrap();
    assert_eq!(odd["name_hex"], "6f6464ff1b5b33316d");
}

#[test]
fn ls_and_stat_of_what_is_absent_fail_and_show_the_rest() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    let ran = place.run(["ls", "--pool", pool, "/absent", "/t/sub"]);
    ran.assert_refused(1, &["cannot list /absent", "no such name"]);
    assert!(ran.out.contains("b.bin"), "{ran:?}");
    let ran = place.run(["stat", "--pool", pool, "/absent", "/t/a.txt"]);
    ran.assert_refused(1, &["cannot look at /absent"]);
    assert!(ran.out.contains("path      /t/a.txt"), "{ran:?}");
    assert_eq!(place.run(["stat", "--pool", pool]).code, Some(2));
}

#[test]
fn output_whose_reader_is_gone_or_whose_disk_is_full_is_no_panic() {
    let place = Place::new();
    let pool = filled(&place);
    for verb in [
        &["ls", "-lR"][..],
        &["status"],
        &["stat", "/t"],
        &["fsck"],
        &["ls", "--json"],
        &["completions", "bash"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ran = Ran::of(place.command(verb).arg("--pool").arg(&pool).stdout(writer).output().unwrap());
        assert_eq!((ran.code, ran.err.as_str()), (Some(141), ""), "{verb:?}: {ran:?}");
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ran = Ran::of(place.command(verb).arg("--pool").arg(&pool).stdout(full).output().unwrap());
        ran.assert_refused(1, &["cannot print", "No space left"]);
    }
}

#[test]
fn stat_tells_attributes_layout_and_state() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    let json = place.json(["stat", "--json", "--pool", pool, "/t/sub/b.bin", "/t/link", "/"]);
    let file = &json[0];
    assert_eq!(file["size"], 100_000);
    assert_eq!(file["mode"], "0640");
    assert_eq!(
        (file["resident"].as_bool(), file["layout"][0]["stripe_count"].as_u64()),
        (Some(true), Some(1))
    );
    assert_eq!((file["node"].as_u64(), file["nlink"].as_u64()), (Some(1), Some(1)));
    let source = std::fs::metadata(place.join("src/sub/b.bin")).unwrap();
    use std::os::unix::fs::MetadataExt;
    let mtime = source.mtime() as f64 + source.mtime_nsec() as f64 / 1e9;
    assert!((file["mtime"].as_f64().unwrap() - mtime).abs() < 1e-3, "times are kept: {file}");
    assert_eq!((json[1]["kind"].as_str(), json[1]["target"].as_str()), (Some("symlink"), Some("sub/b.bin")));
    assert_eq!((json[2]["kind"].as_str(), json[2]["size"].as_u64()), (Some("directory"), Some(1)));
    let followed = place.json(["stat", "-L", "--json", "--pool", pool, "/t/link"]);
    assert_eq!(followed[0]["ino"], file["ino"]);
    let text = place.ok(["stat", "--pool", pool, "/t/sub/b.bin"]).out;
    assert!(text.contains("100000 bytes") && text.contains("one backing file"), "{text}");
}

#[test]
fn staging_round_trip_gives_the_same_bytes_and_a_report() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    let back = format!("/t/:{}", place.join("back").display());
    let report = place.json(["stage-out", "--json", "--verify", "--pool", pool, &back]);
    assert_eq!((report["direction"].as_str(), report["complete"].as_bool()), (Some("out"), Some(true)));
    assert_eq!(report["files"], 4);
    assert_eq!(report["bytes"], 100_000 + 5 + 3);
    assert_eq!(report["verified"], 4);
    let mut diff = Command::new("diff");
    diff.args(["-r", "--no-dereference"]).args([place.join("src"), place.join("back")]);
    let diff = diff.output().unwrap();
    assert!(diff.status.success(), "{}", String::from_utf8_lossy(&diff.stdout));
    // A second time all files are skipped, unless `--no-resume` is given.
    let again = place.json(["stage-out", "--json", "--pool", pool, &back]);
    assert_eq!(
        (again["files"].as_u64(), again["skipped_files"].as_u64().map(|n| n >= 4)),
        (Some(0), Some(true))
    );
    let again = place.json(["stage-out", "--json", "--no-resume", "--pool", pool, &back]);
    assert_eq!(again["files"], 4);
    let table = place.ok(["stage-in", "--pool", pool, &format!("{}:/u/", place.join("src/a.txt").display())]);
    assert!(table.out.contains("1 file, 5 B"), "{table:?}");
    assert_eq!(place.ok(["ls", "--pool", pool, "/u"]).out, "a.txt\n");
}

#[test]
fn manifest_names_many_pairs_and_its_mistakes_by_line() {
    let place = Place::new();
    let pool = place.up("p");
    let pool = pool.to_str().unwrap();
    let a = place.write("a b.txt", "1");
    let c = place.write("c.txt", "22");
    let list = place.write("list", format!("# inputs\n\"{}\" /x/one\n{} /x/\n", a.display(), c.display()));
    let report = place.json(["stage-in", "--json", "--pool", pool, "--manifest", list.to_str().unwrap()]);
    assert_eq!(report["files"], 2);
    assert_eq!(place.ok(["ls", "--pool", pool, "/x"]).out, "c.txt\none\n");
    let bad = place.write("bad", "/a /b\n/a /b /c\n");
    place
        .run(["stage-in", "--pool", pool, "--manifest", bad.to_str().unwrap()])
        .assert_refused(1, &["line 2", "more than two fields"]);
    assert_eq!(place.run(["stage-in", "--pool", pool]).code, Some(2));
}

#[test]
fn staging_of_the_pool_itself_is_refused() {
    let place = Place::new();
    let pool = place.up("p");
    let pool = pool.to_str().unwrap();
    let above = place.join("").display().to_string();
    place.write("src/a", "1");
    for source in [above.trim_end_matches('/'), pool, &format!("{pool}/pool.json")] {
        place.run(["stage-in", "--pool", pool, source]).assert_refused(1, &["the pool itself", "--path"]);
    }
    for destination in [pool, &format!("{pool}/new/dir")] {
        place
            .run(["stage-out", "--pool", pool, &format!("/:{destination}")])
            .assert_refused(1, &["the pool itself", "--path"]);
    }
    let beside = place.join("src").display().to_string();
    assert_eq!(place.json(["stage-in", "--json", "--pool", pool, &beside])["files"], 1);
}

#[test]
fn staging_of_what_cannot_be_read_or_written_says_so() {
    let place = Place::new();
    let pool = place.up("p");
    let pool = pool.to_str().unwrap();
    place
        .run(["stage-in", "--pool", pool, "/no/such/file"])
        .assert_refused(1, &["/no/such/file", "No such file"]);
    place
        .run(["stage-out", "--pool", pool, "/absent:/tmp/x"])
        .assert_refused(1, &["/absent", "No such file"]);
    place.run(["stage-out", "--pool", pool, "/absent"]).assert_refused(1, &["where to", "SRC:DST"]);
    let ran = place.run(["stage-in", "--json", "--pool", pool, "/no/such/file"]);
    let error: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(error["error"]["code"], "not-found");
    if can_be_nobody() {
        give_to_nobody(&place.path);
        let tree = place.write("tree/open", "x");
        let closed = place.write("tree/closed", "secret");
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o600)).unwrap();
        let up = Ran::of(as_nobody(&place, ["up", "--capacity", "128MiB"]).output().unwrap());
        assert_eq!(up.code, Some(0), "{up:?}");
        let mut stage = as_nobody(&place, ["stage-in"]);
        let ran = Ran::of(stage.arg(tree.parent().unwrap()).output().unwrap());
        ran.assert_refused(1, &["tree/closed", "Permission denied"]);
        assert!(ran.out.contains("failed") && ran.out.contains("1 file"), "the others are staged: {ran:?}");
        let ls = Ran::of(as_nobody(&place, ["ls", "/tree"]).output().unwrap());
        assert_eq!(ls.out, "open\n");
        let mut stage = as_nobody(&place, ["stage-in", "--all-or-nothing"]);
        let ran = Ran::of(stage.arg(format!("{}:/whole", place.join("tree").display())).output().unwrap());
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let ls = Ran::of(as_nobody(&place, ["ls", "/"]).output().unwrap());
        assert_eq!(ls.out, "tree\n");
        let down = Ran::of(as_nobody(&place, ["down"]).output().unwrap());
        assert_eq!(down.code, Some(0), "{down:?}");
    }
}

#[test]
fn stage_out_onto_a_full_disk_leaves_no_torn_file() {
    if !is_root() {
        println!("skipped: only root may mount a full disk");
        return;
    }
    let place = Place::new();
    let pool = place.up("p");
    let pool = pool.to_str().unwrap();
    let big = place.write("big", vec![1u8; 4 << 20]);
    place.ok(["stage-in", "--pool", pool, big.to_str().unwrap()]);
    let small = place.join("small");
    std::fs::create_dir(&small).unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "small"]).arg(&small).status().unwrap();
    assert!(mount.success());
    let pair = format!("/big:{}/big", small.display());
    place.run(["stage-out", "--pool", pool, &pair]).assert_refused(1, &["No space left", "small"]);
    let names: Vec<_> = std::fs::read_dir(&small).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.contains(&"big".into()), "{names:?}");
    assert!(Command::new("mount").args(["-o", "remount,size=16m"]).arg(&small).status().unwrap().success());
    place.ok(["stage-out", "--pool", pool, &pair]);
    assert_eq!(std::fs::read(small.join("big")).unwrap(), vec![1u8; 4 << 20]);
}

#[test]
fn verbs_within_a_run_speak_of_its_pool_and_of_real_files() {
    let place = Place::new();
    let forebay = common::forebay().to_str().unwrap();
    place.write("real.txt", "real");
    let script = format!(
        "echo pooled > /forebay/f; {forebay} ls; {forebay} stage-out /forebay/f:{0}/f; {forebay} stage-in {0}/real.txt; \
         cat /forebay/real.txt; {forebay} status | head -1",
        place.path.display()
    );
    let ran = place.ok(["run", "--quiet", "--", "sh", "-c", &script]);
    assert!(ran.out.starts_with("f\n"), "{ran:?}");
    assert!(ran.out.contains("\nreal") && ran.out.contains("of `forebay run`"), "{ran:?}");
    assert_eq!(std::fs::read_to_string(place.join("f")).unwrap(), "pooled\n");
    place.assert_nothing_left();
}

#[test]
fn staging_that_is_interrupted_ends_by_the_signal_and_goes_on_when_run_again() {
    let place = Place::new();
    let pool = place.join("p");
    let pool = pool.to_str().unwrap();
    place.ok(["up", "--capacity", "1GiB", "--path", pool]);
    for i in 0..40 {
        place.write(&format!("many/{i}"), vec![i as u8; 8 << 20]);
    }
    let source = format!("{}:/many", place.join("many").display());
    let mut stage = common::start(place.command(["stage-in", "--no-progress", "--pool", pool, &source]));
    common::eventually("something is staged", || {
        place.run(["ls", "--pool", pool, "/many"]).out.lines().count() > 1
    });
    common::kill(stage.pid(), libc::SIGINT);
    use std::os::unix::process::ExitStatusExt;
    let status = stage.wait();
    // On a fast machine it may have finished already.
    assert!(status.signal() == Some(libc::SIGINT) || status.success(), "{status}");
    let report = place.json(["stage-in", "--json", "--pool", pool, &source]);
    assert_eq!(report["files"].as_u64().unwrap() + report["skipped_files"].as_u64().unwrap(), 40, "{report}");
    assert!(report["skipped_files"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(place.json(["fsck", "--json", "--pool", pool])["clean"], true);
}

/// Number of backing files, and bytes of a stripe, from `layout get`.
fn layout_of(place: &Place, pool: &str, path: &str) -> (u64, u64) {
    let shown: Value =
        serde_json::from_str(&place.ok(["layout", "get", "--pool", pool, "--json", path]).out).unwrap();
    let first = &shown[0]["layout"][0];
    (first["stripe_count"].as_u64().unwrap(), first["stripe_bytes"].as_u64().unwrap())
}

#[test]
fn layout_of_a_new_file_and_of_a_directory_is_as_set_and_migrate_makes_it_one() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    place.ok(["layout", "set", "--pool", pool, "--stripe-count", "3", "--stripe-size", "8KiB", "/t/new"]);
    assert_eq!(layout_of(&place, pool, "/t/new"), (3, 8192));
    place.ok(["layout", "set", "--pool", pool, "--stripe-count", "4", "/t/sub"]);
    assert_eq!(layout_of(&place, pool, "/t/sub"), (4, 1 << 20));
    let text = place.ok(["layout", "get", "--pool", pool, "/t/new", "/t/a.txt", "/t/sub"]).out;
    assert!(text.starts_with("/t/new: 3 backing files, stripes of 8"), "{text}");
    assert!(text.contains("/t/a.txt: one backing file, on 1\n"), "{text}");
    assert!(text.contains("/t/sub: files that MPI-IO and forebay.h make in it: 4 backing files"), "{text}");
    // Files that other programs make in that directory still have one backing file.
    place.ok(["stage-in", "--pool", pool, &format!("{}:/t/sub/more", place.join("src/a.txt").display())]);
    assert_eq!(layout_of(&place, pool, "/t/sub/more").0, 1);
    place.ok(["layout", "migrate", "--pool", pool, "/t/new", "/t/a.txt"]);
    assert_eq!((layout_of(&place, pool, "/t/new").0, layout_of(&place, pool, "/t/a.txt").0), (1, 1));
    for (words, why) in [
        (vec!["layout", "set", "--stripe-count", "3", "/t/a.txt"], "settled when it is made"),
        (vec!["layout", "set", "--stripe-count", "0", "/t/x"], "1 to 256"),
        (vec!["layout", "set", "--stripe-count", "2", "--stripe-size", "5000", "/t/x"], "power of two"),
        (vec!["layout", "migrate", "/t/sub"], "has no data"),
        (vec!["layout", "migrate", "/t/none"], "no such name"),
        (vec!["layout", "get", "/t/none"], "no such name"),
    ] {
        let ran = Ran::of(place.command(words.iter().chain(&["--pool", pool])).output().unwrap());
        assert!(ran.code == Some(1) && ran.err.contains(why), "{words:?}: {ran:?}");
    }
    place.ok(["down", "--pool", pool]);
}

#[test]
fn ls_and_stat_above_the_root_say_that_it_is_the_root() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    for (verb, path) in [("ls", "/../etc"), ("ls", "t/../../etc"), ("stat", "/..")] {
        let ran = place.run([verb, "--pool", pool, path]);
        ran.assert_refused(1, &["`..` of the pool's root leads out of the pool", "hint: paths here begin"]);
        assert!(!ran.err.contains("symbolic link"), "{ran:?}");
    }
    assert_eq!(place.ok(["ls", "--pool", pool, "/t/../t/sub"]).out, "b.bin\n");
    let pair = format!("/../etc:{}", place.join("x").display());
    place.run(["stage-out", "--pool", pool, &pair]).assert_refused(1, &["`..` on the way leads out"]);
}

#[test]
fn stage_out_to_where_the_kernel_has_no_files_says_so() {
    let place = Place::new();
    let pool = filled(&place);
    for to in ["/proc/f", "/sys/f", "/proc/new/f"] {
        let ran = place.run(["stage-out", "--pool", pool.to_str().unwrap(), &format!("/t/a.txt:{to}")]);
        ran.assert_refused(1, &["cannot stage to", "the kernel's own", "another file system"]);
        assert!(!ran.err.contains("another program"), "{ran:?}");
    }
}

#[test]
fn stage_out_over_what_was_changed_later_says_so() {
    let place = Place::new();
    let pool = filled(&place);
    let pool = pool.to_str().unwrap();
    let store = place.join("src");
    let out = |more: &[&str]| {
        let mut words = vec!["stage-out", "--pool", pool];
        words.extend(more);
        let pair = format!("/t/:{}", store.display());
        words.push(&pair);
        place.ok(words)
    };
    let said = "a file was replaced by one with an older modification time";
    assert!(!out(&[]).err.contains(said), "nothing was changed");
    // Another job changes a file of the backing store, and this one stages out the older version that it staged in.
    for more in [&[][..], &["--all-or-nothing"][..]] {
        place.write("src/a.txt", "changed by another job");
        let ran = out(more);
        assert!(
            ran.err.contains("warning") && ran.err.contains(said) && ran.err.contains("a.txt"),
            "{ran:?}"
        );
        assert_eq!(std::fs::read(store.join("a.txt")).unwrap(), b"alpha");
    }
    // Newer results over older results need no warning.
    place.ok(["run", "--pool", pool, "--", "sh", "-c", "echo newer > /forebay/t/a.txt"]);
    assert!(!out(&[]).err.contains(said));
    assert_eq!(std::fs::read(store.join("a.txt")).unwrap(), b"newer\n");
}

#[test]
fn layout_set_and_migrate_print_json() {
    let place = Place::new();
    let pool = place.up("p");
    let pool = pool.to_str().unwrap();
    let json = |words: &[&str]| {
        let mut all = vec!["layout"];
        all.extend(words);
        all.extend(["--pool", pool, "--json"]);
        place.json(all)
    };
    let set = json(&["set", "-c", "3", "-S", "64KiB", "/striped"]);
    assert_eq!((set[0]["path"].as_str(), set[0]["kind"].as_str()), (Some("/striped"), Some("file")));
    assert_eq!((set[0]["layout"][0]["stripe_count"].as_u64()), Some(3), "{set}");
    assert_eq!(set, json(&["get", "/striped"]));
    let directory = json(&["set", "-c", "2", "/"]);
    assert_eq!(directory, json(&["get", "/"]));
    assert_eq!(directory[0]["layout"][0]["stripe_count"], 2);
    let migrated = json(&["migrate", "/striped"]);
    assert_eq!(migrated[0]["layout"][0]["stripe_count"], 1, "{migrated}");
    // An error in the command line is JSON too, and that of a path that fails is in its place.
    let ran = place.run(["layout", "set", "--pool", pool, "--json", "-c", "0", "/x"]);
    let error: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, error["error"]["code"].as_str()), (Some(1), Some("invalid")));
    let ran = place.run(["layout", "migrate", "--pool", pool, "--json", "/absent", "/striped"]);
    let rest: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, rest.as_array().unwrap().len()), (Some(1), 2), "{ran:?}");
    assert_eq!((&rest[0]["path"], &rest[0]["error"]["code"]), (&"/absent".into(), &"not-found".into()));
}
