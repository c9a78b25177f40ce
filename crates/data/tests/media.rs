//! The test suite of media, run on a target in a tmpfs of its own, on one in a plain directory and on the faulty
//! medium. It also runs on media with one planted defect each, and must find the defect.

#[path = "../src/scratch.rs"]
mod scratch;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use forebay_data::{detached_tmpfs, Access, BackingStat, FaultyMedium, Media, Space, Target};
use forebay_types::{Code, Component, Ino, Layout, NodeId, TimeSet, Timestamp};
use rustix::fs::SeekFrom;
use scratch::Scratch;

const TARGET: u32 = 1 << 16 | 3;
const INO: Ino = Ino(0x1_0000_0000_01ab);
const OTHER: Ino = Ino(0x1_0000_0000_02ab);
const PAST: Timestamp = Timestamp { sec: -86_400, nsec: 7 };
const LATER: Timestamp = Timestamp { sec: 4_000_000_000, nsec: 999_999_999 };

/// A difference from the expectation.
type Verdict = Result<(), String>;

macro_rules! expect {
    ($holds:expr, $($words:tt)+) => {
        if !$holds {
            return Err(format!($($words)+));
        }
    };
}

/// Unwraps a result that should be Ok.
fn fine<T, E: std::fmt::Debug>(outcome: Result<T, E>, what: &str) -> Result<T, String> {
    outcome.map_err(|e| format!("{what}: {e:?}"))
}

fn write(medium: &dyn Media, ino: Ino, component: usize, stripe: u16, bytes: &[u8], at: u64) -> Verdict {
    let file = fine(medium.open(ino, component, stripe, Access::ReadWrite), "open to write")?;
    let n = fine(rustix::io::pwrite(file, bytes, at), "write")?;
    expect!(n == bytes.len(), "a short write of {n}");
    Ok(())
}

fn read(file: impl AsFd) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; 1 << 16];
    let n = fine(rustix::io::pread(file, &mut bytes, 0), "read")?;
    bytes.truncate(n);
    Ok(bytes)
}

fn contents(medium: &dyn Media, ino: Ino, component: usize, stripe: u16) -> Result<Vec<u8>, String> {
    read(fine(medium.open(ino, component, stripe, Access::Read), "open to read")?)
}

fn listed(medium: &dyn Media) -> Result<BTreeMap<(Ino, usize, u16), u32>, String> {
    let mut seen = BTreeMap::new();
    let visited = medium.for_each(&mut |ino, component, stripe| {
        *seen.entry((ino, component, stripe)).or_default() += 1;
        Ok(())
    });
    fine(visited, "for_each")?;
    Ok(seen)
}

fn create_twice_keeps_what_was_written(medium: &dyn Media) -> Verdict {
    fine(medium.create(INO, 0, 0), "create")?;
    expect!(contents(medium, INO, 0, 0)?.is_empty(), "a new backing file is not empty");
    let file = fine(medium.open(INO, 0, 0, Access::Read), "open")?;
    let mode = fine(rustix::fs::fstat(&file), "fstat")?.st_mode;
    expect!(mode == 0o100_700, "mode {mode:o}");
    write(medium, INO, 0, 0, b"kept", 0)?;
    fine(medium.create(INO, 0, 0), "create again")?;
    expect!(contents(medium, INO, 0, 0)? == b"kept", "create again lost what was written");
    Ok(())
}

fn open_gives_descriptors_of_their_own(medium: &dyn Media) -> Verdict {
    expect!(medium.open(INO, 0, 0, Access::Read).err() == Some(Code::NotFound), "an absent one opens");
    fine(medium.create(INO, 0, 0), "create")?;
    let reader = fine(medium.open(INO, 0, 0, Access::Read), "open to read")?;
    let writer = fine(medium.open(INO, 0, 0, Access::ReadWrite), "open to write")?;
    expect!(rustix::io::write(&reader, b"x").is_err(), "a descriptor for reading writes");
    fine(rustix::io::write(&writer, b"abc"), "write")?;
    let at = fine(rustix::fs::seek(&reader, SeekFrom::Current(0)), "seek")?;
    expect!(at == 0, "descriptors share an offset");
    expect!(read(&reader)? == b"abc", "the reader does not see what was written");
    expect!(read(&writer)? == b"abc", "a descriptor for reading and writing does not read");
    let flags = fine(rustix::io::fcntl_getfd(&reader), "fcntl")?;
    expect!(flags.contains(rustix::io::FdFlags::CLOEXEC), "a descriptor lives through exec");
    Ok(())
}

fn remove_takes_one_and_open_descriptors_go_on(medium: &dyn Media) -> Verdict {
    fine(medium.remove(INO, 0, 0), "remove of an absent one")?;
    for (ino, stripe) in [(INO, 0), (INO, 1), (OTHER, 0)] {
        fine(medium.create(ino, 0, stripe), "create")?;
    }
    let file = fine(medium.open(INO, 0, 0, Access::ReadWrite), "open")?;
    fine(medium.remove(INO, 0, 0), "remove")?;
    expect!(medium.stat(INO, 0, 0).err() == Some(Code::NotFound), "it is still there");
    expect!(medium.stat(INO, 0, 1).is_ok() && medium.stat(OTHER, 0, 0).is_ok(), "another one went too");
    fine(rustix::io::pwrite(&file, b"on", 0), "write after remove")?;
    expect!(read(&file)? == b"on", "what is written after remove is lost");
    fine(medium.create(INO, 0, 0), "create anew")?;
    expect!(contents(medium, INO, 0, 0)?.is_empty(), "the removed one came back");
    fine(medium.remove(INO, 0, 0), "remove")?;
    fine(medium.remove(INO, 0, 0), "remove again")
}

fn stat_shows_size_space_and_identity(medium: &dyn Media) -> Verdict {
    expect!(medium.stat(INO, 0, 0).err() == Some(Code::NotFound), "an absent one has a stat");
    for stripe in [0, 1] {
        fine(medium.create(INO, 0, stripe), "create")?;
    }
    write(medium, INO, 0, 0, b"end", 1 << 30)?;
    let file = fine(medium.open(INO, 0, 0, Access::Read), "open")?;
    fine(rustix::fs::fsync(&file), "fsync")?;
    let stat = fine(medium.stat(INO, 0, 0), "stat")?;
    expect!(stat.bytes == (1 << 30) + 3, "{} bytes", stat.bytes);
    expect!((1..1 << 24).contains(&stat.allocated_bytes), "a hole takes {} bytes", stat.allocated_bytes);
    let kernel = fine(rustix::fs::fstat(&file), "fstat")?;
    expect!(kernel.st_ino == stat.kernel_ino, "the inode number is not the kernel's");
    expect!(kernel.st_mtime as i64 == stat.mtime.sec, "mtime is not the kernel's");
    expect!(stat.mtime.sec > 1_600_000_000 && stat.ctime >= stat.mtime, "times {stat:?}");
    let other = fine(medium.stat(INO, 0, 1), "stat")?;
    expect!(other.kernel_ino != stat.kernel_ino && other.bytes == 0, "two stripes are one");
    Ok(())
}

fn truncate_cuts_and_lengthens_by_zeros(medium: &dyn Media) -> Verdict {
    expect!(medium.truncate(INO, 0, 0, 1).err() == Some(Code::NotFound), "an absent one is cut");
    fine(medium.create(INO, 0, 0), "create")?;
    write(medium, INO, 0, 0, b"0123456789", 0)?;
    fine(medium.truncate(INO, 0, 0, 4), "cut")?;
    expect!(contents(medium, INO, 0, 0)? == b"0123", "cut");
    fine(medium.truncate(INO, 0, 0, 6), "lengthen")?;
    expect!(contents(medium, INO, 0, 0)? == b"0123\0\0", "lengthened");
    Ok(())
}

fn set_times_sets_each_as_asked(medium: &dyn Media) -> Verdict {
    let (at, omit, now) = (TimeSet::At, TimeSet::Omit, TimeSet::Now);
    expect!(medium.set_times(INO, 0, 0, now, now).err() == Some(Code::NotFound), "an absent one has times");
    fine(medium.create(INO, 0, 0), "create")?;
    let times = || fine(medium.stat(INO, 0, 0), "stat").map(|s| (s.atime, s.mtime));
    fine(medium.set_times(INO, 0, 0, at(PAST), at(LATER)), "set both")?;
    expect!(times()? == (PAST, LATER), "both: {:?}", times()?);
    fine(medium.set_times(INO, 0, 0, at(LATER), omit), "set atime")?;
    expect!(times()? == (LATER, LATER), "atime: {:?}", times()?);
    fine(medium.set_times(INO, 0, 0, omit, now), "set mtime to now")?;
    let (atime, mtime) = times()?;
    expect!(atime == LATER && mtime > PAST && mtime < LATER, "now: {:?}", (atime, mtime));
    Ok(())
}

fn space_is_taken_and_comes_back(medium: &dyn Media) -> Verdict {
    const BYTES: usize = 4 << 20;
    let before = fine(medium.space(), "space")?;
    expect!(before.free_bytes > BYTES as u64 && before.free_bytes <= before.total_bytes, "{before:?}");
    fine(medium.create(INO, 0, 0), "create")?;
    write(medium, INO, 0, 0, &vec![1; BYTES], 0)?;
    let allocated = fine(medium.stat(INO, 0, 0), "stat")?.allocated_bytes;
    expect!(allocated >= BYTES as u64, "{allocated} bytes allocated");
    let during = fine(medium.space(), "space")?;
    expect!(during.total_bytes == before.total_bytes, "the medium grew");
    expect!(during.free_bytes + BYTES as u64 <= before.free_bytes, "{during:?} after {before:?}");
    fine(medium.truncate(INO, 0, 0, 0), "truncate")?;
    expect!(
        fine(medium.space(), "space")?.free_bytes + (1 << 16) >= before.free_bytes,
        "not back after cutting"
    );
    write(medium, INO, 0, 0, &vec![1; BYTES], 0)?;
    fine(medium.remove(INO, 0, 0), "remove")?;
    expect!(
        fine(medium.space(), "space")?.free_bytes + (1 << 16) >= before.free_bytes,
        "not back after removal"
    );
    Ok(())
}

fn for_each_shows_every_one_once(medium: &dyn Media) -> Verdict {
    let mut want = BTreeMap::new();
    for number in 0..300u64 {
        let (ino, component, stripe) =
            (Ino(number * 0x31 + (1 << 48)), (number % 2) as usize, (number % 5) as u16);
        fine(medium.create(ino, component, stripe), "create")?;
        want.insert((ino, component, stripe), 1);
    }
    let seen = listed(medium)?;
    expect!(seen == want, "{} shown, {} there", seen.len(), want.len());
    let removing = medium.for_each(&mut |ino, component, stripe| medium.remove(ino, component, stripe));
    fine(removing, "for_each that removes")?;
    expect!(listed(medium)?.is_empty(), "some were not shown");
    Ok(())
}

fn for_each_ends_at_the_visitors_error(medium: &dyn Media) -> Verdict {
    for stripe in 0..3 {
        fine(medium.create(INO, 0, stripe), "create")?;
    }
    let mut visits = 0;
    let outcome = medium.for_each(&mut |_, _, _| {
        visits += 1;
        Err(Code::TimedOut)
    });
    expect!(outcome == Err(Code::TimedOut) && visits == 1, "{outcome:?} after {visits} visits");
    Ok(())
}

fn sync_succeeds(medium: &dyn Media) -> Verdict {
    fine(medium.create(INO, 0, 0), "create")?;
    fine(medium.sync(), "sync")?;
    expect!(medium.stat(INO, 0, 0).is_ok(), "sync lost a backing file");
    Ok(())
}

/// Two components. The second has four stripes over this target and another.
fn spread() -> Layout {
    let first = Layout::single(NodeId(1), 3).components()[0];
    let mut second = Component { stripe_bytes: 4096, stripe_count: 4, target_count: 2, ..first };
    second.targets[1] = TARGET + 1;
    Layout::new(&[Component { end: 8192, ..first }, second]).expect("a layout")
}

fn whole_files_only_own_stripes_are_touched(medium: &dyn Media) -> Verdict {
    let layout = spread();
    fine(medium.create_all(INO, &layout), "create_all")?;
    let want = [(INO, 1, 0), (INO, 2, 0), (INO, 2, 2)].map(|key| (key, 1));
    expect!(listed(medium)? == BTreeMap::from(want), "made {:?}", listed(medium)?);
    expect!(medium.file_size(INO, &layout) == Ok(0), "a new file has a size");
    fine(medium.truncate_all(INO, &layout, 8192 + 3 * 4096 - 1), "truncate_all")?;
    let bytes = |component, stripe| medium.stat(INO, component, stripe).map(|s| s.bytes);
    let sizes = (bytes(1, 0), bytes(2, 0), bytes(2, 2));
    expect!(sizes == (Ok(8192), Ok(4096), Ok(4095)), "sizes {sizes:?}");
    expect!(
        medium.file_size(INO, &layout) == Ok(8192 + 3 * 4096 - 1),
        "{:?}",
        medium.file_size(INO, &layout)
    );
    fine(medium.create(OTHER, 0, 0), "create another")?;
    fine(medium.remove_all(INO, &layout), "remove_all")?;
    expect!(listed(medium)?.into_keys().eq([(OTHER, 0, 0)]), "left {:?}", listed(medium)?);
    fine(medium.remove_all(INO, &layout), "remove_all again")?;
    expect!(medium.file_size(INO, &layout) == Err(Code::NotFound), "a removed file has a size");
    Ok(())
}

fn whole_files_times_are_those_of_the_stripe_that_changed_last(medium: &dyn Media) -> Verdict {
    let layout = Layout::overstriped(NodeId(1), 3, 3, 4096).expect("a layout");
    fine(medium.create_all(INO, &layout), "create_all")?;
    fine(medium.set_times_all(INO, &layout, TimeSet::At(PAST), TimeSet::At(PAST)), "set_times_all")?;
    let stat = fine(medium.file_stat(INO, &layout), "file_stat")?;
    expect!((stat.atime, stat.mtime) == (PAST, PAST), "a time in the past is undone: {stat:?}");
    // The kernel updates ctime once a tick, so the next change must be in a later tick.
    let tick = std::time::Duration::from_millis(20);
    std::thread::sleep(tick);
    write(medium, INO, 1, 1, &[1; 100], 0)?;
    let one = fine(medium.stat(INO, 1, 1), "stat")?;
    let stat = fine(medium.file_stat(INO, &layout), "file_stat")?;
    expect!(
        (stat.mtime, stat.ctime) == (one.mtime, one.ctime),
        "{stat:?}, but the last to change is {one:?}"
    );
    expect!(stat.bytes == 4096 + 100, "{} bytes", stat.bytes);
    std::thread::sleep(tick);
    fine(medium.set_times(INO, 1, 2, TimeSet::Omit, TimeSet::At(PAST)), "set_times")?;
    expect!(fine(medium.file_stat(INO, &layout), "file_stat")?.mtime == PAST, "the last change is not seen");
    fine(medium.remove(INO, 1, 2), "remove")?;
    expect!(medium.file_stat(INO, &layout).err() == Some(Code::NotFound), "a missing stripe is not told");
    Ok(())
}

type Case = (&'static str, fn(&dyn Media) -> Verdict);

macro_rules! cases {
    ($($name:ident),+ $(,)?) => { &[$((stringify!($name), $name as fn(&dyn Media) -> Verdict)),+] };
}

const CASES: &[Case] = cases![
    create_twice_keeps_what_was_written,
    open_gives_descriptors_of_their_own,
    remove_takes_one_and_open_descriptors_go_on,
    stat_shows_size_space_and_identity,
    truncate_cuts_and_lengthens_by_zeros,
    set_times_sets_each_as_asked,
    for_each_shows_every_one_once,
    for_each_ends_at_the_visitors_error,
    sync_succeeds,
    whole_files_only_own_stripes_are_touched,
    whole_files_times_are_those_of_the_stripe_that_changed_last,
];

/// For media that no other process writes to.
const CASES_ALONE: &[Case] = cases![space_is_taken_and_comes_back];

/// Runs the cases, each on a new medium. Returns the failures.
fn run<M: Media>(cases: &[&[Case]], make: impl Fn() -> M) -> Vec<String> {
    let mut failures = Vec::new();
    for (name, case) in cases.iter().copied().flatten() {
        if let Err(words) = case(&make()) {
            failures.push(format!("{name}: {words}"));
        }
    }
    failures
}

const NONE: [String; 0] = [];

fn target_in(directory: impl AsFd) -> Target {
    Target::format(&directory).unwrap();
    Target::open(&directory, TARGET).unwrap()
}

#[test]
fn suite_on_the_twin_passes() {
    assert_eq!(run(&[CASES, CASES_ALONE], || FaultyMedium::new(TARGET, 1 << 30)), NONE);
}

#[test]
fn suite_on_a_target_in_a_tmpfs_of_its_own_passes() {
    if let Err(e) = detached_tmpfs(64 << 20) {
        println!("skipped: {e}");
        return;
    }
    assert_eq!(run(&[CASES, CASES_ALONE], || target_in(detached_tmpfs(64 << 20).unwrap())), NONE);
}

#[test]
fn suite_on_a_target_in_a_directory_passes() {
    for parent in [std::env::temp_dir(), "/dev/shm".into()] {
        let made = Mutex::new(Vec::new());
        let make = || {
            let scratch = Scratch::within(&parent);
            let target = target_in(std::fs::File::open(scratch.path()).unwrap());
            made.lock().unwrap().push(scratch);
            target
        };
        assert_eq!(run(&[CASES], make), NONE, "in {}", parent.display());
    }
}

/// A medium with one planted defect.
struct Broken {
    medium: FaultyMedium,
    way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    CreateEmptiesWhatIsThere,
    CreateForgetsTheStripe,
    OpenIgnoresAccess,
    OpenMakesWhatIsAbsent,
    RemoveDoesNothing,
    RemoveFailsOnAbsent,
    RemoveTakesAllStripes,
    StatCountsHoles,
    TruncateOneTooMany,
    TruncateNeverLengthens,
    TimesSwapped,
    TimesDropNanoseconds,
    SpaceNeverChanges,
    EachSkipsOne,
    EachTwice,
    EachGoesOnAfterAnError,
    SyncLoses,
    OthersStripesAreOwn,
}

const WAYS: [Way; 18] = [
    Way::CreateEmptiesWhatIsThere,
    Way::CreateForgetsTheStripe,
    Way::OpenIgnoresAccess,
    Way::OpenMakesWhatIsAbsent,
    Way::RemoveDoesNothing,
    Way::RemoveFailsOnAbsent,
    Way::RemoveTakesAllStripes,
    Way::StatCountsHoles,
    Way::TruncateOneTooMany,
    Way::TruncateNeverLengthens,
    Way::TimesSwapped,
    Way::TimesDropNanoseconds,
    Way::SpaceNeverChanges,
    Way::EachSkipsOne,
    Way::EachTwice,
    Way::EachGoesOnAfterAnError,
    Way::SyncLoses,
    Way::OthersStripesAreOwn,
];

impl Media for Broken {
    fn target(&self) -> u32 {
        self.medium.target()
    }

    fn create(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        match self.way {
            Way::CreateEmptiesWhatIsThere => self.medium.remove(ino, component, stripe)?,
            Way::CreateForgetsTheStripe => return self.medium.create(ino, component, 0),
            _ => {}
        }
        self.medium.create(ino, component, stripe)
    }

    fn open(&self, ino: Ino, component: usize, stripe: u16, access: Access) -> Result<OwnedFd, Code> {
        match self.way {
            Way::OpenIgnoresAccess => self.medium.open(ino, component, stripe, Access::ReadWrite),
            Way::OpenMakesWhatIsAbsent => {
                self.medium.create(ino, component, stripe)?;
                self.medium.open(ino, component, stripe, access)
            }
            _ => self.medium.open(ino, component, stripe, access),
        }
    }

    fn remove(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        match self.way {
            Way::RemoveDoesNothing => return Ok(()),
            Way::RemoveFailsOnAbsent => {
                self.medium.stat(ino, component, stripe)?;
            }
            Way::RemoveTakesAllStripes => (0..8).try_for_each(|s| self.medium.remove(ino, component, s))?,
            _ => {}
        }
        self.medium.remove(ino, component, stripe)
    }

    fn stat(&self, ino: Ino, component: usize, stripe: u16) -> Result<BackingStat, Code> {
        let stat = self.medium.stat(ino, component, stripe)?;
        Ok(match self.way {
            Way::StatCountsHoles => BackingStat { allocated_bytes: stat.bytes, ..stat },
            Way::TimesDropNanoseconds => {
                let whole = |t: Timestamp| Timestamp { nsec: 0, ..t };
                BackingStat { atime: whole(stat.atime), mtime: whole(stat.mtime), ..stat }
            }
            _ => stat,
        })
    }

    fn truncate(&self, ino: Ino, component: usize, stripe: u16, bytes: u64) -> Result<(), Code> {
        match self.way {
            Way::TruncateOneTooMany => self.medium.truncate(ino, component, stripe, bytes + 1),
            Way::TruncateNeverLengthens => {
                let bytes = bytes.min(self.medium.stat(ino, component, stripe)?.bytes);
                self.medium.truncate(ino, component, stripe, bytes)
            }
            _ => self.medium.truncate(ino, component, stripe, bytes),
        }
    }

    fn set_times(
        &self,
        ino: Ino,
        component: usize,
        stripe: u16,
        atime: TimeSet,
        mtime: TimeSet,
    ) -> Result<(), Code> {
        match self.way {
            Way::TimesSwapped => self.medium.set_times(ino, component, stripe, mtime, atime),
            _ => self.medium.set_times(ino, component, stripe, atime, mtime),
        }
    }

    fn space(&self) -> Result<Space, Code> {
        match self.way {
            Way::SpaceNeverChanges => Ok(Space { total_bytes: 1 << 30, free_bytes: 1 << 29 }),
            _ => self.medium.space(),
        }
    }

    fn sync(&self) -> Result<(), Code> {
        match self.way {
            Way::SyncLoses => self.medium.for_each(&mut |ino, c, s| self.medium.remove(ino, c, s)),
            _ => self.medium.sync(),
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(Ino, usize, u16) -> Result<(), Code>) -> Result<(), Code> {
        let mut first = true;
        self.medium.for_each(&mut |ino, component, stripe| {
            match self.way {
                Way::EachSkipsOne if std::mem::take(&mut first) => return Ok(()),
                Way::EachTwice => visit(ino, component, stripe)?,
                Way::EachGoesOnAfterAnError => {
                    let _ = visit(ino, component, stripe);
                    return Ok(());
                }
                _ => {}
            }
            visit(ino, component, stripe)
        })
    }

    fn create_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        match self.way {
            Way::OthersStripesAreOwn => {
                layout.stripes().try_for_each(|(c, s)| self.create(ino, layout.file_number(c), s))
            }
            _ => layout
                .stripes()
                .filter(|&(c, s)| layout.components()[c].target(s) == self.target())
                .try_for_each(|(c, s)| self.create(ino, layout.file_number(c), s)),
        }
    }
}

#[test]
fn suite_on_a_broken_medium_fails_whatever_is_broken_and_every_case_can_fail() {
    let mut seen = String::new();
    for way in WAYS {
        let failures =
            run(&[CASES, CASES_ALONE], || Broken { medium: FaultyMedium::new(TARGET, 1 << 30), way });
        assert!(!failures.is_empty(), "{way:?} was not found");
        seen += &failures.join("\n");
        seen.push('\n');
    }
    for (name, _) in [CASES, CASES_ALONE].concat() {
        assert!(seen.lines().any(|line| line.starts_with(&format!("{name}:"))), "{name} found nothing");
    }
}

#[test]
fn target_format_again_keeps_what_is_there() {
    let scratch = Scratch::new();
    let directory = std::fs::File::open(scratch.path()).unwrap();
    let target = target_in(&directory);
    target.create(INO, 0, 0).unwrap();
    Target::format(&directory).unwrap();
    assert!(target.stat(INO, 0, 0).is_ok());
    use std::os::unix::fs::PermissionsExt;
    for path in ["", "data", "data/00", "data/ff", "anchors", "shard"] {
        let mode = scratch.path().join(path).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700, "{path}");
    }
}

#[test]
fn target_open_of_what_is_no_target_says_so() {
    let scratch = Scratch::new();
    let e = Target::open(std::fs::File::open(scratch.path()).unwrap(), TARGET).unwrap_err();
    assert_eq!(e.code, Code::NotFound);
    assert!(e.cure.contains("--pool"), "{e}");
}

#[test]
fn target_remove_anchors_removes_empty_directories_and_links_and_nothing_else() {
    let scratch = Scratch::new();
    let target = target_in(std::fs::File::open(scratch.path()).unwrap());
    target.create(INO, 0, 0).unwrap();
    let anchors = scratch.path().join("anchors");
    for number in 0..3 {
        let name = forebay_data::AnchorName::new(INO, 4711, number);
        std::fs::create_dir(scratch.path().join(name.as_c_str().to_str().unwrap())).unwrap();
    }
    std::fs::create_dir_all(anchors.join("kept/within")).unwrap();
    std::fs::write(anchors.join("file"), "kept").unwrap();
    let name = forebay_data::AnchorName::new(INO, 4711, 3);
    let link = scratch.path().join(name.as_c_str().to_str().unwrap());
    std::os::unix::fs::symlink("kept", link).unwrap();
    std::os::unix::fs::symlink("kept", anchors.join("link")).unwrap();
    assert_eq!(target.remove_anchors(), Ok(4));
    assert_eq!(target.remove_anchors(), Ok(0));
    assert_eq!(std::fs::read_dir(anchors).unwrap().count(), 3);
    assert!(target.stat(INO, 0, 0).is_ok());
}

#[test]
fn target_symbolic_links_are_never_followed() {
    let scratch = Scratch::new();
    let target = target_in(std::fs::File::open(scratch.path()).unwrap());
    let outside = scratch.path().join("outside");
    std::fs::write(&outside, "precious").unwrap();
    let name = forebay_data::BackingName::new(INO, 0, 0);
    let link = scratch.path().join(std::str::from_utf8(name.as_bytes()).unwrap());
    std::os::unix::fs::symlink(&outside, link).unwrap();
    assert!(target.open(INO, 0, 0, Access::Read).is_err());
    assert!(target.truncate(INO, 0, 0, 0).is_err());
    target.create(INO, 0, 0).unwrap();
    target.set_times(INO, 0, 0, TimeSet::At(PAST), TimeSet::At(PAST)).unwrap();
    target.remove(INO, 0, 0).unwrap();
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "precious");
    let mtime = std::os::unix::fs::MetadataExt::mtime(&outside.metadata().unwrap());
    assert_ne!(mtime, PAST.sec);
}

#[test]
fn target_strangers_files_are_not_visited() {
    let scratch = Scratch::new();
    let target = target_in(std::fs::File::open(scratch.path()).unwrap());
    target.create(INO, 0, 0).unwrap();
    for stranger in ["data/ab/notes", "data/00/00010000000001ab", "data/ab/00010000000001ab.0.0"] {
        std::fs::write(scratch.path().join(stranger), "").unwrap();
    }
    std::fs::create_dir(scratch.path().join("data/ab/00010000000003ab")).unwrap();
    assert!(listed(&target).unwrap().into_keys().eq([(INO, 0, 0)]));
}
