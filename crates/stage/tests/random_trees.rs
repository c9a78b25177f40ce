//! Random trees are unchanged after stage-in and stage-out with random options, over random leftovers of earlier
//! versions.

mod trees;

use std::os::fd::OwnedFd;
use std::path::Path;

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, Way};
use proptest::prelude::*;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, XattrFlags};
use trees::*;

/// An object in a tree. Its directory is selected by number among those created so far.
#[derive(Clone, Debug)]
enum Thing {
    File {
        within: usize,
        name: Vec<u8>,
        mode: u32,
        pieces: Vec<(u32, u16)>,
        extra: u32,
        xattr: Option<Vec<u8>>,
    },
    Directory {
        within: usize,
        name: Vec<u8>,
        mode: u32,
    },
    Symlink {
        within: usize,
        name: Vec<u8>,
        target: Vec<u8>,
    },
    Fifo {
        within: usize,
        name: Vec<u8>,
    },
    HardLink {
        within: usize,
        name: Vec<u8>,
        of: usize,
    },
    Times {
        of: usize,
        atime: (i32, u32),
        mtime: (i32, u32),
    },
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_filter("not in names", |&b| b != 0 && b != b'/');
    // Few different names, so that files, directories and links collide under one; and some odd ones.
    prop_oneof![
        4 => (0u8..12).prop_map(|i| vec![b'a' + i]),
        1 => proptest::collection::vec(byte, 1..256),
    ]
    .prop_filter("not special", |name| name != b"." && name != b"..")
}

fn thing() -> impl Strategy<Value = Thing> {
    let within = 0usize..40;
    let mode = 0u32..0o7777;
    let pieces = proptest::collection::vec((0u32..600_000, 1u16..20_000), 0..4);
    let xattr = proptest::option::of(proptest::collection::vec(any::<u8>(), 0..100));
    let time = (any::<i32>(), 0u32..1_000_000_000);
    let target = proptest::collection::vec(1u8..=255, 1..300);
    prop_oneof![
        6 => (within.clone(), name(), mode.clone(), pieces, 0u32..100_000, xattr).prop_map(
            |(within, name, mode, pieces, extra, xattr)| Thing::File { within, name, mode, pieces, extra, xattr }),
        3 => (within.clone(), name(), mode).prop_map(|(within, name, mode)| Thing::Directory { within, name, mode }),
        1 => (within.clone(), name(), target).prop_map(|(within, name, target)| Thing::Symlink { within, name, target }),
        1 => (within.clone(), name()).prop_map(|(within, name)| Thing::Fifo { within, name }),
        2 => (within, name(), 0usize..40).prop_map(|(within, name, of)| Thing::HardLink { within, name, of }),
        3 => (0usize..40, time.clone(), time).prop_map(|(of, atime, mtime)| Thing::Times { of, atime, mtime }),
    ]
}

/// Creates the tree that the things describe. A thing whose name exists is skipped.
fn make(path: &Path, things: &[Thing]) {
    std::fs::create_dir(path).unwrap();
    let mut directories = vec![rustix::fs::open(path, OFlags::DIRECTORY, Mode::empty()).unwrap()];
    let mut made: Vec<(usize, Vec<u8>)> = Vec::new();
    let mut modes = Vec::new();
    let is_free =
        |at: &OwnedFd, name: &[u8]| rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).is_err();
    for thing in things {
        let within = match thing {
            Thing::File { within, .. }
            | Thing::Directory { within, .. }
            | Thing::Symlink { within, .. }
            | Thing::Fifo { within, .. }
            | Thing::HardLink { within, .. } => within % directories.len(),
            Thing::Times { .. } => 0,
        };
        let at = directories[within].try_clone().unwrap();
        match thing {
            Thing::File { name, mode, pieces, extra, xattr, .. } if is_free(&at, name) => {
                let content = noise(20_000, u64::from(*extra));
                let pieces: Vec<(u64, &[u8])> =
                    pieces.iter().map(|&(at, len)| (u64::from(at), &content[..len as usize])).collect();
                let size = pieces.iter().map(|(at, bytes)| at + bytes.len() as u64).max().unwrap_or(0);
                let file = write(&at, name, 0o600, &pieces, size + u64::from(*extra % 3) * u64::from(*extra));
                if let Some(value) = xattr {
                    let _ = rustix::fs::fsetxattr(&file, "user.random", value, XattrFlags::empty());
                }
                rustix::fs::fchmod(&file, Mode::from_raw_mode(mode | if is_root() { 0 } else { 0o400 }))
                    .unwrap();
                made.push((within, name.clone()));
            }
            Thing::Directory { name, mode, .. } if is_free(&at, name) => {
                directories.push(make_directory(&at, name));
                modes.push((directories.len() - 1, mode | if is_root() { 0 } else { 0o500 }));
            }
            Thing::Symlink { name, target, .. } if is_free(&at, name) => {
                rustix::fs::symlinkat(&target[..], &at, name).unwrap();
                made.push((within, name.clone()));
            }
            Thing::Fifo { name, .. } if is_free(&at, name) => {
                rustix::fs::mknodat(&at, name, FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
                made.push((within, name.clone()));
            }
            Thing::HardLink { name, of, .. } if is_free(&at, name) && !made.is_empty() => {
                let (other, first) = &made[of % made.len()];
                rustix::fs::linkat(&directories[*other], first, &at, name, AtFlags::empty()).unwrap();
                made.push((within, name.clone()));
            }
            Thing::Times { of, atime, mtime } if !made.is_empty() => {
                let (at, name) = &made[of % made.len()];
                let time = |t: &(i32, u32)| (i64::from(t.0), i64::from(t.1));
                set_times(&directories[*at], name, time(atime), time(mtime));
            }
            _ => {}
        }
    }
    set_times(&directories[0], b".", (UNREAD, 1), (1, 1));
    for (i, mode) in modes.into_iter().rev() {
        set_times(&directories[i], b".", (UNREAD + i as i64, 1), (-(i as i64), 999_999_999));
        rustix::fs::fchmod(&directories[i], Mode::from_raw_mode(mode)).unwrap();
    }
}

fn stage(way: Way, source: &Path, destination: &Path, options: &StageOptions) {
    let pairs = [Pair { source: source.into(), destination: destination.into() }];
    let report = stage_between(way, &pairs, options, &Quiet).unwrap();
    report.outcome().unwrap();
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stage_in_then_out_gives_the_same_tree(
        things in proptest::collection::vec(thing(), 0..80),
        threads in 1usize..5,
        verify in any::<bool>(),
        all_or_nothing in any::<bool>(),
        twice in any::<bool>(),
    ) {
        let scratch = Scratch::new();
        let (store, pool, back) = (scratch.join("store"), scratch.join("pool"), scratch.join("back"));
        make(&store, &things);
        let before = snapshot(&store);
        let options = StageOptions { threads, verify, all_or_nothing, ..StageOptions::default() };
        for _ in 0..=usize::from(twice) {
            stage(Way::In, &store, &pool, &options);
            assert_same(&before, &snapshot(&pool));
        }
        stage(Way::Out, &pool, &back, &options);
        assert_same(&before, &snapshot(&back));
        assert_no_temporaries(&scratch.0);
    }

    #[test]
    fn stage_over_an_older_tree_gives_what_is_new_and_keeps_the_rest(
        older in proptest::collection::vec(thing(), 0..40),
        newer in proptest::collection::vec(thing(), 0..40),
        durable in any::<bool>(),
        all_or_nothing in any::<bool>(),
    ) {
        let scratch = Scratch::new();
        let (store, pool) = (scratch.join("store"), scratch.join("pool"));
        make(&pool, &older);
        make(&store, &newer);
        let (before, wanted) = (snapshot(&pool), snapshot(&store));
        let kind = |item: &Item| item.kind == 0o040_000;
        let clash = wanted.iter().any(|(path, item)| before.get(path).is_some_and(|was| kind(was) != kind(item)));
        let way = if durable { Way::Out } else { Way::In };
        let options = StageOptions { all_or_nothing, ..StageOptions::default() };
        let pairs = [Pair { source: store.clone(), destination: pool.clone() }];
        let report = stage_between(way, &pairs, &options, &Quiet).unwrap();
        assert_eq!(report.is_complete(), !clash, "{:?}", report.errors);
        let after = snapshot(&pool);
        assert_no_temporaries(&scratch.0);
        if clash && all_or_nothing {
            assert!(report.rolled_back);
            let content = |tree: &Snapshot| tree.iter().map(|(p, i)| (p.clone(), i.content.clone(), i.mode)).collect::<Vec<_>>();
            assert_eq!(content(&before), content(&after));
        } else if !clash {
            for (path, item) in &wanted {
                // `linked_to` is not compared: hard links of the older tree may remain.
                let bare = |item: &Item| Item { linked_to: None, ..item.clone() };
                assert_eq!(bare(item), bare(&after[path]), "{}", path.escape_ascii());
            }
            for (path, item) in before.iter().filter(|(path, _)| !wanted.contains_key(*path)) {
                assert_eq!(item.content, after[path].content, "{}", path.escape_ascii());
            }
        }
    }
}
