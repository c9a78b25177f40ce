//! `forebay state`: whether backing stores have what the pool has.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{PathBuffer, Pool};
use forebay_tasks::{Recall, StoreSettings};
use forebay_types::{
    Attr, Code, Entry, Error, Ino, Kind, NodeId, PendingPlace, Result, StorePlace, Timestamp, Wanted,
    EPOCH_UNKNOWN, FLAG_ATTACHED, FLAG_DIRTY, FLAG_DRAINING, FLAG_PINNED, FLAG_STORE, FLAG_UNLISTED,
};
use serde_json::{json, Value};

use super::ls::{failed_path, kind_name, link_target, put_name};
use crate::arguments::State;
use crate::backing::{self, Trees};
use crate::table::{self, Facts};
use crate::{failure, pool};

/// The state of a file's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Data {
    Unattached,
    Released,
    Clean,
    Dirty,
    Draining,
}

impl Data {
    const ALL: [Data; 5] = [Data::Released, Data::Clean, Data::Dirty, Data::Draining, Data::Unattached];

    fn of(attr: &Attr) -> Data {
        match attr.flags {
            flags if flags & FLAG_ATTACHED == 0 => Data::Unattached,
            _ if attr.is_file() && !attr.is_resident() => Data::Released,
            flags if flags & FLAG_DRAINING != 0 => Data::Draining,
            flags if flags & FLAG_DIRTY != 0 => Data::Dirty,
            _ => Data::Clean,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Data::Unattached => "unattached",
            Data::Released => "released",
            Data::Clean => "clean",
            Data::Dirty => "dirty",
            Data::Draining => "draining",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Data::Unattached => "unattached: it belongs to no backing store",
            Data::Released => "released: its data are in the store alone, and come at the next open",
            Data::Clean => "clean: pool and store are equal",
            Data::Dirty => "dirty: the store does not have the last data",
            Data::Draining => "draining: its data are being copied to the store",
        }
    }
}

/// What is pending, and the place of each inode that it concerns.
struct Pending {
    all: Vec<PendingPlace>,
    by_inode: HashMap<Ino, usize>,
}

impl Pending {
    fn read(pool: &Pool, nodes: &[NodeId]) -> Result<Pending> {
        let all = backing::all(pool, nodes)?;
        let mut by_inode = HashMap::new();
        for (index, place) in all.iter().enumerate() {
            let inode = match (&place.wanted, &place.placed) {
                (Some(Wanted::Here(entry, _)), _) => Some(entry.attr.ino),
                (Some(Wanted::Elsewhere(ino, _)), _) => Some(*ino),
                (None, placed) => placed.as_ref().map(|placed| placed.ino),
            };
            if let Some(ino) = inode {
                by_inode.insert(ino, index);
            }
        }
        Ok(Pending { all, by_inode })
    }

    fn of(&self, ino: Ino) -> Option<&PendingPlace> {
        self.by_inode.get(&ino).map(|index| &self.all[*index])
    }
}

pub(super) fn state(named: Option<PathBuf>, arguments: &State) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let pending = Pending::read(pool, &backing::nodes(&dir)?)?;
    let mut trees = Trees::new(pool);
    let mut all = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        let shown = backing::look(pool, &path, "look at").and_then(|entry| {
            match arguments.recursive && entry.attr.is_directory() {
                true if arguments.list => {
                    for place in Differing::below(pool, &mut trees, &pending, &entry) {
                        match arguments.json {
                            true => all.push(place.json()),
                            false => failure::put(place.text()),
                        }
                    }
                    Ok(())
                }
                true => Sums::of(pool, &mut trees, &pending, &entry).map(|sums| match arguments.json {
                    true => all.push(sums.json(&path)),
                    false => failure::put(sums.text(&path)),
                }),
                false => One::of(pool, &mut trees, &pending, &entry).map(|one| match arguments.json {
                    true => all.push(one.json(&path)),
                    false => failure::put(one.text(&path)),
                }),
            }
        });
        if let Err(e) = shown {
            failure::say(&e);
            all.push(failed_path(&path, &e));
            status = ExitCode::from(failure::FAILED);
        }
    }
    if arguments.json {
        failure::print_json(&Value::Array(all));
    }
    Ok(status)
}

/// The bytes that a file occupies in the pool.
fn resident_bytes(pool: &Pool, entry: &Entry) -> u64 {
    match entry.attr.is_file() && entry.attr.is_resident() {
        true => pool.stat_entry(entry).map_or(0, |stat| stat.st_blocks as u64 * 512),
        false => 0,
    }
}

/// The state of one file or directory.
struct One {
    attr: Attr,
    data: Data,
    size: u64,
    resident_bytes: u64,
    root: Option<(String, StoreSettings)>,
    place: Option<StorePlace>,
    pending_since: Option<Timestamp>,
    conflict: bool,
}

impl One {
    fn of(pool: &'static Pool, trees: &mut Trees, pending: &Pending, entry: &Entry) -> Result<One> {
        let attr = entry.attr;
        let place = match backing::place_of(pool, attr.ino) {
            Ok(place) => Some(place),
            Err(Code::NotFound) => None,
            Err(code) => {
                return Err(Error::new(code, "cannot ask where the store has it").why(pool::words(code)))
            }
        };
        let top = match attr.flags & FLAG_ATTACHED {
            0 => None,
            _ if attr.is_directory() => trees.store_of(attr.ino),
            _ => place.as_ref().filter(|place| place.is_root).map(|place| place.top),
        };
        // A file that the store never had: its name says where it is to go.
        let waiting = pending.of(attr.ino);
        let top = top.or_else(|| trees.store_of(waiting?.parent));
        let root = top.and_then(|root| Some((backing::path_of(pool, root), trees.settings(root)?)));
        Ok(One {
            attr,
            data: Data::of(&attr),
            size: pool.stat_entry(entry).map_or(attr.size, |stat| stat.st_size as u64),
            resident_bytes: resident_bytes(pool, entry),
            root,
            place,
            pending_since: waiting.map(|place| place.since),
            conflict: waiting.is_some_and(|place| place.conflict),
        })
    }

    fn is_durable(&self) -> bool {
        self.pending_since.is_none() && matches!(self.data, Data::Released | Data::Clean)
    }

    fn json(&self, path: &[u8]) -> Value {
        let time = |t: Timestamp| t.sec as f64 + f64::from(t.nsec) / 1e9;
        let kind = self.attr.kind();
        let mut object = json!({
            "kind": kind_name(kind),
            "ino": self.attr.ino.0,
            "state": self.data.name(),
            "durable": self.is_durable(),
            "pinned": self.attr.flags & FLAG_PINNED != 0,
            "pending_since": self.pending_since.map(time),
            "conflict": self.conflict,
        });
        put_name(&mut object, "path", path);
        if kind == Kind::File {
            object["epoch"] = json!(self.attr.epoch());
            object["size"] = json!(self.size);
            object["resident_bytes"] = json!(self.resident_bytes);
        }
        if kind == Kind::Directory {
            object["listed"] = json!(self.attr.flags & FLAG_UNLISTED == 0);
        }
        if let Some((at, settings)) = &self.root {
            object["store"] = json!({ "at": at, "url": settings.url, "drain": settings.drain,
                "rules": settings.rules, "durable": settings.durable, "read_only": settings.read_only, "explicit": settings.explicit,
                "recall": settings.recall, "yield_to": settings.yield_to });
            if let Some(place) = self.place.as_ref().filter(|place| place.is_root) {
                put_name(&mut object["store"], "path", &place.path);
            }
        }
        if let Some(placed) = self.place.as_ref().and_then(|place| place.placed) {
            let epoch = self.place.as_ref().map(|place| place.epoch).filter(|epoch| *epoch != EPOCH_UNKNOWN);
            let version = placed.version;
            object["published"] = json!({ "bytes": version.bytes, "mtime": time(version.mtime),
                "ino": version.ino, "tag": format!("{:016x}", version.tag), "epoch": epoch });
        }
        object
    }

    fn text(&self, path: &[u8]) -> String {
        let mut facts = Facts::default();
        let kind = self.attr.kind();
        facts.add("path", format!("{} ({})", table::printable(path), kind_name(kind)));
        let state = match kind {
            Kind::Directory if self.attr.flags & FLAG_STORE != 0 => "a store is attached here",
            Kind::Directory if self.attr.flags & FLAG_UNLISTED != 0 => {
                "not listed yet: names come at the first look"
            }
            Kind::Directory if self.data != Data::Unattached => "listed",
            _ => self.data.words(),
        };
        facts.add("state", state);
        if kind == Kind::File {
            let (size, resident) = (table::bytes(self.size), table::bytes(self.resident_bytes));
            facts.add("data", format!("{size}, {resident} of them in the pool, epoch {}", self.attr.epoch()));
        }
        if let Some((at, settings)) = &self.root {
            let read_only = if settings.read_only { ", read-only" } else { "" };
            facts.add("store", format!("{} at {at}{read_only}, drained: {}", settings.url, settings.drain));
            if let Some(files) = &settings.yield_to {
                facts.add("gives way", format!("to {files}"));
            }
            if settings.recall != Recall::Yes {
                facts.add("recall", backing::recall_in_words(settings.recall));
            }
            match self.place.as_ref().filter(|place| place.is_root) {
                Some(place) if !place.path.is_empty() => facts.add("there as", table::printable(&place.path)),
                Some(_) => {}
                None => facts.add("there as", "nothing: the store does not have it"),
            }
        }
        if let (Some(placed), Kind::File) = (self.place.as_ref().and_then(|place| place.placed), kind) {
            let version = placed.version;
            let modified = table::local_time(version.mtime.sec);
            let is_snapshot = self.place.as_ref().is_some_and(|place| place.epoch == EPOCH_UNKNOWN);
            let as_what = match is_snapshot && self.data == Data::Dirty {
                true => ", a copy of a file that was open: durable through that time",
                false => "",
            };
            facts.add("published", format!("{}, modified {modified}{as_what}", table::bytes(version.bytes)));
        }
        if let Some(since) = self.pending_since {
            facts.add("pending", format!("since {}", table::local_time(since.sec)));
        }
        if self.conflict {
            let path = table::printable(path);
            facts.add("conflict", "the store has a version that others wrote");
            facts.add("", format!("settle it: forebay resolve {path} --keep pool|store|both"));
        }
        if self.attr.flags & FLAG_PINNED != 0 {
            facts.add("pinned", "it stays in the pool");
        }
        facts.text()
    }
}

/// Files and bytes of one state.
#[derive(Clone, Copy, Default)]
struct Sum {
    files: u64,
    bytes: u64,
}

/// The states of everything below a directory.
#[derive(Default)]
struct Sums {
    by_state: [Sum; 5],
    resident_bytes: u64,
    pinned: u64,
    unlisted: u64,
    pending: u64,
    conflicts: u64,
}

impl Sums {
    fn of(pool: &'static Pool, trees: &mut Trees, pending: &Pending, top: &Entry) -> Result<Sums> {
        let mut sums = Sums::default();
        let mut directories = vec![top.attr.ino];
        while let Some(directory) = directories.pop() {
            let failed = |code| {
                let what = format!("cannot list {}", backing::path_of(pool, directory));
                Error::new(code, what).why(pool::words(code))
            };
            let mut cursor = match pool.get_attr(directory) {
                // A sum must not make the store list everything.
                Ok(entry) if entry.attr.flags & FLAG_UNLISTED != 0 => {
                    sums.unlisted += 1;
                    pool.read_known(directory)
                }
                Ok(_) => pool.read_directory(directory),
                Err(Code::NotFound) => continue,
                Err(code) => return Err(failed(code)),
            };
            while let Some(found) = cursor.next(pool).map_err(failed)? {
                match found.kind {
                    Kind::Directory => directories.push(found.ino),
                    Kind::File => {
                        if let Ok(entry) = pool.get_attr(found.ino) {
                            sums.add(pool, &entry);
                        }
                    }
                    _ => {}
                }
            }
        }
        for place in &pending.all {
            if trees.is_below(place.parent, top.attr.ino) {
                sums.pending += 1;
                sums.conflicts += u64::from(place.conflict);
            }
        }
        Ok(sums)
    }

    fn add(&mut self, pool: &Pool, entry: &Entry) {
        let data = Data::of(&entry.attr);
        let index = Data::ALL.iter().position(|other| *other == data).unwrap_or_default();
        let sum = &mut self.by_state[index];
        sum.files += 1;
        sum.bytes += pool.stat_entry(entry).map_or(entry.attr.size, |stat| stat.st_size as u64);
        self.resident_bytes += resident_bytes(pool, entry);
        self.pinned += u64::from(entry.attr.flags & FLAG_PINNED != 0);
    }

    fn json(&self, path: &[u8]) -> Value {
        let mut object = json!({
            "durable": self.pending == 0,
            "resident_bytes": self.resident_bytes,
            "pinned": self.pinned,
            "unlisted": self.unlisted,
            "pending": self.pending,
            "conflicts": self.conflicts,
        });
        put_name(&mut object, "path", path);
        for (data, sum) in Data::ALL.iter().zip(&self.by_state) {
            object[data.name()] = json!({ "files": sum.files, "bytes": sum.bytes });
        }
        object
    }

    fn text(&self, path: &[u8]) -> String {
        let mut facts = Facts::default();
        facts.add("path", format!("{} and everything below", table::printable(path)));
        for (data, sum) in Data::ALL.iter().zip(&self.by_state).filter(|(_, sum)| sum.files > 0) {
            facts.add(
                data.name(),
                format!("{}, {}", table::count(sum.files, "file"), table::bytes(sum.bytes)),
            );
        }
        facts.add("in the pool", table::bytes(self.resident_bytes));
        if self.pinned > 0 {
            facts.add("pinned", table::count(self.pinned, "file"));
        }
        if self.unlisted > 0 {
            facts.add(
                "not listed",
                format!(
                    "{}: what the pool does not know of is not in these sums",
                    table::count(self.unlisted, "directory")
                ),
            );
        }
        let pending = match self.pending {
            0 => "nothing: the store has everything".to_owned(),
            n => format!("{} at which the store differs", table::count(n, "place")),
        };
        facts.add("pending", pending);
        if self.conflicts > 0 {
            facts.add("conflicts", format!("{}: `forebay state -r --list` names them", self.conflicts));
        }
        facts.text()
    }
}

fn path_of(pool: &Pool, ino: Ino) -> Option<Vec<u8>> {
    let mut path = PathBuffer::new();
    pool.path_of(ino, &mut path).ok().map(|()| path.as_bytes().to_vec())
}

/// The path that a directory had which the pool has removed and the store has not.
fn path_of_gone(pool: &Pool, ino: Ino) -> Vec<u8> {
    let there = backing::place_of(pool, ino).ok().filter(|place| place.is_root);
    let found = there.and_then(|place| Some((path_of(pool, place.top)?, place.path)));
    match found {
        Some((top, path)) => [top.strip_suffix(b"/").unwrap_or(&top), &path].join(&b'/'),
        None => format!("inode {ino}").into_bytes(),
    }
}

/// A place at which the store differs from the pool.
struct Differing {
    path: Vec<u8>,
    /// What the pool has there; none if it has removed it.
    kind: Option<Kind>,
    /// Where a symbolic link leads.
    target: Option<Vec<u8>>,
    data: Option<Data>,
    /// The store has nothing there, as far as the pool knows.
    is_new: bool,
    is_temporary: bool,
    conflict: bool,
}

impl Differing {
    /// All of them below a directory, by path.
    fn below(pool: &'static Pool, trees: &mut Trees, pending: &Pending, top: &Entry) -> Vec<Differing> {
        let mut below = Vec::new();
        for place in &pending.all {
            if trees.is_below(place.parent, top.attr.ino) {
                below.push(Differing::of(pool, trees, place));
            }
        }
        below.sort_by(|a, b| a.path.cmp(&b.path));
        below
    }

    fn of(pool: &Pool, trees: &mut Trees, place: &PendingPlace) -> Differing {
        let mut path = path_of(pool, place.parent).unwrap_or_else(|| path_of_gone(pool, place.parent));
        if path != b"/" {
            path.push(b'/');
        }
        path.extend_from_slice(&place.name);
        let (kind, data) = match &place.wanted {
            Some(Wanted::Here(entry, _)) => (Some(entry.attr.kind()), Some(Data::of(&entry.attr))),
            Some(Wanted::Elsewhere(_, kind)) => (Some(*kind), None),
            None => (None, None),
        };
        let target = kind.filter(|kind| *kind == Kind::Symlink).and_then(|_| link_target(pool, &path));
        let is_temporary = trees.policy(place).is_some_and(|policy| policy.is_temporary());
        let (is_new, conflict) = (place.placed.is_none(), place.conflict);
        Differing { path, kind, target, data, is_new, is_temporary, conflict }
    }

    /// In one word. What has no data of its own, or has them in the store already, has another name or other attributes.
    fn state(&self) -> &'static str {
        match (self.kind, self.data) {
            (None, _) => "removed",
            (Some(_), _) if self.is_new => "new",
            (Some(Kind::File), Some(data @ (Data::Dirty | Data::Draining))) => data.name(),
            _ => "changed",
        }
    }

    fn json(&self) -> Value {
        let mut object = json!({ "kind": self.kind.map(kind_name), "state": self.state(),
            "temporary": self.is_temporary, "conflict": self.conflict });
        put_name(&mut object, "path", &self.path);
        if let Some(target) = &self.target {
            put_name(&mut object, "target", target);
        }
        object
    }

    fn text(&self) -> String {
        let more = match (self.conflict, self.is_temporary) {
            (true, _) => "  conflict: the store has a version that others wrote",
            (_, true) => "  temporary: it stays in the pool, by its policy",
            _ => "",
        };
        format!("{:8}  {}{more}\n", self.state(), table::printable(&self.path))
    }
}
