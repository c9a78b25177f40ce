//! Loop devices (loop(4)): block devices whose bytes are those of a file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONTROL: &str = "/dev/loop-control";
const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_CTL_ADD: libc::c_ulong = 0x4c80;
const LOOP_CTL_REMOVE: libc::c_ulong = 0x4c81;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Devices that are tried if other programs take those that were free.
const ATTEMPTS: u32 = 16;
/// How long a device that has just got a file may keep it, because a program looks at it.
const RENEW_TIME: Duration = Duration::from_millis(200);
/// Bytes of a device's name, besides the zero at its end.
pub const NAME_BYTES_MAX: usize = 63;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; NAME_BYTES_MAX + 1],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: RawInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<RawInfo>() == 232 && size_of::<Config>() == 304);

const EMPTY: RawInfo = RawInfo {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; NAME_BYTES_MAX + 1],
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

/// How a device is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings<'a> {
    /// The name that LOOP_GET_STATUS64 returns; what is longer than [`NAME_BYTES_MAX`] is cut off.
    pub name: &'a [u8],
    /// Bytes of a sector; 512 if it is 0.
    pub sector_bytes: u32,
    /// The device cannot be written.
    pub is_read_only: bool,
    /// The kernel detaches it at its last close, also when the process that made it is killed.
    pub ends_at_last_close: bool,
    /// Requests bypass the page cache of the file.
    pub is_direct: bool,
    /// Discards are to reach the file, if it can free space.
    pub discards: bool,
}

/// What the kernel says about a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// `st_dev` of the file.
    pub device: u64,
    /// `st_ino` of the file.
    pub inode: u64,
    /// The name that it was made with.
    pub name: Vec<u8>,
}

/// A loop device that this process has open.
#[derive(Debug)]
pub struct LoopDevice {
    /// Its path in /dev.
    pub path: PathBuf,
    file: File,
}

/// The queue's limit of discards.
const DISCARD_LIMIT: &str = "queue/discard_max_bytes";

/// Makes the device of a number anew, if nobody uses it: a limit of discards of 0 cannot be taken back otherwise, and
/// stays for the next user of the number.
fn renew(control: &File, number: i32) {
    for request in [LOOP_CTL_REMOVE, LOOP_CTL_ADD] {
        // SAFETY: the argument is a number.
        if unsafe { libc::ioctl(control.as_raw_fd(), request, number) } == -1 {
            return;
        }
    }
}

impl LoopDevice {
    fn open(path: &Path, flags: i32) -> io::Result<LoopDevice> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        // Without the right to write, a device can still be looked at.
        let file = file.or_else(|_| OpenOptions::new().read(true).custom_flags(flags).open(path))?;
        Ok(LoopDevice { path: path.to_owned(), file })
    }

    /// Makes a device with the bytes of a file.
    pub fn new(file: BorrowedFd<'_>, settings: &Settings<'_>) -> io::Result<LoopDevice> {
        let control = control()?;
        let mut info = EMPTY;
        let n = settings.name.len().min(NAME_BYTES_MAX);
        info.file_name[..n].copy_from_slice(&settings.name[..n]);
        let flags = [
            (settings.is_read_only, LO_FLAGS_READ_ONLY),
            (settings.ends_at_last_close, LO_FLAGS_AUTOCLEAR),
            (settings.is_direct, LO_FLAGS_DIRECT_IO),
        ];
        info.flags = flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum();
        let config =
            Config { fd: file.as_raw_fd() as u32, block_size: settings.sector_bytes, info, reserved: [0; 8] };
        for attempt in 0..ATTEMPTS {
            // SAFETY: the call takes no argument.
            let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
            let device = match LoopDevice::open(Path::new(&format!("/dev/loop{number}")), 0) {
                // Another process makes it anew.
                Err(e)
                    if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO))
                        && attempt + 1 < ATTEMPTS =>
                {
                    continue;
                }
                opened => opened?,
            };
            // SAFETY: the call reads the structure, which lives over it.
            match check(unsafe { libc::ioctl(device.file.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }) {
                Ok(_) if settings.discards && attempt < ATTEMPTS / 2 && !device.passes_discards() => {
                    device.clear(RENEW_TIME)?;
                }
                Ok(_) => return Ok(device),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Has the kernel refuse discards, which would free memory behind the device. The number of the device keeps this
    /// for its next use.
    pub fn refuse_discards(&self) -> io::Result<()> {
        std::fs::write(attribute(&self.path, DISCARD_LIMIT), "0")
    }

    /// True if the kernel passes discards on to the file.
    fn passes_discards(&self) -> bool {
        std::fs::read(attribute(&self.path, DISCARD_LIMIT)).is_ok_and(|limit| limit != b"0\n")
    }

    /// The devices that have a file and that this process may open. One that ends just now is left out.
    pub fn all() -> io::Result<Vec<LoopDevice>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir("/sys/block")? {
            let path = Path::new("/dev").join(entry?.file_name());
            if attribute(&path, "loop/backing_file").exists() {
                all.extend(LoopDevice::open(&path, 0));
            }
        }
        Ok(all)
    }

    /// The device at a path, unless it is mounted or used exclusively in another way (EBUSY).
    pub fn exclusive(path: &Path) -> io::Result<LoopDevice> {
        LoopDevice::open(path, libc::O_EXCL)
    }

    /// What the kernel says about it.
    pub fn info(&self) -> io::Result<Info> {
        let mut info = EMPTY;
        // SAFETY: the call writes the structure, which lives over it.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
        let name = info.file_name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        Ok(Info { device: info.device, inode: info.inode, name })
    }

    /// Writes what the page cache has of it.
    pub fn synchronize(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Detaches the file. While another process has the device open, it keeps the file until that process closes it. So
    /// false is returned if it still has the file after `wait`: programs that look for a free device have each open for
    /// a moment.
    pub fn clear(self, wait: Duration) -> io::Result<bool> {
        let backing = attribute(&self.path, "loop/backing_file");
        // SAFETY: the call takes no argument.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_CLR_FD) })?;
        let number = self.path.to_str().and_then(|path| path.strip_prefix("/dev/loop")?.parse().ok());
        let is_limited = !self.passes_discards();
        drop(self);
        let asked = Instant::now();
        while backing.exists() {
            if asked.elapsed() >= wait {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if let (true, Some(number), Ok(control)) = (is_limited, number, control()) {
            renew(&control, number);
        }
        Ok(true)
    }
}

fn control() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(CONTROL)
}

/// Locks the control device against other commands that make devices of volumes, as long as the file is open.
pub fn locked_control() -> io::Result<File> {
    let control = control()?;
    // SAFETY: plain system call on our descriptor.
    check(unsafe { libc::flock(control.as_raw_fd(), libc::LOCK_EX) })?;
    Ok(control)
}

/// A file of sysfs of a block device.
pub fn attribute(device: &Path, name: &str) -> PathBuf {
    Path::new("/sys/block").join(device.file_name().unwrap_or_default()).join(name)
}

/// True if a block device is mounted, or in exclusive use in another way.
pub fn is_in_use(device: &Path) -> bool {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device);
    opened.is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn device_has_the_bytes_of_its_file_and_its_name_cut() {
        if OpenOptions::new().write(true).open(CONTROL).is_err() {
            eprintln!("skipped: needs loop devices and root");
            return;
        }
        // SAFETY: plain system call; the descriptor is new and ours.
        let memory = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        let memory = File::from(memory);
        memory.write_all_at(&[7; 8192], 0).unwrap();
        let name = [b'n'; 100];
        let settings = Settings { name: &name, ends_at_last_close: true, ..Settings::default() };
        let device = LoopDevice::new(memory.as_fd(), &settings).unwrap();
        let info = device.info().unwrap();
        let file = memory.metadata().unwrap();
        assert_eq!((info.device, info.inode), (file.dev(), file.ino()));
        assert_eq!(info.name, name[..NAME_BYTES_MAX]);
        let found = LoopDevice::all().unwrap().iter().any(|one| one.info().is_ok_and(|one| one == info));
        assert!(found, "it is not among all devices");
        let mut block = [0; 512];
        device.file.read_exact_at(&mut block, 0).unwrap();
        assert_eq!(block, [7; 512]);
        assert!(!is_in_use(&device.path));
        let path = device.path.clone();
        let exclusive = LoopDevice::exclusive(&path).unwrap();
        assert!(is_in_use(&path));
        drop(exclusive);
        device.clear(Duration::from_secs(20)).unwrap();
    }
}
