//! `forebay-emulate`: the keeper of one device, and the start of its server.
//!
//! The keeper makes the connection, starts the server, opens the file, makes the loop device, describes it for commands,
//! and reports to its starter. Then it waits: for SIGTERM or SIGINT, which end the device, or for the end of the server.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_fuse::Device;
use forebay_pacing::{Pacers, Profile};
use forebay_sys::process::shed_preload;
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Result};
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use crate::connection::Detached;
use crate::control::Control;
use crate::description::{self, is_name, Description, Options, Process};
use crate::loop_device::LoopDevice;
use crate::memory_cgroup::leave_limited;
use crate::serve::{self, Copying, Medium, CAUGHT};
use crate::store::{Guards, Store, BLOCK_BYTES};
use crate::way;

/// Memory of the node that a device leaves to others, at least.
const RESERVE_BYTES: u64 = 256 << 20;

const HELP: &str = "\
forebay-emulate: the processes of one emulated block device. `forebay emulate up` starts it.

Usage: forebay-emulate OPTIONS

  OPTIONS    JSON; the device's name, profile, bytes and guards

The result of the start is written to standard output, which is then closed. SIGTERM ends the device.
";

/// The result of a start.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// The device is there.
    Up(Box<Description>),
    /// It is not.
    Failed {
        /// The code of the error.
        code: u16,
        /// What was tried.
        what: String,
        /// Why it failed.
        why: String,
        /// What can be done.
        cure: String,
    },
}

impl Report {
    fn failed(e: &Error) -> Report {
        Report::Failed { code: e.code as u16, what: e.what.clone(), why: e.why.clone(), cure: e.cure.clone() }
    }

    /// The error of a start that failed.
    pub fn into_result(self) -> Result<Description> {
        match self {
            Report::Up(description) => Ok(*description),
            Report::Failed { code, what, why, cure } => {
                Err(Error::new(Code::from_u16(code), what).why(why).cure(cure))
            }
        }
    }
}

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
            report(&Report::failed(&e));
            ExitCode::FAILURE
        }
    }
}

/// Writes the report, and closes standard output.
fn report(report: &Report) {
    let text = serde_json::to_string(report).unwrap_or_default();
    let _ = writeln!(io::stdout(), "{text}");
    close_output();
}

/// Ends the starter's wait for the end of standard output.
fn close_output() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        // SAFETY: plain system call on two descriptors.
        unsafe { libc::dup2(null.as_raw_fd(), 1) };
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
    let failed = |step: &'static str| {
        let what = what.clone();
        move |e: io::Error| {
            let error = Error::io(what, &e).why(format!("{step}: {e}"));
            match e.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => error.cure("it takes root"),
                Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                    error.cure("the kernel needs FUSE (/dev/fuse) and loop devices (/dev/loop-control)")
                }
                _ => error,
            }
        }
    };
    let profile = check(options)?;
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD])
        .map_err(failed("signals"))?;
    let device = Device::open().map_err(failed("/dev/fuse"))?;
    let directory = make_directory(options)?;
    let mount = Detached::new(&device, &options.name).map_err(failed("the FUSE mount"))?;
    let (ready, told) = io::pipe().map_err(failed("a pipe"))?;
    // SAFETY: this process has one thread.
    let server = match unsafe { libc::fork() } {
        -1 => return Err(failed("fork")(io::Error::last_os_error())),
        0 => {
            // The keeper removes it, and reports.
            std::mem::forget(directory);
            close_output();
            drop((mount, ready));
            let done = be_server(device, options, &profile, told);
            // SAFETY: the keeper's buffers are not flushed twice.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        pid => Server(pid),
    };
    drop((device, told));
    let fds = told_by(ready).map_err(|why| Error::new(Code::Io, what.clone()).why(why))?;
    let file = mount.open().map_err(failed("the served file"))?;
    let connection =
        std::os::unix::fs::MetadataExt::dev(&file.metadata().map_err(failed("the served file"))?);
    drop(mount);
    let device = LoopDevice::new(&file, &options.name).map_err(failed("the loop device"))?;
    drop(file);
    let process = |pid: u32| Process::of(pid).map_err(failed("/proc"));
    let description = Description {
        options: options.clone(),
        device: device.path.clone(),
        keeper: process(std::process::id())?,
        server: process(server.0 as u32)?,
        fds,
        connection: libc::minor(connection),
    };
    let ways = way::measure(&description.device, options.bytes, &profile.medium)
        .map_err(failed("a first request to the device"))?;
    description.set_ways(ways)?;
    description.write(&directory.0).map_err(failed("its description"))?;
    tracing::info!("{} emulates {}", device.path.display(), profile.name);
    report(&Report::Up(Box::new(description)));

    let how = loop {
        if let Some(status) = server.ended() {
            break Some(status);
        }
        match signals.next() {
            Some(received) if received.signal != libc::SIGCHLD => break None,
            Some(_) => {}
            None => {
                let mut readable = [PollFd::new(&signals, PollFlags::IN)];
                let _ = rustix::event::poll(&mut readable, None);
            }
        }
    };
    if let Some(status) = how {
        let caught = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == CAUGHT;
        let why = if caught {
            "its write protection caught a stray write".into()
        } else {
            format!("status {status}")
        };
        tracing::error!("the server has ended ({why}): I/O on {} fails", device.path.display());
    }
    // Before the server ends: what was written to the device's page cache is written to it.
    let path = device.path.clone();
    if !device.end() {
        tracing::warn!("{} is still in use: its I/O fails from now on", path.display());
    }
    Ok(())
}

/// The server's process, killed and waited for on drop.
struct Server(libc::pid_t);

impl Server {
    /// Its status, if it has ended.
    fn ended(&self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: our own child; the status is writable. It is not reaped, as its number is used until the drop.
        let info = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_PID, self.0 as libc::id_t, &mut info, flags) != 0 || info.si_pid() == 0 {
                return None;
            }
            info
        };
        // SAFETY: filled by waitid.
        let value = unsafe { info.si_status() };
        status |= if info.si_code == libc::CLD_EXITED { value << 8 } else { value };
        Some(status)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: our own child, not reaped before.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// What the server says once: its descriptors, or why it cannot serve.
fn told_by(mut ready: io::PipeReader) -> std::result::Result<[i32; 3], String> {
    let mut text = String::new();
    let _ = ready.read_to_string(&mut text);
    match serde_json::from_str::<std::result::Result<[i32; 3], String>>(&text) {
        Ok(told) => told,
        Err(_) => Err("its server ended at its start".into()),
    }
}

fn be_server(device: Device, options: &Options, profile: &Profile, told: io::PipeWriter) -> io::Result<()> {
    // Closes the pipe, too.
    let tell = |mut told: io::PipeWriter, what: &std::result::Result<[i32; 3], String>| {
        let _ = told.write_all(serde_json::to_string(what).unwrap_or_default().as_bytes());
    };
    let (medium, kept) = match prepare(options, profile) {
        Ok(prepared) => prepared,
        Err(e) => {
            tell(told, &Err(format!("its server: {e}")));
            return Err(e);
        }
    };
    let numbers = serve::numbers(&medium.store.memory, &kept[0], &kept[1]);
    serve::serve(device, medium, options.write_protect, move || tell(told, &Ok(numbers)))
}

/// Allocates everything.
fn prepare(options: &Options, profile: &Profile) -> io::Result<(Medium, [OwnedFd; 2])> {
    // SAFETY: plain system calls. The keeper may have died before.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() == 1 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // Signals to the group are for the keeper.
        libc::setpgid(0, 0);
    }
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
