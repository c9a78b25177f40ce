//! `forebay-register` as a program: for one user, on a socket that it was given; or for all, on one where it listens.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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

/// Exit status when this process has not the capability.
pub(crate) const NOT_PERMITTED: u8 = 3;
/// Users that are served at a time: more wait.
const CONNECTIONS_MAX: usize = 1024;

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
            eprintln!("forebay-register: {e}");
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
    let (socket, uid) = unsafe { (OwnedFd::from_raw_fd(fd), libc::getuid()) };
    serve::serve(socket.as_fd(), uid)
}

/// A socket bound to a path, for all users to connect to. One that nobody listens on is replaced.
fn bind(path: &Path) -> io::Result<OwnedFd> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir)?;
    }
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
    let new = || -> io::Result<OwnedFd> {
        // SAFETY: the descriptor is new and ours.
        match unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) } {
            // SAFETY: as above.
            fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let socket = new()?;
    // SAFETY: here and below, the address lives over the call and is as long as said, the path is NUL-terminated.
    let bound = || unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) == 0 };
    if !bound() {
        let e = io::Error::last_os_error();
        let probe = new()?;
        // SAFETY: as above.
        let answered = unsafe { libc::connect(probe.as_raw_fd(), (&raw const address).cast(), length) == 0 };
        if answered || e.kind() != io::ErrorKind::AddrInUse {
            return Err(e);
        }
        std::fs::remove_file(path)?;
        if !bound() {
            return Err(io::Error::last_os_error());
        }
    }
    let path = CString::new(bytes)?;
    // SAFETY: as above.
    unsafe {
        if libc::chmod(path.as_ptr(), 0o666) < 0 || libc::listen(socket.as_raw_fd(), 64) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(socket)
}

/// Serves all users, each by a process of his own that became him. SIGTERM ends it, and leaves those be that serve.
fn listen(path: &Path) -> io::Result<()> {
    // SAFETY: it cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "only root can serve all users"));
    }
    let socket = bind(path)?;
    eprintln!("forebay-register: serves on {}", path.display());
    let mut children = 0usize;
    loop {
        let connection = accept(socket.as_fd())?;
        children += 1;
        while reap(children >= CONNECTIONS_MAX) {
            children -= 1;
        }
        // SAFETY: this process has one thread, so that the child may do anything.
        match unsafe { libc::fork() } {
            0 => {
                drop(socket);
                let done = peer(connection.as_fd()).and_then(|(uid, gid)| {
                    privilege::become_user(uid, gid)?;
                    serve::serve(connection.as_fd(), uid)
                });
                std::process::exit(i32::from(done.is_err()));
            }
            pid if pid < 0 => {
                children -= 1;
                eprintln!("forebay-register: cannot serve a user: {}", io::Error::last_os_error());
            }
            _ => {}
        }
    }
}

fn accept(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    loop {
        // SAFETY: no address is wanted; the descriptor is new and ours.
        let fd = unsafe {
            libc::accept4(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC)
        };
        if fd >= 0 {
            // SAFETY: as above.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        match io::Error::last_os_error() {
            e if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ECONNABORTED)) => {}
            e => return Err(e),
        }
    }
}

/// Reaps one child that ended; waits for one if it must.
fn reap(must: bool) -> bool {
    // SAFETY: no status is wanted.
    unsafe { libc::waitpid(-1, std::ptr::null_mut(), if must { 0 } else { libc::WNOHANG }) > 0 }
}

/// Who connected: user and group.
fn peer(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
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
