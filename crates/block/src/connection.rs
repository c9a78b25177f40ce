//! A FUSE file system whose root is one regular file. It is mounted nowhere: the mount lives as long as the file is
//! open, and no path leads to it.

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use forebay_fuse::Device;

const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_SET_STRING: libc::c_uint = 1;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const NO_ATTRIBUTES: libc::c_uint = 0;

/// The mount of a connection, not attached to any directory.
#[derive(Debug)]
pub(crate) struct Detached(OwnedFd);

fn made(fd: libc::c_long) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

impl Detached {
    /// Makes a connection of `device`. Its file belongs to root.
    pub(crate) fn new(device: &Device, subtype: &CStr, source: &str) -> io::Result<Detached> {
        // SAFETY: here and below, strings are NUL-terminated and live over the call, and descriptors are ours.
        let context = made(unsafe { libc::syscall(libc::SYS_fsopen, c"fuse".as_ptr(), FSOPEN_CLOEXEC) })?;
        let configure = |command: libc::c_uint, key: Option<&CStr>, value: Option<&CStr>| {
            let pointer = |c: Option<&CStr>| c.map_or(std::ptr::null(), CStr::as_ptr);
            // SAFETY: as above.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_fsconfig,
                    context.as_raw_fd(),
                    command,
                    pointer(key),
                    pointer(value),
                    0,
                )
            };
            if done < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(())
            }
        };
        let number = CString::new(device.as_fd().as_raw_fd().to_string())?;
        let source = CString::new(source)?;
        let settings = [
            (c"source", source.as_c_str()),
            (c"subtype", subtype),
            (c"fd", number.as_c_str()),
            (c"rootmode", c"100600"),
            (c"user_id", c"0"),
            (c"group_id", c"0"),
        ];
        for (key, value) in settings {
            configure(FSCONFIG_SET_STRING, Some(key), Some(value))?;
        }
        configure(FSCONFIG_CMD_CREATE, None, None)?;
        // SAFETY: as above.
        made(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, NO_ATTRIBUTES) })
            .map(Detached)
    }

    /// Opens the file. The server must be serving.
    pub(crate) fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}
