//! The mount compared with the medium below it, and with bindfs over tmpfs, a FUSE file system that passes requests on.

use crate::calls::{c_path, check, close, create};
use crate::gate::Gate;
use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::systems::{said, Pool, System};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Phases of the driver for names.
const NAMES: [&str; 4] = ["create", "cold stat", "warm stat", "unlink"];
/// Capacity of the pool for names.
const NAMES_CAPACITY_BYTES: u64 = 1 << 30;
/// Phases of the driver for mapped files.
const MAPPED: [&str; 2] = ["mapped write", "mapped read"];
/// Phases of the driver for data served by requests.
const TRANSFERS: [&str; 4] = ["first write", "rewrite", "read", READ_AGAIN];
const READ_AGAIN: &str = "read again";
/// Writing 1 here makes the kernel drop its cached data, 2 entries and inodes.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

const MOUNT: &str = "mount";
const REQUESTS: &str = "mount, by requests";
const MEDIUM: &str = "medium";
const BINDFS: &str = "bindfs";

/// A file system mounted for the measurement; dropping it unmounts it.
struct Mounted {
    at: PathBuf,
    unmount: Command,
}

impl Mounted {
    fn new(at: PathBuf, mount: &mut Command, unmount: Command) -> Result<Mounted, String> {
        std::fs::create_dir(&at).map_err(|e| format!("{}: {e}", at.display()))?;
        let mounted = Mounted { at, unmount };
        said(mount.arg(&mounted.at))?;
        Ok(mounted)
    }

    fn forebay(pool: &Pool, name: &str, options: &[&str]) -> Result<Mounted, String> {
        let at = std::env::temp_dir().join(format!("forebay-bench-{name}-{}", std::process::id()));
        let (mut mount, mut unmount) = (pool.command(), pool.command());
        mount.arg("mount").args(options);
        unmount.arg("umount").arg(&at);
        Mounted::new(at, &mut mount, unmount)
    }

    fn bindfs(over: &Path) -> Result<Mounted, String> {
        let at = std::env::temp_dir().join(format!("forebay-bench-bindfs-{}", std::process::id()));
        let (mut mount, mut unmount) = (Command::new("bindfs"), Command::new("umount"));
        mount.args(["-o", "big_writes"]).arg(over);
        unmount.arg(&at);
        Mounted::new(at, &mut mount, unmount)
    }

    fn system(&self, name: &str) -> Result<System<'static>, String> {
        System::at(name, &self.at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(message) = said(&mut self.unmount) {
            eprintln!("forebay-bench: {message}");
        }
        std::fs::remove_dir(&self.at).ok();
    }
}

/// The tables, if a file system can be mounted here; otherwise prints the reason.
pub(crate) fn measure(pool: &Pool, tmpfs: &Path, sizes: &crate::sizes::Sizes) -> Result<Vec<Table>, String> {
    let mounted = match Mounted::forebay(pool, MOUNT, &[]) {
        Ok(mounted) => mounted,
        Err(message) => {
            println!("\n(e) the mount is left out: {message}");
            return Ok(Vec::new());
        }
    };
    let medium = pool.target();
    if !medium.is_dir() {
        println!("\n(e) the mount is left out: its medium has no path here ({})", medium.display());
        return Ok(Vec::new());
    }
    let bindfs = match Mounted::bindfs(tmpfs) {
        Ok(mounted) => Some(mounted),
        Err(message) => {
            println!("\n(e) without bindfs: {message}");
            None
        }
    };
    let against = |first: System<'static>| -> Result<Vec<System<'static>>, String> {
        let other = bindfs.as_ref().map(|bindfs| bindfs.system(BINDFS)).transpose()?;
        Ok(std::iter::once(first).chain(other).collect())
    };
    let mut tables = Vec::new();
    {
        let with_bindfs = against(mounted.system(MOUNT)?)?;
        let with_medium = [mounted.system("mount")?, System::at(MEDIUM, &medium)?];
        tables.extend(names_alone_and_not(pool, &against, sizes)?);
        tables.push(data(&with_medium, sizes)?);
        tables.push(builds(&with_bindfs, &with_medium[1], sizes)?);
    }
    // A pool can have only one mount.
    drop(mounted);
    let requests = Mounted::forebay(pool, "requests", &["--no-passthrough"])?;
    let by_requests = against(requests.system(REQUESTS)?)?;
    tables.push(transfers(&by_requests, sizes)?);
    drop(by_requests);
    Ok(tables)
}

fn columns(systems: &[System<'_>]) -> Vec<String> {
    systems.iter().map(|s| s.name.clone()).collect()
}

fn target(against: &str, at_least: f64) -> Vec<Target> {
    vec![Target::Ratio { against: against.into(), at_least }]
}

/// Names in a pool that no program has used through another interface, so that the kernel may cache the attributes of
/// files as with bindfs; then names in a pool that programs have used.
fn names_alone_and_not(
    pool: &Pool,
    against: &dyn Fn(System<'static>) -> Result<Vec<System<'static>>, String>,
    sizes: &crate::sizes::Sizes,
) -> Result<[Table; 2], String> {
    let pool = pool.another(NAMES_CAPACITY_BYTES)?;
    let mounted = Mounted::forebay(&pool, "names", &[])?;
    let systems = against(mounted.system(MOUNT)?)?;
    let alone = names(&systems, sizes, "alone", true)?;
    said(pool.command().args(["run", "--", "ls", "/forebay"]))?;
    let not_alone = names(&systems, sizes, "after programs by another door", false)?;
    drop(systems);
    Ok([alone, not_alone])
}

fn names(
    systems: &[System<'_>],
    sizes: &crate::sizes::Sizes,
    how: &str,
    targets: bool,
) -> Result<Table, String> {
    let mut table = Table {
        title: format!("(e) names through the mount, {how}, {} files a process", sizes.files),
        unit: "operations/s",
        more_is_better: true,
        columns: columns(systems),
        rows: Vec::new(),
    };
    for repetition in 0..sizes.repetitions {
        for processes in [1, 2] {
            for column in crate::systems::turns(systems, repetition) {
                let orders = Orders { processes, files: sizes.files, ..Orders::default() };
                let rates = systems[column].drive("names", &orders)?;
                for phase in NAMES {
                    let Some((_, rate)) = rates.iter().find(|(name, _)| name == phase) else { continue };
                    table.add(&format!("{phase}: {processes}"), column, *rate, || {
                        if targets {
                            target(BINDFS, 1.0)
                        } else {
                            Vec::new()
                        }
                    });
                }
            }
        }
    }
    table.rows.sort_by_key(|row| NAMES.iter().position(|p| row.label.starts_with(&format!("{p}:"))));
    Ok(table)
}

/// The phases of drivers for several block sizes, on all systems.
fn throughput(
    systems: &[System<'_>],
    sizes: &crate::sizes::Sizes,
    title: &str,
    (drivers, blocks): (&[&str], &[usize]),
    targets: impl Fn(&str) -> Vec<Target>,
) -> Result<Table, String> {
    let mut table = Table {
        title: format!("{title}, {} MiB", sizes.bytes / MIB),
        unit: "GB/s",
        more_is_better: true,
        columns: columns(systems),
        rows: Vec::new(),
    };
    for repetition in 0..sizes.repetitions {
        for &block in blocks {
            for column in crate::systems::turns(systems, repetition) {
                let orders = Orders { bytes: sizes.bytes, block, ..Orders::default() };
                for driver in drivers {
                    for (phase, rate) in systems[column].drive(driver, &orders)? {
                        let label = format!("{phase}, {} KiB", block / KIB);
                        table.add(&label, column, rate, || targets(&phase));
                    }
                }
            }
        }
    }
    table.rows.sort_by(|a, b| a.label.split(',').next().cmp(&b.label.split(',').next()));
    Ok(table)
}

fn data(systems: &[System<'_>], sizes: &crate::sizes::Sizes) -> Result<Table, String> {
    let how = (["data", "mapped"].as_slice(), [4 * KIB, 128 * KIB, MIB].as_slice());
    throughput(systems, sizes, "(e) data through the mount", how, |_| target(MEDIUM, 0.95))
}

/// Data that passthrough cannot serve go by requests. bindfs lets the kernel cache data that it read or wrote, and gets
/// no request the second time. So only the first read compares requests.
fn transfers(systems: &[System<'_>], sizes: &crate::sizes::Sizes) -> Result<Table, String> {
    let how = (["transfers"].as_slice(), [128 * KIB, MIB].as_slice());
    throughput(systems, sizes, "(e) data that passthrough cannot serve", how, |phase| match phase {
        READ_AGAIN => Vec::new(),
        _ => target(BINDFS, 1.0),
    })
}

/// Times of building a tree of C sources.
fn builds(mounts: &[System<'_>], medium: &System<'_>, sizes: &crate::sizes::Sizes) -> Result<Table, String> {
    let systems: Vec<&System<'_>> = mounts.iter().chain([medium]).collect();
    let mut table = Table {
        title: "(e) a source tree unpacked and built (bench/tree)".into(),
        unit: "s",
        more_is_better: false,
        columns: systems.iter().map(|s| s.name.clone()).collect(),
        rows: Vec::new(),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tree");
    for repetition in 0..sizes.repetitions {
        for i in 0..systems.len() {
            let column = (i + repetition) % systems.len();
            let root = systems[column].root.join("tree");
            let start = Instant::now();
            said(Command::new("sh").arg(&script).arg(&root))?;
            table.add("source-tree build", column, start.elapsed().as_secs_f64(), Vec::new);
            std::fs::remove_dir_all(&root).map_err(|e| format!("{}: {e}", root.display()))?;
        }
    }
    Ok(table)
}

/// Operations per second on names. Without permission to drop the kernel's caches there is no cold stat.
pub(crate) fn drive_names(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let can_drop = std::fs::write(DROP_CACHES, "2").is_ok();
    let seconds = Gate::run(orders.processes, |gate| {
        let (mine, next) = (gate.process, (gate.process + 1) % orders.processes);
        let names = |who: usize| -> Vec<CString> {
            (0..orders.files).map(|i| c_path(&orders.root, &format!("file.{who}.{i}"))).collect()
        };
        let (own, theirs) = (names(mine), names(next));
        gate.timed(|| own.iter().try_for_each(|path| create(path).map(close)))?;
        if can_drop {
            if gate.process == 0 {
                std::fs::write(DROP_CACHES, "2").map_err(|e| format!("{DROP_CACHES}: {e}"))?;
            }
            gate.timed(|| theirs.iter().try_for_each(crate::meta::stat))?;
        } else {
            theirs.iter().try_for_each(crate::meta::stat)?;
        }
        gate.timed(|| theirs.iter().try_for_each(crate::meta::stat))?;
        gate.timed(|| {
            own.iter().try_for_each(|path| {
                // SAFETY: the string ends in NUL.
                check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", path)
            })
        })
    })?;
    let operations = (orders.files * orders.processes) as f64;
    let phases = NAMES.into_iter().filter(|phase| can_drop || *phase != "cold stat");
    Ok(phases.zip(seconds).map(|(phase, s)| (phase, operations / s)).collect())
}

/// GB/s of stores into and loads from a mapped file; its memory is allocated in advance.
pub(crate) fn drive_mapped(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let seconds = Gate::run(1, |gate| {
        let path = c_path(&orders.root, "mapped");
        // SAFETY: the string ends in NUL.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o644) };
        check(fd, "open", &path)?;
        // SAFETY: a descriptor of ours.
        check(unsafe { libc::posix_fallocate(fd, 0, orders.bytes as i64).min(0) }, "posix_fallocate", &path)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), orders.bytes, protection, libc::MAP_SHARED, fd, 0) };
        if at == libc::MAP_FAILED {
            return check(-1, "mmap", &path);
        }
        // SAFETY: mapped above for its length, and by nobody else.
        let memory = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), orders.bytes) };
        let mut block = vec![7; orders.block];
        // One untimed pass: memory that the machine has not used recently is slow, in any file.
        memory.fill(0);
        gate.timed(|| {
            memory.chunks_exact_mut(block.len()).for_each(|to| to.copy_from_slice(&block));
            Ok(())
        })?;
        gate.timed(|| {
            memory.chunks_exact(block.len()).for_each(|from| block.copy_from_slice(from));
            Ok(())
        })?;
        if block.iter().any(|b| *b != 7) {
            return Err("read other bytes than it stored".into());
        }
        // SAFETY: the mapping is ours and no longer used.
        unsafe { libc::munmap(at, orders.bytes) };
        close(fd);
        // SAFETY: the string ends in NUL.
        check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", &path)
    })?;
    Ok(MAPPED.into_iter().zip(seconds.iter().map(|s| orders.bytes as f64 / s / 1e9)).collect())
}

/// GB/s of writing a file twice and reading it twice; before the reads the kernel's cache is dropped.
pub(crate) fn drive_transfers(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let seconds = Gate::run(1, |gate| {
        let path = c_path(&orders.root, "transferred");
        // SAFETY: the string ends in NUL.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o644) };
        check(fd, "open", &path)?;
        let mut block = vec![7u8; orders.block];
        let offsets = || (0..orders.bytes / orders.block).map(|i| (i * orders.block) as i64);
        for _ in 0..2 {
            gate.timed(|| {
                offsets().try_for_each(|at| {
                    // SAFETY: the bytes are ours and of the length given.
                    let n = unsafe { libc::pwrite(fd, block.as_ptr().cast(), block.len(), at) };
                    crate::data::whole(n, block.len(), "pwrite")
                })
            })?;
        }
        // Only data that were written back can be dropped from the cache.
        // SAFETY: a descriptor of ours.
        check(unsafe { libc::fsync(fd) }, "fsync", &path)?;
        std::fs::write(DROP_CACHES, "1").map_err(|e| format!("{DROP_CACHES}: {e}"))?;
        for _ in 0..2 {
            block.fill(0);
            gate.timed(|| {
                offsets().try_for_each(|at| {
                    // SAFETY: the buffer is ours and of the length given.
                    let n = unsafe { libc::pread(fd, block.as_mut_ptr().cast(), block.len(), at) };
                    crate::data::whole(n, block.len(), "pread")
                })
            })?;
            if block.iter().any(|b| *b != 7) {
                return Err("read other bytes than it wrote".into());
            }
        }
        close(fd);
        // SAFETY: the string ends in NUL.
        check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", &path)
    })?;
    Ok(TRANSFERS.into_iter().zip(seconds.iter().map(|s| orders.bytes as f64 / s / 1e9)).collect())
}
