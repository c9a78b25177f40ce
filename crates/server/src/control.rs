//! Requests to a pool that is up: status, check, mount, membership. The supervisor and the worker answer them.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub use forebay_tasks::{MoverReport, StoreReport};
use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::directory::{PoolDirectory, SOCKET_FILE, SUPERVISOR_FILE};
use crate::frame;
use crate::members::{Answer, JoinRequest};
pub use crate::protocol::MountOptions;
use crate::protocol::{Ask, Reply, WorkerAsk};

/// The supervisor never blocks, so a missing answer means that it is stopped or starved.
const SUPERVISOR_TIMEOUT: Duration = Duration::from_secs(5);
/// A worker answers after at most one batch, unless it is being replaced.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Mounting takes the kernel's time and one access through the mount.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(30);
/// The mover attaches to the pool and reads its own files before it is ready.
const MOVER_TIMEOUT: Duration = Duration::from_secs(30);
/// A check walks the whole shard and target.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3600);

/// A connection to a pool's supervisor.
#[derive(Debug)]
pub(crate) struct Supervisor {
    stream: UnixStream,
    /// An exchange failed. The next message may be the answer to that request, so no further request is sent. The
    /// connection stays open, because the membership ends with it.
    failed: bool,
}

impl Supervisor {
    pub(crate) fn connect(dir: &PoolDirectory) -> Result<Supervisor> {
        Ok(Supervisor { stream: dir.connect(SUPERVISOR_FILE)?, failed: false })
    }

    pub(crate) fn ask(&mut self, ask: &Ask, timeout: Option<Duration>) -> Result<Reply> {
        self.ensure_in_step()?;
        frame::ask(&mut self.stream, ask, timeout).inspect_err(|_| self.failed = true)
    }

    /// As [`Supervisor::ask`], but waits no longer once `interrupt` can be read: none then.
    pub(crate) fn ask_until(
        &mut self,
        ask: &Ask,
        timeout: Duration,
        interrupt: Option<BorrowedFd<'_>>,
    ) -> Result<Option<Reply>> {
        self.ensure_in_step()?;
        let answer = frame::ask_until(&mut self.stream, ask, timeout, interrupt);
        self.failed = !matches!(answer, Ok(Some(_)));
        answer
    }

    fn ensure_in_step(&self) -> Result<()> {
        match self.failed {
            false => Ok(()),
            true => Err(Error::new(Code::TimedOut, "cannot ask the pool's daemon")
                .why("it did not answer an earlier request on this connection")),
        }
    }

    pub(crate) fn status(&mut self) -> Result<Value> {
        self.status_until(None)?.ok_or_else(unexpected)
    }

    /// As [`Supervisor::status`], but waits no longer once `interrupt` can be read: none then.
    pub(crate) fn status_until(&mut self, interrupt: Option<BorrowedFd<'_>>) -> Result<Option<Value>> {
        match self.ask_until(&Ask::Status, SUPERVISOR_TIMEOUT, interrupt)? {
            None => Ok(None),
            Some(Reply::Status(value)) => Ok(Some(value)),
            Some(Reply::Failed(failure)) => Err(failure.into()),
            Some(_) => Err(unexpected()),
        }
    }

    pub(crate) fn unmount(&mut self, at: Option<&Path>, lazy: bool) -> Result<()> {
        let ask = Ask::Unmount { at: at.map(Path::to_owned), lazy };
        match self.ask(&ask, Some(MOUNT_TIMEOUT))? {
            Reply::Unmounted => Ok(()),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
        }
    }

    fn member(&mut self, ask: &Ask, timeout: Option<Duration>) -> Result<Answer> {
        match self.ask(ask, timeout)? {
            Reply::Member(Answer::Refused { why }) => {
                Err(Error::new(Code::Invalid, "the pool's supervisor refused").why(why))
            }
            Reply::Member(answer) => Ok(answer),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> Error {
    Error::new(Code::Malformed, "the pool's supervisor sent an unexpected reply")
        .cure("command and daemon must be of one version: stop the pool with the Forebay that started it")
}

/// Process numbers of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pids {
    /// The supervisor.
    pub supervisor: u32,
    /// The worker; none while it is being replaced.
    #[serde(default)]
    pub worker: Option<u32>,
}

/// The state of a pool that is up. Its JSON is that of `forebay status --json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The pool's directory.
    pub pool: String,
    /// `up`, `restarting` (the worker is being replaced) or `stopping`.
    pub state: String,
    /// The node's number.
    pub node: u16,
    /// `dram` or `ssd`.
    pub media: String,
    /// `tmpfs`, `directory` or `detached`.
    pub backing: String,
    /// True for a pool that ends with its last member.
    pub embedded: bool,
    /// Process numbers.
    pub pids: Pids,
    /// How often the worker was replaced.
    pub restarts: u64,
    /// How the last replaced worker ended.
    pub last_crash: Option<String>,
    /// Seconds since the pool was started.
    pub uptime_s: u64,
    /// Capacity for data and shard, in bytes.
    pub capacity_bytes: u64,
    /// Bytes that data and shard use.
    pub used_bytes: Option<u64>,
    /// Bytes that can still be written.
    pub free_bytes: Option<u64>,
    /// The number of inodes.
    pub inodes: Option<u64>,
    /// The number of attached processes.
    pub clients: Option<u64>,
    /// The number of `forebay run`s that use the pool.
    pub members: u64,
    /// The commands that they run.
    pub member_labels: Vec<String>,
    /// The number of programs that are attached, whether or not `forebay run` started them.
    pub programs: u64,
    /// Some of them, by name and process number.
    pub program_labels: Vec<String>,
    /// Grows with each `forebay run`, mount and attached program of the pool, and when it gets its first backing store.
    pub uses: u64,
    /// The pool's mounts.
    pub mounts: Vec<MountStatus>,
    /// The pool's mover; none without backing stores.
    pub mover: Option<MoverStatus>,
    /// Drawbacks of the medium and its placement, for users to read.
    pub costs: Vec<String>,
    /// Other values from the worker: ring, board, capabilities.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// Queries the status of a pool that is up. If the worker does not answer in time, its values are missing.
/// [`Code::NotFound`] when the pool is not up.
pub fn status(path: &Path) -> Result<Status> {
    status_until(path, None)?.ok_or_else(unexpected)
}

/// As [`status`], but waits no longer once `interrupt` can be read: none then.
pub fn status_until(path: &Path, interrupt: Option<BorrowedFd<'_>>) -> Result<Option<Status>> {
    let dir = PoolDirectory::open(path)?;
    // Reports a damaged or newer pool before a pool that is down.
    crate::identity::PoolIdentity::read(&dir)?;
    let ours = match Supervisor::connect(&dir)?.status_until(interrupt)? {
        None => return Ok(None),
        Some(Value::Object(ours)) => ours,
        Some(_) => return Err(unexpected()),
    };
    let theirs = dir
        .connect(SOCKET_FILE)
        .and_then(|mut worker| frame::ask_until(&mut worker, &WorkerAsk::Status, WORKER_TIMEOUT, interrupt));
    let mut all = match theirs {
        Ok(None) => return Ok(None),
        Ok(Some(Value::Object(theirs))) => theirs,
        _ => Map::new(),
    };
    all.extend(ours);
    serde_json::from_value(Value::Object(all)).map(Some).map_err(|e| unexpected().why(e))
}

/// Fails, with a cure for the user, when the pool in `path` is not up, is of a newer format, or is not there.
pub fn ensure_up(path: &Path) -> Result<()> {
    let dir = PoolDirectory::open(path)?;
    crate::identity::PoolIdentity::read(&dir)?;
    Supervisor::connect(&dir).map(drop)
}

/// True when the pool in `path` has other nodes and is not mounted on this one: preloaded programs cannot open files
/// whose data lie on other nodes.
pub fn lacks_mount(path: &Path) -> bool {
    let ask = || Supervisor::connect(&PoolDirectory::open(path)?)?.status();
    ask().is_ok_and(|status| {
        status["node_count"].as_u64().is_some_and(|n| n > 1)
            && status["mounts"].as_array().is_some_and(Vec::is_empty)
    })
}

/// The mounts of the pool in `path` if it emulates a medium; none if it does not. Asks neither the worker nor other nodes.
pub fn mounts_if_paced(path: &Path) -> Result<Option<Vec<MountStatus>>> {
    let dir = PoolDirectory::open(path)?;
    let identity = crate::identity::PoolIdentity::read(&dir)?;
    if identity.is_none_or(|identity| identity.media_profile.is_none()) {
        return Ok(None);
    }
    let status = Supervisor::connect(&dir)?.status()?;
    let mounts = status.get("mounts").cloned().unwrap_or_default();
    serde_json::from_value(mounts).map(Some).map_err(|e| unexpected().why(e))
}

/// Makes the worker of a pool that is up check its shard and its target. Returns the worker's findings.
pub fn check(path: &Path) -> Result<Value> {
    let dir = PoolDirectory::open(path)?;
    crate::identity::PoolIdentity::read(&dir)?;
    Supervisor::connect(&dir)?;
    frame::ask(&mut dir.connect(SOCKET_FILE)?, &WorkerAsk::Check, Some(CHECK_TIMEOUT))
}

/// A membership in a pool, which ends when this is dropped.
#[derive(Debug)]
pub struct Membership {
    connection: Supervisor,
    token: String,
}

/// The state of a claim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn {
    /// This member does it, then reports with [`Membership::finish_claim`].
    Mine,
    /// Another member of the group has done it.
    Done,
    /// Another member tried and failed, for this reason.
    Failed(String),
}

/// The remaining work of a member whose program has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeavePlan {
    /// Keys that no other member holds any more: the stage-outs that this member does.
    pub keys: Vec<String>,
    /// True when a member of its group failed.
    pub any_failed: bool,
}

/// How a pool was mounted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MountFacts {
    /// `passthrough`: the kernel accesses the backing files by itself; `requests`: by requests to the mount's process.
    pub data: String,
    /// Why data do not go by passthrough.
    pub why: Option<String>,
}

/// A mount, as `status` reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStatus {
    /// The directory.
    pub at: String,
    /// `mounted`, `mounting` (its process is being started or replaced) or `unmounting`.
    pub state: String,
    /// True when other users may use it too.
    pub allow_other: bool,
    /// True when it was made with `--no-passthrough`.
    pub no_passthrough: bool,
    /// The process that serves it.
    pub pid: Option<u32>,
    /// See [`MountFacts`].
    pub data: Option<String>,
    /// See [`MountFacts`].
    pub why: Option<String>,
    /// How often its process was replaced.
    pub restarts: u64,
    /// How the last replaced process ended.
    pub last_crash: Option<String>,
}

/// The mover, as `status` reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MoverStatus {
    /// `up`, `starting` (it is being started or replaced) or `stopping`.
    pub state: String,
    /// Its process.
    pub pid: Option<u32>,
    /// Seconds since it was started.
    pub uptime_s: Option<u64>,
    /// How often it was replaced.
    pub restarts: u64,
    /// How the last replaced one ended.
    pub last_crash: Option<String>,
    /// Why it could not start, in its own words.
    pub last_failure: Option<String>,
    /// What it reported last.
    #[serde(flatten)]
    pub report: MoverReport,
}

/// Starts the mover of the pool in `path`, which the pool keeps from then on; returns when it is ready. Does nothing if
/// it runs.
pub fn start_mover(path: &Path) -> Result<()> {
    let mut supervisor = Supervisor::connect(&PoolDirectory::open(path)?)?;
    match supervisor.ask(&Ask::StartMover, Some(MOVER_TIMEOUT))? {
        Reply::MoverStarted => Ok(()),
        Reply::Failed(failure) => Err(failure.into()),
        _ => Err(unexpected()),
    }
}

/// Mounts the pool in `path` on the empty directory `at`; returns when the mount serves requests.
pub fn mount(path: &Path, at: &Path, options: MountOptions) -> Result<MountFacts> {
    let mut supervisor = Supervisor::connect(&PoolDirectory::open(path)?)?;
    match supervisor.ask(&Ask::Mount { at: at.to_owned(), options }, Some(MOUNT_TIMEOUT))? {
        Reply::Mounted(facts) => serde_json::from_value(facts).map_err(|_| unexpected()),
        Reply::Failed(failure) => Err(failure.into()),
        _ => Err(unexpected()),
    }
}

/// Unmounts the pool in `path`, from `at` or from wherever it is mounted. [`Code::Busy`] while programs use the mount,
/// unless `lazy`: then it is detached while they use it.
pub fn unmount(path: &Path, at: Option<&Path>, lazy: bool) -> Result<()> {
    let mut supervisor = Supervisor::connect(&PoolDirectory::open(path)?)?;
    supervisor.unmount(at, lazy)
}

/// Joins the pool in `path`. [`Code::NotFound`] or [`Code::PoolGone`] when it is not up or is stopping.
pub fn join(path: &Path, request: JoinRequest) -> Result<Membership> {
    let dir = PoolDirectory::open(path)?;
    crate::identity::PoolIdentity::read(&dir)?;
    let mut connection = Supervisor::connect(&dir)?;
    match connection.member(&Ask::Join(request), Some(SUPERVISOR_TIMEOUT))? {
        Answer::Joined { token } => Ok(Membership { connection, token }),
        _ => Err(unexpected()),
    }
}

impl Membership {
    /// The token that marks this member's programs: the value of [`crate::TOKEN_VARIABLE`] in their environment.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Claims work that the group does once. Blocks while another member does it.
    pub fn claim(&mut self, key: &str) -> Result<Turn> {
        match self.connection.member(&Ask::Claim { key: key.to_owned() }, None)? {
            Answer::Mine => Ok(Turn::Mine),
            Answer::Done => Ok(Turn::Done),
            Answer::Failed { why } => Ok(Turn::Failed(why)),
            _ => Err(unexpected()),
        }
    }

    /// Reports the result of the claimed work.
    pub fn finish_claim(&mut self, key: &str, result: std::result::Result<(), String>) -> Result<()> {
        let ask = Ask::Finish { key: key.to_owned(), failure: result.err() };
        self.connection.member(&ask, Some(SUPERVISOR_TIMEOUT)).map(drop)
    }

    /// Reports that this member's program ended, successfully or not, and releases the member's holds. The plan lists
    /// the holds that no other member has; this member does their work before it leaves. Blocks while members of its
    /// group have not joined yet.
    pub fn leave_plan(&mut self, success: bool) -> Result<LeavePlan> {
        match self.connection.member(&Ask::LeavePlan { success }, None)? {
            Answer::Plan { keys, any_failed } => Ok(LeavePlan { keys, any_failed }),
            _ => Err(unexpected()),
        }
    }

    /// Keeps an embedded pool up after its last member leaves, until `forebay down`.
    pub fn keep_pool(&mut self) -> Result<()> {
        match self.connection.ask(&Ask::Keep, Some(SUPERVISOR_TIMEOUT))? {
            Reply::Kept => Ok(()),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
        }
    }

    /// Tells the supervisor that this member begins to copy to the backing store what it lacks.
    pub fn draining(&mut self) -> Result<()> {
        self.note(&Ask::Draining)
    }

    /// Tells the supervisor that the backing store has everything that was written before [`Membership::draining`]: an
    /// embedded pool that is not told so is drained before it ends.
    pub fn drained(&mut self) -> Result<()> {
        self.note(&Ask::Drained)
    }

    fn note(&mut self, ask: &Ask) -> Result<()> {
        match self.connection.ask(ask, Some(SUPERVISOR_TIMEOUT))? {
            Reply::Noted => Ok(()),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
        }
    }

    /// Leaves the pool. An embedded pool ends with its last member.
    pub fn leave(self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn answer_that_comes_too_late_is_not_taken_for_the_next() {
        let (stream, mut theirs) = UnixStream::pair().unwrap();
        let mut supervisor = Supervisor { stream, failed: false };
        let late = supervisor.ask(&Ask::Keep, Some(Duration::from_millis(20)));
        assert_eq!(late.unwrap_err().code, Code::TimedOut);
        theirs.write_all(&frame::encode(&Reply::Kept).unwrap()).unwrap();
        let next = supervisor.ask(&Ask::Keep, Some(Duration::from_secs(10)));
        assert_eq!(next.unwrap_err().code, Code::TimedOut);
        let mut asked = Vec::new();
        supervisor.stream.shutdown(std::net::Shutdown::Write).unwrap();
        theirs.read_to_end(&mut asked).unwrap();
        assert_eq!(asked, frame::encode(&Ask::Keep).unwrap(), "it was asked once");
    }

    #[test]
    fn answer_is_awaited_no_longer_than_it_may_take_or_than_until_an_interrupt() {
        let (stream, mut theirs) = UnixStream::pair().unwrap();
        let (interrupt, mut interrupts) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        let mut supervisor = Supervisor { stream: stream.try_clone().unwrap(), failed: false };
        let late = supervisor.ask_until(&Ask::Keep, Duration::from_secs(1), Some(interrupt.as_fd()));
        assert_eq!(late.unwrap_err().code, Code::TimedOut);
        assert!((1..2).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        let ask = || {
            let mut supervisor = Supervisor { stream: stream.try_clone().unwrap(), failed: false };
            supervisor.ask_until(&Ask::Keep, Duration::from_secs(60), Some(interrupt.as_fd()))
        };
        interrupts.write_all(b"x").unwrap();
        assert!(ask().unwrap().is_none());
        theirs.write_all(&frame::encode(&Reply::Kept).unwrap()).unwrap();
        assert!(matches!(ask(), Ok(Some(Reply::Kept))), "an answer that is there");
        drop(theirs);
        assert_eq!(ask().unwrap_err().code, Code::PoolGone);
    }
}
