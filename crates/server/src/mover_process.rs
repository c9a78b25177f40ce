//! The supervisor's part of the mover: starts `forebay-mover`, keeps its last report, restarts it when it dies, and ends
//! it with the pool.
//!
//! A pool has a mover once a backing store was attached, which the file [`STORES_MARK`] records. A mover that hangs in a
//! store must not keep the pool from ending: it is killed, and left behind if even that does not end it.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result, STORES_MARK};
use rustix::fs::OFlags;
use rustix::process::Signal;
use serde_json::{json, Value};

use crate::child_process::{describe, program, Backoff, Helper};
use crate::directory::PoolDirectory;
use crate::members::MemberId;
use crate::protocol::Reply;
use forebay_tasks::Failure;

/// The program's name; it is beside this program.
const PROGRAM: &str = "forebay-mover";

/// The path of the mover's program, which is beside this one.
pub fn mover_program() -> Result<PathBuf> {
    program(PROGRAM)
}

/// How long the mover may take to end when the pool stops.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How much longer a killed mover may hang in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Process {
    helper: Helper,
    is_ready: bool,
}

/// How far the mover's end is, when the pool stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    No,
    /// It got SIGTERM, and is killed then.
    Told(Instant),
    /// It was killed, and is left behind then.
    Killed(Instant),
}

/// The pool's mover, if it has one, and answers to be sent.
#[derive(Debug)]
pub(crate) struct MoverKeeper {
    wanted: bool,
    process: Option<Process>,
    backoff: Backoff,
    start_at: Instant,
    restarts: u64,
    last_end: Option<String>,
    /// The error that the last mover reported at its end.
    failure: Option<Failure>,
    /// The last report of the mover that runs.
    report: Value,
    /// Connections that wait for the start.
    askers: Vec<MemberId>,
    /// The file that records the mover was made for these, and no mover has been ready since.
    is_new: bool,
    ending: Ending,
    answers: Vec<(MemberId, Reply)>,
}

impl MoverKeeper {
    pub(crate) fn new(pool: &PoolDirectory) -> MoverKeeper {
        MoverKeeper {
            wanted: pool.file(STORES_MARK).exists(),
            process: None,
            backoff: Backoff::default(),
            start_at: Instant::now(),
            restarts: 0,
            last_end: None,
            failure: None,
            report: json!({}),
            askers: Vec::new(),
            is_new: false,
            ending: Ending::No,
            answers: Vec::new(),
        }
    }

    /// Starts the mover, unless it runs; `asker` gets the answer when it is ready or has failed.
    pub(crate) fn start(&mut self, pool: &PoolDirectory, asker: MemberId) {
        if self.process.as_ref().is_some_and(|process| process.is_ready) {
            return self.answers.push((asker, Reply::MoverStarted));
        }
        if !self.wanted {
            if let Err(e) = pool.open_file(STORES_MARK, OFlags::WRONLY | OFlags::CREATE) {
                return self.answers.push((asker, Reply::failed(&e)));
            }
            (self.wanted, self.is_new) = (true, true);
        }
        self.askers.push(asker);
        self.start_at = Instant::now();
    }

    /// Starts the mover, unless the pool has one, because another node's mover needs it.
    pub(crate) fn want(&mut self, pool: &PoolDirectory) {
        if self.wanted || self.ending != Ending::No {
            return;
        }
        match pool.open_file(STORES_MARK, OFlags::WRONLY | OFlags::CREATE) {
            Ok(_) => (self.wanted, self.start_at) = (true, Instant::now()),
            Err(e) => tracing::error!("cannot start the mover: {e}"),
        }
    }

    /// Ends the mover because the pool stops.
    pub(crate) fn stop(&mut self) {
        if let Some(process) = &self.process {
            process.helper.signal(Signal::TERM);
        }
        self.ending = Ending::Told(Instant::now() + STOP_GRACE);
        self.wanted = false;
        let gone = Error::new(Code::PoolGone, "cannot start the mover").why("the pool is stopping");
        self.answer_askers(&gone);
    }

    /// True for a pool that has, or had, a backing store.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// True when no mover is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.process.is_none()
    }

    /// Removes and returns the answers to be sent.
    pub(crate) fn take_answers(&mut self) -> Vec<(MemberId, Reply)> {
        std::mem::take(&mut self.answers)
    }

    /// Its socket, to be polled for reading.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|process| process.helper.socket())
    }

    /// When [`MoverKeeper::tend`] must next be called although no event occurs.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        match (&self.process, self.ending) {
            (Some(_), Ending::Told(at) | Ending::Killed(at)) => Some(at),
            (None, Ending::No) if self.wanted => Some(self.start_at),
            _ => None,
        }
    }

    /// Reads the mover's messages, reaps it and restarts it, as is due.
    pub(crate) fn tend(&mut self, pool: &PoolDirectory, pool_serves: bool) {
        self.hear();
        self.hasten_end();
        if let Some(process) = &mut self.process {
            let Some(status) = process.helper.ended() else { return };
            self.hear();
            self.has_ended(pool, &describe(status));
        }
        if self.process.is_none() && self.wanted && pool_serves && Instant::now() >= self.start_at {
            match start(pool) {
                Ok(helper) => self.process = Some(Process { helper, is_ready: false }),
                Err(e) => {
                    tracing::error!("{e}");
                    self.failure = Some(Failure::from(&e));
                    self.start_failed(pool);
                    self.start_at = Instant::now() + self.backoff.after(Duration::ZERO);
                }
            }
        }
    }

    fn hasten_end(&mut self) {
        let Some(process) = &self.process else { return };
        let now = Instant::now();
        match self.ending {
            Ending::Told(at) if now >= at => {
                tracing::error!(pid = process.helper.pid(), "the mover does not stop: killed");
                process.helper.signal(Signal::KILL);
                self.ending = Ending::Killed(now + KILL_GRACE);
            }
            Ending::Killed(at) if now >= at => {
                tracing::error!(
                    pid = process.helper.pid(),
                    "the mover hangs in the kernel: it is left behind"
                );
                self.process = None;
            }
            _ => {}
        }
    }

    fn has_ended(&mut self, pool: &PoolDirectory, words: &str) {
        let Some(process) = self.process.take() else { return };
        if self.ending != Ending::No {
            return tracing::info!("the mover {words}");
        }
        tracing::error!(pid = process.helper.pid(), "the mover {words}");
        self.restarts += 1;
        self.report = json!({});
        self.last_end = Some(words.to_owned());
        self.start_at = Instant::now() + self.backoff.after(process.helper.started.elapsed());
        if !process.is_ready {
            self.start_failed(pool);
        }
    }

    /// A start has failed: tells those who wait for it. A pool that never had a mover is as it was before.
    fn start_failed(&mut self, pool: &PoolDirectory) {
        if self.askers.is_empty() {
            return;
        }
        let ended = self.last_end.clone().unwrap_or_default();
        let unsaid =
            || Error::new(Code::Io, "cannot start the mover").why(format!("it {ended}: see the pool's log"));
        let e = self.failure.clone().map_or_else(unsaid, Error::from);
        self.answer_askers(&e);
        if std::mem::take(&mut self.is_new) {
            self.wanted = false;
            let _ = pool.remove_file(STORES_MARK);
        }
    }

    fn answer_askers(&mut self, e: &Error) {
        self.answers.extend(self.askers.drain(..).map(|asker| (asker, Reply::failed(e))));
    }

    fn hear(&mut self) {
        let Some(process) = &mut self.process else { return };
        for message in process.helper.messages() {
            if message.get("ready").is_some() {
                (process.is_ready, self.is_new, self.failure) = (true, false, None);
                self.answers.extend(self.askers.drain(..).map(|asker| (asker, Reply::MoverStarted)));
            } else if let Some(report) = message.get("report") {
                self.report = report.clone();
            } else if let Some(why) = message.get("failed") {
                self.failure = serde_json::from_value(why.clone()).ok();
            }
        }
    }

    /// The mover's part of `status`; null for a pool without stores.
    pub(crate) fn status(&self) -> Value {
        if !self.wanted && self.process.is_none() {
            return Value::Null;
        }
        let mut status = self.report.clone();
        let state = match &self.process {
            _ if self.ending != Ending::No => "stopping",
            Some(process) if process.is_ready => "up",
            _ => "starting",
        };
        status["state"] = json!(state);
        status["pid"] = json!(self.process.as_ref().map(|process| process.helper.pid()));
        status["uptime_s"] =
            json!(self.process.as_ref().map(|process| process.helper.started.elapsed().as_secs()));
        status["restarts"] = json!(self.restarts);
        status["last_crash"] = json!(self.last_end);
        status["last_failure"] = json!(self.failure.clone().map(|failure| Error::from(failure).to_string()));
        status
    }
}

fn start(pool: &PoolDirectory) -> Result<Helper> {
    let mut command = Command::new(program(PROGRAM)?);
    command.arg("--pool").arg(pool.path());
    Helper::start(command, "cannot start the mover")
}
