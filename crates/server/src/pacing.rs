//! The memory of the pacers of a pool whose media are paced (docs/emulation.md): made by the supervisor, so that it
//! survives workers, and kept in its descriptor store.

use std::os::fd::{AsFd, OwnedFd};

use forebay_pacing::{measure_floor, Direction, Pacers, Profile, Speed, Statistics};
use forebay_types::{Code, Error, Result};
use serde_json::{json, Value};

use crate::identity::PoolIdentity;

/// Its tag in the descriptor store.
const PACING_TAG: &str = "pacing";

/// Makes the memory if the pool has a profile. Returns it with its tag.
pub(crate) fn made_for(identity: &PoolIdentity) -> Result<Option<(String, Vec<OwnedFd>)>> {
    let Some(text) = &identity.media_profile else { return Ok(None) };
    let what = "cannot pace the pool's media";
    let profile = Profile::parse(text).ok_or_else(|| {
        Error::new(Code::Malformed, what)
            .why(format!("`{text}` is no profile of this version"))
            .cure("start the pool with --media-profile NAME, or none")
    })?;
    let (_, fd) = Pacers::create(&profile).map_err(|e| Error::io(what, &e))?;
    Ok(Some((PACING_TAG.to_owned(), vec![fd])))
}

/// The memory, taken out of the descriptors that a worker got.
pub(crate) fn taken_from(left: &mut Vec<(String, Vec<OwnedFd>)>) -> Option<OwnedFd> {
    left.extract_if(.., |(tag, _)| tag == PACING_TAG).find_map(|(_, mut fds)| fds.pop())
}

/// Maps the memory.
pub(crate) fn opened(fd: &OwnedFd) -> Result<Pacers> {
    Pacers::open(fd.as_fd()).map_err(|e| Error::io("cannot pace the pool's media", &e))
}

/// What `status` shows: the profile, and configured beside measured values for each target.
pub(crate) fn status(fd: &OwnedFd, targets: usize) -> Value {
    let Ok(pacers) = opened(fd) else { return Value::Null };
    let of_target = |index| {
        let pacer = pacers.pacer(index);
        let [reads, writes] = [Direction::Read, Direction::Write].map(|to| as_json(&pacer.statistics(to)));
        json!({ "reads": reads, "writes": writes })
    };
    medium_as_json(&pacers.profile(), (0..targets).map(of_target).collect())
}

/// A medium, with the floor of waits on this machine, and what its targets counted.
pub fn medium_as_json(profile: &Profile, targets: Vec<Value>) -> Value {
    let Profile { name, medium } = profile;
    let speed = |speed: Speed| json!({ "latency_ns": speed.latency_ns, "bytes_per_s": speed.bytes_per_s });
    let (spin_ns, sleep_ns) = measure_floor();
    json!({
        "profile": name,
        "read": speed(medium.read),
        "write": speed(medium.write),
        "seek_ns": medium.seek_ns,
        "queue_depth": medium.queue_depth,
        "floor_ns": { "short": spin_ns, "long": sleep_ns },
        "targets": targets,
    })
}

/// What one pacer counted in one direction.
pub fn as_json(counted: &Statistics) -> Value {
    let mean = |sum: u64| sum.checked_div(counted.completed());
    json!({
        "requests": counted.requests,
        "bytes": counted.bytes,
        "sequential": counted.sequential,
        "late": counted.late,
        "configured_mean_ns": mean(counted.configured_ns),
        "measured_mean_ns": mean(counted.measured_ns),
        "measured_p50_ns": counted.quantile_ns(0.5),
        "measured_p99_ns": counted.quantile_ns(0.99),
        "histogram_log2_ns": counted.histogram.to_vec(),
    })
}
