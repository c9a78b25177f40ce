//! A pool's directory: its files, its permissions, and its default path.
//!
//! Files in the directory are opened relative to one descriptor, so that a directory that was moved or replaced
//! meanwhile is not mistaken for the pool. The directory belongs to the pool's user and is closed to all others. A
//! symbolic link in place of a default directory is refused. The path is short enough for the addresses of the pool's
//! sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use forebay_types::{
    Code, Error, Result, MODEL_FILE, MODEL_FILE_NEW, MOVER_SOCKET, STORES_MARK, TASKS_FILE, TASKS_FILE_NEW,
};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};

/// Locked by the supervisor and its worker while the pool is up; its text is the supervisor's process number.
pub const LOCK_FILE: &str = "lock";
/// Clients attach here.
pub const SOCKET_FILE: &str = "socket";
/// The supervisor answers here.
pub const SUPERVISOR_FILE: &str = "supervisor";
/// The log of supervisor and worker.
pub const LOG_FILE: &str = "log";
/// The target: data, anchors, shard.
pub const TARGET_FILE: &str = "target";

/// In a target's directory `shard`: the boot of the node during which the pool ran last.
pub(crate) const BOOT_FILE: &str = "boot";

/// The pool's identity.
pub const IDENTITY_FILE: &str = "pool.json";
/// The link to the pool's mount, while it is being replaced.
pub(crate) const MOUNT_LINK_NEW: &str = "mounted.new";

/// Mirrors of the directories that programs watch.
pub(crate) const MIRRORS_DIRECTORY: &str = "watches";
/// Where `forebay run` mounts a pool that emulates a medium and has no mount.
pub const RUN_MOUNT: &str = "mnt";

/// The pool file of a node that received it in a bundle ([`crate::bundle`]).
pub const NODES_FILE: &str = "nodes.toml";
/// The bundle's secret, under the name that the pool file gives it by default.
pub const SECRET_FILE: &str = "nodes.key";
pub(crate) const NODES_FILE_NEW: &str = "nodes.toml.new";
pub(crate) const SECRET_FILE_NEW: &str = "nodes.key.new";
/// The data ID with which this node first met each other node.
pub(crate) const MET_FILE: &str = "met.json";
pub(crate) const MET_FILE_NEW: &str = "met.json.new";
/// In the directory of each target after a node's first: the pool that owns the target.
pub(crate) const OWNER_FILE: &str = "target.json";
pub(crate) const OWNER_FILE_NEW: &str = "target.json.new";
/// Those of these files that a pool removes only together with its data.
pub(crate) const NODES_FILES: [&str; 6] =
    [NODES_FILE, SECRET_FILE, NODES_FILE_NEW, SECRET_FILE_NEW, MET_FILE, MET_FILE_NEW];

/// What a pool with backing stores, or with a calibration, leaves beside its data, and removes together with them.
pub(crate) const KEPT_FILES: [&str; 5] =
    [STORES_MARK, TASKS_FILE, TASKS_FILE_NEW, MODEL_FILE, MODEL_FILE_NEW];

/// Only the pool's user may access its files.
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);

/// Maximum bytes of a pool directory's path: a socket's address holds 107, which include the longest socket's name.
const PATH_BYTES_MAX: usize = 107 - "/supervisor".len();

/// How often the directory of a new pool is made again because another pool's end removed it, or the one above it,
/// meanwhile.
const MAKE_ATTEMPTS: usize = 100;

/// Adds a cure to the error of a full medium of a pool's directory.
pub(crate) fn or_elsewhere(error: Error) -> Error {
    match error.code {
        Code::NoSpace => error.cure(format!(
            "free some space there, or make the pool elsewhere: --path DIR, or {BASE_VARIABLE} for pools without a path"
        )),
        _ => error,
    }
}

/// Every name that a pool's directory may hold. Any other entry is a file that does not belong to a pool.
const NAMES: [&str; 23] = [
    LOCK_FILE,
    SOCKET_FILE,
    SUPERVISOR_FILE,
    LOG_FILE,
    TARGET_FILE,
    IDENTITY_FILE,
    "pool.json.new",
    forebay_types::MOUNT_LINK,
    MOUNT_LINK_NEW,
    NODES_FILE,
    SECRET_FILE,
    NODES_FILE_NEW,
    SECRET_FILE_NEW,
    MET_FILE,
    MET_FILE_NEW,
    OWNER_FILE,
    OWNER_FILE_NEW,
    MIRRORS_DIRECTORY,
    RUN_MOUNT,
    MOVER_SOCKET,
    STORES_MARK,
    TASKS_FILE,
    TASKS_FILE_NEW,
];

/// The error for a pool that is not there. That of a job of Slurm cannot be made by hand: its prolog does it.
fn missing(what: String, path: &Path) -> Error {
    let error = Error::new(Code::NotFound, what);
    let of_job = std::env::var("FOREBAY_JOB").ok();
    let of_job =
        of_job.filter(|_| std::env::var_os("FOREBAY_POOL").is_some_and(|pool| path == Path::new(&pool)));
    match of_job.as_deref().and_then(|job| job.split('.').next()) {
        Some(job) => error
            .why(format!("there is no such directory: slurmd has run no prolog of job {job} on this node, or the pool has ended"))
            .cure(format!(
                "`scontrol requeue {job}`; if it comes back to this node, exclude that: `scontrol update JobId={job} ExcNodeList=NODE`"
            )),
        None => error
            .why("there is no such directory")
            .cure(format!("`forebay up --path {}` makes a pool there", path.display())),
    }
}

/// A pool's directory, open.
#[derive(Debug)]
pub struct PoolDirectory {
    path: PathBuf,
    fd: OwnedFd,
}

impl PoolDirectory {
    /// Opens the directory of an existing pool.
    pub fn open(path: &Path) -> Result<PoolDirectory> {
        let what = || format!("cannot open pool {}", path.display());
        let fd = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| match e {
                rustix::io::Errno::NOENT => missing(what(), path),
                rustix::io::Errno::NOTDIR => {
                    Error::new(Code::NotDirectory, what()).why("it is not a directory")
                }
                e => Error::io(what(), &e.into()),
            })?;
        let path = std::path::absolute(path).map_err(|e| Error::io(what(), &e))?;
        Ok(PoolDirectory { path, fd })
    }

    /// Opens the directory for a pool, and makes it and its parents if they are missing; true when it was made. Refuses
    /// a directory of another user and one with entries that belong to no pool.
    pub fn make(path: &Path) -> Result<(PoolDirectory, bool)> {
        let what = || format!("cannot make a pool in {}", path.display());
        let denied = |e: &std::io::Error| {
            let error = Error::io(what(), e);
            match error.code {
                Code::AccessDenied | Code::NotPermitted | Code::ReadOnly => {
                    error.cure("name a directory that you may write, with --path DIR")
                }
                _ => or_elsewhere(error),
            }
        };
        if path.as_os_str().as_bytes().len() > PATH_BYTES_MAX {
            return Err(Error::new(Code::NameTooLong, what())
                .why(format!("its path exceeds {PATH_BYTES_MAX} bytes, and addresses of sockets are short"))
                .cure("name a shorter path, such as one under /tmp"));
        }
        // Messages between processes and files of the pool contain the path, and all of them are JSON.
        if path.to_str().is_none() {
            return Err(Error::new(Code::Invalid, what())
                .why("its path is not UTF-8")
                .cure("name a directory whose path is, with --path DIR"));
        }
        let mut attempts = 0;
        let (dir, made) = loop {
            match path.parent() {
                Some(parent) if parent == user_directory_path() => drop(user_directory()?),
                Some(parent) => std::fs::create_dir_all(parent).map_err(|e| denied(&e))?,
                None => {}
            }
            let made = match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
                Ok(()) => Ok(true),
                Err(rustix::io::Errno::EXIST) => Ok(false),
                Err(e) => Err(denied(&e.into())),
            };
            attempts += 1;
            match made.and_then(|made| Ok((PoolDirectory::open(path)?, made))) {
                // Another pool's end removed it, or the one above it, between two steps.
                Err(e) if e.code == Code::NotFound && attempts < MAKE_ATTEMPTS => {}
                other => break other?,
            }
        };
        dir.check_owner()?;
        if !made {
            dir.check_content()?;
            // A directory that the user made beforehand is usually readable for others.
            rustix::fs::fchmod(&dir.fd, Mode::from_raw_mode(0o700)).map_err(|e| denied(&e.into()))?;
        }
        rustix::fs::accessat(
            &dir.fd,
            ".",
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
            AtFlags::EACCESS,
        )
        .map_err(|e| denied(&e.into()))?;
        Ok((dir, made))
    }

    fn check_owner(&self) -> Result<()> {
        let stat = rustix::fs::fstat(&self.fd)
            .map_err(|e| Error::io(format!("cannot look at {}", self.path.display()), &e.into()))?;
        let me = rustix::process::geteuid().as_raw();
        if stat.st_uid != me {
            return Err(Error::new(
                Code::AccessDenied,
                format!("cannot use pool directory {}", self.path.display()),
            )
            .why(format!("it belongs to user {}, and a pool is its user's own", stat.st_uid))
            .cure("name a directory of yours with --path DIR"));
        }
        Ok(())
    }

    fn check_content(&self) -> Result<()> {
        let what = || format!("cannot make a pool in {}", self.path.display());
        let entries = rustix::fs::Dir::read_from(&self.fd).map_err(|e| Error::io(what(), &e.into()))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(what(), &e.into()))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." && !NAMES.iter().any(|n| n.as_bytes() == name) {
                let name = String::from_utf8_lossy(name).into_owned();
                return Err(Error::new(Code::NotEmpty, what())
                    .why(format!("it holds other files ({name})"))
                    .cure(format!(
                        "name an empty or a new directory, such as {}/pool",
                        self.path.display()
                    )));
            }
        }
        Ok(())
    }

    /// The directory's absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it, for messages.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The directory's descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens or makes a file in the directory that only the pool's user may access.
    pub fn open_file(&self, name: &str, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(&self.fd, name, flags, FILE_MODE).map_err(|e| {
            or_elsewhere(Error::io(format!("cannot open {}", self.file(name).display()), &e.into()))
        })
    }

    /// Removes an empty directory; a missing one is no error, nor is one that cannot be removed.
    pub(crate) fn remove_directory(&self, name: &str) {
        let _ = rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR);
    }

    /// Removes a file; a missing file is no error.
    pub fn remove_file(&self, name: &str) -> Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(Error::io(format!("cannot remove {}", self.file(name).display()), &e.into())),
        }
    }

    /// Makes a listening socket, and replaces the socket of a dead pool.
    pub fn listen(&self, name: &str) -> Result<UnixListener> {
        self.remove_file(name)?;
        let what = || format!("cannot make socket {}", self.file(name).display());
        let listener =
            UnixListener::bind(self.file(name)).map_err(|e| or_elsewhere(Error::io(what(), &e)))?;
        rustix::fs::chmodat(&self.fd, name, FILE_MODE, AtFlags::empty())
            .map_err(|e| Error::io(what(), &e.into()))?;
        Ok(listener)
    }

    /// Connects to a socket of the pool. A socket that is missing or refuses means that the pool is not up:
    /// [`Code::NotFound`].
    pub fn connect(&self, name: &str) -> Result<UnixStream> {
        UnixStream::connect(self.file(name)).map_err(|e| match e.raw_os_error() {
            Some(libc::ENOENT) | Some(libc::ECONNREFUSED) => self.not_up(),
            _ => Error::io(format!("cannot connect to {}", self.file(name).display()), &e),
        })
    }

    /// The error for a pool that is not up.
    pub fn not_up(&self) -> Error {
        Error::new(Code::NotFound, format!("cannot reach pool {}", self.path.display()))
            .why("it is not up")
            .cure(format!("`forebay up --path {}` starts it", self.path.display()))
    }

    /// Takes the pool's lock and writes this process's number into it. [`Code::Busy`] when the pool is up.
    /// [`Code::Stale`] when lock or directory were removed meanwhile: the caller makes them again.
    pub fn lock(&self) -> Result<OwnedFd> {
        let fd = self.open_file(LOCK_FILE, OFlags::RDWR | OFlags::CREATE)?;
        let what = || format!("cannot lock {}", self.file(LOCK_FILE).display());
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(self.already_up()),
            Err(e) => return Err(Error::io(what(), &e.into())),
        }
        let same = |a: &rustix::fs::Stat, b: &rustix::fs::Stat| a.st_ino == b.st_ino && a.st_dev == b.st_dev;
        match (rustix::fs::fstat(&fd), rustix::fs::stat(self.file(LOCK_FILE))) {
            (Ok(held), Ok(seen)) if same(&held, &seen) => {}
            _ => return Err(Error::new(Code::Stale, what()).why("it was removed meanwhile")),
        }
        let text = format!("{}\n", rustix::process::getpid().as_raw_nonzero());
        rustix::fs::ftruncate(&fd, 0).and_then(|()| rustix::io::pwrite(&fd, text.as_bytes(), 0)).map_err(
            |e| {
                let _ = self.remove_file(LOCK_FILE); // this process holds the lock and so may remove it
                or_elsewhere(Error::io(what(), &e.into()))
            },
        )?;
        Ok(fd)
    }

    /// True while some process holds the lock. Fails if that cannot be found out.
    pub fn is_locked(&self) -> Result<bool> {
        let file = match self.open_file(LOCK_FILE, OFlags::RDONLY) {
            Err(e) if e.code == Code::NotFound => return Ok(false),
            file => file?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
            Err(e) => Err(Error::io(format!("cannot lock {}", self.file(LOCK_FILE).display()), &e.into())),
        }
    }

    /// The number of the process that holds, or last held, the lock.
    pub fn lock_holder(&self) -> Option<i32> {
        let fd = self.open_file(LOCK_FILE, OFlags::RDONLY).ok()?;
        let mut buffer = [0u8; 32];
        let n = rustix::io::pread(&fd, &mut buffer, 0).ok()?;
        std::str::from_utf8(&buffer[..n]).ok()?.trim().parse().ok().filter(|&pid| pid > 0)
    }

    fn already_up(&self) -> Error {
        let who = self.lock_holder().map_or(String::new(), |pid| format!(" (pid {pid})"));
        Error::new(Code::Busy, format!("cannot start pool {}", self.path.display()))
            .why(format!("it is already up{who}"))
            .cure(format!(
                "use it with --pool {0}, or stop it first: `forebay down --pool {0}`",
                self.path.display()
            ))
    }
}

/// The environment variable for a directory to use instead of `/tmp`, on nodes whose `/tmp` is not local to them.
pub const BASE_VARIABLE: &str = "FOREBAY_TMPDIR";

/// The path of [`user_directory`], whether or not it exists.
pub(crate) fn user_directory_path() -> PathBuf {
    let me = rustix::process::geteuid().as_raw();
    let base = std::env::var_os(BASE_VARIABLE).filter(|v| !v.is_empty()).map_or("/tmp".into(), PathBuf::from);
    base.join(format!("forebay-{me}"))
}

/// The directory for pools without a path: one per user, closed to others. It is in `/tmp`, or in the directory that
/// [`BASE_VARIABLE`] names. XDG_RUNTIME_DIR is not used: a logout clears it although the pool should outlive the login,
/// and batch systems set it on nodes that lack the directory.
pub fn user_directory() -> Result<PathBuf> {
    let path = absolute_user_directory_path()?;
    let what = || format!("cannot use {}", path.display());
    let mut attempts = 0;
    loop {
        match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(Error::io(what(), &e.into()).cure("name a directory with --pool DIR")),
        }
        attempts += 1;
        // The last pool in it may have removed it at its end.
        if is_safe_user_directory(&path)? || attempts == MAKE_ATTEMPTS {
            return Ok(path);
        }
    }
}

fn absolute_user_directory_path() -> Result<PathBuf> {
    let path = user_directory_path();
    if !path.is_absolute() {
        return Err(Error::new(Code::Invalid, format!("cannot keep pools in {}", path.display()))
            .why(format!("{BASE_VARIABLE} is not an absolute path"))
            .cure(format!("unset {BASE_VARIABLE}, or make it one such as /local/tmp")));
    }
    Ok(path)
}

/// Refuses a user directory that other users may have made or may change; false when it does not exist.
fn is_safe_user_directory(path: &Path) -> Result<bool> {
    let me = rustix::process::geteuid().as_raw();
    let what = || format!("cannot use {}", path.display());
    let stat = match rustix::fs::lstat(path) {
        Err(rustix::io::Errno::NOENT) => return Ok(false),
        other => other.map_err(|e| Error::io(what(), &e.into()))?,
    };
    let unsafe_because = |why: String| {
        Err(Error::new(Code::AccessDenied, what())
            .why(why)
            .cure("remove it, or name a directory of your own with --pool DIR"))
    };
    if stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
        return unsafe_because("it is not a directory of yours but a link or a file".into());
    }
    if stat.st_uid != me {
        return unsafe_because(format!("it belongs to user {}", stat.st_uid));
    }
    // It is open to others, or was made under a umask that closed it to its owner.
    if stat.st_mode & 0o777 != 0o700 {
        rustix::fs::chmod(path, Mode::from_raw_mode(0o700)).map_err(|e| Error::io(what(), &e.into()))?;
    }
    Ok(true)
}

/// The directory for pools of `forebay run` on a disk: one per user, in the directory for temporary files, where batch
/// systems place a node's disk.
pub fn ssd_directory() -> Result<PathBuf> {
    let me = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(ssd_directory_name());
    match rustix::fs::mkdir(&path, Mode::RWXU) {
        Ok(()) => {
            // The umask may have cleared bits.
            rustix::fs::chmod(&path, Mode::RWXU)
                .map_err(|e| Error::io(format!("cannot make {}", path.display()), &e.into()))?;
            return Ok(path);
        }
        Err(rustix::io::Errno::EXIST) => {}
        Err(e) => {
            return Err(Error::io(format!("cannot make {}", path.display()), &e.into())
                .cure("set TMPDIR to a directory on the disk that you may write"));
        }
    }
    let stat = rustix::fs::lstat(&path)
        .map_err(|e| Error::io(format!("cannot use {}", path.display()), &e.into()))?;
    if stat.st_uid != me || stat.st_mode & libc::S_IFMT != libc::S_IFDIR || stat.st_mode & 0o077 != 0 {
        return Err(Error::new(Code::AccessDenied, format!("cannot use {}", path.display()))
            .why("it is not a directory of yours alone")
            .cure("remove it, or set TMPDIR to another directory"));
    }
    Ok(path)
}

fn ssd_directory_name() -> String {
    format!("forebay-ssd-{}", rustix::process::geteuid().as_raw())
}

/// Removes the directory above `path` if it is [`user_directory`] or [`ssd_directory`] and empty, so that the last pool
/// leaves nothing behind. A process that makes a pool in it makes the directory again first.
pub fn remove_empty_above(path: &Path) {
    let Some(above) = path.parent() else { return };
    if above == user_directory_path() || above.ends_with(ssd_directory_name()) {
        let _ = rustix::fs::rmdir(above);
    }
}

/// True for a pool that has met another of its nodes, so that programs on that node can see it.
pub fn has_met_others(path: &Path) -> bool {
    path.join(MET_FILE).is_file()
}

/// The path of the pool that `forebay up` makes, and that all other verbs use, when none is named. Makes nothing.
pub fn default_pool() -> Result<PathBuf> {
    let above = absolute_user_directory_path()?;
    is_safe_user_directory(&above)?;
    Ok(above.join("pool"))
}
