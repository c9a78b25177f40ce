//! Pools and programs in a memory cgroup of the kernel: how much memory counts as free, and the warning for a program
//! in a tighter cgroup. Skipped where no cgroup can be made.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{eventually, forebay, Place, Ran};

const MIB: u64 = 1 << 20;
const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";

/// A memory cgroup of one test, removed when dropped.
struct Cgroup {
    path: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    fn new(name: &str, limit_bytes: u64) -> Option<Cgroup> {
        let name = format!("fbt-{}-{name}", std::process::id());
        let (path, limit) = match Path::new(V1).join("memory.limit_in_bytes").exists() {
            true => (Path::new(V1).join(name), "memory.limit_in_bytes"),
            false => (Path::new(V2).join(name), "memory.max"),
        };
        std::fs::create_dir(&path).ok()?;
        let cgroup = Cgroup { path, limit };
        cgroup.limit_to(limit_bytes).then_some(cgroup)
    }

    fn limit_to(&self, bytes: u64) -> bool {
        // Swap is disabled where it exists, since swapped pages do not count towards the memory limit. Version 1 has a
        // limit for memory and one for memory with swap, and the second must never be below the first.
        let with_swap = |name: &str, value: &str| {
            let file = self.path.join(name);
            if file.exists() {
                let _ = std::fs::write(file, value);
            }
        };
        with_swap("memory.swap.max", "0");
        with_swap("memory.memsw.limit_in_bytes", &bytes.to_string());
        let done = std::fs::write(self.path.join(self.limit), bytes.to_string()).is_ok();
        with_swap("memory.memsw.limit_in_bytes", &bytes.to_string());
        done
    }

    /// Runs a command in the cgroup.
    fn run(&self, place: &Place, words: &[&str]) -> Ran {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        command.args(words);
        place.dress(&mut command);
        Ran::of(command.output().unwrap())
    }

    /// `forebay` with these arguments.
    fn forebay(&self, place: &Place, words: &[&str]) -> Ran {
        let mut all = vec![forebay().to_str().unwrap()];
        all.extend(words);
        self.run(place, &all)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The directory can be removed when the cgroup's processes have ended; they have, or are about to.
        for _ in 0..500 {
            if std::fs::remove_dir(&self.path).is_ok() || !self.path.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn up_in_a_cgroup_counts_cached_files_as_free() {
    let place = Place::new();
    let Some(cgroup) = Cgroup::new("cache", 512 * MIB) else {
        println!("skipped: no memory cgroup can be made here");
        return;
    };
    // Nearly all of the cgroup's memory is page cache, read several times and thus active. The kernel still reclaims it
    // for a page of tmpfs.
    let big = place.write("big", vec![5u8; 400 << 20]);
    let file = std::fs::File::open(&big).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let read = format!("for i in 1 2 3; do cat {} > /dev/null; done", big.display());
    assert_eq!(cgroup.run(&place, &["sh", "-c", &read]).code, Some(0));
    let stat = std::fs::read_to_string(cgroup.path.join("memory.stat")).unwrap();
    let active =
        stat.lines().rev().find_map(|l| l.split_once("active_file ")?.1.parse::<u64>().ok()).unwrap();
    if active < 300 * MIB {
        println!("skipped: the cache is not charged here: {stat}");
        return;
    }
    let up = cgroup.forebay(&place, &["up", "--capacity", "256MiB"]);
    assert_eq!(up.code, Some(0), "{up:?}");
    // The pool really gets the promised space, when a program in the same cgroup writes it.
    let fill = "dd if=/dev/zero of=/forebay/fill bs=1M count=200 status=none";
    let ran = cgroup.forebay(&place, &["run", "--", "sh", "-c", fill]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.err.contains("warning"), "the pool is no larger than the cgroup's room: {ran:?}");
    place.ok(["down"]);
    // The figure that a refusal names is accepted.
    let refused = cgroup.forebay(&place, &["up", "--capacity", "2GiB"]);
    refused.assert_refused(1, &["too large", "memory cgroup", "ask for less"]);
    let advised = refused.err.split_once("--capacity ").unwrap().1.split_once(')').unwrap().0;
    let up = cgroup.forebay(&place, &["up", "--capacity", advised]);
    assert_eq!(up.code, Some(0), "{advised}: {up:?}");
    place.ok(["down"]);
    place.assert_nothing_left();
}

#[test]
fn files_and_volumes_fill_the_pool_in_a_cgroup_and_no_process_is_killed() {
    let place = Place::new();
    let Some(cgroup) = Cgroup::new("volumes", 512 * MIB) else {
        println!("skipped: no memory cgroup can be made here");
        return;
    };
    let refused = cgroup.forebay(&place, &["up", "--capacity", "2GiB"]);
    let advised = refused.err.split_once("--capacity ").unwrap().1.split_once(')').unwrap().0;
    assert_eq!(cgroup.forebay(&place, &["up", "--capacity", advised]).code, Some(0));
    let status = || place.json(["status", "--json"]);
    let free = || status()["free_bytes"].as_u64().unwrap();
    let before = free();
    let half = format!("{}MiB", before / 2 / MIB);
    let ok = |words: &[&str]| {
        let ran = cgroup.forebay(&place, words);
        assert_eq!(ran.code, Some(0), "{words:?}: {ran:?}");
    };
    ok(&["volume", "create", "v", "--size", &half]);
    ok(&["volume", "format", "v"]);
    cgroup
        .forebay(&place, &["volume", "create", "w", "--size", advised])
        .assert_refused(1, &["are needed on node 1"]);
    // Files get the rest, to the last page.
    let fill = "dd if=/dev/zero of=/forebay/fill bs=1M status=none; test $? = 1 && stat -c %s /forebay/fill";
    let filled = cgroup.forebay(&place, &["run", "--quiet", "--", "sh", "-c", fill]);
    let bytes: u64 = filled.out.trim().parse().unwrap_or_else(|_| panic!("{filled:?}"));
    assert!(bytes.abs_diff(before / 2) < 4 * MIB && free() < 2 * MIB, "{bytes} of {before}");
    // The kernel's own count: no process of the cgroup was killed for lack of memory.
    let events = ["memory.events", "memory.oom_control"].map(|name| cgroup.path.join(name));
    let kills = events.iter().find_map(|file| {
        let text = std::fs::read_to_string(file).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse::<u64>().ok())
    });
    assert_eq!((kills, status()["restarts"].as_u64()), (Some(0), Some(0)));
    // What the volume gives back, files get.
    ok(&["volume", "delete", "v"]);
    eventually("the space is free", || free() > before / 2 - 4 * MIB);
    let more = "dd if=/dev/zero of=/forebay/more bs=1M count=50 status=none";
    ok(&["run", "--quiet", "--", "sh", "-c", more]);
    place.ok(["down"]);
}

#[test]
fn program_in_a_tighter_cgroup_than_the_pool_is_warned() {
    let place = Place::new();
    let Some(cgroup) = Cgroup::new("tight", 128 * MIB) else {
        println!("skipped: no memory cgroup can be made here");
        return;
    };
    place.ok(["up", "--capacity", "512MiB"]);
    let name = cgroup.path.file_name().unwrap().to_str().unwrap();
    let ran = cgroup.forebay(&place, &["run", "--", "sh", "-c", "echo x > /forebay/small"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for word in ["warning: memory cgroup", name, "128 MiB", "the kernel kills it", "hint:"] {
        assert!(ran.err.contains(word), "{word}: {ran:?}");
    }
    // The warning is true: a program that writes more into the pool is killed while the pool still has space.
    let fill = "dd if=/dev/zero of=/forebay/fill bs=1M count=300 status=none";
    let ran = cgroup.forebay(&place, &["run", "--", "sh", "-c", fill]);
    assert!(ran.code != Some(0) && ran.err.contains("warning: memory cgroup"), "{ran:?}");
    // With enough memory there is no warning.
    place.ok(["run", "--quiet", "--", "rm", "-f", "/forebay/fill"]);
    assert!(cgroup.limit_to(1024 * MIB));
    let ran = cgroup.forebay(&place, &["run", "--", "true"]);
    assert!(!ran.err.contains("warning"), "{ran:?}");
    place.ok(["down"]);
    eventually("the pool is gone", || place.pools().is_empty());
    place.assert_nothing_left();
}
