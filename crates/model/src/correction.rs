//! What measured times say about predictions: a factor for each way and direction, and for calls of about the same time.
//!
//! All ranks of a file apply the same measurements, which they have exchanged, in the same order. So their factors are
//! equal, whatever a rank reports. A rank that reports a false time can make a choice wrong, within the limits here, but
//! not different from that of the others.
//!
//! What a short call takes beside what is modelled, such as waiting for a processor, is a large factor for it and nothing
//! for a long one. So calls of another order of magnitude have factors of their own.

/// Corrections of later predictions. Factors are in units of 1/1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrections {
    factors: [i64; FACTORS],
}

/// Ways and directions.
const KINDS: usize = 4;
/// Times without corrections up to which calls count as alike, in nanoseconds, and those above.
const CLASS_ENDS_NS: [f64; 3] = [100e3, 1.6e6, 25.6e6];
/// The number of factors.
pub const FACTORS: usize = KINDS * (CLASS_ENDS_NS.len() + 1);
/// A factor of one.
const ONE: i64 = 1024;
/// The limits of a factor.
const FACTOR_MIN: i64 = ONE / 16;
const FACTOR_MAX: i64 = ONE * 16;
/// How much of a difference one measurement corrects: 1/4. One call that waited for a busy node does not turn a choice.
const PART: i64 = 4;

impl Default for Corrections {
    fn default() -> Corrections {
        Corrections { factors: [ONE; FACTORS] }
    }
}

impl Corrections {
    /// The factors, for the driver's state of a file, the shortest calls first: of each write and read independent, write
    /// and read collective. Zeros are no corrections.
    pub fn from_numbers(numbers: [i64; FACTORS]) -> Corrections {
        Corrections { factors: numbers.map(|n| if n == 0 { ONE } else { n.clamp(FACTOR_MIN, FACTOR_MAX) }) }
    }

    /// The same numbers.
    pub fn numbers(&self) -> [i64; FACTORS] {
        self.factors
    }

    /// That of calls which take so long without corrections.
    fn index(writes: bool, is_collective: bool, plain_ns: f64) -> usize {
        let class = CLASS_ENDS_NS.iter().filter(|end| plain_ns > **end).count();
        KINDS * class + usize::from(!writes) + 2 * usize::from(is_collective)
    }

    /// The factor of a prediction of this kind, which is so long without it.
    pub(crate) fn factor(&self, writes: bool, is_collective: bool, plain_ns: f64) -> f64 {
        self.factors[Corrections::index(writes, is_collective, plain_ns)] as f64 / ONE as f64
    }

    /// Takes the time that a call took, and the one that was predicted without corrections, in nanoseconds. Times that are
    /// not above zero are no measurement.
    pub fn learn(&mut self, writes: bool, is_collective: bool, plain_ns: i64, measured_ns: i64) {
        if plain_ns <= 0 || measured_ns <= 0 {
            return;
        }
        let factor = &mut self.factors[Corrections::index(writes, is_collective, plain_ns as f64)];
        // i128, as any number may have been reported.
        let seen = i128::from(ONE) * i128::from(measured_ns) / i128::from(plain_ns);
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
            c.learn(true, true, 1000, 3000);
        }
        assert!((c.factor(true, true, 1000.0) - 3.0).abs() < 0.02, "{}", c.factor(true, true, 1000.0));
        assert_eq!(c.factor(true, false, 1000.0), 1.0);
        assert_eq!(c.factor(false, true, 1000.0), 1.0);
    }

    #[test]
    fn calls_of_another_order_of_magnitude_keep_their_factor() {
        let mut c = Corrections::default();
        for _ in 0..60 {
            c.learn(true, false, 2_000, 30_000);
            c.learn(true, false, 5_000_000, 4_000_000);
        }
        let factors = [2e3, 99e3, 101e3, 1e6, 2e6, 20e6, 30e6].map(|ns| c.factor(true, false, ns));
        assert!(factors[0] > 14.0 && factors[1] == factors[0], "{factors:?}");
        assert!((factors[4] - 0.8).abs() < 0.01 && factors[5] == factors[4], "{factors:?}");
        assert_eq!([factors[2], factors[3], factors[6]], [1.0; 3], "{factors:?}");
    }

    #[test]
    fn one_slow_call_does_not_double_a_time() {
        let mut c = Corrections::default();
        c.learn(false, false, 1000, 4000);
        assert!(c.factor(false, false, 1e3) > 1.0 && c.factor(false, false, 1e3) < 2.0);
    }

    proptest! {
        #[test]
        fn factors_stay_within_their_limits_whatever_is_reported(
            reports in prop::collection::vec((any::<bool>(), any::<bool>(), any::<i64>(), any::<i64>()), 0..40),
            start in any::<[i64; FACTORS]>(),
        ) {
            let mut c = Corrections::from_numbers(start);
            for (writes, collective, plain, measured) in reports {
                c.learn(writes, collective, plain, measured);
                prop_assert!(c.numbers().iter().all(|f| (FACTOR_MIN..=FACTOR_MAX).contains(f)));
            }
            prop_assert_eq!(Corrections::from_numbers(c.numbers()), c);
        }
    }
}
