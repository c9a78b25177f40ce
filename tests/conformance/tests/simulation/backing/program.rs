//! A simulated program in front of a store: the client library on a thread of its own, with operations that its random
//! numbers choose. It keeps files open and mapped while it does others.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_client::{File, Pool, Role};
use forebay_fabric::Numbers;
use forebay_types::{Caller, Code, Entry, Ino, Kind, PendingPlace, Reply, Request, Wanted};

use super::ledger::{bytes_of, content, value_of, Expected, Ledger, Place, Shared, FOREIGN};
use crate::baton::{Baton, Process};

/// Names of each program in a directory.
const NAMES: u64 = 3;
/// Files that a program keeps open.
const HELD_MAX: usize = 3;

/// What a program does when it has the baton between two operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    Anything,
    /// Close what it has open, and do nothing more.
    Close,
    /// Read the whole tree.
    Compare,
    /// Wait until nothing is pending.
    AwaitDrained,
    Rest,
}

/// A file that a program keeps open.
enum Held {
    /// By a descriptor of its backing file.
    Descriptor { ino: Ino, fd: OwnedFd, writes: bool },
    /// By requests to the node that has it.
    Requests { file: Box<File>, writes: bool },
    /// Mapped for writing, the descriptor closed.
    Mapped { ino: Ino, start: *mut u8 },
}

impl Held {
    fn ino(&self) -> Ino {
        match self {
            Held::Descriptor { ino, .. } | Held::Mapped { ino, .. } => *ino,
            Held::Requests { file, .. } => file.ino(),
        }
    }

    fn writes(&self) -> bool {
        match self {
            Held::Descriptor { writes, .. } | Held::Requests { writes, .. } => *writes,
            Held::Mapped { .. } => true,
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Code> {
        match self {
            Held::Descriptor { fd, .. } => {
                // SAFETY: plain system call on a descriptor of ours, with memory that lives over it.
                let n = unsafe { libc::pwrite(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
                assert_eq!(n, bytes.len() as isize, "{}", std::io::Error::last_os_error());
                Ok(())
            }
            Held::Requests { file, .. } => match file.write_at(bytes, 0)? {
                n if n == bytes.len() => Ok(()),
                n => panic!("{n} of {} bytes were written", bytes.len()),
            },
            Held::Mapped { start, .. } => {
                // SAFETY: the mapping has as many bytes as the file, which only grows to this.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), *start, bytes.len()) };
                Ok(())
            }
        }
    }

    fn read(&self) -> Result<Vec<u8>, Code> {
        let mut bytes = vec![0; bytes_of(self.ino())];
        let n = match self {
            Held::Descriptor { fd, .. } => {
                // SAFETY: as in `write`.
                let n = unsafe { libc::pread(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
                usize::try_from(n).expect("a read")
            }
            Held::Requests { file, .. } => file.read_at(&mut bytes, 0)?,
            Held::Mapped { start, .. } => {
                // SAFETY: as in `write`.
                unsafe { std::ptr::copy_nonoverlapping(*start, bytes.as_mut_ptr(), bytes.len()) };
                bytes.len()
            }
        };
        bytes.truncate(n);
        Ok(bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Held::Mapped { ino, start } = self {
            // SAFETY: mapped by us with this length, and used by nothing else.
            unsafe { libc::munmap((*start).cast(), bytes_of(*ino)) };
        }
    }
}

/// A program as the scheduler sees it.
pub(crate) struct Client {
    pub(crate) process: Process,
    pub(crate) seat: Baton,
    pub(crate) node: u16,
    pub(crate) session: u64,
    plan: Arc<Mutex<Plan>>,
}

impl Client {
    pub(crate) fn start(
        index: usize,
        (node, session): (u16, u64),
        dir: PathBuf,
        seed: u64,
        shared: Shared,
        store: String,
    ) -> Client {
        let (process, plan) = (Process::default(), Arc::new(Mutex::new(Plan::Anything)));
        let orders = Arc::clone(&plan);
        let seat = process.start("program", move || {
            let pool = Pool::attach_as(&dir, Role::Tool).unwrap_or_else(|e| panic!("{e}"));
            let (numbers, held) = (Numbers::new(seed), Vec::new());
            let (conflicts, in_conflict) = (BTreeSet::new(), BTreeSet::new());
            let mut program = Program { pool, index, numbers, shared, store, held, conflicts, in_conflict };
            loop {
                Baton::mine().between_operations();
                let plan = *orders.lock().unwrap_or_else(PoisonError::into_inner);
                match plan {
                    Plan::Anything => program.anything(),
                    Plan::Close => program.held.clear(),
                    Plan::Compare => program.compare(),
                    Plan::AwaitDrained => program.await_drained(),
                    Plan::Rest => {}
                }
                if plan != Plan::Anything {
                    *orders.lock().unwrap_or_else(PoisonError::into_inner) = Plan::Rest;
                }
            }
        });
        // It attaches now, while its node is running.
        seat.pass();
        Client { process, seat, node, session, plan }
    }

    pub(crate) fn set_plan(&self, plan: Plan) {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner) = plan;
    }

    pub(crate) fn plan(&self) -> Plan {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Program {
    pool: &'static Pool,
    index: usize,
    numbers: Numbers,
    shared: Shared,
    /// The URL of the store.
    store: String,
    held: Vec<Held>,
    /// Places in conflict with the store, and their files.
    conflicts: BTreeSet<Place>,
    in_conflict: BTreeSet<Ino>,
}

fn caller() -> Caller {
    // SAFETY: these calls cannot fail.
    unsafe { Caller { uid: libc::geteuid(), gid: libc::getegid() } }
}

/// Errors after which an operation may have taken effect, or may still.
fn is_doubtful(code: Code) -> bool {
    !matches!(
        code,
        Code::NotFound
            | Code::Exists
            | Code::NotEmpty
            | Code::NotDirectory
            | Code::IsDirectory
            | Code::Invalid
            | Code::Stale
    )
}

/// Ends the history with a broken promise.
fn assert_kept(judged: Result<(), String>) {
    if let Err(why) = judged {
        panic!("{why}");
    }
}

impl Program {
    fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.shared.lock()
    }

    fn anything(&mut self) {
        let root = self.ledger().root;
        let Some(root) = root else {
            if self.index == 0 {
                self.attach();
            }
            return;
        };
        let done = match self.numbers.below(100) {
            0..=15 => self.create(),
            16..=30 => self.write(),
            31..=44 => self.read(),
            45..=50 => self.hold(true),
            51..=55 => self.hold(false),
            56..=64 => self.use_held(),
            65..=72 => {
                if !self.held.is_empty() {
                    let i = self.numbers.below(self.held.len() as u64) as usize;
                    drop(self.held.swap_remove(i));
                }
                Ok(())
            }
            73..=82 => self.rename(),
            83..=85 => self.link(),
            86..=90 => self.unlink(),
            91..=93 => self.mkdir(),
            94..=95 => self.import(root),
            _ => self.look(),
        };
        let mut ledger = self.ledger();
        ledger.operations += 1;
        ledger.failed += u64::from(done.is_err());
        ledger.note(done.map_or_else(|code| code as u64, |()| 0));
    }

    fn attach(&mut self) {
        let made = match self.pool.make_directory_in(caller(), Ino::ROOT, b"s", 0o755) {
            Err(Code::Exists) => self.pool.lookup(Ino::ROOT, b"s"),
            made => made,
        };
        let Ok(made) = made else { return };
        let ino = made.attr.ino;
        let settings = format!("{{\"url\":\"{}\"}}", self.store);
        let request = Request::Attach { ino, listed: true, settings: settings.as_bytes() };
        if let Ok(()) | Err(Code::Exists) = self.pool.request(&request, |_| Ok(())) {
            let mut ledger = self.ledger();
            ledger.root = Some(ino);
            ledger.directories.push(ino);
        }
    }

    fn directory(&mut self) -> Ino {
        let ledger = self.shared.lock();
        let n = ledger.directories.len() as u64;
        ledger.directories[self.numbers.below(n) as usize]
    }

    fn place(&mut self, letter: char) -> Place {
        let name = format!("{letter}{}{}", self.index, self.numbers.below(NAMES));
        (self.directory(), name.into_bytes())
    }

    /// A file, of this program's own ones if it is to be written.
    fn file(&mut self, own: bool) -> Option<Ino> {
        let ledger = self.shared.lock();
        let fits = |file: &super::ledger::File| {
            !file.is_gone && (!own || file.writer == self.index && !file.in_doubt)
        };
        let all: Vec<Ino> = ledger.files.iter().filter(|(_, file)| fits(file)).map(|(ino, _)| *ino).collect();
        match all.len() as u64 {
            0 => None,
            n => Some(all[self.numbers.below(n) as usize]),
        }
    }

    fn create(&mut self) -> Result<(), Code> {
        let place = self.place('f');
        let made = self.pool.create(caller(), place.0, &place.1, 0o644, true, 0);
        let (entry, fd) = match made {
            Ok((entry, _, fd)) => (entry, fd),
            Err(code) => {
                if is_doubtful(code) {
                    self.ledger().expect(place, self.index, Expected::Unknown);
                }
                return Err(code);
            }
        };
        let ino = entry.attr.ino;
        {
            let mut ledger = self.ledger();
            let before = ledger.judge_name(&place, None);
            assert_kept(before);
            ledger.made(ino, self.index);
            ledger.expect(place, self.index, Expected::Inode(ino));
        }
        let held = match fd {
            Some(fd) => Held::Descriptor { ino, fd, writes: true },
            None => Held::Requests { file: Box::new(self.pool.open_file(&entry, true)?), writes: true },
        };
        self.write_by(&held)?;
        if self.numbers.chance(150) && self.held.len() < HELD_MAX {
            self.held.push(held);
        }
        Ok(())
    }

    /// Writes a new value.
    fn write_by(&self, held: &Held) -> Result<(), Code> {
        let ino = held.ino();
        let value = {
            let mut ledger = self.ledger();
            let value = ledger.new_value();
            ledger.begins(ino, value);
            value
        };
        held.write(&content(value, bytes_of(ino)))?;
        self.ledger().acknowledged(ino);
        Ok(())
    }

    /// Reads, and judges what it reads.
    fn read_by(&self, held: &Held, before: usize) -> Result<Option<u32>, Code> {
        let bytes = held.read()?;
        let value = value_of(&bytes).unwrap_or_else(|why| panic!("{why}: {}", held.ino()));
        assert_kept(self.ledger().judge(held.ino(), value, before));
        Ok(value)
    }

    fn open(&self, ino: Ino, writes: bool, by_requests: bool) -> Result<Held, Code> {
        let entry = self.pool.get_attr(ino)?;
        if !by_requests {
            let access = if writes { libc::O_RDWR } else { libc::O_RDONLY };
            match self.pool.open_backing(&entry, access | libc::O_CLOEXEC) {
                Err(Code::NotSupported) => {}
                opened => {
                    // SAFETY: the descriptor is new and ours.
                    let fd = unsafe { OwnedFd::from_raw_fd(opened?) };
                    return Ok(Held::Descriptor { ino, fd, writes });
                }
            }
        }
        Ok(Held::Requests { file: Box::new(self.pool.open_file(&entry, writes)?), writes })
    }

    /// Notes that a file is gone.
    fn found<T>(&self, ino: Ino, result: Result<T, Code>) -> Result<T, Code> {
        if let Err(Code::NotFound) = result {
            if let Some(file) = self.ledger().files.get_mut(&ino) {
                file.is_gone = true;
            }
        }
        result
    }

    fn write(&mut self) -> Result<(), Code> {
        let Some(ino) = self.file(true) else { return Ok(()) };
        let by_requests = self.numbers.chance(500);
        let held = self.open(ino, true, by_requests);
        let held = self.found(ino, held)?;
        self.write_by(&held)
    }

    fn read(&mut self) -> Result<(), Code> {
        let Some(ino) = self.file(false) else { return Ok(()) };
        let before = self.ledger().count(ino);
        let by_requests = self.numbers.chance(500);
        let held = self.open(ino, false, by_requests);
        let held = self.found(ino, held)?;
        self.read_by(&held, before).map(drop)
    }

    fn hold(&mut self, writes: bool) -> Result<(), Code> {
        let Some(ino) = self.file(writes) else { return Ok(()) };
        if self.held.len() >= HELD_MAX {
            return Ok(());
        }
        let (by_requests, maps) = (self.numbers.chance(400), self.numbers.chance(300));
        let held = self.open(ino, writes, by_requests);
        let mut held = self.found(ino, held)?;
        if let (Held::Descriptor { fd, .. }, true) = (&held, writes && maps) {
            // A mapping beyond the end of the file would end in SIGBUS.
            let bytes = bytes_of(ino);
            // SAFETY: plain system calls on a descriptor of ours; the kernel chooses the place.
            let start = unsafe {
                let mut st: libc::stat = std::mem::zeroed();
                libc::fstat(fd.as_raw_fd(), &raw mut st);
                match st.st_size as usize >= bytes {
                    true => {
                        let access = libc::PROT_READ | libc::PROT_WRITE;
                        libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd.as_raw_fd(), 0)
                    }
                    false => libc::MAP_FAILED,
                }
            };
            if start != libc::MAP_FAILED {
                held = Held::Mapped { ino, start: start.cast() };
            }
        }
        self.held.push(held);
        Ok(())
    }

    fn use_held(&mut self) -> Result<(), Code> {
        if self.held.is_empty() {
            return Ok(());
        }
        let i = self.numbers.below(self.held.len() as u64) as usize;
        let held = &self.held[i];
        let before = self.ledger().count(held.ino());
        let is_in_doubt = self.ledger().files.get(&held.ino()).is_none_or(|file| file.in_doubt);
        let done = match held.writes() && !is_in_doubt {
            true => self.write_by(held),
            false => self.read_by(held, before).map(drop),
        };
        if done.is_err() {
            // The worker of its node was killed, perhaps.
            drop(self.held.swap_remove(i));
        }
        done
    }

    /// One of this program's names, with what it leads to.
    fn own_name(&mut self) -> Option<(Place, Ino)> {
        let ledger = self.shared.lock();
        let mine = |(place, (program, expected)): (&Place, &(usize, Expected))| match expected {
            Expected::Inode(ino) if *program == self.index => Some((place.clone(), *ino)),
            _ => None,
        };
        let all: Vec<_> = ledger.names.iter().filter_map(mine).collect();
        match all.len() as u64 {
            0 => None,
            n => Some(all[self.numbers.below(n) as usize].clone()),
        }
    }

    fn rename(&mut self) -> Result<(), Code> {
        let Some((from, ino)) = self.own_name() else { return Ok(()) };
        let is_directory = self.ledger().directories.contains(&ino);
        let to = self.place(if is_directory { 'd' } else { 'f' });
        let done = self.pool.rename_in(from.0, &from.1, to.0, &to.1, 0);
        let mut ledger = self.ledger();
        let replaced = ledger.names.get(&to).map(|(_, expected)| *expected);
        match done {
            // Two names of one inode stay as they are.
            Ok(()) if replaced == Some(Expected::Inode(ino)) => {}
            // They may be of one inode.
            Ok(()) if replaced == Some(Expected::Unknown) => {
                ledger.expect(from, self.index, Expected::Unknown);
                ledger.expect(to, self.index, Expected::Inode(ino));
            }
            Ok(()) => {
                ledger.expect(from, self.index, Expected::Nothing);
                ledger.expect(to, self.index, Expected::Inode(ino));
            }
            Err(code) if is_doubtful(code) => {
                ledger.expect(from, self.index, Expected::Unknown);
                ledger.expect(to, self.index, Expected::Unknown);
            }
            Err(_) => {}
        }
        done
    }

    fn link(&mut self) -> Result<(), Code> {
        let Some(ino) = self.file(true) else { return Ok(()) };
        let place = self.place('f');
        let done = self.pool.link_in(ino, place.0, &place.1);
        let expected = match done {
            Ok(_) => Expected::Inode(ino),
            Err(code) if is_doubtful(code) => Expected::Unknown,
            Err(_) => return done.map(drop),
        };
        self.ledger().expect(place, self.index, expected);
        done.map(drop)
    }

    fn unlink(&mut self) -> Result<(), Code> {
        let Some((place, ino)) = self.own_name() else { return Ok(()) };
        let is_directory = self.ledger().directories.contains(&ino);
        let done = match is_directory {
            true => self.pool.remove_directory_in(place.0, &place.1),
            false => self.pool.unlink_in(place.0, &place.1),
        };
        let mut ledger = self.ledger();
        match done {
            Ok(()) => {
                ledger.expect(place, self.index, Expected::Nothing);
                ledger.directories.retain(|other| *other != ino);
            }
            Err(code) if is_doubtful(code) => ledger.expect(place, self.index, Expected::Unknown),
            Err(_) => {}
        }
        done
    }

    fn mkdir(&mut self) -> Result<(), Code> {
        let place = self.place('d');
        let done = self.pool.make_directory_in(caller(), place.0, &place.1, 0o755);
        let mut ledger = self.ledger();
        match &done {
            Ok(made) => {
                ledger.expect(place, self.index, Expected::Inode(made.attr.ino));
                ledger.directories.push(made.attr.ino);
            }
            Err(code) if is_doubtful(*code) => ledger.expect(place, self.index, Expected::Unknown),
            Err(_) => {}
        }
        done.map(drop)
    }

    /// Takes over files that were in the store before.
    fn import(&mut self, root: Ino) -> Result<(), Code> {
        let (mut all, mut listing) = (Vec::new(), self.pool.read_directory(root));
        while let Some(entry) = listing.next(self.pool)? {
            if entry.kind == Kind::File && entry.name.first() == Some(&b'i') {
                all.push((entry.name.to_vec(), entry.ino));
            }
        }
        for (name, ino) in all {
            let number: u32 = std::str::from_utf8(&name[1..]).ok().and_then(|n| n.parse().ok()).unwrap_or(0);
            // Its bytes are those of its length, which is the inode's only if the store gave it that.
            let entry = self.pool.get_attr(ino)?;
            if entry.attr.is_file() && number as usize % 8 == self.index {
                let place = (root, name);
                let mut ledger = self.ledger();
                ledger.imported(ino, self.index, FOREIGN + number);
                if !ledger.names.contains_key(&place) {
                    ledger.expect(place, self.index, Expected::Inode(ino));
                }
            }
        }
        Ok(())
    }

    /// Looks at one of its names.
    fn look(&mut self) -> Result<(), Code> {
        let letter = if self.numbers.chance(800) { 'f' } else { 'd' };
        let place = self.place(letter);
        match self.pool.lookup(place.0, &place.1) {
            Ok(entry) => assert_kept(self.ledger().judge_name(&place, Some(entry.attr.ino))),
            // It may be the directory that is gone.
            Err(Code::NotFound) if self.pool.get_attr(place.0).is_ok() => {
                assert_kept(self.ledger().judge_name(&place, None));
            }
            Err(code) => return Err(code),
        }
        Ok(())
    }

    fn await_drained(&mut self) {
        loop {
            let pending =
                self.pool.request(&Request::Pending { parent: Ino(0), name: b"" }, |reply| match reply {
                    Reply::Bytes(bytes) => PendingPlace::decode_list(bytes),
                    _ => Err(Code::Malformed),
                });
            match pending {
                Ok(places) if waits_for_people(&places) => {
                    self.in_conflict = places.iter().filter_map(wanted_by).collect();
                    self.conflicts = places.into_iter().map(|place| (place.parent, place.name)).collect();
                    return;
                }
                Ok(places) => {
                    let names: Vec<_> = places.iter().map(described).collect();
                    *super::WAITS_FOR.lock().unwrap_or_else(PoisonError::into_inner) = names.join("; ");
                }
                Err(_) => {}
            }
            super::store::sleep(std::time::Duration::from_millis(200));
        }
    }

    /// Reads all names and files of the tree, and compares them with what was acknowledged.
    fn compare(&mut self) {
        let Some(root) = self.ledger().root else { return };
        let (mut tree, mut conflicts) = (super::Tree::new(), BTreeSet::new());
        let mut left = vec![(root, Vec::new())];
        while let Some((directory, path)) = left.pop() {
            let (mut entries, mut listing) = (Vec::new(), self.pool.read_directory(directory));
            while let Some(entry) =
                listing.next(self.pool).unwrap_or_else(|code| panic!("{BROKEN_LIST}{}", code.name()))
            {
                if entry.name != b"." && entry.name != b".." {
                    entries.push((entry.name.to_vec(), entry.ino, entry.kind));
                }
            }
            let expected: Vec<Place> =
                self.ledger().names.keys().filter(|place| place.0 == directory).cloned().collect();
            for place in expected {
                let found = entries.iter().find(|entry| entry.0 == place.1).map(|entry| entry.1);
                assert_kept(self.ledger().judge_name(&place, found));
            }
            for (name, ino, kind) in entries {
                let mut path = path.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&name);
                if self.conflicts.contains(&(directory, name)) {
                    conflicts.insert(path.clone());
                }
                match kind {
                    Kind::Directory => {
                        tree.insert(path.clone(), None);
                        left.push((ino, path));
                    }
                    _ => drop(tree.insert(path, Some(self.read_whole(ino)))),
                }
            }
        }
        *super::TREE.lock().unwrap_or_else(PoisonError::into_inner) = (tree, conflicts);
    }

    fn read_whole(&self, ino: Ino) -> Vec<u8> {
        let before = self.ledger().count(ino);
        let read = || -> Result<Vec<u8>, Code> {
            let file = self.pool.open_file(&self.pool.get_attr(ino)?, false)?;
            let mut bytes = vec![0; 100_000];
            let n = file.read_at(&mut bytes, 0)?;
            bytes.truncate(n);
            Ok(bytes)
        };
        let bytes = match read() {
            // Its only version was replaced in the store by another program.
            Err(Code::Io) if self.in_conflict.contains(&ino) => return b"in conflict".to_vec(),
            read => read.unwrap_or_else(|code| panic!("{BROKEN_LIST}{ino}: {}", code.name())),
        };
        let value = value_of(&bytes).unwrap_or_else(|why| panic!("{why}: {ino}"));
        if self.ledger().files.contains_key(&ino) {
            assert_kept(self.ledger().judge(ino, value, before));
        }
        bytes
    }
}

const BROKEN_LIST: &str = "a promise is broken: without faults the tree cannot be read: ";

/// True if nothing is pending but conflicts, and old places of files whose new ones are in conflict.
fn waits_for_people(places: &[PendingPlace]) -> bool {
    let in_conflict: BTreeSet<Ino> = places.iter().filter(|p| p.conflict).filter_map(wanted_by).collect();
    let is_old = |place: &PendingPlace| {
        place.wanted.is_none() && place.placed.is_some_and(|placed| in_conflict.contains(&placed.ino))
    };
    places.iter().all(|place| place.conflict || is_old(place))
}

/// The inode that a pending place is to have.
fn wanted_by(place: &PendingPlace) -> Option<Ino> {
    match &place.wanted {
        Some(Wanted::Here(Entry { attr, .. }, _)) => Some(attr.ino),
        _ => None,
    }
}

/// A pending place, for people.
fn described(place: &PendingPlace) -> String {
    let wanted = match &place.wanted {
        Some(Wanted::Here(Entry { attr, .. }, _)) => format!("{} flags {:x}", attr.ino, attr.flags),
        Some(Wanted::Elsewhere(node, _)) => format!("elsewhere: {node:?}"),
        None => "nothing".to_owned(),
    };
    format!("{} {}: {wanted}", place.parent, place.name.escape_ascii())
}
