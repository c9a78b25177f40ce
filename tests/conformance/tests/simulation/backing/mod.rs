//! A pool in front of a backing store: the mover's engine, whole, on each node, and programs on all nodes, with faults of
//! workers, movers, programs, network and store, and with changes of the store by others (docs/decisions/0041, 0042).
//!
//! Real: client library, worker, shard, network calls, the engine with its threads, leases of the kernel on backing
//! files, and the code for stores that are directories. Simulated: clock, scheduler, network, the store's answers.
//!
//! At each moment a program may read only what was written to a file, and nothing older than what was acknowledged. At
//! the end, without faults, everything is drained: then pool and store are equal except at places in conflict, also after
//! all files were released and restored, and nothing that another program wrote into the store was overwritten unseen.

pub(crate) mod ledger;
mod process;
mod program;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_server::stepped::session_of;
use forebay_tasks::Verb;
use forebay_types::NodeId;

use self::ledger::{content, value_of, Expected, Shared, BROKEN, FOREIGN};
use self::process::Mover;
use self::program::{Client, Plan};
use self::store::Weather;
use crate::baton::{Process, NOW_NS};
use crate::world::World;

/// Names of a tree below its root: a file's content, none for a directory.
type Tree = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// What the last program that compared has found in the pool, and the names in conflict.
static TREE: Mutex<(Tree, BTreeSet<Vec<u8>>)> = Mutex::new((Tree::new(), BTreeSet::new()));
/// What was pending when it was looked at last.
static WAITS_FOR: Mutex<String> = Mutex::new(String::new());

/// Files that the store has at the beginning.
const INITIAL_FILES: u32 = 6;
/// The longest that draining takes once there are no more faults.
const DRAIN: Duration = Duration::from_secs(240);
/// The longest that the daemons' own work and a link's pause between two attempts take.
const SETTLE: Duration = Duration::from_secs(15);
/// Session numbers of movers lie above those of programs.
const MOVERS: u64 = 1 << 20;
/// Names that movers give: temporaries, and versions beside others.
const OURS: &str = "forebay-";

/// See the module.
pub(crate) struct Front {
    pub(crate) shared: Shared,
    pub(crate) weather: Weather,
    store: PathBuf,
    /// Other programs change the store.
    is_shared: bool,
    /// The mover of each node, and how many it had.
    movers: Vec<(Option<Mover>, u64)>,
    /// The threads of each node's I/O workers.
    io: Vec<Option<Process>>,
    programs: Vec<Client>,
    next_foreign: u32,
    /// What other programs wrote into the store: value, inode number and modification time.
    foreign: Vec<(u32, (u64, u64))>,
}

fn version_of(path: &Path) -> std::io::Result<(u64, u64)> {
    let st = std::fs::symlink_metadata(path)?;
    Ok((st.ino(), st.mtime() as u64 * 1_000_000_000 + st.mtime_nsec() as u64))
}

/// The names below a directory of the machine.
fn tree_of(top: &Path) -> Tree {
    fn add(tree: &mut Tree, directory: &Path, path: &[u8]) {
        let mut entries: Vec<_> =
            std::fs::read_dir(directory).map(|all| all.flatten().collect()).unwrap_or_default();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let mut path = path.to_vec();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(entry.file_name().as_encoded_bytes());
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => {
                    tree.insert(path.clone(), None);
                    add(tree, &entry.path(), &path);
                }
                false => drop(std::fs::read(entry.path()).map(|bytes| tree.insert(path, Some(bytes)))),
            }
        }
    }
    let mut tree = Tree::new();
    add(&mut tree, top, b"");
    tree
}

fn is_ours(path: &[u8]) -> bool {
    String::from_utf8_lossy(path).contains(OURS)
}

impl Front {
    /// A store in a new directory, with some files.
    pub(crate) fn new(seed: u64, dir: &Path, nodes: u16) -> Front {
        let store = dir.join("store");
        std::fs::create_dir_all(&store).unwrap_or_else(|e| panic!("{}: {e}", store.display()));
        let weather = Weather::new(seed ^ 0x57_0e);
        let shared = Shared::default();
        for number in 0..INITIAL_FILES {
            std::fs::write(store.join(format!("i{number}")), content(FOREIGN + number, 4)).expect("a file");
        }
        process::take_over(weather.clone());
        Front {
            shared,
            weather,
            store,
            is_shared: seed % 2 == 1,
            movers: (0..nodes).map(|_| (None, 0)).collect(),
            io: (0..nodes).map(|_| None).collect(),
            programs: Vec::new(),
            next_foreign: FOREIGN + INITIAL_FILES,
            foreign: Vec::new(),
        }
    }

    /// Another program replaces a file of the store, or writes into it.
    fn change_store(&mut self, world: &mut World) {
        let files: Vec<_> = tree_of(&self.store)
            .into_iter()
            .filter_map(|(path, bytes)| bytes.filter(|_| !is_ours(&path)).map(|bytes| (path, bytes)))
            .collect();
        if files.is_empty() {
            return;
        }
        let (path, bytes) = &files[world.numbers.below(files.len() as u64) as usize];
        let Ok(Some(replaced)) = value_of(bytes) else { return };
        let value = self.next_foreign;
        self.next_foreign += 1;
        let at = self.store.join(String::from_utf8_lossy(path).as_ref());
        let bytes = content(value, bytes.len());
        let written = match world.numbers.chance(500) {
            true => std::fs::write(&at, bytes),
            false => {
                let beside = self.store.join("elsewhere");
                std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, &at))
            }
        };
        written.unwrap_or_else(|e| panic!("cannot change {}: {e}", at.display()));
        self.shared.lock().foreign.insert(value, replaced);
        self.foreign.push((value, version_of(&at).expect("it was written")));
        world.recorder.tell(format!(
            "another program writes {value} in place of {replaced} at {}",
            String::from_utf8_lossy(path)
        ));
    }

    fn start_mover(&mut self, world: &mut World, index: usize) {
        let number = world.hosts[index].number;
        self.end_mover(world, index, "");
        let (mover, starts) = &mut self.movers[index];
        *starts += 1;
        let session = session_of(NodeId(number), MOVERS + *starts);
        let Some(node) = world.hosts[index].node.as_mut() else { return };
        let ring = node.attach(session).unwrap_or_else(|e| panic!("{e}"));
        world.hosts[index].rings.insert(session, std::sync::Arc::new(ring));
        world.lay_out(index);
        let dir = world.dir.join(format!("mover{number}-{starts}"));
        std::fs::create_dir(&dir).expect("a directory");
        world.desk.open_door(&dir, session);
        *mover = Some(Mover::start(number, *starts, session, dir));
        world.recorder.tell(format!("mover {number}.{starts} starts"));
    }

    fn end_mover(&mut self, world: &mut World, index: usize, why: &str) {
        let Some(mover) = self.movers[index].0.take() else { return };
        world.end_process(index, mover.session, &mover.process);
        world.recorder.tell(format!("the mover of node {} ends{why}", index + 1));
    }

    fn kill_program(&mut self, world: &mut World, index: usize) {
        let client = &self.programs[index];
        // The first program lives on. Others are killed between two operations: in the middle of one, the library has
        // descriptors as bare numbers, which the kernel would close.
        if index == 0 || client.process.is_killed() || !client.seat.is_ready() {
            return;
        }
        world.end_process(usize::from(client.node) - 1, client.session, &client.process);
        world.recorder.tell(format!("program {index} is killed"));
        // What it had requested may be done or not.
        for (program, expected) in self.shared.lock().names.values_mut() {
            if *program == index {
                *expected = Expected::Unknown;
            }
        }
    }

    /// Injects a fault.
    fn trouble(&mut self, world: &mut World) {
        let index = world.numbers.below(world.hosts.len() as u64) as usize;
        match world.numbers.below(20) {
            0..=2 => self.end_mover(world, index, ": it is killed"),
            5 if self.is_shared => self.change_store(world),
            8 if world.numbers.chance(150) => {
                let program = world.numbers.below(self.programs.len() as u64) as usize;
                self.kill_program(world, program);
            }
            9..=15 => self.task(world, index, Verb::Release),
            16 => self.task(world, index, Verb::Refresh),
            17 => self.task(world, index, Verb::Purge),
            _ => {}
        }
    }

    fn task(&self, world: &World, index: usize, verb: Verb) {
        let root = self.shared.lock().root;
        if let (Some(root), Some(mover)) = (root, &self.movers[index].0) {
            world.recorder.tell(format!("node {}: {verb}", index + 1));
            mover.task(verb, root);
        }
    }

    /// Runs the threads of movers, I/O workers and programs.
    pub(crate) fn turn(&mut self, world: &mut World) {
        self.weather.turn();
        if world.chaos && world.numbers.chance(5) {
            self.trouble(world);
        }
        for index in 0..world.hosts.len() {
            if world.hosts[index].node.is_none() {
                if let Some(io) = self.io[index].take() {
                    io.kill();
                }
            } else if self.io[index].is_none() {
                self.io[index] = Some(start_io_workers(world, index));
            }
            if let Some(io) = self.io[index].as_ref().filter(|_| !world.hosts[index].stopped) {
                io.run(|| world.numbers.chance(600));
            }
            let has_mover = self.movers[index].0.as_ref().is_some_and(Mover::is_alive);
            if !has_mover && world.hosts[index].node.is_some() && world.numbers.chance(30) {
                self.start_mover(world, index);
            }
            if let Some(mover) = &self.movers[index].0 {
                mover.process.run(|| world.numbers.chance(700));
            }
        }
        let first = world.numbers.below(self.programs.len().max(1) as u64) as usize;
        for i in 0..self.programs.len() {
            let client = &self.programs[(first + i) % self.programs.len()];
            let is_ready = client.seat.is_ready();
            let may_run = match client.plan() {
                Plan::Rest => false,
                Plan::Anything if is_ready => world.chaos && world.numbers.chance(80),
                _ => world.numbers.chance(700),
            };
            if may_run && !client.process.is_killed() && (is_ready || client.seat.is_woken()) {
                client.seat.pass();
            }
        }
    }

    /// Starts a program on a node.
    pub(crate) fn add_program(&mut self, world: &mut World, number: u16) {
        let index = self.programs.len();
        let session = session_of(NodeId(number), index as u64 + 1);
        let dir = world.add_process(number, session, &format!("program{index}"));
        let (seed, url) = (world.numbers.draw(), format!("file://{}?parallel=8", self.store.display()));
        let (shared, at) = (self.shared.clone(), (number, session));
        self.programs.push(Client::start(index, at, dir, seed, shared, url));
    }

    fn at_rest(&self) -> bool {
        let rests = |client: &Client| client.process.is_killed() || client.plan() == Plan::Rest;
        self.programs.iter().all(rests)
    }

    fn plan(&self, plan: Plan, which: impl Fn(usize) -> bool) {
        for (i, client) in self.programs.iter().enumerate() {
            if which(i) && !client.process.is_killed() {
                client.set_plan(plan);
            }
        }
    }
}

fn start_io_workers(world: &World, index: usize) -> Process {
    let process = Process::default();
    let node = world.hosts[index].node.as_ref().expect("a node that runs");
    for _ in 0..2 {
        let mut worker = node.io_worker();
        process.start("data", move || loop {
            crate::baton::Baton::mine().between_operations();
            worker.serve();
        });
    }
    process
}

/// What differs between pool and store, except at places in conflict.
fn differences(pool: &Tree, conflicts: &BTreeSet<Vec<u8>>, store: &Tree) -> Vec<String> {
    let mut all = Vec::new();
    for path in pool.keys().chain(store.keys().filter(|path| !pool.contains_key(*path))) {
        let content = |tree: &Tree| tree.get(path).cloned().flatten();
        let is_foreign = content(store).is_some_and(|bytes| {
            value_of(&bytes).is_ok_and(|value| value.is_some_and(|value| value >= FOREIGN))
        });
        // What another program changed before the pool removed it stays in the store.
        let is_kept = is_foreign && !pool.contains_key(path);
        let is_unreadable = content(pool).is_some_and(|bytes| bytes == b"in conflict");
        let is_equal = pool.get(path) == store.get(path);
        if is_equal || is_kept || is_unreadable || is_ours(path) || conflicts.contains(path) {
            continue;
        }
        let shown = |tree: &Tree| match tree.get(path) {
            None => "nothing".to_owned(),
            Some(None) => "a directory".to_owned(),
            Some(Some(bytes)) => format!("{:?} in {} bytes", value_of(bytes), bytes.len()),
        };
        all.push(format!("{}: pool {}, store {}", String::from_utf8_lossy(path), shown(pool), shown(store)));
    }
    all
}

/// Repairs all faults, drains everything, and judges. Run with the front taken out of the world.
pub(crate) fn heal(world: &mut World, front: &mut Front) -> Result<(), String> {
    world.repair();
    front.weather.clear();
    front.plan(Plan::Close, |_| true);
    world.until_front(front, "closing files", Duration::from_secs(200), Front::at_rest)?;
    let pause = |world: &mut World, front: &mut Front, time: Duration| {
        let until = NOW_NS.load(Ordering::Relaxed) + time.as_nanos() as u64;
        let is_over = |_: &Front| NOW_NS.load(Ordering::Relaxed) >= until;
        world.until_front(front, "a pause", time * 2, is_over)
    };
    // Nodes that were down when a program was killed find out that it is gone, as they do periodically.
    pause(world, front, SETTLE)?;
    for host in &mut world.hosts {
        host.node.as_mut().expect("repaired").review_sessions();
    }
    let drain = |world: &mut World, front: &mut Front| {
        front.plan(Plan::AwaitDrained, |i| i == 0);
        let done = world.until_front(front, "draining", DRAIN, Front::at_rest);
        let waits_for = WAITS_FOR.lock().unwrap_or_else(PoisonError::into_inner).clone();
        done.map_err(|why| format!("{BROKEN}{why}: {waits_for}"))
    };
    let compare = |world: &mut World, front: &mut Front, when: &str| {
        front.plan(Plan::Compare, |i| i == 0);
        world.until_front(front, "reading everything", DRAIN, Front::at_rest)?;
        let (pool, conflicts) = TREE.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !conflicts.is_empty() && front.foreign.is_empty() {
            return Err(format!("{BROKEN}{when} places are in conflict with no program: {conflicts:?}"));
        }
        let found = differences(&pool, &conflicts, &tree_of(&front.store));
        match found.is_empty() {
            true => Ok(()),
            false => Err(format!("{BROKEN}{when} pool and store differ: {found:#?}")),
        }
    };
    drain(world, front)?;
    compare(world, front, "drained,")?;
    // What the store has now, the pool gets back.
    front.task(world, 0, Verb::Release);
    pause(world, front, Duration::from_secs(20))?;
    compare(world, front, "released and restored,")?;
    drain(world, front)?;
    judge_store(front)
}

/// Nothing that another program wrote was overwritten unseen, and no file is torn.
fn judge_store(front: &Front) -> Result<(), String> {
    let store = tree_of(&front.store);
    let mut values = Vec::new();
    for (path, bytes) in &store {
        let Some(bytes) = bytes else { continue };
        match value_of(bytes) {
            Ok(value) => values.extend(value),
            Err(why) => return Err(format!("{why}: {} in the store", String::from_utf8_lossy(path))),
        }
    }
    let ledger = front.shared.lock();
    for (value, version) in &front.foreign {
        let was_replaced = ledger.foreign.values().any(|replaced| replaced == value);
        if !values.contains(value) && !was_replaced && !front.weather.has_seen(*version) {
            return Err(format!("{BROKEN}{value} of another program was overwritten in the store, unseen"));
        }
    }
    Ok(())
}
