//! Released files for which the pool has no room: the mount reads them from the store without a copy.
//!
//! The pool is full of what programs wrote, which the policy does not copy to the store, so that nothing can be released.

mod common;

use common::{bytes, is_equal, read, wait_for, Place};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use serde_json::Value;

const MIB: usize = 1 << 20;
/// Bytes of a file that would be read while it arrives if there were room, and of one that would be opened whole.
const LARGE: usize = 20 * MIB + 123;
const SMALL: usize = 6 * MIB + 5;

/// A mounted pool that is full, and shows a store at `/s` with a file `large` and a file `small`.
struct Full {
    place: Place,
    large: Vec<u8>,
    small: Vec<u8>,
}

impl Full {
    fn up() -> Option<Full> {
        let place = Place::of(&["--capacity", "64MiB"])?;
        let (large, small) = (bytes(1, LARGE), bytes(2, SMALL));
        let store = place.dir.join("store");
        std::fs::create_dir(&store).unwrap();
        std::fs::write(store.join("large"), &large).unwrap();
        std::fs::write(store.join("small"), &small).unwrap();
        place.done(&[
            "attach",
            &format!("file://{}?rate=10MB/s", store.display()),
            "/s",
            "--drain",
            "request",
        ]);
        place.done(&["mount", place.mnt().to_str().unwrap()]);
        let on = Full { place, large, small };
        // A descriptor from before the pool is full uses all that is left.
        let mut dirty = File::create(on.at("dirty")).unwrap();
        loop {
            match dirty.write_all(&[7; 64 << 10]) {
                Ok(()) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => break,
                Err(e) => panic!("{e}"),
            }
        }
        Some(on)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.mnt().join("s").join(name)
    }

    fn store(&self, name: &str) -> PathBuf {
        self.place.dir.join("store").join(name)
    }

    fn state(&self, name: &str) -> String {
        let shown = self.place.done(&["state", &format!("/s/{name}"), "--json"]);
        let all: Value = serde_json::from_str(&shown).unwrap();
        all[0]["state"].as_str().unwrap_or_default().to_owned()
    }

    fn mover(&self) -> i32 {
        self.place.pid("mover")
    }

    /// The store has what programs wrote, and the pool releases it.
    fn make_room(&self) {
        self.place.done(&["sync", "-r", "/s"]);
        wait_for("there is room", || {
            let _ = self.place.run(&["release", "/s/dirty"]);
            self.state("dirty") == "released"
        });
    }
}

/// An open whose version is gone from the store reads what has arrived of it, and nothing of another one.
#[track_caller]
fn reads_no_other(open: &File, old: &[u8]) {
    let mut errors = 0;
    for from in (0..old.len() - 100).step_by(MIB / 2) {
        match read(open, from, 100) {
            Ok(read) => assert!(read == old[from..from + 100], "from {from} on"),
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EIO));
                errors += 1;
            }
        }
    }
    assert!(errors > 0, "the old version was not read whole");
}

#[test]
fn reader_of_a_file_for_which_there_is_no_room_reads_it_from_the_store() {
    let Some(on) = Full::up() else { return };
    let open = File::open(on.at("large")).unwrap();
    is_equal(&open, 19 * MIB - 100, &on.large[19 * MIB - 100..19 * MIB + 100]);
    is_equal(&open, 0, &on.large);
    assert_eq!(open.read_at(&mut [0; 10], LARGE as u64).unwrap(), 0, "the end is known");
    assert_eq!(open.metadata().unwrap().size(), LARGE as u64);
    assert!(std::fs::read(on.at("small")).unwrap() == on.small);
    // A mapping has the kernel's copy.
    let small = File::open(on.at("small")).unwrap();
    // SAFETY: a new mapping of a whole file, which is unmapped below.
    unsafe {
        let at =
            libc::mmap(std::ptr::null_mut(), SMALL, libc::PROT_READ, libc::MAP_SHARED, small.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        assert!(std::slice::from_raw_parts(at.cast::<u8>(), SMALL) == on.small);
        libc::munmap(at, SMALL);
    }
    // Preloaded programs read through the mount.
    for name in ["large", "small"] {
        on.place.preloaded(&format!("cmp /forebay/s/{name} {}", on.store(name).display()));
    }
    for name in ["large", "small"] {
        assert_eq!(on.state(name), "released", "{name}");
    }
    // What is open goes over to the pool's data, and later opens restore the file.
    on.make_room();
    is_equal(&small, 5 * MIB, &on.small[5 * MIB..]);
    assert!(std::fs::read(on.at("small")).unwrap() == on.small);
    assert!(std::fs::read(on.at("large")).unwrap() == on.large);
    wait_for("all is restored", || on.state("small") == "clean" && on.state("large") == "clean");
    is_equal(&open, 0, &on.large);
    is_equal(&small, 0, &on.small);
    drop((open, small));
    on.place.is_clean();
}

#[test]
fn killed_movers_cost_readers_from_the_store_nothing_but_time() {
    let Some(on) = Full::up() else { return };
    let (begun, begins) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let file = File::open(on.at("large")).unwrap();
            is_equal(&file, 0, &on.large[..MIB]);
            begun.send(()).unwrap();
            is_equal(&file, 0, &on.large);
        });
        begins.recv().unwrap();
        for _ in 0..2 {
            let mover = on.mover();
            common::kill(mover);
            wait_for("another mover runs", || on.mover() != mover);
        }
        reader.join().unwrap();
    });
    assert_eq!(on.state("large"), "released");
    on.make_room();
    assert!(std::fs::read(on.at("large")).unwrap() == on.large);
    on.place.is_clean();
}

#[test]
fn open_that_reads_from_the_store_gets_no_other_versions_data() {
    let Some(on) = Full::up() else { return };
    let open = File::open(on.at("large")).unwrap();
    is_equal(&open, 0, &on.large[..1000]);
    // Another file of the same size.
    let new = bytes(3, LARGE);
    std::fs::write(on.place.dir.join("new"), &new).unwrap();
    std::fs::rename(on.place.dir.join("new"), on.store("large")).unwrap();
    reads_no_other(&open, &on.large);
    let again = File::open(on.at("large")).unwrap();
    is_equal(&again, 0, &new);
    // In place, and the store's file disappears.
    std::fs::write(on.store("small"), bytes(4, SMALL)).unwrap();
    assert!(std::fs::read(on.at("small")).unwrap() == bytes(4, SMALL), "nothing of the old one was read");
    std::fs::rename(on.store("large"), on.place.dir.join("aside")).unwrap();
    assert_eq!(
        read(&File::open(on.at("large")).unwrap(), 0, 10).unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );
    std::fs::rename(on.place.dir.join("aside"), on.store("large")).unwrap();
    is_equal(&again, 0, &new);
    on.make_room();
    is_equal(&again, 0, &new);
    assert!(std::fs::read(on.at("large")).unwrap() == new);
    drop((open, again));
    on.place.is_clean();
}

#[test]
fn open_that_read_from_the_store_gets_no_version_from_after_a_release() {
    let Some(on) = Full::up() else { return };
    let open = File::open(on.at("large")).unwrap();
    is_equal(&open, 0, &on.large[..1000]);
    // Nothing of this open keeps the file from being restored and released.
    on.make_room();
    on.place.done(&["prestage", "/s/large"]);
    wait_for("the file is restored", || on.state("large") == "clean");
    on.place.done(&["release", "/s/large"]);
    wait_for("it is released", || on.state("large") == "released");
    let new = bytes(3, LARGE);
    std::fs::write(on.place.dir.join("new"), &new).unwrap();
    std::fs::rename(on.place.dir.join("new"), on.store("large")).unwrap();
    reads_no_other(&open, &on.large);
    assert!(std::fs::read(on.at("large")).unwrap() == new);
    drop(open);
    on.place.is_clean();
}
