//! A pool in front of a store.

use crate::systems::{said, Pool};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where programs see the store.
const PREFIX: &str = "/forebay";
const DIRECTORY: &str = "/store";

/// A pool with a store at `/store`.
pub(crate) struct Attached {
    pub(crate) pool: Pool,
}

impl Attached {
    /// Starts a pool of `capacity_bytes`, and attaches the store at `url`, which is drained by `policy`.
    pub(crate) fn up(
        binaries: &Path,
        capacity_bytes: u64,
        url: &str,
        policy: &str,
    ) -> Result<Attached, String> {
        let pool = Pool::up(binaries, capacity_bytes)?;
        said(pool.command().args(["attach", url, DIRECTORY, "--drain", policy]))?;
        Ok(Attached { pool })
    }

    /// A path below the store's directory, as programs see it.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        Path::new(PREFIX).join(DIRECTORY.trim_start_matches('/')).join(below)
    }

    /// The command, run so that it sees the pool.
    pub(crate) fn under(&self, command: Command) -> Command {
        let mut run = self.pool.command();
        run.args(["run", "--prefix", PREFIX, "--"]).arg(command.get_program()).args(command.get_args());
        run
    }

    /// A program with arguments, run so that it sees the pool.
    pub(crate) fn program(&self, program: &str, arguments: &[&OsStr]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments);
        self.under(command)
    }

    /// Runs a verb of the command.
    pub(crate) fn verb(&self, words: &[&str]) -> Result<(), String> {
        said(self.pool.command().args(words)).map(|_| ())
    }
}
