//! A tree with injected faults, and the engine's reaction: tests of failures that are too rare on a real file system.
//! Each detector has its canary test here: corruption is injected and must be found.

use std::fs::Permissions;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::Arc;

use forebay_types::{Code, Kind, Timestamp};

use crate::kernel_file::KernelFile;
use crate::leftovers::remove_tree;
use crate::names::{Tag, Use};
use crate::posix::PosixTree;
use crate::run::stage;
use crate::tree::{File, Meta, Names, Object, OwnerAndMode, Space, Tree, Wanted};
use crate::trees::{assert_no_temporaries, assert_same, noise, snapshot, write, Scratch};
use crate::{Pair, Progress, Quiet, StageOptions, StageReport};

/// The faults and their times. A count runs down to zero at the call that fails; a negative count never does.
#[derive(Debug)]
struct Plan {
    /// A byte of this write is flipped.
    corrupt_write: AtomicI64,
    /// This write fails with ENOSPC, and all after it.
    full_from_write: AtomicI64,
    /// This rename fails.
    fail_rename: AtomicI64,
    /// Number of calls of a file's `version` that report a change.
    changes: AtomicI64,
    /// Renames with flags are refused, as on NFS, and a directory that is not writable keeps its parent, as for other
    /// users than root.
    like_nfs: bool,
    /// Files have no descriptor and report no holes, like striped ones.
    striped: AtomicBool,
    /// Directories cannot be synced.
    fail_sync: bool,
    /// Names that contain this cannot be opened.
    unreadable: &'static [u8],
    unreadable_as: Code,
    writes: AtomicU64,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            corrupt_write: AtomicI64::new(-1),
            full_from_write: AtomicI64::new(-1),
            fail_rename: AtomicI64::new(-1),
            changes: AtomicI64::new(0),
            like_nfs: false,
            striped: AtomicBool::new(false),
            fail_sync: false,
            unreadable: b"",
            unreadable_as: Code::AccessDenied,
            writes: AtomicU64::new(0),
        }
    }
}

/// True at the call at which the count reaches zero.
fn due(count: &AtomicI64) -> bool {
    count.load(Ordering::Relaxed) >= 0 && count.fetch_sub(1, Ordering::Relaxed) == 0
}

struct Faulty {
    inner: PosixTree,
    plan: Arc<Plan>,
}

struct FaultyFile {
    inner: KernelFile,
    plan: Arc<Plan>,
}

fn faulty(plan: Plan) -> Faulty {
    Faulty { inner: PosixTree::new(), plan: Arc::new(plan) }
}

impl FaultyFile {
    fn is_striped(&self) -> bool {
        self.plan.striped.load(Ordering::Relaxed)
    }
}

impl File for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        // Any read may be short.
        let most = buffer.len().min(100_000);
        self.inner.read_at(&mut buffer[..most], offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Code> {
        self.plan.writes.fetch_add(1, Ordering::Relaxed);
        if self.plan.full_from_write.load(Ordering::Relaxed) >= 0
            && self.plan.writes.load(Ordering::Relaxed) as i64
                > self.plan.full_from_write.load(Ordering::Relaxed)
        {
            return Err(Code::NoSpace);
        }
        let data = &data[..data.len().min(100_000)];
        if due(&self.plan.corrupt_write) {
            let mut wrong = data.to_vec();
            let middle = wrong.len() / 2;
            wrong[middle] ^= 0x10;
            return self.inner.write_at(&wrong, offset);
        }
        self.inner.write_at(data, offset)
    }

    fn set_size(&self, bytes: u64) -> Result<(), Code> {
        self.inner.set_size(bytes)
    }

    fn version(&self) -> Result<(u64, Timestamp), Code> {
        let (size, mtime) = self.inner.version()?;
        // One step, since threads that copy at the same time may each take the last change.
        let less = |n: i64| (n > 0).then(|| n - 1);
        if self.plan.changes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return Ok((size, Timestamp { sec: mtime.sec + 1, ..mtime }));
        }
        Ok((size, mtime))
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        if self.is_striped() {
            return Ok(Some(within).filter(|range| !range.is_empty()));
        }
        self.inner.next_data(within)
    }

    fn knows_holes(&self) -> bool {
        !self.is_striped()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor().filter(|_| !self.is_striped())
    }

    fn start_sync(&self) {
        self.inner.start_sync();
    }

    fn sync(&self) -> Result<(), Code> {
        self.inner.sync()
    }

    fn forget_cached(&self) {
        self.inner.forget_cached();
    }
}

fn plain<'a>(object: Object<'a, Faulty>) -> Object<'a, PosixTree> {
    match object {
        Object::File(file) => Object::File(&file.inner),
        Object::Directory(fd) => Object::Directory(fd),
        Object::Entry(fd, name) => Object::Entry(fd, name),
    }
}

impl Tree for Faulty {
    type Directory = OwnedFd;
    type File = FaultyFile;

    fn title(&self) -> &'static str {
        "the test"
    }

    fn open_path(&self, path: &[u8]) -> Result<(OwnedFd, Meta), Code> {
        self.inner.open_path(path)
    }

    fn open_directory(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<(OwnedFd, Meta), Code> {
        self.inner.open_directory(at, name, follow)
    }

    fn list(&self, at: &OwnedFd, cursor: u64, names: &mut Names) -> Result<Option<u64>, Code> {
        // Like a file system that does not report kinds.
        let mut all = Names::default();
        let next = self.inner.list(at, cursor, &mut all)?;
        all.iter().for_each(|(name, _)| names.push(name, None));
        Ok(next)
    }

    fn stat(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<Meta, Code> {
        self.inner.stat(at, name, follow)
    }

    fn open(&self, at: &OwnedFd, name: &[u8], follow: bool) -> Result<(FaultyFile, Meta), Code> {
        let hidden = self.plan.unreadable;
        if !hidden.is_empty() && name.windows(hidden.len()).any(|w| w == hidden) {
            return Err(self.plan.unreadable_as);
        }
        let (inner, meta) = self.inner.open(at, name, follow)?;
        Ok((FaultyFile { inner, plan: self.plan.clone() }, meta))
    }

    fn create(&self, at: &OwnedFd, name: &[u8], wanted: &Wanted) -> Result<FaultyFile, Code> {
        Ok(FaultyFile { inner: self.inner.create(at, name, wanted)?, plan: self.plan.clone() })
    }

    fn make_directory(&self, at: &OwnedFd, name: &[u8], mode: u32) -> Result<(), Code> {
        self.inner.make_directory(at, name, mode)
    }

    fn symlink(&self, target: &[u8], at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        self.inner.symlink(target, at, name)
    }

    fn read_link(&self, at: &OwnedFd, name: &[u8]) -> Result<Vec<u8>, Code> {
        self.inner.read_link(at, name)
    }

    fn make_node(&self, at: &OwnedFd, name: &[u8], meta: &Meta) -> Result<(), Code> {
        self.inner.make_node(at, name, meta)
    }

    fn link(&self, _: (&OwnedFd, &[u8]), _: (&OwnedFd, &[u8])) -> Result<(), Code> {
        // Like a file system without hard links.
        Err(Code::NotSupported)
    }

    fn rename(&self, from: (&OwnedFd, &[u8]), to: (&OwnedFd, &[u8]), flags: u32) -> Result<(), Code> {
        if due(&self.plan.fail_rename) {
            return Err(Code::Io);
        }
        if self.plan.like_nfs && flags != 0 {
            return Err(Code::Invalid);
        }
        let meta = self.inner.stat(from.0, from.1, false)?;
        let stays =
            || Ok(self.inner.stat(from.0, b".", false)?.ino == self.inner.stat(to.0, b".", false)?.ino);
        if self.plan.like_nfs && meta.kind == Kind::Directory && meta.mode & 0o200 == 0 && !stays()? {
            return Err(Code::AccessDenied);
        }
        self.inner.rename(from, to, flags)
    }

    fn unlink(&self, at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        self.inner.unlink(at, name)
    }

    fn remove_directory(&self, at: &OwnedFd, name: &[u8]) -> Result<(), Code> {
        self.inner.remove_directory(at, name)
    }

    fn check_writable(&self, at: &OwnedFd) -> Result<(), Code> {
        self.inner.check_writable(at)
    }

    fn set_owner(&self, object: Object<'_, Self>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code> {
        self.inner.set_owner(plain(object), uid, gid)
    }

    fn set_mode(&self, object: Object<'_, Self>, mode: u32) -> Result<(), Code> {
        self.inner.set_mode(plain(object), mode)
    }

    fn owner_and_mode(&self, object: Object<'_, Self>) -> Result<OwnerAndMode, Code> {
        self.inner.owner_and_mode(plain(object))
    }

    fn set_times(&self, object: Object<'_, Self>, atime: Timestamp, mtime: Timestamp) -> Result<(), Code> {
        self.inner.set_times(plain(object), atime, mtime)
    }

    fn list_xattrs(&self, object: Object<'_, Self>, names: &mut Vec<u8>) -> Result<(), Code> {
        self.inner.list_xattrs(plain(object), names)
    }

    fn get_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &mut Vec<u8>) -> Result<(), Code> {
        self.inner.get_xattr(plain(object), name, value)
    }

    fn set_xattr(&self, _: Object<'_, Self>, _: &[u8], _: &[u8]) -> Result<(), Code> {
        // Like a file system without extended attributes.
        Err(Code::NotSupported)
    }

    fn space(&self, at: &OwnedFd) -> Result<Space, Code> {
        let space = self.inner.space(at)?;
        let full = self.plan.full_from_write.load(Ordering::Relaxed) >= 0;
        Ok(if full { Space { free_bytes: 4096, ..space } } else { space })
    }

    fn sync_directory(&self, at: &OwnedFd) -> Result<(), Code> {
        if self.plan.fail_sync {
            return Err(Code::Io);
        }
        self.inner.sync_directory(at)
    }

    fn is_remote(&self, _: &OwnedFd) -> bool {
        false
    }
}

const OPTIONS: StageOptions = StageOptions {
    threads: 2,
    verify: false,
    all_or_nothing: false,
    resume: true,
    transfer_bytes: 1 << 20,
    preserve_owner: None,
    durable: None,
};

fn pair(source: &Path, destination: &Path) -> [Pair; 1] {
    [Pair { source: source.into(), destination: destination.into() }]
}

fn run(
    from: Plan,
    to: Plan,
    source: &Path,
    destination: &Path,
    options: &StageOptions,
    durable: bool,
) -> StageReport {
    stage(&faulty(from), &faulty(to), &pair(source, destination), options, durable, &Quiet).unwrap()
}

/// Some files: small, of several transfers, large with holes.
fn make(scratch: &Scratch) -> (PathBuf, PathBuf) {
    let store = scratch.join("store");
    std::fs::create_dir_all(store.join("d/e")).unwrap();
    let top = rustix::fs::open(&store, rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty()).unwrap();
    write(&top, b"small", 0o644, &[(0, &noise(5000, 1))], 5000);
    write(&top, b"medium", 0o600, &[(0, &noise(3_000_000, 2))], 3_000_000);
    let piece = noise(1_000_000, 3);
    write(&top, b"large", 0o640, &[(0, &piece), (33 << 20, &piece), (69 << 20, &piece)], 100 << 20);
    for i in 0..50 {
        std::fs::write(store.join(format!("d/e/f{i}")), noise(i * 10, i as u64)).unwrap();
    }
    (store, scratch.join("pool"))
}

#[test]
fn verify_of_an_injected_corruption_finds_it_and_leaves_no_copy() {
    for durable in [false, true] {
        let scratch = Scratch::new();
        let (store, pool) = make(&scratch);
        // The order of writes differs from run to run. Each corrupted write must be found.
        for n in 0..60 {
            let options = StageOptions { verify: true, resume: false, ..OPTIONS };
            let plan = Plan { corrupt_write: AtomicI64::new(n), ..Plan::default() };
            let report = run(Plan::default(), plan, &store, &pool, &options, durable);
            assert_eq!(report.errors_total, 1, "write {n}: {:?}", report.errors);
            assert_eq!(report.errors[0].code, Code::Corrupt);
            assert_eq!(report.outcome().unwrap_err().code, Code::Corrupt);
            let bad = PathBuf::from(&report.errors[0].path);
            assert!(n > 0 || !bad.exists(), "the corrupt copy of {} is there", bad.display());
            assert_no_temporaries(&pool);
            if n % 20 == 0 {
                std::fs::remove_dir_all(&pool).unwrap();
            }
        }
    }
}

#[test]
fn corruption_without_verify_is_not_noticed_which_shows_that_it_is_injected() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let plan = Plan { corrupt_write: AtomicI64::new(0), ..Plan::default() };
    let report = run(Plan::default(), plan, &store, &pool, &OPTIONS, false);
    assert!(report.is_complete());
    assert_ne!(snapshot(&store), snapshot(&pool));
}

#[test]
fn resume_with_verify_of_a_corrupted_copy_copies_it_anew() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let plan = Plan { corrupt_write: AtomicI64::new(0), ..Plan::default() };
    run(Plan::default(), plan, &store, &pool, &OPTIONS, false);
    let options = StageOptions { verify: true, ..OPTIONS };
    let report = run(Plan::default(), Plan::default(), &store, &pool, &options, false);
    assert_eq!((report.files, report.skipped_files, report.verified), (1, 52, 53));
    assert_same(&snapshot(&store), &snapshot(&pool));
}

#[test]
fn striped_files_keep_their_holes_and_content() {
    let striped = || Plan { striped: AtomicBool::new(true), ..Plan::default() };
    for verify in [false, true] {
        let scratch = Scratch::new();
        let (store, pool) = make(&scratch);
        let back = scratch.join("back");
        let options = StageOptions { verify, ..OPTIONS };
        assert!(run(Plan::default(), striped(), &store, &pool, &options, false).is_complete());
        assert_same(&snapshot(&store), &snapshot(&pool));
        let report = run(striped(), Plan::default(), &pool, &back, &options, true);
        assert!(report.is_complete() && report.holes_bytes > 90 << 20, "{report:?}");
        assert_same(&snapshot(&store), &snapshot(&back));
    }
}

#[test]
fn source_that_changes_once_is_copied_again_and_one_that_never_rests_is_reported() {
    for durable in [false, true] {
        let scratch = Scratch::new();
        let (store, pool) = make(&scratch);
        let plan = Plan { changes: AtomicI64::new(2), ..Plan::default() };
        let report = run(plan, Plan::default(), &store, &pool, &OPTIONS, durable);
        assert!(report.is_complete() && report.retries == 2, "{report:?}");
        assert_same(&snapshot(&store), &snapshot(&pool));

        let never = scratch.join("never");
        let plan = Plan { changes: AtomicI64::new(i64::MAX), ..Plan::default() };
        let report = run(plan, Plan::default(), &store, &never, &OPTIONS, durable);
        assert_eq!(report.errors_total, 53);
        assert!(report.errors.iter().all(|e| e.code == Code::Busy && !e.cure.is_empty()));
        assert_eq!(std::fs::read_dir(&never).unwrap().count(), 1, "only the directory");
        assert_no_temporaries(&never);
    }
}

#[test]
fn unreadable_file_within_is_reported_and_the_others_are_staged() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let plan = || Plan { unreadable: b"f17", ..Plan::default() };
    let report = run(plan(), Plan::default(), &store, &pool, &OPTIONS, true);
    assert_eq!((report.files, report.errors_total), (52, 1));
    assert_eq!((report.errors_unreachable, report.stopped), (0, false), "it is there");
    let error = &report.errors[0];
    assert_eq!(error.code, Code::AccessDenied);
    assert!(error.path.ends_with("store/d/e/f17") && error.cure.contains("chmod"), "{error:?}");
    let outcome = report.outcome().unwrap_err();
    assert!(outcome.what.contains("f17") && outcome.why.contains("Permission denied"), "{outcome}");

    let nothing = scratch.join("deeper/nothing");
    let options = StageOptions { all_or_nothing: true, ..OPTIONS };
    let report = run(plan(), Plan::default(), &store, &nothing, &options, true);
    assert!(report.rolled_back && !report.is_complete());
    assert!(!scratch.join("deeper").exists(), "directories made for it are gone, too");
    assert_no_temporaries(&scratch.0);
}

#[test]
fn directory_that_cannot_be_synced_is_reported_with_its_path() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let plan = Plan { fail_sync: true, ..Plan::default() };
    let report = run(Plan::default(), plan, &store, &pool, &OPTIONS, true);
    assert_eq!(report.files, 53);
    let mut paths: Vec<PathBuf> = report.errors.iter().map(|e| PathBuf::from(&e.path)).collect();
    paths.sort();
    assert_eq!(paths, [scratch.0.clone(), pool.clone(), pool.join("d"), pool.join("d/e")]);
    assert_eq!((report.errors_total, report.errors_unreachable), (4, 0), "the destination failed");
}

#[test]
fn files_that_the_source_has_lost_are_counted_apart_and_stop_nothing() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let plan = Plan { unreadable: b"f17", unreadable_as: Code::Io, ..Plan::default() };
    let report = run(plan, Plan::default(), &store, &pool, &OPTIONS, true);
    assert_eq!((report.files, report.errors_total, report.errors_unreachable), (52, 1, 1));
    assert!(!report.stopped);
}

#[test]
fn full_destination_stops_says_what_is_missing_and_leaves_only_whole_files() {
    for durable in [false, true] {
        for n in [0, 5, 20] {
            let scratch = Scratch::new();
            let (store, pool) = make(&scratch);
            let full = || Plan { full_from_write: AtomicI64::new(n), ..Plan::default() };
            let report = run(Plan::default(), full(), &store, &pool, &OPTIONS, durable);
            let error = &report.errors[0];
            assert_eq!(error.code, Code::NoSpace);
            assert!(error.what.contains("needs") && error.what.contains("4.0 KiB are free"), "{error:?}");
            assert!(error.cure.contains("free space"), "{error:?}");
            assert!(report.errors_total <= 3, "it stops: {:?}", report.errors);
            assert_eq!((report.stopped, report.errors_unreachable), (true, 0));
            let (all, some) = (snapshot(&store), snapshot(&pool));
            for (path, item) in some.iter().filter(|(_, item)| item.kind == 0o100_000) {
                assert_eq!(Some(item), all.get(path), "{}", path.escape_ascii());
            }
            assert_no_temporaries(&pool);
            assert!(run(Plan::default(), Plan::default(), &store, &pool, &OPTIONS, durable).is_complete());
            assert_same(&all, &snapshot(&pool));

            let nothing = scratch.join("nothing");
            let options = StageOptions { all_or_nothing: true, ..OPTIONS };
            let report = run(Plan::default(), full(), &store, &nothing, &options, durable);
            assert!(report.rolled_back && !nothing.exists());
            assert_no_temporaries(&scratch.0);
        }
    }
}

#[test]
fn all_or_nothing_whose_moves_fail_half_way_leaves_the_destination_as_it_was() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    std::fs::create_dir_all(pool.join("d/e")).unwrap();
    for i in 10..30 {
        std::fs::write(pool.join(format!("d/e/f{i}")), b"before").unwrap();
    }
    std::fs::write(pool.join("d/other"), b"other").unwrap();
    let before = snapshot(&pool);
    let options = StageOptions { all_or_nothing: true, ..OPTIONS };
    let mut failed = 0;
    // The renames of files that are not small come first, then those of the moves.
    for n in 0..70 {
        let plan = Plan { fail_rename: AtomicI64::new(n), ..Plan::default() };
        let report = run(Plan::default(), plan, &store, &pool, &options, false);
        if !report.rolled_back {
            // Everything was moved. A failed rename can only have been one for the removal of replaced objects.
            assert_eq!(std::fs::read(pool.join("d/e/f10")).unwrap(), noise(100, 10));
            break;
        }
        failed += 1;
        assert!(!report.is_complete());
        let mut after = snapshot(&pool);
        for (path, item) in &mut after {
            // Directories' times change with moved entries.
            if let Some(was) = before.get(path).filter(|was| was.kind == 0o040_000) {
                (item.mtime, item.atime) = (was.mtime, was.atime);
            }
        }
        assert_same(&before, &after);
    }
    assert!((50..70).contains(&failed), "{failed} of the moves were made to fail");
}

#[test]
fn tree_of_a_file_system_without_rename_flags_is_removed() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.join("tree/a/b/c")).unwrap();
    // Names that the removal would give to the directories that it moves up.
    for moved in ["1.moved", "2.moved", "3.moved/4.moved"] {
        std::fs::create_dir_all(scratch.join("tree").join(moved)).unwrap();
    }
    for file in ["f", "a/f", "a/b/f", "a/b/c/f", "2.moved/f", "3.moved/4.moved/f"] {
        std::fs::write(scratch.join("tree").join(file), b"f").unwrap();
    }
    let tree = faulty(Plan { like_nfs: true, ..Plan::default() });
    let (at, _) = tree.open_path(scratch.0.as_os_str().as_encoded_bytes()).unwrap();
    remove_tree(&tree, &at, b"tree", &Tag::new()).unwrap();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
}

#[test]
fn tree_of_a_killed_staging_is_adopted_without_rename_flags() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let options = StageOptions { all_or_nothing: true, ..OPTIONS };
    for like_nfs in [false, true] {
        let dead = Tag::of_a_process_that_has_ended().temporary(b"pool", Use::Part);
        let left = scratch.join(std::str::from_utf8(&dead).unwrap());
        assert!(run(Plan::default(), Plan::default(), &store, &left, &OPTIONS, false).is_complete());
        let plan = Plan { like_nfs, ..Plan::default() };
        let report = run(Plan::default(), plan, &store, &pool, &options, false);
        assert_eq!((report.skipped_files, report.leftovers_removed), (53, 0), "{report:?}");
        assert!(report.is_complete() && !left.exists());
        assert_same(&snapshot(&store), &snapshot(&pool));
        std::fs::remove_dir_all(&pool).unwrap();
    }
}

#[test]
fn leftover_of_a_killed_staging_in_removal_by_another_killed_staging_is_removed() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    let dead = Tag::of_a_process_that_has_ended();
    let part = Tag::of_another_host().temporary(b"pool", Use::Part);
    let gone = scratch.join(std::str::from_utf8(&dead.temporary(&part, Use::Gone)).unwrap());
    std::fs::create_dir_all(gone.join("d")).unwrap();
    let options = StageOptions { all_or_nothing: true, ..OPTIONS };
    let report = run(Plan::default(), Plan::default(), &store, &pool, &options, false);
    assert_eq!((report.leftovers_removed, gone.exists()), (1, false), "{report:?}");
}

#[test]
fn directory_that_is_not_writable_is_moved_without_rename_flags() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    std::fs::set_permissions(store.join("d"), Permissions::from_mode(0o555)).unwrap();
    std::fs::create_dir(&pool).unwrap();
    let options = StageOptions { all_or_nothing: true, ..OPTIONS };
    let plan = Plan { like_nfs: true, ..Plan::default() };
    let report = run(Plan::default(), plan, &store, &pool, &options, false);
    assert!(report.is_complete(), "{report:?}");
    assert_same(&snapshot(&store), &snapshot(&pool));
}

#[test]
fn hard_links_and_attributes_that_cannot_be_kept_are_warnings() {
    let scratch = Scratch::new();
    let (store, pool) = make(&scratch);
    std::fs::hard_link(store.join("small"), store.join("small-too")).unwrap();
    let file = std::fs::File::open(store.join("small")).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    let has_xattrs = rustix::fs::fsetxattr(&file, "user.forebay-test", b"x", flags).is_ok();
    let report = run(Plan::default(), Plan::default(), &store, &pool, &OPTIONS, true);
    report.outcome().unwrap();
    assert_eq!((report.files, report.hard_links), (54, 0));
    let warned = |text: &str| report.warnings.iter().any(|w| w.what.contains(text) && w.count >= 1);
    assert!(warned("hard link not kept"), "{:?}", report.warnings);
    assert!(!has_xattrs || warned("user.forebay-test not kept"), "{:?}", report.warnings);
    assert_eq!(std::fs::read(pool.join("small-too")).unwrap(), std::fs::read(pool.join("small")).unwrap());
}

/// Stops after a number of files.
struct StopAfter(AtomicI64);

impl Progress for StopAfter {
    fn done(&self, files: u64, _: u64) {
        self.0.fetch_sub(files as i64, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) <= 0
    }
}

#[test]
fn cancel_at_any_file_leaves_whole_files_and_what_resumes() {
    for durable in [false, true] {
        let scratch = Scratch::new();
        let (store, pool) = make(&scratch);
        let all = snapshot(&store);
        for after in [0, 1, 10, 30] {
            for all_or_nothing in [false, true] {
                let _ = std::fs::remove_dir_all(&pool);
                let options = StageOptions { all_or_nothing, ..OPTIONS };
                let trees = (faulty(Plan::default()), faulty(Plan::default()));
                let stop = StopAfter(AtomicI64::new(after));
                let report =
                    stage(&trees.0, &trees.1, &pair(&store, &pool), &options, durable, &stop).unwrap();
                assert!(report.cancelled, "{report:?}");
                assert_eq!(report.outcome().unwrap_err().code, Code::Interrupted);
                assert_no_temporaries(&scratch.0);
                if all_or_nothing {
                    assert!(report.rolled_back && !pool.exists());
                    continue;
                }
                assert!(run(Plan::default(), Plan::default(), &store, &pool, &OPTIONS, durable).is_complete());
                assert_same(&all, &snapshot(&pool));
            }
        }
    }
}

/// Adds up the reports.
#[derive(Default)]
struct Sums {
    found: (AtomicU64, AtomicU64),
    done: (AtomicU64, AtomicU64),
    scanned: AtomicBool,
}

impl Progress for Sums {
    fn found(&self, files: u64, bytes: u64) {
        self.found.0.fetch_add(files, Ordering::Relaxed);
        self.found.1.fetch_add(bytes, Ordering::Relaxed);
    }

    fn done(&self, files: u64, bytes: u64) {
        self.done.0.fetch_add(files, Ordering::Relaxed);
        self.done.1.fetch_add(bytes, Ordering::Relaxed);
    }

    fn scanning_finished(&self) {
        self.scanned.store(true, Ordering::Relaxed);
    }
}

#[test]
fn progress_sums_agree_at_the_end() {
    // Without and with files that are copied again because they changed.
    for changes in [0, 2] {
        let scratch = Scratch::new();
        let (store, pool) = make(&scratch);
        let sums = Sums::default();
        let plan = Plan { changes: AtomicI64::new(changes), ..Plan::default() };
        let trees = (faulty(plan), faulty(Plan::default()));
        let report = stage(&trees.0, &trees.1, &pair(&store, &pool), &OPTIONS, false, &sums).unwrap();
        assert!(report.is_complete() && report.retries == changes as u64, "{report:?}");
        let value = |n: &AtomicU64| n.load(Ordering::Relaxed);
        assert_eq!((value(&sums.found.0), value(&sums.found.1)), (value(&sums.done.0), value(&sums.done.1)));
        assert_eq!(value(&sums.done.0), 53);
        assert!(value(&sums.done.1) > 100 << 20 && sums.scanned.into_inner());
    }
}

#[test]
fn progress_of_a_large_file_that_is_copied_again_counts_its_bytes_once() {
    let scratch = Scratch::new();
    std::fs::write(scratch.join("large"), noise(70 << 20, 1)).unwrap();
    let sums = Sums::default();
    let plan = Plan { changes: AtomicI64::new(2), ..Plan::default() };
    let trees = (faulty(plan), faulty(Plan::default()));
    let pair = pair(&scratch.join("large"), &scratch.join("copy"));
    let report = stage(&trees.0, &trees.1, &pair, &OPTIONS, false, &sums).unwrap();
    assert!(report.is_complete() && report.retries == 2, "{report:?}");
    assert_eq!(sums.done.1.into_inner(), 70 << 20);
    assert_eq!(sums.found.1.into_inner(), 70 << 20);
}
