//! Samples, medians, tables, targets.

use serde_json::{json, Value};

/// A target for one row of a table, relative to the median of another column.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Forebay's rate over the other's (the other's time over Forebay's) must be at least this.
    Ratio { against: String, at_least: f64 },
    /// Forebay's time may exceed the other's by at most this.
    Difference { against: String, at_most: f64 },
}

impl Target {
    fn against(&self) -> &str {
        match self {
            Target::Ratio { against, .. } | Target::Difference { against, .. } => against,
        }
    }
}

/// One row: the same measurement on several systems.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// What was measured.
    pub(crate) label: String,
    /// Forebay's targets.
    pub(crate) targets: Vec<Target>,
    /// The samples of each system, in the order of the table's columns.
    pub(crate) samples: Vec<Vec<f64>>,
}

/// One table.
pub(crate) struct Table {
    /// Heading.
    pub(crate) title: String,
    /// Unit of the numbers: "operations/s", "GB/s", "s".
    pub(crate) unit: &'static str,
    /// True for rates, false for times.
    pub(crate) more_is_better: bool,
    /// Systems; the first is Forebay.
    pub(crate) columns: Vec<String>,
    /// Rows.
    pub(crate) rows: Vec<Row>,
}

impl Table {
    /// Adds a sample to the row with this label, which is created if it is new.
    pub(crate) fn add(
        &mut self,
        label: &str,
        column: usize,
        sample: f64,
        targets: impl FnOnce() -> Vec<Target>,
    ) {
        let at = self.rows.iter().position(|row| row.label == label).unwrap_or_else(|| {
            let samples = vec![Vec::new(); self.columns.len()];
            self.rows.push(Row { label: label.to_owned(), targets: targets(), samples });
            self.rows.len() - 1
        });
        self.rows[at].samples[column].push(sample);
    }

    /// The ratio of Forebay's median to another column's; above 1 is better.
    fn ratio(&self, row: &Row, column: usize) -> Option<f64> {
        let (ours, other) = (median(&row.samples[0])?, median(&row.samples[column])?);
        Some(if self.more_is_better { ours / other } else { other / ours })
    }

    /// The difference of Forebay's median to another column's.
    fn more(&self, row: &Row, column: usize) -> Option<f64> {
        Some(median(&row.samples[0])? - median(&row.samples[column])?)
    }

    /// The table as text; adds to `missed` the number of missed targets.
    pub(crate) fn text(&self, missed: &mut usize) -> String {
        let width = self.rows.iter().map(|row| row.label.len()).max().unwrap_or(0).max(10);
        let mut text = format!("\n{} ({}, medians)\n{:width$}", self.title, self.unit, "");
        for column in &self.columns {
            text += &format!(" {column:>12}");
        }
        text += "   ratio and target\n";
        for row in &self.rows {
            text += &format!("{:width$}", row.label);
            for samples in &row.samples {
                text += &format!(" {:>12}", median(samples).map_or("-".into(), number));
            }
            let mut said = Vec::new();
            for target in &row.targets {
                let against = target.against();
                let Some(column) = self.columns.iter().position(|c| c == against) else { continue };
                let (Some(ratio), Some(more)) = (self.ratio(row, column), self.more(row, column)) else {
                    continue;
                };
                let (met, words, bound) = match target {
                    Target::Ratio { at_least, .. } => {
                        // Rounded as printed, since the clocks are no more precise.
                        let met = (ratio * 1e3).round() / 1e3 >= *at_least;
                        (met, format!("{ratio:.3} of {against}"), format!(">= {at_least:.2}"))
                    }
                    Target::Difference { at_most, .. } => (
                        more <= *at_most,
                        format!("{more:+.2} {} to {against}", self.unit),
                        format!("<= {at_most:+.2}"),
                    ),
                };
                *missed += !met as usize;
                said.push(format!("{words} ({bound}, {})", if met { "met" } else { "MISSED" }));
            }
            if row.targets.is_empty() && self.columns.len() > 1 {
                said.extend(self.ratio(row, 1).map(|ratio| format!("{ratio:.2} of {}", self.columns[1])));
            }
            text += &format!("   {}\n", said.join(", "));
        }
        text
    }

    /// All data of the table, for the results file.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let samples: serde_json::Map<String, Value> =
                    self.columns.iter().cloned().zip(row.samples.iter().map(|s| json!(s))).collect();
                let targets: Vec<_> = row
                    .targets
                    .iter()
                    .map(|target| match target {
                        Target::Ratio { against, at_least } => {
                            json!({"against": against, "at_least": at_least})
                        }
                        Target::Difference { against, at_most } => {
                            json!({"against": against, "at_most_more": at_most})
                        }
                    })
                    .collect();
                json!({"label": row.label, "samples": samples, "targets": targets})
            })
            .collect();
        json!({"title": self.title, "unit": self.unit, "more_is_better": self.more_is_better, "rows": rows})
    }
}

/// The median; of an even count the mean of the middle two.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        // Thousands are separated, as operations per second have many digits.
        let digits = format!("{value:.0}");
        let mut text = String::new();
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i) % 3 == 0 {
                text.push(' ');
            }
            text.push(digit);
        }
        text
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn text_of_a_table_tells_met_from_missed_for_rates_and_times() {
        for (more_is_better, missed_expected) in [(true, 1), (false, 0)] {
            let mut table = Table {
                title: "T".into(),
                unit: "x",
                more_is_better,
                columns: vec!["Forebay".into(), "tmpfs".into()],
                rows: vec![],
            };
            table.add("row", 0, 1.0, || vec![Target::Ratio { against: "tmpfs".into(), at_least: 0.9 }]);
            table.add("row", 1, 2.0, Vec::new);
            let mut missed = 0;
            let text = table.text(&mut missed);
            assert_eq!(missed, missed_expected, "{text}");
        }
    }

    #[test]
    fn number_of_many_digits_is_grouped() {
        assert_eq!(number(1_234_567.0), "1 234 567");
        assert_eq!(number(12.34), "12.3");
        assert_eq!(number(1.5), "1.500");
    }
}
