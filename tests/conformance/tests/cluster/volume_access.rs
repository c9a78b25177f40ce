//! Puts, gets and atomic operations by processes of several nodes on a volume that is striped over them, against a model,
//! while workers are killed, a node dies, and a link is cut.
//!
//! Processes that use a volume are this program again: the test `process_of_volume_tests` does what the variable TASK says.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};

use forebay_client::{Pool, Role, VolumePlaces};
use forebay_conformance::linearizable::{check, Call};
use forebay_types::{target_of, AtomicOp, Code, NodeId};
use forebay_volume::Striped;

use crate::nodes::{said, until, Cluster};
use crate::volumes::{succeeds, volume};

const MIB: u64 = 1 << 20;
/// A variable with what the process does.
const TASK: &str = "FOREBAY_TEST_VOLUME_TASK";
const POOL: &str = "FOREBAY_TEST_VOLUME_POOL";
/// The words that all processes change: one by additions, one by compare-and-swap. They are on different nodes.
const ADDED: u64 = 8;
const SWAPPED: u64 = 64 * 1024 + 8;
/// A word on the third node, on which they execute everything.
const MIXED: u64 = 2 * 64 * 1024 - 4096;
/// A byte of the second stripe, beside that word.
const FAR: u64 = 64 * 1024 + 4096;
/// Where the slots begin, each of one process in turn.
const SLOTS_AT: u64 = 2 * 64 * 1024;
const SLOT_BYTES: u64 = 100_000;
/// Slots of one process.
const SLOTS: u64 = 6;
/// Rounds of a process.
const ROUNDS: usize = 60;

/// Starts a process on a node.
pub(crate) fn process(c: &Cluster, node: usize, task: &str) -> Child {
    let mut command = c.bed.command(node, &std::env::current_exe().unwrap());
    command.args(["--exact", "volume_access::process_of_volume_tests", "--nocapture", "--ignored"]);
    command.env(TASK, task).env(POOL, c.pool(node)).stdout(Stdio::piped()).spawn().unwrap()
}

/// Waits until a process has printed a line.
pub(crate) fn waits(child: &mut Child, line: &str) {
    let output = child.stdout.take().unwrap();
    let mut lines = BufReader::new(output).lines();
    assert!(
        lines.by_ref().any(|l| l.unwrap().ends_with(line)),
        "the process has ended before it printed {line}"
    );
    // It may print more.
    std::thread::spawn(move || lines.for_each(drop));
}

/// A pseudo-random sequence (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

#[test]
#[ignore = "a process of other tests"]
fn process_of_volume_tests() {
    let (Ok(task), Ok(dir)) = (std::env::var(TASK), std::env::var(POOL)) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    if let ["async", rest @ ..] = words.as_slice() {
        return crate::volume_async::task(&dir, rest);
    }
    let pool = Pool::attach_as(Path::new(&dir), Role::Tool).unwrap();
    match words.as_slice() {
        ["hold", name] => {
            let _volume = pool.volume_open(name.as_bytes(), true).unwrap();
            println!("open");
            // Until it is killed, or nobody waits for it any more.
            let _ = std::io::stdin().read(&mut [0]);
            std::thread::sleep(std::time::Duration::from_secs(300));
        }
        ["make", "and", "die"] => {
            let targets = (1..=3).map(|node| target_of(NodeId(node), 0)).collect();
            let places = VolumePlaces { targets, stripe_bytes: MIB, is_thin: false };
            let mut killed = |done| {
                if done > 6 * MIB {
                    // SAFETY: ends this process.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                }
                true
            };
            pool.volume_create(b"half", 0o600, 9 * MIB, &places, &mut killed).unwrap();
        }
        ["grow", "and", what] => {
            let mut stopped = |done| {
                // The pieces of two nodes are reserved.
                if done > 15 * MIB && *what == "wait" {
                    println!("growing");
                    std::thread::sleep(std::time::Duration::from_secs(300));
                } else if done > 15 * MIB {
                    // SAFETY: ends this process.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                }
                true
            };
            pool.volume_resize(b"v", 39 * MIB, &mut stopped).unwrap();
        }
        ["mix", index, count] => {
            mix(&pool.volume_open(b"v", true).unwrap(), index.parse().unwrap(), count.parse().unwrap());
        }
        ["random", rest @ ..] => crate::volume_mix::task(pool, rest),
        ["memory", what] => crate::volume_memory::task(pool, what),
        ["faults", what] => crate::volume_faults::task(pool, what),
        ["fails", node] => fails(&pool.volume_open(b"v", true).unwrap(), node),
        other => panic!("{other:?} is no task"),
    }
}

/// Now, by a clock that all processes of the host share.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is writable for the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) }, 0);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Executes a random operation on the word that all processes change so, and returns its line of the history. `last` is
/// what the word may be.
fn history(volume: &Striped, random: &mut Random, unique: u64, last: &mut u64) -> String {
    let op = match random.below(3) {
        0 => AtomicOp::Swap { new: unique },
        1 => AtomicOp::Add { by: unique },
        _ => AtomicOp::CompareAndSwap { expected: *last, new: unique },
    };
    let began = now_ns();
    let (name, expected, done) = match op {
        AtomicOp::Swap { new } => ("swap", 0, volume.swap(MIXED, new)),
        AtomicOp::Add { by } => ("add", 0, volume.fetch_add(MIXED, by)),
        _ => ("cas", *last, volume.compare_and_swap(MIXED, *last, unique)),
    };
    let ended = now_ns();
    match done {
        Ok(was) => {
            *last = if was == *last || name != "cas" { unique } else { was };
            if name == "add" {
                *last = was.wrapping_add(unique);
            }
            format!("call {name} {unique} {expected} {began} {ended} {was}")
        }
        Err(Code::Io) => format!("call {name} {unique} {expected} {began} unknown 0"),
        Err(code) => panic!("{code}"),
    }
}

/// A line of a history.
fn call(line: &str) -> Call {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let op = match words[1] {
        "swap" => AtomicOp::Swap { new: number(2) },
        "add" => AtomicOp::Add { by: number(2) },
        _ => AtomicOp::CompareAndSwap { expected: number(3), new: number(2) },
    };
    Call { began: number(4), ended: (words[5] != "unknown").then(|| (number(5), number(6))), op }
}

/// Tries again until it succeeds, or another error than EIO comes.
pub(crate) fn persistently(mut act: impl FnMut() -> Result<(), Code>) {
    until("an access that succeeds", || match act() {
        Ok(()) => Some(()),
        Err(Code::Io) => None,
        Err(code) => panic!("{code}"),
    });
}

/// Random puts, gets and lists in the slots of this process against a model, and atomic operations on words of all. Prints
/// what the words were, and the number of operations with an unknown outcome.
fn mix(volume: &Striped, index: u64, count: u64) {
    let mut random = Random(index);
    let at = |slot: u64| SLOTS_AT + (slot * count + index) * SLOT_BYTES;
    let mut model = vec![vec![0u8; SLOT_BYTES as usize]; SLOTS as usize];
    let (mut added, mut swapped, mut unknown_adds, mut unknown_swaps) = (vec![], vec![], 0, 0);
    let (mut calls, mut last) = (vec![], 0);
    let ends = |random: &mut Random| {
        let (a, b) = (random.below(SLOT_BYTES + 1), random.below(SLOT_BYTES + 1));
        (a.min(b), a.max(b))
    };
    for round in 0..ROUNDS {
        let data: Vec<u8> = (0..SLOT_BYTES * SLOTS).map(|_| random.below(256) as u8).collect();
        if random.below(2) == 0 {
            let slot = random.below(SLOTS);
            let (from, to) = ends(&mut random);
            let data = &data[..(to - from) as usize];
            persistently(|| volume.put_bytes(at(slot) + from, data));
            model[slot as usize][from as usize..to as usize].copy_from_slice(data);
        } else {
            let runs: Vec<(u64, u64, u64)> = (0..SLOTS)
                .map(|slot| {
                    let (from, to) = ends(&mut random);
                    (slot, from, to)
                })
                .collect();
            let list: Vec<(u64, u64)> =
                runs.iter().map(|(slot, from, to)| (at(*slot) + from, to - from)).collect();
            let total = list.iter().map(|(_, n)| *n as usize).sum();
            // SAFETY: the vector has at least as many bytes.
            persistently(|| unsafe { volume.put_runs(&list, data.as_ptr(), total) });
            let mut done = 0;
            for (slot, from, to) in &runs {
                let n = (to - from) as usize;
                model[*slot as usize][*from as usize..*to as usize].copy_from_slice(&data[done..done + n]);
                done += n;
            }
            let mut seen = vec![0; total];
            // SAFETY: the vector is writable.
            persistently(|| unsafe { volume.get_runs(&list, seen.as_mut_ptr(), total) });
            assert!(seen == data[..total], "round {round}: the list");
        }
        let slot = random.below(SLOTS);
        let (from, to) = ends(&mut random);
        let mut seen = vec![0; (to - from) as usize];
        persistently(|| volume.get_bytes(at(slot) + from, &mut seen));
        assert!(
            seen == model[slot as usize][from as usize..to as usize],
            "round {round}: slot {slot} at {from}"
        );
        for i in 0..5 {
            let unique = (index + 1) << 48 | (round as u64) << 8 | i;
            calls.push(history(volume, &mut random, unique, &mut last));
            match volume.fetch_add(ADDED, 1) {
                Ok(was) => added.push(was),
                Err(Code::Io) => unknown_adds += 1,
                Err(code) => panic!("{code}"),
            }
            let mut expected = u64::MAX;
            loop {
                match volume.compare_and_swap(SWAPPED, expected, expected.wrapping_add(1)) {
                    Ok(was) if was == expected => break swapped.push(was),
                    Ok(was) => expected = was,
                    Err(Code::Io) => break unknown_swaps += 1,
                    Err(code) => panic!("{code}"),
                }
            }
        }
    }
    persistently(|| volume.flush());
    for slot in 0..SLOTS {
        let mut seen = vec![0; SLOT_BYTES as usize];
        persistently(|| volume.get_bytes(at(slot), &mut seen));
        assert!(seen == model[slot as usize], "slot {slot} in the end");
    }
    let list = |all: &[u64]| all.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    println!("\nadded {unknown_adds} {}\nswapped {unknown_swaps} {}", list(&added), list(&swapped));
    println!("{}", calls.join("\n"));
}

/// Accesses a piece whose node is gone. All calls fail with EIO, and the reason names the node.
fn fails(volume: &Striped, node: &str) {
    println!("\nopen");
    // The first stripe is on node 1, which is there, the second on the node that dies.
    until("the end of the node", || volume.put_bytes(64 * 1024, &[7; 64]).err());
    assert_eq!(volume.put_bytes(64 * 1024, &[7; 64]), Err(Code::Io));
    let reason = volume.reason().unwrap_or_default();
    assert!(reason.contains(&format!("node {node} ")), "{reason}");
    assert_eq!(volume.get_bytes(64 * 1024, &mut [0; 64]), Err(Code::Io));
    assert_eq!(volume.get_bytes(0, &mut [0; 200_000]), Err(Code::Io));
    assert_eq!(volume.fetch_add(SWAPPED, 1), Err(Code::Io));
    assert_eq!(volume.flush(), Err(Code::Io));
    assert_eq!(volume.put_bytes(volume.bytes(), &[0]), Err(Code::Range));
    volume.put_bytes(0, &[7; 64 * 1024]).unwrap();
    volume.fetch_add(ADDED, 1).unwrap();
    println!("done");
}

/// What processes have printed of a word: the values that it had before each operation, and the operations with an
/// unknown outcome.
fn printed(outputs: &[String], word: &str) -> (Vec<u64>, usize) {
    let (mut all, mut unknown) = (Vec::new(), 0);
    for line in outputs.iter().flat_map(|output| output.lines()).filter(|line| line.starts_with(word)) {
        let mut words = line.split(' ').skip(1);
        unknown += words.next().unwrap().parse::<usize>().unwrap();
        all.extend(
            words.next().unwrap().split(',').filter(|w| !w.is_empty()).map(|w| w.parse::<u64>().unwrap()),
        );
    }
    all.sort_unstable();
    (all, unknown)
}

/// Runs a process or two on each of four nodes while `disturb` acts, and checks what they have seen.
fn mixed(c: &Cluster, disturb: impl FnOnce(&mut dyn FnMut() -> bool)) {
    succeeds(volume(
        c,
        1,
        &["create", "v", "--size", "12MiB", "--on", "n1,n2,n3,n4", "--stripe-size", "64KiB"],
    ));
    let on = [1, 2, 3, 4, 1, 3];
    let mut children: Vec<Child> =
        (0..).zip(on).map(|(i, node)| process(c, node, &format!("mix {i} {}", on.len()))).collect();
    disturb(&mut || children.iter_mut().any(|child| child.try_wait().unwrap().is_none()));
    let outputs: Vec<String> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            said(&output)
        })
        .collect();
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    for (word, at) in [("added ", ADDED), ("swapped ", SWAPPED)] {
        let (mut seen, unknown) = printed(&outputs, word);
        let (known, last) = (seen.len(), v.fetch_add(at, 0).unwrap());
        seen.dedup();
        // Each operation saw the word as another one left it: the order of these values is their order.
        assert_eq!(seen.len(), known, "{word}: two operations saw the same value");
        assert!(seen.last().is_none_or(|was| *was < last), "{word}");
        let executed = known..=known + unknown;
        assert!(
            executed.contains(&(last as usize)),
            "{word}: {last} operations, and {executed:?} were called"
        );
    }
    let lines = outputs.iter().flat_map(|output| output.lines()).filter(|line| line.starts_with("call "));
    let mut calls: Vec<Call> = lines.map(call).collect();
    assert_eq!(calls.len(), on.len() * ROUNDS * 5);
    let last = v.fetch_add(MIXED, 0).unwrap();
    calls.push(Call { began: now_ns(), ended: Some((u64::MAX, last)), op: AtomicOp::Load });
    check(0, &calls).unwrap();
    drop(v);
    succeeds(volume(c, 2, &["delete", "v"]));
    c.check();
}

#[test]
fn processes_of_all_nodes_see_what_they_put_and_their_atomic_operations_have_one_order() {
    let c = Cluster::up("volume-mix", 4);
    mixed(&c, |_| {});
}

#[test]
fn killed_workers_lose_no_put_and_no_atomic_operation_happens_twice() {
    let c = Cluster::up("volume-kills", 4);
    let mut kills = 0;
    mixed(&c, |are_running| {
        for node in (1..=4).cycle().take(12) {
            if !are_running() {
                break;
            }
            c.kill_worker(node);
            kills += 1;
            until("a new worker", || c.status(node)["pids"]["worker"].as_u64());
        }
    });
    println!("{kills} workers were killed");
    assert!(kills >= 4, "the processes have ended after {kills} kills");
}

#[test]
fn piece_of_a_node_that_died_is_eio_and_named_and_its_volume_can_be_deleted() {
    let c = Cluster::up("volume-death", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n1,n2", "--stripe-size", "64KiB"]));
    let mut user = process(&c, 1, "fails 2");
    let output = user.stdout.take().unwrap();
    let mut lines = BufReader::new(output).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "open"));
    c.kill(2);
    assert!(lines.any(|line| line == "done"), "the process failed");
    assert!(user.wait().unwrap().success());
    let opened = volume(&c, 1, &["format", "v"]);
    assert!(said(&opened).contains("node 2 has lost its piece of volume `v`"), "{}", said(&opened));
    assert!(c.start(2).status.success());
    // The memory of its piece did not outlive the node.
    let opened = volume(&c, 2, &["format", "v"]);
    assert!(!opened.status.success() && said(&opened).contains("is lost"), "{}", said(&opened));
    succeeds(volume(&c, 2, &["delete", "v"]));
    succeeds(volume(&c, 2, &["create", "v", "--size", "4MiB", "--on", "n1,n2"]));
    succeeds(volume(&c, 1, &["format", "v"]));
    succeeds(volume(&c, 1, &["delete", "v"]));
    c.check();
}

#[test]
fn cut_link_is_eio_and_the_volume_is_whole_when_it_is_back() {
    let c = Cluster::up("volume-cut", 2);
    if !c.bed.is_apart() {
        return println!("skipped: links cannot be cut here");
    }
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n1,n2", "--stripe-size", "64KiB"]));
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    v.put_bytes(FAR, b"before").unwrap();
    assert!(c.bed.set_link(2, false));
    assert_eq!(v.put_bytes(FAR, b"during"), Err(Code::Io));
    assert_eq!(v.swap(SWAPPED, 5), Err(Code::Io));
    v.put_bytes(0, b"here").unwrap();
    assert!(c.bed.set_link(2, true));
    persistently(|| v.put_bytes(FAR + 6, b" after"));
    let mut seen = [0; 12];
    persistently(|| v.get_bytes(FAR, &mut seen));
    // What failed may have happened.
    assert!(&seen == b"before after" || &seen == b"during after", "{seen:?}");
    let was = v.fetch_add(SWAPPED, 1).unwrap();
    assert!(was == 0 || was == 5, "{was}");
    drop(v);
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    c.check();
}

#[test]
fn volume_of_a_pool_that_is_gone_is_not_the_one_of_the_same_name_and_number_in_the_next() {
    let c = Cluster::up("volume-next", 2);
    let make = || succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    make();
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    v.put_bytes(0, b"first").unwrap();
    for node in [1, 2] {
        let dir = c.pool(node);
        let down = c.forebay(node, &["down", "--force", "--discard", "--pool", dir.to_str().unwrap()]);
        assert!(down.status.success(), "{}", said(&down));
    }
    c.start_all();
    make();
    // The call that finds out. The next one is for the pool that is there now.
    assert_eq!(v.put_bytes(0, b"wrong"), Err(Code::PoolGone));
    let ino = pool.volume(b"v").unwrap().ino;
    let next = pool.volume_open(b"v", true).unwrap();
    assert!(v.numbers().eq([ino]), "this tests what it says only if the numbers are the same");
    for _ in 0..3 {
        assert_eq!(v.put_bytes(0, b"wrong"), Err(Code::PoolGone));
        assert_eq!(v.get_bytes(0, &mut [0; 5]), Err(Code::PoolGone));
        assert_eq!(v.fetch_add(8, 1), Err(Code::PoolGone));
        assert_eq!(v.flush(), Err(Code::PoolGone));
    }
    let mut seen = [7; 16];
    next.get_bytes(0, &mut seen).unwrap();
    assert_eq!(seen, [0; 16]);
    drop((v, next));
    succeeds(volume(&c, 2, &["delete", "v"]));
    c.check();
}
