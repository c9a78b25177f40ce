//! fsync and close that wait for the store, by every interface, and the calls of forebay.h for files in front of one.
//!
//! The policy is `request`: nothing reaches the store unless a call waits for it.

use std::path::Path;
use std::process::Command;

use super::bed::{text, Bed};

fn waiting(calls: &str) -> Bed {
    let bed = Bed::new("256MiB");
    bed.attach_with("", &["--drain", "request", "--durable", calls]);
    bed
}

#[test]
fn fsync_returns_when_the_store_has_the_data() {
    let bed = waiting("fsync");
    bed.sh("cd /forebay/s; mkdir -p a/b; dd if=/dev/urandom of=a/b/f bs=1M count=3 conv=fsync 2>/dev/null;
        cmp a/b/f $S/a/b/f; dd if=/dev/urandom of=a/b/f bs=100k count=1 seek=3 conv=notrunc,fdatasync 2>/dev/null;
        cmp a/b/f $S/a/b/f; cp a/b/f g");
    let names: Vec<_> = bed.stored().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a/", "a/b/", "a/b/f"], "close does not wait, and nothing else was asked for");
}

#[test]
fn fsync_of_a_file_that_others_hold_open_has_what_was_written_before() {
    let bed = waiting("fsync");
    bed.sh("cd /forebay/s; exec 3>>log; echo one >&3; echo two | dd of=log oflag=append conv=notrunc,fsync 2>/dev/null;
        test \"$(cat $S/log | tr '\\n' ' ')\" = 'one two '; echo three >&3; dd if=/dev/null of=log oflag=append conv=notrunc,fsync;
        cmp log $S/log");
    let state = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "state", "--json", "/s/log"]);
    let state: serde_json::Value = serde_json::from_slice(&state.stdout).unwrap();
    assert_eq!((&state[0]["state"], &state[0]["durable"]), (&"dirty".into(), &false.into()), "{state}");
    assert_eq!((&state[0]["published"]["bytes"], &state[0]["published"]["epoch"]), (&14.into(), &().into()));
    // A file that was open when it was copied is not clean: it is copied once more, and is then.
    let sync = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "sync", "/s/log"]);
    assert!(sync.status.success(), "{}", text(&sync));
    let release = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "release", "/s/log"]);
    assert!(release.status.success(), "{}", text(&release));
    assert_eq!(bed.sh("cat /forebay/s/log"), "one\ntwo\nthree\n");
}

#[test]
fn close_returns_when_the_store_has_the_data() {
    let bed = waiting("close");
    bed.sh("cd /forebay/s; head -c 3000000 /dev/urandom > $S/../data; cp $S/../data f; cmp f $S/f;
        tr a b < $S/../data | dd of=f conv=notrunc bs=1M 2>/dev/null; cat f > /dev/null");
    let python =
        "f = open('/forebay/s/g', 'w'); f.write('by python'); f.close(); print(open('/forebay/s/g').read())";
    if Command::new("python3").arg("--version").output().is_ok() {
        assert_eq!(bed.sh(&format!("python3 -c \"{python}\"; cat $S/g")), "by python\nby python");
    }
}

#[test]
fn temporary_files_are_not_waited_for() {
    let bed = Bed::new("64MiB");
    bed.attach_with("", &["--durable", "close", "--rule", "*.tmp=temporary"]);
    bed.sh("cd /forebay/s; dd if=/dev/zero of=a.tmp bs=1k count=1 conv=fsync 2>/dev/null; cp a.tmp b; cmp b $S/b; test ! -e $S/a.tmp");
}

#[test]
fn calls_through_the_mount_wait_too() {
    let bed = waiting("close");
    let mount = bed.pool().with_file_name("mount");
    std::fs::create_dir(&mount).unwrap();
    let done = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "mount", mount.to_str().unwrap()]);
    if !done.status.success() {
        eprintln!("skipped: no mount: {}", text(&done));
        return;
    }
    let run = |script: &str| {
        let mut command = Command::new("bash");
        command.args(["-c", &format!("set -e; {script}")]).env("S", bed.store()).current_dir(&mount);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{script}: {}\nlog: {}", text(&done), bed.log());
    };
    run("dd if=/dev/urandom of=s/f bs=1M count=3 conv=fsync 2>/dev/null; cmp s/f $S/f; echo x > s/g; cmp s/g $S/g");
    let done = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "umount", mount.to_str().unwrap()]);
    assert!(done.status.success(), "{}", text(&done));
}

#[test]
fn a_store_that_nothing_writes_is_not_waited_for() {
    let bed = Bed::new("64MiB");
    for arguments in [&["--durable", "close", "--drain", "never"][..], &["--durable", "fsync", "--read-only"]]
    {
        let done = bed.try_attach_with("", arguments);
        assert!(!done.status.success() && text(&done).contains("wait for ever"), "{}", text(&done));
    }
    let done = bed.try_attach_with("", &["--durable", "always"]);
    assert!(text(&done).contains("none of no, fsync, close"), "{}", text(&done));
}

#[test]
fn calls_of_forebay_h_say_and_do_what_the_store_has() {
    let bed = waiting("fsync");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned();
    let libraries = Path::new(env!("CARGO_BIN_EXE_forebay-mover")).parent().unwrap();
    let program = bed.pool().with_file_name("state");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(crates.join("capi/include"))
        .arg(crates.join("mover/tests/pool/state.c"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(libraries)
        .args(["-lforebay", &format!("-Wl,-rpath,{}", libraries.display())])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", text(&compiled));
    let done = Command::new(&program).arg(bed.pool()).arg(bed.store()).output().unwrap();
    assert!(done.status.success(), "{}\nlog: {}", text(&done), bed.log());
}
