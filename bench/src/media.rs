//! Emulated media: what programs measure at block devices of each profile, beside the configured values. fio reads and
//! writes the devices directly, with 1 to 8 processes. Needs root, FUSE, loop devices and fio.

use crate::report::{Table, Target};
use crate::sizes::Sizes;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// The profiles, after [`FASTEST`].
const PROFILES: [&str; 6] = ["hdd", "ssd", "slc", "pcram", "reram", "optane"];
/// A profile that is faster than the path through the kernel. Its measured bandwidths are those of the path.
const FASTEST: &str = "dram";
const PROCESSES: [u64; 4] = [1, 2, 4, 8];
/// Requests of the bandwidth's and of the latency's measurement.
/// The kernel splits larger ones, and each part has the medium's latency.
const LARGE_BYTES: u64 = 512 << 10;
const SMALL_BYTES: u64 = 4096;
/// Size of a device, divided among the processes.
const DEVICE_BYTES: u64 = 256 << 20;
/// The bandwidth must be at least this part of the configured one, or of what the path through the kernel has.
const BANDWIDTH_PART: f64 = 0.95;
/// The latency may be longer than the configured one, or than the floor, by 10 %.
const LATENCY_PART: f64 = 1.0 / 1.1;

/// A device, ended on drop.
struct Device<'a> {
    forebay: &'a Path,
    name: String,
    path: String,
    medium: Value,
    ways: Value,
}

fn json_of(mut command: Command) -> Result<Value, String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("{command:?}: {e}"))
}

impl Device<'_> {
    fn up<'a>(forebay: &'a Path, profile: &str) -> Result<Device<'a>, String> {
        let name = format!("bench-{profile}");
        let run = |words: &[&str]| {
            let mut command = Command::new(forebay);
            command.arg("emulate").args(words).args(["--json"]);
            json_of(command)
        };
        let size = DEVICE_BYTES.to_string();
        let up = run(&["up", "--profile", profile, "--size", &size, "--name", &name])?;
        let path = up["device"].as_str().unwrap_or_default().to_owned();
        let mut device = Device { forebay, name, path, medium: Value::Null, ways: Value::Null };
        let stat = run(&["stat", &device.name])?;
        (device.medium, device.ways) = (stat["medium"].clone(), stat["way_ns"].clone());
        Ok(device)
    }

    /// One run of fio by so many processes, each in its part of the device: its results of the direction.
    fn fio(&self, how: &str, block: u64, processes: u64, seconds: u64) -> Result<Value, String> {
        let part = DEVICE_BYTES / processes;
        let mut fio = Command::new("fio");
        fio.args(["--name=media", "--direct=1", "--ioengine=psync", "--group_reporting", "--time_based"]);
        fio.args([format!("--filename={}", self.path), format!("--rw={how}"), format!("--bs={block}")]);
        fio.args([format!("--numjobs={processes}"), format!("--size={part}")]);
        fio.args([format!("--offset_increment={part}"), format!("--runtime={seconds}")]);
        fio.args(["--output-format=json"]);
        let direction = how.trim_start_matches("rand");
        Ok(json_of(fio)?["jobs"][0][direction].clone())
    }

    fn number(&self, direction: &str, key: &str) -> f64 {
        self.medium[direction][key].as_f64().unwrap_or(0.0)
    }

    /// The time that one request takes on the idle medium, in nanoseconds.
    fn request_ns(&self, direction: &str, block: u64, seeks: bool) -> f64 {
        let seek = if seeks { self.medium["seek_ns"].as_f64().unwrap_or(0.0) } else { 0.0 };
        let transfer = block as f64 * 1e9 / self.number(direction, "bytes_per_s");
        self.number(direction, "latency_ns") + seek + transfer
    }

    /// How long a small request takes without a medium: what the path through the kernel takes.
    fn floor_ns(&self, direction: &str) -> f64 {
        self.ways[direction]["small_ns"].as_f64().unwrap_or(0.0)
    }

    /// The bandwidth that so many processes get, each with one request at a time, in MB/s. Several streams seek.
    fn bandwidth(&self, direction: &str, processes: u64) -> f64 {
        let in_service = processes.min(self.medium["queue_depth"].as_u64().unwrap_or(1)) as f64;
        let ns = self.request_ns(direction, LARGE_BYTES, processes > 1);
        (in_service * LARGE_BYTES as f64 * 1e3 / ns).min(self.number(direction, "bytes_per_s") / 1e6)
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        let _ = Command::new(self.forebay).args(["emulate", "down", &self.name, "--force"]).output();
    }
}

fn table(title: &str, unit: &'static str, more_is_better: bool, floor: &str) -> Table {
    let columns = ["measured", "configured", floor, EXPECTED].map(str::to_owned).to_vec();
    Table { title: title.to_owned(), unit, more_is_better, columns, rows: Vec::new() }
}

/// The column that targets refer to: the configured value, or what the path through the kernel can do.
const EXPECTED: &str = "expected";

pub(crate) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let forebay = binaries.join("forebay");
    let seconds = if sizes.is_quick { 1 } else { 3 };
    let mut bandwidths = table("emulated media: bandwidth of requests of 512 KiB", "MB/s", true, "path");
    let mut latencies =
        table("emulated media: requests of 4 KiB at random places, one process", "us", false, "floor");
    let mut paths = HashMap::new();
    for profile in std::iter::once(FASTEST).chain(PROFILES) {
        let device = Device::up(&forebay, profile)?;
        for _ in 0..sizes.repetitions {
            for direction in ["read", "write"] {
                for processes in PROCESSES {
                    let ran = device.fio(direction, LARGE_BYTES, processes, seconds)?;
                    let (measured, configured) = (
                        ran["bw_bytes"].as_f64().unwrap_or(0.0) / 1e6,
                        device.bandwidth(direction, processes),
                    );
                    let path: &mut f64 = paths.entry((direction, processes)).or_insert(measured);
                    if profile == FASTEST {
                        *path = path.max(measured);
                    }
                    let label = format!("{profile}, {direction}, {processes}");
                    let wanted =
                        || vec![Target::Ratio { against: EXPECTED.into(), at_least: BANDWIDTH_PART }];
                    bandwidths.add(&label, 0, measured, wanted);
                    bandwidths.add(&label, 1, configured, Vec::new);
                    bandwidths.add(&label, 2, *path, Vec::new);
                    bandwidths.add(&label, 3, configured.min(*path), Vec::new);
                }
                let ran = device.fio(&format!("rand{direction}"), SMALL_BYTES, 1, seconds)?;
                let label = format!("{profile}, {direction}");
                let median = ran["clat_ns"]["percentile"]["50.000000"].as_f64().unwrap_or(0.0) / 1e3;
                let (configured, floor) =
                    (device.request_ns(direction, SMALL_BYTES, true) / 1e3, device.floor_ns(direction) / 1e3);
                let wanted = || vec![Target::Ratio { against: EXPECTED.into(), at_least: LATENCY_PART }];
                latencies.add(&label, 0, median, wanted);
                latencies.add(&label, 1, configured, Vec::new);
                latencies.add(&label, 2, floor, Vec::new);
                latencies.add(&label, 3, configured.max(floor), Vec::new);
            }
        }
    }
    Ok(vec![bandwidths, latencies])
}
