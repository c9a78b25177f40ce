//! Draining and restoring, compared with copy tools: all copy between memory and a directory of the disk.
//!
//! Drain: the pool has files that the store does not have; `forebay sync` returns when the store has them, durably. The
//! tools copy the same files from tmpfs to the disk, and a sync of its file system follows. Restore: the pool has
//! released them; `forebay prestage` copies them back. The tools copy them to tmpfs. Sources are in the page cache or in
//! memory; memory is touched and freed right before each copy. Trees that were copied to the store stay until the end:
//! ext4 looks for inodes that were not freed within the last seconds, so a removal would slow down the next copy.

use super::attached::Attached;
use super::slow::{SlowStore, Slowness};
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::stage::{
    make_file, make_tree, make_tree_of, measure_of, remove, same_size, timed, warm, Place, Way,
};
use crate::systems::said;
use crate::tools::on_path;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

const GIB: f64 = (1_u64 << 30) as f64;
const AT_LEAST: f64 = 1.5;
/// Of each call to a distant store.
const LATENCY_MS: u64 = 30;

/// Files of a directory, where they are to be copied side by side.
const FEW_A_DIRECTORY: usize = 4;

/// How each tool copies a tree or a file to a name that does not exist. rclone copies several files at a time, as many
/// as it is told: with its default of 4 it was slower.
const WAYS: [Way; 3] = [
    Way { name: "cp -a", script: "cp -a \"$1\" \"$2\"" },
    Way {
        name: "rsync",
        script: "if [ -d \"$1\" ]; then rsync -a \"$1/\" \"$2\"; else rsync -a \"$1\" \"$2\"; fi",
    },
    Way {
        name: "rclone",
        script: "if [ -d \"$1\" ]; then rclone copy --config= --transfers 16 --checkers 16 \"$1\" \"$2\"; \
            else rclone copyto --config= \"$1\" \"$2\"; fi",
    },
];

/// A directory that plays the store: where it is used, and the same where looking at it costs nothing.
struct Store<'a> {
    used: &'a Path,
    behind: &'a Path,
}

/// Seconds of a drain and of a restore.
fn forebay(pool: &Attached, source: &Path, store: &Store<'_>) -> Result<(f64, f64), String> {
    let bytes = measure_of(source)?.1;
    let name = new_name();
    let (inside, path) = (pool.path(&name), format!("/store/{name}"));
    said(&mut pool.program("cp", &[OsStr::new("-a"), source.as_os_str(), inside.as_os_str()]))?;
    warm(bytes)?;
    let drain = timed(pool.pool.command().args(["sync", "--no-progress", "-r", &path]))?;
    same_size(source, &store.behind.join(&name))?;
    pool.verb(&["release", "--no-progress", "-r", &path])?;
    warm(bytes)?;
    let restore = timed(pool.pool.command().args(["prestage", "--no-progress", "-r", &path]))?;
    said(&mut pool.program("diff", &[OsStr::new("-rq"), source.as_os_str(), inside.as_os_str()]))?;
    pool.verb(&["release", "--no-progress", "-r", &path])?;
    if source.is_file() {
        said(&mut pool.program("rm", &[inside.as_os_str()]))?;
        pool.verb(&["sync", "--no-progress", "-r", "/store"])?;
    }
    Ok((drain, restore))
}

/// A name in the store that was never used.
fn new_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("copy{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Seconds of the same two copies by a tool.
fn tool(way: &Way, source: &Path, memory: &Path, store: &Store<'_>) -> Result<(f64, f64), String> {
    let bytes = measure_of(source)?.1;
    let shell = |from: &Path, to: &Path, then: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{{ {}; }} {then}", way.script), "copy"]).arg(from).arg(to);
        warm(bytes)?;
        timed(&mut command)
    };
    let name = new_name();
    let there = store.used.join(&name);
    let drain = shell(source, &there, "&& sync -f \"$2\"")?;
    same_size(source, &store.behind.join(&name))?;
    let restore = shell(&there, memory, "")?;
    remove(memory);
    if source.is_file() {
        remove(&store.behind.join(&name));
    }
    Ok((drain, restore))
}

/// One comparison: rows of the table for a source.
fn compare(
    binaries: &Path,
    title: String,
    source: &Path,
    memory: &Path,
    store: &Store<'_>,
    (ways, repetitions): (&[Way], usize),
) -> Result<Table, String> {
    let is_there = |way: &&Way| on_path(way.name.split(' ').next().unwrap_or(""));
    let all = ways;
    let ways: Vec<&Way> = all.iter().filter(is_there).collect();
    for way in all.iter().filter(|way| !is_there(way)) {
        println!("{} is not installed: it is not compared", way.name);
    }
    let columns = std::iter::once("Forebay").chain(ways.iter().map(|way| way.name));
    let columns = columns.map(str::to_owned).collect();
    let mut table = Table { title, unit: "s", more_is_better: false, columns, rows: Vec::new() };
    let capacity = 2 * measure_of(source)?.1 + (512 << 20);
    let pool = Attached::up(binaries, capacity, &store.used.to_string_lossy(), "request")?;
    for repetition in 0..repetitions {
        for turn in 0..=ways.len() {
            let column = (turn + repetition) % (ways.len() + 1);
            let (drain, restore) = match column {
                0 => forebay(&pool, source, store)?,
                n => tool(ways[n - 1], source, &memory.join("back"), store)?,
            };
            let targets = || {
                let each = ways.iter();
                each.map(|way| Target::Ratio { against: way.name.into(), at_least: AT_LEAST }).collect()
            };
            table.add("drain, durable", column, drain, targets);
            table.add("restore", column, restore, targets);
        }
    }
    Ok(table)
}

/// The tables of (c).
pub(super) fn measure(
    binaries: &Path,
    disk: &Path,
    sizes: &Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    let place = Place::new(disk)?;
    let memory = Place::new(Path::new("/dev/shm"))?;
    let source = memory.0.join("source");
    let large = format!("one file of {} GiB", sizes.staged_bytes as f64 / GIB);
    let small = format!("{} files of 4 to 64 KiB", sizes.staged_files);
    for (what, is_large) in [(large, true), (small, false)] {
        match is_large {
            true => make_file(&source, sizes.staged_bytes)?,
            false => make_tree(&source, sizes.staged_files)?,
        }
        let store = place.0.join("store");
        std::fs::create_dir(&store).map_err(|e| format!("{}: {e}", store.display()))?;
        let title = format!("(h) drain and restore of {what}, {}", place.0.display());
        let both = Store { used: &store, behind: &store };
        show(compare(binaries, title, &source, &memory.0, &both, (&WAYS, sizes.repetitions.min(3)))?);
        remove(&store);
        remove(&source);
    }
    // A tool that copies one file after the other takes a fifth of a second for each.
    let files = if sizes.is_quick { 100 } else { 400 };
    match SlowStore::of(disk, Slowness { rate: 0, latency_ms: LATENCY_MS }) {
        Ok(slow) => {
            make_tree(&source, files)?;
            let title = format!(
                "(h) the same of {files} files of 4 to 64 KiB, each call takes {LATENCY_MS} ms longer"
            );
            let store = Store { used: &slow.at, behind: &slow.behind };
            show(compare(binaries, title, &source, &memory.0, &store, (&WAYS, 1))?);
            // Linux makes one name at a time in a directory, and holds the others up meanwhile: with 30 ms a call, a
            // hundred files of one directory say little of ten thousand in a hundred of them. Tools that copy one file
            // after the other gain nothing by more directories.
            remove(&source);
            make_tree_of(&source, files, FEW_A_DIRECTORY)?;
            let title = format!(
                "(h) the same of {files} files, {FEW_A_DIRECTORY} a directory, each call takes {LATENCY_MS} ms longer"
            );
            show(compare(binaries, title, &source, &memory.0, &store, (&WAYS[2..], 1))?);
        }
        Err(why) => println!("\n(h) copies to a distant directory are not measured: {why}"),
    }
    Ok(())
}
