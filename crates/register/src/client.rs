//! The client's side, which `forebay-mount` uses.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::message::{pair, receive, send, File, Message, Packet};
use crate::socket_address::socket_address;
use crate::{PROGRAM, SOCKET, SOCKET_VARIABLE};

/// A helper: a process that may register files, and does so for this one.
#[derive(Debug)]
pub struct Registrar {
    /// None once an exchange has failed. The socket is not used after a failure: a message that arrives on it later
    /// would be taken for the answer to another request.
    socket: Option<OwnedFd>,
    /// The number of the last request.
    number: u32,
    /// Reaped when this is dropped.
    child: Option<Child>,
}

/// Why a helper did not serve a request.
#[derive(Debug)]
pub enum Failure {
    /// The helper has ended, hangs, or sent a message that makes no sense. It cannot be used any more.
    Gone(io::Error),
    /// The kernel or the helper refused. The helper can still be used.
    Refused(io::Error),
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        match failure {
            Failure::Gone(e) | Failure::Refused(e) => e,
        }
    }
}

/// Time limit for a helper to accept the connection: the program may have to be loaded first.
const GREETING: Duration = Duration::from_secs(10);
/// Time limit for a helper to register a file. The kernel does that at once, and an open waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for a killed process to end.
const REAP: Duration = Duration::from_secs(1);

fn strange(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The file that a descriptor refers to.
fn file_of(fd: BorrowedFd<'_>) -> io::Result<File> {
    // SAFETY: an all-zero stat is valid, and writable for the call.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut st) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(File { device: st.st_dev, inode: st.st_ino })
    }
}

/// Sets how long a socket's operations wait.
fn set_timeout(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let timeout = libc::timeval { tv_sec: timeout.as_secs() as libc::time_t, tv_usec: 0 };
    let length = size_of::<libc::timeval>() as libc::socklen_t;
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let value = (&raw const timeout).cast();
        // SAFETY: the structure lives over the call and is as long as said.
        if unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, length) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

impl Registrar {
    /// The first helper that can be used for a FUSE connection: one that listens, else the program beside this one.
    /// The error states why neither could be used.
    pub fn find(device: BorrowedFd<'_>) -> Result<Registrar, String> {
        let named = std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from);
        let socket = named.clone().unwrap_or_else(|| PathBuf::from(SOCKET));
        let listening = match named {
            Some(_) => Registrar::connect(&socket, device),
            // Root must own the socket there, because descriptors are sent to it.
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

    /// Starts the program, which must have CAP_SYS_ADMIN as a file capability, and sends it the FUSE connection.
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
        Registrar::send_connection(ours, Some(child), device)
    }

    /// Connects to a helper that listens, and sends it the FUSE connection.
    pub fn connect(path: &Path, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        let address = socket_address(path)?;
        // SAFETY: the descriptor is new and ours; the address lives over the call and is as long as said.
        let socket = unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let socket = OwnedFd::from_raw_fd(fd);
            // Connections to a listener that does not accept them wait.
            set_timeout(socket.as_fd(), GREETING)?;
            let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            if libc::connect(fd, (&raw const address).cast(), length) < 0 {
                return Err(io::Error::last_os_error());
            }
            socket
        };
        Registrar::send_connection(socket, None, device)
    }

    fn connect_to_root(path: &Path, device: BorrowedFd<'_>) -> io::Result<Registrar> {
        let (owner, dir) = (|path: &Path| std::fs::symlink_metadata(path).map(|m| m.uid()), path.parent());
        if owner(path)? != 0 || dir.map_or(Ok(0), owner)? != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "root does not own the socket or its directory",
            ));
        }
        Registrar::connect(path, device)
    }

    /// Sends a helper the FUSE connection.
    fn send_connection(
        socket: OwnedFd,
        child: Option<Child>,
        device: BorrowedFd<'_>,
    ) -> io::Result<Registrar> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let mut registrar = Registrar { socket: None, number: 0, child };
        set_timeout(socket.as_fd(), GREETING)?;
        registrar.socket = Some(socket);
        match registrar.ask(Message::Connection, device, File::default()) {
            Ok(_) => {}
            Err(Failure::Gone(e)) if matches!(e.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) => {
                return Err(registrar.why_gone(e));
            }
            Err(failure) => return Err(failure.into()),
        }
        if let Some(socket) = &registrar.socket {
            set_timeout(socket.as_fd(), TIMEOUT)?;
        }
        Ok(registrar)
    }

    /// The reason why a helper closed the connection without an answer.
    fn why_gone(mut self, e: io::Error) -> io::Error {
        let Some(mut child) = self.child.take() else {
            return io::Error::new(
                e.kind(),
                "it closed the connection; it may be of another version than this mount",
            );
        };
        match child.wait() {
            Ok(status) if status.code() == Some(crate::program::NOT_PERMITTED.into()) => {
                let why = "it lacks CAP_SYS_ADMIN (as root: `setcap cap_sys_admin+ep` on it)";
                io::Error::new(io::ErrorKind::PermissionDenied, why)
            }
            Ok(status) => io::Error::other(format!("it ended at once: {status}")),
            _ => e,
        }
    }

    /// Sends one request about `file` and receives its answer. Closes the socket if that fails.
    fn ask(&mut self, message: Message, descriptor: BorrowedFd<'_>, file: File) -> Result<i32, Failure> {
        let Some(socket) = &self.socket else {
            return Err(Failure::Gone(io::ErrorKind::NotConnected.into()));
        };
        self.number = self.number.wrapping_add(1);
        let (number, none) = (self.number, File::default());
        let answer =
            send(socket.as_fd(), number, message, Some(descriptor)).and_then(|()| receive(socket.as_fd()));
        let result = answer.and_then(|answer| match answer {
            None => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(Packet { message: Message::Answer(result, of), descriptor: None, number: n }) => {
                match result {
                    _ if n != number => Err(strange("it answers another request")),
                    _ if of != (if result < 0 { none } else { file }) => {
                        Err(strange("it registered another file"))
                    }
                    result => Ok(result),
                }
            }
            Some(_) => Err(strange("it sent a message that is not an answer")),
        });
        match result {
            Ok(result) if result < 0 => Err(Failure::Refused(io::Error::from_raw_os_error(-result))),
            Ok(result) => Ok(result),
            Err(e) => {
                self.hang_up();
                Err(Failure::Gone(e))
            }
        }
    }

    /// Closes the connection, also for [`Registrar::watch`].
    fn hang_up(&mut self) {
        if let Some(socket) = self.socket.take() {
            // SAFETY: plain system call on a descriptor of ours.
            unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
        }
    }

    /// A descriptor that hangs up (POLLHUP) when the helper ends, or is given up because an exchange failed.
    ///
    /// # Errors
    /// No descriptor is left, or the helper is gone already.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        self.socket.as_ref().ok_or(io::Error::from(io::ErrorKind::NotConnected))?.try_clone()
    }

    /// Registers a regular file of this user. Returns the number that opens give to the kernel.
    ///
    /// # Errors
    /// [`Failure::Gone`] also when the helper registered another file than this.
    pub fn register(&mut self, file: BorrowedFd<'_>) -> Result<i32, Failure> {
        let this = file_of(file).map_err(Failure::Refused)?;
        self.ask(Message::Register, file, this)
    }

    /// Ends a registration; opens that use it continue. It has ended when a later [`Registrar::register`] is answered.
    ///
    /// # Errors
    /// The message was not sent: the helper is gone.
    pub fn unregister(&mut self, id: i32) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Err(io::ErrorKind::NotConnected.into()) };
        self.number = self.number.wrapping_add(1);
        send(socket.as_fd(), self.number, Message::Unregister(id), None).inspect_err(|_| self.hang_up())
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        self.hang_up();
        let Some(mut child) = self.child.take() else { return };
        // A stopped process does not notice that its connection is closed.
        let _ = child.kill();
        let end = Instant::now() + REAP;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A registrar whose other end belongs to the test.
    fn served() -> (Registrar, OwnedFd) {
        let (ours, theirs) = pair().unwrap();
        (Registrar { socket: Some(ours), number: 0, child: None }, theirs)
    }

    /// The result of a registration with this answer, and whether the helper can be used afterwards.
    fn answered(answer: impl FnOnce(u32, File) -> (u32, Message) + Send) -> (Result<i32, Failure>, bool) {
        let (mut registrar, theirs) = served();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let this = file_of(file.as_fd()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let asked = receive(theirs.as_fd()).unwrap().unwrap();
                let (number, answer) = answer(asked.number, this);
                send(theirs.as_fd(), number, answer, None).unwrap();
                // The helper stays until the other side closes the connection.
                let _ = receive(theirs.as_fd());
            });
            let result = registrar.register(file.as_fd());
            let of_use = registrar.watch().is_ok();
            drop(registrar);
            (result, of_use)
        })
    }

    #[test]
    fn answer_to_this_request_about_this_file_alone_is_taken() {
        let right = answered(|number, file| (number, Message::Answer(7, file)));
        assert!(matches!(right, (Ok(7), true)), "{right:?}");
        let refused = answered(|number, _| (number, Message::Answer(-libc::EACCES, File::default())));
        assert!(matches!(refused, (Err(Failure::Refused(_)), true)), "{refused:?}");
        let late = answered(|number, file| (number - 1, Message::Answer(7, file)));
        assert!(matches!(late, (Err(Failure::Gone(_)), false)), "{late:?}");
        let other =
            answered(|number, file| (number, Message::Answer(7, File { inode: file.inode + 1, ..file })));
        assert!(matches!(other, (Err(Failure::Gone(_)), false)), "{other:?}");
        let no_answer = answered(|number, _| (number, Message::Register));
        assert!(matches!(no_answer, (Err(Failure::Gone(_)), false)), "{no_answer:?}");
    }

    #[test]
    fn helper_that_did_not_answer_in_time_is_not_asked_again() {
        let (mut registrar, theirs) = served();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        set_timeout(registrar.socket.as_ref().unwrap().as_fd(), Duration::from_secs(1)).unwrap();
        assert!(matches!(registrar.register(file.as_fd()), Err(Failure::Gone(_))));
        let asked = receive(theirs.as_fd()).unwrap().unwrap();
        // Sending the answer fails, so that the helper can undo the registration.
        let this = file_of(file.as_fd()).unwrap();
        assert!(send(theirs.as_fd(), asked.number, Message::Answer(7, this), None).is_err());
        assert!(matches!(registrar.register(file.as_fd()), Err(Failure::Gone(_))));
        assert!(registrar.unregister(7).is_err());
        assert!(receive(theirs.as_fd()).unwrap().is_none(), "something was sent after the failure");
    }
}
