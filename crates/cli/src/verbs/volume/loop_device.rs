//! Loop devices (loop(4)): block devices whose bytes are those of a file, here of a volume's memory.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

const CONTROL: &str = "/dev/loop-control";
const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_READ_ONLY: u32 = 1;
/// What the names of the devices that this program makes begin with. `losetup` does not make such names.
const MARK: &[u8] = b"forebay:";
/// Devices that are tried if other programs take those that were free.
const ATTEMPTS: u32 = 16;
/// How long other programs may have a device open that they only look at.
const LOOK_TIME: Duration = Duration::from_millis(500);

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const EMPTY: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

fn check(result: i32) -> io::Result<i32> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// A loop device in use.
#[derive(Debug)]
pub(super) struct LoopDevice {
    pub(super) path: PathBuf,
    file: File,
    number: String,
}

impl LoopDevice {
    fn open(path: &Path, flags: i32) -> io::Result<LoopDevice> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        // Without the right to write, a device can still be looked at.
        let file = file.or_else(|_| OpenOptions::new().read(true).custom_flags(flags).open(path))?;
        let number = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(LoopDevice { path: path.to_owned(), file, number })
    }

    /// Makes a device with the bytes of `memory`. It refuses discards, which would free memory of the volume.
    pub(super) fn attach(memory: &OwnedFd, name: &[u8], is_read_only: bool) -> io::Result<LoopDevice> {
        let control = control()?;
        let mut info = EMPTY;
        let all = [MARK, name].concat();
        let n = all.len().min(info.file_name.len() - 1);
        info.file_name[..n].copy_from_slice(&all[..n]);
        info.flags = if is_read_only { LO_FLAGS_READ_ONLY } else { 0 };
        let config = Config { fd: memory.as_raw_fd() as u32, block_size: 0, info, reserved: [0; 8] };
        for _ in 0..ATTEMPTS {
            // SAFETY: the call takes no argument.
            let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
            let device = LoopDevice::open(Path::new(&format!("/dev/loop{number}")), 0)?;
            // SAFETY: the call reads the structure, which lives over it.
            match check(unsafe { libc::ioctl(device.file.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }) {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(e) => return Err(e),
            }
            let refused = std::fs::write(device.attribute("queue/discard_max_bytes"), "0");
            return match refused {
                Ok(()) => Ok(device),
                Err(e) => {
                    device.clear()?;
                    Err(e)
                }
            };
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// The device with the bytes of `memory`, if there is one.
    pub(super) fn of(memory: &OwnedFd) -> io::Result<Option<LoopDevice>> {
        let found = File::from(memory.try_clone()?).metadata()?;
        for entry in std::fs::read_dir("/sys/block")? {
            let name = entry?.file_name();
            let directory = Path::new("/sys/block").join(&name);
            if !directory.join("loop/backing_file").exists() {
                continue;
            }
            // One that ends just now, or may not be opened, is not looked at.
            let Ok(device) = LoopDevice::open(&Path::new("/dev").join(&name), 0) else { continue };
            if device.info().is_ok_and(|info| (info.device, info.inode) == (found.dev(), found.ino())) {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// The device at a path, unless it is mounted or used exclusively in another way (EBUSY).
    pub(super) fn exclusive(path: &Path) -> io::Result<LoopDevice> {
        LoopDevice::open(path, libc::O_EXCL)
    }

    fn info(&self) -> io::Result<Info> {
        let mut info = EMPTY;
        // SAFETY: the call writes the structure, which lives over it.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
        Ok(info)
    }

    /// True if this program made it.
    pub(super) fn is_marked(&self) -> bool {
        self.info().is_ok_and(|info| info.file_name.starts_with(MARK))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block").join(&self.number).join(name)
    }

    /// Ends the device, after what was written to it is in the volume. False if another process has it open for longer
    /// than a look takes, as programs look that want a free device: it ends when that process closes it.
    pub(super) fn clear(self) -> io::Result<bool> {
        let backing = self.attribute("loop/backing_file");
        self.file.sync_all()?;
        // SAFETY: the call takes no argument.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_CLR_FD) })?;
        drop(self);
        let asked = Instant::now();
        while backing.exists() {
            if asked.elapsed() >= LOOK_TIME {
                return Ok(false);
            }
            std::thread::sleep(LOOK_TIME / 50);
        }
        Ok(true)
    }
}

fn control() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(CONTROL)
}

/// Locks the control device against other commands that attach volumes, as long as the file is open.
pub(super) fn locked_control() -> io::Result<File> {
    let control = control()?;
    rustix::fs::flock(&control, FlockOperation::LockExclusive)?;
    Ok(control)
}
