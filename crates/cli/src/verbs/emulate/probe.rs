//! `forebay emulate probe`: configured values beside what a program measures at the device, and the floor of the way
//! through the kernel.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_emulate::Description;
use forebay_pacing::{Direction, Speed};
use forebay_types::{Error, Result};
use serde_json::json;

use crate::arguments::EmulateStat;
use crate::failure;
use crate::table::Facts;
use crate::verbs::status::emulated::time;

/// Longest time for each of the measurements.
const LIMIT: Duration = Duration::from_secs(2);
const SMALL_BYTES: usize = 4096;
/// The kernel splits larger ones, and each part has the medium's latency.
const LARGE_BYTES: usize = 512 << 10;
const SMALL_REQUESTS_MAX: usize = 1000;

/// What was measured in one direction.
struct Measured {
    /// Median time of a request of [`SMALL_BYTES`] at a random place.
    small_ns: u64,
    /// Bandwidth of requests of [`LARGE_BYTES`], one after the other.
    bytes_per_s: u64,
}

/// Memory that direct I/O can use.
struct Aligned(*mut u8, std::alloc::Layout);

impl Aligned {
    fn new(bytes: usize) -> Option<Aligned> {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).ok()?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        (!memory.is_null()).then_some(Aligned(memory, layout))
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.0, self.1) };
    }
}

/// One request. A write stores what is in the memory.
fn transfer(file: &File, memory: &Aligned, bytes: usize, offset: u64, writes: bool) -> std::io::Result<()> {
    let (fd, at) = (file.as_raw_fd(), offset as libc::off_t);
    // SAFETY: the memory has at least as many bytes.
    let n = unsafe {
        match writes {
            true => libc::pwrite(fd, memory.0.cast(), bytes, at),
            false => libc::pread(fd, memory.0.cast(), bytes, at),
        }
    };
    match n {
        n if n == bytes as isize => Ok(()),
        n if n < 0 => Err(std::io::Error::last_os_error()),
        _ => Err(std::io::Error::from_raw_os_error(libc::EIO)),
    }
}

fn measure(one: &Description, file: &File, writes: bool) -> std::io::Result<Option<Measured>> {
    let Some(memory) = Aligned::new(LARGE_BYTES) else { return Ok(None) };
    let blocks = one.options.bytes / SMALL_BYTES as u64;
    let large = one.options.bytes / LARGE_BYTES as u64;
    // A sequence without repetition in sight, spread over the device.
    let place = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16) % blocks * SMALL_BYTES as u64;
    let begun = Instant::now();
    let mut times = Vec::new();
    while times.len() < SMALL_REQUESTS_MAX && begun.elapsed() < LIMIT {
        let offset = place(times.len() as u64 + 1);
        if writes {
            // What is there stays there.
            transfer(file, &memory, SMALL_BYTES, offset, false)?;
        }
        let sent = Instant::now();
        transfer(file, &memory, SMALL_BYTES, offset, writes)?;
        times.push(sent.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    let (mut spent, mut moved, mut next) = (Duration::ZERO, 0, 0);
    while large > 0 && spent < LIMIT && next < 4 * large.max(16) {
        let offset = next % large * LARGE_BYTES as u64;
        if writes {
            transfer(file, &memory, LARGE_BYTES, offset, false)?;
        }
        let sent = Instant::now();
        transfer(file, &memory, LARGE_BYTES, offset, writes)?;
        spent += sent.elapsed();
        (moved, next) = (moved + LARGE_BYTES as u64, next + 1);
    }
    let bytes_per_s = if spent.is_zero() { 0.0 } else { moved as f64 / spent.as_secs_f64() };
    Ok(Some(Measured {
        small_ns: times.get(times.len() / 2).copied().unwrap_or(0),
        bytes_per_s: bytes_per_s as u64,
    }))
}

/// The time that a request of [`SMALL_BYTES`] at a random place takes on an idle medium.
fn configured_ns(one: &Description, speed: Speed) -> u64 {
    let seek = one.profile().map_or(0, |profile| profile.medium.seek_ns);
    speed.latency_ns + seek + (SMALL_BYTES as u64 * 1_000_000_000).div_ceil(speed.bytes_per_s)
}

/// The bandwidth that requests of [`LARGE_BYTES`] one after the other have, each with its latency.
fn configured_bandwidth(speed: Speed) -> u64 {
    let ns = speed.latency_ns as f64 + LARGE_BYTES as f64 * 1e9 / speed.bytes_per_s as f64;
    (LARGE_BYTES as f64 * 1e9 / ns) as u64
}

pub(super) fn probe(arguments: &EmulateStat) -> Result<ExitCode> {
    let one = forebay_emulate::find(arguments.name.as_deref())?;
    let failed = |e: std::io::Error| Error::io(format!("cannot probe {}", one.device.display()), &e);
    let Some(profile) = one.profile() else { return Err(failed(std::io::ErrorKind::InvalidData.into())) };
    // Another program may change what a write would put back.
    let is_free = !forebay_sys::loop_device::is_in_use(&one.device);
    let exclusive = if is_free { libc::O_EXCL } else { 0 };
    let file = File::options()
        .read(true)
        .write(is_free)
        .custom_flags(libc::O_DIRECT | exclusive)
        .open(&one.device)
        .map_err(failed)?;
    let ways = one.ways()?;
    let mut facts = Facts::default();
    let mut object = json!({ "name": one.options.name, "profile": profile.name });
    for (direction, word, speed) in
        [(Direction::Read, "read", profile.medium.read), (Direction::Write, "write", profile.medium.write)]
    {
        if direction == Direction::Write && !is_free {
            facts.add(word, "not measured: the device is in use");
            continue;
        }
        let Some(measured) = measure(&one, &file, direction == Direction::Write).map_err(failed)? else {
            continue;
        };
        let floor_ns = ways[direction as usize].small_ns;
        let (small, large) = (configured_ns(&one, speed), configured_bandwidth(speed));
        facts.add(
            word,
            format!(
                "4 KiB in {}, {} configured; {} MB/s in 512 KiB, {} configured; the kernel's way takes {}",
                time(measured.small_ns),
                time(small),
                measured.bytes_per_s / 1_000_000,
                large / 1_000_000,
                time(floor_ns),
            ),
        );
        object[word] = json!({
            "small_ns": measured.small_ns,
            "small_configured_ns": small,
            "floor_ns": floor_ns,
            "bytes_per_s": measured.bytes_per_s,
            "configured_bytes_per_s": large,
        });
    }
    match arguments.json {
        true => failure::print_json(&object),
        false => failure::put(facts.text()),
    }
    Ok(ExitCode::SUCCESS)
}
