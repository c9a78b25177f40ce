//! Many short ranges of a file on another node: what is read and written, by how many requests, and over the death of the
//! worker that serves them.

use std::os::raw::c_void;

use forebay_client::{File, PathBuffer, Place, Pool, Role, Run, Striping};
use forebay_types::Ino;

use crate::nodes::Cluster;
use crate::volume_access::Random;

const FILE_BYTES: usize = 1 << 20;

fn open(c: &Cluster, node: usize, name: &str, striping: Striping) -> File {
    let pool = Pool::attach_as(&c.pool(node), Role::Tool).unwrap();
    let place = Place { dir: Ino::ROOT, path: name.as_bytes() };
    pool.open_striped(place, libc::O_RDWR | libc::O_CREAT, 0o600, striping, &mut PathBuffer::new()).unwrap()
}

fn part(memory: &mut [u8]) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: memory.as_mut_ptr().cast::<c_void>(), iov_len: memory.len() }]
}

fn write(file: &File, runs: &[Run], data: &mut [u8]) {
    // SAFETY: the memory is ours, and of the given length.
    assert_eq!(unsafe { file.write_runs(&part(data), runs) }, Ok(data.len() as u64));
}

/// The bytes up to the file's end.
fn read(file: &File, runs: &[Run]) -> Vec<u8> {
    let all: u64 = runs.iter().map(|run| run.bytes).sum();
    let mut data = vec![0xEE; all as usize];
    // SAFETY: the memory is ours, and of the given length.
    let n = unsafe { file.read_runs(&part(&mut data), runs) }.unwrap();
    data.truncate(n as usize);
    data
}

fn requests(c: &Cluster, node: usize) -> u64 {
    let status = c.status(node);
    status["ring"]["requests"].as_u64().unwrap_or_else(|| panic!("{status}"))
}

#[test]
fn short_ranges_on_another_node_travel_together_and_are_what_they_are_here() {
    let c = Cluster::up("runs", 2);
    let one = Striping { stripe_count: 1, stripe_bytes: 1 << 20, directory_takes_precedence: false };
    let (here, far) = (open(&c, 1, "f", one), open(&c, 2, "f", one));
    assert_eq!(c.lies_on("/f"), "n1");
    // 100 ranges of 4000 bytes, with gaps that are not worth their way.
    let runs: Vec<Run> = (0..100).map(|i| Run { offset: i * 10_000, bytes: 4000 }).collect();
    let mut data: Vec<u8> = (0..400_000usize).map(|i| (i / 7 % 251) as u8).collect();
    let before = requests(&c, 2);
    write(&far, &runs, &mut data);
    let written = requests(&c, 2);
    assert_eq!(read(&far, &runs), data);
    let both = requests(&c, 2);
    assert!(written - before < 20 && both - written < 20, "{before} {written} {both}");
    assert_eq!(read(&here, &runs), data);
    // Nothing was written between them, nor behind them.
    assert_eq!(here.size(), Ok(994_000));
    assert!(read(&here, &[Run { offset: 4000, bytes: 6000 }]).iter().all(|byte| *byte == 0));
    // The end of the file is found, wherever it is among them.
    let end = [(0, 4000), (990_000, 3000), (992_000, 4000), (10_000, 10)]
        .map(|(offset, bytes)| Run { offset, bytes });
    let found = read(&far, &end);
    assert_eq!(found.len(), 9000, "2000 of the third range are there, and nothing after them counts");
    assert_eq!(found, read(&here, &end));
    // A worker that dies meanwhile: the requests are sent again.
    for round in 0..5u8 {
        data.iter_mut().for_each(|byte| *byte = byte.wrapping_add(round + 1));
        std::thread::scope(|scope| {
            scope.spawn(|| c.kill_worker(1 + usize::from(round % 2)));
            write(&far, &runs, &mut data);
        });
        assert_eq!(read(&far, &runs), data, "round {round}");
    }
    c.check();
}

/// Ranges that do not overlap, in the file's order but for a turn of the list.
fn ranges(random: &mut Random) -> Vec<Run> {
    let mut offset = random.below(FILE_BYTES as u64);
    let longest = [300, 20_000][random.below(2) as usize];
    let mut runs = Vec::new();
    for _ in 0..=random.below(80) {
        offset += random.below(5000);
        let bytes = 1 + random.below(longest);
        runs.push(Run { offset, bytes });
        offset += bytes;
    }
    let first = random.below(runs.len() as u64) as usize;
    runs.rotate_left(first);
    runs
}

/// What a read of ranges finds.
fn expected(model: &[u8], runs: &[Run]) -> Vec<u8> {
    let mut found = Vec::new();
    for run in runs {
        let at = (run.offset as usize).min(model.len());
        let end = ((run.offset + run.bytes) as usize).min(model.len());
        found.extend_from_slice(&model[at..end]);
        if ((end - at) as u64) < run.bytes {
            break;
        }
    }
    found
}

#[test]
fn ranges_at_random_over_two_nodes_agree_with_a_model() {
    let c = Cluster::up("runs-model", 2);
    let steps = std::env::var("FOREBAY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(80);
    for (name, stripe_count) in [("one", 1), ("striped", 3)] {
        let striping = Striping { stripe_count, stripe_bytes: 64 << 10, directory_takes_precedence: false };
        let files = [open(&c, 1, name, striping), open(&c, 2, name, striping)];
        let (mut model, mut random) = (Vec::new(), Random(stripe_count.into()));
        for step in 0..steps {
            let runs = ranges(&mut random);
            let by = random.below(2) as usize;
            if random.below(2) == 0 {
                let mut data: Vec<u8> =
                    runs.iter().flat_map(|run| (0..run.bytes).map(|i| (i / 3) as u8)).collect();
                data.iter_mut().for_each(|byte| *byte ^= step as u8);
                write(&files[by], &runs, &mut data);
                let mut rest = &data[..];
                for run in &runs {
                    let (at, end) = (run.offset as usize, (run.offset + run.bytes) as usize);
                    model.resize(end.max(model.len()), 0);
                    model[at..end].copy_from_slice(&rest[..end - at]);
                    rest = &rest[end - at..];
                }
            }
            for (node, file) in files.iter().enumerate() {
                assert!(read(file, &runs) == expected(&model, &runs), "{name}, step {step}, node {node}");
            }
        }
        assert_eq!(files[1].size(), Ok(model.len() as u64));
    }
    c.check();
}
