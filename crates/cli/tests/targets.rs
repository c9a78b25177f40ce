//! A node with several targets: their errors, and files of a pool that has only this node.

mod common;

use std::path::{Path, PathBuf};

use common::{Place, Ran};

/// A pool file of one node with these targets: directory in the place, and medium.
fn pool_file(place: &Place, name: &str, targets: &[(&Path, &str)]) -> PathBuf {
    let list: Vec<String> = targets
        .iter()
        .map(|(path, media)| {
            format!("{{ media = \"{media}\", path = \"{}\", capacity = \"64MiB\" }}", path.display())
        })
        .collect();
    let (a, b) = (std::process::id() / 251 % 251, std::process::id() % 251);
    let text = format!(
        "[[node]]\nname = \"alone\"\nhost = \"127.{a}.{b}.1\"\nport = {}\ntarget = [{}]\n",
        7850 + name.len(),
        list.join(", ")
    );
    place.write(&format!("{name}.toml"), text)
}

fn up(place: &Place, file: &Path) -> Ran {
    place.run(["up", "--pool", file.to_str().unwrap()])
}

#[test]
fn node_that_is_up_stays_up_when_its_store_cannot_be_attached() {
    let place = Place::new();
    let pool = place.join("first");
    let file = pool_file(&place, "node", &[(&pool, "ssd")]);
    let file = file.to_str().unwrap();
    place.ok(["up", "--pool", file]);
    let sh = |script: &str| place.ok(["run", "--quiet", "--pool", file, "--", "sh", "-c", script]).out;
    sh("echo kept >/forebay/f");
    place.write("store/f", "in the store\n");
    let resources = place.write("r.toml", "[[directories]]\nat = \"/d\"\nurl = \"/nowhere/at/all\"\n");
    let store = place.join("store");
    for (option, value) in [("--backing", &store), ("--resources", &resources)] {
        let ran = place.run(["up", "--pool", file, option, value.to_str().unwrap()]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_eq!(sh("cat /forebay/f"), "kept\n", "it runs on");
    }
    place.ok(["down", "--pool", file]);
}

#[test]
fn target_that_cannot_be_had_is_named_with_what_to_do_and_nothing_is_left() {
    let place = Place::new();
    let (first, second) = (place.join("first"), place.join("second"));
    let far = place.join("nvme/target");
    let missing = pool_file(&place, "missing", &[(&first, "ssd"), (&second, "ssd"), (&far, "ssd")]);
    let why = format!("there is no directory {}", place.join("nvme").display());
    up(&place, &missing)
        .assert_refused(1, &["cannot use target 2 of node alone", &why, "is its medium mounted"]);
    assert!(!first.exists() && !second.exists(), "what was made before it is left");
    // A directory with other files, a pool's directory, and another pool's target.
    place.write("full/letter", "precious");
    let full = pool_file(&place, "full", &[(&first, "ssd"), (&place.join("full"), "ssd")]);
    up(&place, &full).assert_refused(1, &["target 1 of node alone", "other files (letter)"]);
    let other = place.up("other");
    let pool = pool_file(&place, "pool", &[(&first, "ssd"), (&other, "ssd")]);
    up(&place, &pool).assert_refused(1, &["target 1 of node alone", "pool.json", "a pool"]);
    let good = pool_file(&place, "good", &[(&first, "ssd"), (&second, "ssd")]);
    place.ok(["up", "--pool", good.to_str().unwrap()]);
    let third = place.join("third");
    let taken = pool_file(&place, "taken", &[(&third, "ssd"), (&second, "ssd")]);
    up(&place, &taken).assert_refused(1, &["target 1 of node alone", "a running pool uses it"]);
    place.run(["up", "--path", second.to_str().unwrap()]).assert_refused(1, &["already up"]);
    // One directory under two names.
    std::os::unix::fs::symlink(&second, place.join("link")).unwrap();
    let fourth = place.join("fourth");
    place.ok(["--pool", first.to_str().unwrap(), "run", "--quiet", "sh", "-c", "echo x > /forebay/x"]);
    place.ok(["down", "--pool", first.to_str().unwrap()]);
    up(&place, &taken)
        .assert_refused(1, &["target 1 of node alone", "its target 1", first.to_str().unwrap()]);
    place
        .run(["up", "--path", second.to_str().unwrap()])
        .assert_refused(1, &["it is target 1 of the pool at"]);
    assert!(!third.exists());
    std::fs::remove_dir_all(&second).unwrap();
    up(&place, &good).assert_refused(1, &["target 1 of node alone", "its data is gone", "--renumber"]);
    assert!(!second.exists(), "a directory was made for what is refused");
    std::fs::create_dir(&second).unwrap();
    let twice =
        pool_file(&place, "twice", &[(&fourth, "ssd"), (&second, "ssd"), (&place.join("link"), "ssd")]);
    up(&place, &twice).assert_refused(1, &["target 2 of node alone", "listed twice"]);
    // More than the memory holds.
    let huge = format!("{}", 1u64 << 50);
    let text = std::fs::read_to_string(&twice).unwrap().replacen("64MiB", &huge, 3).replace("ssd", "dram");
    let huge = place.write("huge.toml", text);
    up(&place, &huge).assert_refused(1, &["1", "asked for"]);
}

#[test]
fn pool_of_one_node_uses_its_targets_in_their_order_and_copies_between_them() {
    let place = Place::new();
    let (first, second) = (place.join("a"), place.join("b"));
    let file = pool_file(&place, "one", &[(&first, "dram"), (&second, "dram")]);
    place.ok(["up", "--pool", file.to_str().unwrap()]);
    let pool = first.to_str().unwrap();
    let tell = |script: &str| place.ok(["--pool", pool, "run", "--quiet", "bash", "-c", script]).out;
    let status = place.json(["status", "--json", "--pool", pool]);
    assert_eq!(status["targets"].as_array().unwrap().len(), 2, "{status}");
    assert_eq!(status["capacity_bytes"], 2 * (64 << 20));
    let on = |path: &str| {
        let said = place.json(["--pool", pool, "layout", "get", "--json", path]);
        let targets = said[0]["layout"][0]["targets"].as_array().unwrap().clone();
        targets.iter().map(|t| t["target"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    tell("mkdir /forebay/d /forebay/e; echo a > /forebay/d/a");
    assert_eq!(on("/d/a"), [0]);
    // Stripes over both targets, which an open for a descriptor converts to one backing file.
    place.ok(["--pool", pool, "layout", "set", "-c", "4", "-S", "4KiB", "/d/s"]);
    assert_eq!(on("/d/s"), [0, 1]);
    tell("seq 10000 > /forebay/d/s; seq 10000 | cmp - /forebay/d/s");
    assert_eq!(on("/d/s"), [0]);
    place.ok(["--pool", pool, "layout", "set", "-t", "alone:1", "/e"]);
    tell("echo there > /forebay/e/f; cat /forebay/e/f; mv /forebay/e/f /forebay/d/f");
    assert_eq!(on("/d/f"), [1]);
    // The first target is filled: files made now, and files copied into one backing file now, are on the second.
    tell("head -c 64M /dev/zero > /forebay/full 2> /dev/null; truncate -s -3M /forebay/full; echo late > /forebay/late");
    place.ok(["--pool", pool, "layout", "set", "-c", "2", "-S", "4KiB", "/d/t"]);
    tell("seq 5000 > /forebay/d/t; seq 5000 | cmp - /forebay/d/t; cat /forebay/late /forebay/d/f /forebay/d/a > /forebay/d/all");
    assert_eq!((on("/late"), on("/d/t"), on("/d/all")), (vec![1], vec![1], vec![1]));
    assert_eq!(tell("cat /forebay/d/all; rm /forebay/full; echo x > /forebay/y"), "late\nthere\na\n");
    assert_eq!(on("/y"), [0]);
    place.ok(["fsck", "--pool", pool]);
    place.ok(["down", "--keep", "--pool", pool]);
    place.ok(["fsck", "--pool", pool]);
    place.ok(["up", "--pool", file.to_str().unwrap()]);
    assert_eq!(tell("cat /forebay/d/all"), "late\nthere\na\n");
    place.run(["up", "--pool", pool]).assert_refused(1, &["already up"]);
    place.ok(["down", "--pool", pool]);
    assert!(!first.exists() && !second.exists(), "its targets are left");
}
