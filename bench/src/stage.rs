//! Staging in and out, compared with common copy tools. All sources are in the page cache or in memory. The other tools
//! copy to tmpfs the data that Forebay stages into its pool. After Forebay's stage-out all data are on the disk, so the
//! other tools are followed by a sync of the destination's file system.
//!
//! Right before each copy memory is touched and freed, several times as much as the copy takes: the host may have reclaimed
//! memory that a virtual machine did not use for some seconds, and its first touch would cost several times the copy. The
//! kernel takes what it needs from anywhere in its free memory.

use crate::machine;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::{said, Pool};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// A directory; dropping it removes it.
pub(crate) struct Place(pub(crate) PathBuf);

impl Place {
    pub(crate) fn new(under: &Path) -> Result<Place, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = under.join(format!("forebay-bench-stage-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Place(path))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A way to copy `from` to `to`.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// Shell words; `$1` is the source and `$2` the destination, which does not exist.
    pub(crate) script: &'static str,
}

const TREE_WAYS: [Way; 3] = [
    Way { name: "cp -a", script: "cp -a \"$1\" \"$2\"" },
    Way { name: "tar pipe", script: "mkdir \"$2\" && tar -C \"$1\" -cf - . | tar -C \"$2\" -xf -" },
    Way { name: "rsync", script: "rsync -a \"$1/\" \"$2\"" },
];
const FILE_WAYS: [Way; 4] = [
    Way { name: "two dd", script: TWO_DD },
    Way { name: "cp -a", script: "cp -a \"$1\" \"$2\"" },
    Way { name: "tar pipe", script: TAR_FILE },
    Way { name: "rsync", script: "rsync -a \"$1\" \"$2\"" },
];
const TWO_DD: &str = "half=$(($(stat -c %s \"$1\") / 2097152)); \
    dd if=\"$1\" of=\"$2\" bs=1M count=$half conv=notrunc status=none & one=$!; \
    dd if=\"$1\" of=\"$2\" bs=1M skip=$half seek=$half conv=notrunc status=none && wait $one";
const TAR_FILE: &str =
    "mkdir \"$2\" && tar -C \"$(dirname \"$1\")\" -cf - \"$(basename \"$1\")\" | tar -C \"$2\" -xf -";

/// The four tables: small files and the large one, in and out.
pub(crate) fn measure(pool: &Pool, disk: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let disk = Place::new(disk)?;
    let memory = Place::new(Path::new("/dev/shm"))?;
    let tree = disk.0.join("tree");
    let file = disk.0.join("large");
    make_tree(&tree, sizes.staged_files)?;
    make_file(&file, sizes.staged_bytes)?;
    let gib = sizes.staged_bytes as f64 / (1_u64 << 30) as f64;
    let small = format!("{} files of 4 to 64 KiB", sizes.staged_files);
    let large = format!("one file of {gib} GiB");
    let mut tables = Vec::new();
    for (what, source, ways) in [(small, &tree, &TREE_WAYS[..]), (large, &file, &FILE_WAYS[..])] {
        let target = |way: &Way| match (way.name, source == &tree) {
            ("cp -a", true) => Some(1.5),
            ("tar pipe", true) | ("two dd", false) => Some(1.0),
            _ => None,
        };
        let mut coming = table(format!("(c) stage-in of {what}, from {} to memory", disk.0.display()), ways);
        let mut going =
            table(format!("(c) stage-out of {what}, from memory to {}, on the disk", disk.0.display()), ways);
        // The copy in memory that the other tools stage out.
        let kept = memory.0.join("kept");
        said(Command::new("cp").arg("-a").arg(source).arg(&kept))?;
        for repetition in 0..sizes.repetitions {
            for turn in 0..=ways.len() {
                let column = (turn + repetition) % (ways.len() + 1);
                let (into, out) = match column {
                    0 => forebay(pool, source, &disk.0.join("out"))?,
                    n => other(&ways[n - 1], source, &kept, &memory.0.join("in"), &disk.0.join("out"))?,
                };
                let targets = || {
                    ways.iter()
                        .filter_map(|w| Some(Target::Ratio { against: w.name.into(), at_least: target(w)? }))
                        .collect()
                };
                coming.add("seconds", column, into, targets);
                going.add("seconds", column, out, Vec::new);
            }
        }
        remove(&kept);
        tables.extend([coming, going]);
    }
    Ok(tables)
}

fn table(title: String, ways: &[Way]) -> Table {
    let columns = ["Forebay"].into_iter().chain(ways.iter().map(|w| w.name)).map(str::to_owned).collect();
    Table { title, unit: "s", more_is_better: false, columns, rows: Vec::new() }
}

/// Seconds for staging in and out through a pool.
fn forebay(pool: &Pool, source: &Path, out: &Path) -> Result<(f64, f64), String> {
    let pair = |from: &Path, to: &Path| format!("{}:{}", from.display(), to.display());
    let inside = Path::new("/staged");
    let bytes = measure_of(source)?.1;
    warm(bytes)?;
    let into = timed(pool.command().args(["stage-in", "--no-progress", &pair(source, inside)]))?;
    warm(bytes)?;
    let from = timed(pool.command().args(["stage-out", "--no-progress", &pair(inside, out)]))?;
    same_size(source, out)?;
    remove(out);
    said(pool.command().args(["run", "--", "rm", "-rf", "/forebay/staged"]))?;
    Ok((into, from))
}

/// Seconds for copying in and out by another tool.
fn other(way: &Way, source: &Path, kept: &Path, memory: &Path, out: &Path) -> Result<(f64, f64), String> {
    let bytes = measure_of(source)?.1;
    let shell = |from: &Path, to: &Path, then: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{{ {}; }} {then}", way.script), "copy"]).arg(from).arg(to);
        warm(bytes)?;
        timed(&mut command)
    };
    let into = shell(source, memory, "")?;
    remove(memory);
    let from = shell(kept, out, "&& sync -f \"$2\"")?;
    remove(out);
    Ok((into, from))
}

/// Touches memory, three times `bytes` or nearly all that is free, and frees it.
pub(crate) fn warm(bytes: u64) -> Result<(), String> {
    const KEPT_FREE: u64 = 512 << 20;
    let free = machine::memory_bytes("MemFree").saturating_sub(KEPT_FREE);
    let bytes = (3 * bytes).min(free).max(64 << 20) as usize;
    // SAFETY: a new mapping of our own, written within its bounds and unmapped here.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return Err(format!("no {bytes} bytes of memory: {}", std::io::Error::last_os_error()));
        }
        libc::madvise(at, bytes, libc::MADV_HUGEPAGE);
        for page in (0..bytes).step_by(4096) {
            at.cast::<u8>().add(page).write_volatile(1);
        }
        libc::munmap(at, bytes);
    }
    Ok(())
}

pub(crate) fn timed(command: &mut Command) -> Result<f64, String> {
    let start = Instant::now();
    said(command)?;
    Ok(start.elapsed().as_secs_f64())
}

pub(crate) fn remove(path: &Path) {
    if path.is_dir() {
        fs::remove_dir_all(path).ok();
    } else {
        fs::remove_file(path).ok();
    }
}

/// Fails unless both have the same number of files and bytes.
pub(crate) fn same_size(a: &Path, b: &Path) -> Result<(), String> {
    let (left, right) = (measure_of(a)?, measure_of(b)?);
    if left == right {
        return Ok(());
    }
    Err(format!("{} has {left:?} (files, bytes) and {} has {right:?}", a.display(), b.display()))
}

pub(crate) fn measure_of(path: &Path) -> Result<(u64, u64), String> {
    let told = |e: std::io::Error| format!("{}: {e}", path.display());
    let stat = fs::symlink_metadata(path).map_err(told)?;
    if !stat.is_dir() {
        return Ok((1, stat.len()));
    }
    let mut sum = (0, 0);
    for entry in fs::read_dir(path).map_err(told)? {
        let (files, bytes) = measure_of(&entry.map_err(told)?.path())?;
        sum = (sum.0 + files, sum.1 + bytes);
    }
    Ok(sum)
}

/// Files of 4 to 64 KiB, a hundred a directory.
pub(crate) fn make_tree(root: &Path, files: usize) -> Result<(), String> {
    make_tree_of(root, files, 100)
}

/// The same with another number of files in each directory.
pub(crate) fn make_tree_of(root: &Path, files: usize, each: usize) -> Result<(), String> {
    let told = |e: std::io::Error| format!("{}: {e}", root.display());
    let bytes: Vec<u8> = (0..64 << 10).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for i in 0..files {
        let directory = root.join(format!("d{}", i / each));
        if i % each == 0 {
            fs::create_dir_all(&directory).map_err(told)?;
        }
        // 4, 8, ... 64 KiB, each equally often.
        fs::write(directory.join(format!("f{i}")), &bytes[..(i % 16 + 1) << 12]).map_err(told)?;
    }
    Ok(())
}

pub(crate) fn make_file(path: &Path, bytes: u64) -> Result<(), String> {
    use std::io::Write;
    let told = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut file = fs::File::create(path).map_err(told)?;
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    for _ in 0..bytes >> 20 {
        file.write_all(&block).map_err(told)?;
    }
    Ok(())
}
