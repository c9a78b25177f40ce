//! The kernel's two ioctls for backing files, on a descriptor of `/dev/fuse`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IOW(229, 1, struct fuse_backing_map)` and `_IOW(229, 2, u32)`.
const BACKING_OPEN: libc::c_ulong = 0x4010_e501;
const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;

/// `struct fuse_backing_map`.
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

/// Registers a regular file for passthrough. Returns the number that opens give to the kernel. For each open the
/// kernel opens the file anew, by its path and with the credentials of the process that registered it, so the
/// descriptor's own mode does not matter. Needs CAP_SYS_ADMIN.
pub fn register(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<i32> {
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the ioctl reads one `BackingMap`, which lives over the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN, &raw const map) } {
        id if id >= 0 => Ok(id),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends a registration; opens that use it continue.
pub fn unregister(device: BorrowedFd<'_>, id: i32) {
    let id = id as u32;
    // SAFETY: the ioctl reads one u32, which lives over the call. A dead connection has no registrations.
    unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE, &raw const id) };
}
