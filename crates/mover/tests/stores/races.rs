//! A foreign program replaces a file in the middle of a call. Its version is never lost.
//!
//! Each round has one call of the store and one replacement by the foreign program, at the same time. The replacement
//! comes after the call, or makes it a conflict: so at the end of the round it is always there. On a busy machine both
//! may never meet; `steps` goes through all orders of a directory's system calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_mover::store::{Attributes, Object, Outcome, StorePath};

use super::subject::{path, source, Subject};

/// Rounds of one race. Every round is a chance to hit a window of some microseconds.
const ROUNDS: u64 = 1500;

/// The rounds of a race. The foreign thread waits for each, and ends if the other thread fails.
#[derive(Default)]
struct Rounds {
    begun: AtomicU64,
    awake: AtomicU64,
    ended: AtomicU64,
    is_over: AtomicBool,
}

impl Rounds {
    /// Waits for the round to begin; false if the race is over.
    fn wait_begun(&self, round: u64) -> bool {
        while self.begun.load(Ordering::Acquire) <= round {
            if self.is_over.load(Ordering::Acquire) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Runs the foreign program's part of all rounds: it replaces `file`, each time at another moment.
    fn foreign(&self, s: &Subject, file: &StorePath) {
        for round in 0..ROUNDS {
            let write = s.foreign.prepare(file, format!("foreign {round:06}").as_bytes()).unwrap();
            if !self.wait_begun(round) {
                return;
            }
            self.awake.store(round + 1, Ordering::Release);
            spin(round % 97);
            write();
            self.ended.store(round + 1, Ordering::Release);
        }
    }

    /// Runs `call` while the foreign program acts.
    fn run<T>(&self, round: u64, call: impl FnOnce() -> T) -> T {
        self.begun.store(round + 1, Ordering::Release);
        while self.awake.load(Ordering::Acquire) <= round {
            std::thread::yield_now();
        }
        spin(round * 53 % 101);
        let result = call();
        while self.ended.load(Ordering::Acquire) <= round {
            std::thread::yield_now();
        }
        result
    }
}

fn spin(rounds: u64) {
    for _ in 0..rounds * 25 {
        std::hint::spin_loop();
    }
}

/// Ends the race, also when a thread fails.
struct Over<'a>(&'a Rounds);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
    }
}

/// Runs `call` against foreign replacements of `file`, with what was there before.
fn race(s: &Subject, file: &StorePath, call: impl Fn(&Subject, &Object)) {
    let rounds = Rounds::default();
    std::thread::scope(|scope| {
        scope.spawn(|| rounds.foreign(s, file));
        let _over = Over(&rounds);
        for round in 0..ROUNDS {
            let before = s.store.look(file).unwrap().unwrap();
            rounds.run(round, || call(s, &before));
            let found = s.get(file).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            assert_eq!(found, Some(format!("foreign {round:06}")), "lost in round {round}");
        }
    });
}

fn publish(s: &Subject) {
    let file = path("file");
    s.foreign.write(&file, b"at first");
    race(s, &file, |s, before| {
        let temporary = s.upload(&file, b"forebay's");
        s.store.publish(&temporary, &file, Some(&before.version)).unwrap();
        s.store.discard(&temporary).unwrap();
    });
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!(listing.temporaries, 0);
}

fn remove(s: &Subject) {
    let file = path("file");
    s.foreign.write(&file, b"at first");
    race(s, &file, |s, before| {
        s.store.remove(&file, &before.version).unwrap();
    });
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!(listing.temporaries, 0);
}

/// Another file is renamed over the one that the foreign program replaces.
fn rename_over(s: &Subject) {
    let (file, other) = (path("file"), path("other"));
    s.foreign.write(&file, b"at first");
    race(s, &file, |s, before| {
        let temporary = s.store.temporaries().next(&StorePath::root());
        s.store.upload(&temporary, &source(b"other"), &Attributes::default()).unwrap();
        let there = s.store.look(&other).unwrap().map(|object| object.version);
        let Outcome::Done(version) = s.store.publish(&temporary, &other, there.as_ref()).unwrap() else {
            panic!("only this thread writes it")
        };
        s.store.rename(&other, &version, &file, Some(&before.version)).unwrap();
    });
}

#[test]
fn publish_with_exchange_loses_no_foreign_version() {
    publish(&Subject::tmpfs());
}

#[test]
fn publish_on_disk_loses_no_foreign_version() {
    publish(&Subject::disk());
}

#[test]
fn publish_without_rename_flags_loses_no_foreign_version() {
    publish(&Subject::without_rename_flags());
}

#[test]
fn publish_without_links_and_exchange_loses_no_foreign_version() {
    publish(&Subject::without_links_and_exchange());
}

#[test]
fn publish_with_conditional_copies_loses_no_foreign_version() {
    publish(&Subject::object());
}

#[test]
fn remove_loses_no_foreign_version() {
    remove(&Subject::tmpfs());
    remove(&Subject::without_rename_flags());
}

#[test]
fn rename_over_a_file_loses_no_foreign_version() {
    rename_over(&Subject::tmpfs());
    rename_over(&Subject::without_rename_flags());
}

/// The foreign program replaces the file that is renamed: its version is at one of both names.
#[test]
fn rename_of_a_file_loses_no_foreign_version() {
    for s in [Subject::tmpfs(), Subject::without_rename_flags()] {
        let (from, to) = (path("from"), path("to"));
        let rounds = Rounds::default();
        let mut lost = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| rounds.foreign(&s, &from));
            let _over = Over(&rounds);
            for round in 0..ROUNDS {
                let found = s.store.look(&from).unwrap();
                rounds.run(round, || {
                    if let Some(found) = found {
                        s.store.rename(&from, &found.version, &to, None).unwrap();
                    }
                });
                let wanted = Some(format!("foreign {round:06}").into_bytes());
                lost += u64::from(s.get(&from) != wanted && s.get(&to) != wanted);
                if let Some(object) = s.store.look(&to).unwrap() {
                    s.store.remove(&to, &object.version).unwrap();
                }
            }
        });
        assert_eq!(lost, 0);
    }
}
