//! Whether a history can be: whether its operations, each somewhere between question and answer, in some order, do to a file
//! tree what clients were told (linearizability, Herlihy and Wing 1990; the search follows the answers in time, as Lowe's
//! just-in-time linearization, 2017). What was not answered, or with EIO, may have happened at any time since, or not at all.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_types::Ino;

use crate::history::{Event, History, Op, Outcome};
use crate::model::State;

/// Most trees that may be looked at for one answer: then the history is too tangled to be judged.
const LOOKS_MAX: usize = 400_000;

/// What may be, at one point in time: a tree, and which operations have happened that were not answered yet.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Possible {
    state: State,
    happened: BTreeSet<usize>,
}

/// Why a history is not accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Sound,
    /// This operation cannot have been answered so.
    Impossible(usize, String),
    /// Too many are in doubt at this operation.
    Tangled(usize),
}

/// True when the order of two operations may matter.
fn conflict(a: &Op, b: &Op) -> bool {
    let structural = |op: &Op| matches!(op, Op::Rmdir { .. } | Op::Rename { .. });
    if structural(a) || structural(b) {
        return true;
    }
    let inode = |op: &Op| match op {
        Op::Link { ino, .. } | Op::Stat { ino } | Op::Chmod { ino, .. } => Some(*ino),
        Op::SetXattr { ino, .. } | Op::GetXattr { ino } => Some(*ino),
        Op::Write { ino, .. } | Op::Read { ino, .. } => Some(*ino),
        Op::Append { ino, .. } | Op::ReadAppended { ino } => Some(*ino),
        Op::Truncate { ino, .. } | Op::Allocate { ino, .. } | Op::Size { ino } => Some(*ino),
        _ => None,
    };
    let unlinks = |op: &Op| matches!(op, Op::Unlink { .. });
    let entry = |op: &Op| match op {
        Op::Create { dir, name, .. } | Op::Mkdir { dir, name } | Op::Symlink { dir, name } => {
            Some((*dir, Some(*name)))
        }
        Op::Link { dir, name, .. } | Op::Unlink { dir, name } | Op::Lookup { dir, name } => {
            Some((*dir, Some(*name)))
        }
        Op::List { dir }
        | Op::ListPart { dir, .. }
        | Op::Widen { dir }
        | Op::WidenNew { dir }
        | Op::Count { dir } => Some((*dir, None)),
        _ => None,
    };
    let same_inode = inode(a).is_some() && inode(a) == inode(b);
    let may_unlink = (unlinks(a) && inode(b).is_some()) || (unlinks(b) && inode(a).is_some());
    let same_entry = match (entry(a), entry(b)) {
        (Some((da, na)), Some((db, nb))) => da == db && (na == nb || na.is_none() || nb.is_none()),
        _ => false,
    };
    same_inode || may_unlink || same_entry
}

/// The unanswered operations whose order may matter to `index`, itself among them.
fn relevant(history: &History, open: &BTreeSet<usize>, index: usize) -> Vec<usize> {
    let mut found = vec![index];
    let mut next = 0;
    while let Some(of) = found.get(next).copied() {
        next += 1;
        let conflicting = |i: &&usize| conflict(&history.entries[of].op, &history.entries[**i].op);
        let more: Vec<usize> =
            open.iter().filter(|i| !found.contains(i)).filter(conflicting).copied().collect();
        found.extend(more);
    }
    found
}

/// Judges a history.
pub(crate) fn judge(history: &History) -> Verdict {
    let in_doubt = |i: usize| history.entries[i].outcome.as_ref().is_none_or(Outcome::is_doubtful);
    let mut possible = vec![Possible { state: State::new(), happened: BTreeSet::new() }];
    let mut open: BTreeSet<usize> = BTreeSet::new();
    // Inodes that were to get names on other nodes, as far as was asked by now.
    let mut linked: HashSet<Ino> = HashSet::new();
    let widened: HashSet<Ino> = history
        .entries
        .iter()
        .filter_map(|entry| if let Op::Widen { dir } = entry.op { Some(dir) } else { None })
        .collect();
    let all_widened = history.entries.iter().any(|entry| matches!(entry.op, Op::WidenNew { .. }));
    for event in &history.events {
        let index = match *event {
            Event::Asked(index) => {
                if let Op::Link { ino, dir, .. } = history.entries[index].op {
                    if ino.birth_node() != dir.birth_node() || all_widened || widened.contains(&dir) {
                        linked.insert(ino);
                    }
                }
                if !(in_doubt(index) && history.entries[index].op.only_reads()) {
                    open.insert(index);
                }
                continue;
            }
            Event::Answered(index) if in_doubt(index) => continue,
            Event::Answered(index) | Event::Over(index) => index,
        };

        let concerned = relevant(history, &open, index);
        let mut seen: HashSet<Possible> = HashSet::new();
        let mut left: Vec<Possible> = possible.clone();
        let mut next: HashSet<Possible> = HashSet::new();
        if history.entries[index].again {
            next.extend(possible.iter().cloned()); // it never happened
        }
        while let Some(mut p) = left.pop() {
            if p.happened.remove(&index) {
                next.insert(p);
                continue;
            }
            if seen.contains(&p) {
                continue;
            }
            if seen.len() > LOOKS_MAX {
                return Verdict::Tangled(index);
            }
            for &i in concerned.iter().filter(|i| !p.happened.contains(i)) {
                let entry = &history.entries[i];
                let told = if in_doubt(i) { None } else { entry.outcome.as_ref() };
                let settled = history.settled.is_some_and(|at| index >= at);
                let linked = matches!(entry.op, Op::Stat { ino } if linked.contains(&ino));
                for state in p.state.after(&entry.op, told, (i, entry.node), settled, linked) {
                    let mut q = Possible { state, happened: p.happened.clone() };
                    q.happened.insert(i);
                    left.push(q);
                }
            }
            seen.insert(p);
        }
        open.remove(&index);
        if next.is_empty() {
            return Verdict::Impossible(index, explain(history, index, &possible));
        }
        possible = next.into_iter().collect();
    }
    Verdict::Sound
}

/// What people want to know of an operation that cannot be.
fn explain(history: &History, index: usize, possible: &[Possible]) -> String {
    let entry = &history.entries[index];
    let mut text = format!("#{index} of client {}: {:?} -> {:?}\n", entry.client, entry.op, entry.outcome);
    text += "unanswered or answered since, and of influence:\n";
    let from = index.saturating_sub(400);
    for (i, other) in history.entries.iter().enumerate().skip(from) {
        if i != index && !other.op.only_reads() && conflict(&other.op, &entry.op) {
            text += &format!("  #{i} of client {}: {:?} -> {:?}\n", other.client, other.op, other.outcome);
        }
    }
    if let Some(p) = possible.first() {
        text += &format!("one of {} trees that could be before: {:?}\n", possible.len(), p.state);
    }
    text
}

/// Where inodes are that clients were told of twice.
pub(crate) fn numbers_given_twice(history: &History) -> Vec<String> {
    let mut made = BTreeMap::new();
    let mut twice = Vec::new();
    for (i, entry) in history.entries.iter().enumerate() {
        let makes = matches!(entry.op, Op::Create { .. } | Op::Mkdir { .. } | Op::Symlink { .. });
        if let (true, Some(Outcome::Inode(ino))) = (makes, &entry.outcome) {
            if let Some(before) = made.insert(*ino, i) {
                twice.push(format!("inode {ino} by #{before} and #{i}"));
            }
        }
    }
    twice
}
