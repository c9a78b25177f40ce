//! Checks whether a history of atomic operations on one word is linearizable (Herlihy and Wing 1990): whether there is an
//! order of the calls in which each sees what the one before it left, and in which a call that ended before another began
//! comes first. The search is Wing's and Gong's (1993) with Lowe's memory of states (2017).
//!
//! A call whose outcome is unknown may have taken effect at any time after its start, or never.

use std::collections::HashSet;

use forebay_types::AtomicOp;

/// States that are visited before the check gives up. A history with unique values needs about one for each call.
const STATES_MAX: usize = 2_000_000;

/// A call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// When it began, by a clock that all callers share.
    pub began: u64,
    /// When it ended, and what the word was before. None if its outcome is unknown.
    pub ended: Option<(u64, u64)>,
    /// What was asked.
    pub op: AtomicOp,
}

/// A set of calls, by their indexes.
type Set = Vec<u64>;

fn has(set: &Set, i: usize) -> bool {
    set[i / 64] >> (i % 64) & 1 == 1
}

/// What the word is after an operation that finds `word`.
pub fn after(op: AtomicOp, word: u64) -> u64 {
    let cell = std::sync::atomic::AtomicU64::new(word);
    op.apply(&cell);
    cell.into_inner()
}

/// The calls that may come next: those that began before every other known one that is left has ended. Those whose outcome
/// is known come last, so that they are tried first.
fn next(calls: &[Call], first: usize, done: &Set, word: u64) -> Vec<usize> {
    let left = || (first..calls.len()).filter(|i| !has(done, *i));
    let until = left().filter_map(|i| calls[i].ended).map(|(ended, _)| ended).min().unwrap_or(u64::MAX);
    let possible = left().take_while(|i| calls[*i].began <= until);
    let fits = |i: &usize| calls[*i].ended.is_none_or(|(_, was)| was == word);
    let (known, unknown): (Vec<_>, Vec<_>) = possible.filter(fits).partition(|i| calls[*i].ended.is_some());
    // One that changes nothing has no effect on others.
    let unknown = unknown.into_iter().filter(|i| after(calls[*i].op, word) != word);
    unknown.chain(known).collect()
}

/// Checks the calls on a word that was `initial` before all of them.
///
/// # Errors
/// The first call that fits in no order, as far as the search has come; or that it was given up.
pub fn check(initial: u64, calls: &[Call]) -> Result<(), String> {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.began);
    let known = calls.iter().filter(|call| call.ended.is_some()).count();
    let mut seen = HashSet::new();
    let mut farthest = (0, vec![0u64; calls.len().div_ceil(64)], initial);
    // The calls in order, the known ones among them, the word after them, and what may come next.
    let start = (0, farthest.1.clone(), initial, next(&calls, 0, &farthest.1, initial));
    let mut path = vec![start];
    while let Some((done_known, done, word, candidates)) = path.last_mut() {
        if *done_known == known {
            return Ok(());
        }
        if *done_known > farthest.0 {
            farthest = (*done_known, done.clone(), *word);
        }
        let Some(i) = candidates.pop() else {
            path.pop();
            continue;
        };
        let mut set = done.clone();
        set[i / 64] |= 1 << (i % 64);
        let (word, done_known) =
            (after(calls[i].op, *word), *done_known + usize::from(calls[i].ended.is_some()));
        if !seen.insert((set.clone(), word)) {
            continue;
        }
        if seen.len() > STATES_MAX {
            return Err(format!("undecided after {STATES_MAX} states"));
        }
        let first = (0..calls.len()).find(|i| !has(&set, *i)).unwrap_or(calls.len());
        let candidates = next(&calls, first, &set, word);
        path.push((done_known, set, word, candidates));
    }
    let (count, done, word) = farthest;
    let stuck: Vec<_> = (0..calls.len()).filter(|i| !has(&done, *i)).take(8).map(|i| calls[i]).collect();
    Err(format!("after {count} of {known} calls the word is {word:#x}, and none of these fits: {stuck:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    fn call(began: u64, ended: u64, op: AtomicOp, was: u64) -> Call {
        Call { began, ended: Some((ended, was)), op }
    }

    const ADD: AtomicOp = AtomicOp::Add { by: 1 };

    #[test]
    fn orders_that_exist_are_found_and_those_that_contradict_time_are_not() {
        assert_eq!(check(5, &[]), Ok(()));
        let overlapping = [call(0, 10, ADD, 6), call(1, 9, ADD, 5)];
        assert_eq!(check(5, &overlapping), Ok(()));
        let one_after_the_other = [call(0, 3, ADD, 6), call(4, 9, ADD, 5)];
        assert!(check(5, &one_after_the_other).unwrap_err().contains("none of these fits"));
        let both_see_one_value = [call(0, 10, ADD, 5), call(1, 9, ADD, 5)];
        assert!(check(5, &both_see_one_value).is_err());
        let stale = [call(0, 1, AtomicOp::Swap { new: 9 }, 5), call(2, 3, AtomicOp::Load, 5)];
        assert!(check(5, &stale).is_err());
        let failed = AtomicOp::CompareAndSwap { expected: 7, new: 8 };
        assert_eq!(check(5, &[call(0, 1, failed, 5), call(2, 3, ADD, 5)]), Ok(()));
    }

    #[test]
    fn unknown_call_has_happened_once_or_never_and_not_before_it_began() {
        let unknown = Call { began: 5, ended: None, op: AtomicOp::Swap { new: 9 } };
        let load = |at, was| call(at, at + 1, AtomicOp::Load, was);
        assert_eq!(check(0, &[unknown, load(20, 0), load(30, 9), load(40, 9)]), Ok(()));
        assert_eq!(check(0, &[unknown, load(20, 0)]), Ok(()));
        assert!(check(0, &[unknown, load(20, 9), load(30, 0)]).is_err());
        assert!(check(0, &[load(0, 9), unknown]).is_err());
        let swap = call(10, 11, AtomicOp::Swap { new: 3 }, 0);
        // Twice.
        assert!(check(0, &[unknown, load(8, 9), swap, load(20, 9)]).is_err());
    }

    /// Threads on one word: what the processor does is linearizable, and a result that is changed is noticed.
    #[test]
    fn history_of_threads_is_accepted_and_a_wrong_result_in_it_is_not() {
        let (word, clock) = (AtomicU64::new(0), Instant::now());
        let now = || clock.elapsed().as_nanos() as u64;
        let mut calls: Vec<Call> = std::thread::scope(|scope| {
            let run = |t: u64| {
                let word = &word;
                move || {
                    let each = |i: u64| {
                        let op = match i % 3 {
                            0 => AtomicOp::Swap { new: t << 32 | i },
                            1 => AtomicOp::Add { by: t << 48 | i },
                            _ => AtomicOp::CompareAndSwap {
                                expected: word.load(Ordering::SeqCst),
                                new: t << 40 | i,
                            },
                        };
                        let began = now();
                        let was = op.apply(word);
                        Call { began, ended: Some((now(), was)), op }
                    };
                    (1..200).map(each).collect::<Vec<_>>()
                }
            };
            let threads: Vec<_> = (1..5).map(|t| scope.spawn(run(t))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(check(0, &calls), Ok(()));
        let middle = calls.len() / 2;
        calls[middle].ended = calls[middle].ended.map(|(ended, was)| (ended, was ^ 1 << 60));
        assert!(check(0, &calls).is_err());
    }
}
