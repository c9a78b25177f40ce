//! A shard with a backing store attached, the data of its files, and programs that use them.

use std::collections::BTreeMap;

use forebay_meta::{Mark, Shard, Unlisted};
use forebay_types::{
    decode_outcomes, Attr, Code, Ino, Kind, Layout, NodeId, PendingPlace, Reply, ReportOutcome, Request,
    SetAttr, StorePlace, Writer, FLAG_DIRTY, FLAG_RESIDENT,
};

use super::place::{at, Driver, Place, OPTIONS};
use super::store::Path;

pub(crate) struct Pool {
    place: Place,
    shard: Option<Shard>,
    driver: Driver,
    /// The directory with the store.
    pub(crate) top: Ino,
    /// The data in backing files.
    pub(crate) backing: BTreeMap<Ino, u64>,
    /// The data that programs wrote last.
    pub(crate) written: BTreeMap<Ino, u64>,
    pub(crate) next_content: u64,
    /// Names that were imported, with their contents.
    pub(crate) imported: Vec<(Ino, Vec<u8>, u64)>,
    /// What the last request that was refused with `NotListed` needs.
    pub(crate) unlisted: Option<Unlisted>,
    /// How often pending places had changed when they were last listed, and what they were.
    seen_pending: Option<(u64, Vec<PendingPlace>)>,
}

impl Pool {
    pub(crate) fn new(listed: bool) -> Pool {
        let place = Place::new();
        let shard = Some(Shard::create(place.path(), &OPTIONS, at(1)).unwrap());
        let mut pool = Pool {
            place,
            shard,
            driver: Driver::new(),
            top: Ino(0),
            backing: BTreeMap::new(),
            written: BTreeMap::new(),
            next_content: 1,
            imported: Vec::new(),
            unlisted: None,
            seen_pending: None,
        };
        pool.top =
            pool.entry(Request::MakeDirectory { parent: Ino::ROOT, name: b"top", mode: 0o755 }).unwrap().ino;
        pool.ask(Request::Attach { ino: pool.top, listed, settings: b"s" }).unwrap();
        pool
    }

    /// Applies one request and commits it.
    pub(crate) fn with<T>(
        &mut self,
        request: Request<'_>,
        read: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Code> {
        let mut batch = self.shard.as_ref().unwrap().begin().unwrap();
        let answer = self.driver.ask(&mut batch, request).map(read);
        self.unlisted = batch.take_unlisted().or(self.unlisted.take());
        batch.commit().unwrap();
        if request.changes() {
            let refused = answer.as_ref().err();
            self.trace(|| format!("{request:?} {refused:?}"));
        }
        answer
    }

    /// What the last request showed the board: the number of new inodes that were found, the names, and those of them that
    /// are changes.
    pub(crate) fn shown(&self) -> (usize, usize, usize) {
        let effects = &self.driver.effects;
        let changes = effects.since(Mark::default()).names().count();
        (effects.found().len(), effects.names().len(), changes)
    }

    /// The directories that became unlisted by the last request, each with whether it was in front of a store before.
    pub(crate) fn became_unlisted(&self) -> Vec<(Ino, bool)> {
        self.driver
            .effects
            .unlisted()
            .iter()
            .map(|directory| (directory.ino, directory.was_attached))
            .collect()
    }

    /// Applies a request that was acknowledged before a crash, and commits it.
    pub(crate) fn again(&mut self, request: Request<'_>) -> Result<(), Code> {
        let mut batch = self.shard.as_ref().unwrap().begin().unwrap();
        batch.open_reserve();
        let answer = self.driver.ask(&mut batch, request).map(|_| ());
        batch.commit().unwrap();
        answer
    }

    /// The store lacks a name.
    pub(crate) fn note_absent(&mut self, directory: Ino, name: &[u8]) -> Result<(), Code> {
        let mut batch = self.shard.as_ref().unwrap().begin().unwrap();
        let noted = batch.note_absent(directory, name);
        batch.commit().unwrap();
        noted
    }

    /// Prints what happens, if `FOREBAY_TRACE` is set.
    pub(crate) fn trace(&self, text: impl FnOnce() -> String) {
        if std::env::var_os("FOREBAY_TRACE").is_some() {
            println!("{}", text());
        }
    }

    pub(crate) fn ask(&mut self, request: Request<'_>) -> Result<(), Code> {
        self.with(request, |_| ())
    }

    pub(crate) fn entry(&mut self, request: Request<'_>) -> Result<Attr, Code> {
        self.with(request, |reply| match reply {
            Reply::Entry(entry) | Reply::Created { entry, .. } => entry.attr,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn bytes(&mut self, request: Request<'_>) -> Result<Vec<u8>, Code> {
        self.with(request, |reply| match reply {
            Reply::Bytes(bytes) => bytes.to_vec(),
            other => panic!("{other:?}"),
        })
    }

    /// Sends reports about several files in one request.
    pub(crate) fn report(&mut self, reports: &[Request<'_>]) -> Vec<ReportOutcome> {
        let mut buffer = [0; 4096];
        let mut w = Writer::new(&mut buffer);
        reports.iter().for_each(|report| report.append_to_reports(&mut w).unwrap());
        let n = w.len();
        let all = self.bytes(Request::StoreReports { node: NodeId(0), reports: &buffer[..n] }).unwrap();
        decode_outcomes(&all).unwrap()
    }

    pub(crate) fn reopen(&mut self) {
        (self.shard, self.seen_pending) = (None, None);
        self.shard = Some(Shard::open(self.place.path()).unwrap());
    }

    pub(crate) fn problems(&self) -> Vec<String> {
        self.shard.as_ref().unwrap().check(&mut |_| {}).unwrap().problems
    }

    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.problems(), Vec::<String>::new());
    }

    pub(crate) fn attr(&mut self, ino: Ino) -> Result<Attr, Code> {
        self.entry(Request::GetAttr { ino })
    }

    pub(crate) fn lookup(&mut self, parent: Ino, name: &[u8]) -> Result<Attr, Code> {
        self.entry(Request::Lookup { parent, name })
    }

    /// All pending places. They are the ones of before if they were not counted as changed.
    pub(crate) fn pending(&mut self) -> Vec<PendingPlace> {
        let changes = self.with(Request::PendingChanges, |reply| match reply {
            Reply::Count(count) => count,
            other => panic!("{other:?}"),
        });
        let (changes, all) = (changes.unwrap(), self.list_pending());
        if let Some((_, before)) = self.seen_pending.as_ref().filter(|(seen, _)| *seen == changes) {
            let facts = |all: &[PendingPlace]| {
                let of = |place: &PendingPlace| {
                    let PendingPlace { parent, name, changes, since, intent, conflict, .. } = place.clone();
                    (parent, name, changes, since, intent, conflict)
                };
                all.iter().map(of).collect::<Vec<_>>()
            };
            assert_eq!(facts(&all), facts(before));
        }
        self.seen_pending = Some((changes, all.clone()));
        all
    }

    fn list_pending(&mut self) -> Vec<PendingPlace> {
        let mut all: Vec<PendingPlace> = Vec::new();
        loop {
            let (parent, name) =
                all.last().map_or((Ino(0), Vec::new()), |last| (last.parent, last.name.clone()));
            let bytes = self.bytes(Request::Pending { parent, name: &name }).unwrap();
            let more = PendingPlace::decode_list(&bytes).unwrap();
            if more.is_empty() {
                return all;
            }
            all.extend(more);
        }
    }

    /// Where the store has an inode: the path, and the record.
    pub(crate) fn store_place(&mut self, ino: Ino) -> Result<(Path, StorePlace), Code> {
        let bytes = self.bytes(Request::StorePlace { ino })?;
        let place = StorePlace::decode(&bytes).unwrap();
        assert!(place.is_root && place.top == self.top, "{ino}: {place:?}");
        let names = place.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        Ok((names.map(<[u8]>::to_vec).collect(), place))
    }

    /// Names and inodes of a directory.
    pub(crate) fn list(&mut self, ino: Ino) -> Result<Vec<(Vec<u8>, Ino, Kind)>, Code> {
        self.with(Request::ReadDirectory { ino, cookie: 0, attributes: false }, |reply| match reply {
            Reply::Entries(entries) => {
                assert!(entries.end);
                entries.iter().map(|e| e.unwrap()).map(|e| (e.name.to_vec(), e.ino, e.kind)).collect()
            }
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn create(&mut self, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        let attr = self.entry(Request::Create {
            parent,
            name,
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        })?;
        self.put_content(attr.ino);
        Ok(attr.ino)
    }

    pub(crate) fn mkdir(&mut self, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        Ok(self.entry(Request::MakeDirectory { parent, name, mode: 0o755 })?.ino)
    }

    pub(crate) fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<(), Code> {
        self.ask(Request::Rename { parent: from.0, name: from.1, new_parent: to.0, new_name: to.1, flags })
    }

    pub(crate) fn chmod(&mut self, ino: Ino, mode: u32) -> Result<(), Code> {
        self.ask(Request::SetAttr { ino, set: SetAttr { mode: Some(mode), ..SetAttr::default() } })
    }

    fn put_content(&mut self, ino: Ino) {
        self.next_content += 1;
        self.backing.insert(ino, self.next_content);
        self.written.insert(ino, self.next_content);
    }

    /// Opens a resident file for writing, and writes.
    pub(crate) fn write(&mut self, ino: Ino) -> Result<(), Code> {
        let attr = self.attr(ino)?;
        assert!(attr.is_resident());
        if attr.needs_mark() {
            let marked = self.entry(Request::MarkDirty { ino })?;
            assert!(marked.flags & FLAG_DIRTY != 0 && !marked.needs_mark());
        }
        self.put_content(ino);
        Ok(())
    }

    /// The layout of an inode.
    pub(crate) fn layout(&mut self, ino: Ino) -> Result<Layout, Code> {
        self.with(Request::GetAttr { ino }, |reply| match reply {
            Reply::Entry(entry) => entry.layout,
            other => panic!("{other:?}"),
        })
    }

    /// What a mover reports that has restored a file in this epoch, and reads its attributes now.
    pub(crate) fn restored(&mut self, ino: Ino, epoch: u64) -> Request<'static> {
        let layout = self.layout(ino).unwrap_or(Layout::single(NodeId(1), 0));
        let (atime, mtime) =
            self.attr(ino).map_or_else(|_| Default::default(), |attr| (attr.atime, attr.mtime));
        Request::Restored { ino, epoch, atime, mtime, layout }
    }

    /// The mover reports that.
    pub(crate) fn restore(&mut self, ino: Ino, epoch: u64) -> Result<(), Code> {
        let restored = self.restored(ino, epoch);
        self.ask(restored)
    }

    /// Releases a file and removes its backing file.
    pub(crate) fn release(&mut self, ino: Ino) -> Result<(), Code> {
        let epoch = self.attr(ino)?.epoch();
        let attr = self.entry(Request::Release { ino, epoch, set: SetAttr::default() })?;
        assert!(attr.flags & FLAG_RESIDENT == 0);
        self.backing.remove(&ino);
        Ok(())
    }
}
