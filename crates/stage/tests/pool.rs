//! Staging into and out of a real pool: a daemon that each test starts and stops.

mod trees;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forebay_client::{PathBuffer, Place, Pool};
use forebay_server::launch::{down, up, DownOptions, UpOptions};
use forebay_server::Medium;
use forebay_stage::{stage_in, stage_out, Pair, Quiet, StageOptions, StageReport};
use forebay_types::{Code, Layout, NodeId};
use trees::{assert_no_temporaries, assert_same, make_odd, noise, snapshot, Scratch, Snapshot};

/// Set for a child of a test: the pool, and the source that it stages in.
const TASK: &str = "FOREBAY_STAGE_TEST_POOL";

/// A pool that is stopped and removed when it is dropped.
struct TestPool {
    directory: PathBuf,
    pool: &'static Pool,
    // Declared after the pool, so that it is dropped after it.
    _place: Scratch,
}

impl TestPool {
    /// A pool on a directory of the disk.
    fn up(capacity_bytes: u64) -> TestPool {
        TestPool::on(Medium::Ssd, capacity_bytes).unwrap()
    }

    /// A pool on a medium; `None` if this process may not have one there.
    fn on(media: Medium, capacity_bytes: u64) -> Option<TestPool> {
        let place = Scratch::within(&std::env::temp_dir());
        let directory = place.join("pool");
        std::fs::create_dir(&directory).unwrap();
        let options = UpOptions {
            path: directory.clone(),
            media: Some(media),
            capacity_bytes: Some(capacity_bytes),
            ..UpOptions::default()
        };
        let started = up(&options)
            .unwrap_or_else(|e| panic!("{e}\nhas `cargo build -p forebay-server` built forebayd?"));
        let pool = Pool::attach(&directory).unwrap();
        let pool = TestPool { directory, pool, _place: place };
        Some(pool).filter(|_| media == Medium::Ssd || started.costs.is_empty())
    }

    fn fill(&self, source: &Path, destination: &str, options: &StageOptions) -> StageReport {
        let pairs = [Pair { source: source.into(), destination: destination.into() }];
        stage_in(self.pool, &pairs, options, &Quiet).unwrap()
    }

    fn drain(&self, source: &str, destination: &Path, options: &StageOptions) -> StageReport {
        let pairs = [Pair { source: source.into(), destination: destination.into() }];
        stage_out(self.pool, &pairs, options, &Quiet).unwrap()
    }

    fn names(&self, path: &[u8]) -> Vec<Vec<u8>> {
        let place = Place { dir: self.pool.root().unwrap(), path };
        let directory = self.pool.resolve(place, true, &mut PathBuffer::new()).unwrap();
        let mut cursor = Box::new(self.pool.read_directory(directory.attr.ino));
        let mut names = Vec::new();
        while let Some(entry) = cursor.next(self.pool).unwrap() {
            names.push(entry.name.to_vec());
        }
        names.sort();
        names
    }

    fn assert_sound(&self) {
        let report = forebay_server::control::check(&self.directory).unwrap();
        assert_eq!(report["clean"], true, "{report:#}");
    }
}

impl Drop for TestPool {
    fn drop(&mut self) {
        if let Err(e) = down(&self.directory, DownOptions { force: true, ..DownOptions::default() }) {
            eprintln!("{e}");
        }
    }
}

/// Removes the offsets of holes, whose granularity depends on the medium.
fn without_holes(mut tree: Snapshot) -> Snapshot {
    tree.values_mut().for_each(|item| item.data.clear());
    tree
}

#[test]
fn odd_tree_through_a_pool_and_back_is_what_it_was() {
    let pool = TestPool::up(512 << 20);
    let scratch = Scratch::new();
    let store = scratch.join("store");
    make_odd(&store);
    let before = without_holes(snapshot(&store));
    for (i, (verify, all_or_nothing)) in
        [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
    {
        let options = StageOptions { verify, all_or_nothing, ..StageOptions::default() };
        let inside = format!("/odd-{}", i / 2);
        let report = pool.fill(&store, &inside, &options);
        report.outcome().unwrap();
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        let back = scratch.join(&format!("back-{i}"));
        let report = pool.drain(&inside, &back, &options);
        report.outcome().unwrap();
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        assert_same(&before, &without_holes(snapshot(&back)));
        assert_no_temporaries(&scratch.0);
        assert!(report.holes_bytes > 5 << 30, "{report:?}");
        trees::clear(
            &rustix::fs::open(&back, rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty()).unwrap(),
        );
    }
    assert_eq!(pool.names(b"/"), [&b"odd-0"[..], b"odd-1"], "no temporaries at the top");
    pool.assert_sound();
}

#[test]
fn stage_in_again_copies_nothing_and_what_changed_is_replaced() {
    let pool = TestPool::up(256 << 20);
    let scratch = Scratch::new();
    let store = scratch.join("store");
    std::fs::create_dir_all(store.join("d")).unwrap();
    for i in 0..300 {
        std::fs::write(store.join(format!("d/f{i}")), noise(i * 37, i as u64)).unwrap();
    }
    std::fs::write(store.join("large"), noise(70 << 20, 1)).unwrap();
    let options = StageOptions::default();
    assert_eq!(pool.fill(&store, "/", &options).files, 301);
    let report = pool.fill(&store, "/", &options);
    assert_eq!((report.files, report.skipped_files), (0, 301));
    let report = pool.fill(&store, "/", &StageOptions { verify: true, ..options.clone() });
    assert_eq!((report.files, report.skipped_files, report.verified), (0, 301, 301));
    std::fs::write(store.join("d/f7"), b"changed").unwrap();
    std::fs::write(store.join("large"), noise(71 << 20, 2)).unwrap();
    let report = pool.fill(&store, "/", &options);
    assert_eq!((report.files, report.skipped_files), (2, 299));
    let back = scratch.join("back");
    assert_eq!(pool.drain("/store/", &back, &options).files, 301);
    assert_same(&without_holes(snapshot(&store)), &without_holes(snapshot(&back)));
    // All-or-nothing staging of contents into the root, whose own attributes stay.
    let root = pool.pool.get_attr(pool.pool.root().unwrap()).unwrap().attr;
    let contents = store.join("");
    let whole = StageOptions { all_or_nothing: true, ..options.clone() };
    assert_eq!(pool.fill(&contents, "/", &whole).files, 301);
    assert_eq!(pool.names(b"/"), [&b"d"[..], b"large", b"store"]);
    let after = pool.pool.get_attr(root.ino).unwrap().attr;
    assert_eq!((root.mode, root.uid, root.gid), (after.mode, after.uid, after.gid));
    pool.assert_sound();
}

#[test]
fn striped_file_is_staged_out_with_its_holes_and_replaced_when_staged_in() {
    let pool = TestPool::up(128 << 20);
    let scratch = Scratch::new();
    let root = pool.pool.root().unwrap();
    let layout = Layout::overstriped(NodeId::FIRST, 0, 4, 64 << 10).unwrap();
    let (entry, _) = pool.pool.create_entry(root, b"striped", 0o640, true, Some(layout)).unwrap();
    let file = pool.pool.open_file(&entry, true).unwrap();
    let piece = noise(300_000, 5);
    for offset in [0u64, 5 << 20, 20 << 20] {
        let mut done = 0;
        while done < piece.len() {
            done += file.write_at(&piece[done..], offset + done as u64).unwrap();
        }
    }
    file.truncate(30 << 20).unwrap();
    for verify in [false, true] {
        let back = scratch.join(&format!("back-{verify}"));
        let report = pool.drain("/striped", &back, &StageOptions { verify, ..StageOptions::default() });
        report.outcome().unwrap();
        assert!(report.holes_bytes > 28 << 20, "{report:?}");
        let bytes = std::fs::read(&back).unwrap();
        assert_eq!(bytes.len(), 30 << 20);
        let mut expected = vec![0; 30 << 20];
        for offset in [0usize, 5 << 20, 20 << 20] {
            expected[offset..offset + piece.len()].copy_from_slice(&piece);
        }
        assert!(bytes == expected, "the content differs");
    }
    std::fs::write(scratch.join("striped"), b"new").unwrap();
    pool.fill(&scratch.join("striped"), "/", &StageOptions::default()).outcome().unwrap();
    pool.drain("/striped", &scratch.join("last"), &StageOptions::default()).outcome().unwrap();
    assert_eq!(std::fs::read(scratch.join("last")).unwrap(), b"new");
    pool.assert_sound();
}

#[test]
fn stage_into_a_full_pool_says_what_is_missing_and_leaves_whole_files() {
    let Some(pool) = TestPool::on(Medium::Dram, 64 << 20) else {
        eprintln!("SKIPPED: this test needs a pool on a tmpfs of its own, which is not allowed here");
        return;
    };
    let scratch = Scratch::new();
    let store = scratch.join("store");
    std::fs::create_dir(&store).unwrap();
    for i in 0..100 {
        std::fs::write(store.join(format!("f{i:02}")), noise(1 << 20, i)).unwrap();
    }
    std::fs::write(store.join("large"), noise(80 << 20, 7)).unwrap();
    let report = pool.fill(&store, "/all", &StageOptions { all_or_nothing: true, ..StageOptions::default() });
    assert!(report.rolled_back && pool.names(b"/").is_empty(), "{report:?}");
    let report = pool.fill(&store, "/some", &StageOptions::default());
    let error = report.outcome().unwrap_err();
    assert_eq!(report.errors[0].code, Code::NoSpace, "{error}");
    assert!(error.why.contains("No space left on device") && error.why.contains("free"), "{error}");
    let back = scratch.join("back");
    pool.drain("/some", &back, &StageOptions::default()).outcome().unwrap();
    let all = snapshot(&store);
    for (path, item) in snapshot(&back).iter().filter(|(_, item)| item.kind == 0o100_000) {
        assert_eq!(item.content, all[path].content, "torn: {}", path.escape_ascii());
    }
    assert!(!pool.names(b"/some").iter().any(|name| name.starts_with(b".forebay-")));
    pool.assert_sound();
}

#[test]
fn link_that_leaves_the_pool_is_no_source() {
    let pool = TestPool::up(64 << 20);
    let scratch = Scratch::new();
    std::os::unix::fs::symlink("/etc", scratch.join("outside")).unwrap();
    let link = scratch.join("links");
    std::fs::create_dir(&link).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", link.join("outside")).unwrap();
    pool.fill(&link, "/links", &StageOptions::default()).outcome().unwrap();
    let pairs = [Pair { source: "/links/outside".into(), destination: scratch.join("x") }];
    let error = stage_out(pool.pool, &pairs, &StageOptions::default(), &Quiet).unwrap_err();
    assert_eq!(error.code, Code::CrossDevice);
    // Within a tree, a link is staged as a link.
    pool.drain("/links", &scratch.join("back"), &StageOptions::default()).outcome().unwrap();
    assert_eq!(std::fs::read_link(scratch.join("back/outside")).unwrap(), Path::new("/etc/passwd"));
}

#[test]
fn child_stages_in_what_the_variable_says() {
    let Ok(task) = std::env::var(TASK) else { return };
    let (pool, source) = task.split_once('|').unwrap();
    let pool = Pool::attach(Path::new(pool)).unwrap();
    let pairs = [Pair { source: source.into(), destination: "/in".into() }];
    stage_in(pool, &pairs, &StageOptions::default(), &Quiet).unwrap().outcome().unwrap();
}

#[test]
fn stage_in_killed_at_random_resumes_to_the_same_tree() {
    let pool = TestPool::up(512 << 20);
    let scratch = Scratch::new();
    let store = scratch.join("store");
    make_odd(&store);
    for d in 0..4 {
        std::fs::create_dir(store.join(format!("many-{d}"))).unwrap();
        for i in 0..200u64 {
            let content = noise((i * 131 % 9000) as usize, i);
            std::fs::write(store.join(format!("many-{d}/f{i}")), content).unwrap();
        }
    }
    let spawn = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["child_stages_in_what_the_variable_says", "--exact", "--nocapture"])
            .env(TASK, format!("{}|{}", pool.directory.display(), store.display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let begin = std::time::Instant::now();
    assert!(spawn().wait().unwrap().success());
    let whole = begin.elapsed();
    let mut killed = 0;
    for round in 1..=8u32 {
        if round % 2 == 1 {
            remove_all(&pool, "/in");
        }
        let mut child = spawn();
        std::thread::sleep(whole * round / 10);
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
    }
    assert!(killed > 0, "no child was killed before its end");
    pool.fill(&store, "/in", &StageOptions::default()).outcome().unwrap();
    let back = scratch.join("back");
    pool.drain("/in", &back, &StageOptions::default()).outcome().unwrap();
    assert_same(&without_holes(snapshot(&store)), &without_holes(snapshot(&back)));
    // Temporaries are never staged out, so the test lists the directories in which they would be.
    for directory in ["/", "/in", "/in/holes", "/in/names", "/in/many-0", "/in/many-3"] {
        let left = pool.names(directory.as_bytes());
        let ours = |name: &&Vec<u8>| name.starts_with(b".forebay-") && name.len() > 40;
        assert_eq!(left.iter().filter(ours).count(), 0, "{directory}");
    }
    pool.assert_sound();
}

/// Removes a tree of the pool, with requests of its own.
fn remove_all(pool: &TestPool, path: &str) {
    let mut escape = PathBuffer::new();
    let root = pool.pool.root().unwrap();
    let place = Place { dir: root, path: path.as_bytes() };
    let Ok(top) = pool.pool.resolve(place, true, &mut escape) else { return };
    let mut stack = vec![(root, path.trim_start_matches('/').as_bytes().to_vec(), top.attr.ino)];
    while let Some((parent, name, ino)) = stack.last().cloned() {
        let mut cursor = Box::new(pool.pool.read_directory(ino));
        let mut deeper = None;
        while let Some(entry) = cursor.next(pool.pool).unwrap() {
            let (inner, kind, inner_name) = (entry.ino, entry.kind, entry.name.to_vec());
            if kind == forebay_types::Kind::Directory {
                deeper = Some((ino, inner_name, inner));
                break;
            }
            pool.pool.unlink_in(ino, &inner_name).unwrap();
        }
        match deeper {
            Some(next) => stack.push(next),
            None => {
                pool.pool.remove_directory_in(parent, &name).unwrap();
                stack.pop();
            }
        }
    }
}
