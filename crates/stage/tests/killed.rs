//! A staging that is killed at any moment leaves no torn file, and the next run completes it and leaves no leftovers.
//!
//! Each staging runs in a process of its own: this test binary, started again with a variable that describes the task.

mod trees;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, Way};
use trees::{assert_no_temporaries, assert_same, make_odd, noise, snapshot, Scratch};

const TASK: &str = "FOREBAY_STAGE_TEST_TASK";

/// The task of a child.
#[derive(Clone, Copy, Debug)]
struct Task {
    way: Way,
    all_or_nothing: bool,
    verify: bool,
}

impl Task {
    fn options(self) -> StageOptions {
        StageOptions {
            all_or_nothing: self.all_or_nothing,
            verify: self.verify,
            threads: 2,
            ..StageOptions::default()
        }
    }

    fn run(self, source: &Path, destination: &Path) {
        let pairs = [Pair { source: source.into(), destination: destination.into() }];
        let report = stage_between(self.way, &pairs, &self.options(), &Quiet).unwrap();
        report.outcome().unwrap();
    }

    fn spawn(self, source: &Path, destination: &Path) -> Child {
        let flag = |on| if on { "1" } else { "0" };
        let way = if self.way == Way::In { "in" } else { "out" };
        let paths = (source.display(), destination.display());
        let task =
            [way, flag(self.all_or_nothing), flag(self.verify), &paths.0.to_string(), &paths.1.to_string()];
        Command::new(std::env::current_exe().unwrap())
            .args(["child_stages_what_the_variable_says", "--exact", "--nocapture"])
            .env(TASK, task.join("|"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

#[test]
fn child_stages_what_the_variable_says() {
    let Ok(task) = std::env::var(TASK) else { return };
    let fields: Vec<&str> = task.split('|').collect();
    let way = if fields[0] == "in" { Way::In } else { Way::Out };
    let task = Task { way, all_or_nothing: fields[1] == "1", verify: fields[2] == "1" };
    task.run(Path::new(fields[3]), Path::new(fields[4]));
}

/// Many small files, so that most kills hit them, a large one, and all odd objects.
fn make(store: &Path) {
    make_odd(store);
    for d in 0..10 {
        let directory = store.join(format!("many-{d}"));
        std::fs::create_dir(&directory).unwrap();
        for i in 0..150u64 {
            std::fs::write(directory.join(format!("f{i}")), noise((i * 131 % 9000) as usize, i)).unwrap();
        }
    }
    std::fs::write(store.join("large"), noise(80 << 20, 42)).unwrap();
}

fn kill_and_resume(task: Task, rounds: u32) {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    make(&store);
    let all = snapshot(&store);
    let begin = std::time::Instant::now();
    let status = task.spawn(&store, &scratch.join("timed")).wait().unwrap();
    assert!(status.success());
    let whole = begin.elapsed();
    let mut state = std::time::SystemTime::now().elapsed().unwrap_or_default().subsec_nanos() as u64 | 1;
    let mut killed = 0;
    for round in 0..rounds {
        if round % 3 == 0 {
            // Every third time the destination is empty, else it has the leftovers of killed runs.
            trees_removed(&pool);
        }
        let mut child = task.spawn(&store, &pool);
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(whole.mul_f64((state >> 33) as f64 / (1u64 << 31) as f64));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        if !pool.exists() {
            continue;
        }
        assert!(
            !task.all_or_nothing || round % 3 != 0 || snapshot(&pool).len() == all.len(),
            "{task:?}: part of all"
        );
        for (path, item) in snapshot(&pool) {
            let temporary = path.windows(9).any(|w| w == b".forebay-");
            if item.kind != 0o100_000 || temporary {
                continue;
            }
            let original = &all[&path];
            let complete = item.size == original.size && item.mtime == original.mtime;
            // A file that a later run takes for complete is complete. After stage-out, every file under its final name
            // is.
            if complete || task.way == Way::Out {
                assert_eq!(item.content, original.content, "{task:?}: {}", path.escape_ascii());
                assert_eq!((item.size, item.mode), (original.size, original.mode), "{}", path.escape_ascii());
                assert_eq!(item.xattrs, original.xattrs, "{}", path.escape_ascii());
            }
        }
    }
    assert!(killed > 0, "no child was killed before its end");
    task.run(&store, &pool);
    assert_same(&all, &snapshot(&pool));
    assert_no_temporaries(&scratch.0);
}

fn trees_removed(path: &Path) {
    if let Ok(top) = rustix::fs::open(path, rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty()) {
        trees::clear(&top);
        std::fs::remove_dir(path).unwrap();
    }
}

#[test]
fn stage_in_killed_at_random_resumes_to_the_same_tree() {
    kill_and_resume(Task { way: Way::In, all_or_nothing: false, verify: false }, 12);
}

#[test]
fn stage_out_killed_at_random_is_never_torn_and_resumes() {
    kill_and_resume(Task { way: Way::Out, all_or_nothing: false, verify: false }, 12);
}

#[test]
fn stage_out_with_verify_killed_at_random_is_never_torn_and_resumes() {
    kill_and_resume(Task { way: Way::Out, all_or_nothing: false, verify: true }, 6);
}

#[test]
fn stage_all_or_nothing_killed_at_random_resumes_to_the_same_tree() {
    kill_and_resume(Task { way: Way::Out, all_or_nothing: true, verify: false }, 9);
    kill_and_resume(Task { way: Way::In, all_or_nothing: true, verify: false }, 9);
}

#[test]
fn leftovers_of_the_dead_are_removed_those_of_the_living_and_like_named_files_stay() {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    std::fs::create_dir(&store).unwrap();
    std::fs::create_dir(&pool).unwrap();
    std::fs::write(store.join("f"), b"f").unwrap();
    let task = Task { way: Way::Out, all_or_nothing: false, verify: false };
    // A child killed during a large file leaves a temporary, whose name is then varied.
    std::fs::write(store.join("large"), noise(100 << 20, 1)).unwrap();
    let mut left = None;
    for _ in 0..100 {
        let mut child = task.spawn(&store, &pool);
        for _ in 0..10_000 {
            left = std::fs::read_dir(&pool)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .find(|name| name.starts_with(".forebay-"));
            if left.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if left.as_ref().is_some_and(|name| pool.join(name).exists()) {
            break;
        }
        left = None;
        let _ = std::fs::remove_file(pool.join("large"));
    }
    let left = left.expect("a child was killed amid its file");
    // A child killed between two files may have left another one.
    let ours = |name: &str| name.starts_with(".forebay-");
    let all_left = std::fs::read_dir(&pool).unwrap();
    let all_left =
        all_left.filter(|e| ours(&e.as_ref().unwrap().file_name().to_string_lossy())).count() as u64;
    let fields: Vec<&str> = left.trim_end_matches(".part").split('-').collect();
    let [hash, host, pid, start, call] = fields[1..] else { panic!("{left}") };
    let mine = format!("{:x}", std::process::id());
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let my_start: u64 = stat[stat.rfind(')').unwrap() + 2..].split(' ').nth(19).unwrap().parse().unwrap();
    let living = format!(".forebay-{hash}-{host}-{mine}-{my_start:x}-ffff.part");
    let foreign =
        format!(".forebay-{hash}-{:08x}-{pid}-{start}-{call}.part", !u32::from_str_radix(host, 16).unwrap());
    let like = ".forebay-notes.part";
    for name in [&living, &foreign, like] {
        std::fs::write(pool.join(name), b"theirs").unwrap();
    }
    // The same for a tree.
    let tree = pool.join(left.replace(".part", ".gone"));
    std::fs::create_dir_all(tree.join("a/b/c")).unwrap();
    std::fs::write(tree.join("a/b/f"), b"f").unwrap();

    let pairs = [Pair { source: store.clone(), destination: pool.clone() }];
    let report = stage_between(Way::Out, &pairs, &task.options(), &Quiet).unwrap();
    report.outcome().unwrap();
    assert_eq!(report.leftovers_removed, all_left + 1);
    assert!(!pool.join(&left).exists() && !tree.exists());
    for name in [&living, &foreign, like] {
        assert!(pool.join(name).exists(), "{name}");
    }

    // Temporaries are never staged from a source, however recent they are.
    let back = scratch.join("back");
    task.run(&pool, &back);
    let mut names: Vec<_> = std::fs::read_dir(&back).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [like, "f", "large"]);
}
