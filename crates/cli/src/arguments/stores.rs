//! The options of the verbs for backing stores.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use forebay_tasks::{Durable, Keep, Policy, Recall, Rule, YieldTo};

use super::values::{path, recall, seconds};

/// `forebay attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay attach /lustre/project /               the pool shows the project's files
  forebay attach /lustre/input /input --read-only
  forebay attach s3://bucket/prefix /data --drain age:10m
  forebay attach 's3://bucket?endpoint=https://minio:9000&region=eu' /data
  forebay attach 'file:///nfs/slow?rate=100MB/s' /out --explicit --drain request
  forebay attach /lustre/run /run --drain close,open=snapshot:10m --durable fsync
  forebay attach /lustre/archive /archive --recall 10GiB
  forebay attach /lustre/run /run --rule '*.tmp=temporary' --rule 'ckpt/**=age:10m'

The directory shows the store's tree: names come at the first look, data at the first open. What
programs write there is copied to the store by itself, and copies that the store has make room for
new data when the pool is full.

Credentials come from the environment of `forebay up` (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE), from \
~/.aws, or from the instance. They are never part of the URL.")]
pub(crate) struct Attach {
    /// Never write to the store
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Show only what is created or staged in the pool, not the names that the store has
    #[arg(long)]
    pub(crate) explicit: bool,
    /// When written data are copied to the store: close, age:30s, watermark (when the pool fills up), request (by
    /// `forebay sync`, and when the pool stops), never. With commas: reusable (released after other files) and
    /// open=snapshot:10m (files that stay open are copied as they are, every 10 minutes)
    #[arg(long, value_name = "POLICY", default_value = "close")]
    pub(crate) drain: Policy,
    /// Another policy for files whose name or path below DIR matches, the first rule first:
    /// '*.tmp=temporary', 'ckpt/**=age:10m'
    #[arg(long = "rule", value_name = "PATTERN=POLICY")]
    pub(crate) rules: Vec<Rule>,
    /// Which calls of programs wait until the store has their data: no, fsync (with MPI_File_sync), close (both)
    #[arg(long, value_name = "CALLS", default_value = "no")]
    pub(crate) durable: Durable,
    /// What programs may have copied from the store by opening released files for reading: yes, no, or a size, which is
    /// what one process may have copied within 10 minutes. Further such opens fail with ENODATA
    #[arg(long, value_name = "yes|no|SIZE", default_value = "yes", value_parser = recall)]
    pub(crate) recall: Recall,
    /// What the policy copies gives way, for 5 minutes at most, while one of these files was touched within 20 s: other
    /// pools' transfers claim the store by them. The name has * and ?: '/shared/turns/*@!lustre@*'
    #[arg(long, value_name = "FILES")]
    pub(crate) yield_to: Option<YieldTo>,
    /// The store's directory was made anew, such as from a backup, and has other inode numbers: use the one that is there
    /// now. Nothing else of how it is attached changes
    #[arg(long)]
    pub(crate) replaced: bool,
    /// Print as JSON what was attached
    #[arg(long)]
    pub(crate) json: bool,
    /// The store: a directory, file:///DIR or s3://BUCKET/PREFIX
    #[arg(value_name = "URL")]
    pub(crate) url: OsString,
    /// An empty directory of the pool, which is created if it is missing
    #[arg(value_name = "DIR", value_parser = path())]
    pub(crate) dir: OsString,
}

/// `forebay detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay detach /data                  copy what the store does not have yet, then take the store away
  forebay detach --discard /data        also if that is not possible: what only the pool has is lost

Nothing is deleted in the store. The pool's copy goes: the directory is empty afterwards.")]
pub(crate) struct Detach {
    /// Do not copy anything to the store; what only the pool has is lost
    #[arg(long)]
    pub(crate) discard: bool,
    /// Do not show progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The directory where the store is attached
    #[arg(value_name = "DIR", value_parser = path())]
    pub(crate) dir: OsString,
}

/// `forebay state`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay state /data/out.h5            is it on the store?
  forebay state -r /data                how much of it is
  forebay state -r --json / | jq .dirty.bytes
  forebay state -r --list /data         what the store lacks, or has in another version

States: released (its data are in the store alone), clean (in both, equal), dirty (the pool's are newer), draining (being \
copied to the store), unattached (it belongs to no store).")]
pub(crate) struct State {
    /// Sum up everything below directories
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Name each place below directories at which the store differs
    #[arg(long, requires = "recursive")]
    pub(crate) list: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Paths in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay wait-durable`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay wait-durable /data/out.h5
  forebay wait-durable -r /data --timeout 10m && echo safe

Waits until the store has what was written so far, as the directory's policy copies it. It copies nothing itself: that is \
`forebay sync`. Exit status 1 if it is not durable in time.")]
pub(crate) struct WaitDurable {
    /// Wait for everything below directories
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Wait at most so long: 30s, 10m, 2h [default: for ever]
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub(crate) timeout: Option<u64>,
    /// Do not show progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print as JSON what is durable
    #[arg(long)]
    pub(crate) json: bool,
    /// Paths in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// Options of `forebay sync`, `prestage`, `release`, `purge` and `refresh`.
#[derive(Debug, Args)]
pub(crate) struct Work {
    /// Everything below directories
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Print the task's number and return
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Do not show progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print the tasks as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the files and bytes copied so far into this file now and then; it has to be there
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) tally: Option<PathBuf>,
    /// Paths in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay sync`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay sync /data/out.h5             return when the store has it
  forebay sync -r /data --no-wait       as a task: `forebay tasks` shows it")]
pub(crate) struct Sync {
    #[command(flatten)]
    pub(crate) work: Work,
}

/// `forebay prestage`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay prestage -r /data/case        before the job needs it
  forebay prestage -r /data/case --no-wait")]
pub(crate) struct Prestage {
    #[command(flatten)]
    pub(crate) work: Work,
}

/// `forebay release`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay release -r /data/old          its space is free; the names stay

Files that the store does not have yet, that are open, or that are pinned keep their data, and are named.")]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) work: Work,
}

/// `forebay purge`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay purge -r /data/done           copy to the store what it does not have, then free the space")]
pub(crate) struct Purge {
    #[command(flatten)]
    pub(crate) work: Work,
}

/// `forebay refresh`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay refresh -r /data              see what others have changed in the store since")]
pub(crate) struct Refresh {
    #[command(flatten)]
    pub(crate) work: Work,
}

/// `forebay pin`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay pin /data/mesh.nc             keep its data in the pool, even when the pool is full
  forebay pin /data/input               what is in the directory")]
pub(crate) struct Pin {
    #[command(flatten)]
    pub(crate) paths: Pinned,
}

/// `forebay unpin`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay unpin /data/mesh.nc")]
pub(crate) struct Unpin {
    #[command(flatten)]
    pub(crate) paths: Pinned,
}

/// Options of `forebay pin` and `forebay unpin`.
#[derive(Debug, Args)]
pub(crate) struct Pinned {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Paths in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay resolve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay state /data/out.h5                    says that there is a conflict
  forebay resolve /data/out.h5 --keep pool      the pool's version replaces the store's
  forebay resolve /data/out.h5 --keep store     the pool's version is dropped
  forebay resolve /data/out.h5 --keep both      the pool's version gets another name beside it")]
pub(crate) struct Resolve {
    /// Whose version survives
    #[arg(long, value_name = "WHOSE")]
    pub(crate) keep: Kept,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// A path in the pool that has a conflict
    #[arg(value_name = "PATH", value_parser = path())]
    pub(crate) path: OsString,
}

/// Whose version survives a conflict.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Kept {
    /// The pool's, which replaces the store's
    Pool,
    /// The store's; the pool's is dropped
    Store,
    /// Both: the pool's gets another name
    Both,
}

impl From<Kept> for Keep {
    fn from(kept: Kept) -> Keep {
        match kept {
            Kept::Pool => Keep::Pool,
            Kept::Store => Keep::Store,
            Kept::Both => Keep::Both,
        }
    }
}

/// `forebay tasks`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay tasks                         those that run, and those that are over
  forebay tasks show 7                  with the paths that failed
  forebay tasks wait 7                  with progress
  forebay tasks cancel 7")]
pub(crate) struct Tasks {
    /// Print as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// What to do [default: list]
    #[command(subcommand)]
    pub(crate) verb: Option<TasksVerb>,
}

/// Verbs of `forebay tasks`.
#[derive(Debug, Subcommand)]
pub(crate) enum TasksVerb {
    /// List all tasks, the oldest first
    List,
    /// Show a task, with the first paths that failed
    Show {
        /// Its number
        id: u64,
    },
    /// Wait until a task is over; exit status 1 if it has failed
    Wait {
        /// Its number
        id: u64,
        /// Do not show progress
        #[arg(long)]
        no_progress: bool,
    },
    /// End a task; what it has done stays
    Cancel {
        /// Its number
        id: u64,
    },
}
