//! The options of `forebay recover`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `forebay recover`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay recover --list /nvme/pool                what a dead pool has that its stores may lack
  forebay recover --dry-run /nvme/pool             and what would be written
  forebay recover /nvme/pool                       write it
  forebay recover /nvme0/pool /nvme1/pool          of a pool with several targets, all that are left
  forebay recover --to /lustre/rescued /nvme/pool  elsewhere, also files that belonged to no store
  forebay recover --discard /nvme/pool             write it, then remove the targets
  forebay recover 1234                             copy what this job of Slurm could not stage out to where it belongs
  forebay recover --to /scratch/me 1234            to another directory

After the death of its node a pool cannot drain any more. Its targets on disks still have the data, with marks that
say where they belong, and snapshots of the pool's names. What a store lacks gets its own name there. Where the store has \
another version, the pool's is written beside it as NAME.forebay-recovered-TIME. Nothing in a store is replaced or removed, \
and the targets are only read: this can be repeated.

Exit status: 0 everything is in the stores, 4 some data are not (each is named), 1 failed.")]
pub(crate) struct Recover {
    /// Write everything into this directory or store, under its path in the pool
    #[arg(long, value_name = "URL")]
    pub(crate) to: Option<OsString>,
    /// Only list what may have to be recovered; the stores are not asked
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) list: bool,
    /// Compare with the stores, and say what would be written
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Write files of which parts are missing too, as NAME.forebay-partial-TIME
    #[arg(long)]
    pub(crate) partial: bool,
    /// Write data whose names are lost too, as forebay-unnamed-TIME/NUMBER; needs --to
    #[arg(long)]
    pub(crate) unnamed: bool,
    /// A store's directory was made anew, such as from a backup, and has another inode number: use the one that is there now
    #[arg(long, conflicts_with = "to")]
    pub(crate) replaced: bool,
    /// Afterwards remove the targets with all data, if the stores have everything
    #[arg(long, conflicts_with_all = ["list", "dry_run"])]
    pub(crate) discard: bool,
    /// Do not show progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print as JSON, with every file
    #[arg(long)]
    pub(crate) json: bool,
    /// The directories of the dead pool's targets; or the number of a job of Slurm whose stage-out has failed
    #[arg(value_name = "DIR", required = true, value_hint = ValueHint::DirPath)]
    pub(crate) directories: Vec<PathBuf>,
}

impl Recover {
    /// The job, if it is about one: a number, where no directory has this name.
    pub(crate) fn job(&self) -> Option<u32> {
        match self.directories.as_slice() {
            [one] if !one.exists() => one.to_str()?.parse().ok(),
            _ => None,
        }
    }
}
