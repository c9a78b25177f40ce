//! What all staging verbs share: parsing pairs, showing progress, printing the report.

mod pairs;
mod progress;
mod summary;

pub(crate) use pairs::{anchored_out, pairs_in, pairs_out, refuse_own};
pub(crate) use progress::{Interrupt, Shown, Style};
pub(crate) use summary::{line, print_problems, print_report};

/// The direction of staging.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// Into the pool.
    In,
    /// Out of it.
    Out,
}

impl Direction {
    /// For messages: `staged in`.
    pub(crate) fn done(self) -> &'static str {
        match self {
            Direction::In => "staged in",
            Direction::Out => "staged out",
        }
    }

    /// For messages: `staging in`.
    pub(crate) fn doing(self) -> &'static str {
        match self {
            Direction::In => "staging in",
            Direction::Out => "staging out",
        }
    }
}
