//! A pool that is up, asked: status, check, membership. The other ends are the supervisor and the worker.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::directory::{PoolDirectory, SOCKET_FILE, SUPERVISOR_FILE};
use crate::frame;
use crate::members::{Answer, JoinRequest};
pub use crate::protocol::MountOptions;
use crate::protocol::{Ask, Reply, WorkerAsk};

/// The supervisor never waits for anybody, so silence means that it is stopped or starved.
const SUPERVISOR_TIMEOUT: Duration = Duration::from_secs(5);
/// A worker answers within a batch, or is being replaced.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Mounting waits for the kernel and one look through the mount.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(30);
/// A check walks the whole shard and target.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3600);

/// A connection to a pool's supervisor.
#[derive(Debug)]
pub(crate) struct Supervisor {
    stream: UnixStream,
    /// An exchange failed: what arrives next may answer that request, so that nothing more is asked. The connection
    /// stays, as a membership lasts as long as it.
    failed: bool,
}

impl Supervisor {
    pub(crate) fn connect(dir: &PoolDirectory) -> Result<Supervisor> {
        Ok(Supervisor { stream: dir.connect(SUPERVISOR_FILE)?, failed: false })
    }

    pub(crate) fn ask(&mut self, ask: &Ask, timeout: Option<Duration>) -> Result<Reply> {
        if self.failed {
            return Err(Error::new(Code::TimedOut, "cannot ask the pool's daemon")
                .why("it did not answer an earlier request on this connection"));
        }
        frame::ask(&mut self.stream, ask, timeout).inspect_err(|_| self.failed = true)
    }

    pub(crate) fn status(&mut self) -> Result<Value> {
        match self.ask(&Ask::Status, Some(SUPERVISOR_TIMEOUT))? {
            Reply::Status(value) => Ok(value),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
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
    Error::new(Code::Malformed, "the pool's supervisor answered something else")
        .cure("command and daemon must be of one version: stop the pool with the Forebay that started it")
}

/// Process numbers of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pids {
    /// The supervisor.
    pub supervisor: u32,
    /// The worker; none while it is replaced.
    #[serde(default)]
    pub worker: Option<u32>,
}

/// What is known about a pool that is up. Its JSON is that of `forebay status --json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The pool's directory.
    pub pool: String,
    /// `up`, `restarting` (the worker is replaced) or `stopping`.
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
    /// Workers that were replaced.
    pub restarts: u64,
    /// How the last worker ended that was replaced.
    pub last_crash: Option<String>,
    /// Seconds since the pool was started.
    pub uptime_s: u64,
    /// Bytes that data and shard may take.
    pub capacity_bytes: u64,
    /// Bytes that they take.
    pub used_bytes: Option<u64>,
    /// Bytes that can still be written.
    pub free_bytes: Option<u64>,
    /// Inodes that exist.
    pub inodes: Option<u64>,
    /// Processes that are attached.
    pub clients: Option<u64>,
    /// `forebay run`s that use the pool.
    pub members: u64,
    /// What they run.
    pub member_labels: Vec<String>,
    /// Where it is mounted.
    pub mounts: Vec<MountStatus>,
    /// What the medium costs, in words.
    pub costs: Vec<String>,
    /// What else the worker tells: ring, board, capabilities.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// Asks a pool that is up how it is. A worker that does not answer in time leaves its part out. [`Code::NotFound`] when
/// the pool is not up.
pub fn status(path: &Path) -> Result<Status> {
    let dir = PoolDirectory::open(path)?;
    // Whoever is not a pool says so before it is said to be down.
    crate::identity::PoolIdentity::read(&dir)?;
    let Value::Object(ours) = Supervisor::connect(&dir)?.status()? else { return Err(unexpected()) };
    let mut all = match ask_worker(&dir, &WorkerAsk::Status, WORKER_TIMEOUT) {
        Ok(Value::Object(theirs)) => theirs,
        _ => Map::new(),
    };
    all.extend(ours);
    serde_json::from_value(Value::Object(all)).map_err(|e| unexpected().why(e))
}

/// Fails with what a user can do when the pool in `path` is not up, is newer, or is not there.
pub fn ensure_up(path: &Path) -> Result<()> {
    let dir = PoolDirectory::open(path)?;
    crate::identity::PoolIdentity::read(&dir)?;
    Supervisor::connect(&dir).map(drop)
}

/// True when the pool in `path` has other nodes and is not mounted on this one: programs that are run over it cannot
/// open files whose data is there.
pub fn lacks_mount(path: &Path) -> bool {
    let ask = || Supervisor::connect(&PoolDirectory::open(path)?)?.status();
    ask().is_ok_and(|status| {
        status["node_count"].as_u64().is_some_and(|n| n > 1)
            && status["mounts"].as_array().is_some_and(Vec::is_empty)
    })
}

/// Has a pool that is up check its shard and its target; the findings as the worker tells them.
pub fn check(path: &Path) -> Result<Value> {
    let dir = PoolDirectory::open(path)?;
    crate::identity::PoolIdentity::read(&dir)?;
    Supervisor::connect(&dir)?;
    ask_worker(&dir, &WorkerAsk::Check, CHECK_TIMEOUT)
}

fn ask_worker(dir: &PoolDirectory, ask: &WorkerAsk, timeout: Duration) -> Result<Value> {
    let mut stream = dir.connect(SOCKET_FILE)?;
    frame::ask(&mut stream, ask, Some(timeout))
}

/// A member's place in a pool, for as long as this lives.
#[derive(Debug)]
pub struct Membership {
    connection: Supervisor,
    token: String,
}

/// Whose turn a claim is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn {
    /// This member's: do it, then say so with [`Membership::finish_claim`].
    Mine,
    /// It was done.
    Done,
    /// It was tried and failed, with this reason.
    Failed(String),
}

/// What is left to a member whose program has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeavePlan {
    /// Keys of which it was the last holder: its stage-outs to do.
    pub keys: Vec<String>,
    /// True when a member of its group failed.
    pub any_failed: bool,
}

/// How a pool was mounted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MountFacts {
    /// `passthrough`: the kernel goes to the backing files by itself; `requests`: by requests to the mount's process.
    pub data: String,
    /// Why not by passthrough.
    pub why: Option<String>,
}

/// A mount, as `status` tells of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStatus {
    /// The directory.
    pub at: String,
    /// `mounted`, `mounting` (its process is started or replaced) or `unmounting`.
    pub state: String,
    /// True when other users may use it too.
    pub allow_other: bool,
    /// The process that serves it.
    pub pid: Option<u32>,
    /// See [`MountFacts`].
    pub data: Option<String>,
    /// See [`MountFacts`].
    pub why: Option<String>,
    /// Processes that were replaced.
    pub restarts: u64,
    /// How the last one ended that was replaced.
    pub last_crash: Option<String>,
}

/// Mounts the pool in `path` on the empty directory `at`; returns when the mount answers.
pub fn mount(path: &Path, at: &Path, options: MountOptions) -> Result<MountFacts> {
    let mut supervisor = Supervisor::connect(&PoolDirectory::open(path)?)?;
    match supervisor.ask(&Ask::Mount { at: at.to_owned(), options }, Some(MOUNT_TIMEOUT))? {
        Reply::Mounted(facts) => serde_json::from_value(facts).map_err(|_| unexpected()),
        Reply::Failed(failure) => Err(failure.into()),
        _ => Err(unexpected()),
    }
}

/// Unmounts the pool in `path`, from `at` or from wherever it is. [`Code::Busy`] while programs use the mount, unless
/// `lazy`: then it is taken away from under them.
pub fn unmount(path: &Path, at: Option<&Path>, lazy: bool) -> Result<()> {
    let mut supervisor = Supervisor::connect(&PoolDirectory::open(path)?)?;
    supervisor.unmount(at, lazy)
}

/// Joins the pool in `path`. [`Code::NotFound`] or [`Code::PoolGone`] when it is not up, or stops just now.
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
    /// What marks this member's programs: the value of [`crate::TOKEN_VARIABLE`] in their environment.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Claims what the group does once. While another member does it, this waits.
    pub fn claim(&mut self, key: &str) -> Result<Turn> {
        match self.connection.member(&Ask::Claim { key: key.to_owned() }, None)? {
            Answer::Mine => Ok(Turn::Mine),
            Answer::Done => Ok(Turn::Done),
            Answer::Failed { why } => Ok(Turn::Failed(why)),
            _ => Err(unexpected()),
        }
    }

    /// Reports how what was claimed went.
    pub fn finish_claim(&mut self, key: &str, result: std::result::Result<(), String>) -> Result<()> {
        let ask = Ask::Finish { key: key.to_owned(), failure: result.err() };
        self.connection.member(&ask, Some(SUPERVISOR_TIMEOUT)).map(drop)
    }

    /// Says that this member's program ended, well or not, and lets go of what it holds; what it was the last to
    /// hold is its to do, before it leaves. While members of its group are still to come, this waits.
    pub fn leave_plan(&mut self, success: bool) -> Result<LeavePlan> {
        match self.connection.member(&Ask::LeavePlan { success }, None)? {
            Answer::Plan { keys, any_failed } => Ok(LeavePlan { keys, any_failed }),
            _ => Err(unexpected()),
        }
    }

    /// Makes an embedded pool stay up after its last member, until `forebay down`.
    pub fn keep_pool(&mut self) -> Result<()> {
        match self.connection.ask(&Ask::Keep, Some(SUPERVISOR_TIMEOUT))? {
            Reply::Kept => Ok(()),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(unexpected()),
        }
    }

    /// Leaves. An embedded pool ends with its last member.
    pub fn leave(self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

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
}
