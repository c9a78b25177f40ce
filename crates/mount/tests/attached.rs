//! Attached trees through the mount: restored, listed, refreshed, released; a store that does not answer; a full pool.
//!
//! The store is a directory beside the pool. Only the mover calls the store, so these tests stop the mover to
//! get a store that does not answer.

mod common;

use common::{wait_for, Place, Stopped};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;

use serde_json::Value;

/// A mounted pool that shows a store at `/s`.
struct Attached {
    place: Place,
}

impl Attached {
    fn up(capacity: &str, options: &str) -> Option<Attached> {
        let place = Place::of(&["--capacity", capacity])?;
        let store = place.dir.join("store");
        std::fs::create_dir(&store).unwrap();
        place.done(&["attach", &format!("file://{}{options}", store.display()), "/s"]);
        place.done(&["mount", place.mnt().to_str().unwrap()]);
        Some(Attached { place })
    }

    /// A path on the mount.
    fn at(&self, name: &str) -> PathBuf {
        self.place.mnt().join("s").join(name)
    }

    fn store(&self, name: &str) -> PathBuf {
        self.place.dir.join("store").join(name)
    }

    fn state(&self, name: &str) -> String {
        let all: Value =
            serde_json::from_str(&self.place.done(&["state", &format!("/s/{name}"), "--json"])).unwrap();
        all[0]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// Writes a file through the mount, and releases it.
    fn released(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.at(name), bytes).unwrap();
        self.release(name);
    }

    fn release(&self, name: &str) {
        self.place.done(&["purge", &format!("/s/{name}")]);
        assert_eq!(self.state(name), "released");
    }

    fn sync(&self) {
        self.place.done(&["sync", "-r", "/s"]);
    }

    fn used_percent(&self) -> u64 {
        let status = self.place.status();
        let bytes = |what: &str| status[what].as_u64().unwrap();
        bytes("used_bytes") * 100 / (bytes("used_bytes") + bytes("free_bytes"))
    }

    /// Writes files until the pool is used to this percentage. Returns how many.
    fn fill(&self, percent: u64) -> usize {
        for i in 0.. {
            if self.used_percent() >= percent {
                return i;
            }
            std::fs::write(self.at(&format!("fill{i}")), vec![i as u8; 1 << 20]).unwrap();
        }
        unreachable!()
    }

    fn mover(&self) -> i32 {
        self.place.pid("mover")
    }
}

fn opened(path: &Path, flags: i32) -> std::io::Result<File> {
    let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let read = flags & libc::O_ACCMODE != libc::O_WRONLY;
    File::options().read(read).write(write).custom_flags(flags & !libc::O_ACCMODE).open(path)
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).map(|i| ((i * 31) >> 3) as u8).collect()
}

#[test]
fn released_file_is_restored_by_every_kind_of_open() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    let whole = bytes(300_000);
    on.released("f", &whole);
    let found = std::fs::metadata(on.at("f")).unwrap();
    assert_eq!((found.len(), found.blocks()), (300_000, 592), "as if its data were there");
    assert_eq!(on.state("f"), "released", "stat restores nothing");
    assert_eq!(std::fs::read(on.at("f")).unwrap(), whole);

    on.release("f");
    let file = opened(&on.at("f"), libc::O_RDWR).unwrap();
    file.write_all_at(b"X", 100).unwrap();
    drop(file);
    let mut expected = whole.clone();
    expected[100] = b'X';
    assert_eq!(std::fs::read(on.at("f")).unwrap(), expected);

    on.release("f");
    let mut file = opened(&on.at("f"), libc::O_WRONLY | libc::O_APPEND).unwrap();
    file.write_all(b"end").unwrap();
    drop(file);
    expected.extend_from_slice(b"end");
    on.release("f");
    assert_eq!(std::fs::read(on.at("f")).unwrap(), expected);
    assert_eq!(std::fs::read(on.store("f")).unwrap(), expected);

    on.release("f");
    // A descriptor that only names the file restores nothing; opened again through it, the file is restored.
    let names = opened(&on.at("f"), libc::O_PATH).unwrap();
    assert_eq!(on.state("f"), "released");
    let again = File::open(format!("/proc/self/fd/{}", names.as_raw_fd())).unwrap();
    let mut read = Vec::new();
    (&again).read_to_end(&mut read).unwrap();
    assert_eq!(read, expected);
    drop(again);
    // The same after another release: the descriptor names the file, not what was its data.
    on.release("f");
    std::fs::write(on.at("f"), b"new").unwrap();
    let again = std::fs::read(format!("/proc/self/fd/{}", names.as_raw_fd())).unwrap();
    assert_eq!(again, b"new");
    drop(names);

    on.release("f");
    drop(opened(&on.at("f"), libc::O_WRONLY | libc::O_TRUNC).unwrap());
    assert_eq!(std::fs::metadata(on.at("f")).unwrap().len(), 0);
    on.sync();
    assert_eq!(std::fs::read(on.store("f")).unwrap(), b"");

    on.released("g", &whole);
    // truncate(2): an open and a truncation in one call.
    let name = std::ffi::CString::new(on.at("g").to_str().unwrap()).unwrap();
    // SAFETY: the name ends in NUL.
    assert_eq!(unsafe { libc::truncate(name.as_ptr(), 1000) }, 0);
    assert_eq!(std::fs::read(on.at("g")).unwrap(), whole[..1000]);
    on.place.is_clean();
}

#[test]
fn mapping_of_a_released_file_shows_its_data_and_keeps_it_from_being_released() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    let whole = bytes(100_000);
    on.released("f", &whole);
    let file = opened(&on.at("f"), libc::O_RDWR).unwrap();
    // SAFETY: a new mapping of a whole file.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            whole.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    drop(file);
    // SAFETY: the mapping is ours, and as long as said.
    let memory = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), whole.len()) };
    assert_eq!(memory, &whole[..]);
    assert!(!on.place.run(&["release", "/s/f"]).status.success(), "it is mapped");
    memory[7] = b'M';
    // SAFETY: as above; `memory` is not used any more.
    unsafe { libc::munmap(mapped, whole.len()) };
    on.release("f");
    let mut expected = whole;
    expected[7] = b'M';
    assert_eq!(std::fs::read(on.store("f")).unwrap(), expected);
    assert_eq!(std::fs::read(on.at("f")).unwrap(), expected);
}

#[test]
fn readers_of_a_file_do_not_keep_what_a_writer_wrote_from_the_store() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    std::fs::write(on.at("f"), b"first").unwrap();
    on.sync();
    // The mount opens a backing file once for all programs: for reading first, for writing next.
    let before = File::open(on.at("f")).unwrap();
    let writer = opened(&on.at("f"), libc::O_RDWR).unwrap();
    let during = File::open(on.at("f")).unwrap();
    writer.write_all_at(b"other", 0).unwrap();
    drop(writer);
    wait_for("the store has it", || std::fs::read(on.store("f")).is_ok_and(|bytes| bytes == b"other"));
    wait_for("it is clean", || on.state("f") == "clean");
    // Again, by a writer that appends, with readers that never go.
    let mut writer = opened(&on.at("f"), libc::O_WRONLY | libc::O_APPEND).unwrap();
    writer.write_all(b" one").unwrap();
    drop(writer);
    wait_for("the store has it", || std::fs::read(on.store("f")).is_ok_and(|bytes| bytes == b"other one"));
    wait_for("it is clean", || on.state("f") == "clean");
    for mut reader in [before, during] {
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"other one");
    }
    on.place.is_clean();
}

#[test]
fn released_program_runs_and_released_hard_links_are_one_file() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    std::fs::copy("/bin/true", on.at("true")).unwrap();
    std::fs::set_permissions(on.at("true"), PermissionsExt::from_mode(0o755)).unwrap();
    on.release("true");
    assert!(Command::new(on.at("true")).status().unwrap().success());
    std::fs::write(on.at("one"), "data").unwrap();
    std::fs::hard_link(on.at("one"), on.at("two")).unwrap();
    on.release("one");
    assert_eq!(on.state("two"), "released");
    assert_eq!(std::fs::metadata(on.at("two")).unwrap().nlink(), 2);
    std::fs::remove_file(on.at("one")).unwrap();
    assert_eq!(std::fs::read_to_string(on.at("two")).unwrap(), "data");
    File::options().append(true).open(on.at("two")).unwrap().write_all(b" and more").unwrap();
    on.sync();
    assert!(!on.store("one").exists());
    assert_eq!(std::fs::read_to_string(on.store("two")).unwrap(), "data and more");
}

#[test]
fn what_another_program_puts_into_the_store_is_seen_after_a_refresh() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    on.released("old", b"old");
    std::fs::create_dir(on.at("d")).unwrap();
    on.sync();
    // The kernel may remember that these names are absent, and what the file is.
    assert!(!on.at("new").exists() && !on.at("d/deep").exists());
    assert_eq!(std::fs::metadata(on.at("old")).unwrap().len(), 3);
    std::fs::write(on.store("new"), "from elsewhere").unwrap();
    std::fs::write(on.store("d/deep"), "deep").unwrap();
    std::fs::write(on.store("old"), "changed, and longer").unwrap();
    on.place.done(&["refresh", "-r", "/s"]);
    assert_eq!(std::fs::metadata(on.at("old")).unwrap().len(), 19);
    assert_eq!(std::fs::read_to_string(on.at("old")).unwrap(), "changed, and longer");
    assert_eq!(std::fs::read_to_string(on.at("new")).unwrap(), "from elsewhere");
    assert_eq!(std::fs::read_to_string(on.at("d/deep")).unwrap(), "deep");
    let names: Vec<_> = std::fs::read_dir(on.at("")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn two_interfaces_use_one_file_that_is_released_between() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    on.released("f", b"one\n");
    assert_eq!(on.place.preloaded("cat /forebay/s/f"), "one\n");
    let file = File::open(on.at("f")).unwrap();
    assert!(!on.place.run(&["release", "/s/f"]).status.success(), "it is open through the mount");
    on.place.preloaded("echo two >> /forebay/s/f");
    let mut read = String::new();
    (&file).read_to_string(&mut read).unwrap();
    assert_eq!(read, "one\ntwo\n");
    drop(file);
    on.release("f");
    let mut file = File::options().append(true).open(on.at("f")).unwrap();
    file.write_all(b"three\n").unwrap();
    assert_eq!(on.place.preloaded("cat /forebay/s/f"), "one\ntwo\nthree\n");
    drop(file);
    on.release("f");
    assert_eq!(on.place.preloaded("stat -c %s /forebay/s/f; cat /forebay/s/f"), "14\none\ntwo\nthree\n");
    assert_eq!(std::fs::read_to_string(on.store("f")).unwrap(), "one\ntwo\nthree\n");
}

#[test]
fn store_that_does_not_answer_holds_up_only_what_needs_it() {
    const PROGRAMS: usize = 90;
    let Some(on) = Attached::up("128MiB", "") else { return };
    std::fs::write(on.at("resident"), "here").unwrap();
    for i in 0..PROGRAMS {
        std::fs::write(on.at(&format!("f{i}")), format!("data {i}")).unwrap();
    }
    on.place.done(&["purge", "-r", "/s"]);
    for i in 0..PROGRAMS {
        std::fs::create_dir(on.store(&format!("d{i}"))).unwrap();
        std::fs::write(on.store(&format!("d{i}/x")), "x").unwrap();
    }
    on.place.done(&["refresh", "/s"]);
    assert_eq!(std::fs::read_to_string(on.at("resident")).unwrap(), "here");

    let stopped = Stopped::new(on.mover());
    let (done, results) = channel();
    std::thread::scope(|scope| {
        for i in 0..PROGRAMS {
            let (path, restored) = (on.at(&format!("f{i}")), done.clone());
            scope.spawn(move || restored.send(std::fs::read(path).map(|bytes| bytes.len())).unwrap());
            let (path, listed) = (on.at(&format!("d{i}/x")), done.clone());
            scope.spawn(move || listed.send(std::fs::metadata(path).map(|st| st.len() as usize)).unwrap());
        }
        // All of these are served while the others wait, whatever they wait for.
        assert_eq!(std::fs::read_to_string(on.at("resident")).unwrap(), "here");
        std::fs::write(on.at("written meanwhile"), "w").unwrap();
        std::fs::create_dir(on.place.file("elsewhere")).unwrap();
        std::fs::write(on.place.file("elsewhere/f"), "no store has it").unwrap();
        assert_eq!(
            std::fs::metadata(on.at("f0")).unwrap().len(),
            6,
            "its open waits, its attributes are known"
        );
        assert!(std::fs::read_dir(on.at("")).unwrap().count() > 2 * PROGRAMS);
        assert_eq!(on.place.preloaded("cat /forebay/s/resident"), "here");
        assert!(results.try_recv().is_err(), "a program got data or names that no store gave");
        drop(stopped);
        for _ in 0..2 * PROGRAMS {
            let got = results.recv().unwrap();
            assert!(matches!(got, Ok(1..=7)), "{got:?}");
        }
    });
}

#[test]
fn directory_of_a_store_that_does_not_answer_fails_after_a_time() {
    let Some(on) = Attached::up("128MiB", "") else { return };
    std::fs::create_dir(on.store("d")).unwrap();
    std::fs::write(on.store("d/x"), "x").unwrap();
    on.place.done(&["refresh", "/s"]);
    assert_eq!(std::fs::read_dir(on.at("")).unwrap().count(), 1);
    let stopped = Stopped::new(on.mover());
    std::thread::scope(|scope| {
        let found = scope.spawn(|| std::fs::metadata(on.at("d/x")).map(|st| st.len()));
        let listed = scope.spawn(|| std::fs::read_dir(on.at("d")).map(|_| ()));
        for error in [found.join().unwrap().err(), listed.join().unwrap().err()] {
            assert_eq!(error.and_then(|e| e.raw_os_error()), Some(libc::EIO));
        }
    });
    drop(stopped);
    wait_for("the store answers again", || std::fs::metadata(on.at("d/x")).is_ok_and(|st| st.len() == 1));
}

#[test]
fn write_to_a_file_opened_in_a_nearly_full_pool_waits_for_space() {
    let Some(on) = Attached::up("64MiB", "") else { return };
    let early = File::create(on.at("early")).unwrap();
    let stopped = Stopped::new(on.mover());
    let fill = on.fill(80);
    // Beside a passthrough open of the same file, which was made when there was space.
    let also_early = opened(&on.at("early"), libc::O_RDWR).unwrap();
    let late =
        File::options().read(true).write(true).create(true).truncate(true).open(on.at("late")).unwrap();
    let (done, results) = channel();
    let total = 24 << 20;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..total >> 20 {
                late.write_all_at(&vec![i as u8 + 1; 1 << 20], i << 20).unwrap();
                done.send(i).unwrap();
            }
        });
        wait_for("the pool is full", || on.used_percent() >= 90);
        // The writer waits; it gets no error. The descriptor from before has what is left.
        early.write_all_at(b"early", 0).unwrap();
        assert!(results.try_iter().count() < total as usize >> 20);
        drop(stopped);
    });
    also_early.write_all_at(b"late", 5).unwrap();
    assert_eq!(std::fs::read(on.at("early")).unwrap(), b"earlylate");
    for i in 0..total >> 20 {
        let mut piece = vec![0; 1 << 20];
        late.read_exact_at(&mut piece, i << 20).unwrap();
        assert!(piece.iter().all(|byte| *byte == i as u8 + 1), "piece {i}");
    }
    drop((early, also_early, late));
    on.sync();
    for i in 0..fill {
        assert!(std::fs::read(on.store(&format!("fill{i}"))).unwrap().iter().all(|byte| *byte == i as u8));
    }
    assert_eq!(std::fs::read(on.store("late")).unwrap(), std::fs::read(on.at("late")).unwrap());
    on.place.is_clean();
}

#[test]
fn more_data_than_the_pool_holds_pass_through_it_to_a_slow_store() {
    const WRITERS: usize = 4;
    const FILES: usize = 16;
    const BYTES: usize = 3 << 20;
    let Some(on) = Attached::up("64MiB", "?rate=40MB/s") else { return };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let on = &on;
            scope.spawn(move || {
                for file in 0..FILES {
                    let mut to = File::create(on.at(&format!("w{writer}-{file}"))).unwrap();
                    for piece in 0..BYTES >> 16 {
                        to.write_all(&[(writer * 64 + file + piece) as u8; 1 << 16]).unwrap();
                    }
                }
            });
        }
    });
    on.sync();
    for writer in 0..WRITERS {
        for file in 0..FILES {
            let stored = std::fs::read(on.store(&format!("w{writer}-{file}"))).unwrap();
            assert_eq!(stored.len(), BYTES);
            let right = |(i, byte): (usize, &u8)| *byte == (writer * 64 + file + (i >> 16)) as u8;
            assert!(stored.iter().enumerate().all(right), "w{writer}-{file}");
        }
    }
    on.place.is_clean();
}

#[test]
fn file_opened_in_a_nearly_full_pool_can_be_mapped_and_appended_to() {
    let Some(on) = Attached::up("64MiB", "") else { return };
    let stopped = Stopped::new(on.mover());
    on.fill(80);
    let flags = libc::O_RDWR | libc::O_APPEND | libc::O_CREAT;
    let name = std::ffi::CString::new(on.at("f").to_str().unwrap()).unwrap();
    // SAFETY: the name ends in NUL; the descriptor is new and ours.
    let file = unsafe { File::from(OwnedFd::from_raw_fd(libc::open(name.as_ptr(), flags, 0o644))) };
    (&file).write_all(&[b'a'; 4096]).unwrap();
    // SAFETY: a new mapping of a whole file.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    // SAFETY: the mapping is ours, and as long as said.
    let memory = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), 4096) };
    memory[1] = b'm';
    (&file).write_all(b"end").unwrap();
    let mut read = vec![0; 4099];
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!((&read[..3], &read[4095..]), (&b"ama"[..], &b"aend"[..]));
    file.write_all_at(b"x", 0).unwrap(); // O_APPEND: Linux appends
    assert_eq!(std::fs::metadata(on.at("f")).unwrap().len(), 4100);
    // SAFETY: as above; `memory` is not used any more.
    unsafe { libc::munmap(mapped, 4096) };
    drop((file, stopped));
}

#[test]
fn descriptor_from_before_uses_what_is_left_and_then_gets_enospc() {
    let Some(on) = Attached::up("64MiB", "") else { return };
    let early = File::create(on.at("early")).unwrap();
    let stopped = Stopped::new(on.mover());
    on.fill(80);
    let mut written = 0;
    let refused = loop {
        match early.write_at(&[7; 1 << 16], written) {
            Ok(n) => written += n as u64,
            Err(e) => break e.raw_os_error(),
        }
    };
    assert_eq!(refused, Some(libc::ENOSPC));
    assert!(on.used_percent() >= 90, "it had the space above the watermark");
    early.set_len(0).unwrap();
    // The same under preload, for a file that was opened when there was space.
    let line = "exec 3>/forebay/s/also; head -c 64M /dev/zero 2>&1 >&3 || true; : >/forebay/s/also";
    let said = on.place.preloaded(line);
    assert!(said.contains("No space left on device"), "{said}");
    drop((early, stopped));
    on.sync();
    on.place.is_clean();
}
