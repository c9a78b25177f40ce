//! The tally of a transfer: a small file that says how many files and bytes the transfer has copied. Others read it to
//! watch its rate.
//!
//! The file is there before the transfer, which never creates it: a tally that was removed stays removed. Who has
//! started the transfer pauses it by a blank text in the file, and lets it go on by a tally.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// How often it is written.
const PERIOD: Duration = Duration::from_millis(250);
/// How often a paused transfer looks whether it may go on.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// A blank tally that nobody has touched for so long pauses nothing: its owner was killed.
const OWNER_DEAD: Duration = forebay_tasks::CLAIM_AGE;
/// It has no more bytes.
pub(crate) const TEXT_MAX: u64 = 64;
/// A file costs as much as so many bytes: several calls to the store.
const FILE_BYTES: f64 = 65536.0;

/// The text of a tally. All have one length, so a later one replaces the one before.
pub(crate) fn text(files: u64, bytes: u64) -> String {
    format!("{files:>20} {bytes:>20}\n")
}

/// The text in the place of a tally while the transfer is to pause. It is as long, so that it takes no space.
pub(crate) fn paused() -> String {
    " ".repeat(text(0, 0).len())
}

/// The work that a tally's text shows, in bytes; `None` if it is no tally.
pub(crate) fn work(text: &str) -> Option<f64> {
    let mut numbers = text.split_whitespace().map(str::parse::<u64>);
    let (files, bytes) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(files as f64 * FILE_BYTES + bytes as f64)
}

/// Writes a tally now and then.
#[derive(Debug)]
pub(crate) struct Tally {
    path: PathBuf,
    started: Instant,
    next_ms: AtomicU64,
    is_paused: AtomicBool,
}

impl Tally {
    pub(crate) fn new(path: PathBuf) -> Tally {
        Tally { path, started: Instant::now(), next_ms: AtomicU64::new(0), is_paused: AtomicBool::new(false) }
    }

    /// Waits as long as the tally's owner has the transfer pause, or until `is_over`.
    pub(crate) fn pause(&self, is_over: impl Fn() -> bool) {
        while self.is_paused.load(Ordering::Relaxed) && !is_over() {
            std::thread::sleep(LOOK_AGAIN);
            let pauses = File::open(&self.path).is_ok_and(|file| pauses(&file));
            self.is_paused.store(pauses, Ordering::Relaxed);
        }
    }

    pub(crate) fn say(&self, files: u64, bytes: u64) {
        let now = self.started.elapsed().as_millis() as u64;
        let due = self.next_ms.load(Ordering::Relaxed);
        let next = now + PERIOD.as_millis() as u64;
        if now < due
            || self.next_ms.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        // A tally that cannot be written is no reason to stop copying.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&self.path) else { return };
        if pauses(&file) {
            self.is_paused.store(true, Ordering::Relaxed);
            return;
        }
        let _ = file.write_all_at(text(files, bytes).as_bytes(), 0);
    }
}

/// True for a tally that is blank, of an owner that lives.
fn pauses(file: &File) -> bool {
    let mut found = [0; TEXT_MAX as usize];
    let is_blank = file.read_at(&mut found, 0).is_ok_and(|len| found[..len] == *paused().as_bytes());
    let at = file.metadata().and_then(|meta| meta.modified());
    is_blank && at.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < OWNER_DEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tally_is_written_where_a_file_is_and_read_back_as_work() {
        let path = std::env::temp_dir().join(format!("forebay-tally-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Tally::new(path.clone()).say(1, 2);
        assert!(!path.exists(), "it is not created");
        std::fs::write(&path, text(0, 0)).unwrap();
        Tally::new(path.clone()).say(2, 1000);
        let said = std::fs::read_to_string(&path).unwrap();
        assert_eq!(work(&said), Some(2.0 * FILE_BYTES + 1000.0));
        assert!(said.len() as u64 <= TEXT_MAX && text(u64::MAX, u64::MAX).len() == said.len());
        assert_eq!((work(""), work("x y"), work("1")), (None, None, None));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn transfer_pauses_while_its_tally_is_blank() {
        let path = std::env::temp_dir().join(format!("forebay-tally-paused-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let tally = Tally::new(path.clone());
        let say = |bytes| {
            tally.next_ms.store(0, Ordering::Relaxed);
            tally.say(1, bytes);
        };
        say(1);
        tally.pause(|| panic!("an empty file is none that pauses"));

        std::fs::write(&path, paused()).unwrap();
        say(2);
        let looks = AtomicU64::new(0);
        tally.pause(|| looks.fetch_add(1, Ordering::Relaxed) == 3);
        assert_eq!(looks.into_inner(), 4, "it is over before the pause is");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), paused(), "a paused transfer says nothing");
        std::thread::scope(|scope| {
            let paused = scope.spawn(|| tally.pause(|| false));
            std::fs::write(&path, text(1, 1)).unwrap();
            paused.join().unwrap();
        });
        say(3);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text(1, 3));

        std::fs::write(&path, paused()).unwrap();
        let blank = OpenOptions::new().write(true).open(&path).unwrap();
        blank.set_modified(SystemTime::now() - OWNER_DEAD).unwrap();
        say(4);
        tally.pause(|| panic!("its owner was killed"));
        std::fs::remove_file(&path).unwrap();
    }
}
