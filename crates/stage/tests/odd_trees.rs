//! Trees with all odd objects are unchanged after stage-in and stage-out.

mod trees;

use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, StageReport, Way};
use forebay_types::Code;
use rustix::fs::Mode;
use trees::*;

fn pair(source: &Path, destination: &Path) -> Pair {
    Pair { source: source.into(), destination: destination.into() }
}

#[track_caller]
fn stage(way: Way, source: &Path, destination: &Path, options: &StageOptions) -> StageReport {
    let report = stage_between(way, &[pair(source, destination)], options, &Quiet).unwrap();
    report.outcome().unwrap();
    report
}

#[test]
fn stage_in_and_out_of_an_odd_tree_keeps_everything() {
    let scratch = Scratch::new();
    let (store, pool, back) = (scratch.join("store"), scratch.join("pool"), scratch.join("back"));
    make_odd(&store);
    let before = snapshot(&store);
    let report = stage(Way::In, &store, &pool, &StageOptions::default());
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    assert_same(&before, &snapshot(&pool));
    assert_same(&before, &snapshot(&store));
    let kinds = |kind: u32| before.values().filter(|item| item.kind == kind).count() as u64;
    let linked =
        before.iter().filter(|(path, item)| item.linked_to.as_ref().is_some_and(|first| first != *path));
    assert_eq!(report.hard_links, linked.count() as u64);
    assert_eq!(report.directories, kinds(0o040_000));
    assert_eq!(
        report.files + report.symlinks + report.special + report.hard_links + report.directories,
        before.len() as u64
    );
    assert!(report.holes_bytes > 5 << 30, "holes are not copied: {report:?}");
    assert!(report.bytes < 100 << 20, "{report:?}");

    let report = stage(Way::Out, &pool, &back, &StageOptions { verify: true, ..StageOptions::default() });
    assert_eq!(report.verified, report.files);
    assert_same(&before, &snapshot(&back));
    assert_no_temporaries(&back);
}

#[test]
fn stage_again_copies_nothing_and_changes_nothing() {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    make_odd(&store);
    for way in [Way::In, Way::Out] {
        let first = stage(way, &store, &pool, &StageOptions::default());
        let before = snapshot(&pool);
        for verify in [false, true] {
            let again = stage(way, &store, &pool, &StageOptions { verify, ..StageOptions::default() });
            assert_eq!(
                (again.files, again.bytes, again.hard_links, again.symlinks, again.special),
                (0, 0, 0, 0, 0)
            );
            assert!(again.skipped_files >= first.files, "{again:?}");
        }
        assert_same(&before, &snapshot(&pool));
        let anew = stage(way, &store, &pool, &StageOptions { resume: false, ..StageOptions::default() });
        assert_eq!(anew.skipped_files, 0);
        assert_same(&before, &snapshot(&pool));
    }
}

#[test]
fn stage_all_or_nothing_of_an_odd_tree_keeps_everything() {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    make_odd(&store);
    let before = snapshot(&store);
    let options = StageOptions { all_or_nothing: true, ..StageOptions::default() };
    for way in [Way::In, Way::Out] {
        // First to an empty destination, then merged into the result.
        stage(way, &store, &pool, &options);
        assert_same(&before, &snapshot(&pool));
        stage(way, &store, &pool, &options);
        assert_same(&before, &snapshot(&pool));
        assert_no_temporaries(&scratch.0);
    }
}

#[test]
fn stage_onto_other_content_replaces_files_and_keeps_what_is_not_in_the_source() {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    std::fs::create_dir_all(store.join("d")).unwrap();
    std::fs::write(store.join("d/f"), b"new").unwrap();
    std::fs::write(store.join("same-size"), b"new").unwrap();
    std::os::unix::fs::symlink("new", store.join("link")).unwrap();
    for all_or_nothing in [false, true] {
        for way in [Way::In, Way::Out] {
            let _ = std::fs::remove_dir_all(&pool);
            std::fs::create_dir_all(pool.join("d")).unwrap();
            std::fs::write(pool.join("d/f"), b"older").unwrap();
            std::fs::write(pool.join("d/kept"), b"kept").unwrap();
            std::fs::write(pool.join("same-size"), b"old").unwrap();
            set_times(rustix::fs::CWD, pool.join("same-size").as_os_str().as_encoded_bytes(), (1, 1), (1, 1));
            std::fs::write(pool.join("link"), b"was a file").unwrap();
            let reader = std::fs::File::open(pool.join("d/f")).unwrap();
            stage(way, &store, &pool, &StageOptions { all_or_nothing, ..StageOptions::default() });
            assert_eq!(std::fs::read(pool.join("d/f")).unwrap(), b"new");
            assert_eq!(std::fs::read(pool.join("same-size")).unwrap(), b"new");
            assert_eq!(std::fs::read(pool.join("d/kept")).unwrap(), b"kept");
            assert_eq!(std::fs::read_link(pool.join("link")).unwrap(), PathBuf::from("new"));
            assert_eq!(
                std::io::read_to_string(reader).unwrap(),
                "older",
                "who had it open reads on undisturbed"
            );
            assert_no_temporaries(&pool);
        }
    }
}

#[test]
fn stage_with_every_number_of_threads_and_transfer_size_gives_the_same() {
    let scratch = Scratch::new();
    let store = scratch.join("store");
    make_odd(&store);
    let before = snapshot(&store);
    for (i, (threads, transfer_bytes)) in [(1, 1), (2, 100_000), (7, 64 << 20)].into_iter().enumerate() {
        let pool = scratch.join(&format!("pool-{i}"));
        stage(Way::In, &store, &pool, &StageOptions { threads, transfer_bytes, ..StageOptions::default() });
        assert_same(&before, &snapshot(&pool));
        clear(&rustix::fs::open(&pool, rustix::fs::OFlags::DIRECTORY, Mode::empty()).unwrap());
    }
}

#[test]
fn stage_by_the_rules_of_slashes_lands_where_they_say() {
    let scratch = Scratch::new();
    let at = |name: &str| scratch.join(name);
    std::fs::create_dir_all(at("src/d")).unwrap();
    std::fs::write(at("src/d/f"), b"f").unwrap();
    std::fs::create_dir_all(at("existing")).unwrap();
    std::os::unix::fs::symlink("src", at("link-to-src")).unwrap();
    std::os::unix::fs::symlink("existing", at("link-to-existing")).unwrap();
    for (source, destination, expected) in [
        ("src", "new", "new/d/f"),
        ("src/", "new2/deeper", "new2/deeper/d/f"),
        ("src", "into/", "into/src/d/f"),
        ("src/", "contents/", "contents/d/f"),
        ("src/d/f", "file", "file"),
        ("src/d/f", "existing", "existing/f"),
        ("src/d/f", "made/for/it", "made/for/it"),
        ("link-to-src", "followed", "followed/d/f"),
        ("src", "link-to-existing", "existing/d/f"),
    ] {
        stage(Way::In, &at(source), &at(destination), &StageOptions::default());
        assert_eq!(std::fs::read(at(expected)).unwrap(), b"f", "{source} to {destination}");
    }
    assert!(std::fs::symlink_metadata(at("link-to-existing")).unwrap().is_symlink());
}

#[test]
fn stage_of_what_cannot_be_is_refused_before_anything_is_made() {
    let scratch = Scratch::new();
    let at = |name: &str| scratch.join(name);
    std::fs::create_dir(at("dir")).unwrap();
    std::fs::write(at("file"), b"f").unwrap();
    std::fs::write(at("other"), b"o").unwrap();
    std::os::unix::fs::symlink("circle", at("circle")).unwrap();
    let before = snapshot(&scratch.0);
    let good = pair(&at("file"), &at("new/copy"));
    for (source, destination, code) in [
        ("missing", "x", Code::NotFound),
        ("file/", "x", Code::NotDirectory),
        ("circle", "x", Code::TooManySymlinks),
        ("dir", "file", Code::NotDirectory),
        ("file", "other/x", Code::NotDirectory),
        ("other", "new/copy", Code::Exists),
    ] {
        for all_or_nothing in [false, true] {
            let pairs = [good.clone(), pair(&at(source), &at(destination))];
            let options = StageOptions { all_or_nothing, ..StageOptions::default() };
            let error = stage_between(Way::In, &pairs, &options, &Quiet).unwrap_err();
            assert_eq!(error.code, code, "{source} to {destination}: {error}");
            assert!(!error.why.is_empty() && !error.cure.is_empty(), "{error:?}");
            assert_eq!(before.keys().collect::<Vec<_>>(), snapshot(&scratch.0).keys().collect::<Vec<_>>());
        }
    }
    let error = stage_between(Way::In, &[], &StageOptions::default(), &Quiet).unwrap_err();
    assert_eq!(error.code, Code::Invalid);
}

#[test]
fn stage_of_many_pairs_by_manifest_lands_each() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.join("in")).unwrap();
    let mut text = String::from("# many\n");
    for i in 0..500 {
        std::fs::write(scratch.join(&format!("in/f {i}")), i.to_string()).unwrap();
        let top = scratch.0.display();
        text.push_str(&format!("\"{top}/in/f {i}\" {top}/out/{}/g{i}\n", i % 7));
    }
    std::fs::write(scratch.join("list"), text).unwrap();
    let pairs = forebay_stage::Manifest::read(&scratch.join("list")).unwrap();
    for all_or_nothing in [true, false] {
        let options = StageOptions { all_or_nothing, ..StageOptions::default() };
        let report = stage_between(Way::Out, &pairs, &options, &Quiet).unwrap();
        report.outcome().unwrap();
        for i in 0..500 {
            assert_eq!(
                std::fs::read(scratch.join(&format!("out/{}/g{i}", i % 7))).unwrap(),
                i.to_string().as_bytes()
            );
        }
        assert_no_temporaries(&scratch.0);
    }
}

#[test]
fn stage_of_names_that_are_not_utf8_reports_them_readably() {
    let scratch = Scratch::new();
    let odd = |prefix: &[u8]| PathBuf::from(std::ffi::OsString::from_vec([prefix, b"\xff\n"].concat()));
    let source = scratch.0.join(odd(b"no-such-"));
    let error = stage_between(Way::In, &[pair(&source, Path::new("/x"))], &StageOptions::default(), &Quiet)
        .unwrap_err();
    assert!(error.what.contains("no-such-\\xff\\x0a"), "{error}");
}
