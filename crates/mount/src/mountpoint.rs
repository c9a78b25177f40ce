//! Mount points: checks, mounting and unmounting.
//!
//! A process that may mount (root, or with CAP_SYS_ADMIN) does so itself. Others run `fusermount3`, the set-user-ID
//! helper of libfuse, which sends the connection's descriptor over a socket.
//!
//! Another process may mount over a mount of ours, or unmount it and mount there itself. So a mount is identified by
//! its device number, and only a mount with that number is unmounted.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_sys::mounts;
use forebay_types::{Code, Error, Result};

use forebay_fuse::Device;

use crate::elsewhere;

/// The file system type in the kernel's mount table.
pub const FILE_SYSTEM_TYPE: &str = "fuse.forebay";
const HELPER: &str = "fusermount3";
/// Users of a mount that an error names, at most.
const SHOWN_MAX: usize = 5;

/// How to mount.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Users other than the one that mounts may use it too.
    pub allow_other: bool,
    /// Root does not own the pool. The pool's owner can put any inode into it, and these must not become set-user-ID
    /// programs of root or device nodes.
    pub distrusts: bool,
}

/// A mount that was just made.
#[derive(Debug)]
pub struct Mount {
    /// Its connection.
    pub device: Device,
    /// Its line in the kernel's mount table.
    pub shown: mounts::Mount,
}

/// All mounts that this process sees. Their order does not show which lies over which.
pub fn mounts() -> Vec<mounts::Mount> {
    mounts::own().unwrap_or_default()
}

/// The visible one of the mounts on one directory.
fn uppermost(stack: &[mounts::Mount]) -> Option<&mounts::Mount> {
    stack.iter().find(|m| !stack.iter().any(|over| over.parent_id == m.id))
}

/// All mounts on a directory, given by its full path.
fn stack_on(at: &Path) -> Vec<mounts::Mount> {
    mounts().into_iter().filter(|m| m.point == at).collect()
}

/// The visible mount on a directory, given by its full path, if there is one.
pub fn mounted_on(at: &Path) -> Option<mounts::Mount> {
    uppermost(&stack_on(at)).cloned()
}

/// The full path of a mount point, also of one whose file system is dead.
pub fn full_path(at: &Path) -> Result<PathBuf> {
    let what = || format!("cannot mount on {}", at.display());
    let absolute = std::path::absolute(at).map_err(|e| Error::io(what(), &e))?;
    if mounted_on(&absolute).is_some() {
        return Ok(absolute);
    }
    absolute.canonicalize().map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT) => Error::io(what(), &e).cure(format!("make it first: mkdir -p {}", at.display())),
        _ => Error::io(what(), &e),
    })
}

/// Checks that a pool may be mounted on a directory: it is a directory, it is empty, and no mount of ours is on it.
/// One mount is permitted and returned: a mount of the same pool, if `alone` states that no process can be serving it
/// any more.
pub fn check_place(at: &Path, source: &str, alone: bool) -> Result<Option<mounts::Mount>> {
    let what = || format!("cannot mount on {}", at.display());
    let stack = stack_on(at);
    if let Some(mounted) = uppermost(&stack).filter(|m| m.fs_type == FILE_SYSTEM_TYPE) {
        if mounted.source == source && alone {
            return Ok(Some(mounted.clone()));
        }
        return Err(Error::new(Code::Busy, what())
            .why(format!("pool {} is mounted there", mounted.source))
            .cure("`forebay umount` it first (or `umount -l` it, if that pool no longer exists), or name another directory"));
    }
    if let (Some(other), true) = (uppermost(&stack), stack.iter().any(|m| m.fs_type == FILE_SYSTEM_TYPE)) {
        return Err(Error::new(Code::Busy, what())
            .why(format!("{} ({}) is mounted over a pool's mount there", other.source, other.fs_type))
            .cure("unmount that first"));
    }
    let metadata = std::fs::metadata(at).map_err(|e| Error::io(what(), &e))?;
    if !metadata.is_dir() {
        return Err(Error::new(Code::NotDirectory, what()).cure("name an empty directory"));
    }
    let mut entries = std::fs::read_dir(at).map_err(|e| Error::io(what(), &e))?;
    if entries.next().is_some() {
        return Err(Error::new(Code::NotEmpty, what())
            .why("it has entries, which would be hidden")
            .cure("name an empty directory"));
    }
    Ok(None)
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(Code::Invalid, format!("cannot use the path {}", path.display())))
}

/// Unmounts the visible mount on a directory.
fn unmount_call(at: &Path, flags: i32) -> Result<()> {
    let path = c_path(at)?;
    // SAFETY: the path is NUL-terminated.
    if unsafe { libc::umount2(path.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } == 0 {
        return Ok(());
    }
    let e = io::Error::last_os_error();
    let what = format!("cannot unmount {}", at.display());
    match e.raw_os_error() {
        Some(libc::EPERM) => unmount_by_helper(at, flags & libc::MNT_DETACH != 0),
        Some(libc::EBUSY) => Err(busy(at, users_of(at))),
        Some(libc::EINVAL) => Err(Error::new(Code::NotFound, what).why("nothing is mounted there")),
        _ => Err(Error::io(what, &e)),
    }
}

fn busy(at: &Path, users: Vec<String>) -> Error {
    let why = if users.is_empty() {
        "it is in use".to_owned()
    } else {
        format!("it is in use by {}", users.join(", "))
    };
    Error::new(Code::Busy, format!("cannot unmount {}", at.display())).why(why).cure(
        "end these programs or make them leave it; `forebay umount --lazy` detaches it while they use it",
    )
}

/// Programs that have their working directory, root, executable or an open file on a mount, as far as this user may
/// see.
fn users_of(at: &Path) -> Vec<String> {
    let mut users = Vec::new();
    let Ok(processes) = std::fs::read_dir("/proc") else { return users };
    let uses = |link: PathBuf| std::fs::read_link(link).is_ok_and(|to| to.starts_with(at));
    for process in processes.flatten() {
        let name = process.file_name();
        if !name.as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let dir = process.path();
        let open = || {
            std::fs::read_dir(dir.join("fd"))
                .is_ok_and(|mut fds| fds.any(|fd| fd.is_ok_and(|fd| uses(fd.path()))))
        };
        if uses(dir.join("cwd")) || uses(dir.join("root")) || uses(dir.join("exe")) || open() {
            let comm = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
            users.push(format!("{} ({})", comm.trim(), name.to_string_lossy()));
            if users.len() == SHOWN_MAX {
                users.push("others".to_owned());
                break;
            }
        }
    }
    users
}

fn unmount_by_helper(at: &Path, lazy: bool) -> Result<()> {
    let what = format!("cannot unmount {}", at.display());
    let mut command = Command::new(HELPER);
    command.arg("-u").arg("-q");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(at).output().map_err(|e| no_helper(&what, &e))?;
    if output.status.success() {
        return Ok(());
    }
    if mounted_on(at).is_none() {
        return Err(Error::new(Code::NotFound, what).why("nothing is mounted there"));
    }
    Err(busy(at, users_of(at)))
}

fn no_helper(what: &str, e: &io::Error) -> Error {
    Error::new(Code::NotPermitted, what)
        .why(format!("this user may not mount, and {HELPER} cannot be run: {e}"))
        .cure("install fuse3 (Debian), or use `forebay run`, which needs no mount")
}

/// Checks that a mount is there, and that nothing is mounted over it.
fn check_uppermost(mounted: &mounts::Mount) -> Result<()> {
    let what = || format!("cannot unmount {}", mounted.point.display());
    let stack = stack_on(&mounted.point);
    match uppermost(&stack) {
        Some(upper) if upper.device == mounted.device => Ok(()),
        Some(other) if stack.iter().any(|m| m.device == mounted.device) => {
            Err(Error::new(Code::Busy, what())
                .why(format!("{} ({}) is mounted over it", other.source, other.fs_type))
                .cure("unmount that first"))
        }
        _ => Err(Error::new(Code::NotFound, what()).why("it is not mounted there any more")),
    }
}

/// Unmounts. [`Code::Busy`] while programs use the mount, here or in another mount namespace, or something is mounted over it.
/// If another namespace has a copy of it that no program uses, the connection lives on.
pub fn unmount(mounted: &mounts::Mount) -> Result<()> {
    check_uppermost(mounted)?;
    let users = elsewhere::users(mounted.device, SHOWN_MAX);
    if !users.is_empty() {
        return Err(busy(&mounted.point, users));
    }
    unmount_call(&mounted.point, 0)
}

/// Aborts a connection that no process serves. It would live as long as any descriptor of it is open, and a process
/// that waits for it may hold one. False where the FUSE control file system is not mounted.
fn abort(mounted: &mounts::Mount) -> bool {
    std::fs::write(format!("/sys/fs/fuse/connections/{}/abort", mounted.device.1), "1").is_ok()
}

/// Removes a mount while programs use it: those that wait for a reply get an error. [`Code::Busy`], and no change,
/// when something is mounted over it.
pub fn clear(mounted: &mounts::Mount) -> Result<()> {
    if let Err(e) = check_uppermost(mounted) {
        return if e.code == Code::NotFound { Ok(()) } else { Err(e) };
    }
    let aborted = abort(mounted);
    // A forced unmount also aborts the connection, for a process that may unmount. `fusermount3` only unmounts.
    let path = c_path(&mounted.point)?;
    let flags = libc::MNT_FORCE | libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW;
    // SAFETY: the path is NUL-terminated.
    if unsafe { libc::umount2(path.as_ptr(), flags) } == 0 {
        return Ok(());
    }
    if !aborted {
        tracing::warn!(
            "programs that wait for {} may wait on: its connection cannot be aborted, as fusectl is not mounted \
             (`mount -t fusectl fusectl /sys/fs/fuse/connections` as root)",
            mounted.point.display()
        );
    }
    match unmount_call(&mounted.point, libc::MNT_DETACH) {
        Err(e) if e.code == Code::NotFound => Ok(()),
        result => result,
    }
}

/// Removes all mounts of a pool that no process serves.
pub fn clear_all(source: &str) -> Result<()> {
    let left = || mounts().into_iter().filter(|m| m.fs_type == FILE_SYSTEM_TYPE && m.source == source);
    for _ in 0..left().count() {
        // A mount that lies over another one is removed first.
        let seen = left().find(|m| check_uppermost(m).is_ok()).or_else(|| left().next());
        let Some(mounted) = seen else { return Ok(()) };
        tracing::warn!("{} is still mounted by a process that has died", mounted.point.display());
        clear(&mounted)?;
    }
    Ok(())
}

/// Calls `mount`, which mounts on `at`, and finds the new mount in the kernel's table.
fn seen(at: &Path, mount: impl FnOnce() -> Result<Device>) -> Result<Mount> {
    let before: Vec<(u32, u32)> = stack_on(at).iter().map(|m| m.device).collect();
    let device = mount()?;
    let new = |m: &mounts::Mount| m.fs_type == FILE_SYSTEM_TYPE && !before.contains(&m.device);
    match stack_on(at).into_iter().find(new) {
        Some(shown) => Ok(Mount { device, shown }),
        None => Err(Error::new(Code::Busy, format!("cannot mount on {}", at.display()))
            .why("another process unmounted it at once")),
    }
}

/// Mounts a new connection on a directory. The kernel's table shows `source` for it.
pub fn mount(at: &Path, source: &str, options: Options) -> Result<Mount> {
    seen(at, || mount_new(at, source, options))
}

fn mount_new(at: &Path, source: &str, options: Options) -> Result<Device> {
    let what = || format!("cannot mount on {}", at.display());
    let device = match Device::open() {
        Ok(device) => device,
        // The helper may be permitted where this user is not.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return mount_by_helper(at, source, options),
        Err(e) => {
            let cure = match e.kind() {
                io::ErrorKind::InvalidInput => "make it again (`mknod -m 666 /dev/fuse c 10 229`); `forebay run` needs no mount",
                _ => "load the kernel's module (`modprobe fuse`), or give the container /dev/fuse; `forebay run` needs no mount",
            };
            return Err(Error::io(what(), &e).why(format!("/dev/fuse: {e}")).cure(cure));
        }
    };
    // SAFETY: these calls cannot fail.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let mut data = format!("rootmode=40000,user_id={uid},group_id={gid},default_permissions");
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let (source_c, kind) =
        (CString::new(source).unwrap_or_default(), CString::new(FILE_SYSTEM_TYPE).unwrap_or_default());
    let with_fd = CString::new(format!("fd={},{data}", device.as_fd().as_raw_fd())).unwrap_or_default();
    let path = c_path(at)?;
    let flags = if options.distrusts { libc::MS_NOSUID | libc::MS_NODEV } else { 0 };
    // SAFETY: all strings are NUL-terminated and live over the call.
    let done = unsafe {
        libc::mount(source_c.as_ptr(), path.as_ptr(), kind.as_ptr(), flags, with_fd.as_ptr().cast())
    };
    if done == 0 {
        return Ok(device);
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => mount_by_helper(at, source, options),
        Some(libc::ENODEV) => {
            Err(Error::io(what(), &e).why("the kernel has no FUSE").cure("`modprobe fuse`"))
        }
        _ => Err(Error::io(what(), &e)),
    }
}

/// Mounts in the place of a mount that no process serves. Where the kernel can (Linux 6.5), the new mount is put
/// beneath the dead one, which is then removed. So no program ever sees the bare directory and creates files in it.
pub fn mount_in_place_of(dead: &mounts::Mount, source: &str, options: Options) -> Result<Mount> {
    tracing::warn!("{} is still mounted by a process that has died", dead.point.display());
    let what = || format!("cannot mount beneath what is mounted on {}", dead.point.display());
    match seen(&dead.point, || mount_beneath(&dead.point, source, options).map_err(|e| Error::io(what(), &e)))
    {
        Ok(mount) => {
            clear(dead)?;
            Ok(mount)
        }
        Err(e) => {
            tracing::info!("removing the dead mount first: {e}");
            clear(dead)?;
            self::mount(&dead.point, source, options)
        }
    }
}

fn mount_beneath(at: &Path, source: &str, options: Options) -> io::Result<Device> {
    const FSOPEN_CLOEXEC: libc::c_uint = 1;
    const FSCONFIG_SET_FLAG: libc::c_uint = 0;
    const FSCONFIG_SET_STRING: libc::c_uint = 1;
    const FSCONFIG_CMD_CREATE: libc::c_uint = 6;
    const FSMOUNT_CLOEXEC: libc::c_uint = 1;
    const MOUNT_ATTR_NOSUID: libc::c_uint = 2;
    const MOUNT_ATTR_NODEV: libc::c_uint = 4;
    const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
    const MOVE_MOUNT_BENEATH: libc::c_uint = 0x200;
    let device = Device::open()?;
    let text = |text: &str| CString::new(text).map_err(io::Error::other);
    let made = |fd: libc::c_long| -> io::Result<OwnedFd> {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    // SAFETY: here and below, strings are NUL-terminated and live over the call, and descriptors are ours.
    let context = made(unsafe { libc::syscall(libc::SYS_fsopen, c"fuse".as_ptr(), FSOPEN_CLOEXEC) })?;
    let configure = |command: libc::c_uint, key: Option<&str>, value: Option<&str>| -> io::Result<()> {
        let (key, value) = (key.map(text).transpose()?, value.map(text).transpose()?);
        let pointer = |c: &Option<CString>| c.as_ref().map_or(std::ptr::null(), |c| c.as_ptr());
        // SAFETY: as above.
        let done = unsafe {
            libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, pointer(&key), pointer(&value), 0)
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: these calls cannot fail.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let strings = [
        ("source", source.to_owned()),
        ("subtype", "forebay".to_owned()),
        ("fd", device.as_fd().as_raw_fd().to_string()),
        ("rootmode", "40000".to_owned()),
        ("user_id", uid.to_string()),
        ("group_id", gid.to_string()),
    ];
    for (key, value) in &strings {
        configure(FSCONFIG_SET_STRING, Some(key), Some(value))?;
    }
    configure(FSCONFIG_SET_FLAG, Some("default_permissions"), None)?;
    if options.allow_other {
        configure(FSCONFIG_SET_FLAG, Some("allow_other"), None)?;
    }
    configure(FSCONFIG_CMD_CREATE, None, None)?;
    let attributes = if options.distrusts { MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV } else { 0 };
    // SAFETY: as above.
    let mount =
        made(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })?;
    let at = CString::new(at.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: as above.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            at.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_BENEATH,
        )
    };
    if moved < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(device)
}

/// Runs `fusermount3` to mount, and receives the descriptor that it sends.
fn mount_by_helper(at: &Path, source: &str, options: Options) -> Result<Device> {
    let what = format!("cannot mount on {}", at.display());
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|e| Error::io(&what, &e))?;
    let source = source.replace('\\', "\\\\").replace(',', "\\,");
    let mut data = format!("default_permissions,subtype=forebay,fsname={source}");
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let number = theirs.as_raw_fd();
    let mut command = Command::new(HELPER);
    command.args(["-o", &data, "--"]).arg(at).env("_FUSE_COMMFD", number.to_string());
    // SAFETY: between fork and exec one system call is made, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let child = command.stderr(std::process::Stdio::piped()).spawn().map_err(|e| no_helper(&what, &e))?;
    drop(theirs);
    let received = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(|e| Error::io(&what, &e))?;
    match received {
        Ok(fd) if output.status.success() => Ok(Device::from_fd(fd)),
        _ => {
            let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let cure = if words.contains("user_allow_other") {
                "add user_allow_other to /etc/fuse.conf, or leave out --allow-other"
            } else {
                "`forebay run` needs no mount"
            };
            Err(Error::new(Code::NotPermitted, what).why(words).cure(cure))
        }
    }
}

fn receive_descriptor(socket: &std::os::unix::net::UnixStream) -> io::Result<OwnedFd> {
    let mut fds = [None];
    forebay_sys::descriptor::receive(socket.as_fd(), &mut [0], &mut fds)?;
    let [fd] = fds;
    fd.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uppermost_is_told_by_what_lies_beneath_and_not_by_the_order_of_lines() {
        let line = |number, beneath, minor| {
            let line = format!("{number} {beneath} 0:{minor} / /mnt rw - fuse.forebay /p rw");
            mounts::parse(line.as_bytes()).remove(0)
        };
        let (dead, new) = (line(70, 80, 1), line(80, 20, 2)); // 80 was put beneath 70
        for stack in [[dead.clone(), new.clone()], [new, dead]] {
            assert_eq!(uppermost(&stack).unwrap().device.1, 1);
        }
        assert_eq!(uppermost(&[]), None);
    }

    #[test]
    fn check_place_refuses_files_and_what_is_not_empty() {
        let dir = std::env::temp_dir().join(format!("forebay-place-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        assert!(check_place(&dir, "x", false).is_ok());
        let file = dir.join("f");
        std::fs::write(&file, "").unwrap();
        assert_eq!(check_place(&dir, "x", false).unwrap_err().code, Code::NotEmpty);
        assert_eq!(check_place(&file, "x", false).unwrap_err().code, Code::NotDirectory);
        assert_eq!(full_path(&dir.join("missing")).unwrap_err().code, Code::NotFound);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
