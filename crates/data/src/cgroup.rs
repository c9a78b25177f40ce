//! The tightest memory cgroup of a process: the one with the least room, from its own cgroup up to the root.
//!
//! Both hierarchies are read, as a node may mount either or both: version 1 (`memory.limit_in_bytes`) and version 2
//! (`memory.max` and `memory.high`; the lower one counts, as above `high` the kernel stalls the writer). The kernel
//! charges a tmpfs page to the process that writes it, and cannot reclaim it without swap. Before it refuses a page at
//! the limit, it reclaims cached pages of files on disks, inactive and active ones alike: "active" means only that a
//! page was read twice. So both count as free, and so do reclaimable slabs. Locked pages (`unevictable`) and tmpfs
//! pages (`inactive_anon`) are in neither list.
//!
//! In a container the path in `/proc/PID/cgroup` may name a directory that the container does not see. Then the
//! container's own cgroup is mounted, and the walk begins there.

use std::path::{Component, Path, PathBuf};

use crate::host::Host;
use forebay_sys::mounts::{self, Mount};

/// Limits at or above this mean no limit: version 1 writes the largest number of whole pages.
const NO_LIMIT: u64 = 1 << 62;

/// A memory cgroup with a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryCgroup {
    /// Its path within its hierarchy.
    pub path: PathBuf,
    /// Its limit.
    pub limit_bytes: u64,
    /// Memory that it uses and that cannot easily be reclaimed.
    pub used_bytes: u64,
}

impl MemoryCgroup {
    /// The bytes that its processes can still allocate.
    pub fn room_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// The memory cgroup with the least room of process `pid` (or of this one) and all above it. None if none has a limit
/// or cgroups cannot be read.
pub fn tightest_memory_cgroup(host: &Host, pid: Option<u32>) -> Option<MemoryCgroup> {
    let process = pid.map_or("self".to_owned(), |pid| pid.to_string());
    let memberships = host.read(format!("/proc/{process}/cgroup")).ok()?;
    // The mounts that this process sees, as this process does the reading.
    let mounts = mounts::parse(&host.read_bytes("/proc/self/mountinfo").unwrap_or_default());
    let v1 = |m: &&Mount| m.fs_type == "cgroup" && m.option("memory").is_some();
    let v2 = |m: &&Mount| m.fs_type == "cgroup2";
    let mut tightest: Option<MemoryCgroup> = None;
    for line in memberships.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let found = if controllers.is_empty() {
            mounts.iter().find(v2).and_then(|mount| tightest_above(host, mount, path, read_v2))
        } else if controllers.split(',').any(|c| c == "memory") {
            mounts.iter().find(v1).and_then(|mount| tightest_above(host, mount, path, read_v1))
        } else {
            None
        };
        tightest = tighter(tightest, found);
    }
    tightest
}

fn tighter(a: Option<MemoryCgroup>, b: Option<MemoryCgroup>) -> Option<MemoryCgroup> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.room_bytes() < a.room_bytes() { b } else { a }),
        (a, b) => a.or(b),
    }
}

/// Reads limit and use of the cgroup in a directory. None if it has no limit.
type Read = fn(&Host, &Path) -> Option<(u64, u64)>;

fn tightest_above(host: &Host, mount: &Mount, path: &str, read: Read) -> Option<MemoryCgroup> {
    let path = Path::new(path);
    let below = path.strip_prefix(&mount.root).ok().filter(|below| {
        below.components().all(|c| matches!(c, Component::Normal(_))) && host.has(mount.point.join(below))
    });
    let mut at = below.unwrap_or(Path::new("")).to_owned();
    let mut tightest = None;
    loop {
        if let Some((limit_bytes, used_bytes)) = read(host, &mount.point.join(&at)) {
            let here = MemoryCgroup { path: mount.root.join(&at), limit_bytes, used_bytes };
            tightest = tighter(tightest, Some(here));
        }
        if !at.pop() {
            return tightest;
        }
    }
}

fn read_v1(host: &Host, at: &Path) -> Option<(u64, u64)> {
    let limit = host.read_number(at.join("memory.limit_in_bytes")).filter(|&limit| limit < NO_LIMIT)?;
    let usage = host.read_number(at.join("memory.usage_in_bytes"))?;
    // Version 1 does not report how much of the slabs can be reclaimed.
    Some((limit, usage.saturating_sub(reclaimable(host, at, &["total_inactive_file", "total_active_file"]))))
}

fn read_v2(host: &Host, at: &Path) -> Option<(u64, u64)> {
    let limits = ["memory.max", "memory.high"].map(|file| host.read_number(at.join(file)));
    let limit = limits.into_iter().flatten().filter(|&limit| limit < NO_LIMIT).min()?;
    let usage = host.read_number(at.join("memory.current"))?;
    let keys = ["inactive_file", "active_file", "slab_reclaimable"];
    Some((limit, usage.saturating_sub(reclaimable(host, at, &keys))))
}

fn reclaimable(host: &Host, at: &Path, keys: &[&str]) -> u64 {
    let stat = host.read(at.join("memory.stat")).unwrap_or_default();
    let value = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        value.trim().parse::<u64>().ok().filter(|_| keys.contains(&key))
    };
    stat.lines().filter_map(value).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const GIB: u64 = 1 << 30;
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    const V2: &str = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    fn tightest(files: &[(&str, &str)]) -> Option<MemoryCgroup> {
        let scratch = Scratch::with(files);
        tightest_memory_cgroup(&Host::at(scratch.path()), None)
    }

    #[test]
    fn tightest_v2_high_of_a_parent_is_found_and_cache_is_not_use() {
        let found = tightest(&[
            ("proc/self/mountinfo", V2),
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.high", "max\n"),
            ("sys/fs/cgroup/job/step/memory.current", "5\n"),
            ("sys/fs/cgroup/job/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/job/memory.high", "4294967296\n"),
            ("sys/fs/cgroup/job/memory.current", "2147483648\n"),
            (
                "sys/fs/cgroup/job/memory.stat",
                "anon 7\ninactive_file 1073741000\nactive_file 800\nslab_reclaimable 24\n",
            ),
        ])
        .unwrap();
        assert_eq!(found, MemoryCgroup { path: "/job".into(), limit_bytes: 4 * GIB, used_bytes: GIB });
        assert_eq!(found.room_bytes(), 3 * GIB);
    }

    #[test]
    fn tightest_least_room_wins_over_least_limit() {
        let found = tightest(&[
            ("proc/self/mountinfo", V1),
            ("proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/a/b\n0::/\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "1073741824"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "0"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4294967296"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "4294967290"),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "inactive_file 4000\ntotal_inactive_file 3\ntotal_active_file 1\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4294967290"),
        ])
        .unwrap();
        assert_eq!((found.path, found.limit_bytes - found.used_bytes), ("/a".into(), 10));
    }

    #[test]
    fn tightest_in_a_container_the_mounted_cgroup_counts() {
        // Version 1 without a cgroup name space: the mount's root is the container's cgroup.
        let inside = "35 31 0:32 /docker/f00 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let limit = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1"),
        ];
        for path in ["4:memory:/docker/f00\n", "4:memory:/elsewhere\n", "4:memory:/../..\n"] {
            let mut files = vec![("proc/self/mountinfo", inside), ("proc/self/cgroup", path)];
            files.extend(limit);
            assert_eq!(tightest(&files).map(|c| c.limit_bytes), Some(1000), "{path}");
        }
    }

    #[test]
    fn tightest_without_limits_or_cgroups_is_none() {
        assert_eq!(tightest(&[]), None);
        let unlimited = [
            ("proc/self/mountinfo", V2),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max"),
            ("sys/fs/cgroup/memory.current", "12"),
        ];
        assert_eq!(tightest(&unlimited), None);
    }

    #[test]
    fn tightest_of_another_process_reads_its_cgroup() {
        let scratch = Scratch::with(&[
            ("proc/self/mountinfo", V2),
            ("proc/self/cgroup", "0::/\n"),
            ("proc/77/cgroup", "0::/tight\n"),
            ("sys/fs/cgroup/tight/memory.max", "77"),
            ("sys/fs/cgroup/tight/memory.current", "7"),
        ]);
        let host = Host::at(scratch.path());
        assert_eq!(tightest_memory_cgroup(&host, None), None);
        assert_eq!(tightest_memory_cgroup(&host, Some(77)).map(|c| c.room_bytes()), Some(70));
        assert_eq!(tightest_memory_cgroup(&host, Some(78)), None);
    }

    #[test]
    fn tightest_of_this_node_is_readable() {
        if let Some(cgroup) = tightest_memory_cgroup(&Host::this(), None) {
            assert!(cgroup.limit_bytes > 0 && cgroup.limit_bytes < NO_LIMIT, "{cgroup:?}");
        }
    }
}
