//! `forebay queue`, and what `scontrol show bbstat` prints: jobs, persistent pools, and the turns with their holders.

use serde_json::{json, Value};

use super::config::Config;
use super::registry::{now_s, Job, Registry, State};
use super::turns::{self, Ticket};
use crate::table;

fn position(config: &Config, tickets: &[Ticket], ticket: &Ticket) -> (usize, bool) {
    let before = tickets.iter().filter(|other| other.store == ticket.store && *other < ticket).count();
    let at_once = turns::store_of(config, ticket.store.as_ref()).map_or(usize::MAX, |(_, n)| n);
    (before + 1, before < at_once)
}

/// Jobs that are not over, pools, and turns. Words: numbers of jobs, or names of pools, that alone are of interest.
pub(crate) fn text(config: &Config, registry: &Registry, words: &[String]) -> String {
    let wanted = |word: &str| words.is_empty() || words.iter().any(|w| w == word);
    let mut text = String::new();
    let jobs: Vec<Job> = registry
        .jobs()
        .into_iter()
        .filter(|job| wanted(&job.job.to_string()) && (!words.is_empty() || job.state != State::TornDown))
        .collect();
    text += "jobs:\n";
    for job in &jobs {
        let space = job.request.capacity_bytes.map_or_else(String::new, |b| format!(" {}", table::bytes(b)));
        let pool =
            job.request.persistent.as_ref().map_or_else(String::new, |p| format!(" pool {}", p.name()));
        let why = job.failed.as_ref().map_or_else(String::new, |why| format!(": {why}"));
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
    text + &turns_text(config, registry)
}

/// Policy and order of each store.
pub(crate) fn turns_text(config: &Config, registry: &Registry) -> String {
    let tickets = turns::all(&registry.turns());
    let mut text = String::from("stores:\n");
    for store in &config.store {
        let policy = match store.at_once {
            0 => "shared: all transfers at the same time".to_owned(),
            1 => "in turn: one job at a time".to_owned(),
            n => format!("in turn: {n} jobs at a time"),
        };
        text += &format!("  {} {policy}\n", store.path.display());
        for ticket in tickets.iter().filter(|t| t.store == store.path.display().to_string()) {
            let (place, runs) = position(config, &tickets, ticket);
            let way = if ticket.into_pool { "stage-in" } else { "stage-out" };
            let state = if runs { "runs" } else { "waits" };
            text += &format!("    {place}. {way} of job {} {state}\n", ticket.key);
        }
    }
    text
}

/// The same as JSON.
pub(crate) fn turns_json(config: &Config, registry: &Registry) -> Value {
    let tickets = turns::all(&registry.turns());
    json!(config
        .store
        .iter()
        .map(|store| {
            let path = store.path.display().to_string();
            json!({
                "store": path,
                "at_once": store.at_once,
                "transfers": tickets.iter().filter(|t| t.store == path).map(|ticket| {
                    let (place, runs) = position(config, &tickets, ticket);
                    json!({ "place": place, "job": ticket.key, "runs": runs,
                            "way": if ticket.into_pool { "in" } else { "out" } })
                }).collect::<Vec<_>>(),
            })
        })
        .collect::<Vec<_>>())
}
