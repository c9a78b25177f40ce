//! What measured times say about predictions: a factor for each way and direction.
//!
//! All ranks of a file apply the same measurements, which they have exchanged, in the same order. So their factors are
//! equal, whatever a rank reports. A rank that reports a false time can make a choice wrong, within the limits here, but
//! not different from that of the others.

/// Corrections of later predictions. Factors are in units of 1/1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrections {
    factors: [i64; 4],
}

/// A factor of one.
const ONE: i64 = 1024;
/// The limits of a factor.
const FACTOR_MIN: i64 = ONE / 16;
const FACTOR_MAX: i64 = ONE * 16;
/// How much of a difference one measurement corrects: 1/4. One call that waited for a busy node does not turn a choice.
const PART: i64 = 4;

impl Default for Corrections {
    fn default() -> Corrections {
        Corrections { factors: [ONE; 4] }
    }
}

impl Corrections {
    /// The factors, for the driver's state of a file: write and read independent, write and read collective. Zeros are
    /// no corrections.
    pub fn from_numbers(numbers: [i64; 4]) -> Corrections {
        Corrections { factors: numbers.map(|n| if n == 0 { ONE } else { n.clamp(FACTOR_MIN, FACTOR_MAX) }) }
    }

    /// The same numbers.
    pub fn numbers(&self) -> [i64; 4] {
        self.factors
    }

    fn index(writes: bool, is_collective: bool) -> usize {
        usize::from(!writes) + 2 * usize::from(is_collective)
    }

    /// The factor of predictions of this kind.
    pub(crate) fn factor(&self, writes: bool, is_collective: bool) -> f64 {
        self.factors[Corrections::index(writes, is_collective)] as f64 / ONE as f64
    }

    /// Takes the time that a call took, and the one that was predicted, in nanoseconds. Times that are not above zero are
    /// no measurement.
    pub fn learn(&mut self, writes: bool, is_collective: bool, predicted_ns: i64, measured_ns: i64) {
        if predicted_ns <= 0 || measured_ns <= 0 {
            return;
        }
        let factor = &mut self.factors[Corrections::index(writes, is_collective)];
        // The prediction has the present factor in it. i128, as any number may have been reported.
        let seen = i128::from(*factor) * i128::from(measured_ns) / i128::from(predicted_ns);
        let seen = seen.clamp(FACTOR_MIN.into(), FACTOR_MAX.into()) as i64;
        let by = seen - *factor;
        // At least one unit, so that the factor reaches what is seen.
        *factor += if by.abs() < PART { by } else { by / PART };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn factor_approaches_what_is_measured_and_other_kinds_keep_theirs() {
        let mut c = Corrections::default();
        for _ in 0..60 {
            let predicted = (1000.0 * c.factor(true, true)) as i64;
            c.learn(true, true, predicted, 3000);
        }
        assert!((c.factor(true, true) - 3.0).abs() < 0.02, "{}", c.factor(true, true));
        assert_eq!(c.factor(true, false), 1.0);
        assert_eq!(c.factor(false, true), 1.0);
    }

    #[test]
    fn one_slow_call_does_not_double_a_time() {
        let mut c = Corrections::default();
        c.learn(false, false, 1000, 4000);
        assert!(c.factor(false, false) > 1.0 && c.factor(false, false) < 2.0);
    }

    proptest! {
        #[test]
        fn factors_stay_within_their_limits_whatever_is_reported(
            reports in prop::collection::vec((any::<bool>(), any::<bool>(), any::<i64>(), any::<i64>()), 0..40),
            start in any::<[i64; 4]>(),
        ) {
            let mut c = Corrections::from_numbers(start);
            for (writes, collective, predicted, measured) in reports {
                c.learn(writes, collective, predicted, measured);
                prop_assert!(c.numbers().iter().all(|f| (FACTOR_MIN..=FACTOR_MAX).contains(f)));
            }
            prop_assert_eq!(Corrections::from_numbers(c.numbers()), c);
        }
    }
}
