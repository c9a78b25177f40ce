//! The suite through every door, each in a pool of its own. Most of these pools are small, so that cases can fill them.

use forebay_conformance::harness::{is_root, not_me, Scratch, TestPool};

const CAPACITY_MIB: u64 = 128;

/// Claims the abilities of a pool: every door must pass the cases that need them.
fn claims() -> Vec<&'static str> {
    ["xattrs", "large-xattrs", "own-space", "small-space"].into_iter().flat_map(|c| ["--claim", c]).collect()
}

/// Checks a pool after a run of the suite: fsck is clean, and the worker did not restart.
fn sound(pool: &TestPool) {
    let report = pool.fsck();
    assert_eq!(report["clean"], true, "{report:#}");
    assert_eq!(
        pool.status()["restarts"],
        0,
        "the daemon's worker crashed: see {}/log",
        pool.directory().display()
    );
}

#[test]
fn client_door_keeps_every_promise() {
    let pool = TestPool::up(CAPACITY_MIB);
    let summary = pool.suite_by_client(&claims());
    summary.passed_but_for(&[not_me(), "Outside", "DirectoryDescriptors"]);
    sound(&pool);
}

/// Large enough that clients use late removal of backing files.
const ROOMY_MIB: u64 = 4096;

#[test]
fn client_and_preload_doors_of_a_pool_with_much_room_keep_every_promise() {
    let claims = ["--claim", "xattrs", "--claim", "large-xattrs", "--claim", "own-space"];
    let pool = TestPool::up(ROOMY_MIB);
    let summary = pool.suite_by_client(&claims);
    summary.passed_but_for(&[not_me(), "Outside", "DirectoryDescriptors", "SmallSpace"]);
    sound(&pool);
    let pool = TestPool::up(ROOMY_MIB);
    let summary = pool.suite_by_run(&[&["--root", "/forebay"], &claims[..]].concat());
    summary.passed_but_for(&[not_me(), "SmallSpace"]);
    sound(&pool);
}

fn preload_door(spelling: &str) {
    let pool = TestPool::up(CAPACITY_MIB);
    let summary =
        pool.suite_by_run(&[&["--root", "/forebay", "--spelling", spelling], &claims()[..]].concat());
    summary.passed_but_for(&[not_me()]);
    sound(&pool);
}

#[test]
fn preload_door_with_absolute_paths_keeps_every_promise() {
    preload_door("absolute");
}

#[test]
fn preload_door_with_relative_paths_keeps_every_promise() {
    preload_door("relative");
}

#[test]
fn preload_door_with_directory_descriptors_keeps_every_promise() {
    preload_door("at");
}

#[test]
fn preload_door_of_another_user_keeps_every_promise() {
    if !is_root() {
        eprintln!("not root: the tests above are of another user");
        return;
    }
    let place = Scratch::on_disk();
    let pool = TestPool::up_as(65_534, &place, CAPACITY_MIB);
    let summary = pool.suite_by_run(&[&["--root", "/forebay"], &claims()[..]].concat());
    summary.passed_but_for(&["Root"]);
    sound(&pool);
    drop(pool);
}

fn mount_door(spelling: &str) {
    let pool = TestPool::up(CAPACITY_MIB);
    let Some(at) = pool.mount() else { return };
    let summary = pool.suite_at(&at, &[&["--spelling", spelling], &claims()[..]].concat());
    summary.passed_but_for(&[not_me()]);
    sound(&pool);
}

#[test]
fn mount_door_with_absolute_paths_keeps_every_promise() {
    mount_door("absolute");
}

#[test]
fn mount_door_with_relative_paths_keeps_every_promise() {
    mount_door("relative");
}

#[test]
fn mount_door_with_directory_descriptors_keeps_every_promise() {
    mount_door("at");
}

#[test]
fn mount_door_of_another_user_keeps_every_promise() {
    let pool = TestPool::up(CAPACITY_MIB);
    let Some(at) = pool.mount().filter(|_| is_root()) else { return };
    for theirs in [&at, at.parent().unwrap()] {
        std::os::unix::fs::chown(theirs, Some(65_534), Some(65_534)).unwrap();
    }
    let summary = pool.suite_at(&at, &[&["--user", "65534"], &claims()[..]].concat());
    summary.passed_but_for(&["Root"]);
    sound(&pool);
}

/// Runs the suite with changes through one door and reads through the other. Cases that fill the pool run through
/// single doors only.
fn pair(changes: &str, looks: &str, pool: &TestPool) {
    let claims = ["--claim", "xattrs", "--claim", "large-xattrs"];
    let summary = pool.suite_by_run(&[&["--root", changes, "--looks-at", looks], &claims[..]].concat());
    summary.passed_but_for(&[not_me(), "OwnSpace", "SmallSpace", "OneDoor"]);
    sound(pool);
}

#[test]
fn what_the_mount_changes_the_preloaded_see_at_once() {
    let pool = TestPool::up(CAPACITY_MIB);
    let Some(at) = pool.mount() else { return };
    pair(at.to_str().unwrap(), "/forebay", &pool);
}

#[test]
fn what_the_preloaded_change_the_mount_sees_at_once() {
    let pool = TestPool::up(CAPACITY_MIB);
    let Some(at) = pool.mount() else { return };
    pair("/forebay", at.to_str().unwrap(), &pool);
}
