//! The program `forebayd`: its command line, the inherited state that it resets, and its three roles.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;

use forebay_types::{Code, Error, Result};
use rustix::fs::{Mode, OFlags};

use crate::bundle::Bundle;
use crate::directory::{PoolDirectory, LOG_FILE};
use crate::inherited;
use crate::launch::Report;
use crate::media_profile::MediaProfile;
use crate::pool_file::PoolFile;
use crate::pool_options::PoolOptions;
use crate::pool_place;
use crate::setup::receive_setup;
use crate::snapshot_period::parse_snapshot_period;
use crate::store::FdStore;
use crate::supervisor::Supervisor;
use crate::supplies::Supplies;
use crate::worker::board_bytes;
use forebay_sys::packet;
use forebay_sys::process::shed_preload;
use forebay_sys::signals::Signals;

const HELP: &str = "\
forebayd: the daemon of a Forebay pool. `forebay up` and `forebay run` start it.

Usage: forebayd --pool DIR [--media dram|ssd] [--capacity SIZE] [--foreground]
       forebayd --pool-file FILE [--node NAME] [--foreground]

  --pool DIR       the pool's directory, made if it is missing
  --media M        dram: data in memory; ssd: data in the directory
  --capacity SIZE  bytes, or with a unit: 4GiB
  --snapshots TIME between two snapshots of the pool's names on targets that outlive the node: 30s, 5m or off
  --media-profile P emulate a medium: hdd, ssd, slc, pcram, reram, optane, dram, a file, or none
  --foreground     log to stderr, for a service manager; without it to DIR/log
  --pool-file FILE one node of the pool that the file describes, with its target there
  --node NAME      which one; default: the one that is this host
  --bundle         pool file and secret come on standard input, from `forebay up`
  --renumber       its data are gone: take a number that the pool never had
  --embedded       end with the last `forebay run` that uses the pool
  --version        print the version

SIGTERM stops the pool; the data of a mounted or plain target stays for the next start.
Environment: FOREBAY_LOG=error|warn|info|debug|trace sets how much is logged.
";

enum Role {
    Supervisor { options: Box<PoolOptions>, report_fd: Option<RawFd>, foreground: bool },
    Worker { socket: RawFd },
    Notifier { socket: RawFd },
    Print(String),
}

/// Runs `forebayd` with these arguments, without the program's name. Exit status: 0 on success, 1 on failure, 2 for an
/// invalid command line.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebayd: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    match parse(arguments) {
        Err(e) => {
            eprintln!("forebayd: {e}");
            ExitCode::from(2)
        }
        Ok(Role::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(Role::Worker { socket }) => work(socket),
        Ok(Role::Notifier { socket }) => notify(socket),
        Ok(Role::Supervisor { options, report_fd, foreground }) => supervise(*options, report_fd, foreground),
    }
}

fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Role> {
    let bad = |what: String| Error::new(Code::Invalid, what).cure("`forebayd --help` shows what there is");
    let mut options = PoolOptions::default();
    let (mut report_fd, mut foreground) = (None, false);
    let (mut pool_file, mut node, mut bundle) = (None, None, false);
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let name = argument.to_string_lossy().into_owned();
        let mut value = || arguments.next().ok_or_else(|| bad(format!("{name} needs a value")));
        let number = |v: OsString| -> Result<RawFd> {
            v.to_str()
                .and_then(|s| s.parse().ok())
                .filter(|&fd| fd > 2)
                .ok_or_else(|| bad(format!("{name} needs a descriptor's number, not {v:?}")))
        };
        match name.as_str() {
            "--pool" | "--path" => options.path = PathBuf::from(value()?),
            "--media" => options.media = Some(value()?.to_string_lossy().parse()?),
            "--capacity" => {
                options.capacity_bytes = Some(forebay_data::parse_size(&value()?.to_string_lossy())?)
            }
            "--snapshots" => options.snapshots_ms = Some(parse_snapshot_period(&value()?.to_string_lossy())?),
            "--media-profile" => {
                options.media_profile = Some(MediaProfile::read(&value()?.to_string_lossy())?)
            }
            "--pool-file" => pool_file = Some(PathBuf::from(value()?)),
            "--node" => node = Some(value()?.to_string_lossy().into_owned()),
            "--bundle" => bundle = true,
            "--renumber" => options.renumber = true,
            "--embedded" => options.embedded = true,
            "--elsewhere-allowed" => options.elsewhere_allowed = true,
            "--foreground" => foreground = true,
            "--report-fd" => report_fd = Some(number(value()?)?),
            "--worker" => return Ok(Role::Worker { socket: number(value()?)? }),
            "--notifier" => return Ok(Role::Notifier { socket: number(value()?)? }),
            "--help" | "-h" => return Ok(Role::Print(HELP.to_owned())),
            "--version" | "-V" => {
                return Ok(Role::Print(format!("forebayd {}\n", env!("CARGO_PKG_VERSION"))));
            }
            _ => return Err(bad(format!("unknown argument {name:?}"))),
        }
    }
    if bundle {
        let bundle = Bundle::decode(&standard_input()?)?;
        let file = bundle.pool_file(&options.path)?;
        be_node(&mut options, &file, node.as_deref())?;
        options.bundle = Some(bundle);
        return Ok(Role::Supervisor { options: Box::new(options), report_fd, foreground });
    }
    match pool_file {
        Some(file) => be_node(&mut options, &PoolFile::read(&file)?, node.as_deref())?,
        None if node.is_some() => return Err(bad("--node names a node of no pool file".to_owned())),
        None => {}
    }
    if options.path.as_os_str().is_empty() {
        return Err(bad("no pool is named".to_owned()).cure("forebayd --pool DIR"));
    }
    Ok(Role::Supervisor { options: Box::new(options), report_fd, foreground })
}

fn standard_input() -> Result<Vec<u8>> {
    /// More than the bundle of the largest pool needs.
    const BYTES_MAX: u64 = 4 << 20;
    let mut bytes = Vec::new();
    std::io::stdin()
        .take(BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io("cannot read the pool bundle from standard input", &e))?;
    Ok(bytes)
}

/// Fills in the options of one node of a pool file. Options of the command line take precedence.
fn be_node(options: &mut PoolOptions, file: &PoolFile, node: Option<&str>) -> Result<()> {
    let node = file.node(node)?;
    if !options.path.as_os_str().is_empty() && options.path != node.dir() {
        return Err(Error::new(Code::Invalid, "the pool's directory is ambiguous").why(format!(
            "the pool file says {}, --pool {}",
            node.dir().display(),
            options.path.display()
        )));
    }
    if node.is_shard_only() && options.capacity_bytes.is_some() {
        return Err(Error::new(Code::Invalid, format!("cannot give node {} a capacity", node.name))
            .why("the pool file gives it no target")
            .cure("leave out --capacity, or give the node a target in the pool file"));
    }
    options.path = node.dir().to_owned();
    let first = node.first();
    options.media = options.media.or(first.media);
    options.capacity_bytes = options.capacity_bytes.or(first.capacity_bytes);
    options.more = node.targets.get(1..).unwrap_or_default().to_vec();
    options.shard_only = node.is_shard_only();
    options.node_name = node.name.clone();
    options.membership = Some(file.membership(node));
    Ok(())
}

fn inherited(number: RawFd) -> Result<OwnedFd> {
    packet::inherited(number).map_err(|e| Error::io(format!("cannot use descriptor {number}"), &e))
}

// --- worker

fn work(socket: RawFd) -> ExitCode {
    let _ = rustix::thread::set_name(c"forebayd-worker");
    forebay_log::to_stderr();
    // The worker gets the store. This second handle reports why it failed.
    let spare = inherited(socket).and_then(|socket| {
        let spare = rustix::io::fcntl_dupfd_cloexec(&socket, 3)
            .map_err(|e| Error::io("cannot duplicate the supervisor's socket", &e.into()))?;
        Ok((socket, FdStore::new(spare)))
    });
    let (socket, spare) = match spare {
        Ok(both) => both,
        Err(e) => {
            tracing::error!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let run = || -> Result<()> {
        let (setup, locks) = receive_setup(socket)?;
        let result = crate::worker::run(setup);
        drop(locks); // held until here, so that no other pool opens the targets earlier
        result
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e}");
            spare.failed(&e);
            ExitCode::FAILURE
        }
    }
}

// --- notifier

fn notify(socket: RawFd) -> ExitCode {
    let _ = rustix::thread::set_name(c"forebayd-notify");
    forebay_log::to_stderr();
    match inherited(socket) {
        Ok(socket) => {
            crate::notifier::serve(socket.as_fd());
            ExitCode::SUCCESS
        }
        Err(e) => {
            tracing::error!("{e}");
            ExitCode::FAILURE
        }
    }
}

// --- supervisor

fn supervise(options: PoolOptions, report_fd: Option<RawFd>, foreground: bool) -> ExitCode {
    let _ = rustix::thread::set_name(c"forebayd");
    close_inherited(report_fd);
    let mut report = match report_fd.map(inherited).transpose() {
        Ok(fd) => Report::new(fd),
        Err(e) => {
            eprintln!("forebayd: {e}");
            return ExitCode::FAILURE;
        }
    };
    match serve(options, &mut report, foreground) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if foreground || report_fd.is_none() {
                eprintln!("forebayd: {e}");
            }
            report.send(&Err(e));
            ExitCode::FAILURE
        }
    }
}

fn serve(mut options: PoolOptions, report: &mut Report, foreground: bool) -> Result<()> {
    options.path = std::path::absolute(&options.path)
        .map_err(|e| Error::io(format!("cannot find {}", options.path.display()), &e))?;
    inherited::shed();
    inherited::check(options.capacity_bytes.map_or(0, board_bytes))?;
    // Directories above the pool's get their mode by the starter's umask, but are always accessible to their owner.
    let mask = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    rustix::process::umask(mask - Mode::RWXU);
    let locked = pool_place::lock_pool(&options.path)?;
    if !foreground {
        if let Err(e) = log_to_file(&locked.dir) {
            locked.give_up();
            return Err(e);
        }
    }
    forebay_log::to_stderr();
    let _ = std::env::set_current_dir("/");
    let _ = rustix::process::setsid(); // `forebay` did this already; a person who starts forebayd did not
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGCHLD])
        .map_err(|e| Error::io("cannot block signals", &e))?;

    let mut pool = pool_place::open_pool(locked, &options)?;
    pool.costs.extend(inherited::costs());
    let supplies = match Supplies::make(&pool) {
        Ok(supplies) => supplies,
        Err(e) => {
            let discard = pool.identity.embedded || !pool.reopened;
            let _ = pool_place::close_pool(pool, !discard, discard);
            return Err(e);
        }
    };
    let supervisor = Supervisor::new(pool, supplies, signals, std::mem::replace(report, Report::new(None)));
    let mut end = supervisor.run();
    *report = std::mem::replace(&mut end.report, Report::new(None));
    let discard = end.pool.identity.embedded || end.failure.is_some() && !end.pool.reopened;
    let (pool, teller) = end.split();
    let stopped = pool_place::close_pool(pool, teller.keep, discard).map(|mut stopped| {
        stopped.killed = teller.killed;
        stopped
    });
    if let Err(e) = &stopped {
        tracing::error!("{e}");
    }
    let failure = teller.tell(&stopped);
    match failure {
        Some(e) => Err(e),
        None => stopped.map(drop),
    }
}

/// Closes descriptors inherited from the starter: if the daemon kept a pipe open, its reader would never see end of
/// file.
fn close_inherited(keep: Option<RawFd>) {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<RawFd> =
        entries.flatten().filter_map(|e| e.file_name().to_str().and_then(|s| s.parse().ok())).collect();
    for fd in numbers {
        if fd > 2 && Some(fd) != keep {
            // SAFETY: this runs first, before this program has opened anything that it keeps; the directory that listed
            // the numbers is closed, and closing its number again is refused by the kernel.
            unsafe { libc::close(fd) };
        }
    }
}

fn log_to_file(dir: &PoolDirectory) -> Result<()> {
    /// A longer log is truncated at the next start.
    const LOG_BYTES_MAX: i64 = 8 << 20;
    let log = dir.open_file(LOG_FILE, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)?;
    if rustix::fs::fstat(&log).is_ok_and(|s| s.st_size > LOG_BYTES_MAX) {
        let _ = rustix::fs::ftruncate(&log, 0);
    }
    // SAFETY: both are open; descriptor 2 is a daemon's to redirect.
    if unsafe { libc::dup2(log.as_raw_fd(), 2) } < 0 {
        let e = std::io::Error::last_os_error();
        return Err(Error::io("cannot redirect messages to the log", &e));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_data::Medium;

    fn parsed(line: &str) -> Result<Role> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn parse_reads_a_whole_command_line() {
        let Ok(Role::Supervisor { options, report_fd, foreground }) = parsed(
            "--pool /p --media ssd --capacity 2GiB --snapshots 0.5 --media-profile ssd --embedded --foreground \
             --report-fd 7",
        ) else {
            panic!("refused")
        };
        assert_eq!(options.path, PathBuf::from("/p"));
        assert_eq!(options.media, Some(Medium::Ssd));
        assert_eq!((options.capacity_bytes, options.snapshots_ms), (Some(2 << 30), Some(500)));
        assert_eq!(options.media_profile, Some(MediaProfile::read("ssd").unwrap()));
        assert!(options.embedded && foreground && !options.elsewhere_allowed);
        assert_eq!(report_fd, Some(7));
        assert!(matches!(parsed("--worker 5"), Ok(Role::Worker { socket: 5 })));
    }

    #[test]
    fn parse_of_nonsense_says_what_to_do() {
        for line in ["", "--pool", "--pool /p --what", "--pool /p --media tape", "--worker 1", "--worker x"] {
            let Err(e) = parsed(line) else { panic!("{line:?} was taken") };
            assert!(!e.cure.is_empty(), "{line:?}: {e}");
        }
    }
}
