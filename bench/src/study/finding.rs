//! What the paper found, and whether the same direction was measured here.

use crate::report::{Table, Target};

/// A finding.
#[derive(Clone, Debug)]
pub(super) struct Finding {
    pub(super) words: &'static str,
    /// What was measured, in words.
    pub(super) here: String,
    pub(super) is_reproduced: bool,
}

/// The part of a rate that is lost from `before` to `after`; negative if it grew.
pub(super) fn loss(before: f64, after: f64) -> f64 {
    1.0 - after / before
}

/// How far two rates are apart, as a part of the greater.
pub(super) fn apart(a: f64, b: f64) -> f64 {
    loss(a.max(b), a.min(b))
}

/// True if each number is greater than the next by more than `by`.
pub(super) fn falls(numbers: &[f64], by: f64) -> bool {
    numbers.windows(2).all(|pair| pair[0] > pair[1] + by)
}

/// The findings as a table, for the results file and the count of missed targets; prints what was measured.
pub(super) fn table(findings: &[Finding]) -> Table {
    let mut table = Table {
        title: "study: findings whose direction was not reproduced (1), or was (0)".into(),
        unit: "findings",
        more_is_better: false,
        columns: vec!["here".into(), "paper".into()],
        rows: Vec::new(),
    };
    println!();
    for finding in findings {
        let verdict = if finding.is_reproduced { "reproduced" } else { "NOT reproduced" };
        println!("{}: {verdict} ({})", finding.words, finding.here);
        let target = || vec![Target::Difference { against: "paper".into(), at_most: 0.0 }];
        table.add(finding.words, 0, f64::from(u8::from(!finding.is_reproduced)), target);
        table.add(finding.words, 1, 0.0, Vec::new);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_distance_are_parts_of_a_rate() {
        assert!((loss(200.0, 50.0) - 0.75).abs() < 1e-12);
        assert!((loss(100.0, 110.0) + 0.1).abs() < 1e-12);
        assert!((apart(90.0, 100.0) - 0.1).abs() < 1e-12 && apart(90.0, 100.0) == apart(100.0, 90.0));
    }

    #[test]
    fn numbers_fall_only_if_each_step_is_large_enough() {
        assert!(falls(&[0.9, 0.5, 0.1], 0.05));
        assert!(!falls(&[0.9, 0.88, 0.1], 0.05) && !falls(&[0.1, 0.9], 0.0));
        assert!(falls(&[1.0], 0.1));
    }

    #[test]
    fn table_of_findings_counts_those_that_were_not_reproduced() {
        let finding = |is_reproduced, words| Finding { words, here: String::new(), is_reproduced };
        let mut missed = 0;
        table(&[finding(true, "a"), finding(false, "b"), finding(false, "c")]).text(&mut missed);
        assert_eq!(missed, 2);
    }
}
