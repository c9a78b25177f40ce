//! The result of staging: counts, rate, failures and warnings, as text and as JSON.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Duration;

use forebay_types::{Code, Error, Result};
use serde::{Serialize, Serializer};

/// Failures that a report lists; further ones are only counted. This bounds the report of a source that disappears
/// during staging.
pub const ERRORS_LISTED_MAX: usize = 1000;
/// Distinct warnings that a report lists; equal ones share an entry.
pub const WARNINGS_LISTED_MAX: usize = 100;

/// A file that was not staged.
#[derive(Clone, Debug, Serialize)]
pub struct FileError {
    /// Its path, on the side that failed. Bytes that are not UTF-8, and control characters, are written as `\xNN`.
    pub path: String,
    /// The stable code; in JSON its name.
    #[serde(serialize_with = "code_name")]
    pub code: Code,
    /// The action that failed, and the reason.
    pub what: String,
    /// What the user can do; may be empty.
    pub cure: String,
}

/// An attribute of a staged file that could not be kept.
#[derive(Clone, Debug, Serialize)]
pub struct Warning {
    /// The attribute, and the reason.
    pub what: String,
    /// The stable code; in JSON its name.
    #[serde(serialize_with = "code_name")]
    pub code: Code,
    /// The first path with this warning.
    pub path: String,
    /// Number of paths with this warning.
    pub count: u64,
}

/// The result of staging.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StageReport {
    /// Regular files staged, without those that existed already.
    pub files: u64,
    /// Directories created or merged into.
    pub directories: u64,
    /// Symbolic links created.
    pub symlinks: u64,
    /// Hard links created to files that were staged before.
    pub hard_links: u64,
    /// FIFOs, sockets and device nodes created.
    pub special: u64,
    /// Bytes of file content that were copied.
    pub bytes: u64,
    /// Bytes of holes, which were kept and not copied.
    pub holes_bytes: u64,
    /// Files, links and nodes whose complete copies existed already.
    pub skipped_files: u64,
    /// Apparent bytes of the skipped files.
    pub skipped_bytes: u64,
    /// Files whose copy was read again and is equal.
    pub verified: u64,
    /// Number of times that a file was copied again because its source changed meanwhile.
    pub retries: u64,
    /// Temporary files and trees of an earlier, killed staging that were removed.
    pub leftovers_removed: u64,
    /// Wall time.
    pub seconds: f64,
    /// `bytes` divided by `seconds`, in units of 10^9 bytes.
    pub gb_per_s: f64,
    /// True if [`Progress::cancelled`](crate::Progress::cancelled) stopped staging.
    pub cancelled: bool,
    /// True if all-or-nothing staging failed and removed everything that it had created.
    pub rolled_back: bool,
    /// Files that were not staged, at most [`ERRORS_LISTED_MAX`].
    pub errors: Vec<FileError>,
    /// Number of files that were not staged.
    pub errors_total: u64,
    /// How many of them the source could not give ([`Code::Io`]): their data or names are on a node or medium that is
    /// lost. All others may be staged another time, or to another destination.
    pub errors_unreachable: u64,
    /// True if staging ended before it had tried everything: no space, a pool that is gone, or it was cancelled.
    pub stopped: bool,
    /// Attributes that could not be kept, at most [`WARNINGS_LISTED_MAX`].
    pub warnings: Vec<Warning>,
}

impl StageReport {
    /// True if everything was staged.
    pub fn is_complete(&self) -> bool {
        self.errors_total == 0 && !self.cancelled
    }

    /// One error for the whole staging if it is not complete.
    ///
    /// # Errors
    /// The code of the first failure, or [`Code::Interrupted`] if staging was cancelled.
    pub fn outcome(&self) -> Result<()> {
        if self.is_complete() {
            return Ok(());
        }
        let nothing = if self.rolled_back { "; everything it had made was removed" } else { "" };
        match self.errors.first() {
            None => Err(Error::new(Code::Interrupted, format!("staging was stopped{nothing}"))
                .why("it was cancelled")
                .cure("run it again: files that are complete are not copied again")),
            Some(first) if self.errors_total == 1 => {
                Err(Error::new(first.code, format!("staging is not complete{nothing}: {}", first.path))
                    .why(&first.what)
                    .cure(first.cure.clone()))
            }
            Some(first) => Err(Error::new(
                first.code,
                format!(
                    "staging is not complete{nothing}: {} files failed, the first {}",
                    self.errors_total, first.path
                ),
            )
            .why(&first.what)
            .cure(first.cure.clone())),
        }
    }
}

fn code_name<S: Serializer>(code: &Code, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(code.name())
}

/// A path for messages: UTF-8 unchanged, other bytes and control characters as `\xNN`.
pub(crate) fn display(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() {
                c.to_string().bytes().for_each(|b| text.push_str(&format!("\\x{b:02x}")));
            } else {
                text.push(c);
            }
        }
        chunk.invalid().iter().for_each(|b| text.push_str(&format!("\\x{b:02x}")));
    }
    text
}

/// A code's reason in words: the kernel's text if it has one.
pub(crate) fn reason(code: Code) -> String {
    let own = match code {
        Code::PoolGone => "the pool's daemon is gone",
        Code::TimedOut => "the request timed out",
        Code::Corrupt => "the bytes differ",
        Code::UnknownSession => "the pool does not know this session any more",
        Code::Malformed => "the pool's daemon sent an invalid reply",
        _ => {
            let text = std::io::Error::from_raw_os_error(code.errno()).to_string();
            return text.split(" (os error").next().unwrap_or(&text).to_string();
        }
    };
    own.to_string()
}

/// Bytes for messages: `1.5 GiB`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64;
    let mut unit = "";
    for name in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = name;
    }
    format!("{value:.1} {unit}")
}

/// Counts that grow while staging runs, shared by its threads.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) files: AtomicU64,
    pub(crate) directories: AtomicU64,
    pub(crate) symlinks: AtomicU64,
    pub(crate) hard_links: AtomicU64,
    pub(crate) special: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) holes_bytes: AtomicU64,
    pub(crate) skipped_files: AtomicU64,
    pub(crate) skipped_bytes: AtomicU64,
    pub(crate) verified: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) leftovers_removed: AtomicU64,
    errors_total: AtomicU64,
    /// See [`StageReport::errors_unreachable`].
    pub(crate) errors_unreachable: AtomicU64,
    errors: Mutex<Vec<FileError>>,
    warnings: Mutex<HashMap<String, Warning>>,
}

/// Adds to one count.
pub(crate) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

impl Tally {
    /// Records a failure.
    pub(crate) fn error(&self, error: FileError) {
        add(&self.errors_total, 1);
        let mut errors = self.errors.lock().unwrap_or_else(|e| e.into_inner());
        if errors.len() < ERRORS_LISTED_MAX {
            errors.push(error);
        }
    }

    /// True if there was a failure.
    pub(crate) fn has_errors(&self) -> bool {
        self.errors_total.load(Ordering::Relaxed) > 0
    }

    /// Records a warning; equal ones are counted together.
    pub(crate) fn warning(&self, what: String, code: Code, path: impl FnOnce() -> String) {
        let mut warnings = self.warnings.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = warnings.get_mut(&what) {
            known.count += 1;
        } else if warnings.len() < WARNINGS_LISTED_MAX {
            warnings.insert(what.clone(), Warning { what, code, path: path(), count: 1 });
        }
    }

    /// The report of these counts.
    pub(crate) fn report(self, elapsed: Duration, cancelled: bool) -> StageReport {
        let seconds = elapsed.as_secs_f64();
        let bytes = self.bytes.into_inner();
        let mut warnings: Vec<Warning> =
            self.warnings.into_inner().unwrap_or_else(|e| e.into_inner()).into_values().collect();
        warnings.sort_by(|a, b| a.what.cmp(&b.what));
        StageReport {
            files: self.files.into_inner(),
            directories: self.directories.into_inner(),
            symlinks: self.symlinks.into_inner(),
            hard_links: self.hard_links.into_inner(),
            special: self.special.into_inner(),
            bytes,
            holes_bytes: self.holes_bytes.into_inner(),
            skipped_files: self.skipped_files.into_inner(),
            skipped_bytes: self.skipped_bytes.into_inner(),
            verified: self.verified.into_inner(),
            retries: self.retries.into_inner(),
            leftovers_removed: self.leftovers_removed.into_inner(),
            seconds,
            gb_per_s: if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 },
            cancelled,
            stopped: cancelled,
            rolled_back: false,
            errors: self.errors.into_inner().unwrap_or_else(|e| e.into_inner()),
            errors_total: self.errors_total.into_inner(),
            errors_unreachable: self.errors_unreachable.into_inner(),
            warnings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_of_odd_bytes_is_escaped() {
        assert_eq!(display("/a/ö\u{7f}".as_bytes()), "/a/ö\\x7f");
        assert_eq!(display(b"x\xff\ny"), "x\\xff\\x0ay");
    }

    #[test]
    fn human_bytes_names_the_unit() {
        assert_eq!(human_bytes(1023), "1023 bytes");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(3 << 30), "3.0 GiB");
    }

    #[test]
    fn report_of_many_errors_lists_some_and_counts_all() {
        let tally = Tally::default();
        for i in 0..ERRORS_LISTED_MAX + 5 {
            let what = "cannot read".to_string();
            tally.error(FileError { path: format!("/f{i}"), code: Code::Io, what, cure: String::new() });
        }
        tally.warning("owner not kept".into(), Code::NotPermitted, || "/a".into());
        tally.warning("owner not kept".into(), Code::NotPermitted, || "/b".into());
        let report = tally.report(Duration::from_secs(1), false);
        assert_eq!(report.errors.len(), ERRORS_LISTED_MAX);
        assert_eq!(report.errors_total, ERRORS_LISTED_MAX as u64 + 5);
        assert_eq!((report.warnings.len(), report.warnings[0].count), (1, 2));
        assert_eq!(report.warnings[0].path, "/a");
        let error = report.outcome().unwrap_err();
        assert_eq!(error.code, Code::Io);
        assert!(error.what.contains("1005 files failed"), "{error}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["errors"][0]["code"], "io");
        assert_eq!(json["errors_total"], 1005);
    }

    #[test]
    fn outcome_of_a_cancelled_run_is_an_error() {
        let report = Tally::default().report(Duration::from_secs(1), true);
        assert_eq!(report.outcome().unwrap_err().code, Code::Interrupted);
        assert!(Tally::default().report(Duration::ZERO, false).outcome().is_ok());
    }
}
