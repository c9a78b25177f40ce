//! A foreign program acts, or the mover dies, before each single system call of a store's calls. Nothing is lost.

use std::cell::Cell;
use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_mover::store::steps::with_steps;
use forebay_mover::store::{
    Attributes, PosixOptions, PosixStore, Store, StoreDirectory, StorePath, StoreVersion,
};

use super::subject::{id, path, source, TempDir};

/// More system calls than any call makes.
const STEPS_MAX: u64 = 60;

const ANY: StoreDirectory = StoreDirectory { number: None, file_system: None };
/// All calls that a file system may have.
const ALL: PosixOptions = PosixOptions {
    exchange: true,
    no_replace: true,
    hard_links: true,
    openat2: true,
    slow_names: false,
    directory: ANY,
};
const KINDS: [PosixOptions; 3] = [
    ALL,
    PosixOptions { exchange: false, no_replace: false, ..ALL },
    PosixOptions { exchange: false, hard_links: false, ..ALL },
];

/// A name that is put aside under its own name, and one that needs a directory.
fn names() -> [String; 2] {
    ["file".into(), "n".repeat(250)]
}

struct Scene {
    directory: TempDir,
    store: PosixStore,
    file: StorePath,
    before: StoreVersion,
    temporary: StorePath,
    upload: StoreVersion,
}

impl Scene {
    /// A file with the bytes `before`, and an upload `upload`, published as another file for acts that need that.
    fn new(options: PosixOptions, name: &str, what: &str) -> Scene {
        let directory = TempDir::tmpfs();
        let store = PosixStore::open(&directory.0, options, id()).unwrap();
        let file = path(name);
        fs::write(directory.file(&file), "before").unwrap();
        let before = store.look(&file).unwrap().unwrap().version;
        let temporary = store.temporaries().next(&StorePath::root());
        let upload = store.upload(&temporary, &source(b"upload"), &Attributes::default()).unwrap();
        match what {
            "publish" => {}
            "rename over" => assert!(!store.publish(&temporary, &path(OTHER), None).unwrap().is_conflict()),
            _ => store.discard(&temporary).unwrap(),
        }
        Scene { directory, store, file, before, temporary, upload }
    }

    fn read(&self, name: &StorePath) -> Option<String> {
        fs::read_to_string(self.directory.file(name)).ok()
    }

    /// All visible contents, sorted.
    fn contents(&self) -> Vec<String> {
        let mut contents = Vec::new();
        self.store
            .list(&StorePath::root(), &mut |object| {
                contents.extend(self.read(&StorePath::root().join(&object.name).unwrap()));
                Ok(())
            })
            .unwrap();
        contents.sort();
        contents
    }

    fn temporaries(&self) -> u64 {
        self.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap().temporaries
    }
}

/// Replaces a file as other programs do.
fn replace(file: &Path, bytes: &str) {
    let beside = PathBuf::from(format!("{}.f", file.with_file_name("beside").display()));
    fs::write(&beside, bytes).unwrap();
    fs::rename(&beside, file).unwrap();
}

/// What a mover does with the scene; true if it was done, false after a conflict.
type Act = fn(&Scene) -> bool;

const OTHER: &str = "other";

fn publish(scene: &Scene) -> bool {
    let done =
        !scene.store.publish(&scene.temporary, &scene.file, Some(&scene.before)).unwrap().is_conflict();
    if !done {
        scene.store.discard(&scene.temporary).unwrap();
    }
    done
}

fn remove(scene: &Scene) -> bool {
    !scene.store.remove(&scene.file, &scene.before).unwrap().is_conflict()
}

/// The upload, which has a final name already, is renamed over the file.
fn rename_over(scene: &Scene) -> bool {
    let other = path(OTHER);
    let version = scene.upload;
    !scene.store.rename(&other, &version, &scene.file, Some(&scene.before)).unwrap().is_conflict()
}

fn rename_away(scene: &Scene) -> bool {
    !scene.store.rename(&scene.file, &scene.before, &path("away"), None).unwrap().is_conflict()
}

const ACTS: [(&str, Act); 4] =
    [("publish", publish), ("remove", remove), ("rename over", rename_over), ("rename away", rename_away)];

/// The foreign program replaces the file before step `first` and again before step `second`.
#[test]
fn foreign_replacement_at_any_step_is_never_lost() {
    for options in KINDS {
        for (what, act) in ACTS {
            for name in names() {
                let (mut done, mut conflicts) = (0, 0);
                for first in 0..STEPS_MAX {
                    let mut is_beyond = true;
                    for second in first..STEPS_MAX {
                        let scene = Scene::new(options, &name, what);
                        let file = scene.directory.file(&scene.file);
                        let acted = Rc::new(Cell::new(0));
                        let counter = acted.clone();
                        let hook = move |step| {
                            if step == first || step == second {
                                replace(&file, &format!("foreign {step}"));
                                counter.set(step + 1);
                            }
                        };
                        let (is_done, steps) = with_steps(hook, || act(&scene));
                        let at =
                            format!("{what}, {options:?}, {} bytes, steps {first} and {second}", name.len());
                        if acted.get() > 0 {
                            is_beyond = false;
                            let newest = format!("foreign {}", acted.get() - 1);
                            assert_eq!(scene.read(&scene.file), Some(newest), "{at}");
                        }
                        assert_eq!(scene.temporaries(), 0, "{at}");
                        assert!(steps < STEPS_MAX, "{at}: {steps} steps");
                        if is_done {
                            done += 1
                        } else {
                            conflicts += 1
                        }
                        if second >= steps {
                            break;
                        }
                    }
                    if is_beyond {
                        break;
                    }
                }
                assert!(done > 0 && conflicts > 0, "{what}: {done} done, {conflicts} conflicts");
            }
        }
    }
}

/// The mover dies before each step; then a sweep, and the same again by another mover.
#[test]
fn death_at_any_step_leaves_what_a_sweep_settles() {
    // Panics stand for deaths: no code of the store runs on unwinding. They are not printed.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<Death>().is_none() {
            hook(info);
        }
    }));
    struct Death;
    for options in KINDS {
        for (what, act) in ACTS {
            for name in names() {
                // With and without a foreign replacement some steps before.
                for lead in [None, Some(0), Some(1), Some(2), Some(3)] {
                    for step in 0..STEPS_MAX {
                        let scene = Scene::new(options, &name, what);
                        let file = scene.directory.file(&scene.file);
                        let foreign = lead.filter(|lead| *lead <= step).map(|lead| step - lead);
                        let acted = Rc::new(Cell::new(false));
                        let act_at = acted.clone();
                        let hook = move |now| {
                            if Some(now) == foreign {
                                replace(&file, "foreign");
                                act_at.set(true);
                            }
                            if now == step {
                                std::panic::panic_any(Death);
                            }
                        };
                        let died =
                            catch_unwind(AssertUnwindSafe(|| with_steps(hook, || act(&scene)))).is_err();
                        let at = format!(
                            "{what}, {options:?}, {} bytes, death at {step}, foreign at {foreign:?}",
                            name.len()
                        );
                        let swept = scene.store.remove_leftovers(&StorePath::root(), &|_| false).unwrap();
                        assert_eq!((scene.temporaries(), swept.live), (0, 0), "{at}");
                        let contents = scene.contents();
                        let has = |text: &str| contents.iter().any(|found| found == text);
                        assert!(!acted.get() || has("foreign"), "{at}: {contents:?}");
                        // The file itself is gone only where it was replaced or removed.
                        let may_go = ["publish", "remove", "rename over"].contains(&what);
                        assert!(has("before") || has("foreign") || may_go, "{at}: {contents:?}");
                        if what == "publish" || what == "rename over" {
                            assert!(scene.read(&scene.file).is_some(), "{at}: {contents:?}");
                        }
                        // A file that is renamed is never lost, unless a foreign program replaces it afterwards.
                        assert!(what != "rename over" || has("upload") || acted.get(), "{at}: {contents:?}");
                        if !died {
                            break;
                        }
                    }
                }
            }
        }
    }
    let _ = std::panic::take_hook();
}
