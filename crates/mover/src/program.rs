//! `forebay-mover` as a program: its command line, its start, and what it reports to its supervisor.
//!
//! It exchanges JSON packets with the supervisor over a SOCK_SEQPACKET socket: `ready` or `failed` once, then `report`
//! now and then. When that socket closes, the supervisor is dead and so is the pool: the mover ends.
//!
//! Threads: this one, which waits for signals and the supervisor; the engine's; and those of [`crate::tasks`].

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_client::{Pool, Role};
use forebay_sys::packet::{self, Received};
use forebay_sys::process::shed_preload;
use forebay_sys::signals::{self, Signals};
use forebay_tasks::{Failure, Keep, MoverReport, Verb};
use forebay_types::{Code, Error, Ino, Result, STORES_MARK};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde_json::{json, Value};

use crate::tasks::{Operations, Progress, TaskServer};

const HELP: &str = "\
forebay-mover: copies between a pool and its backing stores. `forebay attach` starts it.

Usage: forebay-mover --pool DIR

  --pool DIR  the pool's directory
  --version   print the version

SIGTERM ends it; what it has not copied yet stays in the pool. Credentials of object stores come from the environment,
profile files or the instance (AWS_ACCESS_KEY_ID, ~/.aws/credentials).
Environment: FOREBAY_LOG=error|warn|info|debug|trace sets how much is logged.
";

/// How often the state is reported to the supervisor.
const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// Maximum bytes of a packet to the supervisor, which receives no larger ones.
const PACKET_BYTES_MAX: usize = 16 * 1024;
/// How long the mover of a killed supervisor may take to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
const LOCK_PERIOD: Duration = Duration::from_millis(20);
/// Bytes of a packet from the supervisor, which sends none yet.
const RECEIVED_BYTES_MAX: usize = 4096;

/// The part of the mover that copies. It has threads of its own, which run from its start until [`Engine::stop`].
pub trait Engine: Operations {
    /// What the supervisor's status shows. Called about once a second; must not wait for a store.
    fn report(&self) -> MoverReport;

    /// Ends its threads as far as they do not hang in a store. Called once, at the end of the process.
    fn stop(&self);
}

#[derive(Debug, Default)]
struct Arguments {
    pool: PathBuf,
    socket: Option<RawFd>,
}

fn parse(arguments: impl Iterator<Item = OsString>) -> Result<std::result::Result<Arguments, String>> {
    let bad =
        |what: String| Error::new(Code::Invalid, what).cure("`forebay-mover --help` shows what there is");
    let mut parsed = Arguments::default();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let name = argument.to_string_lossy().into_owned();
        let mut value = || arguments.next().ok_or_else(|| bad(format!("{name} needs a value")));
        match name.as_str() {
            "--pool" => parsed.pool = value()?.into(),
            "--socket" => {
                let number = value()?.to_string_lossy().parse().ok().filter(|fd| *fd > 2);
                parsed.socket =
                    Some(number.ok_or_else(|| bad(format!("{name} needs a descriptor's number")))?);
            }
            "--help" | "-h" => return Ok(Err(HELP.to_owned())),
            "--version" | "-V" => return Ok(Err(format!("forebay-mover {}\n", env!("CARGO_PKG_VERSION")))),
            _ => return Err(bad(format!("unknown argument {name:?}"))),
        }
    }
    if parsed.pool.as_os_str().is_empty() {
        return Err(bad("no pool is named".to_owned()));
    }
    Ok(Ok(parsed))
}

/// Runs `forebay-mover` with these arguments, without the program's name. `start` starts the engine on the pool.
pub fn main(
    arguments: impl Iterator<Item = OsString>,
    start: impl FnOnce(&'static Pool) -> Result<Arc<dyn Engine>>,
) -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebay-mover: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    let arguments = match parse(arguments) {
        Ok(Ok(arguments)) => arguments,
        Ok(Err(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("forebay-mover: {e}");
            return ExitCode::from(2);
        }
    };
    forebay_log::to_stderr();
    let supervisor = match Supervisor::new(arguments.socket) {
        Ok(supervisor) => supervisor,
        Err(e) => {
            eprintln!("forebay-mover: {e}");
            return ExitCode::FAILURE;
        }
    };
    match run(&arguments, &supervisor, start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("the mover ends: {e}");
            supervisor.send(&json!({ "failed": Failure::from(&e) }));
            ExitCode::FAILURE
        }
    }
}

/// The supervisor's end of the socket, if there is one.
#[derive(Debug)]
struct Supervisor {
    socket: Option<OwnedFd>,
}

impl Supervisor {
    fn new(number: Option<RawFd>) -> Result<Supervisor> {
        let socket = number.map(packet::inherited).transpose();
        let socket = socket.map_err(|e| Error::io("cannot use the supervisor's socket", &e))?;
        Ok(Supervisor { socket })
    }

    /// A failed send is ignored: the supervisor is gone, which [`Supervisor::is_gone`] finds.
    fn send(&self, message: &Value) {
        if let Some(socket) = &self.socket {
            let _ = packet::send(socket, message.to_string().as_bytes());
        }
    }

    fn is_gone(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut buffer = [0; RECEIVED_BYTES_MAX];
        loop {
            match packet::receive(socket, &mut buffer) {
                Received::Packet(_) => {}
                Received::Nothing => return false,
                Received::Closed => return true,
            }
        }
    }
}

fn run(
    arguments: &Arguments,
    supervisor: &Supervisor,
    start: impl FnOnce(&'static Pool) -> Result<Arc<dyn Engine>>,
) -> Result<()> {
    let _ = rustix::thread::set_name(c"forebay-mover");
    let signals =
        Signals::block(&[rustix::process::Signal::TERM, rustix::process::Signal::INT].map(|s| s.as_raw()))
            .map_err(|e| Error::io("cannot wait for signals", &e))?;
    // While SIGCHLD is ignored, this process could not wait for programs that it starts.
    signals::reset(rustix::process::Signal::CHILD.as_raw());
    let _lock =
        lock(&arguments.pool, if supervisor.socket.is_some() { LOCK_PATIENCE } else { Duration::ZERO })?;
    let pool = Pool::attach_as(&arguments.pool, Role::Tool)?;
    let engine = start(pool)?;
    let tasks = TaskServer::start(&arguments.pool, engine.clone())?;
    tracing::info!("the mover runs");
    supervisor.send(&json!({ "ready": {} }));
    serve(supervisor, &signals, &*engine);
    tasks.stop();
    engine.stop();
    Ok(())
}

/// Excludes a second mover of the pool, as long as the file is open. Waits for the mover of a supervisor that was killed,
/// which is about to end.
fn lock(pool: &Path, patience: Duration) -> Result<File> {
    let path = pool.join(STORES_MARK);
    let what = || format!("cannot lock {}", path.display());
    let mark = File::options().create(true).append(true).open(&path).map_err(|e| Error::io(what(), &e))?;
    let until = Instant::now() + patience;
    loop {
        match rustix::fs::flock(&mark, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(mark),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOCK_PERIOD),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::new(Code::Busy, "cannot start a mover")
                    .why(format!("another one serves pool {}", pool.display())))
            }
            Err(e) => return Err(Error::io(what(), &e.into())),
        }
    }
}

/// Reports now and then, until a signal comes or the supervisor is gone.
fn serve(supervisor: &Supervisor, signals: &Signals, engine: &dyn Engine) {
    let period = Timespec { tv_sec: REPORT_PERIOD.as_secs() as i64, tv_nsec: 0 };
    let mut reported = None;
    loop {
        let report = engine.report();
        if reported.as_ref() != Some(&report) {
            supervisor.send(&json!({ "report": report.clone().bounded(PACKET_BYTES_MAX / 2) }));
            reported = Some(report);
        }
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend(
            supervisor.socket.iter().map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)),
        );
        let _ = poll(&mut fds, Some(&period)); // interrupted: looks anyway
        if let Some(received) = signals.next() {
            tracing::info!("signal {}: the mover ends", received.signal);
            return;
        }
        if supervisor.is_gone() {
            tracing::error!("the supervisor has died: the mover ends");
            return;
        }
    }
}

/// Starts no engine: tasks are refused, and nothing is copied.
pub fn without_engine(_: &'static Pool) -> Result<Arc<dyn Engine>> {
    Ok(Arc::new(WithoutEngine))
}

struct WithoutEngine;

fn no_engine(what: String) -> Error {
    Error::new(Code::NotSupported, what).why("this forebay-mover was built without its engine")
}

impl Operations for WithoutEngine {
    fn run(&self, verb: Verb, _: Ino, _: bool, _: &Progress) -> Result<()> {
        Err(no_engine(format!("cannot {verb}")))
    }

    fn resolve(&self, _: Ino, _: &[u8], _: Keep) -> Result<()> {
        Err(no_engine("cannot settle a conflict".to_owned()))
    }
}

impl Engine for WithoutEngine {
    fn report(&self) -> MoverReport {
        MoverReport::default()
    }

    fn stop(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_nonsense_says_what_to_do() {
        let words = |line: &str| parse(line.split_whitespace().map(OsString::from));
        for line in ["", "--pool", "--pool /p --what", "--pool /p --socket 1", "--pool /p --socket x"] {
            assert!(!words(line).unwrap_err().cure.is_empty(), "{line:?}");
        }
        let arguments = words("--pool /p --socket 5").unwrap().unwrap();
        assert_eq!((arguments.pool, arguments.socket), (PathBuf::from("/p"), Some(5)));
    }
}
