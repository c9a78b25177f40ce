//! A workload that tests kill, and the check of what it leaves.
//!
//! [`run`] changes a directory by single calls, in an order that a seed determines. It writes each step to a journal
//! outside the pool, once before the calls and once after they returned. [`check`] replays a journal: every
//! acknowledged step must have its exact effect, the last step may have happened or not (or, for data, in part), and
//! there must be nothing else.

use crate::door::{Door, Errno, Outcome};
use libc::{O_APPEND, O_CREAT, O_EXCL, O_TRUNC, O_WRONLY};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Number of names that a workload uses: few, so that steps concern the same names.
const NAMES: u64 = 24;
/// Maximum length of data in one step, in bytes.
const BYTES_MAX: u64 = 192 << 10;

/// One step: one call, or one write of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Step {
    /// A new file with these bytes.
    Create {
        name: u64,
        tag: u64,
        length: u64,
    },
    /// Replaces the file's bytes.
    Overwrite {
        name: u64,
        tag: u64,
        length: u64,
    },
    /// Appends bytes of the file's own pattern.
    Append {
        name: u64,
        length: u64,
    },
    /// Shortens the file.
    Truncate {
        name: u64,
        length: u64,
    },
    Unlink {
        name: u64,
    },
    Rename {
        name: u64,
        to: u64,
    },
    Link {
        name: u64,
        to: u64,
    },
    Symlink {
        name: u64,
        tag: u64,
    },
    MakeDirectory {
        name: u64,
    },
    RemoveDirectory {
        name: u64,
    },
    Chmod {
        name: u64,
        mode: u64,
    },
    SetXattr {
        name: u64,
        tag: u64,
    },
}

impl Step {
    fn words(&self) -> String {
        match self {
            Step::Create { name, tag, length } => format!("create {name} {tag} {length}"),
            Step::Overwrite { name, tag, length } => format!("overwrite {name} {tag} {length}"),
            Step::Append { name, length } => format!("append {name} {length}"),
            Step::Truncate { name, length } => format!("truncate {name} {length}"),
            Step::Unlink { name } => format!("unlink {name}"),
            Step::Rename { name, to } => format!("rename {name} {to}"),
            Step::Link { name, to } => format!("link {name} {to}"),
            Step::Symlink { name, tag } => format!("symlink {name} {tag}"),
            Step::MakeDirectory { name } => format!("mkdir {name}"),
            Step::RemoveDirectory { name } => format!("rmdir {name}"),
            Step::Chmod { name, mode } => format!("chmod {name} {mode}"),
            Step::SetXattr { name, tag } => format!("setxattr {name} {tag}"),
        }
    }

    fn parse(words: &str) -> Option<Step> {
        let mut parts = words.split(' ');
        let verb = parts.next()?;
        let n: Vec<u64> = parts.map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(match (verb, &n[..]) {
            ("create", &[name, tag, length]) => Step::Create { name, tag, length },
            ("overwrite", &[name, tag, length]) => Step::Overwrite { name, tag, length },
            ("append", &[name, length]) => Step::Append { name, length },
            ("truncate", &[name, length]) => Step::Truncate { name, length },
            ("unlink", &[name]) => Step::Unlink { name },
            ("rename", &[name, to]) => Step::Rename { name, to },
            ("link", &[name, to]) => Step::Link { name, to },
            ("symlink", &[name, tag]) => Step::Symlink { name, tag },
            ("mkdir", &[name]) => Step::MakeDirectory { name },
            ("rmdir", &[name]) => Step::RemoveDirectory { name },
            ("chmod", &[name, mode]) => Step::Chmod { name, mode },
            ("setxattr", &[name, tag]) => Step::SetXattr { name, tag },
            _ => return None,
        })
    }
}

/// A name's path.
fn path(name: u64) -> String {
    format!("n{name}")
}

/// The byte of a file at `offset`.
fn byte(tag: u64, offset: u64) -> u8 {
    (tag.wrapping_mul(0x9e37_79b9).wrapping_add(offset) ^ (offset >> 12).wrapping_mul(tag | 1)) as u8
}

fn bytes(tag: u64, from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|offset| byte(tag, offset)).collect()
}

/// An inode of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Node {
    File { tag: u64, length: u64, mode: u64, xattr: Option<u64> },
    Symlink { tag: u64 },
    Directory,
}

/// A file that may have been written in part: its length is at least this.
#[derive(Clone, Copy, Debug)]
struct Partly {
    name: u64,
    at_least: u64,
}

/// The expected content of the directory.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Model {
    names: BTreeMap<u64, usize>,
    nodes: Vec<Node>,
}

impl Model {
    fn node(&self, name: u64) -> Option<&Node> {
        self.names.get(&name).map(|i| &self.nodes[*i])
    }

    fn file(&mut self, name: u64) -> Option<&mut Node> {
        self.names.get(&name).map(|i| &mut self.nodes[*i]).filter(|n| matches!(n, Node::File { .. }))
    }

    fn links(&self, name: u64) -> u64 {
        self.names.values().filter(|i| self.names.get(&name) == Some(i)).count() as u64
    }

    fn make(&mut self, name: u64, node: Node) {
        self.nodes.push(node);
        self.names.insert(name, self.nodes.len() - 1);
    }

    /// The model after a step.
    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Create { name, tag, length } => {
                self.make(name, Node::File { tag, length, mode: 0o644, xattr: None })
            }
            Step::Overwrite { name, tag: new, length: l } => {
                if let Some(Node::File { tag, length, .. }) = self.file(name) {
                    (*tag, *length) = (new, l);
                }
            }
            Step::Append { name, length: more } => {
                if let Some(Node::File { length, .. }) = self.file(name) {
                    *length += more;
                }
            }
            Step::Truncate { name, length: l } => {
                if let Some(Node::File { length, .. }) = self.file(name) {
                    *length = l;
                }
            }
            Step::Unlink { name } | Step::RemoveDirectory { name } => {
                self.names.remove(&name);
            }
            Step::Rename { name, to } => {
                if self.names.get(&name) != self.names.get(&to) {
                    if let Some(node) = self.names.remove(&name) {
                        self.names.insert(to, node);
                    }
                }
            }
            Step::Link { name, to } => {
                if let Some(node) = self.names.get(&name).copied() {
                    self.names.insert(to, node);
                }
            }
            Step::Symlink { name, tag } => self.make(name, Node::Symlink { tag }),
            Step::MakeDirectory { name } => self.make(name, Node::Directory),
            Step::Chmod { name, mode: m } => {
                if let Some(Node::File { mode, .. }) = self.file(name) {
                    *mode = m;
                }
            }
            Step::SetXattr { name, tag } => {
                if let Some(Node::File { xattr, .. }) = self.file(name) {
                    *xattr = Some(tag);
                }
            }
        }
    }

    /// The models that the directory may match if it is unknown whether a step completed: before it, after it, and for
    /// data every length in between.
    fn possible(&self, step: &Step) -> Vec<(Model, Option<Partly>)> {
        let mut after = self.clone();
        after.apply(step);
        let mut all = vec![(self.clone(), None), (after.clone(), None)];
        match *step {
            // The name exists, with a part of the bytes.
            Step::Create { name, .. } | Step::Overwrite { name, .. } => {
                all.push((after, Some(Partly { name, at_least: 0 })))
            }
            Step::Append { name, .. } => {
                let Some(Node::File { length, .. }) = self.node(name) else { return all };
                all.push((after, Some(Partly { name, at_least: *length })))
            }
            _ => {}
        }
        all
    }

    /// The differences between the model and the directory.
    fn differences(&self, door: &dyn Door, partly: Option<Partly>) -> Vec<String> {
        let mut wrong = Vec::new();
        let there = match door.names(".") {
            Ok(names) => names,
            Err(errno) => return vec![format!("the directory cannot be listed: {errno}")],
        };
        let expected: Vec<Vec<u8>> = {
            let mut names: Vec<_> = self.names.keys().map(|n| path(*n).into_bytes()).collect();
            names.sort();
            names
        };
        if there != expected {
            let text = |names: &[Vec<u8>], other: &[Vec<u8>]| {
                let only = names.iter().filter(|n| !other.contains(n));
                only.map(|n| String::from_utf8_lossy(n).into_owned()).collect::<Vec<_>>().join(" ")
            };
            wrong.push(format!(
                "missing: [{}], too much: [{}]",
                text(&expected, &there),
                text(&there, &expected)
            ));
        }
        for (&name, &index) in &self.names {
            // All names of a partly written file show the same part.
            let part = partly.filter(|p| self.names.get(&p.name) == Some(&index));
            if let Err(what) = self.compare(door, name, part) {
                wrong.push(format!("{}: {what}", path(name)));
            }
        }
        wrong
    }

    fn compare(&self, door: &dyn Door, name: u64, part: Option<Partly>) -> Result<(), String> {
        let said = |errno: Errno| format!("{errno}");
        let stat = door.lstat(path(name)).map_err(said)?;
        match self.node(name) {
            Some(Node::File { tag, length, mode, xattr }) => {
                if stat.kind() != libc::S_IFREG || u64::from(stat.permissions()) != *mode {
                    return Err(format!("has mode {:o}, expected a file with {mode:o}", stat.mode));
                }
                if stat.nlink != self.links(name) {
                    return Err(format!("has {} links, expected {}", stat.nlink, self.links(name)));
                }
                let seen = door.get(path(name)).map_err(said)?;
                let at_least = part.map_or(*length, |p| p.at_least);
                if !(at_least..=*length).contains(&(seen.len() as u64)) || stat.size != seen.len() as i64 {
                    return Err(format!("has {} bytes (stat: {}), expected {length}", seen.len(), stat.size));
                }
                if let Some(at) = seen.iter().zip(0..).position(|(b, at)| *b != byte(*tag, at)) {
                    return Err(format!("has another byte at {at} of {}", seen.len()));
                }
                let mut value = [0; 8];
                let seen = match door.get_xattr(path(name).as_bytes(), true, b"user.tag", &mut value) {
                    Ok(_) => Some(u64::from_le_bytes(value)),
                    Err(Errno(libc::ENODATA)) => None,
                    Err(errno) => return Err(format!("its attribute cannot be read: {errno}")),
                };
                if seen != *xattr {
                    return Err(format!("has attribute {seen:?}, expected {xattr:?}"));
                }
            }
            Some(Node::Symlink { tag }) => {
                let seen = door.read_link(path(name)).map_err(said)?;
                if seen != target(*tag) {
                    return Err("is another symbolic link".into());
                }
            }
            Some(Node::Directory) => {
                let empty = stat.kind() == libc::S_IFDIR && door.names(path(name)).map_err(said)?.is_empty();
                return if empty { Ok(()) } else { Err("is no empty directory".into()) };
            }
            None => {}
        }
        Ok(())
    }
}

fn target(tag: u64) -> Vec<u8> {
    format!("to/{tag}/{}", "x".repeat((tag % 200) as usize)).into_bytes()
}

/// xorshift64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A step that is possible now.
fn choose(model: &Model, dice: &mut Dice) -> Step {
    let (name, to) = (dice.below(NAMES), dice.below(NAMES));
    let (tag, length) = (dice.below(1 << 40), dice.below(BYTES_MAX));
    // Most files are small, as in practice.
    let length = if dice.below(4) > 0 { length / 40 } else { length };
    let is_directory = |name| matches!(model.node(name), Some(Node::Directory));
    match model.node(name) {
        None => match dice.below(10) {
            0 => Step::MakeDirectory { name },
            1 => Step::Symlink { name, tag },
            _ => Step::Create { name, tag, length },
        },
        Some(Node::Directory) => match dice.below(2) {
            0 if model.node(to).is_none() => Step::Rename { name, to },
            _ => Step::RemoveDirectory { name },
        },
        Some(Node::Symlink { .. }) => match dice.below(2) {
            0 if !is_directory(to) => Step::Rename { name, to },
            _ => Step::Unlink { name },
        },
        Some(Node::File { length: has, .. }) => match dice.below(12) {
            0..=2 if !is_directory(to) => Step::Rename { name, to },
            3 if model.node(to).is_none() => Step::Link { name, to },
            4 => Step::Overwrite { name, tag, length },
            5 if *has < BYTES_MAX => Step::Append { name, length: length / 4 + 1 },
            6 if *has > 0 => Step::Truncate { name, length: dice.below(*has) },
            7 => Step::Chmod { name, mode: 0o600 + dice.below(0o100) },
            8 => Step::SetXattr { name, tag },
            _ => Step::Unlink { name },
        },
    }
}

/// Executes a step.
fn act(door: &dyn Door, model: &Model, step: &Step) -> Outcome<()> {
    let put = |name: u64, flags: i32, bytes: &[u8]| -> Outcome<()> {
        let fd = door.open(path(name), O_WRONLY | flags, 0o644)?;
        // Several writes, so that a kill can leave a file partly written.
        bytes.chunks(17_000).try_for_each(|chunk| match door.write(&fd, chunk)? {
            n if n == chunk.len() => Ok(()),
            _ => Err(Errno(libc::EIO)),
        })
    };
    match *step {
        Step::Create { name, tag, length } => put(name, O_CREAT | O_EXCL, &bytes(tag, 0, length)),
        Step::Overwrite { name, tag, length } => put(name, O_TRUNC, &bytes(tag, 0, length)),
        Step::Append { name, length } => match model.node(name) {
            Some(Node::File { tag, length: has, .. }) => {
                put(name, O_APPEND, &bytes(*tag, *has, has + length))
            }
            _ => Err(Errno(libc::EINVAL)),
        },
        Step::Truncate { name, length } => door.truncate(path(name).as_bytes(), length as i64),
        Step::Unlink { name } => door.unlink(path(name)),
        Step::Rename { name, to } => door.rename(path(name), path(to)),
        Step::Link { name, to } => door.link(path(name), path(to)),
        Step::Symlink { name, tag } => door.symlink(target(tag), path(name)),
        Step::MakeDirectory { name } => door.make_directory(path(name)),
        Step::RemoveDirectory { name } => door.remove_directory(path(name)),
        Step::Chmod { name, mode } => door.chmod(path(name), mode as u32),
        Step::SetXattr { name, tag } => {
            door.set_xattr(path(name).as_bytes(), true, b"user.tag", &tag.to_le_bytes(), 0)
        }
    }
}

/// Changes the directory that the door entered until `steps` are done or the process is killed. Any failed call ends it
/// with an error: kills of other processes must not be visible to this program.
pub fn run(door: &dyn Door, seed: u64, journal: &Path, steps: u64) -> Result<(), String> {
    let mut journal = File::create(journal).map_err(|e| format!("{}: {e}", journal.display()))?;
    let mut dice = Dice(seed | 1);
    let mut model = Model::default();
    for i in 0..steps {
        let step = choose(&model, &mut dice);
        writeln!(journal, "begin {}", step.words()).map_err(|e| format!("the journal: {e}"))?;
        act(door, &model, &step)
            .map_err(|errno| format!("step {i} (seed {seed}), {}: {errno}", step.words()))?;
        writeln!(journal, "done").map_err(|e| format!("the journal: {e}"))?;
        model.apply(&step);
        // Inodes without a name are removed from the model, so that it does not grow without limit.
        if i % 1000 == 999 {
            model = model.compact();
        }
    }
    Ok(())
}

impl Model {
    fn compact(&self) -> Model {
        let mut small = Model::default();
        let mut moved: BTreeMap<usize, usize> = BTreeMap::new();
        for (&name, &index) in &self.names {
            let to = *moved.entry(index).or_insert_with(|| {
                small.nodes.push(self.nodes[index].clone());
                small.nodes.len() - 1
            });
            small.names.insert(name, to);
        }
        small
    }
}

/// Checks the directory that the door entered against a journal. Returns the number of acknowledged steps.
pub fn check(door: &dyn Door, journal: &Path) -> Result<u64, String> {
    let text = std::fs::read_to_string(journal).map_err(|e| format!("{}: {e}", journal.display()))?;
    let mut model = Model::default();
    let mut begun: Option<Step> = None;
    let mut done = 0;
    let whole_lines = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole_lines.lines() {
        if let Some(words) = line.strip_prefix("begin ") {
            begun = Some(Step::parse(words).ok_or(format!("the journal has {words:?}"))?);
        } else if let Some(step) = begun.take() {
            model.apply(&step);
            done += 1;
        }
    }
    let possible = match &begun {
        None => vec![(model, None)],
        Some(step) => model.possible(step),
    };
    let found: Vec<Vec<String>> = possible.iter().map(|(m, partly)| m.differences(door, *partly)).collect();
    if found.iter().any(Vec::is_empty) {
        return Ok(done);
    }
    let last = begun.map_or("none".into(), |s| s.words());
    Err(format!("after {done} steps (and perhaps {last}) the directory differs: {}", found[0].join("; ")))
}

/// Removes everything from the directory that the door entered.
pub fn clear(door: &dyn Door) -> Outcome<()> {
    for name in door.names(".")? {
        match door.unlink(&name) {
            Err(Errno(libc::EISDIR)) => door.remove_directory(&name)?,
            other => other?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_read_back_from_its_words() {
        let mut dice = Dice(7);
        let mut model = Model::default();
        for _ in 0..5000 {
            let step = choose(&model, &mut dice);
            assert_eq!(Step::parse(&step.words()), Some(step.clone()));
            model.apply(&step);
        }
        assert_eq!(Step::parse("create 1 2"), None);
    }
}
