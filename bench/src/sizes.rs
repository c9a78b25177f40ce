//! The amounts of data and files to measure with.

use crate::machine;

/// Repetitions of every measurement.
const REPETITIONS: usize = 5;
const MIB: usize = 1 << 20;

/// The amounts of data and files to measure with.
pub(crate) struct Sizes {
    /// For a short run.
    pub(crate) is_quick: bool,
    /// Repetitions of each measurement.
    pub(crate) repetitions: usize,
    /// Files of each process in metadata measurements.
    pub(crate) files: usize,
    /// Bytes of all processes together in data measurements.
    pub(crate) bytes: usize,
    /// Number of small files to stage.
    pub(crate) staged_files: usize,
    /// Bytes of the large file to stage.
    pub(crate) staged_bytes: u64,
    /// Capacity of the pool in bytes.
    pub(crate) capacity_bytes: u64,
}

impl Sizes {
    /// The sizes; an error if this machine has too little memory for them.
    pub(crate) fn new(quick: bool) -> Result<Sizes, String> {
        let sizes = if quick {
            Sizes {
                is_quick: true,
                repetitions: 3,
                files: 4000,
                bytes: 256 * MIB,
                staged_files: 2000,
                staged_bytes: 512 << 20,
                capacity_bytes: 2 << 30,
            }
        } else {
            Sizes {
                is_quick: false,
                repetitions: REPETITIONS,
                files: 20_000,
                bytes: 1024 * MIB,
                staged_files: 10_000,
                staged_bytes: 4 << 30,
                capacity_bytes: 6 << 30,
            }
        };
        // The pool, the same amount on tmpfs, and the source in the page cache.
        let needed = 3 * sizes.capacity_bytes;
        let free = machine::memory_bytes("MemAvailable");
        if free < needed {
            let gib = |bytes: u64| bytes as f64 / (1 << 30) as f64;
            return Err(format!(
                "needs {:.0} GiB of free memory and finds {:.1}: free some, or use QUICK=1 (6 GiB)",
                gib(needed),
                gib(free)
            ));
        }
        Ok(sizes)
    }
}
