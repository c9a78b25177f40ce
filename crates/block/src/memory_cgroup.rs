//! Memory cgroups: a limited one for a run, so that its page cache is as small as is wanted, and leaving a limited one.
//!
//! The first hierarchy with a memory controller counts, version 1 or 2. A run's cgroup is made below this process's own
//! (version 1), or beside it (version 2, in which a cgroup with processes may not have limited children).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_sys::mounts::{self, Mount};
use forebay_sys::process::Stat;
use forebay_types::{Code, Error, Result};

/// What the names of cgroups of runs begin with: then the number and the start of the process that made it.
const PREFIX: &str = "forebay-run-";
/// How long the processes that a run left may take to end once they were killed.
const END_TIME: Duration = Duration::from_secs(10);
/// Least limit: below it most programs cannot start.
const BYTES_MIN: u64 = 4 << 20;
/// Limits from here on are none.
const NO_LIMIT: u64 = 1 << 60;

/// Where this process is in the hierarchy of memory cgroups.
#[derive(Debug)]
struct Own {
    is_v2: bool,
    /// The hierarchy's root, as far as it is mounted here.
    root: PathBuf,
    /// The directory of this process's cgroup.
    dir: PathBuf,
}

fn own() -> io::Result<Option<Own>> {
    let memberships = fs::read_to_string("/proc/self/cgroup")?;
    let mounts = mounts::parse(&fs::read("/proc/self/mountinfo")?);
    let v1 = |m: &&Mount| m.fs_type == "cgroup" && m.option("memory").is_some();
    let v2 = |m: &&Mount| m.fs_type == "cgroup2";
    for line in memberships.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (is_v2, mount) = match controllers {
            "" => (true, mounts.iter().find(v2)),
            list if list.split(',').any(|c| c == "memory") => (false, mounts.iter().find(v1)),
            _ => continue,
        };
        let Some(mount) = mount else { continue };
        // A hierarchy of version 2 beside one of version 1 has no memory controller.
        let controllers = fs::read_to_string(mount.point.join("cgroup.controllers")).unwrap_or_default();
        if is_v2 && !controllers.split_ascii_whitespace().any(|c| c == "memory") {
            continue;
        }
        let below = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
        let dir = mount.point.join(below);
        let dir = if dir.is_dir() { dir } else { mount.point.clone() };
        return Ok(Some(Own { is_v2, root: mount.point.clone(), dir }));
    }
    Ok(None)
}

fn limit_of(dir: &Path, is_v2: bool) -> u64 {
    let name = if is_v2 { "memory.max" } else { "memory.limit_in_bytes" };
    fs::read_to_string(dir.join(name)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX)
}

/// Moves this process to the root of its hierarchy if a memory cgroup limits it. True if it had to.
pub fn leave_limited() -> io::Result<bool> {
    let Some(own) = own()? else { return Ok(false) };
    let is_limited = own
        .dir
        .ancestors()
        .take_while(|dir| dir.starts_with(&own.root))
        .any(|dir| limit_of(dir, own.is_v2) < NO_LIMIT);
    if !is_limited {
        return Ok(false);
    }
    fs::write(own.root.join("cgroup.procs"), "0")?;
    // In a container the root that is visible may be the limited one.
    match limit_of(&own.root, own.is_v2) < NO_LIMIT {
        true => Err(io::Error::other("the root of the memory cgroups that is visible here has a limit too")),
        false => Ok(true),
    }
}

/// A memory cgroup for one run. Dropping it ends what is left in it, and removes it.
#[derive(Debug)]
pub struct Limited {
    dir: PathBuf,
    is_v2: bool,
}

fn failed(bytes: u64) -> impl Fn(io::Error) -> Error {
    move |e| {
        let denied = matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS));
        let error = Error::io(format!("cannot limit the run's memory to {bytes} bytes"), &e);
        match denied {
            true => error.cure("run it as root, or have a memory cgroup delegated to you"),
            false => error,
        }
    }
}

impl Limited {
    /// Makes a cgroup whose processes together have `bytes` of memory, page cache included.
    ///
    /// # Errors
    /// With what to do where there is no memory controller, or no permission.
    pub fn new(bytes: u64) -> Result<Limited> {
        let what = || format!("cannot limit the run's memory to {bytes} bytes");
        if bytes < BYTES_MIN {
            return Err(Error::new(Code::Invalid, what())
                .why("programs do not start with so little")
                .cure(format!("give it at least {} MiB", BYTES_MIN >> 20)));
        }
        let Some(own) = own().map_err(failed(bytes))? else {
            return Err(Error::new(Code::NotSupported, what())
                .why("no cgroup hierarchy with a memory controller is mounted")
                .cure("mount one: mount -t cgroup -o memory memory /sys/fs/cgroup/memory"));
        };
        let parent = match own.is_v2 && own.dir != own.root {
            true => own.dir.parent().unwrap_or(&own.root).to_owned(),
            false => own.dir,
        };
        sweep(&parent);
        if own.is_v2 {
            let enabled = fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
            if !enabled.split_ascii_whitespace().any(|c| c == "memory") {
                fs::write(parent.join("cgroup.subtree_control"), "+memory").map_err(failed(bytes))?;
            }
        }
        let pid = std::process::id();
        let start = Stat::of(pid).map_or(0, |stat| stat.start_ticks);
        let dir = parent.join(format!("{PREFIX}{pid}-{start}"));
        fs::create_dir(&dir).map_err(failed(bytes))?;
        let limited = Limited { dir, is_v2: own.is_v2 };
        // Without a limit of swap the limit would be one of page cache and memory that the kernel may exceed by swapping.
        let (limit, swap, most) = match own.is_v2 {
            true => ("memory.max", "memory.swap.max", 0),
            false => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", bytes),
        };
        fs::write(limited.dir.join(limit), bytes.to_string()).map_err(failed(bytes))?;
        // A kernel without swap accounting lacks the file.
        let _ = fs::write(limited.dir.join(swap), most.to_string());
        Ok(limited)
    }

    /// The file to which a process writes `0` to enter.
    pub fn entrance(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }

    /// Most memory that its processes had at the same time, if the kernel says so.
    pub fn peak_bytes(&self) -> Option<u64> {
        let name = if self.is_v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.dir.join(name)).ok()?.trim().parse().ok()
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

/// Kills what is in a cgroup, and removes it.
fn remove(dir: &Path) {
    let until = Instant::now() + END_TIME;
    while fs::remove_dir(dir).is_err() && dir.is_dir() && Instant::now() < until {
        let left = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        for pid in left.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 1) {
            // SAFETY: plain system call.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Removes cgroups of runs whose process was killed.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((pid, start)) = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')) else {
            continue;
        };
        let (Ok(pid), Ok(start)) = (pid.parse::<u32>(), start.parse::<u64>()) else { continue };
        if !Stat::of(pid).is_ok_and(|stat| stat.start_ticks == start && !stat.has_ended()) {
            remove(&entry.path());
        }
    }
}
