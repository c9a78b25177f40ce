//! Large files that are read while they are restored: through the mount, and by preloaded programs through the mount. And
//! preloaded programs that write where space is scarce, which get their files through the mount too.
//!
//! The store is slow, so that a file takes seconds. Where a test needs a restore that does not go on, it stops the mover.

mod common;

use common::{is_equal, read, wait_for, Place, Stopped};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;

const MIB: usize = 1 << 20;
/// Bytes of a file that is large.
const LARGE: usize = 20 * MIB + 123;

/// A mounted pool that shows a store at `/s`.
struct Slow {
    place: Place,
}

impl Slow {
    /// The store has one large file, `f`, and delivers it in some seconds.
    fn up() -> Option<(Slow, Vec<u8>)> {
        let on =
            Slow::of("128MiB", "?rate=5MB/s", |store| std::fs::write(store.join("f"), bytes(1)).unwrap())?;
        assert_eq!(on.state(), "released");
        Some((on, bytes(1)))
    }

    fn of(capacity: &str, options: &str, fill: impl FnOnce(&PathBuf)) -> Option<Slow> {
        let place = Place::of(&["--capacity", capacity])?;
        let store = place.dir.join("store");
        std::fs::create_dir(&store).unwrap();
        fill(&store);
        place.done(&["attach", &format!("file://{}{options}", store.display()), "/s"]);
        place.done(&["mount", place.mnt().to_str().unwrap()]);
        Some(Slow { place })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.mnt().join("s").join(name)
    }

    fn store(&self, name: &str) -> PathBuf {
        self.place.dir.join("store").join(name)
    }

    fn state(&self) -> String {
        let all: Value = serde_json::from_str(&self.place.done(&["state", "/s/f", "--json"])).unwrap();
        all[0]["state"].as_str().unwrap_or_default().to_owned()
    }

    fn mover(&self) -> i32 {
        self.place.pid("mover")
    }

    fn used_percent(&self) -> u64 {
        let status = self.place.status();
        let bytes = |what: &str| status[what].as_u64().unwrap();
        bytes("used_bytes") * 100 / (bytes("used_bytes") + bytes("free_bytes"))
    }
}

/// The contents of a large file.
fn bytes(seed: u64) -> Vec<u8> {
    common::bytes(seed, LARGE)
}

#[test]
fn reader_of_a_large_file_gets_what_it_reads_before_the_rest_has_arrived() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    // The end of the file, over the border of two ranges.
    let from = 19 * MIB - 100;
    is_equal(&file, from, &whole[from..from + 200]);
    let stopped = Stopped::new(on.mover());
    assert_eq!(on.state(), "released", "the rest has not arrived");
    is_equal(&file, from, &whole[from..from + 200]);
    assert_eq!(file.metadata().unwrap().len(), LARGE as u64);
    assert_eq!(file.read_at(&mut [0; 10], LARGE as u64).unwrap(), 0, "the end is known");
    // An open returns although nothing arrives, also in a preloaded program.
    drop(File::open(on.at("f")).unwrap());
    let by_mount = |expected: bool| {
        let shown = on.place.preloaded("exec 3< /forebay/s/f; readlink /proc/self/fd/3");
        assert_eq!(shown.contains("/.forebay-inode-"), expected, "{shown}");
    };
    by_mount(true);
    drop(stopped);
    let copied = on.place.dir.join("copied");
    on.place.preloaded(&format!("cat /forebay/s/f > {}", copied.display()));
    assert!(std::fs::read(copied).unwrap() == whole);
    is_equal(&file, 0, &whole);
    wait_for("all has arrived", || on.state() == "clean");
    by_mount(false);
    assert!(std::fs::read(on.at("f")).unwrap() == whole);
    assert!(!on.place.run(&["release", "/s/f"]).status.success(), "it is open");
    drop(file);
    wait_for("it is closed", || on.place.run(&["release", "/s/f"]).status.success());
    on.place.is_clean();
}

#[test]
fn mappings_locks_and_writers_of_a_file_that_arrives_see_its_data() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    for kind in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        // SAFETY: a new mapping of a whole file, which is unmapped below.
        unsafe {
            let at = libc::mmap(std::ptr::null_mut(), LARGE, libc::PROT_READ, kind, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            let mapped = std::slice::from_raw_parts(at.cast::<u8>(), LARGE);
            assert!(mapped[LARGE - 50_000..] == whole[LARGE - 50_000..]);
            assert!(mapped[7 * MIB..7 * MIB + 50_000] == whole[7 * MIB..7 * MIB + 50_000]);
            libc::munmap(at, LARGE);
        }
    }
    // A lock waits for the whole file, and excludes others.
    file.lock_shared().unwrap();
    let other = File::options().read(true).write(true).open(on.at("f")).unwrap();
    assert!(other.try_lock().is_err());
    file.unlock().unwrap();
    other.lock().unwrap();
    other.write_all_at(b"written by another", 1000).unwrap();
    is_equal(&file, 1000, b"written by another");
    other.set_len(5000).unwrap();
    assert_eq!(file.read_at(&mut [0; 10], 5000).unwrap(), 0);
    drop((file, other));
    on.place.done(&["sync", "-r", "/s"]);
    let stored = std::fs::read(on.store("f")).unwrap();
    assert!(
        stored.len() == 5000
            && stored[..1000] == whole[..1000]
            && &stored[1000..1018] == b"written by another"
    );
}

#[test]
fn file_that_is_removed_or_renamed_while_it_arrives_stays_whole_for_its_readers() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    is_equal(&file, 5 * MIB, &whole[5 * MIB..5 * MIB + 10]);
    std::fs::create_dir(on.at("d")).unwrap();
    std::fs::rename(on.at("f"), on.at("d/g")).unwrap();
    is_equal(&file, 12 * MIB, &whole[12 * MIB..12 * MIB + 10]);
    wait_for("the store has the new name", || on.store("d/g").exists() && !on.store("f").exists());
    is_equal(&file, 15 * MIB, &whole[15 * MIB..15 * MIB + 10]);
    std::fs::remove_file(on.at("d/g")).unwrap();
    is_equal(&file, 0, &whole);
    on.place.done(&["sync", "-r", "/s"]);
    assert!(!on.store("d/g").exists());
    is_equal(&file, 0, &whole);
    drop(file);
    on.place.is_clean();
}

#[test]
fn readers_get_no_other_versions_data_and_an_error_for_what_the_store_does_not_give() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    is_equal(&file, 0, &whole[..1000]);
    // It is gone in the store.
    std::fs::rename(on.store("f"), on.place.dir.join("aside")).unwrap();
    let error = read(&file, 19 * MIB, 100).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    is_equal(&file, 0, &whole[..1000]);
    assert_eq!(on.state(), "released");
    let other = File::open(on.at("f")).unwrap();
    assert_eq!(read(&other, 0, 100).unwrap_err().raw_os_error(), Some(libc::EIO));
    // The same file again: readers go on.
    std::fs::rename(on.place.dir.join("aside"), on.store("f")).unwrap();
    is_equal(&file, 19 * MIB, &whole[19 * MIB..]);
    // Another file under its name: its readers get no mixture.
    let new = bytes(2);
    std::fs::write(on.place.dir.join("new"), &new).unwrap();
    std::fs::rename(on.place.dir.join("new"), on.store("f")).unwrap();
    let mut errors = 0;
    for from in (0..LARGE - 100).step_by(MIB / 2) {
        match read(&file, from, 100) {
            Ok(read) => assert!(read == whole[from..from + 100], "from {from} on"),
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EIO));
                errors += 1;
            }
        }
    }
    assert!(errors > 0, "the old version cannot have arrived whole");
    drop((file, other));
    assert!(std::fs::read(on.at("f")).unwrap() == new);
    on.place.is_clean();
}

#[test]
fn killed_movers_and_workers_cost_readers_nothing_but_time() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    is_equal(&file, 3 * MIB, &whole[3 * MIB..4 * MIB]);
    common::kill(on.mover());
    is_equal(&file, 3 * MIB, &whole[3 * MIB..4 * MIB]);
    is_equal(&file, 16 * MIB, &whole[16 * MIB..16 * MIB + 10]);
    on.place.kill("worker");
    is_equal(&file, 17 * MIB - 5, &whole[17 * MIB - 5..17 * MIB + 5]);
    is_equal(&file, 0, &whole);
    assert!(std::fs::read(on.at("f")).unwrap() == whole);
    on.place.is_clean();
}

#[test]
fn killed_mount_leaves_a_file_that_arrives_as_it_was() {
    let Some((on, whole)) = Slow::up() else { return };
    let file = File::open(on.at("f")).unwrap();
    is_equal(&file, 0, &whole[..10]);
    on.place.kill("mount");
    let error = read(&file, 19 * MIB, 10).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)), "{error}");
    wait_for("it is mounted again", || on.at("f").exists());
    let file = File::open(on.at("f")).unwrap();
    is_equal(&file, 0, &whole);
}

#[test]
fn program_that_scans_gets_enodata_for_released_files() {
    let fill = |store: &PathBuf| {
        std::fs::write(store.join("f"), bytes(1)).unwrap();
        std::fs::write(store.join("small"), "needle").unwrap();
        std::fs::write(store.join("here"), "needle").unwrap();
    };
    let Some(on) = Slow::of("128MiB", "", fill) else { return };
    assert_eq!(on.place.preloaded("cat /forebay/s/here"), "needle");
    let scan = |line: &str| {
        let mut command = on.place.command(&["run", "--quiet", "--", "sh", "-c", line]);
        command.env("FOREBAY_RECALL", "no").env("LC_ALL", "C").output().unwrap()
    };
    let found = scan("ls -l /forebay/s; grep -rl needle /forebay/s");
    let (names, errors) = (String::from_utf8_lossy(&found.stdout), String::from_utf8_lossy(&found.stderr));
    assert!(names.contains("/forebay/s/here") && !names.contains("/forebay/s/small"), "{names}");
    for name in ["f", "small"] {
        assert!(errors.contains(&format!("{name}: No data available")), "{errors}");
    }
    let copied = scan(
        "for f in f small; do cp /forebay/s/$f /dev/null && echo read $f; echo x >> /forebay/s/$f; done",
    );
    assert_eq!(String::from_utf8_lossy(&copied.stdout), "");
    assert_eq!(on.state(), "released");
    assert!(scan("echo new > /forebay/s/new && cat /forebay/s/new").status.success());
    assert_eq!(on.place.preloaded("cat /forebay/s/small"), "needle");
    on.place.is_clean();
}

#[test]
fn preloaded_program_that_writes_in_a_nearly_full_pool_waits_for_space() {
    let Some(on) = Slow::of("64MiB", "", |_| {}) else { return };
    let data: Vec<u8> = bytes(3).into_iter().cycle().take(24 * MIB).collect();
    std::fs::write(on.place.dir.join("data"), &data).unwrap();
    let show = |path: &str, how: &str| {
        on.place.preloaded(&format!("exec 3{how} /forebay/s/{path}; readlink /proc/self/fd/3"))
    };
    assert!(!show("early", ">").contains("/.forebay-inode-"), "there is space");
    let stopped = Stopped::new(on.mover());
    for i in 0.. {
        if on.used_percent() >= 80 {
            break;
        }
        File::create(on.at(&format!("fill{i}"))).unwrap().write_all(&vec![i as u8; MIB]).unwrap();
    }
    assert!(show("new", ">").contains("/.forebay-inode-"), "a new file");
    assert!(show("early", ">>").contains("/.forebay-inode-"), "a file that is there");
    assert!(!show("early", "<").contains("/.forebay-inode-"), "a reader does not wait");
    let copy = format!("cat {} > /forebay/s/late", on.place.dir.join("data").display());
    let mut command = on.place.command(&["run", "--quiet", "--", "sh", "-c", &copy]);
    let mut writer = command.stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the pool is full", || on.used_percent() >= 90);
    assert!(writer.try_wait().unwrap().is_none(), "it waits");
    drop(stopped);
    let done = writer.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    on.place.done(&["sync", "-r", "/s"]);
    assert!(std::fs::read(on.store("late")).unwrap() == data);
    on.place.is_clean();
}
