//! The deadline of a call with several requests in progress. All of them together have the timeout of one request,
//! counted from the last reply. So a slow call that still makes progress is not cut off, and a call to a daemon that
//! stopped waits once, not once for each request.

use forebay_ring::call_clock;
use forebay_types::limits::CALL_TIMEOUT_MS;

const TIMEOUT_NS: u64 = CALL_TIMEOUT_MS * 1_000_000;

/// The deadline of one call.
#[derive(Debug)]
pub(crate) struct CallDeadline {
    until_ns: u64,
}

impl CallDeadline {
    /// Starts with the call.
    pub(crate) fn new() -> CallDeadline {
        CallDeadline { until_ns: call_clock() + TIMEOUT_NS }
    }

    /// Time of [`call_clock`] by which the next request must be answered.
    pub(crate) fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// Extends the deadline after a reply.
    pub(crate) fn answered(&mut self) {
        if !self.is_over() {
            self.until_ns = call_clock() + TIMEOUT_NS;
        }
    }

    /// Ends waiting after a request failed: replies that are there are still taken, and no further request is sent.
    pub(crate) fn end(&mut self) {
        self.until_ns = 0;
    }

    /// True after [`CallDeadline::end`].
    pub(crate) fn is_over(&self) -> bool {
        self.until_ns == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_counts_from_the_last_answer_and_ends_for_good() {
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
