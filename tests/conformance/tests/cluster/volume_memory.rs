//! Puts and gets between allocated memory and pieces on another node: without a copy, and with no byte changed that no call
//! was to change, while workers are killed and a link is cut (docs/decisions/0053).

use std::process::Child;

use forebay_client::{free_memory, memory_in_use, Pool, Role};
use forebay_types::Code;
use forebay_volume::Striped;

use crate::nodes::{until, Cluster};
use crate::volume_access::{persistently, process, Random};
use crate::volumes::{succeeds, volume};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
const VOLUME: usize = 4 * MIB;

/// Allocated memory of a test. Nothing else in the process has a reference into it while a call uses it.
struct Allocated(*mut u8, usize);

impl Allocated {
    fn new(pool: &'static Pool, bytes: usize) -> Allocated {
        let memory = Allocated(pool.allocate_memory(bytes).unwrap(), bytes);
        assert!(memory.bytes().iter().all(|byte| *byte == 0) && (memory.0 as usize).is_multiple_of(PAGE));
        memory
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is there until it is dropped, and no call is in progress.
        unsafe { std::slice::from_raw_parts(self.0, self.1) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
    }

    fn put(&self, v: &Striped, at: usize, offset: usize, bytes: usize) -> Result<(), Code> {
        assert!(at + bytes <= self.1);
        // SAFETY: within the memory.
        unsafe { v.put(offset as u64, self.0.add(at), bytes) }
    }

    fn get(&self, v: &Striped, at: usize, offset: usize, bytes: usize) -> Result<(), Code> {
        assert!(at + bytes <= self.1);
        // SAFETY: within the memory.
        unsafe { v.get(offset as u64, self.0.add(at), bytes) }
    }
}

// SAFETY: one thread at a time has it, or several only read it.
unsafe impl Send for Allocated {}
// SAFETY: as above.
unsafe impl Sync for Allocated {}

impl Drop for Allocated {
    fn drop(&mut self) {
        // SAFETY: not used again.
        assert_eq!(unsafe { free_memory(self.0) }, Ok(()));
    }
}

fn fill(memory: &mut Allocated, random: &mut Random) {
    memory.bytes_mut().chunks_mut(8).for_each(|word| {
        let value = random.below(u64::MAX).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    });
}

/// True if the process has mapped a buffer from and to which bytes are copied.
fn has_buffer() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains("forebay-buffer")
}

fn mapped_memories() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("forebay-memory").count()
}

/// What the process of a test does.
pub(crate) fn task(pool: &'static Pool, what: &str) {
    match what {
        "copies" => copies(pool),
        "kills" => kills(pool),
        "forks" => forks(pool),
        other => panic!("{other:?} is no task"),
    }
    println!("done");
}

/// Transfers of whole pages need no buffer; any other gives the same bytes.
fn copies(pool: &'static Pool) {
    let v = pool.volume_open(b"v", true).unwrap();
    let mut random = Random(7);
    let (mut from, to) = (Allocated::new(pool, VOLUME), Allocated::new(pool, VOLUME));
    for bytes in [64 << 10, MIB, VOLUME] {
        fill(&mut from, &mut random);
        for offset in (0..VOLUME).step_by(bytes) {
            from.put(&v, offset, offset, bytes).unwrap();
            to.get(&v, offset, offset, bytes).unwrap();
        }
        assert!(from.bytes() == to.bytes(), "{bytes}");
    }
    // Lists, and what travels in requests.
    fill(&mut from, &mut random);
    let runs: Vec<(u64, u64)> = (0..32).rev().map(|i| (i * (128 << 10), 64 << 10)).collect();
    // SAFETY: within the memory.
    unsafe {
        v.put_runs(&runs, from.0, 2 * MIB).unwrap();
        v.get_runs(&runs, to.0, 2 * MIB).unwrap();
    }
    assert!(from.bytes()[..2 * MIB] == to.bytes()[..2 * MIB]);
    from.put(&v, 100, 5, 30_000).unwrap();
    to.get(&v, 200, 5, 30_000).unwrap();
    assert!(from.bytes()[100..30_100] == to.bytes()[200..30_200]);
    assert!(!has_buffer(), "bytes were copied into a buffer");
    // What is not of whole pages is copied, and no other byte changes.
    for _ in 0..60 {
        let bytes = random.below(MIB as u64) as usize + 1;
        let [at, offset, back] = [(); 3].map(|()| random.below((VOLUME - bytes) as u64) as usize);
        let before = to.bytes().to_vec();
        from.put(&v, at, offset, bytes).unwrap();
        to.get(&v, back, offset, bytes).unwrap();
        let expected = [&before[..back], &from.bytes()[at..at + bytes], &before[back + bytes..]].concat();
        assert!(to.bytes() == expected, "{bytes} bytes from {at} at {offset} to {back}");
    }
    assert!(has_buffer(), "a buffer is found if there is one");
    // Memory in use is not freed, and not twice when it is not.
    let used = memory_in_use(to.0, 1).unwrap();
    // SAFETY: refused.
    assert_eq!(unsafe { free_memory(to.0) }, Err(Code::Busy));
    drop(used);
    let address = to.0;
    drop(to);
    // SAFETY: refused.
    assert_eq!(unsafe { free_memory(address) }, Err(Code::Invalid));
    // Two ranges more than once: a registration ends with its memory.
    for _ in 0..600 {
        let one = Allocated::new(pool, PAGE);
        one.put(&v, 0, 0, PAGE).unwrap();
    }
    drop(from);
    assert_eq!(mapped_memories(), 0);
}

/// Puts and gets until the volume says so, and checks each get, and that memory is left alone when a call has ended.
fn kills(pool: &'static Pool) {
    let v = pool.volume_open(b"v", true).unwrap();
    let mut random = Random(9);
    let (mut from, mut to) = (Allocated::new(pool, 2 * MIB), Allocated::new(pool, 2 * MIB));
    println!("running");
    let mut rounds = 0;
    loop {
        let mut stop = [0; 8];
        v.get_bytes((VOLUME - 8) as u64, &mut stop).unwrap();
        if stop != [0; 8] {
            break;
        }
        fill(&mut from, &mut random);
        let offset = PAGE * random.below(256) as usize;
        from.put(&v, 0, offset, 2 * MIB).unwrap();
        to.get(&v, 0, offset, 2 * MIB).unwrap();
        assert!(to.bytes() == from.bytes(), "round {rounds}");
        to.bytes_mut().fill(rounds as u8);
        from.put(&v, 0, offset, MIB).unwrap();
        assert!(to.bytes().iter().all(|byte| *byte == rounds as u8), "round {rounds}: it was written later");
        rounds += 1;
    }
    println!("{rounds} rounds");
}

/// Children put from memory from which a thread of the parent puts, too, and free it.
fn forks(pool: &'static Pool) {
    let v = pool.volume_open(b"v", true).unwrap();
    let memory = Allocated::new(pool, MIB);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                memory.put(&v, 0, 0, MIB).unwrap();
            }
        });
        for round in 0..20 {
            // SAFETY: the child frees the memory once, and ends; one that waits without end is killed.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe {
                    libc::alarm(60);
                    let put = memory.put(&v, 0, MIB, MIB);
                    let freed = free_memory(memory.0);
                    libc::_exit(i32::from(put.is_err() || freed.is_err()));
                }
            }
            let mut status = -1;
            // SAFETY: it is writable for the call.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "round {round}");
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// True if some of the memory has other pages than those that the daemon has.
fn has_other_pages(memory: &Allocated) -> bool {
    let (start, end) = (memory.0 as usize, memory.0 as usize + memory.1);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut lines = maps.lines().filter(|line| {
        let (from, to) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        let [from, to] = [from, to].map(|address| usize::from_str_radix(address, 16).unwrap());
        from < end && start < to
    });
    lines.any(|line| !line.contains("forebay-memory"))
}

fn ends_well(mut user: Child) {
    assert!(user.wait().unwrap().success(), "the process failed");
}

#[test]
fn whole_pages_of_allocated_memory_are_transferred_without_a_copy_and_others_as_they_are() {
    let c = Cluster::up("memory-copies", 2);
    for (on, stripe) in [("n2", "1MiB"), ("n1,n2", "64KiB")] {
        succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", on, "--stripe-size", stripe]));
        ends_well(process(&c, 1, "memory copies"));
        until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    }
    // The daemon has it as long as the program.
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let worker = c.status(1)["pids"]["worker"].as_u64().unwrap();
    let maps = || std::fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
    let memory = Allocated::new(pool, MIB);
    assert!(maps().contains("forebay-memory"));
    drop(memory);
    until("its end in the daemon", || (!maps().contains("forebay-memory")).then_some(()));
    c.check();
}

#[test]
fn children_share_allocated_memory_and_neither_wait_for_threads_of_their_parent_nor_keep_it() {
    let c = Cluster::up("memory-forks", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    ends_well(process(&c, 1, "memory forks"));
    c.check();
}

#[test]
fn memory_that_a_stopped_worker_registers_late_does_not_outlive_the_programs() {
    let c = Cluster::up("memory-late", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    let memory = Allocated::new(pool, VOLUME);
    memory.put(&v, 0, 0, VOLUME).unwrap();
    // The next worker has to register the memory anew.
    let of_node = || c.status(1)["pids"]["worker"].as_u64();
    let killed = of_node();
    c.kill_worker(1);
    let worker = until("a new worker", || of_node().filter(|worker| Some(*worker) != killed));
    let maps = || std::fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
    assert!(!maps().contains("forebay-memory"));
    let go_on = c.stop_worker(1);
    let put = std::thread::spawn(move || (memory.put(&v, 0, 0, VOLUME), memory, v));
    // The put waits a few seconds at most until its memory is registered.
    std::thread::sleep(std::time::Duration::from_secs(4));
    go_on();
    let (done, memory, v) = put.join().unwrap();
    assert_eq!(done, Ok(()));
    drop(memory);
    until("its end in the daemon", || (!maps().contains("forebay-memory")).then_some(()));
    drop(v);
    c.check();
}

#[test]
fn killed_workers_lose_no_byte_of_allocated_memory() {
    let c = Cluster::up("memory-kills", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    let user = process(&c, 1, "memory kills");
    for node in [1, 2, 2, 1, 1, 2, 1, 2] {
        c.kill_worker(node);
        until("a new worker", || c.status(node)["pids"]["worker"].as_u64());
        // Some rounds between two kills.
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    let pool = Pool::attach_as(&c.pool(2), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    v.put_bytes((VOLUME - 8) as u64, &[1; 8]).unwrap();
    ends_well(user);
    drop(v);
    c.check();
}

#[test]
fn nothing_writes_allocated_memory_after_a_call_that_a_cut_link_has_failed() {
    let c = Cluster::up("memory-cut", 2);
    if !c.bed.is_apart() {
        return println!("skipped: links cannot be cut here");
    }
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    let mut memory = Allocated::new(pool, VOLUME);
    memory.bytes_mut().fill(1);
    memory.put(&v, 0, 0, VOLUME).unwrap();
    // Gets are in progress when the link is cut.
    let gets = std::thread::spawn({
        let v = pool.volume_open(b"v", false).unwrap();
        move || {
            let other = Allocated::new(pool, VOLUME);
            loop {
                match other.get(&v, 0, 0, VOLUME) {
                    Ok(()) => assert!(other.bytes().iter().all(|byte| *byte == 1)),
                    failed => return (other, failed),
                }
            }
        }
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(c.bed.set_link(2, false));
    let (mut other, failed) = gets.join().unwrap();
    assert_eq!(failed, Err(Code::Io));
    assert!(has_other_pages(&other));
    other.bytes_mut().fill(2);
    // A put that fails leaves the bytes of its memory as they are.
    assert!(!has_other_pages(&memory));
    assert_eq!(memory.put(&v, 0, 0, VOLUME), Err(Code::Io));
    assert!(has_other_pages(&memory));
    assert!(memory.bytes().iter().all(|byte| *byte == 1));
    assert_eq!(memory.get(&v, 0, 0, MIB), Err(Code::Io));
    memory.bytes_mut().fill(3);
    assert!(c.bed.set_link(2, true));
    persistently(|| memory.put(&v, 0, 0, VOLUME));
    assert!(memory.bytes().iter().all(|byte| *byte == 3), "what was in flight came late");
    memory.bytes_mut().fill(4);
    persistently(|| memory.get(&v, 0, 0, VOLUME));
    assert!(memory.bytes().iter().all(|byte| *byte == 3), "as it was put");
    assert!(other.bytes().iter().all(|byte| *byte == 2), "what was in flight came late");
    drop((memory, other, v));
    c.check();
}
