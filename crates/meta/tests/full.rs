//! A full shard: requests that grow it are refused with NoSpace, the existing files can be read, changed and removed,
//! and all of them can be removed. Never SIGBUS, and never LMDB out of pages within a batch, which would fail its
//! commit.

mod place;

use std::path::Path;

use forebay_meta::{Batch, Shard, ShardOptions};
use forebay_types::{
    limits, Code, Ino, Kind, PendingPlace, Reply, Request, SetAttr, StoreObject, StoreVersion, Writer,
    RENAME_EXCHANGE,
};
use place::{at, Driver, Place, OPTIONS};

const ROOT: Ino = Ino::ROOT;

/// Little more than the minimum: the pages reserved for removals, and space for some thousand files.
const SMALL: ShardOptions = ShardOptions { map_bytes: 14 << 20, ..OPTIONS };

fn name(n: usize) -> Vec<u8> {
    // Scattered, so that the test writes to every page of the directory again and again.
    format!("{:016x}.file", (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).into_bytes()
}

/// Requests in one transaction of the daemon: CHANGES_MAX in crates/server/src/worker/core/state.rs
/// (docs/decisions/0001).
const LONG: usize = 1024;
/// Requests in one transaction of a daemon that rests after every batch.
const SHORT: usize = limits::BATCH_MAX;

/// Runs transactions like the daemon: commits when one is long or spent.
struct Batches<'s> {
    shard: &'s Shard,
    requests_max: usize,
    batch: Option<Batch<'s>>,
    requests: usize,
    driver: Driver,
}

impl<'s> Batches<'s> {
    fn new(shard: &'s Shard, requests_max: usize) -> Batches<'s> {
        Batches { shard, requests_max, batch: None, requests: 0, driver: Driver::new() }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Driver, &mut Batch<'s>) -> T) -> T {
        if self.requests >= self.requests_max || self.batch.as_ref().is_some_and(|b| b.is_spent()) {
            self.commit();
        }
        self.requests += 1;
        let shard = self.shard;
        let batch = self.batch.get_or_insert_with(|| shard.begin().unwrap());
        f(&mut self.driver, batch)
    }

    /// A request that is repeated in a new transaction if a long one refuses it for lack of space, as the daemon does:
    /// a transaction cannot use the pages that it has freed. A short one refuses nothing that the next would not refuse.
    fn apply<T>(&mut self, f: impl Fn(&mut Driver, &mut Batch<'s>) -> Result<T, Code>) -> Result<T, Code> {
        let answer = self.with(&f);
        let may_fit = self.requests_max > SHORT && self.batch.as_ref().is_some_and(Batch::has_changes);
        if !may_fit || !matches!(answer, Err(Code::NoSpace)) {
            return answer;
        }
        self.commit();
        self.with(&f)
    }

    fn commit(&mut self) {
        self.requests = 0;
        if let Some(mut batch) = self.batch.take() {
            batch.keep_reply(1, 1, 1, &[0; 200]).unwrap();
            batch.commit().unwrap();
        }
    }

    /// Creates files until even a new batch has no space for one more. Returns the number of the next file.
    fn fill(&mut self, from: usize) -> usize {
        let mut n = from;
        loop {
            let fresh = self.requests == 0;
            match self.with(|d, b| d.file(b, ROOT, &name(n))) {
                Ok(_) => n += 1,
                Err(code) => {
                    assert_eq!(code, Code::NoSpace);
                    if fresh {
                        return n;
                    }
                    self.commit();
                }
            }
        }
    }

    fn remove_orphans(&mut self) {
        self.commit();
        let mut batch = self.shard.begin().unwrap();
        let orphans: Vec<Ino> = batch.orphans().unwrap().iter().map(|o| o.0).collect();
        for some in orphans.chunks(20) {
            if batch.is_spent() {
                batch.commit().unwrap();
                batch = self.shard.begin().unwrap();
            }
            batch.remove_orphans(some).unwrap();
        }
        batch.commit().unwrap();
    }
}

fn assert_clean(shard: &Shard) {
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

fn fill_use_and_empty(dir: &Path, options: &ShardOptions, requests_max: usize, files_min: usize) {
    let mut shard = Shard::create(dir, options, at(1)).unwrap();
    let mut most = 0;
    for round in 0..3 {
        let mut batches = Batches::new(&shard, requests_max);
        let files = batches.fill(0);
        assert!(files >= files_min, "round {round}: only {files} files");
        assert!(files * 10 >= most * 9, "round {round}: space was lost, {files} files after {most}");
        most = most.max(files);
        // Growth of every kind stays refused; an existing name is still reported as such.
        let first = name(0);
        let refused = [
            Request::MakeDirectory { parent: ROOT, name: b"d", mode: 0o755 },
            Request::Symlink { parent: ROOT, name: b"s", target: b"t" },
            Request::SetXattr { ino: ROOT, name: b"user.a", value: &[1; 65_000], flags: 0 },
        ];
        for request in refused {
            assert_eq!(
                batches.apply(|d, b| d.ask(b, request).map(|_| ())),
                Err(Code::NoSpace),
                "{request:?}"
            );
        }
        assert_eq!(batches.apply(|d, b| d.file(b, ROOT, &first)), Err(Code::Exists));
        let open = Request::Create {
            parent: ROOT,
            name: &first,
            mode: 0,
            exclusive: false,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        };
        batches.apply(|d, b| d.entry(b, open)).unwrap();
        // Existing files can be renamed and changed, many times.
        for n in 0..2000 {
            let (old, new) = (name(n % files), [b"renamed ".as_slice(), &name(n % files)].concat());
            for (name, new_name) in [(&old, &new), (&new, &old)] {
                let request = Request::Rename { parent: ROOT, name, new_parent: ROOT, new_name, flags: 0 };
                batches.apply(|d, b| d.ask(b, request).map(|_| ())).unwrap();
            }
            let found =
                batches.with(|d, b| d.entry(b, Request::Lookup { parent: ROOT, name: &old })).unwrap();
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            let ino = found.attr.ino;
            batches.apply(|d, b| d.ask(b, Request::SetAttr { ino, set }).map(|_| ())).unwrap();
        }
        // Half of the files are removed, and created again as far as possible: the shard stays full, and usable.
        for n in 0..files / 2 {
            batches.apply(|d, b| d.unlink(b, ROOT, &name(n))).unwrap();
        }
        batches.remove_orphans();
        let mut made = 0;
        for n in 0..files / 2 {
            match batches.apply(|d, b| d.file(b, ROOT, &name(n))) {
                Ok(_) => made += 1,
                Err(code) => assert_eq!(code, Code::NoSpace),
            }
        }
        assert!(made > files / 20, "round {round}: of {} only {made} could be made again", files / 2);
        batches.commit();
        assert_clean(&shard);
        if round == 1 {
            drop(batches);
            drop(shard);
            shard = Shard::open(dir).unwrap();
            batches = Batches::new(&shard, requests_max);
        }
        // All files can be removed, in another order.
        let mut names = batches.with(|d, b| d.list(b, ROOT));
        names.sort_by_key(|n| n.0.wrapping_mul(0x2545_f491_4f6c_dd1d));
        for (_, name) in names {
            batches.apply(|d, b| d.unlink(b, ROOT, &name)).unwrap();
        }
        batches.remove_orphans();
        let attr = batches.with(|d, b| d.attr(b, ROOT)).unwrap();
        assert_eq!(attr.size, 0);
        batches.commit();
        assert_clean(&shard);
    }
}

#[test]
fn full_map_refuses_growth_and_can_be_emptied() {
    let place = Place::new();
    fill_use_and_empty(place.path(), &SMALL, LONG, 8000);
}

#[test]
fn full_map_in_short_transactions_refuses_growth_and_can_be_emptied() {
    let place = Place::new();
    fill_use_and_empty(place.path(), &SMALL, SHORT, 8000);
}

#[test]
fn shard_full_of_attributes_and_links_can_be_emptied() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &SMALL, at(1)).unwrap();
    for requests_max in [LONG, SHORT] {
        let mut batches = Batches::new(&shard, requests_max);
        let mut made = 0usize;
        loop {
            let done = batches.with(|d, b| -> Result<(), Code> {
                let ino = d.file(b, ROOT, &name(made))?;
                let value = vec![made as u8; [60_000, 10, 3000][made % 3]];
                let set = |name| Request::SetXattr { ino, name, value: &value, flags: 0 };
                d.ask(b, set(b"user.one"))?;
                d.ask(b, set(b"trusted.two")).or_else(|c| {
                    if value.len() > 9999 {
                        Ok(Reply::Done)
                    } else {
                        Err(c)
                    }
                })?;
                d.ask(
                    b,
                    Request::Symlink {
                        parent: ROOT,
                        name: &[b"s", name(made).as_slice()].concat(),
                        target: &[b't'; 4000],
                    },
                )?;
                Ok(())
            });
            match done {
                Ok(()) => made += 1,
                Err(code) => {
                    assert_eq!(code, Code::NoSpace);
                    break;
                }
            }
        }
        assert!(made > 30, "only {made}");
        let names = batches.with(|d, b| d.list(b, ROOT));
        for (n, (_, name)) in names.iter().enumerate() {
            let entry = batches.with(|d, b| d.entry(b, Request::Lookup { parent: ROOT, name })).unwrap();
            if n % 2 == 0 && entry.attr.is_file() {
                let request = Request::RemoveXattr { ino: entry.attr.ino, name: b"user.one" };
                let done = batches.with(|d, b| d.ask(b, request).map(|_| ()));
                assert!(matches!(done, Ok(()) | Err(Code::NoAttribute)), "{done:?}");
            }
            batches.with(|d, b| d.unlink(b, ROOT, name)).unwrap();
        }
        batches.remove_orphans();
        assert_clean(&shard);
        assert_eq!(shard.statistics().unwrap().entries, 0);
    }
}

#[test]
fn one_long_batch_on_a_full_shard_refuses_and_still_commits() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &SMALL, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let mut made = 0;
    while driver.file(&mut batch, ROOT, &name(made)).is_ok() {
        made += 1;
    }
    // Without `is_spent`, removals may be refused here, but nothing else may happen.
    let removed = (0..made).filter(|n| driver.unlink(&mut batch, ROOT, &name(*n)).is_ok()).count();
    batch.commit().unwrap();
    assert!(made > 1000);
    assert_clean(&shard);
    assert_eq!(shard.statistics().unwrap().entries as usize, made - removed);
}

#[test]
fn opened_reserve_lets_acknowledged_growth_be_applied_again() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &SMALL, at(1)).unwrap();
    let mut batches = Batches::new(&shard, LONG);
    let files = batches.fill(0);
    batches.commit();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    assert_eq!(driver.file(&mut batch, ROOT, &name(files)), Err(Code::NoSpace));
    batch.open_reserve();
    for n in files..files + 10 {
        driver.file(&mut batch, ROOT, &name(n)).unwrap();
    }
    batch.commit().unwrap();
    assert_clean(&shard);
}

/// Publishes what is pending, or reports that it was removed: each in a transaction of its own if need be.
fn settle_all(batches: &mut Batches<'_>) {
    loop {
        let pending = batches.with(|d, b| match d.ask(b, Request::Pending { parent: Ino(0), name: b"" }) {
            Ok(Reply::Bytes(bytes)) => PendingPlace::decode_list(bytes).unwrap(),
            other => panic!("{other:?}"),
        });
        if pending.is_empty() {
            return;
        }
        for place in &pending {
            let (parent, name, seen) = (place.parent, place.name.as_slice(), place.changes);
            let request = match place.placed {
                _ if place.conflict => {
                    Request::Conflict { parent, name, found: false, version: StoreVersion::default() }
                }
                Some(_) => Request::Unpublished { parent, name, seen },
                None => Request::Settled { parent, name, seen },
            };
            batches.apply(|d, b| d.ask(b, request).map(|_| ())).unwrap();
        }
    }
}

#[test]
fn shard_full_of_what_a_backing_store_has_refuses_growth_and_can_be_emptied() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &SMALL, at(1)).unwrap();
    for requests_max in [LONG, SHORT] {
        let mut batches = Batches::new(&shard, requests_max);
        let parent = batches.with(|d, b| d.directory(b, ROOT, b"top")).unwrap();
        let attach = Request::Attach { ino: parent, listed: false, settings: b"s" };
        batches.apply(|d, b| d.ask(b, attach).map(|_| ())).unwrap();
        let version = |n: usize| StoreVersion { ino: n as u64, ..StoreVersion::default() };
        let mut made = Vec::new();
        let refusal = loop {
            let n = made.len();
            let ino = match batches.apply(|d, b| d.file(b, parent, &name(n))) {
                Ok(ino) => ino,
                Err(code) => break code,
            };
            made.push(ino);
            let published =
                Request::Published { parent, name: &name(n), ino, epoch: 0, seen: 1, version: version(n) };
            let done = batches.apply(|d, b| d.ask(b, Request::BeginDrain { ino }).map(|_| ()));
            let done = done.and_then(|()| batches.apply(|d, b| d.ask(b, published).map(|_| ())));
            assert!(matches!(done, Ok(()) | Err(Code::NoSpace)), "{done:?}");
        };
        assert_eq!(refusal, Code::NoSpace);
        assert!(made.len() > 2000, "only {}", made.len());
        // Everything that changes names, attributes or states is answered, with NoSpace at worst, and the batch lives.
        let mut refused = 0;
        for n in (0..made.len()).step_by(16) {
            let (old, new, ino) = (name(n), [b"renamed ".as_slice(), &name(n)].concat(), made[n]);
            let (next, version) = (name((n + 1) % made.len()), version(n));
            let (name, new_name, new_parent) = (old.as_slice(), new.as_slice(), parent);
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            let requests = [
                Request::MarkDirty { ino },
                Request::SetAttr { ino, set },
                Request::Link { ino, parent, name: &[b"link ".as_slice(), name].concat() },
                Request::Rename { parent, name, new_parent, new_name, flags: 0 },
                Request::Moved { parent, name, new_parent, new_name, version },
                Request::Intend { parent, name, version },
                Request::Conflict { parent, name: new_name, found: n % 2 == 0, version },
                Request::Rename { parent, name: new_name, new_parent, new_name: name, flags: 0 },
                Request::Rename { parent, name, new_parent, new_name: &next, flags: RENAME_EXCHANGE },
            ];
            for request in requests {
                match batches.apply(|d, b| d.ask(b, request).map(|_| ())) {
                    Err(Code::NoSpace) => refused += 1,
                    Ok(()) | Err(Code::NotFound | Code::Stale | Code::Busy | Code::Exists) => {}
                    Err(code) => panic!("{request:?}: {code:?}"),
                }
            }
        }
        println!("{} files, {refused} requests refused", made.len());
        batches.commit();
        assert_clean(&shard);
        let names = batches.with(|d, b| d.list(b, parent));
        for (_, name) in names {
            batches.apply(|d, b| d.unlink(b, parent, &name)).unwrap();
        }
        batches.remove_orphans();
        settle_all(&mut batches);
        let request = Request::Detach { ino: parent };
        batches.apply(|d, b| d.ask(b, request).map(|_| ())).unwrap();
        let request = Request::RemoveDirectory { parent: ROOT, name: b"top" };
        batches.apply(|d, b| d.ask(b, request).map(|_| ())).unwrap();
        batches.commit();
        assert_clean(&shard);
    }
}

#[test]
fn listing_for_whose_last_names_there_is_no_room_ends_after_some_was_made() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &SMALL, at(1)).unwrap();
    let mut batches = Batches::new(&shard, LONG);
    let top = batches.with(|d, b| d.directory(b, ROOT, b"top")).unwrap();
    let attach = Request::Attach { ino: top, listed: true, settings: b"s" };
    batches.apply(|d, b| d.ask(b, attach).map(|_| ())).unwrap();
    let files = batches.fill(0);
    let names: Vec<_> = (0..500).map(name).collect();
    let encode = |from: usize| {
        let mut buffer = vec![0; limits::MESSAGE_BYTES_MAX];
        let mut w = Writer::new(&mut buffer);
        for (n, name) in names.iter().enumerate().skip(from) {
            let version = StoreVersion { ino: n as u64 + 1, ..StoreVersion::default() };
            let (kind, time, target) = (Kind::File, at(1), b"");
            let object = StoreObject {
                name,
                kind,
                mode: 0o644,
                uid: 1,
                gid: 1,
                rdev: 0,
                atime: time,
                version,
                target,
                nlink: 1,
                file_system: 0,
            };
            object.encode(&mut w).unwrap();
        }
        let n = w.len();
        buffer.truncate(n);
        buffer
    };
    // How many of the objects are there; none when the directory is listed.
    let send = |batches: &mut Batches<'_>, from: usize| {
        let objects = encode(from);
        let listed = Request::Listed { ino: top, epoch: 0, objects: &objects };
        batches.apply(|d, b| {
            d.ask(b, listed).map(|reply| match reply {
                Reply::Count(count) => Some(count as usize),
                Reply::Entry(_) => None,
                other => panic!("{other:?}"),
            })
        })
    };
    let mut removed = 0;
    let mut there = loop {
        for n in removed..removed + 20 {
            batches.apply(|d, b| d.unlink(b, ROOT, &name(n))).unwrap();
        }
        removed += 20;
        batches.remove_orphans();
        match send(&mut batches, 0) {
            Err(Code::NoSpace) => {}
            sent => break sent.unwrap().expect("there is room for all"),
        }
    };
    assert!(there > 0 && there < names.len(), "{there} names");
    // A new transaction may have room for a few more.
    let refused = loop {
        match send(&mut batches, there) {
            Ok(more) => there += more.expect("there is room for all"),
            Err(code) => break code,
        }
    };
    assert_eq!(refused, Code::NoSpace);
    let list = Request::ReadDirectory { ino: top, cookie: 0, attributes: false };
    let refused = batches.with(|d, b| d.ask(b, list).map(|_| ()));
    assert_eq!(refused, Err(Code::NotListed));
    for n in removed..files {
        batches.apply(|d, b| d.unlink(b, ROOT, &name(n))).unwrap();
    }
    batches.remove_orphans();
    assert_eq!(send(&mut batches, there), Ok(None));
    assert_eq!(batches.with(|d, b| d.list(b, top)).len(), names.len());
    batches.commit();
    assert_clean(&shard);
}

#[test]
fn map_too_small_for_its_reserve_is_refused_and_leaves_nothing() {
    let place = Place::new();
    let options = ShardOptions { map_bytes: 4 << 20, ..OPTIONS };
    let error = Shard::create(place.path(), &options, at(1)).unwrap_err();
    assert_eq!(error.code, Code::NoSpace);
    assert!(!error.cure.is_empty());
    Shard::create(place.path(), &SMALL, at(1)).unwrap();
}

/// Mounts a tmpfs in a private mount namespace of this thread, so that it is gone with the thread. None if the machine
/// does not permit it.
fn tiny_tmpfs(at: &Path, bytes: u64) -> Option<()> {
    use rustix::mount::{mount, mount_change, MountFlags, MountPropagationFlags};
    use rustix::thread::{unshare_unsafe, UnshareFlags};
    // SAFETY: the mount namespace is this thread's own; file descriptors and memory stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.ok()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).ok()?;
    let data = std::ffi::CString::new(format!("size={bytes}")).ok()?;
    mount("tmpfs", at, "tmpfs", MountFlags::empty(), data.as_c_str()).ok()
}

#[test]
fn full_tmpfs_refuses_growth_and_can_be_emptied() {
    let place = Place::new();
    if tiny_tmpfs(place.path(), 14 << 20).is_none() {
        println!("not permitted to mount: the same on a small map is tested above");
        return;
    }
    // The map is larger than the medium, so that the medium runs full first.
    fill_use_and_empty(place.path(), &OPTIONS, LONG, 6000);
}

#[test]
fn tmpfs_filled_by_others_refuses_growth_until_they_give_way() {
    let place = Place::new();
    if tiny_tmpfs(place.path(), 40 << 20).is_none() {
        println!("not permitted to mount: the same on a small map is tested above");
        return;
    }
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let other = place.path().join("data");
    // Takes all free space, to the last page.
    let full = std::fs::write(&other, vec![1; 64 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(28));
    let mut batches = Batches::new(&shard, LONG);
    let files = batches.fill(0);
    assert!(files > 1000);
    std::fs::remove_file(&other).unwrap();
    let more = batches.fill(files);
    assert!(more > 2 * files, "{files} files, and {more} when there was room");
    batches.commit();
    assert_clean(&shard);
}
