//! The loop device of an emulated medium: direct I/O, detached by the kernel at its last close.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::store::BLOCK_BYTES;

const CONTROL: &str = "/dev/loop-control";
const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Devices that are tried if other programs take those that were free.
const ATTEMPTS: u32 = 16;
/// How long the end of a device may take that no one uses.
const END_TIME: Duration = Duration::from_secs(2);

/// `struct loop_info64` of linux/loop.h, of which only the flags and the name are used.
#[repr(C)]
struct Info {
    before: [u64; 5],
    numbers: [u32; 3],
    flags: u32,
    file_name: [u8; 64],
    rest: [u8; 96],
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

const _: () = assert!(size_of::<Info>() == 232 && size_of::<Config>() == 304);

/// A loop device that this process has open.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
    file: File,
}

impl LoopDevice {
    /// Makes a device with the bytes of `file`. The name is shown by losetup(8).
    pub(crate) fn new(file: &File, name: &str) -> io::Result<LoopDevice> {
        let control = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let mut file_name = [0; 64];
        let text = format!("forebay-emulate:{name}");
        let n = text.len().min(file_name.len() - 1);
        file_name[..n].copy_from_slice(&text.as_bytes()[..n]);
        let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
        let info = Info { before: [0; 5], numbers: [0; 3], flags, file_name, rest: [0; 96], init: [0; 2] };
        let (fd, block_size) = (file.as_raw_fd() as u32, BLOCK_BYTES as u32);
        let config = Config { fd, block_size, info, reserved: [0; 8] };
        for _ in 0..ATTEMPTS {
            // SAFETY: the call takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = OpenOptions::new().read(true).write(true).open(&path)?;
            // SAFETY: the call reads the structure, which lives over it.
            if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
                return Ok(LoopDevice { path, file: device });
            }
            match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EBUSY) => {}
                e => return Err(e),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Ends the device. False if something still uses it: it ends at its last close.
    pub(crate) fn end(self) -> bool {
        let backing = attribute(&self.path, "loop/backing_file");
        // SAFETY: the call takes no argument. Its error is that the device has ended.
        unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_CLR_FD) };
        drop(self);
        let until = Instant::now() + END_TIME;
        while backing.exists() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

/// A file of sysfs of a block device.
pub(crate) fn attribute(device: &Path, name: &str) -> PathBuf {
    Path::new("/sys/block").join(device.file_name().unwrap_or_default()).join(name)
}

/// True if a block device is mounted, or in exclusive use in another way.
pub fn is_in_use(device: &Path) -> bool {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device);
    opened.is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY))
}
