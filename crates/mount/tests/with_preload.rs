//! Programs under the preload library while the pool is mounted: their working directories are on the mount.

mod common;

use common::Place;
use std::fs;

/// The output of a script under the preload library, without the last newline.
#[track_caller]
fn script(place: &Place, text: &str) -> String {
    place.preloaded(text).trim_end().to_owned()
}

#[test]
fn working_directory_is_the_mounts_and_programs_without_the_library_see_it() {
    let Some(place) = Place::mounted() else { return };
    let mnt = place.mnt();
    script(&place, "mkdir -p /forebay/d/e && echo x >/forebay/d/e/f");
    assert_eq!(script(&place, "cd /forebay/d/e && pwd"), "/forebay/d/e");
    // Without the preload library: the kernel's own view.
    let seen =
        script(&place, "cd /forebay/d/e && env -u LD_PRELOAD sh -c '/bin/pwd -P; ls; cat f; echo y >g'");
    assert_eq!(seen, format!("{}/d/e\nf\nx", mnt.display()));
    assert_eq!(script(&place, "cd /forebay/d && cat e/g ../d/e/f && cd e && cat g && ls"), "y\nx\ny\nf\ng");
}

#[test]
fn working_directory_is_the_pools_whatever_pwd_was_left_as() {
    let Some(place) = Place::mounted() else { return };
    let mnt = place.mnt();
    script(&place, "mkdir /forebay/d && echo x >/forebay/d/f");
    let print = "python3 -c 'import os; print(os.getcwd(), os.stat(\"f\").st_dev == os.stat(\"/forebay/d/f\").st_dev)'";
    assert_eq!(script(&place, &format!("cd / && env -C /forebay/d {print}")), "/forebay/d True");
    // So that cp recognizes that both are one file.
    let seen = script(&place, "cd / && env -C /forebay/d cp f /forebay/d/f 2>/dev/null || cat /forebay/d/f");
    assert_eq!(seen, "x");
    // A directory entered by the mount's own path shows that path.
    let print = "python3 -c 'import os; print(os.getcwd())'";
    assert_eq!(script(&place, &format!("cd {}/d && {print}", mnt.display())), format!("{}/d", mnt.display()));
}

#[test]
fn working_directory_survives_an_exec_and_its_renaming() {
    let Some(place) = Place::mounted() else { return };
    script(&place, "mkdir /forebay/a && echo x >/forebay/a/f");
    let seen = script(
        &place,
        "cd /forebay/a && mv /forebay/a /forebay/b && exec sh -c 'cat f && echo y >g && /bin/pwd && cat /forebay/b/g'",
    );
    assert_eq!(seen, "x\n/forebay/b\ny");
}

#[test]
fn working_directory_that_was_removed_is_nowhere() {
    let Some(place) = Place::mounted() else { return };
    let seen = script(
        &place,
        "mkdir /forebay/gone && cd /forebay/gone && rmdir /forebay/gone && { echo y >f; } 2>/dev/null || echo refused; \
         ls; cd / && echo here",
    );
    assert_eq!(seen, "refused\nhere");
}

/// Needs python3, which the preload library's tests need too.
#[test]
fn directory_descriptors_serve_calls_that_start_from_them() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    fs::write(place.file("d/one"), "1").unwrap();
    let program = r#"
import os, sys, fcntl, subprocess
d = os.open("/forebay/d", os.O_RDONLY | os.O_DIRECTORY)
assert os.readlink(f"/proc/self/fd/{d}") in (MNT + "/d", "/forebay/d"), os.readlink(f"/proc/self/fd/{d}")
assert os.fstat(d).st_ino == os.stat("/forebay/d").st_ino and os.fstat(d).st_dev == os.stat("/forebay/d").st_dev
again = os.open(f"/proc/self/fd/{d}", os.O_RDONLY | os.O_DIRECTORY)
for fd in (again, d):
    assert os.fstat(fd).st_dev == os.stat(f"/proc/self/fd/{fd}/one").st_dev == os.stat("/forebay/d/one").st_dev
os.close(again)
f = os.open("two", os.O_CREAT | os.O_WRONLY, dir_fd=d); os.write(f, b"22"); os.close(f)
assert sorted(os.listdir(d)) == ["one", "two"]
os.rename("two", "three", src_dir_fd=d, dst_dir_fd=d)
assert os.stat("three", dir_fd=d).st_size == 2
assert sorted(e.name for e in os.scandir(d)) == ["one", "three"]
os.fchdir(d)
assert os.getcwd() == "/forebay/d" and open("three").read() == "22"
os.fchmod(d, 0o750); assert os.stat("/forebay/d").st_mode & 0o777 == 0o750
os.fsync(d)
e = os.dup(d); os.close(d)
assert sorted(os.listdir(e)) == ["one", "three"]
# A lock on a directory excludes, also programs that know nothing of the library.
fcntl.flock(e, fcntl.LOCK_EX)
other = "import os,fcntl,sys\nd=os.open(sys.argv[1],os.O_RDONLY)\ntry: fcntl.flock(d,fcntl.LOCK_EX|fcntl.LOCK_NB)\nexcept BlockingIOError: print('excluded')\n"
for path, env in (("/forebay/d", dict(os.environ)), (MNT + "/d", {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})):
    said = subprocess.run([sys.executable, "-c", other, path], env=env, capture_output=True, text=True)
    assert said.stdout == "excluded\n", (path, said)
# A child that inherits it.
said = subprocess.run(["sh", "-c", f"ls /proc/self/fd/{e}/"], pass_fds=[e], capture_output=True, text=True)
assert said.stdout == "one\nthree\n", said
os.unlink("three", dir_fd=e)
print(sorted(os.listdir(e)))
"#;
    let file = place.dir.join("program.py");
    fs::write(&file, format!("MNT = {:?}\n{program}", place.mnt().to_str().unwrap())).unwrap();
    assert_eq!(script(&place, &format!("python3 {}", file.display())), "['one']");
}

#[test]
fn programs_go_on_when_the_mount_is_taken_away_and_comes_back() {
    let Some(place) = Place::mounted() else { return };
    script(&place, "mkdir /forebay/d && echo x >/forebay/d/f");
    place.done(&["umount"]);
    assert_eq!(script(&place, "cd /forebay/d && cat f && find . | sort"), "x\n.\n./f");
    // A link that names no existing mount is ignored.
    std::os::unix::fs::symlink(format!("99999:{}", place.mnt().display()), place.pool().join("mounted"))
        .unwrap();
    assert_eq!(script(&place, "cd /forebay/d && cat f && find . | sort"), "x\n.\n./f");
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    assert_eq!(script(&place, "cd /forebay/d && cat f && /bin/pwd"), "x\n/forebay/d");
    let link = fs::read_link(place.pool().join("mounted")).unwrap();
    assert!(link.to_str().unwrap().ends_with(place.mnt().to_str().unwrap()), "{}", link.display());
}

#[test]
fn trees_are_copied_searched_and_removed() {
    let Some(place) = Place::mounted() else { return };
    let seen = script(
        &place,
        "cp -a /usr/include/linux /forebay/tree && diff -r /usr/include/linux /forebay/tree && cd /forebay/tree && \
         find . -type f | wc -l >/forebay/n && tar cf /forebay/t.tar . && mkdir /forebay/u && tar xf /forebay/t.tar -C /forebay/u && \
         diff -r . ../u && rm -rf /forebay/tree/* && ls | wc -l && find ../u -type f | wc -l | cmp - /forebay/n && echo same",
    );
    assert_eq!(seen, "0\nsame");
}

#[test]
fn prefix_that_is_the_mount_gives_both_doors_the_same_paths() {
    let Some(place) = Place::mounted() else { return };
    let mnt = place.mnt().to_str().unwrap().to_owned();
    let link = place.dir.join("link");
    std::os::unix::fs::symlink(place.file("d"), &link).unwrap();
    let link = link.to_str().unwrap();
    let text = format!(
        "mkdir d && echo x >d/f && cat {link}/f && mv {link}/f {mnt}/g && cat {link}/../g; \
         cd d && /bin/pwd && env -u LD_PRELOAD /bin/pwd && readlink /proc/self/cwd; \
         ls {link}/missing {mnt}/missing /missing 2>/dev/null; echo y >{link}/new && cat {mnt}/d/new; \
         cp {mnt}/d/new {link}/new 2>/dev/null; cat {link}/new"
    );
    let mut command = place.command(&["run", "--quiet", "--prefix", &mnt, "--", "sh", "-c", &text]);
    let output = command.current_dir(&mnt).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        said,
        format!("x\nx\n{mnt}/d\n{mnt}/d\n{mnt}/d\ny\ny\n"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
