//! What a check found.

/// Problems that are reported in words; further ones are only counted.
const PROBLEMS_TOLD_MAX: usize = 1000;

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// Inodes.
    pub inodes: u64,
    /// Regular files among them.
    pub files: u64,
    /// Directories among them.
    pub directories: u64,
    /// Directory entries.
    pub entries: u64,
    /// Orphans that are listed.
    pub orphans: u64,
    /// Links from entries on other nodes.
    pub links: u64,
    /// Prepared parts of cross-node transactions.
    pub prepared: u64,
    /// Decisions and debts that other nodes have not acknowledged yet.
    pub deliveries: u64,
    /// Places at which a backing store may differ.
    pub pending: u64,
    /// Volumes.
    pub volumes: u64,
    /// When the oldest of these parts, decisions and debts was written, in seconds since 1970; 0: there is none.
    pub oldest_seconds: u64,
    /// Number of problems.
    pub problem_count: u64,
    /// The first of them, in words.
    pub problems: Vec<String>,
}

impl CheckReport {
    /// True when no problem was found.
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }

    pub(crate) fn problem(&mut self, text: impl FnOnce() -> String) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_TOLD_MAX {
            self.problems.push(text());
        }
    }
}
