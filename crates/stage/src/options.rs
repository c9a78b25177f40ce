//! How a caller wants files staged.

/// How to stage.
#[derive(Clone, Debug)]
pub struct StageOptions {
    /// Threads that copy; 0 chooses: half as many again as cores, at most 16; more if a side is reached by
    /// network.
    pub threads: usize,
    /// Read each copy again and compare it with what was read from its source (xxh3-128). Copies that are durable are
    /// synced first and dropped from the page cache, so that the medium is read where it can be.
    pub verify: bool,
    /// Stage everything or leave the destination as it was.
    pub all_or_nothing: bool,
    /// Leave out files that are there already, complete; take a killed staging's temporaries over.
    pub resume: bool,
    /// Bytes of one read and write; 0 chooses 2 MiB.
    pub transfer_bytes: usize,
    /// Keep owner and group; `None` does if this process is root's, and else keeps only groups that the user is in.
    pub preserve_owner: Option<bool>,
    /// Have each copy on the medium before it gets its name, and the names at the end; `None` does when staging out.
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
