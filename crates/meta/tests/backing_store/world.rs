//! One file, the programs that open it, the kernel's leases and descriptors, a mover and a store: every step that any
//! of them can take from a state. The metadata are `meta.rs`.

use super::meta::{Defects, Meta, Name, Placed, Refused, Version, ALL, UNKNOWN};

/// Number of a backing file.
type Inode = u8;

/// Protocol errors of programs and movers, planted on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Mistakes {
    pub(crate) open_reads_not_again: bool,
    pub(crate) open_keeps_what_is_gone: bool,
    pub(crate) creator_reads_not_again: bool,
    pub(crate) mark_reply_not_read: bool,
    pub(crate) evict_unlinks_first: bool,
    pub(crate) evict_looks_not_at_lease: bool,
    pub(crate) drain_takes_no_lease: bool,
    pub(crate) drain_looks_not_at_lease: bool,
    pub(crate) drain_begins_not: bool,
    pub(crate) removes_unasked: bool,
    pub(crate) publishes_unfinished: bool,
    pub(crate) node_marks_not: bool,
    pub(crate) node_looks_not_at_name: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Opener {
    Idle,
    /// It has created the inode, with this epoch, and is about to open the backing file.
    Created(u8),
    /// It has read the inode: its epoch.
    Looked(u8),
    /// The kernel has found the backing file, and may let the open wait for a lease.
    Resolved(u8, Inode),
    Opened(u8, Inode),
    /// It has read the inode again and marks the file.
    Marking(u8, Inode),
    /// The program has the descriptor, a mapping, or another node's open of the backing file.
    Ready(Inode),
    /// The worker of the node with the backing file was killed, and the program goes on by requests.
    Lost,
    /// The next worker has found the backing file, and waits for a lease, perhaps.
    FoundAgain(Inode),
    OpenedAgain(Inode),
    /// It has marked the file, and looks whether the backing file still has a name.
    MarkedAgain(Inode),
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Program {
    writes: bool,
    /// It is of another node than the backing file: that node opens and writes it.
    by_requests: bool,
    at: Opener,
    /// Opens that are left, with the present one.
    left: u8,
}

impl Opener {
    /// The epoch and the backing file that it holds.
    fn numbers(&mut self) -> (Option<&mut u8>, Option<&mut Inode>) {
        match self {
            Opener::Idle | Opener::Lost | Opener::Done => (None, None),
            Opener::Created(epoch) | Opener::Looked(epoch) => (Some(epoch), None),
            Opener::Resolved(epoch, inode) | Opener::Opened(epoch, inode) | Opener::Marking(epoch, inode) => {
                (Some(epoch), Some(inode))
            }
            Opener::Ready(inode)
            | Opener::FoundAgain(inode)
            | Opener::OpenedAgain(inode)
            | Opener::MarkedAgain(inode) => (None, Some(inode)),
        }
    }
}

impl Program {
    fn inode(&self) -> Option<Inode> {
        match self.at {
            Opener::Opened(_, inode)
            | Opener::Marking(_, inode)
            | Opener::Ready(inode)
            | Opener::OpenedAgain(inode)
            | Opener::MarkedAgain(inode) => Some(inode),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Lease {
    for_writing: bool,
    inode: Inode,
}

/// What the mover does next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Mover {
    Idle,
    /// Begun for many files at a time, before the leases of any.
    DrainBegun(Name, u8, u8),
    DrainLeased(Name, u8, u8),
    DrainHalf(Name, u8, u8, u8),
    DrainCopied(Name, u8, u8, Version),
    DrainIntended(Name, u8, u8, Version),
    DrainPut(Name, u8, u8, Version),
    EvictLeased(u8),
    EvictReleased(u8),
    EvictUnlinked,
    RestoreMade(u8),
    RestoreFilled(u8),
    MoveFirst(Name, Name, Version),
    MoveBoth(Name, Name, Version),
    MoveDone(Name, Name, Version),
    LinkIntended(Name, u8, u8, Version),
    LinkPut(Name, u8, u8, Version),
    RemoveIntended(Name, u8),
    Removed(Name, u8),
}

impl Mover {
    /// The epoch and the version that it holds.
    fn numbers(&mut self) -> (Option<&mut u8>, Option<&mut Version>) {
        match self {
            Mover::DrainBegun(_, _, epoch)
            | Mover::DrainLeased(_, _, epoch)
            | Mover::DrainHalf(_, _, epoch, _)
            | Mover::EvictLeased(epoch)
            | Mover::EvictReleased(epoch)
            | Mover::RestoreMade(epoch)
            | Mover::RestoreFilled(epoch) => (Some(epoch), None),
            Mover::DrainCopied(_, _, epoch, version)
            | Mover::DrainIntended(_, _, epoch, version)
            | Mover::DrainPut(_, _, epoch, version)
            | Mover::LinkIntended(_, _, epoch, version)
            | Mover::LinkPut(_, _, epoch, version) => (Some(epoch), Some(version)),
            Mover::MoveFirst(_, _, version)
            | Mover::MoveBoth(_, _, version)
            | Mover::MoveDone(_, _, version) => (None, Some(version)),
            Mover::Idle | Mover::EvictUnlinked | Mover::RemoveIntended(..) | Mover::Removed(..) => {
                (None, None)
            }
        }
    }
}

/// What may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Budget {
    pub(crate) kills: u8,
    pub(crate) evicts: u8,
    pub(crate) breaks: u8,
    pub(crate) name_changes: u8,
    pub(crate) workers: u8,
    /// Versions that another program writes in the store while the file is released.
    pub(crate) others: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    pub(crate) meta: Meta,
    /// Data of the backing files that exist, with or without a name.
    inodes: Vec<u8>,
    /// Whether a mover has copied each since a node marked its file.
    copied: Vec<bool>,
    /// The backing file that has the name.
    path: Option<Inode>,
    programs: Vec<Program>,
    lease: Option<Lease>,
    mover: Mover,
    /// The epoch of the released file that another thread of the mover looks up in the store.
    refresh: Option<u8>,
    /// Data of the versions in the store: [`TORN`] for a version with parts of two.
    versions: Vec<u8>,
    store: [Option<Version>; 2],
    /// What was written last.
    written: u8,
    next: u8,
    budget: Budget,
    mistakes: Mistakes,
}

type NameChange = fn(&mut Meta, Name) -> Result<(), Refused>;

const TORN: u8 = u8::MAX;
/// The version of nothing.
const NOTHING: Version = 0;

impl World {
    /// A file that was created and not closed: the first program has it open for writing.
    pub(crate) fn new(
        writers: usize,
        readers: usize,
        opens: u8,
        budget: Budget,
        mistakes: Mistakes,
        defects: Defects,
    ) -> World {
        let program = |writes| Program { writes, by_requests: false, at: Opener::Idle, left: opens };
        let mut programs: Vec<_> = (0..writers).map(|_| program(true)).collect();
        programs.extend((0..readers).map(|_| program(false)));
        programs[0].at = Opener::Ready(0);
        let mut meta = Meta::new();
        meta.defects = defects;
        World {
            meta,
            inodes: vec![1],
            copied: vec![false],
            path: Some(0),
            programs,
            lease: None,
            mover: Mover::Idle,
            refresh: None,
            versions: vec![0],
            store: [None; 2],
            written: 1,
            next: 2,
            budget,
            mistakes,
        }
    }

    /// The same with the first program on another node than the backing file.
    pub(crate) fn with_other_node(mut self) -> World {
        self.programs[0].by_requests = true;
        self
    }

    /// The same with a first program that has created the file, which is empty, and not opened its backing file yet.
    pub(crate) fn with_creator(mut self) -> World {
        self.programs[0].at = Opener::Created(self.meta.epoch);
        (self.inodes, self.copied, self.path) = (Vec::new(), Vec::new(), None);
        (self.written, self.next) = (0, 1);
        self
    }

    /// An empty backing file under the file's name.
    fn make_backing(&mut self) -> Inode {
        self.inodes.push(0);
        self.copied.push(false);
        let inode = (self.inodes.len() - 1) as Inode;
        self.path = Some(inode);
        inode
    }

    /// The backing file under the file's name. A resident file that has none gets an empty one.
    fn found_or_made(&mut self) -> Option<Inode> {
        let is_to_make = self.path.is_none() && self.meta.exists() && self.meta.resident;
        self.path.or_else(|| is_to_make.then(|| self.make_backing()))
    }

    /// Every state that one step leads to, with the step's name.
    pub(crate) fn steps(&self) -> Vec<(&'static str, World)> {
        let mut all = Vec::new();
        for i in 0..self.programs.len() {
            self.program(i, &mut all);
        }
        self.mover(&mut all);
        self.refresh(&mut all);
        if self.mover != Mover::Idle && self.budget.kills > 0 {
            self.step(&mut all, "kill", |w| {
                w.budget.kills -= 1;
                (w.mover, w.refresh) = (Mover::Idle, None);
                w.lease = None;
            });
        }
        if self.budget.breaks > 0 && self.programs.iter().any(|p| self.waits(p)) {
            self.step(&mut all, "the lease is broken", |w| {
                w.budget.breaks -= 1;
                w.lease = None;
            });
        }
        if self.budget.name_changes > 0 {
            for at in 0..2 {
                let changes: [(&'static str, NameChange); 3] = [
                    ("rename", |meta, at| meta.rename(at, 1 - at)),
                    ("link", Meta::link),
                    ("unlink", Meta::unlink),
                ];
                for (name, change) in changes {
                    let mut next = self.clone();
                    if change(&mut next.meta, at).is_ok() {
                        next.budget.name_changes -= 1;
                        all.push((name, next));
                    }
                }
            }
        }
        all
    }

    fn step(
        &self,
        all: &mut Vec<(&'static str, World)>,
        name: &'static str,
        change: impl FnOnce(&mut World),
    ) {
        let mut next = self.clone();
        change(&mut next);
        all.push((name, next));
    }

    /// True for an open that waits for a lease.
    fn waits(&self, program: &Program) -> bool {
        match (program.at, self.lease) {
            (Opener::Created(_), Some(lease)) => Some(lease.inode) == self.path,
            (Opener::Resolved(_, inode) | Opener::FoundAgain(inode), Some(lease)) => {
                lease.inode == inode && (lease.for_writing || program.writes)
            }
            _ => false,
        }
    }

    fn program(&self, i: usize, all: &mut Vec<(&'static str, World)>) {
        let program = self.programs[i];
        let go = |w: &mut World, at: Opener| w.programs[i].at = at;
        match program.at {
            Opener::Idle if self.meta.exists() && self.meta.resident => {
                self.step(all, "look", |w| go(w, Opener::Looked(w.meta.epoch)));
            }
            Opener::Idle | Opener::Done => {}
            Opener::Created(epoch) => {
                if !self.waits(&program) {
                    self.step(all, "open the new file", |w| {
                        let inode = w.path.unwrap_or_else(|| w.make_backing());
                        go(
                            w,
                            match w.mistakes.creator_reads_not_again {
                                true => Opener::Ready(inode),
                                false => Opener::Opened(epoch, inode),
                            },
                        );
                    });
                }
            }
            Opener::Looked(epoch) => self.step(all, "resolve", |w| {
                let found = w.found_or_made();
                go(w, found.map_or(Opener::Idle, |inode| Opener::Resolved(epoch, inode)));
            }),
            Opener::Resolved(epoch, inode) => {
                if !self.waits(&program) {
                    self.step(all, "open", |w| go(w, Opener::Opened(epoch, inode)));
                }
            }
            Opener::Opened(epoch, inode) => self.step(all, "read again", |w| {
                let is_same = w.meta.exists() && w.meta.resident && w.meta.epoch == epoch;
                go(
                    w,
                    match () {
                        () if !w.meta.exists() && w.mistakes.open_keeps_what_is_gone => Opener::Ready(inode),
                        () if !is_same && !w.mistakes.open_reads_not_again => Opener::Idle,
                        () if w.programs[i].writes && w.meta.needs_mark() => Opener::Marking(epoch, inode),
                        () => Opener::Ready(inode),
                    },
                );
            }),
            Opener::Marking(epoch, inode) => self.step(all, "mark", |w| {
                let done = w.meta.mark_dirty();
                let is_mine = done.is_ok() && w.meta.resident && w.meta.epoch == epoch + 1;
                let is_mine = is_mine || w.meta.defects.mark_keeps_epoch && done.is_ok() && w.meta.resident;
                let is_mine = is_mine || w.mistakes.mark_reply_not_read || w.mistakes.open_reads_not_again;
                go(w, if is_mine { Opener::Ready(inode) } else { Opener::Idle });
            }),
            Opener::Lost => self.step(all, "find again", |w| match w.path {
                Some(inode) => go(w, Opener::FoundAgain(inode)),
                None => w.fail(i),
            }),
            Opener::FoundAgain(inode) => {
                if !self.waits(&program) {
                    self.step(all, "open again", |w| go(w, Opener::OpenedAgain(inode)));
                }
            }
            Opener::OpenedAgain(inode) => self.step(all, "mark again", |w| {
                if !w.copied[usize::from(inode)] || w.mistakes.node_marks_not {
                    return go(w, Opener::Ready(inode));
                }
                match w.meta.mark_dirty() {
                    Ok(()) if w.meta.resident => go(w, Opener::MarkedAgain(inode)),
                    Ok(()) => w.fail(i),
                    Err(_) if !w.meta.exists() => go(w, Opener::Ready(inode)),
                    Err(_) => w.fail(i),
                }
            }),
            Opener::MarkedAgain(inode) => self.step(all, "look at the name again", |w| {
                match w.path == Some(inode) || w.mistakes.node_looks_not_at_name {
                    true => {
                        w.copied[usize::from(inode)] = false;
                        go(w, Opener::Ready(inode));
                    }
                    false => w.fail(i),
                }
            }),
            Opener::Ready(inode) => {
                if program.by_requests && program.writes && self.budget.workers > 0 {
                    self.step(all, "worker killed", |w| {
                        w.budget.workers -= 1;
                        go(w, Opener::Lost);
                    });
                }
                if program.writes {
                    self.step(all, "write", |w| {
                        w.inodes[usize::from(inode)] = w.next;
                        w.written = w.next;
                        w.next += 1;
                    });
                }
                self.step(all, "close", |w| {
                    w.programs[i].left -= 1;
                    go(w, if program.left == 1 { Opener::Done } else { Opener::Idle });
                });
            }
        }
    }

    fn has_other_node(&self) -> bool {
        self.programs.iter().any(|program| program.by_requests)
    }

    /// A request of a program fails: it closes the file.
    fn fail(&mut self, i: usize) {
        let program = &mut self.programs[i];
        program.left -= 1;
        program.at = if program.left == 0 { Opener::Done } else { Opener::Idle };
    }

    fn version(&mut self, data: u8) -> Version {
        self.versions.push(data);
        (self.versions.len() - 1) as Version
    }

    /// True if the mover still has its lease.
    fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    fn end(&mut self) {
        self.mover = Mover::Idle;
        self.lease = None;
    }

    fn mover(&self, all: &mut Vec<(&'static str, World)>) {
        let data = |w: &World, inode: Option<Inode>| inode.map_or(0, |inode| w.inodes[usize::from(inode)]);
        let ask = |w: &mut World, done: Result<(), Refused>, next: Mover| match done {
            Ok(()) => w.mover = next,
            Err(_) => w.end(),
        };
        match self.mover {
            Mover::Idle => self.idle_mover(all),
            Mover::DrainBegun(at, seen, epoch) => self.step(all, "drain: lease", |w| {
                let is_written = |p: &Program| p.writes && p.inode().is_some() && p.inode() == w.path;
                let (takes, has_writer) =
                    (!w.mistakes.drain_takes_no_lease, w.programs.iter().any(is_written));
                match w.found_or_made() {
                    Some(_) if takes && has_writer => return w.end(),
                    Some(inode) if takes => {
                        w.copied[usize::from(inode)] = w.has_other_node();
                        w.lease = Some(Lease { for_writing: false, inode });
                    }
                    Some(_) => {}
                    None => return w.end(),
                }
                w.mover = Mover::DrainLeased(at, seen, epoch);
            }),
            Mover::DrainLeased(at, seen, epoch) => self.step(all, "copy one half", |w| {
                if !w.has_lease() && !w.mistakes.drain_looks_not_at_lease && !w.mistakes.drain_takes_no_lease
                {
                    return w.end();
                }
                w.mover = match w.path {
                    Some(_) => Mover::DrainHalf(at, seen, epoch, data(w, w.path)),
                    None => Mover::Idle,
                };
                if w.mistakes.publishes_unfinished {
                    let version = w.version(TORN);
                    w.store[at] = Some(version);
                }
            }),
            Mover::DrainHalf(at, seen, epoch, half) => self.step(all, "copy the other half", |w| {
                let now = data(w, w.path);
                let version = w.version(if now == half { now } else { TORN });
                w.mover = Mover::DrainCopied(at, seen, epoch, version);
            }),
            Mover::DrainCopied(at, seen, epoch, version) => self.step(all, "intend", |w| {
                if !w.has_lease() && !w.mistakes.drain_looks_not_at_lease && !w.mistakes.drain_takes_no_lease
                {
                    return w.end();
                }
                let done = w.meta.intend(at, version);
                ask(w, done, Mover::DrainIntended(at, seen, epoch, version));
            }),
            Mover::DrainIntended(at, seen, epoch, version) => self.step(all, "put", |w| {
                w.store[at] = Some(version);
                w.mover = Mover::DrainPut(at, seen, epoch, version);
            }),
            Mover::DrainPut(at, seen, epoch, version) => self.step(all, "published", |w| {
                let _ = w.meta.published(at, epoch, seen, version);
                w.end();
            }),
            Mover::EvictLeased(epoch) => self.step(all, "release", |w| {
                if w.mistakes.evict_unlinks_first {
                    w.path = None;
                }
                let done = w.meta.release(epoch);
                let epoch = w.meta.epoch;
                ask(w, done, Mover::EvictReleased(epoch));
            }),
            Mover::EvictReleased(epoch) => self.step(all, "unlink, or take back", |w| {
                if w.has_lease() || w.mistakes.evict_looks_not_at_lease {
                    w.path = None;
                    w.mover = Mover::EvictUnlinked;
                } else {
                    let _ = w.meta.restored(epoch);
                    w.end();
                }
            }),
            Mover::EvictUnlinked => self.step(all, "end the lease", World::end),
            Mover::RestoreMade(epoch) => self.step(all, "fill", |w| {
                let version = w.meta.copy.and_then(|copy| w.store[copy.at]);
                let known = w.meta.copy.and_then(|copy| w.meta.placed[copy.at]);
                match (version, known, w.path) {
                    (Some(version), Some(placed), Some(inode)) if version == placed.version => {
                        w.inodes[usize::from(inode)] = w.versions[usize::from(version)];
                        w.mover = Mover::RestoreFilled(epoch);
                    }
                    _ => w.end(),
                }
            }),
            Mover::RestoreFilled(epoch) => self.step(all, "restored", |w| {
                let _ = w.meta.restored(epoch);
                w.end();
            }),
            Mover::MoveFirst(from, to, version) => self.step(all, "intend there", |w| {
                let done = w.meta.intend(to, version);
                ask(w, done, Mover::MoveBoth(from, to, version));
            }),
            Mover::MoveBoth(from, to, version) => self.step(all, "rename in the store", |w| {
                w.store[to] = w.store[from].take();
                w.mover = Mover::MoveDone(from, to, version);
            }),
            Mover::MoveDone(from, to, version) => self.step(all, "moved", |w| {
                let _ = w.meta.moved(from, to, version);
                w.end();
            }),
            Mover::LinkIntended(at, seen, epoch, version) => self.step(all, "link in the store", |w| {
                w.store[at] = Some(version);
                w.mover = Mover::LinkPut(at, seen, epoch, version);
            }),
            Mover::LinkPut(at, seen, epoch, version) => self.step(all, "link published", |w| {
                let _ = w.meta.published(at, epoch, seen, version);
                w.end();
            }),
            Mover::RemoveIntended(at, seen) => self.step(all, "remove", |w| {
                w.store[at] = None;
                w.mover = Mover::Removed(at, seen);
            }),
            Mover::Removed(at, seen) => self.step(all, "unpublished", |w| {
                let _ = w.meta.unpublished(at, seen);
                w.end();
            }),
        }
    }

    /// Another thread of the mover takes over what another program writes in the store. That program writes after the
    /// thread has read what the pool knows. A version that is not taken over would be a conflict later: it is left out.
    fn refresh(&self, all: &mut Vec<(&'static str, World)>) {
        let Some(epoch) = self.refresh else {
            if self.budget.others > 0 && self.meta.exists() && !self.meta.resident {
                self.step(all, "refresh: look up", |w| {
                    w.budget.others -= 1;
                    w.refresh = Some(w.meta.epoch);
                });
            }
            return;
        };
        self.step(all, "refresh: published", |w| {
            w.refresh = None;
            let Some(copy) = w.meta.copy else { return };
            // One that comes while the mover changes the store there is taken over at the next look.
            let is_changing = w.meta.pending[copy.at].is_some_and(|pending| pending.intent.is_some());
            if is_changing || w.store[copy.at] != w.meta.placed[copy.at].map(|placed| placed.version) {
                return;
            }
            let version = w.version(w.next);
            if w.meta.published(copy.at, epoch, ALL, version).is_ok() {
                w.store[copy.at] = Some(version);
                w.written = w.next;
                w.next += 1;
            }
        });
    }

    fn idle_mover(&self, all: &mut Vec<(&'static str, World)>) {
        let meta = &self.meta;
        for at in 0..2 {
            if meta.pending[at].is_some() {
                self.plan(at, all);
            }
        }
        let is_clean = meta.exists() && meta.resident && !meta.dirty;
        if let (true, Some(inode), 1..) = (is_clean, self.path, self.budget.evicts) {
            if self.programs.iter().all(|p| p.inode() != Some(inode)) {
                self.step(all, "evict: lease", |w| {
                    w.budget.evicts -= 1;
                    w.lease = Some(Lease { for_writing: true, inode });
                    w.mover = Mover::EvictLeased(w.meta.epoch);
                });
            }
        }
        let is_wanted = self.programs.iter().any(|p| p.at == Opener::Idle);
        if meta.exists() && !meta.resident && is_wanted {
            self.step(all, "restore: make", |w| {
                if w.path.is_none() {
                    let inode = w.make_backing();
                    w.copied[usize::from(inode)] = w.has_other_node();
                }
                w.mover = Mover::RestoreMade(w.meta.epoch);
            });
        }
    }

    /// Looks at a pending place, as `mover.rs` does.
    fn plan(&self, at: Name, all: &mut Vec<(&'static str, World)>) {
        let (meta, other, real) = (&self.meta, 1 - at, self.store[at]);
        let (Some(pending), placed) = (meta.pending[at], meta.placed[at]) else { return };
        let was = |placed: Option<Placed>| placed.map(|placed| placed.version);
        let intends = |at: Name| meta.pending[at].and_then(|pending| pending.intent);
        if let Some(intent) = pending.intent.filter(|_| real != was(placed)) {
            let is_pair = intends(other) == Some(intent);
            match real {
                None if intent == NOTHING => self.step(all, "recover: unpublished", |w| {
                    let _ = w.meta.unpublished(at, pending.changes);
                }),
                None if is_pair && self.store[other] == Some(intent) => {
                    self.step(all, "recover: moved", |w| {
                        let _ = w.meta.moved(at, other, intent);
                    })
                }
                Some(_) if is_pair && self.store[other].is_none() && was(meta.placed[other]) == real => {
                    self.step(all, "recover: moved here", |w| {
                        let _ = w.meta.moved(other, at, intent);
                    });
                }
                Some(version) => self.step(all, "recover: cleared", |w| {
                    let _ = w.meta.cleared(at, version);
                }),
                None => {}
            }
            return;
        }
        if intends(other).is_some() && self.store[other] != was(meta.placed[other]) {
            return; // what another mover has left comes first
        }
        let seen = pending.changes;
        let is_copy = meta.copy.is_some_and(|copy| copy.at == at);
        if !meta.names[at] {
            let Some(placed) = placed else {
                return self.step(all, "settled", |w| {
                    let _ = w.meta.settled(at, seen);
                });
            };
            if meta.exists() && is_copy && placed.is_file && meta.placed[other].is_none() && meta.names[other]
            {
                return self.begin_move(all, at, other, placed.version);
            }
            return self.step(all, "remove: intend", |w| {
                let done = if w.mistakes.removes_unasked { Ok(()) } else { w.meta.intend(at, NOTHING) };
                if done.is_ok() {
                    w.mover = Mover::RemoveIntended(at, seen);
                }
            });
        }
        match meta.copy {
            Some(copy) if copy.at != at => {
                let Some(Placed { version, .. }) = meta.placed[copy.at] else { return };
                if !meta.names[copy.at] && placed.is_none() {
                    return self.begin_move(all, copy.at, at, version);
                }
                if meta.names[copy.at] && meta.dirty {
                    return; // the other name comes first
                }
                if !meta.dirty {
                    return self.step(all, "link: intend", |w| {
                        let next = match real == Some(version) {
                            true => Mover::LinkPut(at, seen, copy.epoch, version),
                            false => Mover::LinkIntended(at, seen, copy.epoch, version),
                        };
                        if real == Some(version) || w.meta.intend(at, version).is_ok() {
                            w.mover = next;
                        }
                    });
                }
            }
            Some(_) if !meta.dirty => {
                return self.step(all, "settled", |w| {
                    let _ = w.meta.settled(at, seen);
                });
            }
            _ => {}
        }
        if meta.resident {
            self.step(all, "begin drain", |w| {
                let epoch = w.meta.epoch;
                let begun = w.mistakes.drain_begins_not || w.meta.begin_drain().is_ok();
                if begun {
                    w.mover = Mover::DrainBegun(at, seen, epoch);
                }
            });
        }
    }

    fn begin_move(&self, all: &mut Vec<(&'static str, World)>, from: Name, to: Name, version: Version) {
        self.step(all, "move: intend", |w| {
            if w.meta.intend(from, version).is_ok() {
                w.mover = Mover::MoveFirst(from, to, version);
            }
        });
    }

    /// The same state with small numbers: names of versions, backing files and data do not matter, nor do epochs before
    /// the oldest that anything holds.
    pub(crate) fn shrink(&mut self) {
        let mut epochs = vec![self.meta.epoch];
        epochs.extend(self.meta.copy.map(|copy| copy.epoch));
        for program in &mut self.programs {
            epochs.extend(program.at.numbers().0.copied());
        }
        epochs.extend(self.mover.numbers().0.copied());
        epochs.extend(self.refresh);
        let epoch = epochs.into_iter().min().unwrap();
        self.meta.shrink(self.mover != Mover::Idle, epoch);
        self.programs.iter_mut().filter_map(|program| program.at.numbers().0).for_each(|e| *e -= epoch);
        if let Some(e) = self.mover.numbers().0.filter(|e| **e != UNKNOWN) {
            *e -= epoch;
        }
        self.refresh.iter_mut().for_each(|e| *e -= epoch);
        self.programs.sort_unstable();
        let (mut versions, mut inodes, mut data) = (vec![NOTHING], Vec::new(), vec![0]);
        let rename = |all: &mut Vec<u8>, number: &mut u8| {
            let found = all.iter().position(|other| other == number);
            let at = found.unwrap_or_else(|| {
                all.push(*number);
                all.len() - 1
            });
            *number = at as u8;
        };
        let meta = &mut self.meta;
        self.store.iter_mut().flatten().for_each(|version| rename(&mut versions, version));
        meta.placed.iter_mut().flatten().for_each(|placed| rename(&mut versions, &mut placed.version));
        let intents = meta.pending.iter_mut().flatten().filter_map(|pending| pending.intent.as_mut());
        intents.for_each(|version| rename(&mut versions, version));
        if let Some(version) = self.mover.numbers().1 {
            rename(&mut versions, version);
        }
        self.path.iter_mut().for_each(|inode| rename(&mut inodes, inode));
        let opened = self.programs.iter_mut().filter_map(|program| program.at.numbers().1);
        opened.for_each(|inode| rename(&mut inodes, inode));
        self.lease.iter_mut().for_each(|lease| rename(&mut inodes, &mut lease.inode));
        self.versions = versions.iter().map(|old| self.versions[usize::from(*old)]).collect();
        self.inodes = inodes.iter().map(|old| self.inodes[usize::from(*old)]).collect();
        self.copied = inodes.iter().map(|old| self.copied[usize::from(*old)]).collect();
        let half = if let Mover::DrainHalf(.., half) = &mut self.mover { Some(half) } else { None };
        let written = std::iter::once(&mut self.written);
        let all = written.chain(&mut self.versions).chain(&mut self.inodes).chain(half);
        all.filter(|datum| **datum != TORN).for_each(|datum| rename(&mut data, datum));
        self.next = data.len() as u8;
    }

    /// What is wrong in this state.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let data = |version: Option<Version>| version.map(|version| self.versions[usize::from(version)]);
        if self.store.iter().any(|at| data(*at) == Some(TORN)) {
            return Some("a torn version under a name in the store");
        }
        let meta = &self.meta;
        if !meta.exists() {
            let has_others = |p: &Program| match p.at {
                Opener::Ready(inode) => self.inodes[usize::from(inode)] != self.written,
                _ => false,
            };
            return self
                .programs
                .iter()
                .any(has_others)
                .then_some("a program has data that were never the file's");
        }
        // A new file without a backing file is empty.
        let here = Some(self.path.map_or(0, |inode| self.inodes[usize::from(inode)]));
        if self.programs.iter().any(|p| matches!(p.at, Opener::Ready(inode) if Some(inode) != self.path)) {
            return Some("a program has a descriptor of a file that is gone");
        }
        let is_there = meta.copies().any(|placed| {
            self.store.contains(&Some(placed.version)) && data(Some(placed.version)) == Some(self.written)
        });
        if meta.resident && here != Some(self.written) {
            return Some("an acknowledged write is lost: the file has other data");
        }
        if !meta.resident && !is_there {
            return Some("an acknowledged write is lost: the file is released, and the store has other data");
        }
        if meta.resident && !meta.dirty && !is_there {
            return Some("a clean file differs from the store");
        }
        let is_open = self.programs.iter().any(|p| p.writes && matches!(p.at, Opener::Ready(_)));
        if is_open && !meta.dirty {
            return Some("a program can write to a file that is clean");
        }
        None
    }

    /// True if no program will do anything more: only the mover has work left.
    pub(crate) fn is_quiet(&self) -> bool {
        self.programs.iter().all(|p| p.at == Opener::Done || p.at == Opener::Idle && !self.meta.exists())
    }

    /// What the mover makes of a quiet state if it is left alone.
    pub(crate) fn settle(mut self) -> Result<(), &'static str> {
        self.refresh = None;
        self.budget = Budget { kills: 0, evicts: 0, breaks: 0, name_changes: 0, workers: 0, others: 0 };
        for _ in 0..60 {
            let mut all = Vec::new();
            self.mover(&mut all);
            // A step that is refused leads nowhere: another place comes first.
            let next = all.into_iter().map(|(_, next)| next).find(|next| *next != self);
            let Some(next) = next else { break };
            self = next;
        }
        if self.meta.pending != [None; 2] {
            return Err("a place stays pending for ever");
        }
        for at in 0..2 {
            let data = self.store[at].map(|version| self.versions[usize::from(version)]);
            if data != self.meta.names[at].then_some(self.written) {
                return Err("in the end the store differs from the pool");
            }
        }
        Ok(())
    }
}

const _: () = assert!(UNKNOWN == TORN);
