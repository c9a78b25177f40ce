//! The whole command line: verbs, options, and the help with examples.

mod batch;
mod emulate;
mod model;
mod pools;
mod recovery;
mod stores;
mod values;
mod volumes;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum, ValueHint};
use forebay_server::media_profile::MediaProfile;
use forebay_server::Medium;

use values::{media_profile, medium, path, size, snapshots};

pub(crate) use batch::{Bb, BbVerb, JobCommand, JobVerb, Queue};
pub(crate) use emulate::{EmulateCommand, EmulateCorrupt, EmulateRun, EmulateStat, EmulateUp, EmulateVerb};
pub(crate) use model::{
    AccessKind, ModelAdvise, ModelCalibrate, ModelCommand, ModelPredict, ModelVerb, PatternOptions,
};
pub(crate) use pools::{Down, Status, Up};
pub(crate) use recovery::Recover;
pub(crate) use stores::{
    Attach, Detach, Pin, Pinned, Prestage, Purge, Refresh, Release, Resolve, State, Sync, Tasks, TasksVerb,
    Unpin, WaitDurable, Work,
};
pub(crate) use values::recall;
pub(crate) use volumes::{
    VolumeAttach, VolumeCommand, VolumeCopy, VolumeCreate, VolumeExport, VolumeFlush, VolumeFormat,
    VolumeLoad, VolumeNames, VolumeResize, VolumeVerb,
};

const AFTER_HELP: &str = "\
Run a program over a pool of its own, with its input staged in and its results out:
  forebay run --stage-in /lustre/case:/case --stage-out /case/out:/lustre/out -- ./solver /forebay/case

Put a pool in front of slow storage: its files appear in the pool, results are copied back by themselves:
  forebay up --backing /lustre/project
  forebay run -- ./solver /forebay/case
  forebay down

Keep one pool for several programs:
  forebay up --capacity 16GiB
  forebay stage-in /lustre/case
  forebay run -- mpirun ./solver /forebay/case
  forebay stage-out /case/out:/lustre/out
  forebay down

A pool is found by --pool DIR (before or after the verb), else by FOREBAY_POOL, else it is /tmp/forebay-UID/pool
(with FOREBAY_TMPDIR set: there instead of in /tmp). Paths in a pool start with /; with the prefix in front
(/forebay/case) they mean the same.

Exit status: 0 done, 1 failed, 2 the command line makes no sense; `fsck`: 4 problems found; `run`: the program's own,
or 125 Forebay failed, 126 the program cannot be started, 127 it is not found.";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "forebay",
    version,
    about = "A burst buffer: memory and SSDs of this node as a fast file system in front of slow storage",
    after_help = AFTER_HELP,
    max_term_width = 110,
    disable_help_subcommand = false,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(crate) struct Arguments {
    /// The pool's directory, or its pool file
    #[arg(long, global = true, env = "FOREBAY_POOL", value_name = "DIR", value_hint = ValueHint::DirPath, hide_env_values = true)]
    pub(crate) pool: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// A verb.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Start a pool that stays until `forebay down`
    Up(Up),
    /// Stop a pool
    Down(Down),
    /// Show a pool: space, processes, and drawbacks of its medium
    Status(Status),
    /// List directories of a pool
    Ls(Ls),
    /// Show all metadata of files of a pool
    Stat(Stat),
    /// Mount a pool as a file system
    Mount(Mount),
    /// Unmount a pool
    Umount(Umount),
    /// Run a program that sees a pool as a directory
    Run(Run),
    /// Copy files and directories into a pool
    StageIn(StageIn),
    /// Copy files and directories out of a pool
    StageOut(StageOut),
    /// Put a pool, or a directory of it, in front of a backing store
    Attach(Attach),
    /// Take a backing store away from a directory; nothing is deleted in the store
    Detach(Detach),
    /// Show whether the backing store has a file
    State(State),
    /// Wait until the backing store has what was written
    WaitDurable(WaitDurable),
    /// Copy to the backing store what it does not have yet
    Sync(Sync),
    /// Copy data from the backing store into the pool, before programs need them
    Prestage(Prestage),
    /// Free the space of data that the backing store has
    Release(Release),
    /// Copy to the backing store, then free the space
    Purge(Purge),
    /// Look for changes that others have made in the backing store
    Refresh(Refresh),
    /// Keep data in the pool even when it is full
    Pin(Pin),
    /// Let data leave the pool again
    Unpin(Unpin),
    /// List, show, await and cancel tasks
    Tasks(Tasks),
    /// Settle a conflict between the versions of pool and backing store
    Resolve(Resolve),
    /// Check the directives of job scripts, and serve the burst-buffer plugin of Slurm
    Bb(Bb),
    /// Give a batch script a pool, with any scheduler
    Job(JobCommand),
    /// Show which jobs transfer from and to slow storage, and in which order
    Queue(Queue),
    /// Copy to the backing stores what a pool has left whose node has died, or what a job could not stage out
    Recover(Recover),
    /// Show or change over how many backing files a file is striped
    Layout(LayoutCommand),
    /// Make, list, resize and delete volumes: memory that programs put to and get from
    Volume(VolumeCommand),
    /// Emulate media: block devices as slow as a disk, an SSD or NVM, and runs with a limited page cache
    Emulate(EmulateCommand),
    /// Measure media, predict the times of collective and independent I/O, and advise
    Model(ModelCommand),
    /// Check that a pool is consistent
    Fsck(Fsck),
    /// Print the completion script of this command for a shell
    Completions(Completions),
}

impl Verb {
    /// True when the user wants the output, and so a failure too, as JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Verb::Up(a) => a.json,
            Verb::Down(a) => a.json,
            Verb::Status(a) => a.json,
            Verb::Ls(a) => a.json,
            Verb::Stat(a) => a.json,
            Verb::StageIn(a) => a.staging.json,
            Verb::StageOut(a) => a.staging.json,
            Verb::Fsck(a) => a.json,
            Verb::Mount(a) => a.json,
            Verb::Umount(a) => a.json,
            Verb::Layout(a) => match &a.verb {
                LayoutVerb::Get(a) => a.json,
                LayoutVerb::Set(a) => a.json,
                LayoutVerb::Migrate(a) => a.json,
            },
            Verb::Volume(a) => a.verb.is_json(),
            Verb::Emulate(a) => a.verb.is_json(),
            Verb::Model(a) => a.verb.is_json(),
            Verb::Attach(a) => a.json,
            Verb::Detach(a) => a.json,
            Verb::State(a) => a.json,
            Verb::WaitDurable(a) => a.json,
            Verb::Sync(a) => a.work.json,
            Verb::Prestage(a) => a.work.json,
            Verb::Release(a) => a.work.json,
            Verb::Purge(a) => a.work.json,
            Verb::Refresh(a) => a.work.json,
            Verb::Pin(a) => a.paths.json,
            Verb::Unpin(a) => a.paths.json,
            Verb::Tasks(a) => a.json,
            Verb::Resolve(a) => a.json,
            Verb::Queue(a) => a.json,
            Verb::Recover(a) => a.json,
            Verb::Run(_) | Verb::Completions(_) | Verb::Bb(_) | Verb::Job(_) => false,
        }
    }
}

/// `forebay mount`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay mount /mnt/pool                       an empty directory
  forebay mount --allow-other /mnt/pool         for all users, by the permission bits

Any program can use the mount. Where this user has CAP_SYS_ADMIN the kernel reads and writes the pool's files by itself,
at the medium's own speed; else it asks, and `forebay status` says why. Users who may not mount need fusermount3 (Debian: \
fuse3).")]
pub(crate) struct Mount {
    /// Let users other than the one who mounts use it too
    #[arg(long)]
    pub(crate) allow_other: bool,
    /// Pass data through the mount's process instead of the kernel, to compare or to find a fault
    #[arg(long)]
    pub(crate) no_passthrough: bool,
    /// Print how it was mounted as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// An empty directory
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

/// `forebay umount`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay umount                 wherever it is
  forebay umount --lazy          also under programs that use it: they get errors")]
pub(crate) struct Umount {
    /// Detach it even while programs use it
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Where the pool is mounted
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
}

/// `forebay ls`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay ls                the root
  forebay ls -l /case
  forebay ls -lR            everything, with sizes
  forebay ls --json /case | jq '.[].name'")]
pub(crate) struct Ls {
    /// Show mode, links, owner, group, size and time of modification
    #[arg(short, long)]
    pub(crate) long: bool,
    /// Show names that start with a dot too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// List subdirectories recursively
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Paths in the pool
    #[arg(value_name = "PATH", default_value = "/", value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay stat /case/mesh.nc
  forebay stat --json /case/mesh.nc | jq '.[0].layout'")]
pub(crate) struct Stat {
    /// Follow a symbolic link instead of showing the link itself
    #[arg(short = 'L', long)]
    pub(crate) dereference: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Paths in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// When `forebay run` stages results out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum StageOutOn {
    /// When the program ended with status 0
    Success,
    /// Whatever the program's exit status
    Always,
}

/// `forebay run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay run -- tar xf sources.tar -C /forebay
  forebay run --stage-in /lustre/case --stage-out /case/out:/lustre/case/out -- ./solver /forebay/case
  forebay run --stage-out /ckpt:/lustre/ckpt --stage-out-on always -- ./simulate --checkpoint /forebay/ckpt
  forebay run --backing /lustre/project -- ./solver /forebay/case
                                                the project's files, with its results copied back
  forebay run -- mpirun -n 8 ./solver           ranks share the pool (of this node)
  mpirun -n 8 forebay run -- ./solver           the same; on several nodes each has a pool of its own
  forebay --pool /local/pool run -- ./solver    over a pool that `forebay up` started

Without a default pool, one is started for the program's life: one for all ranks of a job step on this node, and
within another `forebay run` that one's. The first rank stages in while the others wait, the last stages out. Nothing is
left when the program has ended, or when `forebay run` is killed. So where there is a default pool that cannot be used (it
is down with its data, was killed, or is up with another --capacity), --own has to be said.

The program sees the pool at the prefix by a preloaded library: programs that are linked statically, and set-user-id
ones, do not see it, and are warned of.

Exit status: the program's; if a signal killed it, the same signal. 125 when Forebay failed, 126 when the program cannot
be started, 127 when it is not found.")]
pub(crate) struct Run {
    /// Copy this into the pool first: a file or directory, and its destination in the pool [default: /NAME]
    #[arg(long, value_name = "SRC[:DST]", action = ArgAction::Append)]
    pub(crate) stage_in: Vec<OsString>,
    /// Copy this out of the pool at the end: a path in the pool, and its destination
    #[arg(long, value_name = "SRC:DST", action = ArgAction::Append)]
    pub(crate) stage_out: Vec<OsString>,
    /// When to stage out
    #[arg(long, value_name = "WHEN", default_value = "success")]
    pub(crate) stage_out_on: StageOutOn,
    /// A file with more to stage in: one SRC DST a line
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) manifest: Option<PathBuf>,
    /// Read every staged file again and compare it with its source
    #[arg(long)]
    pub(crate) verify: bool,
    /// Where the program sees the pool: an absolute path that does not exist, or the pool's mount point
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/forebay",
        env = "FOREBAY_PREFIX",
        hide_env_values = true
    )]
    pub(crate) prefix: PathBuf,
    /// Capacity of the pool if one is started, e.g. 4GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) capacity: Option<u64>,
    /// Where a started pool stores its data: dram or ssd (in the directory for temporary files)
    #[arg(long, value_name = "MEDIUM", value_parser = medium)]
    pub(crate) media: Option<Medium>,
    /// Time between two snapshots of the names of a pool that is started, on targets that outlive the node, e.g. 30s, or
    /// off: `forebay recover` needs them [default: 60s]
    #[arg(
        long,
        value_name = "TIME",
        env = "FOREBAY_SNAPSHOT",
        hide_env_values = true,
        value_parser = snapshots
    )]
    pub(crate) snapshots: Option<u64>,
    /// Make the targets of a started pool as slow as a medium, for every interface: hdd, ssd, slc, pcram, reram, optane, dram, or a file that
    /// describes one (docs/emulation.md); none ends it [default: none]
    #[arg(long, value_name = "NAME|FILE", value_parser = media_profile)]
    pub(crate) media_profile: Option<MediaProfile>,
    /// Start a pool that ends with the program, even if a default pool exists
    #[arg(long)]
    pub(crate) own: bool,
    /// Put the pool in front of this store, as with `forebay attach`; implies --own. What the program has written is on
    /// the store when `forebay run` ends
    #[arg(long, value_name = "URL")]
    pub(crate) backing: Option<OsString>,
    /// Do not show the progress of staging
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print nothing on stderr but errors and warnings
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Write a report of the run to this file, as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) report: Option<PathBuf>,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// Options of both directions of staging.
#[derive(Debug, Args)]
pub(crate) struct Staging {
    /// A file with more to stage: one SRC DST a line
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) manifest: Option<PathBuf>,
    /// Read every staged file again and compare it with its source
    #[arg(long)]
    pub(crate) verify: bool,
    /// If anything fails, remove everything that was staged
    #[arg(long)]
    pub(crate) all_or_nothing: bool,
    /// Write the files and bytes copied so far into this file now and then; it has to be there
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) tally: Option<PathBuf>,
    /// Copy files again even if size and time indicate that they are already there
    #[arg(long)]
    pub(crate) no_resume: bool,
    /// Files copied at the same time; 0: chosen to suit the machine
    #[arg(short, long, value_name = "COUNT", default_value = "0", hide_default_value = true)]
    pub(crate) jobs: usize,
    /// Do not show progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay stage-in`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay stage-in /lustre/case                 to /case
  forebay stage-in /lustre/case:/inputs/        to /inputs/case
  forebay stage-in /lustre/case/:/inputs        its contents into /inputs
  forebay stage-in --verify --manifest list.txt

A staging that was interrupted goes on where it stopped: run it again. A path with a colon goes into a manifest.")]
pub(crate) struct StageIn {
    #[command(flatten)]
    pub(crate) staging: Staging,
    /// What to copy, and its destination in the pool
    #[arg(value_name = "SRC[:DST]", required_unless_present = "manifest")]
    pub(crate) pairs: Vec<OsString>,
}

/// `forebay stage-out`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay stage-out /out:/lustre/case/out
  forebay stage-out /out/:/lustre/case          its contents
  forebay stage-out /a.nc:/lustre/ /b.nc:/lustre/ --verify

A file appears under its name only when it is whole. A staging that was interrupted goes on where it stopped.")]
pub(crate) struct StageOut {
    #[command(flatten)]
    pub(crate) staging: Staging,
    /// What to copy from the pool, and its destination
    #[arg(value_name = "SRC:DST", required_unless_present = "manifest")]
    pub(crate) pairs: Vec<OsString>,
}

/// `forebay fsck`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay fsck
  forebay fsck --pool /local/pool --json        also of a pool that is down

Exit status: 0 clean, 1 it could not be checked, 4 problems found.")]
pub(crate) struct Fsck {
    /// Print the findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay layout`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay layout get /case/out.h5
  forebay layout set --stripe-count 4 /case        for files that MPI programs make there
  forebay layout migrate /case/out.h5

A file is one backing file on the medium, or several, between which its bytes go round robin, so
that several processes write it at a time. Files that several MPI ranks make have several, and
those that MPI-IO or forebay.h make where a hint, or the directory's layout, says so. A program
under `forebay run` that opens such a file migrates it by itself.")]
pub(crate) struct LayoutCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: LayoutVerb,
}

/// Verbs of `forebay layout`.
#[derive(Debug, Subcommand)]
pub(crate) enum LayoutVerb {
    /// Show the layouts of files and directories
    Get(LayoutGet),
    /// Set the layout of files that will be made in a directory, or make an empty file with that layout
    Set(LayoutSet),
    /// Convert files to one backing file each; this needs space for a copy, and fails while a program has the file open
    Migrate(LayoutMigrate),
}

/// `forebay layout get`.
#[derive(Debug, Args)]
pub(crate) struct LayoutGet {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Files and directories in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay layout set`.
#[derive(Debug, Args)]
pub(crate) struct LayoutSet {
    /// Distribute the entries of an empty directory over this many nodes, 2 to 16; 0: over all of the pool's, 16 at
    /// most. For directories in which many nodes make files at the same time
    #[arg(short = 'W', long, value_name = "N")]
    pub(crate) width: Option<u16>,
    /// The width of directories that will be made in this one, and, by inheritance, in those; 1: narrow. Each such
    /// mkdir sends two messages to each node
    #[arg(short = 'D', long, value_name = "N")]
    pub(crate) default_width: Option<u16>,
    /// Backing files of a file, 1 to 256 [default: the number of --targets]
    #[arg(short = 'c', long, value_name = "N", required_unless_present_any = ["targets", "width", "default_width"])]
    pub(crate) stripe_count: Option<u16>,
    /// Targets of the backing files, used in turn: nodes by name or number, NODE:I for a node's I-th target from 0
    /// [default: nodes that have space, this one first]
    #[arg(short = 't', long, value_name = "NODE[:I],...", value_delimiter = ',')]
    pub(crate) targets: Vec<String>,
    /// Bytes of a stripe, a power of two
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = size, default_value = "1MiB")]
    pub(crate) stripe_size: u64,
    /// Print the resulting layouts as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Directories in the pool, or names of files to make
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay layout migrate`.
#[derive(Debug, Args)]
pub(crate) struct LayoutMigrate {
    /// Print the resulting layouts as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Files in the pool
    #[arg(value_name = "PATH", required = true, value_parser = path())]
    pub(crate) paths: Vec<OsString>,
}

/// `forebay completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay completions bash > ~/.local/share/bash-completion/completions/forebay
  forebay completions zsh > \"${fpath[1]}/_forebay\"
  forebay completions fish > ~/.config/fish/completions/forebay.fish")]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn arguments_are_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_verb_has_help_with_examples() {
        for verb in Arguments::command().get_subcommands().filter(|c| c.get_name() != "help") {
            let help = verb.get_after_help().map(|h| h.to_string()).unwrap_or_default();
            assert!(help.contains("Examples:\n  forebay "), "{} shows no example", verb.get_name());
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
        }
    }

    #[test]
    fn pool_is_taken_before_and_after_the_verb() {
        for line in [["forebay", "--pool", "/p", "status"], ["forebay", "status", "--pool", "/p"]] {
            let a = Arguments::try_parse_from(line).unwrap();
            assert_eq!(a.pool, Some("/p".into()));
        }
    }

    #[test]
    fn run_takes_everything_behind_two_dashes_as_the_command() {
        let line = [
            "forebay",
            "run",
            "--stage-in",
            "/a",
            "--stage-in",
            "/b:/c",
            "--",
            "prog",
            "--pool",
            "/x",
            "--",
            "-v",
        ];
        let Verb::Run(run) = Arguments::try_parse_from(line).unwrap().verb else { panic!() };
        assert_eq!(run.command, ["prog", "--pool", "/x", "--", "-v"]);
        assert_eq!(run.stage_in, ["/a", "/b:/c"]);
        let line = ["forebay", "run", "--quiet", "prog", "--quiet", "-n", "--", "3"];
        let Verb::Run(run) = Arguments::try_parse_from(line).unwrap().verb else { panic!() };
        assert_eq!(run.command, ["prog", "--quiet", "-n", "--", "3"], "the two dashes may be left out");
        assert!(Arguments::try_parse_from(["forebay", "run", "--"]).is_err());
    }
}
