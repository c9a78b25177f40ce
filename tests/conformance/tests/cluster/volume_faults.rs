//! Puts to a piece of another node while its node is stopped, a link is cut, their process is killed, or their volume is to be
//! deleted: each call ends, none changes what others have put there later, and no memory of a piece is freed or given to another
//! volume while bytes may still be stored there (docs/decisions/0048).

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_client::{Pool, Role};
use forebay_types::Code;
use forebay_volume::Striped;

use crate::nodes::{said, until, Cluster};
use crate::volume_access::{persistently, process, waits, Random};
use crate::volumes::{held, succeeds, volume};

const MIB: usize = 1 << 20;
/// Longer than any call, and than what a failed put may still write in.
const FAILED: Duration = Duration::from_secs(32);
/// Bytes of the puts that are in progress at a time, each in a MiB of its own: by transfers, ahead of a request, and within one.
const PUTS: [usize; 5] = [MIB, MIB, 300_000, 50_000, 100];

/// What the process of a test does.
pub(crate) fn task(pool: &'static Pool, what: &str) {
    let v = pool.volume_open(b"v", true).unwrap();
    let puts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..PUTS.len())
            .map(|n| {
                scope.spawn({
                    let v = &v;
                    move || put_until_error(v, n)
                })
            })
            .collect();
        println!("\nputting");
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    match what {
        "puts" => assert!(puts.iter().all(|(_, code)| *code == Code::Interrupted), "{puts:?}"),
        other => panic!("{other:?} is no task"),
    }
    println!("done");
}

/// Puts ones, again and again, until the volume says so in its last byte, or until a call fails.
fn put_until_error(v: &Striped, n: usize) -> (u32, Code) {
    let (ones, mut last) = (vec![1; PUTS[n]], [0]);
    for puts in 0.. {
        let put = v.put_bytes((n * MIB) as u64, &ones).and_then(|()| v.get_bytes(v.bytes() - 1, &mut last));
        match put {
            Ok(()) if last == [0] => {}
            Ok(()) => return (puts, Code::Interrupted),
            Err(code) => return (puts, code),
        }
    }
    unreachable!("it ends with an error")
}

fn attach(c: &Cluster, node: usize) -> &'static Pool {
    Pool::attach_as(&c.pool(node), Role::Tool).unwrap()
}

fn is_filled(v: &Striped, bytes: usize, byte: u8) -> bool {
    is_filled_from(v, 0, bytes, byte)
}

fn is_filled_from(v: &Striped, from: usize, bytes: usize, byte: u8) -> bool {
    let mut all = vec![!byte; bytes];
    v.get_bytes(from as u64, &mut all).unwrap();
    all.iter().all(|b| *b == byte)
}

fn pids(c: &Cluster) -> Vec<Option<u64>> {
    [1, 2].map(|node| c.status(node)["pids"]["worker"].as_u64()).to_vec()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The worker of the piece's node is stopped while puts are in progress, until long after they have failed. When it goes on,
/// it ends, and another one has none of what had reached it.
#[test]
fn put_that_has_failed_changes_nothing_when_a_stopped_node_goes_on() {
    let c = Cluster::up("faults-stop", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n2"]));
    // On the node itself puts and gets are copies.
    let here = attach(&c, 2).volume_open(b"v", true).unwrap();
    let pool = attach(&c, 1);
    let v = pool.volume_open(b"v", true).unwrap();
    let workers = pids(&c);
    let (go_on, failed) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..PUTS.len())
            .map(|n| {
                scope.spawn({
                    let v = &v;
                    move || put_until_error(v, n)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        let go_on = c.stop_worker(2);
        let stopped = Instant::now();
        let failed: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(stopped.elapsed() < FAILED, "a call took {:?}", stopped.elapsed());
        (go_on, failed)
    });
    assert!(failed.iter().all(|(puts, code)| *puts > 0 && *code == Code::Io), "{failed:?}");
    std::thread::sleep(FAILED);
    here.put_bytes(0, &vec![7; 8 * MIB]).unwrap();
    go_on();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(100));
        let is_late = |n: &usize| !is_filled_from(&here, n * MIB, MIB, 7);
        let late: Vec<_> = (0..PUTS.len()).filter(is_late).collect();
        assert!(late.is_empty(), "what was in flight came late: {late:?}");
    }
    persistently(|| v.put_bytes(0, &[2; 100]));
    let now = pids(&c);
    assert_eq!(now[0], workers[0], "the worker that was not stopped has died");
    assert_ne!(now[1], workers[1], "the worker that was stopped executes what it had received");
    drop((v, here));
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    until("the memory is free", || (held(&c, 2) == 0).then_some(()));
    c.check();
}

/// The processes that put are killed, or cut off, and the next volume has the same memory.
#[test]
fn next_volume_of_the_same_memory_has_none_of_the_bytes_that_were_on_their_way() {
    let c = Cluster::up("faults-next", 2);
    for round in 0..6 {
        // The node has no memory for two.
        succeeds(volume(&c, 1, &["create", "v", "--size", "64MiB", "--on", "n2"]));
        let mut user = process(&c, 1, "faults puts");
        waits(&mut user, "putting");
        std::thread::sleep(Duration::from_millis(100 + 37 * round));
        let is_cut = round % 2 == 1 && c.bed.set_link(2, false);
        if is_cut {
            std::thread::sleep(Duration::from_secs(1));
        }
        kill(user);
        if is_cut {
            assert!(c.bed.set_link(2, true));
        }
        until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
        until("the next volume", || {
            volume(&c, 1, &["create", "w", "--size", "64MiB", "--on", "n2"]).status.success().then_some(())
        });
        let w = attach(&c, 2).volume_open(b"w", true).unwrap();
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            assert!(is_filled(&w, 64 * MIB, 0), "round {round}: another volume's bytes");
        }
        assert_eq!(held(&c, 2), 64 * MIB as u64 + 4096);
        drop(w);
        until("the deletion", || volume(&c, 1, &["delete", "w"]).status.success().then_some(()));
        until("the memory is free", || (held(&c, 2) == 0).then_some(()));
    }
    c.check();
}

#[test]
fn volume_is_neither_shrunk_nor_deleted_while_puts_of_another_node_are_in_progress() {
    let c = Cluster::up("faults-delete", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n2"]));
    let mut user = process(&c, 1, "faults puts");
    waits(&mut user, "putting");
    succeeds(volume(&c, 1, &["resize", "v", "--size", "12MiB"]));
    for round in 0..12 {
        for words in [&["resize", "v", "--size", "8MiB"][..], &["delete", "v"]] {
            // The second segment is one that the process has not opened.
            let refused = volume(&c, 1 + round % 2, words);
            assert!(
                said(&refused).contains("a program has it open"),
                "round {round}, {words:?}: {}",
                said(&refused)
            );
        }
    }
    let v = attach(&c, 2).volume_open(b"v", true).unwrap();
    // The last byte of what the process has opened.
    v.put_bytes((8 * MIB - 1) as u64, &[1]).unwrap();
    assert!(user.wait().unwrap().success(), "a put has failed");
    assert!(is_filled(&v, 2 * MIB + 300_000, 1));
    drop(v);
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    until("the memory is free", || (held(&c, 2) == 0).then_some(()));
    c.check();
}

/// Mappings of this name that a process has, and how many of them are in its core dumps.
fn mapped_and_dumped(process: &str, name: &str) -> (usize, usize) {
    let all = std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap();
    let (mut is_it, mut mapped, mut dumped) = (false, 0, 0);
    for line in all.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_it) {
            mapped += 1;
            dumped += usize::from(!flags.split_whitespace().any(|flag| flag == "dd"));
        } else if line.contains(" rw-s ") || line.contains(" r--s ") || line.contains("-p ") {
            is_it = line.contains(name);
        }
    }
    (mapped, dumped)
}

#[test]
fn bytes_of_volumes_are_in_no_core_dump_and_those_of_programs_in_none_of_a_daemon() {
    let c = Cluster::up("faults-dumps", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n1,n2"]));
    let pool = attach(&c, 1);
    let v = pool.volume_open(b"v", true).unwrap();
    let memory = pool.allocate_memory(MIB).unwrap();
    for at in [0, MIB as u64] {
        // SAFETY: the memory has as many bytes, and nothing else uses it.
        unsafe {
            v.put(at, memory, MIB).unwrap();
            v.get(at, memory, MIB).unwrap();
        }
        v.put_bytes(at + 100, &vec![1; 300_000]).unwrap();
        v.fetch_add(at, 1).unwrap();
    }
    let [one, two] = [0, 1].map(|i| pids(&c)[i].unwrap().to_string());
    let (volume, programs, buffer) = ("forebay-volume", "forebay-memory", "forebay-buffer");
    // The piece, and of the other node's two for the network and one for atomic operations.
    for (process, name, most) in
        [("self", volume, 1), (&two, volume, 3), (&one, programs, 9), (&one, buffer, 9)]
    {
        let (mapped, dumped) = mapped_and_dumped(process, name);
        assert!(
            (1..=most).contains(&mapped) && dumped == 0,
            "{name} in {process}: {mapped}, {dumped} dumped"
        );
    }
    // A program's own memory is in its dump.
    assert_eq!(mapped_and_dumped("self", programs), (1, 1));
    // SAFETY: not used again.
    assert_eq!(unsafe { forebay_client::free_memory(memory) }, Ok(()));
    drop(v);
    c.check();
}

/// The doorbell that a daemon gives to each process that attaches.
fn doorbell(c: &Cluster, node: usize) -> OwnedFd {
    use forebay_ring::{
        read_exact, receive_fds, send_fds, AttachReply, Header, ATTACH_FDS, HEADER_BYTES, KIND_ATTACH,
    };
    let socket = std::os::unix::net::UnixStream::connect(c.pool(node).join("socket")).unwrap();
    send_fds(socket.as_fd(), &Header { kind: KIND_ATTACH, len: 0 }.encode(), &[]).unwrap();
    let (mut header, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
    let got = receive_fds(socket.as_fd(), &mut header, &mut fds).unwrap();
    read_exact(socket.as_fd(), &mut header[got..]).unwrap();
    read_exact(socket.as_fd(), &mut [0; AttachReply::BYTES]).unwrap();
    let [_, Some(doorbell), ..] = fds else { panic!("descriptors are missing") };
    doorbell
}

/// A program writes what it likes into the words by which programs wake the daemons.
#[test]
fn garbage_in_the_doorbell_delays_puts_and_gets_at_most() {
    let c = Cluster::up("faults-doorbell", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB", "--on", "n2"]));
    let v = attach(&c, 1).volume_open(b"v", true).unwrap();
    let workers = pids(&c);
    let words: Vec<_> =
        [1, 2].map(|node| forebay_ring::Mapping::new(doorbell(&c, node).as_fd(), 4096, true).unwrap()).into();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(5);
            while !is_over.load(Ordering::Relaxed) {
                for word in words.iter().flat_map(|words| [words.word32(0), words.word32(64)]) {
                    // Those that mean something do most harm.
                    let value = match random.below(4) {
                        0 => random.below(u64::from(u32::MAX)) as u32,
                        other => other as u32 - 1,
                    };
                    word.store(value, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_micros(random.below(3000)));
            }
        });
        let mut longest = Duration::ZERO;
        for round in 0..200u32 {
            let data = vec![round as u8; if round % 2 == 0 { 100 } else { 300_000 }];
            let mut seen = vec![0; data.len()];
            let begun = Instant::now();
            v.put_bytes(0, &data).unwrap();
            v.get_bytes(0, &mut seen).unwrap();
            longest = longest.max(begun.elapsed());
            assert!(seen == data, "round {round}");
        }
        is_over.store(true, Ordering::Relaxed);
        println!("a put and a get took {longest:?} at most");
        assert!(longest < Duration::from_secs(5));
    });
    // What is left there does no lasting harm.
    for value in [1, u32::MAX] {
        words.iter().for_each(|words| words.word32(64).store(value, Ordering::Relaxed));
        v.put_bytes(0, &[3; 100]).unwrap();
    }
    assert_eq!(pids(&c), workers, "no worker has died");
    drop(v);
    c.check();
}
