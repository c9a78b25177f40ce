//! The options of the verbs that start, stop and show whole pools.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use forebay_server::media_profile::MediaProfile;
use forebay_server::Medium;

use super::values::{media_profile, medium, size, snapshots};

/// `forebay up`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay up                                    memory of this node, half of what is free
  forebay up --capacity 64GiB                   so much of it
  forebay up --media ssd --path /local/scratch/pool
  forebay up --path /dev/shm/$USER-pool         memory, for a user who may not mount
  forebay up --mount /mnt/pool                  mounted there, for any program
  forebay up --backing /lustre/project          in front of slow storage, whose files it shows
  forebay up --resources case.toml              in front of several stores, as a file says
  forebay up --hosts n1,n2,n3                   one pool of three nodes, by ssh
  forebay up --hosts 'n[01-16]' --media ssd --path /local/pool
  forebay up --hosts \"$SLURM_JOB_NODELIST\"
  forebay up --hosts mem1,mem2 --no-target 'n[01-16]'
                                                two memory servers, and 16 nodes that keep their memory
  srun --overlap --ntasks-per-node=1 forebay up --job &
                                                each rank starts its node, and they find each other
  forebay status --wait 60                      in the same script: until all nodes are up
  mpirun --map-by node forebay up --job
  forebay up --pool case.toml --node n2         one node of the pool that a file describes
  forebay up --pool case.toml --all             all of them, by ssh

With --media dram the pool mounts a tmpfs of its own where it may. Else it uses the directory given, which should then be
on a tmpfs; `forebay status` says what that costs. After a crash or `down --keep`, `up` finds the data again.

--hosts, --all: if one node cannot be started, those that were started are stopped again, unless --partial is given. Stop the
pool with `forebay down --hosts LIST`, or on one of its nodes with `forebay down --all`. --job needs a directory that all
ranks share, by default the home directory, in which they leave notes until all have come.")]
pub(crate) struct Up {
    /// The directory in which to make the pool: the same as --pool
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) path: Option<PathBuf>,
    /// dram: data in memory; ssd: data in the directory, on whatever disk holds it
    #[arg(long, value_name = "MEDIUM", value_parser = medium)]
    pub(crate) media: Option<Medium>,
    /// Put it in front of this store, as with `forebay attach URL /`
    #[arg(long, value_name = "URL", conflicts_with_all = ["all", "hosts", "job", "node"])]
    pub(crate) backing: Option<OsString>,
    /// Put directories of it in front of stores, as this file says: TOML (`man forebay-resources`), or the YAML of
    /// echofs. Options take precedence
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["all", "hosts", "job", "node", "backing"])]
    pub(crate) resources: Option<PathBuf>,
    /// Mount it on this empty directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) mount: Option<PathBuf>,
    /// Start every node of the pool file: this host's node directly, the others by ssh (or by the command in
    /// FOREBAY_RSH)
    #[arg(long, conflicts_with_all = ["node", "path", "media", "capacity", "mount", "hosts", "job"])]
    pub(crate) all: bool,
    /// Start one pool over these hosts, by ssh: a,b or n[01-16] or @FILE. In --path and --mount, %n is the host's name
    #[arg(long, value_name = "LIST", conflicts_with_all = ["node", "job"])]
    pub(crate) hosts: Option<String>,
    /// Hosts that are also nodes of the pool of --hosts, but without a target: their programs use the space of the
    /// others
    #[arg(long, value_name = "LIST", requires = "hosts")]
    pub(crate) no_target: Option<String>,
    /// Start this node of one pool over the hosts of this MPI or Slurm job step; every rank runs it. NAME is needed
    /// where the launcher does not name its job
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "", conflicts_with = "node")]
    pub(crate) job: Option<String>,
    /// The directory through which the ranks of --job find each other; all of them must see it [default: the home
    /// directory]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, env = "FOREBAY_SHARED", hide_env_values = true)]
    pub(crate) shared: Option<PathBuf>,
    /// How long --job waits for the other ranks
    #[arg(long, value_name = "SECONDS", requires = "job", default_value = "60", hide_default_value = true)]
    pub(crate) wait: u64,
    /// Leave the started nodes up when others could not be started
    #[arg(long)]
    pub(crate) partial: bool,
    /// The port on which the nodes listen for one another [default: 7850]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// libfabric's provider between the nodes, e.g. verbs;ofi_rxm [default: tcp;ofi_rxm]
    #[arg(long, value_name = "NAME")]
    pub(crate) provider: Option<String>,
    /// Also write the pool file of --hosts here, with the secret beside it, for `--pool FILE` on this host
    #[arg(long, value_name = "FILE", requires = "hosts", value_hint = ValueHint::FilePath)]
    pub(crate) write: Option<PathBuf>,
    /// Read pool file and secret from standard input; --hosts starts each node this way
    #[arg(long, hide = true, requires = "node")]
    pub(crate) handed: bool,
    /// Which node of the pool file this is [default: FOREBAY_NODE, or the node that has this host's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// This node's data are lost: join the pool again under a number that it never had. Files that had data here stay
    /// I/O errors
    #[arg(long, conflicts_with_all = ["all", "hosts", "job"])]
    pub(crate) renumber: bool,
    /// Let users other than the one who mounts use the mount too
    #[arg(long, requires = "mount")]
    pub(crate) allow_other: bool,
    /// Stay until the pool is down; SIGTERM, SIGHUP and ^C stop it. In a Slurm step this is the default
    #[arg(long, conflicts_with_all = ["all", "hosts", "background"])]
    pub(crate) foreground: bool,
    /// Return when the pool is up, even in a Slurm step, at whose end Slurm kills it
    #[arg(long, conflicts_with_all = ["all", "hosts"])]
    pub(crate) background: bool,
    /// Capacity of the pool, e.g. 4GiB; with several nodes, of each [default: half of the free memory, or 80 % of the
    /// free disk]. With --job each rank sets it for its host, and 0 means a host without a target
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) capacity: Option<u64>,
    /// Time between two snapshots of the pool's names on targets that outlive the node, e.g. 30s, or off: `forebay
    /// recover` needs them [default: 60s, or what the pool had]
    #[arg(
        long,
        value_name = "TIME",
        env = "FOREBAY_SNAPSHOT",
        hide_env_values = true,
        value_parser = snapshots
    )]
    pub(crate) snapshots: Option<u64>,
    /// Make the targets as slow as a medium, for every interface: hdd, ssd, slc, pcram, reram, optane, dram, or a file that
    /// describes one (docs/emulation.md); none ends it [default: none, or what the pool had]
    #[arg(long, value_name = "NAME|FILE", value_parser = media_profile)]
    pub(crate) media_profile: Option<MediaProfile>,
    /// Print as JSON what was started
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay down`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay down              stop; what is only in memory is gone, and is counted
  forebay down --keep       stop; the next `up` finds the data (not after a reboot, if it is in memory)
  forebay stage-out /:/lustre/saved && forebay down
  forebay down --pool case.toml --all            all nodes that the file names
  forebay down --all                             all nodes of the pool that is up here
  forebay down --hosts 'n[01-16]'                what `up --hosts` started

A pool with backing stores first copies to them what they do not have yet. If that fails, the pool stays up, unless
--discard is given.

A pool on a disk (--media ssd) keeps its data in any case: remove its directory to be rid of it. `down` also clears away
what a killed pool left.")]
pub(crate) struct Down {
    /// Stop every node of the pool file: this host's node directly, the others by ssh (or by the command in
    /// FOREBAY_RSH). If one of them would refuse, none is stopped
    #[arg(long, conflicts_with_all = ["json", "hosts"])]
    pub(crate) all: bool,
    /// Stop the pool on these hosts, by ssh: the list that was given to `up --hosts`
    #[arg(long, value_name = "LIST", conflicts_with = "json")]
    pub(crate) hosts: Option<String>,
    /// Keep the data of a pool in memory for the next `up`
    #[arg(long)]
    pub(crate) keep: bool,
    /// Stop the pool even while programs use it
    #[arg(long)]
    pub(crate) force: bool,
    /// Stop the pool even if backing stores do not have everything, or with --keep although it has volumes: what they
    /// lack, and the volumes, are lost
    #[arg(long)]
    pub(crate) discard: bool,
    /// Do not show the progress of copying to backing stores
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Only find out whether it would be stopped, for `--all` and `--hosts`
    #[arg(long, hide = true)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay status
  forebay status --wait 60                      until this node and all others of the pool are up
  forebay status --json | jq .free_bytes")]
pub(crate) struct Status {
    /// Wait until the pool and all its nodes are up, at most this long
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait: Option<u64>,
    /// Print everything as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
