//! `/dev/fuse`: requests are read from it, replies and notifications written to it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const DEVICE: &CStr = c"/dev/fuse";
/// Its major and minor number.
const NUMBERS: (u32, u32) = (10, 229);

/// `_IOR(229, 0, u32)`.
const CLONE: libc::c_ulong = 0x8004_e500;

/// One descriptor of a FUSE connection.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

impl Device {
    /// Opens the device. A mount that names the descriptor makes it a connection.
    pub fn open() -> io::Result<Device> {
        // SAFETY: the path is NUL-terminated; the descriptor is new and ours; an all-zero stat is valid and writable.
        unsafe {
            let fd = check(libc::open(DEVICE.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC).into())?;
            let device = Device { fd: OwnedFd::from_raw_fd(fd as i32) };
            let mut st: libc::stat = std::mem::zeroed();
            check(libc::fstat(fd as i32, &mut st).into())?;
            let is_device = st.st_mode & libc::S_IFMT == libc::S_IFCHR;
            if !is_device || (libc::major(st.st_rdev), libc::minor(st.st_rdev)) != NUMBERS {
                let what = "it is not the FUSE device, which has the numbers 10 and 229";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
            Ok(device)
        }
    }

    /// The descriptor of a connection that another process opened.
    pub fn from_fd(fd: OwnedFd) -> Device {
        Device { fd }
    }

    /// Another descriptor of the same connection, with its own queue of requests in progress.
    pub fn another(&self) -> io::Result<Device> {
        let new = Device::open()?;
        let number = self.fd.as_raw_fd() as u32;
        // SAFETY: the ioctl reads one u32, which lives over the call.
        check(unsafe { libc::ioctl(new.fd.as_raw_fd(), CLONE, &raw const number) }.into())?;
        Ok(new)
    }

    /// Reads one request. `ENODEV` when the file system is unmounted; `ENOENT` for a request that the kernel withdrew
    /// meanwhile.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the buffer is as long as said.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        check(n as libc::c_long).map(|n| n as usize)
    }

    /// Sets whether a read waits for a request, or fails at once with `EAGAIN` if there is none.
    pub fn set_waiting(&self, waits: bool) {
        let flags = libc::O_RDWR | if waits { 0 } else { libc::O_NONBLOCK };
        // SAFETY: plain system call on our descriptor.
        unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETFL, flags) };
    }

    /// Writes one message, whole. `ENOENT` when the kernel no longer waits for that reply.
    pub fn write(&self, message: &[u8]) -> io::Result<()> {
        // SAFETY: the buffer is as long as said.
        let n = unsafe { libc::write(self.fd.as_raw_fd(), message.as_ptr().cast(), message.len()) };
        check(n as libc::c_long).map(|_| ())
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
