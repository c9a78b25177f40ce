//! Who uses a mount in other mount namespaces: of containers, and of services and jobs with private mounts.
//!
//! A new namespace gets a copy of every mount. If the mount is taken away here, the copy stays, and with it the connection
//! and the programs that use it there: the kernel does not say that it is in use. What this process may not read of others,
//! as that of other users, is taken for unused.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_sys::mounts;

/// Programs in other mount namespaces that have their working directory, root, executable, an open file or mapped memory on
/// the file system with this device number; `most` of them at most.
pub(crate) fn users(device: (u32, u32), most: usize) -> Vec<String> {
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let own = namespace(Path::new("/proc/thread-self"));
    // Whether each namespace has a copy.
    let mut copies: HashMap<PathBuf, bool> = HashMap::new();
    let has_copy = |process: &Path| {
        let table = std::fs::read(process.join("mountinfo")).unwrap_or_default();
        mounts::parse(&table).iter().any(|mounted| mounted.device == device)
    };
    let mut users = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path()) {
        let number = process.file_name().unwrap_or_default();
        if !number.as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let Some(its) = namespace(&process).filter(|its| Some(its) != own.as_ref()) else { continue };
        if *copies.entry(its).or_insert_with(|| has_copy(&process)) && uses(&process, device) {
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            users.push(format!("{} ({}, in another mount namespace)", name.trim(), number.to_string_lossy()));
            if users.len() == most {
                break;
            }
        }
    }
    users
}

fn uses(process: &Path, device: (u32, u32)) -> bool {
    let is_on = |link: &Path| device_of(link) == Some(device);
    ["cwd", "root", "exe"].iter().any(|link| is_on(&process.join(link)))
        || std::fs::read_dir(process.join("fd"))
            .is_ok_and(|mut open| open.any(|fd| fd.is_ok_and(|fd| is_on(&fd.path()))))
        || maps(&std::fs::read(process.join("maps")).unwrap_or_default(), device)
}

/// The device number of what a link of /proc leads to. Sends no request: this process may be the one that serves it.
fn device_of(link: &Path) -> Option<(u32, u32)> {
    let path = CString::new(link.as_os_str().as_bytes()).ok()?;
    // SAFETY: an all-zero statx is valid, the path is NUL-terminated, and the call fills the structure.
    let (done, found) = unsafe {
        let mut found: libc::statx = std::mem::zeroed();
        let done = libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT,
            libc::STATX_TYPE,
            &mut found,
        );
        (done, found)
    };
    (done == 0).then_some((found.stx_dev_major, found.stx_dev_minor))
}

/// Whether memory of a process is mapped from the device; see proc_pid_maps(5).
fn maps(table: &[u8], (major, minor): (u32, u32)) -> bool {
    let device = format!("{major:02x}:{minor:02x}");
    table.split(|&byte| byte == b'\n').any(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        fields.nth(3).is_some_and(|field| OsStr::from_bytes(field) == OsStr::new(&device))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_recognized_by_its_device() {
        let table = b"7f00-7f01 r--p 00000000 fd:00 12 /lib/a\n7f01-7f02 rw-s 00000000 00:3c 7 /mnt/a b\n7f03-7f04 rw-p 0 00:00 0 \n";
        assert!(maps(table, (0, 0x3c)) && maps(table, (0xfd, 0)));
        assert!(!maps(table, (0, 0x3d)) && !maps(b"", (0, 0)));
    }

    #[test]
    fn device_of_a_link_is_that_of_its_file() {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata("/proc/self/exe").unwrap();
        let expected = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        assert_eq!(device_of(Path::new("/proc/self/exe")), Some(expected));
        assert_eq!(device_of(Path::new("/proc/self/none")), None);
    }
}
