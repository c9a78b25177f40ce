//! Block devices of volumes beside a loop device on a file of tmpfs, in the same run: one on a volume that is one piece,
//! which the kernel serves, and one on a volume of two pieces, which a process serves. fio reads and writes them directly.
//! Needs root, loop devices, FUSE and fio.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::{said, Pool};

const DEVICE_BYTES: u64 = 128 << 20;
const CAPACITY_BYTES: u64 = 512 << 20;
const LOOP: &str = "loop on tmpfs";
/// Kinds of devices, and the part of the loop device's rate that each must have.
const KINDS: [(&str, f64); 2] = [("one piece", 0.9), ("served", 0.6)];
/// Block, requests at a time.
const LOADS: [(u64, u32); 4] = [(1 << 20, 1), (1 << 20, 16), (4096, 1), (4096, 16)];

/// A file of tmpfs with a loop device on it, which end on drop.
struct Reference {
    file: PathBuf,
    device: String,
}

impl Reference {
    fn new() -> Result<Reference, String> {
        let file = PathBuf::from(format!("/dev/shm/forebay-bench-loop-{}", std::process::id()));
        let mut reference = Reference { file, device: String::new() };
        // Its memory is there before, as that of a volume.
        let count = format!("count={}", DEVICE_BYTES >> 20);
        let to = format!("of={}", reference.file.display());
        said(Command::new("dd").args(["if=/dev/urandom", &to, "bs=1M", &count, "status=none"]))?;
        let device = said(Command::new("losetup").args(["--find", "--show"]).arg(&reference.file))?;
        reference.device = device.trim().to_owned();
        Ok(reference)
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = Command::new("losetup").args(["--detach", &self.device]).status();
        }
        let _ = std::fs::remove_file(&self.file);
    }
}

/// The devices of a pool's volumes, which end on drop.
struct Devices {
    pool: Pool,
    paths: Vec<String>,
}

impl Devices {
    fn new(binaries: &Path) -> Result<Devices, String> {
        let mut devices = Devices { pool: Pool::up(binaries, CAPACITY_BYTES)?, paths: Vec::new() };
        for (number, first) in [DEVICE_BYTES, DEVICE_BYTES / 2].into_iter().enumerate() {
            let volume = |words: &[&str]| said(devices.pool.command().arg("volume").args(words));
            let name = format!("v{number}");
            volume(&["create", &name, "--size", &first.to_string(), "--json"])?;
            volume(&["resize", &name, "--size", &DEVICE_BYTES.to_string(), "--json"])?;
            let attached = volume(&["attach", &name])?;
            devices.paths.push(attached.trim().to_owned());
        }
        Ok(devices)
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for path in &self.paths {
            let _ = said(self.pool.command().args(["volume", "detach", path]));
        }
    }
}

/// Bytes per second of one run of fio.
fn fio(device: &str, how: &str, (block, depth): (u64, u32), seconds: u64) -> Result<f64, String> {
    let mut fio = Command::new("fio");
    fio.args(["--name=device", "--direct=1", "--ioengine=libaio", "--time_based", "--output-format=json"]);
    fio.args([format!("--filename={device}"), format!("--rw=rand{how}"), format!("--bs={block}")]);
    fio.args([
        format!("--iodepth={depth}"),
        format!("--runtime={seconds}"),
        format!("--size={DEVICE_BYTES}"),
    ]);
    let told: Value = serde_json::from_str(&said(&mut fio)?).map_err(|e| format!("fio: {e}"))?;
    told["jobs"][0][how]["bw_bytes"].as_f64().ok_or_else(|| "fio says no bandwidth".into())
}

/// Both tables; none where they cannot be measured.
pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let can = std::fs::OpenOptions::new().write(true).open("/dev/loop-control").is_ok()
        && Path::new("/dev/fuse").exists()
        && Command::new("fio").arg("--version").output().is_ok();
    if !can {
        println!("no block devices: they need root, /dev/loop-control, /dev/fuse and fio");
        return Ok(Vec::new());
    }
    let columns = || vec!["Forebay".to_owned(), LOOP.to_owned()];
    let table = |title: &str, unit| Table {
        title: title.to_owned(),
        unit,
        more_is_better: true,
        columns: columns(),
        rows: Vec::new(),
    };
    let mut large = table("(f) block devices: requests of 1 MiB at random places", "GB/s");
    let mut small = table("(g) block devices: requests of 4 KiB at random places", "thousand/s");
    let (devices, reference) = (Devices::new(binaries)?, Reference::new()?);
    let seconds = if sizes.is_quick { 1 } else { 3 };
    for _ in 0..sizes.repetitions {
        for load in LOADS {
            for how in ["read", "write"] {
                let (table, scale) =
                    if load.0 == 4096 { (&mut small, 4096.0 * 1e3) } else { (&mut large, 1e9) };
                let theirs = fio(&reference.device, how, load, seconds)? / scale;
                for ((kind, at_least), path) in KINDS.into_iter().zip(&devices.paths) {
                    let label = format!("{kind}, {how}, {:>2} at a time", load.1);
                    let target = || vec![Target::Ratio { against: LOOP.into(), at_least }];
                    table.add(&label, 0, fio(path, how, load, seconds)? / scale, target);
                    table.add(&label, 1, theirs, Vec::new);
                }
            }
        }
    }
    for table in [&mut large, &mut small] {
        table.rows.sort_by_key(|row| row.label.starts_with("served"));
    }
    Ok(vec![large, small])
}
