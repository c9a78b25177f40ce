//! Other programs change files of the store while the pool renames, links or replaces them. The mover is stopped
//! meanwhile, so that it meets both at once.

use std::process::Command;

use super::bed::Bed;

/// What another program writes into the store.
const THEIRS: &str = "theirs, and longer\n";

/// A pool with some files that the store has, too.
fn bed() -> Bed {
    let bed = Bed::attached("256MiB", "", "");
    bed.sh("cd /forebay/s; mkdir d; echo a > a; echo b > b; echo e > d/e; ln -s a l");
    bed.wait_drained();
    // The mover, which will be stopped, would have to be asked about new names in a directory that is not listed.
    bed.sh("ls -R /forebay/s > $S/../listed");
    bed
}

/// Runs scripts on the pool and in the store while the mover does not, then waits until it has done what it can.
pub(crate) fn meet(bed: &Bed, in_pool: &str, in_store: &str) {
    let mover = bed.status()["mover"]["pid"].as_u64().unwrap().to_string();
    let signal =
        |signal: &str| assert!(Command::new("kill").args([signal, &mover]).status().unwrap().success());
    signal("-STOP");
    let done = bed.run(&format!("cd /forebay/s; {in_pool}; cd $S; {in_store}"));
    signal("-CONT");
    assert!(done.status.success(), "{}", super::bed::text(&done));
}

fn stored(bed: &Bed, name: &str) -> Option<String> {
    let found = bed.stored().into_iter().find(|(stored, _)| stored == name);
    found.map(|(_, bytes)| String::from_utf8_lossy(&bytes).into_owned())
}

/// The contents of what lies beside a file.
fn beside(bed: &Bed, name: &str) -> Vec<String> {
    let prefix = format!("{name}.forebay-conflict-");
    let all = bed.stored().into_iter().filter(|(stored, _)| stored.starts_with(&prefix));
    all.map(|(_, bytes)| String::from_utf8_lossy(&bytes).into_owned()).collect()
}

pub(crate) fn wait_conflicts(bed: &Bed, count: u64) {
    bed.wait("the conflicts are reported", || bed.sums()["conflicts"] == count);
}

#[test]
fn file_that_is_renamed_while_another_program_changes_it_is_in_the_store_twice() {
    let bed = bed();
    meet(&bed, "mv a renamed", &format!("printf '{THEIRS}' > a"));
    bed.wait_drained();
    assert_eq!(stored(&bed, "renamed").as_deref(), Some("a\n"), "{}", bed.log());
    assert_eq!(stored(&bed, "a").as_deref(), Some(THEIRS));
    // The old name is nothing of the pool's, until the store is read again.
    bed.sh("test ! -e /forebay/s/a");
    assert_eq!(bed.pool_verb(&["refresh", "/s"]).status.code(), Some(0));
    assert_eq!(bed.sh("cat /forebay/s/a /forebay/s/renamed"), format!("{THEIRS}a\n"));
    assert_eq!(bed.sums()["conflicts"], 0);
}

#[test]
fn file_that_is_written_and_renamed_while_another_program_changes_it_is_in_the_store_twice() {
    let bed = bed();
    meet(&bed, "echo more >> a; mv a d/renamed", &format!("printf '{THEIRS}' > a"));
    bed.wait_drained();
    assert_eq!(stored(&bed, "d/renamed").as_deref(), Some("a\nmore\n"), "{}", bed.log());
    assert_eq!(stored(&bed, "a").as_deref(), Some(THEIRS));
}

#[test]
fn file_that_is_renamed_while_another_program_removes_it_is_copied_from_the_pool() {
    let bed = bed();
    meet(&bed, "mv a renamed; mv l d/l", "rm a l");
    bed.wait_drained();
    assert_eq!(stored(&bed, "renamed").as_deref(), Some("a\n"), "{}", bed.log());
    assert_eq!(stored(&bed, "d/l@").as_deref(), Some("a"));
    assert_eq!(stored(&bed, "a"), None);
}

#[test]
fn released_file_that_is_renamed_while_another_program_changes_it_takes_the_change_along() {
    let bed = bed();
    assert_eq!(bed.pool_verb(&["release", "/s/a", "/s/b"]).status.code(), Some(0));
    meet(&bed, "mv a renamed; ln b second", &format!("printf '{THEIRS}' > a; printf 'their b\n' > b"));
    bed.wait_drained();
    assert_eq!(stored(&bed, "renamed").as_deref(), Some(THEIRS), "{}", bed.log());
    assert_eq!(stored(&bed, "a"), None);
    assert_eq!(bed.sh("cat /forebay/s/renamed /forebay/s/b"), format!("{THEIRS}their b\n"));
    assert_eq!(bed.sh("cmp $S/b $S/second; stat -c %h $S/b"), "2\n");
}

#[test]
fn released_files_that_change_places_while_another_program_changes_one_take_the_change_along() {
    let bed = bed();
    assert_eq!(bed.pool_verb(&["release", "/s/a", "/s/b"]).status.code(), Some(0));
    meet(&bed, "mv b c; mv a b; mv c a", &format!("printf '{THEIRS}' > b"));
    bed.wait_drained();
    assert_eq!(stored(&bed, "a").as_deref(), Some(THEIRS), "{}", bed.log());
    assert_eq!(stored(&bed, "b").as_deref(), Some("a\n"));
    assert_eq!(bed.sh("cat /forebay/s/a /forebay/s/b"), format!("{THEIRS}a\n"));
}

#[test]
fn file_that_gets_another_name_while_another_program_changes_it_is_copied_under_that_name() {
    let bed = bed();
    meet(&bed, "ln a second", &format!("printf '{THEIRS}' > a"));
    // The mover may link it to the other program's version first, which it then finds out.
    bed.wait("the second name is in the store", || stored(&bed, "second").as_deref() == Some("a\n"));
    assert_eq!(stored(&bed, "a").as_deref(), Some(THEIRS));
}

#[test]
fn files_that_change_places_while_another_program_changes_one_lose_nothing() {
    let bed = bed();
    let change = "mv b c; mv a b; echo new >> b; mv c a";
    meet(&bed, change, &format!("printf '{THEIRS}' > b"));
    wait_conflicts(&bed, 1);
    // The pool has at b what a was, with more data; at a what b was.
    bed.wait("the pool's version is beside the store's", || !beside(&bed, "b").is_empty());
    assert_eq!(beside(&bed, "b"), ["a\nnew\n"], "{}", bed.log());
    assert_eq!(stored(&bed, "b").as_deref(), Some(THEIRS));
    assert_eq!(bed.sh("cat /forebay/s/a /forebay/s/b"), "b\na\nnew\n");
    let done = bed.pool_verb(&["resolve", "/s/b", "--keep", "pool"]);
    assert!(done.status.success(), "{}", super::bed::text(&done));
    bed.wait_drained();
    assert_eq!(stored(&bed, "b").as_deref(), Some("a\nnew\n"), "{}", bed.log());
    assert_eq!(stored(&bed, "a").as_deref(), Some("b\n"), "{}", bed.log());
}

#[test]
fn file_that_is_written_in_pool_and_store_is_in_the_store_twice() {
    let bed = bed();
    meet(
        &bed,
        "echo mine > a; echo mine > fresh",
        &format!("printf '{THEIRS}' > a; printf '{THEIRS}' > fresh"),
    );
    wait_conflicts(&bed, 2);
    for name in ["a", "fresh"] {
        assert_eq!(stored(&bed, name).as_deref(), Some(THEIRS));
        bed.wait("the pool's version is beside the store's", || !beside(&bed, name).is_empty());
        assert_eq!(beside(&bed, name), ["mine\n"], "{}", bed.log());
    }
}
