//! Data that are too large for a request: the network moves them by RMA.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_types::limits::READ_AHEAD_MS;
use forebay_types::{Code, Ino};

use crate::nodes::{bytes, until, Cluster};

const MIB: usize = 1 << 20;

#[test]
fn large_reads_and_writes_pass_between_nodes_as_they_are() {
    let c = Cluster::up("large", 2);
    let (Some(near), Some(far)) = (c.mount(2), c.mount(1)) else { return };
    fs::create_dir(near.join("d")).unwrap();
    let mut data = bytes(7 * MIB + 12_345, 1);
    fs::write(near.join("d/f"), &data).unwrap();
    assert!(fs::read(far.join("d/f")).unwrap() == data, "what another node wrote");
    let file = OpenOptions::new().read(true).write(true).open(far.join("d/f")).unwrap();
    // Writes of various lengths and unaligned offsets, also beyond the end.
    for (i, (at, len)) in
        [(0, 2 * MIB), (1, 65_537), (777_777, 3 * MIB + 1), (7 * MIB, MIB), (9 * MIB + 5, 300_000)]
            .into_iter()
            .enumerate()
    {
        let part = bytes(len, 10 + i as u32);
        file.write_all_at(&part, at as u64).unwrap();
        if data.len() < at + len {
            data.resize(at + len, 0);
        }
        data[at..at + len].copy_from_slice(&part);
        assert!(fs::read(near.join("d/f")).unwrap() == data, "write {i}, as the file's node sees it");
        let mut back = vec![0; len];
        file.read_exact_at(&mut back, at as u64).unwrap();
        assert!(back == part, "write {i}, read back");
    }
    let mut beyond = vec![1; 2 * MIB];
    assert_eq!(file.read_at(&mut beyond, data.len() as u64 - 5).unwrap(), 5);
    assert_eq!(file.read_at(&mut beyond, data.len() as u64 + 5).unwrap(), 0);
    c.check();
}

/// Without `read_in_order`, a reader sees each write of another node at once. With it, read data may be up to
/// `READ_AHEAD_MS` old, and no older.
#[test]
fn reads_in_order_are_ahead_of_their_reader_only_where_it_asks_for_that() {
    const STEP: usize = 64 << 10;
    let c = Cluster::up("ahead", 2);
    c.tell(2, "mkdir /forebay/d; head -c 8388608 /dev/zero >/forebay/d/f");
    let open = |node| {
        let pool = Pool::attach(&c.pool(node)).unwrap();
        let dir = pool.lookup(Ino::ROOT, b"d").unwrap().attr.ino;
        pool.open_file(&pool.lookup(dir, b"f").unwrap(), true).unwrap()
    };
    let (home, far) = (open(2), open(1));
    let read = |at: usize, expected: u8| {
        let mut room = vec![99; STEP];
        assert_eq!(far.read_at(&mut room, at as u64).unwrap(), STEP);
        room.iter().all(|byte| *byte == expected)
    };
    let fill = |value: u8| assert_eq!(home.write_at(&vec![value; 8 * MIB], 0).unwrap(), 8 * MIB);
    for (value, at) in (1..).zip((0..2 * MIB).step_by(STEP)) {
        fill(value);
        assert!(read(at, value), "nobody has asked for anything old, at {at}");
    }
    far.read_in_order(true);
    fill(100);
    assert!((0..4 * MIB).step_by(STEP).all(|at| read(at, 100)), "what was there before any of it was read");
    fill(101);
    far.sync().unwrap();
    assert!((4 * MIB..6 * MIB).step_by(STEP).all(|at| read(at, 101)), "what was there when it was synced");
    assert_eq!(far.write_at(&vec![102; STEP], 6 * MIB as u64).unwrap(), STEP);
    assert!(read(6 * MIB, 102), "its own write");
    assert!(read(6 * MIB + STEP, 101));
    far.punch((6 * MIB + 2 * STEP) as u64, STEP as u64).unwrap();
    assert!(read(6 * MIB + 2 * STEP, 0), "its own hole");
    assert!(read(6 * MIB + 3 * STEP, 101));
    fill(103);
    std::thread::sleep(Duration::from_millis(READ_AHEAD_MS));
    assert!(read(6 * MIB + 4 * STEP, 103), "older than it may be");
    // Read-ahead ends at the file's end, and continues when the file has grown.
    assert!((7 * MIB..8 * MIB).step_by(STEP).all(|at| read(at, 103)));
    let mut room = vec![0; STEP];
    assert_eq!(far.read_at(&mut room, 8 * MIB as u64).unwrap(), 0);
    home.write_at(&[104; 10], 8 * MIB as u64).unwrap();
    assert_eq!(far.read_at(&mut room, 8 * MIB as u64).unwrap(), 10);
    far.read_in_order(false);
    fill(105);
    assert!(read(0, 105) && read(STEP, 105));
    drop((home, far));
    c.check();
}

/// An append that is too large for a request is whole, like a small one.
#[test]
fn large_appends_to_another_node_s_file_are_whole() {
    const RECORD: usize = 500_000;
    const ROUNDS: usize = 12;
    let c = Cluster::up("appended", 2);
    let (Some(near), Some(far)) = (c.mount(2), c.mount(1)) else { return };
    File::create(near.join("log")).unwrap();
    std::thread::scope(|scope| {
        for who in 1..=2u8 {
            let path = far.join("log");
            scope.spawn(move || {
                let file = OpenOptions::new().append(true).open(path).unwrap();
                for _ in 0..ROUNDS {
                    let n = std::io::Write::write(&mut &file, &vec![who; RECORD]).unwrap();
                    assert_eq!(n, RECORD);
                }
            });
        }
    });
    let log = fs::read(near.join("log")).unwrap();
    assert_eq!(log.len(), 2 * ROUNDS * RECORD);
    assert!(log.chunks(RECORD).all(|record| record.iter().all(|byte| *byte == record[0])), "one in another");
    c.check();
}

/// Large appends are whole even while other threads of the process use all of its data buffers.
#[test]
fn large_appends_are_whole_while_much_else_is_moved() {
    const RECORD: usize = 300_000;
    const ROUNDS: usize = 30;
    let c = Cluster::up("crowded", 2);
    c.tell(
        2,
        "mkdir /forebay/d; : > /forebay/d/log; head -c 8388608 /dev/zero | tr '\\0' r > /forebay/d/read",
    );
    let pool = Pool::attach(&c.pool(1)).unwrap();
    let dir = pool.lookup(Ino::ROOT, b"d").unwrap().attr.ino;
    let open = |name: &[u8], write| pool.open_file(&pool.lookup(dir, name).unwrap(), write).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let (file, mut room) = (open(b"read", false), vec![0; 8 * MIB]);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(file.read_at(&mut room, 0), Ok(8 * MIB));
                    assert!(room.iter().all(|byte| *byte == b'r'));
                    room.fill(0);
                }
            });
        }
        let writers: Vec<_> = (1..=3u8)
            .map(|who| {
                scope.spawn(move || {
                    let file = open(b"log", true);
                    (0..ROUNDS).all(|_| file.append(&vec![who; RECORD]) == Ok(RECORD))
                })
            })
            .collect();
        let wrote: Vec<_> = writers.into_iter().map(|writer| writer.join().is_ok_and(|all| all)).collect();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(wrote, [true; 3]);
    });
    let log = open(b"log", false);
    let mut room = vec![0; 3 * ROUNDS * RECORD + 1];
    assert_eq!(log.read_at(&mut room, 0), Ok(3 * ROUNDS * RECORD));
    room.pop();
    assert!(room.chunks(RECORD).all(|record| record.iter().all(|byte| *byte == record[0])), "one in another");
    drop(log);
    c.tell(1, "rm -r /forebay/d");
    c.check();
}

/// If a worker dies during a request, its successor completes the request, on the node that has the data and on the
/// node of the client.
#[test]
fn large_reads_and_writes_go_on_when_workers_are_killed() {
    let c = Cluster::up("larger", 2);
    let (Some(near), Some(far)) = (c.mount(2), c.mount(1)) else { return };
    fs::create_dir(near.join("d")).unwrap();
    let data = bytes(8 * MIB, 3);
    fs::write(near.join("d/read"), &data).unwrap();
    File::create(near.join("d/written")).unwrap();
    File::create(near.join("d/short")).unwrap();
    const SHORT: usize = 60_000;
    let (stop, far, data) = (AtomicBool::new(false), &far, &data);
    std::thread::scope(|scope| {
        let stop = &stop;
        let reader = scope.spawn(move || {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                let read = fs::read(far.join("d/read")).unwrap();
                assert!(read == *data, "round {rounds}");
                rounds += 1;
            }
            rounds
        });
        let writer = scope.spawn(move || {
            let file = OpenOptions::new().write(true).open(far.join("d/written")).unwrap();
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                file.write_all_at(&bytes(5 * MIB, rounds), 3).unwrap();
                rounds += 1;
            }
            rounds
        });
        // Short writes go into an eager buffer before their request.
        let short = scope.spawn(move || {
            let file = OpenOptions::new().read(true).write(true).open(far.join("d/short")).unwrap();
            let (mut rounds, mut back) = (0, vec![0; SHORT]);
            while !stop.load(Ordering::Relaxed) {
                let block = bytes(SHORT, rounds);
                file.write_all_at(&block, 7).unwrap();
                file.read_exact_at(&mut back, 7).unwrap();
                assert!(back == block, "round {rounds}");
                rounds += 1;
            }
            rounds
        });
        for node in [2, 1, 2, 1] {
            std::thread::sleep(Duration::from_millis(400));
            c.kill_worker(node);
            until("the next worker", || c.status(node)["pids"]["worker"].as_u64());
        }
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::Relaxed);
        let (read, written, short) = (reader.join().unwrap(), writer.join().unwrap(), short.join().unwrap());
        assert!(read > 0 && written > 0 && short > 0, "{read} reads, {written} and {short} writes");
        let last = fs::read(near.join("d/written")).unwrap();
        assert!(last[3..] == bytes(5 * MIB, written - 1) && last.len() == 3 + 5 * MIB);
    });
    c.check();
}

/// An append is done once and whole even if the worker that executes it is killed. If the outcome is unknown, it fails
/// with EIO.
#[test]
fn appends_are_done_once_though_the_worker_that_has_the_file_is_killed() {
    const SIZES: [usize; 2] = [3_000, 68_000];
    // So many records fit on the target.
    const RECORDS: u32 = 1000;
    let c = Cluster::up("once", 2);
    c.tell(2, "mkdir /forebay/d; : > /forebay/d/log0; : > /forebay/d/log1");
    let pool = Pool::attach(&c.pool(1)).unwrap();
    let dir = pool.lookup(Ino::ROOT, b"d").unwrap().attr.ino;
    let (stop, appended) = (AtomicBool::new(false), AtomicU32::new(0));
    // For each log, the numbers of the successful appends and of those with unknown outcome.
    let told: Vec<(Vec<u32>, Vec<u32>)> = std::thread::scope(|scope| {
        let append = |which: usize| {
            let (stop, appended) = (&stop, &appended);
            scope.spawn(move || {
                let entry = pool.lookup(dir, format!("log{which}").as_bytes()).unwrap();
                let file = pool.open_file(&entry, true).unwrap();
                let (mut there, mut doubtful) = (Vec::new(), Vec::new());
                for number in 1..=RECORDS {
                    let record = u32::to_le_bytes(number).repeat(SIZES[which] / 4);
                    match file.append(&record) {
                        Ok(n) if n == record.len() => there.push(number),
                        Err(Code::Io) => doubtful.push(number),
                        other => panic!("append {number}: {other:?}"),
                    }
                    appended.fetch_add(1, Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
                appended.store(2 * RECORDS, Ordering::Relaxed);
                (there, doubtful)
            })
        };
        // These threads keep the machine busy, so that a worker is killed in the middle of a write.
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let writers = [append(0), append(1)];
        // Kills a worker in the middle of the appends, each time after some of them.
        let mut kills = 0;
        for some in [20, 35, 50, 5, 40, 30, 60, 25] {
            let goal = appended.load(Ordering::Relaxed) + some;
            let end = Instant::now() + Duration::from_secs(60);
            while appended.load(Ordering::Relaxed) < goal {
                assert!(Instant::now() < end, "no append is done");
                std::thread::sleep(Duration::from_micros(200));
            }
            kills += u32::from(appended.load(Ordering::Relaxed) < 2 * RECORDS);
            c.kill_worker(2);
            until("the next worker", || c.status(2)["pids"]["worker"].as_u64());
        }
        assert!(kills > 2, "the appends were over");
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    for (which, (there, doubtful)) in told.iter().enumerate() {
        let file =
            pool.open_file(&pool.lookup(dir, format!("log{which}").as_bytes()).unwrap(), false).unwrap();
        let size = SIZES[which];
        let mut log = vec![0; (there.len() + doubtful.len() + 10) * size];
        // A read may be short if a part of it failed.
        let mut n = 0;
        while let more @ 1.. = file.read_at(&mut log[n..], n as u64).unwrap() {
            n += more;
        }
        assert_eq!(n % size, 0, "log {which}: a record is torn, in doubt {doubtful:?}");
        let found: Vec<u32> = log[..n]
            .chunks(size)
            .map(|record| {
                let (first, rest) = record.split_at(4);
                assert!(rest.chunks(4).all(|word| word == first), "one in another");
                u32::from_le_bytes(first.try_into().unwrap())
            })
            .filter(|number| !doubtful.contains(number))
            .collect();
        assert!(found == *there, "log {which}: appended {there:?}, found {found:?}, in doubt {doubtful:?}");
    }
    c.tell(1, "rm -r /forebay/d");
    c.check();
}
