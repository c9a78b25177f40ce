//! `forebay-emulate`: the keeper of one device, and the start of its server.
//!
//! The keeper checks what is requested, makes the directory of the device, and describes it there for commands.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_block::{leave_limited, Device, Ending, Memory, Plan, Process, Report, Tell};
use forebay_pacing::{Pacers, Profile};
use forebay_sys::loop_device::Settings;
use forebay_sys::process::shed_preload;
use forebay_types::{Code, Error, Result};

use crate::control::Control;
use crate::description::{self, is_name, Description, Options};
use crate::serve::{self, Copying, Medium, CAUGHT};
use crate::store::{Guards, Store, BLOCK_BYTES};
use crate::way;

// A device is measured by its smallest requests.
const _: () = assert!(way::SMALL_BYTES == BLOCK_BYTES);

/// Memory of the node that a device leaves to others, at least.
const RESERVE_BYTES: u64 = 256 << 20;

const HELP: &str = "\
forebay-emulate: the processes of one emulated block device. `forebay emulate up` starts it.

Usage: forebay-emulate OPTIONS

  OPTIONS    JSON; the device's name, profile, bytes and guards

The result of the start is written to standard output, which is then closed. SIGTERM ends the device.
";

/// Runs `forebay-emulate` with these arguments, without the program's name.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebay-emulate: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    let text = arguments.next().unwrap_or_default().to_string_lossy().into_owned();
    if text == "--help" || text == "-h" {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let Ok(options) = serde_json::from_str::<Options>(&text) else {
        eprintln!("forebay-emulate: its options are not those of a device\n{HELP}");
        return ExitCode::from(2);
    };
    forebay_log::to_stderr();
    match keep(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e}");
            println!("{}", serde_json::to_string(&Report::<Description>::of(Err(e))).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// How often the directory of a device is made again.
const MAKE_TRIES: u32 = 20;

/// The directory of a device, locked, and removed with it.
struct Directory(PathBuf, #[allow(dead_code)] File); // The file is the lock.

impl Drop for Directory {
    fn drop(&mut self) {
        description::remove(&self.0);
    }
}

/// Makes the directory of a device. It is the device's lock.
fn make_directory(options: &Options) -> Result<Directory> {
    let what = || format!("cannot make device {}", options.name);
    if !is_name(&options.name) {
        return Err(
            Error::new(Code::Invalid, what()).why("names have 1 to 32 letters, digits, `-`, `_` and `.`")
        );
    }
    description::all(); // removes what a killed keeper left
    let all = description::directory();
    let make = |dir: &Path| fs::DirBuilder::new().mode(0o700).recursive(dir == all).create(dir);
    let dir = all.join(&options.name);
    for _ in 0..MAKE_TRIES {
        let made = make(&all).and_then(|()| make(&dir)).and_then(|()| description::lock(&dir));
        match made {
            Ok(Some(lock)) => return Ok(Directory(dir, lock)),
            // Another device ended, and removed the directory above or took this one for what a killed keeper left.
            Ok(None) => std::thread::sleep(std::time::Duration::from_millis(10)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Error::new(Code::Exists, what())
                    .why("there is one with that name")
                    .cure(format!("`forebay emulate down {}`, or give another --name", options.name)));
            }
            Err(e) => return Err(Error::io(what(), &e).cure("it takes root")),
        }
    }
    Err(Error::new(Code::Busy, what()).why("other devices come and go").cure("try again"))
}

fn check(options: &Options) -> Result<Profile> {
    let what = || format!("cannot make device {}", options.name);
    let profile = Profile::parse(&options.profile).ok_or_else(|| {
        Error::new(Code::Invalid, what()).why(format!("`{}` is no profile", options.profile))
    })?;
    if options.bytes == 0 || !options.bytes.is_multiple_of(BLOCK_BYTES as u64) {
        let why = format!("its size is {}, and has to be a multiple of {BLOCK_BYTES}", options.bytes);
        return Err(Error::new(Code::Invalid, what()).why(why));
    }
    let available = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = available.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()
    });
    match available {
        Some(kib) if kib.saturating_mul(1024) < options.bytes.saturating_add(RESERVE_BYTES) => {
            Err(Error::new(Code::NoMemory, what())
                .why(format!(
                    "it has {} MiB, and {} MiB of memory are available",
                    options.bytes >> 20,
                    kib >> 10
                ))
                .cure("give a smaller --size"))
        }
        _ => Ok(profile),
    }
}

fn keep(options: &Options) -> Result<()> {
    let what = format!("cannot make device {}", options.name);
    let failed = |e: io::Error| Error::io(&what, &e);
    let profile = check(options)?;
    let directory = make_directory(options)?;
    let name = format!("forebay-emulate:{}", options.name);
    let plan = Plan {
        what: &what,
        subtype: c"forebay-emulate",
        source: &options.name,
        settings: Settings {
            name: name.as_bytes(),
            sector_bytes: BLOCK_BYTES as u32,
            is_read_only: false,
            ends_at_last_close: true,
            is_direct: true,
            discards: false,
        },
        refuses_discards: false,
        ending: Ending::Soon,
        meaning: |status| (status == CAUGHT).then_some("its write protection caught a stray write"),
    };
    let serve = |device, tell| be_server(device, options, &profile, tell);
    forebay_block::keep(&plan, serve, |up| {
        let description = Description {
            options: options.clone(),
            device: up.device,
            keeper: Process::of(std::process::id()).map_err(failed)?,
            server: up.server,
            fds: up.told,
            connection: up.connection,
        };
        let ways = way::measure(&description.device, options.bytes, &profile.medium)
            .map_err(|e| failed(e).why("a first request to the device"))?;
        description.set_ways(ways)?;
        description.write(&directory.0).map_err(failed)?;
        Ok(description)
    })
}

fn be_server(device: Device, options: &Options, profile: &Profile, tell: Tell<[i32; 3]>) -> io::Result<()> {
    let (medium, kept) = match prepare(options, profile) {
        Ok(prepared) => prepared,
        Err(e) => {
            tell.tell(Err(Error::io(format!("cannot make device {}", options.name), &e)));
            return Err(e);
        }
    };
    if options.write_protect {
        serve::guard(&medium.store);
    }
    let numbers = serve::numbers(&medium.store.memory, &kept[0], &kept[1]);
    forebay_block::serve(device, &medium, Memory::All, || tell.tell(Ok(numbers)))
}

/// Allocates everything.
fn prepare(options: &Options, profile: &Profile) -> io::Result<(Medium, [OwnedFd; 2])> {
    if let Err(e) = leave_limited() {
        tracing::warn!(
            "cannot leave its limited memory cgroup, whose programs may wait for the device for ever: {e}"
        );
    }
    let guards = Guards {
        write_protect: options.write_protect,
        checksum: options.checksum,
        verify_writes: options.verify_writes,
    };
    let bytes = usize::try_from(options.bytes).map_err(io::Error::other)?;
    let store = Store::new(bytes, guards)?;
    let (pacers, pacing) = Pacers::create(profile)?;
    let (control, page) = Control::create()?;
    Ok((Medium { store, pacers, control, copying: Copying::default() }, [pacing, page]))
}
