//! Emulated media: what programs measure at block devices of each profile, beside the configured values. fio reads and
//! writes the devices directly, with 1 to 8 processes. Needs root, FUSE, loop devices and fio.

use crate::report::{Table, Target};
use crate::sizes::Sizes;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The profiles.
const PROFILES: [&str; 7] = ["hdd", "ssd", "slc", "pcram", "reram", "optane", "dram"];
const PROCESSES: [u64; 4] = [1, 2, 4, 8];
/// Requests of the bandwidth's and of the latency's measurement.
const LARGE_BYTES: u64 = 1 << 20;
const SMALL_BYTES: u64 = 4096;
/// Size of a device, divided among the processes.
const DEVICE_BYTES: u64 = 256 << 20;
/// The bandwidth must be at least this part of the configured one.
const BANDWIDTH_PART: f64 = 0.95;

/// A device, ended on drop.
struct Device<'a> {
    forebay: &'a Path,
    name: String,
    path: String,
    medium: Value,
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
        let mut device = Device { forebay, name, path, medium: Value::Null };
        device.medium = run(&["stat", &device.name])?["medium"].clone();
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

fn table(title: &str, unit: &'static str, more_is_better: bool) -> Table {
    let columns = vec!["measured".to_owned(), "configured".to_owned()];
    Table { title: title.to_owned(), unit, more_is_better, columns, rows: Vec::new() }
}

pub(crate) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let forebay = binaries.join("forebay");
    let seconds = if sizes.is_quick { 1 } else { 3 };
    let mut bandwidths = table("emulated media: bandwidth of requests of 1 MiB", "MB/s", true);
    let mut latencies = table("emulated media: requests of 4 KiB at random places, one process", "us", false);
    for profile in PROFILES {
        let device = Device::up(&forebay, profile)?;
        for _ in 0..sizes.repetitions {
            for direction in ["read", "write"] {
                for processes in PROCESSES {
                    let ran = device.fio(direction, LARGE_BYTES, processes, seconds)?;
                    let label = format!("{profile}, {direction}, {processes}");
                    let wanted =
                        || vec![Target::Ratio { against: "configured".into(), at_least: BANDWIDTH_PART }];
                    bandwidths.add(&label, 0, ran["bw_bytes"].as_f64().unwrap_or(0.0) / 1e6, wanted);
                    bandwidths.add(&label, 1, device.bandwidth(direction, processes), Vec::new);
                }
                let ran = device.fio(&format!("rand{direction}"), SMALL_BYTES, 1, seconds)?;
                let label = format!("{profile}, {direction}");
                latencies.add(&label, 0, ran["clat_ns"]["mean"].as_f64().unwrap_or(0.0) / 1e3, Vec::new);
                latencies.add(&label, 1, device.request_ns(direction, SMALL_BYTES, true) / 1e3, Vec::new);
            }
        }
    }
    Ok(vec![bandwidths, latencies])
}
