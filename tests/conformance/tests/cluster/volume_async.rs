//! Asynchronous calls on a piece of another node, many at a time, while workers are killed, also two within milliseconds, a
//! link is cut, and the node dies: each call that was started completes once, with EIO if it fails, and a get that succeeds
//! has the bytes that were put.
//!
//! The process of the test uses the library as C programs do, libforebay.so.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void, CString};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::nodes::{program, until, Cluster};
use crate::volume_access::{process, Random};
use crate::volume_history::{content, contents};
use crate::volumes::{succeeds, volume};

/// The most calls of a round, all of which are started before the first completion is taken.
const CALLS: usize = 300;
/// The volume: a word; bytes that are never changed; places of [`CALLS`] puts each, one for each round in turn.
const WORD: u64 = 64;
const FIXED: u64 = 4096;
const FIXED_BYTES: u64 = 1 << 20;
const PLACES: u64 = FIXED + FIXED_BYTES;
/// Bytes of a place. Longer puts may be repeated late, where the worker of the caller's node dies.
const PLACE: u64 = 8 << 10;
/// Bytes to which long puts go, which are not read.
const LONG_AT: u64 = PLACES + CALLS as u64 * PLACE;
const LONG: u64 = 200_000;
/// Longer than any call takes, in milliseconds.
const HANGS_MS: c_int = 120_000;

#[repr(C)]
#[derive(Clone, Copy)]
struct Completion {
    state: *mut c_void,
    result: i64,
    was: u64,
}

type Volume = *const c_void;
type Queue = *mut c_void;
type Start = unsafe extern "C" fn(Volume, *mut c_void, usize, i64, Queue, *mut c_void) -> c_int;
type Transfer = unsafe extern "C" fn(Volume, *mut c_void, usize, i64) -> c_int;
type AddStart = unsafe extern "C" fn(Volume, i64, u64, Queue, *mut c_void) -> c_int;
type Add = unsafe extern "C" fn(Volume, i64, u64, *mut u64) -> c_int;
type Wait = unsafe extern "C" fn(Queue, *mut Completion, c_int, c_int) -> c_int;
type Close = unsafe extern "C" fn(Queue) -> c_int;

/// The functions of forebay.h that are used here.
struct Library {
    put: Transfer,
    get: Transfer,
    put_start: Start,
    get_start: Start,
    add_start: AddStart,
    add: Add,
    wait: Wait,
    close: Close,
    volume: Volume,
    queue: Queue,
}

impl Library {
    /// Loads the library, and opens the volume.
    fn open(pool: &str) -> Library {
        let path = CString::new(program("libforebay.so").to_str().unwrap()).unwrap();
        // SAFETY: the library's prototypes are those of forebay.h; the pointers are valid for the calls.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null(), "{path:?} cannot be loaded");
            let find = |name: &str| {
                let name = CString::new(name).unwrap();
                let found = libc::dlsym(library, name.as_ptr());
                assert!(!found.is_null(), "{name:?} is missing");
                found
            };
            let attach: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int =
                std::mem::transmute(find("forebay_attach"));
            let open: unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut Volume) -> c_int =
                std::mem::transmute(find("forebay_volume_open"));
            let create: unsafe extern "C" fn(c_int, *mut Queue) -> c_int =
                std::mem::transmute(find("forebay_queue_create"));
            let (mut attached, mut volume, mut queue) = (null_mut(), std::ptr::null(), null_mut());
            let pool = CString::new(pool).unwrap();
            assert_eq!(attach(pool.as_ptr(), &raw mut attached), 0);
            assert_eq!(open(attached, c"v".as_ptr(), libc::O_RDWR, &raw mut volume), 0);
            assert_eq!(create(0, &raw mut queue), 0);
            Library {
                put: std::mem::transmute::<*mut c_void, Transfer>(find("forebay_volume_put")),
                get: std::mem::transmute::<*mut c_void, Transfer>(find("forebay_volume_get")),
                put_start: std::mem::transmute::<*mut c_void, Start>(find("forebay_volume_put_start")),
                get_start: std::mem::transmute::<*mut c_void, Start>(find("forebay_volume_get_start")),
                add_start: std::mem::transmute::<*mut c_void, AddStart>(find(
                    "forebay_volume_fetch_add_start",
                )),
                add: std::mem::transmute::<*mut c_void, Add>(find("forebay_volume_fetch_add")),
                wait: std::mem::transmute::<*mut c_void, Wait>(find("forebay_queue_wait")),
                close: std::mem::transmute::<*mut c_void, Close>(find("forebay_queue_close")),
                volume,
                queue,
            }
        }
    }

    fn put_now(&self, offset: u64, bytes: &mut [u8]) -> c_int {
        // SAFETY: the slice is there for the call.
        unsafe { (self.put)(self.volume, bytes.as_mut_ptr().cast(), bytes.len(), offset as i64) }
    }

    fn get_now(&self, offset: u64, bytes: &mut [u8]) -> c_int {
        // SAFETY: the slice is writable for the call.
        unsafe { (self.get)(self.volume, bytes.as_mut_ptr().cast(), bytes.len(), offset as i64) }
    }
}

enum Call {
    Get {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A put to the place of its number.
    Put {
        bytes: Vec<u8>,
    },
    Long {
        bytes: Vec<u8>,
    },
    Add,
}

fn drawn(random: &mut Random, round: u32, index: usize) -> Call {
    match random.below(8) {
        0..=2 => {
            let most = [100, 5_000, LONG][random.below(3) as usize];
            let bytes = random.below(most) + 1;
            Call::Get { offset: FIXED + random.below(FIXED_BYTES - bytes), bytes: vec![0x5a; bytes as usize] }
        }
        3..=5 => Call::Put { bytes: contents(round, &[(place(index), random.below(PLACE) + 1)]) },
        6 => Call::Long { bytes: vec![7; random.below(LONG) as usize + 1] },
        _ => Call::Add,
    }
}

fn place(index: usize) -> u64 {
    PLACES + index as u64 * PLACE
}

fn is_fixed(offset: u64, bytes: &[u8]) -> bool {
    (offset..).zip(bytes).all(|(at, byte)| content(1, 0, at) == *byte)
}

const EIO: i64 = -(libc::EIO as i64);

/// What the process of the test does until it is stopped. Prints a line for each round.
pub(crate) fn task(pool: &str, words: &[&str]) {
    let [dir, count] = words else { panic!("{words:?}") };
    let count: usize = count.parse().unwrap();
    let (library, stop) = (Library::open(pool), Path::new(dir).join("stop"));
    assert_eq!(library.put_now(FIXED, &mut contents(1, &[(FIXED, FIXED_BYTES)])), 0);
    let mut random = Random(3);
    // Of which places the bytes are known. What has failed may be stored later.
    let mut is_known = vec![true; CALLS];
    let (mut seen_words, mut unknown_adds, mut is_dead) = (Vec::new(), 0u64, false);
    for round in 2.. {
        let is_last = stop.exists();
        let mut calls: Vec<Call> = (0..count).map(|i| drawn(&mut random, round, i)).collect();
        for (i, call) in calls.iter_mut().enumerate() {
            let (volume, queue, state) = (library.volume, library.queue, std::ptr::without_provenance_mut(i));
            // SAFETY: the vectors stay as they are until the completions have come.
            let started = unsafe {
                match call {
                    Call::Get { offset, bytes } => (library.get_start)(
                        volume,
                        bytes.as_mut_ptr().cast(),
                        bytes.len(),
                        *offset as i64,
                        queue,
                        state,
                    ),
                    Call::Put { bytes } => (library.put_start)(
                        volume,
                        bytes.as_mut_ptr().cast(),
                        bytes.len(),
                        place(i) as i64,
                        queue,
                        state,
                    ),
                    Call::Long { bytes } => (library.put_start)(
                        volume,
                        bytes.as_mut_ptr().cast(),
                        bytes.len(),
                        LONG_AT as i64,
                        queue,
                        state,
                    ),
                    Call::Add => (library.add_start)(volume, WORD as i64, 1, queue, state),
                }
            };
            assert_eq!(started, 0, "call {i} of round {round} is not started");
        }
        let mut ended: Vec<Option<Completion>> = vec![None; count];
        let mut left = count;
        while left > 0 {
            let mut some = [Completion { state: null_mut(), result: 1, was: 0 }; 64];
            // SAFETY: the array is writable for the call.
            let taken = unsafe { (library.wait)(library.queue, some.as_mut_ptr(), 64, HANGS_MS) };
            assert!(taken > 0, "round {round}: {left} calls do not complete ({taken})");
            for one in &some[..taken as usize] {
                let before = ended[one.state.addr()].replace(*one);
                assert!(before.is_none(), "call {} of round {round} completes twice", one.state.addr());
                left -= 1;
            }
        }
        // SAFETY: the array is writable for the call.
        let more = unsafe {
            (library.wait)(
                library.queue,
                [Completion { state: null_mut(), result: 1, was: 0 }].as_mut_ptr(),
                1,
                0,
            )
        };
        assert_eq!(more, 0, "more completions than calls");
        let mut failed = 0;
        for (i, (call, ended)) in calls.iter().zip(ended).enumerate() {
            let Completion { result, was, .. } = ended.unwrap();
            assert!(result == 0 || result == EIO, "call {i} of round {round}: {result}");
            failed += usize::from(result == EIO);
            match call {
                Call::Get { offset, bytes } => {
                    assert!(
                        result != 0 || is_fixed(*offset, bytes),
                        "get {i} of round {round} has other bytes"
                    );
                }
                Call::Put { bytes } if result == 0 => {
                    let mut seen = vec![0x5a; bytes.len()];
                    let got = if is_dead { -libc::EIO } else { library.get_now(place(i), &mut seen) };
                    assert!(got == 0 || i64::from(got) == EIO, "{got}");
                    let is_right = got != 0 || !is_known[i] || seen == *bytes;
                    assert!(is_right, "put {i} of round {round} is not there");
                }
                Call::Put { .. } => is_known[i] = false,
                Call::Long { .. } => {}
                Call::Add if result == 0 => seen_words.push(was),
                Call::Add => unknown_adds += 1,
            }
        }
        // Each call to a node that is gone takes seconds.
        is_dead = failed == count;
        println!("\nround {failed}");
        if is_last {
            break;
        }
    }
    // Each addition that succeeded saw the word as another one left it.
    let known = seen_words.len() as u64;
    seen_words.sort_unstable();
    seen_words.dedup();
    assert_eq!(seen_words.len() as u64, known, "two additions saw the same value");
    let mut last = 0;
    // SAFETY: the word is writable for the call.
    if unsafe { (library.add)(library.volume, WORD as i64, 0, &raw mut last) } == 0 {
        assert!(
            (known..=known + unknown_adds).contains(&last),
            "{last} additions, {known} known, {unknown_adds} unknown"
        );
        assert!(seen_words.iter().all(|was| *was < last));
    } else {
        assert!(is_dead);
    }
    println!("additions {known} {unknown_adds}");
    // SAFETY: not used again.
    assert_eq!(unsafe { (library.close)(library.queue) }, 0);
}

/// The process of a test, and the rounds that it has ended so far.
struct User {
    child: std::process::Child,
    rounds: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    reader: Option<std::thread::JoinHandle<VecDeque<String>>>,
}

impl User {
    fn start(c: &Cluster, count: usize) -> User {
        let dir = c.file().parent().unwrap().to_owned();
        let mut child = process(c, 1, &format!("async {} {count}", dir.display()));
        let (rounds, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let counts = (Arc::clone(&rounds), Arc::clone(&failed));
        let reader = std::thread::spawn(move || {
            let mut last = VecDeque::new();
            for line in lines.map_while(Result::ok) {
                if let Some(count) = line.strip_prefix("round ") {
                    counts.1.fetch_add(count.parse::<u64>().unwrap(), Ordering::SeqCst);
                    counts.0.fetch_add(1, Ordering::SeqCst);
                } else {
                    last.push_back(line);
                }
            }
            last
        });
        let mut user = User { child, rounds, failed, reader: Some(reader) };
        user.goes_on("the first rounds");
        user
    }

    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Waits until another round has ended.
    fn ends_round(&mut self, what: &str) {
        let before = self.rounds();
        let end = Instant::now() + Duration::from_millis(HANGS_MS as u64);
        while self.rounds() == before {
            if self.child.try_wait().unwrap().is_some() {
                panic!("{what}: the process has ended: {:?}", self.reader.take().unwrap().join().unwrap());
            }
            assert!(Instant::now() < end, "{what}: no round ends");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a round has ended that has begun after this call.
    fn goes_on(&mut self, what: &str) {
        self.ends_round(what);
        self.ends_round(what);
    }

    /// Waits until a round ends of which calls fail.
    fn fails(&mut self) {
        let before = self.failed();
        while self.failed() == before {
            self.ends_round("calls fail");
        }
    }

    fn failed(&self) -> u64 {
        self.failed.load(Ordering::SeqCst)
    }

    fn ends(mut self, c: &Cluster) {
        std::fs::write(c.file().parent().unwrap().join("stop"), []).unwrap();
        let ended = self.child.wait().unwrap();
        let said = self.reader.take().unwrap().join().unwrap();
        println!("{} rounds, {} EIO; {:?}", self.rounds(), self.failed(), said.back());
        assert!(ended.success(), "{said:?}");
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn worker(c: &Cluster, node: usize) -> u64 {
    until("a worker", || c.status(node)["pids"]["worker"].as_u64())
}

fn kill(pid: u64) {
    // SAFETY: plain system call; the number is of a process that this test started and has not buried.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0, "{}", std::io::Error::last_os_error());
}

fn cluster(name: &str) -> Cluster {
    let c = Cluster::up(name, 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n2"]));
    c
}

#[test]
fn asynchronous_calls_all_complete_while_workers_of_both_nodes_are_killed() {
    let c = cluster("async-workers");
    let mut user = User::start(&c, CALLS);
    let mut random = Random(17);
    for nodes in [&[2][..], &[1], &[1, 2], &[2, 1], &[2, 2], &[1, 1]] {
        std::thread::sleep(Duration::from_millis(random.below(80)));
        let pids: Vec<u64> = match nodes {
            [one, other] if one == other => vec![worker(&c, *one)],
            nodes => nodes.iter().map(|node| worker(&c, *node)).collect(),
        };
        for pid in &pids {
            kill(*pid);
            std::thread::sleep(Duration::from_micros(random.below(2000)));
        }
        if nodes.len() > pids.len() {
            // The next one, while it starts.
            let next = until("a new worker", || {
                c.status(nodes[0])["pids"]["worker"].as_u64().filter(|new| *new != pids[0])
            });
            kill(next);
        }
        user.goes_on(&format!("workers {nodes:?} were killed"));
    }
    user.ends(&c);
    c.check();
}

#[test]
fn asynchronous_calls_all_complete_with_eio_while_their_node_is_cut_off_and_when_it_dies() {
    let c = cluster("async-death");
    let mut user = User::start(&c, 40);
    // Cut off for a moment, and the own worker is killed at the same time.
    let own = worker(&c, 1);
    let is_cut = c.bed.set_link(2, false);
    kill(own);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!is_cut || c.bed.set_link(2, true));
    user.goes_on("a link was cut and a worker killed");
    if c.bed.set_link(2, false) {
        user.fails();
    }
    // The node dies, and another own worker at the same time.
    let own = worker(&c, 1);
    c.kill(2);
    kill(own);
    user.fails();
    user.ends(&c);
}
