//! `forebay down` of pools that programs use without `forebay run`: with `forebay.h`, and with a preload library that they
//! were given by hand. And volumes that are created while a pool stops.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Once};
use std::time::Duration;

use common::{eventually, forebay, kill, Guarded, Place, Ran, Replaced};
use forebay_client::Pool;
use serde_json::Value;

/// A pool that is up.
struct Bed {
    place: Place,
    pool: PathBuf,
}

impl Bed {
    fn new() -> Bed {
        let place = Place::new();
        let pool = place.up("p");
        Bed { place, pool }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.env("FOREBAY_POOL", &self.pool).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().unwrap())
    }

    fn ok(&self, arguments: &[&str]) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["status", "--json"]).out).unwrap()
    }

    fn pid(&self, process: &str) -> i32 {
        self.status()["pids"][process].as_i64().unwrap() as i32
    }

    /// A shell under the preload library that works in the pool, is in no run, and ends at a line of its input.
    fn shell(&self, script: &str) -> Guarded {
        let mut command = Command::new("sh");
        self.place.dress(command.args(["-c", &format!("cd /forebay; {script}; echo; read line")]));
        let library = forebay().with_file_name("libforebay_preload.so");
        command.env("LD_PRELOAD", library).env("FOREBAY_POOL", &self.pool);
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        shell.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Guarded(shell)
    }

    /// Puts the pool in front of a store that gets 2 MB in a second, when it is told to.
    fn attach_slow_store(&self) -> PathBuf {
        let store = self.place.join("store");
        std::fs::create_dir(&store).unwrap();
        let url = format!("file://{}?rate=2MB/s", store.display());
        self.ok(&["attach", &url, "/data", "--drain", "request"]);
        store
    }
}

fn end(mut shell: Guarded) {
    shell.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(shell.0.wait().unwrap().success());
}

#[test]
fn down_of_a_pool_that_a_program_uses_without_a_run_is_refused_and_names_it() {
    let bed = Bed::new();
    let shell = bed.shell("echo one >f");
    let name = format!("a program uses it: sh ({})", shell.pid());
    let refused = |options: &[&str]| {
        let down = bed.run(&[&["down"], options].concat());
        down.assert_refused(1, &[&name, "--force"]);
    };
    refused(&[]);
    refused(&["--keep"]);
    // The supervisor knows of it, whatever the worker does.
    let worker = bed.pid("worker");
    kill(worker, libc::SIGSTOP);
    refused(&[]);
    kill(worker, libc::SIGKILL);
    eventually("it is replaced", || bed.status()["state"] == "up" && bed.pid("worker") != worker);
    refused(&[]);
    assert_eq!(bed.status()["programs"], 1);
    end(shell);
    let down = bed.ok(&["down"]);
    assert!(down.out.contains("1 entry"), "{down:?}");
}

#[test]
fn program_that_calls_the_library_keeps_down_from_stopping_the_pool_and_force_does_not_ask() {
    let bed = Bed::new();
    Pool::attach(&bed.pool).unwrap();
    let down = bed.run(&["down"]);
    down.assert_refused(1, &["a program uses it", &format!("({})", std::process::id()), "--force"]);
    bed.ok(&["down", "--force"]);
}

#[test]
fn pool_in_the_foreground_keeps_what_a_program_without_a_run_writes_to_the_end() {
    let bed = Bed::new();
    bed.ok(&["down"]);
    let path = bed.pool.to_str().unwrap();
    let up = bed.command(&["up", "--capacity", "128MiB", "--path", path, "--foreground"]).spawn().unwrap();
    bed.ok(&["status", "--wait", "60"]);
    bed.attach_slow_store();
    let shell = bed.shell("echo one >data/one");
    kill(up.id() as i32, libc::SIGTERM);
    std::thread::sleep(Duration::from_secs(1));
    kill(up.id() as i32, libc::SIGTERM);
    let up = Ran::of(up.wait_with_output().unwrap());
    up.assert_refused(1, &["programs use it"]);
    end(shell);
}

/// Stands between the command and the supervisor, and calls `before` before a request to stop the pool is passed on. Its
/// threads live as long as this process, and `before` with them: what that holds outlives the test.
fn between(replaced: &Replaced, before: impl Fn() + Send + Sync + 'static) {
    let (fake, aside) = (replaced.fake.try_clone().unwrap(), replaced.aside.clone());
    let before = Arc::new(before);
    std::thread::spawn(move || {
        for asker in fake.incoming().map_while(Result::ok) {
            let (aside, before) = (aside.clone(), Arc::clone(&before));
            std::thread::spawn(move || pass_on(asker, &aside, &*before));
        }
    });
}

fn pass_on(mut asker: UnixStream, to: &Path, before: &dyn Fn()) {
    let mut supervisor = UnixStream::connect(to).unwrap();
    let (mut from, mut back) = (supervisor.try_clone().unwrap(), asker.try_clone().unwrap());
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut back);
        let _ = back.shutdown(std::net::Shutdown::Both);
    });
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = asker.read(&mut bytes) {
        if String::from_utf8_lossy(&bytes[..n]).contains("\"down\"") {
            before();
        }
        if supervisor.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = supervisor.shutdown(std::net::Shutdown::Write);
}

#[test]
fn what_a_program_without_a_run_writes_between_the_copy_and_the_stop_is_copied_too() {
    let bed = Arc::new(Bed::new());
    let store = bed.attach_slow_store();
    end(bed.shell("echo early >data/early"));
    let supervisor = Replaced::new(&bed.pool, "supervisor");
    let (writer, once) = (Arc::downgrade(&bed), Once::new());
    let write = move || end(writer.upgrade().unwrap().shell("echo late >data/late"));
    between(&supervisor, move || once.call_once(&write));
    let down = bed.run(&["down"]);
    assert_eq!(down.code, Some(0), "{down:?}");
    assert!(down.err.contains("copying again"), "{down:?}");
    assert_eq!(std::fs::read(store.join("late")).unwrap(), b"late\n");
}

#[test]
fn volume_that_is_created_between_the_look_and_the_stop_keeps_the_pool_up() {
    for options in [&["down", "--keep"][..], &["down", "--keep", "--force"]] {
        let bed = Arc::new(Bed::new());
        if bed.status()["backing"] == "directory" {
            return eprintln!("skipped: there are no volumes");
        }
        let supervisor = Replaced::new(&bed.pool, "supervisor");
        let (maker, once) = (Arc::downgrade(&bed), Once::new());
        let make = move || drop(maker.upgrade().unwrap().ok(&["volume", "create", "v", "--size", "1MiB"]));
        between(&supervisor, move || once.call_once(&make));
        let down = bed.run(options);
        down.assert_refused(1, &["its volumes have 1 MiB", "--discard"]);
        supervisor.restore();
        bed.ok(&["volume", "delete", "v"]);
        bed.ok(&["volume", "create", "w", "--size", "1MiB"]);
        bed.ok(&["down", "--keep", "--discard"]);
    }
}

#[test]
fn volume_is_not_created_in_a_pool_that_stops_and_keeps_its_data() {
    let bed = Bed::new();
    if bed.status()["backing"] == "directory" {
        return eprintln!("skipped: there are no volumes");
    }
    bed.attach_slow_store();
    // The supervisor waits for it for a while. The worker serves until then.
    let mover = bed.status()["mover"]["pid"].as_i64().unwrap() as i32;
    kill(mover, libc::SIGSTOP);
    let down = bed.command(&["down", "--keep"]).spawn().unwrap();
    eventually("the pool stops", || {
        std::fs::read_to_string(bed.pool.join("log")).unwrap().contains("pool stops")
    });
    let created = bed.run(&["volume", "create", "v", "--size", "1MiB"]);
    kill(mover, libc::SIGCONT);
    assert!(created.code != Some(0) && created.err.contains("daemon is gone"), "{created:?}");
    let down = Ran::of(down.wait_with_output().unwrap());
    assert_eq!(down.code, Some(0), "{down:?}");
}
