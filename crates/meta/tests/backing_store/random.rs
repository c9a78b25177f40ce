//! Random programs and a mover, a request at a time, with kills of the mover and the shard closed and opened: in the
//! end the store has what the pool has, and no data have been lost on the way.

use std::collections::BTreeMap;

use forebay_types::{Code, Ino, Kind, Request, RENAME_EXCHANGE, RENAME_NOREPLACE};

use super::mover::Mover;
use super::pool::Pool;
use super::store::{Id, Store, ROOT};

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % below as u64) as usize
    }
}

struct World {
    pool: Pool,
    store: Store,
    mover: Mover,
    random: Random,
}

/// What a name may be.
const NAMES: [u8; 4] = *b"abcd";

/// Names of the pool: path, inode, kind.
type Tree = Vec<(Vec<Vec<u8>>, Ino, Kind)>;

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random::new(seed);
        let (mut store, mut directories, mut files) = (Store::new(), vec![ROOT], Vec::new());
        for n in 0..random.next(16) {
            let parent = directories[random.next(directories.len())];
            let kind = [Kind::File, Kind::Directory, Kind::Symlink][random.next(3)];
            let name = vec![NAMES[random.next(4)]];
            // One in three files is one more name of an earlier one.
            let id = match kind {
                Kind::File if !files.is_empty() && random.next(3) == 0 => files[random.next(files.len())],
                _ => store.make(kind, 1_000_000 + n as u64, 0o755),
            };
            store.nodes.get_mut(&parent).unwrap().entries.insert(name, id);
            if kind == Kind::File {
                files.push(id);
            }
            if kind == Kind::Directory {
                directories.push(id);
            }
        }
        World { pool: Pool::new(true), store, mover: Mover::default(), random }
    }

    /// The names of a directory that the pool knows: of one that is not listed, those that were looked up.
    fn known(&mut self, directory: Ino) -> Vec<(Vec<u8>, Ino, Kind)> {
        match self.pool.list(directory) {
            Ok(names) => return names,
            Err(Code::NotListed) => {}
            Err(code) => panic!("{code:?}"),
        }
        let found = NAMES.map(|name| (vec![name], self.pool.lookup(directory, &[name])));
        let known = found.into_iter().filter_map(|(name, found)| Some((name, found.ok()?)));
        known.map(|(name, attr)| (name, attr.ino, attr.kind())).collect()
    }

    /// What is known of the pool.
    fn tree(&mut self) -> Tree {
        let mut tree: Tree = vec![(Vec::new(), self.pool.top, Kind::Directory)];
        let mut next = 0;
        while next < tree.len() {
            let (path, ino, kind) = tree[next].clone();
            next += 1;
            if kind != Kind::Directory {
                continue;
            }
            tree.extend(
                self.known(ino)
                    .into_iter()
                    .map(|(name, ino, kind)| ([path.clone(), vec![name]].concat(), ino, kind)),
            );
        }
        tree
    }

    /// One operation of a program. Refusals are as good as successes.
    fn program(&mut self) {
        let tree = self.tree();
        let pick = |random: &mut Random, kind: Option<Kind>| {
            let all: Vec<_> = tree.iter().filter(|each| kind.is_none_or(|kind| each.2 == kind)).collect();
            (!all.is_empty()).then(|| all[random.next(all.len())].1)
        };
        let random = &mut self.random;
        let name = |random: &mut Random| vec![NAMES[random.next(4)]];
        let (parent, new_parent) =
            (pick(random, Some(Kind::Directory)).unwrap(), pick(random, Some(Kind::Directory)).unwrap());
        let (name, new_name) = (name(random), name(random));
        let file = pick(random, Some(Kind::File));
        let any = pick(random, None).unwrap();
        let flags = [0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE][random.next(5)];
        let mode = 0o600 + random.next(64) as u32;
        let pool = &mut self.pool;
        let done = match random.next(17) {
            0 | 1 => pool.create(parent, &name).map(|_| ()),
            2 => pool.mkdir(parent, &name).map(|_| ()),
            3 => {
                pool.next_content += 1;
                let target = pool.next_content.to_string();
                pool.ask(Request::Symlink { parent, name: &name, target: target.as_bytes() })
            }
            4..=6 => pool.rename((parent, &name), (new_parent, &new_name), flags),
            7 => match file {
                Some(ino) => pool.ask(Request::Link { ino, parent, name: &name }),
                None => Ok(()),
            },
            8 => pool.ask(Request::Unlink { parent, name: &name }),
            9 => pool.ask(Request::RemoveDirectory { parent, name: &name }),
            10 if any != pool.top => pool.chmod(any, mode),
            11 | 12 => match file {
                Some(ino) if self.is_resident(ino) => self.pool.write(ino),
                _ => Ok(()),
            },
            13 => match file {
                Some(ino) => pool.release(ino),
                None => Ok(()),
            },
            14 | 15 => pool.lookup(parent, &name).map(|_| ()),
            // As `forebay detach` does, also while the directory is listed.
            16 if random.next(2) == 0 => {
                pool.ask(Request::Forget { parent, name: &name, relist: true, discard: false })
            }
            _ => pool.list(parent).map(|_| ()),
        };
        if done == Err(Code::NotListed) {
            let needed = self.pool.unlisted.take().expect("a refusal says what it needs");
            match needed {
                (ino, None) if !self.mover.lists.contains(&ino) => self.mover.lists.push_back(ino),
                (ino, Some(name)) if !self.mover.looks.contains(&(ino, name.clone())) => {
                    self.mover.looks.push_back((ino, name));
                }
                _ => {}
            }
        }
    }

    /// Restores a file if need be. False while the store's place cannot be read.
    fn is_resident(&mut self, ino: Ino) -> bool {
        let attr = self.pool.attr(ino).unwrap();
        if attr.is_resident() {
            return true;
        }
        let (path, place) = self.pool.store_place(ino).unwrap();
        let Some(id) = self.store.find(&path) else { return false };
        if Some(Store::version_of(id)) != place.placed.map(|placed| placed.version) {
            return false;
        }
        let content = self.store.nodes[&id].content;
        if let Some(written) = self.pool.written.get(&ino) {
            assert_eq!(content, *written, "{ino} is restored from another version");
        }
        self.pool.written.insert(ino, content);
        self.pool.backing.insert(ino, content);
        self.pool.restore(ino, attr.epoch()).unwrap();
        true
    }

    /// The data of every file of the pool are in a backing file, or in the store under some name.
    fn assert_nothing_is_lost(&mut self) {
        let contents = self.store.contents();
        for (_, ino, kind) in self.tree() {
            if kind != Kind::File {
                continue;
            }
            let attr = self.pool.attr(ino).unwrap();
            match (attr.is_resident(), self.pool.written.get(&ino)) {
                (true, written) => assert_eq!(self.pool.backing.get(&ino), written),
                (false, Some(written)) => assert!(contents.contains(written), "{ino}: its data are gone"),
                (false, None) => {}
            }
        }
    }

    /// The store has what the pool knows. Adds the pool's and the store's inode of each file to `files`.
    fn assert_equal(&mut self, ino: Ino, id: Id, files: &mut Vec<(Ino, Id)>) {
        let there = self.store.nodes[&id].entries.clone();
        let here: BTreeMap<_, _> =
            self.known(ino).into_iter().map(|(name, ino, kind)| (name, (ino, kind))).collect();
        let is_unknown = |pool: &mut Pool, name: &[u8]| pool.lookup(ino, name) == Err(Code::NotListed);
        let ours: Vec<_> = here.keys().collect();
        let theirs: Vec<_> = there.keys().filter(|name| !is_unknown(&mut self.pool, name)).collect();
        assert_eq!(ours, theirs, "in {ino}");
        for (name, (ino, kind)) in here {
            let node = self.store.nodes[&there[&name]].clone();
            let attr = self.pool.attr(ino).unwrap();
            assert_eq!((kind, attr.mode & 0o7777), (node.kind, node.mode), "{name:?} {ino}");
            match kind {
                Kind::Directory => self.assert_equal(ino, there[&name], files),
                Kind::File => {
                    files.push((ino, there[&name]));
                    assert!(self.is_resident(ino));
                    assert_eq!(self.pool.written[&ino], node.content, "{name:?} {ino}");
                }
                _ => {
                    let target = self.pool.bytes(Request::ReadLink { ino }).unwrap();
                    assert_eq!(target, node.content.to_string().as_bytes());
                }
            }
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.next(100) {
                0 | 1 => {
                    self.pool.trace(|| "kill".into());
                    self.mover.kill();
                }
                2 => {
                    self.mover.kill();
                    self.pool.reopen();
                }
                3..=35 => self.program(),
                _ => {
                    let pick = self.random.next(1000);
                    self.mover.step(&mut self.pool, &mut self.store, pick);
                }
            }
            self.assert_nothing_is_lost();
        }
        self.pool.assert_clean();
        for _ in 0..3000 {
            let pick = self.random.next(1000);
            if !self.mover.step(&mut self.pool, &mut self.store, pick) {
                break;
            }
        }
        assert_eq!(self.pool.pending(), [], "pending for ever");
        self.pool.assert_clean();
        let mut files = Vec::new();
        self.assert_equal(self.pool.top, ROOT, &mut files);
        for (ino, id) in &files {
            let differs = |(other, other_id): &&(Ino, Id)| (ino == other) != (id == other_id);
            assert_eq!(files.iter().find(differs), None, "{ino} is {id}: one file is one inode");
        }
    }
}

pub(crate) fn cases() -> u64 {
    std::env::var("FOREBAY_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

#[test]
fn in_the_end_the_store_has_what_the_pool_has() {
    let first = std::env::var("FOREBAY_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    for seed in first..first + cases() {
        println!("FOREBAY_SEED={seed}");
        World::new(seed).run(250);
    }
}
