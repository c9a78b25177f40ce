//! `forebay-device`: the keeper of one device, and the start of its server.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_block::{leave_limited, Device, Ending, Memory, Plan, Process, Report, Tell};
use forebay_client::{Pool, Role};
use forebay_sys::loop_device::Settings;
use forebay_sys::process::shed_preload;
use forebay_types::{Code, Error, Result, Segment};

use crate::found::{Joined, Kind};
use crate::medium::VolumeMedium;
use crate::options::Options;

/// The program's file.
const PROGRAM: &str = "forebay-device";

const HELP: &str = "\
forebay-device: the processes of one volume's block device. `forebay volume attach` starts it.

Usage: forebay-device OPTIONS

  OPTIONS    JSON; the pool's directory and its life, the volume's name, whether the device is read-only,
             whether discards free space, and the numbers of the volumes

The result of the start is written to standard output, which is then closed. SIGTERM ends the device when no program has
it open any longer. SIGKILL ends it at once: its I/O fails then.
";

/// Starts the processes of a device, and waits until it is there. `log` gets what they log.
pub fn start(options: &Options, log: std::fs::File) -> Result<PathBuf> {
    let what = options.what();
    let text = serde_json::to_string(options).map_err(|e| Error::new(Code::Invalid, &*what).why(e))?;
    forebay_block::start(&what, PROGRAM, &text, log, || "the pool's log may say why".into())
}

/// Runs `forebay-device` with these arguments, without the program's name.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("{PROGRAM}: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    let text = arguments.next().unwrap_or_default().to_string_lossy().into_owned();
    if text == "--help" || text == "-h" {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let Ok(options) = serde_json::from_str::<Options>(&text) else {
        eprintln!("{PROGRAM}: its options are not those of a device\n{HELP}");
        return ExitCode::from(2);
    };
    forebay_log::to_stderr();
    match keep(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e}");
            println!("{}", serde_json::to_string(&Report::<PathBuf>::of(Err(e))).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn keep(options: &Options) -> Result<()> {
    let what = options.what();
    let own = Process::of(std::process::id()).map_err(|e| Error::io(&*what, &e))?;
    let name = Kind::served_name(options.life, own, Joined::of(&options.numbers));
    let source = options.volume.escape_ascii().to_string();
    let plan = Plan {
        what: &what,
        subtype: c"forebay-device",
        source: &source,
        settings: Settings {
            name: name.as_bytes(),
            // As a device on a piece's memory has: a volume may have one kind of device after the other.
            sector_bytes: 0,
            is_read_only: options.is_read_only,
            ends_at_last_close: true,
            is_direct: true,
            discards: options.is_thin,
        },
        refuses_discards: !options.is_thin,
        ending: Ending::AtLastClose,
        meaning: |_| None,
    };
    forebay_block::keep(&plan, |device, tell| be_server(device, options, tell), |up| Ok(up.device))
}

/// Locks what this process has now: not what it maps of the pool, of which the board is large and mostly holes.
fn lock_program() -> io::Result<()> {
    // SAFETY: plain system call.
    match unsafe { libc::mlockall(libc::MCL_CURRENT) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn be_server(device: Device, options: &Options, tell: Tell<()>) -> io::Result<()> {
    let warn = |what: &str, done: io::Result<()>| {
        if let Err(e) = done {
            tracing::warn!("the device may be slow or block when memory is short: {what}: {e}");
        }
    };
    warn("leaving its limited memory cgroup", leave_limited().map(drop));
    warn("mlockall", lock_program());
    let (medium, parts) = match open(options) {
        Ok(opened) => opened,
        Err(e) => {
            tell.tell(Err(e));
            return Err(io::ErrorKind::Other.into());
        }
    };
    warn("mlock", medium.lock(&parts));
    forebay_block::serve(device, &medium, Memory::New, || tell.tell(Ok(())))
}

/// Opens the volume. Returns the segments of each that is joined, too.
fn open(options: &Options) -> Result<(VolumeMedium, Vec<Vec<Segment>>)> {
    let dir = Path::new(OsStr::from_bytes(&options.pool));
    let pool = Pool::attach_as(dir, Role::Tool)?;
    let failed = |code: Code| Error::new(code, options.what()).why(code);
    let volume = pool.volume_open(&options.volume, !options.is_read_only)?;
    // What one has grown by since then is not found in it, and neither locked nor read.
    let names = options.names();
    let parts: Result<Vec<Vec<Segment>>> =
        names.iter().map(|name| pool.volume(name).map(|one| one.segments).map_err(failed)).collect();
    let (parts, medium) = (parts?, VolumeMedium::new(volume));
    medium.warm(&parts).map_err(failed)?;
    Ok((medium, parts))
}
