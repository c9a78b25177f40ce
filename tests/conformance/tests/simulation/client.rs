//! A simulated client: the client library on a thread of its own. It executes operations that its random numbers
//! choose, until its plan is to read the whole tree and then to end.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_client::{LockPlace, Pool, Role};
use forebay_fabric::Numbers;
use forebay_types::{Caller, Code, Entry, Ino, Kind, Layout, Parts, SetAttr};
use forebay_volume::Far;

use crate::baton::Baton;
use crate::history::{Name, Op, Outcome, Recorder};
use crate::locks::{Locked, LockedElsewhere};
use crate::words::{self, Words};
use crate::world::Plot;

const XATTR: &[u8] = b"user.word";
/// The layout of spread files, which lie over two nodes.
const STRIPES: u16 = 4;
const STRIPE_BYTES: u32 = 4096;
/// Offset and length of a file's block. The block is too long for a request, and short enough that one transfer moves
/// it, so that it is written at one moment.
const BLOCK_AT: u64 = 4096;
const BLOCK_BYTES: usize = 60 << 10;
/// Names in a directory: few, so that clients conflict.
const NAMES: u64 = 5;

/// What a client does when it has the baton between two operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    /// Execute an operation that its random numbers choose.
    Anything,
    /// List and stat all inodes that can be reached from the root.
    LookAtAll,
    /// End its thread.
    End,
}

/// A planted defect. The simulation must find it, to show that it would find other defects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Defect {
    /// A restarted worker forgets the kept replies of other nodes' processes.
    ForgetsReplies,
    /// A restarted worker forgets which appends are done.
    ForgetsAppends,
    /// A restarted worker forgets the last atomic operations of other nodes' processes.
    ForgetsAtomics,
    /// A restarted worker forgets which locks other nodes' processes hold.
    ForgetsLocks,
    /// A restarted worker forgets which process has the turn to append to a spread file.
    ForgetsTurns,
    /// `fallocate` of a spread file does nothing.
    AllocatesNothing,
    /// `stat` of a wide directory returns the attributes of its home alone, without those of its parts.
    CountsWithoutParts,
    /// The canary of an eager buffer is not checked: data are used before they have arrived.
    TrustsPlaces,
}

impl Defect {
    pub(crate) const ALL: [(Defect, &'static str); 8] = [
        (Defect::ForgetsReplies, "replies"),
        (Defect::ForgetsAppends, "appends"),
        (Defect::ForgetsAtomics, "atomics"),
        (Defect::ForgetsLocks, "locks"),
        (Defect::ForgetsTurns, "turns"),
        (Defect::AllocatesNothing, "allocates"),
        (Defect::CountsWithoutParts, "counts"),
        (Defect::TrustsPlaces, "trusts"),
    ];
}

/// The inodes that clients have created. Each client may use what another created.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) directories: Vec<Ino>,
    pub(crate) files: Vec<Made>,
    pub(crate) next_value: u32,
}

/// A file, what clients do with it, and the index of its creator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    ino: Ino,
    use_of: Use,
    maker: usize,
}

/// What clients do with a file's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    /// It has a word and a block, which clients overwrite.
    Written,
    /// Clients append to it.
    Appended,
    /// It is spread, and only its size changes.
    Spread,
    /// It is spread, and clients append to it.
    SpreadAppended,
}

impl Use {
    fn of(entry: &Entry) -> Use {
        match (entry.layout.is_single(), entry.attr.ino.0.is_multiple_of(2)) {
            (true, false) => Use::Written,
            (true, true) => Use::Appended,
            (false, false) => Use::Spread,
            (false, true) => Use::SpreadAppended,
        }
    }
}

/// What scheduler and clients share. Only one of them runs at a time.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) recorder: Recorder,
    planted: Option<Defect>,
    /// Half of the operations are on data, and half of the files are spread.
    much_data: bool,
    /// Clients lock files.
    locks: bool,
    /// Many operations read or write files' blocks.
    blocks: bool,
    words: Option<Words>,
    known: Arc<Mutex<Known>>,
}

impl Common {
    pub(crate) fn new(recorder: Recorder, plot: &Plot, words: Option<Words>) -> Common {
        let Plot { planted, much_data, locks, blocks, .. } = *plot;
        let known = Known { directories: vec![Ino::ROOT], ..Known::default() };
        Common { recorder, planted, much_data, locks, blocks, words, known: Arc::new(Mutex::new(known)) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client as the scheduler sees it.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) baton: Baton,
    pub(crate) node: u16,
    pub(crate) session: u64,
    pub(crate) plan: Arc<Mutex<Plan>>,
    pub(crate) killed: bool,
    pub(crate) locked: Locked,
}

impl Client {
    /// Starts a client of `node`. The socket for attaching is in `dir`.
    pub(crate) fn start(
        index: usize,
        node: u16,
        session: u64,
        dir: PathBuf,
        seed: u64,
        common: Common,
    ) -> Client {
        let (baton, plan) = (Baton::new(), Arc::new(Mutex::new(Plan::Anything)));
        let (seat, orders) = (baton.clone(), Arc::clone(&plan));
        let locked = Locked::default();
        let its = locked.clone();
        let follow = move |seat: &Baton| {
            let pool = Pool::attach_as(&dir, Role::Tool).unwrap_or_else(|e| panic!("{e}"));
            let numbers = Numbers::new(seed);
            let elsewhere = LockedElsewhere::default();
            let doubtful = Vec::new();
            let mut program = Program {
                pool,
                index,
                node,
                numbers,
                common,
                locked: its,
                elsewhere,
                doubtful,
                fresh: true,
                piece: None,
                seen: 0,
            };
            loop {
                seat.between_operations();
                let plan = *orders.lock().unwrap_or_else(PoisonError::into_inner);
                match plan {
                    Plan::Anything => program.anything(),
                    Plan::LookAtAll => {
                        program.look_at_all();
                        *orders.lock().unwrap_or_else(PoisonError::into_inner) = Plan::End;
                    }
                    Plan::End => return,
                }
            }
        };
        let body = move || {
            seat.sit_down();
            let followed = catch_unwind(AssertUnwindSafe(|| follow(&seat)));
            seat.end(followed.is_err());
        };
        std::thread::Builder::new().name(format!("client {index}")).spawn(body).unwrap();
        // The client attaches now, while its node is running.
        baton.pass();
        Client { baton, node, session, plan, killed: false, locked }
    }

    pub(crate) fn set_plan(&self, plan: Plan) {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner) = plan;
    }

    pub(crate) fn plan(&self) -> Plan {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends to a file of this node with `O_APPEND`, as programs do.
fn append_here(pool: &Pool, entry: &Entry, bytes: &[u8]) -> Result<usize, Code> {
    let fd = pool.open_backing(entry, libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC)?;
    // SAFETY: the descriptor is new and ours.
    let mut file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    Ok(std::io::Write::write(&mut file, bytes).unwrap_or_else(|e| panic!("cannot append: {e}")))
}

/// The content of a file that clients append to: the values of whole appends, in order, and the values of which the
/// file has anything else.
fn appended(bytes: &[u8]) -> Outcome {
    assert!(bytes.len().is_multiple_of(4), "a word is torn");
    let words: Vec<u32> = bytes.chunks(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    let (mut whole, mut torn) = (Vec::new(), BTreeSet::new());
    for run in words.chunk_by(|a, b| a == b) {
        let value = run[0];
        let length = if value & 1 == 1 { BLOCK_BYTES / 4 } else { 1 };
        match run.len() == length && value != 0 {
            true => whole.push(value),
            false => drop(torn.insert(value)),
        }
    }
    Outcome::Appended { whole, torn }
}

fn letters() -> impl Iterator<Item = Name> {
    (0..NAMES).map(|i| Name(b'a' + i as u8))
}

/// The letters of each part, as bits.
fn letters_of(parts: &Parts) -> Vec<u32> {
    let its = |part: &Ino| letters().filter(|name| parts.of_name(name.bytes()) == *part).map(Name::bit).sum();
    parts.as_slice().iter().map(its).collect()
}

/// The listed names that are among these letters.
fn among(names: &BTreeMap<Name, Ino>, letters: u32) -> BTreeMap<Name, Ino> {
    names.iter().filter(|(name, _)| name.bit() & letters != 0).map(|(name, ino)| (*name, *ino)).collect()
}

struct Program {
    pool: &'static Pool,
    index: usize,
    node: u16,
    numbers: Numbers,
    common: Common,
    locked: Locked,
    elsewhere: LockedElsewhere,
    /// Numbers, in the history, of its lock operations with unknown outcome.
    doubtful: Vec<usize>,
    /// It has executed no operation yet.
    fresh: bool,
    /// The piece with the word, once it could be opened, and what the word was after the last call that succeeded.
    piece: Option<Arc<dyn Far>>,
    seen: u64,
}

impl Program {
    fn name(&mut self) -> Name {
        Name(b'a' + self.numbers.below(NAMES) as u8)
    }

    /// A directory: mostly one of the last four created, as older ones are often removed.
    fn directory(&mut self) -> Ino {
        let known = self.common.known();
        let n = known.directories.len() as u64;
        let i = if self.numbers.chance(300) { 0 } else { n - 1 - self.numbers.below(n.min(4)) };
        known.directories[i as usize]
    }

    fn file(&mut self) -> Option<Made> {
        let known = self.common.known();
        let n = known.files.len() as u64;
        (n > 0).then(|| known.files[(n - 1 - self.numbers.below(n.min(5))) as usize])
    }

    fn choose(&mut self) -> Op {
        let (dir, name) = (self.directory(), self.name());
        let file = self.file();
        let value = || {
            let mut known = self.common.known();
            known.next_value += 1;
            known.next_value
        };
        if let (Some(Made { ino, .. }), true) = (file, self.common.locks && self.numbers.chance(300)) {
            let client = self.index;
            return match self.numbers.chance(600) {
                true => Op::Lock { ino, client },
                false => Op::Unlock { ino, client },
            };
        }
        let block = file.filter(|made| made.use_of == Use::Written);
        if let (true, Some(Made { ino, .. })) = (self.common.blocks && self.numbers.chance(400), block) {
            return match self.numbers.chance(600) {
                true => Op::Write { ino, value: value(), large: true },
                false => Op::Read { ino, large: true },
            };
        }
        let much_data = self.common.much_data;
        let kind = if much_data && self.numbers.chance(500) { 92 } else { self.numbers.below(100) };
        match (kind, file) {
            (0..=16, _) => Op::Create { dir, name, spread: much_data && self.numbers.chance(500) },
            (17..=19, _) => Op::Create { dir, name, spread: true },
            (20..=33, _) => Op::Mkdir { dir, name },
            (34, _) => Op::Symlink { dir, name },
            (35..=36, _) => Op::Widen { dir },
            (37..=46, _) => Op::Unlink { dir, name },
            (47..=56, _) => Op::Rmdir { dir, name },
            (57..=66, _) => {
                let (to_dir, to_name) = (self.directory(), self.name());
                Op::Rename { dir, name, to_dir, to_name, replaces: self.numbers.chance(700) }
            }
            (67..=70, Some(Made { ino, .. })) => Op::Link { ino, dir, name },
            (71, _) => Op::Widen { dir },
            (72, _) => Op::WidenNew { dir },
            (73..=79, _) => Op::Lookup { dir, name },
            (80..=83, _) => Op::List { dir },
            (84..=86, Some(Made { ino, .. })) => Op::Stat { ino },
            (87..=89, Some(Made { ino, .. })) => {
                Op::Chmod { ino, mode: 0o600 + self.numbers.below(64) as u32 }
            }
            (90, Some(Made { ino, .. })) => Op::SetXattr { ino, value: value() },
            (91, Some(Made { ino, .. })) => Op::GetXattr { ino },
            (92..=99, Some(Made { ino, use_of, maker })) => {
                let (changes, large) = (self.numbers.chance(600), self.numbers.chance(600));
                let bytes = self.numbers.below(12) as u32 * 3000;
                match use_of {
                    Use::Written if changes => Op::Write { ino, value: value(), large },
                    Use::Written => Op::Read { ino, large },
                    Use::Appended | Use::SpreadAppended if changes => {
                        let spread = use_of == Use::SpreadAppended;
                        Op::Append { ino, value: value() << 1 | u32::from(large), large, spread }
                    }
                    Use::Appended => Op::ReadAppended { ino },
                    // A read during appends over several nodes may see any part of them, so it is not checked.
                    Use::SpreadAppended => Op::Stat { ino },
                    Use::Spread if maker != self.index => Op::Stat { ino },
                    Use::Spread if !changes => Op::Size { ino },
                    Use::Spread if large => Op::Truncate { ino, bytes },
                    Use::Spread => Op::Allocate { ino, bytes },
                }
            }
            _ => Op::Lookup { dir, name },
        }
    }

    /// Executes an operation on the word, if the client can open its piece.
    fn change_word(&mut self, words: &Words) {
        if self.piece.is_none() {
            self.piece = self.pool.open_pieces(vec![words::backing()]).ok();
        }
        let Some(piece) = &self.piece else { return };
        let op = words.choose(&mut self.numbers, self.seen);
        let index = words.asked(self.index, op);
        let result = piece.atomic(words::backing(), words::word(), op);
        match result {
            Ok(was) => self.seen = words::after(op, was),
            // Its session may be over: the next one opens the piece again.
            Err(Code::PoolGone) => self.piece = None,
            Err(Code::Io | Code::TimedOut) => {}
            Err(code) => panic!("an atomic operation failed: {}", code.name()),
        }
        words.answered(self.index, index, result);
    }

    fn anything(&mut self) {
        if let Some(words) = self.common.words.clone().filter(|_| self.node != words::HOME) {
            if self.numbers.chance(400) {
                return self.change_word(&words);
            }
        }
        // Only an empty directory can be made wide, and the root is empty only at the beginning.
        let is_first = self.index == 0 && std::mem::take(&mut self.fresh);
        let op =
            if is_first && self.numbers.chance(400) { Op::Widen { dir: Ino::ROOT } } else { self.choose() };
        self.record(op);
    }

    fn record(&mut self, op: Op) -> Outcome {
        if let Op::List { dir } = op {
            if let Ok(Some(parts)) = self.pool.parts_of(dir) {
                return self.list_parts(dir, &parts);
            }
        }
        // On a node without a target, the node of a new directory depends on its parent directory. 0 stands for any
        // node.
        let home = if self.pool.takes_files() { self.node } else { 0 };
        let recorder = &self.common.recorder;
        let starts = recorder.starts();
        let index = recorder.asked(self.index, home, &op);
        let (outcome, made) = match self.execute(&op) {
            Ok((outcome, made)) => (outcome, made),
            Err(code) => (Outcome::Failed(code), None),
        };
        // If a worker was killed before it replied to a write, the client sends the write again to the next worker,
        // which repeats it or finds that the file was removed meanwhile.
        let may_be_again = matches!(outcome, Outcome::Done | Outcome::Failed(Code::Stale | Code::NotFound));
        if matches!(op, Op::Write { .. }) && may_be_again && starts != recorder.starts() {
            recorder.may_have_been_repeated(index);
        }
        if matches!(op, Op::Lock { .. } | Op::Unlock { .. }) && outcome.is_doubtful() {
            self.doubtful.push(index);
        }
        // A client releases a lock whose outcome is unknown as soon as the lock's node can be reached.
        if let (Op::Lock { ino, client }, true) = (&op, outcome.is_doubtful()) {
            let unlock = recorder.asked(self.index, 0, &Op::Unlock { ino: *ino, client: *client });
            self.doubtful.push(unlock);
        }
        match (&op, &outcome) {
            (Op::List { dir }, Outcome::Names(names)) => self.listed(*dir, index, names),
            _ => recorder.answered(index, outcome.clone()),
        }
        let mut known = self.common.known();
        match (&op, &outcome) {
            (Op::Mkdir { .. }, Outcome::Inode(ino)) => known.directories.push(*ino),
            (Op::Create { .. }, Outcome::Inode(ino)) => {
                let made = made.map(|use_of| Made { ino: *ino, use_of, maker: self.index });
                known.files.extend(made);
            }
            _ => {}
        }
        outcome
    }

    /// Records a listing of a directory that had no parts when the listing began. If it still has none, all names are
    /// from one moment.
    fn listed(&self, dir: Ino, index: usize, names: &BTreeMap<Name, Ino>) {
        let recorder = &self.common.recorder;
        let letters = match self.pool.parts_of(dir) {
            Ok(None) => return recorder.answered(index, Outcome::Names(names.clone())),
            Ok(Some(parts)) => letters_of(&parts),
            // The parts are unknown, so each name may be from another moment.
            Err(_) => letters().map(Name::bit).collect(),
        };
        for (part, letters) in recorder.is_of_parts(index, &letters) {
            recorder.answered(part, Outcome::Names(among(names, letters)));
        }
    }

    /// Lists a wide directory. The names of one part are from one moment; different parts may be from different
    /// moments.
    fn list_parts(&mut self, dir: Ino, parts: &Parts) -> Outcome {
        let asked = |letters| {
            (self.common.recorder.asked(self.index, self.node, &Op::ListPart { dir, letters }), letters)
        };
        let recorded: Vec<(usize, u32)> = letters_of(parts).into_iter().map(asked).collect();
        let listed = self.execute(&Op::List { dir });
        let outcome = listed.map_or_else(Outcome::Failed, |(outcome, _)| outcome);
        for (index, letters) in recorded {
            let its = match &outcome {
                Outcome::Names(names) => Outcome::Names(among(names, letters)),
                other => other.clone(),
            };
            self.common.recorder.answered(index, its);
        }
        outcome
    }

    /// Executes an operation. Returns its outcome, and the use of a created file.
    fn execute(&self, op: &Op) -> Result<(Outcome, Option<Use>), Code> {
        let mut made = None;
        let outcome = self.execute_as(op, &mut made)?;
        Ok((outcome, made))
    }

    fn execute_as(&self, op: &Op, made: &mut Option<Use>) -> Result<Outcome, Code> {
        // SAFETY: these calls cannot fail.
        let caller = unsafe { Caller { uid: libc::geteuid(), gid: libc::getegid() } };
        let pool = self.pool;
        Ok(match op {
            Op::Create { dir, name, spread: false } => {
                let (entry, _, _) = pool.create(caller, *dir, name.bytes(), 0o644, true, 0)?;
                *made = Some(Use::of(&entry));
                Outcome::Inode(entry.attr.ino)
            }
            Op::Create { dir, name, spread: true } => {
                let layout = Layout::on(&[1 << 16, 2 << 16], STRIPES, STRIPE_BYTES)?;
                let (entry, _) = pool.create_entry(*dir, name.bytes(), 0o644, true, Some(layout))?;
                *made = Some(Use::of(&entry));
                Outcome::Inode(entry.attr.ino)
            }
            Op::Mkdir { dir, name } => {
                Outcome::Inode(pool.make_directory_in(caller, *dir, name.bytes(), 0o755)?.attr.ino)
            }
            Op::Symlink { dir, name } => {
                Outcome::Inode(pool.symlink_in(caller, *dir, name.bytes(), b"target")?.attr.ino)
            }
            Op::Link { ino, dir, name } => {
                pool.link_in(*ino, *dir, name.bytes())?;
                Outcome::Done
            }
            Op::Unlink { dir, name } => {
                pool.unlink_in(*dir, name.bytes())?;
                Outcome::Done
            }
            Op::Rmdir { dir, name } => {
                pool.remove_directory_in(*dir, name.bytes())?;
                Outcome::Done
            }
            Op::Rename { dir, name, to_dir, to_name, replaces } => {
                let flags = if *replaces { 0 } else { libc::RENAME_NOREPLACE };
                pool.rename_in(*dir, name.bytes(), *to_dir, to_name.bytes(), flags)?;
                Outcome::Done
            }
            Op::Lookup { dir, name } => Outcome::Inode(pool.lookup(*dir, name.bytes())?.attr.ino),
            Op::List { dir } => {
                let (mut names, mut cursor) = (BTreeMap::new(), pool.read_directory(*dir));
                while let Some(entry) = cursor.next(pool)? {
                    assert!(entry.name.len() == 1, "a name nobody gave: {:?}", entry.name);
                    let twice = names.insert(Name(entry.name[0]), entry.ino);
                    assert!(twice.is_none(), "a name is listed twice");
                }
                Outcome::Names(names)
            }
            // `list_parts` records these operations; it executes `Op::List`.
            Op::ListPart { .. } => return Err(Code::NotSupported),
            Op::WidenNew { dir } => {
                pool.set_width_of_new(*dir, 16)?;
                Outcome::Done
            }
            Op::Widen { dir } => {
                pool.set_width(*dir, 0)?;
                Outcome::Done
            }
            Op::Stat { ino } => {
                let attr = pool.get_attr(*ino)?.attr;
                Outcome::Attr { kind: attr.kind(), links: attr.nlink, mode: attr.mode & 0o7777 }
            }
            Op::Chmod { ino, mode } => {
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                pool.set_attr(*ino, set)?;
                Outcome::Done
            }
            Op::SetXattr { ino, value } => {
                pool.set_xattr_inode(*ino, XATTR, &value.to_le_bytes(), 0)?;
                Outcome::Done
            }
            Op::GetXattr { ino } => {
                let mut bytes = [0; 4];
                match pool.get_xattr_inode(*ino, XATTR, &mut bytes) {
                    Ok(_) => Outcome::Value(Some(u32::from_le_bytes(bytes))),
                    Err(Code::NoAttribute) => Outcome::Value(None),
                    Err(code) => return Err(code),
                }
            }
            Op::Write { ino, value, large } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, true)?;
                let (count, at) = if *large { (BLOCK_BYTES / 4, BLOCK_AT) } else { (1, 0) };
                let bytes = value.to_le_bytes().repeat(count);
                match file.write_at(&bytes, at)? {
                    n if n == bytes.len() => Outcome::Done,
                    n => panic!("{n} of {} bytes were written", bytes.len()),
                }
            }
            Op::Append { ino, value, large, .. } => {
                let entry = pool.get_attr(*ino)?;
                let bytes = value.to_le_bytes().repeat(if *large { BLOCK_BYTES / 4 } else { 1 });
                let n = match pool.open_file(&entry, true)?.append(&bytes) {
                    Err(Code::NotSupported) => append_here(pool, &entry, &bytes)?,
                    appended => appended?,
                };
                assert_eq!(n, bytes.len(), "an append is whole");
                Outcome::Done
            }
            Op::ReadAppended { ino } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, false)?;
                let (mut all, mut piece) = (Vec::new(), vec![0; BLOCK_BYTES]);
                loop {
                    match file.read_at(&mut piece, all.len() as u64)? {
                        0 => break,
                        n => all.extend_from_slice(&piece[..n]),
                    }
                }
                appended(&all)
            }
            Op::Truncate { ino, bytes } => {
                pool.open_file(&pool.get_attr(*ino)?, true)?.truncate((*bytes).into())?;
                Outcome::Done
            }
            Op::Lock { ino, .. } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, true)?;
                match file.lock_place() {
                    LockPlace::Here(fd) => self.locked.take(*ino, fd)?,
                    LockPlace::There(locks) => self.elsewhere.take(*ino, locks)?,
                }
                Outcome::Done
            }
            Op::Unlock { ino, .. } => {
                if self.locked.drop_lock(*ino) {
                    return Ok(Outcome::Done);
                }
                let file = pool.open_file(&pool.get_attr(*ino)?, true)?;
                if let LockPlace::There(locks) = file.lock_place() {
                    self.elsewhere.drop_lock(*ino, locks)?;
                }
                Outcome::Done
            }
            Op::Allocate { ino, bytes } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, true)?;
                // The planted defect: no allocation.
                if *bytes > 0 && self.common.planted != Some(Defect::AllocatesNothing) {
                    file.allocate((*bytes).into())?;
                }
                Outcome::Done
            }
            Op::Size { ino } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, false)?;
                Outcome::Value(Some(file.size()? as u32))
            }
            Op::Count { dir } => {
                let (names, links) = match self.common.planted {
                    // The planted defect: the attributes of the parts are not included.
                    Some(Defect::CountsWithoutParts) => {
                        let attr = pool.get_attr(*dir)?.attr;
                        (attr.size, attr.nlink)
                    }
                    _ => {
                        let stat = pool.stat_inode(*dir)?;
                        (stat.st_size as u64, stat.st_nlink as u32)
                    }
                };
                let wide = pool.get_attr(*dir)?.attr.width_log2 != 0;
                Outcome::Count { names, directories: links - 2, wide }
            }
            Op::Read { ino, large } => {
                let file = pool.open_file(&pool.get_attr(*ino)?, false)?;
                let (count, at) = if *large { (BLOCK_BYTES / 4, BLOCK_AT) } else { (1, 0) };
                let mut bytes = vec![0; 4 * count];
                match file.read_at(&mut bytes, at)? {
                    0 => Outcome::Value(None),
                    n => {
                        let (first, rest) = bytes.split_at(4);
                        assert!(
                            n == bytes.len() && rest.chunks(4).all(|word| word == first),
                            "{n} bytes, not all alike, of what is written as a whole: {first:?}"
                        );
                        let word = u32::from_le_bytes([first[0], first[1], first[2], first[3]]);
                        // The word is 0, a hole, if only the block was written.
                        Outcome::Value(Some(word).filter(|word| *word != 0))
                    }
                }
            }
        })
    }

    /// Releases the locks with unknown outcome. Earlier lock operations have happened by then, or never will.
    fn settle_locks(&mut self) {
        let (doubts, client) = (self.elsewhere.take_doubts(), self.index);
        for ino in &doubts {
            self.record(Op::Unlock { ino: *ino, client });
        }
        let doubtful = std::mem::take(&mut self.doubtful);
        doubtful.into_iter().for_each(|index| self.common.recorder.is_over(index));
        for ino in doubts {
            self.record(Op::Unlock { ino, client });
        }
    }

    fn look_at_all(&mut self) {
        self.settle_locks();
        let (mut left, mut seen) = (vec![Ino::ROOT], BTreeSet::new());
        while let Some(dir) = left.pop() {
            let Outcome::Names(names) = self.record(Op::List { dir }) else { continue };
            self.record(Op::Count { dir });
            for ino in names.into_values() {
                if !seen.insert(ino) {
                    continue;
                }
                match self.record(Op::Stat { ino }) {
                    Outcome::Attr { kind: Kind::Directory, .. } => left.push(ino),
                    Outcome::Attr { kind: Kind::File, .. } => {
                        match self.pool.get_attr(ino).as_ref().map(Use::of) {
                            Ok(Use::Written) => {
                                self.record(Op::Read { ino, large: false });
                                self.record(Op::Read { ino, large: true });
                            }
                            Ok(Use::Appended | Use::SpreadAppended) => {
                                drop(self.record(Op::ReadAppended { ino }));
                            }
                            Ok(Use::Spread) => drop(self.record(Op::Size { ino })),
                            Err(_) => {}
                        }
                        self.record(Op::GetXattr { ino });
                        if self.common.locks {
                            let client = self.index;
                            self.record(Op::Lock { ino, client });
                            self.record(Op::Unlock { ino, client });
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
