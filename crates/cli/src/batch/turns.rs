//! Transfers of several jobs from and to one store take turns.
//!
//! If one job alone can use a store's whole bandwidth, two that share it both take twice as long; one after the other,
//! the first has its data in half the time and the second no later. A transfer leaves a ticket in a directory that all
//! see. With a fixed number it begins when fewer older tickets of its store are there. Else the oldest one begins when
//! none runs, and the next joins it if `sharing` says so. If nothing is known, it first looks at the rates of those that
//! run, joins them, and looks again: what they lost is the figure for the next ones. If that says that sharing gains
//! nothing, the one that has joined steps back: it pauses, with its place in the order, until its turn comes.
//!
//! A ticket is empty while it waits, and then has the files and bytes that were copied; the copying process writes them,
//! and pauses while its ticket is blank.
//! Who holds a ticket touches it; one that is not touched belongs to a process that was killed, and does not count
//! (`tickets`).

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_types::{Error, Result};

use super::config::AtOnce;
use super::sharing::{self, Mix, Verdict};
use super::tickets::{all, escaped, Ticket};
use crate::tally;

/// How often a ticket is touched.
const TOUCH: Duration = Duration::from_secs(2);

/// The periods of waiting and measuring.
#[derive(Clone, Copy)]
struct Pace {
    look_again: Duration,
    /// A transfer that has just begun or been joined is not measured for so long.
    settle: Duration,
    /// The time over which rates are measured.
    window: Duration,
    /// A transfer pauses no longer: after an hour, its temporary files count as those of a killed one.
    pause_max: Duration,
}

const PACE: Pace = Pace {
    look_again: Duration::from_millis(100),
    settle: Duration::from_secs(1),
    window: Duration::from_secs(3),
    pause_max: Duration::from_secs(1800),
};

/// A turn; it ends when it is dropped.
pub(crate) struct Turn {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Turn {
    /// The file in which the transfer writes its tally.
    pub(crate) fn tally(&self) -> &Path {
        &self.path
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _ = std::fs::remove_file(&self.path);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Waits for a turn at the store. `None` when `is_over` says that it is not needed any more.
///
/// # Errors
/// A directory of tickets that cannot be written.
pub(crate) fn wait(
    dir: &Path,
    store: (String, AtOnce),
    key: &str,
    way: Way,
    is_over: impl FnMut() -> bool,
) -> Result<Option<Turn>> {
    wait_at(PACE, dir, store, key, way, is_over)
}

/// Where a transfer goes, and whether it pauses when its ticket is emptied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) into_pool: bool,
    pub(crate) can_pause: bool,
}

fn wait_at(
    pace: Pace,
    dir: &Path,
    (store, at_once): (String, AtOnce),
    key: &str,
    Way { into_pool, can_pause }: Way,
    mut is_over: impl FnMut() -> bool,
) -> Result<Option<Turn>> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    let ticket = Ticket { since_ns, store, key: key.to_owned(), into_pool };
    let path = dir.join(ticket.name());
    let failed = |e| Error::io(format!("cannot wait for a turn in {}", dir.display()), &e);
    std::fs::write(&path, "").map_err(failed)?;
    let ended = Arc::new(AtomicBool::new(false));
    let (touched, over) = (path.clone(), Arc::clone(&ended));
    let toucher = std::thread::spawn(move || {
        while !over.load(Ordering::Acquire) {
            // Without creating it: it may have been removed since.
            if let Ok(file) = OpenOptions::new().write(true).open(&touched) {
                let _ = file.set_modified(SystemTime::now());
            }
            std::thread::park_timeout(TOUCH);
        }
    });
    let mut turn = Turn { path, ended, threads: vec![toucher] };
    let mut waiting = Waiting { dir: dir.to_owned(), ticket, pace, measured: None };
    loop {
        let step = waiting.step(at_once);
        if let Step::Begin | Step::Join(_) = step {
            std::fs::write(&turn.path, tally::text(0, 0)).map_err(failed)?;
        }
        match step {
            Step::Begin => return Ok(Some(turn)),
            Step::Join(before) => {
                let (path, ended) = (turn.path.clone(), Arc::clone(&turn.ended));
                turn.threads.push(std::thread::spawn(move || {
                    waiting.share(before, can_pause.then_some(&*path), &ended)
                }));
                return Ok(Some(turn));
            }
            Step::Wait => {}
        }
        if is_over() {
            return Ok(None);
        }
        std::thread::sleep(pace.look_again);
    }
}

/// A ticket, to be read and written. One that is gone is not made again.
fn existing(ticket: &Path) -> std::io::Result<std::fs::File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(ticket)
}

/// The transfers that run, and what each had moved at a time.
struct Sample {
    at: Instant,
    moved: Vec<(Ticket, f64)>,
}

impl Sample {
    /// The rate of all since an earlier sample of the same transfers; `None` if they are others, or one has not moved.
    fn rate_since(&self, earlier: &Sample) -> Option<f64> {
        let is_same = self.moved.len() == earlier.moved.len()
            && self
                .moved
                .iter()
                .zip(&earlier.moved)
                .all(|(now, before)| now.0 == before.0 && now.1 > before.1);
        let moved: f64 = self.moved.iter().zip(&earlier.moved).map(|(now, before)| now.1 - before.1).sum();
        is_same.then(|| moved / self.at.duration_since(earlier.at).as_secs_f64().max(1e-3))
    }

    fn is_of_same(&self, other: &Sample) -> bool {
        self.moved.iter().map(|(ticket, _)| ticket).eq(other.moved.iter().map(|(ticket, _)| ticket))
    }
}

/// Those that ran when a transfer joined them, and their rate.
struct Before {
    running: Vec<Ticket>,
    rate: f64,
}

enum Step {
    Wait,
    Begin,
    /// Begins to find out whether the store's rate grows.
    Join(Before),
}

struct Waiting {
    dir: PathBuf,
    ticket: Ticket,
    pace: Pace,
    /// Since when the same transfers have been running.
    measured: Option<Sample>,
}

impl Waiting {
    fn step(&mut self, at_once: AtOnce) -> Step {
        let tickets: Vec<Ticket> =
            all(&self.dir).into_iter().filter(|other| other.store == self.ticket.store).collect();
        if let AtOnce::Number(number) = at_once {
            let before = tickets.iter().filter(|other| **other < self.ticket).count();
            return if number == 0 || before < number { Step::Begin } else { Step::Wait };
        }
        let sample = self.sample(&tickets);
        let running = &sample.moved;
        let is_waiting = |other: &&Ticket| !running.iter().any(|(ticket, _)| ticket == *other);
        let mut older = tickets.iter().filter(is_waiting).filter(|other| **other < self.ticket);
        if running.is_empty() {
            return if older.next().is_none() { Step::Begin } else { Step::Wait };
        }
        // The ways have limits of their own, so the first of each may join.
        if older.any(|other| other.into_pool == self.ticket.into_pool) {
            return Step::Wait;
        }
        let ins = running.iter().filter(|(ticket, _)| ticket.into_pool).count();
        let mix = Mix { ins, outs: running.len() - ins, joins_in: self.ticket.into_pool };
        let figures = sharing::figures(&self.dir, &escaped(&self.ticket.store));
        match sharing::verdict(&figures, mix, tickets.len()) {
            Verdict::Join => Step::Begin,
            Verdict::Wait => Step::Wait,
            Verdict::Unknown => self.measure(sample),
        }
    }

    /// The transfers of the store that run.
    fn sample(&self, tickets: &[Ticket]) -> Sample {
        let running = tickets.iter().filter(|other| **other != self.ticket);
        let moved = running.filter_map(|other| Some((other.clone(), other.moved(&self.dir)?))).collect();
        Sample { at: Instant::now(), moved }
    }

    /// Joins when the rate of those that run is known.
    fn measure(&mut self, now: Sample) -> Step {
        let Some(since) = self.measured.as_ref().filter(|since| since.is_of_same(&now)) else {
            // What has begun a moment ago has no steady rate yet. Of several, the last may still measure, and step back.
            let measures = if now.moved.len() > 1 { 2 * self.pace.window } else { Duration::ZERO };
            let at = now.at + self.pace.settle + measures;
            self.measured = Some(Sample { at, ..now });
            return Step::Wait;
        };
        if now.at < since.at {
            self.measured = Some(Sample { at: since.at, ..now });
            return Step::Wait;
        }
        if now.at.duration_since(since.at) < self.pace.window {
            return Step::Wait;
        }
        match now.rate_since(since) {
            Some(rate) => Step::Join(Before {
                running: now.moved.into_iter().map(|(ticket, _)| ticket).collect(),
                rate,
            }),
            None => {
                self.measured = Some(now);
                Step::Wait
            }
        }
    }

    /// Measures what sharing gains after this transfer has joined others. If it is not enough, the transfer steps back,
    /// where `ticket` names its file. It may join others to measure again after that.
    fn share(&mut self, mut before: Before, ticket: Option<&Path>, ended: &AtomicBool) {
        loop {
            let Some((mix, transfers)) = self.look_what_others_lost(&before, ended) else { return };
            let figures = sharing::figures(&self.dir, &escaped(&self.ticket.store));
            let gains = sharing::verdict(&figures, mix, transfers) != Verdict::Wait;
            let (Some(ticket), false) = (ticket, gains) else { return };
            match self.step_back(ticket, ended) {
                Some(joined) => before = joined,
                None => return,
            }
        }
    }

    /// Pauses the transfer until its turn comes, or for [`Pace::pause_max`]. Returns whom it joins then, if it is to measure.
    /// If the ticket cannot be written, it is removed: the transfer then goes on, and others do not wait for it.
    fn step_back(&mut self, ticket: &Path, ended: &AtomicBool) -> Option<Before> {
        let since = Instant::now();
        let mut moved = tally::text(0, 0);
        self.measured = None;
        let mut pause = || -> std::io::Result<()> {
            let mut file = existing(ticket)?;
            let mut text = String::new();
            let _ = (&mut file).take(tally::TEXT_MAX).read_to_string(&mut text);
            // The copying process may just have written what it had moved.
            if tally::work(&text).is_some() {
                moved = text;
                file.write_all_at(tally::paused().as_bytes(), 0)?;
            }
            Ok(())
        };
        let joined = loop {
            if pause().is_err() {
                let _ = std::fs::remove_file(ticket);
                return None;
            }
            if ended.load(Ordering::Acquire) {
                return None;
            }
            match self.step(AtOnce::Measured) {
                Step::Wait if since.elapsed() < self.pace.pause_max => {
                    std::thread::park_timeout(self.pace.look_again);
                }
                Step::Wait | Step::Begin => break None,
                Step::Join(before) => break Some(before),
            }
        };
        if existing(ticket).and_then(|file| file.write_all_at(moved.as_bytes(), 0)).is_err() {
            let _ = std::fs::remove_file(ticket);
            return None;
        }
        joined
    }

    /// Measures what the others still move beside this transfer, and keeps the figure. Returns what it is about, and how
    /// many transfers there are. Says nothing if one of them ends or another begins meanwhile, or if this one moves
    /// nothing.
    fn look_what_others_lost(&self, before: &Before, ended: &AtomicBool) -> Option<(Mix, usize)> {
        let mut from: Option<(Sample, f64)> = None;
        let mut begins = None;
        while !ended.load(Ordering::Acquire) {
            let tickets: Vec<Ticket> =
                all(&self.dir).into_iter().filter(|other| other.store == self.ticket.store).collect();
            let now = self.sample(&tickets);
            if !now.moved.iter().map(|(ticket, _)| ticket).eq(before.running.iter()) {
                return None;
            }
            let own = self.ticket.moved(&self.dir).unwrap_or(0.0);
            let has_settled =
                own > 0.0 && now.at.duration_since(*begins.get_or_insert(now.at)) >= self.pace.settle;
            match &from {
                None if has_settled => from = Some((now, own)),
                Some((since, own_before)) if now.at.duration_since(since.at) >= self.pace.window => {
                    let rate = now.rate_since(since).filter(|_| own > *own_before)?;
                    let ins = before.running.iter().filter(|ticket| ticket.into_pool).count();
                    let outs = before.running.len() - ins;
                    let mix = Mix { ins, outs, joins_in: self.ticket.into_pool };
                    let growth = mix.growth(rate / before.rate);
                    sharing::keep(&self.dir, &escaped(&self.ticket.store), mix, growth).ok()?;
                    return Some((mix, tickets.len()));
                }
                _ => {}
            }
            std::thread::park_timeout(self.pace.look_again);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::sharing::Figure;
    use crate::batch::tickets::{of_store, DEAD};
    use std::sync::atomic::AtomicUsize;

    const ONE: AtOnce = AtOnce::Number(1);
    const IN: Way = Way { into_pool: true, can_pause: true };
    const OUT: Way = Way { into_pool: false, can_pause: false };
    const QUICK: Pace = Pace {
        look_again: Duration::from_millis(10),
        settle: Duration::from_millis(200),
        window: Duration::from_secs(1),
        pause_max: Duration::from_secs(600),
    };

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forebay-turns-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    fn ticket(since_ns: u64, key: &str, into_pool: bool) -> Ticket {
        Ticket { since_ns, store: "/a".into(), key: key.into(), into_pool }
    }

    #[test]
    fn turns_of_one_store_come_one_after_the_other_and_those_of_another_do_not_wait() {
        let dir = dir("order");
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for i in 0..4 {
                let (dir, running, most) = (&dir, &running, &most);
                scope.spawn(move || {
                    let turn = wait(dir, ("/a/b".into(), ONE), &format!("{i}.0"), IN, || false).unwrap();
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(30));
                    running.fetch_sub(1, Ordering::SeqCst);
                    drop(turn);
                });
            }
            let turn = wait(&dir, ("/c".into(), ONE), "9.0", OUT, || true).unwrap();
            assert!(turn.is_some(), "another store's transfers do not count");
        });
        assert_eq!(most.into_inner(), 1);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "no ticket is left");
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn ticket_of_a_killed_process_does_not_count_and_a_wait_can_be_given_up() {
        for at_once in [ONE, AtOnce::Measured] {
            let dir = dir("dead");
            let old = ticket(1, "1.0", true);
            std::fs::write(dir.join(old.name()), tally::text(0, 0)).unwrap();
            assert_eq!(all(&dir), std::slice::from_ref(&old));
            assert!(wait(&dir, ("/a".into(), at_once), "2.0", IN, || true).unwrap().is_none());
            let file = OpenOptions::new().write(true).open(dir.join(old.name())).unwrap();
            file.set_modified(SystemTime::now() - DEAD).unwrap();
            assert!(wait(&dir, ("/a".into(), at_once), "2.0", IN, || true).unwrap().is_some());
            std::fs::remove_dir_all(&dir).unwrap();
        }
    }

    /// Two transfers at a store that gives each at most `solo` and all together at most `total` bytes per second, as
    /// long as it takes to know what sharing does. Returns what was found.
    fn learnt(dir: &Path, solo: f64, total: f64) -> Vec<Figure> {
        let running = AtomicUsize::new(0);
        let end = Instant::now() + Duration::from_secs(60);
        let found = || sharing::figures(dir, "!a");
        std::thread::scope(|scope| {
            for i in 0..2 {
                let (running, found) = (&running, &found);
                scope.spawn(move || {
                    let key = format!("{i}.0");
                    let way = Way { can_pause: false, ..IN };
                    let turn = wait_at(QUICK, dir, ("/a".into(), AtOnce::Measured), &key, way, || false);
                    let turn = turn.unwrap().unwrap();
                    running.fetch_add(1, Ordering::SeqCst);
                    let (mut moved, mut at) = (0.0, Instant::now());
                    while found().is_empty() && Instant::now() < end {
                        std::thread::sleep(Duration::from_millis(5));
                        let rate = solo.min(total / running.load(Ordering::SeqCst) as f64);
                        moved += at.elapsed().as_secs_f64() * rate;
                        at = Instant::now();
                        // As `Tally` does, without a moment in which it is empty.
                        let file = OpenOptions::new().write(true).open(turn.tally()).unwrap();
                        file.write_all_at(tally::text(0, moved as u64).as_bytes(), 0).unwrap();
                    }
                });
            }
        });
        found()
    }

    #[test]
    fn transfer_that_has_measured_that_sharing_gains_nothing_steps_back_until_its_turn_comes() {
        let dir = dir("steps-back");
        let end = Instant::now() + Duration::from_secs(60);
        let begin = |key: &str| {
            wait_at(QUICK, &dir, ("/a".into(), AtOnce::Measured), key, IN, || Instant::now() > end).unwrap()
        };
        let shares = AtomicUsize::new(1);
        let has_first_ended = AtomicBool::new(false);
        // Copies at its share of the rate, as `Tally` says it and pauses, until `is_over`.
        let copy = |turn: &Turn, is_over: &dyn Fn() -> bool| {
            let (mut moved, mut at) = (0.0, Instant::now());
            while !is_over() {
                assert!(Instant::now() < end);
                std::thread::sleep(Duration::from_millis(5));
                let passed = std::mem::replace(&mut at, Instant::now()).elapsed().as_secs_f64();
                let file = existing(turn.tally()).unwrap();
                if std::io::read_to_string(&file).unwrap() == tally::paused() {
                    continue;
                }
                moved += passed * 1e9 / shares.load(Ordering::SeqCst) as f64;
                file.write_all_at(tally::text(0, moved as u64).as_bytes(), 0).unwrap();
            }
            moved
        };
        let running = || -> Vec<(String, bool)> {
            let all = of_store(&dir, "/a", AtOnce::Measured);
            all.into_iter().map(|(ticket, runs)| (ticket.key, runs)).collect()
        };
        let one_runs = [("1.0".to_owned(), true), ("2.0".to_owned(), false)];
        let first = begin("1.0").unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let turn = begin("2.0").unwrap();
                shares.store(2, Ordering::SeqCst);
                copy(&turn, &|| {
                    has_first_ended.load(Ordering::SeqCst) && running() == [("2.0".to_owned(), true)]
                })
            });
            copy(&first, &|| !sharing::figures(&dir, "!a").is_empty() && running() == one_runs);
            let moved = first.tally().metadata().unwrap().len();
            assert!(moved > 0, "the one that measured pauses, not the one that was there");
            has_first_ended.store(true, Ordering::SeqCst);
            drop(first);
            assert!(second.join().unwrap() > 0.0);
        });
        assert!(all(&dir).is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// What a new transfer does beside those that run.
    fn step_beside(dir: &Path, running: &[Ticket], into_pool: bool) -> Step {
        for ticket in running {
            std::fs::write(dir.join(ticket.name()), tally::text(1, 1)).unwrap();
        }
        let ticket = ticket(u64::MAX, "9.0", into_pool);
        std::fs::write(dir.join(ticket.name()), "").unwrap();
        let step = Waiting { dir: dir.to_owned(), ticket: ticket.clone(), pace: PACE, measured: None }
            .step(AtOnce::Measured);
        for ticket in running.iter().chain([&ticket]) {
            std::fs::remove_file(dir.join(ticket.name())).unwrap();
        }
        step
    }

    #[test]
    fn transfers_at_a_store_of_limited_rate_are_found_to_gain_nothing_and_then_run_in_turn() {
        let dir = dir("limited");
        let figures = learnt(&dir, 1e9, 1e9);
        assert_eq!(figures.len(), 1, "{figures:?}");
        assert!(figures[0].growth < 1.2, "{figures:?}");
        assert!(matches!(step_beside(&dir, &[ticket(1, "1.0", true)], true), Step::Wait));
        assert!(matches!(step_beside(&dir, &[], true), Step::Begin));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn transfers_that_a_store_of_long_latency_slows_down_are_found_to_gain_and_then_share_it() {
        let dir = dir("slow");
        let figures = learnt(&dir, 1e7, 1e12);
        assert_eq!(figures.len(), 1, "{figures:?}");
        assert!(figures[0].growth > 1.5, "{figures:?}");
        assert!(matches!(step_beside(&dir, &[ticket(1, "1.0", true)], true), Step::Begin));
        // The other way, and one more, are other questions.
        assert!(matches!(step_beside(&dir, &[ticket(1, "1.0", false)], true), Step::Wait));
        assert!(matches!(
            step_beside(&dir, &[ticket(1, "1.0", true), ticket(2, "2.0", true)], true),
            Step::Wait
        ));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn oldest_of_those_that_wait_begins_when_none_runs() {
        let dir = dir("oldest");
        let older = ticket(1, "1.0", false);
        std::fs::write(dir.join(older.name()), "").unwrap();
        assert!(matches!(step_beside(&dir, &[], true), Step::Wait));
        let runs: Vec<bool> =
            of_store(&dir, "/a", AtOnce::Measured).into_iter().map(|(_, runs)| runs).collect();
        assert_eq!(runs, [false]);
        std::fs::write(dir.join(older.name()), tally::text(0, 0)).unwrap();
        assert!(of_store(&dir, "/a", AtOnce::Measured)[0].1);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
