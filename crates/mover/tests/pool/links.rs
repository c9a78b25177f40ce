//! Files of which the store has several names before the pool sees any of them.

use super::bed::{text, Bed};

/// A store with one file of two names, `a` and `d/b`, in front of which the pool stands.
fn bed() -> Bed {
    let bed = Bed::new("256MiB");
    let store = bed.store();
    std::fs::create_dir(store.join("d")).unwrap();
    std::fs::write(store.join("a"), "old\n").unwrap();
    std::fs::hard_link(store.join("a"), store.join("d/b")).unwrap();
    bed.attach("", "");
    bed
}

/// Both names lead to one file of the store.
fn assert_linked(bed: &Bed) {
    let number = |name: &str| bed.sh(&format!("stat -c '%i %h' $S/{name}"));
    assert_eq!(number("a"), number("d/b"), "{}", bed.log());
    assert!(number("a").ends_with(" 2\n"), "{}", number("a"));
}

fn release(bed: &Bed) {
    let done = bed.pool_verb(&["release", "/s/a", "/s/d/b"]);
    assert!(done.status.success(), "{}", text(&done));
}

fn refresh(bed: &Bed) {
    let done = bed.pool_verb(&["refresh", "-r", "/s"]);
    assert!(done.status.success(), "{}", text(&done));
}

#[test]
fn names_of_one_file_in_the_store_are_names_of_one_file_in_the_pool() {
    let bed = bed();
    bed.sh("ls -R /forebay/s");
    let number = |name: &str| bed.sh(&format!("stat -c '%i %h' /forebay/s/{name}"));
    assert_eq!(number("a"), number("d/b"));
    assert!(number("a").ends_with(" 2\n"), "{}", number("a"));
    assert_eq!(bed.sh("cd /forebay/s; cat a; echo new >> a; cat d/b; chmod 640 d/b"), "old\nold\nnew\n");
    bed.wait_drained();
    assert_eq!(bed.sh("cat $S/d/b; stat -c %a $S/a"), "old\nnew\n640\n");
    assert_linked(&bed);
    // Attributes alone: nothing is linked anew.
    let before = bed.sh("stat -c %i $S/a");
    bed.sh("chmod 600 /forebay/s/a; touch -h -d 2001-02-03 /forebay/s/d/b");
    bed.wait_drained();
    assert_linked(&bed);
    assert_eq!(bed.sh("stat -c '%i' $S/d/b; stat -c '%a %Y' $S/d/b"), format!("{before}600 981158400\n"));
    bed.sh("rm /forebay/s/a; mv /forebay/s/d/b /forebay/s/c");
    bed.wait_drained();
    assert_eq!(bed.sh("cat $S/c; stat -c %h $S/c"), "old\nnew\n1\n");
    assert!(bed.stored().iter().map(|(name, _)| name.as_str()).eq(["c", "d/"]), "{:?}", bed.stored());
}

#[test]
fn name_that_is_listed_after_its_file_was_written_leads_to_the_new_data() {
    let bed = bed();
    bed.sh("ls /forebay/s; echo new > /forebay/s/a");
    bed.wait_drained();
    // The pool does not know of the other name yet.
    assert_eq!(bed.sh("cat $S/a $S/d/b"), "new\nold\n");
    assert_eq!(bed.sh("cat /forebay/s/d/b"), "new\n");
    bed.wait_drained();
    assert_linked(&bed);
    assert_eq!(bed.sh("cat $S/d/b"), "new\n");
}

#[test]
fn name_that_another_program_replaces_leaves_the_file_and_the_others_keep_it() {
    for (name, other) in [("a", "d/b"), ("d/b", "a")] {
        let bed = bed();
        bed.sh("ls -R /forebay/s; cat /forebay/s/a");
        release(&bed);
        // As rsync, tar and editors do.
        bed.sh(&format!("printf 'theirs\\n' > $S/new; mv $S/new $S/{name}"));
        refresh(&bed);
        assert_eq!(bed.sh(&format!("cat /forebay/s/{name} /forebay/s/{other}")), "theirs\nold\n");
        bed.sh(&format!("echo mine >> /forebay/s/{other}"));
        bed.wait_drained();
        assert_eq!(bed.sh(&format!("cat $S/{name} $S/{other}")), "theirs\nold\nmine\n", "{}", bed.log());
        assert_eq!(bed.sums()["conflicts"], 0);
    }
}

#[test]
fn name_that_another_program_replaces_is_met_by_the_next_reader_of_another_name() {
    let bed = bed();
    bed.sh("ls -R /forebay/s; cat /forebay/s/a");
    release(&bed);
    bed.sh("printf 'theirs\\n' > $S/new; mv $S/new $S/a");
    assert_eq!(bed.sh("cat /forebay/s/d/b"), "old\n", "{}", bed.log());
    assert_eq!(bed.sh("cat /forebay/s/a"), "theirs\n", "{}", bed.log());
    bed.wait_drained();
    assert_eq!(bed.sh("cat $S/a $S/d/b"), "theirs\nold\n");
}

#[test]
fn name_that_is_not_known_yet_keeps_its_data_when_another_program_replaces_the_known_one() {
    let bed = bed();
    bed.sh("ls /forebay/s; cat /forebay/s/a");
    let done = bed.pool_verb(&["release", "/s/a"]);
    assert!(done.status.success(), "{}", text(&done));
    bed.sh("printf 'theirs\\n' > $S/new; mv $S/new $S/a");
    assert_eq!(bed.sh("cd /forebay/s; cat a d/b"), "theirs\nold\n", "{}", bed.log());
    bed.wait_drained();
    assert_eq!(bed.sh("cat $S/a $S/d/b"), "theirs\nold\n");
}

#[test]
fn file_that_another_program_writes_in_place_has_the_new_data_under_all_names() {
    let bed = bed();
    bed.sh("ls -R /forebay/s; cat /forebay/s/a");
    release(&bed);
    bed.sh("echo theirs >> $S/d/b");
    assert_eq!(bed.sh("cat /forebay/s/d/b /forebay/s/a"), "old\ntheirs\nold\ntheirs\n", "{}", bed.log());
    bed.wait_drained();
    assert_linked(&bed);
    assert_eq!(bed.sums()["conflicts"], 0);
}

#[test]
fn file_that_is_replaced_in_the_store_under_one_name_and_written_in_the_pool_is_beside_it() {
    let bed = bed();
    bed.sh("ls -R /forebay/s; cat /forebay/s/a");
    bed.sh("printf 'theirs\\n' > $S/new; mv $S/new $S/a; echo mine >> /forebay/s/d/b");
    bed.wait("the conflict is reported", || bed.sums()["conflicts"] == 1);
    bed.wait("the other name has the pool's data", || bed.sh("cat $S/d/b") == "old\nmine\n");
    assert_eq!(bed.sh("cat $S/a"), "theirs\n");
    let done = bed.pool_verb(&["resolve", "/s/a", "--keep", "pool"]);
    assert!(done.status.success(), "{}", text(&done));
    bed.wait_drained();
    assert_eq!(bed.sh("cat $S/a"), "old\nmine\n");
    assert_linked(&bed);
}
