//! Describes the machine that produced the numbers.

use serde_json::{json, Value};
use std::fs::read_to_string;
use std::path::Path;

/// The type of the file system that holds a path, by the longest mount point.
pub(crate) fn file_system_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (point, kind) = (words.next()?, words.next()?);
            path.starts_with(point).then(|| (point.len(), kind.to_owned()))
        })
        .max()
        .map_or("disk".into(), |(_, kind)| kind)
}

/// The value of a line of /proc/meminfo, in bytes.
pub(crate) fn memory_bytes(line: &str) -> u64 {
    read_to_string("/proc/meminfo")
        .unwrap_or_default()
        .lines()
        .find_map(|l| {
            l.strip_prefix(line)?.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
        })
        .unwrap_or(0)
        * 1024
}

fn first_line(path: &str) -> String {
    read_to_string(path).unwrap_or_default().lines().next().unwrap_or_default().trim().to_owned()
}

/// The machine's description, for the results file.
pub(crate) fn describe(disk: &Path) -> Value {
    let cpus = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or_default();
    json!({
        "cpu": model.trim_start_matches([' ', '\t', ':']),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_bytes": memory_bytes("MemTotal"),
        "kernel": first_line("/proc/sys/kernel/osrelease"),
        "disk": file_system_of(disk),
        "huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shmem": first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load_before": first_line("/proc/loadavg"),
        "time": std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
    })
}
