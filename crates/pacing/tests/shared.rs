//! Pacers of several mappings and processes are one.

use std::os::fd::AsFd;

use forebay_pacing::{Direction, Pacers, Place, Profile, PROFILES};

const START: u64 = 1_000_000;

fn place(offset: u64) -> Place {
    Place { file: 1, offset }
}

#[test]
fn open_finds_the_profile_and_the_reservations_of_others() {
    let profile = Profile { name: "mine".into(), ..Profile::named("hdd").unwrap() };
    let (made, fd) = Pacers::create(&profile).unwrap();
    let opened = Pacers::open(fd.as_fd()).unwrap();
    assert_eq!(opened.profile(), profile);
    let first = made.pacer(0).reserve(START, Direction::Read, place(0), 1_000_000).due_ns;
    let second = opened.pacer(0).reserve(START, Direction::Read, place(1_000_000), 1_000_000);
    assert!(second.sequential, "it began where the other mapping's request ended");
    assert!(second.due_ns > first, "a disk serves one request after the other");
    let elsewhere = opened.pacer(1).reserve(START, Direction::Read, place(0), 1_000_000).due_ns;
    assert_eq!(elsewhere, first, "another target is another medium");
}

#[test]
fn open_refuses_what_is_no_memory_of_pacers() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(Pacers::open(file.as_fd()).is_err());
    let (made, fd) = Pacers::create(&Profile::named("ssd").unwrap()).unwrap();
    drop(made);
    // The words of its profile, each spoiled once.
    for word in 0..7 {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::from(fd.try_clone().unwrap());
        let mut good = [0; 8];
        file.read_exact_at(&mut good, word * 8).unwrap();
        file.write_all_at(&u64::MAX.to_le_bytes(), word * 8).unwrap();
        assert!(Pacers::open(fd.as_fd()).is_err(), "word {word}");
        file.write_all_at(&good, word * 8).unwrap();
        assert!(Pacers::open(fd.as_fd()).is_ok(), "word {word} restored");
    }
    let wrong = Profile { name: "a b".into(), medium: PROFILES[0].1 };
    assert!(Pacers::create(&wrong).is_err());
}

#[test]
fn process_that_is_killed_leaves_nothing_locked() {
    let (pacers, fd) = Pacers::create(&Profile::named("optane").unwrap()).unwrap();
    // SAFETY: the child makes no call but atomics on memory that was mapped before, until it is killed.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut now = START;
        loop {
            now = pacers.pacer(0).reserve(now, Direction::Write, place(0), 4096).due_ns;
        }
    }
    let reached = || Pacers::open(fd.as_fd()).unwrap().pacer(0).statistics(Direction::Write).requests;
    while reached() < 10_000 {
        std::thread::yield_now();
    }
    // SAFETY: our own child, which is reaped.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    // Every one of its requests was complete in its own time, so an arrival far later finds an idle medium.
    let later = u64::MAX / 2;
    let one = pacers.pacer(0).reserve(later, Direction::Read, place(0), 0);
    assert_eq!(one.due_ns - later, Profile::named("optane").unwrap().medium.read.latency_ns);
}

#[test]
fn tickets_are_counted_and_never_early() {
    let (pacers, _fd) = Pacers::create(&Profile::named("pcram").unwrap()).unwrap();
    let pacer = pacers.pacer(2);
    for i in 0..20 {
        pacer.begin().complete(Direction::Write, place(i * 4096), 4096);
    }
    let writes = pacer.statistics(Direction::Write);
    assert_eq!((writes.requests, writes.bytes, writes.completed()), (20, 20 * 4096, 20));
    assert_eq!(writes.sequential, 19);
    assert!(writes.measured_ns >= writes.configured_ns);
    assert!(writes.quantile_ns(0.0) >= 4096 * 1_000_000_000 / pacer.medium().write.bytes_per_s);
    assert_eq!(pacer.statistics(Direction::Read).requests, 0);
}

#[test]
fn document_has_the_profiles_as_they_are() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/emulation.md");
    let text = std::fs::read_to_string(path).unwrap();
    for (name, medium, source) in PROFILES {
        let (read, write) = (medium.read, medium.write);
        let row = format!(
            "| {name} | {} ns | {} ns | {} | {} | {} ns | {} | {source} |",
            read.latency_ns,
            write.latency_ns,
            read.bytes_per_s / 1_000_000,
            write.bytes_per_s / 1_000_000,
            medium.seek_ns,
            medium.queue_depth
        );
        assert!(text.lines().any(|line| line == row), "docs/emulation.md lacks {row}");
    }
}
