//! Starts and stops pools for `forebay up`, `forebay down` and `forebay run`.
//!
//! `up` starts `forebayd` in a session of its own, so that it outlives its starter, and waits for its report: it
//! serves, or why it cannot. `forebayd` does all preparation of the pool, because it holds the lock.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_data::Medium;
use forebay_sys::process::Stat;
use forebay_types::{Code, Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

use crate::bundle::Bundle;
use crate::control;
use crate::directory::{PoolDirectory, LOG_FILE, SOCKET_FILE};
use crate::identity::PoolIdentity;
use crate::media_profile::MediaProfile;
use crate::pool_place::sweep;
use crate::protocol::{Ask, Reply, Stopped};
use crate::target;
use forebay_tasks::Failure;

/// Longer than a supervisor waits for its worker to stop.
const DOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// A worker whose supervisor was killed ends within this time.
const WORKER_END: Duration = Duration::from_secs(5);
/// How long a process may have a pool and accept no connection while the pool is starting or stopping: to free the memory
/// of a large pool takes long.
const CHANGE_GRACE: Duration = Duration::from_secs(30);
/// The polling interval for changes that no event reports.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Environment variables of the starter that the daemon must not inherit.
const FOREIGN_VARIABLES: [&str; 6] = [
    "LD_PRELOAD",
    "LD_AUDIT",
    "FOREBAY_POOL",
    "FOREBAY_PREFIX",
    "FOREBAY_DISABLE",
    crate::programs::TOKEN_VARIABLE,
];

/// The pool to start.
#[derive(Clone, Debug, Default)]
pub struct UpOptions {
    /// The pool's directory.
    pub path: PathBuf,
    /// The medium; by default the existing pool's, else memory.
    pub media: Option<Medium>,
    /// Bytes; by default the existing pool's capacity, else as much as the medium and the memory cgroup permit.
    pub capacity_bytes: Option<u64>,
    /// Milliseconds between two snapshots of the shard on targets that outlive the node, 0 for none; by default the
    /// existing pool's setting, else a minute.
    pub snapshots_ms: Option<u64>,
    /// The medium that the targets emulate; by default the existing pool's setting, else none.
    pub media_profile: Option<MediaProfile>,
    /// The pool ends with its last member, and everything of it is removed.
    pub embedded: bool,
    /// The user did not choose the directory: if no target in memory can be made in it, the target may lie in
    /// `/dev/shm`.
    pub elsewhere_allowed: bool,
    /// The description of the pool's nodes, and the name of the one to start. It gives path, medium and capacity.
    pub node: Option<(Described, String)>,
    /// The node's data are lost: it takes a number that the pool has never had.
    pub renumber: bool,
}

/// A description of a pool's nodes.
#[derive(Clone, Debug)]
pub enum Described {
    /// A pool file.
    File(PathBuf),
    /// The pool file's text and the pool's secret.
    Bundle(Bundle),
}

/// A pool that was started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Started {
    /// The pool's directory.
    pub pool: PathBuf,
    /// The supervisor's process number.
    pub pid: u32,
    /// The pool's identity.
    pub identity: PoolIdentity,
    /// Drawbacks of the medium and its placement, for users to read.
    pub costs: Vec<String>,
    /// True when the pool existed before and has its data.
    pub reopened: bool,
}

/// The pipe by which the daemon reports the result of the start, once, to its starter.
#[derive(Debug)]
pub(crate) struct Report(Option<File>);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ReportText {
    Started(Box<Started>),
    Failed(Failure),
}

impl Report {
    pub(crate) fn new(fd: Option<OwnedFd>) -> Report {
        Report(fd.map(File::from))
    }

    /// Sends the result of the start. Later calls do nothing.
    pub(crate) fn send(&mut self, result: &Result<Started>) {
        let Some(mut file) = self.0.take() else { return };
        let text = match result {
            Ok(started) => ReportText::Started(Box::new(started.clone())),
            Err(e) => ReportText::Failed(Failure::from(e)),
        };
        if let Ok(bytes) = serde_json::to_vec(&text) {
            let _ = file.write_all(&bytes); // fails if the starter has ended, which does not matter
        }
    }
}

/// The path of `forebayd`: beside this program, or where the build puts it for tests.
fn daemon_program() -> Result<PathBuf> {
    let what = "cannot find forebayd";
    let me = std::env::current_exe().map_err(|e| Error::io(what, &e))?;
    let beside = me.with_file_name("forebayd");
    // The build puts test binaries one directory below the programs.
    let above = me.parent().and_then(Path::parent).map(|dir| dir.join("forebayd"));
    [Some(beside.clone()), above].into_iter().flatten().find(|p| p.is_file()).ok_or_else(|| {
        Error::new(Code::NotFound, what)
            .why(format!("{} is not there", beside.display()))
            .cure("install forebay and forebayd into one directory (`make install`)")
    })
}

/// Starts a pool and waits until it serves. [`Code::Busy`] when it is already up.
pub fn up(options: &UpOptions) -> Result<Started> {
    let what = || format!("cannot start pool {}", options.path.display());
    let program = daemon_program()?;
    let (reader, writer) = std::io::pipe().map_err(|e| Error::io(what(), &e))?;
    let report = OwnedFd::from(writer);
    let number = report.as_raw_fd();
    let path = std::path::absolute(&options.path).map_err(|e| Error::io(what(), &e))?;

    let mut command = Command::new(&program);
    command.arg("--pool").arg(path).args(["--report-fd", &number.to_string()]);
    if let Some(media) = options.media {
        command.args(["--media", &media.to_string()]);
    }
    if let Some(bytes) = options.capacity_bytes {
        command.args(["--capacity", &bytes.to_string()]);
    }
    if let Some(ms) = options.snapshots_ms {
        let seconds = if ms == 0 { "off".to_owned() } else { format!("{}", ms as f64 / 1000.0) };
        command.args(["--snapshots", &seconds]);
    }
    if let Some(profile) = &options.media_profile {
        command.args(["--media-profile", &profile.to_string()]);
    }
    let mut input = None;
    if let Some((described, node)) = &options.node {
        match described {
            Described::File(file) => command.arg("--pool-file").arg(file),
            Described::Bundle(bundle) => {
                input = Some(bundle.encode());
                command.arg("--bundle")
            }
        };
        command.args(["--node", node]);
    }
    if options.renumber {
        command.arg("--renumber");
    }
    if options.embedded {
        command.arg("--embedded");
    }
    if options.elsewhere_allowed {
        command.arg("--elsewhere-allowed");
    }
    for name in FOREIGN_VARIABLES {
        command.env_remove(name);
    }
    let null = || -> Result<Stdio> {
        let opened = File::options().read(true).write(true).open("/dev/null");
        opened.map(Stdio::from).map_err(|e| {
            Error::io(what(), &e)
                .why(format!("/dev/null: {e}"))
                .cure("make the device (`mknod -m 666 /dev/null c 1 3`), or give the container one")
        })
    };
    command.stdin(if input.is_some() { Stdio::piped() } else { null()? });
    command.stdout(null()?).stderr(null()?).current_dir("/");
    // SAFETY: between fork and exec only system calls are made, all async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            forebay_sys::signals::SignalMask::empty().set();
            libc::setsid();
            // A second fork makes init the daemon's parent: its starter may live long and never reap it.
            match libc::fork() {
                -1 => return Err(std::io::Error::last_os_error()),
                0 => {}
                _ => libc::_exit(0),
            }
            if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let mut between = command.spawn().map_err(|e| {
        Error::io(what(), &e).cure(format!("is {} a program of this machine?", program.display()))
    })?;
    drop(report);
    if let (Some(input), Some(mut pipe)) = (input, between.stdin.take()) {
        // A daemon that does not read it reports the reason.
        let _ = pipe.write_all(&input);
    }
    let _ = between.wait();
    receive_report(reader, options)
}

fn receive_report(mut reader: std::io::PipeReader, options: &UpOptions) -> Result<Started> {
    let what = || format!("cannot start pool {}", options.path.display());
    let mut text = Vec::new();
    reader.read_to_end(&mut text).map_err(|e| Error::io(what(), &e))?;
    match serde_json::from_slice(&text) {
        Ok(ReportText::Started(started)) => Ok(*started),
        Ok(ReportText::Failed(failure)) => Err(failure.into()),
        Err(_) => Err(Error::new(Code::Io, what())
            .why("its daemon ended without a report")
            .cure(format!("see {}", options.path.join(LOG_FILE).display()))),
    }
}

/// How to stop a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct DownOptions<'a> {
    /// Keep the data of a mounted tmpfs for the next `up`.
    pub keep: bool,
    /// Stop the pool although programs use it.
    pub force: bool,
    /// What [`ensure_unused`] returned, or [`UNASKED`]. If a program has used the pool since, it is not stopped:
    /// [`Attempt::Used`].
    pub uses: Option<u64>,
    /// A daemon that does not answer is not killed: the error is [`unanswered`].
    pub spares: bool,
    /// A pool with volumes is not stopped: [`Attempt::Used`].
    pub spares_volumes: bool,
    /// Once it can be read, nothing is waited for, and the pool is neither told to stop nor killed nor swept if that
    /// was not begun yet.
    pub interrupt: Option<BorrowedFd<'a>>,
}

/// For [`DownOptions::uses`]: the pool's daemon did not answer. If it answers now, the pool is not stopped.
pub const UNASKED: u64 = u64::MAX;

/// What an attempt to stop a pool has come to.
#[derive(Clone, Debug)]
pub enum Attempt {
    /// The pool is down, and none of its processes is left.
    Stopped(Stopped),
    /// The pool is up, as a program has used it meanwhile, or as it has volumes. Its mount may have been taken away.
    Used,
    /// The pool is as it was, as the attempt was interrupted. Its mount may have been taken away.
    Interrupted,
    /// The pool was told to stop, and its end is not waited for, as the attempt was interrupted.
    Stopping,
}

/// Fails if programs use the pool in `path`, and takes its mount away. Returns a number by which [`try_down`] notices that
/// a program has used the pool since.
pub fn ensure_unused(path: &Path) -> Result<u64> {
    let dir = PoolDirectory::open(path)?;
    let mut connection = control::Supervisor::connect(&dir)?;
    let status = connection.status()?;
    ensure_unused_by(&mut connection, &status, &dir)
}

fn ensure_unused_by(
    connection: &mut control::Supervisor,
    status: &serde_json::Value,
    dir: &PoolDirectory,
) -> Result<u64> {
    refuse_if_used(status, dir)?;
    if status["mounts"].as_array().is_some_and(|mounts| !mounts.is_empty()) {
        unmount_unused(connection, dir)?;
    }
    Ok(status["uses"].as_u64().unwrap_or_default())
}

/// Stops the pool in `path`, or removes the remains of a killed one. Returns when none of its processes is left.
/// [`Code::NotFound`] when there is no pool; [`Code::Busy`] when a program has begun to use it meanwhile.
pub fn down(path: &Path, options: DownOptions<'_>) -> Result<Stopped> {
    let why = match try_down(path, options)? {
        Attempt::Stopped(stopped) => return Ok(stopped),
        Attempt::Used => "a program has used it meanwhile",
        Attempt::Interrupted | Attempt::Stopping => "that was interrupted",
    };
    Err(Error::new(Code::Busy, format!("cannot stop pool {}", path.display())).why(why).cure("try again"))
}

/// As [`down`], but also returns when the pool is not stopped, or its end is not waited for.
pub fn try_down(path: &Path, options: DownOptions<'_>) -> Result<Attempt> {
    let dir = PoolDirectory::open(path)?;
    let identity = match PoolIdentity::read(&dir) {
        Ok(Some(identity)) => identity,
        // A supervisor that died before it wrote the pool's identity leaves only a lock.
        Ok(None) if dir.is_locked()? => {
            return Err(dir.not_up().why("it is starting or stopping").cure("try again"))
        }
        Ok(None) => return Err(dir.not_up().why("there is no pool in that directory")),
        Err(e) => return Err(e),
    };
    let mut connection = match reach(&dir, options.interrupt)? {
        Reached::Served(connection) => connection,
        Reached::Free if is_interrupted(options) => return Ok(Attempt::Interrupted),
        Reached::Free => return swept(dir, options.keep).map(Attempt::Stopped),
        Reached::Stuck if is_interrupted(options) => return Ok(Attempt::Interrupted),
        Reached::Stuck => return kill(&dir, &identity, options),
        Reached::Interrupted => return Ok(Attempt::Interrupted),
    };
    let status = match connection.status_until(options.interrupt) {
        Ok(Some(status)) => status,
        Ok(None) => return Ok(Attempt::Interrupted),
        Err(e) if matches!(e.code, Code::TimedOut | Code::PoolGone) && is_interrupted(options) => {
            return Ok(Attempt::Interrupted)
        }
        // The supervisor never blocks, so it is stopped or stuck.
        Err(e) if e.code == Code::TimedOut => return kill(&dir, &identity, options),
        Err(e) if e.code == Code::PoolGone => return after_its_end(dir, e, options, Attempt::Interrupted),
        // It lives, and refuses: it has no descriptor for one more connection, or is of another version.
        Err(e) => return Err(e),
    };
    let uses = if status["state"] == "stopping" {
        None // this waits for its end
    } else if options.uses.is_some_and(|uses| Some(uses) != status["uses"].as_u64()) {
        return Ok(Attempt::Used); // before the mount is taken away
    } else if options.force {
        None
    } else {
        let uses = ensure_unused_by(&mut connection, &status, &dir)?;
        Some(options.uses.unwrap_or(uses))
    };
    if is_interrupted(options) {
        return Ok(Attempt::Interrupted);
    }
    let ask = Ask::Down { keep: options.keep, uses, spares_volumes: options.spares_volumes };
    match connection.ask_until(&ask, DOWN_TIMEOUT, options.interrupt) {
        Ok(Some(Reply::Stopped(stopped))) => {
            wait_until_unlocked(&dir, DOWN_TIMEOUT, options.interrupt);
            Ok(Attempt::Stopped(stopped))
        }
        Ok(Some(Reply::Used)) => Ok(Attempt::Used),
        Ok(Some(Reply::Failed(failure))) => Err(failure.into()),
        Ok(Some(_)) => Err(Error::new(Code::Malformed, "the supervisor sent an unexpected reply")),
        Ok(None) => was_told(&dir),
        Err(e) if matches!(e.code, Code::TimedOut | Code::PoolGone) && is_interrupted(options) => {
            Ok(Attempt::Stopping)
        }
        Err(e) if e.code == Code::TimedOut => kill(&dir, &identity, options),
        Err(e) if e.code == Code::PoolGone => after_its_end(dir, e, options, Attempt::Stopping),
        Err(e) => Err(e),
    }
}

/// What an attempt has come to that was interrupted after its request to stop was sent.
fn was_told(dir: &PoolDirectory) -> Result<Attempt> {
    // The supervisor takes requests in the order in which they come, so it has seen that one before this.
    match control::Supervisor::connect(dir).and_then(|mut again| again.status()) {
        Ok(status) if status["state"] != "stopping" => Ok(Attempt::Interrupted),
        Ok(_) => Ok(Attempt::Stopping),
        Err(e) if matches!(e.code, Code::PoolGone | Code::NotFound) => Ok(Attempt::Stopping),
        Err(e) => Err(Error::new(e.code, format!("cannot tell whether pool {} stops", dir.path().display()))
            .why(format!(
                "it was told to, and then the wait for its end was interrupted; {}: {}",
                e.what, e.why
            ))
            .cure("`forebay down` again waits for its end, or stops it")),
    }
}

/// A pool's supervisor, or why there is none.
enum Reached {
    Served(control::Supervisor),
    /// No process has the pool.
    Free,
    /// A process has the pool, and has accepted no connection for a long time.
    Stuck,
    Interrupted,
}

/// Connects to a pool's supervisor. Waits while the pool is starting or stopping.
fn reach(dir: &PoolDirectory, interrupt: Option<BorrowedFd<'_>>) -> Result<Reached> {
    let end = Instant::now() + CHANGE_GRACE;
    loop {
        match control::Supervisor::connect(dir) {
            Ok(connection) => return Ok(Reached::Served(connection)),
            Err(e) if e.code == Code::NotFound => {}
            // This process lacks a permission or a resource, which says nothing about the pool.
            Err(e) => return Err(e),
        }
        if !dir.is_locked()? {
            return Ok(Reached::Free);
        }
        if Instant::now() >= end {
            return Ok(Reached::Stuck);
        }
        if waits_in_vain(interrupt, LOOK_AGAIN) {
            return Ok(Reached::Interrupted);
        }
    }
}

/// The supervisor has closed the connection: it has ended, or was killed, or does not serve this process. If the wait for
/// its worker is interrupted, the attempt has come to `interrupted`.
fn after_its_end(
    dir: PoolDirectory,
    e: Error,
    options: DownOptions<'_>,
    interrupted: Attempt,
) -> Result<Attempt> {
    if !wait_until_unlocked(&dir, WORKER_END, options.interrupt) {
        if is_interrupted(options) {
            return Ok(interrupted);
        }
        return Err(e.cure(format!("see {}", dir.file(LOG_FILE).display())));
    }
    if dir.file(SOCKET_FILE).exists() {
        return swept(dir, options.keep).map(Attempt::Stopped);
    }
    // Another command has stopped it.
    let data_kept = PoolIdentity::read(&dir).is_ok_and(|identity| identity.is_some());
    Ok(Attempt::Stopped(Stopped { data_kept, killed: false }))
}

fn swept(dir: PoolDirectory, keep: bool) -> Result<Stopped> {
    let gone = dir.not_up().why("another command has just removed it");
    sweep(dir, keep).map_err(|e| if e.code == Code::Stale { gone } else { e })
}

fn is_interrupted(options: DownOptions<'_>) -> bool {
    options.interrupt.is_some() && waits_in_vain(options.interrupt, Duration::ZERO)
}

/// Waits for `period`, but no longer than until `interrupt` can be read: true then.
fn waits_in_vain(interrupt: Option<BorrowedFd<'_>>, period: Duration) -> bool {
    let Some(interrupt) = interrupt else {
        std::thread::sleep(period);
        return false;
    };
    let limit = Timespec { tv_sec: period.as_secs() as i64, tv_nsec: period.subsec_nanos() as i64 };
    poll(&mut [PollFd::new(&interrupt, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// The error for `what`, which is not done as the daemon of the pool in `path` does not answer, and may have data that the
/// pool's backing store does not have.
pub fn unanswered(path: &Path, what: String) -> Error {
    let holder = PoolDirectory::open(path).ok().and_then(|dir| dir.lock_holder());
    let state = holder.and_then(|pid| Stat::of(pid as u32).ok()).map(|stat| stat.state);
    let (why, cure) = match (holder, state) {
        (Some(pid), Some(b'T' | b't')) => (
            format!("its daemon does not answer, because process {pid} is stopped"),
            format!("`kill -CONT {pid}` lets it go on, and then try again"),
        ),
        (Some(pid), Some(b'D')) => (
            format!("its daemon does not answer, because process {pid} is blocked in the kernel"),
            format!("see /proc/{pid}/stack for what blocks it, and try again"),
        ),
        (Some(pid), Some(_)) => {
            (format!("its daemon (process {pid}) does not answer"), "try again".to_owned())
        }
        _ => ("its daemon does not answer".to_owned(), "try again".to_owned()),
    };
    Error::new(Code::TimedOut, what)
        .why(format!("{why}; it may have data that its backing store does not have"))
        .cure(format!("{cure}; `forebay down --pool {} --discard` kills it with its data", path.display()))
}

/// True when a pool whose supervisor has ended was killed rather than stopped: the files that a supervisor removes at
/// its end still exist. Its worker holds the lock too, and ends a moment later.
pub fn was_killed(path: &Path) -> bool {
    let end = Instant::now() + WORKER_END;
    loop {
        match PoolDirectory::open(path) {
            Ok(dir) if dir.file(SOCKET_FILE).exists() => match dir.is_locked() {
                Ok(false) => return true,
                // A new pool has started in the same directory.
                _ if Instant::now() >= end => return false,
                _ => std::thread::sleep(LOOK_AGAIN),
            },
            _ => return false,
        }
    }
}

/// The state of a pool's directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// No pool was made there, or it was stopped and removed.
    None,
    /// Its supervisor accepts connections.
    Up,
    /// A process holds its lock and does not serve: the pool is starting or stopping.
    Changing,
    /// It is down, and its identity exists.
    Down {
        /// Its daemon did not stop it: the daemon was killed, or the node failed.
        killed: bool,
        /// Its data exist, for the next `up`, or cannot be looked for now: only those are gone that are not found.
        has_data: bool,
    },
}

/// Determines the state of a pool's directory. Starts nothing and changes nothing.
pub fn presence(path: &Path) -> Result<Presence> {
    let dir = match PoolDirectory::open(path) {
        Err(e) if e.code == Code::NotFound => return Ok(Presence::None),
        other => other?,
    };
    match control::Supervisor::connect(&dir) {
        Ok(_) => return Ok(Presence::Up),
        Err(e) if e.code == Code::NotFound => {}
        Err(e) => return Err(e),
    }
    if dir.is_locked()? {
        return Ok(Presence::Changing);
    }
    let Some(identity) = PoolIdentity::read(&dir)? else { return Ok(Presence::None) };
    Ok(Presence::Down {
        killed: dir.file(SOCKET_FILE).exists(),
        has_data: target::open_target_at_rest(&dir, &identity)
            .map_or_else(|e| e.code != Code::NotFound, |_| true),
    })
}

/// As [`presence`], but waits up to `grace` while the pool is starting or stopping.
pub fn settled_presence(path: &Path, grace: Duration) -> Result<Presence> {
    let end = Instant::now() + grace;
    loop {
        match presence(path)? {
            Presence::Changing if Instant::now() < end => std::thread::sleep(LOOK_AGAIN),
            other => return Ok(other),
        }
    }
}

/// Removes the remains of the embedded pools below `base` whose supervisors were killed.
pub fn sweep_dead(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        let is_pool = entry.file_name().as_encoded_bytes().starts_with(b"run-");
        if is_pool && entry.file_type().is_ok_and(|t| t.is_dir()) {
            sweep_if_dead(&entry.path());
        }
    }
}

/// Removes the remains of the embedded pool in `path` if its supervisor was killed. Any other pool stays unchanged.
pub fn sweep_if_dead(path: &Path) {
    let Ok(dir) = PoolDirectory::open(path) else { return };
    if dir.is_locked().is_ok_and(|locked| !locked)
        && PoolIdentity::read(&dir).is_ok_and(|i| i.is_some_and(|i| i.embedded))
    {
        let _ = sweep(dir, false);
    }
}

/// Unmounts, unless programs use the mount.
fn unmount_unused(connection: &mut control::Supervisor, dir: &PoolDirectory) -> Result<()> {
    connection.unmount(None, false).or_else(|e| match e.code {
        Code::NotFound => Ok(()), // it was unmounted meanwhile
        code => Err(Error::new(code, format!("cannot stop pool {}", dir.path().display()))
            .why(e.what + ": " + &e.why)
            .cure(
                "end these programs or have them leave the mount, or stop the pool under them with --force",
            )),
    })
}

fn refuse_if_used(status: &serde_json::Value, dir: &PoolDirectory) -> Result<()> {
    let (runs, first_run) = (status["members"].as_u64(), status["member_labels"][0].as_str());
    let (programs, first_program) = (status["programs"].as_u64(), status["program_labels"][0].as_str());
    // The programs of a run are not counted with it.
    let (who, count, first) = match (first_run, first_program) {
        (Some(first), _) => ("`forebay run`", runs, first),
        (None, Some(first)) => ("a program", programs, first),
        (None, None) => return Ok(()),
    };
    let more = match count.unwrap_or(1) {
        0 | 1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    Err(Error::new(Code::Busy, format!("cannot stop pool {}", dir.path().display()))
        .why(format!("{who} uses it: {first}{more}"))
        .cure("wait for it, or stop the pool under it with --force"))
}

/// Kills a supervisor that does not answer, because it is stopped or stuck, unless it is to be spared. The caller has seen
/// that nothing has interrupted the attempt.
fn kill(dir: &PoolDirectory, identity: &PoolIdentity, options: DownOptions<'_>) -> Result<Attempt> {
    let what = || format!("cannot stop pool {}", dir.path().display());
    if options.spares {
        return Err(unanswered(dir.path(), what()));
    }
    let stuck = |why: &str| {
        Error::new(Code::TimedOut, what()).why(why).cure(format!("see {}", dir.file(LOG_FILE).display()))
    };
    let pid = dir.lock_holder().and_then(rustix::process::Pid::from_raw);
    let Some(pid) = pid else { return Err(stuck("the process that holds its lock is unknown")) };
    // The lock is held, so the recorded number belongs to the supervisor, unless only the worker is left. Then nothing
    // is killed, and the worker releases the lock when it ends.
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    if let Ok(process) = process {
        let name =
            std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
        if name.trim() == "forebayd" {
            let _ = rustix::process::pidfd_send_signal(&process, rustix::process::Signal::KILL);
        }
    }
    // What is killed does not clear away what it leaves, so an interrupt that comes now ends only a long wait.
    if !wait_until_unlocked(dir, WORKER_END, None)
        && !wait_until_unlocked(dir, DOWN_TIMEOUT, options.interrupt)
    {
        return Err(stuck("a process of it does not die"));
    }
    let dir = PoolDirectory::open(dir.path())?;
    let mut stopped = swept(dir, options.keep)?;
    stopped.killed = true;
    stopped.data_kept &= identity.backing != crate::identity::Backing::Detached;
    Ok(Attempt::Stopped(stopped))
}

/// False if the lock is still held when the time is over or `interrupt` can be read.
fn wait_until_unlocked(dir: &PoolDirectory, limit: Duration, interrupt: Option<BorrowedFd<'_>>) -> bool {
    let end = Instant::now() + limit;
    while !dir.is_locked().is_ok_and(|locked| !locked) {
        if Instant::now() >= end || waits_in_vain(interrupt, LOOK_AGAIN) {
            return false;
        }
    }
    true
}
