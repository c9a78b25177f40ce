//! Attributes through the mount are the pool's, though the kernel keeps them: changed by another door while the kernel looks an
//! inode up for the first time, and of inodes that it knows by two numbers.

mod common;

use common::{wait_for, Place, PATIENCE};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn change_by_another_door_beside_the_first_look_is_seen() {
    let Some(place) = Place::mounted() else { return };
    const ROUNDS: usize = 600;
    let line = format!(
        "i=0; while [ $i -lt {ROUNDS} ]; do mkdir -m 755 /forebay/d$i; chmod 700 /forebay/d$i; echo $i; i=$((i+1)); done"
    );
    // As a program of its own for each call would be too slow to meet the look-ups.
    let script = format!(
        "import os\nfor i in range({ROUNDS}):\n d = '/forebay/d%d' % i\n os.mkdir(d, 0o755); os.chmod(d, 0o700); print(i, flush=True)\n"
    );
    let mut command = place.command(&["run", "--quiet", "--"]);
    match std::process::Command::new("python3").arg("-V").output() {
        Ok(_) => command.args(["python3", "-c", &script]),
        Err(_) => command.args(["sh", "-c", &line]),
    };
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut words = BufReader::new(child.stdout.take().unwrap()).lines();
    for i in 0..ROUNDS {
        let path = place.file(&format!("d{i}"));
        // The first look that finds it is about when it is changed.
        let end = Instant::now() + PATIENCE;
        while fs::metadata(&path).is_err() {
            assert!(Instant::now() < end, "{} does not come", path.display());
        }
        assert_eq!(words.next().unwrap().unwrap(), i.to_string());
        // Attributes that came with the name are believed for a moment, and no longer.
        wait_for("the change is seen", || fs::metadata(&path).unwrap().mode() & 0o777 == 0o700);
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn file_made_without_a_name_and_linked_shows_the_same_by_descriptor_and_by_name() {
    let Some(place) = Place::mounted() else { return };
    // While nobody else uses the pool: the kernel keeps attributes of files.
    let mut file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o600)
        .open(place.mnt())
        .unwrap();
    file.write_all(b"one").unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    let path = place.file("named");
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let to = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: both paths are NUL-terminated.
    let linked = unsafe {
        libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    assert_eq!(linked, 0, "{}", std::io::Error::last_os_error());
    let agree = |what: &str| {
        let (one, other) = (file.metadata().unwrap(), fs::metadata(&path).unwrap());
        let facts =
            |m: &fs::Metadata| (m.mode(), m.len(), m.nlink(), m.mtime(), m.mtime_nsec(), m.ctime_nsec());
        assert_eq!(facts(&one), facts(&other), "{what}");
    };
    agree("linked");
    (&file).write_all(b" and two").unwrap();
    agree("written by the descriptor");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    agree("changed by the name");
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    agree("changed by the descriptor");
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b" and three").unwrap();
    agree("written by the name");
    fs::hard_link(&path, place.file("again")).unwrap();
    agree("linked again");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(5).unwrap();
    agree("cut by the name");
    assert_eq!(fs::read(&path).unwrap(), b"one a");
}

#[test]
fn file_that_was_looked_at_before_the_first_program_came_shows_what_that_writes() {
    let Some(place) = Place::mounted() else { return };
    let path = place.file("f");
    fs::write(&path, "x").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    for _ in 0..3 {
        assert_eq!(fs::metadata(&path).unwrap().len(), 1);
    }
    assert_eq!(place.preloaded("printf more >> /forebay/f && echo done"), "done\n");
    assert_eq!(fs::metadata(&path).unwrap().len(), 5);
}
