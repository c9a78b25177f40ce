//! `forebay-register` as a program: it serves one user on a socket that it inherited, or listens on a socket for all
//! users.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use crate::socket_address::socket_address;
use crate::{privilege, serve, SOCKET};

const HELP: &str = "\
forebay-register: registers files of ordinary users for FUSE passthrough, so that their pools' mounts
run at the medium's own speed. The kernel lets only CAP_SYS_ADMIN do so.

Usage: forebay-register --listen [PATH]
       forebay-register --socket FD

  --listen [PATH]  as root, for all users of this node: listen on a socket (/run/forebay/register).
                   For the prolog of a batch system:  forebay-register --listen &
  --socket FD      for who holds the other end; forebay-mount starts it so. The program's file needs
                   the capability:  setcap cap_sys_admin+ep $(command -v forebay-register)
  --version        print the version

A user's files alone are registered, with FUSE connections that he holds. Without this helper data goes
through forebay-mount: the same results, more slowly. `forebay status` says which way a mount takes.
";

/// Exit status when this process lacks the capability.
pub(crate) const NOT_PERMITTED: u8 = 3;
/// Most connections that are served at a time. Further ones are closed, and their mounts serve data by requests.
const CONNECTIONS_MAX: usize = 1024;
/// Most connections of one user: mounts of pools on one node.
const CONNECTIONS_OF_USER_MAX: usize = 32;
/// Pause after a failure for lack of resources.
const PAUSE: Duration = Duration::from_millis(100);

enum Wanted {
    Listen(PathBuf),
    Serve(RawFd),
    Text(String),
}

fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Wanted, String> {
    let usage = |what: String| format!("{what}; `forebay-register --help` shows what there is");
    let first = arguments.next().ok_or_else(|| usage("no argument is given".into()))?;
    let second = arguments.next();
    if let Some(more) = arguments.next() {
        return Err(usage(format!("unknown argument {more:?}")));
    }
    match (first.to_str().unwrap_or_default(), second) {
        ("--listen", path) => Ok(Wanted::Listen(path.map_or_else(|| SOCKET.into(), PathBuf::from))),
        ("--socket", Some(fd)) => match fd.to_str().and_then(|fd| fd.parse().ok()).filter(|fd| *fd >= 0) {
            Some(fd) => Ok(Wanted::Serve(fd)),
            None => Err(usage(format!("{fd:?} is no descriptor's number"))),
        },
        ("--help" | "-h", None) => Ok(Wanted::Text(HELP.into())),
        ("--version" | "-V", None) => {
            Ok(Wanted::Text(format!("forebay-register {}\n", env!("CARGO_PKG_VERSION"))))
        }
        _ => Err(usage(format!("unknown argument {first:?}"))),
    }
}

/// Runs `forebay-register` with these arguments, without the program's name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let done = match parse(arguments) {
        Ok(Wanted::Text(text)) => {
            print!("{text}");
            Ok(())
        }
        Ok(Wanted::Serve(fd)) => serve_one(fd),
        Ok(Wanted::Listen(path)) => listen(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot serve on {}: {e}", path.display()))),
        Err(words) => {
            eprintln!("forebay-register: {words}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(format_args!("{e}"));
            ExitCode::from(if e.kind() == io::ErrorKind::PermissionDenied { NOT_PERMITTED } else { 1 })
        }
    }
}

fn serve_one(fd: RawFd) -> io::Result<()> {
    // SAFETY: only asks.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    privilege::keep_one().map_err(|e| io::Error::new(e.kind(), format!("CAP_SYS_ADMIN is needed: {e}")))?;
    // SAFETY: the descriptor is open, was given for this, and is not used otherwise; it cannot fail.
    let (socket, uid) = unsafe {
        // A signal to the process group of the starting process, such as a terminal's interrupt, must not end the
        // helper.
        libc::setsid();
        (OwnedFd::from_raw_fd(fd), libc::getuid())
    };
    serve::serve(socket.as_fd(), uid)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// The directory of the socket, which only root may change. It is locked while the returned file is open.
fn lock_directory(path: &Path) -> io::Result<std::fs::File> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    let open = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(dir)?;
    let metadata = open.metadata()?;
    if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 {
        let why = format!("others than root may change {} (make it root's, with mode 0755)", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    // SAFETY: plain system call on a descriptor of ours.
    check(unsafe { libc::flock(open.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }).map_err(|e| {
        io::Error::new(e.kind(), format!("another one is starting in {}: {e}", dir.display()))
    })?;
    Ok(open)
}

/// A socket bound to a path, to which all users can connect. A socket that no process listens on is replaced.
fn bind(path: &Path) -> io::Result<OwnedFd> {
    // SAFETY: it cannot fail. What is made here is for root to change and, the socket, for all to connect to.
    unsafe { libc::umask(0o022) };
    let _lock = lock_directory(path)?;
    let address = socket_address(path)?;
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let new = || -> io::Result<OwnedFd> {
        // SAFETY: the descriptor is new and ours.
        unsafe {
            let fd = check(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0))?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    };
    let socket = new()?;
    let bound = || {
        // SAFETY: the address lives over the call and is as long as said; umask cannot fail.
        unsafe {
            libc::umask(0o111);
            let done = libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length);
            let done = check(done);
            libc::umask(0o022);
            done
        }
    };
    match bound() {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_stale(path, &new()?, &address) => {
            std::fs::remove_file(path)?;
            bound()?;
        }
        Err(e) => return Err(e),
    }
    // SAFETY: plain system call on a descriptor of ours.
    check(unsafe { libc::listen(socket.as_raw_fd(), 64) })?;
    Ok(socket)
}

/// True for a socket that no process listens on.
fn is_stale(path: &Path, probe: &OwnedFd, address: &libc::sockaddr_un) -> bool {
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address lives over the call and is as long as said.
    let answer =
        check(unsafe { libc::connect(probe.as_raw_fd(), std::ptr::from_ref(address).cast(), length) });
    let refused = answer.is_err_and(|e| e.raw_os_error() == Some(libc::ECONNREFUSED));
    refused && std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
}

/// Writes a message, and ignores a failure: the output of a prolog may be closed by now.
fn say(words: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "forebay-register: {words}");
}

/// Serves all users, each by a child process that has become that user. SIGTERM ends this process, and not the
/// children.
fn listen(path: &Path) -> io::Result<()> {
    // SAFETY: these touch no memory; a process that leads its group already stays as it is.
    unsafe {
        if libc::geteuid() != 0 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "only root can serve all users"));
        }
        // If the starting process ignored SIGCHLD, the children could not be counted.
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::setsid();
    }
    let socket = bind(path)?;
    say(format_args!("serves on {}", path.display()));
    let mut children: Vec<(libc::pid_t, u32)> = Vec::new();
    loop {
        let connection = match accept(socket.as_fd()) {
            Ok(connection) => connection,
            Err(e) => {
                say(format_args!("cannot take a connection: {e}"));
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        reap(&mut children);
        let Ok((uid, gid)) = peer(connection.as_fd()) else { continue };
        let of_user = children.iter().filter(|(_, of)| *of == uid).count();
        if children.len() >= CONNECTIONS_MAX || of_user >= CONNECTIONS_OF_USER_MAX {
            say(format_args!(
                "user {uid} is refused: {of_user} of his connections are served, {} in all",
                children.len()
            ));
            continue;
        }
        // SAFETY: this process has one thread, so that the child may do anything.
        match unsafe { libc::fork() } {
            0 => {
                drop(socket);
                let done = privilege::become_user(uid, gid).and_then(|()| {
                    // SAFETY: it touches no memory.
                    unsafe { libc::setsid() };
                    serve::serve(connection.as_fd(), uid)
                });
                std::process::exit(i32::from(done.is_err()));
            }
            pid if pid < 0 => {
                say(format_args!("cannot serve a user: {}", io::Error::last_os_error()));
                std::thread::sleep(PAUSE);
            }
            pid => children.push((pid, uid)),
        }
    }
}

fn accept(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    loop {
        // SAFETY: no address is wanted; the descriptor is new and ours.
        let fd = unsafe {
            libc::accept4(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC)
        };
        match check(fd) {
            // SAFETY: as above.
            Ok(fd) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ECONNABORTED)) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Forgets the children that have ended.
fn reap(children: &mut Vec<(libc::pid_t, u32)>) {
    loop {
        // SAFETY: no status is wanted.
        match unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } {
            pid if pid > 0 => children.retain(|(child, _)| *child != pid),
            _ => return,
        }
    }
}

/// User and group of the process at the other end.
pub(crate) fn peer(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the structure is writable for the length given.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        )
    };
    if got < 0 || credentials.uid == u32::MAX {
        return Err(io::Error::last_os_error());
    }
    Ok((credentials.uid, credentials.gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_nonsense_says_what_to_do() {
        let words = |line: &str| parse(line.split_whitespace().map(OsString::from));
        for line in ["", "--socket", "--socket x", "--socket -1", "--listen /a /b", "--what"] {
            assert!(words(line).is_err_and(|words| words.contains("--help")), "{line:?}");
        }
        assert!(matches!(words("--listen"), Ok(Wanted::Listen(path)) if path == Path::new(SOCKET)));
        assert!(matches!(words("--socket 0"), Ok(Wanted::Serve(0))));
    }
}
