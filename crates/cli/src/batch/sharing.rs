//! Whether one more transfer may join those that run at a store: the rule, and what was measured of the store.
//!
//! With `k` transfers at a time, the last of `n` equal ones ends after `n / S(k)`, where `S(k)` is the store's total
//! rate, and the mean is proportional to `(n + k) / S(k)`. So one more shortens the mean until a job may start exactly
//! if `S(k + 1) / S(k)`, the *growth*, is more than `(n + k + 1) / (n + k)`. A store that is limited by its bandwidth
//! has a growth of 1, and transfers run in turn. One whose calls take long, or small files, give a growth up to
//! `(k + 1) / k`, and transfers share it.
//!
//! The growth is measured when a transfer joins others (`turns`): these keep a part of their rate, and if the newcomer
//! gets as much as each of them, the growth is `(k + 1) / k` times that part. The transfers' own sizes of files do not
//! matter. It depends on which ways data go, as reads and writes may have limits of their own.

use std::path::{Path, PathBuf};

use forebay_types::Result;
use serde::{Deserialize, Serialize};

use super::registry::{self, now_s};

/// A growth that is less is within the errors of measurement.
const LEAST: f64 = 1.1;
/// How long a figure counts, in seconds. Then it is measured again.
pub(crate) const FRESH_S: u64 = 3600;

/// What runs at a store, and what would join it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Mix {
    pub(crate) ins: usize,
    pub(crate) outs: usize,
    pub(crate) joins_in: bool,
}

impl Mix {
    fn running(self) -> usize {
        self.ins + self.outs
    }

    /// The growth, if those that run keep `part` of their rate.
    pub(crate) fn growth(self, part: f64) -> f64 {
        let running = self.running().max(1) as f64;
        part * (running + 1.0) / running
    }

    /// The growth that one more needs, if the store has so many transfers in all.
    pub(crate) fn needed(self, transfers: usize) -> f64 {
        let both = (transfers + self.running()) as f64;
        ((both + 1.0) / both.max(1.0)).max(LEAST)
    }

    pub(crate) fn text(self) -> String {
        let counted = |count: usize, way: &str| match count {
            0 => None,
            1 => Some(format!("1 stage-{way}")),
            n => Some(format!("{n} stage-{way}s")),
        };
        let running: Vec<String> =
            [counted(self.ins, "in"), counted(self.outs, "out")].into_iter().flatten().collect();
        format!("a stage-{} beside {}", if self.joins_in { "in" } else { "out" }, running.join(" and "))
    }
}

/// What was measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) mix: Mix,
    pub(crate) growth: f64,
    pub(crate) measured_s: u64,
}

/// What the figures say about one more transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Join,
    Wait,
    /// Nothing was measured lately.
    Unknown,
}

pub(crate) fn verdict(figures: &[Figure], mix: Mix, transfers: usize) -> Verdict {
    match figures.iter().find(|figure| figure.mix == mix) {
        Some(figure) if figure.growth > mix.needed(transfers) => Verdict::Join,
        Some(_) => Verdict::Wait,
        None => {
            // Where the last one that joined has gained nothing, a further one does not try.
            let mut before =
                figures.iter().filter(|figure| figure.mix.running() + 1 == mix.running()).peekable();
            let is_known = before.peek().is_some();
            match is_known && before.all(|figure| figure.growth <= figure.mix.needed(transfers)) {
                true => Verdict::Wait,
                false => Verdict::Unknown,
            }
        }
    }
}

/// Each user has a file with a store's figures: users cannot replace one another's files.
fn path_of(dir: &Path, store: &str, uid: u32) -> PathBuf {
    dir.join(format!("rate@{uid}@{store}.json"))
}

/// True for the name of a file of figures.
fn is_of(name: &str, store: &str) -> bool {
    let rest = name.strip_prefix("rate@").and_then(|rest| rest.split_once('@'));
    rest.is_some_and(|(_, rest)| rest.strip_suffix(".json") == Some(store))
}

/// The newest figure of each mix that is fresh. `store` as tickets name it.
pub(crate) fn figures(dir: &Path, store: &str) -> Vec<Figure> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = names.filter(|entry| entry.file_name().to_str().is_some_and(|name| is_of(name, store)));
    let mut newest: Vec<Figure> = Vec::new();
    for figure in files.flat_map(|entry| {
        registry::read::<Vec<Figure>>(&entry.path(), None).ok().flatten().unwrap_or_default()
    }) {
        let age_s = now_s().checked_sub(figure.measured_s);
        if age_s.is_none_or(|age| age > FRESH_S) || !figure.growth.is_finite() {
            continue;
        }
        match newest.iter_mut().find(|other| other.mix == figure.mix) {
            Some(other) if other.measured_s >= figure.measured_s => {}
            Some(other) => *other = figure,
            None => newest.push(figure),
        }
    }
    newest.sort_by_key(|figure| (figure.mix.running(), figure.mix.outs, !figure.mix.joins_in));
    newest
}

/// Keeps what this user's transfer has measured.
pub(crate) fn keep(dir: &Path, store: &str, mix: Mix, growth: f64) -> Result<()> {
    let path = path_of(dir, store, rustix::process::geteuid().as_raw());
    let mut all: Vec<Figure> = registry::read(&path, None).ok().flatten().unwrap_or_default();
    all.retain(|figure| figure.mix != mix && now_s().saturating_sub(figure.measured_s) <= FRESH_S);
    all.push(Figure { mix, growth, measured_s: now_s() });
    registry::write(&path, &all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_IN: Mix = Mix { ins: 1, outs: 0, joins_in: true };

    /// The mean until the end of `n` equal transfers of 1, `k` at a time, at a total rate.
    fn mean_s(n: usize, k: usize, rate: f64) -> f64 {
        (0..n).map(|i| ((i / k + 1) * k) as f64 / rate).sum::<f64>() / n as f64
    }

    #[test]
    fn one_more_joins_exactly_if_that_shortens_the_mean() {
        for n in [2, 4, 12] {
            for growth in [0.9, 1.0, 1.05, 1.2, 1.32, 1.34, 1.6, 2.0] {
                let is_faster = mean_s(n, 2, growth) < mean_s(n, 1, 1.0) && growth > LEAST;
                assert_eq!(growth > ONE_IN.needed(n), is_faster, "{n} transfers, growth {growth}");
            }
        }
    }

    #[test]
    fn growth_of_a_limited_store_is_one_and_that_of_a_slow_one_two() {
        assert_eq!(ONE_IN.growth(0.5), 1.0);
        assert_eq!(ONE_IN.growth(1.0), 2.0);
        assert_eq!(Mix { ins: 2, ..ONE_IN }.growth(2.0 / 3.0), 1.0);
    }

    #[test]
    fn figures_of_a_store_are_kept_for_each_mix_and_the_newest_counts() {
        let dir = std::env::temp_dir().join(format!("forebay-figures-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let mixed = Mix { joins_in: false, ..ONE_IN };
        keep(&dir, "!a.b", ONE_IN, 1.9).unwrap();
        keep(&dir, "!a.b", mixed, 2.0).unwrap();
        keep(&dir, "!a", ONE_IN, 1.5).unwrap();
        assert_eq!(verdict(&figures(&dir, "!a.b"), ONE_IN, 2), Verdict::Join);
        keep(&dir, "!a.b", ONE_IN, 1.0).unwrap();
        let known = figures(&dir, "!a.b");
        assert_eq!(known.len(), 2);
        assert_eq!(verdict(&known, ONE_IN, 2), Verdict::Wait);
        assert_eq!(verdict(&known, mixed, 2), Verdict::Join);
        let two_in = Mix { ins: 2, ..ONE_IN };
        assert_eq!(verdict(&known, two_in, 3), Verdict::Unknown, "a stage-out beside a stage-in has gained");
        assert_eq!(verdict(&[], two_in, 3), Verdict::Unknown);
        assert_eq!(verdict(&[], ONE_IN, 2), Verdict::Unknown);
        let no_gain = Figure { mix: ONE_IN, growth: 1.0, measured_s: now_s() };
        assert_eq!(verdict(&[no_gain], two_in, 3), Verdict::Wait, "the second one has gained nothing");
        assert_eq!(verdict(&[no_gain], Mix { ins: 3, ..ONE_IN }, 4), Verdict::Unknown);
        // Of another user's figures, neither one of the future counts nor an old one.
        let future = Figure { mix: ONE_IN, growth: 1.8, measured_s: now_s() + 1000 };
        registry::write(&path_of(&dir, "!a.b", 77), &[future]).unwrap();
        assert_eq!(figures(&dir, "!a.b")[0].growth, 1.0);
        let old = Figure { measured_s: now_s() - FRESH_S - 1, ..future };
        registry::write(&path_of(&dir, "!old", 77), &[old]).unwrap();
        assert!(figures(&dir, "!old").is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
