//! Input that is refused, and stores that fail: each with what to do, and without a change.

use std::path::PathBuf;

use crate::bed::{backing_files, Bed};
use crate::common::{is_root, Place};

#[test]
fn directory_that_is_no_pool_is_refused() {
    let place = Place::new();
    std::fs::create_dir(place.join("empty")).unwrap();
    place
        .run(["recover", place.join("empty").to_str().unwrap()])
        .assert_refused(1, &["no pool's directory and no target", "hint"]);
    place.run(["recover", "/nowhere/at/all"]).assert_refused(1, &["/nowhere/at/all", "hint"]);
    let file = place.write("file", "x");
    place.run(["recover", file.to_str().unwrap()]).assert_refused(1, &["not a directory"]);
    let memory = place.up("memory");
    place.ok(["down", "--keep", "--pool", memory.to_str().unwrap()]);
    place.write("memory/pool.json", "{ torn");
    place.run(["recover", memory.to_str().unwrap()]).assert_refused(1, &["pool.json"]);
}

#[test]
fn living_pool_is_refused() {
    let bed = Bed::new(&[]);
    bed.recover(&[]).assert_refused(1, &["the pool is up", "forebay down"]);
    bed.sh("echo x >/forebay/x"); // it lives on
}

#[test]
fn pools_that_do_not_belong_together_are_refused() {
    let (one, other) = (Bed::new(&[]), Bed::new(&[]));
    one.die();
    other.die();
    one.recover(&[other.pool.to_str().unwrap()])
        .assert_refused(1, &["of another pool", "one pool after the other"]);
}

#[test]
fn marks_that_are_damaged_or_of_another_pool_are_not_used() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; echo 1 >one; echo 2 >two; sync one; sync two");
    bed.die();
    bed.lose_shard();
    let files = backing_files(&bed.pool);
    assert_eq!(files.len(), 2);
    let mut mark = vec![0; 4000];
    let n = rustix::fs::getxattr(&files[0], "user.forebay.mark", &mut mark[..]).unwrap();
    mark.truncate(n);
    // Of another inode, and with one bit changed.
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&files[1], "user.forebay.mark", &mark, flags).unwrap();
    mark[n - 20] ^= 4;
    rustix::fs::setxattr(&files[0], "user.forebay.mark", &mark, flags).unwrap();
    let report = bed.recovered(&[]);
    assert!(report["notes"].to_string().contains("2 marks of backing files cannot be read"), "{report}");
    assert_eq!(report["sums"]["unnamed"]["files"], 2, "{report}");
    assert!(bed.names().is_empty());
    // A target of a pool that is not named.
    let identity = bed.pool.join("pool.json");
    let text = std::fs::read_to_string(&identity).unwrap();
    let uuid = text.split('"').find(|word| word.len() >= 32 && !word.contains(' ')).unwrap().to_owned();
    let other: String = uuid.chars().rev().collect();
    std::fs::write(&identity, text.replace(&uuid, &other)).unwrap();
    assert!(bed.recovered(&["--list"])["sums"]["unnamed"]["files"] == 2);
}

#[test]
fn store_that_is_missing_fails_every_file_and_can_be_replaced() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; echo 1 >one; sync one");
    bed.die();
    let away = bed.place.join("away");
    std::fs::rename(&bed.store, &away).unwrap();
    let ran = bed.recover(&[]);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(
        ran.err.contains("cannot open the store") && ran.err.contains("mount its file system"),
        "{ran:?}"
    );
    bed.recover(&["--discard"]).assert_refused(1, &["the targets are not removed"]);
    std::fs::rename(&away, &bed.store).unwrap();
    let listed = bed.recovered(&["--list"]);
    assert_eq!(listed["sums"]["dirty"]["files"], 1, "{listed}");
    let dry = bed.recovered(&["--dry-run"]);
    assert_eq!(dry["sums"]["recovered"]["files"], 1, "{dry}");
    assert!(bed.names().is_empty(), "nothing is written yet");
    assert_eq!(bed.recovered(&[])["complete"], true);
    assert_eq!(bed.stored("one").as_deref(), Some("1\n"));
}

#[test]
fn store_that_is_not_mounted_gets_nothing_in_its_place() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; echo 1 >one; sync one");
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    let away = bed.place.join("away");
    std::fs::rename(&bed.store, &away).unwrap();
    std::fs::create_dir(&bed.store).unwrap();
    let ran = bed.recover(&[]);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(ran.err.contains("not the one that was attached") && ran.err.contains("--replaced"), "{ran:?}");
    bed.recover(&["--discard"]).assert_refused(1, &["the targets are not removed"]);
    assert!(bed.names().is_empty(), "{:?}", bed.names());
    // It was made anew.
    assert_eq!(bed.recovered(&["--replaced"])["complete"], true);
    assert_eq!(bed.stored("one").as_deref(), Some("1\n"));
    std::fs::remove_dir_all(&bed.store).unwrap();
    std::fs::rename(&away, &bed.store).unwrap();
    assert_eq!(bed.recovered(&[])["complete"], true);
    assert_eq!(bed.stored("one").as_deref(), Some("1\n"));
}

#[test]
fn path_that_leaves_the_store_and_something_in_the_way_are_failures_of_those_files() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; mkdir d; echo 1 >d/one; echo 2 >two");
    bed.die();
    // Meanwhile something else has the names.
    std::fs::write(bed.store.join("d"), "a file").unwrap();
    std::os::unix::fs::symlink("/etc", bed.store.join("two")).unwrap();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], false, "{report}");
    let names: Vec<_> = bed.names().into_iter().collect();
    assert!(names.iter().any(|name| name.starts_with("two.forebay-recovered-")), "{names:?}");
    assert_eq!(bed.stored("d").as_deref(), Some("a file"));
    std::fs::remove_file(bed.store.join("d")).unwrap();
    assert_eq!(bed.recovered(&[])["complete"], true);
    assert_eq!(bed.stored("d/one").as_deref(), Some("1\n"));
}

/// A small file system as store, until it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Small {
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "small"])
            .arg(&at)
            .status()
            .unwrap();
        assert!(status.success());
        Small(at)
    }

    fn remount(&self, options: &str) {
        let status = std::process::Command::new("mount").args(["-o", options]).arg(&self.0).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn store_that_is_full_or_read_only_gets_what_fits_and_the_rest_later() {
    if !is_root() {
        return eprintln!("skipped: only root may mount");
    }
    let bed = Bed::without_store();
    let small = Small::mount(bed.store.clone());
    bed.ok(&["attach", bed.store.to_str().unwrap(), "/", "--drain", "request"]);
    bed.sh("cd /forebay; head -c 100000 /dev/zero | tr '\\0' a >a; head -c 400000 /dev/zero | tr '\\0' b >b");
    bed.die();
    small.remount("remount,ro");
    let ran = bed.recover(&[]);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(ran.err.contains("ead-only"), "{ran:?}");
    small.remount("remount,rw");
    let ran = bed.recover(&[]);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(ran.err.contains("No space left"), "{ran:?}");
    assert_eq!(bed.names(), ["a".to_owned()].into(), "no torn file, no temporary");
    small.remount("remount,size=4m");
    assert_eq!(bed.recovered(&[])["complete"], true);
    assert_eq!(bed.stored("b").map(|b| b.len()), Some(400_000));
}
