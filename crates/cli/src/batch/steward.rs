//! The steward of a persistent pool: a process of the pool's user on each of its nodes, which prolog starts.
//!
//! The steward of node 0 stages what orders say, so data come before a job's start and leave after its end without any
//! node being held. Each steward stops its node of the pool when the pool is to end, and then ends itself.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use forebay_types::Result;

use super::config::Config;
use super::destroying::{self, Wish};
use super::registry::{self, Job, Order, Outcome, Registry, LEADER_FILE};
use super::staging::{self, Turns};
use super::user::{self, Beat, Here};

/// How often orders are looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The file that says that a pool that ends has nothing that its backing store lacks.
const DRAINED_FILE: &str = "drained";

/// The result of an order.
pub(crate) fn result_name(key: &str) -> String {
    format!("{key}.order.json")
}

/// Serves the pool that the job has created until the pool ends.
pub(crate) fn serve(job: u32, rank: usize) -> Result<()> {
    let Here { config, registry, job, .. } = Here::of_this_process(job)?;
    let (Some(key), Some(persistent)) = (job.pool_key.clone(), job.request.persistent.clone()) else {
        return Ok(());
    };
    let name = persistent.name().to_owned();
    let node = std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| rank.to_string());
    let results = registry.make_results(&key)?;
    let dir = job.pool_dir(&config);
    let alive = results.join(format!("{node}.alive"));
    let beats =
        [Some(Beat::start(alive.clone())), (rank == 0).then(|| Beat::start(results.join(LEADER_FILE)))];
    let shared = Arc::new(Served { config, registry, job, key, name, looks: AtomicBool::new(false) });
    let mut begun = BTreeSet::new();
    let mut failures = 0u32;
    loop {
        if shared.is_to_end() {
            match shared.drained(rank).and_then(|()| user::clear(&dir)) {
                Ok(()) => break,
                // What it has may be nowhere else; try again, more and more seldom.
                Err(_) => failures = (failures + 1).min(60),
            }
        }
        if rank == 0 {
            if let Some(wish) = shared.wish().filter(|_| !shared.looks.swap(true, Ordering::AcqRel)) {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.look(wish));
            }
            for order in shared.registry.orders(&shared.name) {
                if begun.insert(order.key.clone()) {
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || shared.carry_out(&order));
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN * (1 + failures));
    }
    drop(beats);
    let _ = std::fs::remove_file(alive);
    if shared.registry.stewards(&shared.key).is_empty() {
        let _ = std::fs::remove_dir_all(&results);
    }
    Ok(())
}

struct Served {
    config: Config,
    registry: Registry,
    job: Job,
    key: String,
    name: String,
    /// A thread looks whether the pool can be destroyed.
    looks: AtomicBool,
}

impl Served {
    /// True when the pool is to end and no job uses it, or when another pool has its name.
    fn is_to_end(&self) -> bool {
        match self.registry.pool(&self.name) {
            Ok(Some(pool)) => pool.key() != self.key || pool.ends && pool.users.is_empty(),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    fn pool(&self) -> std::path::PathBuf {
        self.job.pool_dir(&self.config).join("pool")
    }

    fn wish(&self) -> Option<Wish> {
        let pool = self.registry.pool(&self.name).ok().flatten().filter(|pool| pool.key() == self.key)?;
        destroying::wish(&self.registry, &pool)
    }

    /// Answers whether the pool can be destroyed.
    fn look(&self, wish: Wish) {
        let found = match wish.discard {
            true => Ok(()),
            false => self.drain(&|| false).and_then(|()| staging::nothing_is_here_alone(&self.pool())),
        };
        let outcome = match found {
            Ok(()) => Outcome { ok: true, ..Outcome::default() },
            Err(why) => Outcome { why, ..Outcome::default() },
        };
        destroying::answer(&self.registry, &self.key, &outcome);
        self.looks.store(false, Ordering::Release);
    }

    /// Copies to a backing store what it lacks.
    fn drain(&self, is_over: &dyn Fn() -> bool) -> std::result::Result<(), String> {
        let turns = Turns { config: &self.config, registry: &self.registry, key: &self.key };
        match &self.job.request.backing {
            Some(url) => turns.drain(&self.pool(), url, is_over),
            None => Ok(()),
        }
    }

    /// Before the pool ends: node 0 drains it, the others wait for that. What its user discards is not drained.
    fn drained(&self, rank: usize) -> std::result::Result<(), String> {
        let results = self.registry.results(&self.key);
        let file = results.join(DRAINED_FILE);
        if self.job.request.backing.is_none() || file.exists() {
            return Ok(());
        }
        if rank > 0 {
            return Err("node 0 has not drained it".to_owned());
        }
        if !destroying::is_discarded(&results, self.job.uid) {
            self.drain(&|| false)?;
        }
        std::fs::write(file, "").map_err(|e| e.to_string())
    }

    fn carry_out(&self, order: &Order) {
        let name = result_name(&order.key);
        if !matches!(self.registry.result(&self.key, self.job.uid, &name), Ok(None)) {
            return; // done before this steward started
        }
        let pool = self.pool();
        let is_over = || !self.registry.has_order(&self.name, &order.key);
        let turns = Turns { config: &self.config, registry: &self.registry, key: &order.key };
        let outcome = if order.into_pool {
            match turns.stage_in(&pool, &order.pairs, &is_over) {
                Ok(()) => Outcome { ok: true, ..Outcome::default() },
                Err(why) => Outcome { why, ..Outcome::default() },
            }
        } else {
            turns.stage_out(&pool, &order.pairs, order.job, &is_over)
        };
        let _ = registry::write(&self.registry.results(&self.key).join(name), &outcome);
    }
}
