//! The options of `forebay model`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::values::size;

/// `forebay model`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay model calibrate                          the pool; about a minute
  forebay model calibrate --quick --medium /scratch --output scratch.toml
  forebay model calibrate --mpi \"mpirun -n 2 --map-by node $HOME/kernels/ping-pong\"
  forebay model predict --ranks 64 --nodes 8 --bytes 16MiB --run 4KiB --interleaved
  forebay model predict --ranks 4 --ior \"-a MPIIO -b 16m -t 64k -s 4 -c\"
  forebay model advise --ranks 64 --nodes 8 --bytes 16MiB --run 4KiB --interleaved --json

The calibration is stored with the pool. MPI-IO uses it there, from the next start of a program on, to choose between
two-phase and independent access in collective calls; FOREBAY_MODEL=off turns that off.")]
pub(crate) struct ModelCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: ModelVerb,
}

/// Verbs of `forebay model`.
#[derive(Debug, Subcommand)]
pub(crate) enum ModelVerb {
    /// Measure a medium, this node and its network
    Calibrate(ModelCalibrate),
    /// Predict how long a pattern of access takes, collective and independent
    Predict(ModelPredict),
    /// Say which way, how many aggregators, buffers and stripes are fastest, with hints for MPI-IO
    Advise(ModelAdvise),
}

impl ModelVerb {
    /// True when the user wants JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            ModelVerb::Calibrate(a) => a.json,
            ModelVerb::Predict(a) => a.pattern.json,
            ModelVerb::Advise(a) => a.pattern.json,
        }
    }
}

/// `forebay model calibrate`.
#[derive(Debug, Args)]
pub(crate) struct ModelCalibrate {
    /// What is measured: a directory, or `pool`
    #[arg(long, value_name = "PATH|pool", value_hint = ValueHint::DirPath, default_value = "pool")]
    pub(crate) medium: PathBuf,
    /// Measure messages by this command: a launcher with the program ping-pong of kernels/, on two nodes. Words are
    /// separated by blanks
    #[arg(long, value_name = "COMMAND")]
    pub(crate) mpi: Option<String>,
    /// Take a few seconds and less space
    #[arg(long)]
    pub(crate) quick: bool,
    /// Store the calibration here [default: with the pool]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
    /// Print the calibration as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the runs of a rank lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum AccessKind {
    /// Each rank has one range
    Sequential,
    /// Runs with gaps between them
    Strided,
    /// Runs in random order
    Random,
}

/// A pattern of access.
#[derive(Debug, Args)]
pub(crate) struct PatternOptions {
    /// Processes
    #[arg(short, long, value_name = "N", default_value = "2")]
    pub(crate) ranks: u64,
    /// Nodes of the processes
    #[arg(short, long, value_name = "N", default_value = "1")]
    pub(crate) nodes: u64,
    /// Processes that access the file for all [default: the fastest number up to the calibrated node's
    /// processors, as the MPI driver chooses]
    #[arg(short, long, value_name = "N")]
    pub(crate) aggregators: Option<u64>,
    /// Bytes of a call of each rank
    #[arg(short, long, value_name = "SIZE", value_parser = size, default_value = "1MiB", conflicts_with = "ior")]
    pub(crate) bytes: u64,
    /// Bytes of a rank's data that follow each other in the file [default: all]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "ior")]
    pub(crate) run: Option<u64>,
    /// Bytes between two runs of a rank
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["ior", "interleaved"])]
    pub(crate) gap: Option<u64>,
    /// The ranks' runs take turns in the file, without gaps between those of different ranks
    #[arg(long, conflicts_with = "ior")]
    pub(crate) interleaved: bool,
    /// Where the runs of a rank lie [default: strided if there are gaps, otherwise sequential]
    #[arg(long, value_name = "KIND", conflicts_with = "ior")]
    pub(crate) access: Option<AccessKind>,
    /// Reads in place of writes
    #[arg(long)]
    pub(crate) read: bool,
    /// Bytes that an aggregator handles at a time
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4MiB")]
    pub(crate) buffer: u64,
    /// Backing files or targets that can be accessed at the same time
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) targets: u64,
    /// Data are on another node than the rank that accesses them
    #[arg(long)]
    pub(crate) far: bool,
    /// All data are on nodes without ranks, such as storage nodes
    #[arg(long)]
    pub(crate) apart: bool,
    /// Calls with this pattern, each of which begins in the file where the one before has ended; times are those of all
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "ior",
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) calls: u64,
    /// The pattern of these options of IOR, each transfer a call
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub(crate) ior: Option<String>,
    /// The calibration to use [default: the pool's]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) calibration: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay model predict`.
#[derive(Debug, Args)]
pub(crate) struct ModelPredict {
    #[command(flatten)]
    pub(crate) pattern: PatternOptions,
    /// Extensions of the model that are left out, to see what they change: runs, sieving, messages, remote, targets,
    /// contention, copies, or `all`
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) without: Vec<String>,
}

/// `forebay model advise`.
#[derive(Debug, Args)]
pub(crate) struct ModelAdvise {
    #[command(flatten)]
    pub(crate) pattern: PatternOptions,
    /// Stripe counts up to this one are tried
    #[arg(long, value_name = "N", default_value = "8")]
    pub(crate) stripes: u64,
}
