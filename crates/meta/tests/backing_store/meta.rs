//! What the shard knows of one file with up to two names in an attached directory, as a small state machine that can be
//! copied and hashed. `agrees_with_the_shard` compares it with the shard.

/// One of the two names.
pub(crate) type Name = usize;
/// A version in the store; 0 is nothing.
pub(crate) type Version = u8;

pub(crate) const UNKNOWN: u8 = u8::MAX;
/// Stands for [`CHANGES_ALL`]: another program wrote this version.
pub(crate) const ALL: u8 = u8::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Copy {
    pub(crate) at: Name,
    pub(crate) epoch: u8,
    generation: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pending {
    pub(crate) changes: u8,
    pub(crate) intent: Option<Version>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Placed {
    /// Whether it is the file; else nobody knows what it is.
    pub(crate) is_file: bool,
    pub(crate) version: Version,
}

/// Refusals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    Busy,
    Stale,
    Other,
}

/// Defects of a shard, planted on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Defects {
    pub(crate) published_ignores_epoch: bool,
    pub(crate) mark_keeps_epoch: bool,
    pub(crate) release_keeps_epoch: bool,
    pub(crate) anything_may_be_lost: bool,
    pub(crate) other_version_keeps_epoch: bool,
    pub(crate) other_version_of_resident: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Meta {
    pub(crate) names: [bool; 2],
    pub(crate) resident: bool,
    pub(crate) dirty: bool,
    pub(crate) draining: bool,
    pub(crate) epoch: u8,
    pub(crate) copy: Option<Copy>,
    further: [Option<u8>; 2],
    pub(crate) placed: [Option<Placed>; 2],
    pub(crate) pending: [Option<Pending>; 2],
    pub(crate) defects: Defects,
}

impl Meta {
    /// A file that was just created as name 0.
    pub(crate) fn new() -> Meta {
        Meta {
            names: [true, false],
            resident: true,
            dirty: true,
            draining: false,
            epoch: 0,
            copy: None,
            further: [None; 2],
            placed: [None; 2],
            pending: [Some(Pending { changes: 1, intent: None }), None],
            defects: Defects::default(),
        }
    }

    pub(crate) fn exists(&self) -> bool {
        self.names != [false; 2]
    }

    pub(crate) fn needs_mark(&self) -> bool {
        !self.dirty || self.draining
    }

    fn note(&mut self, at: Name) {
        let before = self.pending[at].unwrap_or(Pending { changes: 0, intent: None });
        self.pending[at] = Some(Pending { changes: before.changes + 1, ..before });
    }

    fn note_name(&mut self, at: Name) {
        match (self.pending[at], self.placed[at], self.names[at]) {
            (Some(pending), None, false) if pending.intent.is_none() => self.pending[at] = None,
            (None, None, false) => {}
            _ => self.note(at),
        }
    }

    fn note_further(&mut self, behind: Option<Name>) {
        let first = behind.map_or(0, |at| at + 1);
        if let Some(next) = (first..2).find(|at| self.further[*at].is_some() && self.exists()) {
            self.note(next);
        }
    }

    fn pass_on(&mut self, at: Name) {
        if self.placed[at].is_some_and(|placed| placed.is_file) {
            self.note_further(self.further[at].map(|_| at));
        }
    }

    fn copy_at(&self, at: Name) -> Option<Copy> {
        self.copy.filter(|copy| copy.at == at)
    }

    fn may_be_lost(&self, at: Name) -> bool {
        let is_file = self.placed[at].is_some_and(|placed| placed.is_file);
        let Some(copy) = self.copy_at(at).filter(|_| is_file) else { return true };
        let is_elsewhere = self.further.contains(&Some(copy.generation));
        !self.exists() || self.resident || is_elsewhere || self.defects.anything_may_be_lost
    }

    fn lose_place(&mut self, at: Name) -> Result<(), Refused> {
        let Some(placed) = self.placed[at] else { return Ok(()) };
        if !self.may_be_lost(at) {
            return Err(Refused::Busy);
        }
        self.placed[at] = None;
        if !placed.is_file {
            return Ok(());
        }
        let Some(copy) = self.copy_at(at) else {
            self.further[at] = None;
            self.note_further(Some(at));
            return Ok(());
        };
        let same = (0..2).find(|other| self.further[*other] == Some(copy.generation));
        match same.or((0..2).find(|other| self.further[*other].is_some())) {
            Some(next) => {
                self.further[next] = None;
                self.copy = Some(match same {
                    Some(_) => Copy { at: next, ..copy },
                    None => Copy { at: next, epoch: UNKNOWN, generation: copy.generation + 1 },
                });
                self.note(next);
            }
            None => self.copy = None,
        }
        if same.is_none() {
            self.make_dirty();
        }
        Ok(())
    }

    fn make_dirty(&mut self) {
        if self.exists() && self.resident && !self.dirty {
            self.epoch += 1;
            self.dirty = true;
        }
    }

    /// Places that should have the file's last published data.
    pub(crate) fn copies(&self) -> impl Iterator<Item = Placed> + '_ {
        let is_copy = |at: &Name| {
            self.copy.is_some_and(|copy| copy.at == *at || self.further[*at] == Some(copy.generation))
        };
        (0..2).filter(is_copy).filter_map(|at| self.placed[at])
    }

    /// Numbers that only grow are made small, so that states that differ in them alone are one: generations, the number
    /// of changes of a place of which nobody holds a number, epochs.
    pub(crate) fn shrink(&mut self, has_seen: bool, epoch: u8) {
        for further in self.further.iter_mut().flatten() {
            *further = u8::from(self.copy.is_some_and(|copy| copy.generation == *further));
        }
        if let Some(copy) = &mut self.copy {
            copy.generation = 1;
            copy.epoch -= if copy.epoch == UNKNOWN { 0 } else { epoch };
        }
        if !has_seen {
            self.pending.iter_mut().flatten().for_each(|pending| pending.changes = 1);
        }
        self.epoch -= epoch;
    }

    fn is_equal(&self, at: Name) -> bool {
        match (self.placed[at], self.names[at]) {
            (placed, false) => placed.is_none(),
            (Some(placed), true) => placed.is_file && !self.dirty,
            (None, true) => self.copy.is_none(),
        }
    }

    fn settle(&mut self, at: Name, seen: Option<u8>) {
        let is_equal = self.is_equal(at);
        match self.pending[at] {
            Some(pending) if is_equal && seen == Some(pending.changes) => self.pending[at] = None,
            Some(pending) => self.pending[at] = Some(Pending { intent: None, ..pending }),
            None if !is_equal || seen.is_none() => self.note(at),
            None => {}
        }
    }

    pub(crate) fn intend(&mut self, at: Name, version: Version) -> Result<(), Refused> {
        if let Some(placed) = self.placed[at] {
            let stays = placed.version == version || placed.is_file && self.names[at];
            if !stays {
                if !self.may_be_lost(at) {
                    return Err(Refused::Busy);
                }
                let copy = self.copy_at(at).filter(|_| placed.is_file);
                if copy.is_some_and(|copy| !self.further.contains(&Some(copy.generation))) {
                    self.make_dirty();
                }
            }
        }
        let pending = self.pending[at].unwrap_or(Pending { changes: 1, intent: None });
        self.pending[at] = Some(Pending { intent: Some(version), ..pending });
        Ok(())
    }

    pub(crate) fn published(
        &mut self,
        at: Name,
        epoch: u8,
        seen: u8,
        version: Version,
    ) -> Result<(), Refused> {
        let epoch = if self.defects.published_ignores_epoch && epoch != UNKNOWN { self.epoch } else { epoch };
        if self.exists() && !self.resident && epoch != self.epoch {
            return Err(Refused::Stale);
        }
        let is_void = self.resident || self.copy_at(at).is_none();
        if self.exists() && seen == ALL && is_void && !self.defects.other_version_of_resident {
            return Err(Refused::Stale);
        }
        let same = self.placed[at].filter(|placed| placed.is_file);
        if same.is_none() {
            self.lose_place(at)?;
        }
        self.placed[at] = Some(Placed { is_file: true, version });
        if !self.exists() {
            self.settle(at, None);
            return Ok(());
        }
        let is_still = !self.dirty || self.draining;
        let copied = epoch == self.epoch && (is_still || self.defects.published_ignores_epoch);
        let known = if copied { epoch } else { UNKNOWN };
        let is_new = same.is_none_or(|same| same.version != version);
        let again = self.note_copy(known, at, is_new);
        if is_new && seen == ALL && !self.resident && !self.defects.other_version_keeps_epoch {
            self.epoch += 1;
            self.copy = self.copy.map(|copy| Copy { epoch: self.epoch, ..copy });
        }
        if copied && (self.draining || self.defects.published_ignores_epoch) {
            (self.dirty, self.draining) = (false, false);
        }
        self.pass_on(at);
        self.settle(at, Some(seen).filter(|_| !again));
        Ok(())
    }

    fn note_copy(&mut self, epoch: u8, at: Name, is_new_version: bool) -> bool {
        let Some(copy) = self.copy else {
            self.copy = Some(Copy { at, epoch, generation: 1 });
            return false;
        };
        let is_same = epoch == copy.epoch && epoch != UNKNOWN;
        if copy.at == at {
            let is_same = is_same && (self.resident || !is_new_version);
            let generation = copy.generation + u8::from(!is_same);
            self.copy = Some(Copy { at, epoch, generation });
            if epoch == UNKNOWN {
                self.make_dirty();
            }
            return false;
        }
        if is_same || epoch == UNKNOWN {
            self.further[at] = Some(if is_same { copy.generation } else { 0 });
            return false;
        }
        self.further[copy.at] = Some(copy.generation);
        self.further[at] = None;
        self.copy = Some(Copy { at, epoch, generation: copy.generation + 1 });
        true
    }

    pub(crate) fn unpublished(&mut self, at: Name, seen: u8) -> Result<(), Refused> {
        self.lose_place(at)?;
        self.settle(at, Some(seen).filter(|_| !self.names[at]));
        Ok(())
    }

    pub(crate) fn settled(&mut self, at: Name, seen: u8) -> Result<(), Refused> {
        self.pass_on(at);
        self.settle(at, Some(seen));
        Ok(())
    }

    pub(crate) fn moved(&mut self, from: Name, to: Name, version: Version) -> Result<(), Refused> {
        let placed = self.placed[from].ok_or(Refused::Other)?;
        if from == to {
            return Ok(());
        }
        if self.placed[to].is_some_and(|there| there.is_file != placed.is_file) {
            self.lose_place(to)?;
        }
        self.placed[from] = None;
        self.placed[to] = Some(Placed { version, ..placed });
        match self.copy {
            _ if !placed.is_file => {}
            None => self.further[from] = None,
            Some(copy) => {
                if copy.at == from {
                    self.further[to] = None;
                    self.copy = Some(Copy { at: to, ..copy });
                } else if let Some(generation) = self.further[from].take() {
                    if copy.at != to {
                        self.further[to] = Some(generation);
                    }
                }
                self.note_further(None);
            }
        }
        self.note(to);
        self.settle(to, None);
        if self.names[from] {
            self.settle(from, None);
        } else if let Some(pending) = &mut self.pending[from] {
            pending.intent = None;
        }
        Ok(())
    }

    /// `Conflict` without one: nobody knows what is there.
    pub(crate) fn cleared(&mut self, at: Name, version: Version) -> Result<(), Refused> {
        self.lose_place(at)?;
        if version != 0 {
            self.placed[at] = Some(Placed { is_file: false, version });
        }
        let changes = self.pending[at].map_or(0, |pending| pending.changes) + 1;
        self.pending[at] = Some(Pending { changes, intent: None });
        Ok(())
    }

    pub(crate) fn release(&mut self, epoch: u8) -> Result<(), Refused> {
        let is_clean = self.resident && !self.dirty && !self.draining;
        let Some(copy) = self.copy.filter(|_| self.exists()) else { return Err(Refused::Stale) };
        if self.epoch != epoch || !is_clean || copy.epoch != epoch {
            return Err(Refused::Stale);
        }
        if self.pending[copy.at].is_some() {
            return Err(Refused::Busy);
        }
        self.epoch += u8::from(!self.defects.release_keeps_epoch);
        self.copy = Some(Copy { epoch: self.epoch, ..copy });
        self.resident = false;
        Ok(())
    }

    pub(crate) fn restored(&mut self, epoch: u8) -> Result<(), Refused> {
        if !self.exists() || self.epoch != epoch || self.resident {
            return Err(Refused::Stale);
        }
        self.resident = true;
        self.dirty = self.copy.is_none_or(|copy| copy.epoch != epoch);
        Ok(())
    }

    pub(crate) fn begin_drain(&mut self) -> Result<(), Refused> {
        if !self.exists() || !self.resident {
            return Err(Refused::Stale);
        }
        (self.dirty, self.draining) = (true, true);
        Ok(())
    }

    pub(crate) fn mark_dirty(&mut self) -> Result<(), Refused> {
        if !self.exists() {
            return Err(Refused::Other);
        }
        if self.needs_mark() && self.resident {
            self.epoch += u8::from(!self.defects.mark_keeps_epoch);
            if let Some(copy) = self.copy {
                self.note(copy.at);
            }
            (self.dirty, self.draining) = (true, false);
        }
        Ok(())
    }

    pub(crate) fn rename(&mut self, from: Name, to: Name) -> Result<(), Refused> {
        if !self.names[from] || self.names[to] {
            return Err(Refused::Other);
        }
        (self.names[from], self.names[to]) = (false, true);
        self.note_name(from);
        self.note_name(to);
        Ok(())
    }

    pub(crate) fn link(&mut self, to: Name) -> Result<(), Refused> {
        if !self.exists() || self.names[to] {
            return Err(Refused::Other);
        }
        self.names[to] = true;
        self.note_name(to);
        Ok(())
    }

    pub(crate) fn unlink(&mut self, at: Name) -> Result<(), Refused> {
        if !self.names[at] {
            return Err(Refused::Other);
        }
        self.names[at] = false;
        if !self.exists() {
            self.copy = None;
        }
        self.note_name(at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_types::{
        Code, Ino, Request, SetAttr, StoreVersion, Wanted, CHANGES_ALL, EPOCH_UNKNOWN, FLAG_DIRTY,
        FLAG_DRAINING,
    };

    use super::*;
    use crate::pool::Pool;
    use crate::random::{cases, Random};

    const NAMES: [&[u8]; 2] = [b"a", b"b"];

    fn version(number: Version) -> StoreVersion {
        StoreVersion { ino: number.into(), ..StoreVersion::default() }
    }

    /// The shard's epochs, by those of the model.
    struct Epochs(Vec<u64>);

    impl Epochs {
        fn long(&self, epoch: u8) -> u64 {
            if epoch == UNKNOWN {
                EPOCH_UNKNOWN
            } else {
                self.0[usize::from(epoch)]
            }
        }

        /// Adds those up to an epoch. The first of another program's version follows all of the version before.
        fn go_on(&mut self, epoch: u8, is_other_version: bool) {
            while self.0.len() <= usize::from(epoch) {
                let last = self.0[self.0.len() - 1];
                self.0.push(if is_other_version { ((last >> 32) + 1) << 32 } else { last + 1 });
            }
        }
    }

    fn assert_same(pool: &mut Pool, ino: Ino, meta: &Meta, epochs: &Epochs) {
        match pool.attr(ino) {
            Ok(attr) => {
                let flags =
                    (attr.is_resident(), attr.flags & FLAG_DIRTY != 0, attr.flags & FLAG_DRAINING != 0);
                assert_eq!(flags, (meta.resident, meta.dirty, meta.draining));
                assert_eq!((attr.epoch(), meta.exists()), (epochs.long(meta.epoch), true));
            }
            Err(_) => assert!(!meta.exists()),
        }
        let pending = pool.pending();
        for (at, name) in NAMES.into_iter().enumerate() {
            let place = pending.iter().find(|place| place.name == name);
            let said = place.map(|place| (place.changes, place.intent));
            let expected =
                meta.pending[at].map(|pending| (pending.changes.into(), pending.intent.map(version)));
            assert_eq!(said, expected, "{at}");
            let Some(place) = place else { continue };
            let placed = place.placed.map(|placed| (placed.ino == ino, placed.version));
            assert_eq!(placed, meta.placed[at].map(|placed| (placed.is_file, version(placed.version))));
            assert_eq!(place.wanted.is_some(), meta.names[at]);
            if let Some(Wanted::Here(_, copy)) = &place.wanted {
                let copy = copy.as_ref().map(|copy| (copy.name.as_slice(), copy.epoch));
                assert_eq!(copy, meta.copy.map(|copy| (NAMES[copy.at], epochs.long(copy.epoch))));
            }
        }
    }

    fn refused(code: Code) -> Refused {
        match code {
            Code::Busy => Refused::Busy,
            Code::Stale => Refused::Stale,
            _ => Refused::Other,
        }
    }

    /// Reports that are taken together do what they do one after the other.
    #[test]
    fn agrees_with_the_shard_on_reports_in_one_request() {
        let epochs = Epochs((0..=u64::from(u8::MAX)).collect());
        let (mut taken, mut refusals) = (0, 0);
        for seed in 1..=cases() {
            let mut random = Random::new(seed);
            let (mut pool, mut meta) = (Pool::new(false), Meta::new());
            let parent = pool.top;
            let ino = pool.create(parent, NAMES[0]).unwrap();
            for _ in 0..20 {
                let (mut reports, mut expected) = (Vec::new(), Vec::new());
                for _ in 0..random.next(5) {
                    let (at, number) = (random.next(2), random.next(4) as u8);
                    let (name, v) = (NAMES[at], version(number));
                    let seen = meta.pending[at].map_or(0, |p| p.changes).saturating_sub(random.next(2) as u8);
                    let epoch = [meta.epoch, meta.epoch, UNKNOWN][random.next(3)];
                    let (report, done) = match random.next(3) {
                        0 => (Request::Intend { parent, name, version: v }, meta.intend(at, number)),
                        1 => (Request::BeginDrain { ino }, meta.begin_drain()),
                        _ => {
                            let (long_epoch, long_seen, version) = (epochs.long(epoch), u64::from(seen), v);
                            let report = Request::Published {
                                parent,
                                name,
                                ino,
                                epoch: long_epoch,
                                seen: long_seen,
                                version,
                            };
                            (report, meta.published(at, epoch, seen, number))
                        }
                    };
                    let begins = matches!(report, Request::BeginDrain { .. });
                    expected.push(done.map(|()| if begins { epochs.long(meta.epoch) } else { 0 }));
                    reports.push(report);
                }
                let outcomes: Vec<_> =
                    pool.report(&reports).into_iter().map(|outcome| outcome.map_err(refused)).collect();
                taken += outcomes.len();
                refusals += outcomes.iter().filter(|outcome| outcome.is_err()).count();
                assert_eq!(outcomes, expected, "seed {seed}: {reports:?}");
                assert_same(&mut pool, ino, &meta, &epochs);
                // So that the next reports meet other states.
                match random.next(6) {
                    0 => _ = (pool.ask(Request::MarkDirty { ino }), meta.mark_dirty()),
                    1 => {
                        let request =
                            Request::Release { ino, epoch: epochs.long(meta.epoch), set: SetAttr::default() };
                        assert_eq!(pool.ask(request).is_ok(), meta.release(meta.epoch).is_ok());
                    }
                    2 => {
                        let restored = pool.restore(ino, epochs.long(meta.epoch));
                        assert_eq!(restored.is_ok(), meta.restored(meta.epoch).is_ok());
                    }
                    3 => {
                        let request = Request::Link { ino, parent, name: NAMES[1] };
                        assert_eq!(pool.ask(request).is_ok(), meta.link(1).is_ok());
                    }
                    _ => {}
                }
                assert_same(&mut pool, ino, &meta, &epochs);
            }
            pool.assert_clean();
        }
        assert!(taken > 100 && refusals > 10 && refusals < taken / 2, "{refusals} of {taken}");
    }

    #[test]
    fn agrees_with_the_shard() {
        for seed in 1..=cases() {
            let mut random = Random::new(seed);
            let (mut pool, mut meta) = (Pool::new(false), Meta::new());
            let mut epochs = Epochs(vec![0]);
            let top = pool.top;
            let ino = pool.create(top, NAMES[0]).unwrap();
            for _ in 0..60 {
                let (at, to) = (random.next(2), random.next(2));
                let (parent, name, new_name) = (top, NAMES[at], NAMES[to]);
                let number = random.next(4) as u8;
                let seen = meta.pending[at].map_or(0, |p| p.changes).saturating_sub(random.next(2) as u8);
                let epoch = [meta.epoch, meta.epoch, meta.epoch.saturating_sub(1), UNKNOWN][random.next(4)];
                let is_other_version = random.next(4) == 0;
                let seen = if is_other_version { ALL } else { seen };
                let long_seen = if is_other_version { CHANGES_ALL } else { u64::from(seen) };
                let long_epoch = epochs.long(epoch);
                let v = version(number);
                let (request, done) = match random.next(14) {
                    0 => (Request::Intend { parent, name, version: v }, meta.intend(at, number)),
                    1 | 2 => (
                        Request::Published {
                            parent,
                            name,
                            ino,
                            epoch: long_epoch,
                            seen: long_seen,
                            version: v,
                        },
                        meta.published(at, epoch, seen, number),
                    ),
                    3 => (Request::Unpublished { parent, name, seen: long_seen }, meta.unpublished(at, seen)),
                    4 => (Request::Settled { parent, name, seen: long_seen }, meta.settled(at, seen)),
                    5 => (
                        Request::Moved { parent, name, new_parent: top, new_name, version: v },
                        meta.moved(at, to, number),
                    ),
                    6 => (
                        Request::Conflict { parent, name, found: false, version: v },
                        meta.cleared(at, number),
                    ),
                    7 => (
                        Request::Release { ino, epoch: long_epoch, set: SetAttr::default() },
                        meta.release(epoch),
                    ),
                    8 => (pool.restored(ino, long_epoch), meta.restored(epoch)),
                    9 => (Request::BeginDrain { ino }, meta.begin_drain()),
                    10 => (Request::MarkDirty { ino }, meta.mark_dirty()),
                    11 if at != to => (
                        Request::Rename { parent, name, new_parent: top, new_name, flags: 1 },
                        meta.rename(at, to),
                    ),
                    12 => (Request::Link { ino, parent, name }, meta.link(at)),
                    13 if random.next(3) == 0 => (Request::Unlink { parent, name }, meta.unlink(at)),
                    _ => continue,
                };
                epochs.go_on(meta.epoch, is_other_version && matches!(request, Request::Published { .. }));
                let answer = pool.ask(request).map_err(refused);
                let same_kind = match (&answer, &done) {
                    (Err(a), Err(b)) => *a == *b || *a == Refused::Other || *b == Refused::Other,
                    (a, b) => a.is_ok() == b.is_ok(),
                };
                assert!(same_kind, "seed {seed}: {request:?}: {answer:?}, expected {done:?}");
                assert_same(&mut pool, ino, &meta, &epochs);
            }
            pool.assert_clean();
        }
    }
}
