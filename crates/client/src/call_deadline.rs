//! How long a call waits that has several requests under way: for all of them together as long as for one, counted from
//! the last that was answered. So a call that goes on slowly is not cut off, and one whose daemon has stopped waits
//! once, not once for each request.

use forebay_ring::call_clock;
use forebay_types::limits::CALL_TIMEOUT_MS;

const TIMEOUT_NS: u64 = CALL_TIMEOUT_MS * 1_000_000;

/// Of one call.
#[derive(Debug)]
pub(crate) struct CallDeadline {
    until_ns: u64,
}

impl CallDeadline {
    /// The call begins.
    pub(crate) fn new() -> CallDeadline {
        CallDeadline { until_ns: call_clock() + TIMEOUT_NS }
    }

    /// By when the next request is to be answered, by [`call_clock`].
    pub(crate) fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// A request was answered.
    pub(crate) fn answered(&mut self) {
        if !self.is_over() {
            self.until_ns = call_clock() + TIMEOUT_NS;
        }
    }

    /// One was not: what is under way is taken if it is there, and nothing more is asked.
    pub(crate) fn end(&mut self) {
        self.until_ns = 0;
    }

    /// True when nothing is waited for any more.
    pub(crate) fn is_over(&self) -> bool {
        self.until_ns == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_from_the_last_answer_and_ends_for_good() {
        let mut deadline = CallDeadline::new();
        let first = deadline.until_ns();
        std::thread::sleep(std::time::Duration::from_millis(2));
        deadline.answered();
        assert!(deadline.until_ns() > first && !deadline.is_over());
        deadline.end();
        deadline.answered();
        assert!(deadline.is_over() && deadline.until_ns() < call_clock());
    }
}
