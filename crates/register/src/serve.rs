//! Serves one user's connection.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::backing;
use crate::message::{receive, send, File, Message, Packet};

/// `/dev/fuse`: misc device 229.
const DEVICE: (u32, u32) = (10, 229);
/// Most registrations of one connection at a time. The kernel keeps a file open for each of them, which counts toward
/// none of the user's limits.
const REGISTERED_MAX: usize = 64 * 1024;
/// Time limit for a client to send its FUSE connection.
const GREETING: Duration = Duration::from_secs(10);
/// File systems that targets lie on: tmpfs, ext4, XFS, btrfs. The kernel reads and writes a registered file with this
/// program's capability, which other file systems could check for.
const FILE_SYSTEMS: [i64; 4] =
    [libc::TMPFS_MAGIC, libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC];

fn fstat(fd: BorrowedFd<'_>) -> Result<libc::stat, i32> {
    // SAFETY: an all-zero stat is valid, and writable for the call.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut st) < 0 {
            return Err(last_errno());
        }
        Ok(st)
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The connection to register with, if the descriptor is one.
fn connection(fd: Option<OwnedFd>) -> Result<OwnedFd, i32> {
    let fd = fd.ok_or(libc::EBADF)?;
    let st = fstat(fd.as_fd())?;
    let is_device = st.st_mode & libc::S_IFMT == libc::S_IFCHR;
    if !is_device || (libc::major(st.st_rdev), libc::minor(st.st_rdev)) != DEVICE {
        return Err(libc::EINVAL);
    }
    Ok(fd)
}

/// EPERM for a file that even its owner may not change (immutable), or only at its end (append-only). EOPNOTSUPP for a
/// file on a file system that no target lies on.
fn check_kind(file: BorrowedFd<'_>) -> Result<(), i32> {
    // SAFETY: all-zero structures are valid, and writable for the calls; the path is the empty one.
    unsafe {
        let mut about: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(file.as_raw_fd(), &mut about) < 0 {
            return Err(last_errno());
        }
        if !FILE_SYSTEMS.contains(&about.f_type) {
            return Err(libc::EOPNOTSUPP);
        }
        let mut found: libc::statx = std::mem::zeroed();
        let mask = libc::STATX_TYPE;
        if libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, mask, &mut found) < 0 {
            return Err(last_errno());
        }
        let kept = libc::STATX_ATTR_APPEND | libc::STATX_ATTR_IMMUTABLE;
        if found.stx_attributes & kept as u64 != 0 {
            return Err(libc::EPERM);
        }
    }
    Ok(())
}

/// Registers a file if it is a regular one that `uid` owns. Returns the registration's number, and which file it is.
fn register(device: Option<&OwnedFd>, file: Option<OwnedFd>, uid: u32) -> Result<(i32, File), i32> {
    let (device, file) = (device.ok_or(libc::ENOTCONN)?, file.ok_or(libc::EBADF)?);
    let st = fstat(file.as_fd())?;
    if st.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(libc::EINVAL);
    }
    // For each open through the mount the kernel opens the file anew, for reading or writing, without a permission
    // check. The file's owner could give himself every permission anyway; no other user may gain one.
    if st.st_uid != uid {
        return Err(libc::EACCES);
    }
    check_kind(file.as_fd())?;
    let id = backing::register(device.as_fd(), file.as_fd());
    let id = id.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
    Ok((id, File { device: st.st_dev, inode: st.st_ino }))
}

/// Sets how long a read of the socket waits. None: without limit.
fn set_timeout(socket: BorrowedFd<'_>, timeout: Option<Duration>) {
    let seconds = timeout.map_or(0, |p| p.as_secs()) as libc::time_t;
    let timeout = libc::timeval { tv_sec: seconds, tv_usec: 0 };
    let length = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: the structure lives over the call and is as long as said. Without it a wait is merely longer.
    unsafe {
        let value = (&raw const timeout).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, length);
    }
}

/// Serves until the other side is gone.
///
/// # Errors
/// A packet that is no message ends it, and so does a client that sends no message in time at first.
pub(crate) fn serve(socket: BorrowedFd<'_>, uid: u32) -> io::Result<()> {
    set_timeout(socket, Some(GREETING));
    let (mut device, mut registered) = (None, HashSet::new());
    while let Some(Packet { number, message, descriptor }) = receive(socket)? {
        let result = match message {
            Message::Connection => match connection(descriptor) {
                Ok(fd) => {
                    set_timeout(socket, None);
                    device = Some(fd);
                    Ok((0, File::default()))
                }
                Err(errno) => Err(errno),
            },
            Message::Register if registered.len() >= REGISTERED_MAX => Err(libc::ENFILE),
            Message::Register => register(device.as_ref(), descriptor, uid).inspect(|(id, _)| {
                registered.insert(*id);
            }),
            Message::Unregister(id) => {
                // The registration may be one of an earlier helper: the connection belongs to the same user.
                registered.remove(&id);
                unregister(device.as_ref(), id);
                continue;
            }
            Message::Answer(..) => Err(libc::EINVAL),
        };
        let (answer, file) = result.unwrap_or_else(|errno| (-errno, File::default()));
        let sent = send(socket, number, Message::Answer(answer, file), None);
        if sent.is_err() && message == Message::Register {
            // The mount has given this helper up, and never receives the number.
            unregister(device.as_ref(), answer);
        }
        sent?;
    }
    Ok(())
}

fn unregister(device: Option<&OwnedFd>, id: i32) {
    if let Some(device) = device.filter(|_| id > 0) {
        backing::unregister(device.as_fd(), id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::pair;

    fn user() -> u32 {
        // SAFETY: it cannot fail.
        unsafe { libc::getuid() }
    }

    /// The answer to one message, without a FUSE connection.
    fn answer_to(message: Message, descriptor: Option<BorrowedFd<'_>>, uid: u32) -> i32 {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), 7, message, descriptor).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = serve(theirs.as_fd(), uid);
            });
            let answer = receive(ours.as_fd()).unwrap().unwrap();
            drop(ours);
            assert_eq!(answer.number, 7, "it answers another request");
            match answer.message {
                Message::Answer(result, _) => result,
                other => panic!("{other:?} is no answer"),
            }
        })
    }

    #[test]
    fn connection_that_is_no_fuse_device_is_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(answer_to(Message::Connection, Some(null.as_fd()), user()), -libc::EINVAL);
        assert_eq!(answer_to(Message::Connection, None, user()), -libc::EBADF);
        assert_eq!(answer_to(Message::Answer(0, File::default()), None, user()), -libc::EINVAL);
    }

    #[test]
    fn file_that_is_registered_with_no_connection_is_refused() {
        let me = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(answer_to(Message::Register, Some(me.as_fd()), user()), -libc::ENOTCONN);
    }

    #[test]
    fn file_of_another_user_or_of_another_kind_is_refused_before_the_kernel_is_asked() {
        let anything = || std::fs::File::open("/dev/null").unwrap().into();
        let device: OwnedFd = anything();
        assert_eq!(register(Some(&device), Some(anything()), user()), Err(libc::EINVAL));
        let own: OwnedFd = std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
        let owner = fstat(own.as_fd()).unwrap().st_uid;
        assert_eq!(register(Some(&device), Some(own), owner + 1), Err(libc::EACCES));
        assert_eq!(register(Some(&device), None, user()), Err(libc::EBADF));
    }

    #[test]
    fn file_of_no_media_is_refused() {
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        assert_eq!(check_kind(proc.as_fd()), Err(libc::EOPNOTSUPP));
    }
}
