//! A real daemon with clients that send wrong requests, overwrite shared memory, stop and die. Other clients must not
//! notice, and the shard must stay clean.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_client::{Fail, PathBuffer, Place, Pool};
use forebay_data::BackingName;
use forebay_ring::{
    read_exact, receive_fds, send_fds, AttachReply, Header, Mapping, Ring, ATTACH_FDS, HEADER_BYTES,
    KIND_ATTACH,
};
use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Caller, Code, Ino, Reply, Request};

/// A daemon over a directory, stopped and removed on drop.
struct Daemon {
    dir: PathBuf,
    supervisor: Child,
    log: PathBuf,
}

impl Daemon {
    fn start(name: &str) -> Daemon {
        let dir = std::env::temp_dir().join(format!("forebay-hostile-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Daemon::start_in(dir)
    }

    /// Starts with the data that an earlier daemon left in `dir`.
    fn start_in(dir: PathBuf) -> Daemon {
        let log = dir.with_extension("log");
        let supervisor = Command::new(env!("CARGO_BIN_EXE_forebayd"))
            .args(["--media", "ssd", "--capacity", "256MiB", "--foreground", "--pool"])
            .arg(&dir)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let daemon = Daemon { dir, supervisor, log };
        let until = Instant::now() + Duration::from_secs(30);
        while forebay_server::control::status(&daemon.dir).map_or(true, |s| s.pids.worker.is_none()) {
            assert!(Instant::now() < until, "the daemon does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon
    }

    fn worker(&self) -> Option<u32> {
        forebay_server::control::status(&self.dir).ok()?.pids.worker
    }

    /// Waits until the daemon has noticed the clients that died, then checks shard and target.
    fn assert_clean(&self) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let report = forebay_server::control::check(&self.dir).unwrap();
            if report["clean"] == true && report["orphans"] == 0 {
                return;
            }
            assert!(Instant::now() < until, "not clean: {report}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts this test binary in another role.
    fn child(&self, role: &str, seed: u64) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_role", "--nocapture", "--include-ignored"])
            .env("FOREBAY_TEST_ROLE", role)
            .env("FOREBAY_TEST_POOL", &self.dir)
            .env("FOREBAY_TEST_SEED", seed.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(self.supervisor.id() as i32, libc::SIGTERM) };
        let _ = self.supervisor.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
        let _ = std::fs::remove_file(&self.log);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Creates, checks and removes files until `stop` is set or for `rounds`; every error is a failure.
fn work(pool: &Pool, who: u64, rounds: u64, stop: &AtomicBool) -> u64 {
    let root = pool.root().unwrap();
    let mut escape = PathBuffer::new();
    let mut done = 0;
    while done < rounds && !stop.load(Ordering::Relaxed) {
        let name = format!("w{who}-{done}");
        let place = Place { dir: root, path: name.as_bytes() };
        let fd = pool.open(place, libc::O_CREAT | libc::O_EXCL | libc::O_RDWR, 0o600, &mut escape).unwrap();
        // SAFETY: the descriptor is ours; the buffer is as long as said.
        unsafe {
            assert_eq!(libc::write(fd, name.as_ptr().cast(), name.len()), name.len() as isize);
            libc::close(fd);
        }
        assert_eq!(pool.stat(place, true, &mut escape).unwrap().st_size, name.len() as i64);
        if done % 2 == 0 {
            pool.unlink(place, &mut escape).unwrap();
            assert!(pool.stat(place, true, &mut escape).is_err());
        }
        done += 1;
    }
    done
}

/// An attachment whose shared memory the test can overwrite.
fn attach_raw(dir: &Path) -> (OwnedFd, OwnedFd, Ring) {
    let socket = UnixStream::connect(dir.join("socket")).unwrap();
    send_fds(socket.as_fd(), &Header { kind: KIND_ATTACH, len: 0 }.encode(), &[]).unwrap();
    let (mut header, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
    let got = receive_fds(socket.as_fd(), &mut header, &mut fds).unwrap();
    read_exact(socket.as_fd(), &mut header[got..]).unwrap();
    let mut body = [0; AttachReply::BYTES];
    read_exact(socket.as_fd(), &mut body).unwrap();
    let [Some(ring), Some(doorbell), Some(_), Some(_), None, ..] = fds else {
        panic!("descriptors are missing")
    };
    let calls = Ring::open(ring.as_fd(), doorbell.as_fd()).unwrap();
    (ring, doorbell, calls)
}

#[test]
fn scribbling_client_harms_no_other() {
    let daemon = Daemon::start("scribble");
    let worker = daemon.worker();
    let (ring, doorbell, _calls) = attach_raw(&daemon.dir);
    const SLOT: usize = 144 * 1024;
    let ring = Mapping::new(ring.as_fd(), 4096 + 64 * SLOT, true).unwrap();
    let doorbell = Mapping::new(doorbell.as_fd(), 4096, true).unwrap();
    let pool = Pool::attach(&daemon.dir).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(0x1234_5678_9abc_def1);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..256 {
                    let slot = 4096 + (random.next() % 64) as usize * SLOT;
                    let at = slot + (random.next() % 12) as usize * 8;
                    // Valid states, lengths and operations do more harm than random words.
                    let v = match random.next() % 4 {
                        0 => (random.next() % 4) | ((random.next() % 200) << 32),
                        1 => random.next() % 24,
                        2 => Ino::ROOT.0 + random.next() % 50,
                        _ => random.next(),
                    };
                    ring.word64(at).store(v, Ordering::Relaxed);
                }
                ring.word64(0).store(random.next(), Ordering::Relaxed);
                doorbell.word64(0).store(random.next(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        assert_eq!(work(pool, 1, 2000, &AtomicBool::new(false)), 2000);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(daemon.worker(), worker, "the worker must not have died");
    daemon.assert_clean();
}

#[test]
fn fuzzed_requests_are_all_answered_and_leave_the_shard_clean() {
    let daemon = Daemon::start("fuzz");
    let worker = daemon.worker();
    let (_ring, _doorbell, calls) = attach_raw(&daemon.dir);
    let mut random = Random(42);
    let mut reply = vec![0; MESSAGE_BYTES_MAX];
    let caller = Caller { uid: 0, gid: 0 };
    let names: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
    for round in 0..20_000u32 {
        let mut message = [0; 600];
        let mut inos = std::iter::repeat_with(|| Ino(Ino::ROOT.0 + random.next() % 40));
        let (p, q) = (inos.next().unwrap(), inos.next().unwrap());
        let (name, new_name) = (names[random.next() as usize % 4], names[random.next() as usize % 4]);
        let request = match random.next() % 9 {
            0 => Request::Create {
                parent: p,
                name,
                mode: 0o644,
                exclusive: false,
                dirty: true,
                layout: None,
                number: (new_name == b"d").then_some(q),
                reserve: name == b"a",
            },
            1 => Request::MakeDirectory { parent: p, name, mode: 0o755 },
            2 => Request::Rename {
                parent: p,
                name,
                new_parent: q,
                new_name,
                flags: (random.next() % 3) as u32,
            },
            3 => Request::Unlink { parent: p, name },
            4 => Request::RemoveDirectory { parent: p, name },
            5 => Request::Link { ino: p, parent: q, name },
            6 => Request::SetXattr { ino: p, name: b"user.x", value: b"value", flags: 0 },
            7 => Request::ReadDirectory { ino: p, cookie: random.next() >> 1, attributes: true },
            _ => Request::Symlink { parent: p, name, target: b"../x" },
        };
        let mut n = request.encode(caller, &mut message).unwrap();
        if round % 3 == 0 {
            for _ in 0..1 + random.next() % 4 {
                message[random.next() as usize % n] = random.next() as u8;
            }
            n -= (random.next() as usize % 3).min(n);
        }
        let answered = calls.call(&message[..n], &mut reply, &|| true, |bytes| match Reply::decode(bytes) {
            Err(Code::Malformed) => bytes.first_chunk::<2>() == Some(&(Code::Malformed as u16).to_le_bytes()),
            _ => true,
        });
        assert_eq!(answered, Ok(true), "request {round}: {:?}", &message[..n]);
    }
    assert_eq!(daemon.worker(), worker, "the worker must not have died");
    drop(calls);
    let report = forebay_server::control::check(&daemon.dir).unwrap();
    assert_eq!(report["clean"], true, "{report}");
}

#[test]
fn garbage_on_the_socket_harms_no_other() {
    let daemon = Daemon::start("socket");
    let worker = daemon.worker();
    let mut silent: Vec<UnixStream> = Vec::new();
    let mut random = Random(7);
    for round in 0..60 {
        let mut socket = UnixStream::connect(daemon.dir.join("socket")).unwrap();
        match round % 4 {
            0 => silent.push(socket),
            1 => {
                let noise: Vec<u8> = (0..300).map(|_| random.next() as u8).collect();
                let _ = socket.write_all(&noise);
            }
            2 => {
                let header = Header { kind: (round % 8) as u16, len: u32::MAX }.encode();
                let _ = socket.write_all(&header);
                let mut answer = Vec::new();
                let _ = socket.read_to_end(&mut answer);
                assert!(!answer.is_empty(), "an impossible length is refused in words");
            }
            _ => {
                let _ = socket.write_all(&Header { kind: 2, len: 9 }.encode());
                let _ = socket.write_all(b"{\"op\":1}x");
            }
        }
    }
    let pool = Pool::attach(&daemon.dir).unwrap();
    assert_eq!(work(pool, 2, 200, &AtomicBool::new(false)), 200);
    assert_eq!(daemon.worker(), worker, "the worker must not have died");
    daemon.assert_clean();
}

#[test]
fn stopped_client_holds_up_nobody_and_goes_on() {
    let daemon = Daemon::start("stop");
    let mut child = daemon.child("work", 3);
    let pool = Pool::attach(&daemon.dir).unwrap();
    for round in 0..10 {
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) };
        assert_eq!(work(pool, 100 + round, 50, &AtomicBool::new(false)), 50);
        // SAFETY: as above.
        unsafe { libc::kill(child.id() as i32, libc::SIGCONT) };
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success(), "the stopped client must finish without an error");
    daemon.assert_clean();
}

/// A stopped worker, which is continued on drop, whatever the result of the test.
struct Stopped(i32);

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: plain system call; the worker is not reaped while its supervisor runs, which outlives this.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

#[test]
fn calls_end_in_time_while_their_own_node_s_worker_is_stopped() {
    let daemon = Daemon::start("stopped-worker");
    let (_ring, _doorbell, calls) = attach_raw(&daemon.dir);
    let mut message = [0; 64];
    let n = Request::GetAttr { ino: Ino::ROOT }.encode(Caller { uid: 0, gid: 0 }, &mut message).unwrap();
    let ask = || calls.call(&message[..n], &mut [0; MESSAGE_BYTES_MAX], &|| true, |bytes| bytes.len());
    ask().unwrap();
    let worker = daemon.worker().unwrap() as i32;
    // SAFETY: plain system call; as above.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGSTOP) }, 0);
    let (went_on, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // More calls than slots: some wait for a slot.
        let waiting: Vec<_> = (0..RING_SLOTS + 2).map(|_| scope.spawn(ask)).collect();
        scope.spawn(|| {
            let _stopped = Stopped(worker);
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(40) && !is_over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(50));
            }
            went_on.store(!is_over.load(Ordering::SeqCst), Ordering::SeqCst);
        });
        for waiting in waiting {
            assert!(waiting.join().unwrap().is_err(), "it was answered, when its worker went on");
        }
        is_over.store(true, Ordering::SeqCst);
    });
    assert!(!went_on.load(Ordering::SeqCst), "calls waited until the worker went on, after 40 s");
    // Slots of abandoned calls are not lost.
    for _ in 0..2 * RING_SLOTS {
        ask().unwrap();
    }
    daemon.assert_clean();
}

#[test]
fn clients_killed_at_random_leak_nothing() {
    let daemon = Daemon::start("kill");
    let pool = Pool::attach(&daemon.dir).unwrap();
    let mut random = Random(0xfeed);
    for round in 0..15 {
        let mut children: Vec<Child> = (0..2).map(|i| daemon.child("work", 10 * round + i)).collect();
        for child in &mut children {
            let mut line = [0; 1];
            child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        }
        std::thread::sleep(Duration::from_micros(random.next() % 30_000));
        for mut child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(work(pool, 1000 + round, 20, &AtomicBool::new(false)), 20);
    }
    daemon.assert_clean();
}

#[test]
fn worker_killed_at_random_is_noticed_by_no_client_and_loses_nothing() {
    let daemon = Daemon::start("worker");
    let mut children: Vec<Child> = (0..2).map(|i| daemon.child("work", 500 + i)).collect();
    let mut random = Random(0xbeef);
    let mut killed = 0;
    while killed < 12 {
        std::thread::sleep(Duration::from_millis(20 + random.next() % 150));
        if let Some(worker) = daemon.worker() {
            // SAFETY: the worker of the daemon that this test started.
            unsafe { libc::kill(worker as i32, libc::SIGKILL) };
            killed += 1;
        }
    }
    for mut child in children.drain(..) {
        drop(child.stdin.take());
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success(), "a client noticed: {said}");
    }
    assert!(forebay_server::control::status(&daemon.dir).unwrap().restarts >= 12);
    daemon.assert_clean();
}

#[test]
fn supervisor_killed_with_its_worker_loses_nothing_that_was_acknowledged() {
    let mut daemon = Daemon::start("both");
    for round in 0..4u64 {
        let mut child = daemon.child("report", 700 + round);
        std::thread::sleep(Duration::from_millis(150));
        daemon.supervisor.kill().unwrap();
        daemon.supervisor.wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        // Each line was written after its file was made.
        let made: Vec<&str> = said.split('\n').filter(|l| l.starts_with("made ")).map(|l| &l[5..]).collect();
        let whole = made.len().saturating_sub(1);
        assert!(whole > 0, "{said}");
        let again = Daemon::start_in(daemon.dir.clone());
        daemon.dir = PathBuf::from("/nonexistent");
        drop(std::mem::replace(&mut daemon, again));
        let pool = Pool::attach(&daemon.dir).unwrap();
        let (root, mut escape) = (pool.root().unwrap(), PathBuffer::new());
        for name in &made[..whole] {
            let place = Place { dir: root, path: name.as_bytes() };
            assert!(pool.stat(place, true, &mut escape).is_ok(), "{name} was acknowledged and is gone");
        }
        daemon.assert_clean();
    }
}

#[test]
fn backing_file_made_ahead_by_who_is_killed_is_removed_whoever_dies_with_it() {
    let mut daemon = Daemon::start("ahead");
    // A check commits first. Without one, the client's changes are only in the journal.
    let kinds = ["client", "client and worker", "all"].map(|victims| [(victims, true), (victims, false)]);
    for (round, (victims, checked)) in kinds.into_iter().flatten().cycle().take(12).enumerate() {
        let mut child = daemon.child("ahead", round as u64);
        let mut path = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        while !path.starts_with("at ") {
            path.clear();
            assert_ne!(said.read_line(&mut path).unwrap(), 0, "the child ended");
        }
        let path = PathBuf::from(path.trim_end().strip_prefix("at ").unwrap());
        assert!(path.exists());
        if checked {
            let report = forebay_server::control::check(&daemon.dir).unwrap();
            assert_eq!(report["clean"], true, "a number in reserve is no leak: {report}");
            assert!(path.exists());
        }
        if victims == "all" {
            daemon.supervisor.kill().unwrap();
            daemon.supervisor.wait().unwrap();
        } else if victims != "client" {
            // SAFETY: the worker of the daemon that this test started.
            unsafe { libc::kill(daemon.worker().unwrap() as i32, libc::SIGKILL) };
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if victims == "all" {
            let again = Daemon::start_in(daemon.dir.clone());
            daemon.dir = PathBuf::from("/nonexistent");
            drop(std::mem::replace(&mut daemon, again));
        }
        let until = Instant::now() + Duration::from_secs(20);
        while path.exists() {
            assert!(Instant::now() < until, "{victims} died: {} is still there", path.display());
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon.assert_clean();
    }
}

#[test]
fn file_that_cannot_be_made_leaves_nothing_and_its_number_serves_the_next_one() {
    let daemon = Daemon::start("undo");
    let pool = Pool::attach(&daemon.dir).unwrap();
    let (root, mut escape) = (pool.root().unwrap(), PathBuffer::new());
    // The names are too long for the board, so only the daemon can find that they exist.
    let long = [b'l'; 120];
    let mut create = |name: &[u8]| {
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
        pool.open(Place { dir: root, path: name }, flags, 0o600, &mut escape)
    };
    let first = create(&long).unwrap();
    let files = |daemon: &Daemon| {
        let report = forebay_server::control::check(&daemon.dir).unwrap();
        assert_eq!(report["clean"], true, "{report}");
        report["backing_files"].as_u64().unwrap()
    };
    assert_eq!(files(&daemon), 1);
    for i in 0..10 {
        assert_eq!(create(&long), Err(Fail::Code(Code::Exists)));
        assert_eq!(files(&daemon), 1 + i);
        let fd = create(format!("f{i}").as_bytes()).unwrap();
        // SAFETY: the descriptor is ours, the buffer as long as said.
        unsafe {
            assert_eq!(libc::lseek(fd, 0, libc::SEEK_END), 0, "a new file is empty");
            assert_eq!(libc::write(fd, long.as_ptr().cast(), long.len()), long.len() as isize);
            libc::close(fd);
        }
        assert_eq!(files(&daemon), 2 + i);
    }
    // SAFETY: ours.
    unsafe { libc::close(first) };
    daemon.assert_clean();
}

#[test]
fn forked_child_and_closed_descriptors_go_on() {
    let daemon = Daemon::start("fork");
    let mut child = daemon.child("fork", 1);
    assert!(child.wait().unwrap().success());
    daemon.assert_clean();
}

/// Not a test itself: the code of the child processes above. Does nothing when the role is not set.
#[test]
#[ignore = "started by the other tests in a process of its own"]
fn child_role() {
    let Ok(role) = std::env::var("FOREBAY_TEST_ROLE") else { return };
    let dir = PathBuf::from(std::env::var_os("FOREBAY_TEST_POOL").unwrap());
    let seed: u64 = std::env::var("FOREBAY_TEST_SEED").unwrap().parse().unwrap();
    let pool = Pool::attach(&dir).unwrap();
    match role.as_str() {
        "work" => {
            print!("!");
            std::io::stdout().flush().unwrap();
            // Runs until standard input is closed; the names that stay are checked at the end.
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let worked = scope.spawn(|| work(pool, seed, u64::MAX, &stop));
                let _ = std::io::stdin().read_to_end(&mut Vec::new());
                stop.store(true, Ordering::Relaxed);
                let done = worked.join().unwrap();
                let (root, mut escape) = (pool.root().unwrap(), PathBuffer::new());
                for i in (1..done).step_by(2) {
                    let name = format!("w{seed}-{i}");
                    let place = Place { dir: root, path: name.as_bytes() };
                    assert_eq!(
                        pool.stat(place, true, &mut escape).unwrap().st_size,
                        name.len() as i64,
                        "{name}"
                    );
                }
            });
        }
        "report" => {
            let (root, mut escape) = (pool.root().unwrap(), PathBuffer::new());
            let mut out = std::io::stdout();
            println!();
            for i in 0..u64::MAX {
                let name = format!("r{seed}-{i}");
                let place = Place { dir: root, path: name.as_bytes() };
                let Ok(fd) = pool.open(place, libc::O_CREAT | libc::O_RDWR, 0o600, &mut escape) else {
                    break;
                };
                // SAFETY: the descriptor is ours.
                unsafe { libc::close(fd) };
                writeln!(out, "made {name}").unwrap();
                out.flush().unwrap();
            }
            // Killed by the test.
            std::thread::sleep(Duration::from_secs(60));
        }
        "ahead" => {
            let (_ring, _doorbell, calls) = attach_raw(&dir);
            let (caller, name) = (Caller { uid: 0, gid: 0 }, format!("ahead{seed}"));
            let create = Request::Create {
                parent: Ino::ROOT,
                name: name.as_bytes(),
                mode: 0o600,
                exclusive: true,
                dirty: true,
                layout: None,
                number: None,
                reserve: true,
            };
            let (mut message, mut reply) = ([0; 600], [0; 600]);
            let n = create.encode(caller, &mut message).unwrap();
            let next = calls.call(&message[..n], &mut reply, &|| true, |bytes| match Reply::decode(bytes) {
                Ok(Reply::Created { created: true, next, .. }) => next,
                other => panic!("{other:?}"),
            });
            let name = BackingName::new(next.unwrap().expect("a number in reserve"), 0, 0);
            let path = dir.join("target").join(name.as_c_str().to_str().unwrap());
            std::fs::write(&path, b"x").unwrap();
            println!("at {}", path.display());
            // Killed by the test.
            std::thread::sleep(Duration::from_secs(60));
        }
        "fork" => {
            work(pool, seed, 10, &AtomicBool::new(false));
            // SAFETY: the child only uses the pool, which is safe after fork, and leaves by _exit.
            unsafe {
                let pid = libc::fork();
                if pid == 0 {
                    let (root, mut escape) = (Ino::ROOT, PathBuffer::new());
                    let place = Place { dir: root, path: b"by-the-child" };
                    let made = pool.open(place, libc::O_CREAT | libc::O_RDWR, 0o600, &mut escape);
                    libc::_exit(if made.is_ok() { 0 } else { 1 });
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                assert_eq!(status, 0, "the forked child must reach the pool");
            }
            let (root, mut escape) = (pool.root().unwrap(), PathBuffer::new());
            pool.stat(Place { dir: root, path: b"by-the-child" }, true, &mut escape).unwrap();
            // SAFETY: nothing in this process needs the descriptors that are closed here.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
            work(pool, seed + 1, 10, &AtomicBool::new(false));
        }
        other => panic!("no such role: {other}"),
    }
}
