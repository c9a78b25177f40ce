//! `forebay down`.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forebay_server::control::{self, MountOptions, MountStatus, Status};
use forebay_server::directory::{PoolDirectory, LOG_FILE};
use forebay_server::hosts_file::path_on;
use forebay_server::launch::{self, Attempt, DownOptions, Presence};
use forebay_server::pool_file::NodeEntry;
use forebay_server::{Backing, PoolIdentity, Stopped};
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Ino, Result, STORES_MARK};
use serde_json::json;

use super::status;
use crate::arguments::Down;
use crate::backing::{self, Drained};
use crate::everywhere::{self, Outcome, RemoteCommand};
use crate::staging::Style;
use crate::unseen::{self, can_be_read};
use crate::{failure, hosts, pool, table};

/// How often a pool is copied because a program has used it meanwhile.
const ROUNDS_MAX: u32 = 5;
/// How often a daemon or a worker that does not answer is asked.
const STATUS_ATTEMPTS: u32 = 4;
/// How long a pool may be starting or stopping.
const CHANGING_GRACE: Duration = Duration::from_secs(5);
/// Signals that come within this time are one: launchers and service managers send several.
const SAME_SIGNAL: Duration = Duration::from_millis(250);
/// How long programs may take to end when a signal ends their pool: they have got it too, in most cases.
const PROGRAMS_GRACE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Exit status of `--check` if the pool would not be stopped.
const REFUSED: u8 = 79;
/// The signals that end this command.
const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

pub(super) fn down(named: Option<PathBuf>, arguments: &Down) -> Result<ExitCode> {
    if arguments.all {
        return down_all(named.as_deref(), arguments);
    }
    if let Some(list) = &arguments.hosts {
        return down_hosts(list, named, arguments);
    }
    let dir = pool::directory(named)?;
    // A signal ends this command only where the pool is left as it was found, or stops by itself.
    let signals = unseen::block(&SIGNALS)?;
    let mut ending = Ending::new(&dir, arguments, &signals);
    if arguments.check {
        return Ok(ending.check());
    }
    match ending.run() {
        Ok(Ended::Down(stopped)) => {
            ending.print(&stopped);
            Ok(ExitCode::SUCCESS)
        }
        Ok(Ended::Interrupted(signal)) => ending.leave(signal),
        Ok(Ended::Stopping(signal)) => {
            let more = if ending.copies { ", and its stores have everything" } else { "" };
            note!("forebay: stopped: the pool was told to stop{more}; it stops by itself");
            crate::death::die_of(signal)
        }
        Err(e) => {
            ending.mount_again();
            Err(e)
        }
    }
}

/// How the stop of a pool has ended.
enum Ended {
    Down(Stopped),
    /// A signal came, and the pool is as it was.
    Interrupted(i32),
    /// A signal came, and the pool stops by itself.
    Stopping(i32),
}

/// The stop of a pool.
struct Ending<'a> {
    dir: &'a Path,
    arguments: &'a Down,
    signals: &'a Signals,
    /// What the pool is like at the beginning of this round. None: its daemon does not answer.
    now: Option<Status>,
    /// What the pool was like when its daemon last answered.
    before: Option<Status>,
    /// The mount that may have been taken away.
    mounts: Vec<MountStatus>,
    /// Backing stores get what they lack.
    copies: bool,
    drained: Drained,
    /// One store has all files.
    is_on_store: bool,
}

impl<'a> Ending<'a> {
    fn new(dir: &'a Path, arguments: &'a Down, signals: &'a Signals) -> Ending<'a> {
        Ending {
            dir,
            arguments,
            signals,
            now: None,
            before: None,
            mounts: Vec::new(),
            copies: false,
            drained: Drained::default(),
            is_on_store: false,
        }
    }

    /// Copies to backing stores what they lack, and stops the pool; again if a program uses it in between.
    fn run(&mut self) -> Result<Ended> {
        let Down { keep, force, .. } = *self.arguments;
        for _ in 0..ROUNDS_MAX {
            if !self.look()? {
                return Ok(Ended::Interrupted(self.signal()));
            }
            let uses = match self.drain() {
                Ok(Drain::Over(uses)) => uses,
                Ok(Drain::Stopped(signal)) => return Ok(Ended::Interrupted(signal)),
                Err(_) if self.is_ended_meanwhile() => continue,
                Err(e) => return Err(e),
            };
            let spares = !self.arguments.discard && may_lose(self.dir, keep);
            let interrupt = Some(self.signals.as_fd());
            let spares_volumes = keep && !self.arguments.discard;
            let options = DownOptions { keep, force, uses, spares, spares_volumes, interrupt };
            match launch::try_down(self.dir, options) {
                Ok(Attempt::Stopped(stopped)) => return Ok(Ended::Down(stopped)),
                Ok(Attempt::Used) if self.copies => {
                    note!("forebay: a program has used the pool meanwhile: copying again");
                }
                Ok(Attempt::Used) => {}
                Ok(Attempt::Interrupted) => return Ok(Ended::Interrupted(self.signal())),
                Ok(Attempt::Stopping) => return Ok(Ended::Stopping(self.signal())),
                // Another command has stopped and removed it.
                Err(e) if e.code == Code::NotFound && self.before.is_some() && self.is_gone() => {
                    return Ok(Ended::Down(Stopped { data_kept: false, killed: false }))
                }
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(Code::Busy, format!("cannot stop pool {}", self.dir.display()))
            .why("programs begin to use it again and again")
            .cure("end what starts them and try again, or stop the pool under them with --force"))
    }

    /// Finds out whether the pool would be stopped, and copies to backing stores what they lack. The pool stays up. Says what
    /// is in the way; what only the stop itself can show is no refusal.
    fn check(&mut self) -> ExitCode {
        match self.is_free() {
            Err(_) if self.is_ended_meanwhile() => ExitCode::SUCCESS,
            Err(e) if !matches!(e.code, Code::NotFound | Code::PoolGone) => {
                failure::report(&e, false, REFUSED)
            }
            _ => {
                failure::put(self.copied());
                ExitCode::SUCCESS
            }
        }
    }

    fn is_free(&mut self) -> Result<()> {
        if !self.look()? {
            self.leave(self.signal());
        }
        if self.now.as_ref().is_some_and(|status| status.state != STOPPING) && !self.arguments.force {
            let is_free = launch::ensure_unused(self.dir);
            // At once: the copy may take long.
            self.mount_again();
            is_free?;
        }
        match self.drain()? {
            Drain::Stopped(signal) => self.leave(signal),
            Drain::Over(_) => Ok(()),
        }
    }

    /// Which signal has come.
    fn signal(&self) -> i32 {
        self.signals.next().map_or(libc::SIGTERM, |received| received.signal)
    }

    /// Reads what the pool is like. The daemon cannot answer after the stop. A dead pool has no status. False if a signal
    /// came.
    fn look(&mut self) -> Result<bool> {
        for attempt in 1.. {
            self.now = match control::status_until(self.dir, Some(self.signals.as_fd())) {
                Ok(Some(status)) => Some(status),
                Ok(None) => return Ok(false),
                Err(e) if matches!(e.code, Code::NotFound | Code::TimedOut | Code::PoolGone) => None,
                Err(e) => return Err(e),
            };
            if self.ensure_no_volumes(attempt == STATUS_ATTEMPTS)? {
                break;
            }
        }
        if let Some(status) = &self.now {
            self.before = Some(status.clone());
            if !status.mounts.is_empty() {
                self.mounts.clone_from(&status.mounts);
            }
        }
        Ok(!can_be_read(self.signals, Duration::ZERO))
    }

    /// Fails if the pool has volumes that would have to be kept. False if that is not known, since its worker did not
    /// answer; if `is_last`, that is an error.
    fn ensure_no_volumes(&self, is_last: bool) -> Result<bool> {
        let Some(status) = self.now.as_ref().filter(|status| status.state != STOPPING) else {
            return Ok(true);
        };
        if !self.arguments.keep || self.arguments.discard {
            return Ok(true);
        }
        let what = format!("cannot stop pool {} and keep its data", self.dir.display());
        match status::volumes(status) {
            Some((0, _)) => Ok(true),
            Some((_, bytes)) => Err(Error::new(Code::Busy, what)
                .why(format!("its volumes have {}, in memory that ends with the daemon", table::bytes(bytes)))
                .cure("delete them (`forebay volume list`), or let them go: `forebay down --keep --discard`")),
            None if !is_last => Ok(false),
            None => Err(Error::new(Code::TimedOut, what)
                .why(
                    "its worker does not answer, and it may have volumes, in memory that ends with the daemon",
                )
                .cure("try again, or let them go: `forebay down --keep --discard`")),
        }
    }

    /// True if the pool has ended or stops since it was looked at: another command stops it, or its daemon was killed.
    fn is_ended_meanwhile(&self) -> bool {
        self.now.as_ref().is_some_and(|status| status.state != STOPPING)
            && match control::status_until(self.dir, Some(self.signals.as_fd())) {
                Ok(status) => status.is_some_and(|status| status.state == STOPPING),
                Err(e) => matches!(e.code, Code::NotFound | Code::PoolGone),
            }
    }

    fn is_gone(&self) -> bool {
        launch::settled_presence(self.dir, CHANGING_GRACE).is_ok_and(|presence| presence == Presence::None)
    }

    /// Copies to backing stores what they lack. Refuses if they still lack something that would be gone with the pool.
    fn drain(&mut self) -> Result<Drain> {
        let Down { force, discard, keep, .. } = *self.arguments;
        let Some(status) = &self.now else {
            self.copies = false;
            refuse_undrained(self.dir, self.arguments)?;
            // If it answers by then, there may be something to copy or to keep.
            return Ok(Drain::Over(Some(launch::UNASKED)));
        };
        let keeps = keep && status.backing != "detached";
        self.copies = status.mover.is_some() && !discard && !keeps && status.state != STOPPING;
        if status.mover.is_none() && !discard && !keeps && !force && status.state != STOPPING {
            // If the pool gets a store by then, there is something to copy.
            return Ok(Drain::Over(Some(status.uses)));
        }
        if !self.copies {
            return Ok(Drain::Over(None));
        }
        // Programs could write by the mount after the copy, so it is taken away before. What uses the pool now may have
        // ended when the pool is to be stopped: what it wrote would be lost, so this is the end.
        let asks = !force && !self.arguments.check;
        let uses = if asks { Some(launch::ensure_unused(self.dir)?) } else { None };
        let (dir, mounts) = (self.dir, self.mounts.clone());
        let up = move |signal| leave(dir, &mounts, "the pool is up", signal);
        unseen::guarded(self.signals, up, || self.copy(uses))
    }

    /// The copy. It may wait for a worker that does not answer, and then sees no signal.
    fn copy(&mut self, uses: Option<u64>) -> Result<Drain> {
        let style = Style::of_stderr(!self.arguments.no_progress && !self.arguments.json);
        let pool = pool::attach(self.dir)?;
        let drained = backing::drain_until_stopped(self.dir, pool, None, style, self.signals)?;
        self.drained.files += drained.files;
        self.drained.bytes += drained.bytes;
        if let Some(signal) = drained.stopped_by {
            return Ok(Drain::Stopped(signal));
        }
        let lacking = backing::would_lose(self.dir, pool, None)?;
        if !lacking.is_nothing() {
            let (what, path) = (format!("cannot stop pool {}", self.dir.display()), self.dir.display());
            return Err(drained.refusal(what, lacking, &format!("down --pool {path} --discard")));
        }
        let settings = backing::settings_of(pool, Ino::ROOT);
        self.is_on_store =
            !self.arguments.force && settings.is_some_and(|settings| settings.is_all_written());
        Ok(Drain::Over(uses))
    }

    /// Mounts a pool that stays up where it was mounted before.
    fn mount_again(&self) {
        mount_again(self.dir, &self.mounts);
    }

    /// Ends this command, as a signal came, and the pool is as it was.
    fn leave(&self, signal: i32) -> ! {
        let words = match (&self.now, self.copies) {
            (Some(_), true) => "the pool is up, and goes on copying (`forebay tasks`)",
            (Some(_), false) => "the pool is up",
            // It is down, or its daemon does not answer.
            (None, _) => "the pool is as it was",
        };
        leave(self.dir, &self.mounts, words, signal)
    }

    /// What was copied to backing stores, in words.
    fn copied(&self) -> String {
        let Drained { files, bytes, .. } = self.drained;
        match files {
            0 => String::new(),
            files => {
                format!(
                    "copied to the backing store: {} ({})\n",
                    table::count(files, "file"),
                    table::bytes(bytes)
                )
            }
        }
    }

    fn print(&self, stopped: &Stopped) {
        let (arguments, before, drained) = (self.arguments, self.before.as_ref(), &self.drained);
        let volume_bytes = before.and_then(status::volumes).map_or(0, |volumes| volumes.1);
        let files = before.and_then(|s| s.inodes).map(|n| n.saturating_sub(1)); // the root does not count
        if arguments.json {
            return failure::print_json(&json!({
                "pool": self.dir,
                "was_up": before.is_some(),
                "data_kept": stopped.data_kept,
                "killed": stopped.killed,
                "inodes": files,
                "used_bytes": before.and_then(|s| s.used_bytes),
                "drained_files": drained.files,
                "drained_bytes": drained.bytes,
                "volume_bytes": volume_bytes,
            }));
        }
        let state = match (before, stopped.killed) {
            (_, true) => "did not answer and was killed",
            (Some(status), false) if status.state == STOPPING => "was stopping already, and is down",
            (Some(_), false) => "is down",
            (None, false) => "was not up: what it had left is cleared away",
        };
        let mut text = self.copied();
        let path = self.dir.display();
        let fate = fate(before, stopped.data_kept, self.is_on_store, volume_bytes);
        text.push_str(&format!("pool {path} {state}{fate}\n"));
        if arguments.keep && !stopped.data_kept {
            text.push_str("  note: it had no memory of its own that could be kept\n");
        }
        if self.now.is_none() && stopped.data_kept && self.dir.join(STORES_MARK).exists() {
            text.push_str(&format!(
                "  note: its backing store may lack some of its data: `forebay up --path {path}` starts it with them, and \
                 `forebay down` then copies them\n"
            ));
        }
        failure::put(text);
    }
}

/// How the copy before a stop has ended.
enum Drain {
    /// Nothing is left to copy. With it: see [`DownOptions::uses`].
    Over(Option<u64>),
    /// A signal came.
    Stopped(i32),
}

/// Ends this command by a signal. Mounts the pool, which stays up, where it was mounted before.
fn leave(dir: &Path, mounts: &[MountStatus], words: &str, signal: i32) -> ! {
    mount_again(dir, mounts);
    note!("forebay: stopped: {words}");
    crate::death::die_of(signal)
}

/// The state of a pool that was told to stop.
const STOPPING: &str = "stopping";

/// True for a pool that a kill would lose data of which its backing store may lack some.
fn may_lose(dir: &Path, keep: bool) -> bool {
    let identity = PoolDirectory::open(dir).and_then(|dir| PoolIdentity::read(&dir));
    let is_kept = |identity: &PoolIdentity| {
        !identity.embedded
            && match identity.backing {
                Backing::Directory => true,
                Backing::Tmpfs => keep,
                Backing::Detached => false,
            }
    };
    dir.join(STORES_MARK).exists() && !matches!(&identity, Ok(Some(identity)) if is_kept(identity))
}

/// Mounts a pool that stays up where it was mounted before.
fn mount_again(dir: &Path, mounts: &[MountStatus]) {
    if mounts.is_empty() {
        return;
    }
    let now = match control::status(dir) {
        Ok(now) if now.state == STOPPING => return,
        Err(e) if matches!(e.code, Code::NotFound | Code::PoolGone) => return,
        now => now,
    };
    for mount in mounts {
        let mounted = match &now {
            Ok(now) if now.mounts.iter().any(|other| other.at == mount.at) => Ok(()),
            Ok(_) => {
                let (allow_other, no_passthrough) = (mount.allow_other, mount.no_passthrough);
                let options = MountOptions { allow_other, no_passthrough };
                control::mount(dir, Path::new(&mount.at), options).map(drop)
            }
            Err(e) => {
                Err(Error::new(e.code, format!("cannot mount the pool again on {}", mount.at)).why(&e.why))
            }
        };
        if let Err(e) = mounted {
            let cure = format!("`forebay mount --pool {} {}` mounts the pool again", dir.display(), mount.at);
            failure::say(&e.cure(cure));
        }
    }
}

/// Stops a pool because `forebay up --foreground` got a signal. What backing stores lack is copied first, while the programs
/// that use the pool end; a further signal ends that. If stores still lack something, or programs use the pool to the end,
/// the pool's data are kept for the next `up`, or, where that is not possible, the pool stays up. A pool without a store is
/// stopped under its programs.
///
/// While it waits for a worker or a mover that does not answer, a further signal ends that too: as if they still lacked
/// something.
pub(super) fn by_signal(dir: &Path, signals: &Signals) -> Result<ExitCode> {
    // On a busy node the daemon may answer late.
    let answer = (0..STATUS_ATTEMPTS).find_map(|_| control::status(dir).ok());
    let Some(status) = answer else {
        let has_stores = dir.join(STORES_MARK).exists();
        if has_stores && may_lose(dir, true) {
            return Err(launch::unanswered(dir, format!("cannot stop pool {}", dir.display())));
        }
        return stop(dir, has_stores).map(|_| ExitCode::SUCCESS);
    };
    std::thread::sleep(SAME_SIGNAL);
    while signals.next().is_some() {}
    if status.mover.is_none() {
        let stops = |signal| {
            note!("forebay: stopped: the pool was told to stop; it stops by itself");
            crate::death::die_of(signal)
        };
        return unseen::guarded(signals, stops, || stop(dir, false)).map(|_| ExitCode::SUCCESS);
    }
    let unanswered = |_| {
        let e = Error::new(Code::TimedOut, uncopied(dir))
            .why("its worker or its mover does not answer")
            .cure(format!("see {}", dir.join(LOG_FILE).display()));
        if let Err(e) = leave_uncopied(dir, &status, e) {
            failure::say(&e);
        }
        std::process::exit(failure::FAILED.into())
    };
    match unseen::guarded(signals, unanswered, || copy_and_stop(dir, signals)) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(e) => leave_uncopied(dir, &status, e),
    }
}

/// Stops a pool under its programs.
fn stop(dir: &Path, keep: bool) -> Result<Stopped> {
    let spares = may_lose(dir, keep);
    launch::down(dir, DownOptions { keep, force: true, spares, ..DownOptions::default() })
}

/// Ends a pool whose stores may lack something so that it is not lost; the pool stays up if that is not possible. Fails with
/// `e`.
fn leave_uncopied(dir: &Path, status: &Status, e: Error) -> Result<ExitCode> {
    let path = dir.display();
    if status.backing == "detached" {
        mount_again(dir, &status.mounts);
        note!("forebay: the pool stays up, and goes on copying: `forebay down --pool {path}` ends it");
        return Err(e);
    }
    stop(dir, true)?;
    note!("forebay: the data are kept: `forebay up --path {path}` starts the pool with them");
    Err(e)
}

/// What could not be done.
fn uncopied(dir: &Path) -> String {
    format!("cannot copy everything to the backing store of pool {}", dir.display())
}

/// Copies what backing stores lack and stops the pool, once no program uses it. Fails if they still lack something, if
/// programs use the pool for too long, or if a signal comes.
fn copy_and_stop(dir: &Path, signals: &Signals) -> Result<()> {
    let path = dir.display();
    let what = || uncopied(dir);
    let end = Instant::now() + PROGRAMS_GRACE;
    let pool = pool::attach(dir)?;
    loop {
        // By the mount, too, programs could write after the copy.
        let uses = match launch::ensure_unused(dir) {
            Err(e) if e.code == Code::Busy => None,
            uses => Some(uses?),
        };
        let drained = backing::drain_until_stopped(dir, pool, None, Style::Messages, signals)?;
        let is_last = drained.stopped_by.is_some() || Instant::now() >= end;
        let lacking = backing::would_lose(dir, pool, None)?;
        if !lacking.is_nothing() && (uses.is_some() || is_last) {
            return Err(drained.refusal(what(), lacking, &format!("down --pool {path} --discard")));
        }
        if uses.is_some() {
            let options = DownOptions { uses, spares: may_lose(dir, false), ..DownOptions::default() };
            match launch::try_down(dir, options) {
                Ok(Attempt::Stopped(_)) => return Ok(()),
                Ok(_) => {} // a program has used it meanwhile
                Err(e) if e.code == Code::Busy => {}
                Err(e) => return Err(e),
            }
        }
        if is_last || can_be_read(signals, LOOK_AGAIN) {
            return Err(Error::new(Code::Busy, what())
                .why("programs use it to the end, and may still write")
                .cure("end them before the pool"));
        }
    }
}

/// Refuses to remove a pool that was killed while a backing store was attached, or to kill one: what the store lacks is not
/// known.
fn refuse_undrained(dir: &Path, arguments: &Down) -> Result<()> {
    if arguments.discard || !may_lose(dir, arguments.keep) {
        return Ok(());
    }
    let identity = PoolDirectory::open(dir).and_then(|dir| PoolIdentity::read(&dir));
    let is_in_memory = matches!(&identity, Ok(Some(i)) if i.embedded || i.backing == Backing::Tmpfs);
    let path = dir.display();
    match launch::settled_presence(dir, CHANGING_GRACE)? {
        Presence::Down { has_data: true, .. } if is_in_memory => {}
        Presence::Up | Presence::Changing => {
            return Err(launch::unanswered(dir, format!("cannot stop pool {path}")))
        }
        _ => return Ok(()),
    }
    Err(Error::new(Code::Busy, format!("cannot remove pool {path}"))
        .why("it is down, and may have data that its backing store does not have")
        .cure(format!(
            "`forebay up --path {path}` starts it with its data, and `forebay down` then copies them; \
             `forebay down --pool {path} --discard` removes it as it is"
        )))
}

/// Stops every node of a pool file.
fn down_all(file: Option<&Path>, arguments: &Down) -> Result<ExitCode> {
    let file = pool::file(file, "stop all nodes")?;
    let command = |node: &NodeEntry| RemoteCommand::new(node, words(node.dir(), arguments));
    down_everywhere(file.nodes.iter().map(command).collect(), arguments)
}

/// Stops the nodes that `up --hosts` started.
fn down_hosts(list: &str, named: Option<PathBuf>, arguments: &Down) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let remote_commands = hosts::expand(list)?.into_iter().map(|host| RemoteCommand {
        words: words(&path_on(&dir, &host), arguments),
        name: host.clone(),
        host,
        input: Vec::new(),
    });
    down_everywhere(remote_commands.collect(), arguments)
}

/// Stops nodes: none of them if one would refuse, since the pool of a node that stays would lack what the others had.
fn down_everywhere(commands: Vec<RemoteCommand>, arguments: &Down) -> Result<ExitCode> {
    let never_refuses = arguments.force && arguments.discard;
    if commands.len() > 1 && !never_refuses {
        let checks: Vec<RemoteCommand> = commands.iter().map(|one| one.with("--check")).collect();
        let outcomes = everywhere::run("copying", &checks);
        // A host that cannot be reached is no reason to let the others run.
        let is_refused = |one: &Outcome| one.status == Some(REFUSED.into());
        for one in &outcomes {
            one.output.lines().for_each(|line| failure::put(format!("{}: {line}\n", one.name)));
            if one.failure.is_none() || is_refused(one) {
                one.errors.lines().for_each(|line| note!("{}: {line}", one.name));
            }
        }
        let refused: Vec<_> =
            outcomes.iter().filter(|one| is_refused(one)).map(|one| one.name.as_str()).collect();
        if !refused.is_empty() {
            return Err(Error::new(Code::Busy, "cannot stop the pool on all nodes, so all stay up")
                .why(format!("refused on {}", refused.join(", ")))
                .cure("see above; `forebay down --hosts` stops the others if it names only those"));
        }
    }
    everywhere::report("stop", &everywhere::run("stopping", &commands))
}

fn words(path: &Path, arguments: &Down) -> Vec<String> {
    let mut words = ["down", "--pool", &path.to_string_lossy()].map(str::to_owned).to_vec();
    words.extend(arguments.keep.then(|| "--keep".to_owned()));
    words.extend(arguments.force.then(|| "--force".to_owned()));
    words.extend(arguments.discard.then(|| "--discard".to_owned()));
    words
}

/// Whether the data still exist, in words.
fn fate(before: Option<&Status>, kept: bool, is_on_store: bool, volume_bytes: u64) -> String {
    let volumes = match volume_bytes {
        0 => String::new(),
        bytes => format!("; its volumes ({}) are gone", table::bytes(bytes)),
    };
    let Some(Status { inodes: Some(inodes), used_bytes: Some(bytes), .. }) = before else {
        return if kept { "; its data is kept".to_owned() } else { String::new() };
    };
    match (kept, inodes.saturating_sub(1)) {
        (true, _) => format!("; its data is kept for the next `forebay up`{volumes}"),
        (false, 0) if volume_bytes > 0 => volumes,
        (false, 0) => "; it was empty".to_owned(),
        (false, _) if is_on_store => format!("; its store has all files{volumes}"),
        (false, n) => {
            let bytes = bytes.saturating_sub(volume_bytes);
            let are = if n == 1 { "is" } else { "are" };
            format!("; {} in it ({}) {are} gone{volumes}", table::count(n, "entry"), table::bytes(bytes))
        }
    }
}
