//! Staging between directories against `cp -a`, a tar pipe, and two `dd` of the halves of a large file.
//!
//!     cargo run --release -p forebay-stage --example stage_rate -- [FILES] [LARGE_MIB] [STORE_DIR] [FAST_DIR] [POOL]
//!
//! Creates 10,000 files of 4 to 64 KiB in 100 directories and one file of 4096 MiB in STORE_DIR (default: the temporary
//! directory). Stages them to FAST_DIR (default: /dev/shm) and, if one is named, into a POOL that is up. Prints the
//! median of five runs of each contender; the contenders take turns. Everything is removed at the end, except the
//! copies in the pool, which stay in `/stage-rate-*`. So the pool needs room for six of each.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use std::sync::atomic::{AtomicU32, Ordering};

use forebay_client::Pool;
use forebay_stage::{stage_between, stage_in, stage_out, Pair, Quiet, StageOptions, Way};

const RUNS: usize = 5;
const DIRECTORIES: usize = 100;

/// A directory that is removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(within: &Path, what: &str) -> Scratch {
        let path = within.join(format!("forebay-stage-rate-{}-{what}", std::process::id()));
        fs::create_dir_all(&path).expect("make a scratch directory");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn noise(len: usize, state: &mut u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(*state ^ (*state >> 29)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn make_small(at: &Path, files: usize) -> u64 {
    let (mut state, mut total) = (1, 0);
    for i in 0..files {
        let directory = at.join(format!("d{:03}", i % DIRECTORIES));
        if i < DIRECTORIES {
            fs::create_dir_all(&directory).expect("make a directory");
        }
        let len = 4096 + (i * 7919) % (60 * 1024);
        fs::write(directory.join(format!("file-{i:06}.dat")), noise(len, &mut state)).expect("write a file");
        total += len as u64;
    }
    total
}

fn make_large(path: &Path, mib: usize) {
    let mut file = File::create(path).expect("create the large file");
    let mut state = 7;
    for _ in 0..mib {
        file.write_all(&noise(1 << 20, &mut state)).expect("write the large file");
    }
    file.sync_all().expect("sync the large file");
}

fn shell(script: &str) {
    let status = Command::new("sh").args(["-c", script]).status().expect("run sh");
    assert!(status.success(), "{script}");
}

fn stage(way: Way, source: &Path, destination: &Path, verify: bool) {
    let pairs = [Pair { source: source.into(), destination: destination.into() }];
    let options = StageOptions { verify, ..StageOptions::default() };
    let report = stage_between(way, &pairs, &options, &Quiet).expect("stage");
    report.outcome().expect("stage everything");
}

/// Stages into a fresh directory of the pool, and returns its path there.
fn into_pool(pool: &'static Pool, source: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    let destination = PathBuf::from(format!("/stage-rate-{}-{n}", std::process::id()));
    let pairs = [Pair { source: source.into(), destination: destination.clone() }];
    let report = stage_in(pool, &pairs, &StageOptions::default(), &Quiet).expect("stage into the pool");
    report.outcome().expect("stage everything into the pool");
    destination
}

fn out_of_pool(pool: &'static Pool, source: &Path, destination: &Path) {
    let pairs = [Pair { source: source.into(), destination: destination.into() }];
    let report = stage_out(pool, &pairs, &StageOptions::default(), &Quiet).expect("stage out of the pool");
    report.outcome().expect("stage everything out of the pool");
}

type Contender<'a> = (&'a str, Box<dyn Fn(&Path) + 'a>);

/// Median seconds of each contender; `target` is removed before every run.
fn race(target: &Path, contenders: &[Contender<'_>]) -> Vec<f64> {
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..RUNS {
        for (i, (_, run)) in contenders.iter().enumerate() {
            shell(&format!("rm -rf '{}'; sync", target.display()));
            let begin = Instant::now();
            run(target);
            times[i].push(begin.elapsed().as_secs_f64());
        }
    }
    shell(&format!("rm -rf '{}'", target.display()));
    times
        .into_iter()
        .map(|mut t| {
            t.sort_by(f64::total_cmp);
            t[RUNS / 2]
        })
        .collect()
}

fn print(title: &str, bytes: u64, contenders: &[Contender<'_>], seconds: &[f64]) {
    println!("\n{title}");
    for ((name, _), s) in contenders.iter().zip(seconds) {
        println!(
            "  {name:<28} {s:7.3} s  {:6.2} GB/s  x{:.2} of {}",
            bytes as f64 / s / 1e9,
            seconds[0] / s,
            contenders[0].0
        );
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: usize| args.next().map_or(default, |a| a.parse().expect("a number"));
    let (files, mib) = (number(10_000), number(4096));
    let store = args.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let fast = args.next().map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let pool = args.next().map(|path| Pool::attach(Path::new(&path)).unwrap_or_else(|e| panic!("{e}")));
    let (from, to) = (Scratch::new(&store, "store"), Scratch::new(&fast, "fast"));

    if files > 0 {
        let source = from.0.join("small");
        let bytes = make_small(&source, files);
        let s = source.display().to_string();
        let contenders: Vec<Contender<'_>> = vec![
            ("cp -a", Box::new(|t: &Path| shell(&format!("cp -a '{s}' '{}'", t.display())))),
            (
                "tar pipe",
                Box::new(|t: &Path| {
                    let t = t.display();
                    shell(&format!("mkdir '{t}' && tar -C '{s}' -cf - . | tar -C '{t}' -xf -"));
                }),
            ),
            ("stage (in)", Box::new(|t: &Path| stage(Way::In, &source, t, false))),
            ("stage (in), verified", Box::new(|t: &Path| stage(Way::In, &source, t, true))),
            ("stage (out)", Box::new(|t: &Path| stage(Way::Out, &source, t, false))),
        ];
        let mut contenders = contenders;
        if let Some(pool) = pool {
            contenders.push(("stage into the pool", Box::new(|_: &Path| drop(into_pool(pool, &source)))));
        }
        let target = to.0.join("small");
        let seconds = race(&target, &contenders);
        print(&format!("{files} files of 4-64 KiB, store to fast"), bytes, &contenders, &seconds);

        stage(Way::In, &source, &target, false);
        let back = from.0.join("back");
        let f = target.display().to_string();
        let contenders: Vec<Contender<'_>> = vec![
            ("cp -a", Box::new(|t: &Path| shell(&format!("cp -a '{f}' '{}'", t.display())))),
            ("cp -a, then sync", Box::new(|t: &Path| shell(&format!("cp -a '{f}' '{}'; sync", t.display())))),
            ("stage (out)", Box::new(|t: &Path| stage(Way::Out, &target, t, false))),
        ];
        let mut contenders = contenders;
        if let Some(pool) = pool {
            let inside = into_pool(pool, &source);
            let run = move |t: &Path| out_of_pool(pool, &inside, t);
            contenders.push(("stage out of the pool", Box::new(run)));
        }
        let seconds = race(&back, &contenders);
        print(&format!("{files} files of 4-64 KiB, fast to store"), bytes, &contenders, &seconds);
        shell(&format!("rm -rf '{f}'"));
    }
    if mib > 0 {
        let source = from.0.join("large");
        make_large(&source, mib);
        let s = source.display().to_string();
        let half = mib / 2;
        let dd = |t: &Path| {
            let t = t.display();
            shell(&format!(
                "truncate -s {mib}M '{t}'; \
                 dd if='{s}' of='{t}' bs=1M count={half} conv=notrunc status=none & \
                 dd if='{s}' of='{t}' bs=1M skip={half} seek={half} conv=notrunc status=none; wait"
            ));
        };
        let contenders: Vec<Contender<'_>> = vec![
            ("two dd of its halves", Box::new(dd)),
            ("cp -a", Box::new(|t: &Path| shell(&format!("cp -a '{s}' '{}'", t.display())))),
            ("stage (in)", Box::new(|t: &Path| stage(Way::In, &source, t, false))),
            ("stage (in), verified", Box::new(|t: &Path| stage(Way::In, &source, t, true))),
        ];
        let mut contenders = contenders;
        if let Some(pool) = pool {
            let run = |_: &Path| {
                let inside = into_pool(pool, &source);
                let root = pool.root().expect("the pool's root");
                // Frees space for the next run.
                pool.unlink_in(root, &inside.as_os_str().as_encoded_bytes()[1..]).expect("remove the file");
            };
            contenders.push(("stage into the pool, and rm", Box::new(run)));
        }
        let seconds = race(&to.0.join("large"), &contenders);
        print(&format!("one file of {mib} MiB, store to fast"), (mib as u64) << 20, &contenders, &seconds);
    }
}
