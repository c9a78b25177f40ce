//! What a daemon inherits from the shell or the job that starts it, and must not be bound by.
//!
//! A pool serves programs for longer than its starter lives. Limits of the starter are raised as far as the kernel lets
//! this user, which is the hard limit for most. What remains of them must not kill: signals that enforce a limit are
//! ignored, so that the call fails instead (EFBIG). Limits below which the daemon cannot work are refused before it
//! starts. Signals that the starter had ignored or blocked, and its umask, are set anew. Limits and ignored signals
//! pass on to worker and mount, which are this program's children.
//!
//! The starter's nice value and processors are kept: they say how much of the machine the pool may use.

use std::io::Write;

use forebay_sys::signals;
use forebay_types::{Code, Error, Result};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// Fewer descriptors than this do not suffice for supervisor, worker and the first clients.
const DESCRIPTORS_MIN: u64 = 48;
/// Descriptors that are enough for all clients that a daemon may have.
const DESCRIPTORS_ENOUGH: u64 = 1 << 16;
/// The largest file of the daemon's own, beside the board, when a pool is new.
const OWN_FILE_BYTES: u64 = 64 << 20;
/// Less stack than this is raised to it. More is left alone: an unlimited stack changes where the kernel maps memory.
const STACK_BYTES: u64 = 8 << 20;

/// Limits that are raised as far as they go.
const RAISED: [Resource; 6] =
    [Resource::Fsize, Resource::Cpu, Resource::As, Resource::Data, Resource::Nproc, Resource::Memlock];

/// Raises one limit to `enough`, or to what this user may have.
fn raise(resource: Resource, enough: Option<u64>) {
    let limit = getrlimit(resource);
    let below = |limit: Option<u64>| limit.is_some_and(|limit| enough.is_none_or(|enough| limit < enough));
    if below(limit.maximum) && setrlimit(resource, Rlimit { current: enough, maximum: enough }).is_ok() {
        return; // only with CAP_SYS_RESOURCE
    }
    if below(limit.current) {
        let current = match enough {
            Some(enough) => Some(limit.maximum.map_or(enough, |maximum| maximum.min(enough))),
            None => limit.maximum,
        };
        let _ = setrlimit(resource, Rlimit { current, maximum: limit.maximum });
    }
}

/// Sheds what can be shed. To be called while the process has one thread.
pub(crate) fn shed() {
    signals::ignore(&[libc::SIGXFSZ, libc::SIGXCPU, libc::SIGPIPE]);
    // Ignored, children could not be waited for.
    signals::reset(libc::SIGCHLD);
    for resource in RAISED {
        raise(resource, None);
    }
    raise(Resource::Stack, Some(STACK_BYTES));
    raise(Resource::Nofile, Some(DESCRIPTORS_ENOUGH));
    // All of them, where the hard limit is above that.
    let descriptors = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: descriptors.maximum, ..descriptors });
    leave_class();
    // A worker that the kernel prefers to end takes all programs' calls with it.
    if std::fs::read_to_string("/proc/self/oom_score_adj")
        .is_ok_and(|n| n.trim().parse().is_ok_and(|n: i32| n > 0))
    {
        let lowered = std::fs::OpenOptions::new().write(true).open("/proc/self/oom_score_adj");
        let _ = lowered.and_then(|mut file| file.write_all(b"0"));
    }
}

/// To the class of ordinary processes: one that runs only when nothing else does lets calls time out, and one in real
/// time keeps all others from its processor while it looks for requests.
fn leave_class() {
    let zero = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives over the call.
    unsafe {
        if libc::sched_getscheduler(0) != libc::SCHED_OTHER {
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const zero);
        }
    }
}

/// Clients that may attach at a time, by the descriptors that this process may have, of which `taken` serve for other
/// things. For each, the supervisor keeps two and has a connection to its `forebay run`.
pub(crate) fn clients_max(taken: u64) -> usize {
    let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(descriptors.saturating_sub(taken) / 3).unwrap_or(usize::MAX)
}

/// Refuses limits with which a pool cannot work, whose board has so many bytes.
pub(crate) fn check(board_bytes: u64) -> Result<()> {
    let refused = |why: String, cure: &str| {
        Err(Error::new(Code::NoResources, "cannot start the pool's daemon").why(why).cure(cure))
    };
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if descriptors < DESCRIPTORS_MIN {
        return refused(
            format!("it may open {descriptors} files at a time, and needs {DESCRIPTORS_MIN} at least"),
            "raise the limit of open files: `ulimit -n 1024`, or have the administrator raise the hard limit",
        );
    }
    let file_bytes = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    let own = board_bytes.max(OWN_FILE_BYTES);
    if file_bytes < own {
        return refused(
            format!("it may write files of {file_bytes} bytes at most, and needs {own} for files of its own"),
            "raise the limit of file sizes: `ulimit -f unlimited`, in a shell that did not lower the hard limit",
        );
    }
    Ok(())
}

/// What remains of the starter's limits, for the user's eye.
pub(crate) fn costs() -> Vec<String> {
    let mut costs = Vec::new();
    if let Some(bytes) = getrlimit(Resource::Fsize).current {
        costs.push(format!(
            "files of more than {bytes} bytes may fail with EFBIG: the limit of file sizes (`ulimit -f`) with which the pool was \
             started cannot be raised"
        ));
    }
    if let Some(seconds) = getrlimit(Resource::Cpu).current {
        costs.push(format!(
            "its processes end after {seconds} s of processor time each (`ulimit -t`): worker and mount start again, the pool does not"
        ));
    }
    costs
}
