//! Options of a staging call.

/// How to stage.
#[derive(Clone, Debug)]
pub struct StageOptions {
    /// Number of copying threads. 0 selects one and a half per core, at most 16; more if one side is a network file
    /// system.
    pub threads: usize,
    /// Read each copy again and compare it with the data that were read from its source (xxh3-128). Durable copies are
    /// first synced and dropped from the page cache, so that the medium is read if possible.
    pub verify: bool,
    /// Stage everything or leave the destination as it was.
    pub all_or_nothing: bool,
    /// Skip files whose complete copy exists; adopt the temporaries of a killed staging.
    pub resume: bool,
    /// Bytes of one read and write; 0 selects 2 MiB.
    pub transfer_bytes: usize,
    /// Keep owner and group. `None` keeps them if this process runs as root, else only groups of which the user is a
    /// member.
    pub preserve_owner: Option<bool>,
    /// Sync each copy to the medium before it gets its name, and the names at the end. `None` does this for stage-out
    /// only.
    pub durable: Option<bool>,
}

impl Default for StageOptions {
    fn default() -> Self {
        StageOptions {
            threads: 0,
            verify: false,
            all_or_nothing: false,
            resume: true,
            transfer_bytes: 0,
            preserve_owner: None,
            durable: None,
        }
    }
}
