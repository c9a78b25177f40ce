//! The asking side: `forebay-mount`'s.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::message::{pair, receive, send, Message};
use crate::{PROGRAM, SOCKET, SOCKET_VARIABLE};

/// Somebody who may register files, and does so for this process.
#[derive(Debug)]
pub struct Registrar {
    /// Held over a question and its answer.
    socket: Mutex<OwnedFd>,
    /// Reaped when this is dropped.
    child: Option<Child>,
}

/// A helper answers within so long: it asks the kernel, which waits for nobody.
const PATIENCE_S: libc::time_t = 10;

/// The address of a socket's path.
pub(crate) fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    // SAFETY: an all-zero address is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}

/// The helper's answer as a number.
fn result_of(answer: Option<(Message, Option<OwnedFd>)>) -> io::Result<i32> {
    match answer {
        Some((Message::Answer(result), None)) if result >= 0 => Ok(result),
        Some((Message::Answer(result), None)) => Err(io::Error::from_raw_os_error(-result)),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Registrar {
    /// The first that can be had for a FUSE connection: one that listens, then the program beside this one. Else what stood
    /// in the way of each, in words.
    pub fn find(device: BorrowedFd<'_>) -> Result<Registrar, String> {
        let named = std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from);
        let socket = named.clone().unwrap_or_else(|| PathBuf::from(SOCKET));
        let listening = match named {
            Some(_) => Registrar::connect(&socket, device),
            // What listens there must be root's: it is given descriptors.
            None => Registrar::connect_to_root(&socket, device),
        };
        let program = std::env::current_exe().map(|me| me.with_file_name(PROGRAM));
        match listening {
            Ok(registrar) => Ok(registrar),
            Err(at_socket) => {
                program.and_then(|program| Registrar::start(&program, device)).map_err(|beside| {
                    let no_socket = at_socket.kind() == io::ErrorKind::NotFound;
                    let said = if no_socket {
                        String::new()
                    } else {
                        format!("{}: {at_socket}; ", socket.display())
                    };
                    format!("{said}{PROGRAM}: {beside}")
                })
            }
        }
    }

    /// Starts the program, which must have CAP_SYS_ADMIN as a file capability, and gives it the connection.
    pub fn start(program: &Path, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        let (ours, theirs) = pair()?;
        let number = theirs.as_raw_fd();
        let mut command = Command::new(program);
        command.arg("--socket").arg("0").env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: between fork and exec one system call is made, which is async-signal-safe.
        unsafe {
            command.pre_exec(move || match libc::dup2(number, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        let child = command.spawn()?;
        drop(theirs);
        Registrar { socket: Mutex::new(ours), child: Some(child) }.with(device)
    }

    /// Connects to one that listens, and gives it the connection.
    pub fn connect(path: &Path, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        let address = address(path)?;
        // SAFETY: the descriptor is new and ours; the address lives over the call and is as long as said.
        let socket = unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let socket = OwnedFd::from_raw_fd(fd);
            let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            if libc::connect(fd, (&raw const address).cast(), length) < 0 {
                return Err(io::Error::last_os_error());
            }
            socket
        };
        Registrar { socket: Mutex::new(socket), child: None }.with(device)
    }

    /// A helper that does not answer is none: whoever asks goes on without.
    fn set_patience(&self) {
        let timeout = libc::timeval { tv_sec: PATIENCE_S, tv_usec: 0 };
        let length = size_of::<libc::timeval>() as libc::socklen_t;
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: the structure lives over the call and is as long as said.
            unsafe {
                let value = (&raw const timeout).cast();
                libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, length);
            }
        }
    }

    fn connect_to_root(path: &Path, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        let (owner, dir) = (|path: &Path| std::fs::symlink_metadata(path).map(|m| m.uid()), path.parent());
        if owner(path)? != 0 || dir.map_or(Ok(0), owner)? != 0 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not root's"));
        }
        Registrar::connect(path, device)
    }

    fn with(self, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        self.set_patience();
        match self.ask(Message::Connection, device) {
            Ok(_) => Ok(self),
            Err(e) if matches!(e.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) => {
                Err(self.why_gone(e))
            }
            Err(e) => Err(e),
        }
    }

    /// Why a program that was started answered nothing.
    fn why_gone(mut self, e: io::Error) -> io::Error {
        match self.child.take().map(|mut child| child.wait()) {
            Some(Ok(status)) if status.code() == Some(crate::program::NOT_PERMITTED.into()) => {
                let why = "it has not the capability (`setcap cap_sys_admin+ep` it, as root)";
                io::Error::new(io::ErrorKind::PermissionDenied, why)
            }
            Some(Ok(status)) => io::Error::other(format!("it ended at once: {status}")),
            _ => e,
        }
    }

    fn ask(&self, message: Message, descriptor: BorrowedFd<'_>) -> io::Result<i32> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        send(socket.as_fd(), message, Some(descriptor))?;
        result_of(receive(socket.as_fd())?)
    }

    /// Registers a regular file of this user; the number by which opens name it.
    pub fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        self.ask(Message::Register, file)
    }

    /// Forgets a registration; opens that use it go on.
    pub fn unregister(&self, id: i32) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is gone has forgotten nothing, but serves nobody either: the kernel forgets with the connection.
        let _ = send(socket.as_fd(), Message::Unregister(id), None);
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let socket = self.socket.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It ends when it hears no more.
        // SAFETY: plain system call on a descriptor of ours.
        unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
        let _ = child.wait();
    }
}
