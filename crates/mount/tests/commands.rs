//! The commands that mount and unmount, with valid and invalid arguments.

mod common;

use common::{is_mounted, wait_for, Place};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};

#[test]
fn mount_shows_the_pool_and_umount_takes_it_away() {
    let Some(place) = Place::new() else { return };
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    fs::write(place.file("a"), "x").unwrap();
    assert_eq!(place.preloaded("cat /forebay/a"), "x");
    let mount = &place.status()["mounts"][0];
    assert_eq!((&mount["state"], &mount["data"]), (&"mounted".into(), &"passthrough".into()), "{mount:#}");
    place.done(&["umount"]);
    assert!(!is_mounted(&place.mnt()));
    assert_eq!(place.status()["mounts"].as_array().map(Vec::len), Some(0));
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    assert_eq!(fs::read(place.file("a")).unwrap(), b"x");
}

#[test]
fn mount_on_bad_places_says_what_to_do() {
    let Some(place) = Place::new() else { return };
    let at = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    assert!(place.refused(&["mount", &at("missing")]).contains("mkdir -p"));
    fs::create_dir(place.dir.join("full")).unwrap();
    fs::write(place.dir.join("full/file"), "").unwrap();
    assert!(place.refused(&["mount", &at("full")]).contains("empty directory"));
    assert!(place.refused(&["mount", &at("full/file")]).contains("empty directory"));
    place.done(&["mount", &at("mnt")]);
    assert!(place.refused(&["mount", &at("mnt")]).contains("is mounted on"));
    assert!(place.refused(&["umount", &at("full")]).contains("not mounted there"));
    assert!(is_mounted(&place.mnt()), "still there");
}

#[test]
fn mount_over_another_pools_is_refused() {
    let Some(place) = Place::mounted() else { return };
    let Some(other) = Place::new() else { return };
    let words = other.refused(&["mount", place.mnt().to_str().unwrap()]);
    assert!(words.contains("is mounted there"), "{words}");
    assert!(is_mounted(&place.mnt()));
}

#[test]
fn umount_and_down_of_a_mount_in_use_name_who_uses_it() {
    let Some(place) = Place::mounted() else { return };
    let held = fs::File::create(place.file("held")).unwrap();
    let me = std::process::id().to_string();
    for words in [place.refused(&["umount"]), place.refused(&["down"])] {
        assert!(words.contains("in use") && words.contains(&me), "{words}");
    }
    place.done(&["umount", "--lazy"]);
    assert!(!is_mounted(&place.mnt()));
    drop(held);
    place.done(&["down"]);
}

#[test]
fn down_unmounts() {
    let Some(place) = Place::mounted() else { return };
    place.done(&["down"]);
    assert!(!is_mounted(&place.mnt()));
}

#[test]
fn up_with_a_mount_that_cannot_be_leaves_no_pool() {
    let Some(place) = Place::new() else { return };
    place.done(&["down"]);
    let pool = place.pool();
    let missing = place.dir.join("missing");
    let up = ["up", "--path", pool.to_str().unwrap(), "--mount"];
    place.refused(&[&up[..], &[missing.to_str().unwrap()]].concat());
    place.refused(&["status"]);
    place.done(&[&up[..], &[place.mnt().to_str().unwrap()]].concat());
    assert!(is_mounted(&place.mnt()));
}

/// A process in a mount namespace of its own, which has a copy of all mounts, and runs a script there. It is killed at the
/// end of the test.
struct Apart(std::process::Child);

impl Apart {
    fn new(script: &str) -> Apart {
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            &format!("{script}; echo; read line"),
        ]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Apart(child)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn mount_of_which_another_namespace_has_a_copy_is_taken_away_unless_it_is_used_there() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    fs::write(place.file("f"), "x").unwrap();
    let (at, file) = (place.file("d"), place.file("f"));
    for script in [format!("cd {}", at.display()), format!("exec 3<{}", file.display())] {
        let user = Apart::new(&script);
        let number = user.0.id().to_string();
        for words in [place.refused(&["umount"]), place.refused(&["down"])] {
            assert!(words.contains("another mount namespace") && words.contains(&number), "{words}");
        }
        assert_eq!(fs::read(&file).unwrap(), b"x", "it is still there");
    }
    let copy = Apart::new(&format!("test -e {}", file.display()));
    place.done(&["umount"]);
    assert!(!is_mounted(&place.mnt()));
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    assert_eq!(fs::read(&file).unwrap(), b"x");
    let copies = Apart::new("true");
    place.done(&["down"]);
    assert!(!is_mounted(&place.mnt()));
    drop((copy, copies));
}

#[test]
fn umount_leaves_alone_what_is_mounted_over_it() {
    let Some(place) = Place::mounted() else { return };
    let over = place.mnt();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&over).status().unwrap();
    assert!(mounted.success());
    fs::write(over.join("theirs"), "x").unwrap();
    for words in [place.refused(&["umount"]), place.refused(&["umount", "--lazy"])] {
        assert!(words.contains("is mounted over it"), "{words}");
    }
    // Nor does the process that replaces a dead one unmount it.
    place.kill("mount");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(over.join("theirs").exists());
    assert!(Command::new("umount").arg(&over).status().unwrap().success());
    wait_for("it is mounted again", || fs::write(place.file("ours"), "x").is_ok());
    let _ = place.pid("mount");
    place.done(&["umount"]);
    assert!(!is_mounted(&place.mnt()));
}

#[test]
fn umount_of_a_mount_whose_process_dies_meanwhile_is_done_when_it_says_so() {
    let Some(place) = Place::mounted() else { return };
    let pid = place.pid("mount");
    // SAFETY: a process of this test's pool, which is not reaped before its supervisor has noticed.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let mut umounts = [(); 2].map(|()| place.command(&["umount"]).spawn().unwrap());
    std::thread::sleep(std::time::Duration::from_millis(200));
    common::kill(pid);
    for umount in &mut umounts {
        assert!(umount.wait().unwrap().success());
        assert!(!is_mounted(&place.mnt()));
    }
    assert!(!place.mnt().join("x").exists(), "the directory itself is seen");
}

#[test]
fn mount_by_root_of_another_users_pool_has_no_set_user_id_programs_and_devices() {
    const NOBODY: u32 = 65534;
    let Some(place) = Place::mounted() else { return };
    let options = |at: &std::path::Path| {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.contains(at.to_str().unwrap())).map(str::to_owned);
        line.and_then(|line| line.split(' ').nth(5).map(str::to_owned)).unwrap_or_default()
    };
    assert!(!options(&place.mnt()).contains("nosuid"), "root's own pool");
    // Another user may not be permitted to read the directory of the build.
    let theirs = place.dir.join("theirs");
    fs::create_dir(&theirs).unwrap();
    for name in ["forebay", "forebayd"] {
        fs::copy(common::binaries().join(name), theirs.join(name)).unwrap();
    }
    std::os::unix::fs::chown(&theirs, Some(NOBODY), Some(NOBODY)).unwrap();
    let (pool, at) = (theirs.join("pool"), place.dir.join("at"));
    fs::create_dir(&at).unwrap();
    let as_nobody = |arguments: &[&str]| {
        let mut command = Command::new(theirs.join("forebay"));
        std::os::unix::process::CommandExt::uid(command.env_remove("LD_PRELOAD"), NOBODY);
        let output = command.current_dir("/").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let pool = pool.to_str().unwrap();
    as_nobody(&["up", "--capacity", "64MiB", "--path", pool]);
    let mut serves = Command::new(env!("CARGO_BIN_EXE_forebay-mount"))
        .args(["--pool", pool, "--at", at.to_str().unwrap()])
        .spawn()
        .unwrap();
    wait_for("it is mounted", || is_mounted(&at));
    let (found, seen) = (options(&at), fs::metadata(&at));
    // SAFETY: a process of this test that is not reaped yet.
    unsafe { libc::kill(serves.id() as i32, libc::SIGTERM) };
    serves.wait().unwrap();
    as_nobody(&["--pool", pool, "down", "--force"]);
    assert!(seen.is_ok() && !is_mounted(&at));
    assert!(found.contains("nosuid") && found.contains("nodev"), "{found}");
}

#[test]
fn umount_by_hand_ends_the_mounts_process() {
    let Some(place) = Place::mounted() else { return };
    assert!(Command::new("umount").arg(place.mnt()).status().unwrap().success());
    wait_for("the supervisor notices", || {
        place.status()["mounts"].as_array().is_some_and(|mounts| mounts.is_empty())
    });
    place.done(&["mount", place.mnt().to_str().unwrap()]);
}
