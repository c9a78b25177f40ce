//! Ends what a pool copies to its store.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_server::control;
use forebay_tasks::{DrainPolicy, MoverClient, Policy, StoreSettings};
use forebay_types::{Error, Ino, Request, Result};
use rustix::process::{kill_process, Pid, Signal};

use super::failed;
use super::trees::{settings_of, SETTINGS};
use crate::pool;

/// How long the supervisor may take to start the next mover.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Has a pool copy nothing more to the store at its root, until it is asked to: its tasks end, and what its mover does.
pub(crate) fn hold_back(dir: &Path) -> Result<()> {
    let pool = pool::attach(dir)?;
    let Some(before) = settings_of(pool, Ino::ROOT) else { return Ok(()) };
    let mut settings = before.clone();
    settings.drain = on_request(settings.drain);
    for rule in &mut settings.rules {
        rule.policy = on_request(rule.policy);
    }
    let write = |settings: &StoreSettings| {
        let value = serde_json::to_vec(settings).map_err(|e| {
            Error::new(forebay_types::Code::Invalid, "cannot write a store's settings").why(e)
        })?;
        let request = Request::SetXattr { ino: Ino::ROOT, name: SETTINGS, value: &value, flags: 0 };
        pool.request(&request, |_| Ok(())).map_err(|code| failed(code, "change", b"/"))
    };
    let Some(mover) = control::status(dir)?.mover else { return write(&settings) };
    let has_tasks = MoverClient::connect(dir)?.list()?.iter().any(|task| !task.state.is_over());
    if settings == before && !has_tasks {
        return Ok(());
    }
    // The next mover begins the tasks again, which then find nothing to do, and end.
    write(&StoreSettings { read_only: true, ..settings.clone() })?;
    // A pass that is under way goes by the settings that it began with, and a cancelled task ends with its batch.
    if let Some(pid) = mover.pid.and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process(pid, Signal::KILL);
        let end = Instant::now() + START_TIMEOUT;
        let next = || control::status(dir).ok().and_then(|status| status.mover).and_then(|mover| mover.pid);
        while next().is_none_or(|next| Some(next) == mover.pid) && Instant::now() < end {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    cancel_all(dir)?;
    write(&settings)
}

fn on_request(policy: Policy) -> Policy {
    match policy.is_temporary() {
        true => policy,
        false => Policy { drain: DrainPolicy::Request, snapshot: None, ..policy },
    }
}

fn cancel_all(dir: &Path) -> Result<()> {
    let mut mover = MoverClient::connect(dir)?;
    let mut tasks = mover.list()?;
    tasks.retain(|task| !task.state.is_over());
    for task in &tasks {
        // One that waits for the store takes its time.
        let _ = mover.cancel(task.id);
    }
    Ok(())
}
