//! A whole pool in front of an S3 server: what it lists, restores, writes, drains, renames and removes, and that no fault
//! of the server loses data, marks clean what is not, or goes unsaid.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::bed::{text, Bed};
use super::s3_server::{Memory, Server, ServerFault, ACCESS_KEY, SECRET_KEY};

/// A pool in front of a bucket. The server lives as long as this.
struct Bucket {
    bed: Bed,
    memory: Arc<Memory>,
    server: Server,
}

impl std::ops::Deref for Bucket {
    type Target = Bed;

    fn deref(&self) -> &Bed {
        &self.bed
    }
}

impl Bucket {
    /// A server and a pool, which is not attached yet.
    fn new() -> Bucket {
        let memory = Memory::new(true);
        // The pool takes its credentials from the environment that the server's start sets.
        let server = Server::memory(memory.clone());
        Bucket { bed: Bed::new("256MiB"), memory, server }
    }

    fn url(&self, options: &str) -> String {
        let place = self.server.place("bucket", "p");
        format!("s3://bucket/p?endpoint={}&region=us-east-1{options}", place.endpoint.unwrap())
    }

    fn attached(options: &str) -> Bucket {
        let bucket = Bucket::new();
        bucket.attach_store(options);
        bucket
    }

    fn attach_store(&self, options: &str) {
        let done = self.pool_verb(&["attach", &self.url(options), "/s"]);
        assert!(done.status.success(), "{}\nlog: {}", text(&done), self.log());
    }

    /// Keys of files in the bucket, without markers of directories.
    fn files(&self) -> Vec<String> {
        let keys = self.memory.keys().into_iter().filter(|key| !key.ends_with('/'));
        keys.filter_map(|key| key.strip_prefix("p/").map(str::to_owned)).collect()
    }

    fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.memory.get(&format!("p/{key}"))
    }

    /// What the status says of the store; empty when all is well.
    fn complaint(&self) -> String {
        let status = self.status();
        let stores = status["mover"]["stores"].as_array().cloned().unwrap_or_default();
        stores.iter().filter_map(|store| store["last_error"].as_str()).collect::<Vec<_>>().join("\n")
    }

    /// Waits until the status complains of the store in these words, and checks that the log does too.
    fn wait_complaint(&self, words: &str) {
        self.wait(&format!("the status says {words:?}"), || self.complaint().contains(words));
        let log = std::fs::read_to_string(self.pool().join("log")).unwrap_or_default();
        assert!(log.contains(words), "{log}");
    }

    /// Nothing is pending, nothing is wrong, and the store has the pool's bytes.
    fn check_healed(&self) {
        self.wait_drained();
        self.wait("the status is clean", || self.complaint().is_empty());
        for name in self.sh("cd /forebay/s; find . -type f -printf '%P\n'").lines() {
            let sum = self.sh(&format!("md5sum < /forebay/s/{name}"));
            std::fs::write(self.store().join("sum"), self.get(name).unwrap_or_else(|| panic!("{name}")))
                .unwrap();
            assert_eq!(self.sh("md5sum < $S/sum"), sum, "{name}");
        }
        let log = std::fs::read_to_string(self.pool().join("log")).unwrap_or_default();
        assert!(!log.contains(SECRET_KEY) && !log.contains(ACCESS_KEY), "credentials are in the log");
    }
}

#[test]
fn bucket_is_listed_restored_written_renamed_and_removed() {
    let bucket = Bucket::new();
    bucket.memory.put("p/in/a", b"hello\n");
    let big: Vec<u8> = (0..20_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    bucket.memory.put("p/in/deep/big", &big);
    bucket.attach_store("");
    assert_eq!(bucket.sh("cd /forebay/s; find . | sort"), ".\n./in\n./in/a\n./in/deep\n./in/deep/big\n");
    assert_eq!(bucket.sh("cat /forebay/s/in/a; stat -c %s /forebay/s/in/deep/big"), "hello\n20000000\n");
    std::fs::write(bucket.store().join("big"), &big).unwrap();
    bucket.sh("cmp /forebay/s/in/deep/big $S/big");
    bucket.sh("cd /forebay/s; mkdir -p out/sub; echo one > out/one; echo two > out/sub/two; ln -s one out/l;
        head -c 20000000 /dev/urandom > out/big; chmod 640 out/one; touch -d 2001-02-03 out/sub/two");
    bucket.check_healed();
    assert_eq!(bucket.files(), ["in/a", "in/deep/big", "out/big", "out/l", "out/one", "out/sub/two"]);
    // A file and a directory that the store has get other names; released files with them.
    bucket.pool_verb(&["release", "-r", "/s"]);
    bucket.sh("cd /forebay/s; mv in/a in/b; mv out final; rm final/l; ln final/one final/second; echo new > final/sub/two");
    bucket.check_healed();
    assert_eq!(
        bucket.files(),
        ["final/big", "final/one", "final/second", "final/sub/two", "in/b", "in/deep/big"]
    );
    assert_eq!(bucket.get("final/sub/two").as_deref(), Some(&b"new\n"[..]));
    // What was renamed is known in its present version: releasing and writing it again is no conflict.
    bucket.pool_verb(&["release", "-r", "/s"]);
    bucket.sh("cd /forebay/s; cat final/one >> final/sub/two; chmod 600 final/one; rm -r in; mv final/big .; rmdir -p a/b || true");
    bucket.check_healed();
    assert_eq!(bucket.files(), ["big", "final/one", "final/second", "final/sub/two"]);
    assert_eq!(bucket.status()["mover"]["conflicts"], 0, "{}", bucket.log());
}

#[test]
fn name_of_an_unlisted_prefix_is_looked_up_alone() {
    let bucket = Bucket::new();
    for key in ["in/a", "in/b", "in/deep/x", "in/deep/er/y"] {
        bucket.memory.put(&format!("p/{key}"), key.as_bytes());
    }
    bucket.attach_store("");
    let shown = bucket.sh(
        "cd /forebay/s/in; cat a; test -d deep; test ! -e de; test ! -e dee/x; cat deep/er/y; echo new > c;
        (set -o noclobber; echo > b) 2>/dev/null && echo overwritten; cat b",
    );
    assert_eq!(shown, "in/ain/deep/er/yin/b");
    let is_listed = |directory: &str| {
        let shown = bucket.pool_verb(&["state", "--json", directory]).stdout;
        serde_json::from_slice::<serde_json::Value>(&shown).unwrap()[0]["listed"].as_bool().unwrap()
    };
    for directory in ["/s/in", "/s/in/deep", "/s/in/deep/er"] {
        assert!(!is_listed(directory), "{directory}");
    }
    // The move copies objects: those that the pool knows have other versions then.
    bucket.sh("mv /forebay/s/in /forebay/s/moved");
    bucket.check_healed();
    assert_eq!(bucket.files(), ["moved/a", "moved/b", "moved/c", "moved/deep/er/y", "moved/deep/x"]);
    bucket.pool_verb(&["release", "-r", "/s"]);
    assert_eq!(
        bucket.sh("cd /forebay/s/moved; echo more >> deep/er/y; cat a deep/er/y deep/x"),
        "in/ain/deep/er/ymore\nin/deep/x"
    );
    bucket.check_healed();
    assert_eq!(bucket.status()["mover"]["conflicts"], 0, "{}", bucket.log());
}

#[test]
fn object_of_another_client_is_not_overwritten() {
    let bucket = Bucket::attached("");
    bucket.sh("cd /forebay/s; echo mine > f; echo mine > g");
    bucket.check_healed();
    bucket.memory.put("p/f", b"theirs\n");
    bucket.memory.put("p/new", b"theirs\n");
    bucket.sh("cd /forebay/s; echo newer > f; echo mine > new");
    bucket.wait("the conflicts are reported", || bucket.status()["mover"]["conflicts"] == 2);
    assert_eq!(bucket.get("f").as_deref(), Some(&b"theirs\n"[..]));
    assert_eq!(bucket.get("new").as_deref(), Some(&b"theirs\n"[..]));
    let beside: Vec<_> =
        bucket.files().into_iter().filter(|key| key.contains(".forebay-conflict-")).collect();
    assert_eq!(beside.len(), 2, "{beside:?}");
    assert_eq!(bucket.sh("cat /forebay/s/f /forebay/s/new"), "newer\nmine\n");
    let state = text(&bucket.pool_verb(&["state", "/s/f"]));
    assert!(state.contains("conflict"), "{state}");
    for (path, keep) in [("/s/f", "pool"), ("/s/new", "store")] {
        let done = bucket.pool_verb(&["resolve", path, "--keep", keep]);
        assert!(done.status.success(), "{}", text(&done));
    }
    bucket.wait_drained();
    assert_eq!(bucket.get("f").as_deref(), Some(&b"newer\n"[..]));
    assert_eq!(bucket.sh("cat /forebay/s/new"), "theirs\n");
}

#[test]
fn wrong_credentials_are_named_when_the_bucket_is_attached() {
    let bucket = Bucket::new();
    bucket.memory.refuses_credentials.store(true, Ordering::Relaxed);
    let done = bucket.pool_verb(&["attach", &bucket.url(""), "/s"]);
    let said = text(&done);
    assert!(!done.status.success() && said.contains("check the credentials"), "{said}");
    assert!(!said.contains(SECRET_KEY) && !said.contains(ACCESS_KEY), "{said}");
    assert_eq!(bucket.sh("ls /forebay"), "", "nothing is left of the attempt");
    bucket.memory.refuses_credentials.store(false, Ordering::Relaxed);
    bucket.attach_store("");
    bucket.sh("echo x > /forebay/s/x");
    bucket.check_healed();
}

#[test]
fn credentials_that_are_lost_in_the_middle_lose_no_data() {
    let bucket = Bucket::attached("");
    bucket.sh("cd /forebay/s; for i in 1 2 3; do head -c 100000 /dev/urandom > before$i; done");
    bucket.check_healed();
    bucket.pool_verb(&["release", "/s/before1"]);
    bucket.memory.refuses_credentials.store(true, Ordering::Relaxed);
    bucket.sh("cd /forebay/s; for i in 1 2 3; do head -c 100000 /dev/urandom > after$i; done; mv before2 moved; rm before3");
    bucket.wait_complaint("check the credentials");
    // A file whose data only the store has fails; all others go on.
    let failed = bucket.run("cat /forebay/s/before1");
    assert!(!failed.status.success() && text(&failed).contains("Permission denied"), "{}", text(&failed));
    bucket.sh("cat /forebay/s/after1 /forebay/s/moved > /dev/null");
    assert_eq!(bucket.files(), ["before1", "before2", "before3"]);
    let release = text(&bucket.pool_verb(&["release", "/s/after1"]));
    assert!(release.contains("does not have its data yet"), "{release}");
    let down = bucket.pool_verb(&["down"]);
    assert!(!down.status.success(), "a pool ended whose data the store does not have");
    bucket.memory.refuses_credentials.store(false, Ordering::Relaxed);
    bucket.check_healed();
    assert_eq!(bucket.files(), ["after1", "after2", "after3", "before1", "moved"]);
}

#[test]
fn fsync_fails_when_the_store_refuses_and_succeeds_later() {
    let bucket = Bucket::new();
    let done =
        bucket.pool_verb(&["attach", &bucket.url(""), "/s", "--durable", "fsync", "--drain", "request"]);
    assert!(done.status.success(), "{}", text(&done));
    bucket.memory.refuses_credentials.store(true, Ordering::Relaxed);
    let failed = bucket.run("dd if=/dev/urandom of=/forebay/s/f bs=100k count=1 conv=fsync");
    assert!(!failed.status.success() && text(&failed).contains("fsync failed"), "{}", text(&failed));
    assert!(text(&failed).contains("Permission denied"), "{}", text(&failed));
    bucket.wait_complaint("check the credentials");
    bucket.memory.refuses_credentials.store(false, Ordering::Relaxed);
    bucket.sh("dd if=/dev/zero of=/forebay/s/f bs=100k count=1 conv=fsync 2>/dev/null");
    assert_eq!(bucket.get("f"), Some(vec![0; 102_400]));
}

#[test]
fn server_that_asks_to_slow_down_gets_all_data_later() {
    let bucket = Bucket::attached("");
    bucket.sh("cd /forebay/s; mkdir d; echo old > d/old");
    bucket.check_healed();
    bucket.memory.slows_down.store(true, Ordering::Relaxed);
    bucket.sh("cd /forebay/s; for i in $(seq 20); do echo $i > f$i; done; mv d e; echo more >> e/old");
    bucket.wait_complaint("reduce your request rate");
    assert!(bucket.status()["mover"]["dirty_files"].as_u64() >= Some(20), "{}", bucket.status());
    bucket.memory.slows_down.store(false, Ordering::Relaxed);
    bucket.check_healed();
    assert_eq!(bucket.get("e/old").as_deref(), Some(&b"old\nmore\n"[..]));
    assert_eq!(bucket.files().len(), 21);
}

#[test]
fn put_and_copy_that_land_after_their_time_out_do_no_harm() {
    let bucket = Bucket::attached("&timeout=300ms");
    bucket.sh("echo first > /forebay/s/f");
    bucket.check_healed();
    for request in ["put", "copy"] {
        let landed = bucket.memory.landed.lock().unwrap().len();
        bucket.memory.inject(request, ServerFault::Late(Duration::from_secs(8)));
        bucket.sh(&format!("echo {request} > /forebay/s/f"));
        bucket.wait("the late request lands", || bucket.memory.landed.lock().unwrap().len() > landed);
        bucket.wait_drained();
        assert_eq!(bucket.get("f"), Some(format!("{request}\n").into_bytes()), "{}", bucket.log());
    }
    // A copy that lands under a name that is new is recognized as the pool's own, and replaced by newer data.
    bucket.memory.inject("copy", ServerFault::Late(Duration::from_millis(3100)));
    bucket.sh("echo old > /forebay/s/g");
    bucket.wait("the log says so", || {
        bucket.log().contains("cannot publish s3://bucket/p/g: no answer within")
    });
    bucket.wait("the first try lands, or a later one", || bucket.get("g").is_some());
    bucket.sh("echo new > /forebay/s/g");
    bucket.wait("the late copy lands", || bucket.memory.landed.lock().unwrap().len() == 3);
    bucket.check_healed();
    assert_eq!(bucket.status()["mover"]["conflicts"], 0, "{}", bucket.log());
    // Temporaries that landed late are removed again by later uploads.
    bucket.wait("no temporary is left", || {
        bucket.sh("date +%N > /forebay/s/tick");
        bucket.wait_drained();
        bucket.files() == ["f", "g", "tick"]
    });
}
