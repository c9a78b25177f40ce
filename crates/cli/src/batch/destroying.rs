//! `forebay bb destroy NAME`, by the user of a persistent pool.
//!
//! The registry's records belong to SlurmUser, so the user's command cannot end a pool itself:
//!
//! ```text
//! user        writes results/KEY/destroy.json, and waits
//! steward 0   drains a backing store, looks for data that are nowhere else, writes results/KEY/destroyed.json
//! controller  at its next hook: if no job uses the pool, forgets it; then its stewards stop it
//! ```

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::registry::{self, Outcome, Pool, Registry};

const REQUEST_FILE: &str = "destroy.json";
const ANSWER_FILE: &str = "destroyed.json";
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Slurm's controller calls the plugin at least every 30 s.
const CONTROLLER: Duration = Duration::from_secs(120);

/// What the user wants.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Wish {
    /// Also if data are lost.
    pub(crate) discard: bool,
}

/// Has a pool of this user's destroyed, and waits for it. `silence`: that of a dead steward.
///
/// # Errors
/// A pool of another user, one that a job uses, or one with data that are nowhere else.
pub(crate) fn ask(name: &str, discard: bool, silence: Duration) -> Result<String> {
    let config = Config::read()?;
    let registry = Registry::of(&config);
    let what = || format!("cannot destroy the pool {name}");
    let pool = registry.pool(name)?.ok_or_else(|| {
        Error::new(Code::NotFound, what())
            .why("there is none of this name")
            .cure("`scontrol show bbstat` lists them")
    })?;
    let uid = rustix::process::geteuid().as_raw();
    if pool.uid != uid {
        return Err(Error::new(Code::AccessDenied, what()).why("it belongs to another user"));
    }
    if !pool.users.is_empty() {
        return Err(Error::new(Code::Busy, what())
            .why(format!("the jobs {:?} use it", pool.users))
            .cure("wait for them, or submit a job with `destroy name=`, which ends it after them"));
    }
    let key = pool.key();
    let dead = || {
        Error::new(Code::PoolGone, what())
            .why("no process of it answers; a node of it may be down")
            .cure(format!("an administrator can end it: `forebay bb destroy {name}` as SlurmUser"))
    };
    let dir = registry.results(&key);
    let (request, answer) = (dir.join(REQUEST_FILE), dir.join(ANSWER_FILE));
    if !dir.is_dir() {
        return Err(dead());
    }
    let _ = std::fs::remove_file(&answer);
    registry::write(&request, &Wish { discard })?;
    let since = Instant::now();
    let mut answered: Option<Instant> = None;
    loop {
        if registry.pool(name)?.is_none_or(|now| now.key() != key) {
            return Ok(format!("pool {name} is destroyed\n"));
        }
        match registry.result(&key, uid, ANSWER_FILE)? {
            Some(outcome) if !outcome.ok => {
                let _ = std::fs::remove_file(&request);
                return Err(Error::new(Code::Busy, what())
                    .why(outcome.why)
                    .cure("stage out what is needed, or give it up with --discard"));
            }
            Some(_) if answered.get_or_insert_with(Instant::now).elapsed() > CONTROLLER => {
                return Err(Error::new(Code::TimedOut, what())
                    .why("Slurm's controller does not look")
                    .cure("it ends the pool as soon as it does"));
            }
            Some(_) => {}
            None => {
                let silent = registry.silent_for(&key, uid, registry::LEADER_FILE)?;
                if silent.unwrap_or_else(|| since.elapsed()) > silence {
                    let _ = std::fs::remove_file(&request);
                    return Err(dead());
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// What the user wants of the pool and has no answer yet. Its steward looks.
pub(crate) fn wish(registry: &Registry, pool: &Pool) -> Option<Wish> {
    let dir = registry.results(&pool.key());
    if dir.join(ANSWER_FILE).exists() {
        return None;
    }
    registry::read(&dir.join(REQUEST_FILE), Some(pool.uid)).ok().flatten()
}

/// Whether the user gives up what a pool has.
pub(crate) fn is_discarded(results: &Path, uid: u32) -> bool {
    let wish = registry::read::<Wish>(&results.join(REQUEST_FILE), Some(uid));
    wish.is_ok_and(|wish| wish.is_some_and(|wish| wish.discard))
}

/// The steward's answer.
pub(crate) fn answer(registry: &Registry, key: &str, outcome: &Outcome) {
    let _ = registry::write(&registry.results(key).join(ANSWER_FILE), outcome);
}

/// Whether the pool can end: its steward has said so since a job last used it. The controller looks.
pub(crate) fn is_agreed(registry: &Registry, pool: &Pool) -> bool {
    registry.is_newer_than_record(pool, ANSWER_FILE)
        && registry.result(&pool.key(), pool.uid, ANSWER_FILE).is_ok_and(|found| found.is_some_and(|o| o.ok))
}
