//! The options of `forebay volume`.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use super::values::{period, permissions, size};

/// `forebay volume`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forebay volume create particles --size 64GiB      memory that programs put to and get from (forebay.h)
  forebay volume create wide --size 8GiB --on a,b,c  striped over three nodes
  forebay volume create sparse --size 1TiB --thin    it takes what is written to it
  forebay volume list
  forebay volume show particles
  forebay volume resize particles --size 96GiB      also while programs use it
  forebay volume format particles                   all of it reads as zeros
  forebay volume copy particles ./particles.raw     to a file; its holes are where the volume has zeros
  forebay volume copy s3://bucket/mesh.bin mesh --to-offset 1GiB
  forebay volume flush particles /lustre/particles.raw --every 10m
  forebay volume load particles /lustre/particles.raw
  forebay volume attach particles                   a block device with its bytes
  forebay volume detach particles
  forebay volume export particles --socket /tmp/particles.sock   for clients of NBD
  forebay volume delete particles

A volume is in the memory of the pool: files and volumes share its capacity. It lives as long as the pool's daemon: what is
to stay is copied with `flush`.")]
pub(crate) struct VolumeCommand {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: VolumeVerb,
}

/// Verbs of `forebay volume`.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeVerb {
    /// Make a volume, and reserve its memory, or none with --thin
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
    /// Copy bytes between volumes, files and objects of stores
    Copy(VolumeCopy),
    /// Copy a volume to a file or an object of a store, which it replaces when the copy is whole
    Flush(VolumeFlush),
    /// Copy a file or an object of a store into a volume; the rest of the volume becomes zero
    Load(VolumeLoad),
    /// Make a block device (/dev/loopN) with the bytes of a volume, and print its name
    Attach(VolumeAttach),
    /// End the block devices of volumes, given by the volumes or by /dev/loopN
    Detach(VolumeNames),
    /// Serve a volume over NBD, until a signal: for programs and virtual machines of any user
    Export(VolumeExport),
}

impl VolumeVerb {
    /// True when the user wants JSON.
    pub(crate) fn is_json(&self) -> bool {
        match self {
            VolumeVerb::Create(a) => a.json,
            VolumeVerb::List(a) => a.json,
            VolumeVerb::Show(a) | VolumeVerb::Delete(a) | VolumeVerb::Detach(a) => a.json,
            VolumeVerb::Resize(a) => a.json,
            VolumeVerb::Format(a) => a.json,
            VolumeVerb::Copy(a) => a.json,
            VolumeVerb::Flush(a) => a.json,
            VolumeVerb::Load(a) => a.json,
            VolumeVerb::Attach(a) => a.json,
            VolumeVerb::Export(_) => false,
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
    /// Where its pieces are: nodes by name or number, and the number of a target; without this option, on this node's first
    /// target
    #[arg(long, value_name = "NODE[:TARGET],...", value_delimiter = ',')]
    pub(crate) on: Vec<String>,
    /// Bytes that follow each other in a piece before the next piece comes, a multiple of 4 KiB
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "1MiB", requires = "on")]
    pub(crate) stripe_size: u64,
    /// Reserve nothing: the volume takes the space of what is written to it, and gives back what is discarded. A write for
    /// which there is no space fails
    #[arg(long)]
    pub(crate) thin: bool,
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
    /// Write the zeros into thin volumes too, which then take all of their space
    #[arg(long)]
    pub(crate) zero: bool,
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

/// `forebay volume copy`.
#[derive(Debug, Args)]
pub(crate) struct VolumeCopy {
    /// Where to begin in FROM
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "0")]
    pub(crate) from_offset: u64,
    /// Where to begin in TO. A file is then changed in place; without this option it is replaced when the copy is whole
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) to_offset: Option<u64>,
    /// How much is copied, at most; without this option, all
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) bytes: Option<u64>,
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print what was copied as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// A volume, by name or specifier; a file, with a `/` in its name (./FILE); or an object (s3://BUCKET/OBJECT,
    /// file:///DIR/FILE)
    #[arg(value_name = "FROM")]
    pub(crate) from: OsString,
    /// The same
    #[arg(value_name = "TO")]
    pub(crate) to: OsString,
}

/// `forebay volume flush`.
#[derive(Debug, Args)]
pub(crate) struct VolumeFlush {
    /// Copy it again and again with this time in between (30s, 10m, 2h), until this command gets a signal, or the volume or
    /// the pool is gone; also after a copy that failed, unless that is the first
    #[arg(long, value_name = "TIME", value_parser = period)]
    pub(crate) every: Option<u64>,
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print what was copied as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The volume, by name or specifier
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: OsString,
    /// A file, with a `/` in its name (./FILE), or an object (s3://BUCKET/OBJECT, file:///DIR/FILE)
    #[arg(value_name = "TO")]
    pub(crate) to: OsString,
}

/// `forebay volume load`.
#[derive(Debug, Args)]
pub(crate) struct VolumeLoad {
    /// Show no progress
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Print what was copied as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The volume, by name or specifier
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: OsString,
    /// A file, with a `/` in its name (./FILE), or an object (s3://BUCKET/OBJECT, file:///DIR/FILE)
    #[arg(value_name = "FROM")]
    pub(crate) from: OsString,
}

/// `forebay volume attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dev=$(forebay volume attach particles)    a disk: /dev/loop0
  mkfs.ext4 $dev; mount $dev /mnt
  umount /mnt; forebay volume detach particles
  forebay volume attach wide --read-only    also of pieces on other nodes
  forebay volume attach a+b                 one disk, striped over two volumes in 1 MiB; detach a+b ends it

It takes root. The kernel serves a volume that is one piece on this node. Others are served by processes (forebay-device)
until the device is detached; when the pool ends, their I/O fails. Without root: forebay volume export.")]
pub(crate) struct VolumeAttach {
    /// The device cannot be written
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Print the device as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The volume, or a specifier, which may join several by +
    #[arg(value_name = "NAME")]
    pub(crate) name: OsString,
}

/// `forebay volume export`.
#[derive(Debug, Args)]
#[command(
    group = clap::ArgGroup::new("where").required(true),
    after_help = "\
Examples:
  forebay volume export particles --socket /tmp/particles.sock &
  until [ -S /tmp/particles.sock ]; do sleep 0.1; done
  nbdcopy /tmp/particles.raw 'nbd+unix:///?socket=/tmp/particles.sock'
  qemu-system-x86_64 -drive file=nbd+unix:///?socket=/tmp/particles.sock,format=raw ...
  forebay volume export wide --port 10809           on 127.0.0.1

It runs nbdkit, which has to be installed, until it gets SIGTERM or SIGINT. NBD has no passwords: whoever may connect to the
socket, or to the port, reads and writes the volume as the user who exports it. A socket has the protection of its
directory. nbdkit's own options, such as TLS, are for `nbdkit .../nbdkit-forebay-plugin.so volume=NAME pool=DIRECTORY`."
)]
pub(crate) struct VolumeExport {
    /// Listen on a Unix socket, which is made
    #[arg(long, value_name = "PATH", group = "where")]
    pub(crate) socket: Option<std::path::PathBuf>,
    /// Listen on a TCP port
    #[arg(long, value_name = "NUMBER", group = "where", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// The address of the port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "port")]
    pub(crate) address: String,
    /// Clients cannot write
    #[arg(long)]
    pub(crate) read_only: bool,
    /// The volume, or a specifier
    #[arg(value_name = "NAME")]
    pub(crate) name: OsString,
}
