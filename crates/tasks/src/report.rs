//! What a mover reports to its supervisor, for `forebay status`.

use serde::{Deserialize, Serialize};

/// The state of a mover. Its JSON is part of that of `forebay status --json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MoverReport {
    /// Places at which a store may differ from the pool. None as long as the mover has not looked.
    pub pending_places: Option<u64>,
    /// Files whose data a store does not have yet.
    pub dirty_files: u64,
    /// Bytes of their data.
    pub dirty_bytes: u64,
    /// Files that are being restored for programs.
    pub restoring: u64,
    /// Places whose version in the store was changed by others.
    pub conflicts: u64,
    /// The attached stores.
    pub stores: Vec<StoreReport>,
}

/// The state of an attached store.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreReport {
    /// The directory of the pool at which it is attached.
    pub at: String,
    /// Its URL, without credentials.
    pub url: String,
    /// The last error, for people. None once a later call has succeeded.
    pub last_error: Option<String>,
    /// When that was, in seconds since 1970.
    pub last_error_s: Option<u64>,
}

impl MoverReport {
    /// The report with so few stores, and errors so short, that its JSON has about `bytes_max` bytes at most.
    pub fn bounded(mut self, bytes_max: usize) -> MoverReport {
        const TEXT_CHARS_MAX: usize = 500;
        let shorten = |text: &mut String| {
            if let Some((end, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
                text.truncate(end);
                text.push_str("...");
            }
        };
        for store in &mut self.stores {
            shorten(&mut store.at);
            shorten(&mut store.url);
            store.last_error.iter_mut().for_each(shorten);
        }
        let bytes = |report: &MoverReport| serde_json::to_string(report).map_or(0, |text| text.len());
        while self.stores.len() > 1 && bytes(&self) > bytes_max {
            self.stores.pop();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_report_fits_and_keeps_the_first_stores() {
        let store = |at: &str| StoreReport {
            at: at.into(),
            last_error: Some("e".repeat(9000)),
            ..Default::default()
        };
        let all = (0..100).map(|i| store(&format!("/{i}"))).collect();
        let report =
            MoverReport { pending_places: Some(7), stores: all, ..MoverReport::default() }.bounded(4096);
        assert!(serde_json::to_string(&report).unwrap().len() <= 4096);
        assert!(report.stores.len() > 2 && report.stores[0].at == "/0" && report.pending_places == Some(7));
    }
}
