//! Reports about the files of a batch, many in one request: a request costs two switches between threads, which is more
//! than the copy of a small file.
//!
//! A group of reports is sent when the first of its files is worked on, by the thread that does; the others wait for its
//! outcomes. So a file waits behind a group at most, and not behind a batch.

use std::sync::OnceLock;

use forebay_types::{Code, ReportOutcome, Request, REPORTS_MAX};

use super::link::Link;

/// See the module.
pub(super) struct Reports<'a> {
    link: &'a Link,
    reports: Vec<Request<'a>>,
    outcomes: Vec<OnceLock<Vec<ReportOutcome>>>,
}

impl<'a> Reports<'a> {
    /// Nothing is sent yet.
    pub(super) fn new(link: &'a Link, reports: Vec<Request<'a>>) -> Reports<'a> {
        let groups = reports.len().div_ceil(REPORTS_MAX);
        Reports { link, reports, outcomes: (0..groups).map(|_| OnceLock::new()).collect() }
    }

    /// The outcome of the report at an index.
    pub(super) fn outcome(&self, index: usize) -> ReportOutcome {
        let (group, at) = (index / REPORTS_MAX, index % REPORTS_MAX);
        let send = || {
            let reports = self.reports.chunks(REPORTS_MAX).nth(group).unwrap_or_default();
            self.link.report(reports)
        };
        let outcomes = self.outcomes.get(group).map(|outcomes| outcomes.get_or_init(send));
        outcomes.and_then(|outcomes| outcomes.get(at).copied()).unwrap_or(Err(Code::Malformed))
    }
}
