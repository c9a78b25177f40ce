//! The options of `forebay volume`.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use super::values::{permissions, size};

/// `forebay volume`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay volume create particles --size 64GiB      memory that programs put to and get from (forebay.h)
  forebay volume create shared --size 1GiB --mode 640
  forebay volume list
  forebay volume show particles
  forebay volume resize particles --size 96GiB      also while programs use it
  forebay volume format particles                   all of it reads as zeros
  forebay volume delete particles

A volume is in the memory of the pool: files and volumes share its capacity. It lives as long as the pool's daemon; nothing
copies it to a backing store.")]
pub(crate) struct VolumeCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: VolumeVerb,
}

/// Verbs of `forebay volume`.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeVerb {
    /// Make a volume, and reserve its memory
    Create(VolumeCreate),
    /// List the volumes of the pool
    List(VolumeList),
    /// Show volumes: size, owner, and where their pieces are
    Show(VolumeNames),
    /// Make a volume larger, or smaller by what it grew last
    Resize(VolumeResize),
    /// Delete volumes that no program uses
    Delete(VolumeNames),
    /// Set all bytes of volumes to zero
    Format(VolumeFormat),
}

impl VolumeVerb {
    /// True when the user wants JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            VolumeVerb::Create(a) => a.json,
            VolumeVerb::List(a) => a.json,
            VolumeVerb::Show(a) | VolumeVerb::Delete(a) => a.json,
            VolumeVerb::Resize(a) => a.json,
            VolumeVerb::Format(a) => a.json,
        }
    }
}

/// `forebay volume create`.
#[derive(Debug, Args)]
pub(crate) struct VolumeCreate {
    /// Its size, rounded up to whole pages of 4 KiB
    #[arg(short, long, value_name = "SIZE", value_parser = size)]
    pub(crate) size: u64,
    /// Its permission bits, in octal
    #[arg(short, long, value_name = "MODE", value_parser = permissions, default_value = "600")]
    pub(crate) mode: u32,
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print what was made as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Its name: no `/`, `:`, `+`, and no control characters
    #[arg(value_name = "NAME")]
    pub(crate) name: OsString,
}

/// `forebay volume list`.
#[derive(Debug, Args)]
pub(crate) struct VolumeList {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Volumes by their names.
#[derive(Debug, Args)]
pub(crate) struct VolumeNames {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Volumes
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<OsString>,
}

/// `forebay volume format`.
#[derive(Debug, Args)]
pub(crate) struct VolumeFormat {
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Volumes
    #[arg(value_name = "NAME", required = true)]
    pub(crate) names: Vec<OsString>,
}

/// `forebay volume resize`.
#[derive(Debug, Args)]
pub(crate) struct VolumeResize {
    /// Its new size, rounded up to whole pages of 4 KiB. A smaller one must be a size that it had before it grew, and no
    /// program may use it then
    #[arg(short, long, value_name = "SIZE", value_parser = size)]
    pub(crate) size: u64,
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The volume
    #[arg(value_name = "NAME")]
    pub(crate) name: OsString,
}
