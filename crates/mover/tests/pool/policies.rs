//! Policies of attached directories: when what is copied to the store, what is never, what stays in the pool longest.

use forebay_tasks::{MoverClient, TaskState, Verb};

use super::bed::{entry, text, Bed};

impl Bed {
    pub(super) fn verb(&self, arguments: &[&str]) -> std::process::Output {
        let pool = self.pool();
        self.forebay(&[&["--pool", pool.to_str().unwrap()], arguments].concat())
    }

    fn state(&self, path: &str) -> String {
        let done = self.verb(&["state", "--json", path]);
        let state: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap_or_default();
        state[0]["state"].as_str().unwrap_or_default().to_owned()
    }
}

#[test]
fn a_file_that_stays_open_is_copied_every_so_often() {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--drain", "close,open=snapshot:1s"]);
    // The program ends by itself once the store has had several versions of the file that it keeps open.
    bed.sh("cd /forebay/s; exec 3>>log; i=0; seen=; versions=0; until test $versions -ge 3; do
        i=$((i + 1)); echo line $i >&3; sleep 0.1; test $i -lt 500;
        if test -e $S/log; then cp $S/log $S/../copy; size=$(stat -c %s $S/../copy);
            head -c $size log | cmp - $S/../copy; test \"$seen\" = $size || versions=$((versions + 1)); seen=$size; fi; done");
    bed.wait_drained();
    bed.sh("cmp /forebay/s/log $S/log");
    assert_eq!(bed.state("/s/log"), "clean");
}

#[test]
fn sync_of_a_file_that_is_kept_open_copies_what_it_contains() {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--drain", "request"]);
    let pool = bed.pool();
    let sync = format!("{} --pool {} sync", bed.program().display(), pool.display());
    bed.sh(&format!(
        "cd /forebay/s; exec 3>>log; echo one >&3; {sync} /s/log; cmp log $S/log; echo two >&3; {sync} -r /s; cmp log $S/log;
        echo three >&3"
    ));
    assert_eq!(bed.sh("cat $S/log"), "one\ntwo\n");
    assert_eq!(bed.state("/s/log"), "dirty");
}

#[test]
fn many_files_that_wait_for_a_request_hide_no_other() {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--rule", "first/**=request", "--rule", "temporary/**=temporary"]);
    // More than the mover reads at a time, 20,000.
    bed.sh("cd /forebay/s; mkdir first temporary last; seq -f first/%g 10500 | xargs touch; \
        seq -f temporary/%g 10500 | xargs touch; echo l > last/l");
    bed.wait("the one behind them is copied", || bed.store().join("last/l").exists());
    assert!(!bed.store().join("first/7").exists());
    bed.sh("echo m > /forebay/s/last/m.tmp");
    let synced = bed.verb(&["sync", "-r", "/s/last"]);
    assert!(synced.status.success() && bed.store().join("last/m.tmp").exists(), "{}", text(&synced));
}

#[test]
fn rules_decide_by_name_and_path() {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--rule", "*.tmp=temporary", "--rule", "ckpt/**=request"]);
    bed.sh("cd /forebay/s; mkdir -p ckpt/1 other; echo t > a.tmp; echo t > ckpt/b.tmp; echo c > ckpt/1/c; echo o > other/o");
    let has = |name: &str| bed.store().join(name).exists();
    bed.wait("what no rule names is copied", || has("other/o"));
    assert!(!has("ckpt/1/c") && !has("a.tmp"), "{:?}", bed.stored());
    let waited = bed.verb(&["wait-durable", "--timeout", "1s", "/s/ckpt/1/c"]);
    assert!(text(&waited).contains("its policy is request"), "{}", text(&waited));
    let synced = bed.verb(&["sync", "-r", "/s"]);
    assert!(synced.status.success() && has("ckpt/1/c"), "{}", text(&synced));
    let refused = bed.verb(&["sync", "/s/a.tmp"]);
    assert!(!refused.status.success() && text(&refused).contains("temporary"), "{}", text(&refused));
    // A temporary file that gets another name is one no longer, and the other way round.
    bed.sh("cd /forebay/s; mv a.tmp kept; mv other/o other/o.tmp");
    bed.wait("the renamed file is copied", || has("kept"));
    // Temporary files end with the pool.
    bed.sh("echo x > /forebay/s/last.tmp; rm /forebay/s/other/o.tmp");
    let down = bed.verb(&["down"]);
    assert!(down.status.success(), "{}", text(&down));
    let names: Vec<_> =
        bed.stored().into_iter().map(|(name, _)| name).filter(|name| name.ends_with(".tmp")).collect();
    assert_eq!(names, Vec::<String>::new());
}

#[test]
fn what_policies_drain_gives_way_to_claims_of_the_store_but_not_what_is_asked_for_or_makes_room() {
    let bed = Bed::new("128MiB");
    let (claims, other) = (bed.store().with_file_name("claims"), bed.store().with_file_name("other"));
    std::fs::create_dir(&claims).unwrap();
    std::fs::create_dir(&other).unwrap();
    bed.attach_with("", &["--yield-to", claims.join("*@s@*").to_str().unwrap()]);
    let attached = bed.verb(&["attach", other.to_str().unwrap(), "/other"]);
    assert!(attached.status.success(), "{}", text(&attached));
    let claim = claims.join("1@s@in");
    let file = std::fs::File::create(&claim).unwrap();
    let hour = std::time::Duration::from_secs(3600);
    // As if somebody went on touching it.
    let claims_it = || file.set_modified(std::time::SystemTime::now() + hour).unwrap();
    claims_it();
    let has = |name: &str| bed.store().join(name).exists();
    // What is written to the other store later is copied before.
    let others_are_copied = |tag: &str| {
        for i in 0..4 {
            let name = format!("{tag}{i}");
            bed.sh(&format!("echo {i} > /forebay/other/{name}"));
            bed.wait("the other store has it", || other.join(&name).exists());
        }
    };
    bed.sh("echo a > /forebay/s/a");
    others_are_copied("first");
    assert!(!has("a"), "it gives way: {:?}", bed.stored());
    let synced = bed.verb(&["sync", "-r", "/s"]);
    assert!(synced.status.success() && has("a"), "{}", text(&synced));
    bed.sh("echo b > /forebay/s/b");
    others_are_copied("second");
    assert!(!has("b"), "it gives way: {:?}", bed.stored());
    file.set_modified(std::time::SystemTime::now() - hour).unwrap();
    bed.wait("nobody claims the store any more", || has("b"));
    claims_it();
    // The pool fills up: what makes room does not wait for the claim to end.
    bed.sh("cd /forebay/s; for i in 1 2 3; do head -c 30000000 /dev/zero > big$i; done");
    // Not the first one if it was in use just then: without the others there is room.
    bed.wait("some of it is copied", || ["big1", "big2", "big3"].into_iter().any(has));
}

#[test]
fn reusable_files_leave_the_pool_last() {
    // An empty pool of this size has some 20 MB of its own.
    let bed = Bed::new("128MiB");
    bed.attach_with("", &["--rule", "mesh*=reusable"]);
    bed.sh("cd /forebay/s; head -c 16000000 /dev/urandom > mesh; sleep 0.1; for i in 1 2 3; do head -c 16000000 /dev/urandom > f$i; done");
    bed.wait_drained();
    bed.sh("cd /forebay/s; head -c 36000000 /dev/urandom > more");
    bed.wait("older files are released", || bed.state("/s/f1") == "released");
    let states = ["f1", "f2", "f3", "more"].map(|name| bed.state(&format!("/s/{name}")));
    assert_eq!(bed.state("/s/mesh"), "clean", "the oldest, but reusable: {states:?}\n{}", bed.log());
}

#[test]
fn a_policy_or_pattern_that_makes_no_sense_is_refused_with_its_words() {
    let bed = Bed::new("64MiB");
    for (arguments, words) in [
        (["--drain", "sometimes"], "none of close"),
        (["--drain", "close,open=snapshot:0s"], "open=snapshot:10m"),
        (["--rule", "*.tmp"], "PATTERN=POLICY"),
        (["--rule", "/x=never"], "from the attached directory"),
    ] {
        let done = bed.try_attach_with("", &arguments);
        assert!(!done.status.success() && text(&done).contains(words), "{arguments:?}: {}", text(&done));
    }
}

#[test]
fn another_store_at_the_same_directory_is_used_from_then_on() {
    let bed = Bed::new("64MiB");
    bed.attach_with("", &[]);
    bed.sh("echo first > /forebay/s/f");
    bed.wait("the first store has it", || bed.store().join("f").exists());
    let detached = bed.verb(&["detach", "/s"]);
    assert!(detached.status.success(), "{}", text(&detached));
    let other = bed.store().with_file_name("other");
    std::fs::create_dir(&other).unwrap();
    let attached = bed.verb(&["attach", other.to_str().unwrap(), "/s", "--rule", "*.tmp=temporary"]);
    assert!(attached.status.success(), "{}", text(&attached));
    assert_eq!(bed.sh("ls /forebay/s; echo second > /forebay/s/g; echo t > /forebay/s/h.tmp"), "");
    bed.wait("the second store has it", || other.join("g").exists());
    assert!(!bed.store().join("g").exists() && !other.join("h.tmp").exists());
}

#[test]
fn file_that_gets_a_name_of_temporary_ones_leaves_the_store_and_stays_in_the_pool() {
    let bed = Bed::new("128MiB");
    bed.attach_with("", &["--rule", "*.tmp=temporary"]);
    bed.sh("cd /forebay/s; for f in a b c; do echo $f > $f; done");
    bed.wait_drained();
    let released = bed.verb(&["release", "/s/c"]);
    assert!(released.status.success(), "{}", text(&released));
    bed.sh("cd /forebay/s; mv a a.tmp; mv b b.tmp; echo new > b; mv c c.tmp");
    let only = [("b".to_owned(), b"new\n".to_vec())];
    bed.wait("the store has what the pool has but for temporary files", || bed.stored() == only);
    assert_eq!(bed.sh("cd /forebay/s; cat a.tmp b.tmp c.tmp"), "a\nb\nc\n", "{}", bed.log());
    for name in ["a", "b", "c"] {
        assert_eq!(bed.state(&format!("/s/{name}.tmp")), "dirty", "the store does not have it");
    }
    let down = bed.verb(&["down"]);
    assert!(down.status.success(), "{}", text(&down));
    assert_eq!(bed.stored(), only);
}

#[test]
fn task_that_prestages_first_has_most_of_the_stores_rate() {
    let bed = Bed::new("512MiB");
    // When the first task ends, the second one has had 32 MiB from its one thread. With as many threads for its file as
    // the first has for each, it has had 128 MiB, and has ended long before.
    for (directory, count, bytes) in [("first", 8, 32 << 20), ("second", 1, 64 << 20)] {
        let directory = bed.store().join(directory);
        std::fs::create_dir(&directory).unwrap();
        for i in 0..count {
            std::fs::write(directory.join(i.to_string()), vec![i + 1; bytes]).unwrap();
        }
    }
    bed.attach_with("?rate=40MB/s", &[]);
    bed.sh("ls -l /forebay/s/first /forebay/s/second");
    let pool = bed.attach_client();
    let mover = || MoverClient::connect(&bed.pool()).unwrap();
    let start = |directory: &str| {
        let ino = entry(pool, directory).unwrap().attr.ino.0;
        mover().start(Verb::Prestage, ino, directory, true).unwrap().id
    };
    let first = start("s/first");
    bed.wait("the first task has found files", || mover().show(first).unwrap().files_total > 0);
    let second = start("s/second");
    let second = mover().wait(second, |_| true).unwrap();
    let first = mover().show(first).unwrap();
    assert_eq!((first.state, second.state), (TaskState::Done, TaskState::Done), "{first:?}, {second:?}");
    assert_eq!((first.files_done, second.files_done), (8, 1));
    bed.sh("cmp $S/first/7 /forebay/s/first/7; cmp $S/second/0 /forebay/s/second/0");
}
