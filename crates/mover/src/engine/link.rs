//! The mover's requests to the pool, typed. Each thread keeps the memory of its requests.

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};

use forebay_client::{LeaseKind, LeasedFiles, Pool, RequestMemory};
use forebay_types::{
    decode_outcomes, decode_store_places, Code, Entry, Ino, NodeId, PendingPlace, Reply, ReportOutcome,
    Request, RestoredRange, SetAttr, StorePlace, StoreTask, StoreVersion, Writer, FLAG_HAS_VALUES,
    REPORTS_MAX,
};

use super::listings::Listings;
use crate::store::Xattrs;

/// The extended attribute that has the settings of a directory's store.
const STORE_SETTINGS: &[u8] = b"trusted.forebay.store";

/// Bytes of the longest report: a name and numbers.
const REPORT_BYTES_MAX: usize = 384;

/// Places that one pass takes: so many that can be drained now.
pub(super) const PLACES_MAX: usize = 20_000;

/// Places that are read at most, about 300 bytes of memory each.
pub(super) const READ_MAX: usize = 1_000_000;

/// The pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) pool: &'static Pool,
    /// Which directories are being listed.
    pub(super) listings: &'static Listings,
}

thread_local! {
    static MEMORY: RefCell<Option<RequestMemory>> = const { RefCell::new(None) };
}

fn bytes<T>(reply: Reply<'_>, read: impl FnOnce(&[u8]) -> Result<T, Code>) -> Result<T, Code> {
    match reply {
        Reply::Bytes(bytes) => read(bytes),
        _ => Err(Code::Malformed),
    }
}

impl Link {
    fn request<T>(
        &self,
        request: &Request<'_>,
        then: impl FnOnce(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        // Taken out: `then` may send a request, too.
        let mut memory = match MEMORY.take() {
            Some(memory) => memory,
            None => RequestMemory::new()?,
        };
        let result = self.pool.request_in(&mut memory, request, then);
        MEMORY.set(Some(memory));
        result
    }

    /// An extended attribute of an inode, of any namespace.
    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Code> {
        self.request(&Request::GetXattr { ino, name }, |reply| bytes(reply, |value| Ok(value.to_vec())))
    }

    fn entry(&self, request: &Request<'_>) -> Result<Entry, Code> {
        self.request(request, |reply| match reply {
            Reply::Entry(entry) => Ok(entry),
            _ => Err(Code::Malformed),
        })
    }

    fn done(&self, request: &Request<'_>) -> Result<(), Code> {
        tracing::debug!("reports {request:?}");
        self.request(request, |_| Ok(()))
    }

    /// An inode; [`Code::NotFound`] if it is gone.
    pub(super) fn inode(&self, ino: Ino) -> Result<Entry, Code> {
        // The place of a version that is of no inode.
        if ino == Ino(0) {
            return Err(Code::NotFound);
        }
        self.pool.get_attr(ino)
    }

    /// The inode that a name leads to.
    pub(super) fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Option<Ino>, Code> {
        match self.entry(&Request::Lookup { parent, name }) {
            Ok(entry) => Ok(Some(entry.attr.ino)),
            Err(Code::NotFound | Code::NotDirectory) => Ok(None),
            Err(code) => Err(code),
        }
    }

    /// The settings of the store that is attached at a directory.
    pub(super) fn settings(&self, root: Ino) -> Result<Vec<u8>, Code> {
        self.xattr(root, STORE_SETTINGS)
    }

    /// Where the store has an inode; [`Code::NotFound`] if it does not.
    pub(super) fn store_place(&self, ino: Ino) -> Result<StorePlace, Code> {
        if ino == Ino(0) {
            return Err(Code::NotFound);
        }
        self.request(&Request::StorePlace { ino }, |reply| bytes(reply, StorePlace::decode))
    }

    /// Where the store has each of many inodes.
    pub(super) fn store_places(&self, inos: &[Ino]) -> Vec<Result<StorePlace, Code>> {
        let node = |ino: Ino| Request::StorePlace { ino }.node();
        let mut all = Vec::with_capacity(inos.len());
        let groups = inos.chunk_by(|a, b| node(*a) == node(*b));
        for group in groups.flat_map(|group| group.chunks(REPORTS_MAX)) {
            let encoded: Vec<u8> = group.iter().flat_map(|ino| ino.0.to_le_bytes()).collect();
            let places = group.first().and_then(|ino| node(*ino)).ok_or(Code::NotFound).and_then(|node| {
                let request = Request::StorePlaces { node, inos: &encoded };
                self.request(&request, |reply| bytes(reply, decode_store_places))
            });
            let end = all.len() + group.len();
            match places {
                Ok(places) => all.extend(places),
                Err(code) => all.resize(end, Err(code)),
            }
            // Those that did not fit into the reply.
            all.resize(end, Err(Code::TooBig));
        }
        all
    }

    /// Waits for tasks, about a second at most.
    pub(super) fn work(&self, restart: bool) -> Result<Vec<StoreTask>, Code> {
        self.request(&Request::StoreWork { restart }, |reply| bytes(reply, StoreTask::decode_list))
    }

    /// The store has what a file contained when the mover got the task, or cannot get it.
    pub(super) fn persisted(&self, ino: Ino, failed: Option<Code>) -> Result<(), Code> {
        self.done(&Request::Persisted { ino, code: failed.map_or(0, |code| code as u16) })
    }

    /// The task for an inode cannot be done.
    pub(super) fn failed(&self, ino: Ino, code: Code) -> Result<(), Code> {
        self.done(&Request::StoreFailed { ino, code: code as u16 })
    }

    /// Readers may wait for a range of a file, which has arrived.
    pub(super) fn range_restored(&self, ino: Ino, RestoredRange { backing, from, to }: RestoredRange) {
        let report = Request::RangeRestored { ino, backing, from, to };
        if let Err(code) = self.pool.request(&report, |_| Ok(())) {
            tracing::debug!("cannot report a range of file {ino}: {}", code.name());
        }
    }

    /// Waits for a message of another node's mover, about a second at most: its number, and the message.
    pub(super) fn mover_work(&self) -> Result<Option<(u64, Vec<u8>)>, Code> {
        self.request(&Request::MoverWork, |reply| {
            bytes(reply, |bytes| match bytes.split_first_chunk() {
                Some((number, message)) => Ok(Some((u64::from_le_bytes(*number), message.to_vec()))),
                None => Ok(None),
            })
        })
    }

    pub(super) fn mover_answer(&self, number: u64, answer: &[u8]) -> Result<(), Code> {
        self.done(&Request::MoverAnswer { number, answer })
    }

    /// A number that is another one once the pending places have changed.
    pub(super) fn pending_changes(&self) -> Result<u64, Code> {
        self.request(&Request::PendingChanges, |reply| match reply {
            Reply::Count(count) => Ok(count),
            _ => Err(Code::Malformed),
        })
    }

    /// Pending places behind one.
    fn pending(&self, parent: Ino, name: &[u8]) -> Result<Vec<PendingPlace>, Code> {
        self.request(&Request::Pending { parent, name }, |reply| bytes(reply, PendingPlace::decode_list))
    }

    /// True if a place in a directory is pending.
    pub(super) fn has_pending_in(&self, directory: Ino) -> Result<bool, Code> {
        Ok(self.pending(directory, b"")?.first().is_some_and(|place| place.parent == directory))
    }

    /// True if a place is pending.
    pub(super) fn is_pending(&self, directory: Ino, name: &[u8]) -> Result<bool, Code> {
        Ok(self.pending_place(directory, name)?.is_some())
    }

    /// The pending place of a name.
    pub(super) fn pending_place(&self, directory: Ino, name: &[u8]) -> Result<Option<PendingPlace>, Code> {
        self.pool.pending_place(directory, name)
    }

    /// The pending places in a directory.
    pub(super) fn pending_in(&self, directory: Ino) -> Result<Vec<PendingPlace>, Code> {
        let mut all: Vec<PendingPlace> = Vec::new();
        loop {
            let behind = all.last().map_or(Vec::new(), |last| last.name.clone());
            let mut more = self.pending(directory, &behind)?;
            let n = more.len();
            more.retain(|place| place.parent == directory);
            let is_end = n == 0 || more.len() < n;
            all.extend(more);
            if is_end {
                return Ok(all);
            }
        }
    }

    /// All pending places, up to [`READ_MAX`].
    pub(super) fn all_pending(&self) -> Result<Vec<PendingPlace>, Code> {
        Ok(self.pending_until(|_| 0)?.0)
    }

    /// Pending places, and true if these are all: more are read until [`PLACES_MAX`] of them count, so that places which
    /// are not to be drained do not hide others behind them. `count` gets each place once, those of a small pool not at all.
    pub(super) fn pending_until(
        &self,
        mut count: impl FnMut(&[PendingPlace]) -> usize,
    ) -> Result<(Vec<PendingPlace>, bool), Code> {
        let mut all: Vec<PendingPlace> = Vec::new();
        let (mut counted, mut n) = (0, 0);
        loop {
            let (parent, name) =
                all.last().map_or((Ino(0), Vec::new()), |last| (last.parent, last.name.clone()));
            let more = self.pending(parent, &name)?;
            if more.is_empty() {
                return Ok((all, true));
            }
            all.extend(more);
            if all.len() >= PLACES_MAX {
                n += count(&all[counted..]);
                counted = all.len();
            }
            if n >= PLACES_MAX || all.len() >= READ_MAX {
                return Ok((all, false));
            }
        }
    }

    /// Imports objects. Returns how many of them, from the first on, are there: the pool may take them in steps.
    pub(super) fn import(&self, ino: Ino, objects: &[u8]) -> Result<u64, Code> {
        self.request(&Request::Import { ino, objects }, |reply| match reply {
            Reply::Count(count) => Ok(count),
            _ => Err(Code::Malformed),
        })
    }

    /// Imports the last objects of a listing that began at this epoch. None if the directory is listed now, else how many
    /// of them, from the first on, are there.
    pub(super) fn listed(&self, ino: Ino, epoch: u64, objects: &[u8]) -> Result<Option<u64>, Code> {
        self.request(&Request::Listed { ino, epoch, objects }, |reply| match reply {
            Reply::Entry(_) => Ok(None),
            Reply::Count(count) => Ok(Some(count)),
            _ => Err(Code::Malformed),
        })
    }

    /// A name of a directory was looked up: code 0 if it was imported.
    pub(super) fn looked_up(&self, parent: Ino, name: &[u8], code: u16) -> Result<(), Code> {
        self.done(&Request::LookedUp { parent, name, code })
    }

    pub(super) fn release(&self, ino: Ino, epoch: u64, set: SetAttr) -> Result<Entry, Code> {
        self.entry(&Request::Release { ino, epoch, set })
    }

    /// A file's data are in its backing files, which have the times of this entry.
    pub(super) fn restored(&self, entry: &Entry) -> Result<Entry, Code> {
        self.entry(&Request::restored(entry))
    }

    /// Begins a new epoch of a file that is being copied, or clean.
    pub(super) fn mark_dirty(&self, ino: Ino) -> Result<Entry, Code> {
        self.entry(&Request::MarkDirty { ino })
    }

    /// Sends reports about many files, each with an outcome of its own.
    pub(super) fn report(&self, reports: &[Request<'_>]) -> Vec<ReportOutcome> {
        let of_one_node = |a: &Request<'_>, b: &Request<'_>| a.node() == b.node();
        let groups = reports.chunk_by(of_one_node).flat_map(|group| group.chunks(REPORTS_MAX));
        groups.flat_map(|group| self.report_group(group)).collect()
    }

    fn report_group(&self, group: &[Request<'_>]) -> Vec<ReportOutcome> {
        let node = match group {
            [_, _, ..] => group.first().and_then(Request::node),
            _ => None,
        };
        let Some(node) = node else { return group.iter().map(|report| self.report_alone(report)).collect() };
        let done = self.reports_to(node, group);
        tracing::debug!("reports {group:?}: {done:?}");
        match done {
            Ok(outcomes) if outcomes.len() == group.len() => {
                let each = group.iter().zip(outcomes).map(|(report, outcome)| match outcome {
                    // Another node has this part of its directory.
                    Err(Code::Wide) => self.report_alone(report),
                    outcome => outcome,
                });
                each.collect()
            }
            Ok(_) => vec![Err(Code::Malformed); group.len()],
            Err(code) => vec![Err(code); group.len()],
        }
    }

    fn reports_to(&self, node: NodeId, group: &[Request<'_>]) -> Result<Vec<ReportOutcome>, Code> {
        let mut buffer = vec![0; group.len() * REPORT_BYTES_MAX];
        let mut w = Writer::new(&mut buffer);
        group.iter().try_for_each(|report| report.append_to_reports(&mut w))?;
        let n = w.len();
        let request = Request::StoreReports { node, reports: &buffer[..n] };
        self.request(&request, |reply| bytes(reply, decode_outcomes))
    }

    fn report_alone(&self, report: &Request<'_>) -> ReportOutcome {
        tracing::debug!("reports {report:?}");
        self.request(report, |reply| match reply {
            Reply::Entry(entry) => Ok(entry.attr.epoch()),
            _ => Ok(0),
        })
    }

    pub(super) fn intend(&self, parent: Ino, name: &[u8], version: StoreVersion) -> Result<(), Code> {
        tracing::debug!("{parent} {}: intends {version:?}", name.escape_ascii());
        self.done(&Request::Intend { parent, name, version })
    }

    pub(super) fn published(
        &self,
        (parent, name): (Ino, &[u8]),
        ino: Ino,
        epoch: u64,
        seen: u64,
        version: StoreVersion,
    ) -> Result<(), Code> {
        tracing::debug!("{parent} {}: published {ino} epoch {epoch} {version:?}", name.escape_ascii());
        self.done(&Request::Published { parent, name, ino, epoch, seen, version })
    }

    pub(super) fn unpublished(&self, parent: Ino, name: &[u8], seen: u64) -> Result<(), Code> {
        self.listings.gone(parent, name, || self.done(&Request::Unpublished { parent, name, seen }))
    }

    pub(super) fn settled(&self, parent: Ino, name: &[u8], seen: u64) -> Result<(), Code> {
        self.done(&Request::Settled { parent, name, seen })
    }

    pub(super) fn moved(
        &self,
        (parent, name): (Ino, &[u8]),
        (new_parent, new_name): (Ino, &[u8]),
        version: StoreVersion,
    ) -> Result<(), Code> {
        let request = Request::Moved { parent, name, new_parent, new_name, version };
        self.listings.gone(parent, name, || self.done(&request))
    }

    pub(super) fn set_attr(&self, ino: Ino, set: SetAttr) -> Result<Entry, Code> {
        self.pool.set_attr(ino, set)
    }

    pub(super) fn conflict(
        &self,
        parent: Ino,
        name: &[u8],
        found: bool,
        version: StoreVersion,
    ) -> Result<(), Code> {
        self.done(&Request::Conflict { parent, name, found, version })
    }

    /// A symbolic link's target.
    pub(super) fn target(&self, ino: Ino) -> Result<Vec<u8>, Code> {
        self.request(&Request::ReadLink { ino }, |reply| bytes(reply, |target| Ok(target.to_vec())))
    }

    /// Extended attributes of the namespace `user.`, as of a time not before that of the entry.
    pub(super) fn xattrs(&self, entry: &Entry) -> Result<Xattrs, Code> {
        if entry.attr.flags & FLAG_HAS_VALUES == 0 {
            return Ok(Xattrs::new());
        }
        let ino = entry.attr.ino;
        let names =
            self.request(&Request::ListXattr { ino }, |reply| bytes(reply, |all| Ok(all.to_vec())))?;
        let mut all = Vec::new();
        for name in names.split(|byte| *byte == 0).filter(|name| name.starts_with(b"user.")) {
            match self.xattr(ino, name) {
                Ok(value) => all.push((name.to_vec(), value)),
                Err(Code::NoAttribute) => {}
                Err(code) => return Err(code),
            }
        }
        Ok(all)
    }

    pub(super) fn lease(&self, entry: &Entry, kind: LeaseKind) -> Result<LeasedFiles, Code> {
        self.pool.lease_files(entry, kind)
    }

    /// Unlinks the backing file of a restore that failed or is void.
    pub(super) fn remove_unrestored(&self, entry: &Entry) {
        if let Err(code) = self.pool.remove_unrestored(entry) {
            tracing::debug!("cannot unlink what was restored of {}: {}", entry.attr.ino, code.name());
        }
    }

    pub(super) fn open_to_restore(&self, entry: &Entry) -> Result<OwnedFd, Code> {
        self.pool.open_to_restore(entry)
    }

    /// The directories of this node's targets.
    pub(super) fn targets(&self) -> Vec<BorrowedFd<'static>> {
        self.pool.target_directories()
    }

    /// The path of a directory from another above it; none if that cannot be told.
    pub(super) fn path_below(&self, top: Ino, directory: Ino) -> Option<Vec<u8>> {
        let path = |ino| {
            let mut path = forebay_client::PathBuffer::new();
            self.pool.path_of(ino, &mut path).ok()?;
            Some(path.as_bytes().to_vec())
        };
        let (top, path) = (path(top)?, path(directory)?);
        let top = top.strip_suffix(b"/").unwrap_or(&top);
        let below = path.strip_prefix(top)?;
        Some(below.strip_prefix(b"/").unwrap_or(below).to_vec())
    }

    /// An inode's path, for people.
    pub(super) fn path(&self, directory: Ino, name: &[u8]) -> String {
        match (self.path_above(directory), name) {
            (above, b"") if above.is_empty() => "/".to_owned(),
            (above, b"") => above,
            (above, name) => path_in(&above, name),
        }
    }

    /// A directory's path as the begin of others, for people: nothing for the pool's root. A request.
    pub(super) fn path_above(&self, directory: Ino) -> String {
        let mut path = forebay_client::PathBuffer::new();
        match self.pool.path_of(directory, &mut path) {
            Ok(()) => String::from_utf8_lossy(path.as_bytes()).trim_end_matches('/').to_owned(),
            Err(_) => format!("<{directory}>"),
        }
    }
}

/// The path of a name behind what [`Link::path_above`] returned, for people.
pub(super) fn path_in(above: &str, name: &[u8]) -> String {
    format!("{above}/{}", String::from_utf8_lossy(name))
}
