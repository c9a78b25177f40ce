//! `forebay queue`, and what `scontrol show bbstat` prints: jobs, persistent pools, data that could not be staged out,
//! and the turns with their holders.

use std::path::Path;

use serde_json::{json, Value};

use super::config::{AtOnce, Config, Store};
use super::registry::{now_s, Job, Registry, State};
use super::sharing::{self, Figure};
use super::{command, recover, tickets};
use crate::table;

/// Jobs that are not over, pools, and turns. Words: numbers of jobs, or names of pools, that alone are of interest.
pub(crate) fn text(config: &Config, registry: &Registry, words: &[String]) -> String {
    let wanted = |word: &str| words.is_empty() || words.iter().any(|w| w == word);
    let mut text = String::new();
    let jobs: Vec<Job> = registry
        .jobs()
        .into_iter()
        .filter(|job| wanted(&job.job.to_string()))
        .filter(|job| !words.is_empty() || job.state != State::TornDown || job.unsaved.is_some())
        .collect();
    text += "jobs:\n";
    for job in &jobs {
        let space = job.request.capacity_bytes.map_or_else(String::new, |b| format!(" {}", table::bytes(b)));
        let pool =
            job.request.persistent.as_ref().map_or_else(String::new, |p| format!(" pool {}", p.name()));
        let why = job.unsaved.as_ref().or(job.failed.as_ref());
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        text += &format!(
            "  {} run {} user {}{space}{pool}: {} for {} s{why}\n",
            job.job,
            job.run,
            job.uid,
            job.state.name(),
            now_s().saturating_sub(job.changed_s)
        );
    }
    text += "persistent pools:\n";
    for pool in registry.pools().iter().filter(|pool| wanted(&pool.name)) {
        let ends = if pool.ends { ", to be destroyed" } else { "" };
        text += &format!(
            "  {} user {} {} of job {}, used by {:?}{ends}\n",
            pool.name,
            pool.uid,
            table::bytes(pool.capacity_bytes),
            pool.creator,
            pool.users
        );
    }
    text += "kept data:\n";
    let job_of = |key: &str| key.split('.').next().unwrap_or("").to_owned();
    for (key, uid, place) in recover::all_kept(config) {
        let job = job_of(&key);
        if wanted(&job) {
            text += &format!("  {key} user {uid} in {}: `forebay recover {job}`\n", place.display());
        }
    }
    for (key, uid, places) in registry.kept_in_pools() {
        if wanted(&job_of(&key)) {
            text += &format!(
                "  {key} user {uid} in pools that are up: {}\n",
                command::reason(&places.join(", "))
            );
        }
    }
    text + &turns_text(config, registry)
}

fn policy(at_once: AtOnce) -> String {
    match at_once {
        AtOnce::Measured => {
            "measured: one more transfer begins when that raises the store's rate enough".to_owned()
        }
        AtOnce::Number(0) => "shared: all transfers at the same time".to_owned(),
        AtOnce::Number(1) => "in turn: one job at a time".to_owned(),
        AtOnce::Number(n) => format!("in turn: {n} jobs at a time"),
    }
}

/// How long what policies drain gives way to the transfers at a store; `None` if it does not.
fn yields_s(store: &Store) -> Option<u64> {
    (store.at_once != AtOnce::Number(0)).then_some(forebay_tasks::YIELD.as_secs())
}

/// Policy and order of each store, and what the policy goes by.
pub(crate) fn turns_text(config: &Config, registry: &Registry) -> String {
    let dir = registry.turns();
    let mut text = String::from("stores:\n");
    for store in &config.store {
        let path = store.path.display().to_string();
        let tickets = tickets::of_store(&dir, &path, store.at_once);
        text += &format!("  {path} {}\n", policy(store.at_once));
        if let Some(yields_s) = yields_s(store) {
            text += &format!(
                "    these go before what policies drain meanwhile, which waits {yields_s} s at most\n"
            );
        }
        for Known { figure, needed, joins } in known(&dir, store, &path, tickets.len()) {
            text += &format!(
                "    {}: the rate is {:.2} times as high, {:.2} needed with {} transfers: {}; measured {} s ago\n",
                figure.mix.text(),
                figure.growth,
                needed,
                tickets.len().max(2),
                if joins { "joins" } else { "waits" },
                now_s().saturating_sub(figure.measured_s)
            );
        }
        for (place, (ticket, runs)) in tickets.iter().enumerate() {
            let way = if ticket.into_pool { "stage-in" } else { "stage-out" };
            let state = if *runs { "runs" } else { "waits" };
            text += &format!("    {}. {way} of job {} {state}\n", place + 1, ticket.key);
        }
    }
    text
}

/// What was measured of a store, and what follows from it.
struct Known {
    figure: Figure,
    needed: f64,
    joins: bool,
}

fn known(dir: &Path, store: &Store, path: &str, transfers: usize) -> Vec<Known> {
    if store.at_once != AtOnce::Measured {
        return Vec::new();
    }
    let figures = sharing::figures(dir, &tickets::escaped(path));
    let known = |figure: Figure| {
        let needed = figure.mix.needed(transfers.max(2));
        Known { figure, needed, joins: figure.growth > needed }
    };
    figures.into_iter().map(known).collect()
}

/// The same as JSON.
pub(crate) fn turns_json(config: &Config, registry: &Registry) -> Value {
    let dir = registry.turns();
    let of = |store: &Store| {
        let path = store.path.display().to_string();
        let tickets = tickets::of_store(&dir, &path, store.at_once);
        let figures: Vec<Value> = known(&dir, store, &path, tickets.len())
            .into_iter()
            .map(|Known { figure, needed, joins }| {
                json!({ "ins": figure.mix.ins, "outs": figure.mix.outs,
                        "joins_way": if figure.mix.joins_in { "in" } else { "out" },
                        "growth": figure.growth, "needed": needed, "joins": joins,
                        "measured_s": figure.measured_s })
            })
            .collect();
        let transfers: Vec<Value> = tickets
            .iter()
            .enumerate()
            .map(|(place, (ticket, runs))| {
                json!({ "place": place + 1, "job": ticket.key, "runs": runs,
                        "way": if ticket.into_pool { "in" } else { "out" } })
            })
            .collect();
        let at_once = match store.at_once {
            AtOnce::Measured => json!("measured"),
            AtOnce::Number(number) => json!(number),
        };
        json!({ "store": path, "at_once": at_once, "figures": figures, "transfers": transfers,
                "drains_wait_s": yields_s(store) })
    };
    json!(config.store.iter().map(of).collect::<Vec<_>>())
}
