//! First-write speed on Forebay's own tmpfs and on /dev/shm, side by side.
//!
//! `cargo run --release -p forebay-data --example first_write [MIB]` writes new files of MIB MiB (default 256) in
//! records of 1 MiB and of 4 KiB, alternately on the two, and prints the medians of nine runs in GB/s. Right before
//! each timed file, another is written and removed untimed, as memory of a virtual machine is slow when first touched.
//! With free page reporting the host takes freed pages back within seconds, so keep the files small on such machines.

use std::error::Error;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

use forebay_data::{detached_tmpfs, Capabilities};
use rustix::fs::{AtFlags, Mode, OFlags};

const TURNS: usize = 9;
const NAME: &std::ffi::CStr = c"forebay-first-write";

/// Writes a new file of `bytes` bytes and removes it. Returns the seconds of the writes.
fn first_write(directory: &OwnedFd, bytes: usize, record: &[u8]) -> Result<f64, Box<dyn Error>> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, NAME, flags, Mode::RWXU)?;
    let write = || -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        let mut done = 0;
        while done < bytes {
            done += rustix::io::pwrite(&file, &record[..record.len().min(bytes - done)], done as u64)?;
        }
        Ok(start.elapsed().as_secs_f64())
    };
    let outcome = write();
    rustix::fs::unlinkat(directory, NAME, AtFlags::empty())?;
    outcome
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(256), |text| text.parse())?;
    let bytes = mib << 20;
    let own = detached_tmpfs(2 * bytes as u64)?;
    let plain: OwnedFd = File::open("/dev/shm")?.into();
    for (name, directory) in [("a tmpfs of our own", &own), ("/dev/shm", &plain)] {
        println!("{name}: huge pages {:?}", Capabilities::of(directory)?.huge_pages);
    }
    println!("{:>10} {:>12} {:>12} {:>8}", "record", "own GB/s", "shm GB/s", "ratio");
    let gigabytes = bytes as f64 / 1e9;
    for record_bytes in [1 << 20, 4096] {
        let record = vec![1; record_bytes];
        let speed = |directory| {
            first_write(directory, bytes, &record)?;
            Ok::<f64, Box<dyn Error>>(gigabytes / first_write(directory, bytes, &record)?)
        };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            ours.push(speed(&own)?);
            theirs.push(speed(&plain)?);
        }
        let (ours, theirs) = (median(ours), median(theirs));
        println!("{record_bytes:>10} {ours:>12.2} {theirs:>12.2} {:>8.2}", ours / theirs);
    }
    Ok(())
}
