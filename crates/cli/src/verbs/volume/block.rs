//! `forebay volume attach` and `detach`: block devices of volumes.
//!
//! A volume of one piece on this node is a loop device on its memory, which the kernel copies to and from: no process
//! serves it, and it has the volume open. Any other has a process that serves it (`forebay-device`). There is no record of
//! either: the kernel knows them (`devices.rs`). Volumes that a specifier joins are served as one, striped over them.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_block::Process;
use forebay_client::Pool;
use forebay_device::{Found, Kind, MEMORY_MARK};
use forebay_server::directory::LOG_FILE;
use forebay_sys::loop_device::{attribute, locked_control, LoopDevice, Settings};
use forebay_types::{Code, Error, Result, Volume};
use forebay_volume::Specifier;
use serde_json::json;

use super::devices::{life, Devices};
use super::shown::{each, failed};
use crate::arguments::{VolumeAttach, VolumeNames};
use crate::verbs::ls::put_name;
use crate::{failure, table};

const DEVICES: &[u8] = b"/dev/";
/// How long other programs may have a device open that they only look at.
const LOOK_TIME: Duration = Duration::from_millis(500);
/// How long a served device may be open after its keeper was asked to end it, before a program is taken to have it open.
const CLOSE_TIME: Duration = Duration::from_secs(3);
/// How long its processes may take to end after that.
const END_TIME: Duration = Duration::from_secs(30);

/// A failure of the kernel's part.
fn refused(verb: &str, name: &OsStr, e: &io::Error) -> Error {
    let error = Error::io(format!("cannot {verb} {}", table::printable(name.as_bytes())), e);
    match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::new(Code::NotSupported, error.what)
            .why("there are no loop devices here")
            .cure("load the kernel's module (modprobe loop); a container needs /dev/loop-control and /dev/loop*"),
        Some(libc::EACCES | libc::EPERM) => Error::new(Code::AccessDenied, error.what)
            .why("loop devices are for root")
            .cure("run this as root, or use `forebay volume export` or `forebay volume copy`"),
        Some(libc::EBUSY) => Error::new(Code::Busy, error.what)
            .why("it is mounted, or a program uses it exclusively")
            .cure("unmount it first, in every mount namespace that has it (`lsns -t mnt`)"),
        _ => error,
    }
}

pub(super) fn attach(pool: &'static Pool, dir: &Path, arguments: &VolumeAttach) -> Result<ExitCode> {
    let name = arguments.name.as_os_str();
    let what = || format!("cannot attach volume {}", table::printable(name.as_bytes()));
    let cannot = |e: io::Error| refused("attach volume", name, &e);
    let names = volumes_of(pool, name, !arguments.read_only)?;
    let memory = match names.as_slice() {
        [only] => match pool.volume_memory(only.as_bytes(), !arguments.read_only) {
            Ok(memory) => Some(memory),
            Err(Code::NotSupported) => None,
            Err(code) => return Err(failed(pool, code, "attach", name, 1)),
        },
        _ => None,
    };
    // Two commands do not attach one volume.
    let control = locked_control().map_err(cannot)?;
    let devices = Devices::look(dir)?;
    let volumes = records(pool, "attach", &names)?;
    let refused_for =
        |why: String| Error::new(Code::Exists, what()).why(why).cure("detach that device first");
    // A keeper that lives says which volumes it has: below.
    if let Some(found) = devices.of_joined(&volumes).filter(|found| volumes.len() > 1 && !found.is_kept()) {
        return Err(refused_for(format!("it is {} already", found.path.display())));
    }
    for (one, volume) in names.iter().zip(&volumes) {
        let which = match names.len() {
            1 => "it".into(),
            _ => format!("volume {}", table::printable(one.as_bytes())),
        };
        if let Some(path) = devices.path_with(pool, volume) {
            let how = match devices.of(pool, volume) {
                Some(_) => "is",
                None => "is part of",
            };
            return Err(refused_for(format!("{which} {how} {} already", path.display())));
        }
        if let Some(found) = devices.without_keeper(volume) {
            let device = found.path.display();
            let why = format!(
                "{which} may be part of {device}, a device of joined volumes whose keeper was killed"
            );
            let cure = format!("unmount {device}, and have programs close it");
            return Err(Error::new(Code::Exists, what()).why(why).cure(cure));
        }
    }
    let (is_served, is_thin) = (memory.is_none(), volumes.iter().all(Volume::is_thin));
    let device = match memory {
        Some(memory) => attach_memory(&memory, &names[0], arguments.read_only, is_thin).map_err(cannot)?,
        None => attach_served(pool, dir, arguments, &volumes, is_thin)?,
    };
    drop(control);
    match arguments.json {
        true => {
            let mut object = json!({ "device": device, "served": is_served });
            put_name(&mut object, "name", name.as_bytes());
            failure::print_json(&object);
        }
        false => failure::put(format!("{}\n", device.display())),
    }
    Ok(ExitCode::SUCCESS)
}

/// The volumes of a name, or of a specifier that may join several, which are opened to see whether they can be.
fn volumes_of(pool: &'static Pool, name: &OsStr, writes: bool) -> Result<Vec<OsString>> {
    let bytes = name.as_bytes();
    if !bytes.iter().any(|byte| b"+:".contains(byte)) {
        return Ok(vec![name.to_owned()]);
    }
    drop(pool.volume_open(bytes, writes)?);
    let names = names_of(name)?;
    for (i, one) in names.iter().enumerate() {
        if names[..i].contains(one) {
            let what = format!("cannot attach volume {}", table::printable(bytes));
            let why = format!("it joins volume {} with itself", table::printable(one.as_bytes()));
            return Err(Error::new(Code::Invalid, what).why(why));
        }
    }
    Ok(names)
}

/// The names of the volumes of a specifier.
fn names_of(specifier: &OsStr) -> Result<Vec<OsString>> {
    let parsed = Specifier::parse_all(specifier.as_bytes()).map_err(|problem| {
        let what = format!("cannot find the device of {}", table::printable(specifier.as_bytes()));
        Error::new(Code::Invalid, what).why(problem)
    })?;
    Ok(parsed.into_iter().map(|one| OsString::from_vec(one.volume)).collect())
}

fn records(pool: &Pool, verb: &str, names: &[OsString]) -> Result<Vec<Volume>> {
    let record = |name: &OsString| {
        pool.volume(name.as_bytes()).map_err(|code| failed(pool, code, verb, name.as_os_str(), 1))
    };
    names.iter().map(record).collect()
}

/// A device on the memory of a volume's only piece.
fn attach_memory(memory: &OwnedFd, name: &OsStr, is_read_only: bool, is_thin: bool) -> io::Result<PathBuf> {
    let mark = [MEMORY_MARK, name.as_bytes()].concat();
    let settings = Settings { name: &mark, is_read_only, discards: is_thin, ..Settings::default() };
    let device = LoopDevice::new(memory.as_fd(), &settings)?;
    let path = device.path.clone();
    if is_thin {
        return Ok(path);
    }
    // They would free memory of the volume.
    if let Err(e) = device.refuse_discards() {
        device.clear(LOOK_TIME)?;
        return Err(e);
    }
    Ok(path)
}

/// A device that a process serves.
fn attach_served(
    pool: &'static Pool,
    dir: &Path,
    arguments: &VolumeAttach,
    volumes: &[Volume],
    is_thin: bool,
) -> Result<PathBuf> {
    let name = arguments.name.as_os_str();
    if !rustix::process::geteuid().is_root() {
        return Err(refused("attach volume", name, &io::Error::from_raw_os_error(libc::EACCES)));
    }
    // An open in this process tells errors in better words than the server does.
    drop(pool.volume_open(name.as_bytes(), !arguments.read_only)?);
    let options = forebay_device::Options {
        pool: dir.as_os_str().as_bytes().to_vec(),
        life: life(dir)?,
        volume: name.as_bytes().to_vec(),
        is_read_only: arguments.read_only,
        is_thin,
        numbers: volumes.iter().map(|volume| volume.ino.0).collect(),
    };
    let log = log_of(dir).or_else(|_| File::options().write(true).open("/dev/null"));
    forebay_device::start(&options, log.map_err(|e| refused("attach volume", name, &e))?)
}

/// The pool's log. Its directory may belong to another user, who may have put something else there. A FIFO would
/// block the process that opens it, or writes to it.
fn log_of(dir: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let log = OpenOptions::new().append(true).custom_flags(flags).open(dir.join(LOG_FILE))?;
    match log.metadata()?.is_file() {
        true => Ok(log),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Devices of this node can be detached after their pool is gone.
pub(super) fn needs_no_pool(arguments: &VolumeNames) -> bool {
    arguments.names.iter().all(|name| name.as_bytes().starts_with(DEVICES))
}

pub(super) fn detach(pool: Option<(&Pool, &Path)>, arguments: &VolumeNames) -> Result<ExitCode> {
    each(&arguments.names, arguments.json, |name| {
        let ended = detach_one(pool, name)?;
        let device = ended.device.display().to_string();
        let shown = match name == OsStr::new(&device) {
            true => device.clone(),
            false => format!("volume {}, {device},", table::printable(name.as_bytes())),
        };
        let lost = match ended.is_written {
            true => "",
            false => "; what was written to it last is lost",
        };
        let text = match ended.is_gone {
            true => format!("{shown} is detached{lost}\n"),
            false => format!("{shown} is detached when the program closes it that has it open{lost}\n"),
        };
        let mut object = json!({ "device": device, "detached": ended.is_gone, "written": ended.is_written });
        put_name(&mut object, "name", name.as_bytes());
        Ok((object, text))
    })
}

/// A device that was detached.
struct Ended {
    device: PathBuf,
    /// False while a program has it open.
    is_gone: bool,
    /// False if what the page cache had could not be written to the volume: its pool is gone, or a node of it.
    is_written: bool,
}

fn detach_one(pool: Option<(&Pool, &Path)>, name: &OsStr) -> Result<Ended> {
    let what = || format!("cannot detach {}", table::printable(name.as_bytes()));
    let cannot = |e: io::Error| refused("detach", name, &e);
    let find = || match pool.filter(|_| !name.as_bytes().starts_with(DEVICES)) {
        None if !Path::new(name).exists() => {
            Err(Error::new(Code::NotFound, what()).why("there is no such device"))
        }
        None => Ok(Path::new(name).to_owned()),
        Some((pool, dir)) => {
            let not_attached = |why: String| Error::new(Code::NotFound, what()).why(why);
            let volumes = records(pool, "detach", &names_of(name)?)?;
            let devices = Devices::look(dir)?;
            let found = match volumes.as_slice() {
                [only] => devices.of(pool, only),
                _ => devices.of_joined(&volumes),
            };
            if let Some(found) = found {
                return Ok(found.path.clone());
            }
            let with = volumes.iter().find_map(|volume| devices.with(pool, volume));
            Err(match with {
                Some(with) => {
                    not_attached(format!("it is not attached alone, but part of {}", with.path.display()))
                        .cure(format!("detach {}", with.path.display()))
                }
                None => not_attached("it is not attached".into()),
            })
        }
    };
    find()?;
    // With the lock, the device that is found is the one that is ended.
    let control = locked_control().map_err(cannot)?;
    let path = find()?;
    let device = LoopDevice::exclusive(&path).map_err(cannot)?;
    let Some(Found { kind, .. }) = Found::of(&device) else {
        return Err(Error::new(Code::Invalid, what()).why("it is no device of a volume"));
    };
    let written = device.synchronize();
    let (is_gone, is_written) = match kind {
        Kind::Memory => {
            written.map_err(cannot)?;
            (device.clear(LOOK_TIME).map_err(cannot)?, true)
        }
        Kind::Served { keeper, .. } => {
            (end_served(device, keeper, control).map_err(cannot)?, written.is_ok())
        }
    };
    Ok(Ended { device: path, is_gone, is_written })
}

/// Ends a served device. False if a program has it open.
fn end_served(device: LoopDevice, keeper: Process, control: File) -> io::Result<bool> {
    let backing = attribute(&device.path, "loop/backing_file");
    match keeper.signal(libc::SIGTERM) {
        Ok(()) => drop(device),
        // Its keeper was killed, and the kernel detaches it at its last close.
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return device.clear(LOOK_TIME),
        Err(e) => return Err(e),
    }
    drop(control);
    let asked = Instant::now();
    while keeper.lives() {
        let most = if backing.exists() { CLOSE_TIME } else { END_TIME };
        if asked.elapsed() >= most {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}
