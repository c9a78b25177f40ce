//! Medians, and a line through them.

/// Times of one size: the median and the quartiles, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Sample {
    /// Bytes of an operation.
    pub(super) bytes: u64,
    /// The median.
    pub(super) value: f64,
    /// A quarter of the times are below.
    pub(super) low: f64,
    /// A quarter of the times are above.
    pub(super) high: f64,
}

impl Sample {
    /// Of at least one time.
    pub(super) fn of(bytes: u64, times: &mut [f64]) -> Sample {
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
        Sample { bytes, value: at(0.5), low: at(0.25), high: at(0.75) }
    }
}

/// A line: time = start + slope · bytes. Neither is below zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Line {
    /// Nanoseconds.
    pub(super) start: f64,
    /// Nanoseconds a byte.
    pub(super) slope: f64,
}

/// The line with the least sum of squares of relative errors.
pub(super) fn fit(points: &[(u64, f64)]) -> Line {
    let (mut w, mut wx, mut wy, mut wxx, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(bytes, time) in points {
        let (x, y) = (bytes as f64, time.max(1.0));
        let weight = 1.0 / (y * y);
        w += weight;
        wx += weight * x;
        wy += weight * y;
        wxx += weight * x * x;
        wxy += weight * x * y;
    }
    let spread = w * wxx - wx * wx;
    let mean = if w > 0.0 { wy / w } else { 0.0 };
    if points.len() < 2 || spread <= f64::EPSILON * w * wxx {
        return Line { start: mean, slope: 0.0 };
    }
    let slope = (w * wxy - wx * wy) / spread;
    if slope < 0.0 {
        return Line { start: mean, slope: 0.0 };
    }
    let start = (wy - slope * wx) / w;
    if start < 0.0 {
        return Line { start: 0.0, slope: if wxx > 0.0 { wxy / wxx } else { 0.0 } };
    }
    Line { start, slope }
}

/// The lines through the medians, and through both quartiles.
pub(super) fn lines(samples: &[Sample]) -> [Line; 3] {
    let of = |pick: fn(&Sample) -> f64| fit(&samples.iter().map(|s| (s.bytes, pick(s))).collect::<Vec<_>>());
    [of(|s| s.value), of(|s| s.low), of(|s| s.high)]
}

/// The lines that begin at the shortest sample, through medians and quartiles: a message without data takes what the
/// shortest one takes. A further byte takes what it takes between the two longest samples, for bytes matter where there are
/// many, and a network may delay long messages alone, by a change of protocol or a limit that lets bursts pass.
pub(super) fn lines_from_shortest(samples: &[Sample]) -> [Line; 3] {
    let mut sorted = samples.to_vec();
    sorted.sort_by_key(|s| s.bytes);
    sorted.dedup_by_key(|s| s.bytes);
    let of = |pick: fn(&Sample) -> f64| {
        let Some(first) = sorted.first() else { return fit(&[]) };
        let between = |a: &Sample, b: &Sample| (pick(b) - pick(a)) / (b.bytes - a.bytes) as f64;
        let slope = match sorted.as_slice() {
            // Noise: the longest one was not slower.
            [.., before, last] if between(before, last) <= 0.0 => between(first, last),
            [.., before, last] => between(before, last),
            _ => 0.0,
        };
        Line { start: pick(first), slope: slope.max(0.0) }
    };
    [of(|s| s.value), of(|s| s.low), of(|s| s.high)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_through_exact_points_is_found() {
        let found = fit(&[(0, 500.0), (1000, 1500.0), (100_000, 100_500.0)]);
        assert!((found.start - 500.0).abs() < 1e-6 && (found.slope - 1.0).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn neither_part_is_negative_and_few_points_are_a_constant() {
        let one = fit(&[(1000, 500.0)]);
        assert!((one.start - 500.0).abs() < 1e-6 && one.slope == 0.0, "{one:?}");
        assert_eq!(fit(&[]), Line { start: 0.0, slope: 0.0 });
        let falling = fit(&[(1, 1000.0), (1000, 10.0)]);
        assert!(falling.slope == 0.0 && falling.start > 0.0);
        let steep = fit(&[(10, 1.0), (1000, 5000.0)]);
        assert!(steep.start == 0.0 && steep.slope > 0.0, "{steep:?}");
    }

    #[test]
    fn line_from_the_shortest_keeps_its_time_where_long_ones_are_limited() {
        let exact = |bytes, time| Sample { bytes, value: time, low: time, high: time };
        let samples = [exact(8, 40.0), exact(4096, 45.0), exact(262_144, 2_000.0), exact(1_048_576, 8_000.0)];
        let [line, ..] = lines_from_shortest(&samples);
        assert!(
            (line.start - 40.0).abs() < 1e-9 && (line.slope - 6000.0 / 786_432.0).abs() < 1e-9,
            "{line:?}"
        );
        let noisy = [exact(8, 40.0), exact(8, 50.0), exact(262_144, 2_000.0), exact(1_048_576, 1_900.0)];
        let [line, ..] = lines_from_shortest(&noisy);
        assert!((line.slope - 1860.0 / 1_048_568.0).abs() < 1e-9, "{line:?}");
        let twice = lines_from_shortest(&[samples[0], samples[3], samples[3]])[0];
        assert!(twice.slope > 0.007, "{twice:?}");
        assert_eq!(lines_from_shortest(&samples[..1])[0], Line { start: 40.0, slope: 0.0 });
    }

    #[test]
    fn median_is_not_moved_by_one_slow_time() {
        let mut times = [5.0, 1e9, 6.0, 4.0, 5.0];
        let found = Sample::of(8, &mut times);
        assert_eq!((found.value, found.low, found.high), (5.0, 5.0, 6.0));
    }
}
