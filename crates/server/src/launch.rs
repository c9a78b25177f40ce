//! Starts and stops pools for `forebay up`, `forebay down` and `forebay run`.
//!
//! `up` starts `forebayd` in a session of its own, so that it outlives its starter, and waits for its report: it
//! serves, or why it cannot. `forebayd` does all preparation of the pool, because it holds the lock.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_data::Medium;
use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use crate::bundle::Bundle;
use crate::control;
use crate::directory::{PoolDirectory, LOG_FILE, SOCKET_FILE};
use crate::identity::PoolIdentity;
use crate::media_profile::MediaProfile;
use crate::pool_place::sweep;
use crate::protocol::{Ask, Stopped};
use crate::target;
use forebay_tasks::Failure;

/// Longer than a supervisor waits for its worker to stop.
const DOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// A worker whose supervisor was killed ends within this time.
const WORKER_END: Duration = Duration::from_secs(5);
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
pub struct DownOptions {
    /// Keep the data of a mounted tmpfs for the next `up`.
    pub keep: bool,
    /// Stop the pool although programs use it.
    pub force: bool,
    /// What [`ensure_unused`] returned. If a program has used the pool since, it is not stopped: [`Code::Stale`].
    pub uses: Option<u64>,
    /// A daemon that does not answer is not killed: [`Code::TimedOut`].
    pub spares: bool,
}

/// Fails if programs use the pool in `path`, and takes its mount away. Returns a number by which [`down`] notices that a
/// program has used the pool since.
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
/// [`Code::NotFound`] when there is no pool.
pub fn down(path: &Path, options: DownOptions) -> Result<Stopped> {
    let dir = PoolDirectory::open(path)?;
    let identity = match PoolIdentity::read(&dir) {
        Ok(Some(identity)) => identity,
        // A supervisor that died before it wrote the pool's identity leaves only a lock.
        Ok(None) if dir.is_locked() => {
            return Err(dir.not_up().why("it is starting or stopping").cure("try again"))
        }
        Ok(None) => return Err(dir.not_up().why("there is no pool in that directory")),
        Err(e) => return Err(e),
    };
    let kill = || match options.spares {
        true => Err(Error::new(Code::TimedOut, format!("cannot stop pool {}", path.display()))
            .why("its daemon does not answer, and may have data that its backing store does not have")
            .cure("try again; `forebay down --discard` kills it with its data")),
        false => kill(&dir, &identity, options.keep),
    };
    let Ok(mut connection) = control::Supervisor::connect(&dir) else {
        if dir.is_locked() {
            return kill();
        }
        return sweep(dir, options.keep);
    };
    let uses = match connection.status() {
        // Before the mount is taken away.
        Ok(status) if options.uses.is_some_and(|uses| Some(uses) != status["uses"].as_u64()) => {
            return Err(Error::new(Code::Stale, format!("cannot stop pool {}", path.display()))
                .why("a program has used it meanwhile"))
        }
        Ok(status) if !options.force => {
            let uses = ensure_unused_by(&mut connection, &status, &dir)?;
            Some(options.uses.unwrap_or(uses))
        }
        Ok(_) => None,
        Err(_) => return kill(), // the supervisor never blocks, so it is stopped or stuck
    };
    match connection.ask(&Ask::Down { keep: options.keep, uses }, Some(DOWN_TIMEOUT)) {
        Ok(crate::protocol::Reply::Stopped(stopped)) => {
            wait_until_unlocked(&dir, DOWN_TIMEOUT);
            Ok(stopped)
        }
        Ok(crate::protocol::Reply::Failed(failure)) => Err(failure.into()),
        Ok(_) => Err(Error::new(Code::Malformed, "the supervisor sent an unexpected reply")),
        Err(_) => kill(),
    }
}

/// True when a pool whose supervisor has ended was killed rather than stopped: the files that a supervisor removes at
/// its end still exist. Its worker holds the lock too, and ends a moment later.
pub fn was_killed(path: &Path) -> bool {
    let end = Instant::now() + WORKER_END;
    loop {
        match PoolDirectory::open(path) {
            Ok(dir) if dir.file(SOCKET_FILE).exists() => match dir.is_locked() {
                false => return true,
                // A new pool has started in the same directory.
                true if Instant::now() >= end => return false,
                true => std::thread::sleep(LOOK_AGAIN),
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
    if dir.is_locked() {
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
    if !dir.is_locked() && PoolIdentity::read(&dir).is_ok_and(|i| i.is_some_and(|i| i.embedded)) {
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
    let labels: Vec<&str> =
        status["member_labels"].as_array().into_iter().flatten().filter_map(|v| v.as_str()).collect();
    if labels.is_empty() {
        return Ok(());
    }
    let (count, first) = (labels.len(), labels[0]);
    let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    Err(Error::new(Code::Busy, format!("cannot stop pool {}", dir.path().display()))
        .why(format!("`forebay run` uses it: {first}{more}"))
        .cure("wait for it, or stop the pool under it with --force"))
}

/// Kills a supervisor that does not answer, because it is stopped or stuck.
fn kill(dir: &PoolDirectory, identity: &PoolIdentity, keep: bool) -> Result<Stopped> {
    let stuck = |why: &str| {
        Error::new(Code::TimedOut, format!("cannot stop pool {}", dir.path().display()))
            .why(why)
            .cure(format!("see {}", dir.file(LOG_FILE).display()))
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
    if !wait_until_unlocked(dir, DOWN_TIMEOUT) {
        return Err(stuck("a process of it does not die"));
    }
    let dir = PoolDirectory::open(dir.path())?;
    let mut stopped = sweep(dir, keep)?;
    stopped.killed = true;
    stopped.data_kept &= identity.backing != crate::identity::Backing::Detached;
    Ok(stopped)
}

fn wait_until_unlocked(dir: &PoolDirectory, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while dir.is_locked() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    true
}
