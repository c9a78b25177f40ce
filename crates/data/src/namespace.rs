//! Makes a mount in namespaces of a short-lived child, and returns it as a descriptor; or a descriptor to configure one.
//!
//! A user who may not mount may do so in a user namespace. The child enters one, maps its own user and group onto
//! themselves, makes the mount and sends its root over a socket. Then the child ends, and its namespaces with it. The
//! mount lives as long as a descriptor of it is open, and works in every process that has one, in any namespace. There
//! is one limit: a process whose group is not the mapped one cannot create files there (EOVERFLOW).
//!
//! The child of a process with threads may only make system calls. So everything is prepared before the fork, and after
//! it no code here allocates, locks or panics.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{Pid, WaitOptions};
use rustix::thread::UnshareFlags;

use crate::tmpfs::{pick, root_of, Tmpfs};

/// How the child makes the mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// In a user namespace, by fsmount.
    UserNew,
    /// In a user namespace, by mount(2), for Linux before 5.2.
    UserOld,
    /// Only in a mount namespace, by mount(2): for a user who may mount, on Linux before 5.2.
    MountOld,
}

/// The step at which the child failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Step {
    /// Starting the child and receiving its message.
    Start = 1,
    /// Entering the namespaces.
    Enter = 2,
    /// Mapping user and group.
    Map = 3,
    /// Mounting.
    Mount = 4,
}

impl Step {
    fn of(number: u8) -> Step {
        match number {
            2 => Step::Enter,
            3 => Step::Map,
            4 => Step::Mount,
            _ => Step::Start,
        }
    }

    /// The step's name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Step::Start => "starting a process that mounts",
            Step::Enter => "entering a user namespace",
            Step::Map => "mapping the user into a namespace",
            Step::Mount => "mounting in a namespace",
        }
    }
}

/// Bytes of the child's message: step and errno, or zeros with the descriptor.
const MESSAGE_BYTES: usize = 8;

/// What the child makes.
enum Work<'a> {
    /// The root of a tmpfs.
    Mount(&'a Tmpfs),
    /// A descriptor to configure the tmpfs with this root.
    Pick(BorrowedFd<'a>),
}

/// The root directory of a tmpfs that is in no namespace that a process could enter.
pub(crate) fn mount_in_child(tmpfs: &Tmpfs, way: Way) -> Result<OwnedFd, (Step, Errno)> {
    in_child(&Work::Mount(tmpfs), way)
}

/// [`pick`] by a user who may not mount. To configure the tmpfs then takes a process of the user who made it, in the
/// namespace that this user's was made in: the kernel gives that user all rights in it.
pub(crate) fn pick_in_child(directory: BorrowedFd<'_>) -> Result<OwnedFd, (Step, Errno)> {
    in_child(&Work::Pick(directory), Way::UserNew)
}

fn in_child(work: &Work<'_>, way: Way) -> Result<OwnedFd, (Step, Errno)> {
    let start = |e: Errno| (Step::Start, e);
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (uid_map, gid_map) = (format!("{uid} {uid} 1\n"), format!("{gid} {gid} 1\n"));
    let (ours, childs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(start)?;

    // SAFETY: the child only makes system calls on memory prepared above, and ends by _exit. It takes no lock that
    // another thread of the parent may have held, and runs no destructor of the parent.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let outcome = make(work, way, uid_map.as_bytes(), gid_map.as_bytes());
        let sent = match &outcome {
            Ok(mount) => send(&childs, [0; MESSAGE_BYTES], Some(mount.as_fd())),
            Err((step, e)) => {
                let mut message = [*step as u8; MESSAGE_BYTES];
                message[4..].copy_from_slice(&e.raw_os_error().to_le_bytes());
                send(&childs, message, None)
            }
        };
        // SAFETY: ends this process, which shares only files with its parent.
        unsafe { libc::_exit(sent.is_err() as i32) };
    }
    let Some(child) = Pid::from_raw(pid).filter(|_| pid > 0) else {
        let e = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN);
        return Err(start(Errno::from_raw_os_error(e)));
    };
    // Closed here, so that the death of the child ends the stream.
    drop(childs);
    let outcome = receive(&ours);
    // The child has ended or is about to. Other code of this process may have reaped it already.
    while matches!(rustix::process::waitpid(Some(child), WaitOptions::empty()), Err(Errno::INTR)) {}
    outcome
}

/// Runs in the child.
fn make(work: &Work<'_>, way: Way, uid_map: &[u8], gid_map: &[u8]) -> Result<OwnedFd, (Step, Errno)> {
    let at = |step: Step| move |e: Errno| (step, e);
    let user = way != Way::MountOld;
    let spaces = if user { UnshareFlags::NEWUSER | UnshareFlags::NEWNS } else { UnshareFlags::NEWNS };
    // SAFETY: neither flag unshares the table of descriptors, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(spaces) }.map_err(at(Step::Enter))?;
    if user {
        // Without this an ordinary user may not map a group. Before Linux 3.19 the file does not exist and is not
        // needed.
        match write_file(c"/proc/self/setgroups", b"deny") {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err((Step::Map, e)),
        }
        write_file(c"/proc/self/uid_map", uid_map).map_err(at(Step::Map))?;
        write_file(c"/proc/self/gid_map", gid_map).map_err(at(Step::Map))?;
    }
    let tmpfs = match work {
        Work::Pick(directory) => return pick(*directory).map_err(at(Step::Mount)),
        Work::Mount(tmpfs) => tmpfs,
    };
    let mount = || match way {
        Way::UserNew => root_of(tmpfs.mount()?.as_fd()),
        Way::UserOld | Way::MountOld => {
            // This mount must not propagate to other namespaces.
            let private = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
            rustix::mount::mount_change(c"/", private)?;
            // Any directory would do. This one was just used.
            tmpfs.mount_at(c"/proc")?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(c"/proc", flags, Mode::empty())
        }
    };
    mount().map_err(at(Step::Mount))
}

fn write_file(path: &std::ffi::CStr, text: &[u8]) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(file, text).map(drop)
}

fn send(
    socket: &OwnedFd,
    message: [u8; MESSAGE_BYTES],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: &[BorrowedFd<'_>] = descriptor.as_slice();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Runs in the parent.
fn receive(socket: &OwnedFd) -> Result<OwnedFd, (Step, Errno)> {
    let mut message = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let into = &mut [IoSliceMut::new(&mut message)];
        match rustix::net::recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(e) => return Err((Step::Start, e)),
            Ok(received) => break received.bytes,
        }
    };
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = part {
            if let Some(mount) = descriptors.next() {
                return Ok(mount);
            }
        }
    }
    let [step, _, _, _, errno @ ..] = message;
    match (received, i32::from_le_bytes(errno)) {
        (MESSAGE_BYTES, errno) if errno != 0 => Err((Step::of(step), Errno::from_raw_os_error(errno))),
        // The child was killed before it sent a message.
        _ => Err((Step::Start, Errno::CHILD)),
    }
}
