//! One target of a node: makes it, opens it again, reports its drawbacks and removes it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use forebay_data::{
    attached_tmpfs, check_capacity, default_capacity, detached_tmpfs, is_mounted_here, logout_clears,
    unmount, Bounds, Capabilities, Host, HugePages, Medium, Unmount,
};
use forebay_sys::file_system::FileSystem;
use forebay_types::limits::{CAPACITY_BYTES_MIN, HIGH_WATER_PERCENT};
use forebay_types::{Code, Error, Result, MOVER_SOCKET};
use rustix::fs::{Mode, OFlags};
use serde_json::{json, Value};

use crate::directory::{
    remove_empty_above, PoolDirectory, IDENTITY_FILE, KEPT_FILES, LOCK_FILE, LOG_FILE, NODES_FILES,
    OWNER_FILE, OWNER_FILE_NEW, SOCKET_FILE, SUPERVISOR_FILE, TARGET_FILE,
};
use crate::identity::{Backing, PoolIdentity};
use crate::pool_options::PoolOptions;

/// The directory for data in memory when the pool's directory is not on a tmpfs and the user chose no directory.
const SHARED_MEMORY: &str = "/dev/shm";

/// Opens the target of an existing pool; none when its data went with its memory.
pub(crate) fn reopen(
    dir: &PoolDirectory,
    identity: &PoolIdentity,
    options: &PoolOptions,
) -> Result<Option<OwnedFd>> {
    let path = dir.file(TARGET_FILE);
    let target_dir = match identity.backing {
        Backing::Detached => return Ok(None),
        Backing::Tmpfs if !is_mounted_here(&path)? => return Ok(None),
        Backing::Tmpfs | Backing::Directory => match open_target(dir) {
            Ok(fd) => fd,
            Err(e) if e.code == Code::NotFound => return Ok(None),
            Err(e) => return Err(e),
        },
    };
    if let Some(bytes) = options.capacity_bytes.filter(|&b| b != identity.capacity_bytes) {
        let bounds = match identity.backing {
            Backing::Tmpfs => Bounds::of(&Host::this(), identity.media, None)?,
            _ => Bounds::of(&Host::this(), identity.media, Some((target_dir.as_fd(), dir.path())))?,
        };
        check_capacity(bytes, &bounds.holding(allocated_bytes(&path)))?;
        if identity.backing == Backing::Tmpfs {
            let options = std::ffi::CString::new(format!("size={bytes}")).unwrap_or_default();
            rustix::mount::mount_remount(&path, rustix::mount::MountFlags::empty(), &options).map_err(
                |e| {
                    Error::io(
                        format!("cannot change the capacity of pool {}", dir.path().display()),
                        &e.into(),
                    )
                    .cure("leave out --capacity, or remove data first")
                },
            )?;
        }
    }
    Ok(Some(target_dir))
}

fn open_target(dir: &PoolDirectory) -> Result<OwnedFd> {
    // A symbolic link is followed: Forebay made it for a target in memory elsewhere.
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::openat(dir.fd(), TARGET_FILE, flags, Mode::empty()).map_err(|e| {
        let error = Error::io(format!("cannot open {}", dir.file(TARGET_FILE).display()), &e.into());
        match e {
            rustix::io::Errno::NOTCONN | rustix::io::Errno::STALE | rustix::io::Errno::IO => error.cure(
                format!("a dead mount was left behind: `umount -l {}`", dir.file(TARGET_FILE).display()),
            ),
            _ => error,
        }
    })
}

/// Removes an entry named `target` in a directory without a pool.
pub(crate) fn clear_stray_target(dir: &PoolDirectory) -> Result<()> {
    let path = dir.file(TARGET_FILE);
    if is_mounted_here(&path)? {
        tracing::warn!("{} was left mounted by a pool that is no more", path.display());
        unmount(&path, Unmount::WhenUnused)?;
    }
    match rustix::fs::unlinkat(dir.fd(), TARGET_FILE, rustix::fs::AtFlags::REMOVEDIR) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(rustix::io::Errno::NOTDIR) => {
            if std::fs::read_link(&path).is_ok_and(|to| !to.exists()) {
                return dir.remove_file(TARGET_FILE); // the node restarted, so the target's memory is gone
            }
        }
        Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {}
        Err(rustix::io::Errno::BUSY) => {
            return Err(Error::new(Code::Busy, format!("cannot make a pool in {}", dir.path().display()))
                .why("something else is mounted at its target")
                .cure(format!("`umount {}`", path.display())));
        }
        Err(e) => return Err(Error::io(format!("cannot remove {}", path.display()), &e.into())),
    }
    Err(Error::new(Code::NotEmpty, format!("cannot make a pool in {}", dir.path().display()))
        .why(format!("{} holds data but {IDENTITY_FILE} is missing", path.display()))
        .cure("put pool.json back, or remove the target if its data is no longer needed"))
}

pub(crate) fn make_target(
    dir: &PoolDirectory,
    medium: Medium,
    options: &PoolOptions,
) -> Result<(Backing, OwnedFd, u64)> {
    if medium == Medium::Ssd {
        return make_directory_target(dir, medium, options, None);
    }
    // A tmpfs that the pool owns is preferred: mounted if this user may mount, else detached. An embedded pool's tmpfs
    // is detached if possible, so that nothing of it can be left behind.
    let in_memory = is_tmpfs(dir.fd());
    let mut refused = Vec::new();
    let ways: [Backing; 3] = if options.embedded {
        [Backing::Detached, Backing::Tmpfs, Backing::Directory]
    } else if in_memory {
        [Backing::Tmpfs, Backing::Directory, Backing::Detached]
    } else {
        [Backing::Tmpfs, Backing::Detached, Backing::Directory]
    };
    for way in ways {
        let made = match way {
            Backing::Directory => {
                let elsewhere = (options.elsewhere_allowed && !in_memory).then(shared_memory).flatten();
                return make_directory_target(dir, medium, options, elsewhere);
            }
            Backing::Tmpfs => make_attached(dir, options),
            Backing::Detached => capacity_of_memory(options)
                .and_then(|bytes| Ok((Backing::Detached, detached_tmpfs(bytes)?, bytes))),
        };
        match made {
            Ok(made) => return Ok(made),
            // If memory lacks the capacity, the other ways lack it too.
            Err(e) if matches!(e.code, Code::NoSpace | Code::Invalid | Code::Overflow) => return Err(e),
            Err(e) => {
                tracing::info!("{e}");
                refused.push(e);
            }
        }
    }
    Err(refused.pop().unwrap_or_else(|| Error::new(Code::NotSupported, "no way to make a target is left")))
}

fn capacity_of_memory(options: &PoolOptions) -> Result<u64> {
    capacity(options, &Bounds::of(&Host::this(), Medium::Dram, None)?.promised(options.promised_bytes))
}

fn capacity(options: &PoolOptions, bounds: &Bounds) -> Result<u64> {
    let asked = options.capacity_bytes.or(options.shard_only.then_some(CAPACITY_BYTES_MIN));
    match asked {
        None => default_capacity(bounds),
        Some(bytes) => check_capacity(bytes, bounds).map(|()| bytes),
    }
}

fn make_attached(dir: &PoolDirectory, options: &PoolOptions) -> Result<(Backing, OwnedFd, u64)> {
    let bytes = capacity_of_memory(options)?;
    make_target_directory(dir)?;
    match attached_tmpfs(&dir.file(TARGET_FILE), bytes, None) {
        Ok(root) => Ok((Backing::Tmpfs, root, bytes)),
        Err(e) => {
            let _ = rustix::fs::unlinkat(dir.fd(), TARGET_FILE, rustix::fs::AtFlags::REMOVEDIR);
            Err(e)
        }
    }
}

fn make_target_directory(dir: &PoolDirectory) -> Result<()> {
    match rustix::fs::mkdirat(dir.fd(), TARGET_FILE, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(Error::io(format!("cannot make {}", dir.file(TARGET_FILE).display()), &e.into())),
    }
}

fn make_directory_target(
    dir: &PoolDirectory,
    medium: Medium,
    options: &PoolOptions,
    elsewhere: Option<PathBuf>,
) -> Result<(Backing, OwnedFd, u64)> {
    match &elsewhere {
        None => make_target_directory(dir)?,
        Some(place) => {
            let what = || format!("cannot make {}", place.display());
            rustix::fs::mkdir(place, Mode::RWXU).map_err(|e| Error::io(what(), &e.into()))?;
            rustix::fs::symlinkat(place, dir.fd(), TARGET_FILE).map_err(|e| {
                let _ = rustix::fs::rmdir(place);
                Error::io(what(), &e.into())
            })?;
        }
    }
    let made = open_target(dir).and_then(|target| {
        let at = Some((target.as_fd(), dir.path()));
        let bounds = Bounds::of(&Host::this(), medium, at)?.promised(options.promised_bytes);
        let bytes = capacity(options, &bounds)?;
        Ok((Backing::Directory, target, bytes))
    });
    if made.is_err() {
        let _ = remove_target(dir, Backing::Directory);
    }
    made
}

/// A name for a new directory in the node's shared memory, if that is a tmpfs that this user may write.
fn shared_memory() -> Option<PathBuf> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(SHARED_MEMORY, flags, Mode::empty()).ok()?;
    let writable = rustix::fs::access(SHARED_MEMORY, rustix::fs::Access::WRITE_OK).is_ok();
    if !writable || !is_tmpfs(fd.as_fd()) {
        return None;
    }
    let bytes = crate::identity::random_bytes().ok()?;
    let name: String = bytes[..8].iter().map(|b| format!("{b:02x}")).collect();
    let me = rustix::process::geteuid().as_raw();
    Some(PathBuf::from(format!("{SHARED_MEMORY}/forebay-{me}-{name}")))
}

pub(crate) fn is_tmpfs(directory: std::os::fd::BorrowedFd<'_>) -> bool {
    FileSystem::of(directory).is_ok_and(|kind| kind == FileSystem::TMPFS)
}

/// Drawbacks of the pool's location, in addition to those of its file system.
fn placement_costs(
    host: &Host,
    uid: u32,
    identity: &PoolIdentity,
    places: &[PathBuf],
    memory: bool,
    fs_type: &str,
) -> Vec<String> {
    let mut costs = Vec::new();
    if identity.media == Medium::Dram && !memory {
        costs.push(format!(
            "not in memory: this user may not mount a tmpfs here, and the directory is on {fs_type}; give one on a tmpfs \
             (--path /dev/shm/NAME), or run as a user who may mount"
        ));
    }
    if identity.backing == Backing::Detached && !identity.embedded {
        costs.push("a private tmpfs: its data goes with the pool, also by `down --keep`".to_owned());
    }
    // An embedded pool ends with its job, so a logout does not matter to it.
    if let (false, Some(reason)) =
        (identity.embedded, places.iter().find_map(|place| logout_clears(host, place, uid)))
    {
        costs.push(format!("{reason}, or name another directory with --path"));
    }
    costs
}

/// What it costs that a disk has other data.
fn cost_of_fullness(blocks: u64, free_blocks: u64) -> Option<String> {
    let used_percent = blocks.saturating_sub(free_blocks).saturating_mul(100).checked_div(blocks)?;
    (used_percent >= HIGH_WATER_PERCENT).then(|| {
        format!(
            "the disk is {used_percent} % full: in front of a backing store files leave the pool as soon as the store has them, \
             and creating one may wait for space; remove data from the disk, or start the pool on another one"
        )
    })
}

pub(crate) fn costs_of(
    dir: &PoolDirectory,
    identity: &PoolIdentity,
    target_dir: &OwnedFd,
) -> Result<(Vec<String>, Value)> {
    let capabilities = Capabilities::of(target_dir)?;
    let real = |path: PathBuf| path.canonicalize().unwrap_or(path);
    // The sockets' directory matters as much as that of the data.
    let places = [real(dir.path().to_owned()), real(dir.file(TARGET_FILE))];
    let uid = rustix::process::geteuid().as_raw();
    let memory = is_tmpfs(target_dir.as_fd());
    let mut costs = placement_costs(&Host::this(), uid, identity, &places, memory, &capabilities.fs_type);
    costs.extend(capabilities.costs());
    if identity.backing == Backing::Directory {
        let space = rustix::fs::fstatvfs(target_dir).ok();
        costs.extend(space.and_then(|space| cost_of_fullness(space.f_blocks, space.f_bavail)));
    }
    let c = &capabilities;
    let value = json!({
        "fs_type": c.fs_type,
        "huge_pages": matches!(c.huge_pages, HugePages::On | HugePages::Always),
        "inode64": c.inode64,
        "o_tmpfile": c.o_tmpfile,
        "fallocate": c.fallocate,
        "punch_hole": c.punch_hole,
        "user_xattrs": c.user_xattrs,
        "exec": c.exec,
        "leases": c.has_leases(),
    });
    Ok((costs, value))
}

/// Bytes allocated below `path`.
fn allocated_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(path) else { return 0 };
    entries
        .flatten()
        .filter_map(|entry| entry.metadata().ok().map(|m| (entry, m)))
        .map(|(entry, m)| m.blocks() * 512 + if m.is_dir() { allocated_bytes(&entry.path()) } else { 0 })
        .sum()
}

pub(crate) fn remove_target(dir: &PoolDirectory, backing: Backing) -> Result<()> {
    let path = dir.file(TARGET_FILE);
    let what = || format!("cannot remove {}", path.display());
    match backing {
        Backing::Detached => return Ok(()), // the kernel frees it with its last descriptor
        Backing::Tmpfs => {
            // Programs may have files open in it: the mount is detached now, and its memory is freed when they have
            // closed them.
            if is_mounted_here(&path)? {
                unmount(&path, Unmount::WhenUnused)?;
            }
        }
        Backing::Directory => {
            if let Ok(place) = std::fs::read_link(&path) {
                remove_tree(&place)?;
                return dir.remove_file(TARGET_FILE);
            }
        }
    }
    match backing {
        Backing::Directory => remove_tree(&path),
        _ => match rustix::fs::unlinkat(dir.fd(), TARGET_FILE, rustix::fs::AtFlags::REMOVEDIR) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(Error::io(what(), &e.into())),
        },
    }
}

pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), &e))
        }
        _ => Ok(()),
    }
}

/// Removes a directory that was made for a pool, with the pool's files.
pub(crate) fn remove_directory(dir: &PoolDirectory) {
    let own = [SOCKET_FILE, SUPERVISOR_FILE, IDENTITY_FILE, "pool.json.new", LOG_FILE, LOCK_FILE];
    let of_mover = KEPT_FILES.into_iter().chain([MOVER_SOCKET]);
    for name in own.into_iter().chain(NODES_FILES).chain([OWNER_FILE, OWNER_FILE_NEW]).chain(of_mover) {
        let _ = dir.remove_file(name);
    }
    let _ = rustix::fs::rmdir(dir.path());
    remove_empty_above(dir.path());
}

/// Opens the target of a pool that is down, if its data exist.
pub(crate) fn open_target_at_rest(dir: &PoolDirectory, identity: &PoolIdentity) -> Result<OwnedFd> {
    let gone = || {
        Error::new(Code::NotFound, format!("cannot look into pool {}", dir.path().display()))
            .why("it is not up, and its data was in memory and went with it")
    };
    match identity.backing {
        Backing::Detached => Err(gone()),
        Backing::Tmpfs if !is_mounted_here(&dir.file(TARGET_FILE))? => Err(gone()),
        _ => open_target(dir),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_of_fullness_is_told_from_the_mark_on_at_which_calls_wait_for_space() {
        assert_eq!((cost_of_fullness(1000, 101), cost_of_fullness(0, 0)), (None, None));
        let told = cost_of_fullness(1000, 100).unwrap();
        assert!(told.contains("90 % full") && told.contains("another one"), "{told}");
    }

    #[test]
    fn placement_in_what_a_logout_clears_is_told_with_what_to_do() {
        let root = std::env::temp_dir().join(format!("forebay-target-logout-{}", std::process::id()));
        std::fs::create_dir_all(root.join("run/systemd/users")).unwrap();
        let host = Host::at(&root);
        let mut identity = PoolIdentity::new(Medium::Dram, Backing::Directory, 1 << 30).unwrap();
        let shm = [PathBuf::from("/dev/shm/pool"), PathBuf::from("/dev/shm/pool/target")];
        let said = placement_costs(&host, 1000, &identity, &shm, true, "tmpfs");
        let elsewhere = placement_costs(&host, 1000, &identity, &["/tmp/pool".into()], true, "tmpfs");
        identity.embedded = true;
        let embedded = placement_costs(&host, 1000, &identity, &shm, true, "tmpfs");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(said.len(), 1, "{said:?}");
        for word in ["RemoveIPC", "/dev/shm/pool", "enable-linger", "--path"] {
            assert!(said[0].contains(word), "{word} is not said: {said:?}");
        }
        assert!(elsewhere.is_empty() && embedded.is_empty());
    }

    #[test]
    fn placement_of_memory_on_a_disk_is_told() {
        let host = Host::this();
        let mut identity = PoolIdentity::new(Medium::Dram, Backing::Directory, 1 << 30).unwrap();
        let said = placement_costs(&host, 0, &identity, &[], false, "ext4");
        assert!(said[0].contains("ext4") && said[0].contains("/dev/shm"), "{said:?}");
        identity.media = Medium::Ssd;
        assert!(placement_costs(&host, 0, &identity, &[], false, "ext4").is_empty());
    }
}
