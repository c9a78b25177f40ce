//! Volumes: the command, the capacity that they share with files, and access by several processes over kills of clients,
//! of the worker and of the whole pool (docs/decisions/0048).
//!
//! Processes that use a volume are this program again: the test `process` does what the variable TASK says.

mod common;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{eventually, kill, Place, Ran};
use forebay_client::{Pool, Role, VolumePlaces};
use forebay_types::{Code, Error};

const MIB: u64 = 1 << 20;
/// A variable with what `process` does.
const TASK: &str = "FOREBAY_TEST_VOLUME_TASK";
const POOL: &str = "FOREBAY_TEST_VOLUME_POOL";
/// Bytes that belong to one process, in turn.
const SLOT_BYTES: u64 = 10_000;
/// The words at the beginning of the volume: counter, lock, and a pair of numbers under the lock.
const COUNTER: u64 = 0;
const LOCK: u64 = 8;
const PAIR: u64 = 16;
const SLOTS_AT: u64 = 4096;

/// A pool with volumes, or none where its daemon may not resize a tmpfs.
fn pool(place: &Place, capacity: &str) -> Option<PathBuf> {
    if !common::is_root() {
        return None;
    }
    let up = place.json(["up", "--capacity", capacity, "--json"]);
    Some(PathBuf::from(up["pool"].as_str().unwrap()))
}

fn attach(dir: &Path) -> &'static Pool {
    Pool::attach_as(dir, Role::Tool).unwrap()
}

fn worker(place: &Place) -> i32 {
    let mut pid = 0;
    eventually("the pool has a worker", || {
        let status = place.json(["status", "--json"]);
        pid = status["pids"]["worker"].as_i64().unwrap_or(0) as i32;
        pid != 0 && status["state"] == "up"
    });
    pid
}

fn number(value: &serde_json::Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn free(place: &Place) -> u64 {
    number(&place.json(["status", "--json"])["free_bytes"])
}

fn spawn(dir: &Path, task: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "process", "--nocapture", "--ignored"]).env(TASK, task).env(POOL, dir);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Waits until a process has printed a line with `word`.
fn wait_for(child: &mut Child, word: &str) {
    use std::io::Read;
    let out = child.stdout.as_mut().unwrap();
    let (mut seen, mut byte) = (String::new(), [0]);
    while !seen.contains(word) {
        assert_eq!(out.read(&mut byte).unwrap(), 1, "the process ended without {word:?}: {seen}");
        seen.push(byte[0] as char);
    }
}

/// A generator of numbers: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// What the processes do that these tests start.
#[test]
#[ignore = "started by the other tests"]
fn process() {
    let (Ok(task), Some(dir)) = (std::env::var(TASK), std::env::var_os(POOL)) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let pool = attach(Path::new(&dir));
    match words.as_slice() {
        ["use", index, count, steps] => {
            use_volume(pool, index.parse().unwrap(), count.parse().unwrap(), steps.parse().unwrap());
        }
        ["hold"] => {
            let volume = pool.volume_open(b"v", true).unwrap();
            println!("opened");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            drop(volume);
        }
        ["put", "until", "gone"] => {
            let volume = pool.volume_open(b"v", true).unwrap();
            println!("opened");
            let failed = loop {
                // SAFETY: the bytes are readable.
                let put = unsafe { volume.put(0, [7u8; 64].as_ptr(), 64) };
                if let Err(code) = put.and_then(|()| volume.flush()) {
                    break code;
                }
            };
            assert_eq!((failed, failed.errno()), (Code::PoolGone, libc::EIO));
            assert_eq!(volume.fetch_add(0, 1), Err(Code::PoolGone));
            assert_eq!(volume.map(0).map(drop), Err(Code::PoolGone));
            println!("gone");
        }
        ["put", "and", "unmap"] => put_while_its_memory_goes(pool),
        ["make", "and", "die"] => {
            let mut killed = |_| {
                // SAFETY: ends this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                true
            };
            pool.volume_create(b"half", 0o600, 65 * MIB, &VolumePlaces::default(), &mut killed).unwrap();
        }
        ["grow", "and", "die"] => {
            let mut killed = |_| {
                // SAFETY: ends this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                true
            };
            pool.volume_resize(b"v", 67 * MIB, &mut killed).unwrap();
        }
        other => panic!("{other:?} is no task"),
    }
}

/// Random puts, gets and lists in the slots of this process against a model, and atomics on words of all.
fn use_volume(pool: &'static Pool, index: u64, count: u64, steps: u64) {
    let volume = pool.volume_open(b"v", true).unwrap();
    println!("opened");
    let slots = (volume.bytes() - SLOTS_AT) / SLOT_BYTES / count;
    let at = |slot: u64| SLOTS_AT + (slot * count + index) * SLOT_BYTES;
    let mut model = vec![vec![0u8; SLOT_BYTES as usize]; slots as usize];
    let mut random = Random(index);
    for step in 0..steps {
        let slot = random.below(slots);
        let from = random.below(SLOT_BYTES);
        let n = random.below(SLOT_BYTES - from) as usize;
        let data: Vec<u8> = (0..n).map(|i| (step + i as u64) as u8).collect();
        let mine = &mut model[slot as usize][from as usize..from as usize + n];
        if step % 2 == 0 {
            // SAFETY: the vector is readable.
            unsafe { volume.put(at(slot) + from, data.as_ptr(), n) }.unwrap();
        } else {
            let half = (n / 2) as u64;
            let runs = [(at(slot) + from, half), (at(slot) + from + half, n as u64 - half)];
            // SAFETY: the vector is readable.
            unsafe { volume.put_runs(&runs, data.as_ptr(), n) }.unwrap();
        }
        mine.copy_from_slice(&data);
        let slot = random.below(slots);
        let mut got = vec![0; SLOT_BYTES as usize];
        // SAFETY: the vector is writable.
        unsafe { volume.get(at(slot), got.as_mut_ptr(), got.len()) }.unwrap();
        assert!(got == model[slot as usize], "process {index}, slot {slot}, step {step}");
        volume.fetch_add(COUNTER, 1).unwrap();
        // A lock of compare-and-swap: the pair under it is always equal.
        while volume.compare_and_swap(LOCK, 0, index + 1).unwrap() != 0 {
            std::thread::yield_now();
        }
        let mut pair = [0u64; 2];
        // SAFETY: the pair is writable, and readable below.
        unsafe { volume.get(PAIR, pair.as_mut_ptr().cast(), 16) }.unwrap();
        assert_eq!(pair[0], pair[1], "another process was in the lock");
        pair = [pair[0] + 1; 2];
        // SAFETY: as above.
        unsafe { volume.put(PAIR, pair.as_ptr().cast(), 8) }.unwrap();
        // SAFETY: as above.
        unsafe { volume.put(PAIR + 8, pair[1..].as_ptr().cast(), 8) }.unwrap();
        assert_eq!(volume.swap(LOCK, 0), Ok(index + 1));
    }
    volume.flush().unwrap();
    println!("done");
}

fn make(place: &Place, name: &str, size: &str) {
    place.ok(["volume", "create", name, "--size", size]);
}

#[test]
fn create_list_show_resize_and_delete_do_what_they_say() {
    let place = Place::new();
    let Some(_dir) = pool(&place, "192MiB") else { return };
    assert_eq!(place.json(["volume", "list", "--json"]), serde_json::json!([]));
    let before = free(&place);
    let made = place.json(["volume", "create", "a volume", "--size", "32MiB", "--mode", "640", "--json"]);
    assert_eq!((number(&made["bytes"]), made["mode"].as_str()), (32 * MIB, Some("0640")));
    assert!((32 * MIB..33 * MIB).contains(&(before - free(&place))), "it is counted");
    let status = place.json(["status", "--json"]);
    assert_eq!(number(&status["capacity_bytes"]), 192 * MIB, "the capacity stays");
    assert!(place.ok(["status"]).out.contains("32 MiB of it"));
    make(&place, "small", "5000");
    let list = place.json(["volume", "list", "--json"]);
    assert_eq!((list[0]["name"].as_str(), list[1]["name"].as_str()), (Some("a volume"), Some("small")));
    assert_eq!(number(&list[1]["bytes"]), 8192, "whole pages");
    assert!(place.ok(["volume", "list"]).out.contains("a volume"));
    assert!(place.ok(["volume", "show", "small"]).out.contains("8 KiB"));
    place.run(["volume", "create", "small", "--size", "1MiB"]).assert_refused(1, &["one of this name"]);
    place.run(["volume", "show", "none"]).assert_refused(1, &["no such volume", "volume list"]);
    let grown = place.json(["volume", "resize", "small", "--size", "16MiB", "--json"]);
    assert_eq!((number(&grown["bytes"]), grown["segments"].as_array().unwrap().len()), (16 * MIB, 2));
    place.run(["volume", "resize", "small", "--size", "12MiB"]).assert_refused(1, &["before it grew"]);
    assert_eq!(number(&place.json(["volume", "resize", "small", "--size", "8KiB", "--json"])["bytes"]), 8192);
    assert!(place.ok(["volume", "format", "a volume"]).out.contains("32 MiB are zero"));
    let both = place.run(["volume", "delete", "none", "small", "a volume"]);
    both.assert_refused(1, &["none", "no such volume"]);
    assert_eq!(place.json(["volume", "list", "--json"]), serde_json::json!([]), "the others are deleted");
    eventually("the space is free again", || free(&place) + MIB > before);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn bad_names_sizes_and_modes_are_refused_in_words() {
    let place = Place::new();
    let Some(_dir) = pool(&place, "128MiB") else { return };
    for name in ["a/b", "n:v", "a+b", "a\nb", ".."] {
        let refused = place.run(["volume", "create", name, "--size", "1MiB"]);
        refused.assert_refused(1, &["cannot create volume"]);
    }
    place.run(["volume", "create", "", "--size", "1MiB"]).assert_refused(1, &["needs a name"]);
    let long = "x".repeat(256);
    place.run(["volume", "create", &long, "--size", "1MiB"]).assert_refused(1, &["255 bytes"]);
    place.run(["volume", "create", "v", "--size", "0"]).assert_refused(1, &["size is zero"]);
    place.run(["volume", "create", "v", "--size", "1PiB"]).assert_refused(1, &["free"]);
    assert_eq!(place.run(["volume", "create", "v", "--size", "1MiB", "--mode", "999"]).code, Some(2));
    assert_eq!(place.run(["volume", "create", "v"]).code, Some(2));
    assert_eq!(place.json(["volume", "list", "--json"]), serde_json::json!([]));
}

#[test]
fn files_and_volumes_share_the_capacity_and_neither_gets_more() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    let before = free(&place);
    make(&place, "v", "64MiB");
    let too_much = place.run(["volume", "create", "w", "--size", "100MiB"]);
    too_much.assert_refused(1, &["are needed on node 1", "and the pool has", "larger --capacity"]);
    assert!((64 * MIB..65 * MIB).contains(&(before - free(&place))), "nothing is left of it");
    // Files get the rest, and not a byte more.
    let file = dir.join("target/file");
    let left = free(&place);
    let refused = std::fs::write(&file, vec![1u8; (left + 2 * MIB) as usize]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    assert!(free(&place) < 2 * MIB);
    place.run(["volume", "create", "w", "--size", "4MiB"]).assert_refused(1, &["are needed"]);
    // What a volume gives back, files can have.
    place.ok(["volume", "delete", "v"]);
    eventually("the space is free again", || free(&place) >= 60 * MIB);
    let more = dir.join("target/more");
    std::fs::write(&more, vec![1u8; 50 * MIB as usize]).unwrap();
    std::fs::remove_file(&more).unwrap();
    std::fs::remove_file(&file).unwrap();
    // A volume can have nearly all.
    let most = (free(&place) - 2 * MIB) / MIB;
    make(&place, "v", &format!("{most}MiB"));
    place.ok(["volume", "delete", "v"]);
    // At once: its creation waits until the other's memory is free.
    make(&place, "v", &format!("{most}MiB"));
}

#[test]
fn maker_that_is_killed_leaves_nothing() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    let before = free(&place);
    let mut maker = spawn(&dir, "make and die");
    assert!(!maker.wait().unwrap().success());
    eventually("what it made is gone", || free(&place) + MIB > before);
    make(&place, "half", "1MiB");
    assert_eq!(place.json(["volume", "list", "--json"]).as_array().unwrap().len(), 1);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn growth_that_is_killed_leaves_the_volume_as_it_was() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    make(&place, "v", "2MiB");
    let volume = attach(&dir).volume_open(b"v", true).unwrap();
    // SAFETY: the bytes are readable.
    unsafe { volume.put(0, b"before".as_ptr(), 6) }.unwrap();
    let before = free(&place);
    assert!(!spawn(&dir, "grow and die").wait().unwrap().success());
    eventually("what it reserved is gone", || free(&place) + MIB > before);
    let mut bytes = [0; 6];
    // SAFETY: the bytes are writable.
    unsafe { volume.get(0, bytes.as_mut_ptr(), 6) }.unwrap();
    assert_eq!(&bytes, b"before");
    drop(volume);
    let shown = place.json(["volume", "list", "--json"]);
    assert_eq!((number(&shown[0]["bytes"]), shown[0]["growing"].as_bool()), (2 * MIB, Some(false)));
    place.ok(["volume", "resize", "v", "--size", "4MiB"]);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn creation_goes_on_with_the_next_worker() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    let before = free(&place);
    let mut kills = 0;
    let mut killing = |_| {
        if kills < 2 {
            kill(worker(&place), libc::SIGKILL);
            kills += 1;
        }
        true
    };
    // Killed after the first piece of it, and when all is reserved and nothing committed.
    let made =
        attach(&dir).volume_create(b"v", 0o600, 66 * MIB, &VolumePlaces::default(), &mut killing).unwrap();
    assert_eq!((made.bytes(), made.maker, kills), (66 * MIB, 0, 2));
    assert!((66 * MIB..67 * MIB).contains(&(before - free(&place))), "it is counted once");
    let volume = attach(&dir).volume_open(b"v", true).unwrap();
    assert_eq!((volume.bytes(), volume.flush()), (66 * MIB, Ok(())));
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn creation_that_its_caller_ends_leaves_nothing() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    let before = free(&place);
    let ended = attach(&dir).volume_create(b"v", 0o600, 66 * MIB, &VolumePlaces::default(), &mut |_| false);
    assert_eq!(ended.map(drop), Err(Code::Interrupted.into()));
    assert_eq!(place.json(["volume", "list", "--json"]), serde_json::json!([]));
    eventually("the space is free again", || free(&place) + MIB > before);
    make(&place, "v", "66MiB");
}

#[test]
fn user_without_privilege_has_volumes_in_a_private_tmpfs() {
    if !common::can_be_nobody() {
        return;
    }
    let place = Place::new();
    common::give_to_nobody(&place.path);
    let run = |words: &[&str]| Ran::of(common::as_nobody(&place, words).output().unwrap());
    let up = run(&["up", "--capacity", "128MiB", "--json"]);
    let up: serde_json::Value = serde_json::from_str(&up.out).unwrap();
    let created = run(&["volume", "create", "v", "--size", "16MiB"]);
    if up["backing"] == "detached" {
        assert_eq!(created.code, Some(0), "{created:?}");
        run(&["volume", "create", "w", "--size", "120MiB"]).assert_refused(1, &["are needed"]);
        assert_eq!(run(&["volume", "delete", "v"]).code, Some(0));
    } else {
        // Where user namespaces are not allowed.
        created.assert_refused(1, &["a tmpfs of its own"]);
    }
    assert_eq!(run(&["down"]).code, Some(0));
}

#[test]
fn pool_in_a_plain_directory_has_no_volumes() {
    let place = Place::new();
    let disk = place.join("disk");
    let disk = disk.to_str().unwrap();
    place.ok(["up", "--media", "ssd", "--path", disk]);
    let refused = place.run(["volume", "create", "v", "--size", "1MiB", "--pool", disk]);
    refused.assert_refused(1, &["a tmpfs of its own"]);
    assert_eq!(place.json(["volume", "list", "--json", "--pool", disk]), serde_json::json!([]));
    place.ok(["down", "--pool", disk]);
}

#[test]
fn puts_of_several_processes_survive_the_death_of_the_worker() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    make(&place, "v", "8MiB");
    let (processes, steps) = (3, 400);
    let mut all: Vec<Child> =
        (0..processes).map(|i| spawn(&dir, &format!("use {i} {processes} {steps}"))).collect();
    all.iter_mut().for_each(|child| wait_for(child, "opened"));
    for _ in 0..3 {
        let pid = worker(&place);
        kill(pid, libc::SIGKILL);
        eventually("another worker serves", || worker(&place) != pid);
    }
    for mut child in all {
        wait_for(&mut child, "done");
        assert!(child.wait().unwrap().success());
    }
    // A process that opens it now, from the fourth worker, sees what they left.
    let volume = attach(&dir).volume_open(b"v", false).unwrap();
    let mut words = [0u64; 4];
    // SAFETY: the words are writable.
    unsafe { volume.get(0, words.as_mut_ptr().cast(), 32) }.unwrap();
    let sum = processes * steps;
    assert_eq!(words, [sum, 0, sum, sum]);
    // SAFETY: the words are readable.
    assert_eq!(unsafe { volume.put(0, words.as_ptr().cast(), 8) }, Err(Code::BadDescriptor));
    let list = place.json(["volume", "list", "--json"]);
    assert_eq!(number(&list[0]["bytes"]), 8 * MIB);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn volume_in_use_is_neither_shrunk_nor_deleted_until_its_users_are_gone_even_killed_ones() {
    let place = Place::new();
    let Some(dir) = pool(&place, "192MiB") else { return };
    make(&place, "v", "2MiB");
    place.ok(["volume", "resize", "v", "--size", "4MiB"]);
    let mut user = spawn(&dir, "hold");
    wait_for(&mut user, "opened");
    let refused = |place: &Place| {
        place.run(["volume", "delete", "v"]).assert_refused(1, &["a program has it open"]);
        place.run(["volume", "resize", "v", "--size", "2MiB"]).assert_refused(1, &["a program has it open"]);
    };
    refused(&place);
    let pid = worker(&place);
    kill(pid, libc::SIGKILL);
    eventually("another worker serves", || worker(&place) != pid);
    refused(&place);
    place.ok(["volume", "resize", "v", "--size", "6MiB"]);
    user.kill().unwrap();
    user.wait().unwrap();
    place.ok(["volume", "resize", "v", "--size", "2MiB"]);
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn programs_that_use_a_volume_get_eio_when_the_pool_is_killed_or_goes_down() {
    for orderly in [false, true] {
        let place = Place::new();
        let Some(dir) = pool(&place, "128MiB") else { return };
        make(&place, "v", "2MiB");
        let mut user = spawn(&dir, "put until gone");
        wait_for(&mut user, "opened");
        if orderly {
            let down = place.ok(["down"]);
            assert!(down.out.contains("volumes (2 MiB) are gone"), "{}", down.out);
        } else {
            let supervisor = place.json(["status", "--json"])["pids"]["supervisor"].as_i64().unwrap();
            kill(supervisor as i32, libc::SIGKILL);
        }
        wait_for(&mut user, "gone");
        assert!(user.wait().unwrap().success());
        if orderly {
            place.assert_nothing_left();
            continue;
        }
        // The next daemon has the record, not the memory.
        eventually("it starts again", || place.run(["up"]).code == Some(0));
        let lost = attach(&dir).volume_open(b"v", true).unwrap_err();
        assert_eq!((lost.code, lost.why.contains("is lost")), (Code::Io, true), "{lost}");
        let fsck = place.run(["fsck", "--json"]);
        assert!(fsck.code == Some(4) && fsck.out.contains("volume \\\"v\\\""), "{}", fsck.out);
        place.ok(["volume", "delete", "v"]);
        assert_eq!(place.json(["fsck", "--json"])["clean"], true);
        make(&place, "v", "60MiB"); // the capacity is whole again
    }
}

#[test]
fn fsck_names_a_capacity_that_files_and_volumes_do_not_share_rightly() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    make(&place, "v", "32MiB");
    let resize = |bytes: u64| {
        let target = dir.join("target");
        let options = format!("remount,size={bytes}");
        let mount = Command::new("mount").args(["-o", &options]).arg(&target).output().unwrap();
        assert!(mount.status.success(), "{mount:?}");
    };
    resize(128 * MIB);
    let fsck = place.run(["fsck"]);
    assert_eq!(fsck.code, Some(4), "{fsck:?}");
    // Its head has a page.
    assert!(fsck.out.contains("its volumes have 33558528 bytes"), "{}", fsck.out);
    resize(96 * MIB - 4096);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn down_that_keeps_the_data_is_refused_while_there_are_volumes() {
    let place = Place::new();
    let Some(_dir) = pool(&place, "128MiB") else { return };
    make(&place, "v", "2MiB");
    place.run(["down", "--keep"]).assert_refused(1, &["its volumes have 2 MiB", "--discard"]);
    place.ok(["down", "--keep", "--discard"]);
    place.ok(["up"]);
    place.ok(["volume", "delete", "v"]);
    place.ok(["down"]);
}

/// Puts memory that another thread unmaps meanwhile.
fn put_while_its_memory_goes(pool: &'static Pool) -> ! {
    const BYTES: usize = 16 << 20;
    let volume = pool.volume_open(b"v", true).unwrap();
    // SAFETY: a new mapping of our own. It is accessed after it was unmapped, which is what is tried.
    unsafe {
        // It leaves no core file behind.
        libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let memory =
            libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        memory.cast::<u8>().write_bytes(9, BYTES);
        let address = memory.expose_provenance();
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            libc::munmap(std::ptr::with_exposed_provenance_mut(address), BYTES);
        });
        loop {
            volume.put(0, memory.cast(), BYTES).unwrap();
        }
    }
}

#[test]
fn put_of_memory_that_is_unmapped_meanwhile_ends_its_process_alone() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    make(&place, "v", "32MiB");
    for _ in 0..5 {
        let ended = spawn(&dir, "put and unmap").wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(libc::SIGSEGV), "{ended:?}");
    }
    // What it had put is there, the volume works as before, and nobody has it open.
    let pool = attach(&dir);
    let volume = pool.volume_open(b"v", true).unwrap();
    let mut byte = [0];
    volume.get_bytes(0, &mut byte).unwrap();
    assert_eq!(byte, [9]);
    volume.put_bytes(0, &[1; 100]).unwrap();
    assert_eq!(volume.fetch_add(128, 1), Ok(0x0909_0909_0909_0909));
    drop(volume);
    place.ok(["volume", "delete", "v"]);
    place.ok(["fsck"]);
    place.ok(["down"]);
}

#[test]
fn names_of_any_bytes_work_in_every_verb() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    let name = OsStr::from_bytes(b"v\xff\xc3\xa4 \"q'");
    let words = |words: [&str; 2]| words.map(OsString::from);
    let with = |before: [&str; 2], after: &[&str]| {
        let after = after.iter().map(OsString::from);
        words(before).into_iter().chain([name.to_owned()]).chain(after).collect::<Vec<_>>()
    };
    place.ok(with(["volume", "create"], &["--size", "1MiB"]));
    let shown = place.ok(with(["volume", "show"], &[]));
    assert!(shown.out.contains("v\\xff\u{e4} \"q'"), "{shown:?}");
    let list = place.json(["volume", "list", "--json"]);
    assert_eq!(list[0]["name_hex"], "76ffc3a420227127", "{list}");
    attach(&dir).volume_open(name.as_bytes(), true).unwrap().put_bytes(0, b"here").unwrap();
    let file = dir.with_file_name("copy");
    place.ok(with(["volume", "copy"], &[file.to_str().unwrap()]));
    assert!(std::fs::read(&file).unwrap().starts_with(b"here"));
    place.ok(with(["volume", "load"], &[file.to_str().unwrap()]));
    place.ok(with(["volume", "format"], &[]));
    place.ok(with(["volume", "resize"], &["--size", "2MiB"]));
    place.ok(["fsck"]);
    place.ok(with(["volume", "delete"], &[]));
    assert_eq!(place.json(["volume", "list", "--json"]).as_array().map(Vec::len), Some(0));
    place.ok(["down"]);
}

#[test]
fn specifiers_are_parsed_and_errors_name_the_part() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    make(&place, "a", "2MiB");
    make(&place, "b", "3MiB");
    let pool = attach(&dir);
    let open = |text: &str| -> Result<u64, Error> {
        pool.volume_open(text.as_bytes(), true).map(|volume| volume.bytes())
    };
    for (text, bytes) in [("a", 2), ("1:a", 2), ("1.0/1.0:b", 3), ("a+b", 4), ("1:a+b+1/1:a", 6)] {
        assert_eq!(open(text).unwrap(), bytes * MIB, "{text}");
    }
    for (text, code, why) in [
        ("", Code::Invalid, "names a volume"),
        ("a+c", Code::NotFound, "specifier 2: there is no volume `c`"),
        ("7:a", Code::NoDevice, "not on node `7`"),
        ("7/1:a", Code::NoDevice, "`7` is not this node"),
        ("1.2:a", Code::Invalid, "`1.2`: a node has one link"),
        ("a+1:", Code::Invalid, "specifier 2"),
    ] {
        let error = open(text).unwrap_err();
        assert_eq!((error.code, error.why.contains(why)), (code, true), "{text}: {error}");
    }
}

#[test]
fn many_opens_and_a_read_only_descriptor_do_what_they_should() {
    let place = Place::new();
    let Some(dir) = pool(&place, "128MiB") else { return };
    make(&place, "v", "1MiB");
    let pool = attach(&dir);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    drop(pool.volume_open(b"v", true).unwrap());
    let before = descriptors();
    for _ in 0..1000 {
        drop(pool.volume_open(b"v", true).unwrap());
    }
    // Other tests of this program open files meanwhile; a leak would be a thousand.
    assert!(descriptors() < before + 500);
    let all: Vec<_> = (0..100).map(|_| pool.volume_open(b"v", false).unwrap()).collect();
    place.run(["volume", "delete", "v"]).assert_refused(1, &["has it open"]);
    drop(all);
    place.ok(["volume", "delete", "v"]);
}
