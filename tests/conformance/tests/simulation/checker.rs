//! Judges whether a history is possible: whether its operations, each at one moment between request and reply, in some
//! order, do to a file tree what the replies say (linearizability, Herlihy and Wing 1990). The search takes the replies
//! in order of time (just-in-time linearization, Lowe 2017). An operation without a reply, or with EIO, may have
//! happened at any time after its request, or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use forebay_types::Ino;

use crate::history::{Event, History, Op, Outcome};
use crate::model::{Id, State};
use crate::reach::{Leads, Pending, Reach};

/// The most trees that the search examines for one reply. Above it the history is too tangled to be judged.
const LOOKS_MAX: usize = 4_000_000;

/// A possible situation at one time: a tree, and the operations that have happened and had no reply yet.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Possible {
    state: State,
    happened: BTreeSet<usize>,
}

/// The judgement of a history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Sound,
    /// The reply to this operation is impossible. The text explains it.
    Impossible(usize, String),
    /// Too many operations are in doubt at this operation.
    Tangled(usize),
}

/// The most operations whose order may matter to one reply: each is a bit of a `u128`.
const CONCERNED_MAX: usize = u128::BITS as usize;

/// Selects the pending operations whose order may matter to the first of them, directly or through others. The first
/// one comes first. Also returns, for each selected operation, a mask of the selected ones that it meets.
fn concerned(pending: &[Pending<'_>], leads: &Leads) -> (Vec<usize>, Vec<u128>) {
    let reaches: Vec<Reach> = pending.iter().map(|one| Reach::of(*one, leads)).collect();
    let mut found = vec![0];
    let mut next = 0;
    while let Some(of) = found.get(next).copied() {
        next += 1;
        let meets = |i: &usize| !found.contains(i) && reaches[of].meets(&reaches[*i]);
        let more: Vec<usize> = (0..pending.len()).filter(meets).collect();
        found.extend(more);
    }
    found.truncate(CONCERNED_MAX + 1);
    let met = |of: &usize| {
        let bits = found.iter().enumerate().take(CONCERNED_MAX);
        bits.fold(0, |met, (bit, i)| if reaches[*of].meets(&reaches[*i]) { met | 1 << bit } else { met })
    };
    (found.iter().map(|i| pending[*i].0).collect(), found.iter().map(met).collect())
}

/// Removes each `Possible` that allows nothing that another one does not allow. The other one has the same tree; all
/// operations that it lacks are in doubt, and all that it has in addition change nothing.
fn without_lesser(
    all: HashSet<Possible>,
    in_doubt: impl Fn(usize) -> bool,
    changes_nothing: impl Fn(usize) -> bool,
) -> Vec<Possible> {
    let mut by_state: HashMap<State, Vec<BTreeSet<usize>>> = HashMap::new();
    for Possible { state, happened } in all {
        let others = by_state.entry(state).or_default();
        let is_lesser = |one: &BTreeSet<usize>, other: &BTreeSet<usize>| {
            one.difference(other).all(|i| in_doubt(*i)) && other.difference(one).all(|i| changes_nothing(*i))
        };
        if !others.iter().any(|other| is_lesser(&happened, other)) {
            others.retain(|other| !is_lesser(other, &happened));
            others.push(happened);
        }
    }
    let of = |(state, all): (State, Vec<BTreeSet<usize>>)| {
        all.into_iter().map(move |happened| Possible { state: state.clone(), happened })
    };
    by_state.into_iter().flat_map(of).collect()
}

/// What reads of appended files show, collected before the search.
struct Appends {
    /// The longest content that was read of each file. Every earlier content is a prefix of it, and every later content
    /// begins with it.
    longest: HashMap<Ino, Vec<u32>>,
}

impl Appends {
    /// Collects this of a history. Fails with the number of an operation that read a part of an append that is not in
    /// doubt, or of no append at all.
    fn of(history: &History, in_doubt: impl Fn(usize) -> bool) -> Result<Appends, usize> {
        let (mut longest, mut torn): (HashMap<Ino, Vec<u32>>, HashMap<Ino, BTreeSet<u32>>) =
            Default::default();
        for (i, entry) in history.entries.iter().enumerate() {
            if let Op::Append { ino, value, spread: true, .. } = entry.op {
                if in_doubt(i) {
                    // Some nodes may have written their parts of the append, and others not.
                    torn.entry(ino).or_default().extend([0, value]);
                }
            }
        }
        for (i, entry) in history.entries.iter().enumerate() {
            if let (Op::ReadAppended { ino }, Some(Outcome::Appended { whole, torn: found })) =
                (&entry.op, &entry.outcome)
            {
                if !found.is_subset(torn.entry(*ino).or_default()) {
                    return Err(i);
                }
                let before = longest.entry(*ino).or_default();
                if whole.len() > before.len() {
                    before.clone_from(whole);
                }
            }
        }
        Ok(Appends { longest })
    }

    /// False for an append whose value no read shows. If the append is also in doubt, nothing depends on it.
    fn shows(&self, op: &Op) -> bool {
        match op {
            Op::Append { ino, value, .. } => self.longest.get(ino).is_some_and(|all| all.contains(value)),
            _ => true,
        }
    }

    /// True when the file's content in `tree` agrees with what was read of it, earlier or later.
    fn fits(&self, op: &Op, tree: &State) -> bool {
        let Op::Append { ino, .. } = op else { return true };
        let (Some(longest), Some(file)) = (self.longest.get(ino), tree.files.get(&Id::Known(ino.0))) else {
            return true;
        };
        file.appended.iter().zip(longest).all(|(has, read)| has == read)
    }

    /// Sorts the values behind the longest content that was read: no read shows their order, so that trees that differ
    /// in it alone allow the same.
    fn order_unread(&self, op: &Op, tree: &mut State) {
        let Op::Append { ino, .. } = op else { return };
        let read = self.longest.get(ino).map_or(0, Vec::len);
        if let Some(unread) = tree.files.get_mut(&Id::Known(ino.0)).and_then(|f| f.appended.get_mut(read..)) {
            unread.sort_unstable();
        }
    }
}

/// Judges a history.
pub(crate) fn judge(history: &History) -> Verdict {
    let in_doubt = |i: usize| history.entries[i].outcome.as_ref().is_none_or(Outcome::is_doubtful);
    let appends = match Appends::of(history, in_doubt) {
        Ok(appends) => appends,
        Err(index) => return Verdict::Impossible(index, explain(history, index, &[], &[index])),
    };
    let mut possible = vec![Possible { state: State::new(), happened: BTreeSet::new() }];
    let mut open: BTreeSet<usize> = BTreeSet::new();
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
                    // The file's home counts the name from now on, until it receives the outcome.
                    if ino.birth_node() != dir.birth_node() || all_widened || widened.contains(&dir) {
                        possible.iter_mut().for_each(|p| p.state.goes_abroad(ino));
                    }
                }
                let op = &history.entries[index].op;
                if !in_doubt(index) || !op.only_reads() && appends.shows(op) {
                    open.insert(index);
                }
                continue;
            }
            Event::Answered(index) if in_doubt(index) => continue,
            Event::Answered(index) | Event::Over(index) => index,
        };

        let told = |i: usize| history.entries[i].outcome.as_ref().filter(|_| !in_doubt(i));
        let changes_nothing = |i: usize| {
            told(i).is_some_and(|o| matches!(o, Outcome::Failed(_)) || history.entries[i].op.only_reads())
        };
        let pending: Vec<Pending<'_>> = std::iter::once(index)
            .chain(open.iter().copied().filter(|i| *i != index))
            .map(|i| (i, &history.entries[i].op, told(i)))
            .collect();
        let leads = Leads::new(&pending, possible.iter().map(|p| &p.state));
        let (concerned, meets) = concerned(&pending, &leads);
        if concerned.len() > CONCERNED_MAX {
            return Verdict::Tangled(index);
        }
        // The mask beside each `Possible` has the idle operations: those that the search has placed for this reply and
        // that no operation placed after them meets.
        let mut seen: HashSet<(Possible, u128)> = HashSet::new();
        let mut left: Vec<(Possible, u128)> = possible.iter().map(|p| (p.clone(), 0)).collect();
        let ways = |state: &State, i: usize| {
            let entry = &history.entries[i];
            let settled = history.settled.is_some_and(|at| index >= at);
            let mut after = state.after(&entry.op, told(i), (i, entry.node), settled);
            after.retain(|tree| appends.fits(&entry.op, tree));
            after.iter_mut().for_each(|tree| appends.order_unread(&entry.op, tree));
            after
        };
        let mut next: HashSet<Possible> = HashSet::new();
        if matches!(event, Event::Over(_)) {
            next.extend(possible.iter().cloned()); // the operation never happened
        }
        while let Some((mut p, mut idle)) = left.pop() {
            // An operation that changes nothing is placed as soon as it fits: this excludes no order.
            for (bit, &i) in concerned.iter().enumerate().filter(|(_, i)| changes_nothing(**i)) {
                if !p.happened.contains(&i) && ways(&p.state, i).contains(&p.state) {
                    p.happened.insert(i);
                    idle &= !meets[bit];
                }
            }
            if p.happened.remove(&index) {
                // Idle operations can as well happen later: a `Possible` without them is found too.
                if idle == 0 {
                    next.insert(p);
                }
                continue;
            }
            let reached = (p, idle);
            if seen.contains(&reached) {
                continue;
            }
            if seen.len() > LOOKS_MAX {
                return Verdict::Tangled(index);
            }
            let p = &reached.0;
            for (bit, &i) in concerned.iter().enumerate().filter(|(_, i)| !p.happened.contains(i)) {
                let idle = idle & !meets[bit] | u128::from(bit > 0) << bit;
                for state in ways(&p.state, i) {
                    let mut happened = p.happened.clone();
                    happened.insert(i);
                    left.push((Possible { state, happened }, idle));
                }
            }
            seen.insert(reached);
        }
        open.remove(&index);
        if next.is_empty() {
            return Verdict::Impossible(index, explain(history, index, &possible, &concerned));
        }
        possible = without_lesser(next, in_doubt, changes_nothing);
    }
    Verdict::Sound
}

/// Describes an impossible operation for the report.
fn explain(history: &History, index: usize, possible: &[Possible], concerned: &[usize]) -> String {
    let entry = &history.entries[index];
    let mut text = format!("#{index} of client {}: {:?} -> {:?}\n", entry.client, entry.op, entry.outcome);
    text += "unanswered or answered since, and of influence:\n";
    for i in &concerned[1..] {
        let other = &history.entries[*i];
        text += &format!("  #{i} of client {}: {:?} -> {:?}\n", other.client, other.op, other.outcome);
    }
    if let Some(p) = possible.first() {
        text += &format!("one of {} trees that could be before: {:?}\n", possible.len(), p.state);
    }
    text
}

/// The inode numbers that two creating operations returned.
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
