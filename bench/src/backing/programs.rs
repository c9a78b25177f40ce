//! The programs of the section on backing stores: they write and read files whose bytes are known, on any directory.
//!
//! `forebay-bench drive files VERB ROOT FILES BYTES VERSION` writes, checks or rewrites the files f0, f1, … of ROOT, BYTES
//! each. `… drive day-write|day-read ROOT COUNT BYTES LAG` are the two programs of a day in the life. All print JSON.

use serde_json::{json, Value};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::gate::now_ns;

/// Bytes of one read or write.
const BLOCK_BYTES: usize = 1 << 20;
/// How long the reader of a day waits for the next checkpoint.
const PATIENCE: Duration = Duration::from_secs(300);

/// The bytes that file `file` has in version `version`, block by block.
struct Contents {
    block: Vec<u8>,
}

impl Contents {
    fn new(version: u64) -> Contents {
        let mut state = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let words = (0..BLOCK_BYTES / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_ne_bytes()
        });
        Contents { block: words.collect() }
    }

    /// Block `index` of a file: no two blocks of two files are equal.
    fn block(&mut self, file: u64, index: u64) -> &[u8] {
        self.block[..8].copy_from_slice(&file.to_ne_bytes());
        self.block[8..16].copy_from_slice(&index.to_ne_bytes());
        &self.block
    }
}

fn told(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{}: {e}", path.display())
}

/// Writes a file, syncs and closes it.
pub(crate) fn write_file(path: &Path, file: u64, bytes: u64, version: u64) -> Result<(), String> {
    let mut contents = Contents::new(version);
    let mut out = File::create(path).map_err(told(path))?;
    for index in 0..bytes.div_ceil(BLOCK_BYTES as u64) {
        let len = (bytes - index * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize;
        out.write_all(&contents.block(file, index)[..len]).map_err(told(path))?;
    }
    out.sync_all().map_err(told(path))
}

/// Reads a file; fails unless it has exactly these bytes.
pub(crate) fn check_file(path: &Path, file: u64, bytes: u64, version: u64) -> Result<(), String> {
    let mut contents = Contents::new(version);
    let mut input = File::open(path).map_err(told(path))?;
    let length = input.metadata().map_err(told(path))?.len();
    if length != bytes {
        return Err(format!("{} has {length} bytes instead of {bytes}", path.display()));
    }
    let mut buffer = vec![0; BLOCK_BYTES];
    for index in 0..bytes.div_ceil(BLOCK_BYTES as u64) {
        let len = (bytes - index * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize;
        input.read_exact(&mut buffer[..len]).map_err(told(path))?;
        if buffer[..len] != contents.block(file, index)[..len] {
            return Err(format!("{} differs in block {index} from what was written", path.display()));
        }
    }
    Ok(())
}

/// A set of files of one size.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) root: PathBuf,
    pub(crate) count: u64,
    /// Bytes of each.
    pub(crate) bytes: u64,
}

impl Files {
    fn each(&self, each: impl Fn(&Path, u64) -> Result<(), String>) -> Result<f64, String> {
        let start = Instant::now();
        (0..self.count).try_for_each(|file| each(&self.root.join(format!("f{file}")), file))?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Writes all; returns the seconds.
    pub(crate) fn write(&self, version: u64) -> Result<f64, String> {
        self.each(|path, file| write_file(path, file, self.bytes, version))
    }

    /// Reads all, and fails unless they have this version; returns the seconds.
    pub(crate) fn check(&self, version: u64) -> Result<f64, String> {
        self.each(|path, file| check_file(path, file, self.bytes, version))
    }

    /// As arguments of `forebay-bench drive`, seen at another root.
    pub(crate) fn arguments(&self, verb: &str, root: &Path, version: u64) -> Vec<String> {
        let numbers = [self.count, self.bytes, version].map(|n| n.to_string());
        let mut all = vec!["drive".into(), "files".into(), verb.into(), root.to_string_lossy().into_owned()];
        all.extend(numbers);
        all
    }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("{word}: not a number"))
}

/// `drive files`.
pub(crate) fn drive_files(words: &[String]) -> Result<Value, String> {
    let [verb, root, count, bytes, version] = words else {
        return Err("drive files VERB ROOT FILES BYTES VERSION".into());
    };
    let files = Files { root: root.into(), count: number(count)?, bytes: number(bytes)? };
    let version = number(version)?;
    match verb.as_str() {
        "write" => Ok(json!({"seconds": files.write(version)?})),
        "check" => Ok(json!({"seconds": files.check(version)?})),
        // Reads all of the version before, then writes all anew.
        "rewrite" => Ok(json!({"read": files.check(version - 1)?, "write": files.write(version)?})),
        other => Err(format!("there is no verb {other}")),
    }
}

/// `drive list`: runs `ls -lR ROOT`, and tells its seconds, without those for which this program was started.
pub(crate) fn drive_list(words: &[String]) -> Result<Value, String> {
    let [root] = words else { return Err("drive list ROOT".into()) };
    let start = Instant::now();
    let done = Command::new("ls").arg("-lR").arg(root).stdout(Stdio::null()).status();
    let seconds = start.elapsed().as_secs_f64();
    match done {
        Ok(status) if status.success() => Ok(json!({"seconds": seconds})),
        other => Err(format!("ls -lR {root}: {other:?}")),
    }
}

/// The name of a checkpoint while it is written, and when it is whole.
pub(crate) fn checkpoint(root: &Path, number: u64) -> (PathBuf, PathBuf) {
    (root.join(format!("c{number}.part")), root.join(format!("c{number}")))
}

/// A line of the log.
pub(crate) fn log_line(number: u64) -> String {
    format!("checkpoint {number:06} is written; {}\n", "the log stays open ".repeat(8))
}

/// The writer of a day: COUNT checkpoints of BYTES as fast as it can, and a log that is open throughout.
pub(crate) fn drive_day_write(words: &[String]) -> Result<Value, String> {
    let [root, count, bytes] = words else { return Err("drive day-write ROOT COUNT BYTES".into()) };
    let (root, count, bytes) = (Path::new(root), number(count)?, number(bytes)?);
    let log = root.join("log");
    let mut log_file = File::options().append(true).create(true).open(&log).map_err(told(&log))?;
    let mut written = Vec::new();
    for i in 0..count {
        let (part, whole) = checkpoint(root, i);
        let from = now_ns();
        write_file(&part, i, bytes, i + 1)?;
        std::fs::rename(&part, &whole).map_err(told(&whole))?;
        let to = now_ns();
        log_file.write_all(log_line(i).as_bytes()).map_err(told(&log))?;
        written.push(json!([from, to]));
    }
    log_file.sync_all().map_err(told(&log))?;
    Ok(json!({"checkpoints": written}))
}

/// The reader of a day: reads every fourth checkpoint back when LAG later ones are whole.
pub(crate) fn drive_day_read(words: &[String]) -> Result<Value, String> {
    let [root, count, bytes, lag] = words else { return Err("drive day-read ROOT COUNT BYTES LAG".into()) };
    let (root, count, bytes, lag) = (Path::new(root), number(count)?, number(bytes)?, number(lag)?);
    let mut read = Vec::new();
    for i in (0..count.saturating_sub(lag)).step_by(4) {
        let (_, awaited) = checkpoint(root, i + lag);
        let begun = Instant::now();
        while !awaited.exists() {
            if begun.elapsed() > PATIENCE {
                return Err(format!("{} does not appear", awaited.display()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let from = now_ns();
        check_file(&checkpoint(root, i).1, i, bytes, i + 1)?;
        read.push(json!([from, now_ns()]));
    }
    Ok(json!({"read": read}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_finds_another_version_another_length_and_swapped_files() {
        let root = std::env::temp_dir().join(format!("forebay-bench-programs-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        let files = Files { root: root.clone(), count: 2, bytes: BLOCK_BYTES as u64 + 5 };
        files.write(1).unwrap();
        files.check(1).unwrap();
        files.check(2).unwrap_err();
        Files { bytes: 5, ..files.clone() }.check(1).unwrap_err();
        std::fs::rename(root.join("f0"), root.join("f1")).unwrap();
        check_file(&root.join("f1"), 1, files.bytes, 1).unwrap_err();
        std::fs::remove_dir_all(&root).unwrap();
    }
}
