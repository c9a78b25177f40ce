//! What a caller hears while staging runs, and how it says stop.

/// Heard by the caller while staging runs, from several threads. All numbers are increments: "so many more".
///
/// `done` may run ahead of `found`: counting the sources starts only when staging takes longer than half a second,
/// and runs beside it. At the end the sums agree, unless files failed. Bytes are apparent sizes, holes included.
pub trait Progress: Sync {
    /// So many more files and bytes were found in the sources.
    fn found(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }
    /// So many more files and bytes are staged (or were there already).
    fn done(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }
    /// `found` will not be called again: the time left can be told.
    fn scanning_finished(&self) {}
    /// Something worth a line: a retry, a leftover that was removed. Failures are in the report.
    fn message(&self, text: &str) {
        let _ = text;
    }
    /// True once staging is to stop. Asked often; what is copied by then stays, and a later run goes on from there.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Hears nothing and never stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {}
