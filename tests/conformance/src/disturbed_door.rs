//! A door to an attached tree whose files are drained and released between two calls.
//!
//! Before a call, at random from a seed, the mover copies what changed below the case's directory to the store, or
//! releases every file there that no program has open, or compares it with the store. So any call may meet files and
//! directories in any state. Results must be those of an undisturbed door.

use crate::door::{Ability, At, Door, Outcome, SetTime, Space, Stat, Stream};
use forebay_tasks::{MoverClient, Task, TaskState, Verb};
use std::cell::{Cell, RefCell};
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Calls at the beginning of a case before which a disturbance is likely. Later ones are in loops of equal calls.
const FIRST_CALLS: u64 = 60;
/// One call of so many is disturbed, at the beginning of a case and later.
const ONE_OF: (u64, u64) = (4, 400);
/// How long a call waits for changes to be copied. Files that the case has open for writing are not copied.
const SYNC_PATIENCE: Duration = Duration::from_millis(60);

/// What the disturbances did.
#[derive(Clone, Copy, Default, Debug)]
pub struct Disturbances {
    /// Calls before which the mover was busy.
    pub calls: u64,
    /// Files that were released, counted again each time.
    pub released: u64,
    /// Bytes that were released.
    pub released_bytes: u64,
}

/// See the module.
pub struct DisturbedDoor {
    inner: Box<dyn Door>,
    pool: PathBuf,
    dice: Cell<u64>,
    /// Calls of the present case.
    calls: Cell<u64>,
    /// The inode of the case's directory; 0 before there is one.
    directory: Cell<u64>,
    process: u32,
    done: RefCell<Disturbances>,
}

impl DisturbedDoor {
    /// Disturbs the calls of a door to the pool in `pool`.
    pub fn new(inner: Box<dyn Door>, pool: &Path, seed: u64) -> DisturbedDoor {
        DisturbedDoor {
            inner,
            pool: pool.into(),
            dice: Cell::new(seed | 1),
            calls: Cell::new(0),
            directory: Cell::new(0),
            process: std::process::id(),
            done: RefCell::default(),
        }
    }

    /// What was done so far.
    pub fn disturbances(&self) -> Disturbances {
        *self.done.borrow()
    }

    fn below(&self, bound: u64) -> u64 {
        let mut x = self.dice.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.dice.set(x);
        x % bound
    }

    /// Possibly disturbs the next call.
    fn disturb(&self) {
        let calls = self.calls.replace(self.calls.get() + 1);
        let of = if calls < FIRST_CALLS { ONE_OF.0 } else { ONE_OF.1 };
        // A forked child has its parent's dice, and shares its connection to nothing.
        if self.directory.get() == 0 || self.process != std::process::id() || self.below(of) != 0 {
            return;
        }
        self.done.borrow_mut().calls += 1;
        match self.below(8) {
            0 => self.run(Verb::Release),
            1 => self.run(Verb::Refresh),
            2 => self.sync(),
            _ => {
                self.sync();
                self.run(Verb::Release);
            }
        }
    }

    fn start(&self, verb: Verb) -> Option<(MoverClient, Task)> {
        let mut mover = MoverClient::connect(&self.pool)
            .unwrap_or_else(|e| panic!("the pool has no mover, so nothing disturbs it: {e}"));
        // The directory may be gone: the case removed it.
        let task = mover.start(verb, self.directory.get(), "a case", true).ok()?;
        Some((mover, task))
    }

    fn run(&self, verb: Verb) {
        let Some((mover, task)) = self.start(verb) else { return };
        let task = mover.wait(task.id, |_| true).unwrap_or_else(|e| panic!("{}: {e}", verb.name()));
        if verb == Verb::Release {
            let mut done = self.done.borrow_mut();
            done.released += task.files_done;
            done.released_bytes += task.bytes_done;
        }
    }

    fn sync(&self) {
        let Some((mut mover, task)) = self.start(Verb::Sync) else { return };
        let begun = Instant::now();
        loop {
            let now = mover.show(task.id).unwrap_or_else(|e| panic!("sync: {e}"));
            if now.state.is_over() {
                return;
            }
            if begun.elapsed() > SYNC_PATIENCE {
                let over = mover.cancel(task.id).unwrap_or_else(|e| panic!("cancel: {e}"));
                assert!(over.state != TaskState::Failed, "{over:?}");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn note_directory(&self) {
        self.calls.set(0);
        let path = self.inner.absolute(b"");
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        self.directory.set(self.inner.stat_at(path.into(), true).map_or(0, |st| st.ino));
    }
}

/// Methods that go to the inner door, after a disturbance perhaps.
macro_rules! disturbed {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.disturb();
            self.inner.$name($($argument),*)
        })*
    };
}

impl Door for DisturbedDoor {
    fn name(&self) -> String {
        format!("{}, disturbed", self.inner.name())
    }

    fn can(&self, ability: Ability) -> bool {
        // Space comes and goes with the files that are released, and a full pool waits for the mover.
        ![Ability::OwnSpace, Ability::SmallSpace].contains(&ability) && self.inner.can(ability)
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        self.directory.set(0);
        self.inner.enter(directory)?;
        self.note_directory();
        Ok(())
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        self.inner.enter_existing(directory)?;
        self.note_directory();
        Ok(())
    }

    fn absolute(&self, path: &[u8]) -> Vec<u8> {
        self.inner.absolute(path)
    }

    fn set_umask(&self, mask: u32) -> u32 {
        self.inner.set_umask(mask)
    }

    disturbed! {
        fn open_at(at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd>;
        fn stat_at(at: At<'_>, follow: bool) -> Outcome<Stat>;
        fn make_directory_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn unlink_at(at: At<'_>) -> Outcome<()>;
        fn remove_directory_at(at: At<'_>) -> Outcome<()>;
        fn rename_at(from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()>;
        fn link_at(from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()>;
        fn link_handle(fd: RawFd, to: At<'_>) -> Outcome<()>;
        fn symlink_at(target: &[u8], at: At<'_>) -> Outcome<()>;
        fn read_link_at(at: At<'_>, buffer: &mut [u8]) -> Outcome<usize>;
        fn make_node_at(at: At<'_>, mode: u32, rdev: u64) -> Outcome<()>;
        fn chmod_at(at: At<'_>, mode: u32) -> Outcome<()>;
        fn chown_at(at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()>;
        fn set_times_at(at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()>;
        fn access_at(at: At<'_>, amode: i32) -> Outcome<()>;
        fn truncate(path: &[u8], size: i64) -> Outcome<()>;
        fn get_xattr(path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
        fn set_xattr(path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
        fn list_xattr(path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize>;
        fn remove_xattr(path: &[u8], follow: bool, name: &[u8]) -> Outcome<()>;
        fn space() -> Outcome<Space>;
        fn open_stream(path: &[u8]) -> Outcome<Box<dyn Stream>>;
        fn stream_of(directory: OwnedFd) -> Outcome<Box<dyn Stream>>;
        fn change_directory(directory: RawFd) -> Outcome<()>;
        fn working_directory() -> Outcome<Vec<u8>>;
        fn stat_handle(fd: RawFd) -> Outcome<Stat>;
        fn chmod_handle(fd: RawFd, mode: u32) -> Outcome<()>;
        fn chown_handle(fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()>;
        fn set_times_handle(fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()>;
        fn get_xattr_handle(fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize>;
        fn set_xattr_handle(fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()>;
        fn list_xattr_handle(fd: RawFd, names: &mut [u8]) -> Outcome<usize>;
        fn remove_xattr_handle(fd: RawFd, name: &[u8]) -> Outcome<()>;
        fn read(fd: &OwnedFd, buffer: &mut [u8]) -> Outcome<usize>;
        fn write(fd: &OwnedFd, bytes: &[u8]) -> Outcome<usize>;
        fn read_at(fd: &OwnedFd, buffer: &mut [u8], offset: i64) -> Outcome<usize>;
        fn write_at(fd: &OwnedFd, bytes: &[u8], offset: i64) -> Outcome<usize>;
        fn seek(fd: &OwnedFd, offset: i64, whence: i32) -> Outcome<i64>;
        fn truncate_handle(fd: &OwnedFd, size: i64) -> Outcome<()>;
        fn allocate(fd: &OwnedFd, mode: i32, offset: i64, bytes: i64) -> Outcome<()>;
        fn sync(fd: &OwnedFd, data_only: bool) -> Outcome<()>;
        fn duplicate(fd: &OwnedFd) -> Outcome<OwnedFd>;
    }
}
