//! A tree deeper than the process may open files. It has its own process, because it lowers the limit.

mod trees;

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, Way};
use rustix::fs::{Mode, OFlags};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use trees::{make_directory, noise, write, Scratch};

#[test]
fn stage_of_a_chain_of_1500_directories_with_120_descriptors_works() {
    let scratch = Scratch::new();
    let (store, pool) = (scratch.join("store"), scratch.join("pool"));
    std::fs::create_dir(&store).unwrap();
    let mut at = rustix::fs::open(&store, OFlags::DIRECTORY, Mode::empty()).unwrap();
    for i in 0..1500 {
        if i % 100 == 0 {
            write(&at, b"f", 0o644, &[(0, &noise(i, 1))], i as u64);
        }
        at = make_directory(&at, b"d");
    }
    drop(at);
    let before = getrlimit(Resource::Nofile);
    let pairs = [Pair { source: store, destination: pool }];
    for (way, all_or_nothing) in [(Way::In, false), (Way::Out, true)] {
        setrlimit(Resource::Nofile, Rlimit { current: Some(120), ..before }).unwrap();
        let options = StageOptions { threads: 4, all_or_nothing, ..StageOptions::default() };
        let report = stage_between(way, &pairs, &options, &Quiet);
        let report = report.and_then(|report| report.outcome().map(|()| report));
        setrlimit(Resource::Nofile, before).unwrap();
        let report = report.unwrap();
        assert_eq!((report.directories, report.files), (1501, 15));
    }
}
