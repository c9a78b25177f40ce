//! The capacity that a pool may have on a node, given the medium and the tightest memory cgroup.
//!
//! A pool that outgrows its medium must get ENOSPC and must not meet the OOM killer. So `up` refuses a capacity that
//! exceeds some bound. Bounds in memory keep a reserve for the daemon, its clients and the kernel. A pool that is
//! started again on its old directory already fills a part of its bounds, which counts as free.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::str::FromStr;

use forebay_types::limits::{
    CAPACITY_BYTES_MIN, CAPACITY_DRAM_PERCENT, CAPACITY_SSD_PERCENT, MEMORY_RESERVE_BYTES_MIN,
    MEMORY_RESERVE_PERCENT,
};
use forebay_types::{Code, Error, Result};

use crate::cgroup::tightest_memory_cgroup;
use crate::host::Host;
use crate::probe::is_memory;
use crate::size::format_size;

/// Capacities are whole huge pages.
const GRAIN_BYTES: u64 = 2 << 20;
/// A message advises this fraction less than the usable bytes, as free space changes while the user reads the message.
const ADVICE_MARGIN: u64 = 16;

/// The medium of a target, as `--media` names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// Memory: tmpfs.
    Dram,
    /// A file system on a disk of the node.
    Ssd,
}

impl FromStr for Medium {
    type Err = Error;

    fn from_str(text: &str) -> Result<Medium> {
        match text {
            "dram" => Ok(Medium::Dram),
            "ssd" => Ok(Medium::Ssd),
            _ => {
                Err(Error::new(Code::Invalid, format!("`{text}` is not a medium")).cure("write dram or ssd"))
            }
        }
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Medium::Dram => "dram",
            Medium::Ssd => "ssd",
        })
    }
}

/// A limit of a pool's capacity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// The name in messages, such as `memory cgroup /job_7`.
    pub name: String,
    /// Its size.
    pub total_bytes: u64,
    /// What is free.
    pub free_bytes: u64,
    /// The bytes of it that must stay free.
    pub reserve_bytes: u64,
    /// How the user can raise it.
    pub cure: &'static str,
}

impl Bound {
    /// The largest capacity within this bound.
    pub fn usable_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.reserve_bytes) / GRAIN_BYTES * GRAIN_BYTES
    }

    fn of_memory(name: String, total_bytes: u64, free_bytes: u64, cure: &'static str) -> Bound {
        Bound { name, total_bytes, free_bytes, reserve_bytes: memory_reserve(total_bytes), cure }
    }
}

/// All limits of the capacity of a pool on this node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// The target's medium.
    pub medium: Medium,
    /// In no order; at least one.
    pub bounds: Vec<Bound>,
}

/// The bytes that must stay free of a memory of `total_bytes`.
pub(crate) fn memory_reserve(total_bytes: u64) -> u64 {
    (total_bytes / 100 * MEMORY_RESERVE_PERCENT).max(MEMORY_RESERVE_BYTES_MIN)
}

impl Bounds {
    /// The bounds for a target on `medium`: in `directory`, or in a tmpfs that is still to be mounted. `name` is the
    /// directory's name in messages. If the directory is on a tmpfs, bounds of memory apply whatever `medium` is.
    pub fn of(host: &Host, medium: Medium, directory: Option<(BorrowedFd<'_>, &Path)>) -> Result<Bounds> {
        let mut bounds = Vec::new();
        let mut in_memory = medium == Medium::Dram;
        if let Some((directory, name)) = directory {
            let failed = |e: rustix::io::Errno| {
                Error::io(format!("cannot read the space of {}", name.display()), &e.into())
            };
            let space = rustix::fs::fstatvfs(directory).map_err(failed)?;
            in_memory |= is_memory(directory).map_err(failed)?;
            bounds.push(Bound {
                name: format!("the file system of {}", name.display()),
                total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
                free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
                reserve_bytes: 0,
                cure: "free some of it, or give a directory on a larger one with --path",
            });
        }
        if in_memory {
            bounds.push(node_memory(host)?);
            bounds.extend(tightest_memory_cgroup(host, None).map(|cgroup| {
                let name = format!("memory cgroup {}", cgroup.path.display());
                let cure =
                    "ask the batch system for more memory (Slurm: --mem), or start it outside the cgroup";
                Bound::of_memory(name, cgroup.limit_bytes, cgroup.room_bytes(), cure)
            }));
        }
        Ok(Bounds { medium, bounds })
    }

    /// Counts `bytes` that the pool occupies already as free.
    pub fn holding(mut self, bytes: u64) -> Bounds {
        for bound in &mut self.bounds {
            bound.free_bytes = bound.free_bytes.saturating_add(bytes).min(bound.total_bytes);
        }
        self
    }

    /// Counts `bytes` of memory that are promised to the pool's other targets as used.
    pub fn promised(mut self, bytes: u64) -> Bounds {
        for bound in &mut self.bounds {
            bound.free_bytes = bound.free_bytes.saturating_sub(bytes);
        }
        self
    }

    /// The bound with the fewest usable bytes.
    pub fn tightest(&self) -> Result<&Bound> {
        let least = self.bounds.iter().min_by_key(|bound| bound.usable_bytes());
        least.ok_or_else(|| Error::new(Code::Invalid, "no bound of the capacity is known"))
    }
}

fn node_memory(host: &Host) -> Result<Bound> {
    let text = host.read("/proc/meminfo").map_err(|e| {
        Error::io("cannot read /proc/meminfo", &e).cure("give a capacity on an SSD: --media ssd")
    })?;
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    // MemAvailable exists since Linux 3.14.
    match (value("MemTotal"), value("MemAvailable").or_else(|| value("MemFree"))) {
        (Some(total), Some(free)) => {
            let cure = "end what takes the memory, or use an SSD: --media ssd --path DIR";
            Ok(Bound::of_memory("the memory of this node".to_owned(), total, free, cure))
        }
        _ => Err(Error::new(Code::Corrupt, "cannot find MemTotal and MemAvailable in /proc/meminfo")),
    }
}

/// The default capacity of a pool: half of the free memory, or 80 % of the free space of an SSD, and never more than
/// [`check_capacity`] accepts.
pub fn default_capacity(bounds: &Bounds) -> Result<u64> {
    let tightest = bounds.tightest()?;
    let percent = match bounds.medium {
        Medium::Dram => CAPACITY_DRAM_PERCENT,
        Medium::Ssd => CAPACITY_SSD_PERCENT,
    };
    let free_bytes = bounds.bounds.iter().map(|bound| bound.free_bytes).min().unwrap_or(0);
    let share = free_bytes / 100 * percent / GRAIN_BYTES * GRAIN_BYTES;
    let capacity = share.min(tightest.usable_bytes());
    if capacity < CAPACITY_BYTES_MIN {
        return Err(too_large(CAPACITY_BYTES_MIN, "the smallest pool takes", tightest));
    }
    Ok(capacity)
}

/// Refuses a capacity of `asked_bytes` below the smallest possible ([`Code::Invalid`]) or above some bound
/// ([`Code::NoSpace`]). The error names both numbers.
pub fn check_capacity(asked_bytes: u64, bounds: &Bounds) -> Result<()> {
    if asked_bytes < CAPACITY_BYTES_MIN {
        let what = format!("a pool cannot have a capacity of {}", format_size(asked_bytes));
        return Err(Error::new(Code::Invalid, what)
            .why(format!("the smallest pool takes {}", format_size(CAPACITY_BYTES_MIN)))
            .cure(format!("ask for more: --capacity {}", compact(CAPACITY_BYTES_MIN))));
    }
    let tightest = bounds.tightest()?;
    if asked_bytes > tightest.usable_bytes() {
        return Err(too_large(asked_bytes, "asked for", tightest));
    }
    Ok(())
}

fn too_large(bytes: u64, verb: &str, bound: &Bound) -> Error {
    let usable = bound.usable_bytes();
    let reserve = match bound.reserve_bytes {
        0 => String::new(),
        reserve => format!(" and {} stay in reserve", format_size(reserve)),
    };
    let why = format!(
        "{verb} {}, but {} has room for {} (of {}, {} are free{reserve})",
        format_size(bytes),
        bound.name,
        format_size(usable),
        format_size(bound.total_bytes),
        format_size(bound.free_bytes),
    );
    let advised = usable - usable / ADVICE_MARGIN;
    let less = match advised {
        0..CAPACITY_BYTES_MIN => String::new(),
        _ => format!("ask for less (--capacity {}), or ", compact(advised)),
    };
    Error::new(Code::NoSpace, "the capacity is too large").why(why).cure(format!("{less}{}", bound.cure))
}

/// A size as written on a command line.
fn compact(bytes: u64) -> String {
    format_size(bytes).replace(' ', "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::size::parse_size;
    use std::os::fd::AsFd;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str =
        "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\nShmem: 5 kB\n";

    fn memory_with(cgroup: &[(&str, &str)]) -> Bounds {
        let mut files = vec![
            ("proc/meminfo", MEMINFO),
            ("proc/self/mountinfo", "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("proc/self/cgroup", "0::/job_7\n"),
        ];
        files.extend(cgroup);
        let scratch = Scratch::with(&files);
        Bounds::of(&Host::at(scratch.path()), Medium::Dram, None).unwrap()
    }

    fn job_with_4_gib() -> Bounds {
        memory_with(&[
            ("sys/fs/cgroup/job_7/memory.max", "4294967296"),
            ("sys/fs/cgroup/job_7/memory.current", "1073741824"),
        ])
    }

    #[test]
    fn default_capacity_of_memory_is_half_of_what_is_free() {
        let half = default_capacity(&memory_with(&[])).unwrap();
        assert!(half.abs_diff(8 * GIB) <= GRAIN_BYTES, "{half}");
        let half = default_capacity(&job_with_4_gib()).unwrap();
        assert!(half > GIB && half <= 3 * GIB / 2, "{half}");
    }

    #[test]
    fn default_capacity_of_an_ssd_is_four_fifths_of_what_is_free() {
        let bound = Bound {
            name: "disk".into(),
            total_bytes: 100 * GIB,
            free_bytes: 10 * GIB,
            reserve_bytes: 0,
            cure: "",
        };
        let bounds = Bounds { medium: Medium::Ssd, bounds: vec![bound] };
        let capacity = default_capacity(&bounds).unwrap();
        assert!(capacity.abs_diff(8 * GIB) <= GRAIN_BYTES, "{capacity}");
        assert_eq!(bounds.clone().holding(40 * GIB).bounds[0].free_bytes, 50 * GIB);
        assert_eq!(bounds.holding(400 * GIB).bounds[0].free_bytes, 100 * GIB);
    }

    #[test]
    fn default_capacity_passes_the_check() {
        for bounds in [memory_with(&[]), job_with_4_gib()] {
            check_capacity(default_capacity(&bounds).unwrap(), &bounds).unwrap();
        }
    }

    #[test]
    fn default_capacity_without_room_says_what_is_short() {
        let bounds = memory_with(&[
            ("sys/fs/cgroup/job_7/memory.max", "134217728"),
            ("sys/fs/cgroup/job_7/memory.current", "33554432"),
        ]);
        let e = default_capacity(&bounds).unwrap_err();
        assert_eq!(e.code, Code::NoSpace);
        assert!(e.to_string().contains("/job_7") && e.to_string().contains("64 MiB"), "{e}");
        assert!(!e.cure.contains("--capacity"), "{e}");
    }

    #[test]
    fn check_capacity_beyond_the_memory_is_refused_with_both_numbers() {
        let e = check_capacity(20 * GIB, &memory_with(&[])).unwrap_err();
        assert_eq!(e.code, Code::NoSpace);
        let text = e.to_string();
        assert!(
            text.contains("20 GiB") && text.contains("14 GiB") && text.contains("memory of this node"),
            "{e}"
        );
    }

    #[test]
    fn check_capacity_beyond_the_cgroup_is_refused_and_the_cure_works() {
        let bounds = job_with_4_gib();
        let e = check_capacity(8 * GIB, &bounds).unwrap_err();
        assert_eq!(e.code, Code::NoSpace);
        assert!(e.why.contains("8 GiB") && e.why.contains("/job_7") && e.why.contains("4 GiB"), "{e}");
        let advised = e.cure.split_once("--capacity ").unwrap().1.split_once(')').unwrap().0;
        check_capacity(parse_size(advised).unwrap(), &bounds).unwrap();
        // The advice must also hold if a little less is free a moment later, as in a cgroup that is in use.
        check_capacity(parse_size(advised).unwrap(), &bounds.promised(64 << 20)).unwrap();
    }

    #[test]
    fn check_capacity_of_less_than_a_pool_is_refused() {
        let e = check_capacity(1000, &memory_with(&[])).unwrap_err();
        assert_eq!(e.code, Code::Invalid);
        check_capacity(CAPACITY_BYTES_MIN, &memory_with(&[])).unwrap();
    }

    #[test]
    fn bounds_of_a_directory_count_its_file_system() {
        let scratch = Scratch::new();
        let directory = std::fs::File::open(scratch.path()).unwrap();
        let at = Some((directory.as_fd(), scratch.path()));
        let bounds = Bounds::of(&Host::this(), Medium::Ssd, at).unwrap();
        assert!(bounds.bounds[0].total_bytes >= bounds.bounds[0].free_bytes);
        let e = check_capacity(1 << 62, &bounds).unwrap_err();
        assert_eq!(e.code, Code::NoSpace);
    }

    #[test]
    fn bounds_of_a_directory_in_memory_count_memory_whatever_the_medium() {
        let shm = Path::new("/dev/shm");
        let directory = std::fs::File::open(shm).unwrap();
        if !is_memory(directory.as_fd()).unwrap() {
            println!("skipped: /dev/shm is not a tmpfs here");
            return;
        }
        let bounds = Bounds::of(&Host::this(), Medium::Ssd, Some((directory.as_fd(), shm))).unwrap();
        assert!(bounds.bounds.iter().any(|b| b.name.contains("memory of this node")), "{bounds:?}");
    }

    #[test]
    fn medium_names_round_trip() {
        for medium in [Medium::Dram, Medium::Ssd] {
            assert_eq!(medium.to_string().parse::<Medium>().unwrap(), medium);
        }
        assert!("tape".parse::<Medium>().unwrap_err().cure.contains("dram"));
    }
}
