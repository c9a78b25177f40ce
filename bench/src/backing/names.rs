//! What a store costs when it is not needed: names and data that are resident, and listings.

use super::attached::Attached;
use super::slow::SlowStore;
use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::stage::{make_tree, remove, timed, Place};
use crate::systems::{said, turns, Pool, System};
use crate::{data, meta};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Names that are listed at once, and the same in a short run.
const NAMES: (usize, usize) = (1_000_000, 50_000);

/// Rates of a pool in front of a store, while it copies nothing, and of one without a store.
pub(super) fn resident(binaries: &Path, disk: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let place = Place::new(disk)?;
    let store = place.0.join("store");
    std::fs::create_dir(&store).map_err(|e| format!("{}: {e}", store.display()))?;
    let with = Attached::up(binaries, sizes.capacity_bytes, &store.to_string_lossy(), "request")?;
    let without = Pool::up(binaries, sizes.capacity_bytes)?;
    let systems = [
        System::in_pool(&with.pool, "with store", "store/bench")?,
        // As many names to look up in each path.
        System::in_pool(&without, "without", "store/bench")?,
    ];
    let columns: Vec<String> = systems.iter().map(|system| system.name.clone()).collect();
    let targets = || vec![Target::Ratio { against: "without".into(), at_least: 0.95 }];
    let mut names = Table {
        title: format!("(h) names of a pool with a store and without, {} files", sizes.files),
        unit: "operations/s",
        more_is_better: true,
        columns: columns.clone(),
        rows: Vec::new(),
    };
    let mut transfers = Table {
        title: format!("(h) data of a pool with a store and without, {} MiB", sizes.bytes as u64 / MIB),
        unit: "GB/s",
        more_is_better: true,
        columns,
        rows: Vec::new(),
    };
    for system in &systems {
        system.drive("age", &Orders { files: 5 * sizes.files, bytes: sizes.bytes, ..Orders::default() })?;
    }
    // The difference to be seen is small: more repetitions than elsewhere.
    for repetition in 0..2 * sizes.repetitions {
        for column in turns(&systems, repetition) {
            let rates = systems[column].drive("meta", &Orders { files: sizes.files, ..Orders::default() })?;
            for (phase, rate) in rates {
                names.add(&phase, column, rate, targets);
            }
        }
        for column in turns(&systems, repetition) {
            let rates = systems[column].drive("data", &Orders { bytes: sizes.bytes, ..Orders::default() })?;
            for (phase, rate) in rates {
                transfers.add(&format!("{phase}, 1 MiB"), column, rate, targets);
            }
        }
    }
    names.rows.sort_by_key(|row| meta::PHASES.iter().position(|phase| *phase == row.label));
    transfers
        .rows
        .sort_by_key(|row| data::PHASES.iter().position(|phase| row.label.starts_with(&format!("{phase},"))));
    // The pool with a store goes before what it would have to drain at its end.
    Ok(vec![names, transfers])
}

fn list_all(directory: &Path) -> Result<Command, String> {
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let mut command = Command::new(this);
    command.args(["drive", "list"]).arg(directory);
    Ok(command)
}

/// The seconds that a driver told.
fn told(command: &mut Command) -> Result<f64, String> {
    let text = said(command)?;
    let told: Option<serde_json::Value> = serde_json::from_str(text.trim()).ok();
    told.and_then(|told| told["seconds"].as_f64()).ok_or(format!("the driver said {text:?}"))
}

/// The first and the second `ls -lR` of a tree that only the store has.
pub(super) fn listings(binaries: &Path, disk: &Path, sizes: &Sizes) -> Result<Table, String> {
    let mut table = Table {
        title: format!("(h) ls -lR of {} files", sizes.staged_files),
        unit: "s",
        more_is_better: false,
        columns: vec!["Forebay".into(), "the store".into(), "a pool".into()],
        rows: Vec::new(),
    };
    for repetition in 0..sizes.repetitions {
        let slow = SlowStore::new(disk)?;
        make_tree(&slow.behind.join("tree"), sizes.staged_files)?;
        for (store, what) in [(&slow.behind, "the disk"), (&slow.at, "the slow store")] {
            let url = store.to_string_lossy().into_owned();
            let pool = Attached::up(binaries, 512 * MIB, &url, "request")?;
            let plain = Pool::up(binaries, 2048 * MIB)?;
            let plain = System::in_pool(&plain, "a pool", "tree")?;
            said(plain.command("cp").arg("-a").arg(slow.behind.join("tree")).arg(&plain.root))?;
            // Attributes are in the page cache for both; the store itself goes first in every other repetition.
            let own = || told(&mut list_all(&store.join("tree"))?);
            own()?;
            let first = || told(&mut pool.under(list_all(&pool.path("tree"))?));
            let (ours, theirs) = match repetition % 2 {
                0 => (first()?, own()?),
                _ => {
                    let theirs = own()?;
                    (first()?, theirs)
                }
            };
            let targets = || vec![Target::Ratio { against: "the store".into(), at_least: 1.0 / 1.3 }];
            let label = format!("first, {what}");
            table.add(&label, 0, ours, targets);
            table.add(&label, 1, theirs, Vec::new);
            let list = list_all(&plain.root)?;
            let mut list_plain = plain.command(list.get_program());
            list_plain.args(list.get_args());
            let label = format!("second, {what}");
            let targets = || vec![Target::Ratio { against: "a pool".into(), at_least: 0.95 }];
            table.add(&label, 0, first()?, targets);
            table.add(&label, 1, own()?, Vec::new);
            table.add(&label, 2, told(&mut list_plain)?, Vec::new);
        }
    }
    Ok(table)
}

/// The most memory that processes of a pool have used, in bytes, by the name of their program.
fn memory_of(pool: &Path, program: &str) -> u64 {
    let mut sum = 0;
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(words) = std::fs::read(path.join("cmdline")) else { continue };
        let words = String::from_utf8_lossy(&words).into_owned();
        let is_ours = words.contains(&*pool.to_string_lossy())
            && words
                .split('\0')
                .next()
                .is_some_and(|word| Path::new(word).file_name().is_some_and(|name| name == program));
        if is_ours {
            let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            sum += kib.unwrap_or(0) * 1024;
        }
    }
    sum
}

/// A directory of very many names, listed for the first time and again.
pub(super) fn many_names(binaries: &Path, disk: &Path, sizes: &Sizes) -> Result<(Table, Table), String> {
    let count = if sizes.is_quick { NAMES.1 } else { NAMES.0 };
    let place = Place::new(disk)?;
    let store = place.0.join("many");
    std::fs::create_dir(&store).map_err(|e| format!("{}: {e}", store.display()))?;
    for i in 0..count {
        let path = store.join(format!("name-{i:07}"));
        std::fs::File::create(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let mut times = Table {
        title: format!("(h) {count} names of one directory"),
        unit: "s",
        more_is_better: false,
        columns: vec!["Forebay".into(), "the store".into()],
        rows: Vec::new(),
    };
    let mut memory = Table {
        title: format!("(h) {count} names of one directory"),
        unit: "MiB",
        more_is_better: false,
        columns: vec!["Forebay".into()],
        rows: Vec::new(),
    };
    let list = |directory: &Path| {
        let mut command = Command::new("sh");
        command
            .args(["-c", "test $(ls -U \"$1\" | wc -l) = $2", "list"])
            .arg(directory)
            .arg(count.to_string());
        command
    };
    let capacity = 512 * MIB + count as u64 * 1024;
    let pool = Attached::up(binaries, capacity, &store.to_string_lossy(), "request")?;
    for label in ["the first ls -U", "the second"] {
        times.add(label, 1, timed(&mut list(&store))?, Vec::new);
        times.add(label, 0, timed(&mut pool.under(list(&pool.path(""))))?, Vec::new);
    }
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let own = |program| mib(memory_of(pool.pool.directory(), program));
    memory.add("forebay-mover, at most", 0, own("forebay-mover"), Vec::new);
    let used = Command::new("df").args(["-B1", "--output=used"]).arg(pool.pool.target()).output();
    let used = used.map_err(|e| format!("df: {e}"))?;
    let used =
        String::from_utf8_lossy(&used.stdout).lines().last().and_then(|l| l.trim().parse::<u64>().ok());
    memory.add("space of the pool", 0, mib(used.unwrap_or(0)), Vec::new);
    drop(pool);
    remove(&store);
    Ok((times, memory))
}
