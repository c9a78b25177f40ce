//! Volumes: puts, gets and atomic operations on the node of the volume beside copies of the processor to shared memory,
//! and from another node beside the network provider's transfers between the same two nodes in the same run.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::far::{rate, LIBRARY_VARIABLE, POOL_VARIABLE};
use super::hosts::Hosts;
use super::library::{Library, Volume};
use super::raw;
use crate::gate::Gate;
use crate::orders::Orders;
use crate::report::{median, Table, Target};
use crate::sizes::Sizes;
use crate::systems::{said, Pool};

const CAPACITY_BYTES: u64 = 512 << 20;
/// Bytes of the volume.
const VOLUME_BYTES: usize = raw::DEEP_WINDOW;
/// Bytes that copies walk through: small ones stay in the processor's cache, large ones do not.
const WINDOWS: [usize; 2] = [1 << 20, raw::WINDOW];
const SMALL: [usize; 2] = [8, 64];
const LARGE: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];
/// The calls of which those that touch a mapping for the first time are measured, too.
const FIRST: usize = 1 << 20;
const FAR_LARGE: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
/// Calls at a time of the asynchronous rows.
const DEPTH: usize = raw::DEPTH;
/// Processes of the rows with several.
const PROCESSES: [usize; 5] = [1, 2, 4, 16, 64];
/// Bytes of one call of those.
const SHARED_BLOCK: usize = 256 << 10;
/// How often each process calls at each of its offsets.
const ROUNDS: usize = 8;
/// Approximate nanoseconds of one batch of calls.
const BATCH_NS: f64 = 5e6;
/// Batches of each kind of call; a sample is their median.
const BATCHES: usize = 15;
/// Seconds for which several calls at a time are kept in progress, and how often.
const DEEP_SECONDS: f64 = 0.25;
const DEEP_ROUNDS: usize = 3;
/// How much longer a small put may take than a copy by the processor.
const SMALL_NS: f64 = 100.0;
const MEMORY: &str = "memcpy";
const PROVIDER: &str = "provider";
/// Calls whose memory forebay_alloc has allocated, or forebay_register has registered.
const ALLOCATED: &str = "allocated";
const REGISTERED: &str = "registered";

/// All tables.
pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let (times, rates) = local(binaries, sizes)?;
    let (far_times, far_rates) = far(binaries, sizes)?;
    Ok(vec![times, rates, far_times, far_rates, processes(binaries, sizes)?])
}

pub(super) fn table(title: String, unit: &'static str, columns: &[&str]) -> Table {
    let columns = columns.iter().map(|&name| name.to_owned()).collect();
    Table { title, unit, more_is_better: unit == "GB/s", columns, rows: Vec::new() }
}

fn block_name(block: usize) -> String {
    match block {
        0..1024 => format!("{block:>5} B"),
        _ => format!("{:>5} KiB", block >> 10),
    }
}

/// This program as a client of a pool.
pub(super) fn client(
    binaries: &Path,
    orders: &Orders,
    what: &str,
    pool: &Path,
    mut command: std::process::Command,
) -> Result<String, String> {
    command.args(orders.arguments(what)).env(POOL_VARIABLE, pool);
    said(command.env(LIBRARY_VARIABLE, binaries.join("libforebay.so")))
}

pub(super) fn this() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|e| format!("this program's path: {e}"))
}

/// On the node of the volume.
fn local(binaries: &Path, sizes: &Sizes) -> Result<(Table, Table), String> {
    let pool = Pool::up(binaries, CAPACITY_BYTES)?;
    said(pool.command().args(["volume", "create", "v", "--size", &VOLUME_BYTES.to_string(), "--json"]))?;
    let mut times = table("(a) small calls on a volume of this node".into(), "ns", &["Forebay", MEMORY]);
    let mut rates = table("(b) large puts and gets of this node".into(), "GB/s", &["Forebay", MEMORY]);
    let shorter = || vec![Target::Difference { against: MEMORY.into(), at_most: SMALL_NS }];
    let as_fast = || vec![Target::Ratio { against: MEMORY.into(), at_least: 0.95 }];
    for _ in 0..sizes.repetitions {
        for block in SMALL.into_iter().chain(LARGE) {
            let orders = Orders { root: "v".into(), block, ..Orders::default() };
            let told =
                client(binaries, &orders, "volume", pool.directory(), std::process::Command::new(this()?))?;
            for (kind, copy) in [("put", "copy to"), ("get", "copy from"), ("add", "processor's add")] {
                let (ours, theirs) = (rate(&told, kind)?, rate(&told, copy)?);
                if kind == "add" {
                    if block == SMALL[0] {
                        times.add("fetch and add", 0, ours, shorter);
                        times.add("fetch and add", 1, theirs, Vec::new);
                    }
                    continue;
                }
                let label = format!("{kind}, {}", block_name(block));
                match SMALL.contains(&block) {
                    true => {
                        times.add(&label, 0, ours, shorter);
                        times.add(&label, 1, theirs, Vec::new);
                    }
                    false => {
                        rates.add(&label, 0, block as f64 / ours, as_fast);
                        rates.add(&label, 1, block as f64 / theirs, Vec::new);
                    }
                }
                if block == FIRST {
                    let label = format!("{label}, the first pass of a process");
                    rates.add(&label, 0, block as f64 / rate(&told, &format!("first {kind}"))?, as_fast);
                    rates.add(&label, 1, block as f64 / rate(&told, &format!("first {copy}"))?, Vec::new);
                }
            }
            if block == SMALL[0] {
                times.add("open and close", 0, rate(&told, "open")?, Vec::new);
            }
        }
    }
    times.rows.sort_by_key(|row| {
        ["put", "get", "fetch", "open"].iter().position(|word| row.label.starts_with(word))
    });
    rates.rows.sort_by_key(|row| row.label.starts_with("get"));
    Ok((times, rates))
}

/// From another node.
fn far(binaries: &Path, sizes: &Sizes) -> Result<(Table, Table), String> {
    let (hosts, place) = Hosts::apart(binaries)?;
    hosts.up(2, CAPACITY_BYTES)?;
    let bytes = VOLUME_BYTES.to_string();
    let mut create = hosts.forebay();
    create.args(["volume", "create", "v", "--size", &bytes, "--on", "2", "--json", "--pool"]);
    said(create.arg(hosts.pool(1)))?;
    let columns = ["Forebay", PROVIDER, ALLOCATED, REGISTERED];
    let mut times =
        table(format!("(c) small calls on a volume of another node, over {place}"), "us", &columns[..2]);
    let mut rates = table(format!("(d) large puts and gets of another node, over {place}"), "GB/s", &columns);
    let ratio = |at_least| move || vec![Target::Ratio { against: PROVIDER.into(), at_least }];
    for _ in 0..sizes.repetitions {
        for block in SMALL.into_iter().chain(FAR_LARGE) {
            let orders = Orders { root: "v".into(), block, ..Orders::default() };
            let ask = |what| client(binaries, &orders, what, &hosts.pool(1), hosts.on(1, &this()?));
            let (told, raw) = (ask("volume-far")?, raw::measure(&hosts, raw::Kind::Memory, block)?);
            let deep_raw = raw::measure(&hosts, raw::Kind::Deep, block)?;
            for (kind, transfer) in [("put", "write"), ("get", "read")] {
                let label = format!("{kind}, {}", block_name(block));
                let (ours, theirs) = (rate(&told, kind)?, rate(&raw, transfer)?);
                if SMALL.contains(&block) {
                    times.add(&label, 0, ours / 1e3, Vec::new);
                    times.add(&label, 1, block as f64 / theirs / 1e3, Vec::new);
                    continue;
                }
                let at_least = if block < 1 << 20 { 0.8 } else { 0.9 };
                rates.add(&label, 0, block as f64 / ours, ratio(at_least));
                rates.add(&label, 1, theirs, Vec::new);
                for (column, memory) in [(2, ALLOCATED), (3, REGISTERED)] {
                    let ours = rate(&told, &format!("{kind} {memory}"))?;
                    rates.add(&label, column, block as f64 / ours, ratio(at_least));
                }
                let deep = format!("{kind}, {}, {} at a time", block_name(block), raw::depth_of(block));
                rates.add(&deep, 0, block as f64 / rate(&told, &format!("{kind} {DEPTH}"))?, ratio(at_least));
                rates.add(&deep, 1, rate(&deep_raw, transfer)?, Vec::new);
                let allocated = rate(&told, &format!("{kind} {DEPTH} {ALLOCATED}"))?;
                rates.add(&deep, 2, block as f64 / allocated, ratio(at_least));
            }
            if block == SMALL[0] {
                let calls = raw::measure(&hosts, raw::Kind::Calls, 1)?;
                times.add(
                    "fetch and add; a request of the call layer",
                    0,
                    rate(&told, "add")? / 1e3,
                    Vec::new,
                );
                times.add(
                    "fetch and add; a request of the call layer",
                    1,
                    1e6 / rate(&calls, "calls")?,
                    Vec::new,
                );
                // Every call is a request to it first; the rest are the other node and the way there and back.
                let own = "of each, the way to this node's daemon and back";
                times.add(own, 0, rate(&told, "own")? / 1e3, Vec::new);
            }
        }
    }
    rates.rows.sort_by_key(|row| row.label.starts_with("get"));
    hosts.down(2)?;
    Ok((times, rates))
}

/// By several processes of one node, beside the file system of the pool.
fn processes(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let pool = Pool::up(binaries, CAPACITY_BYTES)?;
    said(pool.command().args(["volume", "create", "v", "--size", &VOLUME_BYTES.to_string(), "--json"]))?;
    let mut all = table(
        format!("(e) all processes of this node together, {} a call", block_name(SHARED_BLOCK).trim_start()),
        "GB/s",
        &["Forebay", "pool file", MEMORY],
    );
    for _ in 0..sizes.repetitions {
        for processes in PROCESSES {
            let bytes = VOLUME_BYTES / 4;
            let orders =
                Orders { root: "v".into(), block: SHARED_BLOCK, processes, bytes, ..Orders::default() };
            let told = client(
                binaries,
                &orders,
                "volume-shared",
                pool.directory(),
                std::process::Command::new(this()?),
            )?;
            for kind in ["put", "get"] {
                let label = format!("{kind}, {processes:>2} processes");
                for (column, of) in ["", "file ", "memory "].into_iter().enumerate() {
                    all.add(&label, column, rate(&told, &format!("{of}{kind}"))?, Vec::new);
                }
            }
        }
    }
    all.rows.sort_by_key(|row| row.label.starts_with("get"));
    Ok(all)
}

pub(super) fn library() -> Result<Library, String> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from).ok_or(format!("{name} is not set"));
    Library::attach(&path(LIBRARY_VARIABLE)?, &path(POOL_VARIABLE)?)
}

fn specifier(orders: &Orders) -> CString {
    CString::new(orders.root.as_str()).unwrap_or_default()
}

/// Memory of processes that share it, as that of volumes.
pub(super) struct SharedMemory {
    at: *mut u8,
    bytes: usize,
}

impl SharedMemory {
    pub(super) fn new(bytes: usize) -> Result<SharedMemory, String> {
        // SAFETY: new memory, which is never unmapped.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        match at == libc::MAP_FAILED {
            true => Err("no shared memory".into()),
            false => Ok(SharedMemory { at: at.cast(), bytes }),
        }
    }

    pub(super) fn copy_to(&self, offset: usize, from: &[u8]) {
        assert!(offset + from.len() <= self.bytes);
        // SAFETY: the range is in the memory, which no reference covers.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at.add(offset), from.len()) }
    }

    pub(super) fn copy_from(&self, offset: usize, to: &mut [u8]) {
        assert!(offset + to.len() <= self.bytes);
        // SAFETY: the range is in the memory, which no reference covers.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(offset), to.as_mut_ptr(), to.len()) }
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: aligned, and used atomically alone while a reference is there.
        unsafe { &*self.at.cast::<AtomicU64>() }
    }
}

/// Shared memory that is there, each time mapped anew.
struct Remapped {
    memory: std::fs::File,
    bytes: usize,
}

impl Remapped {
    fn new(bytes: usize) -> Result<Remapped, String> {
        let failed = |e: std::io::Error| format!("shared memory: {e}");
        // SAFETY: the name ends in NUL, and the descriptor is nobody else's.
        let memory = unsafe {
            match libc::memfd_create(c"bench".as_ptr(), libc::MFD_CLOEXEC) {
                -1 => return Err(failed(std::io::Error::last_os_error())),
                fd => std::fs::File::from_raw_fd(fd),
            }
        };
        std::io::Write::write_all(&mut &memory, &vec![1; bytes]).map_err(failed)?;
        Ok(Remapped { memory, bytes })
    }

    fn map(&self) -> Result<SharedMemory, String> {
        let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, self.memory.as_raw_fd());
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), self.bytes, protection, libc::MAP_SHARED, fd, 0) };
        match at == libc::MAP_FAILED {
            true => Err("no shared memory".into()),
            false => Ok(SharedMemory { at: at.cast(), bytes: self.bytes }),
        }
    }
}

/// Nanoseconds of calls that touch all of a window of memory that was mapped right before: medians over passes that
/// alternate.
fn first_passes(library: &Library, orders: &Orders, window: usize) -> Result<Vec<(String, f64)>, String> {
    let (block, memory) = (orders.block, Remapped::new(window)?);
    let (source, mut sink) = (vec![1u8; block], vec![0u8; block]);
    let names = ["first put", "first copy to", "first get", "first copy from"];
    let mut samples = vec![Vec::new(); names.len()];
    for _ in 0..BATCHES {
        for (samples, name) in samples.iter_mut().zip(names) {
            let (volume, mapped) = (library.volume(&specifier(orders))?, memory.map()?);
            let started = Instant::now();
            for at in (0..window).step_by(block) {
                match name {
                    "first put" => volume.put(&source, at)?,
                    "first get" => volume.get(&mut sink, at)?,
                    "first copy to" => mapped.copy_to(at, &source),
                    _ => mapped.copy_from(at, &mut sink),
                }
            }
            std::hint::black_box(&sink);
            samples.push(started.elapsed().as_nanos() as f64 / (window / block) as f64);
            // SAFETY: the mapping of `map`, which nothing uses any longer.
            unsafe { libc::munmap(mapped.at.cast(), mapped.bytes) };
        }
    }
    let medians = samples.iter().map(|samples| median(samples).unwrap_or(f64::NAN));
    Ok(names.iter().map(|name| (*name).to_owned()).zip(medians).collect())
}

/// A kind of call: its name, and the call at an offset.
type Kind<'a> = (String, &'a mut dyn FnMut(usize) -> Result<(), String>);

/// A call at the place with a number, with the process's buffer.
type Transfer<'a> = dyn FnMut(usize, &mut [u8]) -> Result<(), String> + 'a;

/// Nanoseconds of each kind of call: the median over batches that alternate. Offsets walk through `window` bytes.
fn alternate(mut kinds: Vec<Kind<'_>>, block: usize, window: usize) -> Result<Vec<(String, f64)>, String> {
    let places = (window / block).max(1);
    let mut counts = Vec::new();
    for (_, call) in &mut kinds {
        let started = Instant::now();
        (0..3).try_for_each(|i| call(i % places * block))?;
        let each = started.elapsed().as_nanos() as f64 / 3.0;
        counts.push(((BATCH_NS / each) as usize).clamp(1, 200_000));
    }
    let mut samples = vec![Vec::new(); kinds.len()];
    let mut place = 0;
    for _ in 0..BATCHES {
        for ((samples, (_, call)), count) in samples.iter_mut().zip(&mut kinds).zip(&counts) {
            let started = Instant::now();
            for _ in 0..*count {
                call(place * block)?;
                place = if place + 1 == places { 0 } else { place + 1 };
            }
            samples.push(started.elapsed().as_nanos() as f64 / *count as f64);
        }
    }
    let medians = samples.iter().map(|samples| median(samples).unwrap_or(f64::NAN));
    Ok(kinds.iter().map(|(name, _)| name.clone()).zip(medians).collect())
}

fn window_of(block: usize) -> usize {
    if block < LARGE[0] {
        WINDOWS[0]
    } else {
        WINDOWS[1].max(block)
    }
}

/// A rate with wrong data is worthless.
fn check(volume: &Volume<'_>, block: usize) -> Result<(), String> {
    let marked: Vec<u8> = (0..block).map(|i| (i / 4096 + i * 7 + 1) as u8).collect();
    let mut found = vec![0; block];
    volume.put(&marked, block)?;
    volume.get(&mut found, block)?;
    match found == marked {
        true => Ok(()),
        false => Err("other bytes than were put".into()),
    }
}

/// `drive volume`: nanoseconds of calls on the node of the volume.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let library = library()?;
    let volume = library.volume(&specifier(orders))?;
    let (block, window) = (orders.block, window_of(orders.block));
    check(&volume, block)?;
    let memory = SharedMemory::new(window)?;
    let (mut source, mut sink) = (vec![1u8; block], vec![0u8; block]);
    source[0] = 2;
    let mut other = sink.clone();
    let first = if block == FIRST { first_passes(&library, orders, window)? } else { Vec::new() };
    let mut times = alternate(
        vec![
            ("put".into(), &mut |at| volume.put(&source, at)),
            ("copy to".into(), &mut |at| {
                memory.copy_to(at, &source);
                Ok(())
            }),
            ("get".into(), &mut |at| volume.get(&mut sink, at)),
            ("copy from".into(), &mut |at| {
                memory.copy_from(at, &mut other);
                std::hint::black_box(&other);
                Ok(())
            }),
            ("add".into(), &mut |_| volume.fetch_add(0, 1).map(drop)),
            ("processor's add".into(), &mut |_| {
                std::hint::black_box(memory.word().fetch_add(1, Ordering::SeqCst));
                Ok(())
            }),
            ("open".into(), &mut |_| library.volume(&specifier(orders)).map(drop)),
        ],
        block,
        window,
    )?;
    times.extend(first);
    Ok(times)
}

/// `drive volume-far`: nanoseconds of calls on the volume of another node.
pub(crate) fn drive_far(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let library = library()?;
    let volume = library.volume(&specifier(orders))?;
    let block = orders.block;
    let window = window_of(block).min(VOLUME_BYTES);
    check(&volume, block.min(VOLUME_BYTES / 2))?;
    let (source, mut sink) = (vec![1u8; block], vec![0u8; block]);
    let (mut allocated, mut other) = (library.allocate(block)?, library.allocate(block)?);
    let (mut registered, mut sink_registered) = (vec![4u8; block], vec![0u8; block]);
    library.register(&mut registered)?;
    library.register(&mut sink_registered)?;
    allocated.bytes().fill(5);
    let mut times = alternate(
        vec![
            ("put".into(), &mut |at| volume.put(&source, at)),
            (format!("put {ALLOCATED}"), &mut |at| volume.put(allocated.bytes(), at)),
            (format!("put {REGISTERED}"), &mut |at| volume.put(&registered, at)),
            ("get".into(), &mut |at| volume.get(&mut sink, at)),
            (format!("get {ALLOCATED}"), &mut |at| volume.get(other.bytes(), at)),
            (format!("get {REGISTERED}"), &mut |at| volume.get(&mut sink_registered, at)),
            ("add".into(), &mut |_| volume.fetch_add(0, 1).map(drop)),
            // The daemon of this node looks for its record, and finds none.
            ("own".into(), &mut |_| library.volume(c"none").map_or(Ok(()), |_| Err("there is one".into()))),
        ],
        block,
        window,
    )?;
    // As many as fit in the volume.
    let depth = raw::depth_of(block);
    let (mut out, mut back) = (vec![3u8; depth * block], vec![0u8; depth * block]);
    let (mut from, mut to) = (library.allocate(depth * block)?, library.allocate(depth * block)?);
    from.bytes().fill(5);
    let queue = library.queue()?;
    let mut deep = [
        (format!("put {DEPTH}"), &mut out[..], true),
        (format!("get {DEPTH}"), &mut back[..], false),
        (format!("put {DEPTH} {ALLOCATED}"), from.bytes(), true),
        (format!("get {DEPTH} {ALLOCATED}"), to.bytes(), false),
    ];
    let mut samples = vec![Vec::new(); deep.len()];
    for round in 0..=DEEP_ROUNDS {
        for (samples, (_, memory, puts)) in samples.iter_mut().zip(&mut deep) {
            let ns = volume.keep_busy(&queue, memory, block, *puts, DEEP_SECONDS)?;
            // The first touches the memory.
            if round > 0 {
                samples.push(ns);
            }
        }
    }
    let medians = samples.iter().map(|samples| median(samples).unwrap_or(f64::NAN));
    times.extend(deep.iter().map(|(name, ..)| name.clone()).zip(medians));
    Ok(times)
}

/// `drive volume-shared`: GB/s of all processes together, each in a range of its own if there are few.
pub(crate) fn drive_shared(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let memory = SharedMemory::new(orders.bytes)?;
    let (block, calls) = (orders.block, (orders.bytes / orders.block / orders.processes).max(1));
    let names = ["put", "get", "file put", "file get", "memory put", "memory get"];
    let seconds = Gate::run(orders.processes, |gate| {
        let library = library()?;
        let volume = library.volume(&specifier(orders))?;
        let path = CString::new(format!("/volumes-{}", gate.process)).unwrap_or_default();
        let file = library.open(&path, libc::O_CREAT | libc::O_RDWR)?;
        // Not zero: its pages would be one page.
        let mut buffer = vec![1 + gate.process as u8; block];
        let first = gate.process * calls;
        let at = |i: usize| (first + i) * block % orders.bytes;
        // Its pages are there before the time begins, as those of the volume are.
        (0..calls).try_for_each(|i| file.write(&buffer, i * block))?;
        let mut phase = |work: &mut Transfer<'_>| {
            gate.timed(|| (0..ROUNDS * calls).try_for_each(|i| work(i % calls, &mut buffer)))
        };
        phase(&mut |i, buffer| volume.put(buffer, at(i)))?;
        phase(&mut |i, buffer| volume.get(buffer, at(i)))?;
        phase(&mut |i, buffer| file.write(buffer, i * block))?;
        phase(&mut |i, buffer| file.read(buffer, i * block))?;
        phase(&mut |i, buffer| {
            memory.copy_to(at(i), buffer);
            Ok(())
        })?;
        phase(&mut |i, buffer| {
            memory.copy_from(at(i), buffer);
            std::hint::black_box(&buffer);
            Ok(())
        })
    })?;
    let bytes = (ROUNDS * calls * orders.processes * block) as f64;
    Ok(names
        .into_iter()
        .zip(seconds)
        .map(|(name, seconds)| (name.to_owned(), bytes / seconds / 1e9))
        .collect())
}
