//! Files made with O_TMPFILE on the mount that got a name later: the kernel knows them under two node numbers.

mod common;

use common::{wait_for, Place};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

fn unnamed(directory: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(directory).unwrap()
}

/// The link that reopens a file.
fn link_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn name(file: &File, path: &Path) {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let (from, to) = (text(&link_of(file)), text(path));
    // SAFETY: both paths are NUL-terminated.
    let linked = unsafe {
        libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    assert_eq!(linked, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn file_that_got_a_name_is_opened_again_by_its_descriptor_and_by_its_name() {
    for mount in [&[][..], &["--no-passthrough"]] {
        let Some(place) = Place::mounted_as(&["--capacity", "128MiB"], mount) else { return };
        let path = place.file("named");
        let file = unnamed(&place.mnt());
        file.write_all_at(b"one", 0).unwrap();
        name(&file, &path);
        for (round, way) in [link_of(&file), path.clone(), link_of(&file)].iter().enumerate() {
            let word = format!("word {round}");
            let again = OpenOptions::new().read(true).write(true).open(way);
            again
                .unwrap_or_else(|e| panic!("{mount:?} {way:?}: {e}"))
                .write_all_at(word.as_bytes(), 0)
                .unwrap();
            OpenOptions::new().append(true).open(way).unwrap().write_all(b"!").unwrap();
            let whole = format!("{word}!");
            for look in [&link_of(&file), &path] {
                assert_eq!(fs::read_to_string(look).unwrap(), whole, "{mount:?} {look:?}");
            }
            let mut bytes = vec![0; whole.len()];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, whole.as_bytes());
            drop(OpenOptions::new().write(true).truncate(true).open(way).unwrap());
            assert_eq!(file.metadata().unwrap().len(), 0);
        }
        // Its own open may end before those that were made by it.
        let reader = File::open(link_of(&file)).unwrap();
        file.write_all_at(b"last", 0).unwrap();
        drop(file);
        let mut bytes = [0; 4];
        reader.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((&bytes, fs::read(&path).unwrap()), (b"last", b"last".to_vec()));
        drop(reader);
        fs::remove_file(&path).unwrap();
        place.is_clean();
    }
}

/// An open that was made by the descriptor ends as it began: the file can be drained and released.
#[test]
fn file_that_got_a_name_in_front_of_a_store_reaches_it_at_fsync_and_close_and_is_released() {
    for (durable, mount) in [("fsync", &[][..]), ("close", &[]), ("fsync", &["--no-passthrough"])] {
        let Some(place) = Place::of(&["--capacity", "128MiB"]) else { return };
        let store = place.dir.join("store");
        fs::create_dir(&store).unwrap();
        place.done(&["attach", store.to_str().unwrap(), "/s", "--drain", "request", "--durable", durable]);
        place.done(&[&["mount"], mount, &[place.mnt().to_str().unwrap()]].concat());
        let file = unnamed(&place.file("s"));
        file.write_all_at(b"kept", 0).unwrap();
        name(&file, &place.file("s/named"));
        let again = OpenOptions::new().write(true).open(link_of(&file)).unwrap();
        again.write_all_at(b"K", 0).unwrap();
        let stored = || fs::read(store.join("named")).ok();
        if durable == "fsync" {
            file.sync_all().unwrap();
            assert_eq!(stored().as_deref(), Some(&b"Kept"[..]), "{mount:?}");
        }
        drop(again);
        assert_eq!(stored().as_deref(), Some(&b"Kept"[..]), "{durable} {mount:?}");
        drop(file);
        place.done(&["sync", "/s/named"]);
        wait_for("it is released", || place.run(&["release", "/s/named"]).status.success());
        assert_eq!(fs::read(place.file("s/named")).unwrap(), b"Kept");
    }
}
