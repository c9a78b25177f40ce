//! Resets the process state that a daemon inherits from the shell or job that starts it.
//!
//! A pool outlives its starter. So the starter's resource limits are raised as far as the kernel permits, which for
//! most users is the hard limit. The limits that remain must not kill the daemon: signals that enforce a limit are
//! ignored, so that the call fails instead (EFBIG). The daemon refuses to start under limits with which it cannot work.
//! Signal dispositions, the signal mask and the umask are reset. The worker and the mount, which are this program's
//! children, inherit the limits and the ignored signals.
//!
//! The starter's nice value and CPU affinity are kept: they state how much of the machine the pool may use.

use std::io::Write;

use forebay_sys::signals;
use forebay_types::{Code, Error, Result};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// The least number of descriptors for supervisor, worker and the first clients.
const DESCRIPTORS_MIN: u64 = 48;
/// Descriptors that are enough for all clients that a daemon may have.
const DESCRIPTORS_ENOUGH: u64 = 1 << 16;
/// The size of the largest file that the daemon itself writes in a new pool, apart from the board.
const OWN_FILE_BYTES: u64 = 64 << 20;
/// A smaller stack limit is raised to this. A larger one stays: an unlimited stack changes where the kernel maps
/// memory.
const STACK_BYTES: u64 = 8 << 20;

/// Limits that are raised to unlimited, or else to the hard limit.
const RAISED: [Resource; 6] =
    [Resource::Fsize, Resource::Cpu, Resource::As, Resource::Data, Resource::Nproc, Resource::Memlock];

/// Raises one limit to `enough` (none: unlimited), or to the hard limit if that is lower.
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

/// Resets the inherited state. Must be called while the process has one thread.
pub(crate) fn shed() {
    signals::ignore(&[libc::SIGXFSZ, libc::SIGXCPU, libc::SIGPIPE]);
    // If the signal were ignored, the kernel would reap children before this process could wait for them.
    signals::reset(libc::SIGCHLD);
    for resource in RAISED {
        raise(resource, None);
    }
    raise(Resource::Stack, Some(STACK_BYTES));
    raise(Resource::Nofile, Some(DESCRIPTORS_ENOUGH));
    // The hard limit may be higher: the soft limit is raised to it.
    let descriptors = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: descriptors.maximum, ..descriptors });
    leave_class();
    // If the kernel's OOM killer preferred the worker, all programs' calls would fail with it.
    if std::fs::read_to_string("/proc/self/oom_score_adj")
        .is_ok_and(|n| n.trim().parse().is_ok_and(|n: i32| n > 0))
    {
        let lowered = std::fs::OpenOptions::new().write(true).open("/proc/self/oom_score_adj");
        let _ = lowered.and_then(|mut file| file.write_all(b"0"));
    }
}

/// Moves to the scheduling class of ordinary processes. In the idle class calls would time out, and a real-time process
/// that polls for requests would keep all others from its processor.
fn leave_class() {
    let zero = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives over the call.
    unsafe {
        if libc::sched_getscheduler(0) != libc::SCHED_OTHER {
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const zero);
        }
    }
}

/// The number of clients that may be attached at one time. It is limited by the descriptors that this process may have;
/// `taken` of those have other uses. For each client the supervisor keeps two descriptors and has a connection to the
/// client's `forebay run`.
pub(crate) fn clients_max(taken: u64) -> usize {
    let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(descriptors.saturating_sub(taken) / 3).unwrap_or(usize::MAX)
}

/// Refuses limits with which a pool cannot work; the board has `board_bytes` bytes.
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

/// Messages to the user about the starter's limits that could not be raised.
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
