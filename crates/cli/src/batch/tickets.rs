//! Tickets of transfers from and to stores: files in a directory that all see. A name has when the ticket was drawn, whose
//! it is, its store, and the way that the data go; `turns` says what a ticket has.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::config::{AtOnce, Config};
use crate::tally;

/// How long a ticket counts that is not touched.
pub(crate) const DEAD: Duration = forebay_tasks::CLAIM_AGE;

/// A transfer that waits or goes on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Ticket {
    /// When it was drawn, in ns since 1970.
    pub(crate) since_ns: u64,
    pub(crate) store: String,
    /// The job and its run.
    pub(crate) key: String,
    pub(crate) into_pool: bool,
}

impl Ticket {
    pub(super) fn name(&self) -> String {
        let way = if self.into_pool { "in" } else { "out" };
        format!("{:020}@{}@{}@{way}", self.since_ns, self.key, escaped(&self.store))
    }

    fn of(name: &str) -> Option<Ticket> {
        let mut parts = name.splitn(3, '@');
        let since_ns = parts.next()?.parse().ok()?;
        let key = parts.next()?.to_owned();
        let (store, way) = parts.next()?.rsplit_once('@')?;
        Some(Ticket { since_ns, key, store: store.replace('!', "/"), into_pool: way == "in" })
    }

    /// What it has moved; `None` while it waits.
    pub(super) fn moved(&self, dir: &Path) -> Option<f64> {
        // Another user's file must not lead this process elsewhere, or keep it.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(dir.join(self.name())).ok()?;
        let mut text = String::new();
        file.take(tally::TEXT_MAX).read_to_string(&mut text).ok()?;
        tally::work(&text)
    }
}

/// A store's path as names of files have it.
pub(crate) fn escaped(store: &str) -> String {
    store.replace('/', "!").chars().take(150).collect()
}

/// The tickets of a store, for `attach --yield-to`.
pub(crate) fn files_of(dir: &Path, store: &str) -> String {
    dir.join(format!("*@*@{}@*", escaped(store))).display().to_string()
}

/// The store of a path, and how many transfers share it; `None` if it has no turns.
pub(crate) fn store_of(config: &Config, path: &Path) -> Option<(String, AtOnce)> {
    let path = path.to_str().and_then(|url| url.strip_prefix("file://")).map_or(path, Path::new);
    let of = config.store.iter().filter(|store| path.starts_with(&store.path));
    let store = of.max_by_key(|store| store.path.components().count())?;
    (store.at_once != AtOnce::Number(0)).then(|| (store.path.display().to_string(), store.at_once))
}

/// All tickets that count, the oldest first.
pub(crate) fn all(dir: &Path) -> Vec<Ticket> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut tickets: Vec<Ticket> = names
        .filter(|entry| {
            let at = entry.metadata().and_then(|m| m.modified());
            at.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < DEAD)
        })
        .filter_map(|entry| Ticket::of(entry.file_name().to_str()?))
        .collect();
    tickets.sort();
    tickets
}

/// The tickets of a store, the oldest first, and whether each of them runs.
pub(crate) fn of_store(dir: &Path, store: &str, at_once: AtOnce) -> Vec<(Ticket, bool)> {
    let tickets = all(dir).into_iter().filter(|ticket| ticket.store == store);
    let runs = |(place, ticket): (usize, Ticket)| {
        let runs = match at_once {
            AtOnce::Number(0) => true,
            AtOnce::Number(number) => place < number,
            AtOnce::Measured => ticket.moved(dir).is_some(),
        };
        (ticket, runs)
    };
    tickets.enumerate().map(runs).collect()
}
