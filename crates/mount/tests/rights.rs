//! Permissions on a mount that several users share, after another interface changed an owner: the kernel checks the
//! owner that it has cached, and nothing refreshes it in between.

mod common;

use common::Place;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const OLD: u32 = 54_321;
const NEW: u32 = 54_322;

/// Makes the requested calls, and prints their errno or 0. It accesses nothing else.
const CALLER: &str = r#"
import os, sys
fds = {}
def opened(path):
    fds[path] = os.open(path, os.O_RDONLY)
calls = {
    'open': opened,
    'stat': os.stat,
    'chmod': lambda path: os.chmod(path, 0o664),
    'fchmod': lambda path: os.fchmod(fds[path], 0o664),
    'utime': lambda path: os.utime(path, (100, 200)),
    'futime': lambda path: os.utime(fds[path], (100, 200)),
    'touch': os.utime,
    'chown': lambda path: os.chown(path, -1, os.getgid()),
    'fchown': lambda path: os.fchown(fds[path], -1, os.getgid()),
    'unlink': os.unlink,
    'rmdir': os.rmdir,
    'rename': lambda path: os.rename(path, path + '.moved'),
    'link': lambda path: os.link(path, path + '.linked'),
    'setxattr': lambda path: os.setxattr(path, 'user.a', b'1'),
}
for line in sys.stdin:
    call, path = line.split()
    try:
        calls[call](path)
        print(0, flush=True)
    except OSError as e:
        print(e.errno, flush=True)
"#;

/// A process of a user, which is killed when dropped.
struct User(Child, ChildStdin, BufReader<ChildStdout>);

impl User {
    fn new(uid: u32) -> User {
        let mut command = Command::new("python3");
        command.args(["-c", CALLER]).stdin(Stdio::piped()).stdout(Stdio::piped()).uid(uid).gid(uid);
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        User(child, stdin, BufReader::new(stdout))
    }

    fn call(&mut self, call: &str, path: &Path) -> i32 {
        writeln!(self.1, "{call} {}", path.display()).unwrap();
        let mut line = String::new();
        self.2.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn shared() -> Option<Place> {
    shared_as(&[])
}

/// A pool that several users share, mounted with further arguments.
fn shared_as(mount: &[&str]) -> Option<Place> {
    if Command::new("python3").arg("-V").output().is_err() {
        eprintln!("skipped: there is no python3");
        return None;
    }
    let place = Place::mounted_as(&["--capacity", "256MiB"], &[&["--allow-other"], mount].concat())?;
    fs::set_permissions(place.mnt(), fs::Permissions::from_mode(0o1777)).unwrap();
    Some(place)
}

const EPERM: i32 = libc::EPERM;

#[test]
fn owner_changed_by_another_door_counts_before_anybody_looks() {
    let Some(place) = shared() else { return };
    let (mut old, mut new) = (User::new(OLD), User::new(NEW));
    // What preload creates belongs to the pool, and the kernel gets no news of inodes that it knows.
    place.preloaded(&format!(
        "for f in a b c d e f; do echo x > /forebay/$f; chmod 666 /forebay/$f; done; mkdir /forebay/dir /forebay/gone; \
         mkfifo /forebay/fifo; ln -s a /forebay/link; chmod 777 /forebay/dir /forebay/gone; chmod 666 /forebay/fifo; \
         chown -h {OLD}:{OLD} /forebay/*"
    ));
    let names = ["a", "b", "c", "d", "e", "f", "dir", "gone", "fifo"];
    let file = |name: &str| place.file(name);
    for name in names {
        for user in [&mut old, &mut new] {
            assert_eq!(user.call("stat", &file(name)), 0);
            if name != "fifo" {
                assert_eq!(user.call("open", &file(name)), 0);
            }
        }
        assert_eq!(old.call("utime", &file(name)), 0, "{name}: it is the owner's");
        assert_eq!(new.call("utime", &file(name)), EPERM, "{name}: it is not another's");
    }
    // Changed by a program that does not see the mount, so that the kernel has the old owner until a program looks it
    // up.
    let change = format!(
        "umount -l {} && cd /forebay && chown {NEW}:{NEW} {}",
        place.mnt().display(),
        names.join(" ")
    );
    place.done(&["run", "--quiet", "--", "unshare", "--mount", "sh", "-c", &change]);
    for (name, call) in [
        ("a", "chmod"),
        ("a", "utime"),
        ("a", "chown"),
        ("b", "fchmod"),
        ("b", "futime"),
        ("b", "fchown"),
        ("c", "unlink"),
        ("c", "rename"),
        ("dir", "chmod"),
        ("dir", "utime"),
        ("gone", "rmdir"),
        ("fifo", "chmod"),
    ] {
        assert_eq!(old.call(call, &file(name)), EPERM, "{call} {name} by the old owner");
    }
    assert_eq!(old.call("touch", &file("d")), 0, "whom the permission bits let write may touch it");
    assert_eq!(old.call("link", &file("d")), 0, "and who may read and write it, may link it");
}

#[test]
fn new_owner_need_not_look_first() {
    let Some(place) = shared() else { return };
    let mut new = User::new(NEW);
    place.preloaded(
        "cd /forebay; for f in a b c d e; do echo x > $f; chmod 644 $f; done; mkdir dir gone; mkfifo fifo",
    );
    let names = ["a", "b", "c", "d", "e", "dir", "gone", "fifo"];
    let file = |name: &str| place.file(name);
    for name in names {
        assert_eq!(new.call("stat", &file(name)), 0);
        assert_eq!(new.call("utime", &file(name)), EPERM, "{name}: it is not the user's yet");
    }
    assert_eq!(new.call("open", &file("b")), 0);
    place.preloaded(&format!("cd /forebay; chown {NEW}:{NEW} a b c d e dir gone fifo"));
    for (name, call) in [
        ("a", "chmod"),
        ("c", "utime"),
        ("b", "fchmod"),
        ("b", "futime"),
        ("b", "fchown"),
        ("d", "rename"),
        ("e", "unlink"),
        ("dir", "chmod"),
        ("dir", "utime"),
        ("gone", "rmdir"),
        ("fifo", "chmod"),
    ] {
        assert_eq!(new.call(call, &file(name)), 0, "{call} {name} by the new owner");
    }
    place.is_clean();
}

#[test]
fn mode_changed_by_another_door_counts_before_anybody_looks() {
    let Some(place) = shared() else { return };
    let mut user = User::new(NEW);
    place.preloaded(
        "mkdir /forebay/dir; chmod 777 /forebay/dir; echo x > /forebay/dir/f; chmod 666 /forebay/dir/f",
    );
    let (dir, f) = (place.file("dir"), place.file("dir/f"));
    assert_eq!((user.call("stat", &f), user.call("open", &f), user.call("setxattr", &f)), (0, 0, 0));
    place.preloaded("chmod 600 /forebay/dir/f");
    assert_eq!((user.call("open", &f), user.call("setxattr", &f)), (libc::EACCES, libc::EACCES));
    place.preloaded("chmod 1777 /forebay/dir");
    assert_eq!((user.call("unlink", &f), user.call("setxattr", &dir)), (EPERM, EPERM));
    place.preloaded("chmod 700 /forebay/dir");
    assert_eq!(user.call("stat", &f), libc::EACCES);
}

#[test]
fn chown_through_the_mount_clears_set_id_bits_of_all_but_directories() {
    let Some(place) = shared() else { return };
    let script = r#"
import os, socket, stat, sys
at = sys.argv[1]
made = []
for kind, name in [(stat.S_IFREG, 'file'), (stat.S_IFIFO, 'fifo'), (stat.S_IFSOCK, 'socket'), (stat.S_IFCHR, 'char'), (stat.S_IFBLK, 'block')]:
    path = os.path.join(at, name)
    os.mknod(path, kind | 0o600, os.makedev(1, 3))
    made.append(path)
os.mkdir(os.path.join(at, 'directory'))
made.append(os.path.join(at, 'directory'))
for path in made:
    for before, group, how in [(0o6755, 0, 7), (0o6755, 0, -1), (0o6744, 0, 7), (0o4711, 7, -1)]:
        os.chown(path, 0, group)
        os.chmod(path, before)
        os.chown(path, how, -1)
        print(os.path.basename(path), oct(before), how, oct(os.stat(path).st_mode & 0o7777))
"#;
    let plain = place.dir.join("plain");
    fs::create_dir(&plain).unwrap();
    fs::create_dir(place.file("here")).unwrap();
    let said = |at: &Path| {
        let output = Command::new("python3").args(["-c", script]).arg(at).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let linux = said(&plain);
    assert!(linux.contains("fifo 0o6755 7 0o755"), "{linux}");
    assert_eq!(said(&place.file("here")), linux);
    fs::write(place.dir.join("script.py"), script).unwrap();
    let line = format!("mkdir /forebay/there; python3 {}/script.py /forebay/there", place.dir.display());
    assert_eq!(place.preloaded(&line), linux, "and by preload");
}

/// Writes as another user to a named file, a file made without a name and a removed one, all with set-ID bits, and
/// prints their modes.
const WRITES: &str = r#"
import os, sys
at, user = sys.argv[1], int(sys.argv[2])
def written(kind, fd, write):
    os.fchmod(fd, 0o6755)
    child = os.fork()
    if child == 0:
        os.setgid(user)
        os.setuid(user)
        write(fd)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(kind, oct(os.fstat(fd).st_mode & 0o7777))
    return fd
def made(name):
    return os.open(os.path.join(at, name), os.O_RDWR | os.O_CREAT)
def removed(name):
    fd = made(name)
    os.unlink(os.path.join(at, name))
    return fd
def unnamed():
    return os.open(at, os.O_RDWR | os.O_TMPFILE)
byte = lambda fd: os.write(fd, b'x')
cut = lambda fd: os.ftruncate(fd, 0)
written('named', made('file'), byte)
written('removed', removed('gone'), byte)
written('removed, cut', removed('gone'), cut)
fd = written('unnamed', unnamed(), byte)
os.link('/proc/self/fd/%d' % fd, os.path.join(at, 'linked'), src_dir_fd=0, follow_symlinks=True)
print('linked', oct(os.stat(os.path.join(at, 'linked')).st_mode & 0o7777))
written('unnamed, cut', unnamed(), cut)
"#;

#[test]
fn write_to_a_file_without_a_name_clears_set_id_bits() {
    for arguments in [&[] as &[&str], &["--no-passthrough"]] {
        let Some(place) = shared_as(arguments) else { return };
        let plain = place.dir.join("plain");
        fs::create_dir(&plain).unwrap();
        let said = |at: &Path| {
            let mut command = Command::new("python3");
            let output = command.args(["-c", WRITES]).arg(at).arg(NEW.to_string()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let linux = said(&plain);
        assert!(linux.contains("unnamed 0o755\nlinked 0o755\n"), "{linux}");
        assert_eq!(said(&place.mnt()), linux, "{arguments:?}");
    }
}
