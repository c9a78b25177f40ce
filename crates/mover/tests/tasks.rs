//! Tasks over the mover's socket, with operations that do what the test says.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use forebay_mover::tasks::{Operations, Progress, TaskServer};
use forebay_tasks::{Keep, MoverClient, Task, TaskState, Verb};
use forebay_types::{Code, Error, Ino, Result, MOVER_SOCKET};

/// A directory that is removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-mover-tasks-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Sync goes on until the gate is open or it is cancelled; release fails for a path; purge fails; refresh panics.
#[derive(Default)]
struct Fake {
    gate: (Mutex<bool>, Condvar),
    resolved: Mutex<Vec<(Ino, Vec<u8>, Keep)>>,
}

impl Fake {
    fn open(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }
}

impl Operations for Fake {
    fn run(&self, verb: Verb, ino: Ino, recursive: bool, progress: &Progress) -> Result<()> {
        assert!(ino == Ino(7) && recursive);
        progress.found(2, 100);
        progress.done(1, 40);
        match verb {
            Verb::Sync => {
                let mut open = self.gate.0.lock().unwrap();
                while !*open && !progress.is_cancelled() {
                    open = self.gate.1.wait_timeout(open, Duration::from_millis(5)).unwrap().0;
                }
                progress.done(1, 60);
            }
            Verb::Release => {
                progress.failed("/a/b", &Error::new(Code::Busy, "cannot release /a/b").why("it is open"))
            }
            Verb::Purge => return Err(Error::new(Code::Io, "cannot reach the store").cure("start it")),
            Verb::Refresh => panic!("a defect"),
            Verb::Prestage => {}
        }
        Ok(())
    }

    fn resolve(&self, parent: Ino, name: &[u8], keep: Keep) -> Result<()> {
        self.resolved.lock().unwrap().push((parent, name.to_vec(), keep));
        Ok(())
    }

    fn probe(&self, url: &str) -> Result<()> {
        Err(Error::new(Code::NotFound, format!("cannot open {url}")).cure("make it"))
    }
}

fn serve(dir: &Path) -> (TaskServer, Arc<Fake>) {
    let fake = Arc::new(Fake::default());
    (TaskServer::start(dir, fake.clone()).unwrap(), fake)
}

fn client(dir: &Path) -> MoverClient {
    MoverClient::connect(dir).unwrap()
}

fn start(dir: &Path, verb: Verb) -> u64 {
    client(dir).start(verb, 7, "/a", true).unwrap().id
}

fn over(dir: &Path, id: u64) -> Task {
    client(dir).wait(id, |_| true).unwrap()
}

#[test]
fn waiting_shows_progress_and_ends_with_the_task() {
    let dir = Dir::new();
    let (_server, fake) = serve(&dir.0);
    let id = start(&dir.0, Verb::Sync);
    let mut seen = Vec::new();
    let task = client(&dir.0).wait(id, |task| {
        if task.state == TaskState::Running && task.bytes_done == 40 {
            fake.open();
        }
        seen.push(task.state);
        true
    });
    let task = task.unwrap();
    assert!(seen.contains(&TaskState::Running), "{seen:?}");
    assert_eq!(
        (task.state, task.files_done, task.bytes_done, task.bytes_total),
        (TaskState::Done, 2, 100, 100)
    );
    assert_eq!(client(&dir.0).list().unwrap(), std::slice::from_ref(&task));
    assert_eq!(client(&dir.0).show(id).unwrap(), task);
    let mode = std::fs::metadata(dir.0.join(MOVER_SOCKET)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn failures_come_with_their_paths_and_a_panic_is_one() {
    let dir = Dir::new();
    let _server = serve(&dir.0);
    let [release, purge, refresh, prestage] = [Verb::Release, Verb::Purge, Verb::Refresh, Verb::Prestage]
        .map(|verb| over(&dir.0, start(&dir.0, verb)));
    assert_eq!((release.state, &*release.errors[0].path), (TaskState::Failed, "/a/b"));
    assert_eq!((purge.state, &*purge.errors[0].path), (TaskState::Failed, "/a"));
    assert_eq!(Error::from(purge.errors[0].error.clone()).cure, "start it");
    assert_eq!((refresh.state, prestage.state), (TaskState::Failed, TaskState::Done));
}

#[test]
fn cancelled_task_ends_and_its_numbers_are_not_given_again() {
    let dir = Dir::new();
    let _server = serve(&dir.0);
    let id = start(&dir.0, Verb::Sync);
    assert_eq!(client(&dir.0).cancel(id).unwrap().state, TaskState::Cancelled);
    assert_eq!(over(&dir.0, id).state, TaskState::Cancelled);
    assert!(start(&dir.0, Verb::Prestage) > id);
    assert_eq!(client(&dir.0).show(99).unwrap_err().code, Code::NotFound);
    assert_eq!(client(&dir.0).wait(99, |_| true).unwrap_err().code, Code::NotFound);
}

#[test]
fn task_that_ran_when_the_mover_ended_is_run_by_the_next_one() {
    let dir = Dir::new();
    let (server, _fake) = serve(&dir.0);
    let id = start(&dir.0, Verb::Sync);
    while client(&dir.0).show(id).unwrap().state != TaskState::Running {
        std::thread::sleep(Duration::from_millis(1));
    }
    server.stop();
    let (_server, fake) = serve(&dir.0);
    fake.open();
    let task = over(&dir.0, id);
    assert_eq!((task.state, task.starts, task.files_done), (TaskState::Done, 2, 2));
}

#[test]
fn command_that_goes_away_leaves_its_task() {
    let dir = Dir::new();
    let (_server, fake) = serve(&dir.0);
    let id = start(&dir.0, Verb::Sync);
    client(&dir.0).wait(id, |_| false).unwrap();
    fake.open();
    assert_eq!(over(&dir.0, id).state, TaskState::Done);
}

#[test]
fn probe_and_resolve_reach_the_engine_and_errors_come_back_whole() {
    let dir = Dir::new();
    let (_server, fake) = serve(&dir.0);
    let e = client(&dir.0).probe("/x").unwrap_err();
    assert_eq!((e.code, &*e.what, &*e.cure), (Code::NotFound, "cannot open /x", "make it"));
    client(&dir.0).resolve(3, b"odd\xff", Keep::Both).unwrap();
    assert_eq!(*fake.resolved.lock().unwrap(), [(Ino(3), b"odd\xff".to_vec(), Keep::Both)]);
}

#[test]
fn malformed_requests_are_answered_and_end_only_their_connection() {
    let dir = Dir::new();
    let _server = serve(&dir.0);
    for bytes in [&b"{\n"[..], b"\n", b"{\"op\":\"dance\"}\n", &[b'x'; 70_000]] {
        let mut stream = UnixStream::connect(dir.0.join(MOVER_SOCKET)).unwrap();
        let _ = stream.write_all(bytes); // the server may close first
        let mut line = String::new();
        let _ = BufReader::new(stream).read_line(&mut line);
        assert!(line.is_empty() || line.contains("cannot read the request"), "{line}");
    }
    assert_eq!(client(&dir.0).list().unwrap(), []);
    let nowhere = Dir::new();
    let e = MoverClient::connect(&nowhere.0).unwrap_err();
    assert!(e.code == Code::NotFound && e.cure.contains("forebay attach"), "{e}");
}
