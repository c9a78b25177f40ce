//! Mounts of Forebay's own tmpfs, made with and without the right to mount: what works in them, and that they vanish.
//!
//! When run as root, each test for an ordinary user runs itself again as one. When run as an ordinary user, tests for
//! root are skipped. All mounts are made in a mount namespace of the test or in none.

#[path = "../src/scratch.rs"]
mod scratch;
#[path = "../src/testing.rs"]
mod testing;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_data::{
    attached_tmpfs, detached_tmpfs, is_mounted_here, lease_fault, unmount, Access, BackingName, Capabilities,
    HugePages, Media, Target, Unmount,
};
use forebay_types::{Code, Ino};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{inotify, FallocateFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use scratch::Scratch;
use testing::{in_mount_namespace, when_free};

const BYTES: u64 = 64 << 20;
const INO: Ino = Ino(0x1_0000_0000_00ab);
const PLAIN_USER: u32 = 1000;
const AGAIN: &str = "FOREBAY_DATA_TEST_AS_PLAIN_USER";
const HOLD: &str = "FOREBAY_DATA_TEST_HOLD";
/// Longer than any machine needs for an event that should happen at once.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Unmounts any mount.
fn unmount_any(path: &Path) {
    use rustix::{io::Errno, mount::UnmountFlags};
    when_free(|| rustix::mount::unmount(path, UnmountFlags::empty()).map_err(|e| e == Errno::BUSY));
}

/// Unmounts a mount of Forebay.
fn unmount_ours(path: &Path) {
    when_free(|| unmount(path, Unmount::Now).map_err(|e| e.code == Code::Busy));
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// This test binary, running one test. As an ordinary user if this process is root.
fn this_test(name: &str) -> Command {
    // Run by /proc's link, as an ordinary user may not reach the path.
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", name, "--nocapture"]).env(AGAIN, "1");
    if is_root() {
        command.uid(PLAIN_USER).gid(PLAIN_USER);
    }
    command
}

/// Runs `body` as an ordinary user.
fn as_plain_user(name: &str, body: impl FnOnce()) {
    if !is_root() {
        body();
        return;
    }
    assert!(std::env::var_os(AGAIN).is_none(), "this process should not be root any more");
    let status = this_test(name).status().unwrap();
    assert!(status.success(), "as a plain user: {status}");
}

/// Makes a detached tmpfs, or prints why it cannot be made.
fn detached_or_skip() -> Option<OwnedFd> {
    detached_tmpfs(BYTES).map_err(|e| println!("skipped: {e}")).ok()
}

/// What processes do with a target, through its descriptor alone.
fn use_it(root: &OwnedFd) {
    let stat = rustix::fs::fstat(root).unwrap();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    assert_eq!((stat.st_mode & 0o7777, stat.st_uid, stat.st_gid), (0o700, uid, gid));
    let space = rustix::fs::fstatvfs(root).unwrap();
    assert_eq!(space.f_blocks * space.f_frsize, BYTES);

    Target::format(root).unwrap();
    let target = Target::open(root, 7).unwrap();
    target.create(INO, 0, 0).unwrap();
    let file = target.open(INO, 0, 0, Access::ReadWrite).unwrap();
    let stat = rustix::fs::fstat(&file).unwrap();
    assert_eq!((stat.st_uid, stat.st_gid), (uid, gid));
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4 << 20).unwrap();
    assert!(target.stat(INO, 0, 0).unwrap().allocated_bytes >= 4 << 20);
    // SAFETY: a new mapping of a file that no other code truncates. It is used within its length and then removed.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let at =
            rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, &file, 0).unwrap();
        at.cast::<u8>().write(b'm');
        rustix::mm::munmap(at, 4096).unwrap();
    }
    let mut byte = [0];
    assert_eq!(rustix::io::pread(&file, &mut byte, 0).unwrap(), 1);
    assert_eq!(byte, *b"m");

    let name = BackingName::new(INO, 0, 0);
    rustix::fs::renameat(root, name.as_c_str(), root, c"data/moved").unwrap();
    rustix::fs::renameat(root, c"data/moved", root, name.as_c_str()).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    assert_eq!(
        BackingName::parse(link.as_os_str().as_encoded_bytes()),
        Some((INO, 0, 0)),
        "{}",
        link.display()
    );
    target.remove(INO, 0, 0).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    assert_eq!(
        BackingName::parse(link.as_os_str().as_encoded_bytes()),
        Some((INO, 0, 0)),
        "{}",
        link.display()
    );
    assert_eq!(lease_fault(root), None);

    let program = format!("/proc/self/fd/{}/data/true", root.as_raw_fd());
    std::fs::copy("/bin/true", &program).unwrap();
    let status = loop {
        match Command::new(&program).status() {
            // Another test's child has a copy of the descriptor that wrote the program, until its exec.
            Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            other => break other.unwrap(),
        }
    };
    assert!(status.success(), "a program in it does not run");
}

fn capabilities_of_our_own(root: &OwnedFd) -> Capabilities {
    let found = Capabilities::of(root).unwrap();
    assert_eq!(found.fs_type, "tmpfs");
    assert!(
        found.o_tmpfile && found.fallocate && found.punch_hole && found.exec && found.has_leases(),
        "{found:?}"
    );
    let shmem =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    if shmem.is_empty() || shmem.contains("[deny]") {
        println!("huge pages not looked at: this kernel has none for shared memory");
    } else {
        assert_eq!(found.huge_pages, HugePages::On, "{found:?}");
        assert_eq!(found.costs(), Vec::<String>::new());
    }
    found
}

/// Detects that a file system is gone, with a watch on it that does not keep it alive.
struct Watch(OwnedFd);

impl Watch {
    fn on(path: &str) -> Watch {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&inotify, path, inotify::WatchFlags::DELETE_SELF).unwrap();
        Watch(inotify)
    }

    /// True if the file system vanished within `timeout`.
    fn gone_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let mut space = [MaybeUninit::uninit(); 512];
            let mut reader = inotify::Reader::new(&self.0, &mut space);
            while let Ok(event) = reader.next() {
                if event.events().contains(inotify::ReadFlags::UNMOUNT) {
                    return true;
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut poll = [PollFd::new(&self.0, PollFlags::IN)];
            let timeout = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
            let _ = rustix::event::poll(&mut poll, Some(&timeout));
        }
    }
}

/// Gives the tmpfs other sizes, as volumes take a part of its capacity.
fn resize_it(root: &OwnedFd) {
    Target::format(root).unwrap();
    let target = Target::open(root, 7).unwrap();
    target.create(INO, 0, 0).unwrap();
    let file = target.open(INO, 0, 0, Access::ReadWrite).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES / 4).unwrap();
    let before = target.space().unwrap();
    target.set_volume_bytes(BYTES / 2, BYTES / 2).unwrap();
    let space = target.space().unwrap();
    assert_eq!(space.total_bytes, BYTES, "volumes count");
    assert_eq!(target.space_for_files().unwrap().total_bytes, BYTES / 2);
    assert_eq!(before.free_bytes - space.free_bytes, BYTES / 2);
    let too_much = rustix::fs::fallocate(&file, FallocateFlags::empty(), BYTES / 4, BYTES / 2);
    assert_eq!(too_much, Err(rustix::io::Errno::NOSPC), "files have the rest alone");
    assert_eq!(target.set_volume_bytes(BYTES / 8, BYTES - BYTES / 8), Err(Code::NoSpace), "files are there");
    assert_eq!(target.space().unwrap(), space, "nothing has changed");
    target.set_volume_bytes(BYTES, 0).unwrap();
    assert_eq!(target.space().unwrap(), before);
    assert_eq!(target.stat(INO, 0, 0).unwrap().allocated_bytes, BYTES / 4);
}

#[test]
fn detached_tmpfs_takes_other_sizes() {
    if let Some(root) = detached_or_skip() {
        resize_it(&root);
    }
}

#[test]
fn detached_tmpfs_of_a_plain_user_takes_other_sizes() {
    as_plain_user("detached_tmpfs_of_a_plain_user_takes_other_sizes", || {
        if let Some(root) = detached_or_skip() {
            resize_it(&root);
        }
    });
}

#[test]
fn directory_that_is_no_mount_of_ours_takes_no_size() {
    let scratch = Scratch::new();
    let directory = File::open(scratch.path()).unwrap();
    Target::format(&directory).unwrap();
    let refused = Target::open(&directory, 7).unwrap().set_volume_bytes(BYTES, BYTES);
    assert_eq!(refused, Err(Code::NotSupported));
}

#[test]
fn detached_tmpfs_works_through_its_descriptor() {
    let Some(root) = detached_or_skip() else { return };
    use_it(&root);
    capabilities_of_our_own(&root);
}

#[test]
fn detached_tmpfs_of_a_plain_user_works_through_its_descriptor() {
    as_plain_user("detached_tmpfs_of_a_plain_user_works_through_its_descriptor", || {
        let Some(root) = detached_or_skip() else { return };
        use_it(&root);
        capabilities_of_our_own(&root);
    });
}

fn vanishes_when_closed() {
    let Some(root) = detached_or_skip() else { return };
    let watch = Watch::on(&format!("/proc/self/fd/{}", root.as_raw_fd()));
    let file =
        rustix::fs::openat(&root, c"file", OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC, Mode::RWXU)
            .unwrap();
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let device = rustix::fs::fstat(&root).unwrap().st_dev;
    let device = format!(" {}:{} ", rustix::fs::major(device), rustix::fs::minor(device));
    assert!(!mounts.contains(&device), "{device} in {mounts}");
    drop(root);
    assert!(!watch.gone_within(Duration::from_millis(50)), "it went while a file in it was open");
    assert_eq!(rustix::io::pwrite(&file, b"still here", 0).unwrap(), 10);
    drop(file);
    assert!(watch.gone_within(TIMEOUT), "it stays though nobody has it open");
}

#[test]
fn detached_tmpfs_last_descriptor_closed_vanishes() {
    vanishes_when_closed();
}

#[test]
fn detached_tmpfs_of_a_plain_user_last_descriptor_closed_vanishes() {
    as_plain_user("detached_tmpfs_of_a_plain_user_last_descriptor_closed_vanishes", vanishes_when_closed);
}

/// A process of the ordinary user that holds a detached tmpfs and waits to be killed.
struct Holder {
    process: Child,
    /// The path of the tmpfs's root, under /proc.
    path: String,
}

impl Holder {
    /// None if a detached tmpfs cannot be made.
    fn start() -> Option<Holder> {
        let mut command = this_test("holder_waits_to_be_killed");
        let mut process = command.env(HOLD, "1").stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        for line in lines {
            let line = line.unwrap();
            if let Some(number) = line.strip_prefix("holding ") {
                let path = format!("/proc/{}/fd/{number}", process.id());
                return Some(Holder { process, path });
            }
            println!("{line}");
        }
        process.wait().unwrap();
        None
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The process that [`Holder`] starts. Not a test by itself.
#[test]
fn holder_waits_to_be_killed() {
    if std::env::var_os(HOLD).is_none() {
        return;
    }
    let Some(root) = detached_or_skip() else { return };
    // On a new line, as the test harness may have printed on this one.
    println!("\nholding {}", root.as_raw_fd());
    std::thread::sleep(TIMEOUT * 2);
}

#[test]
fn detached_tmpfs_holder_killed_vanishes() {
    let Some(mut holder) = Holder::start() else { return };
    let watch = Watch::on(&holder.path);
    assert!(!watch.gone_within(Duration::from_millis(50)), "it went while its holder lived");
    holder.process.kill().unwrap();
    assert!(watch.gone_within(TIMEOUT), "it outlives its holder");
}

#[test]
fn detached_tmpfs_of_a_plain_user_other_processes_use_it_and_other_groups_may_not_create() {
    if !is_root() {
        println!("skipped: only root can start processes of other groups");
        return;
    }
    let Some(holder) = Holder::start() else { return };
    let touch = |uid: u32, gid: u32, name: &str| {
        let root = File::open(&holder.path).unwrap();
        let mut command = Command::new("touch");
        command.arg(format!("/proc/self/fd/0/{name}")).uid(uid).gid(gid).stdin(root).stderr(Stdio::piped());
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    assert_eq!(touch(PLAIN_USER, PLAIN_USER, "same"), "");
    assert!(Path::new(&holder.path).join("same").exists());
    // As the documentation of detached_tmpfs states.
    assert!(touch(PLAIN_USER, PLAIN_USER + 1, "group").contains("Value too large"));
    assert!(touch(0, 0, "root").contains("Value too large"));
    assert!(touch(PLAIN_USER + 1, PLAIN_USER + 1, "user").contains("Permission denied"));
}

#[test]
fn attached_tmpfs_of_a_plain_user_is_refused_with_a_cure() {
    as_plain_user("attached_tmpfs_of_a_plain_user_is_refused_with_a_cure", || {
        let scratch = Scratch::new();
        let e = attached_tmpfs(scratch.path(), BYTES, None).unwrap_err();
        assert_eq!(e.code, Code::NotPermitted, "{e}");
        assert!(e.cure.contains("use the directory as it is"), "{e}");
        assert!(!is_mounted_here(scratch.path()).unwrap());
    });
}

#[test]
fn attached_tmpfs_is_seen_used_and_unmounted() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let root = match attached_tmpfs(scratch.path(), BYTES, None) {
            Ok(root) => root,
            Err(e) => return println!("skipped: {e}"),
        };
        assert!(is_mounted_here(scratch.path()).unwrap());
        assert_eq!(capabilities_of_our_own(&root).inode64, Some(true));
        use_it(&root);
        let below = scratch.path().join("data");
        assert!(!is_mounted_here(&below).unwrap(), "a directory in it is not where it is mounted");
        assert_eq!(unmount(&below, Unmount::Now).unwrap_err().code, Code::Invalid);

        let again = attached_tmpfs(scratch.path(), BYTES, None).unwrap_err();
        assert_eq!(again.code, Code::NotEmpty, "{again}");
        let busy = unmount(scratch.path(), Unmount::Now).unwrap_err();
        assert_eq!(busy.code, Code::Busy, "{busy}");
        assert!(is_mounted_here(scratch.path()).unwrap());

        let watch = Watch::on(scratch.path().to_str().unwrap());
        unmount(scratch.path(), Unmount::WhenUnused).unwrap();
        assert!(!is_mounted_here(scratch.path()).unwrap());
        rustix::fs::openat(&root, c"late", OFlags::RDWR | OFlags::CREATE, Mode::RWXU).unwrap();
        drop(root);
        assert!(watch.gone_within(TIMEOUT), "it stays though nobody uses it");
        assert_eq!(unmount(scratch.path(), Unmount::Now).unwrap_err().code, Code::Invalid);
    });
}

#[test]
fn attached_tmpfs_belongs_to_the_owner_given() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let root = match attached_tmpfs(scratch.path(), BYTES, Some((1234, 5678))) {
            Ok(root) => root,
            Err(e) => return println!("skipped: {e}"),
        };
        let stat = rustix::fs::fstat(root.as_fd()).unwrap();
        assert_eq!((stat.st_uid, stat.st_gid, stat.st_mode & 0o7777), (1234, 5678, 0o700));
        drop(root);
        unmount_ours(scratch.path());
    });
}

#[test]
fn unmount_of_a_strangers_tmpfs_is_refused() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let flags = rustix::mount::MountFlags::empty();
        if let Err(e) = rustix::mount::mount("stranger", scratch.path(), "tmpfs", flags, None) {
            return println!("skipped: {e}");
        }
        assert!(!is_mounted_here(scratch.path()).unwrap());
        assert_eq!(unmount(scratch.path(), Unmount::WhenUnused).unwrap_err().code, Code::Invalid);
        // Forebay's mount is not the visible one while another mount covers it.
        unmount_any(scratch.path());
        drop(attached_tmpfs(scratch.path(), BYTES, None).unwrap());
        rustix::mount::mount("stranger", scratch.path(), "tmpfs", flags, None).unwrap();
        assert!(!is_mounted_here(scratch.path()).unwrap());
        unmount_any(scratch.path());
        assert!(is_mounted_here(scratch.path()).unwrap());
        unmount_ours(scratch.path());
    });
}

#[test]
fn capabilities_of_overlayfs_lack_leases() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let directory = |name: &str| {
            let path = scratch.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (lower, upper, work, merged) =
            (directory("lower"), directory("upper"), directory("work"), directory("merged"));
        let data =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let data = std::ffi::CString::new(data).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        if let Err(e) = rustix::mount::mount("overlay", &merged, "overlay", flags, data.as_c_str()) {
            return println!("skipped: no overlayfs here: {e}");
        }
        let found = Capabilities::of(File::open(&merged).unwrap()).unwrap();
        unmount_any(&merged);
        assert_eq!(found.fs_type, "overlay");
        assert!(!found.has_leases(), "{found:?}");
        assert!(found.lease_fault.as_deref().unwrap().contains("mapping"), "{found:?}");
        assert!(found.costs().iter().any(|line| line.contains("in use")));
    });
}

#[test]
fn capabilities_of_a_tmpfs_without_huge_pages_and_with_noexec_name_the_costs() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let (flags, data) = (rustix::mount::MountFlags::NOEXEC, c"size=16m,huge=never,inode32");
        if let Err(e) = rustix::mount::mount("stranger", scratch.path(), "tmpfs", flags, data) {
            return println!("skipped: {e}");
        }
        let found = Capabilities::of(File::open(scratch.path()).unwrap()).unwrap();
        unmount_any(scratch.path());
        assert_eq!((found.huge_pages, found.inode64, found.exec), (HugePages::Off, Some(false), false));
        assert_eq!(found.costs().len(), 3, "{:?}", found.costs());
    });
}

#[test]
fn capabilities_of_huge_always_name_the_cost() {
    in_mount_namespace(|| {
        let scratch = Scratch::new();
        let (flags, data) = (rustix::mount::MountFlags::empty(), c"size=16m,huge=always");
        if let Err(e) = rustix::mount::mount("stranger", scratch.path(), "tmpfs", flags, data) {
            return println!("skipped: {e}");
        }
        let found = Capabilities::of(File::open(scratch.path()).unwrap()).unwrap();
        unmount_any(scratch.path());
        assert!(matches!(found.huge_pages, HugePages::Always | HugePages::Off), "{found:?}");
        assert!(!found.costs().is_empty());
    });
}
