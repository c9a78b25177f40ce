//! The options of `forebay emulate`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use forebay_server::media_profile::MediaProfile;

use super::values::{media_profile, size};

/// `forebay emulate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay emulate up --profile pcram --size 8GiB    a block device in memory, as slow as phase-change memory
  mkfs.ext4 /dev/loop0 && mount /dev/loop0 /mnt     for any file system
  forebay emulate up --profile ./my-disk.toml --size 1GiB --name disk --checksum --verify-writes
  forebay emulate list
  forebay emulate stat disk                         requests, bytes, latencies, merges
  forebay emulate probe disk                        configured beside measured values
  forebay emulate run --memory 1GiB -- program      a program whose page cache is limited
  forebay emulate down disk

Devices need root, FUSE and loop devices. Their data are in memory and end with them.")]
pub(crate) struct EmulateCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: EmulateVerb,
}

/// Verbs of `forebay emulate`.
#[derive(Debug, Subcommand)]
pub(crate) enum EmulateVerb {
    /// Make a block device that is as slow as a medium, and print its name
    Up(EmulateUp),
    /// List the devices
    List(EmulateList),
    /// Show what a device counted: requests, bytes, latencies, merges
    Stat(EmulateStat),
    /// Measure a device, and show the values beside the configured ones
    Probe(EmulateStat),
    /// Run a program in a memory cgroup, which limits its page cache too
    Run(EmulateRun),
    /// End a device; its data are gone
    Down(EmulateDown),
    /// Damage a device's data or memory, for tests
    #[command(hide = true)]
    Corrupt(EmulateCorrupt),
}

impl EmulateVerb {
    /// True when the user wants JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            EmulateVerb::Up(a) => a.json,
            EmulateVerb::List(a) => a.json,
            EmulateVerb::Stat(a) | EmulateVerb::Probe(a) => a.json,
            EmulateVerb::Run(_) | EmulateVerb::Down(_) | EmulateVerb::Corrupt(_) => false,
        }
    }
}

/// `forebay emulate up`.
#[derive(Debug, Args)]
pub(crate) struct EmulateUp {
    /// The medium: hdd, ssd, slc, pcram, reram, optane, dram, or a file that describes one (docs/emulation.md)
    #[arg(long, value_name = "NAME|FILE", value_parser = media_profile)]
    pub(crate) profile: MediaProfile,
    /// Size of the device, e.g. 8GiB; all of it is allocated in memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) size: u64,
    /// Name of the device for the other verbs [default: the profile's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Protect the device's memory: a stray write of its server ends the device instead of changing data
    #[arg(long)]
    pub(crate) write_protect: bool,
    /// Keep a checksum of each block, and verify it at each read: changed data are an I/O error
    #[arg(long)]
    pub(crate) checksum: bool,
    /// Read each block back after it was written
    #[arg(long)]
    pub(crate) verify_writes: bool,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay emulate list`.
#[derive(Debug, Args)]
pub(crate) struct EmulateList {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay emulate stat` and `probe`.
#[derive(Debug, Args)]
pub(crate) struct EmulateStat {
    /// The device, by its name or as /dev/loopN [default: the only one]
    pub(crate) name: Option<String>,
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `forebay emulate run`.
#[derive(Debug, Args)]
pub(crate) struct EmulateRun {
    /// Memory of the program and its children together, page cache included, e.g. 1GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: u64,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// `forebay emulate down`.
#[derive(Debug, Args)]
pub(crate) struct EmulateDown {
    /// The device, by its name or as /dev/loopN [default: the only one]
    pub(crate) name: Option<String>,
    /// End it although it is mounted: what uses it gets I/O errors
    #[arg(long)]
    pub(crate) force: bool,
}

/// `forebay emulate corrupt`.
#[derive(Debug, Args)]
pub(crate) struct EmulateCorrupt {
    /// The device, by its name or as /dev/loopN [default: the only one]
    pub(crate) name: Option<String>,
    /// Flip a bit of this byte in memory
    #[arg(long, value_name = "BYTE")]
    pub(crate) flip: Option<u64>,
    /// Have the server store to this byte as a wild pointer would, at its next request
    #[arg(long, value_name = "BYTE")]
    pub(crate) stray: Option<u64>,
    /// Have the next verified write go wrong
    #[arg(long)]
    pub(crate) spoil_write: bool,
}
