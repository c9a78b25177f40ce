//! Progress reports to the caller of a staging, and cancellation.

/// The caller's view of a running staging, called by several threads. All numbers are increments.
///
/// `done` may run ahead of `found`, because counting the sources starts only if staging takes longer than half a
/// second, and runs beside it. At the end the sums are equal, unless files failed. Bytes are apparent sizes, including
/// holes.
pub trait Progress: Sync {
    /// More files and bytes were found in the sources.
    fn found(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }
    /// More files and bytes are staged, or existed already.
    fn done(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }
    /// `found` will not be called again, so the time left can be estimated.
    fn scanning_finished(&self) {}
    /// An event worth a line: a retry, or a leftover that was removed. Failures are in the report.
    fn message(&self, text: &str) {
        let _ = text;
    }
    /// True to stop staging. Called often. Files copied by then stay, and a later run continues from there.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Ignores all reports and never cancels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {}
