//! Whole programs on the mount, unmodified, by passthrough and by requests: they do what they do on a plain file
//! system, and leave the same files.

mod common;

use common::{Place, TIMEOUT};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

/// Arguments for `mount`: both ways in which data is served.
const WAYS: [&[&str]; 2] = [&[], &["--no-passthrough"]];

/// The repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// True when these programs are installed; otherwise prints which one is not.
fn has(programs: &[&str]) -> bool {
    let there = |program: &&&str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        found.is_ok_and(|output| output.status.success())
    };
    let missing = programs.iter().find(|program| !there(program));
    if let Some(missing) = missing {
        eprintln!("skipped: {missing} is not installed");
    }
    missing.is_none()
}

/// A directory of a plain file system, removed with the test.
struct Plain(PathBuf);

impl Plain {
    fn new(place: &Place) -> Plain {
        let dir = place.dir.join("plain");
        fs::create_dir(&dir).unwrap();
        Plain(dir)
    }
}

/// Runs a program in a directory with a time limit. Returns its output, including errors.
#[track_caller]
fn run(directory: &Path, program: impl AsRef<OsStr>, arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "300"]).arg(program).args(arguments).current_dir(directory);
    command.env("LC_ALL", "C.UTF-8").env("HOME", directory).env_remove("LD_PRELOAD");
    command.stdin(Stdio::null()).output().unwrap()
}

/// The same for a program that must succeed.
#[track_caller]
fn done(directory: &Path, program: impl AsRef<OsStr>, arguments: &[&str]) -> String {
    let output = run(directory, program.as_ref(), arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{:?} {arguments:?}: {}\n{said}{words}",
        program.as_ref(),
        output.status
    );
    said
}

/// Runs lines of a shell, which must succeed.
#[track_caller]
fn shell(directory: &Path, lines: &str) -> String {
    done(directory, "bash", &["-ec", lines])
}

/// Runs the test for each way of mounting in turn.
fn each_way(up: &[&str], mut test: impl FnMut(&Place)) {
    for way in WAYS {
        let Some(place) = Place::mounted_as(up, way) else { return };
        let expected = if way.is_empty() { "passthrough" } else { "requests" };
        assert_eq!(place.status()["mounts"][0]["data"], expected);
        test(&place);
        place.is_clean();
    }
}

/// Runs a script of the repository on a plain file system and on the mount: both print the same, and succeed.
fn same(script: &str, needs: &[&str]) {
    if !has(needs) {
        return;
    }
    let path = repository().join(script);
    each_way(&["--capacity", "512MiB"], |place| {
        let plain = Plain::new(place);
        let outcome = |directory: &Path| {
            // Scripts of tests/programs run in their working directory; the others get the directory as an argument.
            let line = match path.extension() {
                None => format!(". {} 2>&1; echo status $?", path.display()),
                Some(kind) => {
                    let program = if kind == "py" { "python3" } else { "bash" };
                    format!("{program} {} {} 2>&1; echo status $?", path.display(), directory.display())
                }
            };
            done(directory, "bash", &["-c", &line]).replace(directory.to_str().unwrap(), "HERE")
        };
        let work = place.file("work");
        fs::create_dir(&work).unwrap();
        let (there, here) = (outcome(&plain.0), outcome(&work));
        assert!(there.ends_with("status 0\n"), "{script} is no test on a plain file system:\n{there}");
        let differing: Vec<_> = there.lines().zip(here.lines()).filter(|(a, b)| a != b).take(5).collect();
        assert!(there == here, "{script} differs (plain, mount): {differing:#?}\n--- on the mount:\n{here}");
    });
}

macro_rules! scripts {
    ($($test:ident: $script:literal needs [$($need:literal),*];)*) => {$(
        #[test]
        fn $test() {
            same($script, &[$($need),*]);
        }
    )*};
}

scripts! {
    coreutils_do_the_same: "tests/programs/coreutils" needs [];
    shells_do_the_same: "tests/programs/shell" needs [];
    tar_does_the_same: "tests/programs/tar" needs ["tar"];
    rsync_does_the_same: "tests/programs/rsync" needs ["rsync"];
    python_does_the_same: "tests/programs/python" needs ["python3"];
    git_does_the_same: "tests/programs/git" needs ["git"];
    compiler_and_make_do_the_same: "tests/programs/compiler" needs ["cc", "make"];
    sqlite_does_the_same: "tests/programs/sqlite" needs ["sqlite3"];
    write_ahead_log_of_several_processes_does_the_same: "crates/preload/tests/programs/wal.py" needs ["python3"];
}

#[test]
fn project_is_cloned_built_and_built_again() {
    if !has(&["git", "cc", "make", "nm"]) {
        return;
    }
    // The MPI-IO driver, which is C, with the header that it needs.
    let origin = |directory: &Path| {
        let git = "git -c user.name=Someone -c user.email=someone@example.org";
        let from = repository();
        shell(directory, &format!(
            "mkdir -p origin/crates/capi && cp -r {from}/mpi origin/ && cp -r {from}/crates/capi/include origin/crates/capi/
            cd origin && {git} init -q && {git} add -A && {git} commit -qm one",
            from = from.display()
        ));
        directory.join("origin")
    };
    let build = |origin: &Path, directory: &Path| {
        shell(directory, &format!(
            "git clone -q {} project && cd project && make -s -C mpi OUT=$PWD/out && test -z \"$(git status --porcelain mpi)\"
            make --no-print-directory -C mpi OUT=$PWD/out -q && touch mpi/src/chooser.c && ! make --no-print-directory -C mpi OUT=$PWD/out -q
            git fsck --strict && for library in out/*.so; do echo $library; nm -D --defined-only $library | cut -d' ' -f2-; done",
            origin.display()
        ))
    };
    let mut plain = None;
    each_way(&["--capacity", "512MiB"], |place| {
        let scratch = Plain::new(place);
        let origin = origin(&scratch.0);
        let plain = plain.get_or_insert_with(|| build(&origin, &scratch.0));
        assert!(plain.contains("MPI_File_open") || !cfg!(target_arch = "x86_64"), "{plain}");
        assert_eq!(*plain, build(&origin, &place.mnt()));
    });
}

const STATIC: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char where[4096], text[64] = {0};
    int fd = open("/file", O_RDONLY);
    printf("%s %s %d\n", argv[0], getcwd(where, sizeof where), argc);
    if (fd >= 0 && read(fd, text, sizeof text - 1) > 0) printf("file: %s", text);
    if (argc > 1) { fflush(stdout); pause(); }
    return fflush(stdout) ? 1 : 3;
}
"#;

#[test]
fn static_program_runs_is_busy_meanwhile_and_is_the_root_of_a_chroot() {
    if !has(&["cc", "chroot"]) {
        return;
    }
    each_way(&["--capacity", "256MiB"], |place| {
        let plain = Plain::new(place);
        fs::write(plain.0.join("static.c"), STATIC).unwrap();
        done(&plain.0, "cc", &["-static", "-O1", "-o", "static", "static.c"]);
        let program = place.file("static");
        fs::copy(plain.0.join("static"), &program).unwrap();
        let output = run(&place.mnt(), &program, &[]);
        let at = place.mnt();
        assert_eq!(output.status.code(), Some(3));
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said, format!("{} {} 1\n", program.display(), at.display()));

        let mut runs = Command::new(&program).arg("stay").stdout(Stdio::piped()).spawn().unwrap();
        let mut word = [0; 1];
        std::io::Read::read_exact(runs.stdout.as_mut().unwrap(), &mut word).unwrap();
        let busy = fs::OpenOptions::new().write(true).open(&program).map(drop);
        runs.kill().unwrap();
        runs.wait().unwrap();
        assert_eq!(busy.unwrap_err().raw_os_error(), Some(libc::ETXTBSY));
        fs::OpenOptions::new().append(true).open(&program).unwrap();

        fs::write(place.file("file"), "the pool's\n").unwrap();
        let output = run(&plain.0, "chroot", &[at.to_str().unwrap(), "/static"]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "/static / 1\nfile: the pool's\n");
        assert_eq!(output.status.code(), Some(3));
    });
}

/// What a copy has to preserve of a tree: kinds, modes, owners, link counts, sizes, times to the nanosecond, targets,
/// device numbers, extended attributes, contents, and which names belong to one inode.
const TREE: &str = r#"
find . -mindepth 1 ! -type d -printf '%P %y %m %U %G %n %s %T@ %l\n' | sort
find . -mindepth 1 -type d -printf '%P %y %m %U %G %n %T@\n' | sort
find . -type f -exec md5sum {} + | sort -k2
find . \( -type b -o -type c \) -exec stat -c '%n %t:%T' {} + | sort
getfattr -R -h -d -m '^user\.' . | sed 's/^$/-/'
find . -type f -links +1 -printf '%i %P\n' | sort | awk '{ if (!($1 in n)) n[$1] = ++c; print "inode", n[$1], $2 }' | sort -k3
"#;

#[test]
fn copies_keep_all_attributes_both_ways() {
    if !has(&["cp", "rsync", "getfattr", "setfattr", "mkfifo", "mknod"]) {
        return;
    }
    each_way(&["--capacity", "256MiB"], |place| {
        let plain = Plain::new(place);
        shell(
            &plain.0,
            r#"
            mkdir -p from/sub/deep from/empty && cd from
            for i in $(seq 1 60); do seq 1 $((i * 40)) > sub/f$i; done
            ln sub/f1 hard; ln sub/f1 sub/deep/hard; ln -s sub/f2 soft; ln -s /nowhere dangling
            truncate -s 3M hole; printf end >> hole; : > nothing
            mkfifo fifo; mknod null c 1 3; mknod disk b 7 200
            setfattr -n user.one -v 1 sub/f3; setfattr -n user.long -v "$(head -c 3000 /dev/zero | tr '\0' x)" sub; setfattr -n user.empty sub/f4
            chmod 4755 sub/f5; chmod 2755 empty; chmod 1777 sub/deep; chmod 000 sub/f6
            chown 1234:4321 sub/f7; chown -h 12:34 soft; chown 77:88 sub/deep
            # rsync takes times of one second for the same
            find . -exec touch -h -d '2015-05-05 05:05:05.987654321' {} +
            touch -d '2001-02-03 04:05:06.123456789' sub/f8; touch -h -d '1969-12-31 23:59:59.5 UTC' dangling
            touch -d '2106-02-07 06:28:17.000000001 UTC' hole; touch -d '2010-10-10' empty sub/deep sub .
        "#,
        );
        let of = |directory: &Path| shell(directory, TREE);
        let from = plain.0.join("from");
        let (first, at) = (of(&from), place.mnt());
        assert!(first.lines().count() > 130, "{first}");
        for (copy, name) in [("cp -a", "cp"), ("rsync -aHAX", "rsync"), ("rsync -aHAX --inplace", "inplace")]
        {
            let (on_mount, back) = (at.join(name), plain.0.join(name));
            shell(&plain.0, &format!("{copy} {}/ {}/", from.display(), on_mount.display()));
            assert_eq!(of(&on_mount), first, "{copy} to the mount");
            shell(&plain.0, &format!("{copy} {}/ {}/", on_mount.display(), back.display()));
            assert_eq!(of(&back), first, "{copy} from the mount");
            let left = shell(
                &plain.0,
                &format!("rsync -aHAXin --checksum {}/ {}/", from.display(), on_mount.display()),
            );
            assert_eq!(left, "", "rsync would copy again");
        }
    });
}

/// Writes and verifies a file in every way.
fn verify(place: &Place) {
    for engine in ["psync", "mmap", "libaio", "io_uring"] {
        for direct in [0, 1] {
            if engine == "mmap" && direct == 1 {
                continue; // a mapping is never direct
            }
            let name = format!("{engine}-{direct}");
            let arguments = [
                &format!("--name={name}"),
                &format!("--ioengine={engine}"),
                &format!("--direct={direct}"),
                "--rw=randwrite",
                "--bs=16k",
                "--size=8m",
                "--numjobs=2",
                "--iodepth=8",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--group_reporting",
            ];
            let output = run(&place.mnt(), "fio", &arguments);
            let said = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            let cannot = ["Operation not permitted", "not loadable", "Function not implemented"];
            if !output.status.success()
                && engine == "io_uring"
                && cannot.iter().any(|word| said.contains(word))
            {
                eprintln!("skipped: this kernel has no io_uring for us");
                continue;
            }
            assert!(output.status.success(), "{name}: {}\n{said}", output.status);
            shell(&place.mnt(), &format!("rm {name}.*"));
        }
    }
}

#[test]
fn fio_verifies_what_it_wrote_in_memory() {
    if has(&["fio"]) {
        each_way(&["--capacity", "256MiB"], verify);
    }
}

#[test]
fn fio_verifies_what_it_wrote_on_a_disk() {
    if has(&["fio"]) {
        each_way(&["--media", "ssd", "--capacity", "256MiB"], verify);
    }
}

#[test]
fn database_whose_processes_are_killed_has_what_was_committed() {
    if !has(&["sqlite3"]) {
        return;
    }
    each_way(&["--capacity", "256MiB"], |place| {
        let at = place.mnt();
        shell(&at, "sqlite3 d.db 'pragma journal_mode=wal; create table t(who integer, n integer); create table total(n integer); insert into total values (0);'");
        // Two shells print what they committed, and one of them is killed.
        let writer = |who: u32| {
            let line = format!(
                "for i in $(seq 1 100000); do sqlite3 -bail -cmd '.timeout 60000' d.db \
                 \"begin immediate; insert into t values ({who}, $i); update total set n = n + 1; commit;\" && echo $i; done"
            );
            let mut command = Command::new("bash");
            command.args(["-c", &line]).current_dir(&at).stdin(Stdio::null()).stdout(Stdio::piped());
            command.stderr(Stdio::null()).process_group(0).spawn().unwrap()
        };
        let mut writers = [writer(1), writer(2)];
        let end = Instant::now() + TIMEOUT;
        let count = || {
            let said = shell(&at, "sqlite3 -cmd '.timeout 60000' d.db 'select count(*) from t'");
            said.trim().parse::<u64>().unwrap()
        };
        while count() < 60 {
            assert!(Instant::now() < end, "nothing is committed");
        }
        let mut committed = Vec::new();
        for writer in &mut writers {
            // SAFETY: the group of a process of this test that is not reaped yet.
            unsafe { libc::kill(-(writer.id() as i32), libc::SIGKILL) };
            writer.wait().unwrap();
            let mut said = String::new();
            std::io::Read::read_to_string(writer.stdout.as_mut().unwrap(), &mut said).unwrap();
            committed.push(said.lines().last().and_then(|line| line.parse::<u64>().ok()).unwrap_or(0));
        }
        let said = shell(&at, "sqlite3 d.db 'pragma integrity_check; select who, max(n), count(*) from t group by who; select (select n from total) = (select count(*) from t);'");
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines[0], *lines.last().unwrap()), ("ok", "1"), "{said}");
        for (who, committed) in [1, 2].into_iter().zip(committed) {
            let line = lines.iter().find_map(|line| line.strip_prefix(&format!("{who}|"))).unwrap();
            let (most, rows) = line.split_once('|').unwrap();
            assert_eq!(most, rows, "{said}");
            assert!(rows.parse::<u64>().unwrap() >= committed, "{committed} were acknowledged: {said}");
        }
    });
}
