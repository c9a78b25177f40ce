//! The arithmetic on measured and predicted times: errors, choices, lost time.

/// The ways, in the order of arrays.
pub(super) const INDEPENDENT: usize = 0;
pub(super) const COLLECTIVE: usize = 1;

/// Medians that differ by less than this part are not told apart: either choice is right.
const TOLD_APART: f64 = 0.02;

/// Errors are at most this part: the paper's worst.
pub(super) const WORST_ERROR: f64 = 0.144;

/// A point, with medians of seconds.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// Measured: independent, collective.
    pub(super) measured: [f64; 2],
    /// As the driver chooses.
    pub(super) automatic: f64,
    /// Predicted, and what the model chooses by it: collective if true.
    pub(super) predicted: [f64; 2],
    pub(super) is_collective: bool,
    /// Predicted with each extension left out, in the order of their names.
    pub(super) without: Vec<[f64; 2]>,
    /// The intervals of the predictions: low, high.
    pub(super) intervals: [[f64; 2]; 2],
}

impl Outcome {
    /// True if the model says that chance decides more than an error may be: no single time is near both ends of the interval.
    pub(super) fn is_chance(&self, way: usize) -> bool {
        let [low, high] = self.intervals[way];
        high * (1.0 - WORST_ERROR) > low * (1.0 + WORST_ERROR)
    }

    /// By what part a time is outside of its interval: 0 inside.
    fn outside(&self, way: usize) -> f64 {
        let ([low, high], measured) = (self.intervals[way], self.measured[way]);
        error(measured.clamp(low, high), measured)
    }

    /// The shorter of both times.
    pub(super) fn better(&self) -> f64 {
        self.measured[INDEPENDENT].min(self.measured[COLLECTIVE])
    }

    /// The faster way.
    pub(super) fn better_way(&self) -> usize {
        usize::from(self.measured[COLLECTIVE] < self.measured[INDEPENDENT])
    }

    /// The part of the better time by which the chosen way is slower: 0 if it is the better one.
    fn lost(&self) -> f64 {
        self.measured[usize::from(self.is_collective)] / self.better() - 1.0
    }
}

/// Relative error of a prediction.
pub(super) fn error(predicted: f64, measured: f64) -> f64 {
    (predicted - measured).abs() / measured
}

/// Mean and greatest of some errors; zeros of none.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Errors {
    pub(super) mean: f64,
    pub(super) worst: f64,
}

pub(super) fn errors(of: impl Iterator<Item = f64>) -> Errors {
    let (count, sum, worst) =
        of.fold((0usize, 0.0, 0f64), |(n, sum, worst), e| (n + 1, sum + e, worst.max(e)));
    Errors { mean: if count > 0 { sum / count as f64 } else { 0.0 }, worst }
}

/// The errors of one way.
pub(super) fn errors_of(outcomes: &[Outcome], way: usize) -> Errors {
    errors(outcomes.iter().map(|o| error(o.predicted[way], o.measured[way])))
}

/// The errors of one way at the points where the model predicts one time.
pub(super) fn errors_of_certain(outcomes: &[Outcome], way: usize) -> Errors {
    let certain = outcomes.iter().filter(|o| !o.is_chance(way));
    errors(certain.map(|o| error(o.predicted[way], o.measured[way])))
}

/// How far times of one way are outside of their intervals at the points where the model predicts an interval.
pub(super) fn outside_of_intervals(outcomes: &[Outcome], way: usize) -> Errors {
    errors(outcomes.iter().filter(|o| o.is_chance(way)).map(|o| o.outside(way)))
}

/// The part of the points where the model predicts an interval for one way.
pub(super) fn left_to_chance(outcomes: &[Outcome], way: usize) -> f64 {
    outcomes.iter().filter(|o| o.is_chance(way)).count() as f64 / outcomes.len().max(1) as f64
}

/// The mean error of both ways with an extension left out, minus that with all: what the extension gains.
pub(super) fn gain(outcomes: &[Outcome], extension: usize) -> f64 {
    let mean = |of: fn(&Outcome, usize, usize) -> f64| {
        errors(outcomes.iter().flat_map(|o| (0..2).map(move |way| of(o, way, extension)))).mean
    };
    mean(|o, way, at| error(o.without[at][way], o.measured[way]))
        - mean(|o, way, _| error(o.predicted[way], o.measured[way]))
}

/// What choices came to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Choices {
    /// The part of the points where the slower way was chosen.
    pub(super) wrong: f64,
    /// The greatest part of its time that a wrong choice lost.
    pub(super) worst_lost: f64,
    /// The part of the time of all points that wrong choices lost.
    pub(super) lost: f64,
    /// The greatest part by which automatic calls were slower than the better way.
    pub(super) automatic_worst: f64,
    /// The part by which all automatic calls together were slower than all better ways; below 0 if faster.
    pub(super) automatic: f64,
}

pub(super) fn choices(outcomes: &[Outcome]) -> Choices {
    let wrong = outcomes.iter().filter(|o| o.lost() >= TOLD_APART).count();
    let better: f64 = outcomes.iter().map(Outcome::better).sum();
    let part = |more: f64| if better > 0.0 { more / better } else { 0.0 };
    Choices {
        wrong: wrong as f64 / outcomes.len().max(1) as f64,
        worst_lost: outcomes.iter().map(Outcome::lost).fold(0.0, f64::max),
        lost: part(outcomes.iter().map(|o| o.lost() * o.better()).sum()),
        automatic_worst: outcomes.iter().map(|o| o.automatic / o.better() - 1.0).fold(0.0, f64::max),
        automatic: part(outcomes.iter().map(|o| o.automatic - o.better()).sum()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(measured: [f64; 2], automatic: f64, predicted: [f64; 2]) -> Outcome {
        let is_collective = predicted[COLLECTIVE] * 1.05 < predicted[INDEPENDENT];
        Outcome {
            measured,
            automatic,
            predicted,
            is_collective,
            without: vec![[predicted[0] * 2.0, predicted[1]]],
            intervals: predicted.map(|time| [time; 2]),
        }
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn errors_are_parts_of_what_was_measured() {
        assert!(near(error(1.1, 1.0), 0.1) && near(error(0.5, 1.0), 0.5));
        let all = [outcome([1.0, 2.0], 1.0, [1.1, 1.0]), outcome([1.0, 4.0], 1.0, [0.7, 4.0])];
        let found = errors_of(&all, INDEPENDENT);
        assert!(near(found.mean, 0.2) && near(found.worst, 0.3), "{found:?}");
        let found = errors_of(&all, COLLECTIVE);
        assert!(near(found.mean, 0.25) && near(found.worst, 0.5), "{found:?}");
        assert_eq!(errors_of(&[], COLLECTIVE), Errors { mean: 0.0, worst: 0.0 });
    }

    #[test]
    fn points_of_chance_are_those_with_wide_intervals_whatever_was_measured() {
        let mut chance = outcome([1.0, 1.0], 1.0, [1.8, 1.2]);
        chance.intervals = [[0.8, 1.8], [1.1, 1.3]];
        assert!(chance.is_chance(INDEPENDENT) && !chance.is_chance(COLLECTIVE));
        let all = [outcome([1.0, 1.0], 1.0, [1.1, 1.0]), chance.clone()];
        assert!(near(errors_of_certain(&all, INDEPENDENT).worst, 0.1));
        assert!(near(errors_of_certain(&all, COLLECTIVE).worst, 0.2));
        assert!(near(left_to_chance(&all, INDEPENDENT), 0.5) && near(left_to_chance(&all, COLLECTIVE), 0.0));
        assert!(near(outside_of_intervals(&all, INDEPENDENT).worst, 0.0), "inside");
        for (measured, part) in [(2.0, 0.1), (0.5, 0.6)] {
            chance.measured[INDEPENDENT] = measured;
            assert!(near(outside_of_intervals(&[chance.clone()], INDEPENDENT).worst, part), "{measured}");
        }
    }

    #[test]
    fn gain_of_an_extension_is_the_error_without_it_less_that_with_it() {
        // Without it, the first way's time is predicted twice as long.
        let exact = [outcome([1.0, 1.0], 1.0, [1.0, 1.0])];
        assert!(near(gain(&exact, 0), 0.5));
        let half = [outcome([2.0, 1.0], 1.0, [1.0, 1.0])];
        assert!(near(gain(&half, 0), -0.25), "it made the prediction worse");
    }

    #[test]
    fn a_choice_is_wrong_where_the_other_way_was_faster_by_more_than_can_be_told() {
        let right = outcome([1.0, 3.0], 1.02, [1.0, 3.0]);
        let wrong = outcome([2.0, 1.0], 2.0, [1.0, 2.0]);
        let tie = outcome([1.01, 1.0], 1.0, [1.0, 2.0]);
        let found = choices(&[right, wrong, tie.clone(), tie]);
        assert!(near(found.wrong, 0.25) && near(found.worst_lost, 1.0), "{found:?}");
        assert!(near(found.lost, 1.02 / 4.0), "{found:?}");
        assert!(near(found.automatic_worst, 1.0) && near(found.automatic, 1.02 / 4.0), "{found:?}");
    }

    #[test]
    fn automatic_may_be_faster_than_both() {
        let found = choices(&[outcome([2.0, 1.0], 0.9, [2.0, 1.0])]);
        assert!(
            found.wrong == 0.0 && found.automatic_worst == 0.0 && near(found.automatic, -0.1),
            "{found:?}"
        );
    }
}
