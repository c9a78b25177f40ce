//! Selects the pool of a run: one that is up, or the job's own pool, which the job's first run starts.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_data::{tightest_memory_cgroup, Host};
use forebay_server::control::{self, Membership};
use forebay_server::directory;
use forebay_server::launch::{self, Presence, Started, UpOptions};
use forebay_server::{JoinRequest, Medium};
use forebay_types::{Code, Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};

use super::job::Job;
use crate::arguments::Run;
use crate::{failure, pool, table};

/// Attempts to join: a pool may end between being found and being joined, because another run leaves it.
const ATTEMPTS: usize = 20;
/// How long a pool may take to start or to stop.
pub(super) const CHANGING_GRACE: Duration = Duration::from_secs(30);
/// Lines of the daemon's log that are shown to explain a restart.
const LOG_LINES: usize = 5;

/// A pool that this run is a member of.
#[derive(Debug)]
pub(super) struct Entered {
    pub(super) dir: PathBuf,
    pub(super) membership: Membership,
    pub(super) embedded: bool,
    /// Set when this run started the pool.
    pub(super) started: Option<Started>,
}

/// Joins the named pool, else the default pool if it is up, else the job's own pool.
pub(super) fn enter(
    named: Option<PathBuf>,
    arguments: &Run,
    job: &Job,
    request: JoinRequest,
) -> Result<Entered> {
    if let Some(dir) = named.filter(|_| !arguments.own) {
        let dir = pool::directory(Some(dir))?;
        refuse_medium(arguments, &dir)?;
        let membership = control::join(&dir, request).map_err(|e| match e.code {
            Code::NotFound | Code::PoolGone => {
                or(e, "leave out --pool (unset FOREBAY_POOL) for a pool of the program's own")
            }
            _ => e,
        })?;
        let embedded = control::status(&dir).is_ok_and(|s| s.embedded);
        return Ok(Entered { dir, membership, embedded, started: None });
    }
    if !arguments.own {
        if let Some(entered) = enter_default(arguments, &request)? {
            return Ok(entered);
        }
    }
    enter_own(arguments, job, request)
}

/// Joins the default pool. `None`: there is none, and the run uses a pool of its own. Data in a pool of the run's own
/// are lost when it ends. So a default pool that exists and cannot be used is an error, unless the results are staged
/// out.
fn enter_default(arguments: &Run, request: &JoinRequest) -> Result<Option<Entered>> {
    let dir = directory::default_pool()?;
    let own = "add --own for a pool that ends with the program";
    let until = Instant::now() + CHANGING_GRACE;
    loop {
        match launch::settled_presence(&dir, CHANGING_GRACE).map_err(|e| or(e, own))? {
            Presence::None => return Ok(None),
            Presence::Up => {
                refuse_medium(arguments, &dir)?;
                match control::join(&dir, request.clone()) {
                    Ok(membership) => {
                        return Ok(Some(Entered { dir, membership, embedded: false, started: None }));
                    }
                    // The pool has just ended.
                    Err(e) if matches!(e.code, Code::NotFound | Code::PoolGone) && Instant::now() < until => {
                    }
                    Err(e) => return Err(or(e, own)),
                }
            }
            Presence::Changing => {
                let busy = Error::new(Code::Busy, format!("cannot use pool {}", dir.display()));
                return Err(or(busy.why("it is starting or stopping").cure("try again"), own));
            }
            Presence::Down { killed, has_data } => {
                let state = state_of_down(killed, has_data);
                if !arguments.stage_out.is_empty() {
                    note!(
                        "forebay: warning: pool {} is not up: {state}. The program gets a pool of its own, of which \
                         only what --stage-out names is kept",
                        dir.display()
                    );
                    return Ok(None);
                }
                let start = if has_data { "starts it with its data" } else { "starts it, empty" };
                let down = Error::new(Code::PoolGone, format!("cannot use pool {}", dir.display()));
                return Err(down.why(format!("it is not up: {state}")).cure(format!(
                    "`forebay up` {start}, `forebay down` removes what is left of it; or {own}"
                )));
            }
        }
    }
}

/// Why a pool is down, and whether its data still exist.
fn state_of_down(killed: bool, has_data: bool) -> &'static str {
    match (killed, has_data) {
        (true, true) => "its daemon was killed, and its data are still there",
        (true, false) => "its daemon was killed, or the node restarted, and its data are gone with it",
        (false, true) => "it was stopped, and its data are kept",
        (false, false) => "it was stopped, and its data, which were kept in memory, are gone",
    }
}

/// Adds an alternative to the cure of an error.
fn or(e: Error, other: &str) -> Error {
    let cure = if e.cure.is_empty() { other.to_owned() } else { format!("{}; or {other}", e.cure) };
    e.cure(cure)
}

/// Medium and capacity of a pool that is up cannot be chosen.
fn refuse_medium(arguments: &Run, dir: &Path) -> Result<()> {
    if arguments.media.is_none() && arguments.capacity.is_none() && arguments.media_profile.is_none() {
        return Ok(());
    }
    Err(failure::invalid(
        "cannot choose --media, --capacity and --media-profile",
        format!("they are those of pool {}, which is up", dir.display()),
        "leave them out, or add --own for a pool of the program's own",
    ))
}

fn enter_own(arguments: &Run, job: &Job, request: JoinRequest) -> Result<Entered> {
    let (_lock, dir) = lock_own(arguments, &format!("run-{}", job.pool_key))?;
    for _ in 0..ATTEMPTS {
        match control::join(&dir, request.clone()) {
            Ok(membership) => return Ok(Entered { dir, membership, embedded: true, started: None }),
            Err(e) if matches!(e.code, Code::NotFound | Code::PoolGone) => {}
            Err(e) => return Err(e),
        }
        let started = match launch::up(&UpOptions {
            path: dir.clone(),
            media: arguments.media,
            capacity_bytes: arguments.capacity,
            snapshots_ms: arguments.snapshots,
            media_profile: arguments.media_profile.clone(),
            embedded: true,
            elsewhere_allowed: true,
            node: None,
            renumber: false,
        }) {
            Ok(started) => started,
            Err(e) if e.code == Code::Busy => continue, // the pool is ending, or another run has just started it
            Err(e) => return Err(e),
        };
        match control::join(&dir, request.clone()) {
            Ok(membership) => return Ok(Entered { dir, membership, embedded: true, started: Some(started) }),
            Err(e) if matches!(e.code, Code::NotFound | Code::PoolGone) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Error::new(Code::Busy, format!("cannot enter pool {}", dir.display()))
        .why("it ends again and again before it can be joined")
        .cure(format!("see what ends it; `forebay down --pool {}` clears it", dir.display())))
}

/// Locks the path of the run's own pool until the pool is joined.
fn lock_own(arguments: &Run, name: &str) -> Result<(StartLock, PathBuf)> {
    let mut attempts = 0;
    loop {
        let base = match arguments.media {
            Some(Medium::Ssd) => directory::ssd_directory()?,
            _ => directory::user_directory()?,
        };
        launch::sweep_dead(&base);
        attempts += 1;
        match StartLock::take(&base.join(format!("{name}.lock"))) {
            // The directory has just been removed with the last pool in it.
            Err(e) if e.code == Code::NotFound && attempts < ATTEMPTS => {}
            lock => return Ok((lock?, base.join(name))),
        }
    }
}

/// Held while a pool is searched for and started, so that only one of several runs starts it. Releasing it removes the
/// file.
struct StartLock {
    path: PathBuf,
    _file: File,
}

impl StartLock {
    fn take(path: &Path) -> Result<StartLock> {
        let failed = |e: rustix::io::Errno| {
            let error = Error::io(format!("cannot lock {}", path.display()), &e.into());
            match error.code {
                Code::NoSpace => {
                    error.cure("free some space there, or set FOREBAY_TMPDIR to a directory elsewhere")
                }
                _ => error,
            }
        };
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
            loop {
                match rustix::fs::flock(&fd, FlockOperation::LockExclusive) {
                    Err(rustix::io::Errno::INTR) => {}
                    other => break other.map_err(failed)?,
                }
            }
            // The previous holder may have removed the file during the wait.
            let held = rustix::fs::fstat(&fd).map_err(failed)?;
            if rustix::fs::stat(path)
                .is_ok_and(|seen| seen.st_ino == held.st_ino && seen.st_dev == held.st_dev)
            {
                return Ok(StartLock { path: path.to_owned(), _file: File::from(fd) });
            }
        }
    }
}

impl Drop for StartLock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        directory::remove_empty_above(&self.path);
    }
}

impl Entered {
    /// Prints notes about a pool that was started, and about the limits of the pool.
    pub(super) fn announce(&self) {
        if !self.embedded && control::lacks_mount(&self.dir) {
            note!(
                "forebay: note: the pool has other nodes and is not mounted here, so files whose data is there cannot be opened: \
                 forebay mount --pool {} DIR",
                self.dir.display()
            );
        }
        self.warn_of_memory();
        let Some(started) = &self.started else { return };
        for cost in started.costs.iter().filter(|c| is_serious(c)) {
            note!(
                "forebay: note: the pool ({}, {}) is {cost}",
                started.identity.media,
                table::bytes(started.identity.capacity_bytes)
            );
        }
    }

    /// Pages of a tmpfs count as memory of the process that first writes them. Warns when the program's cgroup has less
    /// memory left than the pool has free: at the cgroup's limit the kernel kills the program, whereas a full pool
    /// fails with ENOSPC.
    fn warn_of_memory(&self) {
        let Some(cgroup) = tightest_memory_cgroup(&Host::this(), None) else { return };
        let Ok(status) = control::status(&self.dir) else { return };
        let in_memory = status.more.get("capabilities").is_some_and(|c| c["fs_type"] == "tmpfs");
        let Some(free_bytes) = status.free_bytes.filter(|_| in_memory) else { return };
        if cgroup.room_bytes() >= free_bytes {
            return;
        }
        note!(
            "forebay: warning: memory cgroup {} of this program has room for {}, and {} are free in the pool: what \
             the program writes into the pool counts as its memory, and beyond the cgroup's limit of {} the kernel \
             kills it\n  hint: ask the batch system for more memory (Slurm: --mem), or use a smaller pool",
            cgroup.path.display(),
            table::bytes(cgroup.room_bytes()),
            table::bytes(free_bytes),
            table::bytes(cgroup.limit_bytes),
        );
    }

    /// How many times the pool's worker was restarted.
    pub(super) fn restarts(&self) -> u64 {
        if !self.embedded {
            return 0; // concerns other runs too
        }
        control::status(&self.dir).map_or(0, |s| s.restarts)
    }

    /// The last lines of the daemon's log that are not informational; the log is removed with the pool.
    pub(super) fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.dir.join(directory::LOG_FILE)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|l| !l.contains(" INFO ")).collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        last.iter().map(|l| format!("\n  {l}")).collect()
    }

    /// Leaves the pool, and removes what a killed supervisor left.
    pub(super) fn leave(self) {
        let Entered { dir, membership, embedded, .. } = self;
        membership.leave();
        if embedded {
            launch::sweep_if_dead(&dir);
        }
    }
}

/// True for costs that a run reports; `forebay status` shows all.
fn is_serious(cost: &str) -> bool {
    cost.starts_with("not in memory") || cost.starts_with("not a medium of this node")
}
