//! The options of the verbs for jobs of batch systems.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, ValueHint};

/// `forebay bb`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay bb check job.sh               are the directives of this script right?
  forebay bb sweep                      as root on a node: remove what lost jobs have left
  forebay bb destroy POOL               end a persistent pool of yours that no job uses

Slurm's plugin, prolog and epilog call the other verbs (docs/slurm.md). Settings are in /etc/forebay/slurm.toml, or in the \
file that FOREBAY_SLURM_CONF names.")]
pub(crate) struct Bb {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: BbVerb,
}

/// Verbs of `forebay bb`.
#[derive(Debug, Subcommand)]
pub(crate) enum BbVerb {
    /// Check the directives of a job script
    Check {
        /// The script
        #[arg(value_hint = ValueHint::FilePath)]
        script: PathBuf,
    },
    /// Answer a call of Slurm's plugin: the first line is its return code
    Hook {
        /// The function, without `slurm_bb_`
        name: String,
        /// Its arguments
        #[arg(allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// What slurmd's prolog does
    Prolog,
    /// What slurmd's epilog does
    Epilog,
    /// Remove what jobs have left on this node that ended without an epilog
    Sweep,
    /// As SlurmUser: end what jobs have left in the registry that Slurm has lost
    Reconcile,
    /// End a persistent pool of yours that no job uses; as SlurmUser, any one as soon as no job uses it
    Destroy {
        /// Also if it has data that are nowhere else
        #[arg(long)]
        discard: bool,
        /// Its name
        name: String,
    },
    /// Start a job's pool on this node
    #[command(hide = true)]
    NodeUp {
        /// The job
        job: u32,
    },
    /// End a job's pool on this node
    #[command(hide = true)]
    NodeDown {
        /// The job
        job: u32,
        /// The run that ends here
        run: u32,
    },
    /// Stage out what a lost node has of a run
    #[command(hide = true)]
    Save {
        /// The job
        job: u32,
        /// Its run
        run: u32,
    },
    /// Have a pool copy nothing more to its store by itself
    #[command(hide = true)]
    HoldBack {
        /// Its directory
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
    /// Remove a pool's directory of this user
    #[command(hide = true)]
    Clear {
        /// Its name
        key: String,
    },
    /// Serve a persistent pool
    #[command(hide = true)]
    Steward {
        /// The job that created it
        job: u32,
        /// This node's number in the job
        rank: usize,
    },
}

/// `forebay queue`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay queue                         which jobs transfer from and to each store, and in which order")]
pub(crate) struct Queue {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay job`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay job begin --capacity 4GiB             in a script, as its first line:
  eval \"$(forebay job begin --capacity 64GiB --stage-in /lustre/case:/case --stage-out /out:/lustre/out)\"

The script then has a pool over the nodes of its job, which stages out and ends with the script, however that ends. The
nodes are taken from Slurm, PBS, LSF, Flux, OAR, Grid Engine or Cobalt, or from FOREBAY_HOSTS (a list) or FOREBAY_HOSTFILE. Several nodes \
are started by ssh, or by the command in FOREBAY_RSH.")]
pub(crate) struct JobCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: JobVerb,
}

/// Verbs of `forebay job`.
#[derive(Debug, Subcommand)]
pub(crate) enum JobVerb {
    /// Start the job's pool and stage in; print the shell code that the script has to evaluate
    Begin {
        /// Capacity of the pool on each node
        #[arg(long, value_name = "SIZE")]
        capacity: Option<String>,
        /// dram or ssd
        #[arg(long, value_name = "MEDIUM")]
        media: Option<String>,
        /// Put it in front of this store
        #[arg(long, value_name = "URL")]
        backing: Option<String>,
        /// When written files are copied to it: close, age:30s, watermark, request or never
        #[arg(long, value_name = "POLICY", requires = "backing")]
        policy: Option<String>,
        /// Copy this into the pool first
        #[arg(long, value_name = "SRC:DST", action = ArgAction::Append)]
        stage_in: Vec<String>,
        /// Copy this out of the pool when the script ends
        #[arg(long, value_name = "SRC:DST", action = ArgAction::Append)]
        stage_out: Vec<String>,
        /// The job's hosts
        #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
        hosts: String,
    },
    /// Stage out and stop the job's pool
    End {
        /// Only the job that began with this
        #[arg(long, hide = true)]
        nonce: Option<String>,
    },
    /// Wait for the end of the script, and end the job's pool if the script has not
    Watch {
        /// Only the job that began with this
        #[arg(long, hide = true)]
        nonce: Option<String>,
        /// The process of the script's shell
        pid: u32,
    },
}
