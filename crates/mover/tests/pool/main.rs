//! A pool in front of a store: names and data seen through it, drained, restored and released.
//!
//! Programs use the pool through the preload library, the store is a directory. A test starts its own pool.

mod bed;
mod chains;
mod created;
mod day;
mod distant;
mod durable;
mod foreign;
#[path = "../killing/mod.rs"]
mod killing;
mod kills;
mod links;
mod lookups;
mod policies;
mod races;
mod replaced;
mod resolving;
mod s3;
#[allow(dead_code)] // Shared with the tests of stores.
#[path = "../stores/s3_server.rs"]
mod s3_server;
mod sharing;
mod taking_over;

use bed::Bed;

#[test]
fn files_of_the_store_are_seen_and_read_through_the_pool() {
    let bed = Bed::new("256MiB");
    let store = bed.store();
    std::fs::create_dir_all(store.join("case/deep")).unwrap();
    std::fs::write(store.join("case/a"), "hello\n").unwrap();
    let big: Vec<u8> = (0..20_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    std::fs::write(store.join("case/big"), &big).unwrap();
    std::fs::write(store.join("case/deep/x"), "x").unwrap();
    std::os::unix::fs::symlink("a", store.join("case/link")).unwrap();
    bed.attach("", "");
    assert_eq!(
        bed.sh("ls -R /forebay/s"),
        "/forebay/s:\ncase\n\n/forebay/s/case:\na\nbig\ndeep\nlink\n\n/forebay/s/case/deep:\nx\n"
    );
    assert_eq!(bed.sh("stat -c '%s %Y' /forebay/s/case/big"), bed.sh("stat -c '%s %Y' $S/case/big"));
    assert_eq!(bed.sh("cat /forebay/s/case/link; readlink /forebay/s/case/link"), "hello\na\n");
    bed.sh("cmp /forebay/s/case/big $S/case/big");
    assert_eq!(bed.sh("stat -c '%s %Y' /forebay/s/case/big"), bed.sh("stat -c '%s %Y' $S/case/big"));
}

#[test]
fn what_programs_write_reaches_the_store() {
    let bed = Bed::attached("256MiB", "", "");
    bed.sh("cd /forebay/s; mkdir -p out/sub; echo one > out/one; echo two > out/sub/two; ln -s one out/l;
        dd if=/dev/urandom of=out/big bs=1M count=20 2>/dev/null; chmod 640 out/one; touch -d 2001-02-03 out/sub/two");
    bed.wait_drained();
    bed.sh("cmp /forebay/s/out/big $S/out/big; cmp /forebay/s/out/one $S/out/one");
    assert_eq!(
        bed.sh("stat -c %a $S/out/one; stat -c %Y $S/out/sub/two; readlink $S/out/l"),
        "640\n981158400\none\n"
    );
    // Renames, removals, hard links, rewriting.
    bed.sh("cd /forebay/s; mv out final; rm final/one; ln final/big final/second; echo new > final/sub/two; mkdir final/e;
        rmdir final/e; mv final/l final/sub/l2");
    bed.wait_drained();
    let names: Vec<_> = bed.stored().into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["final/", "final/big", "final/second", "final/sub/", "final/sub/l2@", "final/sub/two"]
    );
    assert_eq!(bed.sh("stat -c %h $S/final/big; cat $S/final/sub/two"), "2\nnew\n");
}

#[test]
fn name_of_a_removed_directory_gets_what_was_in_that() {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--drain", "request"]);
    bed.sh("cd /forebay/s; mkdir d e; mkdir -p n/m/o; echo d > d/old; echo e > e/f; echo deep > n/m/o/f");
    assert_eq!(bed.pool_verb(&["sync", "-r", "/s"]).status.code(), Some(0));
    // A new directory of the same name, a file of it, and one that lay two levels below.
    bed.sh("cd /forebay/s; mv d/old x; rmdir d; mkdir d; mv x d/new; echo more > d/more; mv e/f y; rmdir e; mv y e;
        mv n/m/o q; rm -r n; mkdir n; mv q n/m");
    let synced = bed.pool_verb(&["sync", "-r", "/s"]);
    assert_eq!(synced.status.code(), Some(0), "{}", bed::text(&synced));
    let names: Vec<_> = bed.stored().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["d/", "d/more", "d/new", "e", "n/", "n/m/", "n/m/f"]);
    assert_eq!(bed.sh("cd $S; cat d/new d/more e n/m/f"), "d\nmore\ne\ndeep\n");
}

#[test]
fn a_released_file_is_restored_by_the_next_reader_and_writer() {
    let bed = Bed::attached("256MiB", "", "");
    bed.sh("cd /forebay/s; head -c 3000000 /dev/urandom > f; cp f $S/../copy");
    bed.wait_drained();
    let pool = bed.attach_client();
    let released = |name: &str| !bed::entry(pool, name).unwrap().attr.is_resident();
    let release = || {
        let mut mover = forebay_tasks::MoverClient::connect(&bed.pool()).unwrap();
        let ino = bed::entry(pool, "s/f").unwrap().attr.ino.0;
        let task = mover.start(forebay_tasks::Verb::Release, ino, "/s/f", false).unwrap();
        mover.wait(task.id, |_| true).unwrap()
    };
    let task = release();
    assert_eq!(task.state, forebay_tasks::TaskState::Done, "{task:?}");
    assert!(released("s/f"));
    assert_eq!(bed.sh("stat -c '%s %Y' /forebay/s/f"), bed.sh("stat -c '%s %Y' $S/f"));
    assert!(released("s/f"), "stat restores nothing");
    bed.sh("cmp /forebay/s/f $S/../copy");
    assert!(!released("s/f"));
    release();
    assert!(released("s/f"));
    bed.sh("printf X | dd of=/forebay/s/f bs=1 seek=100 conv=notrunc 2>/dev/null; truncate -s 2999999 /forebay/s/f");
    bed.wait_drained();
    bed.sh(
        "printf X | dd of=$S/../copy bs=1 seek=100 conv=notrunc 2>/dev/null; truncate -s 2999999 $S/../copy;
        cmp $S/f $S/../copy",
    );
}

#[test]
fn a_file_that_is_written_all_the_time_is_never_torn_in_the_store() {
    let bed = Bed::attached("256MiB", "?rate=20MB/s", "");
    // Each version is 2 MB of one letter, written whole with one open.
    bed.sh("cd /forebay/s; for i in 1 2 3 4 5 6 7 8 9; do head -c 2000000 /dev/zero | tr '\\0' $i > f; sleep 0.15;
        if cp $S/f $S/../v 2>/dev/null; then tr -d $(head -c 1 $S/../v) < $S/../v | wc -c; fi; done | sort -u > /tmp/torn.$$;
        test \"$(cat /tmp/torn.$$ | tr -d '\\n')\" = 0 -o ! -s /tmp/torn.$$; rm /tmp/torn.$$");
    bed.wait_drained();
    bed.sh("cmp /forebay/s/f $S/f; test $(head -c 1 $S/f) = 9");
}

#[test]
fn a_pool_smaller_than_the_data_holds_all_of_it_in_front_of_the_store() {
    let bed = Bed::attached("96MiB", "", "");
    bed.sh("cd /forebay/s; for i in $(seq 12); do head -c 16000000 /dev/urandom > f$i; md5sum < f$i >> $S/../sums; done");
    bed.wait_drained();
    bed.sh("cd /forebay/s; for i in $(seq 12); do md5sum < f$i; done | cmp - $S/../sums");
    bed.sh("cd $S; for i in $(seq 12); do md5sum < f$i; done | cmp - $S/../sums");
}
