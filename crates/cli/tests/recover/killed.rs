//! Rounds of the same: a program writes, syncs, renames and replaces files in front of a slow store; at a random moment
//! everything is killed, and the node restarts. After the recovery the store must have each file that was acknowledged,
//! its own files as they were or as the pool had replaced them, and no torn file under a final name.
//!
//! FOREBAY_RECOVERIES sets the number of rounds, FOREBAY_SEED the seed of the first.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use crate::bed::Bed;

/// Files of the store before.
const ORIGINALS: u64 = 4;
const FILE_BYTES_MAX: u64 = 300_000;

fn rounds() -> u64 {
    let number = std::env::var("FOREBAY_RECOVERIES").ok().and_then(|text| text.parse().ok());
    number.unwrap_or(if std::env::var_os("FOREBAY_SOAK").is_some() { 60 } else { 2 })
}

/// A generator of numbers (splitmix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The content of version `id`, of so many bytes: a torn one is none of these.
fn content(id: &str, bytes: u64) -> Vec<u8> {
    let line = format!("{id} {bytes}\n");
    line.bytes().cycle().take(bytes as usize).collect()
}

/// A step of the program, with the line by which it acknowledges it.
struct Step {
    script: String,
    /// After it, this version is under one of these names, or beside one of them.
    holds: Option<(String, Vec<String>)>,
}

/// The program: `put ID BYTES FILE` writes a whole file and syncs it.
const PRELUDE: &str =
    "cd /forebay; put() { yes \"$1 $2\" | head -c $2 | dd of=$3 bs=64k conv=fsync status=none; }; ";

fn program(dice: &mut Dice, versions: &mut BTreeMap<String, u64>) -> Vec<Step> {
    let mut steps = Vec::new();
    for i in 0..400 {
        let (id, bytes) = (format!("v{i}"), 100 + dice.below(FILE_BYTES_MAX));
        versions.insert(id.clone(), bytes);
        let put = |name: &str| format!("put {id} {bytes} {name}");
        let holds =
            |names: &[&str]| Some((id.clone(), names.iter().map(|name| (*name).to_owned()).collect()));
        match dice.below(4) {
            // Written under a temporary name, then renamed: the usual checkpoint.
            0 | 1 => {
                let (tmp, name) = (format!("c{i}.tmp"), format!("c{i}"));
                steps.push(Step { script: put(&tmp), holds: holds(&[&tmp, &name]) });
                steps.push(Step { script: format!("mv {tmp} {name}; sync ."), holds: holds(&[&name]) });
            }
            // In a directory of its own.
            2 => {
                let name = format!("d{}/f{i}", dice.below(3));
                let script = format!("mkdir -p {}; {}", name.split('/').next().unwrap(), put(&name));
                steps.push(Step { script, holds: holds(&[&name]) });
            }
            // A file of the store is replaced, as editors do.
            _ => {
                let name = format!("original{}", dice.below(ORIGINALS));
                let tmp = format!("{name}.new{i}");
                steps.push(Step { script: put(&tmp), holds: holds(&[&tmp, &name]) });
                // From here on a later replacement may win.
                steps.push(Step { script: format!("mv {tmp} {name}; sync ."), holds: None });
            }
        }
    }
    steps
}

/// All files of the store, by name.
fn all_files(bed: &Bed) -> BTreeMap<String, Vec<u8>> {
    let (mut all, mut left) = (BTreeMap::new(), vec![bed.store.clone()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => left.push(path),
                false => {
                    let name = path.strip_prefix(&bed.store).unwrap().to_str().unwrap().to_owned();
                    all.insert(name, std::fs::read(&path).unwrap());
                }
            }
        }
    }
    all
}

fn round(seed: u64) {
    let mut dice = Dice(seed);
    let bed = Bed::without_store();
    for i in 0..ORIGINALS {
        let id = format!("o{i}");
        std::fs::write(bed.store.join(format!("original{i}")), content(&id, 1000 + i)).unwrap();
    }
    let mut versions: BTreeMap<String, u64> = (0..ORIGINALS).map(|i| (format!("o{i}"), 1000 + i)).collect();
    let rate = ["500kB/s", "3MB/s", "50MB/s"][dice.below(3) as usize];
    bed.ok(&["attach", &format!("file://{}?rate={rate}", bed.store.display()), "/"]);
    let steps = program(&mut dice, &mut versions);
    let script: String =
        steps.iter().enumerate().map(|(i, step)| format!("{}\necho {i}\n", step.script)).collect();
    let mut run = bed.command(&["run", "--quiet", "--", "sh", "-e", "-c", &format!("{PRELUDE}\n{script}")]);
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let output = child.stdout.take().unwrap();
    let acknowledged = std::thread::spawn(move || {
        // What the pipe has when all writers are dead was acknowledged too.
        BufReader::new(output).lines().map_while(Result::ok).filter_map(|line| line.parse().ok()).max()
    });
    std::thread::sleep(Duration::from_millis(300 + dice.below(2200)));
    bed.die();
    let _ = child.kill();
    let _ = child.wait();
    let last: Option<usize> = acknowledged.join().unwrap();
    // What a restart of the node leaves of the shard: all of it as far as it was written, a part, or nothing.
    bed.restart_node();
    let left = dice.below(3);
    match left {
        0 => {}
        1 => std::fs::remove_file(bed.shard("data.mdb")).unwrap(),
        _ => bed.lose_shard(),
    }
    let about = || format!("FOREBAY_SEED={seed}: {rate}, case {left}, acknowledged up to {last:?}");
    let before = all_files(&bed);
    let report = bed.recovered(&[]);
    let after = all_files(&bed);
    for (name, bytes) in &before {
        // Temporaries of the killed mover go; what it had put aside comes back.
        if !name.split('/').any(|part| part.starts_with(".forebay-")) {
            assert!(after.get(name) == Some(bytes), "{name} was changed by the recovery; {}", about());
        }
    }
    let known: BTreeMap<Vec<u8>, &str> =
        versions.iter().map(|(id, bytes)| (content(id, *bytes), id.as_str())).collect();
    // Which versions the store has, under which names. An empty file was created and not written yet.
    let mut found: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, bytes) in &after {
        match known.get(bytes) {
            Some(id) => found.entry(id).or_default().push(name.clone()),
            None => {
                // Data that no fsync had acknowledged may be there as the program had written them: a beginning.
                let is_beginning = versions
                    .iter()
                    .any(|(id, whole)| bytes.is_empty() || content(id, *whole).starts_with(bytes));
                let is_unacknowledged =
                    is_beginning && last.is_none_or(|last| !is_held(&steps[..=last], name));
                assert!(is_unacknowledged, "{name} is torn ({} bytes); {}: {report}", bytes.len(), about());
            }
        }
    }
    for step in &steps[..last.map_or(0, |last| last + 1)] {
        let Some((id, names)) = &step.holds else { continue };
        let is_there = found.get(id.as_str()).is_some_and(|all| {
            all.iter().any(|name| {
                names
                    .iter()
                    .any(|wanted| name == wanted || name.starts_with(&format!("{wanted}.forebay-recovered-")))
            })
        });
        // A version that another one has replaced since need not be anywhere.
        let is_replaced = names.iter().any(|name| name.starts_with("original"));
        assert!(is_there || is_replaced, "{id} is lost, which {names:?} had; {}: {report}", about());
    }
    // The last replacement of each original is there, or the one that was under way.
    for i in 0..ORIGINALS {
        let name = format!("original{i}");
        let has = |id: &str| {
            let of = |other: &String| *other == name || other.starts_with(&format!("{name}."));
            found.get(id).is_some_and(|all| all.iter().any(of))
        };
        let replaced = steps[..last.map_or(0, |last| last + 1)]
            .iter()
            .filter(|step| step.script.ends_with(&format!(" {name}; sync .")))
            .filter_map(|step| step.script.split(".new").nth(1)?.split(' ').next().map(|i| format!("v{i}")))
            .next_back();
        let next =
            steps[last.map_or(0, |last| last + 1)..].iter().take(1).any(|step| step.script.contains(&name));
        let expected = replaced.unwrap_or(format!("o{i}"));
        assert!(has(&expected) || next, "{expected} of {name} is lost; {}: {report}", about());
    }
}

/// True if a name was acknowledged whole.
fn is_held(steps: &[Step], name: &str) -> bool {
    let base = name.split(".forebay-recovered-").next().unwrap_or(name);
    steps
        .iter()
        .any(|step| step.holds.as_ref().is_some_and(|(_, names)| names.len() == 1 && names[0] == base))
}

#[test]
fn killed_at_any_moment_nothing_acknowledged_is_lost_and_nothing_is_replaced() {
    let first = std::env::var("FOREBAY_SEED").ok().and_then(|text| text.parse().ok());
    let first = first.unwrap_or_else(|| u64::from(std::process::id()));
    for seed in first..first + rounds() {
        eprintln!("FOREBAY_SEED={seed}");
        round(seed);
    }
}
