//! The pool of a run: one that is up, or the job's own, which the first of its runs starts.

use std::fs::File;
use std::path::{Path, PathBuf};

use forebay_server::control::{self, Membership};
use forebay_server::launch::{self, Started, UpOptions};
use forebay_server::{JoinRequest, Medium};
use forebay_types::{Code, Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};

use super::job::Job;
use crate::arguments::Run;
use crate::{failure, pool, table};

/// Times that a pool may end between being found and being joined, each time under another run's feet.
const ATTEMPTS: usize = 20;
/// Lines of a daemon's log that explain why it was restarted.
const LOG_LINES: usize = 5;

/// A pool that this run is a member of.
#[derive(Debug)]
pub(super) struct Entered {
    pub(super) dir: PathBuf,
    pub(super) membership: Membership,
    pub(super) embedded: bool,
    /// Set when this run started it.
    pub(super) started: Option<Started>,
}

/// Joins the pool that is named, else the default one if it is up, else the job's own.
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
                let leave_out = "leave out --pool (unset FOREBAY_POOL) for a pool of the program's own";
                let cure = if e.cure.is_empty() {
                    leave_out.to_owned()
                } else {
                    format!("{}; or {leave_out}", e.cure)
                };
                e.cure(cure)
            }
            _ => e,
        })?;
        let embedded = control::status(&dir).is_ok_and(|s| s.embedded);
        return Ok(Entered { dir, membership, embedded, started: None });
    }
    if !arguments.own && arguments.media.is_none() && arguments.capacity.is_none() {
        let dir = forebay_server::directory::default_pool()?;
        if let Ok(membership) = control::join(&dir, request.clone()) {
            return Ok(Entered { dir, membership, embedded: false, started: None });
        }
    }
    enter_own(arguments, job, request)
}

/// What a pool that is up is made of cannot be chosen any more.
fn refuse_medium(arguments: &Run, dir: &Path) -> Result<()> {
    if arguments.media.is_none() && arguments.capacity.is_none() {
        return Ok(());
    }
    Err(failure::invalid(
        "cannot choose --media and --capacity",
        format!("they are those of pool {}, which is up", dir.display()),
        "leave them out, or add --own for a pool of the program's own",
    ))
}

fn enter_own(arguments: &Run, job: &Job, request: JoinRequest) -> Result<Entered> {
    let base = match arguments.media {
        Some(Medium::Ssd) => ssd_directory()?,
        _ => forebay_server::directory::user_directory()?,
    };
    launch::sweep_dead(&base);
    let dir = base.join(format!("run-{}", job.pool_key));
    let _lock = StartLock::take(&base.join(format!("run-{}.lock", job.pool_key)))?;
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
            embedded: true,
            elsewhere_allowed: true,
            node: None,
            renumber: false,
        }) {
            Ok(started) => started,
            Err(e) if e.code == Code::Busy => continue, // it is ending, or was started beside us
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

/// The directory for temporary files is where batch systems put a node's disk.
fn ssd_directory() -> Result<PathBuf> {
    let me = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(format!("forebay-ssd-{me}"));
    match rustix::fs::mkdir(&path, Mode::RWXU) {
        Ok(()) => {
            // A umask may have taken bits away.
            rustix::fs::chmod(&path, Mode::RWXU)
                .map_err(|e| Error::io(format!("cannot make {}", path.display()), &e.into()))?;
            return Ok(path);
        }
        Err(rustix::io::Errno::EXIST) => {}
        Err(e) => {
            return Err(Error::io(format!("cannot make {}", path.display()), &e.into())
                .cure("set TMPDIR to a directory on the disk that you may write"));
        }
    }
    let stat = rustix::fs::lstat(&path)
        .map_err(|e| Error::io(format!("cannot use {}", path.display()), &e.into()))?;
    if stat.st_uid != me || stat.st_mode & libc::S_IFMT != libc::S_IFDIR || stat.st_mode & 0o077 != 0 {
        return Err(Error::new(Code::AccessDenied, format!("cannot use {}", path.display()))
            .why("it is not a directory of yours alone")
            .cure("remove it, or set TMPDIR to another directory"));
    }
    Ok(path)
}

/// Held while a pool is looked for and started, so that one of several runs starts it. The file goes with the last.
struct StartLock {
    path: PathBuf,
    _file: File,
}

impl StartLock {
    fn take(path: &Path) -> Result<StartLock> {
        let failed = |e: rustix::io::Errno| Error::io(format!("cannot lock {}", path.display()), &e.into());
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
            loop {
                match rustix::fs::flock(&fd, FlockOperation::LockExclusive) {
                    Err(rustix::io::Errno::INTR) => {}
                    other => break other.map_err(failed)?,
                }
            }
            // Whoever held it before may have removed the file while this waited.
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
    }
}

impl Entered {
    /// Says what was started, and what it costs.
    pub(super) fn announce(&self) {
        if !self.embedded && control::lacks_mount(&self.dir) {
            note!(
                "forebay: note: the pool has other nodes and is not mounted here, so files whose data is there cannot be opened: \
                 forebay mount --pool {} DIR",
                self.dir.display()
            );
        }
        let Some(started) = &self.started else { return };
        for cost in started.costs.iter().filter(|c| is_serious(c)) {
            note!(
                "forebay: note: the pool ({}, {}) is {cost}",
                started.identity.media,
                table::bytes(started.identity.capacity_bytes)
            );
        }
    }

    /// Workers of the pool that were replaced.
    pub(super) fn restarts(&self) -> u64 {
        if !self.embedded {
            return 0; // not this run's affair alone
        }
        control::status(&self.dir).map_or(0, |s| s.restarts)
    }

    /// What the daemon's log says of a crash; the log goes with the pool.
    pub(super) fn last_words(&self) -> String {
        let log =
            std::fs::read_to_string(self.dir.join(forebay_server::directory::LOG_FILE)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|l| !l.contains(" INFO ")).collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        last.iter().map(|l| format!("\n  {l}")).collect()
    }

    /// Leaves; what a supervisor that was killed left is cleared away.
    pub(super) fn leave(self) {
        let Entered { dir, membership, embedded, .. } = self;
        membership.leave();
        if embedded {
            launch::sweep_if_dead(&dir);
        }
    }
}

/// Costs that a run is told of; `forebay status` has all.
fn is_serious(cost: &str) -> bool {
    cost.starts_with("not in memory") || cost.starts_with("not a medium of this node")
}
