//! The privileges that this program keeps: its user's, and CAP_SYS_ADMIN.

use std::io;

const CAP_SYS_ADMIN: u32 = 21;
const VERSION_3: u32 = 0x2008_0522;

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`; version 3 takes two, for 32 capabilities each.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Keeps CAP_SYS_ADMIN and drops all other capabilities for good.
///
/// # Errors
/// EPERM when this process does not have it.
pub(crate) fn keep_one() -> io::Result<()> {
    let header = Header { version: VERSION_3, pid: 0 };
    let mut data = [Data::default(); 2];
    data[0] = Data { effective: 1 << CAP_SYS_ADMIN, permitted: 1 << CAP_SYS_ADMIN, inheritable: 0 };
    // SAFETY: plain system calls; the structures live over the call and are as long as the version says.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        check(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0).into())?;
        check(libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()))
    }
}

/// As root: becomes this user, in the user's primary group alone, and keeps CAP_SYS_ADMIN.
pub(crate) fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: plain system calls; no list of groups is given.
    unsafe {
        check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0).into())?;
        check(libc::setgroups(0, std::ptr::null()).into())?;
        check(libc::setresgid(gid, gid, gid).into())?;
        check(libc::setresuid(uid, uid, uid).into())?;
    }
    keep_one()
}
