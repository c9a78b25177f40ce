//! Transfers of several jobs from and to one store take turns.
//!
//! If one job alone can use a store's whole bandwidth, two that share it both take twice as long; one after the other,
//! the first has its data in half the time and the second no later. A transfer leaves a ticket in a directory that all
//! see, and begins when fewer than `at_once` older tickets of its store are there. Who holds a ticket touches it; one
//! that is not touched for [`DEAD`] belongs to a process that was killed, and does not count.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_types::{Error, Result};

use super::config::Config;

/// How often a ticket is touched.
const TOUCH: Duration = Duration::from_secs(2);
/// How long a ticket counts that is not touched.
pub(crate) const DEAD: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

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
    fn name(&self) -> String {
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
}

fn escaped(store: &str) -> String {
    store.replace('/', "!").chars().take(150).collect()
}

/// The store of a path, and how many transfers share it; `None` if it has no turns.
pub(crate) fn store_of(config: &Config, path: &Path) -> Option<(String, usize)> {
    let of = config.store.iter().filter(|store| path.starts_with(&store.path));
    let store = of.max_by_key(|store| store.path.components().count())?;
    (store.at_once > 0).then(|| (store.path.display().to_string(), store.at_once))
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

/// A turn; it ends when it is dropped.
pub(crate) struct Turn {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    toucher: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _ = std::fs::remove_file(&self.path);
        if let Some(toucher) = self.toucher.take() {
            toucher.thread().unpark();
            let _ = toucher.join();
        }
    }
}

/// Waits for a turn at the store. `None` when `is_over` says that it is not needed any more.
///
/// # Errors
/// A directory of tickets that cannot be written.
pub(crate) fn wait(
    dir: &Path,
    store: (String, usize),
    key: &str,
    into_pool: bool,
    mut is_over: impl FnMut() -> bool,
) -> Result<Option<Turn>> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    let ticket = Ticket { since_ns, store: store.0, key: key.to_owned(), into_pool };
    let path = dir.join(ticket.name());
    std::fs::write(&path, "")
        .map_err(|e| Error::io(format!("cannot wait for a turn in {}", dir.display()), &e))?;
    let ended = Arc::new(AtomicBool::new(false));
    let (touched, over) = (path.clone(), Arc::clone(&ended));
    let toucher = std::thread::spawn(move || {
        while !over.load(Ordering::Acquire) {
            // Without creating it: it may have been removed since.
            if let Ok(file) = std::fs::OpenOptions::new().write(true).open(&touched) {
                let _ = file.set_modified(SystemTime::now());
            }
            std::thread::park_timeout(TOUCH);
        }
    });
    let turn = Turn { path, ended, toucher: Some(toucher) };
    loop {
        let before = all(dir).iter().filter(|other| other.store == ticket.store && **other < ticket).count();
        if before < store.1 {
            return Ok(Some(turn));
        }
        if is_over() {
            return Ok(None);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forebay-turns-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn turns_of_one_store_come_one_after_the_other_and_those_of_another_do_not_wait() {
        let dir = dir("order");
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for i in 0..4 {
                let (dir, running, most) = (&dir, &running, &most);
                scope.spawn(move || {
                    let turn = wait(dir, ("/a/b".into(), 1), &format!("{i}.0"), true, || false).unwrap();
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(30));
                    running.fetch_sub(1, Ordering::SeqCst);
                    drop(turn);
                });
            }
            let turn = wait(&dir, ("/c".into(), 1), "9.0", false, || true).unwrap();
            assert!(turn.is_some(), "another store's transfers do not count");
        });
        assert_eq!(most.into_inner(), 1);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "no ticket is left");
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn ticket_of_a_killed_process_does_not_count_and_a_wait_can_be_given_up() {
        let dir = dir("dead");
        let old = Ticket { since_ns: 1, store: "/a".into(), key: "1.0".into(), into_pool: true };
        std::fs::write(dir.join(old.name()), "").unwrap();
        assert_eq!(all(&dir), std::slice::from_ref(&old));
        assert!(wait(&dir, ("/a".into(), 1), "2.0", true, || true).unwrap().is_none());
        let file = std::fs::OpenOptions::new().write(true).open(dir.join(old.name())).unwrap();
        file.set_modified(SystemTime::now() - DEAD).unwrap();
        assert!(wait(&dir, ("/a".into(), 1), "2.0", true, || true).unwrap().is_some());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
