//! An ordinary user's mount: by fusermount3, with passthrough if `forebay-register` helps, and without.

mod common;

use common::{binaries, wait_for};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{chown, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// `nobody`: a user with a name, which fusermount3 requires.
const USER: u32 = 65_534;

/// The programs in a directory that every user may read, and a pool of an ordinary user. Removed when dropped.
struct Place {
    dir: PathBuf,
    register: PathBuf,
    listener: Option<Child>,
}

fn can(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Permits every user to open /dev/fuse, as Debian does, where this machine does not. It does so in a mount namespace
/// of this thread and its children, which ends with them.
fn open_device_to_all() -> bool {
    let mode = |path: &Path| fs::metadata(path).map_or(0, |m| m.permissions().mode() & 0o777);
    if mode(Path::new("/dev/fuse")) & 0o6 == 0o6 {
        return true;
    }
    let node =
        PathBuf::from(format!("/tmp/fbu-fuse-{}-{:?}", std::process::id(), std::thread::current().id()));
    // SAFETY: it concerns this thread alone.
    let own = unsafe { libc::unshare(libc::CLONE_NEWNS) == 0 };
    let text = node.to_str().unwrap();
    let done = own
        && can("mount", &["--make-rprivate", "/"])
        && can("mknod", &["-m", "666", text, "c", "10", "229"])
        && can("mount", &["--bind", text, "/dev/fuse"]);
    let _ = fs::remove_file(&node);
    done
}

/// True when something is mounted there, as this thread sees it.
fn is_mounted(at: &Path) -> bool {
    let table = fs::read_to_string("/proc/thread-self/mounts").unwrap();
    table.lines().any(|line| line.split(' ').nth(1) == at.to_str())
}

impl Place {
    /// None where an ordinary user cannot mount. Prints the reason then.
    fn new(name: &str) -> Option<Place> {
        // SAFETY: cannot fail.
        let is_root = unsafe { libc::geteuid() } == 0;
        for (there, what) in [
            (is_root, "root, who can become another user"),
            (Path::new("/dev/fuse").exists(), "/dev/fuse"),
            (can("fusermount3", &["--version"]), "fusermount3"),
            (can("setpriv", &["--version"]), "setpriv"),
            (open_device_to_all(), "a /dev/fuse that everybody may open"),
        ] {
            if !there {
                eprintln!("skipped: this needs {what}");
                return None;
            }
        }
        let dir = PathBuf::from(format!("/tmp/fbu-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let place = Place { register: dir.join("no-socket"), dir, listener: None };
        fs::set_permissions(&place.dir, fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(place.dir.join("bin")).unwrap();
        for program in ["forebay", "forebayd", "forebay-mount", "forebay-register"] {
            // Copied by a process of its own, so that no other thread's child inherits a descriptor that can write a
            // program.
            let (from, to) = (binaries().join(program), place.dir.join("bin"));
            assert!(
                can("cp", &[from.to_str().unwrap(), to.to_str().unwrap()]),
                "{} is built",
                from.display()
            );
        }
        for name in ["home", "mnt"] {
            fs::create_dir(place.dir.join(name)).unwrap();
            chown(place.dir.join(name), Some(USER), Some(USER)).unwrap();
        }
        Some(place)
    }

    fn mnt(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    /// A command as that user, without capabilities.
    fn user(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        let id = USER.to_string();
        command
            .args(["--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all"])
            .arg("--")
            .arg(program);
        for name in ["FOREBAY_PREFIX", "FOREBAY_DISABLE", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        command.env("HOME", self.dir.join("home")).env("FOREBAY_POOL", self.dir.join("home/pool"));
        command.env("FOREBAY_REGISTER", &self.register).current_dir(&self.dir);
        command
    }

    fn forebay(&self, arguments: &[&str]) -> String {
        let output = self.user(self.dir.join("bin/forebay")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts pool and mount. Returns how data are served, and the reason.
    fn mounted(&self) -> (String, String) {
        let pool = self.dir.join("home/pool");
        self.forebay(&["up", "--capacity", "64MiB", "--path", pool.to_str().unwrap()]);
        self.forebay(&["mount", self.mnt().to_str().unwrap()]);
        let status: Value = serde_json::from_str(&self.forebay(&["status", "--json"])).unwrap();
        let mount = &status["mounts"][0];
        (mount["data"].as_str().unwrap().to_owned(), mount["why"].as_str().unwrap_or("").to_owned())
    }

    /// Writes, reads, maps and executes files on the mount, as its user.
    fn use_it(&self) {
        let script = "cd \"$0\" && rm -rf * && head -c 3000000 /dev/urandom >a && cp a b && cmp a b && echo more >>b && \
             test $(stat -c %s b) = 3000005 && rm a && cp /bin/true t && ./t && mkdir d && mv b d && ls d && \
             truncate -s 10 d/b && test $(wc -c <d/b) = 10";
        let output = self.user("sh").args(["-ec", script]).arg(self.mnt()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "b\n");
    }
}

/// Process numbers of the processes that run this program.
fn running(program: &Path) -> Vec<i32> {
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program)).collect()
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a process of this test's own, which its parent has not reaped or reaps in a moment.
    unsafe { libc::kill(pid, signal) };
}

/// Stopped processes, which continue when this is dropped.
struct Stopped(Vec<i32>);

impl Stopped {
    fn stop(pids: Vec<i32>) -> Stopped {
        for pid in &pids {
            signal(*pid, libc::SIGSTOP);
        }
        Stopped(pids)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            signal(*pid, libc::SIGCONT);
        }
    }
}

impl Place {
    fn helper(&self) -> PathBuf {
        self.dir.join("bin/forebay-register")
    }

    /// Gives the helper's file its capability. False where no file can have one. Prints the reason then.
    fn allow_helper(&self) -> bool {
        let done = can("setcap", &["cap_sys_admin+ep", self.helper().to_str().unwrap()]);
        if !done {
            eprintln!("skipped: no file can be given a capability here (setcap)");
        }
        done
    }

    /// Starts the helper as root, listening for mounts that need it.
    fn listen(&mut self) {
        self.register = self.dir.join("register.socket");
        let mut listener = Command::new(self.helper());
        self.listener = Some(listener.arg("--listen").arg(&self.register).spawn().unwrap());
        wait_for("it listens", || self.register.exists());
    }

    /// Runs a line of shell as the user.
    fn shell(&self, line: &str) -> std::process::Output {
        self.user("sh").args(["-ec", line]).arg(self.mnt()).output().unwrap()
    }

    fn free_bytes(&self) -> u64 {
        let output = self.shell("df --output=avail -B1 \"$0\" | tail -n 1");
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.user(self.dir.join("bin/forebay")).args(["down"]).output();
        if is_mounted(&self.mnt()) {
            let _ = Command::new("umount").arg("-l").arg(self.mnt()).status();
        }
        if let Some(listener) = &mut self.listener {
            let _ = listener.kill();
            let _ = listener.wait();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn mount_without_the_helper_goes_by_requests_and_says_how_to_change_that() {
    let Some(place) = Place::new("plain") else { return };
    let (data, why) = place.mounted();
    assert_eq!(data, "requests", "{why}");
    assert!(why.contains("setcap cap_sys_admin+ep"), "{why}");
    place.use_it();
}

#[test]
fn mount_with_the_helpers_capability_passes_through() {
    let Some(place) = Place::new("capability") else { return };
    if !place.allow_helper() {
        return;
    }
    let (data, why) = place.mounted();
    assert_eq!(data, "passthrough", "{why}");
    assert!(why.contains("forebay-register"), "{why}");
    place.use_it();
    // Opens succeed without a helper, and with the next one.
    let helpers = running(&place.helper());
    assert_eq!(helpers.len(), 1);
    signal(helpers[0], libc::SIGKILL);
    place.use_it();
    wait_for("another helper", || {
        place.use_it();
        running(&place.helper()).iter().any(|pid| *pid != helpers[0])
    });
    place.use_it();
    place.forebay(&["down"]);
    wait_for("the helper ends with the mount", || running(&place.helper()).is_empty());
}

#[test]
fn mount_with_a_helper_that_root_started_passes_through() {
    let Some(mut place) = Place::new("listener") else { return };
    place.listen();
    let (data, why) = place.mounted();
    assert_eq!(data, "passthrough", "{why}");
    place.use_it();
    // A mount that is being served continues when the listener ends. A second listener replaces the first.
    let listener = place.listener.as_mut().unwrap();
    listener.kill().unwrap();
    listener.wait().unwrap();
    let output =
        place.user("sh").args(["-ec", "echo y >\"$0/y\" && cat \"$0/y\""]).arg(place.mnt()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "y\n", "{}", String::from_utf8_lossy(&output.stderr));
    let mut again = Command::new(place.dir.join("bin/forebay-register"));
    place.listener = Some(again.arg("--listen").arg(&place.register).spawn().unwrap());
    place.forebay(&["umount"]);
    wait_for("a mount by the second", || {
        place.forebay(&["mount", place.mnt().to_str().unwrap()]);
        let status: Value = serde_json::from_str(&place.forebay(&["status", "--json"])).unwrap();
        if status["mounts"][0]["data"] == "passthrough" {
            return true;
        }
        place.forebay(&["umount"]);
        false
    });
}

/// Files are opened while the helper is stopped, each 0.1 s after the one before. Every program reads its own file's
/// content, and writes to its own file, also when the helper continues after the mount has given it up.
fn opens_while_the_helper_is_stopped(place: &Place) {
    const FILES: usize = 8;
    let (data, why) = place.mounted();
    assert_eq!(data, "passthrough", "{why}");
    let made = place.shell(&format!(
        "cd \"$0\" && for i in $(seq {FILES}); do yes \"file $i\" | head -c 100000 >f$i; done"
    ));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let helpers = running(&place.helper()).into_iter();
    let helpers = helpers.filter(|pid| place.listener.as_ref().is_none_or(|l| l.id() as i32 != *pid));
    let stopped = Stopped::stop(helpers.collect());
    assert_eq!(stopped.0.len(), 1);
    let begun = Instant::now();
    let line = "cd \"$0\" && exec 3<>f$1 && cat <&3 && echo written by $1 >&3";
    let mut programs = Vec::new();
    for i in 1..=FILES {
        let mut program = place.user("sh");
        program.args(["-ec", line]).arg(place.mnt()).arg(i.to_string());
        programs.push(program.stdout(std::process::Stdio::piped()).spawn().unwrap());
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_secs(12).saturating_sub(begun.elapsed()));
    drop(stopped);
    let was = |i: usize| format!("file {i}\n").repeat(20_000)[..100_000].to_owned();
    for (i, program) in (1..).zip(programs) {
        let output = program.wait_with_output().unwrap();
        assert!(output.status.success(), "program {i}");
        let read = String::from_utf8(output.stdout).unwrap();
        assert!(read == was(i), "program {i} read {:?}", read.lines().next());
    }
    for i in 1..=FILES {
        let now = String::from_utf8(place.shell(&format!("cat \"$0\"/f{i}")).stdout).unwrap();
        let wanted = format!("{}written by {i}\n", was(i));
        assert!(now == wanted, "f{i} ends with {:?}", now.lines().next_back());
    }
    place.use_it();
}

#[test]
fn files_opened_while_the_helper_is_stopped_are_their_own() {
    let Some(place) = Place::new("stopped") else { return };
    if place.allow_helper() {
        opens_while_the_helper_is_stopped(&place);
    }
}

#[test]
fn files_opened_while_the_helper_of_a_listener_is_stopped_are_their_own() {
    let Some(mut place) = Place::new("stopped-listener") else { return };
    place.listen();
    opens_while_the_helper_is_stopped(&place);
}

#[test]
fn files_that_were_open_when_the_helper_died_give_their_space_back() {
    let Some(place) = Place::new("died") else { return };
    if !place.allow_helper() {
        return;
    }
    let (data, why) = place.mounted();
    assert_eq!(data, "passthrough", "{why}");
    let free = place.free_bytes();
    let killed = running(&place.helper())[0];
    let line = format!(
        "cd \"$0\" && for i in 1 2 3; do head -c 12000000 /dev/zero >f$i; done && exec 3<f1 4<>f2 5<f3 && \
         kill -KILL {killed} && rm f1 f2 f3 && cat <&3 | wc -c"
    );
    let output = place.shell(&line);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "12000000\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // From here on nothing is opened, which would make the mount search for another helper.
    wait_for("the space is free again", || place.free_bytes() + 4_000_000 > free);
}

#[test]
fn opens_do_not_wait_for_a_helper_that_hangs() {
    let Some(mut place) = Place::new("hangs") else { return };
    place.listen();
    let (data, why) = place.mounted();
    assert_eq!(data, "passthrough", "{why}");
    // The kernel continues to accept connections for a stopped listener.
    let listener = place.listener.as_ref().unwrap().id() as i32;
    let _stopped = Stopped::stop(vec![listener]);
    for pid in running(&place.helper()).into_iter().filter(|pid| *pid != listener) {
        signal(pid, libc::SIGKILL);
    }
    let (begun, mut longest) = (Instant::now(), Duration::ZERO);
    while begun.elapsed() < Duration::from_secs(15) {
        let open = Instant::now();
        let output = place.shell("echo x >\"$0\"/x && cat \"$0\"/x");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "x\n");
        longest = longest.max(open.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(longest < Duration::from_secs(8), "an open took {longest:?}");
}

#[test]
fn limit_of_file_sizes_of_whoever_started_the_pool_fails_larger_files_and_kills_nobody() {
    let Some(place) = Place::new("limit") else { return };
    let (forebay, pool) = (place.dir.join("bin/forebay"), place.dir.join("home/pool"));
    let mut up = place.user("prlimit");
    up.arg("--fsize=70000000:70000000").arg(forebay).args(["up", "--capacity", "64MiB", "--path"]).arg(pool);
    let output = up.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    place.forebay(&["mount", place.mnt().to_str().unwrap()]);
    for line in ["truncate -s 80000000 \"$0\"/a", "echo x | dd of=\"$0\"/b bs=1 seek=80000000"] {
        let output = place.shell(&format!("export LC_ALL=C; {line}"));
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.contains("File too large"), "{line}: {words}");
    }
    place.use_it();
    let status: Value = serde_json::from_str(&place.forebay(&["status", "--json"])).unwrap();
    assert_eq!(status["mounts"][0]["restarts"], 0, "{status:#}");
    assert_eq!(status["restarts"], 0, "{status:#}");
}
