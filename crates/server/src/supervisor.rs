//! The supervisor: the process that keeps a pool up and does as little else as possible.
//!
//! It holds the resources that must outlive a worker: the locks, the targets' descriptors (which keep a detached mount
//! alive), the clients' listening socket, the descriptor store and the flight recorder. It starts the worker, and
//! restarts it at once when it dies. It counts the members of an embedded pool, which ends with the last one. It has
//! one thread and one poll loop and does not block: all its sockets are non-blocking, and a connection that does not
//! read its answers is closed. It depends on no member and checks everything that a member sends.
//!
//! If the supervisor dies, the kernel kills the worker (PR_SET_PDEATHSIG). The data stay as far as the medium permits,
//! and the next `up` removes the remains. Tests: `crates/cli/tests/supervisor.rs`.

mod programs;
mod requests;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use crate::child_process::{describe, program, Backoff, Helper};
use crate::connection::Connection;
use crate::directory::LOG_FILE;
use crate::frame;
use crate::launch::{Report, Started};
use crate::life::{Life, LIFE_TAG};
use crate::members::{MemberId, Members};
use crate::mount_process::MountKeeper;
use crate::mover_process::MoverKeeper;
use crate::notifier::Notifiers;
use crate::pacing;
use crate::pool_place::OpenPool;
use crate::protocol::{Reply, Stopped};
use crate::reserve::{Reserve, Seldom};
use crate::setup::{SetupFds, SetupText};
use crate::store::{Kept, Message, PROGRAM_TAG};
use crate::supplies::Supplies;
use crate::worker_process::{self, WorkerProcess};
use forebay_sys::signals::Signals;

/// How long an embedded pool waits for its first member.
const FIRST_MEMBER_GRACE: Duration = Duration::from_secs(30);
/// How long programs may take to end that were killed with their run: those with much memory take their time.
const PROGRAMS_END: Duration = Duration::from_secs(60);
/// How often it is looked whether they have ended.
const PROGRAMS_LOOK: Duration = Duration::from_millis(20);
/// How long a worker may take to stop after SIGTERM.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How much longer notifiers, which end with their worker, may stay blocked in the kernel.
const NOTIFIERS_GRACE: Duration = Duration::from_secs(1);
/// How many workers may crash before the pool has served at all.
const FIRST_STARTS_MAX: u32 = 3;
/// How many lines of the log the error of a pool that never served contains.
const LOG_LINES_SHOWN: usize = 8;

struct Stopping {
    keep: bool,
    worker_told: bool,
    kill_at: Instant,
    killed: bool,
    /// Once the worker is gone: when the pool ends even if notifiers are left.
    end_at: Option<Instant>,
    askers: Vec<MemberId>,
}

/// The state of the poll loop.
pub(crate) struct Supervisor {
    /// The ID of a pool with a secret, in hexadecimal digits.
    pool_id: Option<String>,
    pool: OpenPool,
    signals: Signals,
    clients: UnixListener,
    listener: UnixListener,
    recorder: OwnedFd,
    kept: Kept,
    worker: Option<WorkerProcess>,
    notifiers: Notifiers,
    mount: MountKeeper,
    /// How often the pool was to be mounted.
    mounts: u64,
    /// None: the pool has no volumes.
    life: Option<Life>,
    /// How many programs have attached to the pool.
    programs: u64,
    mover: MoverKeeper,
    backoff: Backoff,
    start_worker_at: Instant,
    restarts: u64,
    last_end: Option<String>,
    last_failure: Option<Error>,
    served: bool,
    members: Members,
    /// What the members have written is in the pool's backing store.
    is_drained: bool,
    /// `forebay down`, which drains an embedded pool whose members could not.
    drainer: Option<Helper>,
    /// How long the programs of a run that was killed may take to end before their pool is drained.
    left_until: Option<Instant>,
    connections: BTreeMap<MemberId, Connection>,
    next_id: MemberId,
    report: Report,
    stopping: Option<Stopping>,
    born: Instant,
    reserve: Reserve,
    refusals: Seldom,
}

/// The result of the poll loop.
pub(crate) struct End {
    pub(crate) pool: OpenPool,
    /// Set when the pool never served.
    pub(crate) failure: Option<Error>,
    pub(crate) report: Report,
    keep: bool,
    killed: bool,
    askers: Vec<UnixStream>,
}

/// The rest of an [`End`] while its pool is being closed.
pub(crate) struct Teller {
    pub(crate) keep: bool,
    pub(crate) killed: bool,
    failure: Option<Error>,
    askers: Vec<UnixStream>,
}

impl End {
    pub(crate) fn split(self) -> (OpenPool, Teller) {
        let End { pool, failure, keep, killed, askers, .. } = self;
        (pool, Teller { keep, killed, failure, askers })
    }
}

impl Teller {
    /// Answers the connections that requested the stop. Returns the reason if the pool never served.
    pub(crate) fn tell(mut self, result: &Result<Stopped>) -> Option<Error> {
        let reply = match result {
            Ok(stopped) => Reply::Stopped(stopped.clone()),
            Err(e) => Reply::failed(e),
        };
        if let Ok(bytes) = frame::encode(&reply) {
            for asker in &mut self.askers {
                let _ = asker.set_nonblocking(false);
                let _ = asker.set_write_timeout(Some(Duration::from_secs(1)));
                let _ = asker.write_all(&bytes);
            }
        }
        self.failure
    }
}

impl Supervisor {
    /// The caller has already blocked `signals`.
    pub(crate) fn new(pool: OpenPool, supplies: Supplies, signals: Signals, report: Report) -> Supervisor {
        let now = Instant::now();
        let Supplies { clients, listener, recorder, pool_id } = supplies;
        Supervisor {
            reserve: Reserve::new(recorder.as_fd()),
            refusals: Seldom::default(),
            pool_id,
            signals,
            clients,
            listener,
            recorder,
            kept: Kept::default(),
            worker: None,
            notifiers: Notifiers::default(),
            mount: MountKeeper::default(),
            mounts: 0,
            life: None,
            programs: 0,
            mover: MoverKeeper::new(&pool.dir),
            pool,
            backoff: Backoff::default(),
            start_worker_at: now,
            restarts: 0,
            last_end: None,
            last_failure: None,
            served: false,
            members: Members::default(),
            is_drained: false,
            drainer: None,
            left_until: None,
            connections: BTreeMap::new(),
            next_id: 1,
            report,
            stopping: None,
            born: now,
        }
    }

    /// Serves until the pool ends.
    pub(crate) fn run(mut self) -> End {
        match Life::begin() {
            Ok((life, page)) => {
                self.kept.put(LIFE_TAG.to_owned(), vec![page]);
                self.life = Some(life);
            }
            Err(e) => tracing::warn!("the pool has no volumes: {e}"),
        }
        match pacing::made_for(&self.pool.identity) {
            Ok(Some((tag, fds))) => self.kept.put(tag, fds),
            Ok(None) => {}
            // Unpaced, every measurement would be wrong.
            Err(e) => {
                self.last_failure = Some(e);
                self.begin_stop(self.pool.reopened, None);
            }
        }
        loop {
            self.keep_a_worker();
            self.notifiers.reap();
            self.reap_drainer();
            self.tend_helpers();
            if self.worker.is_none() && self.helpers_are_gone() && self.notifiers_are_gone() {
                if let Some(stopping) = self.stopping.take() {
                    self.life.iter().for_each(Life::end);
                    return self.end(stopping);
                }
            }
            self.wait_and_serve();
            let answers = self.members.tick(self.now_ms());
            self.answer(answers);
            self.end_when_left();
        }
    }

    fn end(mut self, stopping: Stopping) -> End {
        let askers = stopping
            .askers
            .iter()
            .filter_map(|id| self.connections.remove(id))
            .map(|connection| connection.stream)
            .collect();
        End {
            failure: if self.served { None } else { self.last_failure.take() },
            pool: self.pool,
            keep: stopping.keep,
            killed: stopping.killed,
            report: self.report,
            askers,
        }
    }

    /// True when no notifier is left, or when the rest have been blocked in the kernel for too long. A notifier holds
    /// nothing of the pool but a descriptor of the mount's connection.
    fn notifiers_are_gone(&mut self) -> bool {
        let Some(stopping) = self.stopping.as_mut().filter(|_| !self.notifiers.is_empty()) else {
            return true;
        };
        Instant::now() >= *stopping.end_at.get_or_insert_with(|| Instant::now() + NOTIFIERS_GRACE)
    }

    fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    // --- the worker

    fn keep_a_worker(&mut self) {
        self.reap_worker();
        if self.worker.is_some() || self.stopping.is_some() || Instant::now() < self.start_worker_at {
            return;
        }
        let text = SetupText {
            identity: self.pool.identity.clone(),
            pool_dir: self.pool.dir.path().to_owned(),
            costs: self.pool.costs.clone(),
            membership: self.pool.membership.clone(),
        };
        let fds = SetupFds {
            listener: self.clients.as_fd(),
            flight_recorder: self.recorder.as_fd(),
            target_dirs: self.pool.target_dirs(),
            locks: self.pool.locks(),
        };
        match WorkerProcess::start(&text, &fds, &self.kept) {
            Ok(mut worker) => {
                tracing::info!(pid = worker.pid(), restarts = self.restarts, "worker started");
                worker.give(&self.kept);
                self.worker = Some(worker);
            }
            Err(e) => {
                tracing::error!("{e}");
                self.last_failure = Some(e);
                self.worker_is_gone(Duration::ZERO);
            }
        }
    }

    fn reap_worker(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let Some(status) = worker.ended() else { return };
        // Messages that it sent before its end are processed, above all stored descriptors.
        self.hear_worker();
        let Some(worker) = self.worker.take() else { return };
        let words = worker_process::describe(status);
        if self.stopping.is_some() {
            tracing::info!("worker {words}");
            return;
        }
        tracing::error!(pid = worker.pid(), "worker {words}");
        self.last_end = Some(words);
        self.worker_is_gone(worker.started.elapsed());
    }

    fn worker_is_gone(&mut self, life: Duration) {
        self.restarts += 1;
        let delay = self.backoff.after(life);
        self.start_worker_at = Instant::now() + delay;
        if !self.served && (self.last_failure.is_some() || self.backoff.short_lives() >= FIRST_STARTS_MAX) {
            if self.last_failure.is_none() {
                let words = self.last_end.clone().unwrap_or_default();
                let log = std::fs::read_to_string(self.pool.dir.file(LOG_FILE)).unwrap_or_default();
                let lines: Vec<&str> = log.lines().rev().take(LOG_LINES_SHOWN).collect();
                let lines: Vec<&str> = lines.into_iter().rev().collect();
                self.last_failure = Some(
                    Error::new(Code::Io, format!("cannot start pool {}", self.pool.dir.path().display()))
                        .why(format!(
                            "its daemon {words}, {} times; its last words:\n{}",
                            self.restarts,
                            lines.join("\n")
                        )),
                );
            }
            // The data of a pool that existed before stay, for a version that can read them.
            self.begin_stop(self.pool.reopened, None);
        } else if !delay.is_zero() {
            tracing::warn!("worker crashes again and again: next start in {} ms", delay.as_millis());
        }
    }

    fn hear_worker(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let mut refused = false;
        for message in worker.messages() {
            match message {
                Message::Put(tag, fds) => {
                    self.programs += u64::from(tag.starts_with(PROGRAM_TAG) && !self.kept.has(&tag));
                    self.kept.put(tag, fds);
                }
                Message::Remove(tag) => self.kept.remove(&tag),
                Message::StartNotifier(socket) => self.notifiers.start(&socket),
                Message::StartMover => self.mover.want(&self.pool.dir),
                Message::Ready => {
                    worker.ready = true;
                    self.served = true;
                    self.report.send(&Ok(Started {
                        pool: self.pool.dir.path().to_owned(),
                        pid: std::process::id(),
                        identity: self.pool.identity.clone(),
                        costs: self.pool.costs.clone(),
                        reopened: self.pool.reopened,
                    }));
                }
                Message::Failed(failure) => {
                    let e = Error::from(failure);
                    tracing::error!("worker: {e}");
                    refused |= e.code == Code::Stale;
                    self.last_failure = Some(e);
                }
                other => tracing::error!("the worker said {other:?}, which a worker must not send"),
            }
        }
        if refused && self.served {
            // The other nodes have met other data under this node's number. No other node has used what was created
            // here since the start.
            self.begin_stop(self.pool.reopened, None);
        }
    }

    /// The mount's process and the mover.
    fn tend_helpers(&mut self) {
        let serves = self.served && self.stopping.is_none();
        self.mount.tend(self.pool.dir.path(), serves);
        self.mover.tend(&self.pool.dir, serves);
        for (id, reply) in self.mount.take_answers().into_iter().chain(self.mover.take_answers()) {
            self.send(id, &reply);
        }
        // The worker serves until both are gone.
        if self.stopping.as_ref().is_some_and(|s| !s.worker_told) && self.helpers_are_gone() {
            self.tell_worker_to_stop();
        }
    }

    fn helpers_are_gone(&self) -> bool {
        self.mount.is_idle() && self.mover.is_idle()
    }

    // --- stopping

    fn begin_stop(&mut self, keep: bool, asker: Option<MemberId>) {
        if let Some(stopping) = &mut self.stopping {
            stopping.askers.extend(asker);
            return;
        }
        tracing::info!(keep, "pool stops");
        self.mount.stop();
        self.mover.stop();
        self.stopping = Some(Stopping {
            keep,
            worker_told: false,
            kill_at: Instant::now() + STOP_GRACE,
            killed: false,
            end_at: None,
            askers: asker.into_iter().collect(),
        });
    }

    fn tell_worker_to_stop(&mut self) {
        let Some(stopping) = &mut self.stopping else { return };
        stopping.worker_told = true;
        stopping.kill_at = Instant::now() + STOP_GRACE;
        if let Some(worker) = &self.worker {
            worker.signal(Signal::TERM);
        }
    }

    fn end_when_left(&mut self) {
        if !self.pool.identity.embedded || self.stopping.is_some() {
            return;
        }
        let never_used = !self.members.ever_used() && self.born.elapsed() >= FIRST_MEMBER_GRACE;
        if never_used || self.members.all_gone() {
            tracing::info!("the last member is gone");
            match self.mover.is_wanted() && !self.is_drained {
                true => self.drain_and_stop(),
                false => self.begin_stop(false, None),
            }
        }
    }

    /// The last member was killed before it had drained the pool to its backing store: `forebay down` does it. If it
    /// cannot, the pool stays up.
    fn drain_and_stop(&mut self) {
        // Programs that were killed with it may still be ending, and `forebay down` refuses to stop a pool in use.
        if !programs::living(&self.kept).is_empty() {
            let until = *self.left_until.get_or_insert_with(|| Instant::now() + PROGRAMS_END);
            if Instant::now() < until {
                return;
            }
        }
        let path = self.pool.dir.path().to_owned();
        self.pool.identity.embedded = false;
        let started = self.pool.identity.write(&self.pool.dir).and_then(|()| {
            let mut command = Command::new(program("forebay")?);
            command.args(["down", "--no-progress", "--pool"]).arg(&path).stdout(Stdio::null());
            Helper::start_silent(command, "cannot start forebay down")
        });
        match started {
            Ok(drainer) => {
                tracing::warn!("it did not drain the pool: the pool is drained, and ends after that");
                self.drainer = Some(drainer);
            }
            Err(e) => {
                tracing::error!("{e}: the pool stays up; to end it: forebay down --pool {}", path.display());
            }
        }
    }

    fn reap_drainer(&mut self) {
        let Some(status) = self.drainer.as_mut().and_then(Helper::ended) else { return };
        self.drainer = None;
        if self.stopping.is_none() {
            let path = self.pool.dir.path().display();
            let how = describe(status);
            tracing::error!("forebay down {how}: the pool stays up; to end it: forebay down --pool {path}");
        }
    }

    // --- the loop

    fn next_wake(&self) -> Option<Instant> {
        let tick = self.members.next_tick_ms(self.now_ms()).map(|ms| self.born + Duration::from_millis(ms));
        let first = (self.pool.identity.embedded && !self.members.ever_used())
            .then(|| self.born + FIRST_MEMBER_GRACE);
        let start = (self.worker.is_none() && self.stopping.is_none()).then_some(self.start_worker_at);
        let kill = self.stopping.as_ref().filter(|s| !s.killed).map(|s| s.kill_at);
        let end = self.stopping.as_ref().and_then(|s| s.end_at);
        let waits_for_programs = self.pool.identity.embedded && self.left_until.is_some();
        let programs = waits_for_programs.then(|| Instant::now() + PROGRAMS_LOOK);
        [programs, tick, first, start, kill, end, self.mount.next_wake(), self.mover.next_wake()]
            .into_iter()
            .flatten()
            .min()
    }

    fn wait_and_serve(&mut self) {
        let timeout = self.next_wake().map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos() as i64 }
        });
        let ids: Vec<MemberId> = self.connections.keys().copied().collect();
        let ready: Vec<PollFlags> = {
            let mut fds =
                vec![PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            for connection in self.connections.values() {
                let mut flags = PollFlags::IN;
                if !connection.to_send.is_empty() {
                    flags |= PollFlags::OUT;
                }
                fds.push(PollFd::new(&connection.stream, flags));
            }
            if let Some(worker) = &self.worker {
                let mut flags = PollFlags::IN;
                if worker.wants_to_send() {
                    flags |= PollFlags::OUT;
                }
                fds.push(PollFd::from_borrowed_fd(worker.socket(), flags));
            }
            let helpers = [self.mount.socket(), self.mover.socket()].into_iter().flatten();
            fds.extend(helpers.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) => fds.iter().map(|fd| fd.revents()).collect(),
                Err(_) => return, // interrupted: the caller's loop repeats it
            }
        };
        if !ready[0].is_empty() {
            self.take_signals();
        }
        if !ready[1].is_empty() {
            self.accept();
        }
        // The next turn of the loop handles the messages and ends of the mount's process and the mover.
        let worker_ready = self.worker.as_ref().and_then(|_| ready.get(2 + ids.len()).copied());
        for (id, flags) in ids.iter().zip(&ready[2..]) {
            if !flags.is_empty() {
                self.serve(*id);
            }
        }
        if let Some(flags) = worker_ready.filter(|flags| !flags.is_empty()) {
            self.hear_worker();
            if let Some(worker) = &mut self.worker {
                worker.give(&self.kept);
                if flags.contains(PollFlags::HUP) {
                    // The worker's end is closed: it is dying, and SIGCHLD follows. Until then poll would return at
                    // once.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        if let Some(stopping) = &mut self.stopping {
            if !stopping.killed && Instant::now() >= stopping.kill_at {
                stopping.killed = true;
                if let Some(worker) = &self.worker {
                    tracing::error!(pid = worker.pid(), "worker does not stop: killed");
                    worker.signal(Signal::KILL);
                }
            }
        }
    }

    fn take_signals(&mut self) {
        while let Some(received) = self.signals.next() {
            match received.signal {
                libc::SIGCHLD => {} // every turn of the loop checks the worker
                // Any other signal stops the pool but keeps its data, unless the pool is embedded.
                signal => {
                    tracing::info!("signal {signal}");
                    self.begin_stop(!self.pool.identity.embedded, None);
                }
            }
        }
    }
}
