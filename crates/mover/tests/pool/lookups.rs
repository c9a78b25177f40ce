//! Names that programs use before their directory is listed: each is looked up in the store alone.

use std::process::Command;

use super::bed::{text, Bed};

impl Bed {
    fn is_listed(&self, directory: &str) -> bool {
        let shown = self.verb(&["state", "--json", directory]);
        let state: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        state[0]["listed"].as_bool().unwrap_or_else(|| panic!("{}", text(&shown)))
    }

    /// The names of a directory that the pool knows.
    fn known(&self, directory: &str) -> u64 {
        self.sh(&format!("stat -c %s /forebay{directory}")).trim().parse().unwrap()
    }

    /// A store with the directory `d` of `n0` to the last of `count` files, the directory `d/sub` with a file, and `e` with
    /// `n6` to `n9`.
    fn with_files(count: usize, options: &str) -> Bed {
        let bed = Bed::new("256MiB");
        let directory = bed.store().join("d");
        std::fs::create_dir_all(directory.join("sub")).unwrap();
        std::fs::write(directory.join("sub/in"), "in").unwrap();
        for i in 0..count {
            std::fs::write(directory.join(format!("n{i}")), format!("{i}\n")).unwrap();
        }
        std::fs::create_dir(bed.store().join("e")).unwrap();
        for i in 6..10 {
            std::fs::write(bed.store().join(format!("e/n{i}")), format!("{i}\n")).unwrap();
        }
        bed.attach_with(options, &[]);
        bed
    }

    /// Kills a process of the pool, and waits until there is another one.
    fn kill_and_wait(&self, which: impl Fn(&serde_json::Value) -> Option<u64>) {
        let pid = which(&self.status()).unwrap();
        assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
        self.wait("it was started again", || which(&self.status()).is_some_and(|now| now != pid));
    }
}

#[test]
fn name_is_looked_up_alone_and_its_directory_stays_unlisted() {
    let bed = Bed::with_files(100, "");
    assert_eq!(
        bed.sh("cd /forebay/s/d; cat n5; test ! -e none; test -d sub; echo x > new; cat new"),
        "5\nx\n"
    );
    assert_eq!(bed.known("/s/d"), 3, "n5, sub and new");
    assert!(!bed.is_listed("/s/d"));
    // A name that the store has is there for every call.
    assert_eq!(
        bed.sh("cd /forebay/s/e; echo x > new; (set -o noclobber; echo > n6) 2>/dev/null || cat n6; mv -f new n7; cat n7; rm n8
            mkdir n6 2>/dev/null || test ! -e new && test ! -e n8 && echo right"),
        "6\nx\nright\n"
    );
    bed.wait_drained();
    bed.sh("test ! -e $S/e/n8; test ! -e $S/e/new; test $(cat $S/e/n7) = x; test ! -e /forebay/s/e/n8");
    assert!(!bed.is_listed("/s/e") && !bed.is_listed("/s/d"));
    // Whether a directory is empty takes a listing of it, not of the one above.
    assert_eq!(bed.sh("cd /forebay/s/d; rmdir sub 2>/dev/null || echo not empty"), "not empty\n");
    assert!(bed.is_listed("/s/d/sub") && !bed.is_listed("/s/d"));
    // A listing shows all, and what was done before.
    assert_eq!(bed.sh("ls /forebay/s/d | wc -l; cat /forebay/s/d/new /forebay/s/d/n99"), "102\nx\n99\n");
    assert_eq!(bed.sh("ls /forebay/s/e; cat /forebay/s/e/n7"), "n6\nn7\nn9\nx\n");
    assert!(bed.is_listed("/s/d") && bed.is_listed("/s/e"));
    bed.wait_drained();
    assert_eq!(bed.sums()["conflicts"], 0, "{}", bed.log());
}

#[test]
fn name_that_the_store_lacked_is_seen_after_a_refresh() {
    let bed = Bed::with_files(10, "");
    bed.sh("test ! -e /forebay/s/d/late; echo 1 > $S/d/late; test ! -e /forebay/s/d/late");
    assert!(!bed.is_listed("/s/d"));
    let done = bed.verb(&["refresh", "/s/d"]);
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(bed.sh("cat /forebay/s/d/late"), "1\n");
    // A program that lists it sees it too.
    bed.sh("test ! -e /forebay/s/d/sub/late; echo 2 > $S/d/sub/late; ls /forebay/s/d/sub > /dev/null; cat /forebay/s/d/sub/late");
}

#[test]
fn absence_in_an_unlisted_directory_is_not_cached_by_the_kernel() {
    let bed = Bed::with_files(10, "");
    let done = bed.mount();
    if !done.status.success() {
        eprintln!("skipped: no mount: {}", text(&done));
        return;
    }
    let at = bed.mountpoint().join("s/d");
    assert_eq!(std::fs::read_to_string(at.join("n3")).unwrap(), "3\n");
    assert!(!at.join("late").exists());
    assert!(!bed.is_listed("/s/d"));
    std::fs::write(bed.store().join("d/late"), "late").unwrap();
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 12);
    assert_eq!(std::fs::read_to_string(at.join("late")).unwrap(), "late");
    // Changes through the mount in a directory that is not listed.
    let sub = at.join("sub");
    std::fs::write(sub.join("new"), "new").unwrap();
    assert!(std::fs::File::create_new(sub.join("in")).is_err(), "the store has it");
    std::fs::rename(sub.join("new"), sub.join("in")).unwrap();
    assert!(!bed.is_listed("/s/d/sub"));
    bed.wait_drained();
    assert_eq!(std::fs::read_to_string(bed.store().join("d/sub/in")).unwrap(), "new");
    assert_eq!(std::fs::read_dir(&sub).unwrap().count(), 1);
    let done = bed.verb(&["umount", bed.mountpoint().to_str().unwrap()]);
    assert!(done.status.success(), "{}", text(&done));
}

#[test]
fn directory_of_which_many_names_are_used_is_listed_if_it_is_not_too_large_for_that() {
    let bed = Bed::with_files(3000, "");
    bed.sh("cd /forebay/s/d; for i in 1 2 3 4 5 6 7; do test -e n$i; done");
    assert_eq!(bed.known("/s/d"), 7);
    bed.sh("test -e /forebay/s/d/n8");
    // The listing is given up after as many names as eight looks are worth.
    bed.wait("it is listed in part", || bed.known("/s/d") >= 1900);
    assert!(!bed.is_listed("/s/d"));
    // Names that the listing brought are looked up no longer: these are not in the store.
    bed.sh("cd /forebay/s/d; for i in 1 2 3 4 5 6 7 8; do test ! -e x$i; done");
    bed.wait("it is listed", || bed.is_listed("/s/d"));
    assert_eq!(bed.known("/s/d"), 3001);
}

#[test]
fn look_up_ends_well_when_the_mover_dies_and_changes_outlive_the_worker() {
    let bed = Bed::with_files(10, "?latency=1500ms");
    let mut reader = bed.command("cat /forebay/s/d/n4; test ! -e /forebay/s/d/none && echo right");
    let reader = reader.stdout(std::process::Stdio::piped()).spawn().unwrap();
    bed.kill_and_wait(|status| status["mover"]["pid"].as_u64());
    let done = reader.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "4\nright\n", "{}", bed.log());
    // The worker that follows knows of no absence, and applies what was acknowledged.
    bed.sh("cd /forebay/s/d; test ! -e new; echo x > new; mkdir made; mv new other");
    bed.kill_and_wait(|status| status["pids"]["worker"].as_u64());
    assert_eq!(bed.sh("cd /forebay/s/d; cat other; test -d made; test ! -e new && echo gone"), "x\ngone\n");
    assert!(!bed.is_listed("/s/d"));
    let fsck: serde_json::Value = serde_json::from_slice(&bed.verb(&["fsck", "--json"]).stdout).unwrap();
    assert_eq!(fsck["clean"], true, "{fsck:#}");
}

#[test]
fn watch_of_an_unlisted_directory_reports_what_happens_to_names_of_the_store() {
    let bed = Bed::with_files(3, "");
    let watch = r#"
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init()
assert libc.inotify_add_watch(fd, b"/forebay/s/d", 0x200) >= 0, os.strerror(ctypes.get_errno())
os.unlink("/forebay/s/d/n1")
event = os.read(fd, 4096)
print(event[16:].rstrip(b"\0").decode())
"#;
    let shown = bed.sh(&format!("python3 -c '{watch}'"));
    assert_eq!(shown, "n1\n");
}

#[test]
fn names_for_which_the_pool_has_no_room_are_no_failure_of_the_store() {
    let bed = Bed::new("64MiB");
    let directory = bed.store().join("d");
    std::fs::create_dir(&directory).unwrap();
    for i in 0..60_000 {
        let name = format!("{i:05}-{}", "x".repeat(200));
        std::fs::File::create(directory.join(name)).unwrap();
    }
    bed.attach_with("", &[]);
    let shown = bed.run("ls /forebay/s/d > /dev/null");
    assert!(!shown.status.success() && text(&shown).contains("No space left"), "{}", text(&shown));
    // A name that is looked up alone, too.
    let shown = bed.run(&format!("cat /forebay/s/d/59999-{}", "x".repeat(200)));
    assert!(!shown.status.success() && text(&shown).contains("No space left"), "{}", text(&shown));
    // Reports are a second old at most.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let stores = &bed.status()["mover"]["stores"];
    assert!(stores[0]["last_error"].is_null(), "{stores:#}");
    assert!(bed.log().contains("no room for its names"), "{}", bed.log());
}
