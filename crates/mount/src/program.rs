//! `forebay-mount` as a program: its command line, its start, and the messages that it handles while it serves.
//!
//! It exchanges JSON messages with its supervisor over a SOCK_SEQPACKET socket (`Supervisor`, `Event`). When that
//! socket closes, the supervisor is dead and so is the pool: the mount is removed.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_client::{Pool, Role};
use forebay_sys::mounts::Mount;
use forebay_sys::packet::{self, Received};
use forebay_sys::process::shed_preload;
use forebay_sys::signals::{self, Signals};
use forebay_types::{Code, Error, Result, MOUNT_LINK};
use serde_json::{json, Value};

use crate::filesystem::{DataPath, FileSystem};
use crate::mountpoint::{self, Options};
use crate::session::Session;

const HELP: &str = "\
forebay-mount: serves a pool as a file system. `forebay mount` starts it.

Usage: forebay-mount --pool DIR --at DIR [--allow-other] [--no-passthrough]
       forebay-mount --pool DIR --clear

  --pool DIR        the pool's directory
  --at DIR          where to mount it: an empty directory
  --allow-other     other users may use it too
  --no-passthrough  data goes through this process even where the kernel would serve it
  --clear           take away dead mounts of this pool
  --version         print the version

SIGTERM unmounts. Environment: FOREBAY_LOG=error|warn|info|debug|trace sets how much is logged.
";

/// Fewest serving threads, whatever the number of processors: one of them may be in a slow call.
const THREADS_MIN: usize = 4;
/// Most serving threads. More would only contend for the daemon.
const THREADS_MAX: usize = 16;
/// How often the main thread checks whether another process has removed the mount.
const LOOK_MS: i32 = 200;
/// How long the connection may live on after the mount was taken away: it does if another mount namespace has a copy.
const COPIES_GRACE: Duration = Duration::from_secs(1);
/// Most bytes of a message.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;

#[derive(Debug, Default)]
struct Arguments {
    pool: PathBuf,
    at: PathBuf,
    options: Options,
    no_passthrough: bool,
    clear: bool,
    socket: Option<RawFd>,
}

fn parse(arguments: impl Iterator<Item = OsString>) -> Result<std::result::Result<Arguments, String>> {
    let bad =
        |what: String| Error::new(Code::Invalid, what).cure("`forebay-mount --help` shows what there is");
    let mut parsed = Arguments::default();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let name = argument.to_string_lossy().into_owned();
        let mut value = || arguments.next().ok_or_else(|| bad(format!("{name} needs a value")));
        match name.as_str() {
            "--pool" => parsed.pool = value()?.into(),
            "--at" => parsed.at = value()?.into(),
            "--allow-other" => parsed.options.allow_other = true,
            "--no-passthrough" => parsed.no_passthrough = true,
            "--clear" => parsed.clear = true,
            "--socket" => {
                let number = value()?.to_string_lossy().parse().ok().filter(|fd| *fd > 2);
                parsed.socket =
                    Some(number.ok_or_else(|| bad(format!("{name} needs a descriptor's number")))?);
            }
            "--help" | "-h" => return Ok(Err(HELP.to_owned())),
            "--version" | "-V" => return Ok(Err(format!("forebay-mount {}\n", env!("CARGO_PKG_VERSION")))),
            _ => return Err(bad(format!("unknown argument {name:?}"))),
        }
    }
    if parsed.pool.as_os_str().is_empty() {
        return Err(bad("no pool is named".to_owned()));
    }
    if parsed.at.as_os_str().is_empty() && !parsed.clear {
        return Err(bad("no directory to mount on is named".to_owned()));
    }
    Ok(Ok(parsed))
}

/// Runs `forebay-mount` with these arguments, without the program's name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebay-mount: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    let arguments = match parse(arguments) {
        Ok(Ok(arguments)) => arguments,
        Ok(Err(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("forebay-mount: {e}");
            return ExitCode::from(2);
        }
    };
    forebay_log::to_stderr();
    let supervisor = match Supervisor::new(arguments.socket) {
        Ok(supervisor) => supervisor,
        Err(e) => {
            eprintln!("forebay-mount: {e}");
            return ExitCode::FAILURE;
        }
    };
    let done = if arguments.clear {
        mountpoint::clear_all(&arguments.pool.to_string_lossy())
    } else {
        run(&arguments, &supervisor)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if supervisor.socket.is_none() {
                eprintln!("forebay-mount: {e}");
            } else {
                tracing::error!("{e}");
            }
            supervisor.failed(&e);
            ExitCode::FAILURE
        }
    }
}

/// The supervisor's end of the socket, if there is one.
#[derive(Debug)]
struct Supervisor {
    socket: Option<OwnedFd>,
}

/// A message or signal to the main thread, or the end of the supervisor.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Unmount {
        lazy: bool,
        /// Repeated in a refusal.
        asker: u64,
    },
    /// A signal: the pool stops, or the process that started this one ends it.
    End,
    Gone,
    Nothing,
}

impl Supervisor {
    fn new(number: Option<RawFd>) -> Result<Supervisor> {
        let socket = number.map(packet::inherited).transpose();
        let socket = socket.map_err(|e| Error::io("cannot use the supervisor's socket", &e))?;
        Ok(Supervisor { socket })
    }

    /// A failed send is ignored, because the supervisor is gone.
    fn send(&self, message: &Value) {
        if let Some(socket) = &self.socket {
            let _ = packet::send(socket, message.to_string().as_bytes());
        }
    }

    fn failed(&self, e: &Error) {
        self.send(&json!({ "failed": failure(e) }));
    }

    /// Reports that the mount cannot be unmounted as requested.
    fn busy(&self, e: &Error, asker: u64) {
        self.send(&json!({ "busy": failure(e), "asker": asker }));
    }

    fn receive(&self) -> Event {
        let Some(socket) = &self.socket else { return Event::Nothing };
        let mut buffer = vec![0u8; MESSAGE_BYTES_MAX];
        let n = match packet::receive(socket, &mut buffer) {
            Received::Closed => return Event::Gone,
            Received::Nothing => return Event::Nothing,
            Received::Packet(n) => n,
        };
        let message: Value = serde_json::from_slice(&buffer[..n]).unwrap_or_default();
        match message.get("unmount") {
            Some(how) => {
                Event::Unmount { lazy: how["lazy"] == true, asker: how["asker"].as_u64().unwrap_or_default() }
            }
            None => Event::Nothing,
        }
    }
}

fn failure(e: &Error) -> Value {
    json!({ "code": e.code as u16, "what": e.what, "why": e.why, "cure": e.cure })
}

/// Blocks SIGTERM and SIGINT in all threads, and makes them readable.
fn block_signals() -> Result<OwnedFd> {
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT]);
    signals.map(OwnedFd::from).map_err(|e| Error::io("cannot watch for signals", &e))
}

/// Raises the limits that this process inherited from a user's shell; a supervisor has raised its own. Exceeding a
/// limit that cannot be raised must not kill this process, which serves other users too: the operation fails instead
/// (EFBIG).
fn shed_limits() {
    let raised = [
        libc::RLIMIT_NOFILE, // two for each file that is open
        libc::RLIMIT_FSIZE,
        libc::RLIMIT_CPU,
        libc::RLIMIT_AS,
        libc::RLIMIT_DATA,
        libc::RLIMIT_NPROC,
    ];
    // SAFETY: the structure lives over the calls; failure leaves a limit as it is.
    unsafe {
        for resource in raised {
            let mut limit: libc::rlimit = std::mem::zeroed();
            if libc::getrlimit(resource, &mut limit) == 0 {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(resource, &limit);
            }
        }
    }
    signals::ignore(&[libc::SIGXFSZ, libc::SIGXCPU]);
    // While SIGCHLD is ignored, this process could not wait for the programs that it starts.
    signals::reset(libc::SIGCHLD);
}

fn run(arguments: &Arguments, supervisor: &Supervisor) -> Result<()> {
    let signals = block_signals()?;
    shed_limits();
    // SAFETY: cannot fail. The kernel has applied each caller's umask already.
    unsafe { libc::umask(0) };
    let at = mountpoint::full_path(&arguments.at)?;
    let source = arguments.pool.to_string_lossy().into_owned();
    // The supervisor starts one process at a time, so a mount of this pool on the directory belongs to one that died.
    let dead = mountpoint::check_place(&at, &source, supervisor.socket.is_some())?;
    let pool = Pool::attach_as(&arguments.pool, Role::Mount)?;
    // If root owns the pool, no other user can write its shard.
    let owner = std::fs::metadata(&arguments.pool).map_err(|e| Error::io("cannot look at the pool", &e))?;
    let options = Options { distrusts: owner.uid() != 0, ..arguments.options };
    let mount = match dead {
        Some(dead) => mountpoint::mount_in_place_of(&dead, &source, options)?,
        None => mountpoint::mount(&at, &source, options)?,
    };
    let device = Arc::new(mount.device);
    let guard = Guard { mounted: mount.shown, armed: true };
    let what = || format!("cannot mount pool {source} on {}", at.display());
    let fs = FileSystem::new(pool, device).map_err(|code| Error::new(code, what()))?;
    let fs = Arc::new(fs);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let session =
        Session::start(&fs, (2 * processors).clamp(THREADS_MIN, THREADS_MAX), arguments.no_passthrough)?;
    // Checked in the kernel's table, without access to the directory: that would be a request to this process, and
    // while it waits for itself it cannot be replaced.
    if mountpoint::mounted_on(&at).is_none_or(|uppermost| uppermost.device != guard.mounted.device) {
        return Err(Error::new(Code::Busy, what()).why("something else was mounted there at the same time"));
    }
    let (data, why) = match &session.agreement.data {
        DataPath::Passthrough => ("passthrough", Value::Null),
        DataPath::PassthroughByHelper => ("passthrough", json!("files are registered by forebay-register")),
        DataPath::Requests(why) => ("requests", json!(why)),
    };
    let reason = why.as_str().map_or_else(String::new, |why| format!(" ({why})"));
    tracing::info!("pool {source} is mounted on {}: data by {data}{reason}", at.display());
    let announced = MountLink::new(&arguments.pool, &at);
    supervisor.send(&json!({ "ready": { "data": data, "why": why } }));
    serve(guard, supervisor, &signals, (&fs, &session));
    drop(announced);
    Ok(())
}

/// The link by which programs under the preload library find the mount. Dropping this removes the link.
struct MountLink {
    link: PathBuf,
    text: PathBuf,
}

impl MountLink {
    /// None when the link cannot be created: programs then do without the mount.
    fn new(pool: &Path, at: &Path) -> Option<MountLink> {
        let mounted = mountpoint::mounted_on(at)?;
        let text = forebay_types::mount_link(libc::makedev(0, mounted.device.1), at.as_os_str().as_bytes());
        let announced = MountLink { link: pool.join(MOUNT_LINK), text: OsString::from_vec(text).into() };
        // Created under another name first, so that there is always one whole link.
        let new = pool.join(format!("{MOUNT_LINK}.new"));
        let _ = std::fs::remove_file(&new);
        let done = std::os::unix::fs::symlink(&announced.text, &new)
            .and_then(|()| std::fs::rename(&new, &announced.link));
        done.inspect_err(|e| tracing::warn!("programs are not told of the mount: {}: {e}", new.display()))
            .ok()
            .map(|()| announced)
    }
}

impl Drop for MountLink {
    fn drop(&mut self) {
        // Unless the link belongs to another mount by now.
        if std::fs::read_link(&self.link).is_ok_and(|text| text == self.text) {
            let _ = std::fs::remove_file(&self.link);
        }
    }
}

/// Removes the mount when this is dropped: if a later step of the start fails, and at the end.
struct Guard {
    mounted: Mount,
    armed: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.armed {
            if let Err(e) = mountpoint::clear(&self.mounted) {
                tracing::error!("{e}");
            }
        }
    }
}

/// Handles messages and signals until the mount is gone.
fn serve(mut guard: Guard, supervisor: &Supervisor, signals: &OwnedFd, served: (&FileSystem, &Session)) {
    let (fs, session) = served;
    let at = guard.mounted.point.display().to_string();
    let mut unmounted: Option<Instant> = None;
    loop {
        let socket = supervisor.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut fds = [signals.as_fd().as_raw_fd(), socket].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: the array is as long as said. An interrupted wait looks again.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, LOOK_MS) };
        fs.lookup_pins.end_grace(&fs.nodes);
        if session.is_over() {
            tracing::info!("{at} was unmounted");
            guard.armed = false;
            supervisor.send(&json!({ "unmounted": {} }));
            return;
        }
        if unmounted.is_some_and(|then| then.elapsed() >= COPIES_GRACE) {
            tracing::warn!("{at} was unmounted; copies of it in other mount namespaces are dead from now on");
            return supervisor.send(&json!({ "unmounted": {} }));
        }
        let event = if fds[0].revents != 0 { Event::End } else { supervisor.receive() };
        match event {
            Event::Nothing => {}
            Event::Gone => {
                tracing::error!("the supervisor has died: unmounting {at}");
                return; // the guard removes it
            }
            Event::Unmount { lazy, asker } => match mountpoint::unmount(&guard.mounted) {
                Ok(()) => (guard.armed, unmounted) = (false, Some(Instant::now())),
                Err(e) if e.code == Code::NotFound => return,
                Err(e) if !lazy => supervisor.busy(&e, asker),
                Err(e) => match mountpoint::clear(&guard.mounted) {
                    Ok(()) => {
                        tracing::warn!("{e}; unmounted anyway");
                        guard.armed = false;
                        return supervisor.send(&json!({ "unmounted": {} }));
                    }
                    Err(e) => supervisor.busy(&e, asker),
                },
            },
            Event::End => match mountpoint::unmount(&guard.mounted) {
                Ok(()) => (guard.armed, unmounted) = (false, Some(Instant::now())),
                Err(e) if e.code == Code::NotFound => return,
                Err(e) => {
                    tracing::warn!("{e}; unmounting anyway");
                    return; // the guard removes it
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_nonsense_says_what_to_do() {
        let words = |line: &str| parse(line.split_whitespace().map(OsString::from));
        for line in ["", "--pool", "--pool /p", "--pool /p --at /m --what", "--pool /p --at /m --socket 1"] {
            assert!(!words(line).unwrap_err().cure.is_empty(), "{line:?}");
        }
        let arguments = words("--pool /p --at /m --allow-other --socket 5").unwrap().unwrap();
        assert!(arguments.options.allow_other && !arguments.clear);
        assert_eq!(arguments.socket, Some(5));
        assert!(words("--pool /p --clear").unwrap().unwrap().clear);
    }
}
