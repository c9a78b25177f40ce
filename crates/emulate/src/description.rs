//! The devices of this host: a directory each, with a description that commands read.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_block::Process;
use forebay_pacing::{Direction, Pacers, Profile, Statistics};
use forebay_sys::loop_device;
use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use crate::control::{Control, Faults};
use crate::way::Way;

/// Environment variable with the directory of all devices' directories.
const DIRECTORY_VARIABLE: &str = "FOREBAY_EMULATE_DIR";
const DIRECTORY: &str = "/run/forebay-emulate";
const FILE: &str = "device.json";
const NEW_FILE: &str = "device.json.new";
/// The log of a device's processes.
pub(crate) const LOG: &str = "log";

/// How a device was requested.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Its name.
    pub name: String,
    /// The medium, as a profile's text.
    pub profile: String,
    /// Its size, a multiple of 4096.
    pub bytes: u64,
    /// The server cannot store to its memory by mistake.
    pub write_protect: bool,
    /// Each block has a checksum that reads verify.
    pub checksum: bool,
    /// Writes are read back.
    pub verify_writes: bool,
}

/// A device that is up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Description {
    /// How it was requested.
    pub options: Options,
    /// The block device.
    pub device: PathBuf,
    pub(crate) keeper: Process,
    pub(crate) server: Process,
    /// Descriptors of the server: memory, pacers, control.
    pub(crate) fds: [i32; 3],
    /// The number of the FUSE connection.
    pub(crate) connection: u32,
}

/// The directory with all devices.
pub fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY_VARIABLE).map_or_else(|| DIRECTORY.into(), PathBuf::from)
}

/// True if this can be a device's name.
pub fn is_name(name: &str) -> bool {
    Profile::is_name(name) && !name.starts_with('.')
}

/// Removes the directory of a device.
pub(crate) fn remove(dir: &Path) {
    for name in [FILE, NEW_FILE, LOG] {
        let _ = fs::remove_file(dir.join(name));
    }
    let _ = fs::remove_dir(dir);
    let _ = fs::remove_dir(directory());
}

/// Locks the directory of a device, which its keeper keeps locked. None if it lives.
pub(crate) fn lock(dir: &Path) -> io::Result<Option<File>> {
    let opened = File::open(dir)?;
    match rustix::fs::flock(&opened, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    // It may have been removed, and made again, in between.
    let (ours, there) = (opened.metadata()?, fs::metadata(dir)?);
    match ours.ino() == there.ino() {
        true => Ok(Some(opened)),
        false => Ok(None),
    }
}

/// The devices that are up, by name. What a killed keeper left is removed.
pub fn all() -> Vec<Description> {
    let names = fs::read_dir(directory()).into_iter().flatten().flatten();
    let mut found: Vec<Description> = names.filter_map(|entry| Description::read(&entry.path())).collect();
    found.sort_by(|a, b| a.options.name.cmp(&b.options.name));
    found
}

/// The device with a name, or the only one.
pub fn find(name: Option<&str>) -> Result<Description> {
    let all = all();
    let names: Vec<&str> = all.iter().map(|one| one.options.name.as_str()).collect();
    let none = |what: String| {
        Error::new(Code::NotFound, what).cure(match names.is_empty() {
            true => "`forebay emulate up` makes one".to_owned(),
            false => format!("there are {}", names.join(", ")),
        })
    };
    match (name, all.as_slice()) {
        (None, [one]) => Ok(one.clone()),
        (None, []) => Err(none("there is no emulated device".into())),
        (None, _) => Err(none("cannot tell which emulated device".into())),
        (Some(name), _) => {
            let is_it = |one: &&Description| one.options.name == name || one.device == Path::new(name);
            all.iter()
                .find(is_it)
                .cloned()
                .ok_or_else(|| none(format!("there is no emulated device `{name}`")))
        }
    }
}

impl Description {
    fn read(dir: &Path) -> Option<Description> {
        let Ok(text) = fs::read(dir.join(FILE)) else {
            // Of a keeper that has begun, or was killed before it had described its device.
            if lock(dir).is_ok_and(|lock| lock.is_some()) {
                remove(dir);
            }
            return None;
        };
        let one: Description = serde_json::from_slice(&text).ok()?;
        if !one.keeper.lives() {
            remove(dir);
            return None;
        }
        Some(one)
    }

    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let (new, file) = (dir.join(NEW_FILE), dir.join(FILE));
        fs::write(&new, serde_json::to_vec_pretty(self).map_err(io::Error::other)?)?;
        fs::rename(new, file)
    }

    fn failed(&self, e: &io::Error) -> Error {
        Error::io(format!("cannot look into the server of device {}", self.options.name), e)
    }

    /// Opens one of the server's descriptors.
    fn fd(&self, index: usize) -> Result<File> {
        let gone = || io::Error::from_raw_os_error(libc::ESRCH);
        if !self.server.lives() {
            return Err(self.failed(&gone()));
        }
        let path = format!("/proc/{}/fd/{}", self.server.pid, self.fds[index]);
        File::options().read(true).write(true).open(path).map_err(|e| self.failed(&e))
    }

    fn control(&self) -> Result<Control> {
        Control::open(self.fd(2)?.as_fd()).map_err(|e| self.failed(&e))
    }

    /// Tells the server how long requests are on their way: reads and writes. What was counted to find out is forgotten.
    pub(crate) fn set_ways(&self, ways: [Way; 2]) -> Result<()> {
        let control = self.control()?;
        control.set_way(Direction::Read, ways[0]);
        control.set_way(Direction::Write, ways[1]);
        control.reset_counted();
        self.pacers()?.pacer(0).reset_statistics();
        Ok(())
    }

    /// How long requests are on their way through the kernel: reads and writes. Times below are not emulated.
    pub fn ways(&self) -> Result<[Way; 2]> {
        let control = self.control()?;
        Ok([Direction::Read, Direction::Write].map(|direction| control.way(direction)))
    }

    fn pacers(&self) -> Result<Pacers> {
        Pacers::open(self.fd(1)?.as_fd()).map_err(|e| self.failed(&e))
    }

    /// The profile.
    pub fn profile(&self) -> Option<Profile> {
        Profile::parse(&self.options.profile)
    }

    /// What the server's pacer counted, reads and writes, and the faults.
    pub fn statistics(&self) -> Result<(Statistics, Statistics, Faults)> {
        let pacers = self.pacers()?;
        let pacer = pacers.pacer(0);
        Ok((pacer.statistics(Direction::Read), pacer.statistics(Direction::Write), self.control()?.faults()))
    }

    /// Reads and writes that the kernel merged into others before they reached the device.
    pub fn merges(&self) -> Option<(u64, u64)> {
        let text = fs::read_to_string(loop_device::attribute(&self.device, "stat")).ok()?;
        let field = |index: usize| text.split_ascii_whitespace().nth(index)?.parse().ok();
        Some((field(1)?, field(5)?))
    }

    /// The path of its log.
    pub fn log(&self) -> PathBuf {
        directory().join(&self.options.name).join(LOG)
    }

    /// Flips the lowest bit of a byte behind the server's back.
    pub fn flip(&self, byte: u64) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let memory = self.fd(0)?;
        let mut one = [0];
        memory
            .read_exact_at(&mut one, byte)
            .and_then(|()| memory.write_all_at(&[one[0] ^ 1], byte))
            .map_err(|e| self.failed(&e))
    }

    /// Has the next verified write not read back.
    pub fn spoil_a_write(&self) -> Result<()> {
        self.control().map(|control| control.spoil_a_write())
    }

    /// Has the server store to a byte as a wild pointer would, at its next request.
    pub fn order_stray_store(&self, byte: u64) -> Result<()> {
        self.control().map(|control| control.order_stray_store(byte))
    }

    /// Ends the device, and waits until it has ended. [`Code::Busy`] while it is in use, unless `force`: then what uses it
    /// gets I/O errors.
    pub fn down(&self, force: bool) -> Result<()> {
        let what = || format!("cannot end device {}", self.options.name);
        if !force && loop_device::is_in_use(&self.device) {
            return Err(Error::new(Code::Busy, what())
                .why(format!("{} is mounted, or a program uses it alone", self.device.display()))
                .cure("unmount it first, or add --force"));
        }
        if force && loop_device::is_in_use(&self.device) {
            // A server that hangs answers nothing, and the device's users would wait for it.
            let _ = fs::write(format!("/sys/fs/fuse/connections/{}/abort", self.connection), "1");
        }
        self.keeper.signal(libc::SIGTERM).map_err(|e| Error::io(what(), &e))?;
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while self.keeper.lives() {
            if std::time::Instant::now() > until {
                return Err(Error::new(Code::TimedOut, what())
                    .why("its keeper does not end: it may be writing to the device what the page cache has of it")
                    .cure("wait, or add --force, which loses that"));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }
}
